//! Requests for a reload of the configuration, and the outcome of a reload.
//!
//! Owns: the channel from the admin socket to the reload task. Must not know: the parts of a reload.
//! Invariant: the outcome names keys and faults, never secrets.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

/// Waiting requests: one per client of the admin socket. A further request waits for room.
const WAITING: usize = 8;

/// The outcome of a reload. The JSON form is for programs: fields are added, never renamed.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReloadOutcome {
    /// The configuration read is in force.
    Applied(AppliedReload),
    /// Nothing has changed, because of these faults.
    Refused(Vec<String>),
}

/// What makes the reload task read the configuration again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadTrigger {
    /// SIGHUP.
    Signal,
    /// A file of the configuration, or named in it, was changed.
    ChangedFile,
    /// A command on the admin socket.
    Command {
        /// The user id of the process that gave the command.
        uid: Option<u32>,
    },
}

impl std::fmt::Display for ReloadTrigger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Signal => "SIGHUP",
            Self::ChangedFile => "a changed file",
            Self::Command { .. } => "a command",
        })
    }
}

/// The changes of a reload.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The changes by reloads that let more callers do more, of the last day.
    pub weaker: Vec<WeakerSetting>,
}

/// A change by a reload that lets more callers do more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeakerSetting {
    /// The time of the reload.
    pub since: SystemTime,
    /// The setting, with the value before and the value now.
    pub change: String,
}

impl ReloadOutcome {
    /// True if the configuration read is in force.
    #[must_use]
    pub fn is_applied(&self) -> bool {
        matches!(self, Self::Applied(_))
    }
}

/// Formats the outcome for a terminal.
impl std::fmt::Display for ReloadOutcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Applied(applied) => writeln!(f, "{applied}"),
            Self::Refused(faults) => f.write_str(&faults.join("\n")),
        }
    }
}

/// Formats the changes for a terminal, one per line.
impl std::fmt::Display for AppliedReload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.changes.is_empty() && self.waiting.is_empty() {
            write!(f, "nothing has changed since the last start or reload")?;
        } else if self.changes.is_empty() {
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
pub struct ReloadRequest {
    uid: Option<u32>,
    done: oneshot::Sender<ReloadOutcome>,
}

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
    /// Requests a reload for a process of this user, and waits for its outcome; `None` if the reload task has
    /// ended. A cancelled wait does not cancel the reload.
    pub async fn reload(&self, uid: Option<u32>) -> Option<ReloadOutcome> {
        let (done, outcome) = oneshot::channel();
        self.0.send(ReloadRequest { uid, done }).await.ok()?;
        outcome.await.ok()
    }
}

impl ReloadRequest {
    /// The trigger of the reload.
    #[must_use]
    pub fn trigger(&self) -> ReloadTrigger {
        ReloadTrigger::Command { uid: self.uid }
    }

    /// Sends the outcome. A client that has gone does not need it.
    pub fn answer(self, outcome: ReloadOutcome) {
        drop(self.done.send(outcome));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_of_what_is_in_force_says_so() {
        let nothing = AppliedReload::default();
        assert_eq!(nothing.to_string(), "nothing has changed since the last start or reload");
        let waiting = AppliedReload { waiting: vec!["runtime".into()], ..nothing };
        let said = "nothing has changed that can change while running\nwaits for a restart: runtime";
        assert_eq!(waiting.to_string(), said);
    }
}
