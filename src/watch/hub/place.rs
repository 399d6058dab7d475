//! Which upstream stream carries which watch: opening, moving, losing, closing.
//!
//! Owns: streams and the way of a watch onto one. Must not know: what is delivered.
//! Invariants: creates of a client are sent in request order; a watch that moves begins anew at its cursor; a stream is
//! opened with a fresh credential only for a refusal that one may cure.

use bytes::Bytes;
use tokio::time::Instant;

use super::super::fault::Planted;
use super::{
    ANY_STREAM, Answer, Checking, Creating, Credential, Cursor, End, Header, Hub, Incarnation, Loss,
    MAX_RESTORING, MAX_STREAMS, NO_WATCH, Output, Place, Response, Revision, SETTLED, Stream, StreamId,
    Traits, Want, Watch, WatchKey, wire,
};

/// A start that no cluster reaches: a member has nothing to look up for it.
const NEVER: i64 = 1 << 62;

/// As etcd says it of a watch from a negative revision (V8).
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";

impl Hub {
    pub(super) fn opened(&mut self, stream: StreamId, traits: Traits) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.traits = Some(traits);
        }
    }

    pub(super) fn lost(&mut self, now: Instant, stream: StreamId, why: Loss) -> Result<(), End> {
        if !self.streams.contains_key(&stream) {
            return Ok(());
        }
        match why {
            Loss::Denied(reason) => self.denied(stream, &reason),
            Loss::Upstream => {
                self.trouble(now);
                self.vacate(stream, Credential::Current);
                Ok(())
            }
            Loss::Credential => {
                self.trouble(now);
                self.vacate(stream, Credential::Fresh);
                Ok(())
            }
        }
    }

    /// Gives up a stream that spoke nonsense or proved useless.
    pub(super) fn abandon(&mut self, now: Instant, stream: StreamId) {
        self.trouble(now);
        self.vacate(stream, Credential::Current);
        self.out.push(Output::Close { stream });
    }

    /// One more loss; counted from one again after a quiet time.
    pub(super) fn trouble(&mut self, now: Instant) {
        self.attempts = self.attempt(now).saturating_add(1);
        self.last_trouble = Some(now);
    }

    fn attempt(&self, now: Instant) -> u32 {
        let quiet = self.last_trouble.is_none_or(|last| now.saturating_duration_since(last) >= SETTLED);
        if quiet { 0 } else { self.attempts }
    }

    /// Moves every watch off a stream that is gone.
    fn vacate(&mut self, stream: StreamId, credential: Credential) {
        let lost = self.streams.remove(&stream);
        for key in self.on_stream(stream) {
            self.displace(key, Want { newer_than: stream, credential });
            if Planted::ResumeAtHeader.is_on()
                && let (Some(watch), Some(lost)) = (self.watches.get_mut(&key), &lost)
            {
                watch.cursor.progress(lost.highest);
            }
        }
    }

    fn on_stream(&self, stream: StreamId) -> Vec<WatchKey> {
        let here = |watch: &Watch| watch.place.stream() == Some(stream);
        self.watches.iter().filter(|(_, watch)| here(watch)).map(|(key, _)| *key).collect()
    }

    /// anywhere → nowhere. A watch "from now" that was registered keeps its beginning, though the client was not told of it
    /// yet: writes that waited for the registration have gone ahead since.
    pub(super) fn displace(&mut self, key: WatchKey, want: Want) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        if let Some(stream) = watch.place.stream().and_then(|id| self.streams.get_mut(&id)) {
            stream.waiting.remove(&key);
            if let Place::Upstream(_, incarnation) = &watch.place {
                stream.ids.remove(&incarnation.id);
            }
        }
        self.held -= watch.cursor.held_bytes();
        watch.cursor.drop_held();
        if watch.id.is_none() {
            watch.answer = None;
        }
        watch.exact = false;
        watch.place = Place::Nowhere;
        let credential = if watch.refusal.is_some() { Credential::Fresh } else { want.credential };
        watch.want = Want { credential, ..want };
        self.moving.insert(key);
        self.interrupt_round();
    }

    /// Takes a watch out for good, upstream too.
    pub(super) fn withdraw(&mut self, key: WatchKey) -> Option<Box<Watch>> {
        let watch = self.watches.remove(&key)?;
        self.held -= watch.cursor.held_bytes();
        self.moving.remove(&key);
        if let Some(stream) = watch.place.stream().and_then(|id| self.streams.get_mut(&id)) {
            stream.waiting.remove(&key);
        }
        self.forget_upstream(&watch.place);
        Some(watch)
    }

    /// Cancels an incarnation; what upstream still says of it is ignored.
    pub(super) fn forget_upstream(&mut self, place: &Place) {
        if let Place::Upstream(id, incarnation) = place
            && let Some(stream) = self.streams.get_mut(id)
            && stream.ids.remove(&incarnation.id).is_some()
        {
            self.send(*id, wire::cancel_message(incarnation.id));
        }
    }

    /// nowhere → assigned, to the newest stream that will do, or to a new one.
    pub(super) fn find_places(&mut self, now: Instant) {
        self.place_moving(now);
        while self.streams.len() > MAX_STREAMS {
            self.retire_oldest();
            self.place_moving(now);
        }
    }

    fn place_moving(&mut self, now: Instant) {
        for credential in [Credential::Fresh, Credential::Current] {
            for key in self.moving.iter().copied().collect::<Vec<_>>() {
                let Some(watch) = self.watches.get(&key) else { continue };
                let want = watch.want;
                if !matches!(watch.place, Place::Nowhere) || want.credential != credential {
                    continue;
                }
                let stream = self.fitting(want).unwrap_or_else(|| self.open(now, want.credential));
                self.assign(key, stream);
            }
        }
    }

    /// nowhere, doubtful → assigned. A watch that the client knows waits for room there, a new one for its turn.
    pub(super) fn assign(&mut self, key: WatchKey, id: StreamId) {
        let (Some(watch), Some(stream)) = (self.watches.get_mut(&key), self.streams.get_mut(&id)) else {
            return;
        };
        watch.place = Place::Assigned(id);
        if watch.id.is_some() {
            self.moving.remove(&key);
            stream.waiting.insert(key);
        } else {
            self.moving.insert(key);
        }
    }

    fn fitting(&self, want: Want) -> Option<StreamId> {
        let fits = |id: StreamId, stream: &Stream| {
            id > want.newer_than
                && (want.credential == Credential::Current || stream.credential == Credential::Fresh)
        };
        self.streams.iter().rev().find(|(id, stream)| fits(**id, stream)).map(|(id, _)| *id)
    }

    fn open(&mut self, now: Instant, credential: Credential) -> StreamId {
        self.last_stream += 1;
        let stream = StreamId(self.last_stream);
        self.streams.insert(stream, Box::new(Stream::new(credential)));
        let known = |key: &WatchKey| self.watches.get(key).is_some_and(|watch| watch.id.is_some());
        let resumes = self.moving.iter().any(known);
        self.out.push(Output::Open { stream, credential, attempt: self.attempt(now), resumes });
        stream
    }

    /// Gives up the oldest stream as if it had been lost; its watches move to newer ones.
    pub(super) fn retire_oldest(&mut self) {
        let Some((&oldest, _)) = self.streams.first_key_value() else { return };
        self.vacate(oldest, Credential::Current);
        self.out.push(Output::Close { stream: oldest });
    }

    /// assigned → upstream.
    pub(super) fn send_creates(&mut self) {
        self.send_waiting();
        // An earlier create that is not on its way yet holds back the later ones: etcd answers in the order sent.
        let mut held_up = false;
        for key in self.moving.iter().copied().collect::<Vec<_>>() {
            let Some(watch) = self.watches.get(&key) else { continue };
            let Place::Assigned(id) = watch.place else {
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

    /// Resumed watches, as many as may be unanswered at once.
    fn send_waiting(&mut self) {
        for id in self.streams.keys().copied().collect::<Vec<_>>() {
            while let Some(stream) = self.streams.get_mut(&id)
                && let Some(traits) = stream.traits
                && stream.restoring < MAX_RESTORING
                && let Some(key) = stream.waiting.pop_first()
            {
                self.send_create(key, id, traits);
            }
        }
    }

    fn send_create(&mut self, key: WatchKey, id: StreamId, traits: Traits) {
        let (Some(watch), Some(stream)) = (self.watches.get_mut(&key), self.streams.get_mut(&id)) else {
            return;
        };
        let start = watch.start(traits);
        self.last_upstream_id += 1;
        let mut upstream_id = self.last_upstream_id;
        if Planted::ReusedUpstreamId.is_on() {
            upstream_id = (1..).find(|id| !stream.ids.contains_key(id)).unwrap_or(upstream_id);
        }
        stream.ids.insert(upstream_id, key);
        let resumed = watch.id.is_some();
        stream.creating.push_back(Creating { id: upstream_id, resumed });
        stream.restoring += usize::from(resumed);
        let asked_before = stream.asked;
        watch.place = Place::Upstream(
            id,
            Incarnation { id: upstream_id, start, created: None, asked_before, heard: false },
        );
        let message = watch.create.message(upstream_id, start);
        self.moving.remove(&key);
        self.send(id, message);
    }

    pub(super) fn check_answered(
        &mut self,
        now: Instant,
        key: WatchKey,
        id: StreamId,
        header: &Bytes,
        revision: Revision,
    ) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let Ok(header) = Header::read(header) else { return self.abandon(now, id) };
        let Some(checking) = stream.checking.take_if(|checking| checking.watch == key) else { return };
        stream.verified = stream.verified.max(revision.0);
        self.learn(id, &header);
        self.checked(id, checking, revision.0);
    }

    pub(super) fn check_failed(&mut self, now: Instant, key: WatchKey, id: StreamId, why: Loss) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let Some(checking) = stream.checking.take_if(|checking| checking.watch == key) else { return };
        if why == Loss::Upstream {
            return self.abandon(now, id);
        }
        // The watch itself was let in there; whose history it is, nobody will say.
        stream.verified = i64::MAX;
        self.checked(id, checking, i64::MAX);
    }

    /// Asks the whole cluster how far it is, once on each stream.
    pub(super) fn check(&mut self, key: WatchKey, id: StreamId) {
        let (Some(watch), Some(stream)) = (self.watches.get(&key), self.streams.get_mut(&id)) else { return };
        if let Some(checking) = &mut stream.checking {
            checking.joined = true;
        } else {
            stream.checking = Some(Checking { watch: key, shown: self.known.shown, joined: false });
            self.out.push(Output::Check { watch: key, stream: id, key: watch.key() });
        }
    }

    /// doubtful → assigned, or ended: the history that a watch followed does not reach that far any more.
    fn checked(&mut self, id: StreamId, checking: Checking, revision: i64) {
        let mut gone_back = checking.shown > revision && self.known.shown == checking.shown;
        for key in self.on_stream(id) {
            let Some(watch) = self.watches.get_mut(&key) else { continue };
            if !matches!(watch.place, Place::Doubtful(_)) {
                continue;
            }
            let reached = watch.cursor.seen().max(if watch.id.is_none() { watch.shown_before } else { 0 });
            if reached > revision && checking.joined {
                // The read may have begun before the cluster had come that far.
                self.check(key, id);
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
        if gone_back {
            self.step_back(revision);
        }
    }

    /// The cluster's history ends at `revision` now: what was shown above it is of another. So is what a watch has seen
    /// above it, or begins after, if that was shown when it was asked for: its client must read anew.
    fn step_back(&mut self, revision: i64) {
        self.known.step_back(revision);
        let (mut ended, mut begun) = (Vec::new(), Vec::new());
        for (key, watch) in &mut self.watches {
            let after = watch.create.start_revision.saturating_sub(1);
            let seen = watch.cursor.seen();
            if after > revision && after <= watch.shown_before && seen == 0 {
                watch.stale = Some(revision);
                ended.extend(watch.id.map(|_| *key));
            } else if seen > revision {
                ended.extend(watch.id.map(|_| *key));
            }
            watch.shown_before = watch.shown_before.min(revision);
            if watch.is_new_from_now() && watch.begins_after.is_some_and(|after| after > revision) {
                watch.forget_beginning();
                begun.extend(matches!(watch.answer, Some(Answer::Created(_))).then_some(*key));
            }
        }
        for key in ended {
            self.end_as_compacted(key, revision);
        }
        for key in begun {
            let Some(watch) = self.watches.get_mut(&key) else { continue };
            let place = std::mem::replace(&mut watch.place, Place::Nowhere);
            self.forget_upstream(&place);
            self.displace(key, ANY_STREAM);
        }
    }

    /// No credential can be had: what waits for one on this stream is refused.
    fn denied(&mut self, stream: StreamId, reason: &str) -> Result<(), End> {
        self.streams.remove(&stream);
        for key in self.on_stream(stream) {
            let known = self.known.header.clone();
            let Some(watch) = self.watches.get_mut(&key) else { continue };
            let refusal = match (watch.refusal.take(), known) {
                (Some(refusal), _) => *refusal,
                (None, Some(header)) => Response {
                    header: Some(header),
                    watch_id: NO_WATCH,
                    created: true,
                    canceled: true,
                    cancel_reason: Bytes::copy_from_slice(reason.as_bytes()),
                    ..Response::default()
                },
                (None, None) => return Err(End::Denied(reason.to_owned())),
            };
            self.refuse(key, refusal);
        }
        Ok(())
    }

    /// The last word on a watch: told in its turn, or at once when it lived.
    pub(super) fn refuse(&mut self, key: WatchKey, refusal: Response) {
        let Some(watch) = self.watches.get_mut(&key) else { return };
        if watch.id.is_some() && refusal.compact_revision > 0 {
            return self.tell_compacted(key, Response { created: false, ..refusal });
        } else if watch.id.is_some() {
            return self.tell_denied(key, refusal);
        }
        watch.answer = Some(Answer::Refused(Box::new(refusal)));
        watch.place = Place::Parked;
        self.moving.remove(&key);
    }

    /// A stream without watches is ended, once the client waits for no create that might use it.
    pub(super) fn close_unused(&mut self) {
        if !self.pending.is_empty() {
            return;
        }
        let assigned: Vec<StreamId> =
            self.moving.iter().filter_map(|key| self.watches.get(key)?.place.stream()).collect();
        let unused = |id: &StreamId, stream: &Stream| {
            let empty = stream.ids.is_empty() && stream.waiting.is_empty() && stream.checking.is_none();
            empty && !assigned.contains(id)
        };
        let unused: Vec<StreamId> =
            self.streams.iter().filter(|(id, stream)| unused(id, stream)).map(|(id, _)| *id).collect();
        for stream in unused {
            self.streams.remove(&stream);
            self.out.push(Output::Close { stream });
        }
    }
}

impl Watch {
    /// The first key that it watches, as etcd reads it.
    pub(super) fn key(&self) -> Bytes {
        if self.create.key.is_empty() { Bytes::from_static(b"\0") } else { self.create.key.clone() }
    }

    /// Whether it is a watch "from now" which the client was not told of.
    pub(super) fn is_new_from_now(&self) -> bool {
        self.id.is_none() && self.create.start_revision == 0
    }

    /// Whether it is a watch "from now" that no member has registered or refused.
    pub(super) fn is_unregistered(&self) -> bool {
        self.is_new_from_now() && self.answer.is_none()
    }

    /// Fixes where a watch "from now" begins.
    pub(super) fn begin_after(&mut self, revision: i64) {
        self.begins_after = Some(revision);
        self.cursor = Cursor::after(revision);
    }

    /// "Now" is to be found anew: what it was is of a history that is gone.
    pub(super) fn forget_beginning(&mut self) {
        self.begins_after = None;
        self.cursor = Cursor::from_start(self.create.start_revision);
    }

    /// A start that this member should refuse and does not: other clients' watches would lose events by it.
    pub(super) fn is_spoiling(&self, traits: Traits) -> bool {
        self.create.start_revision < 0 && !traits.refuses_negative_start
    }

    /// Where to begin upstream. An odd start that the client chose is passed on, so that etcd answers it.
    fn start(&self, traits: Traits) -> i64 {
        if self.id.is_some() || self.begins_after.is_some() {
            self.cursor.resume_at(traits.late_created && !self.exact)
        } else if self.is_spoiling(traits) {
            // Whether this client may watch at all, the member says.
            NEVER
        } else {
            self.create.start_revision
        }
    }

    /// What a newer member says to a watch from a negative revision.
    pub(super) fn refused_start(header: Header) -> Response {
        Response {
            header: Some(header),
            watch_id: NO_WATCH,
            created: true,
            canceled: true,
            cancel_reason: Bytes::from_static(COMPACTED.as_bytes()),
            ..Response::default()
        }
    }
}
