//! The sinks beside the file: standard output, syslog and OTLP, each with a thread and a bounded queue.
//!
//! Owns: the queue of a sink, and the counting of its losses. Must not know: the chain. Invariants: a batch
//! reaches a sink after the file; with `on_full = "drop"` a slow or failing sink delays no other sink; the
//! end of the process waits a moment for the last batch of each sink.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::otlp_collector::OtlpCollector;
use super::queue::AuditQueue;
use super::sink_progress::SinkProgress;
use super::syslog::SyslogServer;
use crate::config::audit_settings::{OnFull, SINK_BATCHES};

/// The pause between two attempts at a failing sink.
const RETRY: Duration = Duration::from_secs(1);
/// The pause between two looks for room in a full queue.
const LOOK: Duration = Duration::from_millis(20);

/// The destination of lines.
pub(super) enum SinkOutput {
    Stdout,
    Syslog(SyslogServer),
    Otlp(Box<OtlpCollector>),
}

impl SinkOutput {
    fn name(&self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Syslog(_) => "syslog",
            Self::Otlp(_) => "otlp",
        }
    }

    /// Sends the lines from the first unsent one on, and counts them in `progress`.
    fn send(&mut self, lines: &[u8], progress: &mut SinkProgress) -> io::Result<()> {
        match self {
            Self::Otlp(collector) => collector.send(lines, progress),
            Self::Stdout => {
                send_each(lines, progress, |line| io::stdout().lock().write_all(line))?;
                io::stdout().lock().flush()
            }
            Self::Syslog(server) => {
                send_each(lines, progress, |line| server.send(line.strip_suffix(b"\n").unwrap_or(line)))
            }
        }
    }
}

fn send_each(
    lines: &[u8],
    progress: &mut SinkProgress,
    mut send: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    for line in lines.split_inclusive(|byte| *byte == b'\n').skip(progress.sent_lines()) {
        send(line)?;
        progress.sent += 1;
    }
    Ok(())
}

/// A batch of lines.
struct SinkBatch {
    lines: Arc<[u8]>,
    count: u64,
}

/// A sink beside the file.
pub(super) struct SecondarySink {
    pub(super) name: &'static str,
    batches: SyncSender<SinkBatch>,
    on_full: OnFull,
    queue: Arc<AuditQueue>,
    /// Lost lines without a record of the loss.
    unreported: Arc<AtomicU64>,
    /// Disconnected at the end of the thread.
    ended: Receiver<()>,
}

impl SecondarySink {
    /// Starts the thread of a sink. The thread is never joined, because a write may hang for ever.
    pub(super) fn start(output: SinkOutput, on_full: OnFull, queue: Arc<AuditQueue>) -> io::Result<Self> {
        let (batches, received) = sync_channel(SINK_BATCHES);
        let (end, ended) = sync_channel(0);
        let name = output.name();
        let sink = Self { name, batches, on_full, queue, unreported: Arc::default(), ended };
        let (queue, unreported) = (Arc::clone(&sink.queue), Arc::clone(&sink.unreported));
        let run = move || {
            run(output, &received, on_full, &queue, &unreported);
            drop(end);
        };
        thread::Builder::new().name(format!("audit {name}")).spawn(run)?;
        Ok(sink)
    }

    /// Passes a batch on. With `on_full = "block"`, waits for room while the process runs.
    pub(super) fn pass(&self, lines: &Arc<[u8]>, count: u64) {
        let mut batch = SinkBatch { lines: Arc::clone(lines), count };
        loop {
            batch = match self.batches.try_send(batch) {
                Ok(()) => return,
                Err(TrySendError::Full(batch)) if self.on_full == OnFull::Block && self.queue.pause(LOOK) => {
                    self.queue.note_failing(true);
                    batch
                }
                Err(TrySendError::Full(batch) | TrySendError::Disconnected(batch)) => {
                    return lose(self.name, &self.queue, &self.unreported, batch.count);
                }
            }
        }
    }

    /// Ends the sink: waits until its last batch is sent or lost, up to `until`.
    pub(super) fn end(self, until: Instant) {
        let Self { batches, ended, .. } = self;
        drop(batches);
        // Nothing is ever sent: the thread's end disconnects the channel.
        _ = ended.recv_timeout(until.saturating_duration_since(Instant::now()));
    }

    /// Takes the number of lost lines without a record of the loss.
    pub(super) fn take_unreported(&self) -> u64 {
        self.unreported.swap(0, Ordering::Relaxed)
    }
}

fn lose(name: &'static str, queue: &AuditQueue, unreported: &AtomicU64, count: u64) {
    queue.metrics.lost(name).inc_by(count);
    unreported.fetch_add(count, Ordering::Relaxed);
}

fn run(
    mut output: SinkOutput,
    batches: &Receiver<SinkBatch>,
    on_full: OnFull,
    queue: &AuditQueue,
    unreported: &AtomicU64,
) {
    let mut fails = false;
    while let Ok(batch) = batches.recv() {
        let mut progress = SinkProgress::default();
        loop {
            let result = output.send(&batch.lines, &mut progress);
            let Err(error) = result else { break };
            if !std::mem::replace(&mut fails, true) {
                tracing::error!(sink = output.name(), %error, "audit records are not accepted");
            }
            if on_full == OnFull::Drop || !queue.pause(RETRY) {
                lose(output.name(), queue, unreported, batch.count - progress.sent);
                break;
            }
        }
        if progress.refused > 0 {
            lose(output.name(), queue, unreported, progress.refused);
        }
        if progress.sent == batch.count && std::mem::take(&mut fails) {
            tracing::info!(sink = output.name(), "audit records are accepted again");
        }
    }
}
