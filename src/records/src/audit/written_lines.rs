//! The lines that stand in the audit file, synced, for the sinks that read them from there.
//!
//! Owns: the number of the last line, and the turns of whoever renames files and whoever looks for them. Must
//! not know: how a line is read or sent. Invariant: the writer waits for no sink: a sink holds the names only
//! while it opens a file.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::sink_state::SinkState;

/// The lines, and the sinks that follow them.
#[derive(Debug)]
pub(super) struct WrittenLines {
    state: Mutex<WrittenState>,
    grows: Condvar,
    names: Mutex<()>,
    followers: Vec<Arc<SinkState>>,
}

#[derive(Debug)]
struct WrittenState {
    last: u64,
    is_closing: bool,
    /// The lines are a successor's: nothing about them is kept any more.
    is_left: bool,
}

impl WrittenLines {
    /// The lines up to the number `last`.
    pub(super) fn new(last: u64, followers: Vec<Arc<SinkState>>) -> Self {
        let state = Mutex::new(WrittenState { last, is_closing: false, is_left: false });
        Self { state, grows: Condvar::new(), names: Mutex::default(), followers }
    }

    fn lock(&self) -> MutexGuard<'_, WrittenState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the lines up to `last` are synced.
    pub(super) fn note(&self, last: u64) {
        self.followers.iter().for_each(|sink| sink.note_written(last));
        self.lock().last = last;
        self.grows.notify_all();
    }

    /// Lets the sinks end once they have taken all lines.
    pub(super) fn close(&self) {
        self.lock().is_closing = true;
        self.grows.notify_all();
    }

    /// True once the sinks are to end.
    pub(super) fn is_closing(&self) -> bool {
        self.lock().is_closing
    }

    /// Leaves the lines to a successor, whose sinks follow them from the kept places on.
    pub(super) fn leave(&self) {
        self.lock().is_left = true;
    }

    /// True once a successor's sinks follow the lines.
    pub(super) fn is_left(&self) -> bool {
        self.lock().is_left
    }

    /// Waits for a line behind the number `taken`, and returns the number of the last line. `None` if no line
    /// follows any more.
    pub(super) fn wait_beyond(&self, taken: u64) -> Option<u64> {
        let waits = |state: &mut WrittenState| state.last <= taken && !state.is_closing;
        let state = self.grows.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        Some(state.last).filter(|last| *last > taken)
    }

    /// While the result is held, no file of the log gets another name.
    pub(super) fn hold_names(&self) -> MutexGuard<'_, ()> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the last line that every sink has taken.
    pub(super) fn taken_by_all(&self) -> u64 {
        self.followers.iter().map(|sink| sink.taken()).min().unwrap_or(u64::MAX)
    }

    /// Notes that the file with the lines up to `last` is gone.
    pub(super) fn note_removed(&self, last: u64) {
        self.followers.iter().for_each(|sink| sink.note_removed(last));
    }
}
