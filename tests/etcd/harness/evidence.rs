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
use std::time::{SystemTime, UNIX_EPOCH};

use data_encoding::{BASE64, HEXLOWER};
use keyward::pb::etcdserverpb::AuthenticateRequest;
use prost::Message as _;
use serde_json::{Value, json};

/// Of a shorter secret nobody could say that it was not found by chance.
const SHORTEST: usize = 8;

static FOLDER: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("KEYWARD_TEST_EVIDENCE").map(PathBuf::from));
/// What the names of this process's files end with. The id alone will not do: a run starts more processes than there are ids, and a
/// later test process may have the id of an earlier one.
static PROCESS: LazyLock<String> = LazyLock::new(|| {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is past 1970");
    format!("{}-{}", process::id(), since.as_nanos())
});
static KNOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
static LOGS: AtomicU32 = AtomicU32::new(0);

/// Remembers a secret. Short ones would be found by chance, and are none.
pub(crate) fn secret(name: &str, value: &str) {
    if value.len() >= SHORTEST {
        remember(value, &json!({ "name": name, "value": value }));
    }
}

/// Remembers a secret that is no text, such as a key.
fn bytes(name: &str, value: &[u8]) {
    let hex = HEXLOWER.encode(value);
    remember(&hex, &json!({ "name": name, "hex": hex }));
}

fn remember(value: &str, line: &Value) {
    let Some(folder) = FOLDER.as_ref() else { return };
    let mut known = KNOWN.lock().expect("no holder panics");
    if !known.insert(value.to_owned()) {
        return;
    }
    let path = folder.join(format!("secrets-{}", *PROCESS));
    let mut file = File::options().create(true).append(true).open(path).expect("the folder is ours");
    // In one piece: a test that takes too long is killed, and half a line could not be read.
    file.write_all(format!("{line}\n").as_bytes()).expect("the file can be written");
}

/// Remembers a private key in PEM: each line, and what a key of P-256 has to itself.
pub(crate) fn key(name: &str, pem: &str) {
    let lines = || pem.lines().filter(|line| !line.starts_with("-----"));
    lines().for_each(|line| secret(name, line));
    let der = BASE64.decode(lines().collect::<String>().as_bytes()).expect("a key in PEM");
    // What stands before it is every such key's.
    bytes(name, der.get(36..68).unwrap_or(&der));
}

/// Remembers what is secret in a file that a test writes for Keyward, by its content and its name.
pub(crate) fn file(name: &str, text: &str) {
    if text.contains("-----BEGIN") {
        // Certificates and public keys are for everybody.
        if text.contains("PRIVATE KEY-----") {
            key(name, text);
        }
        return;
    }
    if name == "users" {
        // Lines of a name and a hash, or for clients of a name and a password.
        for line in text.lines() {
            match (line.split_once(":$"), line.split_once(' ')) {
                (Some((_, hash)), _) => secret("a hash of Keyward's users file", hash),
                (None, Some((_, password))) => secret("a password of a client", password),
                (None, None) => {}
            }
        }
    }
    // What the configuration says is told where it is wrong; its secrets stand in files beside it.
    let is_secret = ["password", "key", "secret"].iter().any(|word| name.contains(word));
    if is_secret && !name.ends_with(".toml") {
        secret(name, text.trim());
        // A session key in hexadecimal: what it stands for.
        let digits: Option<Vec<u8>> = text
            .trim()
            .as_bytes()
            .chunks(2)
            .map(|two| u8::from_str_radix(str::from_utf8(two).ok()?, 16).ok())
            .collect();
        digits.iter().filter(|raw| raw.len() == 32).for_each(|raw| bytes(name, raw));
    }
}

/// Remembers what a request shows: the password of a login.
pub(crate) fn request(path: &str, message: &[u8]) {
    if path == "/etcdserverpb.Auth/Authenticate"
        && let Ok(login) = AuthenticateRequest::decode(message)
    {
        secret("a password shown", &login.password);
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
    folder.join("logs").join(format!("{plain}.{}-{number}", *PROCESS))
}
