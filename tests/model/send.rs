//! What goes out on one Watch stream (`sendLoop` in etcd).
//!
//! Owns: which watches were announced, what waits for its Created, previous values, fragments. Must not know why an answer was given.
//! Invariant: what lies in one of the two channels is read in order; between the channels the caller chooses, as Go's `select` does.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use keyward::pb::{
    etcdserverpb::{WatchCreateRequest, WatchResponse},
    mvccpb::Event,
};
use prost::Message as _;

use super::{
    member::Member,
    store::{Store, is_delete},
    stream::{NO_WATCH, WatchStream},
};

/// From which channel the loop reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selected {
    /// Created, refusals, acks; manual progress on old servers.
    Control,
    /// Events, compactions, progress.
    Channel,
}

/// What the store gives to a stream.
#[derive(Clone, Debug)]
pub(super) struct Given {
    id: i64,
    revision: i64,
    compacted: i64,
    events: Vec<Event>,
}

/// What `sendLoop` remembers, and the wire.
#[derive(Clone, Debug, Default)]
pub(super) struct Outgoing {
    announced: BTreeSet<i64>,
    parked: BTreeMap<i64, Vec<WatchResponse>>,
    prev_kv: BTreeSet<i64>,
    fragment: BTreeSet<i64>,
    /// Who asked for progress, and whether it is due at the next tick.
    progress: BTreeMap<i64, bool>,
    pub(super) wire: VecDeque<WatchResponse>,
}

impl Given {
    pub(super) fn events(id: i64, revision: i64, events: Vec<Event>) -> Given {
        Given { id, revision, compacted: 0, events }
    }

    pub(super) fn progress(id: i64, revision: i64) -> Given {
        Given::events(id, revision, Vec::new())
    }

    /// Its header has no revision.
    pub(super) fn compaction(id: i64, compacted: i64) -> Given {
        Given { id, revision: 0, compacted, events: Vec::new() }
    }
}

impl Outgoing {
    /// What a create that was registered asked for.
    pub(super) fn asked(&mut self, id: i64, create: &WatchCreateRequest) {
        if create.progress_notify {
            self.progress.insert(id, true);
        }
        if create.prev_kv {
            self.prev_kv.insert(id);
        }
        if create.fragment {
            self.fragment.insert(id);
        }
    }

    /// A watch was cancelled. What was given to it before is still sent, as if it had asked for nothing.
    pub(super) fn forget(&mut self, id: i64) {
        self.progress.remove(&id);
        self.prev_kv.remove(&id);
        self.fragment.remove(&id);
    }

    pub(super) fn parked(&self) -> usize {
        self.parked.values().map(Vec::len).sum()
    }

    /// A tick: who is due. Whoever was not is at the next one.
    pub(super) fn progress_due(&mut self) -> Vec<i64> {
        let due = self.progress.iter().filter_map(|(id, due)| due.then_some(*id)).collect();
        self.progress.values_mut().for_each(|due| *due = true);
        due
    }
}

impl WatchStream {
    /// `sendLoop`: sends one thing from the channel that the caller chose. Previous values are looked up now.
    pub(crate) fn send(&mut self, store: &Store, member: &Member, from: Selected) -> bool {
        match from {
            Selected::Control => self.control.pop_front().map(|answer| self.send_control(answer)).is_some(),
            Selected::Channel => {
                self.channel.pop_front().map(|given| self.send_given(store, member, given)).is_some()
            }
        }
    }

    /// Whether that channel has something to send.
    pub(crate) fn can_send(&self, from: Selected) -> bool {
        match from {
            Selected::Control => !self.control.is_empty(),
            Selected::Channel => !self.channel.is_empty(),
        }
    }

    fn send_control(&mut self, answer: WatchResponse) {
        let (id, created, canceled) = (answer.watch_id, answer.created, answer.canceled);
        self.out.wire.push_back(answer);
        // Before V7 a refusal, too, takes its id out of those that are announced: the watch that has it falls silent.
        if canceled && (id != NO_WATCH || !self.flavor.exact_refusals) {
            self.out.announced.remove(&id);
        } else if created {
            self.out.announced.insert(id);
            self.out.wire.extend(self.out.parked.remove(&id).unwrap_or_default());
        }
    }

    fn send_given(&mut self, store: &Store, member: &Member, given: Given) {
        let id = given.id;
        let mut events = given.events;
        if self.out.prev_kv.contains(&id) {
            events.iter_mut().for_each(|event| add_prev_kv(store, member, event));
        }
        let answer = WatchResponse {
            header: Some(member.header(store, given.revision)),
            watch_id: id,
            canceled: given.compacted != 0,
            compact_revision: given.compacted,
            events,
            ..WatchResponse::default()
        };
        let of_stream = self.flavor.ordered_progress && id == NO_WATCH;
        if !of_stream && !self.out.announced.contains(&id) {
            // Also for ever: after an ack, or after a refusal that muted it.
            self.out.parked.entry(id).or_default().push(answer);
            return;
        }
        if !answer.events.is_empty()
            && let Some(due) = self.out.progress.get_mut(&id)
        {
            *due = false;
        }
        if self.out.fragment.contains(&id) {
            self.out.wire.extend(fragments(answer, self.limits.fragment));
        } else {
            self.out.wire.push_back(answer);
        }
    }
}

/// The key before the event, unless the event made it or a compaction has taken it.
fn add_prev_kv(store: &Store, member: &Member, event: &mut Event) {
    let Some(kv) = &event.kv else { return };
    let before = kv.mod_revision - 1;
    let made = !is_delete(event) && kv.create_revision == kv.mod_revision;
    if !made && before >= member.compacted() {
        event.prev_kv = store.value(&kv.key, before).cloned();
    }
}

/// `sendFragments`: pieces below `limit`, but of one event at least; all but the last say that more follows.
fn fragments(answer: WatchResponse, limit: usize) -> Vec<WatchResponse> {
    if answer.encoded_len() < limit || answer.events.len() < 2 {
        return vec![answer];
    }
    let empty = WatchResponse { events: Vec::new(), fragment: true, ..answer.clone() };
    let head = empty.encoded_len();
    let mut pieces: Vec<WatchResponse> = Vec::new();
    let mut size = 0;
    for event in answer.events {
        let body = event.encoded_len();
        let length = 1 + prost::length_delimiter_len(body) + body;
        match pieces.last_mut() {
            Some(piece) if size + length < limit => {
                piece.events.push(event);
                size += length;
            }
            _ => {
                pieces.push(WatchResponse { events: vec![event], ..empty.clone() });
                size = head + length;
            }
        }
    }
    if let Some(last) = pieces.last_mut() {
        last.fragment = false;
    }
    pieces
}
