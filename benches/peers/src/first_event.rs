//! The first event of a new watch: one watch after the other, each on a stream of its own.
//!
//! Invariants: each Put follows the watch's Created, and goes to the member directly; the first event must be
//! the event of the Put.

use std::time::Duration;

use clap::Args;
use keyward::pb::etcdserverpb::WatchResponse;
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::Failure;
use crate::fan_out::{open_watches, put};
use crate::grpc_client::GrpcClient;
use crate::latency::{micros, percentile};
use crate::script_turns::tell;
use crate::target::ProxyAndMember;

const LIMIT: Duration = Duration::from_secs(10);
const KEY: &str = "first-event";
/// Length of a value.
const VALUE: usize = 256;

/// The load.
#[derive(Args)]
pub(crate) struct FirstEvent {
    #[command(flatten)]
    target: ProxyAndMember,
    /// Number of watches.
    #[arg(long, default_value_t = 40)]
    watches: usize,
}

impl FirstEvent {
    /// Prints the time from the create's sending to the first event.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let tasks = Tasks::default();
        let client = self.target.proxy.connect(&tasks).await?;
        let member = self.target.connect_to_member(&tasks).await?;
        let (mut created, mut first) = (Vec::new(), Vec::new());
        for _ in 0..self.watches {
            let (to_created, to_event) = timeout(LIMIT, one_watch(&client, &member)).await??;
            created.push(micros(to_created));
            first.push(micros(to_event));
        }
        tell(&json!({
            "created_p50_us": percentile(&mut created, 50),
            "p50_us": percentile(&mut first, 50),
            "p99_us": percentile(&mut first, 99),
        }))?;
        Ok(())
    }
}

/// The times of the Created and of the first event, both from the sending of the create.
async fn one_watch(client: &GrpcClient, member: &GrpcClient) -> Result<(Duration, Duration), Failure> {
    let began = Instant::now();
    let mut stream = open_watches(client, KEY, 1).await?;
    let created = began.elapsed();
    let written = put(member, KEY, VALUE).await?.header.ok_or("a Put was answered without a header")?;
    let message = stream.responses.next().await?.ok_or("a watch stream ended before its event")?;
    let event = began.elapsed();
    let response = WatchResponse::decode(message)?;
    let revisions: Vec<_> =
        response.events.iter().filter_map(|event| event.kv.as_ref()).map(|kv| kv.mod_revision).collect();
    if revisions != [written.revision] {
        return Err(format!("the first event is of {revisions:?}, not of {}", written.revision).into());
    }
    stream.requests.send_data(bytes::Bytes::new(), true)?;
    Ok((created, event))
}
