//! The users whose lines in the users file differ between replicas at this time.
//!
//! Owns: for how long a replica takes a session of a line that it does not have for one of a line to come, or
//! just gone. Must not know: sessions, streams, the users file. Invariants (docs/decisions.md#d12): the time
//! is bounded for each user, and a user who comes again and again does not prolong it; memory is bounded.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use keyward_etcd::identity::UserName;
use keyward_upstream::credentials::lock;

/// The time in which replicas come to the same users file: a copy, and a reload of each.
const SETTLES: Duration = Duration::from_secs(30);
/// The age up to which a session shows that another replica has the line now.
const FRESH: Duration = Duration::from_secs(60);
/// After this time without such a session, the next one begins another change of the file.
const FORGOTTEN: Duration = Duration::from_secs(120);
/// Users in memory. For further users no time is given.
const USERS: usize = 1024;

/// The users whose sessions of another line were seen here.
#[derive(Default)]
pub(super) struct UnsettledLines(Mutex<HashMap<UserName, UnsettledLine>>);

struct UnsettledLine {
    first: Instant,
    last: Instant,
}

impl UnsettledLines {
    /// True while the replicas may be of two minds about the user's line. `issued_at` is the time of issue of
    /// the session shown, in seconds of the Unix epoch.
    pub(super) fn is_unsettled(
        &self,
        user: &UserName,
        issued_at: u64,
        wall: SystemTime,
        now: Instant,
    ) -> bool {
        let wall = wall.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        // A session of a replica whose clock is ahead is fresh.
        if wall.saturating_sub(issued_at) > FRESH.as_secs() {
            return false;
        }
        let mut lines = lock(&self.0);
        let is_new = lines.get(user).is_none_or(|line| now.duration_since(line.last) > FORGOTTEN);
        if is_new {
            if lines.len() >= USERS {
                lines.retain(|_, line| now.duration_since(line.last) <= FORGOTTEN);
            }
            if lines.len() >= USERS && !lines.contains_key(user) {
                return false;
            }
            lines.insert(user.clone(), UnsettledLine { first: now, last: now });
            return true;
        }
        lines.get_mut(user).is_some_and(|line| {
            line.last = now;
            now.duration_since(line.first) < SETTLES
        })
    }

    /// Forgets all users, since this replica has another users file.
    pub(super) fn forget(&self) {
        lock(&self.0).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const ISSUED: u64 = 1_700_000_000;

    fn at(lines: &UnsettledLines, user: &str, age: u64, now: Instant) -> bool {
        let wall = UNIX_EPOCH + Duration::from_secs(ISSUED + age);
        lines.is_unsettled(&user.into(), ISSUED, wall, now)
    }

    #[test]
    fn a_user_who_comes_again_for_ever_has_the_time_once() {
        let (lines, start) = (UnsettledLines::default(), Instant::now());
        for second in 0..600 {
            assert_eq!(at(&lines, "alice", 0, start + second * SECOND), second < 30, "{second}");
        }
        assert!(at(&lines, "bob", 0, start + 600 * SECOND), "each user by itself");
        assert!(at(&lines, "alice", 0, start + 721 * SECOND), "another change, after two quiet minutes");
        lines.forget();
        assert!(at(&lines, "alice", 0, start + 760 * SECOND), "another file here");
    }

    #[test]
    fn an_old_session_tells_nothing_of_other_replicas() {
        let (lines, start) = (UnsettledLines::default(), Instant::now());
        assert!(!at(&lines, "alice", 61, start));
        assert!(at(&lines, "alice", 60, start + 40 * SECOND), "the old one began no time");
    }

    #[test]
    fn users_in_memory_are_bounded() {
        let (lines, start) = (UnsettledLines::default(), Instant::now());
        let full = (0..USERS).all(|n| at(&lines, &format!("user{n}"), 0, start));
        assert!(full && !at(&lines, "one more", 0, start + SECOND));
        assert!(at(&lines, "user7", 0, start + SECOND), "the others keep their time");
        assert!(at(&lines, "one more", 0, start + 200 * SECOND), "room again");
    }
}
