//! What a client connection's socket shows of its peer.
//!
//! Owns: how many bytes came, and the last moment at which the peer showed that it is there. Must not know: HTTP/2, what the bytes are.
//! Invariants: received bytes are a sign of life; sent ones are none, since the kernel takes them also for a peer that is gone, but a socket
//! that took nothing and takes bytes again has a peer that reads.

use std::cell::Cell;

use tokio::time::Instant;

/// The progress of one socket.
#[derive(Debug)]
pub(super) struct SocketProgress {
    received: Cell<usize>,
    sign_of_life: Cell<Instant>,
    is_blocked: Cell<bool>,
}

impl Default for SocketProgress {
    fn default() -> Self {
        Self {
            received: Cell::default(),
            sign_of_life: Cell::new(Instant::now()),
            is_blocked: Cell::default(),
        }
    }
}

impl SocketProgress {
    /// So many bytes came.
    pub(super) fn note_received(&self, bytes: usize) {
        if bytes > 0 {
            self.received.set(self.received.get().saturating_add(bytes));
            self.sign_of_life.set(Instant::now());
        }
    }

    /// A write took bytes, or took none since there is no room.
    pub(super) fn note_write(&self, was_taken: bool) {
        if was_taken && self.is_blocked.get() {
            self.sign_of_life.set(Instant::now());
        }
        self.is_blocked.set(!was_taken);
    }

    /// How many bytes came.
    pub(super) fn received(&self) -> usize {
        self.received.get()
    }

    /// When the peer showed last that it is there.
    pub(super) fn sign_of_life(&self) -> Instant {
        self.sign_of_life.get()
    }
}
