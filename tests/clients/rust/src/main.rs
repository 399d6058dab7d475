//! Watches what a spec file names with the crate etcd-client and prints what an application saw, one JSON object a line.
//!
//! It owns the record; it must not know Keyward, and it does not judge: `tests/etcd` does. The contract of the command line and of
//! the lines is in `tests/clients/README.md`.

mod record;
mod stream;

use std::{
    collections::HashMap,
    env, fs,
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use etcd_client::{Client, ConnectOptions};
use record::{described, emit};
use serde::Deserialize;
use serde_json::json;
use stream::{Missing, Shared, Spec};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

const USAGE: &str =
    "usage: watchers watchers --endpoints HOST:PORT[,…] --user NAME --password-file FILE --spec SPEC.json";

#[derive(Deserialize)]
struct File {
    watches: Vec<Spec>,
}

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let flags: HashMap<&str, &str> = args
        .get(1..)
        .unwrap_or_default()
        .chunks_exact(2)
        .map(|pair| (pair[0].as_str(), pair[1].as_str()))
        .collect();
    let known = ["--endpoints", "--user", "--password-file", "--spec"];
    if args.first().is_none_or(|scenario| scenario != "watchers")
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
        .and_then(|runtime| runtime.block_on(run(&flags)));
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

async fn run(flags: &HashMap<&str, &str>) -> Result<(), (String, String)> {
    let mut terminated =
        signal(SignalKind::terminate()).map_err(|fault| ("Unknown".to_owned(), fault.to_string()))?;
    let client = connect(flags).await?;
    let file: File = serde_json::from_str(&read(flags, "--spec")?)
        .map_err(|fault| ("Unknown".to_owned(), fault.to_string()))?;

    let missing = Missing::new(file.watches.len());
    let (stop, stopped) = tokio::sync::watch::channel(false);
    // Every other watch has a stream of its own, as the library's first example does it; the rest share one.
    let (alone, shared): (Vec<_>, Vec<_>) =
        file.watches.into_iter().enumerate().partition(|(at, _)| at % 2 == 1);
    let mut groups: Vec<Vec<Spec>> = alone.into_iter().map(|(_, spec)| vec![spec]).collect();
    groups.push(shared.into_iter().map(|(_, spec)| spec).collect());
    let mut streams = JoinSet::new();
    for group in groups.into_iter().filter(|group| !group.is_empty()) {
        streams.spawn(Shared::new(client.watch_client(), group, missing.clone()).run(stopped.clone()));
    }
    terminated.recv().await;
    stop.send_replace(true);
    streams.join_all().await;
    Ok(())
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

fn read(flags: &HashMap<&str, &str>, flag: &str) -> Result<String, (String, String)> {
    let path = flags.get(flag).ok_or_else(|| ("Unknown".to_owned(), format!("{flag} is missing")))?;
    fs::read_to_string(path).map_err(|fault| ("Unknown".to_owned(), format!("{path}: {fault}")))
}
