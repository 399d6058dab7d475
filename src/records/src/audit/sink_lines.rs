//! Lines on their way to a sink.
//!
//! Owns: the bounds of what a sink takes at once. Must not know: where the lines come from.

use std::sync::Arc;

use super::queue::BatchRoom;

/// The most that a sink takes at once. A longer line goes alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct SinkLimits {
    pub(super) lines: u64,
    pub(super) bytes: usize,
}

impl SinkLimits {
    /// True if a line of `length` bytes fits behind these lines.
    pub(super) fn fits(self, lines: &SinkLines, length: usize) -> bool {
        lines.count == 0 || (lines.count < self.lines && lines.bytes.len() + length <= self.bytes)
    }
}

/// Whole lines, with their line breaks.
#[derive(Default)]
pub(super) struct SinkLines {
    pub(super) bytes: Vec<u8>,
    pub(super) count: u64,
    /// The room of the lines' records, held until the sink has done with them.
    pub(super) rooms: Vec<Arc<BatchRoom>>,
}

impl SinkLines {
    pub(super) fn push(&mut self, line: &[u8]) {
        self.bytes.extend_from_slice(line);
        self.count += 1;
    }
}
