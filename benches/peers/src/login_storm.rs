//! A storm of logins: many clients of one user connect at once, as after a restart of all clients.
//!
//! Owns: one connection for each client, one Authenticate and one Range on each connection. Must not know: the
//! number of logins that reach the member; `run` reads etcd's own metric. Invariant: each client receives a
//! token, and with the token a verified Range.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use keyward::tasks::Tasks;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::Failure;
use crate::check::authenticate;
use crate::client_pool::verified_range;
use crate::grpc_client::GrpcClient;
use crate::latency::{micros, percentile};
use crate::script_turns::{tell, wait_for_turn};

/// Time limit of one client: without a proxy each login costs etcd tens of milliseconds of bcrypt.
const LIMIT: Duration = Duration::from_secs(60);
/// The load.
#[derive(Args)]
pub(crate) struct LoginStorm {
    /// The proxy.
    #[arg(long)]
    address: SocketAddr,
    #[arg(long, value_name = "USER:PASSWORD")]
    login: String,
    #[arg(long, default_value_t = 1000)]
    clients: usize,
    /// Clients that are not yet served, at the same time.
    #[arg(long, default_value_t = 1000)]
    at_once: usize,
}

impl LoginStorm {
    /// Lets all clients come in `run`'s turn, and prints the times from a client's connect to its Range.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let (name, password) = self.login.split_once(':').ok_or("--login without a colon")?;
        tell(&json!({ "clients": self.clients }))?;
        wait_for_turn().await?;
        let began = Instant::now();
        let clients = stream::iter(0..self.clients)
            .map(|_| timeout(LIMIT, serve_client(self.address, name, password, &tasks)))
            .buffer_unordered(self.at_once)
            .map(|ended| ended?);
        // A client keeps its connection until the last client was served.
        let served: Vec<(Duration, GrpcClient)> = clients.try_collect().await?;
        let seconds = began.elapsed().as_secs_f64();
        let mut times: Vec<_> = served.iter().map(|(time, _)| micros(*time)).collect();
        tell(&json!({
            "served": times.len(),
            "seconds": seconds,
            "p50_us": percentile(&mut times, 50),
            "p99_us": percentile(&mut times, 99),
        }))?;
        wait_for_turn().await
    }
}

/// One client: connect, Authenticate, Range.
async fn serve_client(
    address: SocketAddr,
    name: &str,
    password: &str,
    tasks: &Tasks,
) -> Result<(Duration, GrpcClient), Failure> {
    let began = Instant::now();
    let mut client = GrpcClient::connect(address, None, tasks).await?;
    let token = authenticate(&client, name, password).await?;
    client.set_token(&token)?;
    verified_range(&client).await?;
    Ok((began.elapsed(), client))
}
