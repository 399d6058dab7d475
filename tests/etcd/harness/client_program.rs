//! The programs of `tests/clients`: real client libraries, and what else a test talks to.
//!
//! Owns: asking a folder's `build` for the path of its program. Must not know what a program does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// The program of a folder under `tests/clients`, which `tests/run` has built before. Blocks while `build` looks for the program, once
/// per process and program.
pub(crate) fn client_program(folder: &str, args: &[&str]) -> PathBuf {
    static FOUND: Mutex<BTreeMap<Vec<String>, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut found = FOUND.lock().expect("no holder panics, or every test must");
    let asked = [&[folder], args].concat().into_iter().map(str::to_owned).collect();
    let program = found.entry(asked).or_insert_with(|| {
        let clients = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients");
        let mut build = Command::new(clients.join(folder).join("build"));
        let built = build.args(args).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let built = built.expect("the build script runs");
        assert!(built.status.success(), "the program of {folder} {args:?} cannot be built");
        String::from_utf8(built.stdout).expect("a path").trim().into()
    });
    program.clone()
}
