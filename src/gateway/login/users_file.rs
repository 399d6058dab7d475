//! The users file as a password source: passwords compared off the shards, and remembered if right.
//!
//! Owns: the number of concurrent comparisons, the memory of accepted passwords. Must not know: the file's
//! path, the version of the file in force, the other sources.
//! Invariants: an accepted password is remembered only for the line compared with, so a reload costs a new
//! comparison only for users with a changed line; a comparison runs to the end after the caller has left.

use std::sync::Arc;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::sync::Semaphore;

use crate::credentials::PasswordFingerprint;
use crate::gateway::login::password_check::{LoginCredentials, LoginDenial};
use crate::users::{UserLineMark, UserPasswordHashes};

/// Concurrent comparisons: each takes a core for some 30 ms and up to 64 MiB.
const AT_A_TIME: usize = 2;
const ACCEPTED: u64 = 10_000;

/// The users file of this process.
pub(super) struct UsersFileSource {
    accepted: Cache<PasswordFingerprint, UserLineMark>,
    turns: Arc<Semaphore>,
}

impl UsersFileSource {
    pub(super) fn new() -> Self {
        let accepted = Cache::builder().max_capacity(ACCEPTED).eviction_policy(EvictionPolicy::lru()).build();
        Self { accepted, turns: Arc::new(Semaphore::new(AT_A_TIME)) }
    }

    /// The user's line among `users`, if the line has accepted this password before.
    pub(super) fn recall(
        &self,
        users: &UserPasswordHashes,
        login: &LoginCredentials,
    ) -> Option<UserLineMark> {
        let line = users.line(&login.user)?;
        (self.accepted.get(&login.fingerprint)? == line).then_some(line)
    }

    /// Compares the password with the user's line.
    pub(super) async fn compare(
        &self,
        users: &UserPasswordHashes,
        login: &LoginCredentials,
    ) -> Result<UserLineMark, LoginDenial> {
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|_closed| LoginDenial::Untold)?;
        let line = users.line(&login.user);
        let comparison = users.comparison(&login.user);
        let password = Arc::clone(&login.password);
        let (accepted, fingerprint) = (self.accepted.clone(), login.fingerprint);
        let compared = tokio::task::spawn_blocking(move || {
            // An unknown user costs a comparison too.
            let matches = comparison.matches(&password);
            drop(turn);
            // Remembered here: a caller may have stopped waiting, and the next try counts on the result.
            let line = line.filter(|_| matches)?;
            accepted.insert(fingerprint, line);
            Some(line)
        });
        match compared.await {
            Ok(Some(line)) => Ok(line),
            Ok(None) => Err(LoginDenial::WrongPassword),
            Err(_panicked) => Err(LoginDenial::Untold),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::credentials::{CredentialSettings, Credentials};
    use crate::identity::UserName;
    use crate::members::membership::ControlChannels;
    use crate::secret::Secret;
    use crate::users::{Cost, hash};

    const CHEAP: Cost = Cost { memory: 8, passes: 1 };

    #[tokio::test]
    async fn a_flood_of_wrong_passwords_is_not_kept_and_no_right_one_is_forgotten() {
        let right = Secret::new("right".to_owned());
        let lines = format!("alice:{}\n", hash(&right, CHEAP).unwrap());
        let users = UserPasswordHashes::parse(lines.as_bytes()).unwrap();
        let file = UsersFileSource::new();
        let (credentials, _control) =
            Credentials::new(CredentialSettings::default(), ControlChannels::default()).unwrap();
        let login = |user: &str, password: &str| {
            let (user, password) = (UserName::from(user), Secret::new(password.to_owned()));
            let fingerprint = credentials.fingerprint(&user, &password);
            LoginCredentials { user, password: Arc::new(password), fingerprint }
        };
        let alice = login("alice", "right");
        let line = file.compare(&users, &alice).await.unwrap();
        for n in 0..1000 {
            let wrong = login(&format!("user{n}"), "guess");
            assert_eq!(file.compare(&users, &wrong).await, Err(LoginDenial::WrongPassword));
            assert_eq!(file.recall(&users, &wrong), None);
        }
        file.accepted.run_pending_tasks();
        assert_eq!(file.accepted.entry_count(), 1);
        assert_eq!(file.recall(&users, &alice), Some(line));
    }

    #[tokio::test]
    async fn a_comparison_is_remembered_although_the_caller_has_left() {
        let right = Secret::new("right".to_owned());
        let lines = format!("alice:{}\n", hash(&right, Cost { memory: 16 * 1024, passes: 3 }).unwrap());
        let users = UserPasswordHashes::parse(lines.as_bytes()).unwrap();
        let file = UsersFileSource::new();
        let (credentials, _control) =
            Credentials::new(CredentialSettings::default(), ControlChannels::default()).unwrap();
        let user = UserName::from("alice");
        let fingerprint = credentials.fingerprint(&user, &right);
        let alice = LoginCredentials { user, password: Arc::new(right), fingerprint };
        let left = tokio::time::timeout(Duration::ZERO, file.compare(&users, &alice)).await;
        assert!(left.is_err(), "the comparison takes longer than nothing");
        let all_turns = u32::try_from(AT_A_TIME).unwrap();
        drop(file.turns.acquire_many(all_turns).await.unwrap());
        while file.recall(&users, &alice).is_none() {
            tokio::task::yield_now().await;
        }
    }
}
