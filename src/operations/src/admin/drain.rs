//! `keyward drain`: requesting the drain, and its stage.
//!
//! Owns: the stage, the requests for a drain, the listeners waiting for its end. Must not know: the actions
//! of a drain. Invariants: a drain begins once, however many requests arrive; every listener hears of the end
//! before the process exits, within a limit.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use keyward_telemetry::metrics::Metrics;

/// Stage of the drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No drain has begun.
    Serving,
    /// `/readyz` reports "not ready"; no client was told to leave yet.
    Waiting {
        /// End of the stage.
        until: Instant,
    },
    /// Clients were told to leave, by GOAWAY.
    Leaving {
        /// Open connections are cut at this time.
        until: Instant,
    },
    /// All connections have ended.
    Ended,
}

/// Stage of the drain as shown to an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// No drain has begun.
    Serving,
    /// Not ready, and still taking calls, so that load balancers notice.
    Waiting,
    /// Clients were told to leave, by GOAWAY.
    Leaving,
    /// All connections have ended; the process exits.
    Ended,
}

/// Progress of the drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Current stage.
    pub phase: Phase,
    /// Remaining time of the stage, in milliseconds.
    pub left_ms: u64,
    /// Open client connections.
    pub connections: i64,
    /// Unary calls in flight.
    pub calls: i64,
    /// Open streams.
    pub streams: i64,
    /// Connections cut at the time limit.
    pub cut: u64,
    /// Audit records of answered calls that wait for a disk that cannot be written.
    #[serde(default)]
    pub audit_waiting: u64,
    /// Audit records that were not written, and are lost with the process.
    #[serde(default)]
    pub audit_lost: u64,
}

/// The drain and end of the process.
#[derive(Debug)]
pub struct Exit {
    stage: watch::Sender<Stage>,
    asked: Notify,
    handed_over: watch::Sender<bool>,
    audit_lost: AtomicU64,
}

impl Default for Exit {
    fn default() -> Self {
        Self {
            stage: watch::Sender::new(Stage::Serving),
            asked: Notify::new(),
            handed_over: watch::Sender::new(false),
            audit_lost: AtomicU64::new(0),
        }
    }
}

impl Exit {
    /// Requests a drain, as a signal does.
    pub fn request_drain(&self) {
        self.asked.notify_one();
    }

    /// Requests a drain, because another process accepts at this process's listening sockets from now on.
    pub fn hand_over(&self) {
        self.handed_over.send_replace(true);
        self.request_drain();
    }

    /// True if another process accepts at this process's listening sockets.
    #[must_use]
    pub fn is_handed_over(&self) -> bool {
        *self.handed_over.borrow()
    }

    /// Waits until another process accepts at this process's listening sockets. Cancel-safe.
    pub async fn handed_over(&self) {
        let mut handed_over = self.handed_over.subscribe();
        // The sender lives in `self`.
        drop(handed_over.wait_for(|is| *is).await);
    }

    /// Waits for a request to drain. Cancel-safe.
    pub async fn drain_requested(&self) {
        self.asked.notified().await;
    }

    /// Current stage.
    #[must_use]
    pub fn stage(&self) -> Stage {
        *self.stage.borrow()
    }

    /// Enters the next stage.
    pub fn enter(&self, stage: Stage) {
        self.stage.send_replace(stage);
    }

    /// Notes the number of audit records that are lost with the process, before the end is told.
    pub fn note_audit_lost(&self, records: u64) {
        self.audit_lost.store(records, Ordering::Relaxed);
    }

    /// Subscribes to the stages. The process waits with its exit for live receivers, within a limit.
    #[must_use]
    pub fn listen(&self) -> watch::Receiver<Stage> {
        self.stage.subscribe()
    }

    /// Waits until all receivers are dropped. Cancel-safe.
    pub async fn receivers_dropped(&self) {
        self.stage.closed().await;
    }

    /// The progress as shown to an operator; the caller knows if audit records wait for the disk.
    #[must_use]
    pub fn progress(&self, metrics: &Metrics) -> Progress {
        let left = |until: Instant| {
            let left = until.saturating_duration_since(Instant::now());
            u64::try_from(left.as_millis()).unwrap_or(u64::MAX)
        };
        let (phase, left_ms) = match self.stage() {
            Stage::Serving => (Phase::Serving, 0),
            Stage::Waiting { until } => (Phase::Waiting, left(until)),
            Stage::Leaving { until } => (Phase::Leaving, left(until)),
            Stage::Ended => (Phase::Ended, 0),
        };
        Progress {
            phase,
            left_ms,
            connections: metrics.connections.get(),
            calls: metrics.calls_open.get(),
            streams: metrics.streams_open.get(),
            cut: metrics.connections_cut.get(),
            audit_waiting: 0,
            audit_lost: self.audit_lost.load(Ordering::Relaxed),
        }
    }
}

/// Formats the progress for a terminal.
impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { connections, calls, streams, .. } = self;
        let open = format!("{connections} connections, {calls} calls and {streams} streams are open");
        let seconds = self.left_ms.div_ceil(1000);
        match self.phase {
            Phase::Serving => write!(f, "serving: {open}"),
            Phase::Waiting => write!(f, "not ready, clients are told in {seconds} s: {open}"),
            Phase::Leaving => write!(f, "clients were told to leave, {seconds} s are left: {open}"),
            Phase::Ended => write!(f, "ended: {} connections were cut with something open", self.cut),
        }?;
        match (self.phase, self.audit_lost, self.audit_waiting) {
            (Phase::Ended, 0, _) => Ok(()),
            (Phase::Ended, lost, _) => write!(f, "; {lost} audit records were not written, and are lost"),
            (_, _, 0) => Ok(()),
            (_, _, waiting) => write!(f, "; {waiting} audit records wait for room on the disk"),
        }
    }
}
