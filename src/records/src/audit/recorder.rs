//! The thread that writes records: batches, the chain, signed heads, rotation, and the record of losses.
//!
//! Owns: the order of the lines. Must not know: the facts of a record. Invariants: one write and one sync
//! for each batch; the chain has exactly the lines of the file, so that a batch that was not written leaves
//! no gap; a batch that was not written is written later or counted as lost; the writer waits for no other
//! sink; a file left to a successor is the successor's, until that process is gone.

mod end_before;
mod succession;

use std::io;
use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use self::end_before::EndBefore;
use self::succession::SucceededFile;
use super::chain::{Chain, ChainEnd};
use super::file::{AuditFile, AuditFileError, ContinuedFile};
use super::head_signature::SignedHead;
use super::left_out::LeftOutCounts;
use super::line_follower::{FollowerBegin, LineFollower};
use super::log_trouble::LogTrouble;
use super::loss_counter::UnreportedLosses;
use super::moved_file::MovedFile;
use super::otlp_collector::OtlpCollector;
use super::queue::{AuditBatch, AuditQueue, BatchRoom};
use super::record::{LogAuditRecord, Timestamp, body};
use super::retention::AuditRetention;
use super::secondary_sink::{SecondarySink, SinkFeed, SinkOutput};
use super::sink_queue::{QueuedLines, SinkQueue};
use super::sink_state::SinkState;
use super::syslog::SyslogServer;
use super::written_lines::WrittenLines;
use crate::otlp::collector_access::CurrentCollectorAccess;
use keyward_base::pem::PrivateKey;
use keyward_config::audit_settings::{AuditCollector, AuditSettings, OnFull};

/// The time between two heads, while records are written.
const HEADS: Duration = Duration::from_secs(60);
/// The time between two records about records that were left out, or lost by a sink.
const LEFT_OUT: Duration = Duration::from_secs(10);
/// The time between two looks at the path of the file, and at files that stay for a sink.
const LOOK: Duration = Duration::from_secs(1);
/// The pause between two attempts to write a batch, or to open the file.
pub(super) const RETRY: Duration = Duration::from_millis(500);
/// How long the end waits for the last batches of the sinks beside the file. The process waits for two
/// seconds.
const LAST_BATCHES: Duration = Duration::from_millis(1500);
/// The pause after a failed rotation.
const ROTATION_RETRY: Duration = Duration::from_secs(60);

/// The writer of records.
pub(super) struct Recorder {
    queue: Arc<AuditQueue>,
    chain: Chain,
    replica: String,
    file: Option<AuditFile>,
    /// The successor that has the file.
    successor: Option<SucceededFile>,
    sinks: Vec<SecondarySink>,
    /// The lines of the file, for the sinks that follow the file.
    written: Arc<WrittenLines>,
    trouble: Arc<LogTrouble>,
    signing_key: Option<Arc<PrivateKey>>,
    on_full: OnFull,
    /// When the next head is due.
    head_at: Instant,
    /// When records that were left out, or lost by a sink, are told next.
    left_out_at: Instant,
    /// When surplus files are looked for next, if files stay for a sink.
    surplus_at: Option<Instant>,
    /// The number of the last head's line.
    last_head: u64,
    /// True if records waited behind the last batch: their times are further apart than those of the writes.
    was_behind: bool,
    /// No rotation before this time: the last rotation failed.
    no_rotation_before: Option<Instant>,
    /// The file before, until the new file has its first line.
    rotated_from: Option<PreviousFile>,
    /// The names of removed files without a record.
    removed: Vec<String>,
    first: Option<FirstLine>,
    /// Records given up since the process ends.
    unwritten: u64,
}

/// The facts of the record of a start.
struct FirstLine {
    previous: Option<PreviousFile>,
    torn: u64,
}

/// The file with the line before the first one of a file.
struct PreviousFile {
    name: String,
    /// Somebody else than Keyward moved or removed the file.
    is_moved: bool,
    /// The file is known to be gone.
    is_removed: bool,
}

impl FirstLine {
    /// The file, the chain so far, and the facts of the record of the start.
    fn of(continued: ContinuedFile) -> (AuditFile, ChainEnd, Self) {
        let ContinuedFile { file, end, previous, is_moved, torn, .. } = continued;
        let previous = previous.map(|name| PreviousFile { name, is_moved, is_removed: false });
        (file, end, Self { previous, torn })
    }
}

impl PreviousFile {
    fn record(&self, event: &'static str) -> LogAuditRecord<'_> {
        LogAuditRecord {
            previous_file: Some(&self.name),
            is_moved: self.is_moved,
            removed_file: self.is_removed.then_some(&self.name),
            ..LogAuditRecord::new(event)
        }
    }
}

/// Makes the writer, which takes the file, and starts the sinks beside the file. The records of the start
/// are written before any other record. Returns the states of the sinks, too.
///
/// # Errors
/// The file cannot be used, or a thread cannot be started.
pub(super) fn open(
    settings: &AuditSettings,
    collector: Option<CurrentCollectorAccess>,
    queue: &Arc<AuditQueue>,
    retention: &Arc<AuditRetention>,
    trouble: &Arc<LogTrouble>,
) -> Result<(Recorder, Vec<Arc<SinkState>>), AuditStartError> {
    let open = |file| AuditFile::open(file, Arc::clone(retention));
    let continued = settings.file.as_ref().map(open).transpose()?;
    let before = continued.as_ref().map(EndBefore::of);
    let (file, end, first) = match continued {
        Some(continued) => {
            let (file, end, first) = FirstLine::of(continued);
            (Some(file), end, first)
        }
        None => (None, ChainEnd::default(), FirstLine { previous: None, torn: 0 }),
    };
    let followed =
        settings.file.as_ref().filter(|_| file.as_ref().is_some_and(|file: &AuditFile| file.is_regular));
    let outputs = outputs(settings, collector)?;
    let (sinks, written) = match followed {
        Some(file) => following_sinks(outputs, &file.path, &end, queue)?,
        None => (queued_sinks(settings, outputs, queue)?, Arc::new(WrittenLines::new(end.seq, Vec::new()))),
    };
    let states = sinks.iter().map(|sink| Arc::clone(&sink.state)).collect();
    let recorder = Recorder {
        queue: Arc::clone(queue),
        chain: Chain::new(&settings.replica, end),
        replica: settings.replica.clone(),
        file,
        successor: None,
        sinks,
        written,
        trouble: Arc::clone(trouble),
        signing_key: settings.signing_key.clone(),
        on_full: settings.on_full,
        head_at: Instant::now() + HEADS,
        left_out_at: Instant::now(),
        surplus_at: Some(Instant::now()),
        last_head: 0,
        was_behind: false,
        no_rotation_before: None,
        rotated_from: None,
        removed: Vec::new(),
        first: Some(first),
        unwritten: 0,
    };
    if let Some(before) = before {
        before.tell(queue, trouble);
    }
    Ok((recorder, states))
}

/// The destinations beside the file.
fn outputs(
    settings: &AuditSettings,
    collector: Option<CurrentCollectorAccess>,
) -> io::Result<Vec<SinkOutput>> {
    let syslog = |address| SinkOutput::Syslog(SyslogServer::new(address, settings.replica.clone()));
    let sending = |(otlp, access): (&AuditCollector, _)| {
        OtlpCollector::new(access, otlp.path.clone(), &settings.replica)
    };
    let collector = settings.otlp.as_ref().zip(collector).map(sending);
    let collector = collector.transpose()?.map(|collector| SinkOutput::Otlp(Box::new(collector)));
    let stdout = settings.stdout.then_some(SinkOutput::Stdout);
    Ok(stdout.into_iter().chain(settings.syslog.clone().map(syslog)).chain(collector).collect())
}

/// The sinks that follow the file.
fn following_sinks(
    outputs: Vec<SinkOutput>,
    path: &Path,
    end: &ChainEnd,
    queue: &Arc<AuditQueue>,
) -> io::Result<(Vec<SecondarySink>, Arc<WrittenLines>)> {
    let mut begun = Vec::new();
    for output in outputs {
        let begin = FollowerBegin::read(path, output.name(), end)?;
        let state = SinkState::new(output.name(), begin.taken.seq, queue.metrics.clone());
        begun.push((output, begin, Arc::new(state)));
    }
    let states = begun.iter().map(|(_, _, state)| Arc::clone(state)).collect();
    let written = Arc::new(WrittenLines::new(end.seq, states));
    let mut sinks = Vec::new();
    for (output, begin, state) in begun {
        let follower = LineFollower::new(path, begin, Arc::clone(&state), Arc::clone(&written));
        let feed = SinkFeed::Followed(Box::new(follower));
        sinks.push(SecondarySink::start(output, feed, state, Arc::clone(queue))?);
    }
    Ok((sinks, written))
}

/// The sinks with queues of their own: no file keeps the lines.
fn queued_sinks(
    settings: &AuditSettings,
    outputs: Vec<SinkOutput>,
    queue: &Arc<AuditQueue>,
) -> io::Result<Vec<SecondarySink>> {
    let holds_calls = settings.on_full == OnFull::Block;
    let sink = |output: SinkOutput| {
        let state = Arc::new(SinkState::new(output.name(), 0, queue.metrics.clone()));
        let own = Arc::new(SinkQueue::new((!holds_calls).then_some(settings.queue)));
        SecondarySink::start(output, SinkFeed::Queued(own, holds_calls), state, Arc::clone(queue))
    };
    outputs.into_iter().map(sink).collect()
}

/// Why the audit log does not start.
#[derive(Debug, thiserror::Error)]
pub enum AuditStartError {
    /// The file cannot be used.
    #[error("audit.file: {0}")]
    File(#[from] AuditFileError),
    /// The operating system gives no thread, or the collector's TLS settings cannot be used.
    #[error("audit: {0}")]
    Thread(#[from] io::Error),
}

/// Records about the log itself, and their undo.
#[derive(Default)]
struct OwnRecords {
    bodies: Vec<Vec<u8>>,
    unreported: UnreportedLosses,
    left_out: LeftOutCounts,
    rotated_from: Option<PreviousFile>,
    removed: Vec<String>,
    first: Option<FirstLine>,
    /// Losses by sink.
    of_sinks: Vec<UnreportedLosses>,
}

impl Recorder {
    /// Writes records until the log is closed.
    pub(super) fn run(mut self) {
        // The record of the start does not wait for the first call.
        self.write(AuditBatch::default());
        let is_stopped = loop {
            self.look_for_surplus();
            let looks = self.file.as_ref().is_some_and(|file| file.is_regular);
            let until = if looks { self.head_at.min(Instant::now() + LOOK) } else { self.head_at };
            let mut batch = self.queue.take(until);
            let (is_last, succession) = (batch.is_last, batch.succession.take());
            let is_written = self.write(batch);
            if let Some(order) = succession {
                self.leave_file(order);
            }
            if is_last {
                break is_written;
            }
        };
        if !is_stopped {
            // The number of the lost records and the stop may fit where the records do not.
            self.write(AuditBatch::of_end());
        }
        let unwritten = self.unwritten.max(self.queue.losses.unreported().records);
        let until = Instant::now() + LAST_BATCHES;
        self.written.close();
        self.sinks.iter().for_each(SecondarySink::close);
        let unsent = self.sinks.drain(..).map(|sink| sink.end(until)).max().unwrap_or_default();
        // The file's lock is free when the process is told, so that the next log may begin.
        drop(self.file.take());
        self.queue.note_closed(unwritten + unsent);
    }

    /// Writes a batch with the records that the log owes. False if they are in no file, and not a
    /// successor's.
    fn write(&mut self, batch: AuditBatch) -> bool {
        if self.successor.is_some() && !self.relay(&batch) {
            return true;
        }
        let bytes = batch.bodies.iter().map(Vec::len).sum::<usize>();
        self.look_at_path();
        self.rotate_if_due(bytes);
        let before = self.chain.end.clone();
        let own = self.own_records(batch.is_last);
        let mut lines = Vec::with_capacity(bytes + 256 * (batch.bodies.len() + own.bodies.len()));
        for body in own.bodies.iter().chain(&batch.bodies) {
            self.chain.append(body, &mut lines);
        }
        if batch.is_last {
            self.chain.append(&body(&LogAuditRecord::new("stop")), &mut lines);
        }
        // Records that waited for a full disk may be hours old: each batch of them has its head.
        let is_late = mem::replace(&mut self.was_behind, batch.has_more) || batch.has_more;
        let is_head_due = Instant::now() >= self.head_at || batch.is_last || is_late;
        if is_head_due && self.chain.end.seq > self.last_head {
            self.append_head(&mut lines);
        }
        if is_head_due {
            self.head_at = Instant::now() + HEADS;
        }
        let count = self.chain.end.seq - before.seq;
        let room = self.queue.room_of(&batch);
        if count == 0 {
            return true;
        }
        let is_written = self.write_lines(&lines, &before, own.unreported);
        if is_written {
            self.queue.metrics.written.inc_by(count);
            self.queue.metrics.written_at.set(unix_seconds());
            self.pass_on(lines, count, Some(room));
            let hung = self.trouble.note_written();
            if self.queue.note_failing(false) || hung {
                tracing::info!("the audit log is written again");
            }
        } else {
            self.chain.end = before;
            self.last_head = self.last_head.min(self.chain.end.seq);
            self.give_up(batch.bodies.len() as u64);
            self.return_own(own);
            let untold = self.queue.losses.unreported();
            if let Some(file) = &mut self.file {
                file.keep_unwritten(&self.chain.end, untold);
            }
        }
        is_written
    }

    /// Counts records that are written by nobody.
    fn give_up(&mut self, records: u64) {
        self.queue.count_lost(records);
        if !self.queue.goes_on() {
            self.unwritten += records;
        }
    }

    /// Tells the sinks of lines that were written. With `on_full = "block"`, lines that stand in no file keep
    /// the room of their records.
    fn pass_on(&self, lines: Vec<u8>, count: u64, room: Option<BatchRoom>) {
        self.written.note(self.chain.end.seq);
        if self.sinks.iter().all(SecondarySink::follows) {
            return;
        }
        let room = room.filter(|_| self.on_full == OnFull::Block).map(Arc::new);
        let batch = QueuedLines { lines: lines.into(), count, room, done: 0 };
        self.sinks.iter().for_each(|sink| sink.pass(&batch));
    }

    /// The records that the log owes: of the start, of a new file, of losses.
    fn own_records(&mut self, is_last: bool) -> OwnRecords {
        let (first, rotated_from) = (self.first.take(), self.rotated_from.take());
        let removed = mem::take(&mut self.removed);
        let unreported = self.queue.losses.take_unreported();
        let mut bodies = Vec::new();
        if let Some(first) = &first {
            let record = first.previous.as_ref().map(|previous| previous.record("start"));
            bodies.push(body(&LogAuditRecord {
                version: Some(env!("CARGO_PKG_VERSION")),
                torn_bytes: Some(first.torn).filter(|torn| *torn > 0),
                ..record.unwrap_or_else(|| LogAuditRecord::new("start"))
            }));
        }
        if let Some(previous) = &rotated_from {
            bodies.push(body(&previous.record("continue")));
        }
        for removed in &removed {
            bodies.push(body(&LogAuditRecord {
                removed_file: Some(removed),
                ..LogAuditRecord::new("removed")
            }));
        }
        let lost = |losses: UnreportedLosses, sink| {
            let (count, since) = (Some(losses.records), losses.since.map(Timestamp));
            body(&LogAuditRecord { count, since, sink, ..LogAuditRecord::new("lost") })
        };
        if unreported.records > 0 {
            bodies.push(lost(unreported, None));
        }
        let is_due = is_last || Instant::now() >= self.left_out_at;
        let (mut left_out, mut of_sinks) = (LeftOutCounts::default(), Vec::new());
        if is_due {
            left_out = self.queue.take_left_out();
            of_sinks = self.sinks.iter().map(|sink| sink.state.losses.take_unreported()).collect();
        }
        // A record of a loss goes to the sinks too: one now and then cannot become a load of its own.
        for (sink, losses) in self.sinks.iter().zip(&of_sinks).filter(|(_, losses)| losses.records > 0) {
            bodies.push(lost(*losses, Some(sink.state.name)));
            self.left_out_at = Instant::now() + LEFT_OUT;
        }
        if left_out.count > 0 {
            let (record, peers) = (LogAuditRecord::new("left_out"), left_out.peers());
            bodies.push(body(&LogAuditRecord { count: Some(left_out.count), peers: &peers, ..record }));
            self.left_out_at = Instant::now() + LEFT_OUT;
        }
        OwnRecords { bodies, unreported, left_out, rotated_from, removed, first, of_sinks }
    }

    /// Takes the owed records back: the lines were not written.
    fn return_own(&mut self, own: OwnRecords) {
        self.queue.losses.return_unreported(own.unreported);
        self.queue.return_left_out(own.left_out);
        self.sinks
            .iter()
            .zip(own.of_sinks)
            .for_each(|(sink, lost)| sink.state.losses.return_unreported(lost));
        (self.first, self.rotated_from, self.removed) = (own.first, own.rotated_from, own.removed);
    }

    /// Writes the lines to the file, behind the line `before`. With `on_full = "block"`, tries until the
    /// process has ended. False if the lines were not written. `untold` are the losses of which the lines
    /// tell.
    fn write_lines(&mut self, lines: &[u8], before: &ChainEnd, untold: UnreportedLosses) -> bool {
        let Some(file) = &mut self.file else { return true };
        loop {
            let end = &self.chain.end;
            self.trouble.note_writing(Instant::now());
            let Err(error) = file.append(lines, before.seq + 1, end, SystemTime::now()) else {
                return true;
            };
            if self.queue.note_failing(true) {
                tracing::error!(%error, "the audit log cannot be written");
            }
            self.trouble.note_unwritable(&error);
            if self.on_full == OnFull::Drop {
                return false;
            }
            // Known to the next process even if this one is killed now.
            let records = untold.records + self.queue.waiting();
            let since = untold.since.or_else(|| Some(SystemTime::now()));
            file.keep_unwritten(before, UnreportedLosses { records, since });
            if !self.queue.pause_writing(RETRY) {
                return false;
            }
        }
    }

    /// Appends a head: the signature of the chain so far.
    fn append_head(&mut self, lines: &mut Vec<u8>) {
        let time = Timestamp::now();
        let text = time.to_string();
        let head = SignedHead {
            replica: &self.replica,
            seq: self.chain.end.seq + 1,
            time: &text,
            prev: &self.chain.end.hash,
        };
        let signature = self.signing_key.as_ref().and_then(|key| head.sign(key));
        let record = LogAuditRecord { time, signature: signature.as_deref(), ..LogAuditRecord::new("head") };
        self.chain.append(&body(&record), lines);
        self.last_head = self.chain.end.seq;
    }

    /// Goes on in a new file if somebody else moved or removed the file, or put another one in its place.
    fn look_at_path(&mut self) {
        let Some(file) = &mut self.file else { return };
        let names = self.written.hold_names();
        let looked = file.follow_path(&self.chain.end);
        drop(names);
        match looked {
            Ok(None) => {}
            Ok(Some(moved)) => self.note_moved(moved),
            Err(error) => {
                if self.trouble.note_lost_path(&error) {
                    tracing::error!(%error, "the audit file was moved, and no new one can be begun");
                }
                return;
            }
        }
        if self.trouble.note_path() {
            tracing::info!("the audit file is at its path again");
        }
    }

    fn note_moved(&mut self, moved: MovedFile) {
        let file = &moved.name;
        if moved.is_removed {
            tracing::error!(file, "somebody removed the audit file: the records go on in a new one");
        } else {
            tracing::error!(file, "somebody moved the audit file: the records go on in a new one");
        }
        self.queue.metrics.moved.inc();
        self.trouble.note_moved(moved.clone());
        let MovedFile { name, is_removed } = moved;
        let previous = PreviousFile { name, is_moved: true, is_removed };
        match &mut self.first {
            Some(first) => first.previous = Some(previous),
            None => self.rotated_from = Some(previous),
        }
    }

    /// Begins a new file if due: a head, then the rename. A failed rotation is tried again later; the records
    /// go into the old file until then.
    fn rotate_if_due(&mut self, more: usize) {
        let (Some(file), now) = (&self.file, Instant::now()) else { return };
        let may = self.no_rotation_before.is_none_or(|until| now >= until);
        if !may || self.first.is_some() || !file.is_due(more, SystemTime::now()) {
            return;
        }
        let before = self.chain.end.clone();
        let mut head = Vec::new();
        if self.last_head < before.seq {
            self.append_head(&mut head);
        }
        let Some(file) = &mut self.file else { return };
        if !head.is_empty()
            && let Err(error) = file.append(&head, self.chain.end.seq, &self.chain.end, SystemTime::now())
        {
            tracing::warn!(%error, "the audit file cannot be rotated");
            self.chain.end = before;
            self.last_head = 0;
            self.no_rotation_before = Some(now + ROTATION_RETRY);
            return;
        }
        let names = self.written.hold_names();
        let rotated = file.rotate();
        drop(names);
        if !head.is_empty() {
            self.pass_on(head, 1, None);
        }
        match rotated {
            Ok(old) => {
                tracing::info!(file = old, "the audit file was rotated");
                self.rotated_from = Some(PreviousFile { name: old, is_moved: false, is_removed: false });
                self.no_rotation_before = None;
                self.surplus_at = Some(now);
                self.look_for_surplus();
            }
            Err(error) => {
                tracing::error!(%error, "the audit file cannot be rotated");
                self.no_rotation_before = Some(now + ROTATION_RETRY);
            }
        }
    }

    /// Removes files beyond the wanted number, if due. With `on_full = "block"` a file stays while a sink has
    /// not taken its lines, and calls are refused meanwhile; with `"drop"` such lines are lost for the sink.
    fn look_for_surplus(&mut self) {
        let (Some(file), now) = (&mut self.file, Instant::now()) else { return };
        if self.surplus_at.is_none_or(|at| now < at) {
            return;
        }
        let taken = match self.on_full {
            OnFull::Block => self.written.taken_by_all(),
            OnFull::Drop => u64::MAX,
        };
        let surplus = file.remove_surplus(taken);
        let held = match surplus {
            Ok(surplus) => {
                surplus.removed.iter().for_each(|(_, last)| self.written.note_removed(*last));
                let names = surplus.removed.into_iter().map(|(name, _)| name.to_string_lossy().into_owned());
                self.removed.extend(names);
                surplus.held
            }
            Err(error) => {
                tracing::error!(%error, "old audit files cannot be removed");
                0
            }
        };
        self.surplus_at = (held > 0).then_some(now + LOOK);
        if self.queue.note_behind(held > 0) {
            if held > 0 {
                tracing::error!(
                    "calls are refused: a sink of audit records is behind by more than audit.keep files"
                );
            } else {
                tracing::info!("calls are served again: all sinks of audit records have taken the old files");
            }
        }
    }
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::BufReader;
    use std::net::{Ipv4Addr, SocketAddr};
    use std::os::unix::net::UnixDatagram;
    use std::thread;

    use futures_util::FutureExt as _;
    use http::uri::PathAndQuery;
    use socket2::{Domain, Socket, Type};

    use super::*;
    use crate::audit::audit_folder::AuditFolder;
    use crate::audit::head_signature::{HeadPublicKey, write_key_pair};
    use crate::audit::log::{AuditCloseGuard, AuditLog, Reservation};
    use crate::audit::queue::RoomShare;
    use crate::audit::verify::{ChainCheck, ChainFault, ChainReport};
    use keyward_config::audit_settings::{AuditCollector, AuditEvent, AuditFileSettings, SyslogAddress};
    use keyward_config::collector_settings::CollectorSettings;
    use keyward_config::{Endpoint, Scheme};
    use keyward_dial::names::NameResolver;
    use keyward_telemetry::metrics::Metrics;

    const UNLIMITED: Duration = Duration::from_secs(24 * 3600);

    #[derive(serde::Serialize)]
    struct Plain {
        time: Timestamp,
        event: &'static str,
        note: String,
    }

    fn settings(path: &Path, on_full: OnFull) -> AuditSettings {
        let file = AuditFileSettings {
            path: path.to_owned(),
            max_size: 1 << 20,
            max_age: None,
            keep: 0,
            keep_for: None,
        };
        AuditSettings {
            events: [AuditEvent::Change].into_iter().collect(),
            file: Some(file),
            stdout: false,
            syslog: None,
            otlp: None,
            queue: 64 * 1024,
            on_full,
            signing_key: None,
            replica: "a".into(),
        }
    }

    fn start(settings: &AuditSettings) -> (Arc<AuditLog>, AuditCloseGuard, Metrics) {
        let metrics = Metrics::new(Vec::new());
        let (log, guard) =
            AuditLog::start(settings, &NameResolver::of_machine(None), metrics.audit.clone()).unwrap();
        (log, guard, metrics)
    }

    /// Ends the log without the limit of the guard: the disk of a test may be slow.
    fn end(guard: AuditCloseGuard) -> u64 {
        guard.0.close(Duration::ZERO, UNLIMITED)
    }

    fn record(log: &AuditLog, note: impl ToString) {
        log.record(
            None,
            RoomShare::Common,
            &Plain { time: Timestamp::now(), event: "x", note: note.to_string() },
        );
    }

    fn check(files: &[&Path], key: Option<&HeadPublicKey>) -> Result<ChainReport, ChainFault> {
        let mut check = ChainCheck::new(key);
        for file in files {
            check.file(BufReader::new(fs::File::open(file).unwrap()), &mut 0)?;
        }
        check.finish()
    }

    fn events(path: &Path) -> Vec<String> {
        let text = fs::read_to_string(path).unwrap();
        let event = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["event"].clone();
        text.lines().map(|line| event(line).as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn a_log_goes_on_after_a_restart_and_is_signed_at_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let (path, key) = (folder.path().join("audit.log"), folder.path().join("key"));
        let public = HeadPublicKey::read(&write_key_pair(&key).unwrap()).unwrap();
        let key = Arc::new(PrivateKey::read(&key).unwrap());
        let settings = AuditSettings { signing_key: Some(key), ..settings(&path, OnFull::Block) };
        for _ in 0..2 {
            let (log, guard, metrics) = start(&settings);
            record(&log, "one");
            end(guard);
            assert_eq!(metrics.audit.written.get(), 4);
            assert_eq!(metrics.audit.waiting.get(), 0);
        }
        let once = ["start", "x", "stop", "head"];
        assert_eq!(events(&path), [once, once].concat());
        let report = check(&[&path], Some(&public)).unwrap();
        assert_eq!((report.lines, report.signed.map(|(seq, _)| seq)), (8, Some(8)));
        // Another key's signatures, and heads without a signature, are faults.
        let other = HeadPublicKey::read(&write_key_pair(&folder.path().join("other")).unwrap()).unwrap();
        assert!(matches!(check(&[&path], Some(&other)), Err(ChainFault::Signature)));
        let unsigned = folder.path().join("unsigned.log");
        end(start(&AuditSettings { signing_key: None, ..self::settings(&unsigned, OnFull::Block) }).1);
        check(&[&unsigned], None).unwrap();
        assert!(matches!(check(&[&unsigned], Some(&public)), Err(ChainFault::Signature)));
    }

    #[test]
    fn rotated_files_are_one_chain() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let mut settings = settings(&path, OnFull::Block);
        if let Some(file) = &mut settings.file {
            file.max_size = 4000;
        }
        let (log, guard, metrics) = start(&settings);
        for number in 0..60 {
            // A batch for each record, so that the file is rotated between.
            while metrics.audit.waiting.get() > 0 {
                thread::yield_now();
            }
            record(&log, number);
        }
        end(guard);
        let files = AuditFolder::of(&path).chain_files().unwrap();
        let files: Vec<_> = files.into_iter().map(|(_, path)| path).collect();
        assert!(files.len() > 3, "{files:?}");
        let files: Vec<&Path> = files.iter().map(|path| &**path).collect();
        let report = check(&files, None).unwrap();
        let all: Vec<_> = files.iter().flat_map(|path| events(path)).collect();
        assert_eq!((report.lines, all.iter().filter(|event| *event == "x").count()), (all.len() as u64, 60));
        for file in &files[1..] {
            assert_eq!(events(file)[0], "continue");
            assert!(file.metadata().unwrap().len() < 4600);
        }
        let second = check(&files[1..], None).unwrap();
        assert_eq!(second.previous_file.as_deref(), files[0].file_name().unwrap().to_str());
        assert!(matches!(check(&[files[0], files[2]], None), Err(ChainFault::Broken)), "a file is missing");
    }

    #[test]
    fn a_full_disk_blocks_or_loses_records_and_losses_are_counted() {
        let full = Path::new("/dev/full");
        let (log, guard, metrics) = start(&settings(full, OnFull::Drop));
        for _ in 0..10 {
            record(&log, "");
        }
        while metrics.audit.waiting.get() > 0 {
            thread::yield_now();
        }
        assert_eq!((metrics.audit.lost("all").get(), metrics.audit.written.get()), (10, 0));
        assert_eq!(end(guard), 10, "no record tells of them");
        let (log, guard, metrics) = start(&settings(full, OnFull::Block));
        for _ in 0..100 {
            record(&log, "");
        }
        assert_eq!(
            metrics.audit.lost("all").get(),
            56,
            "44 wait for the disk, beside the shares of refusals and commands"
        );
        assert!(metrics.audit.waiting.get() > 0);
        while log.waiting_for_disk() == 0 {
            thread::yield_now();
        }
        assert_eq!(log.waiting_for_disk(), 44);
        assert_eq!(end(guard), 100);
        assert_eq!(metrics.audit.lost("all").get(), 100, "the process does not wait for ever");
    }

    #[test]
    fn records_that_a_process_cannot_write_are_the_losses_of_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let settings = settings(&path, OnFull::Block);
        end(start(&settings).1);
        let mut before = AuditFile::open(settings.file.as_ref().unwrap(), Arc::default()).unwrap();
        assert!(!before.is_unstopped, "a stop and its head");
        let since = Some(UNIX_EPOCH + Duration::from_secs(1_800_000_000));
        before.file.keep_unwritten(&before.end, UnreportedLosses { records: 539, since });
        drop(before);
        let (log, guard, metrics) = start(&settings);
        assert_eq!(end(guard), 0);
        assert_eq!(metrics.audit.lost("all").get(), 539);
        assert_eq!(log.report().lost.map(|lost| (lost.records, lost.since)), since.map(|at| (539, at)));
        let once = ["start", "stop", "head"];
        assert_eq!(events(&path), [&once[..], &["start", "lost", "stop", "head"]].concat());
        let report = check(&[&path], None).unwrap();
        assert_eq!((report.lost, report.unstopped), (539, Vec::new()));
        // The loss is told once, and behind other records it would be of an earlier end.
        let (log, guard, _) = start(&settings);
        assert_eq!((end(guard), log.report().lost), (0, None));
    }

    #[test]
    fn a_process_that_did_not_stop_is_told_by_the_next_one_and_by_a_check() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let settings = settings(&path, OnFull::Block);
        let (log, guard, _) = start(&settings);
        assert_eq!(log.report().trouble.unstopped, None, "the first process");
        end(guard);
        let text = fs::read_to_string(&path).unwrap();
        let killed = text.lines().next().unwrap();
        fs::write(&path, format!("{killed}\n")).unwrap();
        fs::remove_file(folder.path().join(".audit.log.end")).unwrap();
        let (log, guard, _) = start(&settings);
        assert_eq!(log.report().trouble.unstopped.map(|(last, _)| last), Some(1));
        end(guard);
        let report = check(&[&path], None).unwrap();
        let unstopped: Vec<_> = report.unstopped.iter().map(|(last, _)| *last).collect();
        assert_eq!(unstopped, [1]);
        let told = report.to_string();
        assert!(told.contains("up to record 1 (") && told.contains("did not end with a stop"), "{told}");
        assert_eq!(start(&settings).0.report().trouble.unstopped, None);
    }

    /// A link that leads to a full disk first, and to a file later.
    #[test]
    fn a_loss_is_recorded_once_the_log_is_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let settings = settings(&path, OnFull::Drop);
        let metrics = Metrics::new(Vec::new());
        let queue = Arc::new(AuditQueue::new(1 << 20, metrics.audit.clone()));
        queue.count_lost(3);
        queue.close(Duration::ZERO, Duration::ZERO);
        open(&settings, None, &queue, &Arc::default(), &Arc::default()).unwrap().0.run();
        assert_eq!(events(&path), ["start", "lost", "stop", "head"]);
        assert_eq!(check(&[&path], None).unwrap().lost, 3);
        let lines = fs::read_to_string(&path).unwrap();
        let lost = lines.lines().find(|line| line.contains(r#""event":"lost""#)).unwrap();
        assert!(lost.contains(r#""count":3,"since":"2"#), "{lost}");
    }

    /// What two processes of a hand-over do, in one.
    #[tokio::test]
    async fn a_successor_goes_on_in_the_file_with_the_last_records_of_the_process_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let settings = settings(&path, OnFull::Block);
        let prepare = || {
            let metrics = Metrics::new(Vec::new()).audit;
            AuditLog::prepare(&settings, &NameResolver::of_machine(None), metrics).unwrap()
        };
        let (before, guard_before, metrics) = start(&settings);
        record(&before, "before");
        let (after, begin) = prepare();
        begin.check().unwrap();
        record(&after, "waits");
        let taken = prepare().1.begin().map(drop).unwrap_err().to_string();
        assert!(taken.contains("another process"), "{taken}");
        let relay = before.leave_to_successor().await.unwrap();
        assert!(relay.is_some());
        let guard_after = begin.succeed(relay).unwrap();
        record(&before, "relayed");
        end(guard_before);
        assert_eq!(metrics.audit.waiting.get(), 0);
        end(guard_after);
        let told = ["start", "x", "succession", "head", "start", "x", "x", "stop", "head"];
        assert_eq!(events(&path), told);
        check(&[&path], None).unwrap();
    }

    #[tokio::test]
    async fn a_process_whose_successor_is_gone_takes_its_file_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let (log, guard, metrics) = start(&settings(&path, OnFull::Block));
        drop(log.leave_to_successor().await.unwrap());
        record(&log, "mine");
        end(guard);
        assert_eq!(metrics.audit.waiting.get(), 0);
        assert_eq!(events(&path), ["start", "succession", "head", "start", "x", "stop", "head"]);
        check(&[&path], None).unwrap();
        // Nobody waits for the answer any more: the file stays with its process.
        let (log, guard, _) = start(&settings(&path, OnFull::Block));
        drop(log.leave_to_successor().boxed().now_or_never());
        record(&log, "still mine");
        end(guard);
        check(&[&path], None).unwrap();
        let again = events(&path).split_off(7);
        assert_eq!(again.iter().filter(|event| *event == "x").count(), 1, "{again:?}");
    }

    #[test]
    fn a_log_whose_file_is_moved_or_removed_goes_on_in_a_new_file_that_names_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let (path, rotated) = (folder.path().join("audit.log"), folder.path().join("audit.log.1"));
        let settings = settings(&path, OnFull::Block);
        let (log, guard, metrics) = start(&settings);
        let written = |number| {
            record(&log, number);
            while metrics.audit.waiting.get() > 0 {
                thread::yield_now();
            }
        };
        written(1);
        // As logrotate: moved, and a new file in its place.
        fs::rename(&path, &rotated).unwrap();
        fs::write(&path, "").unwrap();
        // No record comes meanwhile: seen all the same.
        while metrics.audit.moved.get() < 1 {
            thread::yield_now();
        }
        written(2);
        check(&[&rotated, &path], None).unwrap();
        let first = |path: &Path| -> serde_json::Value {
            let text = fs::read_to_string(path).unwrap();
            serde_json::from_str(text.lines().next().unwrap()).unwrap()
        };
        let record = first(&path);
        assert_eq!((&record["event"], &record["previous_file"]), (&"continue".into(), &"audit.log.1".into()));
        assert_eq!(
            (&record["moved"], log.report().trouble.moved.unwrap().0.name.as_str()),
            (&true.into(), "audit.log.1")
        );
        let seq = record["seq"].as_u64().unwrap();
        fs::remove_file(&path).unwrap();
        written(3);
        let record = first(&path);
        assert_eq!((&record["removed_file"], &record["moved"]), (&"audit.log".into(), &true.into()));
        assert!(record["seq"].as_u64().unwrap() > seq);
        end(guard);
        let fault = check(&[&rotated, &path], None).unwrap_err();
        assert!(matches!(fault, ChainFault::Moved { is_removed: true, .. }), "{fault}");
        assert!(check(&[&path], None).unwrap().to_string().contains("somebody removed"));
        // Moved while no process writes: no number is given twice.
        let last = AuditFolder::of(&path).chain_files().unwrap().len();
        fs::rename(&path, folder.path().join("elsewhere")).unwrap();
        end(start(&settings).1);
        assert_eq!(last, 2);
        let record = first(&path);
        assert_eq!((&record["event"], &record["moved"]), (&"start".into(), &true.into()));
        check(&[&folder.path().join("elsewhere"), &path], None).unwrap();
    }

    /// A collector whose port is taken by a socket that does not listen, so that no other program answers
    /// there.
    fn dead_collector() -> (Socket, Option<AuditCollector>) {
        let held = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        held.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        let port = held.local_addr().unwrap().as_socket().unwrap().port();
        let endpoint = Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port };
        let path = PathAndQuery::from_static("/v1/logs");
        let collector = CollectorSettings { endpoint, tls: None, headers: Vec::new() };
        (held, Some(AuditCollector { collector, path }))
    }

    /// Receives the lines of a syslog server at `path`, up to the first `stop`, and returns their records.
    fn syslog_lines(path: &Path) -> Vec<serde_json::Value> {
        let (server, mut buffer) = (UnixDatagram::bind(path).unwrap(), [0; 4096]);
        let mut records: Vec<serde_json::Value> = Vec::new();
        while records.last().is_none_or(|record| record["event"] != "stop") {
            let length = server.recv(&mut buffer).unwrap();
            let begin = buffer[..length].iter().position(|byte| *byte == b'{').unwrap();
            records.push(serde_json::from_slice(&buffer[begin..length]).unwrap());
        }
        records
    }

    #[test]
    fn the_file_waits_for_no_sink_and_a_sink_gets_its_lines_after_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let (file, socket) = (folder.path().join("audit.log"), folder.path().join("syslog"));
        let (_held, otlp) = dead_collector();
        let syslog = Some(SyslogAddress::Unix(socket.clone()));
        let settings = AuditSettings { otlp, syslog, ..settings(&file, OnFull::Block) };
        let (log, guard, metrics) = start(&settings);
        for number in 0..100 {
            // A batch for each record: more than a sink holds in memory.
            while metrics.audit.waiting.get() > 0 {
                thread::yield_now();
            }
            record(&log, number);
        }
        end(guard);
        assert_eq!(events(&file).len(), 103);
        assert_eq!((metrics.audit.lost("syslog").get(), metrics.audit.lost("otlp").get()), (0, 0));
        assert_eq!((metrics.audit.unsent("otlp").get(), metrics.audit.sink_failing("otlp").get()), (103, 1));
        let receiving = thread::spawn(move || syslog_lines(&socket));
        let (_log, guard, _) = start(&settings);
        let mut received = receiving.join().unwrap();
        end(guard);
        received.retain(|record| record["event"] == "x");
        let notes: Vec<_> = received.iter().map(|record| record["note"].as_str().unwrap()).collect();
        assert_eq!(notes, (0..100).map(|number| number.to_string()).collect::<Vec<_>>());
    }

    /// Files that a sink has not taken stay beyond the wanted number with `Block`, and calls are refused;
    /// with `Drop` the lines are lost for this sink alone, and the loss is recorded.
    #[test]
    fn a_sink_that_is_behind_by_more_than_the_kept_files_holds_calls_or_loses_lines() {
        for on_full in [OnFull::Block, OnFull::Drop] {
            let folder = tempfile::tempdir().unwrap();
            let (file, (_held, otlp)) = (folder.path().join("audit.log"), dead_collector());
            let mut settings = AuditSettings { otlp, ..settings(&file, on_full) };
            settings.file.as_mut().map(|file| (file.max_size, file.keep) = (2000, 2)).unwrap();
            let (log, guard, metrics) = start(&settings);
            let mut made = 0;
            while made < 40 && !matches!(log.reserve(100), Reservation::Full) {
                record(&log, made);
                made += 1;
                while metrics.audit.waiting.get() > 0 {
                    thread::yield_now();
                }
            }
            let old = || AuditFolder::of(&file).old_files().unwrap();
            assert_eq!(log.report().sinks.is_behind, on_full == OnFull::Block);
            if on_full == OnFull::Block {
                assert!(made < 40 && old().len() == 3, "{made} records, {:?}", old());
                // What is no call goes on, and takes twice as many files at most.
                for number in 0..40 {
                    record(&log, number);
                    while metrics.audit.waiting.get() > 0 {
                        thread::yield_now();
                    }
                }
                assert_eq!(old().len(), 4);
            }
            end(guard);
            let all: Vec<_> = old().into_iter().map(|name| folder.path().join(name)).chain([file]).collect();
            check(&all.iter().map(|path| &**path).collect::<Vec<_>>(), None).unwrap();
            let lines = all.iter().map(|path| fs::read_to_string(path).unwrap()).collect::<String>();
            let records = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
            let lost = records.filter(|record| record["event"] == "lost" && record["sink"] == "otlp");
            let told = lost.filter_map(|record| record["count"].as_u64()).sum::<u64>();
            assert!(told > 0 && told <= metrics.audit.lost("otlp").get(), "{on_full:?}: {lines}");
            assert_eq!(metrics.audit.lost("all").get(), 0);
        }
    }

    #[test]
    fn without_a_file_records_keep_their_room_until_every_sink_has_them_or_are_lost_for_one_sink() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("syslog");
        for on_full in [OnFull::Block, OnFull::Drop] {
            let (_held, otlp) = dead_collector();
            let syslog = Some(SyslogAddress::Unix(socket.clone()));
            let settings = AuditSettings { otlp, syslog, file: None, ..settings(&socket, on_full) };
            let (server, mut buffer) = (UnixDatagram::bind(&socket).unwrap(), [0; 4096]);
            let (log, guard, metrics) = start(&settings);
            let mut receive = || server.recv(&mut buffer).unwrap();
            // The record of the start.
            receive();
            for number in 0..200 {
                record(&log, number);
                // Whoever takes every record at once loses none, whatever the other sink does.
                if on_full == OnFull::Drop {
                    receive();
                }
            }
            let lost = metrics.audit.lost("all").get();
            assert_eq!(lost > 0, on_full == OnFull::Block, "the sink that takes none holds the room");
            if on_full == OnFull::Block {
                for _ in lost..200 {
                    receive();
                }
            }
            let full = matches!(log.reserve(100), Reservation::Full);
            assert_eq!(full, on_full == OnFull::Block);
            if on_full == OnFull::Block {
                assert!(metrics.audit.waiting.get() > 0);
            }
            end(guard);
            // The process ends before a sink that is too slow: its thread gives the room back when it ends.
            while metrics.audit.waiting.get() > 0 {
                thread::yield_now();
            }
            assert!(metrics.audit.lost("otlp").get() > 0);
            drop(server);
            fs::remove_file(&socket).unwrap();
        }
    }
}
