//! Which member gets a call.
//!
//! Owns: the choice among members as published, by what the call wants, how busy each is and how it bears that. Pure: no
//! clock, no sockets. Must not know: what the call is, who calls. Invariants: a learner, a member of another cluster or one
//! that is not ready is never chosen, unless it was named, or nothing that is ready is left and it merely was suspected; what
//! is ejected, or lags, is chosen where nothing better is left.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::identity::{MemberId, Revision};
use crate::rpc::method::{Method, Target};
use crate::upstream::conduct::Conduct;
use crate::upstream::membership::{Member, Membership, Readiness};

/// Members whose answers take at most twice as long as the fastest's, and this, are equally fast: a follower asks the
/// leader first, a busy machine pauses, and neither is worth an uneven load. Well below what a slow disk or a far zone costs.
const ALIKE: Duration = Duration::from_millis(15);
/// Of equally fast members one is too busy when it has twice as many calls as another, and this many more: what the slower
/// of two must have under way to answer as many as the faster.
const BUSIER: u32 = 8;
/// Raft entries that a member may be behind ([`Membership::lag`]), for calls that any serves. etcd itself refuses writes at a member
/// that has 5,000 left to apply; members are probed up to half a second apart, in which a fast cluster writes some thousand more,
/// so that a smaller figure may be no lag at all.
pub const LAG: u64 = 10_000;
/// Entries of its own log that a member may have left to apply, for what shows its store as it is: Snapshot. One probe tells both
/// figures, so that this one can be smaller than [`LAG`]: seconds of a heavy load.
const BEHIND: u64 = 1000;

/// Chooses members; one per shard.
#[derive(Debug)]
pub struct Chooser {
    turn: Cell<usize>,
    dice: Cell<u64>,
}

/// How a choice compares members that are fit.
#[derive(Clone, Copy)]
pub enum By<'a> {
    /// For short calls: by how fast they answer and how many calls wait for them.
    Conduct,
    /// For streams and what is rare: by how much this shard has on them.
    Load(&'a dyn Fn(MemberId) -> usize),
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

    /// A number below `limit`, for spreading things only.
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

    /// A member for a call that wants `wanted`. Members in `avoid` were just tried in vain and are taken last. None where no
    /// member can serve it now.
    pub fn choose(
        &self,
        members: &Membership,
        wanted: Wanted,
        avoid: &[MemberId],
        by: By<'_>,
        now: Instant,
    ) -> Option<Arc<Member>> {
        let field = Field::new(members, avoid, now);
        let any = || self.any(&field, by).map(Arc::clone);
        let named = |id: Option<MemberId>| {
            let member = members.get(id?)?;
            field.is_fit(member).then(|| Arc::clone(member))
        };
        match wanted {
            Wanted::Leader => members.leader().cloned(),
            Wanted::LeaderFirst => named(members.leader).or_else(any),
            Wanted::Spared => field.spared().or_else(|| members.leader().cloned()),
            Wanted::Home(home) => named(home).or_else(any),
            Wanted::Current { home, floor } => {
                let current = |member: &Member| member.known_revision() >= floor;
                let home = named(home);
                home.clone()
                    .filter(|member| current(member))
                    .or_else(|| self.one(&field, by, &|member| current(member)).map(Arc::clone))
                    .or(home)
                    .or_else(any)
            }
            Wanted::Near => self.near(&field, by).map(Arc::clone).or_else(any),
            Wanted::Any => any(),
            Wanted::This(id) => {
                let stays = |member: &&Arc<Member>| member.is_ours() && !member.rest.is_being_removed();
                members.get(id).filter(stays).cloned()
            }
        }
    }

    /// Whether a call that wants `wanted` has a ready member left that is not among `tried`.
    #[must_use]
    pub fn another(members: &Membership, wanted: Wanted, tried: &[MemberId]) -> bool {
        let left = |member: &Arc<Member>| member.is_ready() && !tried.contains(&member.id);
        match wanted {
            Wanted::Leader => members.leader().is_some_and(left),
            Wanted::This(id) => members.get(id).is_some_and(left),
            _ => members.members.iter().any(left),
        }
    }

    /// Anyone that is fit; else what is ready and was not tried; else what may be back: better than a sure refusal.
    fn any<'m>(&self, field: &Field<'m>, by: By<'_>) -> Option<&'m Arc<Member>> {
        let voters = || field.members.iter().filter(|member| member.readiness == Readiness::Ready);
        let untried = |member: &&Arc<Member>| !field.avoid.contains(&member.id);
        self.one(field, by, &|_| true)
            .or_else(|| voters().filter(|member| member.is_ready()).find(untried))
            .or_else(|| voters().find(untried))
            .or_else(|| voters().next())
    }

    /// Power of two choices among those that are fit and `suit`: one whose turn it is, so that equals are used evenly, and
    /// another by lot, which takes its place where that is clearly better.
    fn one<'m>(
        &self,
        field: &Field<'m>,
        by: By<'_>,
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
            By::Load(load) => load(second.id) < load(first.id),
            By::Conduct => field.is_better(second, first),
        };
        Some(if better { second } else { first })
    }

    /// One that is near, unless one that is not is clearly better.
    fn near<'m>(&self, field: &Field<'m>, by: By<'_>) -> Option<&'m Arc<Member>> {
        let near = self.one(field, by, &|member| member.conduct.is_near())?;
        let far = self.one(field, by, &|member| !member.conduct.is_near());
        let far = far.filter(|far| matches!(by, By::Conduct) && field.is_better(far, near));
        Some(far.unwrap_or(near))
    }
}

/// What one choice is made among.
struct Field<'m> {
    members: &'m [Arc<Member>],
    leader: Option<MemberId>,
    avoid: &'m [MemberId],
    now: Instant,
    /// Whether ejections count: not where more than half would be out.
    ejecting: bool,
    /// The longest that an answer may take of a member which is as fast as the fastest.
    alike: Duration,
}

impl<'m> Field<'m> {
    fn new(members: &'m Membership, avoid: &'m [MemberId], now: Instant) -> Self {
        let (mut voters, mut ejected, mut fastest) = (0, 0, None);
        for member in members.ready_voters() {
            voters += 1;
            ejected += usize::from(member.conduct.ejected(now).is_some());
            fastest = fastest.into_iter().chain(member.conduct.latency()).min();
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
        member.is_ready()
            && !(self.ejecting && member.conduct.ejected(self.now).is_some())
            && member.conduct.lag() <= LAG
            && !self.avoid.contains(&member.id)
    }

    /// Whether `second` is clearly better than `first` for a short call.
    fn is_better(&self, second: &Member, first: &Member) -> bool {
        let (second, first) = (&second.conduct, &first.conduct);
        if first.is_full() || second.is_full() {
            return !second.is_full();
        }
        let took = |conduct: &Conduct| match conduct.latency() {
            Some(latency) if latency > self.alike && conduct.is_due(self.now) => Duration::ZERO,
            latency => latency.unwrap_or_default(),
        };
        let (slower, faster) = (took(first), took(second));
        if slower.max(faster) <= self.alike {
            return first.in_flight() > second.in_flight().saturating_mul(2).saturating_add(BUSIER);
        }
        let calls = |conduct: &Conduct| conduct.in_flight().saturating_add(1);
        faster.saturating_mul(calls(second)) < slower.saturating_mul(calls(first))
    }

    /// A ready follower, always the same while it is there: maintenance spares the leader. One that is behind says less
    /// than was acknowledged.
    fn spared(&self) -> Option<Arc<Member>> {
        let followers = self.members.iter().filter(|member| {
            member.is_ready() && Some(member.id) != self.leader && !self.avoid.contains(&member.id)
        });
        let rank = |member: &&Arc<Member>| (!self.is_fit(member), is_behind(member), member.id);
        followers.min_by_key(rank).cloned()
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
    /// Any, those that the configuration calls near before others.
    Near,
    /// The connection's own member, else any: what a client reads there never goes back.
    Home(Option<MemberId>),
    /// The connection's own member or another that is known to have applied this revision, else as `Home`.
    Current {
        /// The connection's own member.
        home: Option<MemberId>,
        /// What the client was shown.
        floor: Revision,
    },
    /// The leader and nobody else.
    Leader,
    /// The leader, else any.
    LeaderFirst,
    /// One member, a follower where there is one: Snapshot, Defragment.
    Spared,
    /// That member, ready or not: whoever names one wants to hear it from that one. Not one whose removal is under way: a Status
    /// would crash it.
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

    const NOW: fn() -> Instant = || Instant::now() + MS;
    const MS: Duration = Duration::from_millis(1);

    /// Who is chosen in `turns` choices, all equally busy.
    fn chosen(members: &Membership, wanted: Wanted, avoid: &[MemberId], turns: usize) -> Vec<Option<u64>> {
        let chooser = Chooser::default();
        let choose = |_| {
            let chosen = chooser.choose(members, wanted, avoid, By::Load(&|_| 0), NOW());
            chosen.map(|member| member.id.0)
        };
        (0..turns).map(choose).collect()
    }

    /// How often each of three is chosen in 3,000 choices for short calls.
    fn shares(members: &Membership, wanted: Wanted, now: Instant) -> [usize; 3] {
        let chooser = Chooser::seeded(7);
        let mut shares = [0; 3];
        for _ in 0..3000 {
            let chosen = chooser.choose(members, wanted, &NOBODY, By::Conduct, now).expect("a member");
            shares[usize::try_from(chosen.id.0).unwrap() - 1] += 1;
        }
        shares
    }

    fn took(members: &Membership, now: Instant, took: [Duration; 3]) {
        for (member, took) in members.members.iter().zip(took) {
            (0..50).for_each(|_| member.conduct.answered(now, took));
        }
    }

    #[test]
    fn idle_members_take_turns_and_the_busier_of_two_is_spared() {
        let three = members(&[Readiness::Ready; 3]);
        assert_eq!(chosen(&three, Wanted::Any, &NOBODY, 4), [Some(1), Some(2), Some(3), Some(1)]);
        let chooser = Chooser::seeded(7);
        let busy = |id| usize::from(id == MemberId(2)) * 10;
        let chosen: Vec<_> = (0..300)
            .filter_map(|_| chooser.choose(&three, Wanted::Any, &NOBODY, By::Load(&busy), NOW()))
            .map(|m| m.id.0)
            .collect();
        assert!(!chosen.contains(&2), "its turns go to the others");
        assert_eq!(chosen.len(), 300);
    }

    #[test]
    fn members_that_are_a_little_slower_get_their_share_all_the_same() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        assert_eq!(shares(&three, Wanted::Any, now), [1000; 3], "nothing is known yet");
        took(&three, now, [MS, 3 * MS, 9 * MS]);
        assert_eq!(shares(&three, Wanted::Any, now), [1000; 3]);
        // What that comes to under a load: the slower have more under way.
        for (member, calls) in three.members.iter().zip([5, 10, 17]) {
            (0..calls).for_each(|_| member.conduct.enter(now));
        }
        assert_eq!(shares(&three, Wanted::Any, now), [1000; 3]);
        (0..40).for_each(|_| three.members[2].conduct.enter(now));
        assert_eq!(shares(&three, Wanted::Any, now)[2], 0, "too many");
    }

    #[test]
    fn a_slow_member_gets_what_the_others_are_too_busy_for_and_now_and_then_one() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        took(&three, now, [MS, MS, 50 * MS]);
        assert_eq!(shares(&three, Wanted::Any, now)[2], 0);
        assert_eq!(shares(&three, Wanted::Any, now + Duration::from_secs(1))[2], 1000, "it is tried again");
        three.members[2].conduct.enter(now);
        assert_eq!(shares(&three, Wanted::Any, now + Duration::from_secs(1))[2], 0, "by one call");
        three.members[..2].iter().for_each(|member| (0..200).for_each(|_| member.conduct.enter(now)));
        assert!(shares(&three, Wanted::Any, now)[2] > 0, "slow is better than crowded");
    }

    #[test]
    fn a_returned_member_gets_as_many_as_it_has_proved() {
        let three = members(&[Readiness::Ready; 3]);
        let (now, back) = (NOW(), &three.members[1]);
        back.suspect();
        back.suspicion.clear(back.suspicion.mark());
        assert_eq!(shares(&three, Wanted::Any, now), [1000; 3]);
        back.conduct.enter(now);
        assert_eq!(shares(&three, Wanted::Any, now)[1], 0, "one, and then its answer");
        back.conduct.answered(now, MS);
        assert_eq!(shares(&three, Wanted::Any, now)[1], 1000);
    }

    #[test]
    fn what_is_ejected_or_lags_is_left_out_while_something_better_is_left() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        three.members[0].conduct.eject(now, crate::upstream::conduct::Ejection::Slow);
        for wanted in [Wanted::Any, Wanted::Home(Some(MemberId(1))), Wanted::LeaderFirst] {
            assert_eq!(shares(&three, wanted, now)[0], 0, "{wanted:?}");
        }
        assert_eq!(chosen(&three, Wanted::Leader, &NOBODY, 1), [Some(1)], "nobody stands in for the leader");
        three.members[1].conduct.place(LAG + 1, false);
        assert_eq!(shares(&three, Wanted::Any, now), [0, 0, 3000]);
        three.members[2].conduct.eject(now, crate::upstream::conduct::Ejection::Slow);
        assert_eq!(shares(&three, Wanted::Any, now), [1500, 0, 1500], "more than half: none counts");
    }

    #[test]
    fn the_near_serve_reads_unless_others_are_clearly_better() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        assert_eq!(shares(&three, Wanted::Near, now).iter().sum::<usize>(), 3000, "none is near");
        three.members[1].conduct.place(0, true);
        assert_eq!(shares(&three, Wanted::Near, now), [0, 3000, 0]);
        (0..100).for_each(|_| three.members[1].conduct.enter(now));
        assert_eq!(shares(&three, Wanted::Near, now)[1], 0);
        three.members[1].suspect();
        assert_eq!(shares(&three, Wanted::Near, now)[1], 0);
    }

    #[test]
    fn a_local_read_goes_home_or_to_whom_it_finds_no_further_back() {
        let three = members(&[Readiness::Ready; 3]);
        let now = NOW();
        let current = |floor| Wanted::Current { home: Some(MemberId(1)), floor: Revision(floor) };
        assert_eq!(shares(&three, current(0), now), [3000, 0, 0]);
        assert_eq!(shares(&three, current(5), now), [3000, 0, 0], "nobody is known to be there");
        three.members[1].conduct.saw(Revision(5));
        assert_eq!(shares(&three, current(5), now), [0, 3000, 0]);
        three.members[0].conduct.saw(Revision(7));
        assert_eq!(shares(&three, current(5), now), [3000, 0, 0]);
        three.members[1].suspect();
        assert_eq!(shares(&three, current(8), now), [3000, 0, 0]);
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
