//! The targets of `tests/props/targets.rs` under libFuzzer. `KEYWARD_FUZZ_TARGET` names the one that runs; `fuzz/run` sets it.
//!
//! libFuzzer's `main` is linked in; it mutates the corpus by coverage and calls the target with each input. A panic
//! aborts the process and leaves the input in a file.

#![no_main]
#![expect(
    unused_imports,
    dead_code,
    reason = "the modules' own tests, which proptest runs, are not compiled here"
)]

#[path = "../../tests/props/authorities.rs"]
mod authorities;
#[path = "../../tests/props/bodies.rs"]
mod bodies;
#[path = "../../tests/props/canonical.rs"]
mod canonical;
#[path = "../../tests/props/chains.rs"]
mod chains;
#[path = "../../tests/props/choices.rs"]
mod choices;
#[path = "../../tests/props/fleet.rs"]
mod fleet;
#[path = "../../tests/props/frames.rs"]
mod frames;
#[path = "../../tests/props/gzip.rs"]
mod gzip;
#[path = "../../tests/props/hub.rs"]
mod hub;
#[path = "../../tests/props/json.rs"]
mod json;
#[path = "../../tests/props/json_texts.rs"]
mod json_texts;
#[path = "../../tests/props/jwts.rs"]
mod jwts;
#[path = "../../tests/props/proxied.rs"]
mod proxied;
#[path = "../../tests/props/readers.rs"]
mod readers;
#[path = "../../tests/props/splice.rs"]
mod splice;
#[path = "../../tests/props/targets.rs"]
mod targets;
#[path = "../../tests/props/users_file.rs"]
mod users_file;
#[path = "../../tests/props/websockets.rs"]
mod websockets;

use std::sync::LazyLock;

static TARGET: LazyLock<targets::Target> = LazyLock::new(|| {
    let name = std::env::var("KEYWARD_FUZZ_TARGET").expect("KEYWARD_FUZZ_TARGET names a target");
    let found = targets::TARGETS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no target is called {name:?}")).1
});

libfuzzer_sys::fuzz_target!(init: { LazyLock::force(&TARGET); }, |input: &[u8]| TARGET(input));
