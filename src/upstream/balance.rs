//! What follows from how members bear their calls: who is ejected, who is suspected of hanging, and which calls are told
//! to look again.
//!
//! A hung member keeps its connections and says nothing; two late probes take seconds to tell. Calls see it sooner: several
//! wait, none is answered, while others are answered elsewhere.
//!
//! Owns: the rules that compare members with each other. Must not know: what a call is, who chooses. Invariants: nobody is
//! ejected or suspected by calls while nobody else was heard: then it is the cluster, not the member; never more than half of
//! the ready voters are ejected, never the last; a call leaves a member only when that is unready, gone from where the call
//! waits, or suspected for as long as a probe of a member that is well takes to clear it.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::config::Endpoint;
use crate::identity::MemberId;
use crate::upstream::conduct::{Ejection, STALLED_FOR};
use crate::upstream::membership::{Hint, Member, Membership, Readiness, Spot};
use crate::upstream::send::Door;

/// Whoever was heard so lately is well.
const LATELY: Duration = Duration::from_secs(1);
/// A call that nobody answered for so long speaks against its member, when it ends.
const UNANSWERED: Duration = Duration::from_secs(1);
/// Where even the fastest member is slow, each of these times is no shorter than so many times what that one takes: a member is
/// slow only beside others.
const PATIENCE: u32 = 4;
/// Far slower than the rest: so many times the slowest of the others, and this more.
const FAR_TIMES: u32 = 5;
const FAR_MORE: Duration = Duration::from_millis(100);
/// Between two looks at what hangs.
const LOOK: Duration = Duration::from_millis(100);
/// How long a suspicion must stand before calls leave: a hint brings a probe within 100 ms, and a member that is well
/// answers it in a few more.
const GRACE: Duration = Duration::from_millis(250);

/// What the time says that a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// How fast the member is: all calls of this kind take about as long.
    Tells,
    /// Nothing: its client can make it as slow as it likes.
    TellsNothing,
}

/// A call that waits for a member's answer. Dropped, it waits no more.
pub struct Waiting<'a> {
    door: &'a Door,
    member: &'a Arc<Member>,
    time: Time,
    began: Instant,
    answered: bool,
}

impl<'a> Waiting<'a> {
    /// One more call waits for `member`.
    #[must_use]
    pub fn begin(door: &'a Door, member: &'a Arc<Member>, time: Time) -> Self {
        let began = Instant::now();
        member.conduct.enter(began);
        Self { door, member, time, began, answered: false }
    }

    /// It was answered; `well`: as it was asked to.
    pub fn answered(mut self, well: bool) {
        self.answered = true;
        let now = Instant::now();
        let conduct = &self.member.conduct;
        conduct.heard(now);
        if !well {
            return;
        }
        if self.time == Time::TellsNothing {
            return conduct.bore();
        }
        let took = now.saturating_duration_since(self.began);
        conduct.answered(now, took);
        let far = took > FAR_MORE && is_far(&self.door.members.snapshot.load(), self.member, now);
        if conduct.is_far(now, far) {
            eject(&self.door.members.snapshot.load(), self.member, Ejection::Slow, now);
        }
    }

    /// It was not, and that is the member's doing, as far as can be told.
    pub fn failed(mut self) {
        self.answered = true;
        self.note_failure(Instant::now());
    }

    fn note_failure(&self, now: Instant) {
        if self.member.conduct.failed(now, self.began) {
            eject(&self.door.members.snapshot.load(), self.member, Ejection::Failing, now);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.member.conduct.leave();
        if self.answered || self.time == Time::TellsNothing {
            return;
        }
        let (now, members) = (Instant::now(), self.door.members.snapshot.load());
        if is_against(&members, self.member, self.began, now) {
            self.note_failure(now);
        }
    }
}

/// Whether it speaks against `member` that a call whose time tells was given up at `now`: it answered nobody since that call
/// began, long ago, while another answered. A client's patience alone is no sign, nor that nobody answers anything.
fn is_against(members: &Membership, member: &Member, began: Instant, now: Instant) -> bool {
    let long = now.saturating_duration_since(began) >= UNANSWERED.max(patience(members));
    long && !member.conduct.was_heard_since(began) && is_another_well(members, member.id, now)
}

/// Whether the others are far faster; not while nothing fresh is known of them.
fn is_far(members: &Membership, member: &Member, now: Instant) -> bool {
    let others = members.ready_voters().filter(|other| other.id != member.id);
    let fresh = others.filter(|other| other.conduct.is_fresh(now));
    let slowest = fresh.filter_map(|other| other.conduct.latency()).max();
    let far = |slowest: Duration| {
        member.conduct.latency().is_some_and(|own| own > slowest * FAR_TIMES && own > slowest + FAR_MORE)
    };
    slowest.is_some_and(far)
}

/// Whether another ready voter was heard lately.
fn is_another_well(members: &Membership, member: MemberId, now: Instant) -> bool {
    let lately = now.checked_sub(LATELY.max(patience(members))).unwrap_or(now);
    let mut others = members.ready_voters().filter(|other| other.id != member);
    others.any(|other| other.conduct.ejected(now).is_none() && other.conduct.was_heard_since(lately))
}

/// How long the fastest ready voter may leave calls waiting before that says anything of it.
fn patience(members: &Membership) -> Duration {
    let fastest = members.ready_voters().filter_map(|member| member.conduct.latency()).min();
    fastest.unwrap_or_default().saturating_mul(PATIENCE)
}

fn eject(members: &Membership, member: &Member, why: Ejection, now: Instant) {
    if member.conduct.ejected(now).is_some() {
        return;
    }
    let voters = members.ready_voters().count();
    let out = members.ready_voters().filter(|voter| voter.conduct.ejected(now).is_some()).count();
    // Somebody who is well is left.
    let may = 2 * (out + 1) <= voters && is_another_well(members, member.id, now);
    if may {
        let lasts = member.conduct.eject(now, why);
        tracing::warn!(member = %member.id, ?why, ?lasts, "member is ejected: it gets no calls that others can serve");
    }
}

/// Who waits on one shard, by member and where that was: told when it is time to look whether to stay.
#[derive(Default)]
pub struct Lingering(RefCell<Vec<Place>>);

/// Where calls wait.
struct Place {
    member: MemberId,
    endpoint: Endpoint,
    at: Option<IpAddr>,
    spot: Spot,
    told: Rc<Notify>,
}

impl Place {
    /// Compared as it is written, which costs a call less than what it means.
    fn is_of(&self, member: &Member) -> bool {
        self.member == member.id && self.at == member.at && self.endpoint == member.endpoint
    }
}

impl Lingering {
    /// Told whenever calls to `member`, where it is now, should look again.
    #[must_use]
    pub fn at(&self, member: &Member) -> Rc<Notify> {
        let mut all = self.0.borrow_mut();
        if let Some(place) = all.iter().find(|place| place.is_of(member)) {
            return Rc::clone(&place.told);
        }
        let told = Rc::new(Notify::new());
        let (endpoint, spot) = (member.endpoint.clone(), member.spot());
        all.push(Place { member: member.id, endpoint, at: member.at, spot, told: Rc::clone(&told) });
        told
    }

    fn tell(&self, member: MemberId) {
        let all = self.0.borrow();
        all.iter().filter(|place| place.member == member).for_each(|place| place.told.notify_waiters());
    }

    /// Tells whoever waits where no member is any more: it was removed, or moved.
    fn tell_strays(&self, members: &Membership) {
        self.0.borrow_mut().retain(|place| {
            let is_there = members.get(place.member).is_some_and(|member| member.spot() == place.spot);
            if !is_there {
                place.told.notify_waiters();
            }
            // Nobody but this list has it where nobody waits.
            is_there || Rc::strong_count(&place.told) > 1
        });
    }
}

/// Whether a call that waits at `member` waits where that still is, and serves.
#[must_use]
pub fn is_still_served(members: &Membership, member: &Member) -> bool {
    members.get(member.id).is_some_and(|now| now.is_ready() && now.spot() == member.spot())
}

/// Since when members are suspected; pure.
#[derive(Debug, Default)]
struct Suspected(Vec<(MemberId, Instant)>);

impl Suspected {
    /// Whether calls should leave `member` now.
    fn is_left(&mut self, member: &Member, now: Instant, grace: Duration) -> bool {
        let at = self.0.iter().position(|(id, _)| *id == member.id);
        if !member.suspicion.is_raised() {
            if let Some(at) = at {
                self.0.swap_remove(at);
            }
            return member.readiness != Readiness::Ready;
        }
        let since = match at.and_then(|at| self.0.get(at)) {
            Some((_, since)) => *since,
            None => {
                self.0.push((member.id, now));
                now
            }
        };
        member.readiness != Readiness::Ready || now >= since + grace
    }
}

/// Looks what hangs, for as long as the shard lives.
pub async fn look_after(door: Rc<Door>) {
    let mut turns = interval(LOOK);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut suspected = Suspected::default();
    loop {
        turns.tick().await;
        let members = door.members.snapshot.load_full();
        let now = Instant::now();
        let grace = GRACE.max(patience(&members));
        for member in &members.members {
            if is_hung(&members, member, now) {
                tracing::info!(
                    member = %member.id, waiting = member.conduct.in_flight(),
                    "member answers nothing while others do: it gets no calls before a probe succeeds"
                );
                member.suspect();
                door.members.hints.send(Hint::Unreachable(member.id));
            }
            if suspected.is_left(member, now, grace) {
                door.lingering.tell(member.id);
            }
        }
        door.lingering.tell_strays(&members);
    }
}

fn is_hung(members: &Membership, member: &Member, now: Instant) -> bool {
    let long = STALLED_FOR.max(patience(members));
    member.is_ready() && member.conduct.is_stalled(now, long) && is_another_well(members, member.id, now)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::upstream::membership::Reason;
    use crate::upstream::membership::tests::member;

    const MS: Duration = Duration::from_millis(1);

    fn ready(count: u64) -> Membership {
        let members = (1..=count).map(|id| member(id, Readiness::Ready)).collect();
        Membership { leader: Some(MemberId(1)), members, ..Membership::unknown(Instant::now()) }
    }

    fn ejected(members: &Membership, now: Instant) -> Vec<u64> {
        let out = members.members.iter().filter(|member| member.conduct.ejected(now).is_some());
        out.map(|member| member.id.0).collect()
    }

    /// All try to eject all, again and again.
    fn all_ejected(members: &Membership) -> Vec<u64> {
        let now = Instant::now() + MS;
        for member in members.members.iter().cycle().take(3 * members.members.len()) {
            members.members.iter().for_each(|member| member.conduct.heard(now));
            eject(members, member, Ejection::Failing, now);
        }
        ejected(members, now)
    }

    #[test]
    fn never_more_than_half_are_ejected_and_never_the_last() {
        assert_eq!(all_ejected(&ready(1)), [0; 0]);
        assert_eq!(all_ejected(&ready(2)), [1]);
        assert_eq!(all_ejected(&ready(3)), [1]);
        assert_eq!(all_ejected(&ready(5)), [1, 2]);
        let mut two_left = ready(3);
        two_left.members[1] = member(2, Readiness::NotReady(Reason::Unreachable));
        assert_eq!(all_ejected(&two_left), [1]);
        two_left.members[2].suspect();
        assert_eq!(all_ejected(&two_left), [1], "the other is gone, and this one was ejected before");
        two_left.members[0] = member(1, Readiness::Ready);
        assert_eq!(all_ejected(&two_left), [0; 0]);
    }

    #[test]
    fn nobody_is_ejected_or_suspected_while_nobody_else_is_heard() {
        let members = ready(3);
        let (stalled, others) = members.members.split_first().unwrap();
        let start = Instant::now() + MS;
        (0..5).for_each(|_| stalled.conduct.enter(start));
        let later = start + 10 * LATELY;
        assert!(stalled.conduct.is_stalled(later, STALLED_FOR));
        assert!(!is_hung(&members, stalled, later), "the cluster has no leader, say");
        eject(&members, stalled, Ejection::Failing, later);
        assert_eq!(ejected(&members, later), [0; 0]);
        others[1].conduct.heard(later - LATELY / 2);
        assert!(is_hung(&members, stalled, later));
        eject(&members, stalled, Ejection::Failing, later);
        assert_eq!(ejected(&members, later), [1]);
        stalled.suspect();
        assert!(!is_hung(&members, stalled, later), "it is known already");
    }

    #[test]
    fn where_all_are_slow_nobody_hangs_for_being_as_slow_as_the_rest() {
        let members = ready(3);
        let start = Instant::now() + MS;
        let took = 1200 * MS;
        for member in &members.members {
            member.conduct.answered(start + took, took);
            member.conduct.heard(start + took);
            (0..5).for_each(|_| member.conduct.enter(start + took));
        }
        let [one, two, _] = &members.members[..] else { panic!() };
        let now = start + 2 * took;
        two.conduct.heard(now);
        assert!(!is_hung(&members, one, now), "its answers are due by now, and others may be as late");
        assert!(!is_against(&members, one, start + took, now));
        let long = start + took + PATIENCE * took;
        two.conduct.heard(long);
        assert!(is_hung(&members, one, long));
        assert!(is_against(&members, one, start + took + MS, long + MS));
    }

    #[test]
    fn a_call_that_is_given_up_speaks_against_a_member_that_alone_is_silent() {
        let members = ready(3);
        let [one, two, _] = &members.members[..] else { panic!() };
        let began = Instant::now() + MS;
        let now = began + UNANSWERED;
        assert!(
            !is_against(&members, one, began, now),
            "nobody says anything: it is the cluster, or nobody asks"
        );
        two.conduct.heard(now - LATELY - MS);
        assert!(!is_against(&members, one, began, now), "the other was well once");
        two.conduct.heard(now);
        assert!(is_against(&members, one, began, now));
        assert!(!is_against(&members, one, began + MS, now), "its client waits for less than a second");
        one.conduct.heard(began + MS);
        assert!(!is_against(&members, one, began, now), "it answered somebody else meanwhile");
        assert!(is_against(&members, one, began + 2 * MS, now + 2 * MS), "and nobody since");
    }

    #[test]
    fn far_slower_is_told_by_the_slowest_of_the_others() {
        let members = ready(3);
        let now = Instant::now() + MS;
        let [one, two, three] = &members.members[..] else { panic!() };
        one.conduct.answered(now, 150 * MS);
        assert!(!is_far(&members, one, now), "of the others nothing is known");
        two.conduct.answered(now, MS);
        assert!(is_far(&members, one, now));
        three.conduct.answered(now, 40 * MS);
        assert!(!is_far(&members, one, now), "a zone that is far");
        assert!(!is_far(&members, three, now), "40 ms are slow, and no reason to do without a member");
    }

    /// Says whether it was told since.
    fn listening(told: &Notify) -> impl FnMut() -> bool {
        let mut notified = Box::pin(told.notified());
        notified.as_mut().enable();
        move || notified.as_mut().now_or_never().is_some()
    }

    #[test]
    fn who_waits_where_no_member_is_any_more_is_told() {
        let mut members = ready(3);
        let lingering = Lingering::default();
        let [first, second, third] = [0, 1, 2].map(|at| lingering.at(&members.members[at]));
        let [mut first_told, mut second_told, mut third_told] =
            [&first, &second, &third].map(|told| listening(told));
        lingering.tell_strays(&members);
        assert!(!first_told() && !second_told() && !third_told(), "all are where they were");
        let removed = members.members.remove(0);
        let stayed = Arc::clone(&members.members[0]);
        let mut moved = Member::clone(&stayed);
        moved.endpoint.port += 1;
        members.members[0] = Arc::new(moved);
        assert!(!is_still_served(&members, &removed));
        assert!(!is_still_served(&members, &stayed), "it is ready elsewhere");
        assert!(is_still_served(&members, &members.members[1]));
        lingering.tell_strays(&members);
        assert!(first_told() && second_told() && !third_told());
        let mut again = listening(&first);
        lingering.tell_strays(&members);
        assert!(again(), "for as long as somebody waits");
        drop((again, first_told, second_told, third_told));
        drop((first, second));
        lingering.tell_strays(&members);
        assert_eq!(lingering.0.borrow().len(), 1, "then it is forgotten");
    }

    #[test]
    fn calls_leave_what_is_unready_at_once_and_what_is_suspected_a_little_later() {
        let mut suspected = Suspected::default();
        let now = Instant::now();
        let gone = member(1, Readiness::NotReady(Reason::Unreachable));
        assert!(suspected.is_left(&gone, now, GRACE));
        let stalled = member(2, Readiness::Ready);
        assert!(!suspected.is_left(&stalled, now, GRACE));
        stalled.suspect();
        assert!(!suspected.is_left(&stalled, now, GRACE));
        assert!(!suspected.is_left(&stalled, now + GRACE - MS, GRACE));
        assert!(suspected.is_left(&stalled, now + GRACE, GRACE));
        stalled.suspicion.clear(stalled.suspicion.mark());
        assert!(!suspected.is_left(&stalled, now + GRACE, GRACE), "a probe was answered");
        stalled.suspect();
        assert!(!suspected.is_left(&stalled, now + 2 * GRACE, GRACE), "from the beginning");
    }
}
