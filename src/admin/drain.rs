//! How far an ending has come, and that it was asked for: `keyward drain`.
//!
//! Owns: the stage, whoever asks for the next, and whoever waits to hear of the last. Must not know: what an ending does. Invariants: it
//! begins once, whoever asks; whoever asked is told of the end before the process goes, within a limit.

use std::fmt;

use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::telemetry::metrics::Metrics;

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It has not begun.
    Serving,
    /// `/readyz` says no; nobody was told to leave yet.
    Waiting {
        /// Until when.
        until: Instant,
    },
    /// Clients were told to leave.
    Leaving {
        /// What is open then is cut.
        until: Instant,
    },
    /// Nobody is left.
    Ended,
}

/// The same for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It has not begun.
    Serving,
    /// Not ready, and still taking calls: balancers are to notice.
    Waiting,
    /// Clients were told to leave.
    Leaving,
    /// Nobody is left; the process goes.
    Ended,
}

/// How far it has come, and what is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Where it is.
    pub phase: Phase,
    /// How long that may still take, in milliseconds.
    pub left_ms: u64,
    /// Connections of clients.
    pub connections: i64,
    /// Unary calls under way.
    pub calls: i64,
    /// Streams that are open.
    pub streams: i64,
    /// Connections that did not end by themselves.
    pub cut: u64,
}

/// The ending of the process.
#[derive(Debug)]
pub struct Exit {
    stage: watch::Sender<Stage>,
    asked: Notify,
}

impl Default for Exit {
    fn default() -> Self {
        Self { stage: watch::Sender::new(Stage::Serving), asked: Notify::new() }
    }
}

impl Exit {
    /// Asks for it, as a signal does.
    pub fn ask(&self) {
        self.asked.notify_one();
    }

    /// Waits until somebody asks. Cancel-safe.
    pub async fn asked(&self) {
        self.asked.notified().await;
    }

    /// How far it has come.
    #[must_use]
    pub fn stage(&self) -> Stage {
        *self.stage.borrow()
    }

    /// Moves on.
    pub fn enter(&self, stage: Stage) {
        self.stage.send_replace(stage);
    }

    /// Hears of each stage. While there is one, the end waits for it, within a limit.
    #[must_use]
    pub fn listen(&self) -> watch::Receiver<Stage> {
        self.stage.subscribe()
    }

    /// Waits until nobody listens any more. Cancel-safe.
    pub async fn heard(&self) {
        self.stage.closed().await;
    }

    /// What an operator is told.
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
        }
    }
}

/// For a terminal.
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
        }
    }
}
