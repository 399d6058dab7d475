//! Direct watches on every member, from the first revision on, over all keys: what the history is made of.
//!
//! Owns: keeping one watch per member open through everything that happens to it. Must not know Keyward, nor what is done with the
//! record. Invariants: no fragments, so a response holds whole revisions, and a watch begins again after the last of them; nothing
//! that a member told is dropped or mended here.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCreateRequest, WatchRequest};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::Status;

use super::door::Door;
use super::history::{History, Revisions};
use super::record::{Event, TAIL};
use crate::harness::{Cluster, wait};
use crate::steady::unix_ms;

/// Before a member that does not answer is asked again.
const PAUSE: Duration = Duration::from_millis(100);
/// How old a compacted revision is at least, in milliseconds: longer than a member is away. A compaction up to the last word of a
/// member that is away would end every watch there whose range was quiet for a moment, whatever stands in between.
const LAG: i64 = 10_000;
/// For a member that was just started to catch up.
const SOON: Duration = Duration::from_secs(60);

/// The watches, ended on drop.
pub(crate) struct Oracle {
    members: Vec<Arc<Mutex<Told>>>,
    _tasks: JoinSet<()>,
}

/// What one member told.
#[derive(Default)]
struct Told {
    revisions: Revisions,
    /// When its newest revision changed, and to what.
    arrivals: Vec<(i64, i64)>,
    opened: usize,
    /// Ends that no death of a member explains.
    refused: Vec<String>,
}

impl Told {
    fn told_by(&self, at: i64) -> i64 {
        let next = self.arrivals.partition_point(|(time, _)| *time <= at);
        next.checked_sub(1).map_or(0, |i| self.arrivals[i].1)
    }

    fn last(&self) -> i64 {
        self.arrivals.last().map_or(0, |(_, revision)| *revision)
    }
}

impl Oracle {
    /// Watches every member of a cluster in which nothing was written yet.
    pub(crate) fn over(cluster: &Cluster) -> Oracle {
        let mut tasks = JoinSet::new();
        let members = (0..cluster.len()).map(|i| {
            let told = Arc::new(Mutex::new(Told::default()));
            tasks.spawn_local(follow(cluster.address(i), Arc::clone(&told)));
            told
        });
        let members = members.collect();
        Oracle { members, _tasks: tasks }
    }

    /// The highest revision that every member told.
    pub(crate) fn recorded(&self) -> i64 {
        self.members.iter().map(|member| held(member).last()).min().unwrap_or_default()
    }

    /// The highest revision that any member told.
    pub(crate) fn newest(&self) -> i64 {
        self.members.iter().map(|member| held(member).last()).max().unwrap_or_default()
    }

    /// The highest revision that may be compacted: all have recorded it, some time ago, and it deleted nothing. Older servers lose
    /// a deletion that is exactly at the compacted revision (etcd #18089, #19179), which is theirs to lose and would drown ours.
    pub(crate) fn compactable(&self) -> Option<i64> {
        let then = unix_ms() - LAG;
        let recorded = self.members.iter().map(|member| held(member).told_by(then)).min()?;
        let member = held(self.members.first()?);
        let puts = |(_, events): &(&i64, &Vec<Event>)| events.iter().all(|event| event.put);
        member.revisions.range(..=recorded).rev().find(puts).map(|(revision, _)| *revision)
    }

    /// How often a watch was opened again.
    pub(crate) fn reopened(&self) -> usize {
        self.members.iter().map(|member| held(member).opened.saturating_sub(1)).sum()
    }

    /// Waits until every member told `last`, and makes the history up to there.
    pub(crate) async fn history(&self, last: i64) -> Result<History, Vec<String>> {
        let all = async || (self.recorded() >= last).then_some(());
        wait::until(SOON, "every member tells the oracle the last revision", all).await;
        let refused: Vec<String> =
            self.members.iter().flat_map(|member| held(member).refused.clone()).collect();
        if !refused.is_empty() {
            return Err(refused);
        }
        let records: Vec<Revisions> =
            self.members.iter().map(|member| held(member).revisions.clone()).collect();
        let mut history = History::agreed(&records, last)?;
        let mut arrivals: Vec<(i64, i64)> =
            self.members.iter().flat_map(|member| held(member).arrivals.clone()).collect();
        arrivals.sort_unstable();
        let mut newest = 0;
        for (_, revision) in &mut arrivals {
            newest = newest.max(*revision);
            *revision = newest;
        }
        history.arrivals = arrivals;
        Ok(history)
    }
}

fn held(told: &Mutex<Told>) -> std::sync::MutexGuard<'_, Told> {
    told.lock().expect("no holder panics")
}

async fn follow(address: SocketAddr, told: Arc<Mutex<Told>>) {
    loop {
        if let Err(status) = watch(address, &told).await {
            let dead = matches!(status.code(), tonic::Code::Unavailable | tonic::Code::Unknown)
                || status.code() == tonic::Code::DeadlineExceeded;
            // A member that is told of a new token late refuses it once.
            let late = status.code() == tonic::Code::Unauthenticated;
            if !dead && !late {
                held(&told).refused.push(format!("{address}: {status:?}"));
            }
        }
        sleep(PAUSE).await;
    }
}

/// One watch, to its end.
async fn watch(address: SocketAddr, told: &Mutex<Told>) -> Result<(), Status> {
    let door = Door::login(address, "root").await?;
    let create = WatchCreateRequest {
        key: "\0".into(),
        range_end: TAIL.into(),
        start_revision: held(told).last() + 1,
        prev_kv: true,
        ..WatchCreateRequest::default()
    };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    // The request stays open, or etcd could take its end for ours.
    let requests = futures_util::stream::iter([create]);
    let requests = futures_util::StreamExt::chain(requests, futures_util::stream::pending());
    let mut answers = door.watch().watch(requests).await?.into_inner();
    while let Some(answer) = answers.message().await? {
        if answer.canceled {
            // Also what a member without our token's user yet says: before 3.5.6 it cannot be told from a denial.
            if answer.compact_revision != 0 {
                held(told).refused.push(format!("{address}: compacted: {answer:?}"));
            }
            return Ok(());
        }
        let mut told = held(told);
        if answer.created {
            told.opened += 1;
        }
        for event in answer.events.iter().map(Event::of) {
            let last = told.last();
            if event.revision <= last {
                told.refused.push(format!("{address}: {event:?} after {last}"));
            }
            told.revisions.entry(event.revision).or_default().push(event);
        }
        if let Some((newest, _)) = told.revisions.last_key_value()
            && *newest > told.last()
        {
            let newest = *newest;
            told.arrivals.push((unix_ms(), newest));
        }
    }
    Ok(())
}
