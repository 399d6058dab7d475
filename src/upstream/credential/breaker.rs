//! When a member is asked to check passwords no more, or more slowly.
//!
//! Owns: that decision, for one member. Must not know: who logs in, clocks (time is an argument).
//! Invariants: a member that does not answer is asked by one login at a time, and ever more rarely, until it answers; a
//! member that refuses everybody is left most of its time for others; one login that is accepted ends both.

use std::time::Duration;

use tokio::time::Instant;

/// Logins without an answer in a row, after which the member is left alone.
const SILENT: u32 = 5;
const FIRST_REST: Duration = Duration::from_millis(250);
/// Well below what a call waits: whoever wants a token then still gets one.
const LONGEST_REST: Duration = Duration::from_secs(2);
/// Refusals in a row, after which each is followed by a rest of some times what it took.
const REFUSED: u32 = 30;
const REST_PER_REFUSAL: u32 = 4;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How a login ended, as far as it tells of its member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Accepted,
    Refused,
    /// No answer, or none about the password.
    Nothing,
}

/// One member's breaker.
#[derive(Debug, Default)]
pub(super) struct Breaker {
    silent: u32,
    refused: u32,
    /// Nobody asks before.
    closed_until: Option<Instant>,
}

impl Breaker {
    /// Whether a login may be made now. One that may while the member was silent is its trial: until it has ended, or its
    /// time is over, no other may.
    pub(super) fn allows(&mut self, now: Instant, trial: Duration) -> bool {
        match self.closed_until {
            None => true,
            Some(until) if now < until => false,
            Some(_) => {
                self.closed_until = Some(now + trial);
                true
            }
        }
    }

    /// Takes down how a login ended. Returns for how long its place stays taken.
    pub(super) fn note(&mut self, heard: Heard, took: Duration, now: Instant) -> Duration {
        match heard {
            Heard::Accepted => *self = Self::default(),
            Heard::Refused => {
                *self = Self { refused: self.refused.saturating_add(1), ..Self::default() };
                if self.refused > REFUSED {
                    return (took * REST_PER_REFUSAL).min(LONGEST_PAUSE);
                }
            }
            Heard::Nothing => {
                self.silent = self.silent.saturating_add(1);
                if let Some(more) = self.silent.checked_sub(SILENT) {
                    let rest = FIRST_REST.saturating_mul(1 << more.min(8)).min(LONGEST_REST);
                    self.closed_until = Some(now + rest);
                }
            }
        }
        Duration::ZERO
    }

    /// Whether it has nothing to remember.
    pub(super) fn is_at_rest(&self) -> bool {
        self.silent == 0 && self.refused == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIAL: Duration = Duration::from_secs(10);
    const MILLI: Duration = Duration::from_millis(1);

    #[test]
    fn a_silent_member_is_asked_ever_more_rarely_and_by_one_at_a_time() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        let mut asked = Vec::new();
        for milli in 0..10_000 {
            let now = start + milli * MILLI;
            while breaker.allows(now, TRIAL) {
                assert!(!breaker.allows(now, TRIAL) || asked.len() < 5, "one at a time");
                breaker.note(Heard::Nothing, Duration::ZERO, now);
                asked.push(milli);
            }
        }
        assert_eq!(asked, [0, 0, 0, 0, 0, 250, 750, 1750, 3750, 5750, 7750, 9750]);
        assert!(breaker.allows(start + 20_000 * MILLI, TRIAL));
        breaker.note(Heard::Accepted, Duration::ZERO, start + 20_001 * MILLI);
        assert!(breaker.is_at_rest() && (0..9).all(|_| breaker.allows(start + 20_001 * MILLI, TRIAL)));
    }

    #[test]
    fn a_trial_that_never_ends_is_not_waited_for_for_ever() {
        let (mut breaker, start) = (Breaker::default(), Instant::now());
        for _ in 0..5 {
            breaker.note(Heard::Nothing, Duration::ZERO, start);
        }
        assert!(breaker.allows(start + 250 * MILLI, TRIAL));
        assert!(!breaker.allows(start + 250 * MILLI + TRIAL - MILLI, TRIAL));
        assert!(breaker.allows(start + 250 * MILLI + TRIAL, TRIAL));
    }

    #[test]
    fn a_member_that_refuses_everybody_gets_time_to_breathe() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        let took = 50 * MILLI;
        let refuse = |breaker: &mut Breaker| breaker.note(Heard::Refused, took, now);
        assert!((0..30).all(|_| refuse(&mut breaker).is_zero()), "some are always wrong");
        assert_eq!(refuse(&mut breaker), 200 * MILLI);
        assert_eq!(breaker.note(Heard::Refused, 60_000 * MILLI, now), LONGEST_PAUSE);
        assert!(breaker.allows(now, TRIAL), "slower, never closed");
        breaker.note(Heard::Accepted, took, now);
        assert!(refuse(&mut breaker).is_zero());
    }

    #[test]
    fn an_answer_of_any_kind_ends_a_silence() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        for _ in 0..9 {
            breaker.note(Heard::Nothing, Duration::ZERO, now);
        }
        assert!(!breaker.allows(now, TRIAL));
        breaker.note(Heard::Refused, Duration::ZERO, now);
        assert!(breaker.allows(now, TRIAL));
    }
}
