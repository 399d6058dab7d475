//! The scenario `unread`: a watch that its application does not read until SIGUSR2, and then reads to a last value, or to its end.
//!
//! It must not know what is written meanwhile. Invariant: the library's connection is driven all the time, as in a program that waits
//! for something else.

use std::collections::HashMap;

use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::connect;
use crate::etcd_client::WatchOptions;
use crate::record::{described, emit};

/// The value of the last event.
const LAST: &[u8] = b"last";

pub(crate) async fn run(flags: &HashMap<&str, &str>) -> Result<(), (String, String)> {
    let signals = signal(SignalKind::user_defined2());
    let mut reads = signals.map_err(|fault| ("Unknown".to_owned(), fault.to_string()))?;
    let prefix =
        *flags.get("--prefix").ok_or_else(|| ("Unknown".to_owned(), "--prefix is missing".to_owned()))?;
    let mut client = connect(flags).await?;
    let options = WatchOptions::new().with_prefix();
    let opened = client.watch(prefix, Some(options)).await.map_err(|error| described(&error))?;
    #[cfg(feature = "v0_17")]
    let (_requests, mut stream) = opened;
    #[cfg(not(feature = "v0_17"))]
    let mut stream = opened;
    emit("ready", json!({}));
    reads.recv().await;
    let mut events = 0;
    loop {
        let (code, message) = match stream.message().await {
            Ok(Some(response)) => {
                events += response.events().len();
                let mut values = response.events().iter().filter_map(|event| event.kv());
                if !values.any(|kv| kv.value() == LAST) {
                    continue;
                }
                ("OK".to_owned(), String::new())
            }
            Ok(None) => ("Ended".to_owned(), String::new()),
            Err(error) => described(&error),
        };
        emit("read", json!({ "events": events, "code": code, "message": message }));
        return Ok(());
    }
}
