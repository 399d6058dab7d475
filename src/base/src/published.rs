//! A value replaced as a whole while in use, with change notification.
//!
//! Owns: the current value and the notification of changes. Must not know: the value's meaning. Invariant: a
//! reader subscribing before its first read misses no change: every value newer than the read value is
//! announced.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tokio::sync::watch;

/// The current value. Readers take no lock.
#[derive(Debug)]
pub struct Published<T> {
    now: ArcSwap<T>,
    changes: watch::Sender<()>,
}

impl<T: Default> Default for Published<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Published<T> {
    /// Creates the first value.
    #[must_use]
    pub fn new(value: impl Into<Arc<T>>) -> Self {
        Self { now: ArcSwap::new(value.into()), changes: watch::Sender::new(()) }
    }

    /// Returns the current value, for a short time.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<T>> {
        self.now.load()
    }

    /// Returns the current value, for a longer time.
    #[must_use]
    pub fn load_full(&self) -> Arc<T> {
        self.now.load_full()
    }

    /// Replaces the value, and notifies subscribers.
    pub fn publish(&self, value: impl Into<Arc<T>>) {
        self.now.store(value.into());
        self.changes.send_replace(());
    }

    /// Subscribes to replacements from now on.
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
