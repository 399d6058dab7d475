//! What `/metrics` shows of each member, put down whole whenever somebody looks.
//!
//! Owns: names, help texts, units. Must not know where the figures come from. Invariant: a member that is gone is not shown.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::telemetry::metrics::{One, one};

type Gauges = Family<One, Gauge>;

/// One member's figures at one moment; what it does not tell is `None`.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// As etcd writes it.
    pub member: String,
    /// As in the member list.
    pub name: String,
    /// etcd's.
    pub version: String,
    /// Whether it gets calls.
    pub ready: bool,
    /// Whether it leads.
    pub leader: bool,
    /// Whether it is ejected.
    pub ejected: bool,
    /// How often it was.
    pub ejections: u64,
    /// How long it takes to answer, smoothed.
    pub latency: Option<Duration>,
    /// Short calls that it was sent.
    pub calls: u64,
    /// Those that wait for its answer.
    pub waiting: u64,
    /// Those that wait for their turn to be sent to it.
    pub queued: u64,
    /// How many had to, and for how long all together.
    pub queue_waits: (u64, Duration),
    /// Those that were refused since they had none.
    pub refused: u64,
    /// Calls and streams that waited for a connection with room, and for how long all together.
    pub seat_waits: (u64, Duration),
    /// Streams that it carries: of watches, of keepalives, others.
    pub streams: [u64; 3],
    /// Raft entries that it is behind.
    pub lag: u64,
    /// Its raft term.
    pub term: u64,
    /// What it complains about, alarms too.
    pub errors: Option<u64>,
    /// Bytes of its database file, and those of them that are in use.
    pub db: Option<(u64, u64)>,
    /// Its quota in bytes.
    pub quota: Option<u64>,
}

/// How many waited, and for how long.
struct Waits {
    ended: Family<One, Counter>,
    took: Family<One, Counter<f64, AtomicU64>>,
}

impl Waits {
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

    fn put(&self, label: &One, (ended, took): (u64, Duration)) {
        let counter = self.ended.get_or_create(label);
        counter.inc_by(ended.saturating_sub(counter.get()));
        drop(counter);
        let counter = self.took.get_or_create(label);
        counter.inc_by((took.as_secs_f64() - counter.get()).max(0.0));
    }
}

/// The families.
pub struct MemberFigures {
    ready: Gauges,
    leader: Gauges,
    ejected: Gauges,
    ejections: Family<One, Counter>,
    latency: Family<One, Gauge<f64, AtomicU64>>,
    calls: Family<One, Counter>,
    waiting: Gauges,
    queued: Gauges,
    queue_waits: Waits,
    refused: Family<One, Counter>,
    seat_waits: Waits,
    streams: Family<[(&'static str, String); 2], Gauge>,
    lag: Gauges,
    term: Gauges,
    errors: Gauges,
    size: Gauges,
    in_use: Gauges,
    quota: Gauges,
    info: Family<[(&'static str, String); 3], Gauge>,
}

impl MemberFigures {
    /// Registers them. `ready` and `leader` are registered by others, who follow them.
    pub(super) fn registered(registry: &mut Registry, ready: Gauges, leader: Gauges) -> Self {
        let mut gauges = |name: &str, help: &str, unit: Option<Unit>| {
            let gauges = Gauges::default();
            match unit {
                Some(unit) => registry.register_with_unit(name, help, unit, gauges.clone()),
                None => registry.register(name, help, gauges.clone()),
            }
            gauges
        };
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
            (Family::default(), Family::<One, Gauge<f64, AtomicU64>>::default(), Family::default());
        let streams = Family::default();
        registry.register("member_streams", "Open streams to the member", Family::clone(&streams));
        let calls = Family::<One, Counter>::default();
        registry.register("member_calls", "Short calls that the member was sent", calls.clone());
        let refused = Family::<One, Counter>::default();
        registry.register("member_calls_refused", "Calls that had no turn at the member", refused.clone());
        let queue_waits = Waits::registered(registry, "member_queue", "for their turn at the member");
        let seat_waits =
            Waits::registered(registry, "member_stream", "for a connection to the member with room");
        registry.register("member_ejections", "Times that the member was ejected", Family::clone(&ejections));
        let help = "How long the member takes to answer, smoothed";
        registry.register_with_unit("member_latency", help, Unit::Seconds, latency.clone());
        registry.register("member_info", "1, with the member's name and version", Family::clone(&info));
        Self {
            ready,
            leader,
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

    /// Puts down the figures of all members.
    pub fn put(&self, members: &[Figures]) {
        self.queued.clear();
        let gauges = [&self.ejected, &self.waiting, &self.lag, &self.term, &self.errors, &self.size];
        gauges.into_iter().chain([&self.in_use, &self.quota]).for_each(Family::clear);
        self.latency.clear();
        self.streams.clear();
        self.info.clear();
        members.iter().for_each(|figures| self.put_one(figures));
    }

    fn put_one(&self, figures: &Figures) {
        let label = one("member", figures.member.as_str());
        let set = |gauges: &Gauges, value: Option<u64>| {
            if let Some(value) = value {
                gauges.get_or_create(&label).set(i64::try_from(value).unwrap_or(i64::MAX));
            }
        };
        set(&self.ready, Some(figures.ready.into()));
        set(&self.leader, Some(figures.leader.into()));
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
        let count = |counters: &Family<One, Counter>, value: u64| {
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
