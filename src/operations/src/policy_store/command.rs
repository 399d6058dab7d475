//! The operator's commands to the stored policy, and their answers.
//!
//! Owns: the commands in the form of the admin socket. Must not know: the execution of a command.

use serde::{Deserialize, Serialize};

/// A command to the stored policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PolicyCommand {
    /// Store a document as the next generation.
    Apply {
        /// The text of the document.
        text: String,
        /// The required current generation; without it, the generation read by the command.
        if_generation: Option<u64>,
        /// The operator's comment.
        comment: String,
        /// True to store also a document with rules that apply to no caller of this replica.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        allow_unreachable: bool,
        /// The user who became root by sudo, as the sender claims; only a sender with user id 0 is heard.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sudo_user: Option<String>,
    },
    /// Compare the generation in force with a document.
    Diff {
        /// The text of the document.
        text: String,
    },
    /// List the kept generations.
    History {},
    /// Store the document of an earlier generation as the next generation.
    Rollback {
        /// The earlier generation.
        generation: u64,
        /// The user who became root by sudo, as the sender claims; only a sender with user id 0 is heard.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sudo_user: Option<String>,
    },
    /// Print the document of a generation.
    Show {
        /// The generation; without it, the generation in force.
        generation: Option<u64>,
    },
    /// Give a role to a peer for a while.
    Grant {
        /// The pattern of the peer, as in a binding.
        peer: String,
        /// The name of the role.
        role: String,
        /// The duration.
        seconds: u64,
        /// The operator's reason.
        reason: String,
        /// The user who became root by sudo, as the sender claims; only a sender with user id 0 is heard.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sudo_user: Option<String>,
    },
    /// Take a temporary grant back.
    Ungrant {
        /// The pattern of the peer, as given.
        peer: String,
        /// The name of the role.
        role: String,
        /// The user who became root by sudo, as the sender claims; only a sender with user id 0 is heard.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sudo_user: Option<String>,
    },
    /// List the temporary grants in force.
    Grants {},
}

impl PolicyCommand {
    /// The user who became root by sudo, as the sender claims.
    #[must_use]
    pub fn sudo_user(&self) -> Option<&str> {
        match self {
            Self::Apply { sudo_user, .. }
            | Self::Rollback { sudo_user, .. }
            | Self::Grant { sudo_user, .. }
            | Self::Ungrant { sudo_user, .. } => sudo_user.as_deref(),
            Self::Diff { .. } | Self::History {} | Self::Show { .. } | Self::Grants {} => None,
        }
    }

    /// The command's name, target and reason for the audit log; `None` for a command that changes nothing.
    #[must_use]
    pub fn audited(&self) -> Option<(&'static str, Option<String>, Option<String>)> {
        Some(match self {
            Self::Apply { comment, .. } => ("policy_apply", None, Some(comment.clone())),
            Self::Rollback { generation, .. } => {
                ("policy_rollback", None, Some(format!("rollback to generation {generation}")))
            }
            Self::Grant { peer, role, reason, seconds, .. } => {
                ("grant", Some(format!("{role} for {seconds} s to {peer}")), Some(reason.clone()))
            }
            Self::Ungrant { peer, role, .. } => ("ungrant", Some(format!("{role} of {peer}")), None),
            Self::Diff { .. } | Self::History {} | Self::Show { .. } | Self::Grants {} => return None,
        })
    }
}

/// The answer to an executed command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyAnswer {
    /// The text for the operator, with its last line break; empty for a listing.
    pub text: String,
    /// The rows of [`PolicyCommand::History`] or [`PolicyCommand::Grants`].
    pub listing: Option<PolicyListing>,
    /// True for a [`PolicyCommand::Diff`] with a difference.
    pub differs: bool,
    /// The generation stored by the command.
    pub generation: Option<u64>,
}

/// Rows for the operator. The JSON form is for programs: fields are added, never renamed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyListing {
    /// The kept generations.
    Generations(Vec<GenerationRow>),
    /// The temporary grants in force.
    Grants(Vec<GrantRow>),
}

/// A kept generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerationRow {
    /// Its number.
    pub generation: u64,
    /// True for the generation in force on this replica.
    pub in_force: bool,
    /// The time of the change, as RFC 3339.
    pub applied_at: String,
    /// The operator's user id, if known.
    pub uid: Option<u32>,
    /// The user who became root by sudo, if the operator told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sudo_user: Option<String>,
    /// The digest of the document, in hexadecimal.
    pub sha256: String,
    /// The operator's comment.
    pub comment: String,
}

/// A temporary grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantRow {
    /// Its end, as RFC 3339.
    pub until: String,
    /// The operator's user id, if known.
    pub uid: Option<u32>,
    /// The user who became root by sudo, if the operator told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sudo_user: Option<String>,
    /// The pattern of the peer.
    pub peer: String,
    /// The role.
    pub role: String,
    /// False if the policy in force has no such role, so that the grant gives nothing.
    pub has_role: bool,
    /// The operator's reason.
    pub reason: String,
}

/// Reasons for not having executed a command.
#[derive(Debug, thiserror::Error)]
pub enum PolicyStoreError {
    /// Nothing has changed.
    #[error("nothing has changed: {0}")]
    Unchanged(String),
    /// A transaction was sent to etcd, and its outcome is unknown. The transaction is never sent again.
    #[error("not known whether it is stored, see `keyward policy history` or `keyward grants`: {0}")]
    Unknown(String),
}
