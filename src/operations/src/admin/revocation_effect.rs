//! The effect of a revocation on one replica, in words for the operator.
//!
//! Owns: counting the sessions and streams ended by one change. Must not know: the storage of revocations.
//! Invariant: an effect is a count of this replica alone, and the text says so.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::timeout;

use keyward_downstream::session::{RevocationChange, Revocations, Sealer, SessionId};

/// Time limit for the shards to end streams. A shard does it within some milliseconds; the change is in force
/// before.
const APPLYING: Duration = Duration::from_secs(2);

/// The state of a replica before a change.
pub(super) struct RevocationEffect {
    change: RevocationChange,
    /// The valid sessions seen by the replica.
    sessions: HashSet<SessionId>,
    ended_streams: u64,
    /// True if the change unblocks a user who is not blocked.
    is_idle: bool,
}

impl RevocationEffect {
    /// Notes the state before `change`.
    pub(super) fn before(change: RevocationChange, sealer: &Sealer, revocations: &Revocations) -> Self {
        let valid = sealer.listed_sessions().into_iter().filter(|session| session.is_valid);
        let is_idle = match &change {
            RevocationChange::Unblock(user) => !revocations.user_revocation(user).blocked,
            _ => false,
        };
        Self {
            is_idle,
            sessions: valid.map(|session| session.id).collect(),
            ended_streams: sealer.ended_streams().total(),
            change,
        }
    }

    /// Describes the effect, after the change was made. Waits until the shards have ended the streams.
    ///
    /// `reaches_others` is true for a change that other replicas take from etcd: the user's sessions may
    /// be there, and then nothing speaks against the name.
    pub(super) async fn describe(self, sealer: &Sealer, reaches_others: bool) -> String {
        if let RevocationChange::Unblock(_) = self.change {
            let idle = "the user was not blocked: is the name right?";
            return if self.is_idle { idle } else { "the user may log in again" }.to_owned();
        }
        let is_applied = timeout(APPLYING, sealer.wait_until_applied()).await.is_ok();
        let ended = |session: &SessionId| self.sessions.contains(session);
        let invalid = sealer.listed_sessions().into_iter().filter(|session| !session.is_valid);
        let sessions = invalid.filter(|session| ended(&session.id)).count();
        let streams = sealer.ended_streams().total().saturating_sub(self.ended_streams);
        if (sessions, streams, is_applied) == (0, 0, true) {
            return nothing_ended(&self.change, reaches_others);
        }
        let more = if is_applied { "" } else { "; more may follow" };
        format!(
            "ended on this replica: {}, {}{more}",
            counted(sessions as u64, "session"),
            counted(streams, "stream or waiting call")
        )
    }
}

/// The effect of a change that ended nothing here.
fn nothing_ended(change: &RevocationChange, reaches_others: bool) -> String {
    let what = match change {
        RevocationChange::RevokeSession(_) => "id",
        _ => "name",
    };
    let doubt = if reaches_others {
        "; those on other replicas end within 2 s".to_owned()
    } else {
        format!(": is the {what} right?")
    };
    format!("no session and no stream on this replica has ended{doubt}")
}

/// A number and its noun.
fn counted(number: u64, noun: &str) -> String {
    let (first, rest) = noun.split_once(' ').unwrap_or((noun, ""));
    match (number, rest) {
        (1, _) => format!("1 {noun}"),
        (_, "") => format!("{number} {noun}s"),
        (_, rest) => format!("{number} {first}s {rest}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_etcd::identity::UserName;

    #[test]
    fn a_name_is_doubted_only_where_no_other_replica_can_have_its_sessions() {
        let block = RevocationChange::Block(UserName::from("alice"));
        let said = nothing_ended(&block, true);
        assert!(said.ends_with("has ended; those on other replicas end within 2 s"), "{said}");
        assert!(nothing_ended(&block, false).ends_with("has ended: is the name right?"));
    }
}
