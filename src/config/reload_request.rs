//! Requests for a reload of the configuration, and the outcome of a reload.
//!
//! Owns: the channel from the admin socket to the reload task. Must not know: the parts of a reload.
//! Invariant: the outcome names keys and faults, never secrets.

use tokio::sync::{mpsc, oneshot};

/// Waiting requests: one per client of the admin socket. A further request waits for room.
const WAITING: usize = 8;

/// The outcome of a reload.
#[derive(Debug, PartialEq, Eq)]
pub enum ReloadOutcome {
    /// The configuration read is in force.
    Applied(AppliedReload),
    /// Nothing has changed, because of these faults.
    Refused(Vec<String>),
}

/// The changes of a reload.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AppliedReload {
    /// Sentences about the changed parts.
    pub changes: Vec<String>,
    /// Changed keys that wait for a restart.
    pub waiting: Vec<String>,
    /// Warnings about the configuration, as far as they are new.
    pub warnings: Vec<String>,
    /// Number of warnings that stood before, too.
    pub standing: usize,
}

/// The state after the last reload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReloadState {
    /// Changed keys that wait for a restart.
    pub pending_restart: Vec<&'static str>,
    /// The faults of the configuration at the last reload, which changed nothing; empty after a success.
    pub faults: Vec<String>,
}

impl ReloadOutcome {
    /// True if the configuration read is in force.
    #[must_use]
    pub fn is_applied(&self) -> bool {
        matches!(self, Self::Applied(_))
    }
}

/// Formats the changes for a terminal, one per line.
impl std::fmt::Display for AppliedReload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.changes.is_empty() {
            write!(f, "nothing has changed that can change while running")?;
        } else {
            write!(f, "{}", self.changes.join("\n"))?;
        }
        for key in &self.waiting {
            write!(f, "\nwaits for a restart: {key}")?;
        }
        for warning in &self.warnings {
            write!(f, "\nwarning: {warning}")?;
        }
        match self.standing {
            0 => Ok(()),
            1 => write!(f, "\n1 warning stands as before: keyward check prints it"),
            count => write!(f, "\n{count} warnings stand as before: keyward check prints them"),
        }
    }
}

/// A request, to be answered by the reload task.
#[derive(Debug)]
pub struct ReloadRequest(oneshot::Sender<ReloadOutcome>);

/// Receives the requests.
pub type ReloadRequestReceiver = mpsc::Receiver<ReloadRequest>;

/// Sends requests to the reload task.
#[derive(Clone, Debug)]
pub struct ReloadRequests(mpsc::Sender<ReloadRequest>);

/// Returns both ends of the channel.
#[must_use]
pub fn reload_requests() -> (ReloadRequests, ReloadRequestReceiver) {
    let (sender, receiver) = mpsc::channel(WAITING);
    (ReloadRequests(sender), receiver)
}

impl ReloadRequests {
    /// Requests a reload and waits for its outcome; `None` if the reload task has ended. A cancelled wait
    /// does not cancel the reload.
    pub async fn reload(&self) -> Option<ReloadOutcome> {
        let (answer, outcome) = oneshot::channel();
        self.0.send(ReloadRequest(answer)).await.ok()?;
        outcome.await.ok()
    }
}

impl ReloadRequest {
    /// Sends the outcome. A client that has gone does not need it.
    pub fn answer(self, outcome: ReloadOutcome) {
        drop(self.0.send(outcome));
    }
}
