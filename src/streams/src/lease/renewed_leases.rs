//! The leases kept alive by one client stream, for an operator's questions.
//!
//! Owns: the newest renewals of the stream. Must not know: renewals in flight. Invariants: a bounded number
//! of leases is remembered, the leases renewed last; a lease that is gone is forgotten.

use std::cell::RefCell;
use std::time::Duration;

use tokio::time::Instant;

/// Leases remembered per stream. clientv3 renews all leases of a client on one stream, nearly always a single
/// one; the search for a lease stays shorter than the decoding of its answer.
const REMEMBERED: usize = 64;

/// The leases of one stream.
#[derive(Debug, Default)]
pub struct RenewedLeases {
    leases: RefCell<Vec<RenewedLease>>,
}

/// A lease kept alive by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenewedLease {
    /// The lease's id.
    pub id: i64,
    /// The TTL told by the member with the last renewal, in seconds.
    pub ttl: i64,
    /// Renewals on this stream.
    pub renewals: u64,
    /// Time of the last renewal.
    pub renewed_at: Instant,
}

impl RenewedLease {
    fn is_live(&self, now: Instant) -> bool {
        let life = Duration::from_secs(u64::try_from(self.ttl).unwrap_or_default());
        now.saturating_duration_since(self.renewed_at) < life
    }
}

impl RenewedLeases {
    /// Notes a renewal answered at `now`; a `ttl` of 0 says that the lease is gone.
    pub fn note(&self, id: i64, ttl: i64, now: Instant) {
        let mut leases = self.leases.borrow_mut();
        let known = leases.iter().position(|lease| lease.id == id);
        match known {
            Some(at) if ttl <= 0 => drop(leases.swap_remove(at)),
            Some(at) => {
                let lease = &mut leases[at];
                (lease.ttl, lease.renewals, lease.renewed_at) = (ttl, lease.renewals + 1, now);
            }
            None if ttl <= 0 => {}
            None => {
                if leases.len() >= REMEMBERED
                    && let Some(oldest) = (0..leases.len()).min_by_key(|at| leases[*at].renewed_at)
                {
                    leases.swap_remove(oldest);
                }
                leases.push(RenewedLease { id, ttl, renewals: 1, renewed_at: now });
            }
        }
    }

    /// The leases that live on by their last renewal.
    #[must_use]
    pub fn live(&self, now: Instant) -> Vec<RenewedLease> {
        self.leases.borrow().iter().filter(|lease| lease.is_live(now)).copied().collect()
    }

    /// The leases that live on by their last renewal, each with the whole seconds that are left.
    pub fn live_for(&self, now: Instant) -> impl Iterator<Item = (i64, i64)> {
        let left = move |lease: RenewedLease| {
            let since = now.saturating_duration_since(lease.renewed_at).as_secs();
            (lease.id, lease.ttl.saturating_sub_unsigned(since))
        };
        self.live(now).into_iter().map(left)
    }

    /// The number of leases that live on by their last renewal.
    #[must_use]
    pub fn live_count(&self, now: Instant) -> u64 {
        self.leases.borrow().iter().filter(|lease| lease.is_live(now)).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leases_renewed_last_are_remembered_and_a_lease_that_is_gone_is_not() {
        let (leases, start) = (RenewedLeases::default(), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        for id in 0..100_u8 {
            leases.note(id.into(), 1000, at(id.into()));
        }
        leases.note(99, 1000, at(100));
        let live = leases.live(at(100));
        assert_eq!(live.len(), REMEMBERED);
        assert!(live.iter().all(|lease| lease.id >= 36), "{live:?}");
        assert_eq!(live.iter().find(|lease| lease.id == 99).map(|lease| lease.renewals), Some(2));
        leases.note(99, 0, at(101));
        leases.note(7, 0, at(101));
        assert_eq!(leases.live_count(at(101)), 63);
        assert_eq!(leases.live_count(at(2000)), 0, "nobody renews them any more");
    }
}
