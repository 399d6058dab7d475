//! The end of the process that wrote the audit file before, as found in the file and beside it.
//!
//! Owns: the words about it. Must not know: how the end is found. Invariant: records that are known to be
//! missing count as losses of this process, whose `lost` record follows its `start`.

use std::time::SystemTime;

use crate::audit::file::ContinuedFile;
use crate::audit::log_trouble::LogTrouble;
use crate::audit::loss_counter::UnreportedLosses;
use crate::audit::queue::AuditQueue;

/// The end of the process that wrote the file before.
pub(super) struct EndBefore {
    /// The last line of a process that did not stop.
    unstopped: Option<u64>,
    /// Records that it could not write.
    unwritten: UnreportedLosses,
}

impl EndBefore {
    pub(super) fn of(continued: &ContinuedFile) -> Self {
        let ContinuedFile { end, is_unstopped, unwritten, .. } = continued;
        Self { unstopped: is_unstopped.then_some(end.seq), unwritten: *unwritten }
    }

    /// Tells of the end: records that are known to be missing count as lost here, so that the record of the
    /// loss follows the start.
    pub(super) fn tell(self, queue: &AuditQueue, trouble: &LogTrouble) {
        if let Some(last) = self.unstopped {
            tracing::warn!(
                last,
                "the process before did not end with a stop: audit records of its last calls may be missing"
            );
            trouble.note_unstopped(last);
        }
        queue.count_lost_at(self.unwritten.records, self.unwritten.since.unwrap_or_else(SystemTime::now));
    }
}
