//! The watch hub under any inputs in any order: what it does stays in bounds, and what its client is told stays in order.
//!
//! `src/streams/src/watch/hub/model.rs` holds it to an honest etcd; here the other side is anybody: garbage, answers to nobody,
//! streams that were never opened, other clusters, numbers at the ends of their types.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use keyward::identity::Revision;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::{etcdserverpb as pb, mvccpb};
use keyward::rpc::canonical;
use keyward::rpc::scan::WireFields;
use keyward::rpc::schema::MessageId;
use keyward::watch::hub::{
    Hub, HubInput, HubOutput, HubTiming, StreamCredential, StreamLoss, UpstreamStreamId, WatchKey,
    WatchTraits,
};
use prost::Message as _;
use tokio::time::Instant;

use crate::bodies::{Style, body};
use crate::choices::{Choices, for_any_bytes};

const REASONS: [&str; 5] = [
    "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token",
    "rpc error: code = PermissionDenied desc = etcdserver: permission denied",
    "etcdserver: mvcc: required revision has been compacted",
    "mvcc: watcher range is empty",
    "",
];

/// The hub's own bound.
const MAX_STREAMS: usize = 4;

/// Names of streams and watches that another hub gave, some of which are ours too.
static STRANGERS: LazyLock<(Vec<UpstreamStreamId>, Vec<WatchKey>)> = LazyLock::new(|| {
    let now = Instant::now();
    let mut hub = Hub::new(now, TIMING);
    let create = pb::WatchCreateRequest { key: "a".into(), ..Default::default() };
    let create = pb::WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let (mut streams, mut watches) = (Vec::new(), Vec::new());
    for _ in 0..12 {
        let mut out = Vec::new();
        hub.handle(now, HubInput::Client(create.encode_to_vec().into()), &mut out);
        watches.push(hub.newest());
        let stream = out.iter().find_map(|output| match output {
            HubOutput::Open { stream, .. } => Some(*stream),
            _ => None,
        });
        let stream = stream.or(streams.last().copied()).expect("a stream was opened");
        hub.handle(now, HubInput::Opened { stream, traits: WatchTraits::UNKNOWN }, &mut out);
        hub.handle(now, HubInput::Lost { stream, why: StreamLoss::Upstream }, &mut out);
        for output in out {
            if let HubOutput::Open { stream, .. } = output {
                streams.push(stream);
            }
        }
    }
    (streams, watches)
});

const TIMING: HubTiming =
    HubTiming { idle_progress: Some(Duration::from_secs(40)), progress_grace: Duration::from_secs(1) };

/// An upstream stream that the hub has asked for and that is not gone.
#[derive(Default)]
struct Upstream {
    open: bool,
    creating: VecDeque<i64>,
    live: Vec<i64>,
}

/// A watch as its client knows it.
#[derive(Default)]
struct Told {
    notify: bool,
    last: i64,
    progress: i64,
    ended: bool,
}

struct World<'a> {
    choices: Choices<'a>,
    hub: Hub,
    now: Instant,
    traits: WatchTraits,
    cluster: u64,
    revision: i64,
    streams: BTreeMap<UpstreamStreamId, Upstream>,
    named: HashSet<UpstreamStreamId>,
    checks: Vec<(WatchKey, UpstreamStreamId)>,
    upstream_ids: HashSet<i64>,
    /// Creates without an answer: the id and whether progress was asked for.
    waiting: VecDeque<(i64, bool)>,
    told: BTreeMap<i64, Told>,
    assigned: HashSet<i64>,
    cancelled: HashSet<i64>,
    ended: bool,
    came: usize,
    said: usize,
    largest: usize,
    counts: Counts,
}

/// What the client was told, in one run or in many: a promise is only kept where it was put to the test.
#[derive(Debug, Default)]
struct Counts {
    created: u32,
    refused: u32,
    events: u32,
    progress: u32,
    all_progress: u32,
    compacted: u32,
    cancelled: u32,
    resumed: u32,
    closed: u32,
}

/// For fuzzers.
pub(crate) fn survives_anybody(input: &[u8]) {
    let _counted = survives(input);
}

/// The target. Every byte is a decision of somebody who is not the hub.
fn survives(input: &[u8]) -> Counts {
    let mut world = World::new(Choices::new(input));
    while !world.choices.is_empty() && !world.ended {
        world.step();
    }
    let counts = std::mem::take(&mut world.counts);
    world.leave();
    counts
}

impl<'a> World<'a> {
    fn new(mut choices: Choices<'a>) -> Self {
        let now = Instant::now();
        let traits = WatchTraits {
            progress_trusted: choices.flag(),
            exact_refusals: choices.flag(),
            late_created: choices.flag(),
            refuses_negative_start: choices.flag(),
            misjudges_open_end: false,
        };
        Self {
            choices,
            hub: Hub::new(now, TIMING),
            now,
            traits,
            cluster: 7,
            revision: 10,
            streams: BTreeMap::new(),
            named: HashSet::new(),
            checks: Vec::new(),
            upstream_ids: HashSet::new(),
            waiting: VecDeque::new(),
            told: BTreeMap::new(),
            assigned: HashSet::new(),
            cancelled: HashSet::new(),
            ended: false,
            came: 0,
            said: 0,
            largest: 0,
            counts: Counts::default(),
        }
    }

    fn step(&mut self) {
        match self.choices.below(40) {
            0..6 => self.create(),
            6 => self.odd_request(),
            7 | 8 => self.cancel(),
            9 | 10 => self.client(RequestUnion::ProgressRequest(pb::WatchProgressRequest {})),
            11..16 => self.opened(),
            16 | 17 => self.check(),
            18 => self.overtaken(),
            19 => self.lost(),
            20 => self.pass_time(),
            _ => self.upstream(),
        }
    }

    // ---- the client

    fn client(&mut self, request: RequestUnion) {
        if self.hub.accepts_client() {
            if let RequestUnion::CreateRequest(create) = &request {
                self.waiting.push_back((create.watch_id, create.progress_notify));
            }
            let message = pb::WatchRequest { request_union: Some(request) }.encode_to_vec();
            self.input(HubInput::Client(message.into()));
        }
    }

    fn create(&mut self) {
        let watch_id = match self.choices.below(8) {
            0..4 => 0,
            4 => self.choices.number().cast_signed(),
            small => i64::try_from(small).expect("small") - 6,
        };
        let start_revision = match self.choices.below(4) {
            0 => 0,
            1 => self.choices.number().cast_signed(),
            _ => self.revision - i64::from(self.choices.byte() % 8),
        };
        let create = pb::WatchCreateRequest {
            key: self.choices.bytes(2).to_vec().into(),
            start_revision,
            watch_id,
            progress_notify: self.choices.flag(),
            fragment: self.choices.flag(),
            ..Default::default()
        };
        self.client(RequestUnion::CreateRequest(create));
    }

    fn cancel(&mut self) {
        let ids: Vec<i64> = self.told.keys().copied().collect();
        let watch_id = match (self.choices.below(4), ids.len()) {
            (0, _) | (_, 0) => self.choices.number().cast_signed(),
            (_, count) => ids[self.choices.below(count)],
        };
        self.cancelled.insert(watch_id);
        self.client(RequestUnion::CancelRequest(pb::WatchCancelRequest { watch_id }));
    }

    /// Canonical or not, it ends the stream exactly where it is not.
    fn odd_request(&mut self) {
        if !self.hub.accepts_client() {
            return;
        }
        let style = if self.choices.flag() { Style::Odd } else { Style::Canonical };
        let message = body(&mut self.choices, MessageId::WatchRequest, style, 0);
        let good = canonical::check(MessageId::WatchRequest, &message).is_ok();
        if good {
            let read = pb::WatchRequest::decode(&*message).expect("canonical");
            match read.request_union {
                Some(RequestUnion::CreateRequest(create)) => {
                    self.waiting.push_back((create.watch_id, create.progress_notify));
                }
                Some(RequestUnion::CancelRequest(cancel)) => {
                    self.cancelled.insert(cancel.watch_id);
                }
                _ => {}
            }
        }
        self.input(HubInput::Client(message.into()));
        assert_eq!(self.ended, !good);
    }

    // ---- the driver

    /// Mostly one that is there.
    fn stream(&mut self) -> UpstreamStreamId {
        let strangers = &STRANGERS.0;
        let known: Vec<UpstreamStreamId> = self.streams.keys().copied().collect();
        match known.len() {
            count @ 1.. if !self.choices.one_in(12) => known[self.choices.below(count)],
            _ => strangers[self.choices.below(strangers.len())],
        }
    }

    fn opened(&mut self) {
        let waiting = self.streams.iter().find(|(_, stream)| !stream.open).map(|(id, _)| *id);
        let stream = match waiting {
            Some(stream) if !self.choices.one_in(8) => stream,
            _ => self.stream(),
        };
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.open = true;
        }
        let mut traits = self.traits;
        traits.progress_trusted ^= self.choices.one_in(16);
        self.input(HubInput::Opened { stream, traits });
    }

    /// A write went ahead of a create, or of no create that there is.
    fn overtaken(&mut self) {
        let strangers = &STRANGERS.1;
        let watch = match self.choices.flag() {
            true => self.hub.newest(),
            false => strangers[self.choices.below(strangers.len())],
        };
        let revision = Revision(self.revision_near());
        self.hub.note_overtaking_write(watch, revision);
    }

    fn check(&mut self) {
        let (watch, stream) = match self.checks.len() {
            count @ 1.. if !self.choices.one_in(8) => {
                let at = self.choices.below(count);
                self.checks.swap_remove(at)
            }
            _ => (STRANGERS.1[self.choices.below(STRANGERS.1.len())], self.stream()),
        };
        if self.choices.one_in(5) {
            let why = self.loss();
            return self.input(HubInput::CheckFailed { watch, stream, why });
        }
        let revision = self.revision_near();
        let mut header = match self.choices.below(8) {
            7 => self.choices.bytes(12).to_vec(),
            _ => self.header(revision).encode_to_vec(),
        };
        spoil_for_all::<pb::ResponseHeader>(&mut header);
        let header = header.into();
        self.input(HubInput::Checked { watch, stream, header, revision: Revision(revision) });
    }

    fn loss(&mut self) -> StreamLoss {
        match self.choices.below(4) {
            0 | 1 => StreamLoss::Upstream,
            2 => StreamLoss::Credential,
            _ => StreamLoss::Denied(REASONS[self.choices.below(REASONS.len())].to_owned()),
        }
    }

    fn lost(&mut self) {
        let stream = self.stream();
        let why = self.loss();
        self.streams.remove(&stream);
        self.input(HubInput::Lost { stream, why });
    }

    fn pass_time(&mut self) {
        let jump = [10, 1_000, 40_000, 86_400_000][self.choices.below(4)];
        self.now += Duration::from_millis(jump);
        self.input(HubInput::Tick);
        assert!(self.hub.next_deadline().is_none_or(|at| at > self.now), "a driver would tick for ever");
    }

    // ---- upstream

    fn revision_near(&mut self) -> i64 {
        self.revision += i64::from(self.choices.byte() % 3);
        match self.choices.below(32) {
            31 => self.choices.number().cast_signed(),
            back @ 24.. => self.revision - i64::try_from(back).expect("small") + 20,
            _ => self.revision,
        }
    }

    fn header(&mut self, revision: i64) -> pb::ResponseHeader {
        if self.choices.one_in(200) {
            self.cluster += 1;
        }
        pb::ResponseHeader { cluster_id: self.cluster, member_id: 1, revision, raft_term: 3 }
    }

    fn upstream(&mut self) {
        let stream = self.stream();
        let message = self.response(stream);
        self.input(HubInput::Upstream { stream, message });
    }

    fn response(&mut self, on: UpstreamStreamId) -> Bytes {
        let revision = self.revision_near();
        let header = Some(self.header(revision));
        let mut choices = std::mem::replace(&mut self.choices, Choices::new(&[]));
        let nobody = &mut Upstream::default();
        let stream = self.streams.get_mut(&on).unwrap_or(nobody);
        let live = match stream.live.len() {
            count @ 1.. if !choices.one_in(16) => stream.live[choices.below(count)],
            _ => choices.number().cast_signed(),
        };
        let mut response = pb::WatchResponse { header, watch_id: live, ..Default::default() };
        let kind = choices.below(16);
        // A Created that nobody waits for ends the stream: seldom, or nothing else would be seen.
        let unasked = kind < 5 && stream.creating.is_empty() && !choices.one_in(16);
        match if unasked { kind + 5 } else { kind } {
            0..5 => {
                response.created = true;
                response.watch_id = stream.creating.pop_front().unwrap_or(live);
                if choices.one_in(5) {
                    response.canceled = true;
                    response.cancel_reason = REASONS[choices.below(REASONS.len())].to_owned();
                    response.watch_id = if choices.flag() { -1 } else { response.watch_id };
                } else {
                    stream.live.push(response.watch_id);
                }
            }
            5..11 => {
                let mut at = revision.saturating_sub(i64::from(choices.byte() % 4));
                for _ in 0..=choices.below(4) {
                    let kv = mvccpb::KeyValue { mod_revision: at, ..Default::default() };
                    response.events.push(mvccpb::Event { kv: Some(kv), ..Default::default() });
                    at = at.saturating_add(i64::from(choices.byte() % 3));
                }
                response.fragment = choices.one_in(3);
                if choices.one_in(16) {
                    response.events.reverse();
                }
            }
            11 => {
                response.canceled = true;
                response.compact_revision =
                    revision.saturating_sub(4).saturating_mul(i64::from(choices.byte() % 2));
            }
            12 | 13 => response.watch_id = -1,
            14 => {}
            _ if !choices.one_in(4) => response.watch_id = live,
            _ => {
                response.header = None;
                response.created = choices.flag();
                response.canceled = choices.flag();
                response.compact_revision = choices.number().cast_signed();
            }
        }
        let mut message = response.encode_to_vec();
        if choices.one_in(64) {
            match choices.below(4) {
                0 => message = choices.bytes(12).to_vec(),
                1 => message.truncate(choices.below(message.len() + 1).min(255)),
                2 => message.extend(choices.bytes(8)),
                _ => {
                    let at = choices.below(message.len().clamp(1, 256));
                    if let Some(byte) = message.get_mut(at) {
                        *byte ^= 1 << choices.below(8);
                    }
                }
            }
        }
        spoil_for_all::<pb::WatchResponse>(&mut message);
        self.choices = choices;
        message.into()
    }

    // ---- what the hub does

    fn input(&mut self, input: HubInput) {
        let size = match &input {
            HubInput::Client(message) | HubInput::Upstream { message, .. } => message.len(),
            HubInput::Checked { header, .. } => header.len(),
            HubInput::Lost { why: StreamLoss::Denied(reason), .. } => reason.len(),
            _ => 0,
        };
        self.came += size;
        self.largest = self.largest.max(size);
        let watches = self.told.len() + self.waiting.len();
        let after_end = self.ended;
        let mut out = Vec::new();
        self.hub.handle(self.now, input, &mut out);
        assert!(!after_end || out.is_empty(), "something after the end: {out:?}");
        assert!(out.len() <= 16 + 8 * watches, "{} outputs with {watches} watches", out.len());
        for output in out {
            assert!(!self.ended, "something after the end: {output:?}");
            self.carry_out(output);
        }
        assert!(self.streams.len() <= MAX_STREAMS, "{} streams", self.streams.len());
        assert!(!self.ended || self.hub.next_deadline().is_none());
    }

    fn carry_out(&mut self, output: HubOutput) {
        match output {
            HubOutput::Open { stream, credential, .. } => {
                assert!(self.named.insert(stream), "{stream:?} named twice");
                assert!(matches!(credential, StreamCredential::Current | StreamCredential::Fresh));
                self.streams.insert(stream, Upstream::default());
                self.counts.resumed += u32::from(!self.told.is_empty());
            }
            HubOutput::Close { stream } => {
                assert!(self.streams.remove(&stream).is_some(), "{stream:?} is not there to be closed");
                self.counts.closed += 1;
            }
            HubOutput::Send { stream, message } => {
                let upstream = self.streams.get_mut(&stream).expect("sent on a stream that is there");
                assert!(upstream.open, "sent on a stream that is not open");
                assert_eq!(canonical::check(MessageId::WatchRequest, &message), Ok(()));
                let read = pb::WatchRequest::decode(message).expect("a request").request_union;
                match read.expect("a request that etcd knows") {
                    RequestUnion::CreateRequest(create) => {
                        assert!(create.watch_id >= 1, "ours are 1 and above");
                        assert!(self.upstream_ids.insert(create.watch_id), "an id twice upstream");
                        assert!(create.fragment && create.progress_notify);
                        upstream.creating.push_back(create.watch_id);
                    }
                    RequestUnion::CancelRequest(cancel) => {
                        assert!(self.upstream_ids.contains(&cancel.watch_id));
                        upstream.live.retain(|live| *live != cancel.watch_id);
                    }
                    RequestUnion::ProgressRequest(_) => {}
                }
            }
            HubOutput::Check { watch, stream, key, .. } => {
                assert!(self.streams.get(&stream).is_some_and(|stream| stream.open), "read on no member");
                assert!(!key.is_empty(), "an empty key is the first one");
                self.checks.push((watch, stream));
            }
            HubOutput::Refused(create, _) => {
                pb::WatchCreateRequest::decode(create).expect("a create");
            }
            HubOutput::Emit(message) => {
                self.said += message.len();
                self.seen(&pb::WatchResponse::decode(message).expect("a response"));
            }
            HubOutput::End(_) => {
                self.ended = true;
                self.streams.clear();
            }
        }
    }

    // ---- what the client is told

    fn seen(&mut self, response: &pb::WatchResponse) {
        let header = response.header.expect("no answer without a header");
        assert!(!response.fragment, "far below the size that is cut");
        if response.created {
            assert!(response.events.is_empty(), "events in a Created: {response:?}");
            return self.seen_created(response);
        }
        let told = || format!("{response:?}");
        if self.told.contains_key(&-1) && response.watch_id == -1 && !response.canceled {
            // etcd lets a client choose -1, and then it cannot tell the progress of that watch from that of all.
            return;
        }
        if response.watch_id == -1 && response.events.is_empty() && !response.canceled {
            assert!(self.told.values().any(|watch| !watch.ended), "progress of nothing");
            for watch in self.told.values_mut().filter(|watch| !watch.ended) {
                assert!(header.revision >= watch.last.max(watch.progress), "went back: {}", told());
                watch.progress = header.revision;
            }
            self.counts.all_progress += 1;
            return;
        }
        let watch =
            self.told.get_mut(&response.watch_id).unwrap_or_else(|| panic!("of no watch: {}", told()));
        if response.canceled && response.compact_revision > 0 {
            assert!(!watch.ended, "ended twice: {}", told());
            watch.ended = true;
            self.counts.compacted += 1;
        } else if response.canceled {
            assert!(!watch.ended || self.cancelled.contains(&response.watch_id), "{}", told());
            self.told.remove(&response.watch_id);
            self.counts.cancelled += 1;
        } else if response.events.is_empty() {
            assert!(watch.notify && !watch.ended, "{}", told());
            assert!(header.revision >= watch.last.max(watch.progress), "went back: {}", told());
            watch.progress = header.revision;
            self.counts.progress += 1;
        } else {
            assert!(!watch.ended, "{}", told());
            let mut revisions =
                response.events.iter().map(|event| event.kv.as_ref().map_or(0, |kv| kv.mod_revision));
            let first = revisions.clone().next().expect("some");
            assert!(
                first > watch.last.max(watch.progress),
                "{first} after {} {}: {}",
                watch.last,
                watch.progress,
                told()
            );
            assert!(revisions.clone().is_sorted());
            watch.last = revisions.next_back().expect("some");
            assert_eq!(header.revision, watch.last, "a header ahead of what was delivered");
            self.counts.events += 1;
        }
    }

    fn seen_created(&mut self, response: &pb::WatchResponse) {
        let (asked, notify) = self.waiting.pop_front().expect("one Created per create");
        let id = response.watch_id;
        let lives = self.told.get(&id).is_some_and(|watch| !watch.ended);
        if response.canceled {
            assert!(id == -1 || (id == asked && !lives), "a refusal that names a living watch: {response:?}");
            self.counts.refused += 1;
            return;
        }
        assert!(!lives, "{id} is taken");
        if asked == 0 {
            assert!(self.assigned.insert(id), "{id} was assigned before");
        } else {
            assert_eq!(id, asked);
        }
        let unseen = Told { notify, last: i64::MIN, progress: i64::MIN, ended: false };
        self.told.insert(id, unseen);
        self.counts.created += 1;
    }

    // ---- the end

    /// No credential can be had any more, and the client cancels what it has: everything is answered, nothing is kept.
    fn leave(&mut self) {
        for _ in 0..100 {
            let Some(stream) = self.streams.keys().next().copied() else { break };
            self.streams.remove(&stream);
            self.input(HubInput::Lost { stream, why: StreamLoss::Denied("denied".to_owned()) });
        }
        assert!(self.streams.is_empty(), "streams are opened for ever");
        if self.ended {
            return;
        }
        assert!(self.waiting.is_empty(), "creates without an answer: {:?}", self.waiting);
        for watch_id in self.told.keys().copied().collect::<Vec<_>>() {
            self.cancelled.insert(watch_id);
            self.client(RequestUnion::CancelRequest(pb::WatchCancelRequest { watch_id }));
        }
        assert!(self.told.is_empty(), "cancels without an answer");
        assert_eq!(self.hub.next_deadline(), None);
        assert!(self.said <= 64 * self.came + 4096, "{} bytes said for {}", self.said, self.came);
        let kept = format!("{:?}", self.hub);
        for nothing in ["watches: {}", "streams: {}", "unsent: {}", "client_ids: {}", "pending: []"] {
            assert!(kept.contains(nothing), "{nothing} is not in {kept}");
        }
        assert!(kept.len() <= 2048 + 4 * self.largest, "{} characters are kept: {kept}", kept.len());
    }
}

/// Parts that the hub does not read cross as they are. Here what is broken is broken for everyone.
fn spoil_for_all<M: prost::Message + Default>(message: &mut Vec<u8>) {
    while M::decode(&**message).is_err() && WireFields::new(message).all(|field| field.is_ok()) {
        message.push(7);
    }
}

#[test]
fn the_hub_survives_anybody() {
    for_any_bytes(1500, survives_anybody);
}

/// Bytes of splitmix64, so that how much happens does not depend on luck.
#[test]
fn enough_happens_to_the_hub() {
    let mut total = Counts::default();
    for seed in 0..300_u64 {
        let mut state = seed;
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            (mixed ^ (mixed >> 27)).to_le_bytes()[5]
        })
        .take(1500)
        .collect();
        total.add(&survives(&bytes));
    }
    println!("{total:?}");
    let Counts { created, refused, events, progress, all_progress, compacted, cancelled, resumed, closed } =
        total;
    let floors = [created, refused, events, progress, all_progress, compacted, cancelled, resumed, closed];
    assert!(floors.iter().all(|happened| *happened >= 30), "too little happened: {floors:?}");
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.created += other.created;
        self.refused += other.refused;
        self.events += other.events;
        self.progress += other.progress;
        self.all_progress += other.all_progress;
        self.compacted += other.compacted;
        self.cancelled += other.cancelled;
        self.resumed += other.resumed;
        self.closed += other.closed;
    }
}
