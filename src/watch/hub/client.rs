//! What the client asks, and what it is told, each in its turn.
//!
//! Owns: downstream ids, request order, duplicates, cancels. Must not know: which stream carries a watch.
//! Invariant: what depends on an earlier create waits for that create's answer; nothing else waits.

use bytes::Bytes;

use super::super::fault::Planted;
use super::{
    ANY_STREAM, Answer, Create, Cursor, End, Hub, NO_WATCH, Pending, Place, Request, Response, Told, Watch,
    WatchKey, wire,
};
use crate::identity::{ClusterId, Revision};

/// As etcd says it (`mvcc.ErrWatcherDuplicateID`).
const DUPLICATE: &str = "mvcc: duplicate watch ID provided on the WatchStream";

impl Hub {
    /// The client's connection was shown this revision, of this cluster, be it by another call: what it asks from here on is
    /// answered from no earlier point of history.
    pub fn was_shown(&mut self, cluster: Option<ClusterId>, revision: Revision) {
        let ours = cluster.is_none_or(|cluster| *self.known.cluster.get_or_insert(cluster.0) == cluster.0);
        if ours {
            self.known.shown = self.known.shown.max(revision.0);
        }
    }

    /// The watch of the newest create.
    #[must_use]
    pub fn newest(&self) -> WatchKey {
        WatchKey(self.last_key)
    }

    /// Whether this watch "from now" waits for a member to register or to refuse it. Writes that its client sent after the create
    /// must wait with it.
    #[must_use]
    pub fn is_unregistered(&self, key: WatchKey) -> bool {
        self.watches.get(&key).is_some_and(|watch| watch.is_unregistered())
    }

    /// A write that the client sent after this create went upstream before the watch was registered: the watch begins after
    /// `revision`, which the cluster had reached before the write, instead of at the moment of its registration.
    pub fn overtaken(&mut self, key: WatchKey, revision: Revision) {
        if let Some(watch) = self.watches.get_mut(&key)
            && watch.is_unregistered()
            && watch.begins_after.is_none()
            && revision.0 > 0
        {
            watch.begin_after(revision.0.max(watch.shown_before));
        }
    }

    /// Whose history is told.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        self.known.cluster.map(ClusterId)
    }

    pub(super) fn client(&mut self, message: &Bytes) -> Result<(), End> {
        self.pending_bytes += message.len();
        match Request::read(message).map_err(|wire::Malformed| End::InvalidRequest)? {
            Request::Create(create) => self.create(create),
            Request::Cancel(id) => self.cancel_requested(id),
            Request::Progress => self.pending.push_back(Pending::Progress),
            Request::Unknown => {}
        }
        Ok(())
    }

    fn create(&mut self, create: Create) {
        self.last_key += 1;
        let key = WatchKey(self.last_key);
        let watch = Watch {
            cursor: Cursor::from_start(create.start_revision),
            create,
            id: None,
            answer: None,
            place: Place::Nowhere,
            want: ANY_STREAM,
            begins_after: None,
            exact: false,
            shown_before: self.known.shown,
            refusal: None,
            stale: None,
            confirmed: false,
        };
        self.watches.insert(key, Box::new(watch));
        self.moving.insert(key);
        self.pending.push_back(Pending::Create(key));
    }

    /// A watch that lives is cancelled at once, whatever is still waiting: an outage must not delay it. Only where an
    /// earlier create may yet take or give the id does the cancel wait behind it.
    fn cancel_requested(&mut self, id: i64) {
        let contested = self.pending.iter().any(|pending| match pending {
            // 0 names none: an id is asked for.
            Pending::Create(key) => {
                id != 0 && self.watches.get(key).is_some_and(|watch| watch.create.watch_id == id)
            }
            Pending::Cancel(_) | Pending::Progress => false,
        });
        if !contested && (self.pending.is_empty() || self.told.contains_key(&id)) {
            self.cancel(id);
        } else {
            self.pending.push_back(Pending::Cancel(id));
        }
    }

    /// live, compacted → gone, acknowledged once. An unknown id gets no answer at all, as in etcd.
    fn cancel(&mut self, id: i64) {
        let seen = match self.told.remove(&id) {
            // Not its floor: a watch that waits for the future has one that the cluster has not reached.
            Some(Told::Watch(key)) => self.withdraw(key).map_or(0, |watch| watch.cursor.seen()),
            Some(Told::Compacted) => 0,
            None => return,
        };
        let header = Some(self.header_at_least(seen));
        self.emit(&Response { header, watch_id: id, canceled: true, ..Response::default() });
    }

    pub(super) fn answer_in_turn(&mut self) {
        while let Some(&first) = self.pending.front() {
            match first {
                Pending::Create(key) => {
                    let Some(answer) = self.watches.get_mut(&key).and_then(|watch| watch.answer.take())
                    else {
                        return;
                    };
                    self.tell(key, answer);
                }
                Pending::Cancel(id) => self.cancel(id),
                Pending::Progress => self.ask_progress(),
            }
            self.pending.pop_front();
        }
        self.pending_bytes = 0;
    }

    fn tell(&mut self, key: WatchKey, answer: Answer) {
        match answer {
            Answer::Refused(refusal) => self.tell_refused(key, *refusal),
            Answer::Created(created) => self.tell_created(key, *created),
        }
    }

    /// The refusal with the member's own bytes and the id that the client can bear: -1 where the member says -1. An old
    /// member (before V7) echoes the id that was asked for; so do we, unless a living watch has it: clients, like those
    /// members, would take that watch for dead.
    fn tell_refused(&mut self, key: WatchKey, mut refusal: Response) {
        let asked = self.withdraw(key).map_or(NO_WATCH, |watch| watch.create.watch_id);
        let echoed = refusal.watch_id != NO_WATCH && !self.told.contains_key(&asked);
        refusal.watch_id = if echoed { asked } else { NO_WATCH };
        let header = self.of_this_cluster(refusal.header.take());
        let revision = header.revision.max(self.known.shown);
        refusal.header = Some(header.with_revision(revision));
        self.emit(&refusal);
    }

    fn tell_created(&mut self, key: WatchKey, mut created: Response) {
        let Some(watch) = self.watches.get(&key) else { return };
        let (asked, from_now, stale) = (watch.create.watch_id, watch.create.start_revision == 0, watch.stale);
        let header = self.of_this_cluster(created.header.take());
        // A "from now" client resumes by this revision: it is exact. For the others it only must not go back.
        let revision = if from_now { header.revision } else { header.revision.max(self.known.shown) };
        created.header = Some(header.with_revision(revision));
        if asked != 0 && self.told.contains_key(&asked) {
            self.withdraw(key);
            created.watch_id = NO_WATCH;
            created.canceled = true;
            created.cancel_reason = Bytes::from_static(DUPLICATE.as_bytes());
            return self.emit(&created);
        }
        let id = if asked == 0 { self.assign_id() } else { asked };
        self.told.insert(id, Told::Watch(key));
        self.denied.remove(&id);
        created.watch_id = id;
        self.emit(&created);
        if let Some(watch) = self.watches.get_mut(&key) {
            watch.id = Some(id);
            if matches!(watch.place, Place::Parked) {
                watch.place = Place::Nowhere;
                self.moving.insert(key);
            }
        }
        if let Some(revision) = stale {
            self.end_as_compacted(key, revision);
        }
    }

    /// As etcd: upward from 0, past the ids that are in use or may be cancelled yet, never back.
    fn assign_id(&mut self) -> i64 {
        if Planted::ReusedId.is_on() {
            self.next_client_id = 0;
        }
        while self.told.contains_key(&self.next_client_id) || self.denied.remove(&self.next_client_id) {
            self.next_client_id += 1;
        }
        self.next_client_id += 1;
        self.next_client_id - 1
    }

    /// Ends a watch whose history is gone, with the member's own words.
    pub(super) fn tell_compacted(&mut self, key: WatchKey, mut compaction: Response) {
        let Some(id) = self.withdraw(key).and_then(|watch| watch.id) else { return };
        self.told.insert(id, Told::Compacted);
        compaction.watch_id = id;
        compaction.header = Some(compaction.header.unwrap_or_else(|| self.header_at(0)).with_revision(0));
        self.emit(&compaction);
    }

    /// Ends a watch because the history that it followed is another's now: the client must read anew.
    pub(super) fn end_as_compacted(&mut self, key: WatchKey, revision: i64) {
        let compact_revision = revision.max(1);
        self.tell_compacted(key, Response { canceled: true, compact_revision, ..Response::default() });
    }

    /// Ends a watch that lived: its user may not have it any more.
    pub(super) fn tell_denied(&mut self, key: WatchKey, mut refusal: Response) {
        let Some(watch) = self.withdraw(key) else { return };
        let Some(id) = watch.id else { return };
        self.told.remove(&id);
        if id >= self.next_client_id {
            self.denied.insert(id);
        }
        refusal.watch_id = id;
        refusal.created = false;
        refusal.header = Some(self.header_at_least(watch.cursor.seen()));
        self.emit(&refusal);
    }
}
