//! The time limit of a probe, relative to the speed of the members: if all members are slow, no member is
//! unfit for slowness.
//!
//! Owns: the time limit, and its growth. Must not know: addresses, the content of answers. Pure: `now` is an
//! argument.
//! Invariants: the limit stays between [`LEAST`] and [`MOST`]; while any ready voter answers within the
//! limit, the limit does not grow; the limit grows once per round of probes, regardless of the number of
//! failed probes.

use std::time::Duration;

use tokio::time::Instant;

/// The limit while members are fast, or their speed is unknown.
pub(super) const LEAST: Duration = Duration::from_secs(1);
/// The longest limit derived from answers.
const MOST: Duration = Duration::from_secs(30);
/// The longest limit while no member answers. A longer limit would delay finding a cluster back behind a new
/// connection.
const BLIND_MOST: Duration = Duration::from_secs(8);
/// The limit as a multiple of the fastest voter's answer time.
const TIMES: u32 = 4;

/// Answers by other voters while a probe timed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OtherVoters {
    /// Another ready voter answered meanwhile: only the silent member is slow.
    Answered,
    /// No voter answered.
    Silent,
}

/// The time of the last answer, and the limit raised by timeouts.
#[derive(Debug, Default)]
pub(super) struct ProbeTimeLimit {
    answered: Option<Instant>,
    raised: Option<(Duration, Instant)>,
}

impl ProbeTimeLimit {
    /// The time limit for a call of a probe begun now, given the fastest voter's answer time.
    pub(super) fn limit(&self, fastest: Option<Duration>) -> Duration {
        let by_answers = fastest.map_or(LEAST, |fastest| (fastest * TIMES).clamp(LEAST, MOST));
        self.raised.map_or(by_answers, |(raised, _)| by_answers.max(raised))
    }

    /// Records the answer of a ready voter.
    pub(super) fn answered(&mut self, now: Instant) {
        self.answered = Some(now);
        self.raised = None;
    }

    /// Records a timeout, after `limit`, of a probe begun at `began`. If no voter answered since, doubles the
    /// limit of later probes.
    pub(super) fn late(&mut self, began: Instant, limit: Duration, now: Instant) -> OtherVoters {
        if self.answered.is_some_and(|at| at >= began) {
            return OtherVoters::Answered;
        }
        if self.raised.is_none_or(|(_, at)| at <= began) {
            let longer = (limit * 2).min(BLIND_MOST.max(limit));
            self.raised = Some((longer, now));
        }
        OtherVoters::Silent
    }
}

/// Updates a member's smoothed answer time: an increase counts at once, a decrease gradually.
pub(super) fn smoothed(before: Option<Duration>, took: Duration) -> Duration {
    before.map_or(took, |before| if took > before { took } else { before - (before - took) / 8 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_limit_follows_the_fastest_voter() {
        let pace = ProbeTimeLimit::default();
        let limit = |millis| pace.limit(Some(Duration::from_millis(millis)));
        assert_eq!((pace.limit(None), limit(1), limit(250)), (LEAST, LEAST, LEAST));
        assert_eq!(limit(1200), Duration::from_millis(4800));
        assert_eq!(limit(10_000), MOST);
    }

    #[test]
    fn the_limit_doubles_once_a_round_while_nobody_answers_and_falls_back_with_the_first_answer() {
        let (mut pace, mut now) = (ProbeTimeLimit::default(), Instant::now());
        let mut limits = Vec::new();
        for _ in 0..5 {
            let (began, limit) = (now, pace.limit(None));
            limits.push(limit.as_secs());
            now += limit;
            for _ in 0..3 {
                assert_eq!(pace.late(began, limit, now), OtherVoters::Silent);
            }
        }
        assert_eq!(limits, [1, 2, 4, 8, 8]);
        pace.answered(now);
        assert_eq!(pace.limit(Some(3 * SECOND)), 12 * SECOND);
        assert_eq!(pace.limit(None), LEAST);
    }

    #[test]
    fn a_member_that_alone_is_silent_makes_nobodys_limit_longer() {
        let (mut pace, began) = (ProbeTimeLimit::default(), Instant::now());
        pace.answered(began + SECOND / 2);
        assert_eq!(pace.late(began, LEAST, began + SECOND), OtherVoters::Answered);
        assert_eq!(pace.limit(None), LEAST);
    }

    #[test]
    fn an_estimate_rises_at_once_and_falls_little_by_little() {
        assert_eq!(smoothed(None, SECOND), SECOND);
        assert_eq!(smoothed(Some(SECOND), 3 * SECOND), 3 * SECOND);
        assert_eq!(smoothed(Some(8 * SECOND), Duration::ZERO), 7 * SECOND);
    }
}
