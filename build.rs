//! Compiles the memory functions of the static program, which is linked with musl.

use std::env;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    memory_functions()
}

/// Compiles memcpy, memmove, memcmp and bcmp for musl on x86-64; the linker takes them before musl's slow ones.
fn memory_functions() -> Result<(), Box<dyn Error>> {
    const SOURCE: &str = "src/musl/memory.c";
    println!("cargo:rerun-if-changed={SOURCE}");
    if env::var("CARGO_CFG_TARGET_ENV")? == "musl" && env::var("CARGO_CFG_TARGET_ARCH")? == "x86_64" {
        // The compiler must not turn the loops of memcpy into calls of memcpy.
        cc::Build::new()
            .file(SOURCE)
            .opt_level(2)
            .flags(["-ffreestanding", "-fno-builtin"])
            .flag_if_supported("-fno-tree-loop-distribute-patterns")
            // No path of this machine in the debug information.
            .flag(format!("-ffile-prefix-map={}=/keyward", env::current_dir()?.display()))
            .try_compile("keyward_memory")?;
    }
    Ok(())
}
