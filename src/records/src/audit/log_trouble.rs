//! The trouble that keeps the audit file from being written, or from standing at its path.
//!
//! Owns: the present trouble and the last one, for doctor. Must not know: how a file is written.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::moved_file::MovedFile;
use super::sink_state::SinkTrouble;

/// A write that takes longer hangs: a disk that is frozen, or a file server that is gone.
const HANGS: Duration = Duration::from_secs(5);

/// The troubles of the process's audit file.
#[derive(Debug, Default)]
pub(super) struct LogTrouble(Mutex<LogTroubleState>);

#[derive(Debug, Default)]
struct LogTroubleState {
    report: LogTroubleReport,
    /// When the present write began.
    writing: Option<(Instant, SystemTime)>,
    /// True if the log tells of the present write.
    is_told: bool,
}

/// The troubles, for doctor.
#[derive(Clone, Debug, Default)]
pub struct LogTroubleReport {
    /// The file cannot be written.
    pub unwritable: Option<SinkTrouble>,
    /// The file was moved, and no new file can be begun at its path.
    pub lost_path: Option<SinkTrouble>,
    /// The last file that somebody else moved or removed, and when that was seen.
    pub moved: Option<(MovedFile, SystemTime)>,
    /// The number of the last record of a process before that did not end with a stop, and when that was
    /// seen.
    pub unstopped: Option<(u64, SystemTime)>,
}

impl LogTrouble {
    fn lock(&self) -> MutexGuard<'_, LogTroubleState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the begin of a write.
    pub(super) fn note_writing(&self, now: Instant) {
        self.lock().writing = Some((now, SystemTime::now()));
    }

    pub(super) fn note_unwritable(&self, error: &io::Error) {
        let mut state = self.lock();
        (state.writing, state.is_told) = (None, false);
        note(&mut state.report.unwritable, error);
    }

    /// Returns true if the log tells that the write hung.
    pub(super) fn note_written(&self) -> bool {
        let mut state = self.lock();
        (state.writing, state.report.unwritable) = (None, None);
        std::mem::take(&mut state.is_told)
    }

    /// Returns true if the path was right before.
    pub(super) fn note_lost_path(&self, error: &io::Error) -> bool {
        note(&mut self.lock().report.lost_path, error)
    }

    /// Returns true if the path was wrong before.
    pub(super) fn note_path(&self) -> bool {
        self.lock().report.lost_path.take().is_some()
    }

    pub(super) fn note_moved(&self, moved: MovedFile) {
        self.lock().report.moved = Some((moved, SystemTime::now()));
    }

    pub(super) fn note_unstopped(&self, last: u64) {
        self.lock().report.unstopped = Some((last, SystemTime::now()));
    }

    /// Why the file cannot be written: the last write failed, or the present one hangs, which is logged once.
    pub(super) fn unwritable(&self, now: Instant) -> Option<SinkTrouble> {
        let mut state = self.lock();
        if state.report.unwritable.is_some() {
            return state.report.unwritable.clone();
        }
        let (began, since) = state.writing?;
        if now.saturating_duration_since(began) < HANGS {
            return None;
        }
        if !std::mem::replace(&mut state.is_told, true) {
            tracing::error!("the audit log cannot be written: the disk does not answer");
        }
        Some(SinkTrouble { since, error: "the disk does not answer".into() })
    }

    pub(super) fn report(&self, now: Instant) -> LogTroubleReport {
        let unwritable = self.unwritable(now);
        LogTroubleReport { unwritable, ..self.lock().report.clone() }
    }
}

fn note(trouble: &mut Option<SinkTrouble>, error: &io::Error) -> bool {
    let since = trouble.as_ref().map(|trouble| trouble.since);
    *trouble = Some(SinkTrouble { since: since.unwrap_or_else(SystemTime::now), error: error.to_string() });
    since.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_hangs_is_a_trouble_as_one_that_fails() {
        let (trouble, now) = (LogTrouble::default(), Instant::now());
        assert!(trouble.unwritable(now + 2 * HANGS).is_none(), "nothing is written");
        trouble.note_writing(now);
        assert!(trouble.unwritable(now + HANGS / 2).is_none());
        assert!(trouble.unwritable(now + HANGS).is_some_and(|trouble| trouble.error.contains("answer")));
        trouble.note_unwritable(&io::Error::other("disk full"));
        assert!(trouble.unwritable(now).is_some_and(|trouble| trouble.error == "disk full"));
        trouble.note_writing(now);
        assert!(trouble.report(now).unwritable.is_some(), "the next attempt has no end yet");
        assert!(!trouble.note_written(), "the log does not tell that this write hung");
        assert!(trouble.report(now + 2 * HANGS).unwritable.is_none());
        trouble.note_writing(now);
        assert!(trouble.unwritable(now + HANGS).is_some());
        assert!(trouble.note_written() && !trouble.note_written(), "its end is told once");
    }
}
