//! Shedding for the whole cluster: calls of low priority are refused while the cluster is under pressure.
//!
//! Owns: the pressure by the database size and by the members' latency, and the calls shed for it. Must not
//! know: members, how a pressure is measured, how a call is refused. Invariants: calls of high priority, and
//! calls that free what a cluster needs (LeaseRevoke, deletions, compaction, maintenance), are never shed;
//! writes are shed before reads of the same priority; a pressure goes away by itself while no call is
//! measured.
//!
//! The controller of the latency follows CoDel (<https://www.rfc-editor.org/rfc/rfc8289>): only the fastest
//! call of an interval counts, since a standing queue delays that call too, and a burst does not.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;

use super::exceeded::{Exceeded, LimitKind, LimitScope};
use keyward_config::usage_limits::Priority;
use keyward_config::{PolicyMode, ProtectionSettings};
use keyward_etcd::rpc::method::{Class, Effect, Method};
use keyward_etcd::rpc::schema::MessageId;
use keyward_telemetry::limit_metrics::LimitMetrics;

/// The interval of the controller.
pub const INTERVAL: Duration = Duration::from_millis(500);

/// Steps of the latency's pressure for one kind of calls: a tenth of the calls for each step.
const STEPS: u8 = 10;

/// The kinds of calls in the order of shedding.
const ORDER: [(Priority, CallEffect); 4] = [
    (Priority::Low, CallEffect::Writes),
    (Priority::Low, CallEffect::Reads),
    (Priority::Normal, CallEffect::Writes),
    (Priority::Normal, CallEffect::Reads),
];

/// The effect of a call, as far as shedding goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallEffect {
    /// Reads keys.
    Reads,
    /// Adds to the store.
    Writes,
}

impl CallEffect {
    /// The effect of a call of `method`; `None` for a call that is never shed.
    #[must_use]
    pub fn of(method: &Method, effect: Effect) -> Option<Self> {
        match (method.class, method.body) {
            (_, MessageId::DeleteRangeRequest | MessageId::UnlockRequest | MessageId::ResignRequest) => None,
            (Class::Read, _) | (_, MessageId::LeaderRequest) => Some(Self::Reads),
            (Class::Write, _) if effect == Effect::ReadOnly => Some(Self::Reads),
            (Class::Write | Class::Lock, _) | (_, MessageId::LeaseGrantRequest) => Some(Self::Writes),
            _ => None,
        }
    }
}

/// The pressure on the cluster, shared by all threads.
pub struct Shedding {
    mode: AtomicU8,
    /// The number of kinds of writes shed for the size of the database.
    db_pressure: AtomicU8,
    latency_pressure: AtomicU8,
    /// Nanoseconds of the fastest call in this interval.
    fastest: AtomicU64,
    /// Calls so far of each kind in [`ORDER`].
    turns: [AtomicU32; 4],
    db_gauge: Gauge,
    latency_gauge: Gauge,
}

impl Shedding {
    /// Without pressure.
    #[must_use]
    pub fn new(metrics: &LimitMetrics) -> Self {
        Self {
            mode: AtomicU8::new(PolicyMode::Off as u8),
            db_pressure: AtomicU8::new(0),
            latency_pressure: AtomicU8::new(0),
            fastest: AtomicU64::new(u64::MAX),
            turns: Default::default(),
            db_gauge: metrics.pressure("db_size"),
            latency_gauge: metrics.pressure("latency"),
        }
    }

    /// Notes the latency of a call that a member has answered.
    pub fn note_latency(&self, took: Duration) {
        if self.is_off() {
            return;
        }
        self.fastest.fetch_min(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Takes a step of the controller, once an interval. `db_share` is the largest part of its quota used by
    /// a member's database, in thousandths.
    pub fn step(&self, settings: &ProtectionSettings, db_share: Option<u32>) {
        self.mode.store(settings.mode as u8, Ordering::Relaxed);
        let fastest = self.fastest.swap(u64::MAX, Ordering::Relaxed);
        let fastest = (fastest != u64::MAX).then(|| Duration::from_nanos(fastest));
        let (db, latency) = match settings.mode {
            PolicyMode::Off => (0, 0),
            PolicyMode::Shadow | PolicyMode::Enforce => (
                db_pressure(settings.db_share, db_share),
                next_pressure(
                    self.latency_pressure.load(Ordering::Relaxed),
                    settings.latency_target,
                    fastest,
                ),
            ),
        };
        self.db_pressure.store(db, Ordering::Relaxed);
        self.latency_pressure.store(latency, Ordering::Relaxed);
        self.db_gauge.set(db.into());
        self.latency_gauge.set(latency.into());
    }

    /// The reason to shed a call; `None` for a call that goes on.
    #[must_use]
    pub fn excess(&self, priority: Priority, effect: CallEffect) -> Option<Exceeded> {
        let scope = LimitScope::Cluster;
        let kind = ORDER.iter().position(|kind| *kind == (priority, effect))?;
        let writes = ORDER.iter().take(kind + 1).filter(|(_, effect)| *effect == CallEffect::Writes).count();
        if effect == CallEffect::Writes && writes <= usize::from(self.db_pressure.load(Ordering::Relaxed)) {
            return Some(Exceeded { scope, limit: LimitKind::DbSize });
        }
        let pressure = self.latency_pressure.load(Ordering::Relaxed);
        let tenths = pressure.saturating_sub(STEPS * u8::try_from(kind).unwrap_or(0)).min(STEPS);
        if tenths == 0 {
            return None;
        }
        let turn = self.turns.get(kind)?.fetch_add(1, Ordering::Relaxed);
        (turn % u32::from(STEPS) < u32::from(tenths)).then_some(Exceeded { scope, limit: LimitKind::Latency })
    }

    /// True while nothing is shed or counted.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.mode.load(Ordering::Relaxed) == PolicyMode::Off as u8
    }

    /// True if calls are only counted.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.mode.load(Ordering::Relaxed) == PolicyMode::Shadow as u8
    }

    /// The pressures by the database size and by the latency; 0 is none.
    #[must_use]
    pub fn pressures(&self) -> (u8, u8) {
        (self.db_pressure.load(Ordering::Relaxed), self.latency_pressure.load(Ordering::Relaxed))
    }
}

/// The number of kinds of writes to shed for the size of the database.
fn db_pressure(from: u32, share: Option<u32>) -> u8 {
    let middle = from + 1000_u32.saturating_sub(from) / 2;
    match share {
        Some(share) if share >= middle => 2,
        Some(share) if share >= from => 1,
        _ => 0,
    }
}

/// The next pressure of the latency: a step up after an interval in which the fastest call was too slow,
/// otherwise a step down.
fn next_pressure(pressure: u8, target: Option<Duration>, fastest: Option<Duration>) -> u8 {
    let most = STEPS * u8::try_from(ORDER.len()).unwrap_or(0);
    match (target, fastest) {
        (None, _) => 0,
        (Some(target), Some(fastest)) if fastest > target => (pressure + 1).min(most),
        _ => pressure.saturating_sub(1),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use keyward_etcd::rpc::method::lookup;
    use keyward_telemetry::metrics::Metrics;

    const TARGET: Duration = Duration::from_millis(100);

    fn settings(mode: PolicyMode) -> ProtectionSettings {
        ProtectionSettings { mode, latency_target: Some(TARGET), ..ProtectionSettings::default() }
    }

    fn shedding() -> Shedding {
        Shedding::new(&Metrics::new(Vec::new()).limits)
    }

    /// The shed calls of each kind, of a hundred.
    fn shed(shedding: &Shedding) -> [usize; 4] {
        ORDER.map(|(priority, effect)| {
            (0..100).filter(|_| shedding.excess(priority, effect).is_some()).count()
        })
    }

    #[test]
    fn a_full_database_sheds_writes_by_priority() {
        let shedding = shedding();
        for (share, low, normal) in
            [(None, 0, 0), (Some(799), 0, 0), (Some(800), 100, 0), (Some(900), 100, 100)]
        {
            shedding.step(&settings(PolicyMode::Enforce), share);
            assert_eq!(shed(&shedding), [low, 0, normal, 0], "{share:?}");
            assert_eq!(shedding.excess(Priority::High, CallEffect::Writes), None);
        }
        shedding.step(&settings(PolicyMode::Off), Some(999));
        assert_eq!(shed(&shedding), [0; 4]);
    }

    #[test]
    fn slow_members_shed_more_and_more_and_fewer_again() {
        let shedding = shedding();
        let slow = || {
            shedding.note_latency(TARGET * 2);
            shedding.step(&settings(PolicyMode::Enforce), None);
        };
        shedding.step(&settings(PolicyMode::Enforce), None);
        for _ in 0..3 {
            slow();
        }
        assert_eq!(shed(&shedding), [30, 0, 0, 0]);
        for _ in 0..20 {
            slow();
        }
        assert_eq!(shed(&shedding), [100, 100, 30, 0]);
        for _ in 0..100 {
            slow();
        }
        assert_eq!(shed(&shedding), [100; 4]);
        assert_eq!(shedding.excess(Priority::High, CallEffect::Reads), None);
        // Without a measured call the pressure goes down, so that a call can be measured.
        for _ in 0..40 {
            shedding.step(&settings(PolicyMode::Enforce), None);
        }
        assert_eq!(shed(&shedding), [0; 4]);
    }

    #[test]
    fn calls_that_free_or_repair_are_never_shed() {
        let effect = |path: &str| {
            let method = lookup(path).expect("a row");
            CallEffect::of(method, method.effect)
        };
        for path in [
            "/etcdserverpb.Lease/LeaseRevoke",
            "/etcdserverpb.Lease/LeaseKeepAlive",
            "/etcdserverpb.Lease/LeaseTimeToLive",
            "/etcdserverpb.KV/DeleteRange",
            "/etcdserverpb.KV/Compact",
            "/etcdserverpb.Maintenance/Defragment",
            "/etcdserverpb.Maintenance/Alarm",
            "/etcdserverpb.Auth/Authenticate",
            "/etcdserverpb.Cluster/MemberList",
            "/etcdserverpb.Watch/Watch",
            "/v3lockpb.Lock/Unlock",
            "/grpc.health.v1.Health/Check",
        ] {
            assert_eq!(effect(path), None, "{path}");
        }
        for path in ["/etcdserverpb.KV/Put", "/etcdserverpb.Lease/LeaseGrant", "/v3lockpb.Lock/Lock"] {
            assert_eq!(effect(path), Some(CallEffect::Writes), "{path}");
        }
        for path in ["/etcdserverpb.KV/Range", "/v3electionpb.Election/Leader"] {
            assert_eq!(effect(path), Some(CallEffect::Reads), "{path}");
        }
        let txn = lookup("/etcdserverpb.KV/Txn").expect("a row");
        assert_eq!(CallEffect::of(txn, Effect::ReadOnly), Some(CallEffect::Reads));
    }

    proptest! {
        #[test]
        fn a_burst_sheds_nothing_and_a_fast_cluster_recovers(
            intervals in proptest::collection::vec(proptest::collection::vec(1u64..1000, 0..8), 0..200),
        ) {
            let shedding = shedding();
            shedding.step(&settings(PolicyMode::Enforce), None);
            let (mut pressure, mut model) = (0, 0i32);
            for calls in intervals {
                calls.iter().for_each(|millis| shedding.note_latency(Duration::from_millis(*millis)));
                shedding.step(&settings(PolicyMode::Enforce), None);
                let is_slow = calls.iter().min().is_some_and(|fastest| *fastest > 100);
                model = (model + if is_slow { 1 } else { -1 }).clamp(0, 40);
                pressure = i32::from(shedding.pressures().1);
                prop_assert_eq!(pressure, model);
            }
            for _ in 0..pressure {
                shedding.note_latency(TARGET);
                shedding.step(&settings(PolicyMode::Enforce), None);
            }
            prop_assert_eq!(shed(&shedding), [0; 4]);
        }
    }
}
