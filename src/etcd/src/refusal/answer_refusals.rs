//! Refusals for the size of an answer, in keys or in bytes.
//!
//! Owns: their texts. Must not know: who is limited, how sizes are known.

use super::{Code, Refusal, RefusalReason};

impl Refusal {
    /// A Range of more than `most` keys, without a limit, by a caller who may get `most` at once.
    #[must_use]
    pub fn range_too_large(most: u32) -> Self {
        let message = format!("keyward: the range has more than {most} keys; set a limit of at most {most}");
        Self::with_text(RefusalReason::Limit, Code::ResourceExhausted, message)
    }

    /// A Txn with a Range without a limit, by a caller who may get `most` keys at once.
    #[must_use]
    pub fn range_in_txn_without_limit(most: u32) -> Self {
        let message = format!("keyward: a range in a txn needs a limit of at most {most}");
        Self::with_text(RefusalReason::Limit, Code::ResourceExhausted, message)
    }

    /// A request for an answer of more than `most` bytes, by a caller who may get `most` at once.
    #[must_use]
    pub fn answer_too_large(most: u64) -> Self {
        let message = format!("keyward: the answer has more than {most} bytes; ask for fewer keys at a time");
        Self::with_text(RefusalReason::Limit, Code::ResourceExhausted, message)
    }
}
