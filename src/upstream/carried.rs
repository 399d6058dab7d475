//! How many streams a member carries, over all shards, by what they are.
//!
//! Owns: the counts and the guard that keeps one. Must not know: members, how streams are opened. Invariant: a stream counts from its
//! being sent until its answer's body is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// One per member, for its whole life.
#[derive(Debug, Default)]
pub struct Streams {
    watches: AtomicU32,
    keepalives: AtomicU32,
    others: AtomicU32,
}

/// How many there are at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of Watch.
    pub watches: u32,
    /// Of `LeaseKeepAlive`.
    pub keepalives: u32,
    /// Of what else stays open or blocks: Observe, Lock, Campaign.
    pub others: u32,
}

/// Counts one stream for as long as it lives.
#[derive(Debug)]
pub struct Carried {
    streams: Arc<Streams>,
    of: fn(&Streams) -> &AtomicU32,
}

impl Streams {
    /// One more, of the method at this path.
    #[must_use]
    pub fn carry(self: &Arc<Self>, path: &str) -> Carried {
        let of: fn(&Self) -> &AtomicU32 = match path {
            "/etcdserverpb.Watch/Watch" => |streams| &streams.watches,
            "/etcdserverpb.Lease/LeaseKeepAlive" => |streams| &streams.keepalives,
            _ => |streams| &streams.others,
        };
        of(self).fetch_add(1, Relaxed);
        Carried { streams: Arc::clone(self), of }
    }

    /// How many there are now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let Self { watches, keepalives, others } = self;
        let [watches, keepalives, others] = [watches, keepalives, others].map(|count| count.load(Relaxed));
        Counts { watches, keepalives, others }
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        (self.of)(&self.streams).fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counts_as_what_it_is_until_it_ends() {
        let streams = Arc::new(Streams::default());
        let watch = streams.carry("/etcdserverpb.Watch/Watch");
        let further = [
            "/etcdserverpb.Watch/Watch",
            "/etcdserverpb.Lease/LeaseKeepAlive",
            "/v3electionpb.Election/Observe",
            "/v3lockpb.Lock/Lock",
            "/x.Y/Z",
        ]
        .map(|path| streams.carry(path));
        assert_eq!(streams.counts(), Counts { watches: 2, keepalives: 1, others: 3 });
        drop(watch);
        assert_eq!(streams.counts(), Counts { watches: 1, keepalives: 1, others: 3 });
        drop(further);
        assert_eq!(streams.counts(), Counts::default());
    }
}
