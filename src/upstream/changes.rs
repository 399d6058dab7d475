//! How those who wait hear that something published has changed.
//!
//! Owns: the count of changes and who is woken. Must not know: what changed. Invariants: no change is missed by whoever looks again
//! after it was woken; who waited first is woken first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::Notify;

/// Tells of changes, to any number of [`Changes`]. Dropped, it ends them.
#[derive(Debug)]
pub struct ChangesSender(Arc<News>);

/// Where changes are told. Clones have seen what their original had seen.
///
/// As tokio's `watch` without a value, but who waits is woken in the order in which it began to wait, where `watch`
/// draws lots: what happens after a change can be repeated.
#[derive(Clone, Debug)]
pub struct Changes {
    news: Arc<News>,
    seen: u64,
}

/// Nothing will change any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nothing will change any more")]
pub struct NoMoreChanges;

#[derive(Debug, Default)]
struct News {
    generation: AtomicU64,
    ended: AtomicBool,
    waiting: Notify,
}

impl Changes {
    /// A pair of ends.
    #[must_use]
    pub fn channel() -> (ChangesSender, Self) {
        let news = Arc::new(News::default());
        (ChangesSender(Arc::clone(&news)), Self { news, seen: 0 })
    }

    /// Takes what changed so far as seen.
    pub fn mark_unchanged(&mut self) {
        self.seen = self.news.generation.load(Ordering::Acquire);
    }

    /// Something changed that is no part of what is published.
    pub(super) fn tell(&self) {
        self.news.generation.fetch_add(1, Ordering::Release);
        self.news.waiting.notify_waiters();
    }

    /// Waits for a change that was not seen; it is then. Cancel-safe.
    ///
    /// # Errors
    /// [`NoMoreChanges`]: the sender is gone.
    pub async fn changed(&mut self) -> Result<(), NoMoreChanges> {
        loop {
            // It hears what is told from here on, before it is awaited too.
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

impl ChangesSender {
    /// Something changed.
    pub fn tell(&self) {
        self.0.generation.fetch_add(1, Ordering::Release);
        self.0.waiting.notify_waiters();
    }
}

impl Drop for ChangesSender {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
        self.0.waiting.notify_waiters();
    }
}
