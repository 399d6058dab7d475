//! A member's fitness to take calls, derived from the last probe, lost connections, the maintenance window,
//! the lag and the ejection.
//!
//! Owns: [`Fitness`], the one order of the reasons against a member. Must not know: how a member is found,
//! how calls are sent. Invariant: nothing is stored here; every reason is kept by one part, and ends there.

use std::fmt;

use tokio::time::Instant;

use crate::fitness::member_load::{Ejection, MemberLoad};
use crate::fitness::quarantine::{MaintenanceWindow, Suspicion};

pub mod delay_counters;
pub mod lag;
pub mod member_load;
pub mod quarantine;
pub mod store_status;
pub mod stream_counts;

/// Maximum lag in raft entries ([`Membership::lag`]) for calls served by any member. etcd itself refuses
/// writes at a member with 5,000 entries left to apply; probes are up to half a second apart, in which a fast
/// cluster writes thousands of entries, so a smaller limit could exclude a member without any real lag.
///
/// [`Membership::lag`]: crate::membership::Membership::lag
pub const LAG: u64 = 10_000;

/// Ready or not to take traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The member answers, has a leader, votes, and belongs to the pinned cluster.
    Ready,
    /// The member must not take traffic.
    NotReady(UnreadyReason),
}

/// Why a member takes no traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreadyReason {
    /// The member was not probed yet.
    Unprobed,
    /// The member refuses connections, or does not answer.
    Unreachable,
    /// The member answers and sees no leader.
    NoLeader,
    /// The member is a learner.
    Learner,
    /// A different cluster answers at the member's address.
    ForeignCluster,
    /// The member hides its cluster id from the probing user, and the membership is not proven by other
    /// means: the configuration pins an id, or neither the member list nor an earlier answer shows the member
    /// in the pinned cluster.
    UnverifiedCluster,
    /// The member is missing from the member list: removed, or added a moment ago.
    Unlisted,
}

/// A member's fitness to take calls at one moment: of the reasons against the member, the first that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fitness {
    /// The maintenance window is open: the member is being defragmented, or about to be.
    InMaintenance,
    /// The last probe found the member unfit.
    Unready(UnreadyReason),
    /// A connection was lost since the start of the last successful probe.
    Suspected,
    /// The member lags by more than [`LAG`] entries: chosen only if no better member is left.
    Lagging,
    /// The member fails, or is far slower than the others: chosen only if no better member is left.
    Ejected(Ejection),
    /// Nothing is against the member.
    Fit,
}

impl Fitness {
    /// The reason why a member takes no calls at all; `None` for a member that may take calls.
    #[must_use]
    pub fn obstacle(
        readiness: Readiness,
        suspicion: &Suspicion,
        maintenance: &MaintenanceWindow,
    ) -> Option<Self> {
        match readiness {
            // Checked first: maintenance may make the member slow, and then its probes fail.
            _ if maintenance.is_open() => Some(Self::InMaintenance),
            Readiness::NotReady(reason) => Some(Self::Unready(reason)),
            Readiness::Ready if suspicion.is_raised() => Some(Self::Suspected),
            Readiness::Ready => None,
        }
    }

    /// The fitness of a member that may take calls.
    #[must_use]
    pub fn by_load(load: &MemberLoad, now: Instant) -> Self {
        if load.lag() > LAG {
            return Self::Lagging;
        }
        load.ejected(now).map_or(Self::Fit, |(why, _)| Self::Ejected(why))
    }
}

impl fmt::Display for UnreadyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unprobed => "not asked yet",
            Self::Unreachable => "unreachable",
            Self::NoLeader => "sees no leader",
            Self::Learner => "is a learner",
            Self::ForeignCluster => "another cluster answers at its address",
            Self::UnverifiedCluster => "its cluster id cannot be verified",
            Self::Unlisted => "is not in the member list",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::membership::Member;
    use crate::test_member::member;

    #[test]
    fn the_first_reason_in_order_is_the_fitness() {
        let now = Instant::now();
        let mut member = Member::clone(&member(1, Readiness::Ready));
        assert_eq!(member.fitness(now), Fitness::Fit);
        member.load.eject(now, Ejection::Slow);
        assert_eq!(member.fitness(now), Fitness::Ejected(Ejection::Slow));
        member.load.set_lag_and_nearness(LAG, false);
        assert_eq!(member.fitness(now), Fitness::Ejected(Ejection::Slow), "a lag at the limit");
        member.load.set_lag_and_nearness(LAG + 1, false);
        assert_eq!(member.fitness(now), Fitness::Lagging);
        assert!(member.is_ready(), "a lagging member may be the last one left");
        member.suspicion.raise();
        assert_eq!(member.fitness(now), Fitness::Suspected);
        assert!(!member.is_ready());
        member.readiness = Readiness::NotReady(UnreadyReason::NoLeader);
        assert_eq!(member.fitness(now), Fitness::Unready(UnreadyReason::NoLeader));
        assert!(!member.is_leaderless_voter(), "a connection was lost");
        let window = Arc::clone(&member.maintenance).open();
        assert_eq!(member.fitness(now), Fitness::InMaintenance);
        drop(window);
        member.suspicion.clear(member.suspicion.mark());
        assert!(member.is_leaderless_voter());
    }
}
