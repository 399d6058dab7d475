//! Byte budget for the Watch and Observe streams of a shard.
//!
//! Owns: the limit on held bytes, counted by client stream in a [`ByteAccount`], and the bytes held for a
//! message to the client. Must not know: watches, elections, clients, or the reaction to an exceeded budget
//! (an upstream stream is opened again; the client's stream goes on).
//! Invariants: a stream holding bytes alone always fits, so that a revision of any accepted size passes; a
//! small amount is free, so that ordinary events do not touch the budget.

use std::any::Any;
use std::rc::Rc;

use prometheus_client::metrics::gauge::Gauge;

use crate::client_replies::TakenGuard;
use keyward_base::byte_account::{ByteAccount, ByteShare, HeldBytes};

/// Bytes of each kind that a stream may hold uncounted: as many as the HTTP/2 stream window admits anyway.
pub const FREE: usize = 64 * 1024;

/// Smaller messages to the client are not counted: the client's queue takes at most five of this size, less
/// than half of an HTTP/2 stream window.
pub const SMALL: usize = 4 * 1024;

/// The byte budget of a shard.
#[derive(Debug)]
pub struct StreamByteBudget {
    limit: usize,
    account: Rc<ByteAccount>,
}

/// The share of a client stream in the budget.
#[derive(Debug)]
pub struct StreamByteShare {
    budget: Rc<StreamByteBudget>,
    share: ByteShare,
    /// The bytes held for a message to the client, in messages: its JSON form is larger.
    copies: usize,
}

impl StreamByteBudget {
    /// Returns a budget of `limit` bytes. The gauge `shown` is the sum over all shards.
    #[must_use]
    pub fn new(limit: usize, shown: Gauge) -> Self {
        Self { limit, account: ByteAccount::new(0, shown) }
    }
}

impl StreamByteShare {
    /// Returns an empty share of the budget, of a client's stream whose messages are held in `copies`.
    #[must_use]
    pub fn new(budget: &Rc<StreamByteBudget>, copies: usize) -> Rc<Self> {
        let share = ByteShare::new(&budget.account, &Rc::default());
        Rc::new(Self { budget: Rc::clone(budget), share, copies })
    }

    /// True if all held bytes are within the budget, or all belong to this stream.
    #[must_use]
    pub fn fits(&self) -> bool {
        let used = self.budget.account.used();
        used <= self.budget.limit || used == self.share.own()
    }

    /// Bytes held for this stream.
    #[must_use]
    pub fn held(&self) -> usize {
        self.share.own()
    }

    /// Counts a message of `bytes` to the client until the returned guard is dropped; a small one is not
    /// counted.
    #[must_use]
    pub fn hold_message(&self, bytes: usize) -> TakenGuard {
        let large = bytes.saturating_mul(self.copies) > SMALL;
        large.then(|| Box::new(self.share.hold(bytes.saturating_mul(self.copies))) as Box<dyn Any>)
    }

    /// Counts `bytes` until the returned value is dropped.
    #[must_use]
    pub fn hold(&self, bytes: usize) -> HeldBytes {
        self.share.hold(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_counted_until_dropped_and_one_alone_always_fits() {
        let shown = Gauge::default();
        let budget = Rc::new(StreamByteBudget::new(100, shown.clone()));
        let [one, other] = [1, 3].map(|copies| StreamByteShare::new(&budget, copies));
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
        assert!(one.hold_message(SMALL).is_none());
        let messages = [one.hold_message(SMALL + 1), other.hold_message(SMALL)];
        assert_eq!(shown.get(), i64::try_from(SMALL + 1 + 3 * SMALL).unwrap());
        drop(messages);
        assert_eq!(shown.get(), 0);
    }
}
