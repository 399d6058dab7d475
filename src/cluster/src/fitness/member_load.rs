//! Load and health of one member, summed over all shards.
//!
//! Owns: for each member the calls in flight, latency, consecutive failures, ejection, slow start after a
//! return, the highest known revision. Must not know: other members, how a member is chosen. All fields are
//! atomic: no lock, no allocation; of two simultaneous writes one may be lost, which is tolerable for
//! statistics. Invariants: a revision only grows; an ejection ends by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

use crate::fitness::delay_counters::DelayCounters;
use crate::fitness::stream_counts::StreamCounters;
use keyward_etcd::identity::Revision;

/// A member counts as stalled once `STALLED_CALLS` calls or more have been in flight for `STALLED_FOR`
/// without any answer. A single slow read is no stall; a pause of the machine is shorter.
const STALLED_CALLS: u32 = 3;
/// See `STALLED_CALLS`.
pub const STALLED_FOR: Duration = Duration::from_millis(300);
/// Allowance at which a returned member counts as proven: the next answer lifts the limit on calls in flight.
const PROVEN: u32 = 64;
const UNBOUND: u32 = u32::MAX;
/// Age at which the old estimate and a new answer have equal weight.
const HALF: Duration = Duration::from_secs(1);
/// The minimum weight of a new answer in the estimate: for a slower answer, and for a faster answer.
const SLOWER: f64 = 0.25;
const FASTER: f64 = 1.0 / 32.0;
/// A new answer counts at most as this multiple of the estimate plus `LEAP`: a single pause says little about
/// the next call.
const LEAP_TIMES: u64 = 4;
const LEAP: Duration = Duration::from_millis(40);
/// A member avoided for slowness is tried again, with a single call in flight, after `TRIAL` times the
/// member's latency (within bounds): one call of all clients is slow for at most a twentieth of the time.
const TRIAL: u32 = 20;
const TRIAL_LEAST: Duration = Duration::from_millis(200);
const TRIAL_MOST: Duration = Duration::from_secs(5);
/// Duration of the first ejection; each further ejection lasts twice as long, up to `EJECTED_MOST`.
const EJECTED: Duration = Duration::from_secs(5);
const EJECTED_MOST: Duration = Duration::from_secs(120);
/// Time without an ejection after which the next ejection counts as a first ejection.
const FORGIVEN: Duration = Duration::from_secs(60);
/// Consecutive failures that eject a member, each of a call begun after the previous failure.
const FAILURES: u32 = 5;
/// Consecutive answers, each far slower than the answers of other members, that eject a member.
const FAR: u32 = 5;

/// Why a member is ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ejection {
    /// Consecutive calls to the member failed while other members answered.
    Failing,
    /// The member answers far slower than the other members.
    Slow,
}

impl Ejection {
    /// The reason, for the log.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Failing => "failing",
            Self::Slow => "slow",
        }
    }
}

/// Load and health of a member; one per member, for the member's whole life.
#[derive(Debug)]
pub struct MemberLoad {
    began: Instant,
    waiting: AtomicU32,
    /// Number of calls sent so far.
    calls: AtomicU64,
    /// Start of the stall timer: when the calls in flight reached `STALLED_CALLS`, or when a later probe
    /// cleared a suspicion.
    stall_timer_start: AtomicU64,
    heard: AtomicU64,
    estimate: AtomicU64,
    sampled: AtomicU64,
    /// When an answer last raised the estimate.
    raised: AtomicU64,
    allowance: AtomicU32,
    failures: AtomicU32,
    failed: AtomicU64,
    far_slower_answers: AtomicU32,
    ejected_until: AtomicU64,
    ejection_cause: AtomicU8,
    ejections: AtomicU32,
    /// True from an ejection until its end is noticed.
    is_ejection_open: AtomicBool,
    level: AtomicU32,
    revision: AtomicI64,
    lag: AtomicU64,
    near: AtomicBool,
    /// Delays of calls queued for the member.
    pub queue: DelayCounters,
    /// Delays of calls and streams waiting for a connection with a free stream.
    pub seats: DelayCounters,
    refused: AtomicU64,
    streams: Arc<StreamCounters>,
}

impl Default for MemberLoad {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            waiting: AtomicU32::default(),
            calls: AtomicU64::default(),
            stall_timer_start: AtomicU64::default(),
            heard: AtomicU64::default(),
            estimate: AtomicU64::default(),
            sampled: AtomicU64::default(),
            raised: AtomicU64::default(),
            allowance: AtomicU32::new(UNBOUND),
            failures: AtomicU32::default(),
            failed: AtomicU64::default(),
            far_slower_answers: AtomicU32::default(),
            ejected_until: AtomicU64::default(),
            ejection_cause: AtomicU8::default(),
            ejections: AtomicU32::default(),
            is_ejection_open: AtomicBool::default(),
            level: AtomicU32::default(),
            revision: AtomicI64::default(),
            lag: AtomicU64::default(),
            near: AtomicBool::default(),
            queue: DelayCounters::default(),
            seats: DelayCounters::default(),
            refused: AtomicU64::default(),
            streams: Arc::default(),
        }
    }
}

impl MemberLoad {
    /// Calls of the unary lane in flight, over all shards.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.waiting.load(Relaxed)
    }

    /// Calls of the unary lane sent so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    /// The streams carried by the member, over all shards.
    #[must_use]
    pub fn streams(&self) -> &Arc<StreamCounters> {
        &self.streams
    }

    /// The smoothed latency; `None` before the first answer.
    #[must_use]
    pub fn latency(&self) -> Option<Duration> {
        (self.sampled.load(Relaxed) > 0).then(|| Duration::from_micros(self.estimate.load(Relaxed)))
    }

    /// Calls refused for want of an in-flight slot: the queue was full, or the wait ended without a slot.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Counts a call refused because the member's queue was full.
    pub fn count_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// The reason for the ejection at `now`, and the remaining duration; `None` if the member is not ejected.
    #[must_use]
    pub fn ejected(&self, now: Instant) -> Option<(Ejection, Duration)> {
        let left = self.ejected_until.load(Relaxed).checked_sub(self.at(now)).filter(|left| *left > 0)?;
        let why = if self.ejection_cause.load(Relaxed) == 0 { Ejection::Failing } else { Ejection::Slow };
        Some((why, Duration::from_micros(left)))
    }

    /// Number of ejections.
    #[must_use]
    pub fn ejections(&self) -> u32 {
        self.ejections.load(Relaxed)
    }

    /// The highest revision known to be applied by the member.
    #[must_use]
    pub fn revision(&self) -> Revision {
        Revision(self.revision.load(Relaxed))
    }

    /// The member's lag in raft entries, as of the last probes.
    #[must_use]
    pub fn lag(&self) -> u64 {
        self.lag.load(Relaxed)
    }

    /// True if the configuration lists the member as near.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.near.load(Relaxed)
    }

    /// Records a revision shown in an answer.
    pub fn record_revision(&self, revision: Revision) {
        self.revision.fetch_max(revision.0, Relaxed);
    }

    /// Stores the lag found by probes, and the nearness configured.
    pub fn set_lag_and_nearness(&self, lag: u64, near: bool) {
        self.lag.store(lag, Relaxed);
        self.near.store(near, Relaxed);
    }

    /// Starts the slow start, after the member was lost or lost readiness: the allowance is one call, plus
    /// one for each answer.
    pub fn begin_slow_start(&self) {
        self.allowance.store(1, Relaxed);
    }

    /// Counts a call as in flight.
    pub fn enter(&self, now: Instant) {
        self.calls.fetch_add(1, Relaxed);
        if self.waiting.fetch_add(1, Relaxed) == STALLED_CALLS - 1 {
            self.stall_timer_start.store(self.at(now), Relaxed);
        }
    }

    /// Removes a call from the calls in flight.
    pub fn leave(&self) {
        self.waiting.fetch_sub(1, Relaxed);
    }

    /// Records an answer to a call, successful or not. Must not be called for probes: a member without a
    /// leader, or with a stuck disk, still answers probes.
    pub fn record_answer(&self, now: Instant) {
        self.heard.store(self.at(now), Relaxed);
    }

    /// Restarts the stall timer after a probe cleared a suspicion: the calls in flight get the full time
    /// again.
    pub fn restart_stall_timer(&self, now: Instant) {
        self.stall_timer_start.store(self.at(now), Relaxed);
    }

    /// True if the member answered a call since `then`.
    #[must_use]
    pub fn has_answered_since(&self, then: Instant) -> bool {
        self.heard.load(Relaxed) >= self.at(then)
    }

    /// True if several calls are in flight and no answer has arrived for `long`.
    #[must_use]
    pub fn is_stalled(&self, now: Instant, long: Duration) -> bool {
        let silent_since = self.heard.load(Relaxed).max(self.stall_timer_start.load(Relaxed));
        self.in_flight() >= STALLED_CALLS && self.at(now) >= silent_since + micros(long)
    }

    /// Records a successful answer with latency `took`. Of several calls delayed by the same pause, only one
    /// raises the estimate.
    pub fn answered(&self, now: Instant, took: Duration) {
        let (now, took) = (self.at(now), micros(took));
        let last = self.sampled.swap(now, Relaxed);
        let before = self.estimate.load(Relaxed);
        if last == 0 {
            self.estimate.store(took, Relaxed);
        } else if took <= before {
            self.estimate.store(smoothed(before, took, now.saturating_sub(last)), Relaxed);
        } else if now.saturating_sub(took) >= self.raised.load(Relaxed) {
            let took = took.min(before.saturating_mul(LEAP_TIMES) + micros(LEAP));
            self.estimate.store(smoothed(before, took, now.saturating_sub(last)), Relaxed);
            self.raised.store(now, Relaxed);
        }
        self.record_completed();
    }

    /// Records a completed call, regardless of its duration: resets the failures and raises the allowance.
    pub fn record_completed(&self) {
        if self.failures.load(Relaxed) > 0 {
            self.failures.store(0, Relaxed);
        }
        let allowance = self.allowance.load(Relaxed);
        if allowance < UNBOUND {
            let more = if allowance >= PROVEN { UNBOUND } else { allowance + 1 };
            self.allowance.store(more, Relaxed);
        }
    }

    /// True once after the end of each ejection.
    pub fn take_end_of_ejection(&self, now: Instant) -> bool {
        self.is_ejection_open.load(Relaxed)
            && self.ejected(now).is_none()
            && self.is_ejection_open.swap(false, Relaxed)
    }

    /// Records a failed call begun at `began`. Returns true if consecutive failures reached the limit. Calls
    /// lost together count as one failure.
    pub fn record_failure(&self, now: Instant, began: Instant) -> bool {
        if self.at(began) <= self.failed.load(Relaxed) {
            return false;
        }
        self.failed.store(self.at(now), Relaxed);
        let limit = if self.is_recently_ejected(now) { 1 } else { FAILURES };
        self.failures.fetch_add(1, Relaxed) + 1 >= limit
    }

    /// Records if the last answer was far slower than the answers of other members. Returns true if
    /// consecutive slow answers reached the limit.
    pub fn record_far_slower(&self, now: Instant, far: bool) -> bool {
        if !far {
            if self.far_slower_answers.load(Relaxed) > 0 {
                self.far_slower_answers.store(0, Relaxed);
            }
            return false;
        }
        let limit = if self.is_recently_ejected(now) { 1 } else { FAR };
        self.far_slower_answers.fetch_add(1, Relaxed) + 1 >= limit
    }

    /// Ejects the member, for twice the time of the previous ejection unless the previous one is forgiven.
    /// Returns the duration.
    pub fn eject(&self, now: Instant, why: Ejection) -> Duration {
        let level =
            if self.is_recently_ejected(now) { self.level.load(Relaxed).saturating_add(1) } else { 0 };
        let lasts = EJECTED.saturating_mul(1_u32.checked_shl(level).unwrap_or(u32::MAX)).min(EJECTED_MOST);
        self.level.store(level, Relaxed);
        self.ejection_cause.store(u8::from(why == Ejection::Slow), Relaxed);
        self.ejected_until.store(self.at(now) + micros(lasts), Relaxed);
        self.is_ejection_open.store(true, Relaxed);
        self.ejections.fetch_add(1, Relaxed);
        self.failures.store(0, Relaxed);
        self.far_slower_answers.store(0, Relaxed);
        self.begin_slow_start();
        lasts
    }

    /// True if the member was ejected recently.
    fn is_recently_ejected(&self, now: Instant) -> bool {
        let until = self.ejected_until.load(Relaxed);
        until > 0 && self.at(now) < until + micros(FORGIVEN)
    }

    /// True if the calls in flight reached the allowance.
    pub fn is_full(&self) -> bool {
        self.in_flight() >= self.allowance.load(Relaxed)
    }

    /// True if a slow member is due for a trial call.
    pub fn is_due(&self, now: Instant) -> bool {
        let estimate = Duration::from_micros(self.estimate.load(Relaxed));
        let pause = (estimate * TRIAL).clamp(TRIAL_LEAST, TRIAL_MOST);
        self.in_flight() == 0 && self.at(now) >= self.sampled.load(Relaxed) + micros(pause)
    }

    /// True if the estimate is recent enough for comparison with other members.
    pub fn is_fresh(&self, now: Instant) -> bool {
        let sampled = self.sampled.load(Relaxed);
        sampled > 0 && self.at(now) < sampled + micros(TRIAL_MOST)
    }

    /// Microseconds since creation, plus one: 0 means never.
    fn at(&self, now: Instant) -> u64 {
        micros(now.saturating_duration_since(self.began)) + 1
    }
}

/// The new estimate after an answer with latency `took`, arriving `since` after the previous answer. Rises
/// quickly, falls slowly, and follows at once after a long silence.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "microseconds of hours fit, and the result lies between the two"
)]
fn smoothed(before: u64, took: u64, since: u64) -> u64 {
    let aged = since as f64 / (since + micros(HALF)) as f64;
    let share = aged.max(if took > before { SLOWER } else { FASTER });
    (before as f64 + (took as f64 - before as f64) * share).round() as u64
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn an_estimate_rises_quickly_falls_slowly_and_is_forgotten_after_a_silence() {
        let load = MemberLoad::default();
        let mut now = Instant::now();
        assert_eq!(load.latency(), None);
        for _ in 0..100 {
            now += MS;
            load.answered(now, MS);
        }
        assert_eq!(load.latency(), Some(MS));
        now += 200 * MS;
        (0..30).for_each(|_| load.answered(now, 200 * MS));
        assert!(load.latency().unwrap() < 13 * MS, "one pause, whoever waited it out");
        for _ in 0..8 {
            now += 50 * MS;
            load.answered(now, 50 * MS);
        }
        let slow = load.latency().unwrap();
        assert!(slow > 40 * MS, "{slow:?}");
        for _ in 0..8 {
            now += MS;
            load.answered(now, MS);
        }
        assert!(load.latency().unwrap() > 25 * MS, "a few fast ones prove little");
        now += 60 * Duration::from_secs(1);
        load.answered(now, MS);
        assert!(load.latency().unwrap() < 2 * MS, "what it was a minute ago counts no more");
    }

    #[test]
    fn a_member_is_stalled_when_several_wait_and_none_is_answered() {
        let load = MemberLoad::default();
        let start = Instant::now();
        load.enter(start);
        load.enter(start);
        assert!(!load.is_stalled(start + 10 * STALLED_FOR, STALLED_FOR), "two may be slow reads");
        let third = start + 10 * STALLED_FOR;
        load.enter(third);
        assert!(!load.is_stalled(third, STALLED_FOR), "the third waits since now");
        assert!(load.is_stalled(third + STALLED_FOR, STALLED_FOR));
        load.record_answer(third + STALLED_FOR);
        assert!(!load.is_stalled(third + STALLED_FOR, STALLED_FOR));
        assert!(load.is_stalled(third + 2 * STALLED_FOR, STALLED_FOR));
        load.leave();
        assert!(!load.is_stalled(third + 2 * STALLED_FOR, STALLED_FOR));
    }

    #[test]
    fn failures_in_a_row_count_and_those_of_one_loss_count_once() {
        let load = MemberLoad::default();
        let mut now = Instant::now() + MS;
        let began = now;
        now += MS;
        assert!((0..100).all(|_| !load.record_failure(now, began)), "a hundred calls of one connection");
        for _ in 2..FAILURES {
            now += MS;
            assert!(!load.record_failure(now, now));
        }
        load.answered(now, MS);
        for _ in 1..FAILURES {
            now += MS;
            assert!(!load.record_failure(now, now), "an answer in between makes them not in a row");
        }
        now += MS;
        assert!(load.record_failure(now, now));
    }

    #[test]
    fn each_ejection_is_longer_until_it_is_forgiven() {
        let load = MemberLoad::default();
        let mut now = Instant::now() + MS;
        assert_eq!(load.eject(now, Ejection::Slow), EJECTED);
        assert_eq!(load.ejected(now), Some((Ejection::Slow, EJECTED)));
        assert!(!load.take_end_of_ejection(now));
        now += EJECTED;
        assert_eq!(load.ejected(now), None);
        assert!(load.take_end_of_ejection(now) && !load.take_end_of_ejection(now), "told once");
        assert!(load.record_failure(now, now), "on parole one is enough");
        assert_eq!(load.eject(now, Ejection::Failing), 2 * EJECTED);
        assert_eq!(load.ejected(now).map(|(why, _)| why), Some(Ejection::Failing));
        for _ in 0..10 {
            now += MS;
            load.eject(now, Ejection::Failing);
        }
        assert_eq!(load.ejected(now).map(|(_, left)| left), Some(EJECTED_MOST));
        now += EJECTED_MOST + FORGIVEN;
        assert_eq!(load.eject(now, Ejection::Slow), EJECTED);
        assert_eq!(load.ejections(), 13);
    }

    #[test]
    fn a_returned_member_is_asked_gently() {
        let load = MemberLoad::default();
        let now = Instant::now() + MS;
        assert!(!load.is_full());
        load.begin_slow_start();
        load.enter(now);
        assert!(load.is_full(), "one at first");
        load.answered(now, MS);
        load.enter(now);
        assert!(load.is_full(), "two after an answer");
        load.leave();
        assert!(!load.is_full());
        for _ in 0..PROVEN {
            load.answered(now, MS);
        }
        (0..10_000).for_each(|_| load.enter(now));
        assert!(!load.is_full(), "then without a bound");
    }

    #[test]
    fn the_slower_it_was_the_later_it_is_tried_again() {
        let load = MemberLoad::default();
        let now = Instant::now() + MS;
        load.answered(now, 50 * MS);
        assert!(!load.is_due(now + 999 * MS));
        assert!(load.is_due(now + 1000 * MS));
        load.enter(now);
        assert!(!load.is_due(now + 1000 * MS), "one call at a time");
    }
}
