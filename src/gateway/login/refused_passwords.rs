//! Passwords refused lately.
//!
//! Owns: the time for which the same password is refused again without asking a source. Must not know: the
//! source that refused.
//! Invariants: the time is the same for every source and for unknown users, so the time does not reveal the
//! source that knows a user; an entry holds only for the user's line in the users file at the time, so a
//! password made right by a reload is right at once; a refusal of a blocked user is not remembered once the
//! user is unblocked.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::time::Duration;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::time::Instant;

use crate::credentials::PasswordFingerprint;
use crate::gateway::login::password_check::{LoginCredentials, LoginDenial, PasswordJudge};
use crate::identity::UserName;
use crate::users::UserLineMark;

/// Entries in memory, of some 200 bytes each whatever the length of the names. The least recently used are
/// evicted first.
const REMEMBERED: u64 = 4096;
/// Lifetime of an entry after the first refusal; each repetition doubles the lifetime, up to
/// [`LONGEST_WAIT`]. The limit is short, since an operator may make the password right at etcd.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Passwords refused lately. Clones share the state.
#[derive(Clone)]
pub(super) struct RefusedPasswords {
    entries: Cache<(PasswordFingerprint, PasswordJudge), RefusedPasswordEntry>,
    hasher: RandomState,
}

#[derive(Clone, Copy)]
struct RefusedPasswordEntry {
    /// Hash of the user name.
    user: u64,
    why: LoginDenial,
    line: Option<UserLineMark>,
    until: Instant,
    wait: Duration,
}

impl RefusedPasswords {
    pub(super) fn nothing() -> Self {
        let entries =
            Cache::builder().max_capacity(REMEMBERED).eviction_policy(EvictionPolicy::lru()).build();
        Self { entries, hasher: RandomState::new() }
    }

    /// The reason of an earlier refusal of this login, if the refusal is still in force `now`. `line` marks
    /// the user's line in the users file.
    pub(super) fn recall(
        &self,
        login: &LoginCredentials,
        asked: PasswordJudge,
        line: Option<UserLineMark>,
        now: Instant,
    ) -> Option<LoginDenial> {
        let entry = self.entries.get(&(login.fingerprint, asked))?;
        (entry.line == line && now < entry.until).then_some(entry.why)
    }

    /// Records a refusal answered `now`.
    pub(super) fn note(
        &self,
        login: &LoginCredentials,
        asked: PasswordJudge,
        line: Option<UserLineMark>,
        why: LoginDenial,
        now: Instant,
    ) {
        let key = (login.fingerprint, asked);
        let before = self.entries.get(&key).filter(|before| before.line == line);
        let wait = before.map_or(FIRST_WAIT, |before| (before.wait * 2).min(LONGEST_WAIT));
        let user = self.hasher.hash_one(&login.user);
        self.entries.insert(key, RefusedPasswordEntry { user, why, line, until: now + wait, wait });
    }

    /// Forgets the refusal of a password that proved right.
    pub(super) fn forget(&self, login: &LoginCredentials) {
        self.entries.invalidate(&(login.fingerprint, PasswordJudge::Sources));
    }

    /// Forgets all refusals: the sources or the cluster have changed.
    pub(super) fn forget_all(&self) {
        self.entries.invalidate_all();
    }

    /// Forgets all refusals of this user, since a password may be right now.
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
    use crate::credentials::{CredentialSettings, Credentials};
    use crate::members::membership::ControlChannels;
    use crate::secret::Secret;

    fn login(user: &str, password: &str) -> LoginCredentials {
        let settings = CredentialSettings::default();
        let (credentials, _control) = Credentials::new(settings, ControlChannels::default()).unwrap();
        let (user, password) = (UserName::from(user), Secret::new(password.to_owned()));
        let fingerprint = credentials.fingerprint(&user, &password);
        LoginCredentials { user, password: Arc::new(password), fingerprint }
    }

    #[test]
    fn the_same_password_is_refused_ever_longer_and_is_looked_at_in_between() {
        let (refused, alice, start) = (RefusedPasswords::nothing(), login("alice", "wrong"), Instant::now());
        let mut looks = Vec::new();
        for second in 0..120 {
            let now = start + Duration::from_secs(second);
            if refused.recall(&alice, PasswordJudge::Sources, None, now).is_none() {
                looks.push(second);
                refused.note(&alice, PasswordJudge::Sources, None, LoginDenial::WrongPassword, now);
            }
        }
        assert_eq!(looks, [0, 1, 3, 7, 15, 31, 61, 91]);
        refused.forget(&alice);
        assert_eq!(refused.recall(&alice, PasswordJudge::Sources, None, start), None);
    }

    #[test]
    fn what_another_line_or_a_block_refused_is_not_what_this_one_says() {
        let (refused, alice, now) = (RefusedPasswords::nothing(), login("alice", "wrong"), Instant::now());
        refused.note(&alice, PasswordJudge::Nobody, Some(UserLineMark(1)), LoginDenial::WrongPassword, now);
        assert_eq!(refused.recall(&alice, PasswordJudge::Sources, Some(UserLineMark(1)), now), None);
        refused.note(&alice, PasswordJudge::Sources, Some(UserLineMark(1)), LoginDenial::WrongPassword, now);
        let of = |line| refused.recall(&alice, PasswordJudge::Sources, line, now);
        assert_eq!(of(Some(UserLineMark(1))), Some(LoginDenial::WrongPassword));
        assert_eq!((of(Some(UserLineMark(2))), of(None)), (None, None));
    }

    #[test]
    fn a_change_at_etcd_makes_its_own_user_forgotten_only() {
        let (refused, now) = (RefusedPasswords::nothing(), Instant::now());
        let (alice, bob) = (login("alice", "wrong"), login("bob", "wrong"));
        for login in [&alice, &bob] {
            refused.note(login, PasswordJudge::Sources, None, LoginDenial::NoPassword, now);
        }
        refused.forget_user(&alice.user);
        assert_eq!(refused.recall(&alice, PasswordJudge::Sources, None, now), None);
        assert_eq!(refused.recall(&bob, PasswordJudge::Sources, None, now), Some(LoginDenial::NoPassword));
    }
    #[test]
    fn a_flood_of_wrong_passwords_takes_no_more_memory_than_there_is() {
        let (refused, now) = (RefusedPasswords::nothing(), Instant::now());
        let settings = CredentialSettings::default();
        let (credentials, _control) = Credentials::new(settings, ControlChannels::default()).unwrap();
        let guess = Secret::new("guess".to_owned());
        for n in 0..3 * REMEMBERED {
            let user = UserName::from(format!("user{n}").as_str());
            let fingerprint = credentials.fingerprint(&user, &guess);
            let wrong = LoginCredentials { user, password: Arc::new(guess.clone()), fingerprint };
            refused.note(&wrong, PasswordJudge::Sources, None, LoginDenial::WrongPassword, now);
        }
        // A single round of moka's housekeeping may stop before all work is done.
        let tidied = || (0..1000).for_each(|_| refused.entries.run_pending_tasks());
        tidied();
        assert!(refused.entries.entry_count() <= REMEMBERED, "{}", refused.entries.entry_count());
        refused.forget_all();
        tidied();
        assert_eq!(refused.entries.entry_count(), 0);
    }
}
