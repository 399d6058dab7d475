//! The users file at work: passwords compared off the shards, and remembered if they were right.
//!
//! Owns: how many comparisons are made at once, what they accepted. Must not know: where the file lies, which one holds,
//! what else could check a password.
//! Invariants: what is remembered counts for the line that it was compared with and no other, so that a reload costs
//! those whose line changed a comparison, and nobody else anything; a comparison runs to its end whoever leaves.

use std::sync::Arc;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::sync::Semaphore;

use crate::gateway::login::sources::{Denied, Login};
use crate::upstream::credential::Fingerprint;
use crate::users::{LineMark, Users};

/// Comparisons at a time: each takes a core for some 30 ms, and up to 64 MiB.
const AT_A_TIME: usize = 2;
const ACCEPTED: u64 = 10_000;

/// The users file of this process.
pub(super) struct UsersFile {
    accepted: Cache<Fingerprint, LineMark>,
    turns: Arc<Semaphore>,
}

impl UsersFile {
    pub(super) fn new() -> Self {
        let accepted = Cache::builder().max_capacity(ACCEPTED).eviction_policy(EvictionPolicy::lru()).build();
        Self { accepted, turns: Arc::new(Semaphore::new(AT_A_TIME)) }
    }

    /// The user's line, where these are the users, if it accepted this password already.
    pub(super) fn recall(&self, users: &Users, login: &Login) -> Option<LineMark> {
        let line = users.line(&login.user)?;
        (self.accepted.get(&login.fingerprint)? == line).then_some(line)
    }

    /// Compares it.
    pub(super) async fn compare(&self, users: &Users, login: &Login) -> Result<LineMark, Denied> {
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|_closed| Denied::Untold)?;
        let line = users.line(&login.user);
        let comparison = users.comparison(&login.user);
        let password = Arc::clone(&login.password);
        let compared = tokio::task::spawn_blocking(move || {
            let matches = comparison.matches(&password);
            drop(turn);
            matches
        });
        match (compared.await, line) {
            (Ok(true), Some(line)) => {
                self.accepted.insert(login.fingerprint, line);
                Ok(line)
            }
            (Ok(_), _) => Err(Denied::WrongPassword),
            (Err(_panicked), _) => Err(Denied::Untold),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::UserName;
    use crate::secret::Secret;
    use crate::upstream::credential::{CredentialSettings, Credentials};
    use crate::upstream::membership::ControlChannels;
    use crate::users::{Cost, hash};

    const CHEAP: Cost = Cost { memory: 8, passes: 1 };

    #[tokio::test]
    async fn a_flood_of_wrong_passwords_is_not_kept_and_no_right_one_is_forgotten() {
        let right = Secret::new("right".to_owned());
        let lines = format!("alice:{}\n", hash(&right, CHEAP).unwrap());
        let users = Users::parse(lines.as_bytes()).unwrap();
        let file = UsersFile::new();
        let (credentials, _control) =
            Credentials::new(CredentialSettings::default(), ControlChannels::default()).unwrap();
        let login = |user: &str, password: &str| {
            let (user, password) = (UserName::from(user), Secret::new(password.to_owned()));
            let fingerprint = credentials.fingerprint(&user, &password);
            Login { user, password: Arc::new(password), fingerprint }
        };
        let alice = login("alice", "right");
        let line = file.compare(&users, &alice).await.unwrap();
        for n in 0..1000 {
            let wrong = login(&format!("user{n}"), "guess");
            assert_eq!(file.compare(&users, &wrong).await, Err(Denied::WrongPassword));
            assert_eq!(file.recall(&users, &wrong), None);
        }
        file.accepted.run_pending_tasks();
        assert_eq!(file.accepted.entry_count(), 1);
        assert_eq!(file.recall(&users, &alice), Some(line));
    }
}
