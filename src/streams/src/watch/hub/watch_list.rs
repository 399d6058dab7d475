//! The watches of a hub, as listed for an operator.
//!
//! Owns: the summary of a client stream's watches. Must not know: the client, the form of the listing.
//! Invariants: listing changes nothing; watches of the same range are one entry, so that a client which leaks
//! watches of a range makes one long entry, not thousands.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::{Hub, HubWatch};

/// The watches of one range on one client stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListedWatch {
    /// The first key of the range, as sent to etcd.
    pub key: Bytes,
    /// The end of the range: empty for a single key, a zero byte for the end of the keyspace.
    pub range_end: Bytes,
    /// The number of watches of the range.
    pub watches: u64,
    /// The watches registered at a member now.
    pub live: u64,
    /// Events delivered to the client, over all the watches.
    pub events: u64,
    /// Bytes of revisions that have begun to arrive and have not ended.
    pub held_bytes: u64,
    /// The lowest first revision not wholly delivered, of watches that a member does not serve now or whose
    /// last revision has not ended. `None` where every watch is served: the events still to come are then
    /// known to the member only.
    pub next_revision: Option<i64>,
}

/// A Watch stream at one moment.
#[derive(Clone, Debug, Default)]
pub struct WatchStreamReport {
    /// The watches, by range.
    pub ranges: Vec<ListedWatch>,
    /// True if the client has left too many messages untaken: no further events are read for the stream.
    pub is_behind: bool,
    /// The lowest revision not yet given to the client, over all watches that have begun.
    pub next_revision: Option<i64>,
}

impl Hub {
    /// The watches of the stream, by range.
    #[must_use]
    pub fn list_watches(&self) -> Vec<ListedWatch> {
        let mut ranges: BTreeMap<(Bytes, Bytes), ListedWatch> = BTreeMap::new();
        for watch in self.watches.values() {
            let range = (watch.create.key.clone(), watch.create.range_end());
            ranges.entry(range).or_default().add(watch);
        }
        ranges
            .into_iter()
            .map(|((key, range_end), listed)| ListedWatch { key, range_end, ..listed })
            .collect()
    }

    /// The lowest first revision not wholly delivered, over all watches that have begun.
    #[must_use]
    pub fn lowest_next_revision(&self) -> Option<i64> {
        self.watches.values().map(|watch| watch.cursor.next()).filter(|next| *next > 0).min()
    }
}

impl ListedWatch {
    fn add(&mut self, watch: &HubWatch) {
        self.watches += 1;
        self.events += watch.events;
        self.held_bytes += watch.cursor.held_bytes() as u64;
        if watch.is_live() {
            self.live += 1;
        }
        let next = watch.cursor.next();
        if next > 0 && (!watch.is_live() || watch.cursor.holds()) {
            self.next_revision = Some(self.next_revision.map_or(next, |lowest| lowest.min(next)));
        }
    }
}
