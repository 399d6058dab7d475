//! The reason of a refusal, and the end of an answer with that reason.
//!
//! Owns: the names of the reasons. Must not know: the statuses. Invariant: `NAMES` has the names in the
//! order of the variants.

use super::{Refusal, Status};

/// Why a call was refused: the label of the metric of refused calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "`name` and the table of docs/metrics.md say it")]
pub enum RefusalReason {
    Token,
    NoIdentity,
    Password,
    AuthOff,
    AuthRevision,
    Policy,
    Blocked,
    Namespace,
    Mapping,
    Patch,
    Limit,
    NoMember,
    TimedOut,
    Deadline,
    Canceled,
    TooLarge,
    Malformed,
    Unknown,
    Audit,
    Defragmentation,
    Suspect,
    Draining,
    Kicked,
    Certificate,
    Internal,
    Member,
}

impl RefusalReason {
    /// The names of all reasons, in the order of the variants.
    pub const NAMES: [&str; 26] = [
        "token",
        "no_identity",
        "password",
        "auth_off",
        "auth_revision",
        "policy",
        "blocked",
        "namespace",
        "mapping",
        "patch",
        "limit",
        "no_member",
        "timed_out",
        "deadline",
        "canceled",
        "too_large",
        "malformed",
        "unknown",
        "audit",
        "defragmentation",
        "suspect",
        "draining",
        "kicked",
        "certificate",
        "internal",
        "member",
    ];
}

impl RefusalReason {
    /// The name for whoever asks who refused a call.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Member => "etcd",
            reason => Self::NAMES[reason as usize],
        }
    }
}

/// The end of an answer, and who made it an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerEnd {
    /// The status for the client.
    pub status: Status,
    /// Keyward's refusal; `None` for a success, and for a member's status.
    pub refused: Option<RefusalCause>,
}

/// Why Keyward refused a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusalCause {
    /// The reason.
    pub reason: RefusalReason,
    /// The rule of the policy, if the end of the call tells the rule.
    pub rule: Option<Box<str>>,
}

impl AnswerEnd {
    /// The refusal by a rule of the policy. The client is not told the rule.
    #[must_use]
    pub fn by_rule(refusal: Refusal, rule: Option<Box<str>>) -> Self {
        let reason = refusal.reason;
        Self { status: refusal.status(), refused: Some(RefusalCause { reason, rule }) }
    }
}

impl From<Status> for AnswerEnd {
    fn from(status: Status) -> Self {
        Self { status, refused: None }
    }
}

impl From<Refusal> for AnswerEnd {
    fn from(Refusal { code, message, reason }: Refusal) -> Self {
        Self { status: Status { code, message }, refused: Some(RefusalCause { reason, rule: None }) }
    }
}
