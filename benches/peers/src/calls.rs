//! Range calls over many connections, with a constant number of calls in flight.
//!
//! Owns: the workers and the latencies. Must not know: the proxy's costs; `scale` reads the costs between the
//! lines. Invariants: every answer is verified; a worker uses its connections in turn, and the workers are
//! spread evenly over the connections, so that connections have equal numbers of calls in flight.

use std::time::Duration;

use clap::Args;
use futures_util::future::try_join_all;
use keyward::tasks::Tasks;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::Failure;
use crate::canned::PASSWORD;
use crate::client_pool::{LIMIT, log_in_all, open, verified_range};
use crate::grpc_client::GrpcClient;
use crate::latency::{micros, percentile};
use crate::script_turns::{tell, wait_for_turn};
use crate::target::ProxyAddress;

/// The load.
#[derive(Args)]
pub(crate) struct Calls {
    #[command(flatten)]
    proxy: ProxyAddress,
    #[arg(long, default_value_t = 8)]
    connections: usize,
    /// Calls in flight, over all connections.
    #[arg(long, default_value_t = 64)]
    active: usize,
    /// Users of the connections in turn, each with a login of its own. 0: no login, the proxy's `token`.
    #[arg(long, default_value_t = 0)]
    users: usize,
    /// Loopback addresses of the connections in turn, from 127.0.0.1.
    #[arg(long, default_value_t = 1)]
    sources: u8,
    /// Duration of the measured calls. A quarter of the duration precedes as warm-up.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
}

impl Calls {
    /// Opens the connections, makes the calls in the script's turn, and prints number and latencies.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let tokens = if self.users == 0 {
            self.proxy.token.iter().cloned().collect()
        } else {
            log_in_all(self.proxy.address, "caller", PASSWORD, self.users, &tasks).await?
        };
        let clients = open(self.proxy.address, self.connections, self.sources, &tokens, &tasks).await?;
        self.call(&clients, self.seconds / 4.0).await?;
        tell(&json!({ "connections": clients.len(), "logins": tokens.len() }))?;
        wait_for_turn().await?;
        let began = Instant::now();
        let mut times = self.call(&clients, self.seconds).await?;
        let seconds = began.elapsed().as_secs_f64();
        tell(&json!({
            "calls": times.len(),
            "seconds": seconds,
            "p50_us": percentile(&mut times, 50),
            "p99_us": percentile(&mut times, 99),
        }))?;
        wait_for_turn().await
    }

    /// Makes calls for `seconds`; the latency of each call.
    async fn call(&self, clients: &[GrpcClient], seconds: f64) -> Result<Vec<u64>, Failure> {
        let ends = Instant::now() + Duration::from_secs_f64(seconds);
        let workers = (0..self.active).map(|worker| async move {
            // Each connection belongs to one worker, or each worker to one connection.
            let own = clients.iter().skip(worker % clients.len().max(1)).step_by(self.active);
            let mut times = Vec::new();
            for client in own.cycle() {
                let began = Instant::now();
                if began >= ends {
                    break;
                }
                timeout(LIMIT, verified_range(client)).await??;
                times.push(micros(began.elapsed()));
            }
            Ok::<_, Failure>(times)
        });
        Ok(try_join_all(workers).await?.concat())
    }
}
