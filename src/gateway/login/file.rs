//! The users file at work: passwords compared off the shards, and remembered.
//!
//! Owns: the file as it is now, how many comparisons are made at once, what they said. Must not know: where the file
//! lies, what else could check a password.
//! Invariants: what is remembered counts for the line that it was compared with and no other, so that a reload costs
//! those whose line changed a comparison, and nobody else anything; a comparison runs to its end whoever leaves.

use std::sync::Arc;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::sync::Semaphore;

use crate::gateway::login::sources::{Denied, Login};
use crate::identity::UserName;
use crate::published::Published;
use crate::upstream::credential::Fingerprint;
use crate::users::{LineMark, Users};

/// Comparisons at a time: each takes a core for some 30 ms, and up to 64 MiB.
const AT_A_TIME: usize = 2;
const ACCEPTED: u64 = 10_000;
const REFUSED: u64 = 1_000;

/// The users file of this process.
pub(super) struct UsersFile {
    users: Arc<Published<Users>>,
    accepted: Cache<Fingerprint, LineMark>,
    /// With the line that refused it; none where there was no line.
    refused: Cache<Fingerprint, Option<LineMark>>,
    turns: Arc<Semaphore>,
}

impl UsersFile {
    pub(super) fn new(users: Arc<Published<Users>>) -> Self {
        Self {
            users,
            accepted: cache(ACCEPTED),
            refused: cache(REFUSED),
            turns: Arc::new(Semaphore::new(AT_A_TIME)),
        }
    }

    /// Whether the file has this user.
    pub(super) fn knows(&self, user: &UserName) -> bool {
        self.users.load().line(user).is_some()
    }

    /// What is known of this password already.
    pub(super) fn recall(&self, login: &Login) -> Option<Result<LineMark, Denied>> {
        let line = self.users.load().line(&login.user);
        if let (Some(line), Some(accepted)) = (line, self.accepted.get(&login.fingerprint))
            && line == accepted
        {
            return Some(Ok(line));
        }
        let refused = self.refused.get(&login.fingerprint).is_some_and(|refused| refused == line);
        refused.then_some(Err(Denied::WrongPassword))
    }

    /// Compares it.
    pub(super) async fn compare(&self, login: &Login) -> Result<LineMark, Denied> {
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|_closed| Denied::Untold)?;
        let users = self.users.load_full();
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
            (Ok(_), line) => {
                self.refused.insert(login.fingerprint, line);
                Err(Denied::WrongPassword)
            }
            (Err(_panicked), _) => Err(Denied::Untold),
        }
    }
}

fn cache<V: Clone + Send + Sync + 'static>(limit: u64) -> Cache<Fingerprint, V> {
    Cache::builder().max_capacity(limit).eviction_policy(EvictionPolicy::lru()).build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;
    use crate::upstream::credential::{CredentialSettings, Credentials};
    use crate::upstream::membership::ControlChannels;
    use crate::users::{Cost, hash};

    const CHEAP: Cost = Cost { memory: 8, passes: 1 };

    #[tokio::test]
    async fn a_flood_of_wrong_passwords_is_forgotten_and_no_right_one() {
        let right = Secret::new("right".to_owned());
        let lines = format!("alice:{}\n", hash(&right, CHEAP).unwrap());
        let users = Arc::new(Published::new(Users::parse(lines.as_bytes()).unwrap()));
        let file = UsersFile::new(users);
        let (credentials, _control) =
            Credentials::new(CredentialSettings::default(), ControlChannels::default()).unwrap();
        let login = |user: &str, password: &str| {
            let (user, password) = (UserName::from(user), Secret::new(password.to_owned()));
            let fingerprint = credentials.fingerprint(&user, &password);
            Login { user, password: Arc::new(password), fingerprint }
        };
        let alice = login("alice", "right");
        let line = file.compare(&alice).await.unwrap();
        for n in 0..3 * REFUSED {
            let wrong = login(&format!("user{n}"), "guess");
            assert_eq!(file.compare(&wrong).await, Err(Denied::WrongPassword));
            assert_eq!(file.recall(&wrong), Some(Err(Denied::WrongPassword)));
        }
        file.refused.run_pending_tasks();
        assert!(file.refused.entry_count() <= REFUSED, "{}", file.refused.entry_count());
        assert_eq!(file.recall(&alice), Some(Ok(line)));
    }
}
