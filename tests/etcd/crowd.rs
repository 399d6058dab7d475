//! Thirty connections that read and write without a pause, and what became of each call.
//!
//! Owns: the connections and their record. Must not know which faults happen meanwhile. Invariant: each write is of a key of its
//! own, which nobody writes again: its version tells how often it was applied.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::{PutRequest, RangeRequest};
use tokio::time::{Instant, timeout};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::harness::wait;

/// Connections.
const SIZE: usize = 30;
/// Of so many calls one writes.
const WRITES: usize = 10;
/// Beyond etcd's own limit and an election.
const LIMIT: Duration = Duration::from_secs(20);
/// For so many calls on a busy machine.
const LONG: Duration = Duration::from_secs(120);
/// What the unique keys begin with.
const PREFIX: &str = "unique/";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Op {
    Read,
    Write,
}

/// A call that ended.
pub(crate) struct Call {
    pub(crate) op: Op,
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    pub(crate) failed: Option<Status>,
}

/// The connections' record.
#[derive(Default)]
pub(crate) struct Crowd {
    calls: RefCell<Vec<Call>>,
    acknowledged: RefCell<Vec<String>>,
    over: Cell<bool>,
}

/// A connection of its own.
pub(crate) async fn connect(url: &str) -> KvClient<Channel> {
    let endpoint = Endpoint::from_shared(url.to_owned()).expect("a URL").tcp_nodelay(true);
    KvClient::new(endpoint.connect().await.expect("a connection"))
}

impl Crowd {
    /// Calls at `url` until told that it is over.
    pub(crate) async fn run(&self, url: &str) {
        join_all((0..SIZE).map(|number| self.one(url, number))).await;
    }

    async fn one(&self, url: &str, number: usize) {
        let mut kv = connect(url).await;
        for call in 0.. {
            if self.over.get() {
                return;
            }
            let began = Instant::now();
            let (op, ended) = if (call + number).is_multiple_of(WRITES) {
                let key = format!("{PREFIX}{number}/{call}");
                let put = PutRequest { key: key.clone().into(), value: "v".into(), ..PutRequest::default() };
                let ended = timeout(LIMIT, kv.put(put)).await.map(|ended| ended.map(drop));
                if matches!(ended, Ok(Ok(()))) {
                    self.acknowledged.borrow_mut().push(key);
                }
                (Op::Write, ended)
            } else {
                let range = RangeRequest { key: "k".into(), ..RangeRequest::default() };
                (Op::Read, timeout(LIMIT, kv.range(range)).await.map(|ended| ended.map(drop)))
            };
            let failed = ended.unwrap_or_else(|_| Err(Status::unknown("no answer at all"))).err();
            self.calls.borrow_mut().push(Call { op, began, ended: Instant::now(), failed });
        }
    }

    /// No further call begins.
    pub(crate) fn end(&self) {
        self.over.set(true);
    }

    /// Calls of this kind that succeeded.
    pub(crate) fn succeeded(&self, op: Op) -> usize {
        self.calls.borrow().iter().filter(|call| call.op == op && call.failed.is_none()).count()
    }

    /// Waits until so many more of this kind have succeeded.
    pub(crate) async fn more(&self, op: Op, more: usize) {
        let enough = self.succeeded(op) + more;
        let what = format!("{more} more of {op:?} succeed");
        wait::until(LONG, &what, async || (self.succeeded(op) >= enough).then_some(())).await;
    }

    /// What failed, by kind and words.
    pub(crate) fn failures(&self) -> BTreeMap<(Op, String), usize> {
        let mut failures = BTreeMap::new();
        for call in self.calls.borrow().iter() {
            if let Some(status) = &call.failed {
                let words = format!("{:?} {}", status.code(), status.message());
                *failures.entry((call.op, words)).or_default() += 1;
            }
        }
        failures
    }

    /// The 99th percentile of the reads that began between the two.
    pub(crate) fn p99(&self, from: Instant, to: Instant) -> Duration {
        let calls = self.calls.borrow();
        let within = calls.iter().filter(|call| call.op == Op::Read && call.began >= from && call.began < to);
        let mut took: Vec<Duration> = within.map(|call| call.ended - call.began).collect();
        took.sort_unstable();
        took.get(took.len() * 99 / 100).copied().unwrap_or_default()
    }

    /// The longest time after `from` in which nothing of this kind succeeded.
    pub(crate) fn gap(&self, op: Op, from: Instant) -> Duration {
        let calls = self.calls.borrow();
        let ended = calls.iter().filter(|call| call.op == op && call.failed.is_none() && call.ended >= from);
        let mut ended: Vec<Instant> = ended.map(|call| call.ended).collect();
        ended.push(from);
        ended.sort_unstable();
        ended.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
    }

    /// Each acknowledged write was applied, and none twice. Returns how many there are.
    pub(crate) async fn applied_once(&self, url: &str) -> usize {
        let all = RangeRequest {
            key: PREFIX.into(),
            range_end: "unique0".into(),
            keys_only: true,
            ..RangeRequest::default()
        };
        let mut kv = connect(url).await.max_decoding_message_size(usize::MAX);
        let there = kv.range(all).await.expect("an answer").into_inner().kvs;
        let versions: BTreeMap<String, i64> = there
            .iter()
            .map(|kv| (String::from_utf8(kv.key.to_vec()).expect("our own keys"), kv.version))
            .collect();
        let twice: Vec<_> = versions.iter().filter(|(_, version)| **version != 1).collect();
        assert!(twice.is_empty(), "applied more than once: {twice:?}");
        let acknowledged = self.acknowledged.borrow();
        let lost: Vec<_> = acknowledged.iter().filter(|key| !versions.contains_key(*key)).collect();
        assert!(lost.is_empty(), "acknowledged and not there: {lost:?}");
        acknowledged.len()
    }
}
