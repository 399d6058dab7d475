//! Bytes held on a shard, counted until given back: the one count under every byte budget.
//!
//! Owns: the counts of a shard and of each holder (a connection or a stream), and the gauge over all shards.
//! Must not know: limits, or the reaction to a full budget. Invariant: bytes count until dropped.

use std::cell::Cell;
use std::rc::Rc;

use prometheus_client::metrics::gauge::Gauge;

/// The bytes held on a shard.
#[derive(Debug)]
pub struct ByteAccount {
    used: Cell<usize>,
    /// Bytes of each holder not counted in `used`.
    reserve: usize,
    gauge: Gauge,
}

/// The part of one holder in an account.
#[derive(Clone, Debug)]
pub struct ByteShare {
    account: Rc<ByteAccount>,
    own: Rc<Cell<usize>>,
}

/// Bytes counted until dropped.
#[derive(Debug)]
pub struct HeldBytes {
    /// The share with these bytes.
    pub share: ByteShare,
    bytes: usize,
}

impl ByteAccount {
    /// An empty account. `gauge` is the sum of all held bytes, over all shards.
    #[must_use]
    pub fn new(reserve: usize, gauge: Gauge) -> Rc<Self> {
        Rc::new(Self { used: Cell::default(), reserve, gauge })
    }

    /// The bytes of all holders, each beyond the reserve.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.get()
    }
}

impl ByteShare {
    /// The share of a holder with `own` bytes.
    #[must_use]
    pub fn new(account: &Rc<ByteAccount>, own: &Rc<Cell<usize>>) -> Self {
        Self { account: Rc::clone(account), own: Rc::clone(own) }
    }

    /// The bytes of this holder.
    #[must_use]
    pub fn own(&self) -> usize {
        self.own.get()
    }

    /// The bytes of the account used once this holder has `own` bytes.
    #[must_use]
    pub fn used_with(&self, own: usize) -> usize {
        let ByteAccount { used, reserve, .. } = &*self.account;
        (used.get() + own.saturating_sub(*reserve)).saturating_sub(self.own().saturating_sub(*reserve))
    }

    /// Counts `bytes` until the returned value is dropped.
    #[must_use]
    pub fn hold(&self, bytes: usize) -> HeldBytes {
        let mut held = HeldBytes { share: self.clone(), bytes: 0 };
        held.resize(bytes);
        held
    }
}

impl HeldBytes {
    /// The number of bytes counted.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets the number of bytes counted.
    pub fn resize(&mut self, bytes: usize) {
        if bytes == self.bytes {
            return;
        }
        let ByteShare { account, own } = &self.share;
        let after = (own.get() + bytes).saturating_sub(self.bytes);
        account.used.set(self.share.used_with(after));
        own.set(after);
        let signed = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        account.gauge.inc_by(signed(bytes) - signed(self.bytes));
        self.bytes = bytes;
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.resize(0);
    }
}
