//! Clients that do nothing wrong while somebody else attacks, and what they saw.
//!
//! Owns: their connections, their pace and their record. Must not know the attack. They run in a thread and a runtime of their own,
//! so that the attackers' threads share the machine with them and nothing else.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::RangeRequest;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use tokio::time::{sleep, timeout};
use tonic::transport::Endpoint;
use tonic::{Code, Request};

/// How many clients.
const CLIENTS: usize = 8;
/// A client's pause between two gets.
const PACE: Duration = Duration::from_millis(10);
/// After this time a get counts as timed out.
const LIMIT: Duration = Duration::from_secs(5);

/// What the clients saw.
#[derive(Debug, Default)]
pub(crate) struct Record {
    /// How long each answered get took, sorted.
    pub(crate) latencies: Vec<Duration>,
    /// Gets and connection attempts that were not answered within the limit.
    pub(crate) timed_out: usize,
    /// Gets and connection attempts that were refused or lost, with the first reason.
    pub(crate) failed: usize,
    pub(crate) reason: Option<String>,
}

impl Record {
    /// The latency below which this share of the answered gets lies.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
        #[expect(clippy::cast_precision_loss, reason = "a few thousand")]
        let index = (last as f64 * share).round() as usize;
        self.latencies.get(index).copied().unwrap_or_default()
    }

    fn add(&mut self, other: Record) {
        self.latencies.extend(other.latencies);
        self.timed_out += other.timed_out;
        self.failed += other.failed;
        self.reason = self.reason.take().or(other.reason);
    }

    fn fail(&mut self, reason: String) {
        self.failed += 1;
        self.reason.get_or_insert(reason);
    }
}

/// Whether a client keeps its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connecting {
    Once,
    /// For each get anew.
    EachTime,
}

/// Clients that are calling.
pub(crate) struct Others {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Record>,
}

impl Others {
    /// Starts them at this address, all with this token.
    pub(crate) fn start(address: SocketAddr, token: &str, connecting: Connecting) -> Others {
        let stop = Arc::new(AtomicBool::new(false));
        let (told, token) = (Arc::clone(&stop), token.to_owned());
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let clients = (0..CLIENTS).map(|_| call(address, &token, connecting, &told));
                let mut all = Record::default();
                join_all(clients).await.into_iter().for_each(|one| all.add(one));
                all.latencies.sort_unstable();
                all
            })
        });
        Others { stop, thread }
    }

    /// Ends them, each after the get that it has under way.
    pub(crate) fn stop(self) -> Record {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the clients do not panic")
    }
}

async fn call(address: SocketAddr, token: &str, connecting: Connecting, stop: &AtomicBool) -> Record {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address").tcp_nodelay(true);
    let mut record = Record::default();
    let mut connection = None;
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let exchange = async {
            let channel = match connection.take() {
                Some(channel) => channel,
                None => endpoint.connect().await.map_err(|error| format!("connecting: {error:?}"))?,
            };
            let range = RangeRequest { key: "/a/small".into(), ..RangeRequest::default() };
            let mut request = Request::new(range);
            request.metadata_mut().insert("token", token.parse().expect("a token is a header"));
            let answered = KvClient::new(channel.clone()).range(request).await;
            if connecting == Connecting::Once
                && answered.as_ref().err().is_none_or(|status| status.code() != Code::Unavailable)
            {
                connection = Some(channel);
            }
            let answer = answered.map_err(|status| format!("{:?}: {}", status.code(), status.message()))?;
            let found = answer.into_inner().kvs.len();
            if found == 1 { Ok(()) } else { Err(format!("{found} keys where there is one")) }
        };
        match timeout(LIMIT, exchange).await {
            Ok(Ok(())) => record.latencies.push(began.elapsed()),
            Ok(Err(reason)) => record.fail(reason),
            Err(_) => record.timed_out += 1,
        }
        sleep(PACE).await;
    }
    record
}
