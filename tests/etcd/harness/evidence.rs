//! What a test run leaves for the search for secrets: the secrets that it used, and the logs that were written.
//!
//! Owns: the folder that `tests/run` names, where it names one; `tests/hygiene` searches it at the end. Must not know what a secret
//! is for. Invariant: a log is kept as it was written, whatever became of its test.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex};
use std::thread;

use serde_json::json;

static FOLDER: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("KEYWARD_TEST_EVIDENCE").map(PathBuf::from));
static KNOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
static LOGS: AtomicU32 = AtomicU32::new(0);

/// Remembers a secret. Short ones would be found by chance, and are none.
pub(crate) fn secret(name: &str, value: &str) {
    if let Some(folder) = FOLDER.as_ref() {
        remember(folder, name, value);
    }
}

fn remember(folder: &Path, name: &str, value: &str) {
    const SHORTEST: usize = 8;
    let mut known = KNOWN.lock().expect("no holder panics");
    if value.len() < SHORTEST || !known.insert(value.to_owned()) {
        return;
    }
    let path = folder.join(format!("secrets-{}", process::id()));
    let mut file = File::options().create(true).append(true).open(path).expect("the folder is ours");
    writeln!(file, "{}", json!({ "name": name, "value": value })).expect("the file can be written");
}

/// Remembers each line of a key in PEM.
pub(crate) fn key(name: &str, pem: &str) {
    pem.lines().filter(|line| !line.starts_with("-----")).for_each(|line| secret(name, line));
}

/// Remembers what is secret in a file that a test writes for Keyward, by the file's name.
pub(crate) fn file(name: &str, text: &str) {
    match name {
        _ if name.contains("password") || name.contains("key") => secret(name, text.trim()),
        // Lines of a name and a password.
        "users" => {
            text.lines().filter_map(|line| line.split_once(' ')).for_each(|(_, word)| secret(name, word))
        }
        _ => {}
    }
}

/// Keeps a log that is written to its end.
pub(crate) fn log(name: &str, path: &Path) {
    let Some(folder) = FOLDER.as_ref() else { return };
    let kept = place(folder, name);
    // One file system, as a rule: then it costs nothing.
    let done = fs::hard_link(path, &kept).is_ok() || fs::copy(path, kept).is_ok();
    // A log that is gone before its process was searched by nobody. No second panic: it would end all tests.
    assert!(done || thread::panicking(), "the log of {name} is gone");
}

/// Keeps a text that was shown to somebody, such as metrics.
pub(crate) fn text(name: &str, text: &str) {
    if let Some(folder) = FOLDER.as_ref() {
        fs::write(place(folder, name), text).expect("the text can be kept");
    }
}

fn place(folder: &Path, name: &str) -> PathBuf {
    let number = LOGS.fetch_add(1, Ordering::Relaxed);
    let plain: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).take(60).collect();
    folder.join("logs").join(format!("{plain}.{}-{number}", process::id()))
}
