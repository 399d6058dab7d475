//! The times at which probes ask for the auth setting.
//!
//! Owns: the intervals. Must not know: the questions, the answers. Invariant: while the belief is wrong, a
//! wrong password is accepted or a call waits for a token, so each round of probes has the question.

use tokio::time::Instant;

use super::probed_address::FORCED;
use super::{LIST, PROBE};

/// The next times, and the last one.
pub(super) struct AuthSchedule {
    asked: Option<Instant>,
    due: Instant,
    /// Confirmations by a login come with the reads of the member list: a login costs a member a raft entry.
    confirmation_due: Instant,
}

impl AuthSchedule {
    /// Due at once.
    pub(super) fn due(now: Instant) -> Self {
        Self { asked: None, due: now, confirmation_due: now }
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.due
    }

    /// Notes a question asked now. True if its answer is to be confirmed by a login.
    pub(super) fn note_asked(&mut self, now: Instant) -> bool {
        let confirms = now >= self.confirmation_due;
        (self.asked, self.due) = (Some(now), now + PROBE);
        if confirms {
            self.confirmation_due = now + LIST;
        }
        confirms
    }

    /// Makes a question with confirmation due: a call met another setting than the believed one.
    pub(super) fn hurry(&mut self) {
        self.due = self.asked.map_or_else(Instant::now, |asked| asked + FORCED);
        self.confirmation_due = self.due;
    }

    /// Makes a question with confirmation due now.
    pub(super) fn restart(&mut self, now: Instant) {
        (self.due, self.confirmation_due) = (now, now);
    }
}
