//! Idle connections, and idle watches on some of the connections.
//!
//! Invariants: a connection has made one verified call, a watch has its Created; both stay open until `run`
//! has read the proxy's memory.

use std::time::Duration;

use clap::Args;
use keyward::pb::etcdserverpb::{RangeRequest, RangeResponse};
use keyward::tasks::Tasks;
use serde_json::json;
use tokio::time::timeout;

use crate::Failure;
use crate::fan_out::open_watches;
use crate::script_turns::{tell, wait_for_turn};
use crate::target::ProxyAddress;

const LIMIT: Duration = Duration::from_secs(10);

/// The load.
#[derive(Args)]
pub(crate) struct IdleStreams {
    #[command(flatten)]
    proxy: ProxyAddress,
    #[arg(long, default_value_t = 500)]
    connections: usize,
    /// Watches, each on a stream of its own.
    #[arg(long, default_value_t = 1000)]
    watches: usize,
    /// Watches of one connection.
    #[arg(long, default_value_t = 100)]
    per_connection: usize,
}

impl IdleStreams {
    /// Opens the connections, then the watches; `run` reads the memory after each.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let mut clients = Vec::new();
        for _ in 0..self.connections {
            let client = self.proxy.connect(&tasks).await?;
            let asked = RangeRequest { key: "small".into(), ..RangeRequest::default() };
            let answer = client.call::<RangeResponse>("/etcdserverpb.KV/Range", &asked);
            timeout(LIMIT, answer).await??;
            clients.push(client);
        }
        tell(&json!({ "connections": clients.len() }))?;
        wait_for_turn().await?;
        let mut streams = Vec::new();
        for at in 0..self.watches {
            let client =
                clients.get(at / self.per_connection).ok_or("too few connections for the watches")?;
            streams.push(timeout(LIMIT, open_watches(client, &format!("idle-{at}"), 1)).await??);
        }
        tell(&json!({ "watches": streams.len() }))?;
        wait_for_turn().await
    }
}
