//! Circuit breaker for password checks at one member: when logins stop or slow down.
//!
//! Owns: the decision for one member. Must not know: the callers of logins, clocks (time is an argument).
//! Invariants: a member without answers gets one login at a time, with growing backoff, until the member
//! answers; a member refusing every login is left idle most of the time, for other work; one accepted login
//! resets the breaker.

use std::time::Duration;

use tokio::time::Instant;

/// Consecutive logins without an answer before the breaker opens.
const SILENT: u32 = 5;
const FIRST_REST: Duration = Duration::from_millis(250);
/// Longest backoff. Well below a call's waiting time, so a call waiting for a token still gets a login.
const LONGEST_REST: Duration = Duration::from_secs(2);
/// Consecutive refusals before each refusal is followed by a pause of `REST_PER_REFUSAL` times the login's
/// duration.
const REFUSED: u32 = 30;
const REST_PER_REFUSAL: u32 = 4;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The outcome of a login, as far as relevant for the member's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoginVerdict {
    Accepted,
    Refused,
    /// No answer, or no answer about the password.
    Nothing,
}

/// The circuit breaker of one member.
#[derive(Debug, Default)]
pub(super) struct LoginBreaker {
    silent: u32,
    refused: u32,
    /// Logins are not allowed before this time.
    closed_until: Option<Instant>,
}

impl LoginBreaker {
    /// Returns true if a login may start now. While the member is silent, an allowed login is a trial: no
    /// further login is allowed until the trial has ended or `trial` has passed.
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

    /// Records the outcome of a login. Returns for how long the login keeps occupying its place.
    pub(super) fn note(&mut self, heard: LoginVerdict, took: Duration, now: Instant) -> Duration {
        match heard {
            LoginVerdict::Accepted => *self = Self::default(),
            LoginVerdict::Refused => {
                *self = Self { refused: self.refused.saturating_add(1), ..Self::default() };
                if self.refused > REFUSED {
                    return (took * REST_PER_REFUSAL).min(LONGEST_PAUSE);
                }
            }
            LoginVerdict::Nothing => {
                self.silent = self.silent.saturating_add(1);
                if let Some(more) = self.silent.checked_sub(SILENT) {
                    let rest = FIRST_REST.saturating_mul(1 << more.min(8)).min(LONGEST_REST);
                    self.closed_until = Some(now + rest);
                }
            }
        }
        Duration::ZERO
    }

    /// True if the breaker has no failure on record.
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
        let (mut breaker, start) = (LoginBreaker::default(), Instant::now());
        let mut asked = Vec::new();
        for milli in 0..10_000 {
            let now = start + milli * MILLI;
            while breaker.allows(now, TRIAL) {
                assert!(!breaker.allows(now, TRIAL) || asked.len() < 5, "one at a time");
                breaker.note(LoginVerdict::Nothing, Duration::ZERO, now);
                asked.push(milli);
            }
        }
        assert_eq!(asked, [0, 0, 0, 0, 0, 250, 750, 1750, 3750, 5750, 7750, 9750]);
        assert!(breaker.allows(start + 20_000 * MILLI, TRIAL));
        breaker.note(LoginVerdict::Accepted, Duration::ZERO, start + 20_001 * MILLI);
        assert!(breaker.is_at_rest() && (0..9).all(|_| breaker.allows(start + 20_001 * MILLI, TRIAL)));
    }

    #[test]
    fn a_trial_that_never_ends_is_not_waited_for_for_ever() {
        let (mut breaker, start) = (LoginBreaker::default(), Instant::now());
        for _ in 0..5 {
            breaker.note(LoginVerdict::Nothing, Duration::ZERO, start);
        }
        assert!(breaker.allows(start + 250 * MILLI, TRIAL));
        assert!(!breaker.allows(start + 250 * MILLI + TRIAL - MILLI, TRIAL));
        assert!(breaker.allows(start + 250 * MILLI + TRIAL, TRIAL));
    }

    #[test]
    fn a_member_that_refuses_everybody_gets_time_to_breathe() {
        let (mut breaker, now) = (LoginBreaker::default(), Instant::now());
        let took = 50 * MILLI;
        let refuse = |breaker: &mut LoginBreaker| breaker.note(LoginVerdict::Refused, took, now);
        assert!((0..30).all(|_| refuse(&mut breaker).is_zero()), "some are always wrong");
        assert_eq!(refuse(&mut breaker), 200 * MILLI);
        assert_eq!(breaker.note(LoginVerdict::Refused, 60_000 * MILLI, now), LONGEST_PAUSE);
        assert!(breaker.allows(now, TRIAL), "slower, never closed");
        breaker.note(LoginVerdict::Accepted, took, now);
        assert!(refuse(&mut breaker).is_zero());
    }

    #[test]
    fn an_answer_of_any_kind_ends_a_silence() {
        let (mut breaker, now) = (LoginBreaker::default(), Instant::now());
        for _ in 0..9 {
            breaker.note(LoginVerdict::Nothing, Duration::ZERO, now);
        }
        assert!(!breaker.allows(now, TRIAL));
        breaker.note(LoginVerdict::Refused, Duration::ZERO, now);
        assert!(breaker.allows(now, TRIAL));
    }
}
