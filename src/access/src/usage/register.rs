//! The limiters of all peers, roles and listeners, shared by the shards.
//!
//! Owns: finding the limits of a caller, and the memory of limiters. Must not know: calls, sockets.
//! Invariants: a limiter is found by the identified peer, never by a text that the client chooses freely; a
//! limiter with a caller, or released less than a minute ago, is never forgotten, unless more peers than
//! 65,536 came within the minute; limiters without a caller are bounded in number.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::caller_usage::{AnswerCap, CallerUsage, MEASURED_AT_ONCE, RangeCap};
use super::exceeded::{LimitScope, RefusalCounters};
use super::limiter::Limiter;
use super::shedding::Shedding;
use super::suspect_reads::SuspectReads;
use keyward_config::policy_document::{PolicyDocument, PolicyRole};
use keyward_config::usage_limits::{OnExceed, UsageLimits};
use keyward_config::{PolicyMode, PolicySettings};
use keyward_etcd::identity::Peer;
use keyward_telemetry::limit_metrics::LimitMetrics;

/// Most limiters before idle limiters are forgotten. A limiter takes some 500 bytes.
const MOST_LIMITERS: usize = 65_536;

/// The time after which an unused limiter may be forgotten. A bucket has long been full again by then, unless
/// its burst is above a minute's calls.
const IDLE: Duration = Duration::from_secs(60);

/// The limiters.
pub struct UsageRegister {
    counters: Arc<RefusalCounters>,
    limiters: Mutex<LimiterTable>,
    /// The number of limiters, for metrics.
    count: Gauge,
    most: usize,
    /// Shedding for the whole cluster.
    pub shedding: Shedding,
    /// The reads that may have ended a member.
    pub suspect_reads: SuspectReads,
}

#[derive(Default)]
struct LimiterTable {
    by_key: HashMap<LimiterKey, Arc<Limiter>>,
    /// The table is swept at this size.
    sweep_at: usize,
}

/// A limit with its present use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LimitUse {
    /// `replica`, `listener`, `role` or `peer`.
    pub scope: &'static str,
    /// The listener, the role, the peer, or the address.
    pub name: Option<String>,
    /// The limit's name.
    pub limit: String,
    /// The present use; null for a rate.
    pub used: Option<u64>,
    /// The limit.
    pub allowed: u64,
}

/// The roles of a caller, as far as limits tell callers apart, as indexes in the rules in force.
#[derive(Clone, Copy, Debug, Default)]
pub struct LimitingRoles<'a> {
    /// The roles of the caller.
    pub own: &'a [usize],
    /// Further roles, of a login that nothing proved.
    pub claimed: &'a [usize],
}

/// Tells limiters apart. A peer with other roles, as on another listener, has another limiter: the limits
/// differ.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum LimiterKey {
    Peer(Box<str>, Box<[Arc<str>]>),
    Role(Arc<str>),
    Listener(Arc<str>),
}

impl LimiterKey {
    fn scope(&self) -> LimitScope {
        match self {
            Self::Peer(..) => LimitScope::Peer,
            Self::Role(_) => LimitScope::Role,
            Self::Listener(_) => LimitScope::Listener,
        }
    }
}

impl LimiterKey {
    fn name(&self) -> &str {
        match self {
            Self::Peer(name, _) => name,
            Self::Role(name) | Self::Listener(name) => name,
        }
    }
}

impl UsageRegister {
    /// A register without limiters.
    #[must_use]
    pub fn new(metrics: &LimitMetrics) -> Self {
        Self::with_capacity(metrics, MOST_LIMITERS)
    }

    fn with_capacity(metrics: &LimitMetrics, most: usize) -> Self {
        Self {
            counters: Arc::new(RefusalCounters::new(metrics)),
            limiters: Mutex::new(LimiterTable { by_key: HashMap::new(), sweep_at: most }),
            count: metrics.limiters.clone(),
            most,
            shedding: Shedding::new(metrics),
            suspect_reads: SuspectReads::default(),
        }
    }

    /// The limits of all limiters with their use, by peer, role and listener.
    #[must_use]
    pub fn limits_in_use(&self) -> Vec<LimitUse> {
        let limiters: Vec<(LimiterKey, Arc<Limiter>)> = {
            let table = self.limiters.lock().unwrap_or_else(PoisonError::into_inner);
            table.by_key.iter().map(|(key, limiter)| (key.clone(), Arc::clone(limiter))).collect()
        };
        let rows = limiters.iter().flat_map(|(key, limiter)| {
            limiter.limits_in_use().into_iter().map(|(kind, used, allowed)| LimitUse {
                scope: key.scope().name(),
                name: Some(key.name().escape_debug().to_string()),
                limit: kind.name().to_owned(),
                used,
                allowed,
            })
        });
        rows.collect()
    }

    /// The counters of refusals.
    #[must_use]
    pub fn counters(&self) -> &RefusalCounters {
        &self.counters
    }

    /// The limits of a caller with these roles, given as indexes in `document`, the rules in force; `None`
    /// without any limit. A claimed role lowers limits, and raises none.
    #[must_use]
    pub fn usage_of(
        &self,
        settings: &PolicySettings,
        document: &PolicyDocument,
        peer: &Peer,
        roles: LimitingRoles<'_>,
        listener: &str,
    ) -> Option<Rc<CallerUsage>> {
        if settings.limits_mode == PolicyMode::Off {
            return None;
        }
        let named = |roles: &[usize]| -> Vec<&PolicyRole> {
            roles.iter().filter_map(|at| document.roles.get(*at)).collect()
        };
        let (proved, claimed) = (named(roles.own), named(roles.claimed));
        let strictest = |all: UsageLimits, role: &&PolicyRole| all.strictest(&role.limits);
        let own = proved.iter().fold(UsageLimits::default(), strictest).or(&settings.peer_limits);
        let own = claimed.iter().fold(own, strictest);
        let roles: Vec<&PolicyRole> = proved.into_iter().chain(claimed).collect();
        let with_limits = || roles.iter().filter(|role| !role.limits.is_empty());
        let mut scopes: Vec<(LimiterKey, &UsageLimits)> = Vec::new();
        if !own.is_empty() {
            let names = with_limits().map(|role| Arc::clone(&role.name)).collect();
            scopes.push((LimiterKey::Peer(peer.to_string().into(), names), &own));
        }
        for role in roles.iter().filter(|role| !role.total_limits.is_empty()) {
            scopes.push((LimiterKey::Role(Arc::clone(&role.name)), &role.total_limits));
        }
        let of_listener = settings.listener_limits.iter().filter(|(name, _)| **name == *listener);
        scopes.extend(of_listener.map(|(name, limits)| (LimiterKey::Listener(Arc::clone(name)), limits)));
        if scopes.is_empty() {
            return None;
        }
        let range_cap = scopes.iter().filter_map(|(key, limits)| {
            let keys = limits.keys_per_range?;
            let on_exceed = limits.on_exceed.unwrap_or(OnExceed::Refuse);
            Some(RangeCap { keys, on_exceed, scope: key.scope() })
        });
        let answer_cap = scopes.iter().filter_map(|(key, limits)| {
            let bytes = u64::from(limits.answer_kib?.get()) * 1024;
            Some(AnswerCap { bytes, scope: key.scope() })
        });
        Some(Rc::new(CallerUsage {
            mode: settings.limits_mode,
            range_cap: range_cap.min_by_key(|cap| (cap.keys, std::cmp::Reverse(cap.on_exceed))),
            answer_cap: answer_cap.min_by_key(|cap| cap.bytes),
            measured: Semaphore::new(MEASURED_AT_ONCE),
            priority: scopes.iter().filter_map(|(_, limits)| limits.priority).min().unwrap_or_default(),
            counters: Arc::clone(&self.counters),
            scopes: scopes.into_iter().map(|(key, limits)| self.limiter(key, limits)).collect(),
        }))
    }

    /// The limiter of a key, with these limits from now on.
    fn limiter(&self, key: LimiterKey, limits: &UsageLimits) -> Arc<Limiter> {
        let mut table = self.limiters.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = table.by_key.get(&key) {
            known.set_limits(limits);
            return Arc::clone(known);
        }
        if table.by_key.len() >= table.sweep_at {
            table.sweep(Instant::now(), self.most);
        }
        let made = Arc::new(Limiter::new(key.scope(), limits));
        table.by_key.insert(key, Arc::clone(&made));
        self.count.set(i64::try_from(table.by_key.len()).unwrap_or(i64::MAX));
        made
    }
}

impl LimiterTable {
    /// Forgets idle limiters, and all limiters without a caller if too few are idle.
    fn sweep(&mut self, now: Instant, most: usize) {
        let has_caller = |limiter: &Arc<Limiter>| Arc::strong_count(limiter) > 1;
        self.by_key.retain(|_, limiter| has_caller(limiter) || !limiter.is_idle(now, IDLE));
        if self.by_key.len() >= most {
            self.by_key.retain(|_, limiter| has_caller(limiter));
        }
        // A table full of limiters in use is not swept for every further limiter.
        self.sweep_at = most.max(self.by_key.len() * 2);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use tokio::time::advance;

    use super::*;
    use crate::usage::call_usage::{CallLength, CallUsage};
    use crate::usage::exceeded::{Exceeded, LimitKind};
    use crate::usage::limiter::CallUrgency;
    use keyward_config::usage_limits::{CallRate, Priority};
    use keyward_telemetry::metrics::Metrics;

    fn number(number: u32) -> NonZeroU32 {
        NonZeroU32::new(number).expect("above 0")
    }

    fn calls(per_second: u32) -> UsageLimits {
        let (per_second, burst) = (number(per_second), number(per_second));
        UsageLimits { calls: Some(CallRate { per_second, burst }), ..UsageLimits::default() }
    }

    fn role(name: &str, limits: UsageLimits, total_limits: UsageLimits) -> PolicyRole {
        PolicyRole { name: name.into(), allow: Vec::new(), deny: Vec::new(), limits, total_limits }
    }

    fn settings(roles: Vec<PolicyRole>) -> PolicySettings {
        let document = Arc::new(PolicyDocument { roles, ..PolicyDocument::default() });
        PolicySettings { document, ..PolicySettings::default() }
    }

    fn of_roles(own: &[usize]) -> LimitingRoles<'_> {
        LimitingRoles { own, claimed: &[] }
    }

    fn peer(name: &str) -> Peer {
        Peer::Listener(name.into())
    }

    fn register(most: usize) -> (UsageRegister, Metrics) {
        let metrics = Metrics::new(Vec::new());
        (UsageRegister::with_capacity(&metrics.limits, most), metrics)
    }

    fn call(usage: &Rc<CallerUsage>) -> Result<(), Exceeded> {
        CallUsage::begin(usage, CallUrgency::Ordinary, CallLength::Counted).map(drop)
    }

    #[tokio::test(start_paused = true)]
    async fn each_scope_limits_and_is_shared_by_its_callers() {
        let (register, _metrics) = register(10);
        let mut settings =
            settings(vec![role("batch", calls(3), calls(5)), role("other", calls(4), calls(9))]);
        settings.listener_limits = vec![("l".into(), calls(7))];
        let of = |settings: &PolicySettings, name: &str, roles: &[usize], listener: &str| {
            register.usage_of(settings, &settings.document, &peer(name), of_roles(roles), listener)
        };
        assert!(of(&settings, "a", &[], "other").is_none());
        let a = of(&settings, "a", &[0, 1], "l").expect("limits");
        for _ in 0..3 {
            call(&a).expect("within the limit");
        }
        let refused = |scope| Err(Exceeded { scope, limit: LimitKind::Calls });
        assert_eq!(call(&a), refused(LimitScope::Peer));
        let again = of(&settings, "a", &[0, 1], "l").expect("limits");
        assert_eq!(call(&again), refused(LimitScope::Peer), "the same limiter");
        let b = of(&settings, "b", &[0], "l").expect("limits");
        assert_eq!([call(&b), call(&b)], [Ok(()), Ok(())]);
        assert_eq!(call(&b), refused(LimitScope::Role));
        let c = of(&settings, "c", &[], "l").expect("limits");
        assert_eq!([call(&c), call(&c)], [Ok(()), Ok(())]);
        assert_eq!(call(&c), refused(LimitScope::Listener));
        settings.limits_mode = PolicyMode::Shadow;
        let c = of(&settings, "c", &[], "l").expect("limits");
        assert_eq!(call(&c), Ok(()));
        settings.limits_mode = PolicyMode::Off;
        assert!(of(&settings, "c", &[], "l").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn changed_limits_hold_at_once_and_keep_counts_and_other_buckets() {
        let (register, _metrics) = register(10);
        let mut settings = settings(Vec::new());
        settings.peer_limits = UsageLimits { watches: Some(2), ..calls(2) };
        let usage = register
            .usage_of(&settings, &settings.document, &peer("a"), LimitingRoles::default(), "l")
            .expect("limits");
        for _ in 0..2 {
            call(&usage).expect("a call");
            usage.begin_watch().expect("a watch");
        }
        assert!(usage.begin_watch().is_err());
        settings.peer_limits.watches = Some(3);
        let after = register
            .usage_of(&settings, &settings.document, &peer("a"), LimitingRoles::default(), "l")
            .expect("limits");
        usage.begin_watch().expect("the new limit, at the old holder");
        assert!(after.begin_watch().is_err(), "watches begun before count");
        assert!(call(&after).is_err(), "the bucket is still empty");
        settings.peer_limits = UsageLimits { watches: Some(3), ..calls(4) };
        let after = register
            .usage_of(&settings, &settings.document, &peer("a"), LimitingRoles::default(), "l")
            .expect("limits");
        for _ in 0..4 {
            call(&after).expect("a full bucket of the new size");
        }
        assert!(call(&usage).is_err());
        usage.release(None, 0, 3);
        after.begin_watch().expect("room");
    }

    #[tokio::test(start_paused = true)]
    async fn idle_limiters_are_forgotten_and_limiters_in_use_stay() {
        let (register, metrics) = register(100);
        let mut settings = settings(Vec::new());
        settings.peer_limits = calls(1);
        let usage_of = |name: &str| {
            register
                .usage_of(&settings, &settings.document, &peer(name), LimitingRoles::default(), "l")
                .expect("limits")
        };
        let (used, waiting) = (usage_of("used"), usage_of("waiting"));
        call(&used).expect("a call");
        call(&waiting).expect("a call");
        drop(waiting);
        for round in 0..50 {
            for number in 0..60 {
                drop(usage_of(&format!("{round} {number}")));
            }
            advance(Duration::from_millis(500)).await;
            assert!(metrics.limits.limiters.get() <= 100, "{}", metrics.limits.limiters.get());
        }
        let kept: Vec<_> = (0..150).map(|number| usage_of(&format!("kept {number}"))).collect();
        assert!(metrics.limits.limiters.get() >= 150);
        assert_eq!(Arc::strong_count(&used.scopes[0]), 2, "still in the table");
        drop(kept);
        advance(Duration::from_secs(61)).await;
        for number in 0..200 {
            drop(usage_of(&format!("late {number}")));
        }
        assert!(metrics.limits.limiters.get() <= 302, "{}", metrics.limits.limiters.get());
    }

    #[tokio::test(start_paused = true)]
    async fn the_lowest_cap_and_priority_hold() {
        let (register, _metrics) = register(10);
        let capped = |keys, on_exceed, priority| UsageLimits {
            keys_per_range: Some(number(keys)),
            on_exceed,
            priority,
            ..UsageLimits::default()
        };
        let one = capped(10, Some(OnExceed::Page), Some(Priority::High));
        let total = capped(5, None, Some(Priority::Low));
        let settings = settings(vec![role("one", one, total)]);
        let usage = register
            .usage_of(&settings, &settings.document, &peer("a"), of_roles(&[0]), "l")
            .expect("limits");
        let cap = RangeCap { keys: number(5), on_exceed: OnExceed::Refuse, scope: LimitScope::Role };
        assert_eq!((usage.range_cap(), usage.priority()), (Some(cap), Priority::Low));
    }

    #[tokio::test(start_paused = true)]
    async fn guards_release_what_they_count_and_leases_count_until_their_end() {
        let (register, _metrics) = register(10);
        let mut settings = settings(Vec::new());
        settings.peer_limits =
            UsageLimits { calls_in_flight: Some(1), leases: Some(1), ..UsageLimits::default() };
        let usage = register
            .usage_of(&settings, &settings.document, &peer("a"), LimitingRoles::default(), "l")
            .expect("limits");
        let begin = || CallUsage::begin(&usage, CallUrgency::Ordinary, CallLength::Counted);
        let under_way = begin().expect("the first");
        assert!(begin().is_err() && begin().is_err());
        drop(under_way);
        drop(begin().expect("again"));
        let call = begin().expect("a LeaseGrant");
        call.reserve_lease().expect("the first");
        settings.peer_limits.calls_in_flight = None;
        let usage = register
            .usage_of(&settings, &settings.document, &peer("a"), LimitingRoles::default(), "l")
            .expect("limits");
        let begin =
            || CallUsage::begin(&usage, CallUrgency::Ordinary, CallLength::Counted).expect("a LeaseGrant");
        assert!(begin().reserve_lease().is_err(), "a grant is under way");
        call.note_grant(7, 5);
        drop(call);
        assert!(begin().reserve_lease().is_err());
        usage.note_renewal(7, 5);
        usage.note_revocation(7);
        begin().reserve_lease().expect("room");
    }

    #[tokio::test(start_paused = true)]
    async fn last_calls_have_a_bucket_of_their_own() {
        let (register, _metrics) = register(10);
        let mut settings = settings(Vec::new());
        settings.peer_limits = calls(2);
        let usage = register
            .usage_of(&settings, &settings.document, &peer("a"), LimitingRoles::default(), "l")
            .expect("limits");
        let begin = |urgency| CallUsage::begin(&usage, urgency, CallLength::Counted).is_ok();
        assert!(begin(CallUrgency::Ordinary) && begin(CallUrgency::Ordinary));
        assert!(!begin(CallUrgency::Ordinary));
        assert!(begin(CallUrgency::Last) && begin(CallUrgency::Last));
        assert!(!begin(CallUrgency::Last), "no way around the limit");
    }
}
