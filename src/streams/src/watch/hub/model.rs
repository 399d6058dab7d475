//! The hub against a small, honest etcd: random schedules with faults, and a checker of the client's view.
//!
//! The model has etcd's two channels per stream (control answers; events with progress), synced and unsynced
//! watchers, batches with the member's revision in the header, fragments, lagging members, compaction, and
//! the version differences named by `WatchTraits`. Messages are encoded with prost, so the model also checks
//! the splices of `wire`.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use tokio::time::Instant;

use keyward_etcd::identity::Revision;
use keyward_etcd::pb::{etcdserverpb as pb, mvccpb};

use super::tests::SMALL_LIMITS;
use super::{
    Hub, HubInput, HubOutput, HubTiming, StreamCredential, StreamLoss, UpstreamStreamId, WatchKey,
    WatchTraits,
};

const KEYS: u8 = 6;
/// In every run, and at full length.
const SEEDS: u64 = 250;
const ALL_SEEDS: u64 = 5_000;
const BAD_TOKEN: &str = "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token";
const DENIED: &str = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
const DUPLICATE: &str = "mvcc: duplicate watch ID provided on the WatchStream";

/// splitmix64: small, and the same on every platform.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n.max(1) as u64).unwrap()
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn int(&mut self, low: i64, high: i64) -> i64 {
        low + i64::try_from(self.below(usize::try_from(high - low + 1).unwrap_or(1))).unwrap()
    }
}

/// Numbers of occurrences in a run or in all runs: the test requires a minimum of each, so that every promise
/// is put to the test.
#[derive(Clone, Copy, Debug, Default)]
struct ModelCounts {
    events: u64,
    creates: u64,
    resumes: u64,
    held: u64,
    cuts: u64,
    refused: u64,
    denied: u64,
    compacted: u64,
    duplicates: u64,
    progress: u64,
    doubts: u64,
    cancels: u64,
    raced: u64,
    behind: u64,
    overtaken: u64,
}

#[derive(Clone, Debug, PartialEq)]
struct ModelEvent {
    revision: i64,
    key: u8,
    delete: bool,
    value: Vec<u8>,
}

#[derive(Clone, Debug)]
struct Range {
    low: u8,
    high: u8,
}

impl Range {
    fn has(&self, key: u8) -> bool {
        (self.low..self.high).contains(&key)
    }
}

struct Watcher {
    range: Range,
    start: i64,
    next: i64,
    synced: bool,
    compacted: bool,
    fragment: bool,
    notify: bool,
}

/// A Watch stream on a member, with the state of etcd's recvLoop and sendLoop.
struct Server {
    credential: StreamCredential,
    member: usize,
    open: bool,
    token: u64,
    inbox: VecDeque<Bytes>,
    control: VecDeque<pb::WatchResponse>,
    channel: VecDeque<(pb::WatchResponse, bool)>,
    watchers: BTreeMap<i64, Watcher>,
    announced: HashSet<i64>,
    parked: HashMap<i64, Vec<pb::WatchResponse>>,
    outbox: VecDeque<pb::WatchResponse>,
    /// Serial numbers of the creates with an answer on the way, in order.
    answered: VecDeque<u64>,
}

/// A create of the client, and the limits of its answer.
struct ModelCreate {
    serial: u64,
    range: Range,
    id: i64,
    start: i64,
    fragment: bool,
    notify: bool,
    shown: i64,
    /// The watch's key inside the hub.
    key: WatchKey,
    /// The revision of the first write sent by the client after the create.
    written_behind: Option<i64>,
}

struct ModelWatch {
    asked: ModelCreate,
    /// The next permitted revision, and index in the revision.
    next: (i64, usize),
    last: i64,
    told: i64,
    in_fragments: bool,
    compacted: bool,
}

#[derive(Default)]
struct ModelClient {
    serial: u64,
    waiting: VecDeque<ModelCreate>,
    watches: BTreeMap<i64, ModelWatch>,
    acks: HashMap<i64, u32>,
    /// Ids of live watches that were denied: not assigned again.
    denied: HashSet<i64>,
    next_id: i64,
    shown: i64,
    told: i64,
    progress_asked: u64,
    progress_told: u64,
}

struct World {
    dice: Dice,
    hub: Hub,
    now: Instant,
    traits: WatchTraits,
    history: Vec<Vec<ModelEvent>>,
    compacted: i64,
    members: [i64; 3],
    /// Index of a member that rarely applies revisions; 3 for none.
    slow: usize,
    servers: BTreeMap<UpstreamStreamId, Server>,
    /// Tokens below `valid` are refused.
    valid: u64,
    /// The token at hand of the driver.
    cached: u64,
    denied: HashSet<u8>,
    checks: Vec<(WatchKey, UpstreamStreamId)>,
    upstream_ids: HashSet<i64>,
    /// Number of refusals of a create since last accepted, by serial number.
    refusals: HashMap<u64, u32>,
    created: HashSet<u64>,
    client: ModelClient,
    calm: bool,
    counts: ModelCounts,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let now = Instant::now();
        let timing = HubTiming {
            idle_progress: Some(Duration::from_secs(30)),
            progress_grace: Duration::from_secs(1),
        };
        let late_created = dice.one_in(2);
        let progress_trusted = late_created || !dice.one_in(3);
        let exact_refusals = progress_trusted || dice.one_in(2);
        let refuses_negative_start = late_created && dice.one_in(2);
        Self {
            hub: Hub { limits: &SMALL_LIMITS, ..Hub::new(now, timing) },
            now,
            traits: WatchTraits {
                progress_trusted,
                exact_refusals,
                late_created,
                refuses_negative_start,
                misjudges_open_end: false,
            },
            history: vec![Vec::new()],
            compacted: 0,
            members: [1; 3],
            slow: dice.below(4),
            servers: BTreeMap::new(),
            valid: 1,
            cached: 1,
            denied: HashSet::new(),
            checks: Vec::new(),
            upstream_ids: HashSet::new(),
            refusals: HashMap::new(),
            created: HashSet::new(),
            client: ModelClient::default(),
            calm: false,
            counts: ModelCounts::default(),
            dice,
        }
    }

    fn head(&self) -> i64 {
        i64::try_from(self.history.len()).unwrap()
    }

    fn at(&self, revision: i64) -> &[ModelEvent] {
        &self.history[usize::try_from(revision - 1).unwrap()]
    }

    /// The first event of `range` at or after a position.
    fn next_event(&self, range: &Range, (revision, index): (i64, usize)) -> Option<(&ModelEvent, usize)> {
        for at in revision.max(1)..=self.head() {
            let skip = if at == revision { index } else { 0 };
            let found = self.at(at).iter().enumerate().skip(skip).find(|(_, event)| range.has(event.key));
            if let Some((index, event)) = found {
                return Some((event, index));
            }
        }
        None
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step();
        }
        self.calm = true;
        self.valid = 0;
        self.settle();
        self.check_everything_arrived();
        self.check_progress_is_answered();
    }

    /// Runs without faults until every member and stream is idle.
    fn settle(&mut self) {
        for _ in 0..20_000 {
            let busy = self.members.iter().any(|applied| *applied < self.head())
                || !self.checks.is_empty()
                || self.servers.values().any(Server::is_busy);
            if !busy {
                return;
            }
            for member in 0..3 {
                self.apply(member);
            }
            self.answer_check();
            for id in self.servers.keys().copied().collect::<Vec<_>>() {
                self.turn_server(id);
            }
        }
        panic!("never came to rest");
    }

    fn turn_server(&mut self, id: UpstreamStreamId) {
        self.open(id);
        for _ in 0..4 {
            self.receive(id);
            self.sync(id);
            self.send(id);
            self.deliver(id);
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.dice.next() % 40);
        if self.hub.next_deadline().is_some_and(|at| at <= self.now) {
            self.input(HubInput::Tick);
        }
        let streams: Vec<UpstreamStreamId> = self.servers.keys().copied().collect();
        let stream = (!streams.is_empty()).then(|| streams[self.dice.below(streams.len())]);
        let member = self.dice.below(3);
        match (self.dice.below(100), stream) {
            (0..10, _) => self.write(),
            (10..26, _) if member != self.slow || self.dice.one_in(8) => self.apply(member),
            (26..29, _) => self.ask_create(),
            (29, _) => self.ask_cancel(),
            (30..32, _) => self.ask_progress(),
            (32..36, _) => self.answer_check(),
            (36..38, _) => self.write_behind(),
            (38, _) if self.dice.one_in(5) => self.expire(),
            (39, _) if self.dice.one_in(4) => self.compact(),
            (40, _) if self.dice.one_in(12) => self.change_rights(),
            (41, Some(id)) if self.dice.one_in(2) => self.cut(id),
            (42, Some(id)) if self.dice.one_in(8) => self.server_cancels(id),
            (43..45, Some(id)) => self.timed_progress(id),
            (45..52, Some(id)) => self.open(id),
            (52..66, Some(id)) => self.receive(id),
            (66..72, Some(id)) => self.sync(id),
            (72..86, Some(id)) => self.send(id),
            (86.., Some(id)) => self.deliver(id),
            _ => {}
        }
    }

    // ---- the cluster

    fn write(&mut self) {
        let revision = self.head() + 1;
        let count = 1 + self.dice.below(4);
        let events = (0..count).map(|index| ModelEvent {
            revision,
            key: u8::try_from(self.dice.below(usize::from(KEYS))).unwrap(),
            delete: self.dice.one_in(5),
            value: format!("{revision}.{index}").into_bytes(),
        });
        let events = events.collect();
        self.history.push(events);
        let leader = (self.slow + 1) % 3;
        while self.members[leader] < revision {
            self.apply(leader);
        }
    }

    /// The member applies a revision and notifies its synced watchers.
    fn apply(&mut self, member: usize) {
        if self.members[member] >= self.head() {
            return;
        }
        self.members[member] += 1;
        let revision = self.members[member];
        let events = self.at(revision).to_vec();
        for server in self.servers.values_mut().filter(|server| server.open && server.member == member) {
            for (id, watcher) in server.watchers.iter_mut().filter(|(_, watcher)| watcher.synced) {
                let mine: Vec<&ModelEvent> =
                    events.iter().filter(|event| watcher.range.has(event.key)).collect();
                if mine.is_empty() || watcher.next > revision {
                    continue;
                }
                if server.channel.len() >= 6 {
                    watcher.synced = false;
                    watcher.next = revision;
                    continue;
                }
                watcher.next = revision + 1;
                let response = answer(*id, revision, member);
                let response =
                    pb::WatchResponse { events: mine.into_iter().map(encode).collect(), ..response };
                server.channel.push_back((response, watcher.fragment));
            }
        }
    }

    fn compact(&mut self) {
        let at = self.head() - self.dice.int(0, 12);
        self.compacted = self.compacted.max(at);
    }

    fn expire(&mut self) {
        self.valid += 1;
    }

    fn change_rights(&mut self) {
        let key = u8::try_from(self.dice.below(usize::from(KEYS))).unwrap();
        if !self.denied.remove(&key) && self.denied.len() < 2 {
            self.denied.insert(key);
        }
    }

    // ---- the driver

    fn input(&mut self, input: HubInput) {
        let mut out = Vec::new();
        self.hub.handle(self.now, input, &mut out);
        let held: usize = self.hub.watches.values().map(|watch| watch.cursor.held_bytes()).sum();
        assert_eq!(self.hub.held(), held, "what is held is counted");
        for output in out {
            self.carry_out(output);
        }
    }

    fn carry_out(&mut self, output: HubOutput) {
        match output {
            HubOutput::Open { stream, credential, .. } => {
                assert!(self.servers.insert(stream, Server::new(credential)).is_none(), "stream re-used");
                assert!(self.servers.len() <= 6, "streams grow without bound");
            }
            HubOutput::Close { stream } => drop(self.servers.remove(&stream)),
            HubOutput::Send { stream, message } => {
                let server = self.servers.get_mut(&stream).expect("sent on a stream that is there");
                assert!(server.open, "sent before the stream was open");
                server.inbox.push_back(message);
            }
            HubOutput::Check { watch, stream, .. } => {
                self.counts.doubts += 1;
                self.checks.push((watch, stream));
            }
            HubOutput::Refused(..) => {}
            HubOutput::Emit(message) => self.seen(&message),
            HubOutput::End(end) => panic!("ended: {end:?}"),
        }
    }

    fn open(&mut self, id: UpstreamStreamId) {
        let member = self.dice.below(3);
        let fails = !self.calm && self.dice.one_in(10);
        let Some(server) = self.servers.get_mut(&id).filter(|server| !server.open) else { return };
        if fails {
            self.servers.remove(&id);
            return self.input(HubInput::Lost { stream: id, why: StreamLoss::Upstream });
        }
        if server.credential == StreamCredential::Fresh {
            self.cached = self.valid;
        }
        server.member = member;
        server.token = self.cached;
        server.open = true;
        self.input(HubInput::Opened { stream: id, traits: self.traits });
    }

    fn answer_check(&mut self) {
        if self.checks.is_empty() {
            return;
        }
        let index = self.dice.below(self.checks.len());
        let (watch, stream) = self.checks.swap_remove(index);
        let Some(server) = self.servers.get(&stream) else { return };
        if !self.calm && self.dice.one_in(8) {
            return self.input(HubInput::CheckFailed { watch, stream, why: StreamLoss::Upstream });
        }
        let revision = self.head();
        let header = header(revision, server.member).encode_to_vec().into();
        self.input(HubInput::Checked { watch, stream, header, revision: Revision(revision) });
    }

    fn cut(&mut self, id: UpstreamStreamId) {
        for _ in 0..self.dice.below(4) {
            self.deliver(id);
        }
        if self.servers.remove(&id).is_some() {
            self.counts.cuts += 1;
            self.input(HubInput::Lost { stream: id, why: StreamLoss::Upstream });
        }
    }

    fn deliver(&mut self, id: UpstreamStreamId) {
        let Some(server) = self.servers.get_mut(&id) else { return };
        let Some(response) = server.outbox.pop_front() else { return };
        if response.created {
            let serial = server.answered.pop_front().unwrap();
            if response.canceled {
                *self.refusals.entry(serial).or_default() += 1;
            } else {
                self.refusals.remove(&serial);
            }
        }
        self.counts.held += u64::from(response.fragment);
        let message = response.encode_to_vec().into();
        self.input(HubInput::Upstream { stream: id, message });
    }

    // ---- one member's stream

    fn receive(&mut self, id: UpstreamStreamId) {
        let Some(message) = self.servers.get_mut(&id).and_then(|server| server.inbox.pop_front()) else {
            return;
        };
        match pb::WatchRequest::decode(message).unwrap().request_union.unwrap() {
            pb::watch_request::RequestUnion::CreateRequest(create) => self.server_create(id, &create),
            pb::watch_request::RequestUnion::CancelRequest(cancel) => {
                let server = self.servers.get_mut(&id).unwrap();
                if server.watchers.remove(&cancel.watch_id).is_some() {
                    let revision = self.members[server.member];
                    let ack = answer(cancel.watch_id, revision, server.member);
                    server.control.push_back(pb::WatchResponse { canceled: true, ..ack });
                }
            }
            pb::watch_request::RequestUnion::ProgressRequest(_) => self.server_progress(id),
        }
    }

    fn server_create(&mut self, id: UpstreamStreamId, create: &pb::WatchCreateRequest) {
        assert!(create.watch_id >= 1 && self.upstream_ids.insert(create.watch_id), "upstream id used twice");
        assert!(
            create.fragment && create.progress_notify,
            "fragments and progress are always asked upstream"
        );
        assert!(create.prev_kv, "the client's own fields are kept");
        let range = Range { low: create.key[0], high: create.range_end[0] };
        let serial = u64::from_be_bytes(create.range_end[1..].try_into().unwrap());
        self.servers.get_mut(&id).unwrap().answered.push_back(serial);
        let member = self.servers[&id].member;
        let before = self.members[member];
        let spoils = create.start_revision < 0 && !self.traits.refuses_negative_start;
        assert!(!spoils, "a start that costs other watches their events");
        let reason = if create.start_revision < 0 {
            Some(COMPACTED)
        } else if self.servers[&id].token < self.valid {
            Some(if self.traits.exact_refusals { BAD_TOKEN } else { DENIED })
        } else if (range.low..range.high).any(|key| self.denied.contains(&key)) {
            Some(DENIED)
        } else {
            None
        };
        if let Some(reason) = reason {
            self.counts.refused += 1;
            let echoed = if self.traits.exact_refusals { -1 } else { create.watch_id };
            let refusal = pb::WatchResponse {
                created: true,
                canceled: true,
                cancel_reason: reason.to_owned(),
                ..answer(echoed, before, member)
            };
            return self.servers.get_mut(&id).unwrap().control.push_back(refusal);
        }
        if !self.created.insert(serial) {
            self.counts.resumes += 1;
        }
        let mut start = create.start_revision;
        if !self.traits.late_created {
            start = if start == 0 { before + 1 } else { start };
            self.maybe_apply(member);
        }
        let applied = self.members[member];
        let synced = start == 0 || start > applied;
        let next = if synced { start.max(applied + 1) } else { start };
        let watcher = Watcher {
            range,
            start,
            next,
            synced,
            compacted: false,
            fragment: create.fragment,
            notify: create.progress_notify,
        };
        self.servers.get_mut(&id).unwrap().watchers.insert(create.watch_id, watcher);
        let mut told = before;
        if self.traits.late_created {
            self.maybe_apply(member);
            told = self.members[member];
        }
        let created = pb::WatchResponse { created: true, ..answer(create.watch_id, told, member) };
        self.servers.get_mut(&id).unwrap().control.push_back(created);
    }

    /// Applies revisions between two lines of recvLoop.
    fn maybe_apply(&mut self, member: usize) {
        for _ in 0..self.dice.below(3) {
            self.apply(member);
        }
    }

    fn server_progress(&mut self, id: UpstreamStreamId) {
        let server = self.servers.get_mut(&id).unwrap();
        let applied = self.members[server.member];
        let response = answer(-1, applied, server.member);
        if !self.traits.progress_trusted {
            return server.control.push_back(response);
        }
        let late = self.traits.late_created;
        let in_sync = |watcher: &Watcher| watcher.synced && !(late && applied < watcher.start);
        if !server.watchers.is_empty() && server.watchers.values().all(in_sync) {
            server.channel.push_back((response, false));
        }
    }

    fn timed_progress(&mut self, id: UpstreamStreamId) {
        let Some(server) = self.servers.get_mut(&id).filter(|server| server.open) else { return };
        let applied = self.members[server.member];
        for (id, watcher) in &server.watchers {
            if watcher.synced && watcher.notify && !(self.traits.late_created && applied < watcher.start) {
                server.channel.push_back((answer(*id, applied, server.member), false));
            }
        }
    }

    fn server_cancels(&mut self, id: UpstreamStreamId) {
        let Some(server) = self.servers.get_mut(&id) else { return };
        let announced = server.announced.iter().copied().filter(|id| server.watchers.contains_key(id)).min();
        let Some(watch_id) = announced else { return };
        server.watchers.remove(&watch_id);
        let ack = answer(watch_id, self.members[server.member], server.member);
        server.channel.push_back((pb::WatchResponse { canceled: true, ..ack }, false));
    }

    /// Sends each unsynced watcher a batch, with the member's own revision in the header.
    fn sync(&mut self, id: UpstreamStreamId) {
        let Some(mut server) = self.servers.remove(&id) else { return };
        let applied = self.members[server.member];
        let compacted = self.compacted.min(applied);
        for (watch_id, watcher) in server.watchers.iter_mut().filter(|(_, w)| !w.synced && !w.compacted) {
            if server.channel.len() >= 6 {
                break;
            }
            if watcher.next < compacted {
                watcher.compacted = true;
                let compaction = pb::WatchResponse {
                    canceled: true,
                    compact_revision: compacted,
                    ..answer(*watch_id, 0, server.member)
                };
                server.channel.push_back((compaction, watcher.fragment));
                continue;
            }
            let mut events = Vec::new();
            let mut revisions = 0;
            let mut more = None;
            for revision in watcher.next..=applied {
                let mine: Vec<&ModelEvent> =
                    self.at(revision).iter().filter(|e| watcher.range.has(e.key)).collect();
                if mine.is_empty() {
                    continue;
                }
                if revisions == 3 {
                    more = Some(revision);
                    break;
                }
                revisions += 1;
                events.extend(mine.into_iter().map(encode));
            }
            watcher.synced = more.is_none();
            watcher.next = more.unwrap_or_else(|| watcher.next.max(applied + 1));
            if !events.is_empty() {
                let response = pb::WatchResponse { events, ..answer(*watch_id, applied, server.member) };
                server.channel.push_back((response, watcher.fragment));
            }
        }
        self.servers.insert(id, server);
    }

    /// sendLoop: takes a message from either channel.
    fn send(&mut self, id: UpstreamStreamId) {
        let Some(server) = self.servers.get_mut(&id) else { return };
        let from_channel = server.control.is_empty() || self.dice.one_in(2);
        if !from_channel || server.channel.is_empty() {
            let Some(control) = server.control.pop_front() else { return };
            let watch_id = control.watch_id;
            server.outbox.push_back(control.clone());
            if control.canceled && watch_id != -1 {
                server.announced.remove(&watch_id);
            } else if control.created {
                server.announced.insert(watch_id);
                server.outbox.extend(server.parked.remove(&watch_id).unwrap_or_default());
            }
            return;
        }
        let Some((response, fragment)) = server.channel.pop_front() else { return };
        if response.watch_id == -1 {
            self.counts.raced += u64::from(!server.control.is_empty());
            server.outbox.push_back(response);
        } else if !server.announced.contains(&response.watch_id) {
            server.parked.entry(response.watch_id).or_default().push(response);
        } else if fragment && response.events.len() > 1 && !self.dice.one_in(3) {
            let mut rest = response.events.clone();
            while !rest.is_empty() {
                let piece: Vec<_> = rest.drain(..1 + self.dice.below(rest.len().min(3))).collect();
                let more = !rest.is_empty();
                server.outbox.push_back(pb::WatchResponse {
                    events: piece,
                    fragment: more,
                    ..response.clone()
                });
            }
        } else {
            server.outbox.push_back(response);
        }
    }

    // ---- the client

    fn ask(&mut self, request: pb::watch_request::RequestUnion) {
        if self.hub.accepts_client() {
            self.hub.raise_shown_revision(None, Revision(self.client.shown));
            let message = pb::WatchRequest { request_union: Some(request) }.encode_to_vec().into();
            self.input(HubInput::Client(message));
        }
    }

    fn ask_create(&mut self) {
        if self.client.watches.len() + self.client.waiting.len() >= 12 {
            return;
        }
        let low = u8::try_from(self.dice.below(usize::from(KEYS))).unwrap();
        let high = low + 1 + u8::try_from(self.dice.below(usize::from(KEYS - low))).unwrap();
        let start = match self.dice.below(10) {
            0..5 => 0,
            5 if self.dice.one_in(4) => -1,
            6 => self.head() + self.dice.int(1, 4),
            _ => (self.head() - self.dice.int(0, 15)).max(1),
        };
        self.client.serial += 1;
        if self.dice.one_in(4) {
            // Another call of the connection was answered, by a member near the head.
            let shown = self.head() - self.dice.int(0, 3);
            self.client.shown = self.client.shown.max(shown);
        }
        let asked = ModelCreate {
            serial: self.client.serial,
            range: Range { low, high },
            // Id -1 is excluded: etcd accepts -1, but the client could not tell the watch's progress from
            // stream-wide progress.
            id: if self.dice.one_in(4) { [-3, -2, 1, 2, 3, 4, 5, 9][self.dice.below(8)] } else { 0 },
            start,
            fragment: self.dice.one_in(3),
            notify: self.dice.one_in(3),
            shown: self.client.shown,
            key: self.hub.newest(),
            written_behind: None,
        };
        let mut range_end = vec![high];
        range_end.extend(asked.serial.to_be_bytes());
        let create = pb::WatchCreateRequest {
            key: vec![low].into(),
            range_end: range_end.into(),
            start_revision: asked.start,
            progress_notify: asked.notify,
            prev_kv: true,
            watch_id: asked.id,
            fragment: asked.fragment,
            ..Default::default()
        };
        self.counts.creates += 1;
        self.client.waiting.push_back(asked);
        self.ask(pb::watch_request::RequestUnion::CreateRequest(create));
        let key = self.hub.newest();
        if let Some(asked) = self.client.waiting.back_mut().filter(|asked| asked.key != key) {
            asked.key = key;
        }
    }

    /// The client writes before the answers to its last creates. As in the driver, the write waits until the
    /// watches are registered, or overtakes creates that take too long.
    fn write_behind(&mut self) {
        let unregistered = |asked: &&ModelCreate| self.hub.is_unregistered(asked.key);
        let overtaken: Vec<WatchKey> =
            self.client.waiting.iter().filter(unregistered).map(|asked| asked.key).collect();
        if !overtaken.is_empty() && !self.dice.one_in(6) {
            return;
        }
        let known = (self.head() - self.dice.int(0, 4)).max(1);
        for key in overtaken {
            self.counts.overtaken += 1;
            self.hub.note_overtaking_write(key, Revision(known));
        }
        self.write();
        let revision = self.head();
        for asked in self.client.waiting.iter_mut().filter(|asked| asked.start == 0) {
            self.counts.behind += 1;
            asked.written_behind.get_or_insert(revision);
        }
    }

    fn ask_cancel(&mut self) {
        let ids: Vec<i64> = self.client.watches.keys().copied().collect();
        if ids.is_empty() {
            return;
        }
        let id = ids[self.dice.below(ids.len())];
        if self.client.acks.contains_key(&id) || self.client.waiting.iter().any(|asked| asked.id == id) {
            return;
        }
        self.client.acks.insert(id, 1);
        self.counts.cancels += 1;
        let cancel = pb::WatchCancelRequest { watch_id: id };
        self.ask(pb::watch_request::RequestUnion::CancelRequest(cancel));
    }

    fn ask_progress(&mut self) {
        self.client.progress_asked += 1;
        self.ask(pb::watch_request::RequestUnion::ProgressRequest(pb::WatchProgressRequest {}));
    }

    // ---- the checker

    fn seen(&mut self, message: &Bytes) {
        let response = pb::WatchResponse::decode(message.clone()).unwrap();
        let header = response.header.expect("no answer without a header");
        assert_eq!((header.cluster_id, header.raft_term), (7, 3), "headers are real");
        if response.created {
            self.seen_created(&response, header.revision);
        } else if response.canceled {
            self.seen_canceled(&response);
        } else if response.events.is_empty() {
            self.seen_progress(&response, header.revision);
        } else {
            self.seen_events(&response, header.revision);
        }
        self.client.shown = self.client.shown.max(header.revision);
    }

    fn seen_created(&mut self, response: &pb::WatchResponse, revision: i64) {
        let asked = self.client.waiting.pop_front().expect("one Created per create");
        let in_use = |id: &i64| self.client.watches.contains_key(id);
        if response.canceled {
            if response.cancel_reason == DUPLICATE {
                assert!(asked.id != 0 && in_use(&asked.id) && response.watch_id == -1, "a duplicate indeed");
                self.counts.duplicates += 1;
                return;
            }
            let ours = response.cancel_reason == COMPACTED;
            let echo = if ours || self.traits.exact_refusals || in_use(&asked.id) { -1 } else { asked.id };
            assert_eq!(response.watch_id, echo, "a refusal that names no living watch");
            return self.check_refusal(&asked, &response.cancel_reason);
        }
        let id = if asked.id == 0 {
            let ModelClient { watches, denied, next_id, .. } = &self.client;
            let taken = |id: &i64| watches.contains_key(id) || denied.contains(id);
            self.client.next_id = (*next_id..).find(|id| !taken(id)).unwrap();
            self.client.next_id += 1;
            self.client.next_id - 1
        } else {
            assert!(!in_use(&asked.id), "a duplicate must be refused");
            asked.id
        };
        assert_eq!(response.watch_id, id, "Created in request order, with the id that etcd would give");
        assert!(revision >= asked.shown.min(self.head()), "no header goes back");
        if let Some(written) = asked.written_behind {
            assert!(revision < written, "from {revision} on, and its client's later write was {written}");
        }
        let start = if asked.start == 0 { revision + 1 } else { asked.start };
        let next = (start.max(1), 0);
        let seen =
            ModelWatch { asked, next, last: 0, told: start - 1, in_fragments: false, compacted: false };
        self.client.denied.remove(&id);
        self.client.watches.insert(id, seen);
    }

    fn check_refusal(&mut self, asked: &ModelCreate, reason: &str) {
        let refusals = self.refusals.remove(&asked.serial).unwrap_or(0);
        let curable = reason == BAD_TOKEN || (!self.traits.exact_refusals && reason == DENIED);
        let ours = reason == COMPACTED && !self.traits.refuses_negative_start;
        let expected = if curable { 2 } else { u32::from(!ours) };
        // A refusal for a stale token may precede the denial.
        assert!((expected..=2).contains(&refusals), "refused {refusals} times before it was told {reason}");
        self.counts.denied += 1;
    }

    fn seen_canceled(&mut self, response: &pb::WatchResponse) {
        let id = response.watch_id;
        if response.compact_revision > 0 {
            assert_eq!(response.header.as_ref().unwrap().revision, 0, "as etcd says it");
            let watch = self.client.watches.get_mut(&id).expect("compaction of a living watch");
            let next = watch.next.0.max(watch.told + 1).max(watch.asked.start);
            assert!(response.compact_revision > next, "compacted at {response:?} but next was {next}");
            assert!(!watch.compacted, "told once");
            watch.compacted = true;
            self.counts.compacted += 1;
        } else if response.cancel_reason.is_empty() {
            assert!(self.client.acks.remove(&id).is_some(), "an ack for a cancel");
            assert!(self.client.watches.remove(&id).is_some(), "an ack for a watch");
        } else {
            let watch = self.client.watches.remove(&id).expect("a living watch was denied");
            self.client.acks.remove(&id);
            self.client.denied.insert(id);
            self.check_refusal(&watch.asked, &response.cancel_reason);
        }
    }

    fn seen_progress(&mut self, response: &pb::WatchResponse, revision: i64) {
        assert!(revision <= self.head(), "progress to where the cluster never was");
        let all = response.watch_id == -1;
        if all {
            assert!(revision >= self.client.told, "progress went back");
            self.client.told = revision;
            self.client.progress_told += 1;
            self.counts.progress += 1;
        } else {
            let watch = self.client.watches.get(&response.watch_id).expect("progress of a living watch");
            assert!(watch.asked.notify, "progress that nobody asked for");
        }
        let mut told = Vec::new();
        for (id, watch) in self.client.watches.iter().filter(|(_, watch)| !watch.compacted) {
            if !all && *id != response.watch_id {
                continue;
            }
            let next = self.next_event(&watch.asked.range, watch.next).map(|(event, _)| event.revision);
            assert!(next.is_none_or(|next| next > revision), "progress {revision} ahead of {next:?} of {id}");
            let (last, before) = (watch.last, watch.told.min(self.head()));
            assert!(
                revision >= last.max(before),
                "{id}: progress {revision} after event {last}, told {before} all {all} start {}",
                watch.asked.start
            );
            assert!(!watch.in_fragments, "progress between fragments");
            told.push(*id);
        }
        for id in told {
            let watch = self.client.watches.get_mut(&id).unwrap();
            watch.told = watch.told.max(revision);
        }
    }

    fn seen_events(&mut self, response: &pb::WatchResponse, revision: i64) {
        let id = response.watch_id;
        let watch = self.client.watches.get(&id).expect("events of a living watch, after its Created");
        assert!(!watch.compacted, "events after the end");
        assert!(!response.fragment || watch.asked.fragment, "fragments that nobody asked for");
        let mut next = watch.next;
        for event in &response.events {
            let event = decode(event);
            let expected = self.next_event(&watch.asked.range, next);
            let (expected, index) = expected.unwrap_or_else(|| panic!("{event:?} never happened for {id}"));
            assert_eq!(&event, expected, "gap, double or disorder on watch {id}");
            assert!(event.revision > watch.told, "an event after its progress");
            next = (event.revision, index + 1);
        }
        let last = next.0;
        if !response.fragment {
            let follows = self.next_event(&watch.asked.range, next).map(|(event, _)| event.revision);
            assert_ne!(follows, Some(last), "half a revision");
            assert_eq!(revision, last, "a header ahead of what was delivered");
        }
        self.counts.events += response.events.len() as u64;
        let fragment = response.fragment;
        let others = self.client.watches.iter().any(|(other, watch)| *other != id && watch.in_fragments);
        assert!(!others, "something between two fragments");
        let watch = self.client.watches.get_mut(&id).unwrap();
        watch.next = next;
        watch.last = last;
        watch.in_fragments = fragment;
    }

    fn check_everything_arrived(&self) {
        assert!(self.client.waiting.is_empty(), "a create without an answer");
        assert!(self.client.acks.is_empty(), "a cancel without an answer");
        for (id, watch) in self.client.watches.iter().filter(|(_, watch)| !watch.compacted) {
            let missing = self.next_event(&watch.asked.range, watch.next);
            assert!(missing.is_none(), "watch {id} of {:?} never got {missing:?}", watch.asked.range);
        }
    }

    fn check_progress_is_answered(&mut self) {
        let living = || self.client.watches.values().filter(|watch| !watch.compacted);
        let future = living().any(|watch| watch.asked.start > self.head());
        if living().next().is_none() || future || !self.traits.progress_trusted {
            return;
        }
        let before = self.client.progress_told;
        self.ask_progress();
        for _ in 0..10 {
            self.settle();
            if self.client.progress_told > before && self.client.told == self.head() {
                return;
            }
            self.now += Duration::from_secs(1);
            self.input(HubInput::Tick);
        }
        panic!("progress was never answered at {} (told {})", self.head(), self.client.told);
    }
}

impl Server {
    fn new(credential: StreamCredential) -> Self {
        Self {
            credential,
            member: 0,
            open: false,
            token: 0,
            inbox: VecDeque::new(),
            control: VecDeque::new(),
            channel: VecDeque::new(),
            watchers: BTreeMap::new(),
            announced: HashSet::new(),
            parked: HashMap::new(),
            outbox: VecDeque::new(),
            answered: VecDeque::new(),
        }
    }

    fn is_busy(&self) -> bool {
        let waits = self.inbox.len() + self.control.len() + self.channel.len() + self.outbox.len() > 0;
        !self.open || waits || self.watchers.values().any(|watcher| !watcher.synced && !watcher.compacted)
    }
}

fn header(revision: i64, member: usize) -> pb::ResponseHeader {
    pb::ResponseHeader { cluster_id: 7, member_id: member as u64 + 1, revision, raft_term: 3 }
}

fn answer(watch_id: i64, revision: i64, member: usize) -> pb::WatchResponse {
    pb::WatchResponse { header: Some(header(revision, member)), watch_id, ..Default::default() }
}

fn encode(event: &ModelEvent) -> mvccpb::Event {
    let kv = mvccpb::KeyValue {
        key: vec![event.key].into(),
        mod_revision: event.revision,
        value: event.value.clone().into(),
        ..Default::default()
    };
    mvccpb::Event { r#type: i32::from(event.delete), kv: Some(kv), prev_kv: None }
}

fn decode(event: &mvccpb::Event) -> ModelEvent {
    let kv = event.kv.as_ref().unwrap();
    let delete = event.r#type == 1;
    ModelEvent { revision: kv.mod_revision, key: kv.key[0], delete, value: kv.value.to_vec() }
}

/// Prints the failing seed.
struct Reproduce(u64);

impl Drop for Reproduce {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {} fails; KEYWARD_SEED={} repeats it", self.0, self.0);
        }
    }
}

#[test]
fn every_watch_is_whole_whatever_happens_upstream() {
    let only = std::env::var("KEYWARD_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let full = std::env::var("KEYWARD_TEST_FULL").is_ok_and(|value| value == "1");
    let count = std::env::var("KEYWARD_SEEDS").ok().and_then(|count| count.parse().ok());
    let count = count.unwrap_or(if full { ALL_SEEDS } else { SEEDS });
    let mut total = ModelCounts::default();
    for seed in only.map_or(0..count, |seed| seed..seed + 1) {
        let _reproduce = Reproduce(seed);
        let mut world = World::new(seed);
        world.run(1500);
        total.add(&world.counts);
    }
    println!("{total:?}");
    if only.is_none() {
        let floors = [
            total.events,
            total.creates,
            total.resumes,
            total.held,
            total.cuts,
            total.refused,
            total.denied,
            total.compacted,
            total.duplicates,
            total.progress,
            total.doubts,
            total.cancels,
            total.raced,
            total.behind,
            total.overtaken,
        ];
        assert!(floors.iter().all(|happened| *happened >= count / 20), "too little happened: {total:?}");
    }
}

impl ModelCounts {
    fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.creates += other.creates;
        self.resumes += other.resumes;
        self.held += other.held;
        self.cuts += other.cuts;
        self.refused += other.refused;
        self.denied += other.denied;
        self.compacted += other.compacted;
        self.duplicates += other.duplicates;
        self.progress += other.progress;
        self.doubts += other.doubts;
        self.cancels += other.cancels;
        self.raced += other.raced;
        self.behind += other.behind;
        self.overtaken += other.overtaken;
    }
}
