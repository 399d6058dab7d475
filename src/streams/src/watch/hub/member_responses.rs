//! Messages of the members, and their translation into messages for the client.
//!
//! Owns: handling of upstream's responses (created, refused, events, cancelled, compacted), and the check for
//! another cluster or history. Must not know: downstream request order.
//! Invariant: no message for a registration given up by the hub reaches the client.

use bytes::Bytes;
use tokio::time::Instant;

use super::super::cursor::{CursorFault, WholeRevisions};
use super::super::planted_fault::PlantedFault;
use super::super::watch_messages::WatchEventBytes;
use super::{
    ANY_STREAM, CreateAnswer, Hub, HubClusterView, HubOutput, HubWatch, NO_WATCH, SplicedWatchResponse,
    StreamCredential, StreamRequirement, UnansweredCreate, UpstreamStreamId, WatchKey, WatchPlacement,
    WatchResponseHeader, WatchStreamEnd, WatchTraits,
};
use keyward_etcd::refusal::{Refusal, RefusalReason};

impl Hub {
    pub(super) fn upstream(
        &mut self,
        now: Instant,
        id: UpstreamStreamId,
        message: &Bytes,
    ) -> Result<(), WatchStreamEnd> {
        if !self.streams.contains_key(&id) {
            return Ok(());
        }
        let Some(response) = SplicedWatchResponse::read(message).ok().filter(is_sound) else {
            self.abandon(now, id);
            return Ok(());
        };
        if let Some(header) = &response.header {
            self.learn(id, header);
        }
        let is_feed = self.streams.get(&id).is_some_and(|stream| stream.is_feed);
        if is_feed && (response.created || response.canceled) {
            // A feed passes on events and progress only.
            self.abandon(now, id);
        } else if response.created {
            self.created(now, id, response);
        } else if response.canceled {
            self.canceled(now, id, response);
        } else {
            let revision = response.header.as_ref().map_or(0, |header| header.revision);
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.highest = stream.highest.max(revision);
            }
            if is_feed {
                return self.feed_message(now, id, &response);
            } else if !response.events.is_empty() {
                return self.events(now, id, response);
            } else if revision > 0 {
                self.progressed(id, revision, response);
            }
        }
        Ok(())
    }

    /// Keeps the header's cluster id and revision. A header of another cluster ends the watches that followed
    /// the old cluster.
    pub(super) fn learn(&mut self, id: UpstreamStreamId, header: &WatchResponseHeader) {
        if header.cluster != 0 {
            let pinned = *self.cluster_view.cluster.get_or_insert(header.cluster);
            if pinned != header.cluster {
                self.change_cluster(id, header);
            }
        }
        self.cluster_view.reached = self.cluster_view.reached.max(header.revision);
        self.cluster_view.header.store(header.raw());
    }

    fn change_cluster(&mut self, id: UpstreamStreamId, header: &WatchResponseHeader) {
        self.cluster_view = HubClusterView { cluster: Some(header.cluster), ..HubClusterView::default() };
        self.cluster_view.header.store(header.raw());
        for key in self.watches.keys().copied().collect::<Vec<_>>() {
            let Some(watch) = self.watches.get_mut(&key) else { continue };
            watch.shown_before = 0;
            if watch.id.is_some() {
                self.end_as_compacted(key, header.revision);
            } else if watch.create.start_revision > 0 {
                watch.compacted_at = Some(header.revision);
            } else if watch.is_new_from_now() {
                // The beginning of a watch "from now" belongs to the old history.
                watch.forget_beginning();
                if matches!(watch.place, WatchPlacement::Parked)
                    && matches!(watch.answer, Some(CreateAnswer::Created(_)))
                {
                    self.unassign(key, ANY_STREAM);
                }
            }
        }
        // The remaining watches wait to be created, on the new cluster.
        for other in self.streams.keys().copied().filter(|other| *other != id).collect::<Vec<_>>() {
            self.streams.remove(&other);
            self.out.push(HubOutput::Close { stream: other });
            let stranded = |place: &WatchPlacement| place.stream() == Some(other);
            let keys = self.watches.iter().filter(|(_, watch)| stranded(&watch.place));
            for key in keys.map(|(key, _)| *key).collect::<Vec<_>>() {
                self.unassign(key, ANY_STREAM);
            }
        }
    }

    fn created(&mut self, now: Instant, id: UpstreamStreamId, response: SplicedWatchResponse) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let answers = |expected: i64| {
            response.watch_id == expected || (response.canceled && response.watch_id == NO_WATCH)
        };
        let Some(UnansweredCreate { id: expected, resumed }) =
            stream.creating.pop_front().filter(|creating| answers(creating.id))
        else {
            return self.abandon(now, id);
        };
        stream.restoring -= usize::from(resumed);
        // Missing if the registration was given up meanwhile.
        let Some(key) = stream.ids.get(expected) else { return };
        if response.canceled {
            stream.ids.remove(expected);
            self.refused(key, id, response);
        } else {
            self.accepted(key, id, response);
        }
    }

    /// sent → nowhere for one more try with a fresh credential, if a fresh credential may cure the refusal;
    /// else refused. The second refusal is final.
    fn refused(&mut self, key: WatchKey, id: UpstreamStreamId, refusal: SplicedWatchResponse) {
        let traits = self.streams.get(&id).and_then(|stream| stream.traits).unwrap_or(WatchTraits::UNKNOWN);
        let Some(watch) = self.watches.get_mut(&key) else { return };
        if watch.refusal.is_none() && curable(&refusal.cancel_reason, traits) {
            watch.refusal = Some(Box::new(refusal));
            self.unassign(key, StreamRequirement { newer_than: id, credential: StreamCredential::Fresh });
        } else {
            if refusal.compact_revision == 0 {
                self.note_refused(key, Refusal::of_cancel_reason(&refusal.cancel_reason));
            }
            self.refuse(key, refusal);
        }
    }

    /// sent → live.
    fn accepted(&mut self, key: WatchKey, id: UpstreamStreamId, mut response: SplicedWatchResponse) {
        let (Some(watch), Some(stream)) = (self.watches.get_mut(&key), self.streams.get_mut(&id)) else {
            return;
        };
        let traits = stream.traits.unwrap_or(WatchTraits::UNKNOWN);
        let spoiling = watch.id.is_none() && watch.has_harmful_start(traits);
        let WatchPlacement::Upstream(_, incarnation) = &mut watch.place else { return };
        let header = response.header.take().unwrap_or_default();
        incarnation.created = Some(header.revision);
        if spoiling {
            let place = std::mem::replace(&mut watch.place, WatchPlacement::Parked);
            self.forget_upstream(&place);
            let refusal = HubWatch::refused_start(header);
            let noted = Refusal::of_cancel_reason(&refusal.cancel_reason).because(RefusalReason::Malformed);
            self.note_refused(key, noted);
            return self.refuse(key, refusal);
        }
        watch.refusal = None;
        let known = match watch.id {
            Some(_) => watch.cursor.seen(),
            None if watch.create.start_revision == 0 => {
                watch.shown_before.max(watch.begins_after.unwrap_or_default())
            }
            None => 0,
        };
        if header.revision < known && stream.verified < known {
            return self.verify_history(key, id);
        }
        // Revisions shown after the create may be above the beginning of the watch: the watch itself lost no
        // events. But those revisions may belong to a lost history.
        let shown = self.cluster_view.shown;
        if header.revision < shown && stream.verified < shown {
            self.check(key, id);
        }
        let Some(watch) = self.watches.get_mut(&key) else { return };
        if let Some(id) = watch.id {
            if PlantedFault::DoubledCreated.is_on() {
                self.emit(&SplicedWatchResponse { header: Some(header), watch_id: id, ..response });
            }
            return;
        }
        let mut told = header.revision;
        if watch.create.start_revision == 0 {
            let Some(begins_after) = watch.beginning(header.revision) else {
                return self.register_again(key, id);
            };
            told = begins_after;
        }
        response.header = Some(header.with_revision(told));
        watch.answer = Some(CreateAnswer::Created(Box::new(response)));
    }

    /// sent → assigned: the watch was registered later than its required beginning.
    fn register_again(&mut self, key: WatchKey, id: UpstreamStreamId) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let place = std::mem::replace(&mut watch.place, WatchPlacement::Nowhere);
        self.forget_upstream(&place);
        self.assign(key, id);
    }

    /// live → doubtful: no events are delivered until a linearizable read has confirmed the member's history.
    fn verify_history(&mut self, key: WatchKey, id: UpstreamStreamId) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let place = std::mem::replace(&mut watch.place, WatchPlacement::Doubtful(id));
        self.forget_upstream(&place);
        self.interrupt_round();
        self.check(key, id);
    }

    pub(super) fn events(
        &mut self,
        now: Instant,
        id: UpstreamStreamId,
        mut response: SplicedWatchResponse,
    ) -> Result<(), WatchStreamEnd> {
        let Some(key) = self.streams.get(&id).and_then(|stream| stream.ids.get(response.watch_id)) else {
            return Ok(());
        };
        let Some(watch) = self.watches.get_mut(&key) else { return Ok(()) };
        let WatchPlacement::Upstream(_, incarnation) = &mut watch.place else { return Ok(()) };
        if incarnation.created.is_none() {
            self.abandon(now, id);
            return Ok(());
        }
        incarnation.has_messages = true;
        if watch.id.is_none() {
            self.park(key);
            return Ok(());
        }
        self.held_bytes -= watch.cursor.held_bytes();
        let events = std::mem::take(&mut response.events);
        let absorbed = watch.cursor.absorb(events, response.fragment, self.limits.held);
        self.held_bytes += watch.cursor.held_bytes();
        match absorbed {
            Ok(Some(ready)) => self.deliver(key, response, ready),
            Ok(None) => {}
            Err(CursorFault::Disorder) => self.abandon(now, id),
            Err(CursorFault::TooLarge) => return Err(WatchStreamEnd::RevisionTooLarge),
        }
        Ok(())
    }

    /// live → parked: events arrived before the Created could be told. The events are dropped, and the watch
    /// is created again in its turn.
    fn park(&mut self, key: WatchKey) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let place = std::mem::replace(&mut watch.place, WatchPlacement::Parked);
        self.forget_upstream(&place);
    }

    fn deliver(&mut self, key: WatchKey, mut response: SplicedWatchResponse, ready: WholeRevisions) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let Some(watch_id) = watch.id else { return };
        watch.events += ready.events.len() as u64;
        let fragment = watch.create.fragment;
        let header = response.header.take().unwrap_or_else(|| self.header_at(ready.last));
        response.header = Some(header.with_revision(ready.last));
        response.watch_id = watch_id;
        response.fragment = false;
        self.cluster_view.delivered = self.cluster_view.delivered.max(ready.last);
        if !fragment {
            response.events = ready.events;
            return self.emit(&response);
        }
        let mut pieces = pieces(ready.events, self.limits.fragment).into_iter().peekable();
        while let Some(events) = pieces.next() {
            response.events = events;
            response.fragment = pieces.peek().is_some();
            self.emit(&response);
        }
    }

    fn canceled(&mut self, now: Instant, id: UpstreamStreamId, response: SplicedWatchResponse) {
        let Some(key) = self.streams.get(&id).and_then(|stream| stream.ids.get(response.watch_id)) else {
            return;
        };
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let WatchPlacement::Upstream(_, incarnation) = &watch.place else { return };
        if incarnation.created.is_none() {
            return self.abandon(now, id);
        }
        let compacted = response.compact_revision;
        if compacted > 0 && watch.id.is_none() {
            // Created again in its turn, and told as compacted then.
            self.park(key);
        } else if compacted > watch.cursor.next().max(0) {
            self.tell_compacted(key, response);
        } else if compacted > incarnation.start.max(0) {
            // Only delivered revisions were compacted: resume at the next revision, or at the last proven one
            // if the member still has it.
            let place = std::mem::replace(&mut watch.place, WatchPlacement::Nowhere);
            watch.resumes_exactly = compacted > watch.cursor.seen();
            self.held_bytes -= watch.cursor.held_bytes();
            watch.cursor.drop_unfinished_revision();
            self.forget_upstream(&place);
            self.assign(key, id);
            self.interrupt_round();
        } else {
            // Neither requested by the client nor a compaction: the watch resumes on another stream.
            self.count_loss(now);
            self.unassign(key, StreamRequirement { newer_than: id, credential: StreamCredential::Current });
        }
    }
}

impl HubWatch {
    /// The revision after which a watch "from now" begins, given the header revision of Created; `None` if
    /// the registration may begin later.
    ///
    /// A member registers the watch exactly at `created`; members from 3.4.38, 3.5.22 and 3.6.2 on register
    /// the watch at `created` or shortly before (`docs/etcd-facts.md#v5`). Events up to `created` are dropped
    /// in either case, so that the watch has the same beginning on every member. No write sent by the client
    /// after the create is among the dropped events, since writes wait for Created.
    fn beginning(&mut self, created: i64) -> Option<i64> {
        let WatchPlacement::Upstream(_, incarnation) = &self.place else { return None };
        let begins_after = match (incarnation.start, self.begins_after) {
            (0, None) => created.max(self.shown_before),
            (0, Some(after)) if created <= after => after,
            (start, Some(after)) if start > 0 && start <= after.saturating_add(1) => after,
            _ => return None,
        };
        self.begin_after(begins_after);
        Some(begins_after)
    }
}

impl HubClusterView {
    /// The history now ends at `revision`.
    pub(super) fn step_back(&mut self, revision: i64) {
        self.reached = self.reached.min(revision);
        self.shown = self.shown.min(revision);
        self.delivered = self.delivered.min(revision);
    }
}

/// True if events come alone, and only events are fragmented.
fn is_sound(response: &SplicedWatchResponse) -> bool {
    let answers = response.created || response.canceled;
    if response.events.is_empty() { !response.fragment } else { !answers }
}

/// True if a fresh credential may cure etcd's refusal. Members older than 3.4.22 and 3.5.6 say "permission
/// denied" for every refusal (`docs/etcd-facts.md#v6`).
fn curable(reason: &[u8], traits: WatchTraits) -> bool {
    let reason = String::from_utf8_lossy(reason);
    let says = |text: &str| reason.contains(text);
    says("invalid auth token")
        || says("revision of auth store is old")
        || says("revision in header is old")
        || says("user name is empty")
        || (!traits.exact_refusals && says("permission denied"))
}

/// Splits events into runs of at most `limit` bytes, with at least one event each.
fn pieces(events: Vec<WatchEventBytes>, limit: usize) -> Vec<Vec<WatchEventBytes>> {
    let mut pieces: Vec<Vec<WatchEventBytes>> = Vec::new();
    let mut bytes = 0;
    for event in events {
        bytes += event.raw.len();
        match pieces.last_mut() {
            Some(piece) if bytes < limit => piece.push(event),
            _ => {
                bytes = event.raw.len();
                pieces.push(vec![event]);
            }
        }
    }
    pieces
}
