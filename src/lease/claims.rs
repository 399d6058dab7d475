//! Which locks and campaigns are being waited for on this process, and what failed ones left behind.
//!
//! Owns: the register of tickets, shared by all shards. Must not know: members, how a key is removed.
//! Invariants (rules 28): a removal begins only where no call waits with that ticket; a call that succeeds settles what
//! others with its ticket left; who arrives during a removal waits for its end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::upstream::send::As;

/// The tickets that are waited for or not yet removed, by key.
#[derive(Default)]
pub struct Claims {
    entries: Mutex<HashMap<Bytes, Entry>>,
}

#[derive(Default)]
struct Entry {
    /// Calls that wait with this ticket.
    calls: usize,
    /// What the failed ones left.
    debt: Option<Debt>,
    /// Tells the end of the removal that is under way.
    removing: Option<Arc<Notify>>,
}

/// A key that may have to be removed.
#[derive(Clone)]
pub struct Debt {
    /// As whom.
    pub whom: As,
    /// The create revision at which it was first seen behind others. From there on it is the failed call's own.
    pub since: Option<i64>,
    /// Nothing that was sent can still create it.
    pub settled: bool,
}

/// How a call with a ticket ended.
pub enum Left {
    /// The client was told that the lock is its own.
    Kept,
    /// There is no key of this call.
    Nothing,
    /// There may be one.
    Owing(Debt),
}

/// A removal that is under way. When dropped, what is left in it is anybody's to settle.
pub struct Removal<'a> {
    claims: &'a Claims,
    key: &'a Bytes,
    /// What is to be removed; none once it was.
    pub debt: Option<Debt>,
}

impl Claims {
    /// Registers a call that waits with this key, once no removal of it is under way. Cancel-safe.
    pub async fn arrive(&self, key: &Bytes) {
        loop {
            let removing = {
                let mut entries = self.entries();
                let entry = entries.entry(key.clone()).or_default();
                match &entry.removing {
                    // Told of every end from here on, polled or not.
                    Some(removing) => Arc::clone(removing).notified_owned(),
                    None => {
                        entry.calls += 1;
                        return;
                    }
                }
            };
            removing.await;
        }
    }

    /// A call leaves. True where something is to be removed now.
    pub fn leave(&self, key: &Bytes, how: Left) -> bool {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(key) else { return false };
        entry.calls -= 1;
        match how {
            Left::Kept => entry.debt = None,
            Left::Nothing => {}
            Left::Owing(debt) => entry.debt = Some(debt.and(entry.debt.take())),
        }
        let due = entry.calls == 0 && entry.debt.is_some();
        remove_idle(&mut entries, key);
        due
    }

    /// Begins to remove the key; none where a call waits with it, or nothing is left to remove.
    pub fn removal<'a>(&'a self, key: &'a Bytes) -> Option<Removal<'a>> {
        let mut entries = self.entries();
        let entry = entries.get_mut(key)?;
        if entry.calls > 0 || entry.removing.is_some() {
            return None;
        }
        let debt = entry.debt.take()?;
        entry.removing = Some(Arc::default());
        Some(Removal { claims: self, key, debt: Some(debt) })
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Bytes, Entry>> {
        // Nothing panics while it is held.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        let mut entries = self.claims.entries();
        let Some(entry) = entries.get_mut(self.key) else { return };
        entry.debt = self.debt.take();
        if let Some(removing) = entry.removing.take() {
            removing.notify_waiters();
        }
        remove_idle(&mut entries, self.key);
    }
}

fn remove_idle(entries: &mut HashMap<Bytes, Entry>, key: &Bytes) {
    let idle = |entry: &Entry| entry.calls == 0 && entry.debt.is_none() && entry.removing.is_none();
    if entries.get(key).is_some_and(idle) {
        entries.remove(key);
    }
}

impl Debt {
    /// This one and an older one: who saw the key says as whom it is removed.
    fn and(self, older: Option<Self>) -> Self {
        match older {
            None => self,
            Some(older) if self.since.is_none() => Self { settled: false, ..older },
            Some(older) => Self {
                since: self.since.into_iter().chain(older.since).min(),
                settled: self.settled && older.settled,
                whom: self.whom,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    static KEY: Bytes = Bytes::from_static(b"n/1f");

    fn owing(since: Option<i64>) -> Left {
        Left::Owing(Debt { whom: As::Nobody, since, settled: true })
    }

    fn arrived(claims: &Claims, calls: usize) {
        for _ in 0..calls {
            claims.arrive(&KEY).now_or_never().expect("nothing is being removed");
        }
    }

    #[test]
    fn only_the_last_call_that_leaves_has_the_key_removed() {
        let claims = Claims::default();
        arrived(&claims, 2);
        assert!(!claims.leave(&KEY, owing(Some(5))));
        assert!(claims.removal(&KEY).is_none(), "another call waits with it");
        assert!(claims.leave(&KEY, Left::Nothing), "the last one finds what the first left");
        let mut removal = claims.removal(&KEY).expect("due");
        assert_eq!(removal.debt.take().expect("what the first left").since, Some(5));
        drop(removal);
        assert!(claims.entries().is_empty());
    }

    #[test]
    fn a_success_settles_what_others_left() {
        let claims = Claims::default();
        arrived(&claims, 3);
        assert!(!claims.leave(&KEY, owing(Some(5))));
        assert!(!claims.leave(&KEY, Left::Kept));
        assert!(!claims.leave(&KEY, Left::Nothing));
        assert!(claims.removal(&KEY).is_none());
        assert!(claims.entries().is_empty());
    }

    #[test]
    fn who_arrives_during_a_removal_waits_for_its_end() {
        let claims = Claims::default();
        arrived(&claims, 1);
        assert!(claims.leave(&KEY, owing(None)));
        let removal = claims.removal(&KEY).expect("due");
        let mut arriving = Box::pin(claims.arrive(&KEY));
        assert!((&mut arriving).now_or_never().is_none());
        assert!(claims.removal(&KEY).is_none(), "one at a time");
        // It found nobody to do it: the debt stays, and the new call takes it over.
        drop(removal);
        assert!((&mut arriving).now_or_never().is_some());
        assert!(claims.removal(&KEY).is_none(), "a call waits");
        assert!(claims.leave(&KEY, Left::Nothing));
        assert!(claims.removal(&KEY).is_some());
    }

    #[test]
    fn of_two_debts_the_one_that_saw_the_key_counts() {
        let debt = |since, settled| Debt { whom: As::Nobody, since, settled };
        let both = debt(None, true).and(Some(debt(Some(5), true)));
        assert_eq!((both.since, both.settled), (Some(5), false));
        let both = debt(Some(7), true).and(Some(debt(Some(5), true)));
        assert_eq!((both.since, both.settled), (Some(5), true));
        let both = debt(Some(7), true).and(Some(debt(None, false)));
        assert_eq!((both.since, both.settled), (Some(7), false));
    }
}
