//! Chooses a member to answer from its own store while the cluster has no quorum.
//!
//! Owns: the choice among answering members without a leader. Pure: no clock, no sockets. Must not know: the
//! content of the call, the caller. Invariants: no such member is chosen while a ready voter is left; each
//! chosen member is a voter of the pinned cluster; all shards choose the same member as long as the member
//! answers, so that a client's reads do not alternate between two stores.

use std::cmp::Reverse;
use std::sync::Arc;

use crate::choose::MemberTarget;
use crate::membership::{Member, Membership};
use keyward_etcd::identity::{MemberId, Revision};
use keyward_etcd::rpc::quorum::QuorumNeed;

/// Chooses a member without a leader for a call with need `need`. `None` if a ready voter is left, or if no
/// member can answer the call alone. Members in `tried` come last.
#[must_use]
pub fn choose_leaderless(
    members: &Membership,
    wanted: MemberTarget,
    need: QuorumNeed,
    tried: &[MemberId],
) -> Option<Arc<Member>> {
    if members.ready_voters().next().is_some() {
        return None;
    }
    let (home, floor) = match wanted {
        MemberTarget::Current { home, floor } => (home, floor),
        MemberTarget::Home(home) => (home, Revision(0)),
        // A call naming a member goes to the named member; `MemberChooser` finds the member, ready or not.
        MemberTarget::This(_) | MemberTarget::Leader => return None,
        MemberTarget::Any | MemberTarget::Near | MemberTarget::LeaderFirst | MemberTarget::Spared => {
            (None, Revision(0))
        }
    };
    let rank = |member: &&Arc<Member>| {
        let revision = member.known_revision();
        let is_tried = tried.contains(&member.id);
        let is_home = home == Some(member.id);
        // Highest revision first: the most advanced store gives the best snapshot.
        (is_tried, revision < floor, !is_home, Reverse(revision), member.id)
    };
    members.leaderless_voters().filter(|member| can_answer(member, need)).min_by_key(rank).cloned()
}

/// True if a call with need `need` has a member without a leader left outside `tried`.
#[must_use]
pub fn is_another_leaderless(
    members: &Membership,
    wanted: MemberTarget,
    need: QuorumNeed,
    tried: &[MemberId],
) -> bool {
    choose_leaderless(members, wanted, need, tried).is_some_and(|member| !tried.contains(&member.id))
}

/// True if a call with need `need`, waiting for `member`, would be sent to the same member and address now.
#[must_use]
pub fn is_still_asked(members: &Membership, member: &Member, need: QuorumNeed) -> bool {
    let now = members
        .get(member.id)
        .filter(|now| now.is_leaderless_voter() && now.connection_target() == member.connection_target());
    members.ready_voters().next().is_none() && now.is_some_and(|now| can_answer(now, need))
}

fn can_answer(member: &Member, need: QuorumNeed) -> bool {
    match need {
        QuorumNeed::Always => false,
        QuorumNeed::Never => true,
        QuorumNeed::SinceLinearizableList => member.traits().lists_members_alone,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::membership::{Readiness, Role, ServingState, UnreadyReason};
    use crate::test_member::member;
    use crate::version::Version;

    const ALONE: Readiness = Readiness::NotReady(UnreadyReason::NoLeader);
    const DOWN: Readiness = Readiness::NotReady(UnreadyReason::Unreachable);

    fn members(readiness: &[Readiness]) -> Membership {
        let members = (1..).zip(readiness).map(|(id, readiness)| member(id, *readiness)).collect();
        Membership { members, ..Membership::unknown(Instant::now()) }
    }

    fn chosen(members: &Membership, wanted: MemberTarget, tried: &[u64]) -> Option<u64> {
        let tried: Vec<MemberId> = tried.iter().copied().map(MemberId).collect();
        choose_leaderless(members, wanted, QuorumNeed::Never, &tried).map(|member| member.id.0)
    }

    #[test]
    fn a_member_without_a_leader_is_chosen_only_where_no_voter_is_ready() {
        assert_eq!(chosen(&members(&[DOWN, ALONE, DOWN]), MemberTarget::Any, &[]), Some(2));
        assert_eq!(chosen(&members(&[DOWN, ALONE, Readiness::Ready]), MemberTarget::Any, &[]), None);
        assert_eq!(chosen(&members(&[DOWN, DOWN]), MemberTarget::Any, &[]), None);
        let suspected = members(&[Readiness::Ready, ALONE]);
        suspected.members[0].suspect();
        assert_eq!(
            chosen(&suspected, MemberTarget::Any, &[]),
            Some(2),
            "the ready one was lost a moment ago"
        );
        suspected.members[1].suspect();
        assert_eq!(chosen(&suspected, MemberTarget::Any, &[]), None);
        let foreign = Readiness::NotReady(UnreadyReason::UnverifiedCluster);
        assert_eq!(chosen(&members(&[foreign, DOWN]), MemberTarget::Any, &[]), None);
        let mut learner = Member::clone(&member(1, ALONE));
        learner.role = Role::Learner;
        let mut with_learner = members(&[DOWN]);
        with_learner.members.push(Arc::new(learner));
        assert_eq!(chosen(&with_learner, MemberTarget::Any, &[]), None);
    }

    #[test]
    fn the_home_member_comes_first_then_the_furthest() {
        let two = members(&[ALONE, ALONE, DOWN]);
        assert_eq!(chosen(&two, MemberTarget::Spared, &[]), Some(1));
        two.members[1].load.record_revision(Revision(9));
        assert_eq!(chosen(&two, MemberTarget::Spared, &[]), Some(2));
        let current = |floor| MemberTarget::Current { home: Some(MemberId(1)), floor: Revision(floor) };
        assert_eq!(chosen(&two, current(0), &[]), Some(1));
        assert_eq!(chosen(&two, current(9), &[]), Some(2), "the home member is below what was shown");
        assert_eq!(chosen(&two, current(9), &[2]), Some(1), "what was tried comes last");
        assert_eq!(chosen(&two, MemberTarget::This(MemberId(1)), &[]), None);
        assert!(is_another_leaderless(&two, MemberTarget::Any, QuorumNeed::Never, &[MemberId(2)]));
        assert!(!is_another_leaderless(
            &two,
            MemberTarget::Any,
            QuorumNeed::Never,
            &[MemberId(1), MemberId(2)]
        ));
    }

    #[test]
    fn a_linearizable_member_list_is_answered_alone_before_3_5_only() {
        let of = |version: &str| {
            let mut alone = Member::clone(&member(1, ALONE));
            alone.version = Version::parse(version).ok();
            let members =
                Membership { members: vec![Arc::new(alone)], ..Membership::unknown(Instant::now()) };
            let need = QuorumNeed::SinceLinearizableList;
            choose_leaderless(&members, MemberTarget::Any, need, &[]).is_some()
        };
        assert!(of("3.4.23"));
        assert!(!of("3.5.1"));
        assert!(!of("3.7.3"));
        let all = members(&[ALONE]);
        assert!(choose_leaderless(&all, MemberTarget::Any, QuorumNeed::Always, &[]).is_none());
    }

    #[test]
    fn a_cluster_without_a_quorum_serves_local_reads() {
        assert_eq!(members(&[DOWN, ALONE]).serving(), ServingState::LocalReadsOnly);
        assert_eq!(members(&[DOWN, DOWN]).serving(), ServingState::NoReadyVoter);
    }
}
