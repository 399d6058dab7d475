//! The limit that refused a call, in the words of metrics, log and doctor, and the counters of refusals.
//!
//! Owns: scopes and kinds of limits, their names, and the minutes in which each refused. Must not know: the
//! refused caller.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;
use tokio::time::Instant;

use keyward_telemetry::limit_metrics::LimitMetrics;

/// Whose usage a limit is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitScope {
    /// One peer.
    Peer,
    /// All peers of one role.
    Role,
    /// All callers of one listener.
    Listener,
    /// The whole cluster.
    Cluster,
}

/// What a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// Calls per second.
    Calls,
    /// Calls under way.
    CallsInFlight,
    /// Watches.
    Watches,
    /// Leases.
    Leases,
    /// Bytes per second of requests.
    RequestBytes,
    /// Bytes per second of replies.
    ReplyBytes,
    /// Keys of one Range.
    KeysPerRange,
    /// Bytes of one answer with keys.
    BytesPerAnswer,
    /// The size of the database (shedding).
    DbSize,
    /// The latency of the members (shedding).
    Latency,
}

/// An exceeded limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// Whose usage.
    pub scope: LimitScope,
    /// Which limit.
    pub limit: LimitKind,
}

impl LimitScope {
    const ALL: [Self; 4] = [Self::Peer, Self::Role, Self::Listener, Self::Cluster];

    /// The scope's name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Role => "role",
            Self::Listener => "listener",
            Self::Cluster => "cluster",
        }
    }
}

impl LimitKind {
    const ALL: [Self; 10] = [
        Self::Calls,
        Self::CallsInFlight,
        Self::Watches,
        Self::Leases,
        Self::RequestBytes,
        Self::ReplyBytes,
        Self::KeysPerRange,
        Self::BytesPerAnswer,
        Self::DbSize,
        Self::Latency,
    ];

    /// The limit's key in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls_per_second",
            Self::CallsInFlight => "calls_in_flight",
            Self::Watches => "watches",
            Self::Leases => "leases",
            Self::RequestBytes => "request_bytes_per_second",
            Self::ReplyBytes => "reply_bytes_per_second",
            Self::KeysPerRange => "keys_per_range",
            Self::BytesPerAnswer => "bytes_per_answer",
            Self::DbSize => "db_share",
            Self::Latency => "latency_target",
        }
    }
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.scope.name(), self.limit.name())
    }
}

/// The counters of refusals, made once: a refusal takes no lock.
pub struct RefusalCounters {
    counters: Vec<(Counter, Counter, AtomicU64)>,
    started: Instant,
}

/// The length of the history in minutes.
const HISTORY: u64 = 10;

impl RefusalCounters {
    /// Counters in `metrics`.
    #[must_use]
    pub fn new(metrics: &LimitMetrics) -> Self {
        let all = LimitScope::ALL.into_iter().flat_map(|scope| LimitKind::ALL.map(|limit| (scope, limit)));
        let counters = all.map(|(scope, limit)| {
            let (refused, shadow) = metrics.counters(scope.name(), limit.name());
            (refused, shadow, AtomicU64::new(0))
        });
        Self { counters: counters.collect(), started: Instant::now() }
    }

    /// Counts an enforced refusal.
    pub fn count_refused(&self, exceeded: Exceeded) {
        let Some((refused, _, minutes)) = self.counters.get(index(exceeded)) else { return };
        refused.inc();
        let minute = self.minute();
        let note = |known| Some(with_minute(known, minute));
        let noted = minutes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, note);
        debug_assert!(noted.is_ok(), "a minute can always be noted");
    }

    /// Counts a refusal that is not enforced.
    pub fn count_shadow(&self, exceeded: Exceeded) {
        if let Some((_, shadow, _)) = self.counters.get(index(exceeded)) {
            shadow.inc();
        }
    }

    /// The limits that refused something in nearly all of the last ten minutes.
    #[must_use]
    pub fn constant(&self) -> Vec<Exceeded> {
        let minute = self.minute();
        let all = LimitScope::ALL
            .into_iter()
            .flat_map(|scope| LimitKind::ALL.map(|limit| Exceeded { scope, limit }));
        all.filter(|exceeded| {
            let minutes = self.counters.get(index(*exceeded)).map(|(_, _, minutes)| minutes);
            let known = minutes.map_or(0, |minutes| minutes.load(Ordering::Relaxed));
            u64::from(minutes_until(known, minute).count_ones()) + 2 >= HISTORY
        })
        .collect()
    }

    fn minute(&self) -> u64 {
        // The first minute is above 0: a value of 0 has no minute.
        self.started.elapsed().as_secs() / 60 + 1
    }
}

fn index(Exceeded { scope, limit }: Exceeded) -> usize {
    scope as usize * LimitKind::ALL.len() + limit as usize
}

/// The last minute above the low 16 bits, which stand for the minutes up to the last.
fn with_minute(known: u64, minute: u64) -> u64 {
    minute << 16 | (minutes_until(known, minute) | 1)
}

/// The bits of the last ten minutes up to `minute`, the lowest for `minute` itself.
fn minutes_until(known: u64, minute: u64) -> u64 {
    let (last, bits) = (known >> 16, known & 0xffff);
    let passed = u32::try_from(minute.saturating_sub(last)).unwrap_or(u32::MAX);
    bits.checked_shl(passed).unwrap_or(0) & ((1 << HISTORY) - 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;
    use keyward_telemetry::metrics::Metrics;

    #[tokio::test(start_paused = true)]
    async fn a_limit_that_refuses_all_the_time_is_told() {
        let metrics = Metrics::new(Vec::new());
        let counters = RefusalCounters::new(&metrics.limits);
        let watches = Exceeded { scope: LimitScope::Peer, limit: LimitKind::Watches };
        let calls = Exceeded { scope: LimitScope::Listener, limit: LimitKind::Calls };
        for minute in 0..9 {
            assert_eq!(counters.constant().contains(&watches), minute >= 8, "{minute}");
            counters.count_refused(watches);
            counters.count_refused(watches);
            counters.count_shadow(calls);
            advance(Duration::from_secs(60)).await;
        }
        assert_eq!(counters.constant(), [watches]);
        advance(Duration::from_secs(180)).await;
        assert!(counters.constant().is_empty());
        advance(Duration::from_secs(60 * 100)).await;
        counters.count_refused(watches);
        assert!(counters.constant().is_empty());
        let text = metrics.text().expect("text");
        let line = "keyward_limit_refused_total{scope=\"peer\",limit=\"watches\"} 19";
        assert!(text.contains(line), "{text}");
        assert!(
            text.contains(
                "keyward_limit_shadow_refused_total{scope=\"listener\",limit=\"calls_per_second\"} 9"
            )
        );
    }
}
