//! Limits on unread answers.
//!
//! Owns: the resolved values of `limits.unread_buffer` and `limits.unread_timeout`. Must not know: the
//! enforcement of the limits.

use std::time::Duration;

/// Limits on answers not read by clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnreadLimits {
    /// Bytes of unread answers, over all shards. A connection may use half of its shard's part.
    pub buffer: usize,
    /// An unread answer without any progress for so long loses its room to any answer that waits.
    pub timeout: Duration,
}
