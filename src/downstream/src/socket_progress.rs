//! Signs of life of a client, from its socket.
//!
//! Owns: the number of bytes received and sent, the time of the last sign of life, and the flag of a first
//! HTTP/1 request. Must not know: the meaning of the bytes.
//! Invariants: received bytes are a sign of life. Sent bytes are not, since the kernel accepts bytes for a
//! dead peer too; but a full socket that accepts bytes again has a reading peer.

use std::cell::Cell;

use tokio::time::Instant;

/// Length of HTTP/2's client preface, sent before the first frame.
pub(super) const PREFACE: usize = 24;

/// The progress of one socket.
#[derive(Debug)]
pub struct SocketProgress {
    received: Cell<usize>,
    sent: Cell<usize>,
    sign_of_life: Cell<Instant>,
    is_blocked: Cell<bool>,
    has_request: Cell<bool>,
}

impl Default for SocketProgress {
    fn default() -> Self {
        Self {
            received: Cell::default(),
            sent: Cell::default(),
            sign_of_life: Cell::new(Instant::now()),
            is_blocked: Cell::default(),
            has_request: Cell::default(),
        }
    }
}

impl SocketProgress {
    /// Records received bytes.
    pub(super) fn note_received(&self, bytes: usize) {
        if bytes > 0 {
            self.received.set(self.received.get().saturating_add(bytes));
            self.sign_of_life.set(Instant::now());
        }
    }

    /// Records a write of `sent` bytes: `was_taken` is false if the socket was full.
    pub(super) fn note_write(&self, was_taken: bool, sent: usize) {
        self.sent.set(self.sent.get().saturating_add(sent));
        if was_taken && self.is_blocked.get() {
            self.sign_of_life.set(Instant::now());
        }
        self.is_blocked.set(!was_taken);
    }

    /// Records the complete head of an HTTP/1 request.
    pub(super) fn note_request(&self) {
        self.has_request.set(true);
    }

    /// True after the head of the first HTTP/1 request.
    pub(super) fn has_request(&self) -> bool {
        self.has_request.get()
    }

    /// The number of bytes received, after TLS.
    pub fn received(&self) -> usize {
        self.received.get()
    }

    /// The number of bytes sent, before TLS.
    pub fn sent(&self) -> usize {
        self.sent.get()
    }

    /// Time of the last sign of life.
    pub(super) fn sign_of_life(&self) -> Instant {
        self.sign_of_life.get()
    }
}
