//! Watches what a spec file names with the crate etcd-client and prints what an application saw, one JSON object a line.
//!
//! It owns the record; it must not know Keyward, and it does not judge: `tests/etcd` does. The contract of the command line and of
//! the lines is in `tests/clients/README.md`.

mod record;
mod rounds;
#[cfg(feature = "v0_21")]
mod stream;
mod unread;
#[cfg(feature = "v0_21")]
mod watchers;

use std::{
    collections::HashMap,
    env, fs,
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use etcd_client::{Client, ConnectOptions};
#[cfg(feature = "v0_17")]
use etcd_client_0_17 as etcd_client;
#[cfg(feature = "v0_19")]
use etcd_client_0_19 as etcd_client;
#[cfg(feature = "v0_21")]
use etcd_client_0_21 as etcd_client;
use record::{described, emit};
use serde_json::json;

const USAGE: &str = "usage: watchers watchers|rounds|unread --endpoints HOST:PORT[,…] --user NAME --password-file FILE \
     (--spec SPEC.json | --prefix PREFIX)";

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let flags: HashMap<&str, &str> = args
        .get(1..)
        .unwrap_or_default()
        .chunks_exact(2)
        .map(|pair| (pair[0].as_str(), pair[1].as_str()))
        .collect();
    let known = ["--endpoints", "--user", "--password-file", "--spec", "--prefix"];
    let scenario = args.first().map(String::as_str).unwrap_or_default();
    if !["watchers", "rounds", "unread"].contains(&scenario)
        || args.len() != 1 + 2 * flags.len()
        || flags.keys().any(|flag| !known.contains(flag))
    {
        eprintln!("{USAGE}");
        return ExitCode::from(64);
    }
    let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    emit(
        "start",
        json!({ "client": concat!("etcd-client ", env!("ETCD_CLIENT_VERSION")), "unix_ms": unix_ms }),
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ran = runtime
        .map_err(|fault| ("Unknown".to_owned(), fault.to_string()))
        .and_then(|runtime| runtime.block_on(run(scenario, &flags)));
    match ran {
        Ok(()) => {
            emit("end", json!({}));
            ExitCode::SUCCESS
        }
        Err((code, message)) => {
            emit("fatal", json!({ "code": code, "message": message }));
            ExitCode::FAILURE
        }
    }
}

async fn run(scenario: &str, flags: &HashMap<&str, &str>) -> Result<(), (String, String)> {
    match scenario {
        "rounds" => rounds::run(flags).await,
        "unread" => unread::run(flags).await,
        #[cfg(feature = "v0_21")]
        "watchers" => watchers::run(flags).await,
        _ => Err(("Unknown".to_owned(), format!("this version has no {scenario}"))),
    }
}

async fn connect(flags: &HashMap<&str, &str>) -> Result<Client, (String, String)> {
    let endpoints: Vec<&str> = flags.get("--endpoints").unwrap_or(&"").split(',').collect();
    let user = flags.get("--user").copied().unwrap_or_default();
    let mut options = ConnectOptions::new();
    if !user.is_empty() {
        options = options.with_user(user, read(flags, "--password-file")?.trim_end_matches(['\r', '\n']));
    }
    Client::connect(endpoints, Some(options)).await.map_err(|error| described(&error))
}

pub(crate) fn read(flags: &HashMap<&str, &str>, flag: &str) -> Result<String, (String, String)> {
    let path = flags.get(flag).ok_or_else(|| ("Unknown".to_owned(), format!("{flag} is missing")))?;
    fs::read_to_string(path).map_err(|fault| ("Unknown".to_owned(), format!("{path}: {fault}")))
}
