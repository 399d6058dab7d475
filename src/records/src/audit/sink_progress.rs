//! The progress of a sink with its lines, and what ends the progress.
//!
//! Owns: the counts. Must not know: sinks, lines.

use std::io;
use std::time::Duration;

/// Why a sink does not go on.
#[derive(Debug)]
pub(super) struct SinkError {
    pub(super) error: io::Error,
    /// The receiver asks for no attempt before this time.
    pub(super) after: Duration,
}

impl From<io::Error> for SinkError {
    fn from(error: io::Error) -> Self {
        Self { error, after: Duration::ZERO }
    }
}

/// The part of a batch that is done.
#[derive(Default)]
pub(super) struct SinkProgress {
    /// Lines sent.
    pub(super) sent: u64,
    /// Lines among the sent ones that the receiver refuses for good.
    pub(super) refused: u64,
}

impl SinkProgress {
    /// Moves the counts of `more` here.
    pub(super) fn add(&mut self, more: &mut Self) {
        let more = std::mem::take(more);
        self.sent += more.sent;
        self.refused += more.refused;
    }

    /// The number of lines sent.
    pub(super) fn sent_lines(&self) -> usize {
        usize::try_from(self.sent).unwrap_or(usize::MAX)
    }
}
