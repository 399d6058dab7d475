//! A value that is replaced whole while others use it, and whose users are told.
//!
//! Owns: the value as it is now, and telling that there is another. Must not know: what it is. Invariant: who asks to be
//! told before it reads misses nothing: what it read is what there was then, or it is told.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tokio::sync::watch;

/// The value as it is now. Readers take no lock.
#[derive(Debug)]
pub struct Published<T> {
    now: ArcSwap<T>,
    changes: watch::Sender<()>,
}

impl<T> Published<T> {
    /// The first value.
    #[must_use]
    pub fn new(value: impl Into<Arc<T>>) -> Self {
        Self { now: ArcSwap::new(value.into()), changes: watch::Sender::new(()) }
    }

    /// What there is now, for a moment.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<T>> {
        self.now.load()
    }

    /// What there is now, for longer.
    #[must_use]
    pub fn load_full(&self) -> Arc<T> {
        self.now.load_full()
    }

    /// Puts another in its place, and tells.
    pub fn publish(&self, value: impl Into<Arc<T>>) {
        self.now.store(value.into());
        self.changes.send_replace(());
    }

    /// Moves after each replacement from now on.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn whoever_asked_before_it_read_is_told_of_what_came_after() {
        let value = Published::new(1);
        let mut changes = value.changes();
        assert_eq!(**value.load(), 1);
        assert!(changes.changed().now_or_never().is_none());
        value.publish(2);
        value.publish(3);
        assert!(changes.changed().now_or_never().is_some());
        assert_eq!(*value.load_full(), 3);
        assert!(changes.changed().now_or_never().is_none(), "once for both");
    }
}
