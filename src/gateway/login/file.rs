//! The users file at work: passwords compared off the shards, and remembered if they were right.
//!
//! Owns: the file as it is now, how many comparisons are made at once, what they accepted. Must not know: where the file
//! lies, what else could check a password.
//! Invariants: what is remembered counts for the line that it was compared with and no other, so that a reload costs
//! those whose line changed a comparison, and nobody else anything; a comparison runs to its end whoever leaves.

use std::sync::Arc;

use arc_swap::ArcSwap;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::sync::Semaphore;

use crate::gateway::login::sources::{Denied, Login};
use crate::identity::UserName;
use crate::upstream::credential::Fingerprint;
use crate::users::{LineMark, Users};

/// Comparisons at a time: each takes a core for some 30 ms, and up to 64 MiB.
const AT_A_TIME: usize = 2;
const ACCEPTED: u64 = 10_000;

/// The users file of this process.
pub(super) struct UsersFile {
    users: Arc<ArcSwap<Users>>,
    accepted: Cache<Fingerprint, LineMark>,
    turns: Arc<Semaphore>,
}

impl UsersFile {
    pub(super) fn new(users: Arc<ArcSwap<Users>>) -> Self {
        let accepted = Cache::builder().max_capacity(ACCEPTED).eviction_policy(EvictionPolicy::lru()).build();
        Self { users, accepted, turns: Arc::new(Semaphore::new(AT_A_TIME)) }
    }

    /// The user's line, if the file has this user.
    pub(super) fn line(&self, user: &UserName) -> Option<LineMark> {
        self.users.load().line(user)
    }

    /// The user's line, if it accepted this password already.
    pub(super) fn recall(&self, login: &Login) -> Option<LineMark> {
        let line = self.line(&login.user)?;
        (self.accepted.get(&login.fingerprint)? == line).then_some(line)
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
            (Ok(_), _) => Err(Denied::WrongPassword),
            (Err(_panicked), _) => Err(Denied::Untold),
        }
    }
}
