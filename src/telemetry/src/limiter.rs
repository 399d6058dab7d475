//! Rate limits for records caused by callers without a proved identity, and by calls without effect.
//!
//! Owns: the rates. Must not know: a record's contents. Invariant: every suppressed record is counted, and
//! the count appears in the log (`report_left_out`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::time::{Instant, interval};

/// Records allowed in a burst, per limiter.
const BURST: u32 = 100;
/// The time to earn a record: 20 records a second.
const REFILL: Duration = Duration::from_millis(50);
/// The time for a peer to earn an audit record of a call without effect: two a second.
const AUDIT_REFILL: Duration = Duration::from_millis(500);
/// Peers with a bucket of their own, in each thread.
const MOST_PEERS: usize = 1024;
/// The interval between reports of suppressed records.
const REPORT: Duration = Duration::from_secs(10);

/// A token bucket for log records, for a single thread.
#[derive(Debug)]
pub struct RecordLimiter {
    records: Cell<u32>,
    refilled: Cell<Instant>,
    refill: Duration,
    left_out: Counter,
}

/// Token buckets by peer for records of calls without effect, for a single thread.
#[derive(Debug)]
pub struct PeerRecordLimiter {
    peers: RefCell<HashMap<Box<str>, RecordLimiter>>,
    /// For callers without a proved identity, and for peers beyond [`MOST_PEERS`] seen lately.
    others: RecordLimiter,
    refill: Duration,
}

impl PeerRecordLimiter {
    /// Full buckets for audit records, counting suppressed records in `left_out`.
    #[must_use]
    pub fn for_audit(left_out: Counter) -> Self {
        Self { peers: RefCell::default(), others: RecordLimiter::new(left_out), refill: AUDIT_REFILL }
    }

    /// Full buckets for access records, counting suppressed records in `left_out`.
    #[must_use]
    pub fn for_access(left_out: Counter) -> Self {
        Self { peers: RefCell::default(), others: RecordLimiter::new(left_out), refill: REFILL }
    }

    /// True if a record of the peer, or of a caller without a proved identity, may be written now; a
    /// suppressed record is counted.
    #[must_use]
    pub fn may_log(&self, peer: Option<&str>) -> bool {
        self.may_log_at(peer, Instant::now())
    }

    fn may_log_at(&self, peer: Option<&str>, now: Instant) -> bool {
        let Some(peer) = peer else { return self.others.may_log_at(now) };
        let mut peers = self.peers.borrow_mut();
        if let Some(known) = peers.get(peer) {
            return known.may_log_at(now);
        }
        if peers.len() >= MOST_PEERS {
            peers.retain(|_, limiter| !limiter.is_full_at(now));
        }
        if peers.len() >= MOST_PEERS {
            return self.others.may_log_at(now);
        }
        let limiter = RecordLimiter::of(self.refill, now, self.others.left_out.clone());
        let may_log = limiter.may_log_at(now);
        peers.insert(peer.into(), limiter);
        may_log
    }
}

impl RecordLimiter {
    /// A full bucket, counting suppressed records in `left_out`.
    #[must_use]
    pub fn new(left_out: Counter) -> Self {
        Self::of(REFILL, Instant::now(), left_out)
    }

    fn of(refill: Duration, now: Instant, left_out: Counter) -> Self {
        Self { records: Cell::new(BURST), refilled: Cell::new(now), refill, left_out }
    }

    fn earned(&self, now: Instant) -> u32 {
        let elapsed = now.saturating_duration_since(self.refilled.get());
        u32::try_from(elapsed.as_millis() / self.refill.as_millis()).unwrap_or(u32::MAX)
    }

    fn is_full_at(&self, now: Instant) -> bool {
        self.records.get().saturating_add(self.earned(now)) >= BURST
    }

    /// True if a record may be written now; a suppressed record is counted.
    #[must_use]
    pub fn may_log(&self) -> bool {
        self.may_log_at(Instant::now())
    }

    fn may_log_at(&self, now: Instant) -> bool {
        let more = self.earned(now);
        let records = self.records.get().saturating_add(more);
        if records >= BURST {
            self.refilled.set(now);
        } else {
            self.refilled.set(self.refilled.get() + self.refill * more);
        }
        let left = records.min(BURST).checked_sub(1);
        self.records.set(left.unwrap_or_default());
        if left.is_none() {
            self.left_out.inc();
        }
        left.is_some()
    }
}

/// Logs the number of records suppressed since the last report, at most every ten seconds. Never ends.
pub async fn report_left_out(left_out: Counter) {
    let mut turns = interval(REPORT);
    let mut told = 0;
    loop {
        turns.tick().await;
        let total = left_out.get();
        if total != told {
            let records = total - std::mem::replace(&mut told, total);
            tracing::warn!(
                records,
                "records of calls without effect were left out: some callers had too many"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_has_a_bucket_and_peers_beyond_the_most_share_one() {
        let limiter = PeerRecordLimiter::for_audit(Counter::default());
        let began = Instant::now();
        let passed = |peer: &str, seconds, tries: u32| {
            let at = began + Duration::from_secs(seconds);
            (0..tries).filter(|_| limiter.may_log_at(Some(peer), at)).count()
        };
        assert_eq!((passed("a", 0, 150), passed("b", 0, 1)), (100, 1));
        assert_eq!(passed("a", 10, 150), 20, "two a second");
        for number in 0..2 * MOST_PEERS {
            passed(&format!("peer {number}"), 10, 2);
        }
        assert!(limiter.peers.borrow().len() <= MOST_PEERS);
        assert_eq!(passed("late", 10, 1), 0, "the shared bucket is empty");
        assert_eq!(passed("late", 10_000, 1), 1, "idle buckets make room");
        assert_eq!(limiter.peers.borrow().len(), 1);
    }

    #[test]
    fn a_burst_passes_and_then_twenty_a_second_and_the_rest_is_counted() {
        let left_out = Counter::default();
        let limiter = RecordLimiter::new(left_out.clone());
        let began = Instant::now();
        let at = |millis: u64| began + Duration::from_millis(millis);
        let passed = |millis, tries: u32| (0..tries).filter(|_| limiter.may_log_at(at(millis))).count();
        assert_eq!(passed(0, 150), 100);
        assert_eq!(left_out.get(), 50);
        // Elapsed time too short for a record is not lost.
        assert_eq!((passed(30, 9), passed(60, 9), passed(100, 9)), (0, 1, 1));
        assert_eq!(passed(1_100, 50), 20);
        // Unused time does not accumulate beyond the burst.
        assert_eq!(passed(1_000_000, 150), 100);
        assert_eq!(passed(1_000_040, 1), 0);
    }
}
