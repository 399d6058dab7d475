//! The succession: the writer leaves its file to the writer of another process, and passes further records
//! on.
//!
//! Owns: the moment, and the way back. Must not know: why another process takes over. Invariants: the last
//! line of a file that is left is a head, and is synced before its lock is free; a record that the
//! successor has not written is written here once that process is gone, or counted as lost.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::end_before::EndBefore;
use super::{FirstLine, LAST_BATCHES, RETRY, Recorder};
use crate::audit::chain::Chain;
use crate::audit::file::AuditFile;
use crate::audit::queue::{AuditBatch, SuccessionOrder};
use crate::audit::record::{LogAuditRecord, body};
use crate::audit::record_relay::RelaySender;
use crate::audit::retention::AuditRetention;
use keyward_config::audit_settings::AuditFileSettings;

/// How long a successor waits for the last batches of the sinks of the process before.
const LEFT_BATCHES: Duration = Duration::from_secs(1);

/// The file that a successor writes, and the way of records to that process.
pub(super) struct SucceededFile {
    settings: AuditFileSettings,
    retention: Arc<AuditRetention>,
    relay: RelaySender,
}

impl Recorder {
    /// Passes a batch to the successor. Returns true if this process is to write the batch: the successor
    /// is gone.
    pub(super) fn relay(&mut self, batch: &AuditBatch) -> bool {
        let own = self.own_records(batch.is_last);
        let Some(successor) = &mut self.successor else { return true };
        let count = batch.bodies.len() + own.bodies.len();
        if count == 0 {
            return false;
        }
        let bodies = own.bodies.iter().chain(&batch.bodies).map(Vec::as_slice);
        // At the end of the process the successor has a last moment for the records sent.
        let last = Cell::new(None);
        let goes_on = || {
            if self.queue.goes_on() {
                return true;
            }
            let until = last.get().unwrap_or_else(|| Instant::now() + LAST_BATCHES);
            last.set(Some(until));
            Instant::now() < until
        };
        match successor.relay.send(bodies, goes_on) {
            Ok(()) => {
                drop(self.queue.room_of(batch));
                false
            }
            // All of the batch is in the successor's memory, and that process tells if it is lost.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                tracing::info!("the successor has the last audit records, and has not written them yet");
                drop(self.queue.room_of(batch));
                false
            }
            Err(error) => {
                tracing::warn!(%error, "the successor takes no audit records: the file is opened again");
                self.return_own(own);
                let begun = self.take_file_back();
                if !begun {
                    drop(self.queue.room_of(batch));
                    self.give_up(batch.bodies.len() as u64);
                }
                begun
            }
        }
    }

    /// Leaves the file to a successor: the last lines, the sinks' last lines, the lock.
    pub(super) fn leave_file(&mut self, order: SuccessionOrder) {
        if !self.file.as_ref().is_some_and(|file| file.is_regular) {
            // Several processes may write a pipe or a device.
            _ = order.send(Ok(None));
            return;
        }
        let left = self.write_succession().and_then(|()| RelaySender::pair());
        let (relay, other) = match left {
            Ok(pair) => pair,
            Err(error) => {
                _ = order.send(Err(error));
                return;
            }
        };
        let until = Instant::now() + LEFT_BATCHES;
        self.written.close();
        self.sinks.drain(..).for_each(|sink| _ = sink.end(until));
        self.written.leave();
        let Some(file) = self.file.take() else { return };
        let (settings, retention) = file.released();
        self.successor = Some(SucceededFile { settings, retention, relay });
        if order.send(Ok(Some(other))).is_err() {
            // The end of the relay has gone with the order: the next batch takes the file back.
            tracing::warn!("no successor has taken the audit file");
        }
    }

    /// Writes the record of the succession and a head.
    fn write_succession(&mut self) -> io::Result<()> {
        let before = (self.chain.end.clone(), self.last_head);
        let mut lines = Vec::new();
        self.chain.append(&body(&LogAuditRecord::new("succession")), &mut lines);
        self.append_head(&mut lines);
        let Some(file) = &mut self.file else { return Ok(()) };
        let appended = file.append(&lines, before.0.seq + 1, &self.chain.end, SystemTime::now());
        if appended.is_err() {
            (self.chain.end, self.last_head) = before;
        } else {
            self.queue.metrics.written.inc_by(2);
            self.written.note(self.chain.end.seq);
        }
        appended
    }

    /// Opens the file again, since the successor is gone, without the sinks: their lines wait for the next
    /// start. False if the process ends before.
    fn take_file_back(&mut self) -> bool {
        let Some(SucceededFile { settings, retention, .. }) = self.successor.take() else { return false };
        loop {
            match AuditFile::open(&settings, Arc::clone(&retention)) {
                Ok(continued) => {
                    EndBefore::of(&continued).tell(&self.queue, &self.trouble);
                    let (file, end, first) = FirstLine::of(continued);
                    (self.file, self.first, self.last_head) = (Some(file), Some(first), 0);
                    self.chain = Chain::new(&self.replica, end);
                    return true;
                }
                Err(error) => {
                    self.trouble.note_unwritable(&io::Error::other(error.to_string()));
                    if !self.queue.pause(RETRY) {
                        return false;
                    }
                }
            }
        }
    }
}
