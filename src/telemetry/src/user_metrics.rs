//! Metrics by etcd user: rate, errors and duration of the calls of users with a proved identity.
//!
//! Owns: the names, the bound on the number of users, and a shard's memory of the users seen. Must not know:
//! credentials, calls. Invariants: without `admin.user_metrics` a call costs one comparison; at most that
//! number of users have metrics of their own, and a user keeps these metrics; the metrics stand on the admin
//! address only, since they name users.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use prometheus_client::registry::Registry;

use crate::call_figures::{CallFamilies, CallFigures};

/// The label of all users without metrics of their own.
const OTHERS: &str = "(others)";
/// The label of calls without a proved etcd user: calls of a cluster without auth, and refused callers.
const NOBODY: &str = "";

/// Metrics by etcd user.
pub struct UserMetrics {
    calls: CallFamilies,
    /// The users with metrics of their own.
    users: Mutex<HashMap<Arc<str>, Arc<CallFigures>>>,
    others: OnceLock<CallFigures>,
    nobody: OnceLock<CallFigures>,
}

/// The metrics of users, as remembered by one shard.
pub struct UserFigures {
    limit: usize,
    /// Users with metrics of their own.
    known: RefCell<HashMap<Arc<str>, Arc<CallFigures>>>,
    /// True once the process has as many users as allowed, all of them in `known`.
    knows_all: Cell<bool>,
}

impl UserMetrics {
    /// Registers the metrics.
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let calls = CallFamilies::registered(registry, "user");
        Self { calls, users: Mutex::default(), others: OnceLock::new(), nobody: OnceLock::new() }
    }

    fn of_others(&self) -> &CallFigures {
        self.others.get_or_init(|| self.calls.of(&OTHERS.into()))
    }

    fn of_nobody(&self) -> &CallFigures {
        self.nobody.get_or_init(|| self.calls.of(&NOBODY.into()))
    }
}

impl UserFigures {
    /// A shard's memory for at most `limit` users; 0 turns the metrics off.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, known: RefCell::default(), knows_all: Cell::default() }
    }

    /// Counts a finished call of `user`, whose identity is proved; `None` for other callers. `count` is not
    /// called without metrics by user.
    pub fn call_ended(&self, metrics: &UserMetrics, user: Option<&str>, count: impl FnOnce(&CallFigures)) {
        if self.limit == 0 {
            return;
        }
        let Some(user) = user else { return count(metrics.of_nobody()) };
        if !self.known.borrow().contains_key(user) && !self.knows_all.get() {
            self.learn(metrics, user);
        }
        match self.known.borrow().get(user) {
            Some(figures) => count(figures),
            None => count(metrics.of_others()),
        }
    }

    /// Remembers the metrics of `user`, or of all users if no user joins any more.
    fn learn(&self, metrics: &UserMetrics, user: &str) {
        let mut users = metrics.users.lock().unwrap_or_else(PoisonError::into_inner);
        if !users.contains_key(user) && users.len() >= self.limit {
            self.known.borrow_mut().clone_from(&users);
            self.knows_all.set(true);
            return;
        }
        let name: Arc<str> = user.into();
        let made = || Arc::new(metrics.calls.of(&name));
        let figures = users.entry(Arc::clone(&name)).or_insert_with(made);
        self.known.borrow_mut().insert(Arc::clone(&name), Arc::clone(figures));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn the_first_users_have_metrics_of_their_own_and_the_others_share() {
        let mut registry = Registry::default();
        let metrics = UserMetrics::registered(&mut registry);
        let shards = [UserFigures::new(2), UserFigures::new(2)];
        let call = |shard: usize, user: Option<&str>| {
            let count =
                |figures: &CallFigures| figures.call_ended(0, || "OK", Some(Duration::from_millis(2)));
            shards[shard].call_ended(&metrics, user, count);
        };
        for (shard, user) in [(0, "a"), (1, "b"), (0, "c"), (1, "d"), (0, "b"), (1, "a"), (0, "d")] {
            call(shard, Some(user));
        }
        call(0, None);
        call(1, None);
        let mut text = String::new();
        encode(&mut text, &registry).expect("text");
        for (user, count) in [("a", 2), ("b", 2), ("(others)", 3), ("", 2)] {
            let calls = format!("user_calls_total{{user=\"{user}\",code=\"OK\"}} {count}\n");
            let times = format!("user_call_duration_seconds_count{{user=\"{user}\"}} {count}\n");
            assert!(text.contains(&calls) && text.contains(&times), "{user}: {text}");
        }
        assert!(!text.contains("\"c\"") && !text.contains("\"d\""), "{text}");
    }

    #[test]
    fn without_a_limit_nothing_is_counted() {
        let mut registry = Registry::default();
        let metrics = UserMetrics::registered(&mut registry);
        UserFigures::new(0).call_ended(&metrics, None, |_| unreachable!("the metrics are off"));
    }
}
