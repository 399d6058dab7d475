//! The calls on one connection to a member: seats, limits, and the end of the connection.
//!
//! Owns: the count of calls in flight, the flow-control windows by lane and the limit on calls that follows
//! from the windows, the close after an idle period. Must not know: HTTP/2's frames, the meaning of a call.
//! Invariants (`docs/decisions.md#d37`): no number of unread answers uses up the connection's window; a
//! connection is closed only while no call is in flight, and no call begins after the close.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use keyward_etcd::rpc::method::Lane;

/// Assumed stream limit of a member whose SETTINGS name none. The TLS ports of old etcd versions have Go's
/// HTTP/2 default of 250.
pub(super) const UNTOLD_STREAMS: usize = 200;

pub(super) const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;
/// Flow-control window of every connection: larger than all unread answers of a full connection together, see
/// `call_limit`.
pub(super) const CONNECTION_WINDOW: u32 = 1024 * MIB;

/// Value of `ConnectionLoad::calls` from the close on: no call may begin. Calls still in flight decrement the
/// value at their end, so every value above half of the maximum means "closing".
const CLOSING: usize = usize::MAX;

pub(super) struct ConnectionLoad {
    pub(super) lane: Lane,
    /// Number of calls in flight, or [`CLOSING`].
    pub(super) calls: AtomicUsize,
    /// The member's limit on concurrent streams, as last announced.
    pub(super) limit: AtomicUsize,
    pub(super) opened_at: Instant,
    /// Start of the latest time without a call, in milliseconds after `opened_at`; 0 before the first.
    pub(super) quiet_since: AtomicU64,
    /// Close the connection after its last call.
    pub(super) retired: AtomicBool,
    /// Streams able to resume on another member must leave.
    pub(super) leave_ordered: AtomicBool,
    /// Keyward cut the connection together with its calls.
    pub(super) given_up: AtomicBool,
    /// Wakes the task responsible for the close.
    pub(super) close_wakeup: Notify,
    /// Wakes waiters for the connection's end, and for the order to leave.
    pub(super) ended: Arc<Notify>,
}

impl ConnectionLoad {
    pub(super) fn new(lane: Lane) -> Self {
        Self {
            lane,
            calls: AtomicUsize::new(0),
            limit: AtomicUsize::new(UNTOLD_STREAMS),
            opened_at: Instant::now(),
            quiet_since: AtomicU64::new(0),
            retired: AtomicBool::new(false),
            leave_ordered: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            close_wakeup: Notify::new(),
            ended: Arc::default(),
        }
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.calls.load(Ordering::SeqCst) == 0
    }

    pub(super) fn is_closing(&self) -> bool {
        self.calls.load(Ordering::SeqCst) > CLOSING / 2
    }

    /// any → closing; wakes all waiters.
    pub(super) fn end(&self) {
        self.calls.store(CLOSING, Ordering::SeqCst);
        self.ended.notify_waiters();
    }

    /// Waits for the connection's end. Cancel-safe.
    pub(super) async fn ended(&self) {
        loop {
            // `Notified` receives wakeups from its creation on, so no end is missed between the check and the
            // await.
            let ended = self.ended.notified();
            if self.is_closing() {
                return;
            }
            ended.await;
        }
    }

    pub(super) fn quiet_since(&self) -> Instant {
        self.opened_at + Duration::from_millis(self.quiet_since.load(Ordering::SeqCst))
    }

    /// no call → closing; returns false while a call is in flight.
    pub(super) fn close(&self) -> bool {
        self.calls.compare_exchange(0, CLOSING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Adds a call if the connection has room.
    pub(super) fn enter(&self) -> bool {
        let room = call_limit(self.limit.load(Ordering::Relaxed), self.lane);
        let enter = |calls| (calls < room).then_some(calls + 1);
        self.calls.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter).is_ok()
    }

    pub(super) fn leave(&self) {
        // Only the end of the last call reads the clock. Store the time before the count: a reader seeing no
        // call must see the new time. If two last calls end on two threads at once, the time may stay old:
        // then an unused connection closes early.
        if self.calls.load(Ordering::SeqCst) == 1 {
            let quiet = u64::try_from(self.opened_at.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.quiet_since.fetch_max(quiet, Ordering::SeqCst);
        }
        if self.calls.fetch_sub(1, Ordering::SeqCst) == 1 && self.retired.load(Ordering::SeqCst) {
            self.close_wakeup.notify_one();
        }
    }

    /// Closes the connection once no call is in flight: after `idle`, or at once if retired. Returns when
    /// closed.
    pub(super) async fn close_when_unused(&self, idle: Duration) {
        loop {
            let quiet = self.is_quiet();
            let since = self.quiet_since();
            if quiet && (self.retired.load(Ordering::SeqCst) || since.elapsed() >= idle) && self.close() {
                return;
            }
            if self.is_closing() {
                return;
            }
            let wait = if quiet { idle.saturating_sub(since.elapsed()) } else { idle };
            tokio::select! {
                biased; // either order is correct; a fixed order makes runs repeatable
                () = self.close_wakeup.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }
}

/// A seat on a connection, released on drop.
pub(super) struct SeatGuard(pub(super) Arc<ConnectionLoad>);

impl Drop for SeatGuard {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Concurrent calls allowed on a connection to a member with a limit of `limit` streams: 80 % of the limit,
/// and no more than fit into the connection's window with unread answers. With more, the unread answers of a
/// single client could block the answers to all clients.
fn call_limit(limit: usize, lane: Lane) -> usize {
    let fit = CONNECTION_WINDOW / stream_window(lane) - 1;
    (limit / 5 * 4 + limit % 5 * 4 / 5).min(fit as usize).max(1)
}

/// Returns the flow-control window of a stream: the bytes of an unread answer a member may send.
#[must_use]
pub fn stream_window(lane: Lane) -> u32 {
    match lane {
        Lane::Stream => 64 * KIB,
        Lane::Unary | Lane::Bulk => 2 * MIB,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_of_unread_answers_uses_up_a_connections_window() {
        for lane in [Lane::Unary, Lane::Bulk, Lane::Stream] {
            for limit in [1, 200, 250, 1000, u32::MAX as usize] {
                let calls = u32::try_from(call_limit(limit, lane)).expect("few");
                assert!(calls >= 1 && calls * stream_window(lane) < CONNECTION_WINDOW, "{lane:?} {limit}");
            }
        }
        assert_eq!(
            (call_limit(200, Lane::Unary), call_limit(1, Lane::Unary), call_limit(10_000, Lane::Bulk)),
            (160, 1, 511)
        );
    }
}
