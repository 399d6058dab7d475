//! Keepalives of many leases: one stream for each connection, as etcd's Go client does.
//!
//! Owns: the leases, granted through the proxy and revoked at the end. Must not know: the proxy's costs; `run`
//! reads the costs between the lines. Invariant: each round sends one keepalive for each lease, and ends after
//! each lease was answered exactly once, with a TTL above zero.

use std::collections::HashSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use clap::Args;
use futures_util::future::try_join_all;
use keyward::pb::etcdserverpb::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest,
    LeaseRevokeResponse,
};
use keyward::rpc::frame;
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::Failure;
use crate::grpc_client::{BidiStream, GrpcClient};
use crate::latency::{micros, percentile};
use crate::script_turns::{tell, wait_for_turn};
use crate::target::ProxyAddress;

/// Time limit of one round, of all grants of one connection, and of all its revokes.
const LIMIT: Duration = Duration::from_secs(60);
/// Lifetime of a lease in seconds: longer than a run.
const TTL: i64 = 300;

/// The load.
#[derive(Args)]
pub(crate) struct Keepalives {
    #[command(flatten)]
    proxy: ProxyAddress,
    #[arg(long, default_value_t = 10)]
    connections: usize,
    /// Leases of one connection.
    #[arg(long, default_value_t = 100)]
    leases: usize,
    /// Number of keepalives of each lease.
    #[arg(long, default_value_t = 30)]
    rounds: usize,
    /// Rounds before the measured rounds.
    #[arg(long, default_value_t = 2)]
    warm: usize,
}

/// One connection with its leases and its stream.
struct LeaseStream {
    client: GrpcClient,
    leases: Vec<i64>,
    stream: BidiStream,
}

impl Keepalives {
    /// Grants the leases, tells `run`, makes the rounds in `run`'s turn, and prints the times of the rounds.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        // Leases of an earlier load may still be alive at the member: the time makes the ids unique.
        let epoch = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros())?;
        let mut ids = epoch.saturating_mul(1000)..;
        let mut streams = Vec::new();
        for _ in 0..self.connections {
            let client = self.proxy.connect(&tasks).await?;
            let leases: Vec<_> = ids.by_ref().take(self.leases).collect();
            streams.push(timeout(LIMIT, LeaseStream::open(client, leases)).await??);
        }
        for _ in 0..self.warm {
            round(&mut streams).await?;
        }
        tell(&json!({ "leases": self.connections * self.leases }))?;
        wait_for_turn().await?;
        let began = Instant::now();
        let mut times = Vec::new();
        for _ in 0..self.rounds {
            let began = Instant::now();
            round(&mut streams).await?;
            times.push(micros(began.elapsed()));
        }
        tell(&json!({
            "keepalives": self.rounds * self.connections * self.leases,
            "seconds": began.elapsed().as_secs_f64(),
            "p50_us": percentile(&mut times, 50),
            "p99_us": percentile(&mut times, 99),
        }))?;
        wait_for_turn().await?;
        for stream in &mut streams {
            timeout(LIMIT, stream.close()).await??;
        }
        tell(&json!({}))?;
        Ok(())
    }
}

/// One keepalive of every lease, all streams at once.
async fn round(streams: &mut [LeaseStream]) -> Result<(), Failure> {
    timeout(LIMIT, try_join_all(streams.iter_mut().map(LeaseStream::renew_all))).await??;
    Ok(())
}

fn keepalive(id: i64) -> Bytes {
    frame::encode(&LeaseKeepAliveRequest { id }.encode_to_vec())
}

impl LeaseStream {
    /// Grants the leases, and opens the stream with a keepalive of the first lease.
    async fn open(client: GrpcClient, leases: Vec<i64>) -> Result<Self, Failure> {
        for &id in &leases {
            let asked = LeaseGrantRequest { ttl: TTL, id };
            let granted: LeaseGrantResponse = client.call("/etcdserverpb.Lease/LeaseGrant", &asked).await?;
            if granted.id != id || granted.ttl < TTL {
                return Err(format!("lease {id} was granted as {}, TTL {}", granted.id, granted.ttl).into());
            }
        }
        let first = *leases.first().ok_or("a connection without leases")?;
        let stream = client.open("/etcdserverpb.Lease/LeaseKeepAlive", keepalive(first)).await?;
        let mut opened = Self { client, leases, stream };
        opened.receive(&mut HashSet::from([first])).await?;
        Ok(opened)
    }

    async fn renew_all(&mut self) -> Result<(), Failure> {
        for &id in &self.leases {
            self.stream.requests.send_data(keepalive(id), false)?;
        }
        let mut missing: HashSet<_> = self.leases.iter().copied().collect();
        while !missing.is_empty() {
            self.receive(&mut missing).await?;
        }
        Ok(())
    }

    /// Verifies one answer, and takes its lease off the `missing` leases.
    async fn receive(&mut self, missing: &mut HashSet<i64>) -> Result<(), Failure> {
        let message = self.stream.responses.next().await?.ok_or("a keepalive stream ended")?;
        let answer = LeaseKeepAliveResponse::decode(message)?;
        if answer.ttl <= 0 || !missing.remove(&answer.id) {
            return Err(format!("not an awaited keepalive: lease {}, TTL {}", answer.id, answer.ttl).into());
        }
        Ok(())
    }

    async fn close(&mut self) -> Result<(), Failure> {
        self.stream.requests.send_data(Bytes::new(), true)?;
        if self.stream.responses.next().await?.is_some() {
            return Err("a keepalive was answered twice".into());
        }
        for &id in &self.leases {
            let asked = LeaseRevokeRequest { id };
            let _: LeaseRevokeResponse = self.client.call("/etcdserverpb.Lease/LeaseRevoke", &asked).await?;
        }
        Ok(())
    }
}
