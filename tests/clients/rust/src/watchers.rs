//! The scenario `watchers`: the watches of a spec file, over a few streams.

use std::collections::HashMap;

use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use crate::stream::{Missing, Shared, Spec};
use crate::{connect, read};

#[derive(Deserialize)]
struct File {
    watches: Vec<Spec>,
}

pub(crate) async fn run(flags: &HashMap<&str, &str>) -> Result<(), (String, String)> {
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
