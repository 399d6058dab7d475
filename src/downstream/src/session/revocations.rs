//! Revocations: decisions about users and sessions, as a pure value.
//!
//! Owns: the test for a revoked session, and the effect of a change on the revocations. Must not know: where
//! revocations are stored, streams.
//! Invariants: a generation only rises, even after the loss of all earlier state, because a generation is
//! also a timestamp. Revoking a user ends all of the user's sessions, whatever source verified the name. An
//! unblocked user must log in again.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use data_encoding::HEXLOWER_PERMISSIVE;

use super::{Session, SessionId};
use keyward_etcd::identity::UserName;

/// Limit on revocations, far above the needs of an incident: beyond the limit, `session.not_before` ends
/// every session at once.
pub const MOST_ENTRIES: usize = 10_000;

/// All revocations, as one immutable value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revocations {
    users: HashMap<UserName, UserRevocation>,
    sessions: HashSet<SessionId>,
}

/// The decision about one user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserRevocation {
    /// Sessions of an earlier generation are refused. Microseconds of the Unix epoch, or the previous
    /// generation plus one if higher; `u64::MAX` if the decision is unreadable.
    pub generation: u64,
    /// True if logins and calls as the user are refused too.
    pub blocked: bool,
}

/// One decision, in the form in which decisions are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevocationEntry {
    /// A decision about a user.
    User(UserName, UserRevocation),
    /// One revoked session.
    Session(SessionId),
}

/// An operator's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevocationChange {
    /// Ends all current sessions of the user, and all streams and calls running as that etcd user.
    Revoke(UserName),
    /// Ends one session.
    RevokeSession(SessionId),
    /// Same as `Revoke`, and refuses further logins and calls as the user.
    Block(UserName),
    /// Lets the user log in and call again. Ended sessions stay ended.
    Unblock(UserName),
}

/// The limit on revocations is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there are {MOST_ENTRIES} revocations already; session.not_before in the configuration ends all sessions"
)]
pub struct RevocationsFull;

/// The text is not 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a session's id is 32 hexadecimal digits, as the log shows it at login")]
pub struct InvalidSessionId;

impl Revocations {
    /// True if the session was revoked.
    #[must_use]
    pub fn refuse(&self, session: &Session) -> bool {
        let standing = self.user_revocation(session.peer.user());
        // A block applies whatever generation the token claims: a holder of the session key can seal any
        // generation.
        standing.blocked || session.generation < standing.generation || self.sessions.contains(&session.id)
    }

    /// The decision about the user; the default for a user without a decision.
    #[must_use]
    pub fn user_revocation(&self, user: &UserName) -> UserRevocation {
        self.users.get(user).copied().unwrap_or_default()
    }

    /// The entry to store for the change to take effect.
    #[must_use]
    pub fn entry(&self, change: &RevocationChange, now: SystemTime) -> RevocationEntry {
        let raised = |user: &UserName, blocked: bool| {
            let before = self.user_revocation(user);
            RevocationEntry::User(user.clone(), UserRevocation { generation: before.raised(now), blocked })
        };
        match change {
            RevocationChange::Revoke(user) => raised(user, self.user_revocation(user).blocked),
            RevocationChange::Block(user) => raised(user, true),
            // A session of the highest generation could never be revoked again.
            RevocationChange::Unblock(user) if self.user_revocation(user) == UserRevocation::NOT_KNOWN => {
                raised(user, false)
            }
            RevocationChange::Unblock(user) => RevocationEntry::User(
                user.clone(),
                UserRevocation { blocked: false, ..self.user_revocation(user) },
            ),
            RevocationChange::RevokeSession(id) => RevocationEntry::Session(*id),
        }
    }

    /// A copy of the revocations with `entry` added.
    ///
    /// # Errors
    /// [`RevocationsFull`].
    pub fn with(&self, entry: RevocationEntry) -> Result<Self, RevocationsFull> {
        let mut more = self.clone();
        more.add(entry);
        if more.len() > MOST_ENTRIES { Err(RevocationsFull) } else { Ok(more) }
    }

    /// All entries, unordered.
    pub fn entries(&self) -> impl Iterator<Item = RevocationEntry> {
        let users = self.users.iter().map(|(user, standing)| RevocationEntry::User(user.clone(), *standing));
        users.chain(self.sessions.iter().map(|id| RevocationEntry::Session(*id)))
    }

    /// The number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.users.len() + self.sessions.len()
    }

    /// True if there are no revocations.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn add(&mut self, entry: RevocationEntry) {
        match entry {
            RevocationEntry::User(user, standing) => drop(self.users.insert(user, standing)),
            RevocationEntry::Session(id) => drop(self.sessions.insert(id)),
        }
    }
}

impl FromIterator<RevocationEntry> for Revocations {
    fn from_iter<I: IntoIterator<Item = RevocationEntry>>(entries: I) -> Self {
        let mut all = Self::default();
        entries.into_iter().for_each(|entry| all.add(entry));
        all
    }
}

impl UserRevocation {
    /// Decision about a user whose stored decision cannot be read: all sessions and logins are refused.
    pub const NOT_KNOWN: Self = Self { generation: u64::MAX, blocked: true };

    fn raised(self, now: SystemTime) -> u64 {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros());
        let now = u64::try_from(now).unwrap_or(u64::MAX - 1);
        // After an unreadable decision, only the clock gives a generation above all earlier generations.
        self.generation.checked_add(1).map_or(now, |next| next.max(now))
    }
}

impl FromStr for SessionId {
    type Err = InvalidSessionId;

    fn from_str(text: &str) -> Result<Self, InvalidSessionId> {
        let id = HEXLOWER_PERMISSIVE.decode(text.as_bytes()).map_err(|_| InvalidSessionId)?;
        id.try_into().map(Self).map_err(|_| InvalidSessionId)
    }
}

impl fmt::Display for RevocationChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Revoke(user) => write!(f, "revoke {user}"),
            Self::RevokeSession(id) => write!(f, "revoke --session {id}"),
            Self::Block(user) => write!(f, "block {user}"),
            Self::Unblock(user) => write!(f, "unblock {user}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::login;
    use super::super::{PeerNamespace, SessionPeer};
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn session(user: &str, generation: u64) -> Session {
        Session { generation, ..login(user, "p") }
    }

    fn after(revocations: &Revocations, change: &RevocationChange, now: u64) -> Revocations {
        revocations.with(revocations.entry(change, at(now))).unwrap()
    }

    #[test]
    fn a_user_loses_the_sessions_of_before_and_may_begin_another() {
        let none = Revocations::default();
        let revoked = after(&none, &RevocationChange::Revoke("alice".into()), 5);
        let now = revoked.user_revocation(&"alice".into());
        assert_eq!(now, UserRevocation { generation: 5_000_000, blocked: false });
        for (user, generation, refused) in [
            ("alice", 0, true),
            ("alice", 4_999_999, true),
            ("alice", 5_000_000, false),
            ("bob", 0, false),
            ("Alice", 0, false),
        ] {
            assert_eq!(revoked.refuse(&session(user, generation)), refused, "{user} {generation}");
            assert!(!none.refuse(&session(user, generation)));
        }
        let peer = SessionPeer::Known { namespace: PeerNamespace::File, user: "alice".into() };
        assert!(revoked.refuse(&Session { peer, ..session("alice", 0) }), "whoever vouched for it");
    }

    #[test]
    fn a_generation_rises_whatever_the_clock_says() {
        let mut revocations = Revocations::default();
        let mut last = 0;
        for now in [9, 9, 3, 0, 12] {
            revocations = after(&revocations, &RevocationChange::Revoke("alice".into()), now);
            let generation = revocations.user_revocation(&"alice".into()).generation;
            assert!(generation > last, "{generation} after {last}");
            last = generation;
        }
    }

    #[test]
    fn a_block_ends_sessions_and_outlives_a_revoke() {
        let blocked = after(&Revocations::default(), &RevocationChange::Block("alice".into()), 1);
        assert!(
            blocked.user_revocation(&"alice".into()).blocked && blocked.refuse(&session("alice", 999_999))
        );
        assert!(blocked.refuse(&session("alice", u64::MAX)), "a generation of the future is no way out");
        let revoked = after(&blocked, &RevocationChange::Revoke("alice".into()), 2);
        assert!(revoked.user_revocation(&"alice".into()).blocked);
        let free = after(&revoked, &RevocationChange::Unblock("alice".into()), 3);
        assert_eq!(
            free.user_revocation(&"alice".into()),
            UserRevocation { generation: 2_000_000, blocked: false }
        );
        assert!(free.refuse(&session("alice", 1_999_999)), "old sessions stay ended");
    }

    #[test]
    fn a_decision_that_could_not_be_read_is_followed_by_ones_that_can() {
        let closed =
            Revocations::from_iter([RevocationEntry::User("alice".into(), UserRevocation::NOT_KNOWN)]);
        assert!(closed.refuse(&session("alice", u64::MAX - 1)));
        for change in [RevocationChange::Unblock("alice".into()), RevocationChange::Revoke("alice".into())] {
            let after = after(&closed, &change, 5);
            let blocked = matches!(change, RevocationChange::Revoke(_));
            assert_eq!(
                after.user_revocation(&"alice".into()),
                UserRevocation { generation: 5_000_000, blocked }
            );
            assert!(after.refuse(&session("alice", 4_999_999)));
        }
        let free = after(&closed, &RevocationChange::Unblock("alice".into()), 5);
        let new = session("alice", free.user_revocation(&"alice".into()).generation);
        assert!(!free.refuse(&new));
        assert!(after(&free, &RevocationChange::Revoke("alice".into()), 5).refuse(&new), "it can be revoked");
    }

    #[test]
    fn one_session_ends_alone() {
        let (one, other) = (session("alice", 0), session("alice", 0));
        let id = one.id.to_string().parse().unwrap();
        let revoked = after(&Revocations::default(), &RevocationChange::RevokeSession(id), 1);
        assert!(revoked.refuse(&one) && !revoked.refuse(&other));
        for wrong in ["", "12", &"g".repeat(32), &"0".repeat(33), &format!("+{}", "0".repeat(31))] {
            assert_eq!(wrong.parse::<SessionId>().err(), Some(InvalidSessionId), "{wrong}");
        }
    }

    #[test]
    fn there_is_a_limit_and_what_is_known_can_still_change() {
        let users = (0..MOST_ENTRIES)
            .map(|n| RevocationEntry::User(n.to_string().as_str().into(), UserRevocation::default()));
        let full: Revocations = users.collect();
        let more = full.entry(&RevocationChange::Block("one more".into()), at(1));
        assert_eq!(full.with(more).err(), Some(RevocationsFull));
        let again = after(&full, &RevocationChange::Block("7".into()), 1);
        assert!(again.user_revocation(&"7".into()).blocked);
        assert_eq!(again.entries().collect::<Revocations>(), again);
    }
}
