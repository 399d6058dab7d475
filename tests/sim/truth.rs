//! What really happened: every history that was behind the addresses, one after the other.
//!
//! Owns: the eras. In each there is one history; the next begins where another cluster took the addresses, or an older
//! state was restored. Must not know: members, streams, clients.

use std::collections::BTreeSet;

use bytes::Bytes;
use keyward::pb::mvccpb::{Event, KeyValue};

use crate::model::store::{Op, Store, is_delete, key_of};

/// The keys of the world: one byte each.
pub(crate) const KEYS: &[u8] = b"abcdef";

/// A history.
pub(crate) struct Era {
    pub(crate) store: Store,
    /// What was asked, revision by revision, for a restore.
    log: Vec<Vec<Op>>,
    /// What it has in common with the era before it: everything up to here. Nothing, where it is another cluster's.
    pub(crate) base: Option<i64>,
    pub(crate) compactions: BTreeSet<i64>,
}

/// All eras; the last one is now.
pub(crate) struct Truth {
    pub(crate) eras: Vec<Era>,
}

/// What a watch is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) low: u8,
    pub(crate) high: u8,
    pub(crate) no_put: bool,
    pub(crate) no_delete: bool,
}

impl Wanted {
    pub(crate) fn has(&self, event: &Event) -> bool {
        let filtered = if is_delete(event) { self.no_delete } else { self.no_put };
        let key = key_of(event).first().copied().unwrap_or_default();
        !filtered && (self.low..=self.high).contains(&key)
    }
}

impl Era {
    fn new(cluster: u64) -> Self {
        Self { store: Store::new(cluster), log: Vec::new(), base: None, compactions: BTreeSet::new() }
    }

    pub(crate) fn head(&self) -> i64 {
        self.store.revision()
    }

    /// One transaction; whether it made a revision.
    pub(crate) fn write(&mut self, ops: Vec<Op>) -> bool {
        let before = self.head();
        let made = self.store.txn(&ops) > before;
        if made {
            self.log.push(ops);
        }
        made
    }

    pub(crate) fn compact(&mut self, revision: i64) -> bool {
        let done = self.store.compact(revision);
        if done {
            self.compactions.insert(revision);
        }
        done
    }

    /// The events of a revision that a watch wants.
    pub(crate) fn of<'a>(&'a self, revision: i64, wanted: &'a Wanted) -> impl Iterator<Item = &'a Event> {
        self.store.at(revision).iter().filter(|event| wanted.has(event))
    }

    /// The first revision from `from` on, up to `to`, in which a watch wants something.
    pub(crate) fn next(&self, from: i64, to: i64, wanted: &Wanted) -> Option<i64> {
        (from.max(1)..=to.min(self.head())).find(|revision| self.of(*revision, wanted).next().is_some())
    }

    /// The value of an event's key before it.
    pub(crate) fn before(&self, event: &Event) -> Option<&KeyValue> {
        let kv = event.kv.as_ref()?;
        self.store.value(&kv.key, kv.mod_revision - 1)
    }
}

impl Truth {
    pub(crate) fn new(cluster: u64) -> Self {
        Self { eras: vec![Era::new(cluster)] }
    }

    pub(crate) fn now(&self) -> &Era {
        self.eras.last().expect("there is always one")
    }

    pub(crate) fn now_mut(&mut self) -> &mut Era {
        self.eras.last_mut().expect("there is always one")
    }

    pub(crate) fn index(&self) -> usize {
        self.eras.len() - 1
    }

    /// Another cluster takes the addresses.
    pub(crate) fn swap(&mut self, cluster: u64) {
        self.eras.push(Era::new(cluster));
    }

    /// The state of revision `base` is restored under the same name.
    pub(crate) fn restore(&mut self, base: i64) {
        let old = self.now();
        let mut era = Era::new(old.store.cluster_id());
        era.base = Some(base);
        let kept = usize::try_from(base - 1).expect("a revision that was there");
        for ops in old.log[..kept].iter().cloned() {
            era.write(ops);
        }
        self.eras.push(era);
    }

    /// Whether a watch to which `proven` was told can go on from era `from` in the next one.
    pub(crate) fn goes_on(&self, from: usize, proven: i64) -> bool {
        self.eras.get(from + 1).and_then(|next| next.base).is_some_and(|base| proven <= base)
    }

    /// Whether history went back since that era: what was known may be gone.
    pub(crate) fn went_back_since(&self, era: usize) -> bool {
        era < self.index()
    }

    /// The newest era whose history has this revision.
    pub(crate) fn era_of(&self, cluster: u64, revision: i64) -> Option<usize> {
        let has =
            |era: &usize| self.eras[*era].store.cluster_id() == cluster && revision <= self.eras[*era].head();
        (0..self.eras.len()).rev().find(has)
    }

    /// Whether that header could have been sent: a member of a cluster that was there, at a revision that it had.
    pub(crate) fn has_header(&self, cluster: u64, revision: i64) -> bool {
        self.era_of(cluster, revision).is_some()
    }
}

/// A key of the world.
pub(crate) fn key(byte: u8) -> Bytes {
    Bytes::copy_from_slice(&[byte])
}
