//! Records that are left out: their number, and the peers of most of them.
//!
//! Owns: the counts until they are recorded, and their bound. Must not know: why a record is left out.
//! Invariant: every record left out is in the sum; peers beyond the bound are in the sum alone.

use std::collections::BTreeMap;

use serde::Serialize;

/// Peers named in one record.
const MOST_NAMED: usize = 16;

/// The counts since the last record about them.
#[derive(Debug, Default)]
pub(super) struct LeftOut(LeftOutCounts);

/// The number of records left out, in all and by peer.
#[derive(Debug, Default)]
pub(super) struct LeftOutCounts {
    pub(super) count: u64,
    by_peer: BTreeMap<Box<str>, u64>,
}

/// A peer, and the number of its records that were left out.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct LeftOutPeer<'a> {
    peer: &'a str,
    count: u64,
}

impl LeftOut {
    /// Counts a record of a peer, whose name is short enough for a record.
    pub(super) fn count(&mut self, peer: Option<&str>) {
        self.0.count += 1;
        if let Some(peer) = peer {
            self.add_peer(peer, 1);
        }
    }

    fn add_peer(&mut self, peer: &str, more: u64) {
        let is_full = self.0.by_peer.len() >= MOST_NAMED;
        match self.0.by_peer.get_mut(peer) {
            Some(count) => *count += more,
            None if is_full => {}
            None => drop(self.0.by_peer.insert(peer.into(), more)),
        }
    }

    pub(super) fn add(&mut self, counts: LeftOutCounts) {
        self.0.count += counts.count;
        counts.by_peer.iter().for_each(|(peer, count)| self.add_peer(peer, *count));
    }

    pub(super) fn take(&mut self) -> LeftOutCounts {
        std::mem::take(&mut self.0)
    }
}

impl LeftOutCounts {
    /// The named peers, those with most records first.
    pub(super) fn peers(&self) -> Vec<LeftOutPeer<'_>> {
        let named = self.by_peer.iter().map(|(peer, count)| LeftOutPeer { peer, count: *count });
        let mut peers: Vec<_> = named.collect();
        peers.sort_by_key(|peer| std::cmp::Reverse(peer.count));
        peers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_named_up_to_a_bound_and_all_are_counted() {
        let mut left_out = LeftOut::default();
        left_out.count(None);
        for peer in 0..2 * MOST_NAMED {
            left_out.count(Some(&format!("peer {peer:02}")));
        }
        for _ in 0..4 {
            left_out.count(Some("peer 03"));
        }
        let taken = left_out.take();
        assert_eq!((taken.count, taken.peers().len()), (37, MOST_NAMED));
        assert_eq!(taken.peers()[0], LeftOutPeer { peer: "peer 03", count: 5 });
        assert_eq!(left_out.take().count, 0);
        left_out.add(taken);
        left_out.count(Some("peer 03"));
        assert_eq!(left_out.take().peers()[0].count, 6, "the record was not written");
    }
}
