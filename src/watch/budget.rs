//! How many bytes the watch streams of one shard hold.
//!
//! Owns: the count, by client stream. Must not know: watches, clients, what is done where it is too much: a stream begins anew upstream,
//! never downstream.
//! Invariants: what is held is counted until it is dropped; a stream that holds alone is never too much, so that one
//! revision of any size that is taken at all passes; a little is free, so that ordinary events ask nobody.

use std::cell::Cell;
use std::rc::Rc;

use prometheus_client::metrics::gauge::Gauge;

/// What a stream may hold of one kind without being counted: as much as its HTTP/2 window lets in anyway.
pub const FREE: usize = 64 * 1024;

/// A message to the client that is smaller is not counted: five of them are in a window twice.
pub const SMALL: usize = 4 * 1024;

/// The bytes of one shard.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: Cell<usize>,
    shown: Gauge,
}

/// What one client stream has of it.
#[derive(Debug)]
pub struct Share {
    budget: Rc<Budget>,
    mine: Cell<usize>,
}

/// Bytes that are held, until dropped.
#[derive(Debug)]
pub struct Held {
    share: Rc<Share>,
    bytes: usize,
}

impl Budget {
    /// A budget of `limit` bytes; `shown` adds up all shards.
    #[must_use]
    pub fn new(limit: usize, shown: Gauge) -> Self {
        Self { limit, used: Cell::new(0), shown }
    }
}

impl Share {
    /// Nothing yet.
    #[must_use]
    pub fn new(budget: &Rc<Budget>) -> Rc<Self> {
        Rc::new(Self { budget: Rc::clone(budget), mine: Cell::new(0) })
    }

    /// Whether all that is held is within the budget, or all of it is this stream's.
    #[must_use]
    pub fn fits(&self) -> bool {
        let used = self.budget.used.get();
        used <= self.budget.limit || used == self.mine.get()
    }

    /// Counts `bytes`.
    #[must_use]
    pub fn hold(self: &Rc<Self>, bytes: usize) -> Held {
        let mut held = Held { share: Rc::clone(self), bytes: 0 };
        held.resize(bytes);
        held
    }
}

impl Held {
    /// How many there are.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// So many there are now.
    pub fn resize(&mut self, bytes: usize) {
        let Share { budget, mine } = &*self.share;
        let change = |count: usize| count.saturating_sub(self.bytes).saturating_add(bytes);
        mine.set(change(mine.get()));
        budget.used.set(change(budget.used.get()));
        let signed = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        budget.shown.inc_by(signed(bytes) - signed(self.bytes));
        self.bytes = bytes;
    }
}

impl Drop for Held {
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
        let budget = Rc::new(Budget::new(100, shown.clone()));
        let (one, other) = (Share::new(&budget), Share::new(&budget));
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
