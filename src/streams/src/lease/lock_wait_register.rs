//! The register of waiting Lock and Campaign calls of this process, and of keys left by failed calls.
//!
//! Owns: the register of queue keys, shared by all shards. Must not know: members, how a key is removed.
//! Invariants (docs/decisions.md#d28): a removal begins only while no call waits with the key; a successful
//! call cancels the removals owed by other calls with the same key; a call arriving during a removal waits
//! for the end of the removal.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use keyward_upstream::send::UpstreamUser;

/// The queue keys with waiting calls or a pending removal.
#[derive(Default)]
pub struct LockWaitRegister {
    entries: Mutex<HashMap<Bytes, LockWaitEntry>>,
}

#[derive(Default)]
struct LockWaitEntry {
    /// Calls waiting with the key.
    calls: usize,
    /// The removal owed by failed calls.
    debt: Option<OwedKeyRemoval>,
    /// Notifies of the end of the running removal.
    removing: Option<Arc<Notify>>,
}

/// A key that may have to be removed.
#[derive(Clone)]
pub struct OwedKeyRemoval {
    /// The user of the removal.
    pub user: UpstreamUser,
    /// Create revision of the key when first seen behind other keys. A key created then or later is the
    /// failed call's own.
    pub since: Option<i64>,
    /// No request sent so far can still create the key.
    pub settled: bool,
}

/// The end of a call with a queue key.
pub enum LockWaitEnd {
    /// The client was told of a success.
    Kept,
    /// The call has no key.
    Nothing,
    /// The call may have left a key.
    Owing(OwedKeyRemoval),
}

/// A running removal. On drop, the remaining debt returns to the register.
pub struct LockKeyRemoval<'a> {
    lock_waits: &'a LockWaitRegister,
    key: &'a Bytes,
    /// The removal still owed; `None` once done.
    pub debt: Option<OwedKeyRemoval>,
}

impl LockWaitRegister {
    /// Registers a call waiting with this key, once no removal of the key is running. Cancel-safe.
    pub async fn arrive(&self, key: &Bytes) {
        loop {
            let removing = {
                let mut entries = self.entries();
                let entry = entries.entry(key.clone()).or_default();
                match &entry.removing {
                    // Catches every notification from here on, even before the first poll.
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

    /// Deregisters a call. Returns true if a removal is due now.
    pub fn leave(&self, key: &Bytes, how: LockWaitEnd) -> bool {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(key) else { return false };
        entry.calls -= 1;
        match how {
            LockWaitEnd::Kept => entry.debt = None,
            LockWaitEnd::Nothing => {}
            LockWaitEnd::Owing(debt) => entry.debt = Some(debt.and(entry.debt.take())),
        }
        let due = entry.calls == 0 && entry.debt.is_some();
        remove_idle(&mut entries, key);
        due
    }

    /// Begins to remove the key; `None` if a call waits with the key or no removal is owed.
    pub fn removal<'a>(&'a self, key: &'a Bytes) -> Option<LockKeyRemoval<'a>> {
        let mut entries = self.entries();
        let entry = entries.get_mut(key)?;
        if entry.calls > 0 || entry.removing.is_some() {
            return None;
        }
        let debt = entry.debt.take()?;
        entry.removing = Some(Arc::default());
        Some(LockKeyRemoval { lock_waits: self, key, debt: Some(debt) })
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Bytes, LockWaitEntry>> {
        // No code under the lock panics.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LockKeyRemoval<'_> {
    fn drop(&mut self) {
        let mut entries = self.lock_waits.entries();
        let Some(entry) = entries.get_mut(self.key) else { return };
        entry.debt = self.debt.take();
        if let Some(removing) = entry.removing.take() {
            removing.notify_waiters();
        }
        remove_idle(&mut entries, self.key);
    }
}

fn remove_idle(entries: &mut HashMap<Bytes, LockWaitEntry>, key: &Bytes) {
    let idle = |entry: &LockWaitEntry| entry.calls == 0 && entry.debt.is_none() && entry.removing.is_none();
    if entries.get(key).is_some_and(idle) {
        entries.remove(key);
    }
}

impl OwedKeyRemoval {
    /// Merges an older debt. The debt that has seen the key determines the user of the removal.
    fn and(self, older: Option<Self>) -> Self {
        match older {
            None => self,
            Some(older) if self.since.is_none() => Self { settled: false, ..older },
            Some(older) => Self {
                since: self.since.into_iter().chain(older.since).min(),
                settled: self.settled && older.settled,
                user: self.user,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    static KEY: Bytes = Bytes::from_static(b"n/1f");

    fn owing(since: Option<i64>) -> LockWaitEnd {
        LockWaitEnd::Owing(OwedKeyRemoval { user: UpstreamUser::Nobody, since, settled: true })
    }

    fn arrived(lock_waits: &LockWaitRegister, calls: usize) {
        for _ in 0..calls {
            lock_waits.arrive(&KEY).now_or_never().expect("nothing is being removed");
        }
    }

    #[test]
    fn only_the_last_call_that_leaves_has_the_key_removed() {
        let lock_waits = LockWaitRegister::default();
        arrived(&lock_waits, 2);
        assert!(!lock_waits.leave(&KEY, owing(Some(5))));
        assert!(lock_waits.removal(&KEY).is_none(), "another call waits with it");
        assert!(lock_waits.leave(&KEY, LockWaitEnd::Nothing), "the last one finds what the first left");
        let mut removal = lock_waits.removal(&KEY).expect("due");
        assert_eq!(removal.debt.take().expect("what the first left").since, Some(5));
        drop(removal);
        assert!(lock_waits.entries().is_empty());
    }

    #[test]
    fn a_success_settles_what_others_left() {
        let lock_waits = LockWaitRegister::default();
        arrived(&lock_waits, 3);
        assert!(!lock_waits.leave(&KEY, owing(Some(5))));
        assert!(!lock_waits.leave(&KEY, LockWaitEnd::Kept));
        assert!(!lock_waits.leave(&KEY, LockWaitEnd::Nothing));
        assert!(lock_waits.removal(&KEY).is_none());
        assert!(lock_waits.entries().is_empty());
    }

    #[test]
    fn who_arrives_during_a_removal_waits_for_its_end() {
        let lock_waits = LockWaitRegister::default();
        arrived(&lock_waits, 1);
        assert!(lock_waits.leave(&KEY, owing(None)));
        let removal = lock_waits.removal(&KEY).expect("due");
        let mut arriving = Box::pin(lock_waits.arrive(&KEY));
        assert!((&mut arriving).now_or_never().is_none());
        assert!(lock_waits.removal(&KEY).is_none(), "one at a time");
        // The removal ended undone: the debt stays, and the new call takes the debt over.
        drop(removal);
        assert!((&mut arriving).now_or_never().is_some());
        assert!(lock_waits.removal(&KEY).is_none(), "a call waits");
        assert!(lock_waits.leave(&KEY, LockWaitEnd::Nothing));
        assert!(lock_waits.removal(&KEY).is_some());
    }

    #[test]
    fn of_two_debts_the_one_that_saw_the_key_counts() {
        let debt = |since, settled| OwedKeyRemoval { user: UpstreamUser::Nobody, since, settled };
        let both = debt(None, true).and(Some(debt(Some(5), true)));
        assert_eq!((both.since, both.settled), (Some(5), false));
        let both = debt(Some(7), true).and(Some(debt(Some(5), true)));
        assert_eq!((both.since, both.settled), (Some(5), true));
        let both = debt(Some(7), true).and(Some(debt(None, false)));
        assert_eq!((both.since, both.settled), (Some(7), false));
    }
}
