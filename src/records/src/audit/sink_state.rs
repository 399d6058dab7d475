//! How far a sink beside the file has come, and what keeps it from going on.
//!
//! Owns: the figures that the writer, the metrics and doctor read. Must not know: how lines are sent.
//! Invariant: a line that the sink will never get is counted as lost once.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use super::loss_counter::{LossCounter, LossSeries};
use keyward_telemetry::audit_metrics::AuditMetrics;

/// The state of a sink.
#[derive(Debug)]
pub(super) struct SinkState {
    pub(super) name: &'static str,
    /// The number of the last line in the file.
    written: AtomicU64,
    /// The number of the last line that the receiver has taken.
    taken: AtomicU64,
    /// The number of the last line that the sink has in memory.
    held: AtomicU64,
    /// The number of the last line that is counted as lost if it was not held.
    given_up: AtomicU64,
    /// Lost lines.
    pub(super) losses: LossCounter,
    trouble: Mutex<Option<SinkTrouble>>,
    metrics: AuditMetrics,
}

/// Why a sink does not go on.
#[derive(Clone, Debug)]
pub struct SinkTrouble {
    /// The time of the first failure.
    pub since: SystemTime,
    /// The last failure.
    pub error: String,
}

/// A sink beside the file, for doctor.
#[derive(Clone, Debug)]
pub struct SinkReport {
    /// The name of the sink, as in the metrics.
    pub name: &'static str,
    /// The number of records that wait for the sink.
    pub unsent: i64,
    /// The present trouble, if any.
    pub trouble: Option<SinkTrouble>,
    /// The last losses, if any.
    pub lost: Option<LossSeries>,
}

impl SinkState {
    /// A sink whose receiver has the lines up to the number `taken`.
    pub(super) fn new(name: &'static str, taken: u64, metrics: AuditMetrics) -> Self {
        drop((metrics.unsent(name), metrics.sink_failing(name)));
        Self {
            name,
            written: taken.into(),
            taken: taken.into(),
            held: taken.into(),
            given_up: taken.into(),
            losses: LossCounter::new(name),
            trouble: Mutex::default(),
            metrics,
        }
    }

    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Notes the number of the last line in the file.
    pub(super) fn note_written(&self, last: u64) {
        self.written.store(last, Ordering::Relaxed);
        self.note_waiting(last.saturating_sub(self.taken()));
    }

    /// Notes how many lines wait for the sink.
    pub(super) fn note_waiting(&self, lines: u64) {
        self.metrics.unsent(self.name).set(i64::try_from(lines).unwrap_or(i64::MAX));
    }

    /// Notes that the sink has read the lines up to `last` into memory.
    pub(super) fn note_held(&self, last: u64) {
        self.held.fetch_max(last, Ordering::Relaxed);
    }

    /// Notes that the receiver has the lines up to `last`.
    pub(super) fn note_taken(&self, last: u64) {
        self.taken.store(last, Ordering::Relaxed);
        self.note_waiting(self.written.load(Ordering::Relaxed).saturating_sub(last));
    }

    /// Counts lines that the receiver has taken, and those among them that it refuses for good.
    pub(super) fn count_sent(&self, sent: u64, refused: u64) {
        self.metrics.sent(self.name).inc_by(sent - refused);
        self.lose(refused);
    }

    /// Notes that the lines up to `last` are in no file any more.
    pub(super) fn note_removed(&self, last: u64) {
        let from = self.held.load(Ordering::Relaxed).max(self.given_up.fetch_max(last, Ordering::Relaxed));
        self.lose(last.saturating_sub(from));
    }

    /// Notes that the lines between two numbers were not found.
    pub(super) fn note_gap(&self, before: u64, behind: u64) {
        let from = before.max(self.given_up.fetch_max(behind - 1, Ordering::Relaxed));
        self.lose((behind - 1).saturating_sub(from));
    }

    /// Counts lost lines.
    pub(super) fn lose(&self, lines: u64) {
        if lines > 0 {
            self.metrics.lost(self.name).inc_by(lines);
            self.losses.add(lines, SystemTime::now());
        }
    }

    fn trouble(&self) -> MutexGuard<'_, Option<SinkTrouble>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a failure. Returns true if the sink worked before.
    pub(super) fn note_failure(&self, error: &io::Error) -> bool {
        let mut trouble = self.trouble();
        let since = trouble.as_ref().map(|trouble| trouble.since);
        *trouble =
            Some(SinkTrouble { since: since.unwrap_or_else(SystemTime::now), error: error.to_string() });
        self.metrics.sink_failing(self.name).set(1);
        since.is_none()
    }

    /// Notes a success. Returns true if the sink failed before.
    pub(super) fn note_success(&self) -> bool {
        self.metrics.sink_failing(self.name).set(0);
        self.trouble().take().is_some()
    }

    pub(super) fn report(&self) -> SinkReport {
        let unsent = self.metrics.unsent(self.name).get();
        let lost = self.losses.series();
        SinkReport { name: self.name, unsent, trouble: self.trouble().clone(), lost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_telemetry::metrics::Metrics;

    #[test]
    fn a_line_that_is_gone_is_counted_once() {
        let metrics = Metrics::new(Vec::new()).audit;
        let sink = SinkState::new("otlp", 10, metrics.clone());
        let lost = || metrics.lost("otlp").get();
        sink.note_held(20);
        sink.note_removed(20);
        assert_eq!(lost(), 0, "the sink has the lines in memory");
        sink.note_removed(30);
        sink.note_removed(40);
        assert_eq!(lost(), 20);
        sink.note_taken(20);
        sink.note_gap(20, 43);
        assert_eq!((lost(), sink.losses.take_unreported().records), (22, 22), "two further ones are missing");
    }
}
