//! The scenario `rounds`: a client that logs in once, holds a watch and a keepalive stream, and does one thing of each kind for each
//! SIGUSR2.
//!
//! It must not know what happens between the rounds. Invariant: what etcd-client does not do by itself, such as logging in
//! again, is not done here; a keepalive stream that ended is opened again in the next round, as an application must.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};

use crate::connect;
use crate::etcd_client::{Client, Error, LeaseKeepAliveStream, LeaseKeeper, WatchOptions, WatchStream};
use crate::record::{described, emit};

const LIMIT: Duration = Duration::from_secs(10);
const TTL: i64 = 600;

type Failed = (String, String);

pub(crate) async fn run(flags: &HashMap<&str, &str>) -> Result<(), Failed> {
    let signals = |kind| signal(kind).map_err(|fault| ("Unknown".to_owned(), fault.to_string()));
    let mut again = signals(SignalKind::user_defined2())?;
    let mut terminated = signals(SignalKind::terminate())?;
    let prefix =
        flags.get("--prefix").ok_or_else(|| ("Unknown".to_owned(), "--prefix is missing".to_owned()))?;
    let mut rounds =
        Rounds::set_up(connect(flags).await?, prefix).await.map_err(|error| described(&error))?;
    emit("ready", json!({}));
    for number in 1.. {
        tokio::select! {
            _ = again.recv() => rounds.round(number).await,
            _ = terminated.recv() => return Ok(()),
        }
    }
    Ok(())
}

struct Rounds {
    client: Client,
    prefix: String,
    watch: Watching,
    /// `None` where it was refused: some versions send no token for it, so newer servers take them for nobody.
    lease: Option<i64>,
    keeper: Option<(LeaseKeeper, LeaseKeepAliveStream)>,
}

impl Rounds {
    async fn set_up(mut client: Client, prefix: &str) -> Result<Rounds, Error> {
        client.put(format!("{prefix}seed"), "seed", None).await?;
        let watch = Watching::open(&mut client, format!("{prefix}watched"), 0).await?;
        let mut rounds = Rounds { client, prefix: prefix.into(), watch, lease: None, keeper: None };
        did(0, "keepalive", rounds.renew()).await;
        Ok(rounds)
    }

    async fn round(&mut self, number: u32) {
        let (seed, written) = (format!("{}seed", self.prefix), format!("{}written", self.prefix));
        let mut client = self.client.clone();
        did(number, "watch", self.watch.shows(&number.to_string())).await;
        let new = async { Watching::open(&mut client, seed.clone(), 1).await?.shows("seed").await };
        did(number, "new watch", new).await;
        did(number, "read", async { client.get(seed, None).await.map(drop) }).await;
        did(number, "write", async { client.put(written, number.to_string(), None).await.map(drop) }).await;
        did(number, "keepalive", self.renew()).await;
        did(number, "grant", async { self.client.lease_grant(TTL, None).await.map(drop) }).await;
        emit("round", json!({ "round": number }));
    }

    async fn renew(&mut self) -> Result<(), Error> {
        let lease = match self.lease {
            Some(lease) => lease,
            None => self.client.lease_grant(TTL, None).await?.id(),
        };
        self.lease = Some(lease);
        // Put back only when it has answered.
        let (keeper, answers) = match self.keeper.take() {
            None => self.client.lease_keep_alive(lease).await?,
            Some((mut keeper, mut answers)) => {
                keeper.keep_alive().await?;
                let answer = answers.message().await?;
                if answer.is_none_or(|answer| answer.ttl() <= 0) {
                    return Err(Error::LeaseKeepAliveError("the lease is gone, or its stream".into()));
                }
                (keeper, answers)
            }
        };
        self.keeper = Some((keeper, answers));
        Ok(())
    }
}

/// A watch of one key. Before 0.18 the library gives two halves, and the watch ends with the first.
struct Watching {
    stream: WatchStream,
    #[cfg(feature = "v0_17")]
    _requests: crate::etcd_client::Watcher,
}

impl Watching {
    async fn open(client: &mut Client, key: String, start: i64) -> Result<Watching, Error> {
        let opened = client.watch(key, Some(WatchOptions::new().with_start_revision(start))).await?;
        #[cfg(feature = "v0_17")]
        let watching = Watching { stream: opened.1, _requests: opened.0 };
        #[cfg(not(feature = "v0_17"))]
        let watching = Watching { stream: opened };
        Ok(watching)
    }

    /// Reads on until the key has had this value.
    async fn shows(&mut self, value: &str) -> Result<(), Error> {
        while let Some(response) = self.stream.message().await? {
            if response.canceled() {
                return Err(Error::WatchError(response.cancel_reason().to_owned()));
            }
            if response
                .events()
                .iter()
                .filter_map(|event| event.kv())
                .any(|kv| kv.value() == value.as_bytes())
            {
                return Ok(());
            }
        }
        Err(Error::WatchError("the stream ended".into()))
    }
}

async fn did(round: u32, op: &str, doing: impl Future<Output = Result<(), Error>>) {
    let begun = Instant::now();
    let (code, message) = match timeout(LIMIT, doing).await {
        Ok(Ok(())) => ("OK".to_owned(), String::new()),
        Ok(Err(error)) => described(&error),
        Err(_) => ("Timeout".to_owned(), String::new()),
    };
    let ms = begun.elapsed().as_millis() as u64;
    emit("did", json!({ "round": round, "op": op, "code": code, "message": message, "ms": ms }));
}
