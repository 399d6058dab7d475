//! Requests of the client, and the answers in request order.
//!
//! Owns: downstream ids, request order, duplicate ids, cancels. Must not know: the upstream stream of a
//! watch.
//! Invariant: a request depending on an earlier create waits for the create's answer; all further requests do
//! not wait.

use bytes::Bytes;
use tokio::time::Instant;

use super::super::planted_fault::PlantedFault;
use super::{
    ANY_STREAM, ClientWatchCreate, ClientWatchIdState, ClientWatchRequest, CreateAnswer, Hub, HubOutput,
    HubWatch, NO_WATCH, PendingClientRequest, SplicedWatchResponse, WatchCursor, WatchKey, WatchPlacement,
    WatchStreamEnd, watch_messages,
};
use keyward_etcd::identity::{ClusterId, Revision};
use keyward_etcd::refusal::{Refusal, RefusalReason};

/// etcd's reason for a duplicate id (`mvcc.ErrWatcherDuplicateID`).
const DUPLICATE: &str = "mvcc: duplicate watch ID provided on the WatchStream";

impl Hub {
    /// The client's connection was shown this revision of this cluster, by any of its calls. Later requests
    /// of the client are answered from no earlier point of the history.
    pub fn raise_shown_revision(&mut self, cluster: Option<ClusterId>, revision: Revision) {
        let ours =
            cluster.is_none_or(|cluster| *self.cluster_view.cluster.get_or_insert(cluster.0) == cluster.0);
        if ours {
            self.cluster_view.shown = self.cluster_view.shown.max(revision.0);
        }
    }

    /// The watch of the newest create.
    #[must_use]
    pub fn newest(&self) -> WatchKey {
        WatchKey(self.last_key)
    }

    /// True if the watch "from now" waits for a member to register or refuse the create. Writes sent by the
    /// client after the create must wait too.
    #[must_use]
    pub fn is_unregistered(&self, key: WatchKey) -> bool {
        self.watches.get(&key).is_some_and(|watch| watch.is_unregistered())
    }

    /// A write sent by the client after the create went upstream before the registration of the watch. The
    /// watch then begins after `revision`, a revision reached by the cluster before the write, instead of at
    /// the moment of registration, and not below the revision shown before the create. Later answers do not
    /// raise the beginning.
    pub fn note_overtaking_write(&mut self, key: WatchKey, revision: Revision) {
        if let Some(watch) = self.watches.get_mut(&key)
            && watch.is_unregistered()
            && watch.begins_after.is_none()
            && revision.0 > 0
        {
            watch.begin_after(revision.0.max(watch.shown_before));
        }
    }

    /// The number of watches, with creates not answered yet.
    #[must_use]
    pub fn watch_count(&self) -> usize {
        self.watches.len()
    }

    /// The cluster whose history is told to the client.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        self.cluster_view.cluster.map(ClusterId)
    }

    pub(super) fn client(&mut self, message: &Bytes) -> Result<(), WatchStreamEnd> {
        self.pending_bytes += message.len();
        match ClientWatchRequest::read(message)
            .map_err(|watch_messages::MalformedWatchMessage| WatchStreamEnd::InvalidRequest)?
        {
            ClientWatchRequest::Create(create) => self.create(create),
            ClientWatchRequest::Cancel(id) => self.cancel_requested(id),
            ClientWatchRequest::Progress => self.pending.push_back(PendingClientRequest::Progress),
            ClientWatchRequest::Unknown => {}
        }
        Ok(())
    }

    /// As [`Hub::client`]; a create is refused in its turn.
    pub(super) fn denied_client(&mut self, message: &Bytes, reason: &Refusal) -> Result<(), WatchStreamEnd> {
        let newest = self.newest();
        self.client(message)?;
        let created = self.newest();
        if created != newest {
            let refusal = self.denial(reason);
            self.refuse(created, refusal);
        }
        Ok(())
    }

    /// Ends every watch that `is_permitted` does not permit, given the watch's WatchCreateRequest.
    pub fn end_denied(
        &mut self,
        now: Instant,
        is_permitted: impl Fn(&[u8]) -> bool,
        out: &mut Vec<HubOutput>,
    ) {
        if self.ended {
            return;
        }
        let denied = self.watches.iter().filter(|(_, watch)| {
            let is_refused = matches!(watch.answer, Some(CreateAnswer::Refused(_)));
            !is_refused && !is_permitted(watch.create.kept())
        });
        let denied: Vec<WatchKey> = denied.map(|(key, _)| *key).collect();
        for key in denied {
            self.leave_stream(key);
            let refusal = self.denial(&Refusal::PERMISSION_DENIED);
            self.refuse(key, refusal);
        }
        self.advance(now);
        out.append(&mut self.out);
    }

    /// anywhere → nowhere, upstream too, for a watch whose Created was not told yet.
    fn leave_stream(&mut self, key: WatchKey) {
        let Some(watch) = self.watches.get_mut(&key).filter(|watch| watch.id.is_none()) else { return };
        let place = std::mem::replace(&mut watch.place, WatchPlacement::Nowhere);
        if let Some(stream) = place.stream().and_then(|id| self.streams.get_mut(&id)) {
            stream.waiting.remove(&key);
        }
        self.forget_upstream(&place);
    }

    /// The response of etcd to a create that is refused, as without permission.
    fn denial(&self, reason: &Refusal) -> SplicedWatchResponse {
        SplicedWatchResponse {
            header: Some(self.header_at_least(0)),
            watch_id: NO_WATCH,
            created: true,
            canceled: true,
            cancel_reason: reason.status().cancel_reason().into(),
            ..SplicedWatchResponse::default()
        }
    }

    fn create(&mut self, create: ClientWatchCreate) {
        self.last_key += 1;
        let key = WatchKey(self.last_key);
        let watch = HubWatch {
            cursor: WatchCursor::from_start(create.start_revision),
            create,
            id: None,
            answer: None,
            place: WatchPlacement::Nowhere,
            requirement: ANY_STREAM,
            begins_after: None,
            resumes_exactly: false,
            shown_before: self.cluster_view.shown,
            refusal: None,
            compacted_at: None,
            confirmed: false,
            events: 0,
        };
        self.watches.insert(key, watch);
        self.unsent.insert(key);
        self.pending.push_back(PendingClientRequest::Create(key));
    }

    /// A live watch is cancelled at once even while requests are pending: an outage must not delay the
    /// cancel. The cancel is queued only where an earlier create may still take or release the id.
    fn cancel_requested(&mut self, id: i64) {
        let contested = self.pending.iter().any(|pending| match pending {
            // Id 0 names no watch: the client asks for an assigned id.
            PendingClientRequest::Create(key) => {
                id != 0 && self.watches.get(key).is_some_and(|watch| watch.create.watch_id == id)
            }
            PendingClientRequest::Cancel(_) | PendingClientRequest::Progress => false,
        });
        if !contested && (self.pending.is_empty() || self.client_ids.contains_key(&id)) {
            self.cancel(id);
        } else {
            self.pending.push_back(PendingClientRequest::Cancel(id));
        }
    }

    /// live, compacted → gone, acknowledged once. An unknown id gets no answer, as in etcd.
    fn cancel(&mut self, id: i64) {
        let seen = match self.client_ids.remove(&id) {
            // Not the floor: a watch from the future has a floor above the cluster's revision.
            Some(ClientWatchIdState::Watch(key)) => self.withdraw(key).map_or(0, |watch| watch.cursor.seen()),
            Some(ClientWatchIdState::Compacted) => 0,
            None => return,
        };
        let header = Some(self.header_at_least(seen));
        self.emit(&SplicedWatchResponse {
            header,
            watch_id: id,
            canceled: true,
            ..SplicedWatchResponse::default()
        });
    }

    pub(super) fn answer_in_turn(&mut self) {
        while let Some(&first) = self.pending.front() {
            match first {
                PendingClientRequest::Create(key) => {
                    let Some(answer) = self.watches.get_mut(&key).and_then(|watch| watch.answer.take())
                    else {
                        return;
                    };
                    self.tell(key, answer);
                }
                PendingClientRequest::Cancel(id) => self.cancel(id),
                PendingClientRequest::Progress => self.ask_progress(),
            }
            self.pending.pop_front();
        }
        self.pending_bytes = 0;
    }

    fn tell(&mut self, key: WatchKey, answer: CreateAnswer) {
        match answer {
            CreateAnswer::Refused(refusal) => self.tell_refused(key, *refusal),
            CreateAnswer::Created(created) => self.tell_created(key, *created),
        }
    }

    /// Tells a refusal with the member's own bytes. The id is -1 if the member says -1. Members older than
    /// 3.4.22 and 3.5.6 echo the requested id, and so does the hub, unless a live watch has the id: clients,
    /// like old members, would take the live watch for dead. See `docs/etcd-facts.md#v7`.
    fn tell_refused(&mut self, key: WatchKey, mut refusal: SplicedWatchResponse) {
        let asked = self.withdraw(key).map_or(NO_WATCH, |watch| watch.create.watch_id);
        let echoed = refusal.watch_id != NO_WATCH && !self.client_ids.contains_key(&asked);
        refusal.watch_id = if echoed { asked } else { NO_WATCH };
        let header = self.of_this_cluster(refusal.header.take());
        let revision = header.revision.max(self.cluster_view.shown);
        refusal.header = Some(header.with_revision(revision));
        self.emit(&refusal);
    }

    fn tell_created(&mut self, key: WatchKey, mut created: SplicedWatchResponse) {
        let Some(watch) = self.watches.get(&key) else { return };
        let (asked, from_now, stale) =
            (watch.create.watch_id, watch.create.start_revision == 0, watch.compacted_at);
        let header = self.of_this_cluster(created.header.take());
        // A client of a watch "from now" resumes by this revision, so the value is the exact beginning, even
        // below a revision shown since the create (docs/decisions.md#d50). For all remaining watches the
        // revision only must not go back.
        let revision = if from_now { header.revision } else { header.revision.max(self.cluster_view.shown) };
        created.header = Some(header.with_revision(revision));
        if asked != 0 && self.client_ids.contains_key(&asked) {
            let noted = Refusal::of_cancel_reason(DUPLICATE.as_bytes()).because(RefusalReason::Malformed);
            self.note_refused(key, noted);
            self.withdraw(key);
            created.watch_id = NO_WATCH;
            created.canceled = true;
            created.cancel_reason = Bytes::from_static(DUPLICATE.as_bytes());
            return self.emit(&created);
        }
        let id = if asked == 0 { self.assign_id() } else { asked };
        self.client_ids.insert(id, ClientWatchIdState::Watch(key));
        self.denied_ids.remove(&id);
        created.watch_id = id;
        self.emit(&created);
        if let Some(watch) = self.watches.get_mut(&key) {
            watch.id = Some(id);
            if matches!(watch.place, WatchPlacement::Parked) {
                watch.place = WatchPlacement::Nowhere;
                self.unsent.insert(key);
            }
        }
        if let Some(revision) = stale {
            self.end_as_compacted(key, revision);
        }
    }

    /// Assigns ids as etcd does: upward from 0, never reused. Ids in use are skipped, and ids of denied
    /// watches, since a cancel may be on its way for a denied watch.
    fn assign_id(&mut self) -> i64 {
        if PlantedFault::ReusedId.is_on() {
            self.next_client_id = 0;
        }
        while self.client_ids.contains_key(&self.next_client_id)
            || self.denied_ids.remove(&self.next_client_id)
        {
            self.next_client_id += 1;
        }
        self.next_client_id += 1;
        self.next_client_id - 1
    }

    /// Ends a watch because of compaction, with the member's own bytes.
    pub(super) fn tell_compacted(&mut self, key: WatchKey, mut compaction: SplicedWatchResponse) {
        let Some(id) = self.withdraw(key).and_then(|watch| watch.id) else { return };
        self.client_ids.insert(id, ClientWatchIdState::Compacted);
        compaction.watch_id = id;
        compaction.header = Some(compaction.header.unwrap_or_else(|| self.header_at(0)).with_revision(0));
        self.emit(&compaction);
    }

    /// Ends a watch as compacted because the watched history was replaced by another: the client must read
    /// anew.
    pub(super) fn end_as_compacted(&mut self, key: WatchKey, revision: i64) {
        let compact_revision = revision.max(1);
        self.tell_compacted(
            key,
            SplicedWatchResponse { canceled: true, compact_revision, ..SplicedWatchResponse::default() },
        );
    }

    /// Ends a live watch because its user lost the permission.
    pub(super) fn tell_denied(&mut self, key: WatchKey, mut refusal: SplicedWatchResponse) {
        let Some(watch) = self.withdraw(key) else { return };
        let Some(id) = watch.id else { return };
        self.client_ids.remove(&id);
        if id >= self.next_client_id {
            self.denied_ids.insert(id);
        }
        refusal.watch_id = id;
        refusal.created = false;
        refusal.header = Some(self.header_at_least(watch.cursor.seen()));
        self.emit(&refusal);
    }
}
