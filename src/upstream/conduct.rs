//! How a member bears its calls, as all shards see it together.
//!
//! Owns: of each member the calls that wait for it, how fast it answers, what failed in a row, whether it is ejected, how
//! much it may be asked after a return, and how far its store is known to be. Must not know: other members, how one is
//! chosen. All of it is atomic: no lock, no allocation; of two that write in one moment one may be lost, which a figure of
//! this kind survives. Invariants: a revision only grows; an ejection ends by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

use crate::identity::Revision;
use crate::upstream::carried::Streams;
use crate::upstream::delays::Delays;

/// As many calls must wait for a member, for so long and without a word from it, before it counts as stalled. A lone slow
/// read is none; a pause of the machine is shorter.
const STALLED_CALLS: u32 = 3;
pub(super) const STALLED_FOR: Duration = Duration::from_millis(300);
/// Calls at once that prove a returned member: from there on it may have all that is its share.
const PROVEN: u32 = 64;
const UNBOUND: u32 = u32::MAX;
/// Old answers count for half after so long.
const HALF: Duration = Duration::from_secs(1);
/// The least share of a new answer in the estimate: where it took longer, and where it was faster.
const SLOWER: f64 = 0.25;
const FASTER: f64 = 1.0 / 32.0;
/// One answer counts for no more than so many times the estimate, and this: a single pause says little of the next call.
const LEAP_TIMES: u64 = 4;
const LEAP: Duration = Duration::from_millis(40);
/// A member that is avoided for being slow is tried again, with one call at a time, after so many times what that call
/// will take: so at most a twentieth of the time one call of everybody's is slow.
const TRIAL: u32 = 20;
const TRIAL_LEAST: Duration = Duration::from_millis(200);
const TRIAL_MOST: Duration = Duration::from_secs(5);
/// How long the first ejection lasts; each further one twice as long, up to the most.
const EJECTED: Duration = Duration::from_secs(5);
const EJECTED_MOST: Duration = Duration::from_secs(120);
/// After so long without another the next one is a first one again.
const FORGIVEN: Duration = Duration::from_secs(60);
/// Calls in a row, each begun after the one before had failed, for which a member is ejected.
const FAILURES: u32 = 5;
/// Answers in a row, each far slower than what others need.
const FAR: u32 = 5;

/// Why a member is ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ejection {
    /// Calls to it failed in a row while others were answered elsewhere.
    Failing,
    /// It answers far slower than the rest.
    Slow,
}

/// One per member, for its whole life.
#[derive(Debug)]
pub struct Conduct {
    began: Instant,
    waiting: AtomicU32,
    /// Calls that ever waited.
    calls: AtomicU64,
    /// Since when as many wait as a stall takes.
    crowded: AtomicU64,
    heard: AtomicU64,
    estimate: AtomicU64,
    sampled: AtomicU64,
    /// When an answer last made the estimate longer.
    raised: AtomicU64,
    allowance: AtomicU32,
    failures: AtomicU32,
    failed: AtomicU64,
    far: AtomicU32,
    ejected_until: AtomicU64,
    why: AtomicU8,
    ejections: AtomicU32,
    level: AtomicU32,
    revision: AtomicI64,
    lag: AtomicU64,
    near: AtomicBool,
    /// Calls that wait for their turn to be sent.
    pub queue: Delays,
    /// Calls and streams that wait for a connection with room.
    pub seats: Delays,
    refused: AtomicU64,
    streams: Arc<Streams>,
}

impl Default for Conduct {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            waiting: AtomicU32::default(),
            calls: AtomicU64::default(),
            crowded: AtomicU64::default(),
            heard: AtomicU64::default(),
            estimate: AtomicU64::default(),
            sampled: AtomicU64::default(),
            raised: AtomicU64::default(),
            allowance: AtomicU32::new(UNBOUND),
            failures: AtomicU32::default(),
            failed: AtomicU64::default(),
            far: AtomicU32::default(),
            ejected_until: AtomicU64::default(),
            why: AtomicU8::default(),
            ejections: AtomicU32::default(),
            level: AtomicU32::default(),
            revision: AtomicI64::default(),
            lag: AtomicU64::default(),
            near: AtomicBool::default(),
            queue: Delays::default(),
            seats: Delays::default(),
            refused: AtomicU64::default(),
            streams: Arc::default(),
        }
    }
}

impl Conduct {
    /// Calls of the unary lane that wait for its answer now, over all shards.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.waiting.load(Relaxed)
    }

    /// Calls of the unary lane that it was sent so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    /// The streams that it carries, over all shards.
    #[must_use]
    pub fn streams(&self) -> &Arc<Streams> {
        &self.streams
    }

    /// How long it takes to answer, smoothed; none before the first answer.
    #[must_use]
    pub fn latency(&self) -> Option<Duration> {
        (self.sampled.load(Relaxed) > 0).then(|| Duration::from_micros(self.estimate.load(Relaxed)))
    }

    /// Calls that were refused since as many as may be waited for their turn, or none came.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    pub(super) fn count_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Why it is ejected at `now`, and for how much longer.
    #[must_use]
    pub fn ejected(&self, now: Instant) -> Option<(Ejection, Duration)> {
        let left = self.ejected_until.load(Relaxed).checked_sub(self.at(now)).filter(|left| *left > 0)?;
        let why = if self.why.load(Relaxed) == 0 { Ejection::Failing } else { Ejection::Slow };
        Some((why, Duration::from_micros(left)))
    }

    /// How often it was ejected.
    #[must_use]
    pub fn ejections(&self) -> u32 {
        self.ejections.load(Relaxed)
    }

    /// The highest revision that it is known to have applied.
    #[must_use]
    pub fn revision(&self) -> Revision {
        Revision(self.revision.load(Relaxed))
    }

    /// How many raft entries it is behind, as of the last probes.
    #[must_use]
    pub fn lag(&self) -> u64 {
        self.lag.load(Relaxed)
    }

    /// Whether the configuration calls it near.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.near.load(Relaxed)
    }

    /// An answer showed this revision.
    pub fn saw(&self, revision: Revision) {
        self.revision.fetch_max(revision.0, Relaxed);
    }

    /// What follows from the probes and the configuration.
    pub fn place(&self, lag: u64, near: bool) {
        self.lag.store(lag, Relaxed);
        self.near.store(near, Relaxed);
    }

    /// It was lost, or takes no traffic: when it is back it begins with one call, and may have one more for each answer.
    pub fn begin_anew(&self) {
        self.allowance.store(1, Relaxed);
    }

    /// One more call waits.
    pub fn enter(&self, now: Instant) {
        self.calls.fetch_add(1, Relaxed);
        if self.waiting.fetch_add(1, Relaxed) == STALLED_CALLS - 1 {
            self.crowded.store(self.at(now), Relaxed);
        }
    }

    /// One waits no more.
    pub fn leave(&self) {
        self.waiting.fetch_sub(1, Relaxed);
    }

    /// It answered a call, whatever it said. Not a probe: what asks it alone is answered by a member that has lost its leader or
    /// its disk.
    pub fn heard(&self, now: Instant) {
        self.heard.store(self.at(now), Relaxed);
    }

    /// A probe was answered: what waits now is given as long again.
    pub fn cleared(&self, now: Instant) {
        self.crowded.store(self.at(now), Relaxed);
    }

    /// Whether it said anything since `then`.
    #[must_use]
    pub fn was_heard_since(&self, then: Instant) -> bool {
        self.heard.load(Relaxed) >= self.at(then)
    }

    /// Whether several calls wait for it and it has said nothing for `long`.
    #[must_use]
    pub fn is_stalled(&self, now: Instant, long: Duration) -> bool {
        let silent_since = self.heard.load(Relaxed).max(self.crowded.load(Relaxed));
        self.in_flight() >= STALLED_CALLS && self.at(now) >= silent_since + micros(long)
    }

    /// A call was answered well, after `took`. Those that waited out the same pause make the estimate longer once.
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
        self.bore();
    }

    /// It did what it was asked, however long that may take.
    pub fn bore(&self) {
        if self.failures.load(Relaxed) > 0 {
            self.failures.store(0, Relaxed);
        }
        let allowance = self.allowance.load(Relaxed);
        if allowance < UNBOUND {
            let more = if allowance >= PROVEN { UNBOUND } else { allowance + 1 };
            self.allowance.store(more, Relaxed);
        }
    }

    /// A call that began at `began` was not answered. Says whether there were too many in a row. Those that were lost
    /// together count as one.
    pub fn failed(&self, now: Instant, began: Instant) -> bool {
        if self.at(began) <= self.failed.load(Relaxed) {
            return false;
        }
        self.failed.store(self.at(now), Relaxed);
        let limit = if self.is_on_parole(now) { 1 } else { FAILURES };
        self.failures.fetch_add(1, Relaxed) + 1 >= limit
    }

    /// Its last answer was far slower than what the rest needs, or was not. Says whether there were too many in a row.
    pub fn is_far(&self, now: Instant, far: bool) -> bool {
        if !far {
            if self.far.load(Relaxed) > 0 {
                self.far.store(0, Relaxed);
            }
            return false;
        }
        let limit = if self.is_on_parole(now) { 1 } else { FAR };
        self.far.fetch_add(1, Relaxed) + 1 >= limit
    }

    /// Ejects it, for longer than the last time. Returns for how long.
    pub fn eject(&self, now: Instant, why: Ejection) -> Duration {
        let level = if self.is_on_parole(now) { self.level.load(Relaxed).saturating_add(1) } else { 0 };
        let lasts = EJECTED.saturating_mul(1_u32.checked_shl(level).unwrap_or(u32::MAX)).min(EJECTED_MOST);
        self.level.store(level, Relaxed);
        self.why.store(u8::from(why == Ejection::Slow), Relaxed);
        self.ejected_until.store(self.at(now) + micros(lasts), Relaxed);
        self.ejections.fetch_add(1, Relaxed);
        self.failures.store(0, Relaxed);
        self.far.store(0, Relaxed);
        self.begin_anew();
        lasts
    }

    /// Whether it was ejected not long ago.
    fn is_on_parole(&self, now: Instant) -> bool {
        let until = self.ejected_until.load(Relaxed);
        until > 0 && self.at(now) < until + micros(FORGIVEN)
    }

    /// Whether it has as many calls as it may have now.
    pub(super) fn is_full(&self) -> bool {
        self.in_flight() >= self.allowance.load(Relaxed)
    }

    /// Whether, slow as it is, it is time to see whether it still is.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let estimate = Duration::from_micros(self.estimate.load(Relaxed));
        let pause = (estimate * TRIAL).clamp(TRIAL_LEAST, TRIAL_MOST);
        self.in_flight() == 0 && self.at(now) >= self.sampled.load(Relaxed) + micros(pause)
    }

    /// Whether its estimate is fresh enough to hold others against it.
    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        let sampled = self.sampled.load(Relaxed);
        sampled > 0 && self.at(now) < sampled + micros(TRIAL_MOST)
    }

    /// Microseconds of its life, and one: 0 is never.
    fn at(&self, now: Instant) -> u64 {
        micros(now.saturating_duration_since(self.began)) + 1
    }
}

/// What is estimated after an answer that took `took`, `since` the one before. It follows what gets slower quickly, what gets
/// faster slowly, and either at once after a long silence.
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
        let conduct = Conduct::default();
        let mut now = Instant::now();
        assert_eq!(conduct.latency(), None);
        for _ in 0..100 {
            now += MS;
            conduct.answered(now, MS);
        }
        assert_eq!(conduct.latency(), Some(MS));
        now += 200 * MS;
        (0..30).for_each(|_| conduct.answered(now, 200 * MS));
        assert!(conduct.latency().unwrap() < 13 * MS, "one pause, whoever waited it out");
        for _ in 0..8 {
            now += 50 * MS;
            conduct.answered(now, 50 * MS);
        }
        let slow = conduct.latency().unwrap();
        assert!(slow > 40 * MS, "{slow:?}");
        for _ in 0..8 {
            now += MS;
            conduct.answered(now, MS);
        }
        assert!(conduct.latency().unwrap() > 25 * MS, "a few fast ones prove little");
        now += 60 * Duration::from_secs(1);
        conduct.answered(now, MS);
        assert!(conduct.latency().unwrap() < 2 * MS, "what it was a minute ago counts no more");
    }

    #[test]
    fn a_member_is_stalled_when_several_wait_and_none_is_answered() {
        let conduct = Conduct::default();
        let start = Instant::now();
        conduct.enter(start);
        conduct.enter(start);
        assert!(!conduct.is_stalled(start + 10 * STALLED_FOR, STALLED_FOR), "two may be slow reads");
        let third = start + 10 * STALLED_FOR;
        conduct.enter(third);
        assert!(!conduct.is_stalled(third, STALLED_FOR), "the third waits since now");
        assert!(conduct.is_stalled(third + STALLED_FOR, STALLED_FOR));
        conduct.heard(third + STALLED_FOR);
        assert!(!conduct.is_stalled(third + STALLED_FOR, STALLED_FOR));
        assert!(conduct.is_stalled(third + 2 * STALLED_FOR, STALLED_FOR));
        conduct.leave();
        assert!(!conduct.is_stalled(third + 2 * STALLED_FOR, STALLED_FOR));
    }

    #[test]
    fn failures_in_a_row_count_and_those_of_one_loss_count_once() {
        let conduct = Conduct::default();
        let mut now = Instant::now() + MS;
        let began = now;
        now += MS;
        assert!((0..100).all(|_| !conduct.failed(now, began)), "a hundred calls of one connection");
        for _ in 2..FAILURES {
            now += MS;
            assert!(!conduct.failed(now, now));
        }
        conduct.answered(now, MS);
        for _ in 1..FAILURES {
            now += MS;
            assert!(!conduct.failed(now, now), "an answer in between makes them not in a row");
        }
        now += MS;
        assert!(conduct.failed(now, now));
    }

    #[test]
    fn each_ejection_is_longer_until_it_is_forgiven() {
        let conduct = Conduct::default();
        let mut now = Instant::now() + MS;
        assert_eq!(conduct.eject(now, Ejection::Slow), EJECTED);
        assert_eq!(conduct.ejected(now), Some((Ejection::Slow, EJECTED)));
        now += EJECTED;
        assert_eq!(conduct.ejected(now), None);
        assert!(conduct.failed(now, now), "on parole one is enough");
        assert_eq!(conduct.eject(now, Ejection::Failing), 2 * EJECTED);
        assert_eq!(conduct.ejected(now).map(|(why, _)| why), Some(Ejection::Failing));
        for _ in 0..10 {
            now += MS;
            conduct.eject(now, Ejection::Failing);
        }
        assert_eq!(conduct.ejected(now).map(|(_, left)| left), Some(EJECTED_MOST));
        now += EJECTED_MOST + FORGIVEN;
        assert_eq!(conduct.eject(now, Ejection::Slow), EJECTED);
        assert_eq!(conduct.ejections(), 13);
    }

    #[test]
    fn a_returned_member_is_asked_gently() {
        let conduct = Conduct::default();
        let now = Instant::now() + MS;
        assert!(!conduct.is_full());
        conduct.begin_anew();
        conduct.enter(now);
        assert!(conduct.is_full(), "one at first");
        conduct.answered(now, MS);
        conduct.enter(now);
        assert!(conduct.is_full(), "two after an answer");
        conduct.leave();
        assert!(!conduct.is_full());
        for _ in 0..PROVEN {
            conduct.answered(now, MS);
        }
        (0..10_000).for_each(|_| conduct.enter(now));
        assert!(!conduct.is_full(), "then without a bound");
    }

    #[test]
    fn the_slower_it_was_the_later_it_is_tried_again() {
        let conduct = Conduct::default();
        let now = Instant::now() + MS;
        conduct.answered(now, 50 * MS);
        assert!(!conduct.is_due(now + 999 * MS));
        assert!(conduct.is_due(now + 1000 * MS));
        conduct.enter(now);
        assert!(!conduct.is_due(now + 1000 * MS), "one call at a time");
    }
}
