//! The cluster's agreed history: every revision, every compaction, in the order in which all members apply them.
//!
//! Owns: keys, revisions, versions. Must not know members or watches. Invariants: nothing is ever forgotten here, so it is the truth that
//! a checker asks; what a member cannot tell any more, because of a compaction, is decided by who asks for that member.

use std::collections::BTreeMap;

use bytes::Bytes;
use keyward::pb::mvccpb::{Event, KeyValue, event::EventType};

use super::interval::Interval;

/// One operation of a transaction.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Put { key: Bytes, value: Bytes, lease: i64 },
    Delete { key: Bytes, range_end: Bytes },
}

/// What a member applies next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// This revision.
    Revision(i64),
    /// A compaction at this revision.
    Compaction(i64),
}

/// The history. A new one is at revision 1, as in etcd.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    cluster_id: u64,
    /// The events of revision 1, 2, ...
    revisions: Vec<Vec<Event>>,
    live: BTreeMap<Bytes, KeyValue>,
    /// What a key was from a revision on; `None` is deleted.
    past: BTreeMap<Bytes, Vec<(i64, Option<KeyValue>)>>,
    log: Vec<Entry>,
    compacted: i64,
}

impl Store {
    pub(crate) fn new(cluster_id: u64) -> Store {
        Store {
            cluster_id,
            revisions: vec![Vec::new()],
            live: BTreeMap::new(),
            past: BTreeMap::new(),
            log: Vec::new(),
            compacted: -1,
        }
    }

    pub(crate) fn cluster_id(&self) -> u64 {
        self.cluster_id
    }

    /// The newest revision.
    pub(crate) fn revision(&self) -> i64 {
        i64::try_from(self.revisions.len()).expect("a history that fits in memory")
    }

    /// The newest compaction; -1 where there was none.
    pub(crate) fn compacted(&self) -> i64 {
        self.compacted
    }

    /// Applies operations as one revision and returns the revision that etcd answers: the old one where nothing changed. (etcd refuses
    /// a transaction that names a key twice; the caller does not make one.)
    pub(crate) fn txn(&mut self, ops: &[Op]) -> i64 {
        let revision = self.revision() + 1;
        let mut events = Vec::new();
        for op in ops {
            match op {
                Op::Put { key, value, lease } => events.push(self.put(revision, key, value, *lease)),
                Op::Delete { key, range_end } => {
                    let range = Interval::new(key, range_end);
                    let gone: Vec<Bytes> =
                        self.live.keys().filter(|key| range.contains(key)).cloned().collect();
                    events.extend(gone.into_iter().map(|key| self.delete(revision, key)));
                }
            }
        }
        if !events.is_empty() {
            self.revisions.push(events);
            self.log.push(Entry::Revision(revision));
        }
        self.revision()
    }

    fn put(&mut self, revision: i64, key: &Bytes, value: &Bytes, lease: i64) -> Event {
        let old = self.live.get(key);
        let kv = KeyValue {
            key: key.clone(),
            create_revision: old.map_or(revision, |old| old.create_revision),
            mod_revision: revision,
            version: old.map_or(1, |old| old.version + 1),
            value: value.clone(),
            lease,
        };
        self.live.insert(key.clone(), kv.clone());
        self.past.entry(key.clone()).or_default().push((revision, Some(kv.clone())));
        Event { r#type: EventType::Put.into(), kv: Some(kv), prev_kv: None }
    }

    fn delete(&mut self, revision: i64, key: Bytes) -> Event {
        self.live.remove(&key);
        self.past.entry(key.clone()).or_default().push((revision, None));
        let kv = KeyValue { key, mod_revision: revision, ..KeyValue::default() };
        Event { r#type: EventType::Delete.into(), kv: Some(kv), prev_kv: None }
    }

    /// Compacts; what etcd refuses (a revision that is compacted or does not exist yet) changes nothing and is `false`.
    pub(crate) fn compact(&mut self, revision: i64) -> bool {
        let possible = self.compacted < revision && revision <= self.revision();
        if possible {
            self.compacted = revision;
            self.log.push(Entry::Compaction(revision));
        }
        possible
    }

    /// The entry that a member applies after `applied` of them.
    pub(crate) fn entry(&self, applied: usize) -> Option<Entry> {
        self.log.get(applied).copied()
    }

    /// How many entries there are.
    pub(crate) fn entries(&self) -> usize {
        self.log.len()
    }

    /// The events of one revision, in order; none where there is no such revision.
    pub(crate) fn at(&self, revision: i64) -> &[Event] {
        let index = usize::try_from(revision).ok().and_then(|revision| revision.checked_sub(1));
        index.and_then(|index| self.revisions.get(index)).map_or(&[], Vec::as_slice)
    }

    /// The truth: what happened in `from..=to` to the keys of a watch on these two fields, in order.
    pub(crate) fn events(
        &self,
        from: i64,
        to: i64,
        key: &Bytes,
        range_end: &Bytes,
    ) -> impl Iterator<Item = (i64, &Event)> {
        let range = Interval::new(key, range_end);
        let revisions = from.max(1)..=to.min(self.revision());
        revisions.flat_map(move |revision| {
            let range = range.clone();
            let of_range = self.at(revision).iter().filter(move |event| range.contains(key_of(event)));
            of_range.map(move |event| (revision, event))
        })
    }

    /// What a key was at a revision, whatever was compacted since.
    pub(crate) fn value(&self, key: &[u8], revision: i64) -> Option<&KeyValue> {
        let past = self.past.get(key)?;
        let after = past.partition_point(|(at, _)| *at <= revision);
        past[..after].last().and_then(|(_, kv)| kv.as_ref())
    }

    /// The keys that there are now, in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &KeyValue> {
        self.live.values()
    }
}

/// The key of an event.
pub(crate) fn key_of(event: &Event) -> &[u8] {
    event.kv.as_ref().map_or(b"", |kv| kv.key.as_ref())
}

/// Whether an event is a delete.
pub(crate) fn is_delete(event: &Event) -> bool {
    event.r#type == i32::from(EventType::Delete)
}
