//! One member: how far it has come in the cluster's history.
//!
//! Owns: what it applied. Must not know how a stream tells it to a client. Invariant: entries are applied in order, each once, and every
//! stream of the member hears of each, or of a snapshot in their place.

use keyward::pb::etcdserverpb::ResponseHeader;

use super::{
    store::{Entry, Store},
    stream::WatchStream,
};

/// A member of a cluster. A new one has applied nothing, and is at revision 1.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) id: u64,
    pub(crate) raft_term: u64,
    entries: usize,
    applied: i64,
    compacted: i64,
}

impl Member {
    pub(crate) fn new(id: u64, raft_term: u64) -> Member {
        Member { id, raft_term, entries: 0, applied: 1, compacted: -1 }
    }

    /// Its revision.
    pub(crate) fn applied(&self) -> i64 {
        self.applied
    }

    /// The newest compaction that it knows; -1 where there was none.
    pub(crate) fn compacted(&self) -> i64 {
        self.compacted
    }

    /// Whether it has applied everything.
    pub(crate) fn is_current(&self, store: &Store) -> bool {
        self.entries == store.entries()
    }

    /// Applies the next entry and tells its streams; `None` where there is none. Streams that are not told of an entry are not this
    /// member's any more.
    pub(crate) fn apply<'a>(
        &mut self,
        store: &Store,
        streams: impl IntoIterator<Item = &'a mut WatchStream>,
    ) -> Option<Entry> {
        let entry = store.entry(self.entries)?;
        self.entries += 1;
        match entry {
            Entry::Compaction(revision) => self.compacted = revision,
            Entry::Revision(revision) => {
                self.applied = revision;
                streams.into_iter().for_each(|stream| stream.notify(store, revision));
            }
        }
        Some(entry)
    }

    /// Takes a snapshot from the leader in place of the entries that it misses.
    pub(crate) fn restore<'a>(
        &mut self,
        store: &Store,
        streams: impl IntoIterator<Item = &'a mut WatchStream>,
    ) {
        self.entries = store.entries();
        self.applied = store.revision();
        self.compacted = store.compacted();
        streams.into_iter().for_each(WatchStream::restored);
    }

    /// The header of an answer.
    pub(crate) fn header(&self, store: &Store, revision: i64) -> ResponseHeader {
        ResponseHeader {
            cluster_id: store.cluster_id(),
            member_id: self.id,
            revision,
            raft_term: self.raft_term,
        }
    }
}
