//! How much of unread answers is kept, and for how long.
//!
//! Owns: the resolved values of `limits.unread_buffer` and `limits.unread_timeout`. Must not know: what is done past them.

use std::time::Duration;

/// Bounds on answers that their clients do not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unread {
    /// Bytes of such answers, over all shards. One connection has half of a shard's part.
    pub buffer: usize,
    /// An answer of which a client takes nothing for so long is given up.
    pub timeout: Duration,
}
