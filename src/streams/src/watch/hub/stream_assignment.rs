//! Assignment of watches to upstream streams: opening, moving, losing, closing.
//!
//! Owns: streams, and the steps of a watch onto a stream. Must not know: event delivery.
//! Invariants: a client's creates are sent in request order; a moved watch resumes at its cursor; a stream is
//! opened with a fresh credential only after a refusal that a fresh credential may cure.

use bytes::Bytes;
use tokio::time::Instant;

use super::super::planted_fault::PlantedFault;
use super::{
    ANY_STREAM, CreateAnswer, Hub, HubOutput, HubStream, HubWatch, MAX_STREAMS, NO_WATCH, Revision,
    RevisionCheck, SETTLED, SplicedWatchResponse, StreamCredential, StreamLoss, StreamRequirement,
    UnansweredCreate, UpstreamStreamId, WatchCursor, WatchKey, WatchPlacement, WatchRegistration,
    WatchResponseHeader, WatchStreamEnd, WatchTraits, watch_messages,
};
use crate::watch::watch_messages::OpenEnd;
use keyward_etcd::refusal::Refusal;

/// A start revision never reached by any cluster: the member has no history to scan for the watch.
const NEVER: i64 = 1 << 62;

/// etcd's cancel reason for a watch from a negative revision (3.4.38, 3.5.24, 3.6.6 and later). See
/// `docs/etcd-facts.md#v8`.
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";

impl Hub {
    pub(super) fn opened(&mut self, stream: UpstreamStreamId, traits: WatchTraits) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.traits = Some(traits);
        }
    }

    pub(super) fn lost(
        &mut self,
        now: Instant,
        stream: UpstreamStreamId,
        why: StreamLoss,
    ) -> Result<(), WatchStreamEnd> {
        if !self.streams.contains_key(&stream) {
            return Ok(());
        }
        match why {
            StreamLoss::Denied(reason) => self.denied(stream, &reason),
            StreamLoss::Upstream => {
                self.count_loss(now);
                self.move_watches_off(stream, StreamCredential::Current);
                Ok(())
            }
            StreamLoss::Credential => {
                self.count_loss(now);
                self.move_watches_off(stream, StreamCredential::Fresh);
                Ok(())
            }
        }
    }

    /// Gives up a stream after a malformed message or a failed read.
    pub(super) fn abandon(&mut self, now: Instant, stream: UpstreamStreamId) {
        self.count_loss(now);
        self.give_up(stream);
    }

    /// Counts a loss. The count starts again at one after a quiet time ([`SETTLED`]).
    pub(super) fn count_loss(&mut self, now: Instant) {
        self.attempts = self.attempt(now).saturating_add(1);
        self.last_trouble = Some(now);
    }

    fn attempt(&self, now: Instant) -> u32 {
        let quiet = self.last_trouble.is_none_or(|last| now.saturating_duration_since(last) >= SETTLED);
        if quiet { 0 } else { self.attempts }
    }

    /// Moves every watch off a lost stream.
    fn move_watches_off(&mut self, stream: UpstreamStreamId, credential: StreamCredential) {
        let lost = self.streams.remove(&stream);
        for key in self.on_stream(stream) {
            self.unassign(key, StreamRequirement { newer_than: stream, credential });
            if PlantedFault::ResumeAtHeader.is_on()
                && let (Some(watch), Some(lost)) = (self.watches.get_mut(&key), &lost)
            {
                watch.cursor.progress(lost.highest);
            }
        }
    }

    fn on_stream(&self, stream: UpstreamStreamId) -> Vec<WatchKey> {
        let here = |watch: &HubWatch| watch.place.stream() == Some(stream);
        self.watches.iter().filter(|(_, watch)| here(watch)).map(|(key, _)| *key).collect()
    }

    /// anywhere → nowhere. A registered watch "from now" keeps its beginning even if the client was not told
    /// of the Created yet: writes that waited for the registration have been sent since.
    pub(super) fn unassign(&mut self, key: WatchKey, want: StreamRequirement) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        if let Some(stream) = watch.place.stream().and_then(|id| self.streams.get_mut(&id)) {
            stream.waiting.remove(&key);
            if let WatchPlacement::Upstream(_, incarnation) = &watch.place {
                stream.ids.remove(incarnation.id);
            }
        }
        self.held_bytes -= watch.cursor.held_bytes();
        watch.cursor.drop_unfinished_revision();
        if watch.id.is_none() {
            watch.answer = None;
        }
        watch.resumes_exactly = false;
        watch.place = WatchPlacement::Nowhere;
        let credential = if watch.refusal.is_some() { StreamCredential::Fresh } else { want.credential };
        watch.requirement = StreamRequirement { credential, ..want };
        self.unsent.insert(key);
        self.interrupt_round();
    }

    /// Removes a watch for good, upstream too.
    pub(super) fn withdraw(&mut self, key: WatchKey) -> Option<HubWatch> {
        let watch = self.watches.remove(&key)?;
        self.held_bytes -= watch.cursor.held_bytes();
        self.unsent.remove(&key);
        if let Some(stream) = watch.place.stream().and_then(|id| self.streams.get_mut(&id)) {
            stream.waiting.remove(&key);
        }
        self.forget_upstream(&watch.place);
        Some(watch)
    }

    /// Cancels a registration upstream; later messages for the registration are ignored.
    pub(super) fn forget_upstream(&mut self, place: &WatchPlacement) {
        if let WatchPlacement::Upstream(id, incarnation) = place
            && let Some(stream) = self.streams.get_mut(id)
            && stream.ids.remove(incarnation.id).is_some()
        {
            self.send(*id, watch_messages::cancel_message(incarnation.id));
        }
    }

    /// nowhere → assigned, to the newest suitable stream, or to a new stream.
    pub(super) fn assign_streams(&mut self, now: Instant) {
        self.assign_unsent(now);
        while self.streams.len() > MAX_STREAMS {
            self.retire_oldest();
            self.assign_unsent(now);
        }
    }

    fn assign_unsent(&mut self, now: Instant) {
        for credential in [StreamCredential::Fresh, StreamCredential::Current] {
            for key in self.unsent.iter().copied().collect::<Vec<_>>() {
                let Some(watch) = self.watches.get(&key) else { continue };
                let want = watch.requirement;
                if !matches!(watch.place, WatchPlacement::Nowhere) || want.credential != credential {
                    continue;
                }
                let stream = self.find_stream(want).unwrap_or_else(|| self.open(now, want.credential));
                self.assign(key, stream);
            }
        }
    }

    /// nowhere, doubtful → assigned. A watch known to the client waits for a free slot on the stream, a new
    /// watch for its turn.
    pub(super) fn assign(&mut self, key: WatchKey, id: UpstreamStreamId) {
        let (Some(watch), Some(stream)) = (self.watches.get_mut(&key), self.streams.get_mut(&id)) else {
            return;
        };
        watch.place = WatchPlacement::Assigned(id);
        if watch.id.is_some() {
            self.unsent.remove(&key);
            stream.waiting.insert(key);
        } else {
            self.unsent.insert(key);
        }
    }

    fn find_stream(&self, want: StreamRequirement) -> Option<UpstreamStreamId> {
        let fits = |id: UpstreamStreamId, stream: &HubStream| {
            !stream.is_feed
                && id > want.newer_than
                && (want.credential == StreamCredential::Current
                    || stream.credential == StreamCredential::Fresh)
        };
        self.streams.iter().rev().find(|(id, stream)| fits(**id, stream)).map(|(id, _)| *id)
    }

    fn open(&mut self, now: Instant, credential: StreamCredential) -> UpstreamStreamId {
        self.last_stream += 1;
        let stream = UpstreamStreamId(self.last_stream);
        self.streams.insert(stream, HubStream::new(credential));
        let known = |key: &WatchKey| self.watches.get(key).is_some_and(|watch| watch.id.is_some());
        let resumes = self.unsent.iter().any(known);
        self.out.push(HubOutput::Open { stream, credential, attempt: self.attempt(now), resumes });
        stream
    }

    /// Gives up the oldest stream; the watches move to newer streams.
    pub(super) fn retire_oldest(&mut self) {
        let Some(&oldest) = self.streams.keys().next() else { return };
        self.give_up(oldest);
    }

    /// Gives up a stream as if the stream had been lost.
    pub(super) fn give_up(&mut self, stream: UpstreamStreamId) {
        self.move_watches_off(stream, StreamCredential::Current);
        self.out.push(HubOutput::Close { stream });
    }

    /// assigned → upstream.
    pub(super) fn send_creates(&mut self) {
        self.send_waiting();
        // An unsent earlier create holds back all later creates: etcd answers creates in sending order.
        let mut held_up = false;
        for key in self.unsent.iter().copied().collect::<Vec<_>>() {
            let Some(watch) = self.watches.get(&key) else { continue };
            let WatchPlacement::Assigned(id) = watch.place else {
                held_up = true;
                continue;
            };
            let Some(traits) = self.streams.get(&id).and_then(|stream| stream.traits) else {
                held_up = true;
                continue;
            };
            if !held_up {
                self.send_create(key, id, traits);
            }
        }
    }

    /// Sends creates of resumed watches, up to the limit of unanswered creates.
    fn send_waiting(&mut self) {
        for id in self.streams.keys().copied().collect::<Vec<_>>() {
            while let Some(stream) = self.streams.get_mut(&id)
                && let Some(traits) = stream.traits
                && stream.restoring < self.limits.restoring
                && let Some(key) = stream.waiting.pop_first()
            {
                self.send_create(key, id, traits);
            }
        }
    }

    fn send_create(&mut self, key: WatchKey, id: UpstreamStreamId, traits: WatchTraits) {
        let (Some(watch), Some(stream)) = (self.watches.get_mut(&key), self.streams.get_mut(&id)) else {
            return;
        };
        let start = watch.start(traits);
        self.last_upstream_id += 1;
        let mut upstream_id = self.last_upstream_id;
        if PlantedFault::ReusedUpstreamId.is_on() {
            upstream_id = (1..).find(|id| !stream.ids.contains(*id)).unwrap_or(upstream_id);
        }
        stream.ids.insert(upstream_id, key);
        let resumed = watch.id.is_some();
        stream.creating.push_back(UnansweredCreate { id: upstream_id, resumed });
        stream.restoring += usize::from(resumed);
        let asked_before = stream.progress_requests;
        watch.place = WatchPlacement::Upstream(
            id,
            WatchRegistration { id: upstream_id, start, created: None, asked_before, has_messages: false },
        );
        let end = if traits.misjudges_open_end { OpenEnd::Explicit } else { OpenEnd::AsSent };
        let message = watch.create.message(upstream_id, start, end);
        self.unsent.remove(&key);
        self.send(id, message);
    }

    pub(super) fn check_answered(
        &mut self,
        now: Instant,
        key: WatchKey,
        id: UpstreamStreamId,
        header: &Bytes,
        revision: Revision,
    ) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let Ok(header) = WatchResponseHeader::read(header) else { return self.abandon(now, id) };
        let Some(checking) = stream.checking.take_if(|checking| checking.watch == key) else { return };
        stream.verified = stream.verified.max(revision.0);
        self.learn(id, &header);
        self.checked(id, checking, revision.0);
    }

    pub(super) fn check_failed(
        &mut self,
        now: Instant,
        key: WatchKey,
        id: UpstreamStreamId,
        why: StreamLoss,
    ) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let Some(checking) = stream.checking.take_if(|checking| checking.watch == key) else { return };
        if why == StreamLoss::Upstream {
            return self.abandon(now, id);
        }
        // The member accepted the watch but refused the read, so the member's history is taken on trust.
        stream.verified = i64::MAX;
        self.checked(id, checking, i64::MAX);
    }

    /// Requests a linearizable read of the cluster's revision, at most one at a time per stream.
    pub(super) fn check(&mut self, key: WatchKey, id: UpstreamStreamId) {
        let (Some(watch), Some(stream)) = (self.watches.get(&key), self.streams.get_mut(&id)) else { return };
        if let Some(checking) = &mut stream.checking {
            checking.joined = true;
        } else {
            stream.checking =
                Some(RevisionCheck { watch: key, shown: self.cluster_view.shown, joined: false });
            self.out.push(HubOutput::Check { watch: key, stream: id, key: watch.key() });
        }
    }

    /// doubtful → assigned, or ended if the cluster's history no longer reaches the revision seen by the
    /// watch.
    fn checked(&mut self, id: UpstreamStreamId, checking: RevisionCheck, revision: i64) {
        let mut gone_back = checking.shown > revision && self.cluster_view.shown == checking.shown;
        let mut doubted = None;
        for key in self.on_stream(id) {
            let Some(watch) = self.watches.get_mut(&key) else { continue };
            if !matches!(watch.place, WatchPlacement::Doubtful(_)) {
                continue;
            }
            let reached = watch.cursor.seen().max(if watch.id.is_none() { watch.shown_before } else { 0 });
            if reached > revision && checking.joined {
                // The read may have begun before the cluster reached that revision.
                doubted.get_or_insert(key);
            } else if watch.id.is_none() {
                gone_back |= reached > revision;
                self.assign(key, id);
            } else if reached > revision {
                gone_back = true;
                self.end_as_compacted(key, revision);
            } else {
                self.assign(key, id);
            }
        }
        if let Some(key) = doubted {
            // One read serves all these watches, and none of them joins it: the read begins after this input.
            self.check(key, id);
        }
        if gone_back {
            self.step_back(revision);
        }
    }

    /// Handles a history that went back to `revision`. Revisions above `revision` shown earlier belong to a
    /// lost history. A watch ends as compacted if it has seen such a revision, or if it begins after one
    /// shown before its create: the client must read anew.
    fn step_back(&mut self, revision: i64) {
        self.cluster_view.step_back(revision);
        let (mut ended, mut begun) = (Vec::new(), Vec::new());
        for (key, watch) in self.watches.iter_mut() {
            let after = watch.create.start_revision.saturating_sub(1);
            let seen = watch.cursor.seen();
            if after > revision && after <= watch.shown_before && seen == 0 {
                watch.compacted_at = Some(revision);
                ended.extend(watch.id.map(|_| *key));
            } else if seen > revision {
                ended.extend(watch.id.map(|_| *key));
            }
            watch.shown_before = watch.shown_before.min(revision);
            if watch.is_new_from_now() && watch.begins_after.is_some_and(|after| after > revision) {
                watch.forget_beginning();
                begun.extend(matches!(watch.answer, Some(CreateAnswer::Created(_))).then_some(*key));
            }
        }
        for key in ended {
            self.end_as_compacted(key, revision);
        }
        for key in begun {
            let Some(watch) = self.watches.get_mut(&key) else { continue };
            let place = std::mem::replace(&mut watch.place, WatchPlacement::Nowhere);
            self.forget_upstream(&place);
            self.unassign(key, ANY_STREAM);
        }
    }

    /// Refuses every watch waiting on the stream, since no credential can be obtained.
    fn denied(&mut self, stream: UpstreamStreamId, reason: &str) -> Result<(), WatchStreamEnd> {
        self.streams.remove(&stream);
        for key in self.on_stream(stream) {
            let known = self.cluster_view.header.read();
            let Some(watch) = self.watches.get_mut(&key) else { continue };
            let is_of_member = watch.refusal.is_some();
            let refusal = match (watch.refusal.take(), known) {
                (Some(refusal), _) => *refusal,
                (None, Some(header)) => SplicedWatchResponse {
                    header: Some(header),
                    watch_id: NO_WATCH,
                    created: true,
                    canceled: true,
                    cancel_reason: Bytes::copy_from_slice(reason.as_bytes()),
                    ..SplicedWatchResponse::default()
                },
                (None, None) => return Err(WatchStreamEnd::Denied(reason.to_owned())),
            };
            let noted = match is_of_member {
                true => Refusal::of_cancel_reason(&refusal.cancel_reason),
                false => Refusal::INVALID_AUTH_TOKEN,
            };
            self.note_refused(key, noted);
            self.refuse(key, refusal);
        }
        Ok(())
    }

    /// Tells the records of a refused watch.
    pub(super) fn note_refused(&mut self, key: WatchKey, refusal: Refusal) {
        if let Some(watch) = self.watches.get(&key) {
            let create = Bytes::copy_from_slice(watch.create.kept());
            self.out.push(HubOutput::Refused(create, refusal));
        }
    }

    /// Refuses a watch for good. The client is told in the create's turn, or at once if the Created was told
    /// before.
    pub(super) fn refuse(&mut self, key: WatchKey, refusal: SplicedWatchResponse) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        if watch.id.is_some() && refusal.compact_revision > 0 {
            return self.tell_compacted(key, SplicedWatchResponse { created: false, ..refusal });
        } else if watch.id.is_some() {
            return self.tell_denied(key, refusal);
        }
        watch.answer = Some(CreateAnswer::Refused(Box::new(refusal)));
        watch.place = WatchPlacement::Parked;
        self.unsent.remove(&key);
    }

    /// Closes streams without watches, unless a pending create of the client may still use the stream.
    pub(super) fn close_unused(&mut self) {
        if !self.pending.is_empty() {
            return;
        }
        let assigned: Vec<UpstreamStreamId> =
            self.unsent.iter().filter_map(|key| self.watches.get(key)?.place.stream()).collect();
        let unused = |id: &UpstreamStreamId, stream: &HubStream| {
            let empty = stream.ids.is_empty() && stream.waiting.is_empty() && stream.checking.is_none();
            empty && !assigned.contains(id)
        };
        let unused: Vec<UpstreamStreamId> =
            self.streams.iter().filter(|(id, stream)| unused(id, stream)).map(|(id, _)| *id).collect();
        for stream in unused {
            self.streams.remove(&stream);
            self.out.push(HubOutput::Close { stream });
        }
    }
}

impl HubWatch {
    /// The first watched key, as etcd reads the create.
    pub(super) fn key(&self) -> Bytes {
        if self.create.key.is_empty() { Bytes::from_static(b"\0") } else { self.create.key.clone() }
    }

    /// True for a watch "from now" not yet told to the client.
    pub(super) fn is_new_from_now(&self) -> bool {
        self.id.is_none() && self.create.start_revision == 0
    }

    /// True for a watch "from now" not yet registered or refused by a member.
    pub(super) fn is_unregistered(&self) -> bool {
        self.is_new_from_now() && self.answer.is_none()
    }

    /// Fixes the beginning of a watch "from now".
    pub(super) fn begin_after(&mut self, revision: i64) {
        self.begins_after = Some(revision);
        self.cursor = WatchCursor::after(revision);
    }

    /// Discards the beginning of a watch "from now", since it belongs to a lost history; the next
    /// registration fixes a new beginning.
    pub(super) fn forget_beginning(&mut self) {
        self.begins_after = None;
        self.cursor = WatchCursor::from_start(self.create.start_revision);
    }

    /// True for a negative start that this member should refuse and does not: the member's watches would lose
    /// events. See `docs/etcd-facts.md#v8`.
    pub(super) fn has_harmful_start(&self, traits: WatchTraits) -> bool {
        self.create.start_revision < 0 && !traits.refuses_negative_start
    }

    /// The start revision for the next upstream create. An odd start chosen by the client is passed on, so
    /// that etcd answers the create.
    fn start(&self, traits: WatchTraits) -> i64 {
        if self.id.is_some() || self.begins_after.is_some() {
            self.cursor.resume_at(traits.late_created && !self.resumes_exactly)
        } else if self.has_harmful_start(traits) {
            // The create is still sent: the member decides if the client may watch the key at all.
            NEVER
        } else {
            self.create.start_revision
        }
    }

    /// The refusal that newer members send for a watch from a negative revision.
    pub(super) fn refused_start(header: WatchResponseHeader) -> SplicedWatchResponse {
        SplicedWatchResponse {
            header: Some(header),
            watch_id: NO_WATCH,
            created: true,
            canceled: true,
            cancel_reason: Bytes::from_static(COMPACTED.as_bytes()),
            ..SplicedWatchResponse::default()
        }
    }
}
