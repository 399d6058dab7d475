//! Notification of waiting tasks about changes of a published value.
//!
//! Owns: the count of changes, and the wakeups. Must not know: the value. Invariants: a waiter looking again
//! after each wakeup misses no change; waiters are woken in the order of waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::Notify;

/// Announces changes to any number of [`ChangeReceiver`]. Dropping the sender ends the notifications.
#[derive(Debug)]
pub struct ChangeSender(Arc<ChangeState>);

/// Receives change notifications. A clone starts with the same changes seen.
///
/// Like tokio's `watch` without a value, except for the wakeups: `watch` wakes waiters at random,
/// [`ChangeReceiver`] in the order of waiting, so the steps after a change are repeatable.
#[derive(Clone, Debug)]
pub struct ChangeReceiver {
    news: Arc<ChangeState>,
    seen: u64,
}

/// No further change will be announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nothing will change any more")]
pub struct NoMoreChanges;

#[derive(Debug, Default)]
struct ChangeState {
    generation: AtomicU64,
    ended: AtomicBool,
    waiting: Notify,
}

impl ChangeReceiver {
    /// Creates a sender and a receiver.
    #[must_use]
    pub fn channel() -> (ChangeSender, Self) {
        let news = Arc::new(ChangeState::default());
        (ChangeSender(Arc::clone(&news)), Self { news, seen: 0 })
    }

    /// Marks all changes so far as seen.
    pub fn mark_unchanged(&mut self) {
        self.seen = self.news.generation.load(Ordering::Acquire);
    }

    /// Announces a change outside of the published value.
    pub(super) fn announce(&self) {
        self.news.generation.fetch_add(1, Ordering::Release);
        self.news.waiting.notify_waiters();
    }

    /// Waits for an unseen change and marks the change as seen. Cancel-safe.
    ///
    /// # Errors
    /// [`NoMoreChanges`]: the sender is gone.
    pub async fn changed(&mut self) -> Result<(), NoMoreChanges> {
        loop {
            // `Notified` receives wakeups from its creation on, so no change is missed between the check and
            // the await.
            let told = self.news.waiting.notified();
            let generation = self.news.generation.load(Ordering::Acquire);
            if generation != self.seen {
                self.seen = generation;
                return Ok(());
            }
            if self.news.ended.load(Ordering::Acquire) {
                return Err(NoMoreChanges);
            }
            told.await;
        }
    }
}

impl ChangeSender {
    /// Announces a change.
    pub fn tell(&self) {
        self.0.generation.fetch_add(1, Ordering::Release);
        self.0.waiting.notify_waiters();
    }
}

impl Drop for ChangeSender {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
        self.0.waiting.notify_waiters();
    }
}
