//! The progress that `progress_notify` asks for, which comes by a clock and so is no part of the scripts.
//!
//! Owns: which watches a tick tells, and with what. Must not know when a tick comes. Invariant: what does not come is shown by what comes in
//! its place: a stream has one ticker for all its watches.

use std::collections::BTreeMap;

use keyward::pb::etcdserverpb::{
    WatchCancelRequest, WatchCreateRequest, WatchResponse, watch_request::RequestUnion,
};

use crate::{
    harness::{binary::Version, every_version},
    model::store::Op,
};

use super::{
    flavor,
    pair::Pair,
    server::{Server, Who},
    transcript::shown,
};

/// The least that etcd takes.
const INTERVAL: &str = "100ms";
/// How many ticks are looked at, each time.
const TICKS: usize = 3;
/// How often the rule that events stand for the next progress is tried.
const ROUNDS: usize = 6;

/// The watches, by id.
const BUSY: i64 = 1;
const QUIET: i64 = 2;
const FUTURE: i64 = 3;
const NOT_ASKED: i64 = 4;
const COMPACTED: i64 = 5;
const CANCELED: i64 = 6;
const FILTERED: i64 = 7;

#[tokio::test]
async fn a_tick_tells_whom_the_model_says() {
    for version in every_version() {
        let mut seen = Seen::start(&version).await;
        let due = seen.due();
        let future = !flavor(&version).no_future_progress;
        assert_eq!(due.contains_key(&FUTURE), future, "the model on {version}");
        assert!([BUSY, QUIET, FILTERED].iter().all(|id| due.contains_key(id)), "the model on {version}");
        seen.ticks(&due).await.unwrap_or_else(|what| panic!("etcd {version}: {what}"));
        for round in 0..ROUNDS {
            seen.events_stand_for_progress()
                .await
                .unwrap_or_else(|what| panic!("etcd {version}, round {round}: {what}"));
        }
        let due = seen.due();
        assert!(due.contains_key(&FUTURE), "its revision has come");
        seen.ticks(&due).await.unwrap_or_else(|what| panic!("etcd {version}, at the end: {what}"));
    }
}

struct Seen {
    server: Server,
    pair: Pair,
}

impl Seen {
    /// A stream with watches of all kinds, at rest.
    async fn start(version: &Version) -> Seen {
        let experimental = if version.at_least("3.6") { "" } else { "experimental-" };
        let flag = format!("--{experimental}watch-progress-notify-interval={INTERVAL}");
        let server = Server::start(version, flavor(version), &[flag]).await;
        let mut pair = Pair::open(&server, Who::Root);
        let future = server.store.revision() + 2;
        let watch = |watch_id, key: &'static str| WatchCreateRequest {
            watch_id,
            key: key.into(),
            progress_notify: true,
            ..WatchCreateRequest::default()
        };
        let creates = [
            watch(BUSY, "/a/busy"),
            watch(QUIET, "/a/quiet"),
            WatchCreateRequest { start_revision: future, ..watch(FUTURE, "/a/future") },
            WatchCreateRequest { progress_notify: false, ..watch(NOT_ASKED, "/a/busy") },
            WatchCreateRequest { start_revision: 1, ..watch(COMPACTED, "/a/busy") },
            watch(CANCELED, "/a/busy"),
            WatchCreateRequest { filters: vec![0, 1], ..watch(FILTERED, "/a/busy") },
        ];
        creates.into_iter().for_each(|create| pair.ask(RequestUnion::CreateRequest(create)));
        pair.ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: CANCELED }));
        let mut seen = Seen { server, pair };
        let asked = seen.modelled();
        seen.others(asked.len()).await;
        seen
    }

    /// What the model says without a tick.
    fn modelled(&mut self) -> Vec<WatchResponse> {
        self.pair.model.rest(&self.server.store, &self.server.member, &|_| Ok(()));
        std::iter::from_fn(|| self.pair.model.pop()).collect()
    }

    /// Reads so many answers that are no progress.
    async fn others(&mut self, count: usize) -> Vec<WatchResponse> {
        let mut others = Vec::new();
        while others.len() < count {
            let answer = self.next().await.expect("etcd goes on");
            if !is_progress(&answer) {
                others.push(answer);
            }
        }
        others
    }

    async fn next(&mut self) -> Result<WatchResponse, String> {
        self.pair.next().await?.ok_or_else(|| "nothing came".to_owned())
    }

    /// What one tick tells, when there were no events since the last.
    fn due(&mut self) -> BTreeMap<i64, WatchResponse> {
        self.pair.model.timed_progress(&self.server.member);
        self.modelled();
        self.pair.model.timed_progress(&self.server.member);
        self.modelled().into_iter().map(|answer| (answer.watch_id, answer)).collect()
    }

    /// Some ticks tell exactly this, each watch as often as another.
    async fn ticks(&mut self, due: &BTreeMap<i64, WatchResponse>) -> Result<(), String> {
        let mut told: BTreeMap<i64, usize> = BTreeMap::new();
        for _ in 0..TICKS * due.len() {
            let answer = self.next().await?;
            if due.get(&answer.watch_id) != Some(&answer) {
                let modelled: Vec<_> = due.values().cloned().collect();
                return Err(format!("told\n{}the model\n{}", shown(&[answer]), shown(&modelled)));
            }
            *told.entry(answer.watch_id).or_default() += 1;
        }
        // The first and the last tick may be seen in part.
        let even = due.keys().all(|id| told.get(id).is_some_and(|n| n.abs_diff(TICKS) <= 1));
        if even { Ok(()) } else { Err(format!("in {TICKS} ticks: {told:?}")) }
    }

    /// After events a watch is left out of one tick: between them and its next progress there is one tick of the others at least, and
    /// two at most.
    async fn events_stand_for_progress(&mut self) -> Result<(), String> {
        self.server.write(&[Op::Put { key: "/a/busy".into(), value: "1".into(), lease: 0 }]).await?;
        while self.server.member.apply(&self.server.store, [&mut self.pair.model]).is_some() {}
        let modelled = self.modelled();
        let mut told = self.others(modelled.len()).await;
        told.sort_by_key(|answer| answer.watch_id);
        if told != modelled {
            return Err(format!("told\n{}the model\n{}", shown(&told), shown(&modelled)));
        }
        self.pair.model.timed_progress(&self.server.member);
        let left_out = !self.modelled().iter().any(|answer| answer.watch_id == BUSY);
        // Within a tick the order is free.
        let ticks = if left_out { 1..=2 } else { 0..=1 };
        let mut quiet = 0;
        loop {
            match self.next().await?.watch_id {
                QUIET => quiet += 1,
                BUSY if ticks.contains(&quiet) => return Ok(()),
                BUSY => return Err(format!("progress after {quiet} ticks, the model says {ticks:?}")),
                _ => {}
            }
        }
    }
}

fn is_progress(answer: &WatchResponse) -> bool {
    answer.events.is_empty() && !answer.created && !answer.canceled
}
