//! The commands of operators and their answers, as lines of JSON at the admin socket.
//!
//! Owns: the form of commands and answers, also of those that a replica takes from another one. Must not
//! know: the execution of a command. Invariants: a command with an unknown part is no command; another
//! replica may ask for a closed set, without secrets, and without anything that outlives the process.

use serde::{Deserialize, Serialize};
use std::fmt;

use super::doctor::DoctorReport;
use super::drain::Progress;
use super::explained_calls::ExplainedCalls;
use super::session_listing::SessionListing;
use super::status::ReplicaStatus;
use super::view::{View, ViewTopic};
use crate::policy_store::{PolicyAnswer, PolicyCommand};
use keyward_access::policy::described_call::DescribedCall;
use keyward_config::reload_request::ReloadOutcome;

/// A command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AdminCommand {
    /// End all sessions of the user, and the streams and calls of this etcd user.
    Revoke {
        /// The user's name, compared byte by byte.
        user: String,
    },
    /// End one session.
    RevokeSession {
        /// The session's id, as logged at login.
        session: String,
    },
    /// Revoke the user, and refuse further logins and calls.
    Block {
        /// The user's name, compared byte by byte.
        user: String,
    },
    /// Let the user log in and call again.
    Unblock {
        /// The user's name, compared byte by byte.
        user: String,
    },
    /// List the sessions seen by this replica, and the revocations.
    Sessions {},
    /// Report the status of the replica and the members.
    Status {},
    /// Run `keyward doctor`.
    Doctor {},
    /// Read or change the policy stored in etcd.
    Policy(PolicyCommand),
    /// Judge calls by the policy in force, whether it is the configuration's or stored in etcd.
    Explain {
        /// The calls.
        calls: Vec<DescribedCall>,
    },
    /// Reload the configuration, as by SIGHUP, and report the changes or the faults.
    Reload {},
    /// Change the filter of the log until the next reload or restart.
    LogLevel {
        /// A [`LogFilter`](keyward_telemetry::log_filter::LogFilter).
        filter: String,
    },
    /// Report what is going on.
    Show {
        /// The topic.
        topic: ViewTopic,
    },
    /// End a client connection.
    Kick {
        /// The connection's number, as in the view of clients.
        client: u64,
    },
    /// End all client connections of a peer.
    KickPeer {
        /// The peer, the etcd user or the address, as in the view of clients.
        peer: String,
    },
    /// Take a member out of service.
    Pause {
        /// The member's name or id.
        member: String,
    },
    /// Return a paused member to service.
    Resume {
        /// The member's name or id.
        member: String,
    },
    /// Give a command to the replicas of the fleet.
    Fleet(FleetQuestion),
    /// Send copies of the listening sockets, for a process that takes over.
    HandOver {},
    /// Leave the audit file, and stop accepting at the sockets handed over before on the same connection,
    /// then drain and exit. A socket for the last audit records comes with the answer, if there is an audit
    /// file.
    Release {
        /// The names of the sockets that the process that takes over does not open: these close.
        #[serde(default)]
        left: Vec<String>,
    },
    /// Drain and exit, as by SIGTERM, and report the progress. A repeated command on the same connection
    /// answers within half a second. Refused while audit records of answered calls wait for a disk that
    /// cannot be written, unless their loss is accepted.
    Drain {
        /// The operator accepts the loss of these records.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        loses_audit_records: bool,
    },
}

/// The answer to a command.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdminAnswer {
    /// The change is made; with its consequences.
    Done(String),
    /// No change was made; with the reason.
    Failed(String),
    /// There was nothing to change on this replica; with the reason.
    Idle(String),
    /// The change is in force on this replica until the process exits, and on no further replica; with the
    /// reason.
    NotKept(String),
    /// The outcome is unknown. The command may be repeated.
    Unknown(String),
    /// Answer to [`AdminCommand::Sessions`].
    Sessions(SessionListing),
    /// Answer to [`AdminCommand::Status`].
    Status(Box<ReplicaStatus>),
    /// Answer to [`AdminCommand::Doctor`].
    Doctor(DoctorReport),
    /// Answer to [`AdminCommand::Policy`].
    Policy(PolicyAnswer),
    /// Answer to [`AdminCommand::Explain`].
    Explained(ExplainedCalls),
    /// Answer to [`AdminCommand::Reload`].
    Reloaded(ReloadOutcome),
    /// Answer to [`AdminCommand::Show`].
    View(View),
    /// Answer to [`AdminCommand::Fleet`].
    Fleet(Vec<ReplicaAnswer>),
    /// The drain has begun.
    Draining(Progress),
    /// The names of the listening sockets, which are sent with the answer.
    HandingOver(Vec<String>),
}

/// A command that a replica takes from another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FleetCommand {
    /// Report the status of the replica and the members.
    Status {},
    /// Report what is going on.
    Show {
        /// The topic.
        topic: ViewTopic,
    },
    /// End a client connection.
    Kick {
        /// The connection's number, as in the view of clients.
        client: u64,
    },
    /// End all client connections of a peer, of an etcd user or of an address.
    KickPeer {
        /// The name, as in the view of clients.
        peer: String,
    },
    /// Take a member out of service.
    Pause {
        /// The member's name or id.
        member: String,
    },
    /// Return a paused member to service.
    Resume {
        /// The member's name or id.
        member: String,
    },
}

/// The command as an operator types it, for the log.
impl fmt::Display for FleetCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status {} => f.write_str("status"),
            Self::Show { topic } => {
                let named = ViewTopic::ALL.iter().find(|(_, one)| one == topic);
                write!(f, "show {}", named.map_or("", |(name, _)| name))
            }
            Self::Kick { client } => write!(f, "kick {client}"),
            Self::KickPeer { peer } => write!(f, "kick {peer}"),
            Self::Pause { member } => write!(f, "pause {member}"),
            Self::Resume { member } => write!(f, "resume {member}"),
        }
    }
}

impl FleetCommand {
    /// True for a command that changes something.
    #[must_use]
    pub fn is_order(&self) -> bool {
        !matches!(self, Self::Status {} | Self::Show { .. })
    }
}

impl From<FleetCommand> for AdminCommand {
    fn from(command: FleetCommand) -> Self {
        match command {
            FleetCommand::Status {} => Self::Status {},
            FleetCommand::Show { topic } => Self::Show { topic },
            FleetCommand::Kick { client } => Self::Kick { client },
            FleetCommand::KickPeer { peer } => Self::KickPeer { peer },
            FleetCommand::Pause { member } => Self::Pause { member },
            FleetCommand::Resume { member } => Self::Resume { member },
        }
    }
}

/// A command of an operator to the replicas of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetQuestion {
    /// The command.
    pub command: FleetCommand,
    /// The name of the only replica to ask; all replicas without it.
    #[serde(default)]
    pub only: Option<String>,
    /// The user who became root by sudo, as the command claims; counts of user id 0 alone.
    #[serde(default)]
    pub sudo_user: Option<String>,
}

/// The answer of one replica.
#[derive(Debug, Serialize, Deserialize)]
pub struct ReplicaAnswer {
    /// The name of the replica: its host, with its process id where hosts have several; its admin address if
    /// the replica was not reached.
    pub replica: String,
    /// Its admin addresses among those of `admin.replicas`; the replica with the admin socket may have none.
    pub addresses: Vec<String>,
    /// The outcome.
    pub outcome: ReplicaOutcome,
}

/// The outcome of a command at one replica.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaOutcome {
    /// The replica's answer.
    Answered(Box<AdminAnswer>),
    /// The replica was not reached, so it did nothing; with the reason.
    Unreached(String),
    /// The command was sent, and no answer came; with the reason.
    Unknown(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_has_an_order_as_an_operator_types_it() {
        for (command, typed) in [
            (FleetCommand::KickPeer { peer: "alice".into() }, "kick alice"),
            (FleetCommand::Kick { client: 7 }, "kick 7"),
            (FleetCommand::Pause { member: "m3".into() }, "pause m3"),
            (FleetCommand::Resume { member: "m3".into() }, "resume m3"),
            (FleetCommand::Show { topic: ViewTopic::Members }, "show members"),
            (FleetCommand::Status {}, "status"),
        ] {
            assert_eq!(command.to_string(), typed);
        }
    }

    #[test]
    fn what_a_replica_takes_from_another_is_a_closed_set() {
        for command in [
            r#"{"status":{}}"#,
            r#"{"show":{"topic":"clients"}}"#,
            r#"{"kick":{"client":7}}"#,
            r#"{"kick_peer":{"peer":"file:bob"}}"#,
            r#"{"pause":{"member":"m1"}}"#,
            r#"{"resume":{"member":"m1"}}"#,
        ] {
            let read: FleetCommand = serde_json::from_str(command).expect("a command");
            // The admin socket takes the same words.
            assert_eq!(serde_json::from_str::<AdminCommand>(command).expect("one, too"), read.into());
        }
        for other in [
            r#"{"block":{"user":"a"}}"#,
            r#"{"reload":{}}"#,
            r#"{"drain":{}}"#,
            r#"{"hand_over":{}}"#,
            r#"{"log_level":{"filter":"trace"}}"#,
            r#"{"fleet":{"command":{"status":{}}}}"#,
            r#"{"kick":{"client":7,"peer":"a"}}"#,
            r#""status""#,
        ] {
            assert!(serde_json::from_str::<FleetCommand>(other).is_err(), "{other}");
        }
    }
}
