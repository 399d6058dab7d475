//! Streams leave a member that takes no traffic any more.
//!
//! A stopped or partitioned member keeps its connections: a watch on it hears nothing, and nobody says so before HTTP/2's
//! own pings fail, many seconds later. The members' task knows sooner.
//!
//! Owns: for how long a member must have been unfit before its stream connections are given up; that connections are left at
//! once which lead to where no member is any more. Must not know: what the streams carry; each begins anew elsewhere by its own
//! rules. Invariants: nothing leaves while no other member could take it; short calls are left to their end, since the outcome
//! of a write would be lost with its connection.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::identity::MemberId;
use crate::rpc::method::Lane;
use crate::upstream::membership::{Membership, Readiness, Reason};
use crate::upstream::send::Door;

/// A member is left after so long without one good probe: several have failed in a row by then, and a pause of a busy
/// machine is over. Well below the 15 s of HTTP/2's pings.
const UNFIT: Duration = Duration::from_secs(3);

/// Since when members are unfit; pure.
#[derive(Debug, Default)]
struct Unfit(BTreeMap<MemberId, Since>);

#[derive(Debug)]
struct Since {
    at: Instant,
    left: bool,
}

impl Unfit {
    /// Takes in what is published now; returns the members to leave now.
    fn look(&mut self, members: &Membership, now: Instant) -> Vec<MemberId> {
        let unfit = |id: &MemberId| {
            let readiness = members.get(*id).map(|member| member.readiness);
            matches!(readiness, Some(Readiness::NotReady(reason)) if reason != Reason::Unprobed)
        };
        self.0.retain(|id, _| unfit(id));
        for id in members.members.iter().map(|member| member.id).filter(unfit) {
            self.0.entry(id).or_insert(Since { at: now, left: false });
        }
        if members.ready_voters().next().is_none() {
            return Vec::new();
        }
        let due = self.0.iter_mut().filter(|(_, since)| !since.left && now >= since.at + UNFIT);
        due.map(|(id, since)| {
            since.left = true;
            *id
        })
        .collect()
    }

    /// When to look again though nothing new was published.
    fn next(&self) -> Option<Instant> {
        self.0.values().filter(|since| !since.left).map(|since| since.at + UNFIT).min()
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
        for member in unfit.look(&members, now) {
            let given_up = door.pool.give_up(member, Lane::Stream);
            if given_up > 0 {
                tracing::info!(%member, connections = given_up, "streams leave a member that does not serve");
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
    use std::sync::Arc;

    use super::*;
    use crate::config::{Endpoint, Scheme};
    use crate::upstream::membership::{Member, Role};

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
        assert_eq!(unfit.look(&one_gone, start + UNFIT), [MemberId(1)]);
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
        assert_eq!(unfit.look(&published(&[GONE, Readiness::Ready]), start + UNFIT), [MemberId(1)]);
    }

    #[test]
    fn a_member_that_was_never_asked_is_not_unfit() {
        let (mut unfit, start) = (Unfit::default(), Instant::now());
        unfit.look(&published(&[Readiness::NotReady(Reason::Unprobed), Readiness::Ready]), start);
        assert_eq!(unfit.next(), None);
    }
}
