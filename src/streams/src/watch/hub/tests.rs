//! Tests of the hub's promises. `tests/watches.md` lists the tests for each promise.

use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use tokio::time::Instant;

use super::{
    Hub, HubInput, HubLimits, HubOutput, HubTiming, MAX_PENDING, MAX_STREAMS, SETTLED, StreamCredential,
    StreamLoss, UpstreamStreamId, WatchKey, WatchStreamEnd, WatchTraits,
};
use keyward_etcd::identity::Revision;
use keyward_etcd::pb::etcdserverpb::watch_request::RequestUnion;
use keyward_etcd::pb::{etcdserverpb as pb, mvccpb};
use keyward_etcd::refusal::{Code, RefusalReason};

const NEW: WatchTraits = WatchTraits {
    progress_trusted: true,
    exact_refusals: true,
    late_created: true,
    refuses_negative_start: true,
    misjudges_open_end: false,
};
const MIDDLE: WatchTraits = WatchTraits {
    progress_trusted: true,
    exact_refusals: true,
    late_created: false,
    refuses_negative_start: false,
    misjudges_open_end: false,
};
const OLD: WatchTraits = WatchTraits {
    progress_trusted: false,
    exact_refusals: false,
    late_created: false,
    refuses_negative_start: false,
    misjudges_open_end: true,
};

/// Small, so that watches wait and events are cut in every run.
pub(super) static SMALL_LIMITS: HubLimits = HubLimits { restoring: 3, fragment: 64, held: 16 << 10 };

const BAD_TOKEN: &str = "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token";
const DENIED: &str = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";
const DUPLICATE: &str = "mvcc: duplicate watch ID provided on the WatchStream";

mod cancels;
mod creates;
mod direct;
mod feeds;
mod histories;
mod progress;
mod resumes;
mod splices;

struct Bench {
    hub: Hub,
    now: Instant,
    cluster: u64,
    /// Outputs of the last input, not yet checked.
    out: Vec<HubOutput>,
    /// What the last input told the records.
    refused: Vec<(Code, RefusalReason)>,
}

impl Bench {
    fn new() -> Self {
        let now = Instant::now();
        let timing = HubTiming {
            idle_progress: Some(Duration::from_secs(40)),
            progress_grace: Duration::from_secs(1),
        };
        Self {
            hub: Hub { limits: &SMALL_LIMITS, ..Hub::new(now, timing) },
            now,
            cluster: 7,
            out: Vec::new(),
            refused: Vec::new(),
        }
    }

    /// A bench with a live watch, id 0 downstream and 1 upstream, from revision 5 on, on stream 1.
    fn watching(traits: WatchTraits) -> Self {
        let mut bench = Self::new();
        bench.create(watch("a", 5));
        bench.opened(1, traits);
        bench.up(1, created(1, 4));
        bench.out.clear();
        bench
    }

    fn input(&mut self, input: HubInput) {
        assert!(self.out.is_empty(), "not looked at: {:?}", self.out);
        self.hub.handle(self.now, input, &mut self.out);
        self.refused.clear();
        let refused = &mut self.refused;
        self.out.retain(|output| match output {
            HubOutput::Refused(_, refusal) => {
                refused.push((refusal.code(), refusal.reason()));
                false
            }
            _ => true,
        });
    }

    fn ask(&mut self, request: RequestUnion) {
        let message = pb::WatchRequest { request_union: Some(request) }.encode_to_vec();
        self.input(HubInput::Client(message.into()));
    }

    fn create(&mut self, create: pb::WatchCreateRequest) {
        self.ask(RequestUnion::CreateRequest(create));
        if let Some(HubOutput::Open { .. }) = self.out.first() {
            self.out.remove(0);
        }
    }

    /// Upstream accepts the create just sent.
    fn create_and_let_in(&mut self, upstream_id: i64) {
        assert_eq!(self.next_create(1).0, upstream_id);
        self.up(1, created(upstream_id, 4));
    }

    fn cancel(&mut self, watch_id: i64) {
        self.ask(RequestUnion::CancelRequest(pb::WatchCancelRequest { watch_id }));
    }

    fn ask_progress(&mut self) {
        self.ask(RequestUnion::ProgressRequest(pb::WatchProgressRequest {}));
    }

    fn opened(&mut self, stream: u64, traits: WatchTraits) {
        self.input(HubInput::Opened { stream: UpstreamStreamId(stream), traits });
        self.out.retain(|output| !matches!(output, HubOutput::Send { .. }));
    }

    fn up(&mut self, stream: u64, mut response: pb::WatchResponse) {
        if let Some(header) = &mut response.header {
            header.cluster_id = self.cluster;
        }
        let message = response.encode_to_vec().into();
        self.input(HubInput::Upstream { stream: UpstreamStreamId(stream), message });
    }

    fn lose(&mut self, stream: u64, why: StreamLoss) {
        self.input(HubInput::Lost { stream: UpstreamStreamId(stream), why });
    }

    fn checked(&mut self, watch: u64, stream: u64, revision: i64) {
        let header = pb::ResponseHeader { cluster_id: self.cluster, member_id: 2, revision, raft_term: 3 };
        let header = header.encode_to_vec().into();
        let (watch, stream) = (WatchKey(watch), UpstreamStreamId(stream));
        self.input(HubInput::Checked { watch, stream, header, revision: Revision(revision) });
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        self.input(HubInput::Tick);
    }

    /// The only output.
    #[track_caller]
    fn only(&mut self) -> HubOutput {
        assert_eq!(self.out.len(), 1, "{:?}", self.out);
        self.out.remove(0)
    }

    #[track_caller]
    fn emitted(&mut self) -> pb::WatchResponse {
        match self.only() {
            HubOutput::Emit(message) => pb::WatchResponse::decode(message).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// The next output, expected to be for the client.
    #[track_caller]
    fn next_emitted(&mut self) -> pb::WatchResponse {
        match self.out.remove(0) {
            HubOutput::Emit(message) => pb::WatchResponse::decode(message).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// The next output, expected to be a message on the given stream.
    #[track_caller]
    fn next_sent(&mut self, on: u64) -> RequestUnion {
        match self.out.remove(0) {
            HubOutput::Send { stream, message } => {
                assert_eq!(stream, UpstreamStreamId(on));
                pb::WatchRequest::decode(message).unwrap().request_union.unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    /// The next output, expected to be a create on the given stream: returns upstream id and start.
    #[track_caller]
    fn next_create(&mut self, on: u64) -> (i64, i64) {
        match self.next_sent(on) {
            RequestUnion::CreateRequest(create) => (create.watch_id, create.start_revision),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn next_cancel(&mut self, on: u64) -> i64 {
        match self.next_sent(on) {
            RequestUnion::CancelRequest(cancel) => cancel.watch_id,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn next_open(&mut self) -> (u64, StreamCredential, u32) {
        match self.out.remove(0) {
            HubOutput::Open { stream, credential, attempt, .. } => (stream.0, credential, attempt),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn nothing(&mut self) {
        assert!(self.out.is_empty(), "{:?}", self.out);
    }

    /// Resumes all watches of a lost stream on the next stream.
    fn resumed(&mut self, lost: u64, next: u64, traits: WatchTraits) {
        self.lose(lost, StreamLoss::Upstream);
        assert_eq!(self.next_open().0, next);
        self.nothing();
        self.input(HubInput::Opened { stream: UpstreamStreamId(next), traits });
    }
}

fn watch(key: &'static str, start_revision: i64) -> pb::WatchCreateRequest {
    pb::WatchCreateRequest { key: key.into(), start_revision, ..Default::default() }
}

fn with_id(watch_id: i64) -> pb::WatchCreateRequest {
    pb::WatchCreateRequest { watch_id, ..watch("a", 5) }
}

fn answer(watch_id: i64, revision: i64) -> pb::WatchResponse {
    let header = pb::ResponseHeader { cluster_id: 7, member_id: 1, revision, raft_term: 3 };
    pb::WatchResponse { header: Some(header), watch_id, ..Default::default() }
}

fn created(watch_id: i64, revision: i64) -> pb::WatchResponse {
    pb::WatchResponse { created: true, ..answer(watch_id, revision) }
}

fn refused(watch_id: i64, reason: &str) -> pb::WatchResponse {
    pb::WatchResponse { canceled: true, cancel_reason: reason.into(), ..created(watch_id, 4) }
}

fn compacted(watch_id: i64, at: i64) -> pb::WatchResponse {
    pb::WatchResponse { canceled: true, compact_revision: at, ..answer(watch_id, 0) }
}

fn event(revision: i64) -> mvccpb::Event {
    let kv = mvccpb::KeyValue { key: "a".into(), mod_revision: revision, ..Default::default() };
    mvccpb::Event { kv: Some(kv), ..Default::default() }
}

fn events(watch_id: i64, header: i64, revisions: &[i64]) -> pb::WatchResponse {
    let events = revisions.iter().map(|revision| event(*revision)).collect();
    pb::WatchResponse { events, ..answer(watch_id, header) }
}

fn fragment(watch_id: i64, header: i64, revisions: &[i64]) -> pb::WatchResponse {
    pb::WatchResponse { fragment: true, ..events(watch_id, header, revisions) }
}

fn revisions(response: &pb::WatchResponse) -> Vec<i64> {
    response.events.iter().map(|event| event.kv.as_ref().unwrap().mod_revision).collect()
}

fn header_revision(response: &pb::WatchResponse) -> i64 {
    response.header.as_ref().expect("no answer without a header").revision
}
