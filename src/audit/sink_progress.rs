//! The progress of a sink with a batch.
//!
//! Owns: the counts. Must not know: sinks, lines.

/// The part of a batch that is done.
#[derive(Default)]
pub(super) struct SinkProgress {
    /// Lines sent.
    pub(super) sent: u64,
    /// Lines among the sent ones that the receiver refuses for good.
    pub(super) refused: u64,
}

impl SinkProgress {
    /// The number of lines sent.
    pub(super) fn sent_lines(&self) -> usize {
        usize::try_from(self.sent).unwrap_or(usize::MAX)
    }
}
