//! The queue of a sink where no file keeps the lines.
//!
//! Owns: the queue and its bound in bytes. Must not know: how lines are sent. Invariants: the writer never
//! waits; with `on_full = "block"` the records keep their room in the queue of the calls until the sink has
//! done with them, so that the calls wait; with `"drop"` lines beyond the bound are not queued.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::queue::BatchRoom;
use super::sink_lines::{SinkLimits, SinkLines};

/// A queue of lines.
#[derive(Default)]
pub(super) struct SinkQueue {
    state: Mutex<SinkQueueState>,
    fills: Condvar,
    /// Bytes of queued lines at most; `None` where the records hold room.
    capacity: Option<usize>,
}

#[derive(Default)]
struct SinkQueueState {
    batches: VecDeque<QueuedLines>,
    bytes: usize,
    lines: u64,
    is_closing: bool,
}

/// A batch of the writer.
#[derive(Clone)]
pub(super) struct QueuedLines {
    pub(super) lines: Arc<[u8]>,
    pub(super) count: u64,
    /// The room of the records, if they hold it.
    pub(super) room: Option<Arc<BatchRoom>>,
    /// Bytes at the begin that the sink has.
    pub(super) done: usize,
}

impl SinkQueue {
    pub(super) fn new(capacity: Option<usize>) -> Self {
        Self { capacity, ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, SinkQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a batch. Returns false if the batch has no room.
    pub(super) fn push(&self, batch: QueuedLines) -> bool {
        let mut state = self.lock();
        let bytes = state.bytes + batch.lines.len();
        if !state.batches.is_empty() && self.capacity.is_some_and(|most| bytes > most) {
            return false;
        }
        (state.bytes, state.lines) = (bytes, state.lines + batch.count);
        state.batches.push_back(batch);
        drop(state);
        self.fills.notify_one();
        true
    }

    /// The number of queued lines.
    pub(super) fn len(&self) -> u64 {
        self.lock().lines
    }

    /// Lets the sink end once it has taken all lines.
    pub(super) fn close(&self) {
        self.lock().is_closing = true;
        self.fills.notify_all();
    }

    /// Waits for lines, and takes as many as fit. `None` if no line follows any more.
    pub(super) fn take(&self, most: SinkLimits) -> Option<SinkLines> {
        let waits = |state: &mut SinkQueueState| state.batches.is_empty() && !state.is_closing;
        let waited = self.fills.wait_while(self.lock(), waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        let mut taken = SinkLines::default();
        while let Some(batch) = state.batches.front_mut() {
            let mut done = batch.done;
            let mut rest = batch.lines[done..].split_inclusive(|byte| *byte == b'\n').peekable();
            while let Some(line) = rest.next_if(|line| most.fits(&taken, line.len())) {
                taken.push(line);
                done += line.len();
            }
            let (is_whole, is_begun) = (rest.peek().is_none(), done > batch.done);
            drop(rest);
            batch.done = done;
            if is_begun {
                taken.rooms.extend(batch.room.clone());
            }
            if !is_whole {
                break;
            }
            let length = batch.lines.len();
            state.bytes -= length;
            state.batches.pop_front();
        }
        state.lines -= taken.count;
        Some(taken).filter(|taken| taken.count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(text: &str) -> QueuedLines {
        let lines: Arc<[u8]> = text.as_bytes().into();
        QueuedLines { lines, count: text.lines().count() as u64, room: None, done: 0 }
    }

    #[test]
    fn batches_are_joined_and_divided_by_lines_and_bytes() {
        let queue = SinkQueue::new(None);
        for text in ["one\ntwo\n", "three\n", "four\n", "a long line\n", "x\n"] {
            assert!(queue.push(batch(text)));
        }
        queue.close();
        let most = SinkLimits { lines: 3, bytes: 14 };
        let taken: Vec<_> = std::iter::from_fn(|| queue.take(most))
            .map(|lines| (String::from_utf8(lines.bytes).unwrap(), lines.count))
            .collect();
        let expected = [("one\ntwo\nthree\n", 3), ("four\n", 1), ("a long line\nx\n", 2)]
            .map(|(a, b)| (a.to_owned(), b));
        assert_eq!(taken, expected);
        assert_eq!(queue.lock().bytes, 0);
        let long = SinkLimits { lines: 3, bytes: 1 };
        assert!(queue.push(batch("longer\nthan\n")));
        assert_eq!(queue.take(long).unwrap().bytes, b"longer\n", "a longer line goes alone");
        assert_eq!(queue.len(), 1);
    }

    #[test]
    fn lines_beyond_the_bound_are_not_queued() {
        let queue = SinkQueue::new(Some(10));
        assert!(queue.push(batch("12345678901234567890\n")), "a large batch is not lost for ever");
        assert!(!queue.push(batch("1\n")));
        queue.take(SinkLimits { lines: 9, bytes: 99 }).unwrap();
        assert!(queue.push(batch("1\n")));
    }
}
