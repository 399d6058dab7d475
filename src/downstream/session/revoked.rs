//! Who was revoked: the decision, whoever keeps it.
//!
//! Owns: what refuses a session, and what a change makes of that. Must not know: where revocations are kept, streams.
//! Invariants: a generation only rises, also after everything that was known is lost, since it is a time as well; what
//! ends a user's sessions ends all of them, whoever vouched for the name; a user that was unblocked must log in anew.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use super::{Session, SessionId};
use crate::identity::UserName;

/// More than an incident has: past it, `session.not_before` ends everything at once.
pub const MOST_ENTRIES: usize = 10_000;

/// Everything that was revoked, as one immutable value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revocations {
    users: HashMap<UserName, Standing>,
    sessions: HashSet<SessionId>,
}

/// What was decided of one user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Sessions of an earlier generation are refused. Microseconds of the Unix epoch, or one more than the last; the highest of
    /// all where it is not known.
    pub generation: u64,
    /// Whether logins, and calls as that user, are refused as well.
    pub blocked: bool,
}

/// One decision, as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Of a user.
    User(UserName, Standing),
    /// One session that was revoked.
    Session(SessionId),
}

/// What an operator asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Ends all sessions that the user has now, and what lives as that etcd user.
    Revoke(UserName),
    /// Ends this session.
    RevokeSession(SessionId),
    /// The same, and refuses further logins and calls as that user.
    Block(UserName),
    /// Lets the user log in and call again. Sessions that were ended stay so.
    Unblock(UserName),
}

/// There are too many entries for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there are {MOST_ENTRIES} revocations already; session.not_before in the configuration ends all sessions"
)]
pub struct Full;

/// Not 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a session's id is 32 hexadecimal digits, as the log shows it at login")]
pub struct NoSessionId;

impl Revocations {
    /// Whether the session was revoked.
    #[must_use]
    pub fn refuse(&self, session: &Session) -> bool {
        let standing = self.standing(session.peer.user());
        // A block holds whatever generation a token claims: who has the key may write any.
        standing.blocked || session.generation < standing.generation || self.sessions.contains(&session.id)
    }

    /// What was decided of the user; of one that nobody spoke of, nothing.
    #[must_use]
    pub fn standing(&self, user: &UserName) -> Standing {
        self.users.get(user).copied().unwrap_or_default()
    }

    /// What has to be kept for the change to hold.
    #[must_use]
    pub fn entry(&self, change: &Change, now: SystemTime) -> Entry {
        let raised = |user: &UserName, blocked: bool| {
            let before = self.standing(user);
            Entry::User(user.clone(), Standing { generation: before.raised(now), blocked })
        };
        match change {
            Change::Revoke(user) => raised(user, self.standing(user).blocked),
            Change::Block(user) => raised(user, true),
            // Of the highest generation a login would be good for ever.
            Change::Unblock(user) if self.standing(user) == Standing::NOT_KNOWN => raised(user, false),
            Change::Unblock(user) => {
                Entry::User(user.clone(), Standing { blocked: false, ..self.standing(user) })
            }
            Change::RevokeSession(id) => Entry::Session(*id),
        }
    }

    /// These and one more.
    ///
    /// # Errors
    /// [`Full`].
    pub fn with(&self, entry: Entry) -> Result<Self, Full> {
        let mut more = self.clone();
        more.add(entry);
        if more.len() > MOST_ENTRIES { Err(Full) } else { Ok(more) }
    }

    /// All of them, in no order.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let users = self.users.iter().map(|(user, standing)| Entry::User(user.clone(), *standing));
        users.chain(self.sessions.iter().map(|id| Entry::Session(*id)))
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.users.len() + self.sessions.len()
    }

    /// Whether nobody was revoked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn add(&mut self, entry: Entry) {
        match entry {
            Entry::User(user, standing) => drop(self.users.insert(user, standing)),
            Entry::Session(id) => drop(self.sessions.insert(id)),
        }
    }
}

impl FromIterator<Entry> for Revocations {
    fn from_iter<I: IntoIterator<Item = Entry>>(entries: I) -> Self {
        let mut all = Self::default();
        entries.into_iter().for_each(|entry| all.add(entry));
        all
    }
}

impl Standing {
    /// Of somebody about whom there is a decision that cannot be read: no session is good, and no login.
    pub const NOT_KNOWN: Self = Self { generation: u64::MAX, blocked: true };

    fn raised(self, now: SystemTime) -> u64 {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros());
        let now = u64::try_from(now).unwrap_or(u64::MAX - 1);
        // Where it was not known, the clock alone says what is later than all that was.
        self.generation.checked_add(1).map_or(now, |next| next.max(now))
    }
}

impl FromStr for SessionId {
    type Err = NoSessionId;

    fn from_str(text: &str) -> Result<Self, NoSessionId> {
        let digits = text.as_bytes();
        if digits.len() != 32 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(NoSessionId);
        }
        u128::from_str_radix(text, 16).map(|id| Self(id.to_be_bytes())).map_err(|_| NoSessionId)
    }
}

impl fmt::Display for Change {
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
    use super::super::{Namespace, SessionPeer};
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn session(user: &str, generation: u64) -> Session {
        Session { generation, ..login(user, "p") }
    }

    fn after(revocations: &Revocations, change: &Change, now: u64) -> Revocations {
        revocations.with(revocations.entry(change, at(now))).unwrap()
    }

    #[test]
    fn a_user_loses_the_sessions_of_before_and_may_begin_another() {
        let none = Revocations::default();
        let revoked = after(&none, &Change::Revoke("alice".into()), 5);
        let now = revoked.standing(&"alice".into());
        assert_eq!(now, Standing { generation: 5_000_000, blocked: false });
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
        let peer = SessionPeer::Known { namespace: Namespace::File, user: "alice".into() };
        assert!(revoked.refuse(&Session { peer, ..session("alice", 0) }), "whoever vouched for it");
    }

    #[test]
    fn a_generation_rises_whatever_the_clock_says() {
        let mut revocations = Revocations::default();
        let mut last = 0;
        for now in [9, 9, 3, 0, 12] {
            revocations = after(&revocations, &Change::Revoke("alice".into()), now);
            let generation = revocations.standing(&"alice".into()).generation;
            assert!(generation > last, "{generation} after {last}");
            last = generation;
        }
    }

    #[test]
    fn a_block_ends_sessions_and_outlives_a_revoke() {
        let blocked = after(&Revocations::default(), &Change::Block("alice".into()), 1);
        assert!(blocked.standing(&"alice".into()).blocked && blocked.refuse(&session("alice", 999_999)));
        assert!(blocked.refuse(&session("alice", u64::MAX)), "a generation of the future is no way out");
        let revoked = after(&blocked, &Change::Revoke("alice".into()), 2);
        assert!(revoked.standing(&"alice".into()).blocked);
        let free = after(&revoked, &Change::Unblock("alice".into()), 3);
        assert_eq!(free.standing(&"alice".into()), Standing { generation: 2_000_000, blocked: false });
        assert!(free.refuse(&session("alice", 1_999_999)), "old sessions stay ended");
    }

    #[test]
    fn a_decision_that_could_not_be_read_is_followed_by_ones_that_can() {
        let closed = Revocations::from_iter([Entry::User("alice".into(), Standing::NOT_KNOWN)]);
        assert!(closed.refuse(&session("alice", u64::MAX - 1)));
        for change in [Change::Unblock("alice".into()), Change::Revoke("alice".into())] {
            let after = after(&closed, &change, 5);
            let blocked = matches!(change, Change::Revoke(_));
            assert_eq!(after.standing(&"alice".into()), Standing { generation: 5_000_000, blocked });
            assert!(after.refuse(&session("alice", 4_999_999)));
        }
        let free = after(&closed, &Change::Unblock("alice".into()), 5);
        let new = session("alice", free.standing(&"alice".into()).generation);
        assert!(!free.refuse(&new));
        assert!(after(&free, &Change::Revoke("alice".into()), 5).refuse(&new), "it can be revoked");
    }

    #[test]
    fn one_session_ends_alone() {
        let (one, other) = (session("alice", 0), session("alice", 0));
        let id = one.id.to_string().parse().unwrap();
        let revoked = after(&Revocations::default(), &Change::RevokeSession(id), 1);
        assert!(revoked.refuse(&one) && !revoked.refuse(&other));
        for wrong in ["", "12", &"g".repeat(32), &"0".repeat(33), &format!("+{}", "0".repeat(31))] {
            assert_eq!(wrong.parse::<SessionId>().err(), Some(NoSessionId), "{wrong}");
        }
    }

    #[test]
    fn there_is_a_limit_and_what_is_known_can_still_change() {
        let users =
            (0..MOST_ENTRIES).map(|n| Entry::User(n.to_string().as_str().into(), Standing::default()));
        let full: Revocations = users.collect();
        let more = full.entry(&Change::Block("one more".into()), at(1));
        assert_eq!(full.with(more).err(), Some(Full));
        let again = after(&full, &Change::Block("7".into()), 1);
        assert!(again.standing(&"7".into()).blocked);
        assert_eq!(again.entries().collect::<Revocations>(), again);
    }
}
