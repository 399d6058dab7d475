//! Evacuates streams from a member that takes no more traffic.
//!
//! A stopped or partitioned member keeps its connections: a watch on such a member stays silent, and HTTP/2
//! pings fail only many seconds later. The members' task knows the fault sooner. A member in a maintenance
//! window is evacuated at once, and so is a member that gets no calls for being slow, failing or far behind:
//! the events of a watch there come late for as long as that lasts, while others deliver at once.
//!
//! Owns: how long a member must be unfit before its stream connections are given up; giving up at once the
//! connections to addresses without a member. Must not know: the content of the streams; each stream resumes
//! elsewhere by its own rules.
//! Invariants: no stream leaves unless a ready voter is left; short calls are left to finish, because the
//! outcome of a write would be lost with the connection; during a maintenance window, or for slowness, no
//! stream is cut that cannot resume elsewhere; streams leave a slow member only for a fit one.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::send::UpstreamClient;
use keyward_cluster::membership::{Fitness, Member, Membership, UnreadyReason};
use keyward_etcd::identity::MemberId;
use keyward_etcd::rpc::method::Lane;

/// Time without a successful probe after which a member is evacuated: several probes have failed in a row by
/// then, and a pause of a busy machine is over. Well below the 15 s of HTTP/2's pings.
const UNFIT: Duration = Duration::from_secs(3);
/// Interval between two looks without a new membership: an ejection publishes none.
const LOOK: Duration = Duration::from_secs(1);

/// The start of each member's unfitness. Pure.
#[derive(Debug, Default)]
struct UnfitMembers(BTreeMap<(MemberId, EvacuationCause), UnfitSince>);

/// Why a member is evacuated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EvacuationCause {
    /// A maintenance window is open: streams able to resume elsewhere leave.
    Maintenance,
    /// The member is ejected, or lags: streams able to resume elsewhere leave.
    Slow,
    /// The member does not serve: all streams are lost.
    Unfit,
}

impl EvacuationCause {
    /// The reason, for the log.
    fn name(self) -> &'static str {
        match self {
            Self::Maintenance => "maintenance",
            Self::Slow => "slow",
            Self::Unfit => "unfit",
        }
    }

    fn of(member: &Member, now: Instant) -> Option<Self> {
        match member.fitness(now) {
            // Streams unable to leave must not be cut for the slowness of maintenance.
            Fitness::InMaintenance => Some(Self::Maintenance),
            Fitness::Unready(reason) if reason != UnreadyReason::Unprobed => Some(Self::Unfit),
            Fitness::Ejected(_) | Fitness::Lagging => Some(Self::Slow),
            _ => None,
        }
    }

    fn after(self) -> Duration {
        match self {
            Self::Maintenance | Self::Slow => Duration::ZERO,
            Self::Unfit => UNFIT,
        }
    }

    /// True if a member is left for the streams.
    fn has_refuge(self, members: &Membership, now: Instant) -> bool {
        let is_refuge = |member: &Arc<Member>| self != Self::Slow || member.fitness(now) == Fitness::Fit;
        members.ready_voters().any(is_refuge)
    }
}

#[derive(Debug)]
struct UnfitSince {
    at: Instant,
    left: bool,
}

impl UnfitMembers {
    /// Takes in the published membership; returns the members to evacuate now.
    fn look(&mut self, members: &Membership, now: Instant) -> Vec<(MemberId, EvacuationCause)> {
        let unfit = |member: &Arc<Member>| Some((member.id, EvacuationCause::of(member, now)?));
        self.0.retain(|(id, why), _| members.get(*id).and_then(unfit) == Some((*id, *why)));
        for id in members.members.iter().filter_map(unfit) {
            self.0.entry(id).or_insert(UnfitSince { at: now, left: false });
        }
        let due = self.0.iter_mut().filter(|((_, why), since)| {
            !since.left && now >= since.at + why.after() && why.has_refuge(members, now)
        });
        due.map(|(id, since)| {
            since.left = true;
            *id
        })
        .collect()
    }

    /// The time of the next check without a new membership.
    fn next(&self) -> Option<Instant> {
        self.0.iter().filter(|(_, since)| !since.left).map(|((_, why), since)| since.at + why.after()).min()
    }
}

/// Evacuates unfit members, as long as memberships are published.
pub async fn leave_unfit_members(upstream: Rc<UpstreamClient>) {
    let mut changes = upstream.members.changes.clone();
    let mut unfit = UnfitMembers::default();
    loop {
        changes.mark_unchanged();
        let now = Instant::now();
        let members = upstream.members.snapshot.load_full();
        if members.ready_voters().next().is_some() {
            let streams = upstream.pool.leave_moved_members(&members);
            if streams > 0 {
                tracing::info!(connections = streams, "streams leave addresses where no member is any more");
            }
        }
        for (member, why) in unfit.look(&members, now) {
            let connections = match why {
                EvacuationCause::Maintenance | EvacuationCause::Slow => {
                    upstream.pool.evacuate(member, Lane::Stream)
                }
                EvacuationCause::Unfit => upstream.pool.give_up(member, Lane::Stream),
            };
            if connections > 0 {
                let name = members.get(member).map_or("", |known| &*known.name);
                tracing::info!(%member, name, connections, reason = why.name(), "streams leave a member");
            }
        }
        // A member not evacuated for want of a refuge waits for the next change, or the next look.
        let look = now + LOOK;
        let next = unfit.next().filter(|at| *at > now).map_or(look, |at| at.min(look));
        tokio::select! {
            biased; // No arm has priority; the fixed order makes runs reproducible.
            () = sleep_until(next) => {}
            changed = changes.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_cluster::fitness::LAG;
    use keyward_cluster::fitness::member_load::Ejection;
    use keyward_cluster::membership::{Readiness, Role};
    use keyward_config::{Endpoint, Scheme};

    fn published(readiness: &[Readiness]) -> Membership {
        let member = |(at, readiness): (u64, &Readiness)| {
            Arc::new(Member {
                id: MemberId(at),
                name: "".into(),
                endpoint: Endpoint { scheme: Scheme::Http, host: "m".into(), port: 1 },
                resolved_ip: None,
                role: Role::Voter,
                version: None,
                readiness: *readiness,
                term: 0,
                store_status: None,
                client_urls: Arc::default(),
                suspicion: Arc::default(),
                maintenance: Arc::default(),
                load: Arc::default(),
            })
        };
        let members = (1..).zip(readiness).map(member).collect();
        Membership { members, ..Membership::unknown(Instant::now()) }
    }

    const GONE: Readiness = Readiness::NotReady(UnreadyReason::Unreachable);

    #[test]
    fn a_member_is_left_once_and_only_after_it_was_unfit_for_long() {
        let (mut unfit, start) = (UnfitMembers::default(), Instant::now());
        let one_gone = published(&[GONE, Readiness::Ready]);
        assert_eq!(unfit.look(&one_gone, start), []);
        assert_eq!(unfit.next(), Some(start + UNFIT));
        assert_eq!(unfit.look(&one_gone, start + UNFIT - Duration::from_millis(1)), []);
        assert_eq!(unfit.look(&one_gone, start + UNFIT), [(MemberId(1), EvacuationCause::Unfit)]);
        assert_eq!((unfit.look(&one_gone, start + 2 * UNFIT), unfit.next()), (Vec::new(), None));
    }

    #[test]
    fn a_good_probe_in_between_counts_from_the_beginning() {
        let (mut unfit, start) = (UnfitMembers::default(), Instant::now());
        unfit.look(&published(&[GONE, Readiness::Ready]), start);
        unfit.look(&published(&[Readiness::Ready; 2]), start + UNFIT / 2);
        assert_eq!(unfit.next(), None);
        assert_eq!(unfit.look(&published(&[GONE, Readiness::Ready]), start + UNFIT), []);
        assert_eq!(unfit.next(), Some(start + 2 * UNFIT));
    }

    #[test]
    fn nothing_leaves_while_nobody_else_serves() {
        let (mut unfit, start) = (UnfitMembers::default(), Instant::now());
        let no_leader = Readiness::NotReady(UnreadyReason::NoLeader);
        unfit.look(&published(&[GONE, no_leader]), start);
        assert_eq!(unfit.look(&published(&[GONE, no_leader]), start + UNFIT), []);
        assert_eq!(
            unfit.look(&published(&[GONE, Readiness::Ready]), start + UNFIT),
            [(MemberId(1), EvacuationCause::Unfit)]
        );
    }

    #[test]
    fn a_member_that_was_never_asked_is_not_unfit() {
        let (mut unfit, start) = (UnfitMembers::default(), Instant::now());
        unfit.look(&published(&[Readiness::NotReady(UnreadyReason::Unprobed), Readiness::Ready]), start);
        assert_eq!(unfit.next(), None);
    }

    #[test]
    fn a_slow_member_is_left_at_once_for_a_fit_one_and_for_no_other() {
        let (mut unfit, start) = (UnfitMembers::default(), Instant::now());
        let two = published(&[Readiness::Ready; 2]);
        let [slow, other] = &two.members[..] else { panic!() };
        let lasts = slow.load.eject(start, Ejection::Slow);
        other.load.set_lag_and_nearness(LAG + 1, false);
        assert_eq!(unfit.look(&two, start), [], "the other one is far behind");
        other.load.set_lag_and_nearness(LAG, false);
        assert_eq!(unfit.look(&two, start), [(MemberId(1), EvacuationCause::Slow)]);
        assert_eq!(unfit.look(&two, start), [], "once");
        let again = start + lasts + Duration::from_millis(1);
        assert_eq!(unfit.look(&two, again), [], "back");
        other.load.set_lag_and_nearness(LAG + 1, false);
        assert_eq!(unfit.look(&two, again), [(MemberId(2), EvacuationCause::Slow)]);
    }

    #[test]
    fn a_member_that_is_to_have_rest_is_left_at_once_and_never_cut() {
        let (mut unfit, start) = (UnfitMembers::default(), Instant::now());
        let two = published(&[Readiness::Ready; 2]);
        let resting = two.members[0].maintenance.open();
        assert_eq!(unfit.look(&two, start), [(MemberId(1), EvacuationCause::Maintenance)]);
        assert_eq!(unfit.look(&two, start), []);
        let slow = published(&[GONE, Readiness::Ready]);
        let slowed = slow.members[0].maintenance.open();
        assert_eq!(unfit.look(&slow, start + 2 * UNFIT), [], "it was left, and is meant to be slow");
        drop((resting, slowed));
        assert_eq!(unfit.look(&slow, start + 2 * UNFIT), []);
        assert_eq!(unfit.look(&slow, start + 3 * UNFIT), [(MemberId(1), EvacuationCause::Unfit)]);
        let alone = published(&[Readiness::Ready]);
        let _resting = alone.members[0].maintenance.open();
        assert_eq!(UnfitMembers::default().look(&alone, start), [], "there is nowhere to go");
    }
}
