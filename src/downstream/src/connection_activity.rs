//! The activity of a client connection.
//!
//! Owns: the number of open streams, the time of the last stream's end, a flag for an admitted call, the
//! request to close in favour of a new connection, an operator's request to close, and a flag for a
//! connection without an age. Must not know: the reason for an eviction or for the flag, the meaning of a
//! stream.
//! Invariants: only the connection's shard counts streams; any thread may read the counts. Another thread may
//! read a slightly old value, so the shard checks again before closing a connection.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The activity of one client connection.
#[derive(Debug)]
pub struct ConnectionActivity {
    opened: Instant,
    streams: AtomicUsize,
    /// End of the last stream, in milliseconds after the connection opened; 0 before the first stream has
    /// ended.
    idle_since: AtomicU64,
    has_called: AtomicBool,
    is_taken_over: AtomicBool,
    is_kicked: AtomicBool,
    is_age_spared: AtomicBool,
    room_wanted: Notify,
}

/// Eviction order: connections without an admitted call first, by time of opening; then connections without
/// streams, by the end of the last stream. The oldest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EvictionRank {
    has_called: bool,
    idle_since: Instant,
}

impl Default for ConnectionActivity {
    fn default() -> Self {
        Self {
            opened: Instant::now(),
            streams: AtomicUsize::default(),
            idle_since: AtomicU64::default(),
            has_called: AtomicBool::default(),
            is_taken_over: AtomicBool::default(),
            is_kicked: AtomicBool::default(),
            is_age_spared: AtomicBool::default(),
            room_wanted: Notify::new(),
        }
    }
}

impl ConnectionActivity {
    /// When the connection was accepted.
    #[must_use]
    pub fn opened(&self) -> Instant {
        self.opened
    }

    /// The number of open streams: calls under way, and streams.
    #[must_use]
    pub fn open_streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Asks the connection to close by an operator's request, also with open streams.
    pub fn kick(&self) {
        self.is_kicked.store(true, Ordering::Relaxed);
        self.room_wanted.notify_one();
    }

    /// True once an operator has asked the connection to close.
    #[must_use]
    pub fn is_kicked(&self) -> bool {
        self.is_kicked.load(Ordering::Relaxed)
    }

    /// Spares the connection the end for its age: its client cannot take a GOAWAY.
    pub fn spare_age(&self) {
        self.is_age_spared.store(true, Ordering::Relaxed);
    }

    /// True if the connection does not end for its age.
    pub(super) fn is_age_spared(&self) -> bool {
        self.is_age_spared.load(Ordering::Relaxed)
    }

    /// Counts a new stream.
    pub(super) fn begin_stream(&self) {
        self.streams.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a stream.
    pub(super) fn end_stream(&self) {
        if self.streams.load(Ordering::Relaxed) == 1 {
            let millis = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.idle_since.store(millis, Ordering::Relaxed);
        }
        self.streams.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts the takeover of the connection by another protocol as a stream.
    pub(super) fn begin_takeover(&self) {
        self.is_taken_over.store(true, Ordering::Relaxed);
        self.begin_stream();
    }

    /// True if the connection's streams are health checks, as far as no call was admitted: a takeover is
    /// none.
    pub(super) fn has_health_checks(&self) -> bool {
        self.has_streams() && !self.is_taken_over.load(Ordering::Relaxed)
    }

    /// Records an admitted call: the caller is an etcd user, or auth is off.
    pub fn note_call(&self) {
        if !self.has_called.load(Ordering::Relaxed) {
            self.has_called.store(true, Ordering::Relaxed);
        }
    }

    /// True if a call was admitted.
    pub(super) fn has_called(&self) -> bool {
        self.has_called.load(Ordering::Relaxed)
    }

    /// True if a stream is open.
    pub(super) fn has_streams(&self) -> bool {
        self.streams.load(Ordering::Relaxed) > 0
    }

    /// True if the connection may be evicted.
    pub(super) fn may_make_room(&self) -> bool {
        !self.has_called() || !self.has_streams()
    }

    /// The position in the eviction order; `None` if the connection may not be evicted.
    pub(super) fn rank(&self) -> Option<EvictionRank> {
        let has_called = self.has_called();
        let idle_since = if has_called { self.idle_since.load(Ordering::Relaxed) } else { 0 };
        let idle_since = self.opened + Duration::from_millis(idle_since);
        self.may_make_room().then_some(EvictionRank { has_called, idle_since })
    }

    /// Asks the connection to close in favour of a new connection.
    pub(super) fn ask_for_room(&self) {
        self.room_wanted.notify_one();
    }

    /// Waits for a request to close. Cancel-safe.
    pub(super) async fn room_wanted(&self) {
        self.room_wanted.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_in_use_has_no_rank_and_one_that_never_called_goes_before_all_others() {
        let early = ConnectionActivity::default();
        early.note_call();
        early.begin_stream();
        tokio::time::advance(Duration::from_secs(1)).await;
        let late = ConnectionActivity::default();
        late.begin_stream();
        assert_eq!(early.rank(), None, "a stream is open");
        assert!(late.rank().is_some(), "nobody was let in");
        early.begin_stream();
        early.end_stream();
        assert_eq!(early.rank(), None, "one of two streams is open");
        early.end_stream();
        assert!(late.rank() < early.rank());
        late.note_call();
        tokio::time::advance(Duration::from_secs(1)).await;
        late.end_stream();
        assert!(early.rank() < late.rank(), "it is idle for longer");
    }
}
