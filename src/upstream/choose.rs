//! Which member gets a call.
//!
//! Owns: the choice among members as published, by what the call wants and how busy each is. Pure: no clock, no
//! sockets. Must not know: what the call is, who calls. Invariant: a learner, a member of another cluster or one that
//! is not ready is never chosen, unless it was named, or nothing that is ready is left and it merely was suspected.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use crate::identity::MemberId;
use crate::rpc::method::{Method, Target};
use crate::upstream::membership::{Member, Membership, Readiness};

/// Entries of the log that seconds of a heavy load leave. etcd itself refuses proposals from 5,000 on.
const BEHIND: u64 = 1000;

/// Chooses members; one per shard.
#[derive(Debug)]
pub struct Chooser {
    turn: Cell<usize>,
    dice: Cell<u64>,
}

impl Default for Chooser {
    fn default() -> Self {
        Self::seeded(RandomState::new().hash_one(0))
    }
}

impl Chooser {
    /// A chooser whose draws follow from `seed`: the same calls, the same choices.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self { turn: Cell::default(), dice: Cell::new(seed) }
    }

    /// A number below `limit`, for spreading things in time only.
    #[must_use]
    pub fn draw(&self, limit: u64) -> u64 {
        // xorshift64: never zero once it is not.
        let mut dice = self.dice.get() | 1;
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        self.dice.set(dice);
        dice % limit.max(1)
    }

    /// A member for a call that wants `target`. `home` is the client connection's own member, taken first where the
    /// target is `Home`. Members in `avoid` were just tried in vain and are taken last. `load` says how many calls a
    /// member has in flight. None where no member can serve it now.
    pub fn choose(
        &self,
        members: &Membership,
        wanted: Wanted,
        avoid: &[MemberId],
        load: impl Fn(MemberId) -> usize,
    ) -> Option<Arc<Member>> {
        let leader = || members.leader().cloned();
        match wanted {
            Wanted::Leader => leader(),
            Wanted::LeaderFirst => leader()
                .filter(|member| !avoid.contains(&member.id))
                .or_else(|| self.any(members, avoid, load)),
            Wanted::Spared => self.spared(members, avoid).or_else(leader),
            Wanted::Home(home) => home
                .and_then(|id| members.get(id))
                .filter(|member| member.is_ready() && !avoid.contains(&member.id))
                .cloned()
                .or_else(|| self.any(members, avoid, load)),
            Wanted::Any => self.any(members, avoid, load),
            Wanted::This(id) => members.get(id).cloned(),
        }
    }

    /// Power of two choices, the two taken in turn: idle members are used evenly, busy ones less.
    fn any(
        &self,
        members: &Membership,
        avoid: &[MemberId],
        load: impl Fn(MemberId) -> usize,
    ) -> Option<Arc<Member>> {
        let voters = || members.members.iter().filter(|member| member.readiness == Readiness::Ready);
        let good = || members.ready_voters().filter(|member| !avoid.contains(&member.id));
        let count = good().count();
        if count == 0 {
            // Better a member that may be back than a sure refusal: the tried ones last.
            let tried = |member: &&Arc<Member>| avoid.contains(&member.id);
            return voters().find(|member| !tried(member)).or_else(|| voters().next()).cloned();
        }
        let turn = self.turn.get();
        self.turn.set(turn.wrapping_add(1));
        let first = good().nth(turn % count)?;
        let second = good().nth((turn + 1) % count)?;
        let chosen = if load(second.id) < load(first.id) { second } else { first };
        Some(Arc::clone(chosen))
    }

    /// A ready follower, always the same while it is there: maintenance spares the leader. One that is behind says less
    /// than was acknowledged.
    fn spared(&self, members: &Membership, avoid: &[MemberId]) -> Option<Arc<Member>> {
        let followers = members
            .ready_voters()
            .filter(|member| Some(member.id) != members.leader && !avoid.contains(&member.id));
        followers.min_by_key(|member| (is_behind(member), member.id)).cloned()
    }
}

/// Whether the member has much left to apply of what it has in its log. At rest it is nothing, under load some tens.
fn is_behind(member: &Member) -> bool {
    member.vitals.as_ref().is_some_and(|vitals| vitals.unapplied() > BEHIND)
}

/// What kind of member a call wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Any ready voter.
    Any,
    /// The connection's own member, else any: what a client reads there never goes back.
    Home(Option<MemberId>),
    /// The leader and nobody else.
    Leader,
    /// The leader, else any.
    LeaderFirst,
    /// One member, a follower where there is one: Snapshot, Defragment.
    Spared,
    /// That member, ready or not: whoever names one wants to hear it from that one.
    This(MemberId),
}

impl Wanted {
    /// What the method table says. A call about one member's own state asks the leader where it only looks, so that
    /// Status, Hash and HashKV speak of the same member, and a follower where it is heavy.
    #[must_use]
    pub fn by(method: &Method) -> Self {
        match method.target {
            Target::AnyVoter => Self::Any,
            Target::Leader => Self::Leader,
            Target::LeaderFirst => Self::LeaderFirst,
            Target::OneMember if matches!(method.name, "Snapshot" | "Defragment") => Self::Spared,
            Target::OneMember => Self::LeaderFirst,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::upstream::membership::Reason;
    use crate::upstream::membership::tests::member;

    const NOBODY: [MemberId; 0] = [];

    fn members(readiness: &[Readiness]) -> Membership {
        let members = (1..).zip(readiness).map(|(id, readiness)| member(id, *readiness)).collect();
        Membership { leader: Some(MemberId(1)), members, ..Membership::unknown(Instant::now()) }
    }

    const DOWN: Readiness = Readiness::NotReady(Reason::Unreachable);
    const LEARNER: Readiness = Readiness::NotReady(Reason::Learner);

    /// Who is chosen in `turns` choices, all equally busy.
    fn chosen(members: &Membership, wanted: Wanted, avoid: &[MemberId], turns: usize) -> Vec<Option<u64>> {
        let chooser = Chooser::default();
        let choose = |_| chooser.choose(members, wanted, avoid, |_| 0).map(|member| member.id.0);
        (0..turns).map(choose).collect()
    }

    #[test]
    fn idle_members_take_turns_and_the_busier_of_two_is_spared() {
        let three = members(&[Readiness::Ready; 3]);
        assert_eq!(chosen(&three, Wanted::Any, &NOBODY, 4), [Some(1), Some(2), Some(3), Some(1)]);
        let chooser = Chooser::default();
        let busy = |id| usize::from(id == MemberId(2)) * 10;
        let chosen: Vec<_> = (0..6)
            .filter_map(|_| chooser.choose(&three, Wanted::Any, &NOBODY, busy))
            .map(|m| m.id.0)
            .collect();
        assert_eq!(chosen, [1, 3, 3, 1, 3, 3]);
    }

    #[test]
    fn what_is_not_ready_is_never_chosen() {
        let only_second = members(&[DOWN, Readiness::Ready, LEARNER]);
        for wanted in [Wanted::Any, Wanted::Home(Some(MemberId(1))), Wanted::LeaderFirst, Wanted::Spared] {
            assert_eq!(chosen(&only_second, wanted, &NOBODY, 3), [Some(2); 3], "{wanted:?}");
            // Tried in vain: still better than none.
            if wanted != Wanted::Spared {
                assert_eq!(chosen(&only_second, wanted, &[MemberId(2)], 2), [Some(2); 2], "{wanted:?}");
            }
        }
        assert_eq!(
            chosen(&only_second, Wanted::Leader, &NOBODY, 1),
            [None],
            "nobody stands in for the leader"
        );
        let none = members(&[DOWN, LEARNER]);
        for wanted in [Wanted::Any, Wanted::Home(None), Wanted::Leader, Wanted::LeaderFirst, Wanted::Spared] {
            assert_eq!(chosen(&none, wanted, &NOBODY, 1), [None], "{wanted:?}");
        }
    }

    #[test]
    fn the_tried_come_last() {
        let three = members(&[Readiness::Ready; 3]);
        let tried = [MemberId(1), MemberId(3)];
        for wanted in [Wanted::Any, Wanted::Home(Some(MemberId(1))), Wanted::LeaderFirst, Wanted::Spared] {
            assert_eq!(chosen(&three, wanted, &tried, 2), [Some(2); 2], "{wanted:?}");
        }
        assert_eq!(chosen(&three, Wanted::Leader, &tried, 1), [Some(1)], "there is only one");
    }

    #[test]
    fn a_suspected_member_is_taken_only_where_nothing_else_is_left() {
        let two = members(&[Readiness::Ready; 2]);
        two.members[0].suspect();
        for wanted in [Wanted::Any, Wanted::Home(Some(MemberId(1))), Wanted::LeaderFirst] {
            assert_eq!(chosen(&two, wanted, &NOBODY, 3), [Some(2); 3], "{wanted:?}");
        }
        two.members[1].suspect();
        assert_eq!(chosen(&two, Wanted::Any, &NOBODY, 1), [Some(1)]);
        assert_eq!(chosen(&two, Wanted::Any, &[MemberId(1)], 1), [Some(2)]);
        assert_eq!(chosen(&two, Wanted::Leader, &NOBODY, 1), [None]);
    }

    #[test]
    fn home_leader_and_spared_are_what_they_say() {
        let three = members(&[Readiness::Ready; 3]);
        assert_eq!(chosen(&three, Wanted::Home(Some(MemberId(3))), &NOBODY, 2), [Some(3); 2]);
        assert_eq!(chosen(&three, Wanted::Leader, &NOBODY, 2), [Some(1); 2]);
        assert_eq!(chosen(&three, Wanted::LeaderFirst, &NOBODY, 2), [Some(1); 2]);
        assert_eq!(chosen(&three, Wanted::Spared, &NOBODY, 2), [Some(2); 2]);
        let alone = members(&[Readiness::Ready]);
        assert_eq!(chosen(&alone, Wanted::Spared, &NOBODY, 1), [Some(1)], "the leader where it is alone");
    }

    #[test]
    fn the_table_says_what_a_call_wants() {
        let by = |path| Wanted::by(crate::rpc::method::lookup(path).unwrap());
        assert_eq!(by("/etcdserverpb.KV/Put"), Wanted::Any);
        assert_eq!(by("/etcdserverpb.Cluster/MemberPromote"), Wanted::Leader);
        assert_eq!(by("/etcdserverpb.Lease/LeaseTimeToLive"), Wanted::LeaderFirst);
        assert_eq!(by("/etcdserverpb.Maintenance/Status"), Wanted::LeaderFirst);
        assert_eq!(by("/etcdserverpb.Maintenance/Snapshot"), Wanted::Spared);
        assert_eq!(by("/etcdserverpb.Maintenance/Defragment"), Wanted::Spared);
    }
}
