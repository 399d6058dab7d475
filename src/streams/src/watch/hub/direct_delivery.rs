//! Delivery of events in the steady state: the way of nearly all messages.
//!
//! Owns: the conditions under which events only pass through. Must not know: every other state of a watch
//! (see `member_responses`, which delivers the same events in the same way, only slower).
//! Invariant: a message is delivered here whole, or the hub is unchanged.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use bytes::BytesMut;

use super::{Hub, HubOutput, UpstreamStreamId, WatchKey, WatchPlacement};
use crate::watch::watch_messages::PlainEvents;
use keyward_etcd::identity::Revision;

/// The watches registered on an upstream stream, by their ids there. The first stands in `one`: most streams
/// have no other.
#[derive(Debug, Default)]
pub(super) struct WatchesByUpstreamId {
    one: Option<(i64, WatchKey)>,
    others: HashMap<i64, WatchKey, BuildHasherDefault<UpstreamIdHasher>>,
}

/// Hashes the ids assigned by the hub: no client can choose ids that collide.
#[derive(Debug, Default)]
struct UpstreamIdHasher(u64);

impl WatchesByUpstreamId {
    pub(super) fn get(&self, id: i64) -> Option<WatchKey> {
        match self.one {
            Some((one, key)) if one == id => Some(key),
            _ => self.others.get(&id).copied(),
        }
    }

    pub(super) fn contains(&self, id: i64) -> bool {
        self.get(id).is_some()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.one.is_none() && self.others.is_empty()
    }

    /// All watches with their ids.
    pub(super) fn iter(&self) -> impl Iterator<Item = (i64, WatchKey)> {
        self.one.iter().copied().chain(self.others.iter().map(|(id, key)| (*id, *key)))
    }

    /// Registers a watch under an id that is not in use.
    pub(super) fn insert(&mut self, id: i64, key: WatchKey) {
        if self.is_empty() {
            self.one = Some((id, key));
        } else {
            self.others.insert(id, key);
        }
    }

    pub(super) fn remove(&mut self, id: i64) -> Option<WatchKey> {
        match self.one.take_if(|(one, _)| *one == id) {
            Some((_, key)) => Some(key),
            None => self.others.remove(&id),
        }
    }
}

impl Hub {
    /// As [`Hub::deliver_directly`], with the client's message as an output. Returns false if the message was
    /// not delivered.
    pub(super) fn emit_directly(&mut self, stream: UpstreamStreamId, message: &[u8]) -> bool {
        let mut told = BytesMut::new();
        let delivered = self.deliver_directly(stream, None, message, &mut told);
        self.out.extend(delivered.map(|_| HubOutput::Emit(told.freeze())));
        delivered.is_some()
    }

    /// Delivers a response of whole new revisions to a watch that stands: appends the client's message to
    /// `to`, and returns the revision in its header. `None`, with everything unchanged, if the message needs
    /// [`Hub::handle`]. `watch` is a watch served by a feed; else the message names the watch.
    pub fn deliver_directly(
        &mut self,
        stream: UpstreamStreamId,
        watch: Option<WatchKey>,
        message: &[u8],
        to: &mut BytesMut,
    ) -> Option<Revision> {
        // Any of these may have to go on after an event.
        let is_steady = self.pending.is_empty() && self.unsent.is_empty() && self.round.is_none();
        if !is_steady || self.ended {
            return None;
        }
        let events = PlainEvents::read(message).filter(|it| self.cluster_view.cluster == Some(it.cluster))?;
        let carrier = self.streams.get_mut(&stream)?;
        let named = || carrier.ids.get(events.watch_id).filter(|_| !carrier.is_feed);
        let watch = self.watches.get_mut(&watch.or_else(named)?)?;
        let (Some(watch_id), WatchPlacement::Upstream(_, incarnation)) = (watch.id, &mut watch.place) else {
            return None;
        };
        let passes = incarnation.created.is_some()
            && !watch.create.fragment
            && watch.cursor.pass(events.first, events.last);
        if !passes {
            return None;
        }
        incarnation.has_messages = true;
        watch.events += events.count;
        carrier.highest = carrier.highest.max(events.last);
        let view = &mut self.cluster_view;
        view.reached = view.reached.max(events.last);
        view.delivered = view.delivered.max(events.last);
        view.shown = view.shown.max(events.last);
        view.header.store(events.header);
        events.write(watch_id, to);
        Some(Revision(events.last))
    }
}

impl Hasher for UpstreamIdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // Fibonacci hashing: consecutive ids differ in the high bits, by which the table groups its entries.
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_i64(&mut self, number: i64) {
        self.write_u64(number.cast_unsigned());
    }
}
