//! One Watch stream on one member: what it hears, and what its watches are given (`recvLoop` and `watchableStore` in etcd).
//!
//! Owns: the requests in order, the watches with their ids, the two channels up to their reading. Must not know what becomes of an answer
//! on the wire, which is `send`. Invariants: each method is one move of etcd's own, which other moves may come between; a move that is not
//! possible does nothing and is `false`. Where etcd takes the watches of a stream in any order, this takes them by id.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use keyward::pb::{
    etcdserverpb::{
        WatchCreateRequest, WatchRequest, WatchResponse, watch_create_request::FilterType,
        watch_request::RequestUnion,
    },
    mvccpb::Event,
};

use super::{
    flavor::Flavor,
    interval::Interval,
    member::Member,
    send::{Given, Outgoing, Selected},
    store::Store,
    watcher::{Batch, Filters, Place, Watcher},
};

/// Sizes. The default is etcd's, with its default `--max-request-bytes`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// What the channel of events and progress holds.
    pub(crate) channel: usize,
    /// What the channel of Created, acks and refusals holds.
    pub(crate) control: usize,
    /// Revisions in one answer to a watch that catches up.
    pub(crate) revisions: usize,
    /// An answer of this size is cut where the client takes fragments: `--max-request-bytes` and 512 KiB.
    pub(crate) fragment: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { channel: 128, control: 16, revisions: 1000, fragment: 2 * 1024 * 1024 }
    }
}

/// Why a create is not permitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The token is unknown on this member, or expired.
    InvalidToken,
    /// A signed token from before the last change of users or roles.
    OldRevision,
    /// There is no token.
    NoUser,
    /// The user has no right to the range.
    Denied,
}

/// Whether the stream's user may watch a range at this moment.
pub(crate) type Permit<'a> = &'a dyn Fn(&Interval) -> Result<(), Refusal>;

/// A client's Watch stream, on the member's side.
#[derive(Clone, Debug)]
pub(crate) struct WatchStream {
    pub(super) flavor: Flavor,
    pub(super) limits: Limits,
    requests: VecDeque<WatchRequest>,
    /// A create that stands between its two reads of the store.
    creating: Option<Creating>,
    pub(super) watchers: BTreeMap<i64, Watcher>,
    next_id: i64,
    pub(super) control: VecDeque<WatchResponse>,
    pub(super) channel: VecDeque<Given>,
    pub(super) out: Outgoing,
}

#[derive(Clone, Debug)]
struct Creating {
    request: WatchCreateRequest,
    /// Old servers: the revision before it was registered. New ones: its id, or why not.
    half: Half,
}

#[derive(Clone, Debug)]
enum Half {
    Read(i64),
    Registered(Result<i64, &'static str>),
}

const EMPTY_RANGE: &str = "mvcc: watcher range is empty";
const DUPLICATE_ID: &str = "mvcc: duplicate watch ID provided on the WatchStream";
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
/// The id of what is about no watch.
pub(crate) const NO_WATCH: i64 = -1;

impl WatchStream {
    pub(crate) fn new(flavor: Flavor, limits: Limits) -> WatchStream {
        WatchStream {
            flavor,
            limits,
            requests: VecDeque::new(),
            creating: None,
            watchers: BTreeMap::new(),
            next_id: 0,
            control: VecDeque::new(),
            channel: VecDeque::new(),
            out: Outgoing::default(),
        }
    }

    /// The client sends a request. (A half-close is no request: etcd goes on as if nothing had been said.)
    pub(crate) fn request(&mut self, request: WatchRequest) {
        self.requests.push_back(request);
    }

    /// What the client reads next.
    pub(crate) fn pop(&mut self) -> Option<WatchResponse> {
        self.out.wire.pop_front()
    }

    /// How many answers the client has not read.
    pub(crate) fn unread(&self) -> usize {
        self.out.wire.len()
    }

    /// The ids that are taken: of all watches but the cancelled ones.
    pub(crate) fn ids(&self) -> impl Iterator<Item = i64> {
        self.watchers.keys().copied()
    }

    /// How many answers wait for a Created of their id, some of them for ever: of watches that were cancelled or muted.
    pub(crate) fn parked(&self) -> usize {
        self.out.parked()
    }

    /// The watches that a pass of `sync` has something to do for.
    pub(crate) fn behind(&self) -> impl Iterator<Item = i64> {
        let behind = |watcher: &Watcher| matches!(watcher.place, Place::Unsynced);
        self.watchers.iter().filter_map(move |(id, watcher)| behind(watcher).then_some(*id))
    }

    /// Whether nothing moves any more until something is asked or applied, the client's reading apart.
    pub(crate) fn is_at_rest(&self) -> bool {
        let waiting = |watcher: &Watcher| matches!(watcher.place, Place::Unsynced | Place::Victim(_));
        self.requests.is_empty()
            && self.creating.is_none()
            && self.control.is_empty()
            && self.channel.is_empty()
            && !self.watchers.values().any(waiting)
    }

    /// Moves until nothing moves.
    pub(crate) fn rest(&mut self, store: &Store, member: &Member, permit: Permit<'_>) {
        loop {
            let moved = self.receive(store, member, permit)
                || self.send(store, member, Selected::Control)
                || self.send(store, member, Selected::Channel)
                || self.flush(member)
                || self.sync(store, member);
            if !moved {
                return;
            }
        }
    }

    /// `recvLoop`: takes the next request, or ends the create that it stands in. A create takes two moves, since revisions may come
    /// between its two looks at the store. Does nothing while the control channel is full.
    pub(crate) fn receive(&mut self, store: &Store, member: &Member, permit: Permit<'_>) -> bool {
        if self.control.len() >= self.limits.control {
            return false;
        }
        if let Some(creating) = self.creating.take() {
            self.end_create(store, member, creating);
            return true;
        }
        let Some(request) = self.requests.pop_front() else { return false };
        match request.request_union {
            Some(RequestUnion::CreateRequest(create)) => self.begin_create(store, member, permit, create),
            Some(RequestUnion::CancelRequest(cancel)) => self.cancel(store, member, cancel.watch_id),
            Some(RequestUnion::ProgressRequest(_)) => self.manual_progress(store, member),
            None => {}
        }
        true
    }

    fn begin_create(
        &mut self,
        store: &Store,
        member: &Member,
        permit: Permit<'_>,
        mut create: WatchCreateRequest,
    ) {
        if create.key.is_empty() {
            create.key = Bytes::from_static(b"\0");
        }
        if self.flavor.refuses_negative_start && create.start_revision < 0 {
            return self.refuse(store, member, NO_WATCH, COMPACTED);
        }
        if let Err(refusal) = permit(&Interval::new(&create.key, &create.range_end)) {
            let (id, reason) = if self.flavor.exact_refusals {
                (NO_WATCH, refusal.reason())
            } else {
                (create.watch_id, Refusal::Denied.reason())
            };
            return self.refuse(store, member, id, reason);
        }
        let half = if self.flavor.late_created {
            Half::Registered(self.register(member, &create, create.start_revision))
        } else {
            Half::Read(member.applied())
        };
        self.creating = Some(Creating { request: create, half });
    }

    fn end_create(&mut self, store: &Store, member: &Member, creating: Creating) {
        let create = creating.request;
        let (registered, revision) = match creating.half {
            Half::Registered(registered) => (registered, member.applied()),
            Half::Read(before) => {
                let start = if create.start_revision == 0 { before + 1 } else { create.start_revision };
                (self.register(member, &create, start), before)
            }
        };
        let mut created = WatchResponse {
            header: Some(member.header(store, revision)),
            watch_id: NO_WATCH,
            created: true,
            ..WatchResponse::default()
        };
        match registered {
            Ok(id) => {
                created.watch_id = id;
                self.out.asked(id, &create);
            }
            Err(reason) => {
                created.canceled = true;
                created.cancel_reason = reason.into();
            }
        }
        self.control.push_back(created);
    }

    fn refuse(&mut self, store: &Store, member: &Member, watch_id: i64, reason: &str) {
        self.control.push_back(WatchResponse {
            header: Some(member.header(store, member.applied())),
            watch_id,
            created: true,
            canceled: true,
            cancel_reason: reason.into(),
            ..WatchResponse::default()
        });
    }

    /// `watchStream.Watch`: an id, and a place among the store's watches.
    fn register(
        &mut self,
        member: &Member,
        create: &WatchCreateRequest,
        start: i64,
    ) -> Result<i64, &'static str> {
        let range = Interval::new(&create.key, &create.range_end);
        if range.is_empty() {
            return Err(EMPTY_RANGE);
        }
        let mut id = create.watch_id;
        if id == 0 {
            while self.watchers.contains_key(&self.next_id) {
                self.next_id += 1;
            }
            id = self.next_id;
            self.next_id += 1;
        } else if self.watchers.contains_key(&id) {
            return Err(DUPLICATE_ID);
        }
        let current = member.applied();
        let synced = start > current || start == 0;
        let least = if synced { start.max(current + 1) } else { start };
        let place = if synced { Place::Synced } else { Place::Unsynced };
        let filters = filters(create);
        self.watchers.insert(id, Watcher { range, filters, start, least, place });
        Ok(id)
    }

    fn cancel(&mut self, store: &Store, member: &Member, id: i64) {
        if self.watchers.remove(&id).is_none() {
            return;
        }
        self.control.push_back(WatchResponse {
            header: Some(member.header(store, member.applied())),
            watch_id: id,
            canceled: true,
            ..WatchResponse::default()
        });
        self.out.forget(id);
    }

    fn manual_progress(&mut self, store: &Store, member: &Member) {
        if self.flavor.ordered_progress {
            let told = self.watchers.values().all(|watcher| self.is_in_sync(member, watcher));
            if told && !self.watchers.is_empty() {
                self.give(Given::progress(NO_WATCH, member.applied()));
            }
            return;
        }
        self.control.push_back(WatchResponse {
            header: Some(member.header(store, member.applied())),
            watch_id: NO_WATCH,
            ..WatchResponse::default()
        });
    }

    fn is_in_sync(&self, member: &Member, watcher: &Watcher) -> bool {
        let future = self.flavor.no_future_progress && member.applied() < watcher.start;
        matches!(watcher.place, Place::Synced) && !future
    }

    /// The ticker of `progress_notify`: one interval is over.
    pub(crate) fn timed_progress(&mut self, member: &Member) {
        for id in self.out.progress_due() {
            let told = self.watchers.get(&id).is_some_and(|watcher| self.is_in_sync(member, watcher));
            if told {
                self.give(Given::progress(id, member.applied()));
            }
        }
    }

    /// The member has applied a revision: those in sync get it. Called by `Member::apply`.
    pub(super) fn notify(&mut self, store: &Store, revision: i64) {
        for id in self.watchers.keys().copied().collect::<Vec<_>>() {
            let Some(watcher) = self.watchers.get_mut(&id) else { continue };
            if !matches!(watcher.place, Place::Synced) {
                continue;
            }
            let events = watcher.at(store, revision);
            if events.is_empty() {
                continue;
            }
            let filters = watcher.filters;
            if self.flavor.keeps_place_over_snapshot {
                watcher.least = revision + 1;
            }
            if !self.offer(id, filters, &events, revision) {
                self.victim(id, revision + 1, Batch { events, more: None });
            }
        }
    }

    /// The member took a snapshot: who was in sync has to catch up. Called by `Member::restore`.
    pub(super) fn restored(&mut self) {
        for watcher in self.watchers.values_mut() {
            if matches!(watcher.place, Place::Synced) {
                watcher.place = Place::Unsynced;
            }
        }
    }

    /// `syncWatchers`: one pass over the watches that have to catch up, each of which gets at most one answer. etcd makes one every
    /// 100 ms, over all streams of the member.
    pub(crate) fn sync(&mut self, store: &Store, member: &Member) -> bool {
        let behind: Vec<i64> = self.behind().collect();
        let mut moved = false;
        let mut from = i64::MAX;
        for id in &behind {
            let Some(watcher) = self.watchers.get_mut(id) else { continue };
            if watcher.least >= member.compacted() {
                from = from.min(watcher.least);
            } else if self.channel.len() < self.limits.channel {
                watcher.place = Place::Compacted;
                self.channel.push_back(Given::compaction(*id, member.compacted()));
                moved = true;
            }
        }
        // Below zero, on a store that was never compacted: etcd's scan finds nothing, for nobody in this pass.
        let from = if from < 0 { i64::MAX } else { from };
        for id in behind {
            moved |= self.sync_one(store, member, id, from);
        }
        moved
    }

    fn sync_one(&mut self, store: &Store, member: &Member, id: i64, from: i64) -> bool {
        let current = member.applied();
        let Some(watcher) = self.watchers.get_mut(&id) else { return false };
        if !matches!(watcher.place, Place::Unsynced) {
            return false;
        }
        if watcher.least < member.compacted() && self.flavor.compaction_always_told {
            return false;
        }
        let batch = watcher.missed(self.flavor, store, member, from, self.limits.revisions);
        let keeps = self.flavor.keeps_place_over_snapshot;
        let caught_up = if keeps { watcher.least.max(current + 1) } else { current + 1 };
        watcher.least = batch.more.unwrap_or(caught_up);
        let (filters, least) = (watcher.filters, watcher.least);
        let place = if batch.more.is_some() { Place::Unsynced } else { Place::Synced };
        watcher.place = place;
        if !batch.events.is_empty() && !self.offer(id, filters, &batch.events, current) {
            self.victim(id, least, batch);
        }
        true
    }

    /// `moveVictims`: tries again what the full channel did not take.
    pub(crate) fn flush(&mut self, member: &Member) -> bool {
        let mut moved = false;
        for id in self.watchers.keys().copied().collect::<Vec<_>>() {
            let Some(watcher) = self.watchers.get(&id) else { continue };
            let Place::Victim(batch) = &watcher.place else { continue };
            let (batch, filters, least) = (batch.clone(), watcher.filters, watcher.least);
            if !self.offer(id, filters, &batch.events, least - 1) {
                continue;
            }
            moved = true;
            let least = batch.more.unwrap_or(least);
            let place = if least <= member.applied() { Place::Unsynced } else { Place::Synced };
            if let Some(watcher) = self.watchers.get_mut(&id) {
                watcher.least = least;
                watcher.place = place;
            }
        }
        moved
    }

    fn victim(&mut self, id: i64, least: i64, batch: Batch) {
        if let Some(watcher) = self.watchers.get_mut(&id) {
            watcher.least = least;
            watcher.place = Place::Victim(batch);
        }
    }

    /// `watcher.send`: what the filters leave goes into the channel; nothing left is as good as sent.
    fn offer(&mut self, id: i64, filters: Filters, events: &[Event], revision: i64) -> bool {
        let events: Vec<Event> = events.iter().filter(|event| filters.pass(event)).cloned().collect();
        events.is_empty() || self.give(Given::events(id, revision, events))
    }

    fn give(&mut self, given: Given) -> bool {
        let room = self.channel.len() < self.limits.channel;
        if room {
            self.channel.push_back(given);
        }
        room
    }
}

impl Refusal {
    fn reason(self) -> &'static str {
        match self {
            Refusal::InvalidToken => {
                "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token"
            }
            Refusal::OldRevision => {
                "rpc error: code = InvalidArgument desc = etcdserver: revision of auth store is old"
            }
            Refusal::NoUser => "rpc error: code = InvalidArgument desc = etcdserver: user name is empty",
            Refusal::Denied => "rpc error: code = PermissionDenied desc = etcdserver: permission denied",
        }
    }
}

fn filters(create: &WatchCreateRequest) -> Filters {
    let has = |filter: FilterType| create.filters.contains(&filter.into());
    Filters { no_put: has(FilterType::Noput), no_delete: has(FilterType::Nodelete) }
}
