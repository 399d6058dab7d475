//! One watch as the store of a member keeps it (`watcher`, `watcherGroup` and `eventBatch` in etcd).
//!
//! Owns: which events are for it, and from where on. Must not know the stream's messages.

use keyward::pb::mvccpb::Event;

use super::{
    flavor::Flavor,
    interval::Interval,
    member::Member,
    store::{Store, is_delete, key_of},
};

/// A watch that was created and not cancelled.
#[derive(Clone, Debug)]
pub(crate) struct Watcher {
    pub(crate) range: Interval,
    pub(crate) filters: Filters,
    /// As it was asked, or as the old servers put it: one after the revision of Created.
    pub(crate) start: i64,
    /// `minRev`: what is below is not for it.
    pub(crate) least: i64,
    pub(crate) place: Place,
}

/// In which of the store's groups it is.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Synced,
    Unsynced,
    /// What the full channel did not take.
    Victim(Batch),
    /// It was told of its compaction. It stays in the stream until it is cancelled.
    Compacted,
}

/// `NOPUT` and `NODELETE`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Filters {
    pub(crate) no_put: bool,
    pub(crate) no_delete: bool,
}

/// What is sent to a watch at once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Batch {
    pub(crate) events: Vec<Event>,
    /// The first revision that did not fit.
    pub(crate) more: Option<i64>,
}

impl Watcher {
    /// The events of one revision that are for it, filters apart.
    pub(crate) fn at(&self, store: &Store, revision: i64) -> Vec<Event> {
        if revision < self.least {
            return Vec::new();
        }
        let events = store.at(revision).iter().filter(|event| self.range.contains(key_of(event)));
        events.cloned().collect()
    }

    /// What it missed in `from..=` the member's revision, at most `revisions` of them.
    pub(crate) fn missed(
        &self,
        flavor: Flavor,
        store: &Store,
        member: &Member,
        from: i64,
        revisions: usize,
    ) -> Batch {
        let mut batch = Batch::default();
        let mut taken = 0;
        for revision in from.max(self.least).max(1)..=member.applied() {
            let mut events = self.at(store, revision);
            if revision == member.compacted() && !flavor.keeps_compacted_tombstone {
                events.retain(|event| !is_delete(event));
            }
            if events.is_empty() {
                continue;
            }
            if taken == revisions {
                batch.more = Some(revision);
                break;
            }
            taken += 1;
            batch.events.extend(events);
        }
        batch
    }
}

impl Filters {
    pub(crate) fn pass(self, event: &Event) -> bool {
        !(if is_delete(event) { self.no_delete } else { self.no_put })
    }
}
