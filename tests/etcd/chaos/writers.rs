//! Random writes through Keyward, each remembered with what was asked for and what was told.
//!
//! Owns: the keys, the calls. Must not know watches. Invariants: a value is written by one call only; an answer is believed word by
//! word; a call without one may or may not have been done.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use keyward::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use keyward::pb::etcdserverpb::{
    Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseRevokeRequest, PutRequest, RequestOp, TxnRequest,
    request_op, response_op,
};
use tokio::time::sleep;
use tonic::Status;

use super::door::{Door, within};
use super::ledger::{Branch, Change, Outcome, Write};
use super::record::{Range, text};
use super::seeded::Rng;

/// Where large values are.
pub(crate) const LARGE: &str = "/B/";
/// The right to this one comes and goes, for one user.
pub(crate) const REVOCABLE: &str = "/a/r/";
/// The right of the same user that stays.
pub(crate) const STEADY: &str = PREFIXES[0];
pub(crate) const PREFIXES: [&str; 9] =
    ["/a/p0/", "/a/p1/", "/a/p2/", "/a/p3/", "/a/p4/", "/a/p5/", "/a/p6/", "/a/p7/", REVOCABLE];
const KEYS: usize = 5;
/// Between two writes of one writer, in milliseconds.
const PAUSE: (usize, usize) = (40, 160);
/// Eight of these in one transaction, with as many previous values, are more than etcd puts into one piece of a fragmented answer.
const LARGE_VALUE: usize = 150_000;
const LARGE_KEYS: usize = 8;
/// One write in so many is a large one.
const LARGE_EVERY: usize = 400;
const LAST_TRIES: usize = 10;

/// What a writer did.
#[derive(Default)]
pub(crate) struct Written {
    pub(crate) writes: Vec<Write>,
    pub(crate) leases: usize,
    /// Errors by code and text.
    pub(crate) errors: BTreeMap<String, usize>,
}

/// One writer; two of a run never have the same number.
pub(crate) struct Writer {
    door: Door,
    number: usize,
    rng: Rng,
    values: usize,
    leases: Vec<i64>,
    written: Written,
}

/// All keys of a prefix.
pub(crate) fn keys(prefix: &str) -> Vec<String> {
    let count = if prefix == LARGE { LARGE_KEYS } else { KEYS };
    (0..count).map(|i| format!("{prefix}k{i}")).collect()
}

impl Writer {
    pub(crate) fn new(door: Door, number: usize, rng: Rng) -> Writer {
        Writer { door, number, rng, values: 0, leases: Vec::new(), written: Written::default() }
    }

    /// Writes until it is told to stop.
    pub(crate) async fn run(mut self, writing: Arc<AtomicBool>) -> Written {
        while writing.load(Ordering::Relaxed) {
            match self.rng.below(LARGE_EVERY) {
                0 => self.large().await,
                n if n < LARGE_EVERY / 3 => self.put(0).await,
                n if n < LARGE_EVERY * 2 / 3 => self.txn().await,
                n if n < LARGE_EVERY * 4 / 5 => self.delete().await,
                _ => self.leased().await,
            }
            let pause = PAUSE.0 + self.rng.below(PAUSE.1 - PAUSE.0);
            sleep(Duration::from_millis(pause as u64)).await;
        }
        self.written
    }

    fn key(&mut self) -> String {
        let prefix = *self.rng.one_of(&PREFIXES);
        self.rng.one_of(&keys(prefix)).clone()
    }

    fn value(&mut self) -> String {
        self.values += 1;
        format!("w{}-{}", self.number, self.values)
    }

    async fn put(&mut self, lease: i64) {
        let (key, value) = (self.key(), self.value());
        let request = PutRequest {
            key: key.clone().into(),
            value: value.clone().into(),
            lease,
            ..PutRequest::default()
        };
        let branch = Branch { puts: vec![(key.clone(), value.clone())], deletes: vec![] };
        let answer = within(self.door.kv().put(request)).await;
        let told = answer.map(|answer| {
            (answer.into_inner().header.map_or(0, |header| header.revision), vec![Change::Put(key, value)])
        });
        self.note("put", vec![branch], told);
    }

    async fn delete(&mut self) {
        let range = if self.rng.percent(25) {
            let prefix = *self.rng.one_of(&PREFIXES);
            Range { key: format!("{prefix}k1"), end: format!("{prefix}k3") }
        } else {
            Range::one(&self.key())
        };
        let branch = Branch { puts: vec![], deletes: vec![range.clone()] };
        let answer = within(self.door.kv().delete_range(deletion(&range))).await;
        let told = answer.map(|answer| {
            let answer = answer.into_inner();
            let changes = answer.prev_kvs.iter().map(|kv| Change::Delete(text(&kv.key))).collect();
            (answer.header.map_or(0, |header| header.revision), changes)
        });
        self.note("delete", vec![branch], told);
    }

    /// Several keys at once, some put and some deleted; which of two branches depends on a key.
    async fn txn(&mut self) {
        let all: Vec<String> = PREFIXES.iter().flat_map(|prefix| keys(prefix)).collect();
        let mut branches = Vec::new();
        for _ in 0..2 {
            let (count, value) = (2 + self.rng.below(5), self.value());
            let mut branch = Branch::default();
            for key in self.rng.some_of(&all, count) {
                if self.rng.percent(70) {
                    branch.puts.push((key, value.clone()));
                } else {
                    branch.deletes.push(Range::one(&key));
                }
            }
            branches.push(branch);
        }
        let key = self.key();
        self.commit("txn", Some(exists(&key)), branches).await;
    }

    async fn large(&mut self) {
        let filler = "x".repeat(LARGE_VALUE);
        let value = format!("{}{filler}", self.value());
        let puts = keys(LARGE).into_iter().map(|key| (key, value.clone())).collect();
        self.commit("large txn", None, vec![Branch { puts, deletes: vec![] }]).await;
    }

    async fn commit(&mut self, what: &str, compare: Option<Compare>, branches: Vec<Branch>) -> Option<i64> {
        let ops = |i: usize| branches.get(i).map(operations).unwrap_or_default();
        let request = TxnRequest { compare: compare.into_iter().collect(), success: ops(0), failure: ops(1) };
        let answer = within(self.door.kv().txn(request)).await;
        let told = answer.map(|answer| {
            let answer = answer.into_inner();
            let branch = &branches[usize::from(!answer.succeeded)];
            let deleted = answer.responses.iter().filter_map(|response| match &response.response {
                Some(response_op::Response::ResponseDeleteRange(deleted)) => Some(&deleted.prev_kvs),
                _ => None,
            });
            let put = |(key, value): &(String, String)| Change::Put(key.clone(), text(value.as_bytes()));
            let changes =
                branch.puts.iter().map(put).chain(deleted.flatten().map(|kv| Change::Delete(text(&kv.key))));
            (answer.header.map_or(0, |header| header.revision), changes.collect())
        });
        let short = |branch: Branch| Branch {
            puts: branch.puts.into_iter().map(|(key, value)| (key, text(value.as_bytes()))).collect(),
            ..branch
        };
        let revision = told.as_ref().ok().map(|(revision, _)| *revision);
        self.note(what, branches.into_iter().map(short).collect(), told);
        revision
    }

    /// A put that a lease takes back: by expiring, or when it is revoked.
    async fn leased(&mut self) {
        if !self.leases.is_empty() && self.rng.percent(50) {
            let lease = self.leases.swap_remove(self.rng.below(self.leases.len()));
            let ended = within(self.door.lease().lease_revoke(LeaseRevokeRequest { id: lease })).await;
            return self.told_error("lease revoke", ended.err());
        }
        let ttl = 2 + self.rng.below(4);
        let request = LeaseGrantRequest { ttl: i64::try_from(ttl).expect("small"), id: 0 };
        match within(self.door.lease().lease_grant(request)).await {
            Err(status) => self.told_error("lease grant", Some(status)),
            Ok(granted) => {
                let lease = granted.into_inner().id;
                self.written.leases += 1;
                self.put(lease).await;
                if self.rng.percent(50) {
                    self.put(lease).await;
                }
                self.leases.push(lease);
            }
        }
    }

    fn note(&mut self, what: &str, branches: Vec<Branch>, told: Result<(i64, Vec<Change>), Status>) {
        let outcome = match told {
            Ok((revision, changes)) => Outcome::Acknowledged { revision, changes },
            Err(status) => {
                self.told_error(what, Some(status));
                Outcome::Unknown
            }
        };
        self.written.writes.push(Write { branches, outcome });
    }

    fn told_error(&mut self, what: &str, error: Option<Status>) {
        if let Some(status) = error {
            let told = format!("{what}: {:?} {}", status.code(), status.message());
            *self.written.errors.entry(told).or_default() += 1;
        }
    }

    /// Puts every key and deletes every key, until both are told; returns the two revisions. Nothing may be written meanwhile.
    pub(crate) async fn last(mut self) -> (Written, i64, i64) {
        let all: Vec<String> = PREFIXES.iter().chain([&LARGE]).flat_map(|prefix| keys(prefix)).collect();
        for _ in 0..LAST_TRIES {
            let value = self.value();
            let puts = all.iter().map(|key| (key.clone(), value.clone())).collect();
            let put = self.commit("last puts", None, vec![Branch { puts, deletes: vec![] }]).await;
            let deletes = all.iter().map(|key| Range::one(key)).collect();
            let deleted = self.commit("last deletes", None, vec![Branch { puts: vec![], deletes }]).await;
            if let (Some(put), Some(deleted)) = (put, deleted) {
                return (self.written, put, deleted);
            }
        }
        panic!("the last keys could not be written: {:?}", self.written.errors);
    }
}

fn deletion(range: &Range) -> DeleteRangeRequest {
    DeleteRangeRequest { key: range.key.clone().into(), range_end: range.end.clone().into(), prev_kv: true }
}

/// Puts first, then deletions: [`Writer::commit`] counts on that order.
fn operations(branch: &Branch) -> Vec<RequestOp> {
    let put = |(key, value): &(String, String)| {
        let put =
            PutRequest { key: key.clone().into(), value: value.clone().into(), ..PutRequest::default() };
        RequestOp { request: Some(request_op::Request::RequestPut(put)) }
    };
    let delete =
        |range: &Range| RequestOp { request: Some(request_op::Request::RequestDeleteRange(deletion(range))) };
    branch.puts.iter().map(put).chain(branch.deletes.iter().map(delete)).collect()
}

fn exists(key: &str) -> Compare {
    Compare {
        result: CompareResult::Greater.into(),
        target: CompareTarget::Version.into(),
        key: key.to_owned().into(),
        target_union: Some(TargetUnion::Version(0)),
        ..Compare::default()
    }
}
