//! The number of streams on a member, over all shards, by kind.
//!
//! Owns: the counts, and the guard of a counted stream. Must not know: members, how streams are opened.
//! Invariant: a stream counts from its request until its answer's body is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A member's stream counts, kept for the member's whole life.
#[derive(Debug, Default)]
pub struct StreamCounters {
    watches: AtomicU32,
    keepalives: AtomicU32,
    others: AtomicU32,
}

/// A snapshot of the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounts {
    /// Watch streams.
    pub watches: u32,
    /// `LeaseKeepAlive` streams.
    pub keepalives: u32,
    /// Further streams and blocking calls: Observe, Lock, Campaign.
    pub others: u32,
}

/// Counts a stream until dropped.
#[derive(Debug)]
pub struct CountedStream {
    streams: Arc<StreamCounters>,
    of: fn(&StreamCounters) -> &AtomicU32,
}

impl StreamCounters {
    /// Counts a stream of the method at `path`.
    #[must_use]
    pub fn carry(self: &Arc<Self>, path: &str) -> CountedStream {
        let of: fn(&Self) -> &AtomicU32 = match path {
            "/etcdserverpb.Watch/Watch" => |streams| &streams.watches,
            "/etcdserverpb.Lease/LeaseKeepAlive" => |streams| &streams.keepalives,
            _ => |streams| &streams.others,
        };
        of(self).fetch_add(1, Relaxed);
        CountedStream { streams: Arc::clone(self), of }
    }

    /// Returns the present counts.
    #[must_use]
    pub fn counts(&self) -> StreamCounts {
        let Self { watches, keepalives, others } = self;
        let [watches, keepalives, others] = [watches, keepalives, others].map(|count| count.load(Relaxed));
        StreamCounts { watches, keepalives, others }
    }
}

impl Drop for CountedStream {
    fn drop(&mut self) {
        (self.of)(&self.streams).fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counts_as_what_it_is_until_it_ends() {
        let streams = Arc::new(StreamCounters::default());
        let watch = streams.carry("/etcdserverpb.Watch/Watch");
        let further = [
            "/etcdserverpb.Watch/Watch",
            "/etcdserverpb.Lease/LeaseKeepAlive",
            "/v3electionpb.Election/Observe",
            "/v3lockpb.Lock/Lock",
            "/x.Y/Z",
        ]
        .map(|path| streams.carry(path));
        assert_eq!(streams.counts(), StreamCounts { watches: 2, keepalives: 1, others: 3 });
        drop(watch);
        assert_eq!(streams.counts(), StreamCounts { watches: 1, keepalives: 1, others: 3 });
        drop(further);
        assert_eq!(streams.counts(), StreamCounts::default());
    }
}
