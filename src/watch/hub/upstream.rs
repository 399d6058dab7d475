//! What the members say, and what of it the client hears.
//!
//! Owns: reading upstream's answers: created, refused, events, cancelled, compacted, and whose history it is.
//! Must not know: request order downstream.
//! Invariant: nothing that is said of an incarnation which we gave up reaches the client.

use bytes::Bytes;
use tokio::time::Instant;

use super::super::cursor::{Fault, Ready};
use super::super::fault::Planted;
use super::super::wire::Event;
use super::{
    ANY_STREAM, Answer, Creating, Credential, End, Header, Hub, Known, NO_WATCH, Output, Place, Response,
    StreamId, Traits, Want, Watch, WatchKey,
};

/// A client that asked for fragments gets pieces of at most this many bytes of events: etcd's default request limit with
/// its overhead. Small in tests, so that every run of the model cuts.
const FRAGMENT_LIMIT: usize = if cfg!(test) { 64 } else { 2 << 20 };

impl Hub {
    pub(super) fn upstream(&mut self, now: Instant, id: StreamId, message: &Bytes) -> Result<(), End> {
        if !self.streams.contains_key(&id) {
            return Ok(());
        }
        let Some(response) = Response::read(message).ok().filter(is_sound) else {
            self.abandon(now, id);
            return Ok(());
        };
        if let Some(header) = &response.header {
            self.learn(id, header);
        }
        if response.created {
            self.created(now, id, response);
        } else if response.canceled {
            self.canceled(now, id, response);
        } else {
            let revision = response.header.as_ref().map_or(0, |header| header.revision);
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.highest = stream.highest.max(revision);
            }
            if !response.events.is_empty() {
                return self.events(now, id, response);
            } else if revision > 0 {
                self.progressed(id, revision, response);
            }
        }
        Ok(())
    }

    /// Keeps what a header says. Another cluster's header ends what followed the old one.
    pub(super) fn learn(&mut self, id: StreamId, header: &Header) {
        if header.cluster != 0 {
            let pinned = *self.known.cluster.get_or_insert(header.cluster);
            if pinned != header.cluster {
                self.change_cluster(id, header);
            }
        }
        self.known.reached = self.known.reached.max(header.revision);
        self.known.header = Some(header.detached());
    }

    fn change_cluster(&mut self, id: StreamId, header: &Header) {
        self.known =
            Known { cluster: Some(header.cluster), header: Some(header.detached()), ..Known::default() };
        for key in self.watches.keys().copied().collect::<Vec<_>>() {
            let Some(watch) = self.watches.get_mut(&key) else { continue };
            watch.shown_before = 0;
            if watch.id.is_some() {
                self.end_as_compacted(key, header.revision);
            } else if watch.create.start_revision > 0 {
                watch.stale = Some(header.revision);
            } else if watch.is_new_from_now() {
                // Where "now" was is of the old history.
                watch.forget_beginning();
                if matches!(watch.place, Place::Parked) && matches!(watch.answer, Some(Answer::Created(_))) {
                    self.displace(key, ANY_STREAM);
                }
            }
        }
        // What is left waits to be created; it goes where the new cluster is.
        for other in self.streams.keys().copied().filter(|other| *other != id).collect::<Vec<_>>() {
            self.streams.remove(&other);
            self.out.push(Output::Close { stream: other });
            let stranded = |place: &Place| place.stream() == Some(other);
            let keys = self.watches.iter().filter(|(_, watch)| stranded(&watch.place));
            for key in keys.map(|(key, _)| *key).collect::<Vec<_>>() {
                self.displace(key, ANY_STREAM);
            }
        }
    }

    fn created(&mut self, now: Instant, id: StreamId, response: Response) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let answers = |expected: i64| {
            response.watch_id == expected || (response.canceled && response.watch_id == NO_WATCH)
        };
        let Some(Creating { id: expected, resumed }) =
            stream.creating.pop_front().filter(|creating| answers(creating.id))
        else {
            return self.abandon(now, id);
        };
        stream.restoring -= usize::from(resumed);
        // Not there: given up in the meantime.
        let Some(key) = stream.ids.get(&expected).copied() else { return };
        if response.canceled {
            stream.ids.remove(&expected);
            self.refused(key, id, response);
        } else {
            self.accepted(key, id, response);
        }
    }

    /// One more try, with a fresh credential, where that may help; the second refusal is the truth.
    fn refused(&mut self, key: WatchKey, id: StreamId, refusal: Response) {
        let traits = self.streams.get(&id).and_then(|stream| stream.traits).unwrap_or(Traits::UNKNOWN);
        let Some(watch) = self.watches.get_mut(&key) else { return };
        if watch.refusal.is_none() && curable(&refusal.cancel_reason, traits) {
            watch.refusal = Some(Box::new(refusal));
            self.displace(key, Want { newer_than: id, credential: Credential::Fresh });
        } else {
            self.refuse(key, refusal);
        }
    }

    /// sent → live.
    fn accepted(&mut self, key: WatchKey, id: StreamId, mut response: Response) {
        let (Some(watch), Some(stream)) = (self.watches.get_mut(&key), self.streams.get_mut(&id)) else {
            return;
        };
        let traits = stream.traits.unwrap_or(Traits::UNKNOWN);
        let spoiling = watch.id.is_none() && watch.is_spoiling(traits);
        let Place::Upstream(_, incarnation) = &mut watch.place else { return };
        let header = response.header.take().unwrap_or_default();
        incarnation.created = Some(header.revision);
        if spoiling {
            let place = std::mem::replace(&mut watch.place, Place::Parked);
            self.forget_upstream(&place);
            return self.refuse(key, Watch::refused_start(header));
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
            return self.doubt(key, id);
        }
        // This watch lost nothing, but what the client was told of others may be of a history that is gone.
        let shown = self.known.shown;
        if header.revision < shown && stream.verified < shown {
            self.check(key, id);
        }
        let Some(watch) = self.watches.get_mut(&key) else { return };
        if let Some(id) = watch.id {
            if Planted::DoubledCreated.is_on() {
                self.emit(&Response { header: Some(header), watch_id: id, ..response });
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
        watch.answer = Some(Answer::Created(Box::new(response)));
    }

    /// sent → assigned: the watch was registered later than where it has to begin.
    fn register_again(&mut self, key: WatchKey, id: StreamId) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let place = std::mem::replace(&mut watch.place, Place::Nowhere);
        self.forget_upstream(&place);
        self.assign(key, id);
    }

    /// live → doubtful: nothing is delivered before it is known whose history this member tells.
    fn doubt(&mut self, key: WatchKey, id: StreamId) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let place = std::mem::replace(&mut watch.place, Place::Doubtful(id));
        self.forget_upstream(&place);
        self.interrupt_round();
        self.check(key, id);
    }

    fn events(&mut self, now: Instant, id: StreamId, mut response: Response) -> Result<(), End> {
        let Some(&key) = self.streams.get(&id).and_then(|stream| stream.ids.get(&response.watch_id)) else {
            return Ok(());
        };
        let Some(watch) = self.watches.get_mut(&key) else { return Ok(()) };
        let Place::Upstream(_, incarnation) = &mut watch.place else { return Ok(()) };
        if incarnation.created.is_none() {
            self.abandon(now, id);
            return Ok(());
        }
        incarnation.heard = true;
        if watch.id.is_none() {
            self.park(key);
            return Ok(());
        }
        self.held -= watch.cursor.held_bytes();
        let absorbed = watch.cursor.absorb(std::mem::take(&mut response.events), response.fragment);
        self.held += watch.cursor.held_bytes();
        match absorbed {
            Ok(Some(ready)) => self.deliver(key, response, ready),
            Ok(None) => {}
            Err(Fault::Disorder) => self.abandon(now, id),
            Err(Fault::TooLarge) => return Err(End::RevisionTooLarge),
        }
        Ok(())
    }

    /// live → parked: its events come before its Created could be told. They are not kept; it begins anew in its turn.
    fn park(&mut self, key: WatchKey) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let place = std::mem::replace(&mut watch.place, Place::Parked);
        self.forget_upstream(&place);
    }

    fn deliver(&mut self, key: WatchKey, mut response: Response, ready: Ready) {
        let Some(watch) = self.watches.get(&key) else { return };
        let Some(watch_id) = watch.id else { return };
        let fragment = watch.create.fragment;
        let header = response.header.take().unwrap_or_else(|| self.header_at(ready.last));
        response.header = Some(header.with_revision(ready.last));
        response.watch_id = watch_id;
        response.fragment = false;
        self.known.delivered = self.known.delivered.max(ready.last);
        if !fragment {
            response.events = ready.events;
            return self.emit(&response);
        }
        let mut pieces = pieces(ready.events).into_iter().peekable();
        while let Some(events) = pieces.next() {
            response.events = events;
            response.fragment = pieces.peek().is_some();
            self.emit(&response);
        }
    }

    fn canceled(&mut self, now: Instant, id: StreamId, response: Response) {
        let Some(&key) = self.streams.get(&id).and_then(|stream| stream.ids.get(&response.watch_id)) else {
            return;
        };
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let Place::Upstream(_, incarnation) = &watch.place else { return };
        if incarnation.created.is_none() {
            return self.abandon(now, id);
        }
        let compacted = response.compact_revision;
        if compacted > 0 && watch.id.is_none() {
            // Told in its turn, when it begins anew.
            self.park(key);
        } else if compacted > watch.cursor.next().max(0) {
            self.tell_compacted(key, response);
        } else if compacted > incarnation.start.max(0) {
            // Only what it had delivered already is gone: begin where it really stands.
            let place = std::mem::replace(&mut watch.place, Place::Nowhere);
            watch.exact = true;
            self.held -= watch.cursor.held_bytes();
            watch.cursor.drop_held();
            self.forget_upstream(&place);
            self.assign(key, id);
            self.interrupt_round();
        } else {
            // Not the client's wish, and not compaction: it goes on elsewhere.
            self.trouble(now);
            self.displace(key, Want { newer_than: id, credential: Credential::Current });
        }
    }
}

impl Watch {
    /// The revision after which this watch "from now" begins, now that its create was answered at revision `created`; none where what
    /// was registered may begin later than that.
    ///
    /// A member before V5 registers it at `created`, a later one at `created` or shortly before. What came before `created` is dropped
    /// in either case, so that the watch has one beginning, whichever member serves it next: no write that its client sent after the
    /// create is among it, since those wait for this answer.
    fn beginning(&mut self, created: i64) -> Option<i64> {
        let Place::Upstream(_, incarnation) = &self.place else { return None };
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

impl Known {
    /// The history now ends at `revision`.
    pub(super) fn step_back(&mut self, revision: i64) {
        self.reached = self.reached.min(revision);
        self.shown = self.shown.min(revision);
        self.delivered = self.delivered.min(revision);
    }
}

/// Events come alone, and nothing but events in fragments.
fn is_sound(response: &Response) -> bool {
    let answers = response.created || response.canceled;
    if response.events.is_empty() { !response.fragment } else { !answers }
}

/// Whether a fresh credential may turn this refusal of etcd's. Old members (before V6) say "permission denied" to
/// everything.
fn curable(reason: &[u8], traits: Traits) -> bool {
    let reason = String::from_utf8_lossy(reason);
    let says = |text: &str| reason.contains(text);
    says("invalid auth token")
        || says("revision of auth store is old")
        || says("revision in header is old")
        || says("user name is empty")
        || (!traits.exact_refusals && says("permission denied"))
}

/// Cuts events into runs of at most [`FRAGMENT_LIMIT`] bytes, each with one event at least.
fn pieces(events: Vec<Event>) -> Vec<Vec<Event>> {
    let mut pieces: Vec<Vec<Event>> = Vec::new();
    let mut bytes = 0;
    for event in events {
        bytes += event.raw.len();
        match pieces.last_mut() {
            Some(piece) if bytes < FRAGMENT_LIMIT => piece.push(event),
            _ => {
                bytes = event.raw.len();
                pieces.push(vec![event]);
            }
        }
    }
    pieces
}
