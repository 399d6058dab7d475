//! Streams leave a member that takes no traffic any more.
//!
//! A stopped or partitioned member keeps its connections: a watch on it hears nothing, and nobody says so before HTTP/2's
//! own pings fail, many seconds later. The members' task knows sooner. A member that is to have rest is left at once.
//!
//! Owns: for how long a member must have been unfit before its stream connections are given up; that connections are left at
//! once which lead to where no member is any more. Must not know: what the streams carry; each begins anew elsewhere by its own
//! rules. Invariants: nothing leaves while no other member could take it; short calls are left to their end, since the outcome
//! of a write would be lost with its connection; of a member that rests nothing is cut that could not go on elsewhere.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::identity::MemberId;
use crate::rpc::method::Lane;
use crate::upstream::membership::{Member, Membership, Readiness, Reason};
use crate::upstream::send::Door;

/// A member is left after so long without one good probe: several have failed in a row by then, and a pause of a busy
/// machine is over. Well below the 15 s of HTTP/2's pings.
const UNFIT: Duration = Duration::from_secs(3);

/// Since when members are unfit; pure.
#[derive(Debug, Default)]
struct Unfit(BTreeMap<(MemberId, Why), Since>);

/// Why a member is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    /// It is to have rest: what can go on elsewhere does.
    Rests,
    /// It does not serve: what it carries is lost.
    Unfit,
}

impl Why {
    fn of(member: &Member) -> Option<Self> {
        match member.readiness {
            // It may well be slow now. What could not leave is not to be cut for that.
            _ if member.rest.is_taken() => Some(Self::Rests),
            Readiness::NotReady(reason) if reason != Reason::Unprobed => Some(Self::Unfit),
            Readiness::Ready | Readiness::NotReady(_) => None,
        }
    }

    fn after(self) -> Duration {
        match self {
            Self::Rests => Duration::ZERO,
            Self::Unfit => UNFIT,
        }
    }
}

#[derive(Debug)]
struct Since {
    at: Instant,
    left: bool,
}

impl Unfit {
    /// Takes in what is published now; returns the members to leave now.
    fn look(&mut self, members: &Membership, now: Instant) -> Vec<(MemberId, Why)> {
        let unfit = |member: &Arc<Member>| Some((member.id, Why::of(member)?));
        self.0.retain(|(id, why), _| members.get(*id).and_then(unfit) == Some((*id, *why)));
        for id in members.members.iter().filter_map(unfit) {
            self.0.entry(id).or_insert(Since { at: now, left: false });
        }
        if members.ready_voters().next().is_none() {
            return Vec::new();
        }
        let due = self.0.iter_mut().filter(|((_, why), since)| !since.left && now >= since.at + why.after());
        due.map(|(id, since)| {
            since.left = true;
            *id
        })
        .collect()
    }

    /// When to look again though nothing new was published.
    fn next(&self) -> Option<Instant> {
        self.0.iter().filter(|(_, since)| !since.left).map(|((_, why), since)| since.at + why.after()).min()
    }
}

/// Gives up stream connections of members that became unfit, for as long as members are published.
pub async fn leave_unfit_members(door: Rc<Door>) {
    let mut changes = door.members.changes.clone();
    let mut unfit = Unfit::default();
    loop {
        changes.mark_unchanged();
        let now = Instant::now();
        let members = door.members.snapshot.load_full();
        if members.ready_voters().next().is_some() {
            let streams = door.pool.leave_strays(&members);
            if streams > 0 {
                tracing::info!(connections = streams, "streams leave addresses where no member is any more");
            }
        }
        for (member, why) in unfit.look(&members, now) {
            let connections = match why {
                Why::Rests => door.pool.leave(member, Lane::Stream),
                Why::Unfit => door.pool.give_up(member, Lane::Stream),
            };
            if connections > 0 {
                tracing::info!(%member, connections, ?why, "streams leave a member");
            }
        }
        // What could not be left for want of another member waits for the next change.
        let next = unfit.next().filter(|at| *at > now);
        let again = async {
            match next {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased; // in any order, but always the same
            () = again => {}
            changed = changes.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Endpoint, Scheme};
    use crate::upstream::membership::Role;

    fn published(readiness: &[Readiness]) -> Membership {
        let member = |(at, readiness): (u64, &Readiness)| {
            Arc::new(Member {
                id: MemberId(at),
                name: "".into(),
                endpoint: Endpoint { scheme: Scheme::Http, host: "m".into(), port: 1 },
                at: None,
                role: Role::Voter,
                version: None,
                readiness: *readiness,
                term: 0,
                vitals: None,
                client_urls: Arc::default(),
                suspicion: Arc::default(),
                rest: Arc::default(),
                conduct: Arc::default(),
            })
        };
        let members = (1..).zip(readiness).map(member).collect();
        Membership { members, ..Membership::unknown(Instant::now()) }
    }

    const GONE: Readiness = Readiness::NotReady(Reason::Unreachable);

    #[test]
    fn a_member_is_left_once_and_only_after_it_was_unfit_for_long() {
        let (mut unfit, start) = (Unfit::default(), Instant::now());
        let one_gone = published(&[GONE, Readiness::Ready]);
        assert_eq!(unfit.look(&one_gone, start), []);
        assert_eq!(unfit.next(), Some(start + UNFIT));
        assert_eq!(unfit.look(&one_gone, start + UNFIT - Duration::from_millis(1)), []);
        assert_eq!(unfit.look(&one_gone, start + UNFIT), [(MemberId(1), Why::Unfit)]);
        assert_eq!((unfit.look(&one_gone, start + 2 * UNFIT), unfit.next()), (Vec::new(), None));
    }

    #[test]
    fn a_good_probe_in_between_counts_from_the_beginning() {
        let (mut unfit, start) = (Unfit::default(), Instant::now());
        unfit.look(&published(&[GONE, Readiness::Ready]), start);
        unfit.look(&published(&[Readiness::Ready; 2]), start + UNFIT / 2);
        assert_eq!(unfit.next(), None);
        assert_eq!(unfit.look(&published(&[GONE, Readiness::Ready]), start + UNFIT), []);
        assert_eq!(unfit.next(), Some(start + 2 * UNFIT));
    }

    #[test]
    fn nothing_leaves_while_nobody_else_serves() {
        let (mut unfit, start) = (Unfit::default(), Instant::now());
        let no_leader = Readiness::NotReady(Reason::NoLeader);
        unfit.look(&published(&[GONE, no_leader]), start);
        assert_eq!(unfit.look(&published(&[GONE, no_leader]), start + UNFIT), []);
        assert_eq!(
            unfit.look(&published(&[GONE, Readiness::Ready]), start + UNFIT),
            [(MemberId(1), Why::Unfit)]
        );
    }

    #[test]
    fn a_member_that_was_never_asked_is_not_unfit() {
        let (mut unfit, start) = (Unfit::default(), Instant::now());
        unfit.look(&published(&[Readiness::NotReady(Reason::Unprobed), Readiness::Ready]), start);
        assert_eq!(unfit.next(), None);
    }
    #[test]
    fn a_member_that_is_to_have_rest_is_left_at_once_and_never_cut() {
        let (mut unfit, start) = (Unfit::default(), Instant::now());
        let two = published(&[Readiness::Ready; 2]);
        let resting = two.members[0].rest.take();
        assert_eq!(unfit.look(&two, start), [(MemberId(1), Why::Rests)]);
        assert_eq!(unfit.look(&two, start), []);
        let slow = published(&[GONE, Readiness::Ready]);
        let slowed = slow.members[0].rest.take();
        assert_eq!(unfit.look(&slow, start + 2 * UNFIT), [], "it was left, and is meant to be slow");
        drop((resting, slowed));
        assert_eq!(unfit.look(&slow, start + 2 * UNFIT), []);
        assert_eq!(unfit.look(&slow, start + 3 * UNFIT), [(MemberId(1), Why::Unfit)]);
        let alone = published(&[Readiness::Ready]);
        let _resting = alone.members[0].rest.take();
        assert_eq!(Unfit::default().look(&alone, start), [], "there is nowhere to go");
    }
}
