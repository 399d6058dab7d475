//! How long a probe may take: relative to how fast members answer, so that no member is unfit for being as slow as all the others.
//!
//! Owns: the time limit, and when it grows. Must not know: addresses, what an answer says. Pure: `now` is an argument.
//! Invariants: the limit is never below [`LEAST`] nor above [`MOST`]; while any voter that serves is answered within the limit, the
//! limit does not grow; it grows once per round of probes, however many of them fail.

use std::time::Duration;

use tokio::time::Instant;

/// The limit while members are fast, or nothing is known of them.
pub(super) const LEAST: Duration = Duration::from_secs(1);
/// The longest limit that follows from answers.
const MOST: Duration = Duration::from_secs(30);
/// The longest limit while nobody answers. Longer ones would find a cluster later that comes back behind a new connection.
const BLIND_MOST: Duration = Duration::from_secs(8);
/// A probe may take so many times what the fastest voter takes.
const TIMES: u32 = 4;

/// Whether somebody else answered while a probe had no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Others {
    /// Another voter that serves was answered meanwhile: the silent member is the slow one.
    Answered,
    /// Nobody was.
    Silent,
}

/// When probes were answered, and the limit where they were not.
#[derive(Debug, Default)]
pub(super) struct Pace {
    answered: Option<Instant>,
    raised: Option<(Duration, Instant)>,
}

impl Pace {
    /// How long a call of a probe that begins now may take, where the fastest voter takes `fastest`.
    pub(super) fn limit(&self, fastest: Option<Duration>) -> Duration {
        let by_answers = fastest.map_or(LEAST, |fastest| (fastest * TIMES).clamp(LEAST, MOST));
        self.raised.map_or(by_answers, |(raised, _)| by_answers.max(raised))
    }

    /// A voter that serves was answered.
    pub(super) fn answered(&mut self, now: Instant) {
        self.answered = Some(now);
        self.raised = None;
    }

    /// A probe that began at `began` had no answer within `limit`. Where no other had one either, later ones may take twice as long.
    pub(super) fn late(&mut self, began: Instant, limit: Duration, now: Instant) -> Others {
        if self.answered.is_some_and(|at| at >= began) {
            return Others::Answered;
        }
        if self.raised.is_none_or(|(_, at)| at <= began) {
            let longer = (limit * 2).min(BLIND_MOST.max(limit));
            self.raised = Some((longer, now));
        }
        Others::Silent
    }
}

/// What a member takes to answer, after an answer that took `took`: more at once, less little by little.
pub(super) fn smoothed(before: Option<Duration>, took: Duration) -> Duration {
    before.map_or(took, |before| if took > before { took } else { before - (before - took) / 8 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_limit_follows_the_fastest_voter() {
        let pace = Pace::default();
        let limit = |millis| pace.limit(Some(Duration::from_millis(millis)));
        assert_eq!((pace.limit(None), limit(1), limit(250)), (LEAST, LEAST, LEAST));
        assert_eq!(limit(1200), Duration::from_millis(4800));
        assert_eq!(limit(10_000), MOST);
    }

    #[test]
    fn the_limit_doubles_once_a_round_while_nobody_answers_and_falls_back_with_the_first_answer() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        let mut limits = Vec::new();
        for _ in 0..5 {
            let (began, limit) = (now, pace.limit(None));
            limits.push(limit.as_secs());
            now += limit;
            for _ in 0..3 {
                assert_eq!(pace.late(began, limit, now), Others::Silent);
            }
        }
        assert_eq!(limits, [1, 2, 4, 8, 8]);
        pace.answered(now);
        assert_eq!(pace.limit(Some(3 * SECOND)), 12 * SECOND);
        assert_eq!(pace.limit(None), LEAST);
    }

    #[test]
    fn a_member_that_alone_is_silent_makes_nobodys_limit_longer() {
        let (mut pace, began) = (Pace::default(), Instant::now());
        pace.answered(began + SECOND / 2);
        assert_eq!(pace.late(began, LEAST, began + SECOND), Others::Answered);
        assert_eq!(pace.limit(None), LEAST);
    }

    #[test]
    fn an_estimate_rises_at_once_and_falls_little_by_little() {
        assert_eq!(smoothed(None, SECOND), SECOND);
        assert_eq!(smoothed(Some(SECOND), 3 * SECOND), 3 * SECOND);
        assert_eq!(smoothed(Some(8 * SECOND), Duration::ZERO), 7 * SECOND);
    }
}
