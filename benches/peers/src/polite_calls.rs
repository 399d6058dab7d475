//! Polite calls: a few connections, one call at a time on each, at a steady rate. `run` starts a greedy client
//! beside the second phase.
//!
//! Owns: the times of the calls. Must not know: the greedy client. Invariants: every answer is verified; a call
//! counts from its sending. A call that was due before the previous call's answer follows that answer at once:
//! counted from the time when it was due, the times would grow with the length of a phase.

use std::time::Duration;

use clap::Args;
use futures_util::future::try_join_all;
use keyward::tasks::Tasks;
use serde_json::json;
use tokio::time::{Instant, sleep_until, timeout};

use crate::Failure;
use crate::canned::PASSWORD;
use crate::client_pool::{log_in, verified_range};
use crate::grpc_client::GrpcClient;
use crate::latency::{micros, percentile};
use crate::script_turns::{tell, wait_for_turn};
use crate::target::ProxyAddress;

/// Time limit of one call.
const LIMIT: Duration = Duration::from_secs(10);
/// Calls of each connection before the measured calls.
const WARM: usize = 5;
/// The load.
#[derive(Args)]
pub(crate) struct PoliteCalls {
    #[command(flatten)]
    proxy: ProxyAddress,
    #[arg(long, default_value_t = 8)]
    connections: u32,
    /// Calls of all connections in one second.
    #[arg(long, default_value_t = 200)]
    rate: u32,
    /// Duration of one phase in milliseconds.
    #[arg(long, default_value_t = 5000)]
    millis: u64,
    /// Users with a connection each, in turn, with the usual password; in place of the token.
    #[arg(long, value_delimiter = ',')]
    users: Vec<String>,
    /// Number of phases; `run` gives each its turn.
    #[arg(long, default_value_t = 2)]
    phases: usize,
}

impl PoliteCalls {
    /// Makes the calls of each phase in `run`'s turn, and prints their times.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let mut clients = Vec::new();
        let mut users = self.users.iter().cycle();
        for _ in 0..self.connections {
            let mut client = self.proxy.connect(&tasks).await?;
            if let Some(user) = users.next() {
                client.set_token(&log_in(self.proxy.address, user, PASSWORD, &tasks).await?)?;
            }
            for _ in 0..WARM {
                timeout(LIMIT, verified_range(&client)).await??;
            }
            clients.push(client);
        }
        tell(&json!({ "connections": clients.len() }))?;
        for _ in 0..self.phases {
            wait_for_turn().await?;
            let began = Instant::now();
            let until = began + Duration::from_millis(self.millis);
            let pause = Duration::from_secs(1) * self.connections / self.rate.max(1);
            // The connections take turns.
            let calls = clients.iter().zip(0..).map(|(client, at): (_, u32)| {
                calls_until(client, began + pause * at / self.connections, pause, until)
            });
            let mut times = try_join_all(calls).await?.concat();
            tell(&json!({
                "calls": times.len(),
                "seconds": began.elapsed().as_secs_f64(),
                "p50_us": percentile(&mut times, 50),
                "p99_us": percentile(&mut times, 99),
            }))?;
        }
        wait_for_turn().await
    }
}

/// One call after the other, one every `pause` at most, the first at `due`. The times of the calls.
async fn calls_until(
    client: &GrpcClient,
    mut due: Instant,
    pause: Duration,
    until: Instant,
) -> Result<Vec<u64>, Failure> {
    let mut times = Vec::new();
    while due < until {
        sleep_until(due).await;
        let began = Instant::now();
        timeout(LIMIT, verified_range(client)).await??;
        times.push(micros(began.elapsed()));
        due = (due + pause).max(Instant::now());
    }
    Ok(times)
}
