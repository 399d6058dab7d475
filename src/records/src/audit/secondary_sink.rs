//! The sinks beside the file: standard output, syslog and OTLP, each with a thread of its own.
//!
//! Owns: the repetition of what a sink does not take. Must not know: the chain, the form of a request.
//! Invariants: no other thread waits for a sink; lines are counted as sent after the receiver has them; the
//! end of the process waits a moment for the last lines of each sink.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::line_follower::LineFollower;
use super::otlp_collector::OtlpCollector;
use super::queue::AuditQueue;
use super::sink_lines::{SinkLimits, SinkLines};
use super::sink_progress::{SinkError, SinkProgress};
use super::sink_queue::{QueuedLines, SinkQueue};
use super::sink_state::SinkState;
use super::syslog::SyslogServer;
use keyward_config::audit_settings::SINK_BYTES;

/// The pause between two attempts at a failing sink.
const RETRY: Duration = Duration::from_secs(1);
/// Lines that a sink takes at once.
const MOST_LINES: u64 = 1000;
/// Bytes of lines that go to a pipe or a socket at once: after a crash they may be written again.
const HANDED_BYTES: usize = 64 * 1024;

/// The destination of lines.
pub(super) enum SinkOutput {
    Stdout,
    Syslog(SyslogServer),
    Otlp(Box<OtlpCollector>),
}

impl SinkOutput {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Syslog(_) => "syslog",
            Self::Otlp(_) => "otlp",
        }
    }

    fn limits(&self) -> SinkLimits {
        let bytes = if matches!(self, Self::Otlp(_)) { SINK_BYTES } else { HANDED_BYTES };
        SinkLimits { lines: MOST_LINES, bytes }
    }

    /// Sends the lines from the first unsent one on, and counts them in `progress`.
    fn send(&mut self, lines: &[u8], progress: &mut SinkProgress) -> Result<(), SinkError> {
        match self {
            Self::Otlp(collector) => collector.send(lines, progress),
            Self::Stdout => {
                for line in lines.split_inclusive(|byte| *byte == b'\n').skip(progress.sent_lines()) {
                    io::stdout().lock().write_all(line)?;
                    progress.sent += 1;
                }
                Ok(io::stdout().lock().flush()?)
            }
            Self::Syslog(server) => Ok(server.send(lines, progress)?),
        }
    }
}

/// The source of a sink's lines.
pub(super) enum SinkFeed {
    /// The audit files.
    Followed(Box<LineFollower>),
    /// A queue in memory; `true` if the calls wait for the sink.
    Queued(Arc<SinkQueue>, bool),
}

/// A sink beside the file, as seen by the writer.
pub(super) struct SecondarySink {
    pub(super) state: Arc<SinkState>,
    queue: Option<Arc<SinkQueue>>,
    /// Disconnected at the end of the thread.
    ended: Receiver<()>,
}

impl SecondarySink {
    /// Starts the thread of a sink. The thread is never joined, because a write may hang for ever.
    pub(super) fn start(
        output: SinkOutput,
        feed: SinkFeed,
        state: Arc<SinkState>,
        queue: Arc<AuditQueue>,
    ) -> io::Result<Self> {
        let (end, ended) = sync_channel(0);
        let own_queue = match &feed {
            SinkFeed::Queued(queue, _) => Some(Arc::clone(queue)),
            SinkFeed::Followed(_) => None,
        };
        let name = format!("audit {}", output.name());
        let sending = SinkThread { output, feed, state: Arc::clone(&state), queue };
        let run = move || {
            sending.run();
            drop(end);
        };
        thread::Builder::new().name(name).spawn(run)?;
        Ok(Self { state, queue: own_queue, ended })
    }

    /// True if the sink reads its lines from the files.
    pub(super) fn follows(&self) -> bool {
        self.queue.is_none()
    }

    /// Passes a batch on that stands in no file. Never waits.
    pub(super) fn pass(&self, batch: &QueuedLines) {
        let Some(queue) = &self.queue else { return };
        if !queue.push(batch.clone()) {
            self.state.lose(batch.count);
        }
        self.state.note_waiting(queue.len());
    }

    /// Lets the sink end behind its last line.
    pub(super) fn close(&self) {
        if let Some(queue) = &self.queue {
            queue.close();
        }
    }

    /// Waits until the last line is sent or lost, up to `until`. Returns the number of lines that are lost
    /// with the process: those that stand in a file are sent after the next start.
    pub(super) fn end(self, until: Instant) -> u64 {
        // Nothing is ever sent: the thread's end disconnects the channel.
        _ = self.ended.recv_timeout(until.saturating_duration_since(Instant::now()));
        let lost = |queue: Arc<SinkQueue>| self.state.losses.unreported().records + queue.len();
        self.queue.map_or(0, lost)
    }
}

struct SinkThread {
    output: SinkOutput,
    feed: SinkFeed,
    state: Arc<SinkState>,
    queue: Arc<AuditQueue>,
}

impl SinkThread {
    fn run(mut self) {
        let limits = self.output.limits();
        loop {
            let lines = match &mut self.feed {
                SinkFeed::Followed(follower) => follower.next(limits),
                SinkFeed::Queued(queue, _) => Ok(queue.take(limits)),
            };
            match lines {
                Ok(Some(lines)) => {
                    if !self.deliver(&lines) {
                        return;
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    self.note_failure(&error);
                    if !self.queue.pause(RETRY) || self.is_closing() {
                        return;
                    }
                }
            }
        }
    }

    /// Sends lines, again and again while the process runs. False if no further line is to be sent.
    fn deliver(&mut self, lines: &SinkLines) -> bool {
        let mut progress = SinkProgress::default();
        loop {
            let before = (progress.sent, progress.refused);
            let result = self.output.send(&lines.bytes, &mut progress);
            self.state.count_sent(progress.sent - before.0, progress.refused - before.1);
            self.note_taken(lines, progress.sent);
            let Err(SinkError { error, after }) = result else {
                self.note_success();
                return true;
            };
            self.note_failure(&error);
            if !self.queue.pause(RETRY.max(after)) || self.is_closing() {
                return self.give_up(lines.count - progress.sent);
            }
        }
    }

    /// True once another process follows the files.
    fn is_closing(&self) -> bool {
        matches!(&self.feed, SinkFeed::Followed(follower) if follower.is_closing())
    }

    fn note_taken(&mut self, lines: &SinkLines, sent: u64) {
        match &mut self.feed {
            SinkFeed::Followed(follower) => follower.note_taken(lines, sent),
            SinkFeed::Queued(queue, _) => self.state.note_waiting(queue.len()),
        }
    }

    /// Gives lines up at the end of the process: those in a file are sent after the next start.
    fn give_up(&self, lines: u64) -> bool {
        match &self.feed {
            SinkFeed::Followed(_) => false,
            SinkFeed::Queued(..) => {
                self.state.lose(lines);
                true
            }
        }
    }

    fn note_failure(&self, error: &io::Error) {
        if self.state.note_failure(error) {
            tracing::error!(sink = self.state.name, %error, "audit records are not accepted");
            self.note_failing(true);
        }
    }

    fn note_success(&self) {
        if self.state.note_success() {
            tracing::info!(sink = self.state.name, "audit records are accepted again");
            self.note_failing(false);
        }
    }

    /// Calls wait for a sink only where their records wait for it in memory.
    fn note_failing(&self, fails: bool) {
        if matches!(self.feed, SinkFeed::Queued(_, true)) {
            self.queue.note_sink_failing(fails);
        }
    }
}
