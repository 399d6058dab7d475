//! What keeps the audit file from being written, or from standing at its path.
//!
//! Owns: the present trouble and the last one, for doctor. Must not know: how a file is written.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use super::moved_file::MovedFile;
use super::sink_state::SinkTrouble;

/// The troubles of the process's audit file.
#[derive(Debug, Default)]
pub(super) struct LogTrouble(Mutex<LogTroubleReport>);

/// The troubles, for doctor.
#[derive(Clone, Debug, Default)]
pub struct LogTroubleReport {
    /// The file cannot be written.
    pub unwritable: Option<SinkTrouble>,
    /// The file was moved, and no new file can be begun at its path.
    pub lost_path: Option<SinkTrouble>,
    /// The last file that somebody else moved or removed, and when that was seen.
    pub moved: Option<(MovedFile, SystemTime)>,
}

impl LogTrouble {
    fn lock(&self) -> MutexGuard<'_, LogTroubleReport> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_unwritable(&self, error: &io::Error) {
        note(&mut self.lock().unwritable, error);
    }

    pub(super) fn note_written(&self) {
        self.lock().unwritable = None;
    }

    /// Returns true if the path was right before.
    pub(super) fn note_lost_path(&self, error: &io::Error) -> bool {
        note(&mut self.lock().lost_path, error)
    }

    pub(super) fn note_path(&self) {
        self.lock().lost_path = None;
    }

    pub(super) fn note_moved(&self, moved: MovedFile) {
        self.lock().moved = Some((moved, SystemTime::now()));
    }

    pub(super) fn report(&self) -> LogTroubleReport {
        self.lock().clone()
    }
}

fn note(trouble: &mut Option<SinkTrouble>, error: &io::Error) -> bool {
    let since = trouble.as_ref().map(|trouble| trouble.since);
    *trouble = Some(SinkTrouble { since: since.unwrap_or_else(SystemTime::now), error: error.to_string() });
    since.is_none()
}
