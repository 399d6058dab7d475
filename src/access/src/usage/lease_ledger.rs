//! The leases of a peer, as far as this replica can know: granted or renewed here, and neither revoked nor
//! expired.
//!
//! Owns: the ends of leases. Must not know: who granted a lease. Invariants: etcd never ends a lease before
//! its time to live is over, so a lease counts no longer than it lives, unless it is revoked elsewhere; a
//! lease renewed through another replica only stops counting early. At most `limit` granted leases are kept,
//! with those of renewals twice as many, and of those that are over no more than of those that live, or
//! [`FEW`].

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// Leases kept without a look at those that are over.
const FEW: usize = 64;

/// The leases of a peer, by id, each with its end.
#[derive(Debug, Default)]
pub(super) struct LeaseLedger {
    ends: HashMap<i64, Instant>,
    /// The number of leases at which those that are over are forgotten.
    full_at: usize,
    /// Grants under way.
    reserved: usize,
}

impl LeaseLedger {
    /// Counts a grant under way. Returns false at the limit.
    pub(super) fn reserve(&mut self, limit: usize, now: Instant) -> bool {
        if self.ends.len() + self.reserved >= limit {
            self.forget_ended(now);
        }
        let has_room = self.ends.len() + self.reserved < limit;
        self.reserved += 1;
        has_room
    }

    /// A grant under way has ended, without or with a lease.
    pub(super) fn end_reservation(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
    }

    /// Counts a lease for its time to live. Past the limit, as under `limits_mode = "shadow"`, a lease is not
    /// kept.
    pub(super) fn grant(&mut self, lease: i64, ttl: i64, limit: usize, now: Instant) {
        let Some(end) = end(ttl, now) else { return };
        if self.ends.len() >= self.full_at.max(FEW) {
            self.forget_ended(now);
        }
        if self.ends.len() < limit {
            self.ends.insert(lease, end);
        }
    }

    /// Prolongs a lease, or counts one that was granted elsewhere or before leases counted; a time to live of
    /// 0 is etcd's word for a lease that is gone. A peer may have more leases than a limit that came later;
    /// past twice the limit a lease is not kept.
    pub(super) fn renew(&mut self, lease: i64, ttl: i64, limit: usize, now: Instant) {
        match (self.ends.get_mut(&lease), end(ttl, now)) {
            (Some(known), Some(end)) => *known = end,
            (_, None) => self.forget(lease),
            (None, Some(_)) => self.grant(lease, ttl, limit.saturating_mul(2), now),
        }
    }

    /// True if a lease counts.
    pub(super) fn has_any(&self, now: Instant) -> bool {
        self.reserved > 0 || self.ends.values().any(|end| *end > now)
    }

    /// The number of leases that count.
    pub(super) fn count(&self, now: Instant) -> usize {
        self.ends.values().filter(|end| **end > now).count()
    }

    /// Costs no more than the grants since the last time.
    fn forget_ended(&mut self, now: Instant) {
        self.ends.retain(|_, end| *end > now);
        self.full_at = 2 * self.ends.len();
    }

    /// The lease is gone.
    pub(super) fn forget(&mut self, lease: i64) {
        self.ends.remove(&lease);
    }
}

/// The end of a lease with this time to live, in seconds; `None` for a lease that is gone, and for an
/// impossible time.
fn end(ttl: i64, now: Instant) -> Option<Instant> {
    let ttl = u64::try_from(ttl).ok().filter(|ttl| *ttl > 0)?;
    now.checked_add(Duration::from_secs(ttl))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_count_until_revoked_or_over() {
        let (mut ledger, now) = (LeaseLedger::default(), Instant::now());
        let later = |seconds| now + Duration::from_secs(seconds);
        for lease in 1..=2 {
            assert!(ledger.reserve(2, now));
            ledger.end_reservation();
            ledger.grant(lease, 10, 2, now);
        }
        assert!(!ledger.reserve(2, now));
        ledger.end_reservation();
        ledger.renew(1, 10, 2, later(9));
        assert!(ledger.reserve(2, later(11)), "the second lease is over");
        assert!(!ledger.reserve(2, later(11)), "a grant is under way, and the first lease was renewed");
        ledger.end_reservation();
        ledger.end_reservation();
        ledger.forget(1);
        assert_eq!(ledger.ends.len(), 0);
        ledger.grant(7, 10, 2, now);
        ledger.renew(7, 0, 2, now);
        assert_eq!(ledger.ends.len(), 0, "etcd says that the lease is gone");
        ledger.grant(8, i64::MAX, 2, now);
        assert!(ledger.ends.len() <= 1, "no panic");
    }

    #[test]
    fn leases_granted_before_the_limit_count_from_their_renewal() {
        let (mut ledger, now, limit) = (LeaseLedger::default(), Instant::now(), 3);
        for lease in 1..=9 {
            ledger.renew(lease, 10, limit, now);
        }
        assert_eq!(ledger.count(now), 6, "bounded");
        ledger.forget(1);
        ledger.forget(2);
        assert!(!ledger.reserve(limit, now), "four of five are left, above the limit");
        ledger.end_reservation();
        assert!(ledger.reserve(limit, now + Duration::from_secs(11)), "nobody renews them");
    }

    #[test]
    fn leases_that_are_over_are_neither_counted_nor_kept() {
        let (mut ledger, begun, limit) = (LeaseLedger::default(), Instant::now(), 100_000);
        for lease in 0..20_000 {
            let now = begun + Duration::from_secs(lease / 100);
            ledger.grant(lease.cast_signed(), 2, limit, now);
        }
        let last = begun + Duration::from_secs(199);
        assert_eq!(ledger.count(last), 200);
        assert!(ledger.ends.len() <= 500, "{}", ledger.ends.len());
        assert_eq!(ledger.count(last + Duration::from_secs(3)), 0);
    }
}
