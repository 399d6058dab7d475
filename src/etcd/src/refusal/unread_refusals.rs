//! The statuses of answers without a place in the buffer of unread answers.
//!
//! Owns: the codes and the texts. Must not know: when an answer is given up. Invariant: an answer given up is
//! Unavailable: a read may be made again, and a write may have been applied.

use super::{Code, Refusal, RefusalReason, refusal};

impl Refusal {
    /// An answer with keys to rewrite does not fit into the buffer of unread answers.
    pub const ANSWER_TOO_LARGE: Self = refusal(
        RefusalReason::TooLarge,
        Code::ResourceExhausted,
        "keyward: the answer is too large to be held whole, as namespaces and limits need; ask for less",
    );
    /// An answer given up after `limits.unread_timeout`.
    pub const UNREAD_FOR_LONG: Self = refusal(
        RefusalReason::Limit,
        Code::Unavailable,
        "keyward: the answer was not read for limits.unread_timeout, and its room was needed",
    );
    /// An answer given up since the buffer of unread answers was full.
    pub const UNREAD_AND_FULL: Self = refusal(
        RefusalReason::Limit,
        Code::Unavailable,
        "keyward: the answer was not read for a second, and limits.unread_buffer was full",
    );
}
