//! Chooses the member for a call.
//!
//! Owns: the choice among the published members, by the call's target, and by each member's load and health.
//! Pure: no clock, no sockets. Must not know: the content of the call, the caller. Invariants: a learner, a
//! member of a different cluster, or an unready member is never chosen, unless named by the call, or merely
//! suspected with no ready member left; an ejected or lagging member is chosen only if no better member is
//! left.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::fitness::member_load::MemberLoad;
use crate::membership::{Fitness, Member, Membership, Readiness};
use keyward_etcd::identity::{MemberId, Revision};
use keyward_etcd::rpc::method::{CallTarget, Method};

/// Members count as equally fast if their latency is at most twice the lowest latency plus this value: a
/// follower asks the leader first, and a busy machine pauses, but neither justifies an uneven load. Well
/// below the cost of a slow disk or a distant zone.
const ALIKE: Duration = Duration::from_millis(15);
/// Among equally fast members, a member is too busy with more than twice the calls of another plus this
/// number: the slower of two members needs so many calls in flight to answer as many as the faster.
const BUSIER: u32 = 8;
/// Maximum number of unapplied entries in a member's own log for a Snapshot, which shows the store as
/// applied. One probe reports both figures, so the limit can be below
/// [`LAG`](crate::fitness::LAG): seconds of a heavy load.
const BEHIND: u64 = 1000;

/// Chooses members; one per shard.
#[derive(Debug)]
pub struct MemberChooser {
    turn: Cell<usize>,
    dice: Cell<u64>,
}

/// The comparison between fit members.
#[derive(Clone, Copy)]
pub enum MemberComparison<'a> {
    /// For short calls: by latency and calls in flight.
    Latency,
    /// For streams and rare calls: by this shard's load on the member.
    Load(&'a dyn Fn(MemberId) -> usize),
}

impl Default for MemberChooser {
    fn default() -> Self {
        Self::seeded(RandomState::new().hash_one(0))
    }
}

impl MemberChooser {
    /// A chooser with random draws derived from `seed`: equal calls lead to equal choices.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self { turn: Cell::default(), dice: Cell::new(seed) }
    }

    /// Draws a number below `limit`; for spreading load only, never for secrets.
    #[must_use]
    pub fn draw(&self, limit: u64) -> u64 {
        // xorshift64: a nonzero state never becomes zero.
        let mut dice = self.dice.get() | 1;
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        self.dice.set(dice);
        dice % limit.max(1)
    }

    /// Chooses a member for a call with target `wanted`. Members in `avoid` were just tried without success
    /// and come last. `None` if no member can serve the call now.
    pub fn choose(
        &self,
        members: &Membership,
        wanted: MemberTarget,
        avoid: &[MemberId],
        by: MemberComparison<'_>,
        now: Instant,
    ) -> Option<Arc<Member>> {
        let field = ChoiceCandidates::new(members, avoid, now);
        let any = || self.choose_any(&field, by).map(Arc::clone);
        let named = |id: Option<MemberId>| {
            let member = members.get(id?)?;
            field.is_fit(member).then(|| Arc::clone(member))
        };
        match wanted {
            MemberTarget::Leader => members.leader().or_else(|| members.paused_leader()).cloned(),
            MemberTarget::LeaderFirst => named(members.leader).or_else(any),
            MemberTarget::Spared => field.choose_follower().or_else(|| members.leader().cloned()),
            MemberTarget::Home(home) => named(home).or_else(any),
            MemberTarget::Current { home, floor } => {
                let current = |member: &Member| member.known_revision() >= floor;
                let home = named(home);
                home.clone()
                    .filter(|member| current(member))
                    .or_else(|| self.choose_of_two(&field, by, &|member| current(member)).map(Arc::clone))
                    .or(home)
                    .or_else(any)
            }
            MemberTarget::Near => self.near(&field, by).map(Arc::clone).or_else(any),
            MemberTarget::Any => any(),
            MemberTarget::This(id) => {
                let stays =
                    |member: &&Arc<Member>| member.is_ours() && !member.maintenance.is_being_removed();
                members.get(id).filter(stays).cloned()
            }
        }
    }

    /// True if a call with target `wanted` has a ready member left outside `tried`.
    #[must_use]
    pub fn has_another_member(members: &Membership, wanted: MemberTarget, tried: &[MemberId]) -> bool {
        let left = |member: &Arc<Member>| member.is_ready() && !tried.contains(&member.id);
        match wanted {
            MemberTarget::Leader => members.leader().is_some_and(left),
            MemberTarget::This(id) => members.get(id).is_some_and(left),
            _ => members.members.iter().any(left),
        }
    }

    /// Any fit member; else a ready member not tried; else a suspected member that may be back: better than a
    /// certain refusal.
    fn choose_any<'m>(
        &self,
        field: &ChoiceCandidates<'m>,
        by: MemberComparison<'_>,
    ) -> Option<&'m Arc<Member>> {
        let voters = || field.members.iter().filter(|member| member.readiness == Readiness::Ready);
        let untried = |member: &&Arc<Member>| !field.avoid.contains(&member.id);
        self.choose_of_two(field, by, &|_| true)
            .or_else(|| voters().filter(|member| member.is_ready()).find(untried))
            .or_else(|| voters().find(untried))
            .or_else(|| voters().next())
    }

    /// Power of two choices among the fit members accepted by `suits`: the first candidate by rotation, so
    /// that equal members get equal shares, the second by lot. The second wins if clearly better.
    fn choose_of_two<'m>(
        &self,
        field: &ChoiceCandidates<'m>,
        by: MemberComparison<'_>,
        suits: &dyn Fn(&Member) -> bool,
    ) -> Option<&'m Arc<Member>> {
        let good = || field.members.iter().filter(|member| field.is_fit(member) && suits(member));
        let count = good().count();
        if count == 0 {
            return None;
        }
        let turn = self.turn.get();
        self.turn.set(turn.wrapping_add(1));
        let first = good().nth(turn % count)?;
        if count == 1 {
            return Some(first);
        }
        let further = usize::try_from(self.draw(u64::try_from(count).unwrap_or(2) - 1)).unwrap_or(0);
        let second = good().nth((turn + 1 + further) % count)?;
        let better = match by {
            MemberComparison::Load(load) => load(second.id) < load(first.id),
            MemberComparison::Latency => field.is_better(second, first),
        };
        Some(if better { second } else { first })
    }

    /// A near member, unless a distant member is clearly better.
    fn near<'m>(&self, field: &ChoiceCandidates<'m>, by: MemberComparison<'_>) -> Option<&'m Arc<Member>> {
        let near = self.choose_of_two(field, by, &|member| member.load.is_near())?;
        let far = self.choose_of_two(field, by, &|member| !member.load.is_near());
        let far = far.filter(|far| matches!(by, MemberComparison::Latency) && field.is_better(far, near));
        Some(far.unwrap_or(near))
    }
}

/// The inputs of one choice.
struct ChoiceCandidates<'m> {
    members: &'m [Arc<Member>],
    leader: Option<MemberId>,
    avoid: &'m [MemberId],
    now: Instant,
    /// True if ejections count. Ejections are ignored if more than half of the ready voters are ejected.
    ejecting: bool,
    /// The highest latency of a member as fast as the fastest.
    alike: Duration,
}

impl<'m> ChoiceCandidates<'m> {
    fn new(members: &'m Membership, avoid: &'m [MemberId], now: Instant) -> Self {
        let (mut voters, mut ejected, mut fastest) = (0, 0, None);
        for member in members.ready_voters() {
            voters += 1;
            ejected += usize::from(member.load.ejected(now).is_some());
            fastest = fastest.into_iter().chain(member.load.latency()).min();
        }
        Self {
            members: &members.members,
            leader: members.leader,
            avoid,
            now,
            ejecting: ejected * 2 <= voters && ejected < voters,
            alike: fastest.unwrap_or_default() * 2 + ALIKE,
        }
    }

    fn is_fit(&self, member: &Member) -> bool {
        let fit = match member.fitness(self.now) {
            Fitness::Fit => true,
            Fitness::Ejected(_) => !self.ejecting,
            Fitness::InMaintenance | Fitness::Unready(_) | Fitness::Suspected | Fitness::Lagging => false,
        };
        fit && !self.avoid.contains(&member.id)
    }

    /// True if `second` is clearly better than `first` for a short call.
    fn is_better(&self, second: &Member, first: &Member) -> bool {
        let (second, first) = (&second.load, &first.load);
        if first.is_full() || second.is_full() {
            return !second.is_full();
        }
        let took = |load: &MemberLoad| match load.latency() {
            Some(latency) if latency > self.alike && load.is_due(self.now) => Duration::ZERO,
            latency => latency.unwrap_or_default(),
        };
        let (slower, faster) = (took(first), took(second));
        if slower.max(faster) <= self.alike {
            return first.in_flight() > second.in_flight().saturating_mul(2).saturating_add(BUSIER);
        }
        let calls = |load: &MemberLoad| load.in_flight().saturating_add(1);
        faster.saturating_mul(calls(second)) < slower.saturating_mul(calls(first))
    }

    /// A ready follower, always the same while available: maintenance calls spare the leader. Lagging
    /// followers come last, because the store of a lagging follower lacks acknowledged writes.
    fn choose_follower(&self) -> Option<Arc<Member>> {
        let followers = self.members.iter().filter(|member| {
            member.is_ready() && Some(member.id) != self.leader && !self.avoid.contains(&member.id)
        });
        let rank = |member: &&Arc<Member>| (!self.is_fit(member), is_behind(member), member.id);
        followers.min_by_key(rank).cloned()
    }
}

/// True if the member has many unapplied entries in its own log. An idle member has none, a loaded member
/// some tens.
fn is_behind(member: &Member) -> bool {
    member.store_status.as_ref().is_some_and(|store_status| store_status.unapplied() > BEHIND)
}

/// The kind of member required or preferred by a call; `rpc::method::CallTarget` is the column of the method
/// table from which the kind is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberTarget {
    /// Any ready voter.
    Any,
    /// Any ready voter, preferably a near one by configuration.
    Near,
    /// The connection's home member, else any: revisions read by a client never go back on the home member.
    Home(Option<MemberId>),
    /// The home member if known to have applied `floor`, else any such member, else as `Home`.
    Current {
        /// The connection's home member.
        home: Option<MemberId>,
        /// The highest revision shown to the client.
        floor: Revision,
    },
    /// Only the leader.
    Leader,
    /// The leader, else any.
    LeaderFirst,
    /// Always the same member, a follower if available: Snapshot, Defragment.
    Spared,
    /// The named member, ready or not, because the client wants the answer of exactly this member. Never a
    /// member being removed: a Status would crash the member.
    This(MemberId),
}

impl MemberTarget {
    /// The target in the method table. A call about one member's own state goes to the leader if cheap, so
    /// that Status, Hash and HashKV describe the same member, and to a follower if expensive.
    #[must_use]
    pub fn by(method: &Method) -> Self {
        match method.target {
            CallTarget::AnyVoter => Self::Any,
            CallTarget::Leader => Self::Leader,
            CallTarget::LeaderFirst => Self::LeaderFirst,
            CallTarget::OneMember if matches!(method.name, "Snapshot" | "Defragment") => Self::Spared,
            CallTarget::OneMember => Self::LeaderFirst,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::membership::UnreadyReason;
    use crate::test_member::member;

    const NOBODY: [MemberId; 0] = [];

    fn members(readiness: &[Readiness]) -> Membership {
        let members = (1..).zip(readiness).map(|(id, readiness)| member(id, *readiness)).collect();
        Membership { leader: Some(MemberId(1)), members, ..Membership::unknown(Instant::now()) }
    }

    const DOWN: Readiness = Readiness::NotReady(UnreadyReason::Unreachable);
    const LEARNER: Readiness = Readiness::NotReady(UnreadyReason::Learner);

    const NOW: fn() -> Instant = || Instant::now() + MS;
    const MS: Duration = Duration::from_millis(1);

    /// The members chosen in `turns` choices, all equally busy.
    fn chosen(
        members: &Membership,
        wanted: MemberTarget,
        avoid: &[MemberId],
        turns: usize,
    ) -> Vec<Option<u64>> {
        let chooser = MemberChooser::default();
        let choose = |_| {
            let chosen = chooser.choose(members, wanted, avoid, MemberComparison::Load(&|_| 0), NOW());
            chosen.map(|member| member.id.0)
        };
        (0..turns).map(choose).collect()
    }

    /// The number of choices of each of three members, in 3,000 choices for short calls.
    fn shares(members: &Membership, wanted: MemberTarget, now: Instant) -> [usize; 3] {
        let chooser = MemberChooser::seeded(7);
        let mut shares = [0; 3];
        for _ in 0..3000 {
            let chosen =
                chooser.choose(members, wanted, &NOBODY, MemberComparison::Latency, now).expect("a member");
            shares[usize::try_from(chosen.id.0).unwrap() - 1] += 1;
        }
        shares
    }

    fn took(members: &Membership, now: Instant, took: [Duration; 3]) {
        for (member, took) in members.members.iter().zip(took) {
            (0..50).for_each(|_| member.load.answered(now, took));
        }
    }

    #[test]
    fn idle_members_take_turns_and_the_busier_of_two_is_spared() {
        let three = members(&[Readiness::Ready; 3]);
        assert_eq!(chosen(&three, MemberTarget::Any, &NOBODY, 4), [Some(1), Some(2), Some(3), Some(1)]);
        let chooser = MemberChooser::seeded(7);
        let busy = |id| usize::from(id == MemberId(2)) * 10;
        let chosen: Vec<_> = (0..300)
            .filter_map(|_| {
                chooser.choose(&three, MemberTarget::Any, &NOBODY, MemberComparison::Load(&busy), NOW())
            })
            .map(|m| m.id.0)
            .collect();
        assert!(!chosen.contains(&2), "its turns go to the others");
        assert_eq!(chosen.len(), 300);
    }

    #[test]
    fn members_that_are_a_little_slower_get_their_share_all_the_same() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        assert_eq!(shares(&three, MemberTarget::Any, now), [1000; 3], "nothing is known yet");
        took(&three, now, [MS, 3 * MS, 9 * MS]);
        assert_eq!(shares(&three, MemberTarget::Any, now), [1000; 3]);
        // Slower members have more calls in flight under the same load.
        for (member, calls) in three.members.iter().zip([5, 10, 17]) {
            (0..calls).for_each(|_| member.load.enter(now));
        }
        assert_eq!(shares(&three, MemberTarget::Any, now), [1000; 3]);
        (0..40).for_each(|_| three.members[2].load.enter(now));
        assert_eq!(shares(&three, MemberTarget::Any, now)[2], 0, "too many");
    }

    #[test]
    fn a_slow_member_gets_what_the_others_are_too_busy_for_and_now_and_then_one() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        took(&three, now, [MS, MS, 50 * MS]);
        assert_eq!(shares(&three, MemberTarget::Any, now)[2], 0);
        assert_eq!(
            shares(&three, MemberTarget::Any, now + Duration::from_secs(1))[2],
            1000,
            "it is tried again"
        );
        three.members[2].load.enter(now);
        assert_eq!(shares(&three, MemberTarget::Any, now + Duration::from_secs(1))[2], 0, "by one call");
        three.members[..2].iter().for_each(|member| (0..200).for_each(|_| member.load.enter(now)));
        assert!(shares(&three, MemberTarget::Any, now)[2] > 0, "slow is better than crowded");
    }

    #[test]
    fn a_returned_member_gets_as_many_as_it_has_proved() {
        let three = members(&[Readiness::Ready; 3]);
        let (now, back) = (NOW(), &three.members[1]);
        back.suspect();
        back.suspicion.clear(back.suspicion.mark());
        assert_eq!(shares(&three, MemberTarget::Any, now), [1000; 3]);
        back.load.enter(now);
        assert_eq!(shares(&three, MemberTarget::Any, now)[1], 0, "one, and then its answer");
        back.load.answered(now, MS);
        assert_eq!(shares(&three, MemberTarget::Any, now)[1], 1000);
    }

    #[test]
    fn what_is_ejected_or_lags_is_left_out_while_something_better_is_left() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        three.members[0].load.eject(now, crate::fitness::member_load::Ejection::Slow);
        for wanted in [MemberTarget::Any, MemberTarget::Home(Some(MemberId(1))), MemberTarget::LeaderFirst] {
            assert_eq!(shares(&three, wanted, now)[0], 0, "{wanted:?}");
        }
        assert_eq!(
            chosen(&three, MemberTarget::Leader, &NOBODY, 1),
            [Some(1)],
            "nobody stands in for the leader"
        );
        three.members[1].load.set_lag_and_nearness(crate::fitness::LAG + 1, false);
        assert_eq!(shares(&three, MemberTarget::Any, now), [0, 0, 3000]);
        three.members[2].load.eject(now, crate::fitness::member_load::Ejection::Slow);
        assert_eq!(shares(&three, MemberTarget::Any, now), [1500, 0, 1500], "more than half: none counts");
    }

    #[test]
    fn the_near_serve_reads_unless_others_are_clearly_better() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        assert_eq!(shares(&three, MemberTarget::Near, now).iter().sum::<usize>(), 3000, "none is near");
        three.members[1].load.set_lag_and_nearness(0, true);
        assert_eq!(shares(&three, MemberTarget::Near, now), [0, 3000, 0]);
        (0..100).for_each(|_| three.members[1].load.enter(now));
        assert_eq!(shares(&three, MemberTarget::Near, now)[1], 0);
        three.members[1].suspect();
        assert_eq!(shares(&three, MemberTarget::Near, now)[1], 0);
    }

    #[test]
    fn a_local_read_goes_home_or_to_whom_it_finds_no_further_back() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        let current = |floor| MemberTarget::Current { home: Some(MemberId(1)), floor: Revision(floor) };
        assert_eq!(shares(&three, current(0), now), [3000, 0, 0]);
        assert_eq!(shares(&three, current(5), now), [3000, 0, 0], "nobody is known to be there");
        three.members[1].load.record_revision(Revision(5));
        assert_eq!(shares(&three, current(5), now), [0, 3000, 0]);
        three.members[0].load.record_revision(Revision(7));
        assert_eq!(shares(&three, current(5), now), [3000, 0, 0]);
        three.members[1].suspect();
        assert_eq!(shares(&three, current(8), now), [3000, 0, 0]);
    }

    #[test]
    fn what_is_not_ready_is_never_chosen() {
        let only_second = members(&[DOWN, Readiness::Ready, LEARNER]);
        for wanted in [
            MemberTarget::Any,
            MemberTarget::Home(Some(MemberId(1))),
            MemberTarget::LeaderFirst,
            MemberTarget::Spared,
        ] {
            assert_eq!(chosen(&only_second, wanted, &NOBODY, 3), [Some(2); 3], "{wanted:?}");
            // A member tried without success is still better than no member.
            if wanted != MemberTarget::Spared {
                assert_eq!(chosen(&only_second, wanted, &[MemberId(2)], 2), [Some(2); 2], "{wanted:?}");
            }
        }
        assert_eq!(
            chosen(&only_second, MemberTarget::Leader, &NOBODY, 1),
            [None],
            "nobody stands in for the leader"
        );
        let none = members(&[DOWN, LEARNER]);
        for wanted in [
            MemberTarget::Any,
            MemberTarget::Home(None),
            MemberTarget::Leader,
            MemberTarget::LeaderFirst,
            MemberTarget::Spared,
        ] {
            assert_eq!(chosen(&none, wanted, &NOBODY, 1), [None], "{wanted:?}");
        }
    }

    #[test]
    fn the_tried_come_last() {
        let three = members(&[Readiness::Ready; 3]);
        let tried = [MemberId(1), MemberId(3)];
        for wanted in [
            MemberTarget::Any,
            MemberTarget::Home(Some(MemberId(1))),
            MemberTarget::LeaderFirst,
            MemberTarget::Spared,
        ] {
            assert_eq!(chosen(&three, wanted, &tried, 2), [Some(2); 2], "{wanted:?}");
        }
        assert_eq!(chosen(&three, MemberTarget::Leader, &tried, 1), [Some(1)], "there is only one");
    }

    #[test]
    fn a_suspected_member_is_taken_only_where_nothing_else_is_left() {
        let two = members(&[Readiness::Ready; 2]);
        two.members[0].suspect();
        for wanted in [MemberTarget::Any, MemberTarget::Home(Some(MemberId(1))), MemberTarget::LeaderFirst] {
            assert_eq!(chosen(&two, wanted, &NOBODY, 3), [Some(2); 3], "{wanted:?}");
        }
        two.members[1].suspect();
        assert_eq!(chosen(&two, MemberTarget::Any, &NOBODY, 1), [Some(1)]);
        assert_eq!(chosen(&two, MemberTarget::Any, &[MemberId(1)], 1), [Some(2)]);
        assert_eq!(chosen(&two, MemberTarget::Leader, &NOBODY, 1), [None]);
    }

    #[test]
    fn home_leader_and_spared_are_what_they_say() {
        let three = members(&[Readiness::Ready; 3]);
        assert_eq!(chosen(&three, MemberTarget::Home(Some(MemberId(3))), &NOBODY, 2), [Some(3); 2]);
        assert_eq!(chosen(&three, MemberTarget::Leader, &NOBODY, 2), [Some(1); 2]);
        assert_eq!(chosen(&three, MemberTarget::LeaderFirst, &NOBODY, 2), [Some(1); 2]);
        assert_eq!(chosen(&three, MemberTarget::Spared, &NOBODY, 2), [Some(2); 2]);
        let alone = members(&[Readiness::Ready]);
        assert_eq!(
            chosen(&alone, MemberTarget::Spared, &NOBODY, 1),
            [Some(1)],
            "the leader where it is alone"
        );
    }

    #[test]
    fn the_table_says_what_a_call_wants() {
        let by = |path| MemberTarget::by(keyward_etcd::rpc::method::lookup(path).unwrap());
        assert_eq!(by("/etcdserverpb.KV/Put"), MemberTarget::Any);
        assert_eq!(by("/etcdserverpb.Cluster/MemberPromote"), MemberTarget::Leader);
        assert_eq!(by("/etcdserverpb.Lease/LeaseTimeToLive"), MemberTarget::LeaderFirst);
        assert_eq!(by("/etcdserverpb.Maintenance/Status"), MemberTarget::LeaderFirst);
        assert_eq!(by("/etcdserverpb.Maintenance/Snapshot"), MemberTarget::Spared);
        assert_eq!(by("/etcdserverpb.Maintenance/Defragment"), MemberTarget::Spared);
    }
}
