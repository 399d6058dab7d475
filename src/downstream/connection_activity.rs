//! Whether a client connection is in use.
//!
//! Owns: the number of its open streams, when it had none last, whether a call was let in, and the request to make room. Must not know: who
//! asks for room, what a stream does.
//! Invariants: one thread, the connection's shard, counts streams; any thread may look. What another thread sees may be a moment old, so the
//! shard looks again before it ends a connection.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The activity of one client connection.
#[derive(Debug)]
pub struct ConnectionActivity {
    opened: Instant,
    streams: AtomicUsize,
    /// When its last stream ended, in milliseconds after it was opened; 0 where there was none.
    idle_since: AtomicU64,
    has_called: AtomicBool,
    room_wanted: Notify,
}

/// In which order connections make room: those without a call that was let in first, then those without streams, each kind from the oldest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
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
            room_wanted: Notify::new(),
        }
    }
}

impl ConnectionActivity {
    /// One more stream is open.
    pub(super) fn begin_stream(&self) {
        self.streams.fetch_add(1, Ordering::Relaxed);
    }

    /// A stream has ended.
    pub(super) fn end_stream(&self) {
        if self.streams.load(Ordering::Relaxed) == 1 {
            let millis = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.idle_since.store(millis, Ordering::Relaxed);
        }
        self.streams.fetch_sub(1, Ordering::Relaxed);
    }

    /// A call was let in: its caller is an etcd user, or auth is off.
    pub fn note_call(&self) {
        if !self.has_called.load(Ordering::Relaxed) {
            self.has_called.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a call was let in.
    pub(super) fn has_called(&self) -> bool {
        self.has_called.load(Ordering::Relaxed)
    }

    /// Whether a stream is open.
    pub(super) fn has_streams(&self) -> bool {
        self.streams.load(Ordering::Relaxed) > 0
    }

    /// Whether it may be ended so that another has its place.
    pub(super) fn may_make_room(&self) -> bool {
        !self.has_called() || !self.has_streams()
    }

    /// Its place among those that may make room; none where it may not.
    pub(super) fn rank(&self) -> Option<Rank> {
        let has_called = self.has_called();
        let idle_since = if has_called { self.idle_since.load(Ordering::Relaxed) } else { 0 };
        let idle_since = self.opened + Duration::from_millis(idle_since);
        self.may_make_room().then_some(Rank { has_called, idle_since })
    }

    /// Asks it to make room.
    pub(super) fn ask_for_room(&self) {
        self.room_wanted.notify_one();
    }

    /// Waits until it is asked to make room. Cancel-safe.
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
