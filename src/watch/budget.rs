//! Byte budget for the watch streams of a shard.
//!
//! Owns: the count of held bytes, by client stream. Must not know: watches, clients, or the reaction to an
//! exceeded budget (an upstream stream is opened again; the client's stream goes on).
//! Invariants: held bytes are counted until dropped; a stream holding bytes alone always fits, so that a
//! revision of any accepted size passes; a small amount is free, so that ordinary events do not touch the
//! budget.

use std::cell::Cell;
use std::rc::Rc;

use prometheus_client::metrics::gauge::Gauge;

/// Bytes of each kind that a stream may hold uncounted: as many as the HTTP/2 stream window admits anyway.
pub const FREE: usize = 64 * 1024;

/// Smaller messages to the client are not counted: five such messages take less than half of an HTTP/2 stream
/// window.
pub const SMALL: usize = 4 * 1024;

/// The byte budget of a shard.
#[derive(Debug)]
pub struct WatchByteBudget {
    limit: usize,
    used: Cell<usize>,
    shown: Gauge,
}

/// The share of a client stream in the budget.
#[derive(Debug)]
pub struct WatchByteShare {
    budget: Rc<WatchByteBudget>,
    mine: Cell<usize>,
}

/// Held bytes, counted until dropped.
#[derive(Debug)]
pub struct HeldWatchBytes {
    share: Rc<WatchByteShare>,
    bytes: usize,
}

impl WatchByteBudget {
    /// Returns a budget of `limit` bytes. The gauge `shown` is the sum over all shards.
    #[must_use]
    pub fn new(limit: usize, shown: Gauge) -> Self {
        Self { limit, used: Cell::new(0), shown }
    }
}

impl WatchByteShare {
    /// Returns an empty share of the budget.
    #[must_use]
    pub fn new(budget: &Rc<WatchByteBudget>) -> Rc<Self> {
        Rc::new(Self { budget: Rc::clone(budget), mine: Cell::new(0) })
    }

    /// True if all held bytes are within the budget, or all belong to this stream.
    #[must_use]
    pub fn fits(&self) -> bool {
        let used = self.budget.used.get();
        used <= self.budget.limit || used == self.mine.get()
    }

    /// Counts `bytes` until the returned value is dropped.
    #[must_use]
    pub fn hold(self: &Rc<Self>, bytes: usize) -> HeldWatchBytes {
        let mut held = HeldWatchBytes { share: Rc::clone(self), bytes: 0 };
        held.resize(bytes);
        held
    }
}

impl HeldWatchBytes {
    /// The number of bytes counted.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets the number of bytes counted.
    pub fn resize(&mut self, bytes: usize) {
        let WatchByteShare { budget, mine } = &*self.share;
        let change = |count: usize| count.saturating_sub(self.bytes).saturating_add(bytes);
        mine.set(change(mine.get()));
        budget.used.set(change(budget.used.get()));
        let signed = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        budget.shown.inc_by(signed(bytes) - signed(self.bytes));
        self.bytes = bytes;
    }
}

impl Drop for HeldWatchBytes {
    fn drop(&mut self) {
        self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_counted_until_dropped_and_one_alone_always_fits() {
        let shown = Gauge::default();
        let budget = Rc::new(WatchByteBudget::new(100, shown.clone()));
        let (one, other) = (WatchByteShare::new(&budget), WatchByteShare::new(&budget));
        let mut large = one.hold(60);
        assert!(one.fits() && other.fits());
        let more = other.hold(50);
        assert!(!one.fits() && !other.fits());
        drop(more);
        large.resize(300);
        assert!(one.fits(), "alone");
        assert!(!other.fits());
        assert_eq!((large.bytes(), shown.get()), (300, 300));
        drop(large);
        assert!(other.fits());
        assert_eq!(shown.get(), 0);
    }
}
