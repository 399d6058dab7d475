//! When a refusal is told.
//!
//! Owns: that moment. Must not know: who tried what, what checked it, clocks (time is an argument).
//! Invariants (rules 15): an unknown user costs etcd no bcrypt, and a line of the users file not what a password of etcd
//! does, so each refusal waits for the next beat, and a beat is longer than a check takes; of many at once each waits as
//! if all before it had cost what a user's password costs, so that the line does not show which of them did. Nobody
//! whose password is right waits for any of that.

use std::time::Duration;

use tokio::time::Instant;

use crate::gateway::exchange::PATIENCE;

/// Refusals are told after a whole number of these, at least.
const LEAST_BEAT: Duration = Duration::from_millis(250);
const LONGEST_BEAT: Duration = Duration::from_secs(2);
/// Tries for which a beat has time: it is twice what a check takes, and a member makes two at a time.
const IN_A_BEAT: u32 = 4;

/// When refusals are told.
#[derive(Debug)]
pub(super) struct Beat {
    /// What a check takes that ends well: it was not cut short. And that was alone: one that waits in line waits as long
    /// whoever its user is. Of one that ends otherwise it is learned only that it can take longer.
    check: Duration,
    /// When the last of those before has had its turn, had each cost a check.
    line: Instant,
}

impl Beat {
    pub(super) fn new(now: Instant) -> Self {
        Self { check: Duration::ZERO, line: now }
    }

    pub(super) fn learn(&mut self, took: Duration, alone: bool) {
        match (self.check.is_zero(), alone) {
            (true, _) => self.check = took,
            (false, true) => self.check = self.check * 7 / 8 + took / 8,
            (false, false) => {}
        }
    }

    /// One that was alone was refused after that.
    pub(super) fn learn_refused(&mut self, took: Duration) {
        if took > self.check {
            self.learn(took, true);
        }
    }

    /// Takes the next place in the line, for a try that begins `now`: a refusal is told no sooner than that. Past
    /// [`PATIENCE`] nobody waits for it any more.
    pub(super) fn enter(&mut self, now: Instant) -> Instant {
        let turn = self.line.max(now) + self.length() / IN_A_BEAT;
        self.line = turn.min(now + PATIENCE);
        self.line
    }

    /// Gives a place in the line back: it was no refusal.
    pub(super) fn leave(&mut self) {
        self.line = self.line.checked_sub(self.length() / IN_A_BEAT).unwrap_or(self.line);
    }

    /// When a refusal that is known `now` is told.
    pub(super) fn tells(&self, begun: Instant, turn: Instant, now: Instant) -> Instant {
        let beat = self.length();
        let took = turn.max(now).saturating_duration_since(begun);
        let beats = took.as_micros().div_ceil(beat.as_micros()).max(1);
        begun + beat.saturating_mul(u32::try_from(beats).unwrap_or(u32::MAX))
    }

    fn length(&self) -> Duration {
        (self.check * 2).clamp(LEAST_BEAT, LONGEST_BEAT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_refusal_is_told_when_any_other_would_be() {
        let start = Instant::now();
        let after = |beat: &Beat, took| beat.tells(start, start, start + millis(took)) - start;
        let mut beat = Beat::new(start);
        // etcd knows no such user; a cheap line; a bcrypt.
        assert_eq!([0, 1, 30, 90, 250].map(|took| after(&beat, took)), [millis(250); 5]);
        assert_eq!(after(&beat, 251), millis(500), "what took longer is late with all others");
        for _ in 0..64 {
            beat.learn(millis(400), true);
        }
        beat.learn(Duration::from_secs(60), false);
        let told = [1, 400].map(|took| after(&beat, took));
        assert_eq!(told[0], told[1], "a dearer bcrypt makes longer beats");
        assert!(told[0] > millis(700) && told[0] <= millis(800), "{told:?}");
        for _ in 0..64 {
            beat.learn(Duration::from_secs(60), true);
        }
        assert_eq!(after(&beat, 1), LONGEST_BEAT);
    }

    /// Nobody has logged in here yet, and a member is slow.
    #[test]
    fn refusals_alone_make_beats_longer_and_never_shorter() {
        let start = Instant::now();
        let mut beat = Beat::new(start);
        beat.learn_refused(millis(400));
        (0..100).for_each(|_| beat.learn_refused(millis(1)));
        assert_eq!(beat.tells(start, start, start + millis(1)) - start, millis(800));
        beat.learn_refused(millis(480));
        assert_eq!(beat.tells(start, start, start + millis(1)) - start, millis(820));
    }

    #[test]
    fn many_at_once_are_told_in_a_line_whatever_each_took() {
        let start = Instant::now();
        let told = |each: Duration| {
            let mut beat = Beat::new(start);
            let turns: Vec<_> = (0..200).map(|_| beat.enter(start)).collect();
            // Two at a time.
            let ends = (0..200).map(|n| start + each * (n / 2 + 1));
            turns
                .iter()
                .zip(ends)
                .map(|(turn, end)| beat.tells(start, *turn, end) - start)
                .collect::<Vec<_>>()
        };
        let (unknown, known) = (told(Duration::ZERO), told(millis(125)));
        assert_eq!(unknown[..112], known[..112]);
        assert_eq!(unknown[..5], [millis(250), millis(250), millis(250), millis(250), millis(500)]);
        assert!(unknown[112..].iter().all(|told| *told == PATIENCE), "nobody waits any more");
        let (mut beat, later, each) = (Beat::new(start), start + millis(1000), LEAST_BEAT / 4);
        assert_eq!(
            [beat.enter(start), beat.enter(later)],
            [start + each, later + each],
            "a line that is empty"
        );
        beat.leave();
        assert_eq!(beat.enter(later), later + each, "who was right makes nobody wait");
    }
}
