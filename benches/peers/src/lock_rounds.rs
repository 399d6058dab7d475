//! Round trips of an uncontended lock: Lock, then Unlock, one after the other with one lease.
//!
//! Invariant: each Lock returns the queue key of the lease, `NAME/HEX(LEASE)`.

use std::time::Duration;

use clap::Args;
use keyward::pb::etcdserverpb::{LeaseGrantRequest, LeaseGrantResponse};
use keyward::pb::v3lockpb::{LockRequest, LockResponse, UnlockRequest, UnlockResponse};
use keyward::tasks::Tasks;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::Failure;
use crate::grpc_client::GrpcClient;
use crate::latency::{micros, percentile};
use crate::script_turns::{tell, wait_for_turn};
use crate::target::ProxyAddress;

const LIMIT: Duration = Duration::from_secs(10);
const NAME: &str = "lock-rounds";
/// Lifetime of the lease in seconds: longer than a run.
const TTL: i64 = 300;

/// The load.
#[derive(Args)]
pub(crate) struct LockRounds {
    #[command(flatten)]
    proxy: ProxyAddress,
    #[arg(long, default_value_t = 100)]
    rounds: usize,
    /// Rounds before the measured rounds.
    #[arg(long, default_value_t = 5)]
    warm: usize,
}

impl LockRounds {
    /// Makes the rounds in `run`'s turn, and prints the time of a round.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let client = self.proxy.connect(&tasks).await?;
        let asked = LeaseGrantRequest { ttl: TTL, id: 0 };
        let lease: LeaseGrantResponse = client.call("/etcdserverpb.Lease/LeaseGrant", &asked).await?;
        for _ in 0..self.warm {
            timeout(LIMIT, lock_and_unlock(&client, lease.id)).await??;
        }
        tell(&json!({ "lease": lease.id }))?;
        wait_for_turn().await?;
        let mut times = Vec::new();
        for _ in 0..self.rounds {
            let began = Instant::now();
            timeout(LIMIT, lock_and_unlock(&client, lease.id)).await??;
            times.push(micros(began.elapsed()));
        }
        tell(&json!({
            "rounds": times.len(),
            "p50_us": percentile(&mut times, 50),
            "p99_us": percentile(&mut times, 99),
        }))?;
        wait_for_turn().await
    }
}

async fn lock_and_unlock(client: &GrpcClient, lease: i64) -> Result<(), Failure> {
    let asked = LockRequest { name: NAME.into(), lease };
    let held: LockResponse = client.call("/v3lockpb.Lock/Lock", &asked).await?;
    if held.key != format!("{NAME}/{lease:x}") {
        return Err(format!("the lock has the key {:?}", held.key).into());
    }
    let _: UnlockResponse = client.call("/v3lockpb.Lock/Unlock", &UnlockRequest { key: held.key }).await?;
    Ok(())
}
