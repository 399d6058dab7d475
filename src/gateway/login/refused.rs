//! Passwords that were refused lately.
//!
//! Owns: for how long the same one is refused again without asking anybody. Must not know: who refused it.
//! Invariants: it is the same for every source, and for names that nobody knows, so that it does not tell whose a user is;
//! what is remembered holds for the user's line in the users file as it was then, so that what a reload makes right is
//! right at once; what was told of a user who is blocked is not remembered for one who is not.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::time::Duration;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::time::Instant;

use crate::gateway::login::sources::{Denied, Login};
use crate::identity::UserName;
use crate::upstream::credential::Fingerprint;
use crate::users::LineMark;

/// Some 200 bytes each, however long the names are. Those that nobody tries go first.
const REMEMBERED: u64 = 4096;
/// After the first refusal, and at most: the password may become right, since etcd's operator can set it.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Who may be asked about a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Asked {
    /// The sources.
    Sources,
    /// Nobody: the user is blocked.
    Nobody,
}

/// What was refused lately. Clones are the same memory.
#[derive(Clone)]
pub(super) struct Refused {
    entries: Cache<(Fingerprint, Asked), Entry>,
    hasher: RandomState,
}

#[derive(Clone, Copy)]
struct Entry {
    /// Stands for the user.
    user: u64,
    why: Denied,
    line: Option<LineMark>,
    until: Instant,
    wait: Duration,
}

impl Refused {
    pub(super) fn nothing() -> Self {
        let entries =
            Cache::builder().max_capacity(REMEMBERED).eviction_policy(EvictionPolicy::lru()).build();
        Self { entries, hasher: RandomState::new() }
    }

    /// Why this one is refused `now`, by what was said of it before. `line` is the user's in the users file.
    pub(super) fn recall(
        &self,
        login: &Login,
        asked: Asked,
        line: Option<LineMark>,
        now: Instant,
    ) -> Option<Denied> {
        let entry = self.entries.get(&(login.fingerprint, asked))?;
        (entry.line == line && now < entry.until).then_some(entry.why)
    }

    /// It is told `now` that it is refused.
    pub(super) fn note(
        &self,
        login: &Login,
        asked: Asked,
        line: Option<LineMark>,
        why: Denied,
        now: Instant,
    ) {
        let key = (login.fingerprint, asked);
        let before = self.entries.get(&key).filter(|before| before.line == line);
        let wait = before.map_or(FIRST_WAIT, |before| (before.wait * 2).min(LONGEST_WAIT));
        let user = self.hasher.hash_one(&login.user);
        self.entries.insert(key, Entry { user, why, line, until: now + wait, wait });
    }

    /// It was right.
    pub(super) fn forget(&self, login: &Login) {
        self.entries.invalidate(&(login.fingerprint, Asked::Sources));
    }

    /// Others say now what is right.
    pub(super) fn forget_all(&self) {
        self.entries.invalidate_all();
    }

    /// What was said of this user's passwords may be true no more.
    pub(super) fn forget_user(&self, user: &UserName) {
        let user = self.hasher.hash_one(user);
        for (key, entry) in &self.entries {
            if entry.user == user {
                self.entries.invalidate(key.as_ref());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::secret::Secret;
    use crate::upstream::credential::{CredentialSettings, Credentials};
    use crate::upstream::membership::ControlChannels;

    fn login(user: &str, password: &str) -> Login {
        let settings = CredentialSettings::default();
        let (credentials, _control) = Credentials::new(settings, ControlChannels::default()).unwrap();
        let (user, password) = (UserName::from(user), Secret::new(password.to_owned()));
        let fingerprint = credentials.fingerprint(&user, &password);
        Login { user, password: Arc::new(password), fingerprint }
    }

    #[test]
    fn the_same_password_is_refused_ever_longer_and_is_looked_at_in_between() {
        let (refused, alice, start) = (Refused::nothing(), login("alice", "wrong"), Instant::now());
        let mut looks = Vec::new();
        for second in 0..120 {
            let now = start + Duration::from_secs(second);
            if refused.recall(&alice, Asked::Sources, None, now).is_none() {
                looks.push(second);
                refused.note(&alice, Asked::Sources, None, Denied::WrongPassword, now);
            }
        }
        assert_eq!(looks, [0, 1, 3, 7, 15, 31, 61, 91]);
        refused.forget(&alice);
        assert_eq!(refused.recall(&alice, Asked::Sources, None, start), None);
    }

    #[test]
    fn what_another_line_or_a_block_refused_is_not_what_this_one_says() {
        let (refused, alice, now) = (Refused::nothing(), login("alice", "wrong"), Instant::now());
        refused.note(&alice, Asked::Nobody, Some(LineMark(1)), Denied::WrongPassword, now);
        assert_eq!(refused.recall(&alice, Asked::Sources, Some(LineMark(1)), now), None);
        refused.note(&alice, Asked::Sources, Some(LineMark(1)), Denied::WrongPassword, now);
        let of = |line| refused.recall(&alice, Asked::Sources, line, now);
        assert_eq!(of(Some(LineMark(1))), Some(Denied::WrongPassword));
        assert_eq!((of(Some(LineMark(2))), of(None)), (None, None));
    }

    #[test]
    fn a_change_at_etcd_makes_its_own_user_forgotten_only() {
        let (refused, now) = (Refused::nothing(), Instant::now());
        let (alice, bob) = (login("alice", "wrong"), login("bob", "wrong"));
        for login in [&alice, &bob] {
            refused.note(login, Asked::Sources, None, Denied::NoPassword, now);
        }
        refused.forget_user(&alice.user);
        assert_eq!(refused.recall(&alice, Asked::Sources, None, now), None);
        assert_eq!(refused.recall(&bob, Asked::Sources, None, now), Some(Denied::NoPassword));
    }
    #[test]
    fn a_flood_of_wrong_passwords_takes_no_more_memory_than_there_is() {
        let (refused, now) = (Refused::nothing(), Instant::now());
        let settings = CredentialSettings::default();
        let (credentials, _control) = Credentials::new(settings, ControlChannels::default()).unwrap();
        let guess = Secret::new("guess".to_owned());
        for n in 0..3 * REMEMBERED {
            let user = UserName::from(format!("user{n}").as_str());
            let fingerprint = credentials.fingerprint(&user, &guess);
            let wrong = Login { user, password: Arc::new(guess.clone()), fingerprint };
            refused.note(&wrong, Asked::Sources, None, Denied::WrongPassword, now);
        }
        // One turn of housekeeping ends after a while, done or not.
        let tidied = || (0..1000).for_each(|_| refused.entries.run_pending_tasks());
        tidied();
        assert!(refused.entries.entry_count() <= REMEMBERED, "{}", refused.entries.entry_count());
        refused.forget_all();
        tidied();
        assert_eq!(refused.entries.entry_count(), 0);
    }
}
