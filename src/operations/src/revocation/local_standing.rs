//! The standing of the known revocations for local reads, while the cluster has no quorum.
//!
//! Owns: the rule. Pure: no clock, no sockets. Must not know: how revocations are read, the revocations.
//! Invariant (docs/decisions.md#d77): the revocations stand for local reads only if they were read, from any
//! member, at most `max_age` before the last moment at which the cluster may have had a quorum, because until
//! that moment a revocation may have been written.

use std::time::Duration;

use tokio::time::Instant;

use keyward_cluster::membership::ServingState;

/// The times of the looks at the cluster and of the reads of the revocations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LocalStanding {
    /// The time of the last good read, of whatever kind.
    read: Option<Instant>,
    /// The last look that saw a ready voter.
    quorum_seen: Option<Instant>,
    /// The last look without a quorum at which the revocations stood. While no member answers, the cluster
    /// may have a quorum unseen, so the standing ends `max_age` after the look.
    stood: Option<Instant>,
}

impl LocalStanding {
    /// Notes a good read asked for at `asked`.
    pub(super) fn note_read(&mut self, asked: Instant) {
        self.read = Some(asked);
    }

    /// Notes the calls that the cluster serves at `now`.
    pub(super) fn look(&mut self, serving: ServingState, now: Instant, max_age: Duration) {
        match serving {
            ServingState::Ready | ServingState::NoKnownLeader => self.quorum_seen = Some(now),
            ServingState::LocalReadsOnly if self.holds(now, max_age) => self.stood = Some(now),
            ServingState::LocalReadsOnly | ServingState::NoReadyVoter | ServingState::NothingKnown => {}
        }
    }

    /// True if the revocations stand for local reads at `now`, provided that the cluster has no quorum then.
    pub(super) fn holds(&self, now: Instant, max_age: Duration) -> bool {
        let Some(read) = self.read else { return false };
        let is_after = |later: Instant, earlier: Instant| later.saturating_duration_since(earlier) > max_age;
        let last_look = self.quorum_seen.into_iter().chain(self.stood).chain([read]).max().unwrap_or(read);
        self.quorum_seen.is_none_or(|seen| !is_after(seen, read)) && !is_after(now, last_look)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ServingState::{LocalReadsOnly, NoReadyVoter, Ready};

    const MAX_AGE: Duration = Duration::from_secs(60);

    /// The seconds since the beginning, one look a second by these phases with their lengths, and a good read
    /// at each second of `reads`. Returns the seconds at which the revocations stood for local reads.
    fn standing(phases: &[(ServingState, u64)], reads: &dyn Fn(u64) -> bool) -> Vec<u64> {
        let (begin, mut second) = (Instant::now(), 0);
        let (mut standing, mut held) = (LocalStanding::default(), Vec::new());
        for (serving, seconds) in phases {
            for _ in 0..*seconds {
                let now = begin + Duration::from_secs(second);
                standing.look(*serving, now, MAX_AGE);
                if reads(second) {
                    standing.note_read(now);
                }
                if *serving == LocalReadsOnly && standing.holds(now, MAX_AGE) {
                    held.push(second);
                }
                second += 1;
            }
        }
        held
    }

    #[test]
    fn known_revocations_stand_as_long_as_the_quorum_is_away() {
        let held = standing(&[(Ready, 10), (LocalReadsOnly, 5000)], &|second| second < 10);
        assert_eq!(held, (10..5010).collect::<Vec<_>>());
        // The reads failed for as long as they may before the quorum was lost, and for longer.
        let held = standing(&[(Ready, 61), (LocalReadsOnly, 100)], &|second| second == 0);
        assert_eq!(held.len(), 100);
        let held = standing(&[(Ready, 62), (LocalReadsOnly, 100)], &|second| second == 0);
        assert_eq!(held, Vec::<u64>::new(), "they did not count any more when the quorum was seen last");
    }

    #[test]
    fn revocations_that_were_never_read_do_not_stand_until_they_are() {
        assert_eq!(standing(&[(LocalReadsOnly, 100)], &|_| false), Vec::<u64>::new());
        assert_eq!(standing(&[(LocalReadsOnly, 100)], &|second| second == 70), (70..100).collect::<Vec<_>>());
        let held = standing(&[(Ready, 100), (LocalReadsOnly, 100)], &|second| second == 170);
        assert_eq!(held, (170..200).collect::<Vec<_>>());
    }

    #[test]
    fn a_quorum_that_came_back_without_a_read_ends_the_standing() {
        let phases = [(Ready, 10), (LocalReadsOnly, 1000), (Ready, 1), (LocalReadsOnly, 100)];
        assert_eq!(standing(&phases, &|second| second < 10), (10..1010).collect::<Vec<_>>());
        let held = standing(&phases, &|second| second < 10 || second == 1050);
        assert_eq!(held, (10..1010).chain(1050..1111).collect::<Vec<_>>());
    }

    #[test]
    fn without_any_answer_the_standing_lasts_as_long_as_a_quorum_may_be_unseen() {
        let of =
            |silence| [(Ready, 10), (LocalReadsOnly, 1000), (NoReadyVoter, silence), (LocalReadsOnly, 9)];
        let first = || 10..1010;
        assert_eq!(standing(&of(59), &|second| second < 10), first().chain(1069..1078).collect::<Vec<_>>());
        assert_eq!(standing(&of(61), &|second| second < 10), first().collect::<Vec<_>>());
    }
}
