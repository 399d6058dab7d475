//! The per-member metrics of `/metrics`, written as a whole at every scrape.
//!
//! Owns: names, help texts, units. Must not know: the source of the values. Invariant: a removed member is
//! not shown.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::single_label::{SingleLabel, one};

/// etcd's alarms.
pub const ALARMS: [&str; 2] = ["nospace", "corrupt"];

type Gauges = Family<SingleLabel, Gauge>;

/// A member's metric values at a moment; `None` for values not reported by the member.
#[derive(Clone, Debug, Default)]
pub struct MemberSample {
    /// The member ID, in etcd's hexadecimal form.
    pub member: String,
    /// The name in the member list.
    pub name: String,
    /// The etcd version.
    pub version: String,
    /// True if the member receives calls.
    pub ready: bool,
    /// True if the member is the leader.
    pub leader: bool,
    /// True if the member is a learner.
    pub learner: bool,
    /// The alarms raised for the member, in etcd's words in lower case.
    pub alarms: Vec<&'static str>,
    /// True if the member is ejected.
    pub ejected: bool,
    /// The number of ejections.
    pub ejections: u64,
    /// The smoothed latency of the member's answers.
    pub latency: Option<Duration>,
    /// Short calls sent to the member.
    pub calls: u64,
    /// Short calls in flight at the member.
    pub waiting: u64,
    /// Calls queued for an in-flight slot at the member.
    pub queued: u64,
    /// The number of queued calls so far, and their total queueing time.
    pub queue_waits: (u64, Duration),
    /// Calls refused because no in-flight slot became free.
    pub refused: u64,
    /// Calls and streams delayed for lack of connection capacity, and their total delay.
    pub seat_waits: (u64, Duration),
    /// Open streams at the member: watch, keepalive, other.
    pub streams: [u64; 3],
    /// The lag behind the leader in raft entries.
    pub lag: u64,
    /// The member's raft term.
    pub term: u64,
    /// The number of errors reported by the member, alarms included.
    pub errors: Option<u64>,
    /// The size of the database file in bytes, and the bytes in use.
    pub db: Option<(u64, u64)>,
    /// The quota in bytes.
    pub quota: Option<u64>,
}

/// Counters of waits: how many, and for how long.
struct WaitCounters {
    ended: Family<SingleLabel, Counter>,
    took: Family<SingleLabel, Counter<f64, AtomicU64>>,
}

impl WaitCounters {
    fn registered(registry: &mut Registry, name: &str, for_what: &str) -> Self {
        let waits = Self { ended: Family::default(), took: Family::default() };
        registry.register(
            format!("{name}_waits"),
            format!("Calls that waited {for_what}"),
            waits.ended.clone(),
        );
        let help = format!("How long calls waited {for_what}, all together");
        registry.register_with_unit(format!("{name}_wait"), help, Unit::Seconds, waits.took.clone());
        waits
    }

    fn put(&self, label: &SingleLabel, (ended, took): (u64, Duration)) {
        let counter = self.ended.get_or_create(label);
        counter.inc_by(ended.saturating_sub(counter.get()));
        drop(counter);
        let counter = self.took.get_or_create(label);
        counter.inc_by((took.as_secs_f64() - counter.get()).max(0.0));
    }
}

/// The metric families with a `member` label.
pub struct MemberMetrics {
    ready: Gauges,
    leader: Gauges,
    learner: Gauges,
    alarms: Family<[(&'static str, String); 2], Gauge>,
    ejected: Gauges,
    ejections: Family<SingleLabel, Counter>,
    latency: Family<SingleLabel, Gauge<f64, AtomicU64>>,
    calls: Family<SingleLabel, Counter>,
    waiting: Gauges,
    queued: Gauges,
    queue_waits: WaitCounters,
    refused: Family<SingleLabel, Counter>,
    seat_waits: WaitCounters,
    streams: Family<[(&'static str, String); 2], Gauge>,
    lag: Gauges,
    term: Gauges,
    errors: Gauges,
    size: Gauges,
    in_use: Gauges,
    quota: Gauges,
    info: Family<[(&'static str, String); 3], Gauge>,
}

impl MemberMetrics {
    /// Registers the metric families. `ready` and `leader` are already registered, because other code reads
    /// both.
    pub(super) fn registered(registry: &mut Registry, ready: Gauges, leader: Gauges) -> Self {
        let mut gauges = |name: &str, help: &str, unit: Option<Unit>| {
            let gauges = Gauges::default();
            match unit {
                Some(unit) => registry.register_with_unit(name, help, unit, gauges.clone()),
                None => registry.register(name, help, gauges.clone()),
            }
            gauges
        };
        let learner = gauges("member_learner", "1 for members that do not vote", None);
        let ejected = gauges("member_ejected", "1 for members that are ejected", None);
        let help = "Short calls that wait for the member's answer";
        let waiting = gauges("member_calls_in_flight", help, None);
        let queued =
            gauges("member_calls_queued", "Calls that wait for their turn to be sent to the member", None);
        let lag = gauges("member_lag_entries", "Raft entries that the member is behind", None);
        let term = gauges("member_raft_term", "The member's raft term", None);
        let errors = gauges("member_errors", "Alarms and other errors that the member reports", None);
        let size = gauges("member_db_size", "Size of the member's database file", Some(Unit::Bytes));
        let in_use = gauges("member_db_in_use", "The part of it that is in use", Some(Unit::Bytes));
        let quota = gauges("member_db_quota", "The member's quota", Some(Unit::Bytes));
        let (ejections, latency, info) =
            (Family::default(), Family::<SingleLabel, Gauge<f64, AtomicU64>>::default(), Family::default());
        let alarms = Family::default();
        registry.register("member_alarm", "1 for a raised alarm of the member", Family::clone(&alarms));
        let streams = Family::default();
        registry.register("member_streams", "Open streams to the member", Family::clone(&streams));
        let calls = Family::<SingleLabel, Counter>::default();
        registry.register("member_calls", "Short calls that the member was sent", calls.clone());
        let refused = Family::<SingleLabel, Counter>::default();
        registry.register("member_calls_refused", "Calls that had no turn at the member", refused.clone());
        let queue_waits = WaitCounters::registered(registry, "member_queue", "for their turn at the member");
        let seat_waits =
            WaitCounters::registered(registry, "member_stream", "for a connection to the member with room");
        registry.register("member_ejections", "Times that the member was ejected", Family::clone(&ejections));
        let help = "How long the member takes to answer, smoothed";
        registry.register_with_unit("member_latency", help, Unit::Seconds, latency.clone());
        registry.register("member_info", "1, with the member's name and version", Family::clone(&info));
        Self {
            ready,
            leader,
            learner,
            alarms,
            ejected,
            ejections,
            latency,
            calls,
            waiting,
            queued,
            queue_waits,
            refused,
            seat_waits,
            streams,
            lag,
            term,
            errors,
            size,
            in_use,
            quota,
            info,
        }
    }

    /// Writes the values of all members.
    pub fn put(&self, members: &[MemberSample]) {
        self.queued.clear();
        let gauges = [&self.ejected, &self.waiting, &self.lag, &self.term, &self.errors, &self.size];
        gauges.into_iter().chain([&self.in_use, &self.quota]).for_each(Family::clear);
        self.latency.clear();
        self.streams.clear();
        self.alarms.clear();
        self.learner.clear();
        self.info.clear();
        members.iter().for_each(|figures| self.put_one(figures));
    }

    fn put_one(&self, figures: &MemberSample) {
        let label = one("member", figures.member.as_str());
        let set = |gauges: &Gauges, value: Option<u64>| {
            if let Some(value) = value {
                gauges.get_or_create(&label).set(i64::try_from(value).unwrap_or(i64::MAX));
            }
        };
        set(&self.ready, Some(figures.ready.into()));
        set(&self.leader, Some(figures.leader.into()));
        set(&self.learner, Some(figures.learner.into()));
        for alarm in ALARMS {
            let labels = [("member", figures.member.clone()), ("alarm", alarm.to_owned())];
            self.alarms.get_or_create(&labels).set(figures.alarms.contains(&alarm).into());
        }
        set(&self.ejected, Some(figures.ejected.into()));
        set(&self.waiting, Some(figures.waiting));
        set(&self.queued, Some(figures.queued));
        for (kind, count) in ["watch", "keepalive", "other"].into_iter().zip(figures.streams) {
            let labels = [("member", figures.member.clone()), ("kind", kind.to_owned())];
            self.streams.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        set(&self.lag, Some(figures.lag));
        set(&self.term, Some(figures.term).filter(|term| *term > 0));
        set(&self.errors, figures.errors);
        set(&self.size, figures.db.map(|(size, _)| size));
        set(&self.in_use, figures.db.map(|(_, in_use)| in_use));
        set(&self.quota, figures.quota);
        if let Some(latency) = figures.latency {
            self.latency.get_or_create(&label).set(latency.as_secs_f64());
        }
        let count = |counters: &Family<SingleLabel, Counter>, value: u64| {
            let counter = counters.get_or_create(&label);
            counter.inc_by(value.saturating_sub(counter.get()));
        };
        count(&self.ejections, figures.ejections);
        count(&self.calls, figures.calls);
        count(&self.refused, figures.refused);
        self.queue_waits.put(&label, figures.queue_waits);
        self.seat_waits.put(&label, figures.seat_waits);
        let info = [
            ("member", figures.member.clone()),
            ("name", figures.name.clone()),
            ("version", figures.version.clone()),
        ];
        self.info.get_or_create(&info).set(1);
    }
}
