//! The end of a call in its record: the status, and the maker of an error.
//!
//! Owns: the count of refusals by reason. Must not know: where records go. Invariants: the first end noted
//! counts, and counts once; a refusal that is decided and held back counts also if its client gives up before
//! the answer.

use super::AccessRecord;
use keyward_etcd::refusal::{AnswerEnd, Code, Refusal, RefusalCause, RefusalReason, Status};

impl AccessRecord {
    /// Counts the refusal of the call, and notes its end.
    pub fn refused(&mut self, refusal: &Refusal) {
        self.ended_by(refusal.clone().into());
    }

    /// Notes the end of the call, and counts a refusal. Later ends are ignored.
    pub fn ended_by(&mut self, end: AnswerEnd) {
        if self.code.is_some() {
            return;
        }
        if let Some(RefusalCause { reason, rule }) = end.refused {
            let is_end_of_wait =
                matches!(reason, RefusalReason::Deadline | RefusalReason::Canceled | RefusalReason::TimedOut);
            let held = self.held_refusal().filter(|_| is_end_of_wait);
            self.count_refusal(held.unwrap_or(reason));
            if let Some(rule) = rule {
                self.note_rule(rule.into());
            }
        }
        self.ended_with(end.status);
    }

    fn count_refusal(&mut self, reason: RefusalReason) {
        self.sinks.metrics.refusals.count(reason as usize);
        self.refused = Some(reason);
    }

    /// True if the client gave up a call that was not refused.
    pub(super) fn is_given_up(&self, code: Code) -> bool {
        code == Code::Canceled && matches!(self.refused, None | Some(RefusalReason::Canceled))
    }

    /// The maker of the error at the call's end: etcd, or Keyward for this reason. `None` for a success,
    /// and for a call that its client gave up.
    pub(super) fn refused_by(&self) -> Option<&'static str> {
        match (self.refused, self.code) {
            (Some(reason), _) => Some(reason.name()),
            (None, Some(code)) if code != Code::Ok => Some("etcd"),
            (None, _) => None,
        }
    }

    /// True once the status code of the call is noted.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.code.is_some()
    }

    /// Notes the end of the call with success, or without any text for the client. Later ends are ignored.
    pub fn ended(&mut self, code: Code) {
        self.code.get_or_insert(code);
    }

    /// Notes the end of the call with a status. Later ends are ignored.
    pub fn ended_with(&mut self, status: Status) {
        if self.code.is_none() && !status.is_ok() && !status.message.is_empty() {
            self.note_rare(|rare| rare.reason = Some(status.message));
        }
        self.ended(status.code);
    }

    /// The code of the call, at the end of its record. A call without an end was given up by its client; a
    /// refusal held back until then counts.
    pub(super) fn end_if_open(&mut self) -> Code {
        if self.code.is_none()
            && let Some(reason) = self.held_refusal()
        {
            self.count_refusal(reason);
        }
        self.code.unwrap_or(Code::Canceled)
    }

    fn held_refusal(&mut self) -> Option<RefusalReason> {
        self.rare.get_mut().as_ref()?.held_refusal
    }
}
