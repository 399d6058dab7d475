//! Draws conclusions from the load and health of all members: ejects members, suspects hung members, and
//! tells waiting calls to check their member again.
//!
//! A hung member keeps its connections and stops answering; two probe timeouts take seconds to show the
//! fault. Calls show the fault sooner: several calls are in flight without any answer, while other members
//! answer.
//!
//! Owns: the rules comparing members. Must not know: the content of a call, how a member is chosen.
//! Invariants: no member is ejected or suspected because of calls unless another member answers, because
//! otherwise the fault lies with the cluster; never more than half of the ready voters are ejected, and never
//! the last; a call leaves a member only if the member is unready, is gone from the call's address, or has
//! been suspected for longer than a probe of a healthy member takes to clear the suspicion.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::send::UpstreamClient;
use keyward_cluster::fitness::member_load::{Ejection, STALLED_FOR};
use keyward_cluster::membership::{Member, Membership, MembershipHint, Readiness};
use keyward_etcd::identity::MemberId;

/// A member heard from within this time is healthy.
const LATELY: Duration = Duration::from_secs(1);
/// A call given up after this time without any answer by the member counts as a failure of the member.
const UNANSWERED: Duration = Duration::from_secs(1);
/// `LATELY`, `UNANSWERED`, `GRACE` and `STALLED_FOR` are each extended to this multiple of the fastest
/// member's latency, if longer: a member is slow only relative to other members.
const PATIENCE: u32 = 4;
/// A member is far slower than the rest if its latency exceeds the highest latency of the others by this
/// factor, and by `FAR_MORE`.
const FAR_TIMES: u32 = 5;
const FAR_MORE: Duration = Duration::from_millis(100);
/// Interval between two checks for hung members.
const LOOK: Duration = Duration::from_millis(100);
/// Minimum age of a suspicion before calls leave the member: a hint causes a probe within 100 ms, answered by
/// a healthy member within a few milliseconds.
const GRACE: Duration = Duration::from_millis(250);

/// The meaning of a call's latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatencySampling {
    /// The latency is a sample of the member's speed: all calls of this kind take about as long.
    Tells,
    /// The latency is ignored: the client can make the call arbitrarily slow.
    TellsNothing,
}

/// A call in flight to a member. Dropping the value ends the wait.
pub struct InFlightCall<'a> {
    upstream: &'a UpstreamClient,
    member: &'a Arc<Member>,
    time: LatencySampling,
    began: Instant,
    answered: bool,
}

impl<'a> InFlightCall<'a> {
    /// Counts a call as in flight to `member` since `began`.
    #[must_use]
    pub fn begin(
        upstream: &'a UpstreamClient,
        member: &'a Arc<Member>,
        time: LatencySampling,
        began: Instant,
    ) -> Self {
        member.load.enter(began);
        Self { upstream, member, time, began, answered: false }
    }

    /// Records an answer received at `now`; `well` is true for a successful answer. Returns the latency, if
    /// it is a sample of the member's speed.
    pub fn answered(mut self, well: bool, now: Instant) -> Option<Duration> {
        self.answered = true;
        let load = &self.member.load;
        load.record_answer(now);
        if !well {
            return None;
        }
        if self.time == LatencySampling::TellsNothing {
            load.record_completed();
            return None;
        }
        let took = now.saturating_duration_since(self.began);
        load.answered(now, took);
        let far = took > FAR_MORE && is_far(&self.upstream.members.snapshot.load(), self.member, now);
        if load.record_far_slower(now, far) {
            eject(&self.upstream.members.snapshot.load(), self.member, Ejection::Slow, now);
        }
        Some(took)
    }

    /// Records a failure apparently caused by the member.
    pub fn failed(mut self) {
        self.answered = true;
        self.note_failure(Instant::now());
    }

    fn note_failure(&self, now: Instant) {
        if self.member.load.record_failure(now, self.began) {
            eject(&self.upstream.members.snapshot.load(), self.member, Ejection::Failing, now);
        }
    }
}

impl Drop for InFlightCall<'_> {
    fn drop(&mut self) {
        self.member.load.leave();
        if self.answered || self.time == LatencySampling::TellsNothing {
            return;
        }
        let (now, members) = (Instant::now(), self.upstream.members.snapshot.load());
        if is_failure_of_member(&members, self.member, self.began, now) {
            self.note_failure(now);
        }
    }
}

/// True if a call given up at `now` counts against `member`: the call was in flight for long, and since its
/// start the member answered no call while another member answered. Neither an impatient client nor a silent
/// cluster is evidence.
fn is_failure_of_member(members: &Membership, member: &Member, began: Instant, now: Instant) -> bool {
    let long = now.saturating_duration_since(began) >= UNANSWERED.max(patience(members));
    long && !member.load.has_answered_since(began) && is_another_well(members, member.id, now)
}

/// True if the other members are far faster; false without recent samples of the others.
fn is_far(members: &Membership, member: &Member, now: Instant) -> bool {
    let others = members.ready_voters().filter(|other| other.id != member.id);
    let fresh = others.filter(|other| other.load.is_fresh(now));
    let slowest = fresh.filter_map(|other| other.load.latency()).max();
    let far = |slowest: Duration| {
        member.load.latency().is_some_and(|own| own > slowest * FAR_TIMES && own > slowest + FAR_MORE)
    };
    slowest.is_some_and(far)
}

/// True if another ready voter answered recently.
fn is_another_well(members: &Membership, member: MemberId, now: Instant) -> bool {
    let lately = now.checked_sub(LATELY.max(patience(members))).unwrap_or(now);
    let mut others = members.ready_voters().filter(|other| other.id != member);
    others.any(|other| other.load.ejected(now).is_none() && other.load.has_answered_since(lately))
}

/// The time for which even the fastest ready voter may leave a call unanswered; a shorter silence is no
/// evidence.
fn patience(members: &Membership) -> Duration {
    let fastest = members.ready_voters().filter_map(|member| member.load.latency()).min();
    fastest.unwrap_or_default().saturating_mul(PATIENCE)
}

fn eject(members: &Membership, member: &Member, why: Ejection, now: Instant) {
    if member.load.ejected(now).is_some() {
        return;
    }
    let voters = members.ready_voters().count();
    let out = members.ready_voters().filter(|voter| voter.load.ejected(now).is_some()).count();
    // At least one healthy member must remain.
    let may = 2 * (out + 1) <= voters && is_another_well(members, member.id, now);
    if may {
        let lasts = member.load.eject(now, why);
        tracing::warn!(
            member = %member.id, name = &*member.name, reason = why.name(), seconds = lasts.as_secs(),
            "member is ejected: it gets no calls that others can serve"
        );
    }
}

/// The start of each suspicion. Pure.
#[derive(Debug, Default)]
struct SuspicionStarts(Vec<(MemberId, Instant)>);

impl SuspicionStarts {
    /// True if calls should leave `member` now.
    fn should_calls_leave(&mut self, member: &Member, now: Instant, grace: Duration) -> bool {
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

/// Checks for hung members periodically, as long as the shard lives.
pub async fn suspect_hung_members(upstream: Rc<UpstreamClient>) {
    let mut turns = interval(LOOK);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut suspected = SuspicionStarts::default();
    loop {
        turns.tick().await;
        let members = upstream.members.snapshot.load_full();
        let now = Instant::now();
        let grace = GRACE.max(patience(&members));
        for member in &members.members {
            if member.load.take_end_of_ejection(now) {
                tracing::info!(
                    member = %member.id, name = &*member.name,
                    "the ejection of a member has ended: it gets calls again"
                );
            }
            if is_hung(&members, member, now) {
                tracing::info!(
                    member = %member.id, name = &*member.name, waiting = member.load.in_flight(),
                    "member answers nothing while others do: it gets no calls before a probe succeeds"
                );
                member.suspect();
                upstream.members.hints.send(MembershipHint::Unreachable(member.id));
            }
            if suspected.should_calls_leave(member, now, grace) {
                upstream.waiting_calls.tell(member.id);
            }
        }
        upstream.waiting_calls.notify_displaced_calls(&members);
    }
}

fn is_hung(members: &Membership, member: &Member, now: Instant) -> bool {
    let long = STALLED_FOR.max(patience(members));
    member.is_ready() && member.load.is_stalled(now, long) && is_another_well(members, member.id, now)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::waiting_calls::{WaitingCalls, is_still_served};
    use keyward_cluster::membership::UnreadyReason;
    use keyward_cluster::test_member::member;
    use tokio::sync::Notify;

    const MS: Duration = Duration::from_millis(1);

    fn ready(count: u64) -> Membership {
        let members = (1..=count).map(|id| member(id, Readiness::Ready)).collect();
        Membership { leader: Some(MemberId(1)), members, ..Membership::unknown(Instant::now()) }
    }

    fn ejected(members: &Membership, now: Instant) -> Vec<u64> {
        let out = members.members.iter().filter(|member| member.load.ejected(now).is_some());
        out.map(|member| member.id.0).collect()
    }

    /// Every member tries repeatedly to eject every member; returns the ejected members.
    fn all_ejected(members: &Membership) -> Vec<u64> {
        let now = Instant::now() + MS;
        for member in members.members.iter().cycle().take(3 * members.members.len()) {
            members.members.iter().for_each(|member| member.load.record_answer(now));
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
        two_left.members[1] = member(2, Readiness::NotReady(UnreadyReason::Unreachable));
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
        (0..5).for_each(|_| stalled.load.enter(start));
        let later = start + 10 * LATELY;
        assert!(stalled.load.is_stalled(later, STALLED_FOR));
        assert!(!is_hung(&members, stalled, later), "the cluster has no leader, say");
        eject(&members, stalled, Ejection::Failing, later);
        assert_eq!(ejected(&members, later), [0; 0]);
        others[1].load.record_answer(later - LATELY / 2);
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
            member.load.answered(start + took, took);
            member.load.record_answer(start + took);
            (0..5).for_each(|_| member.load.enter(start + took));
        }
        let [one, two, _] = &members.members[..] else { panic!() };
        let now = start + 2 * took;
        two.load.record_answer(now);
        assert!(!is_hung(&members, one, now), "its answers are due by now, and others may be as late");
        assert!(!is_failure_of_member(&members, one, start + took, now));
        let long = start + took + PATIENCE * took;
        two.load.record_answer(long);
        assert!(is_hung(&members, one, long));
        assert!(is_failure_of_member(&members, one, start + took + MS, long + MS));
    }

    #[test]
    fn a_call_that_is_given_up_speaks_against_a_member_that_alone_is_silent() {
        let members = ready(3);
        let [one, two, _] = &members.members[..] else { panic!() };
        let began = Instant::now() + MS;
        let now = began + UNANSWERED;
        assert!(
            !is_failure_of_member(&members, one, began, now),
            "nobody says anything: it is the cluster, or nobody asks"
        );
        two.load.record_answer(now - LATELY - MS);
        assert!(!is_failure_of_member(&members, one, began, now), "the other was well once");
        two.load.record_answer(now);
        assert!(is_failure_of_member(&members, one, began, now));
        assert!(
            !is_failure_of_member(&members, one, began + MS, now),
            "its client waits for less than a second"
        );
        one.load.record_answer(began + MS);
        assert!(!is_failure_of_member(&members, one, began, now), "it answered somebody else meanwhile");
        assert!(is_failure_of_member(&members, one, began + 2 * MS, now + 2 * MS), "and nobody since");
    }

    #[test]
    fn far_slower_is_told_by_the_slowest_of_the_others() {
        let members = ready(3);
        let now = Instant::now() + MS;
        let [one, two, three] = &members.members[..] else { panic!() };
        one.load.answered(now, 150 * MS);
        assert!(!is_far(&members, one, now), "of the others nothing is known");
        two.load.answered(now, MS);
        assert!(is_far(&members, one, now));
        three.load.answered(now, 40 * MS);
        assert!(!is_far(&members, one, now), "a zone that is far");
        assert!(!is_far(&members, three, now), "40 ms are slow, and no reason to do without a member");
    }

    /// Returns a check for a notification since this call.
    fn listening(told: &Notify) -> impl FnMut() -> bool {
        let mut notified = Box::pin(told.notified());
        notified.as_mut().enable();
        move || notified.as_mut().now_or_never().is_some()
    }

    #[test]
    fn who_waits_where_no_member_is_any_more_is_told() {
        let mut members = ready(3);
        let waiting_calls = WaitingCalls::default();
        let [first, second, third] = [0, 1, 2].map(|at| waiting_calls.at(&members.members[at]));
        let [mut first_told, mut second_told, mut third_told] =
            [&first, &second, &third].map(|told| listening(told));
        waiting_calls.notify_displaced_calls(&members);
        assert!(!first_told() && !second_told() && !third_told(), "all are where they were");
        let removed = members.members.remove(0);
        let stayed = Arc::clone(&members.members[0]);
        let mut moved = Member::clone(&stayed);
        moved.endpoint.port += 1;
        members.members[0] = Arc::new(moved);
        assert!(!is_still_served(&members, &removed));
        assert!(!is_still_served(&members, &stayed), "it is ready elsewhere");
        assert!(is_still_served(&members, &members.members[1]));
        waiting_calls.notify_displaced_calls(&members);
        assert!(first_told() && second_told() && !third_told());
        let mut again = listening(&first);
        waiting_calls.notify_displaced_calls(&members);
        assert!(again(), "for as long as somebody waits");
        drop((again, first_told, second_told, third_told));
        drop((first, second));
        waiting_calls.notify_displaced_calls(&members);
        assert_eq!(waiting_calls.0.borrow().len(), 1, "then it is forgotten");
    }

    #[test]
    fn calls_leave_what_is_unready_at_once_and_what_is_suspected_a_little_later() {
        let mut suspected = SuspicionStarts::default();
        let now = Instant::now();
        let gone = member(1, Readiness::NotReady(UnreadyReason::Unreachable));
        assert!(suspected.should_calls_leave(&gone, now, GRACE));
        let stalled = member(2, Readiness::Ready);
        assert!(!suspected.should_calls_leave(&stalled, now, GRACE));
        stalled.suspect();
        assert!(!suspected.should_calls_leave(&stalled, now, GRACE));
        assert!(!suspected.should_calls_leave(&stalled, now + GRACE - MS, GRACE));
        assert!(suspected.should_calls_leave(&stalled, now + GRACE, GRACE));
        stalled.suspicion.clear(stalled.suspicion.mark());
        assert!(!suspected.should_calls_leave(&stalled, now + GRACE, GRACE), "a probe was answered");
        stalled.suspect();
        assert!(!suspected.should_calls_leave(&stalled, now + 2 * GRACE, GRACE), "from the beginning");
    }
}
