//! A mixed load in cycles: sessions of clients until a deadline, then nothing is open.
//!
//! Owns: the cycles and their counts. Must not know: the samples; the script `soak` takes samples during and
//! after each cycle. Invariant: a cycle's line is printed only after every connection of the cycle was closed
//! and every answer verified.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use futures_util::future::try_join_all;
use keyward::tasks::Tasks;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::Failure;
use crate::script_turns::{tell, wait_for_turn};
use crate::soak_session::{Counts, Session};

/// Time limit of one session: everything in a session has a time limit at etcd of some seconds.
const LIMIT: Duration = Duration::from_secs(60);
/// Time limit of the closing of all connections.
const CLOSING: Duration = Duration::from_secs(10);

/// The load.
#[derive(Args)]
pub(crate) struct Soak {
    /// The proxy.
    #[arg(long)]
    address: SocketAddr,
    /// The users of the sessions in turn.
    #[arg(long, value_delimiter = ',', required = true)]
    users: Vec<String>,
    /// Sessions at the same time.
    #[arg(long, default_value_t = 8)]
    sessions: usize,
    /// Duration of one cycle.
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
}

impl Soak {
    /// Makes one cycle in each turn of the script, until the script ends the load.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        for cycle in 0_usize.. {
            wait_for_turn().await?;
            let counts = self.cycle(cycle).await?;
            tell(&json!({ "cycle": cycle, "counts": counts }))?;
        }
        Ok(())
    }

    async fn cycle(&self, cycle: usize) -> Result<Counts, Failure> {
        let (counts, tasks) = (Counts::default(), Tasks::default());
        let ends = Instant::now() + Duration::from_secs_f64(self.seconds);
        let clients = self.users.iter().cycle().take(self.sessions).zip(0..);
        let running = clients.map(|(user, place): (_, usize)| {
            let prefix = format!("soak/{cycle}-{place}");
            self.sessions_until(ends, prefix, user, &tasks, &counts)
        });
        try_join_all(running).await?;
        timeout(CLOSING, tasks.joined()).await.map_err(|_| "a connection of the load stays open")?;
        Ok(counts)
    }

    /// Runs sessions of one user, one after the other.
    async fn sessions_until(
        &self,
        ends: Instant,
        prefix: String,
        user: &str,
        tasks: &Tasks,
        counts: &Counts,
    ) -> Result<(), Failure> {
        for number in 0_usize.. {
            if Instant::now() >= ends {
                break;
            }
            let name = format!("{prefix}-{number}");
            let session = Session { name, user, address: self.address, tasks, counts };
            timeout(LIMIT, session.run()).await.map_err(|_| "a session hangs")??;
        }
        Ok(())
    }
}
