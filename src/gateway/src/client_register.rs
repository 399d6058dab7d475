//! The client connections of a shard.
//!
//! Owns: finding a connection by its number. Must not know: what is asked of a connection. Invariants: the
//! register holds no connection alive; the register belongs to a single thread.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use crate::ClientConnection;

/// The connections of a shard, by number.
#[derive(Default)]
pub struct ClientRegister(RefCell<BTreeMap<u64, Weak<ClientConnection>>>);

/// Takes a connection out of the register when dropped.
pub struct ClientListing(Rc<ClientRegister>, u64);

impl Drop for ClientListing {
    fn drop(&mut self) {
        self.0.0.borrow_mut().remove(&self.1);
    }
}

impl ClientRegister {
    /// Registers a connection. The caller holds a [`ClientListing`] of the number until the connection's end.
    pub fn add(&self, client: &Rc<ClientConnection>) {
        self.0.borrow_mut().insert(client.origin.figures.id, Rc::downgrade(client));
    }

    /// A guard that takes the connection with this number out of the register when dropped.
    #[must_use]
    pub fn listing(self: &Rc<Self>, id: u64) -> ClientListing {
        ClientListing(Rc::clone(self), id)
    }

    /// The connection with this number.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<Rc<ClientConnection>> {
        self.0.borrow().get(&id)?.upgrade()
    }

    /// The numbers of all connections, the oldest first.
    #[must_use]
    pub fn ids(&self) -> Vec<u64> {
        self.0.borrow().keys().copied().collect()
    }
}
