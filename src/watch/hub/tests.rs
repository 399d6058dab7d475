//! The hub's promises, one by one.

use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use tokio::time::Instant;

use super::{
    Credential, End, Hub, Input, Loss, MAX_PENDING, MAX_STREAMS, Output, Read, SETTLED, StreamId, Timing,
    Traits, WatchKey,
};
use crate::identity::Revision;
use crate::pb::etcdserverpb::watch_request::RequestUnion;
use crate::pb::{etcdserverpb as pb, mvccpb};

const NEW: Traits = Traits { progress_trusted: true, exact_refusals: true, late_created: true };
const MIDDLE: Traits = Traits { progress_trusted: true, exact_refusals: true, late_created: false };
const OLD: Traits = Traits { progress_trusted: false, exact_refusals: false, late_created: false };

const BAD_TOKEN: &str = "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token";
const DENIED: &str = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";
const DUPLICATE: &str = "mvcc: duplicate watch ID provided on the WatchStream";

struct Bench {
    hub: Hub,
    now: Instant,
    cluster: u64,
    /// What came out of the last input and was not taken.
    out: Vec<Output>,
}

impl Bench {
    fn new() -> Self {
        let now = Instant::now();
        let timing =
            Timing { idle_progress: Duration::from_secs(40), progress_grace: Duration::from_secs(1) };
        Self { hub: Hub::new(now, timing), now, cluster: 7, out: Vec::new() }
    }

    /// With one live watch, id 0 downstream and 1 upstream, from revision 5 on, on stream 1.
    fn watching(traits: Traits) -> Self {
        let mut bench = Self::new();
        bench.create(watch("a", 5));
        bench.opened(1, traits);
        bench.up(1, created(1, 4));
        bench.out.clear();
        bench
    }

    fn input(&mut self, input: Input) {
        assert!(self.out.is_empty(), "not looked at: {:?}", self.out);
        self.hub.handle(self.now, input, &mut self.out);
    }

    fn ask(&mut self, request: RequestUnion) {
        let message = pb::WatchRequest { request_union: Some(request) }.encode_to_vec();
        self.input(Input::Client(message.into()));
    }

    fn create(&mut self, create: pb::WatchCreateRequest) {
        self.ask(RequestUnion::CreateRequest(create));
        if let Some(Output::Open { .. }) = self.out.first() {
            self.out.remove(0);
        }
    }

    fn cancel(&mut self, watch_id: i64) {
        self.ask(RequestUnion::CancelRequest(pb::WatchCancelRequest { watch_id }));
    }

    fn ask_progress(&mut self) {
        self.ask(RequestUnion::ProgressRequest(pb::WatchProgressRequest {}));
    }

    fn opened(&mut self, stream: u64, traits: Traits) {
        self.input(Input::Opened { stream: StreamId(stream), traits });
        self.out.retain(|output| !matches!(output, Output::Send { .. }));
    }

    fn up(&mut self, stream: u64, mut response: pb::WatchResponse) {
        if let Some(header) = &mut response.header {
            header.cluster_id = self.cluster;
        }
        let message = response.encode_to_vec().into();
        self.input(Input::Upstream { stream: StreamId(stream), message });
    }

    fn lose(&mut self, stream: u64, why: Loss) {
        self.input(Input::Lost { stream: StreamId(stream), why });
    }

    fn anchored(&mut self, watch: u64, stream: u64, revision: i64) {
        let header = pb::ResponseHeader { cluster_id: self.cluster, member_id: 2, revision, raft_term: 3 };
        let header = header.encode_to_vec().into();
        let (watch, stream) = (WatchKey(watch), StreamId(stream));
        self.input(Input::Anchored { watch, stream, header, revision: Revision(revision) });
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        self.input(Input::Tick);
    }

    /// The one output there is.
    #[track_caller]
    fn only(&mut self) -> Output {
        assert_eq!(self.out.len(), 1, "{:?}", self.out);
        self.out.remove(0)
    }

    #[track_caller]
    fn emitted(&mut self) -> pb::WatchResponse {
        match self.only() {
            Output::Emit(message) => pb::WatchResponse::decode(message).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// The next output, which must be for the client.
    #[track_caller]
    fn next_emitted(&mut self) -> pb::WatchResponse {
        match self.out.remove(0) {
            Output::Emit(message) => pb::WatchResponse::decode(message).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    /// The next output, which must be a message on that stream.
    #[track_caller]
    fn next_sent(&mut self, on: u64) -> RequestUnion {
        match self.out.remove(0) {
            Output::Send { stream, message } => {
                assert_eq!(stream, StreamId(on));
                pb::WatchRequest::decode(message).unwrap().request_union.unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    /// The next output, which must be a create on that stream: its id and start.
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
    fn next_open(&mut self) -> (u64, Credential, u32) {
        match self.out.remove(0) {
            Output::Open { stream, credential, attempt } => (stream.0, credential, attempt),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn nothing(&mut self) {
        assert!(self.out.is_empty(), "{:?}", self.out);
    }

    /// Resumes everything of a lost stream on the next one.
    fn resumed(&mut self, lost: u64, next: u64, traits: Traits) {
        self.lose(lost, Loss::Upstream);
        assert_eq!(self.next_open().0, next);
        self.nothing();
        self.input(Input::Opened { stream: StreamId(next), traits });
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

// ---- creates

#[test]
fn from_now_is_anchored_by_a_read_before_it_is_created() {
    let mut bench = Bench::new();
    bench.create(watch("a", 0));
    bench.nothing();
    bench.opened(1, NEW);
    let anchor = bench.only();
    assert!(
        matches!(&anchor, Output::Anchor { stream: StreamId(1), key, read: Read::Local, .. } if key == "a"),
        "{anchor:?}"
    );
    bench.anchored(1, 1, 10);
    // One back: a watch from the future gets no progress on this member.
    assert_eq!(bench.next_create(1), (1, 10));
    bench.up(1, created(1, 15));
    let told = bench.emitted();
    assert_eq!((told.watch_id, header_revision(&told), told.created), (0, 10, true));
    bench.up(1, events(1, 11, &[10, 11]));
    assert_eq!(revisions(&bench.emitted()), [11]);
}

#[test]
fn from_now_needs_no_anchor_where_created_is_exact() {
    let mut bench = Bench::new();
    bench.create(watch("a", 0));
    bench.input(Input::Opened { stream: StreamId(1), traits: MIDDLE });
    assert_eq!(bench.next_create(1), (1, 0));
    bench.up(1, created(1, 15));
    assert_eq!(header_revision(&bench.emitted()), 15);
    bench.resumed(1, 2, MIDDLE);
    assert_eq!(bench.next_create(2), (2, 16));
}

#[test]
fn from_now_is_never_before_what_the_client_was_shown() {
    let mut bench = Bench::watching(NEW);
    bench.up(1, events(1, 20, &[20]));
    bench.out.clear();
    bench.create(watch("b", 0));
    assert!(matches!(bench.only(), Output::Anchor { .. }));
    bench.anchored(2, 1, 12);
    assert_eq!(bench.next_create(1), (2, 20));
    bench.up(1, created(2, 12));
    assert_eq!(header_revision(&bench.emitted()), 20);
}

#[test]
fn odd_starts_reach_etcd_as_they_are() {
    let mut bench = Bench::new();
    bench.create(watch("a", -3));
    bench.input(Input::Opened { stream: StreamId(1), traits: NEW });
    assert_eq!(bench.next_create(1), (1, -3));
    bench.up(1, refused(-1, "etcdserver: mvcc: required revision has been compacted"));
    let Output::Emit(message) = bench.out.remove(0) else { panic!() };
    let told = pb::WatchResponse::decode(message).unwrap();
    assert_eq!((told.watch_id, told.created, told.canceled), (-1, true, true));
}

#[test]
fn a_refused_anchor_lets_etcd_refuse_the_create_itself() {
    let mut bench = Bench::new();
    bench.create(watch("a", 0));
    bench.opened(1, NEW);
    bench.out.clear();
    let failed = |stream, why| Input::AnchorFailed { watch: WatchKey(1), stream: StreamId(stream), why };
    bench.input(failed(1, Loss::Credential));
    assert_eq!(bench.next_create(1), (1, 0));
    bench.up(1, refused(-1, BAD_TOKEN));
    assert_eq!(bench.next_open(), (2, Credential::Fresh, 0));
    bench.nothing();
    bench.opened(2, NEW);
    assert!(matches!(bench.only(), Output::Anchor { stream: StreamId(2), .. }));
    bench.input(failed(2, Loss::Denied("no".into())));
    assert_eq!(bench.next_create(2), (2, 0));
    // Let in after all: it is from what Created says, and nothing before that is told.
    bench.up(2, created(2, 9));
    assert_eq!(header_revision(&bench.next_emitted()), 9);
    bench.out.clear();
    bench.up(2, events(2, 10, &[9, 10]));
    assert_eq!(revisions(&bench.emitted()), [10]);
}

#[test]
fn a_failed_anchor_is_read_elsewhere() {
    let mut bench = Bench::new();
    bench.create(watch("a", 0));
    bench.opened(1, NEW);
    bench.out.clear();
    bench.input(Input::AnchorFailed { watch: WatchKey(1), stream: StreamId(1), why: Loss::Upstream });
    assert!(matches!(bench.out.remove(0), Output::Close { stream: StreamId(1) }));
    assert_eq!(bench.next_open(), (2, Credential::Current, 1));
    // A late answer of the old one is nobody's.
    bench.anchored(1, 1, 10);
    bench.nothing();
}

#[test]
fn created_comes_once_per_create_in_request_order() {
    let mut bench = Bench::new();
    bench.create(watch("a", 5));
    bench.create(watch("b", 5));
    bench.opened(1, MIDDLE);
    bench.up(1, refused(-1, BAD_TOKEN));
    assert_eq!(bench.next_open(), (2, Credential::Fresh, 0));
    // The second one is let in first, and even speaks: neither may be told yet.
    bench.up(1, created(2, 4));
    bench.nothing();
    bench.up(1, events(2, 6, &[6]));
    assert_eq!(bench.next_cancel(1), 2);
    bench.nothing();
    bench.input(Input::Opened { stream: StreamId(2), traits: MIDDLE });
    assert_eq!(bench.next_create(2), (3, 5));
    bench.up(2, created(3, 4));
    assert_eq!(bench.next_emitted().watch_id, 0);
    assert_eq!(bench.next_emitted().watch_id, 1);
    assert_eq!(bench.next_create(2), (4, 5));
    assert!(matches!(bench.only(), Output::Close { stream: StreamId(1) }));
    bench.up(2, created(4, 4));
    bench.nothing();
    bench.up(2, events(4, 6, &[6]));
    assert_eq!((bench.out.len(), bench.next_emitted().watch_id), (1, 1));
}

#[test]
fn a_create_waits_until_the_earlier_ones_are_on_their_way() {
    let mut bench = Bench::new();
    bench.create(watch("a", 0));
    bench.create(watch("b", 5));
    bench.opened(1, NEW);
    assert!(matches!(bench.only(), Output::Anchor { .. }));
    bench.anchored(1, 1, 10);
    assert_eq!(bench.next_create(1), (1, 10));
    assert_eq!(bench.next_create(1), (2, 5));
}

#[test]
fn ids_are_assigned_upward_past_those_in_use_and_never_again() {
    let mut bench = Bench::watching(MIDDLE);
    for (upstream, (asked, given)) in [(1, 1), (0, 2), (-7, -7)].into_iter().enumerate() {
        bench.create(with_id(asked));
        bench.out.clear();
        bench.up(1, created(i64::try_from(upstream).unwrap() + 2, 4));
        assert_eq!(bench.emitted().watch_id, given);
    }
    bench.cancel(2);
    bench.out.clear();
    bench.create(watch("a", 5));
    bench.out.clear();
    bench.up(1, created(5, 4));
    assert_eq!(bench.emitted().watch_id, 3);
}

#[test]
fn a_duplicate_id_is_refused_as_etcd_does() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(with_id(9));
    bench.create_and_let_in(2);
    assert_eq!(bench.emitted().watch_id, 9);
    bench.create(with_id(9));
    bench.create_and_let_in(3);
    assert_eq!(bench.next_cancel(1), 3);
    let told = bench.emitted();
    assert_eq!((told.watch_id, told.created, told.canceled), (-1, true, true));
    assert_eq!(told.cancel_reason, DUPLICATE);
    // The first goes on; once it is cancelled the id is free.
    bench.up(1, events(2, 8, &[8]));
    assert_eq!(bench.emitted().watch_id, 9);
    bench.cancel(9);
    bench.out.clear();
    bench.create(with_id(9));
    bench.create_and_let_in(4);
    assert_eq!((bench.emitted().watch_id), 9);
}

impl Bench {
    /// Upstream lets the create in that was just sent.
    fn create_and_let_in(&mut self, upstream_id: i64) {
        assert_eq!(self.next_create(1).0, upstream_id);
        self.up(1, created(upstream_id, 4));
    }
}

#[test]
fn a_refusal_that_a_fresh_credential_may_cure_is_tried_once_more_alone() {
    for (traits, reason) in [
        (NEW, BAD_TOKEN),
        (NEW, "rpc error: code = InvalidArgument desc = etcdserver: revision of auth store is old"),
        (NEW, "rpc error: code = InvalidArgument desc = etcdserver: user name is empty"),
        (OLD, DENIED),
    ] {
        let mut bench = Bench::watching(traits);
        bench.create(watch("b", 5));
        bench.out.clear();
        bench.up(1, refused(if traits == OLD { 2 } else { -1 }, reason));
        assert_eq!(bench.next_open(), (2, Credential::Fresh, 0));
        bench.nothing();
        bench.input(Input::Opened { stream: StreamId(2), traits });
        assert_eq!(bench.next_create(2), (3, 5));
        bench.up(2, created(3, 4));
        assert_eq!(bench.emitted().watch_id, 1);
        // The others stay where they are.
        bench.up(1, events(1, 6, &[6]));
        assert_eq!(bench.emitted().watch_id, 0);
    }
}

#[test]
fn a_second_refusal_is_the_truth_and_told_once() {
    for traits in [NEW, OLD] {
        let mut bench = Bench::watching(traits);
        bench.create(with_id(77));
        bench.out.clear();
        let reason = if traits == NEW { BAD_TOKEN } else { DENIED };
        bench.up(1, refused(if traits == OLD { 2 } else { -1 }, reason));
        bench.out.clear();
        bench.opened(2, traits);
        bench.up(2, refused(if traits == OLD { 3 } else { -1 }, reason));
        let told = bench.next_emitted();
        assert_eq!((told.created, told.canceled), (true, true));
        assert_eq!(told.cancel_reason, reason);
        assert_eq!(told.watch_id, if traits == OLD { 77 } else { -1 }, "as that version says it");
        assert!(matches!(bench.only(), Output::Close { stream: StreamId(2) }));
    }
}

#[test]
fn a_real_denial_is_told_at_once() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    bench.out.clear();
    bench.up(1, refused(-1, DENIED));
    assert_eq!(bench.emitted().cancel_reason, DENIED);
}

#[test]
fn an_old_refusal_never_names_a_living_watch() {
    // etcd 3.5.1 says id 0 to the refused one; watch 0 of the same client lives.
    let mut bench = Bench::watching(OLD);
    bench.create(watch("b", 5));
    bench.out.clear();
    bench.up(1, refused(2, DENIED));
    bench.out.clear();
    bench.opened(2, OLD);
    bench.up(2, refused(3, DENIED));
    assert_eq!(bench.next_emitted().watch_id, -1);
    bench.out.clear();
    bench.up(1, events(1, 6, &[6]));
    assert_eq!(bench.emitted().watch_id, 0);
}

#[test]
fn without_any_credential_the_first_refusal_is_told() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    bench.out.clear();
    bench.up(1, refused(-1, BAD_TOKEN));
    bench.out.clear();
    bench.lose(2, Loss::Denied("wrong password".into()));
    assert_eq!(bench.emitted().cancel_reason, BAD_TOKEN);
}

#[test]
fn without_any_credential_or_header_the_stream_ends() {
    let mut bench = Bench::new();
    bench.create(watch("a", 5));
    bench.lose(1, Loss::Denied("wrong password".into()));
    assert!(matches!(bench.only(), Output::End(End::Denied(reason)) if reason == "wrong password"));
    bench.create(watch("a", 5));
    bench.nothing();
}

#[test]
fn bytes_that_are_no_request_end_the_stream_and_unknown_requests_do_not() {
    let mut bench = Bench::watching(NEW);
    bench.input(Input::Client(Bytes::new()));
    bench.input(Input::Client(Bytes::from_static(&[0x7a, 0])));
    bench.nothing();
    bench.input(Input::Client(Bytes::from_static(&[0x0a, 0x05, 0x01])));
    assert!(matches!(bench.only(), Output::End(End::InvalidRequest)));
}

#[test]
fn a_flood_of_creates_is_not_read_without_end() {
    let mut bench = Bench::new();
    for _ in 0..MAX_PENDING {
        assert!(bench.hub.accepts_client());
        bench.create(watch("a", 5));
    }
    assert!(!bench.hub.accepts_client());
}

// ---- events and resume

#[test]
fn resumes_after_the_last_whole_revision_never_after_a_header() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 900, &[6, 7]));
    let told = bench.emitted();
    assert_eq!((revisions(&told), header_revision(&told)), (vec![6, 7], 7));
    bench.resumed(1, 2, MIDDLE);
    assert_eq!(bench.next_create(2), (2, 8));
    bench.up(2, created(2, 950));
    bench.nothing();
    bench.up(2, events(2, 950, &[7, 8]));
    assert_eq!(revisions(&bench.emitted()), [8]);
}

#[test]
fn half_a_revision_is_held_back_and_comes_whole_from_the_next_member() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, fragment(1, 9, &[6, 7]));
    let told = bench.emitted();
    assert_eq!((revisions(&told), header_revision(&told), told.fragment), (vec![6], 6, false));
    bench.up(1, fragment(1, 9, &[7]));
    bench.nothing();
    bench.resumed(1, 2, MIDDLE);
    assert_eq!(bench.next_create(2), (2, 7));
    bench.up(2, created(2, 9));
    bench.up(2, events(2, 9, &[7, 7, 7]));
    assert_eq!(revisions(&bench.emitted()), [7, 7, 7]);
}

#[test]
fn a_client_that_asked_for_fragments_gets_contiguous_ones() {
    let mut bench = Bench::new();
    bench.create(pb::WatchCreateRequest { fragment: true, ..watch("a", 5) });
    bench.opened(1, MIDDLE);
    bench.up(1, created(1, 4));
    bench.out.clear();
    bench.up(1, events(1, 6, &[6; 9]));
    let pieces: Vec<_> = (0..bench.out.len()).map(|_| bench.next_emitted()).collect();
    assert!(pieces.len() > 1, "the limit is small in tests");
    assert_eq!(pieces.iter().map(|piece| piece.events.len()).sum::<usize>(), 9);
    let flags: Vec<bool> = pieces.iter().map(|piece| piece.fragment).collect();
    assert!(flags[..flags.len() - 1].iter().all(|more| *more) && !flags[flags.len() - 1]);
    assert!(pieces.iter().all(|piece| header_revision(piece) == 6 && !piece.events.is_empty()));
}

#[test]
fn a_revision_too_large_to_be_whole_ends_the_stream() {
    let mut bench = Bench::watching(MIDDLE);
    for _ in 0..3 {
        bench.up(1, fragment(1, 6, &[6; 1000]));
        if let Some(output) = bench.out.pop() {
            return assert!(matches!(output, Output::End(End::RevisionTooLarge)));
        }
    }
    panic!("held without bound");
}

#[test]
fn all_watches_of_a_lost_stream_move_to_one_new_stream() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(watch("b", 6));
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    assert_eq!(bench.next_create(2), (3, 5));
    assert_eq!(bench.next_create(2), (4, 6));
    bench.nothing();
    // What the old stream still says is nobody's.
    bench.up(1, events(1, 6, &[6]));
    bench.nothing();
}

#[test]
fn losses_are_counted_until_it_has_been_quiet() {
    let mut bench = Bench::watching(MIDDLE);
    bench.lose(1, Loss::Upstream);
    assert_eq!(bench.next_open(), (2, Credential::Current, 1));
    bench.lose(2, Loss::Credential);
    assert_eq!(bench.next_open(), (3, Credential::Fresh, 2));
    bench.now += SETTLED;
    bench.lose(3, Loss::Upstream);
    assert_eq!(bench.next_open(), (4, Credential::Current, 1));
}

#[test]
fn a_cancel_that_the_client_did_not_ask_for_is_resumed() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, pb::WatchResponse { canceled: true, ..answer(1, 6) });
    assert_eq!(bench.next_open(), (2, Credential::Current, 1));
    assert!(matches!(bench.only(), Output::Close { stream: StreamId(1) }));
    bench.input(Input::Opened { stream: StreamId(2), traits: MIDDLE });
    assert_eq!(bench.next_create(2), (2, 5));
}

#[test]
fn a_watch_that_lived_is_ended_once_when_its_user_may_not_have_it_any_more() {
    let mut bench = Bench::watching(NEW);
    bench.resumed(1, 2, NEW);
    bench.out.clear();
    bench.up(2, refused(-1, BAD_TOKEN));
    assert_eq!(bench.next_open(), (3, Credential::Fresh, 1));
    bench.out.clear();
    bench.opened(3, NEW);
    bench.up(3, refused(-1, DENIED));
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.created, told.canceled), (0, false, true));
    assert_eq!(told.cancel_reason, DENIED);
    bench.out.clear();
    bench.cancel(0);
    bench.nothing();
}

#[test]
fn upstream_nonsense_costs_the_stream_not_the_watch() {
    for message in [
        Bytes::from_static(&[0xff]),
        events(1, 6, &[7, 6]).encode_to_vec().into(),
        created(9, 6).encode_to_vec().into(),
    ] {
        let mut bench = Bench::watching(MIDDLE);
        bench.input(Input::Upstream { stream: StreamId(1), message });
        assert!(matches!(bench.out.remove(0), Output::Close { stream: StreamId(1) }));
        assert_eq!(bench.next_open(), (2, Credential::Current, 1));
        bench.nothing();
        bench.input(Input::Opened { stream: StreamId(2), traits: MIDDLE });
        assert_eq!(bench.next_create(2), (2, 5));
    }
}

#[test]
fn streams_are_bounded_and_the_oldest_gives_way() {
    let mut bench = Bench::watching(NEW);
    let mut upstream = 1;
    for stream in 1..=u64::try_from(MAX_STREAMS).unwrap() {
        bench.create(watch("b", 5));
        bench.out.clear();
        bench.up(stream, refused(-1, BAD_TOKEN));
        let next = stream + 1;
        assert_eq!(bench.next_open(), (next, Credential::Fresh, 0));
        if stream == u64::try_from(MAX_STREAMS).unwrap() {
            assert!(matches!(bench.only(), Output::Close { stream: StreamId(1) }));
            bench.input(Input::Opened { stream: StreamId(next), traits: NEW });
            assert_eq!(bench.next_create(next).1, 5, "the watch of the oldest goes on here");
            return;
        }
        bench.opened(next, NEW);
        upstream += 2;
        bench.up(next, created(upstream, 4));
        bench.out.clear();
    }
    panic!("never bounded");
}

// ---- compaction, other histories

#[test]
fn compaction_is_told_as_etcd_tells_it_and_its_id_stays_taken_until_cancelled() {
    let mut bench = Bench::watching(MIDDLE);
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 90));
    bench.up(2, compacted(2, 50));
    assert_eq!(bench.next_cancel(2), 2);
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.created, told.canceled), (0, false, true));
    assert_eq!((told.compact_revision, header_revision(&told)), (50, 0));
    bench.out.clear();
    // A later cancel is acknowledged, once.
    bench.cancel(0);
    let ack = bench.emitted();
    assert_eq!((ack.watch_id, ack.canceled, ack.compact_revision), (0, true, 0));
    bench.cancel(0);
    bench.nothing();
}

#[test]
fn an_id_that_compaction_ended_is_a_duplicate() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(with_id(9));
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.up(1, compacted(2, 50));
    bench.out.clear();
    bench.create(with_id(9));
    bench.create_and_let_in(3);
    bench.out.remove(0);
    assert_eq!(bench.emitted().cancel_reason, DUPLICATE);
}

#[test]
fn compaction_of_what_was_delivered_is_none() {
    let mut bench = Bench::watching(NEW);
    bench.up(1, events(1, 9, &[9]));
    bench.out.clear();
    bench.resumed(1, 2, NEW);
    // Reaches back to 9, so that progress is answered; 9 is compacted, 10 is not.
    assert_eq!(bench.next_create(2), (2, 9));
    bench.up(2, created(2, 12));
    bench.up(2, compacted(2, 10));
    assert_eq!(bench.next_cancel(2), 2);
    assert_eq!(bench.next_create(2), (3, 10));
    bench.nothing();
}

#[test]
fn another_cluster_ends_watches_as_compacted() {
    let mut bench = Bench::watching(MIDDLE);
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.cluster = 8;
    bench.up(2, created(2, 3));
    assert_eq!(bench.next_cancel(2), 2);
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.canceled, told.compact_revision), (0, true, 3));
    assert_eq!(header_revision(&told), 0);
    assert!(matches!(bench.only(), Output::Close { .. }));
    // The client starts anew, on the new cluster.
    bench.create(watch("a", 4));
    bench.opened(3, MIDDLE);
    bench.up(3, created(3, 3));
    assert_eq!(bench.emitted().watch_id, 1);
}

#[test]
fn history_that_went_back_ends_watches_as_compacted() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 40, &[40]));
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 30));
    assert_eq!(bench.next_cancel(2), 2);
    assert!(matches!(bench.only(), Output::Anchor { read: Read::Linearizable, .. }));
    bench.anchored(1, 2, 31);
    let told = bench.next_emitted();
    assert_eq!((told.watch_id, told.canceled, told.compact_revision), (0, true, 31));
}

#[test]
fn a_member_that_is_only_behind_is_accepted() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 40, &[40]));
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 30));
    bench.out.clear();
    bench.anchored(1, 2, 45);
    assert_eq!(bench.next_create(2), (3, 41));
    bench.up(2, created(3, 30));
    bench.nothing();
    // Its progress is behind what the client knows: not told, not believed.
    bench.up(2, answer(3, 35));
    bench.nothing();
    bench.up(2, events(3, 41, &[41]));
    assert_eq!(revisions(&bench.emitted()), [41]);
}

#[test]
fn a_history_that_may_not_be_asked_for_is_taken_on_trust() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 40, &[40]));
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 30));
    bench.out.clear();
    let why = Loss::Denied(DENIED.into());
    bench.input(Input::AnchorFailed { watch: WatchKey(1), stream: StreamId(2), why });
    assert_eq!(bench.next_create(2), (3, 41));
}

// ---- cancels

#[test]
fn a_cancel_is_acknowledged_at_once_even_during_an_outage() {
    let mut bench = Bench::watching(MIDDLE);
    bench.up(1, events(1, 6, &[6]));
    bench.out.clear();
    bench.lose(1, Loss::Upstream);
    bench.out.clear();
    bench.cancel(0);
    let ack = bench.next_emitted();
    assert_eq!((ack.watch_id, ack.canceled, ack.created), (0, true, false));
    assert_eq!((ack.cancel_reason.as_str(), header_revision(&ack)), ("", 6));
    assert!(matches!(bench.only(), Output::Close { stream: StreamId(2) }), "nothing is resumed");
}

#[test]
fn what_upstream_says_after_a_cancel_is_not_told() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(watch("b", 5));
    bench.create_and_let_in(2);
    bench.out.clear();
    bench.cancel(0);
    assert_eq!(bench.next_cancel(1), 1);
    assert!(bench.emitted().canceled);
    bench.up(1, events(1, 6, &[6]));
    bench.up(1, pb::WatchResponse { canceled: true, ..answer(1, 6) });
    bench.nothing();
}

#[test]
fn a_cancel_of_an_unknown_id_gets_no_answer() {
    let mut bench = Bench::watching(MIDDLE);
    bench.cancel(33);
    bench.nothing();
}

#[test]
fn a_cancel_behind_its_create_waits_for_it() {
    let mut bench = Bench::watching(MIDDLE);
    bench.create(with_id(9));
    assert_eq!(bench.next_create(1).0, 2);
    bench.cancel(9);
    bench.nothing();
    bench.up(1, created(2, 4));
    assert!(bench.next_emitted().created);
    assert_eq!(bench.next_cancel(1), 2);
    assert!(bench.emitted().canceled);
}

// ---- progress

#[test]
fn timed_progress_is_told_only_to_those_who_asked_and_moves_the_resume_point() {
    for asked in [false, true] {
        let mut bench = Bench::new();
        bench.create(pb::WatchCreateRequest { progress_notify: asked, ..watch("a", 5) });
        bench.opened(1, OLD);
        bench.up(1, created(1, 4));
        bench.out.clear();
        bench.up(1, answer(1, 30));
        if asked {
            let told = bench.emitted();
            assert_eq!((told.watch_id, header_revision(&told)), (0, 30));
        }
        bench.up(1, answer(1, 29));
        bench.nothing();
        bench.resumed(1, 2, OLD);
        assert_eq!(bench.next_create(2), (2, 31));
    }
}

#[test]
fn a_progress_request_is_answered_when_upstream_answered() {
    let mut bench = Bench::watching(MIDDLE);
    bench.ask_progress();
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)));
    bench.nothing();
    bench.up(1, answer(-1, 30));
    let told = bench.emitted();
    assert_eq!((told.watch_id, header_revision(&told)), (-1, 30));
    bench.up(1, answer(-1, 31));
    bench.nothing();
}

#[test]
fn a_progress_of_upstream_from_before_a_watch_does_not_count_for_it() {
    let mut bench = Bench::watching(MIDDLE);
    bench.ask_progress();
    bench.out.clear();
    bench.create(watch("b", 2));
    bench.create_and_let_in(2);
    bench.out.clear();
    // Asked before the create, heard after its Created: etcd may not have known it. Asked again at once.
    bench.up(1, answer(-1, 4));
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)));
    bench.nothing();
    bench.up(1, events(2, 4, &[3]));
    assert_eq!(revisions(&bench.emitted()), [3]);
    bench.up(1, answer(-1, 4));
    assert_eq!(header_revision(&bench.emitted()), 4);
}

#[test]
fn a_progress_request_during_an_outage_waits_and_is_answered_after_it() {
    let mut bench = Bench::watching(MIDDLE);
    bench.lose(1, Loss::Upstream);
    bench.out.clear();
    bench.ask_progress();
    bench.nothing();
    bench.opened(2, MIDDLE);
    bench.up(2, created(2, 8));
    assert!(matches!(bench.next_sent(2), RequestUnion::ProgressRequest(_)));
    bench.up(2, answer(-1, 8));
    assert_eq!(header_revision(&bench.emitted()), 8);
}

#[test]
fn a_progress_request_that_was_lost_with_its_stream_is_asked_again() {
    let mut bench = Bench::watching(MIDDLE);
    bench.ask_progress();
    bench.out.clear();
    bench.resumed(1, 2, MIDDLE);
    bench.out.clear();
    bench.up(2, created(2, 8));
    assert!(matches!(bench.next_sent(2), RequestUnion::ProgressRequest(_)));
    bench.up(2, answer(-1, 8));
    assert_eq!(header_revision(&bench.emitted()), 8);
}

#[test]
fn where_upstream_stays_silent_what_is_known_answers() {
    // From the next revision of an idle cluster: V4 members do not answer before the next write.
    let mut bench = Bench::watching(NEW);
    bench.ask_progress();
    bench.out.clear();
    assert_eq!(bench.hub.next_deadline(), Some(bench.now + Duration::from_secs(1)));
    bench.wait(Duration::from_secs(1));
    let told = bench.emitted();
    assert_eq!((told.watch_id, header_revision(&told)), (-1, 4));
}

#[test]
fn no_progress_is_told_of_where_the_cluster_never_was() {
    let mut bench = Bench::new();
    bench.create(watch("a", 50));
    bench.opened(1, NEW);
    bench.up(1, created(1, 4));
    bench.out.clear();
    bench.ask_progress();
    bench.out.clear();
    bench.wait(Duration::from_secs(1));
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)), "asked again instead");
    bench.nothing();
}

#[test]
fn progress_of_several_streams_holds_for_all_watches() {
    let mut bench = Bench::watching(NEW);
    bench.create(watch("b", 5));
    bench.out.clear();
    bench.up(1, refused(-1, BAD_TOKEN));
    bench.out.clear();
    bench.opened(2, NEW);
    bench.up(2, created(3, 4));
    bench.out.clear();
    bench.ask_progress();
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)));
    assert!(matches!(bench.next_sent(2), RequestUnion::ProgressRequest(_)));
    bench.up(1, answer(-1, 40));
    bench.nothing();
    bench.up(2, answer(-1, 35));
    assert_eq!(header_revision(&bench.emitted()), 35);
}

#[test]
fn an_old_member_is_never_asked_and_its_progress_never_believed() {
    let mut bench = Bench::watching(OLD);
    bench.up(1, events(1, 6, &[6]));
    bench.out.clear();
    bench.ask_progress();
    let told = bench.emitted();
    assert_eq!((told.watch_id, header_revision(&told)), (-1, 6));
    bench.up(1, answer(-1, 60));
    bench.wait(Duration::from_secs(60));
    bench.nothing();
    bench.resumed(1, 2, OLD);
    assert_eq!(bench.next_create(2), (2, 7));
}

#[test]
fn a_progress_request_without_watches_gets_no_answer() {
    let mut bench = Bench::new();
    bench.ask_progress();
    bench.nothing();
    assert_eq!(bench.hub.next_deadline(), None);
}

#[test]
fn idle_watches_are_kept_fresh_unseen() {
    let mut bench = Bench::watching(MIDDLE);
    bench.wait(Duration::from_secs(40));
    assert!(matches!(bench.next_sent(1), RequestUnion::ProgressRequest(_)));
    bench.up(1, answer(-1, 70));
    bench.nothing();
    bench.resumed(1, 2, MIDDLE);
    assert_eq!(bench.next_create(2), (2, 71));
}

// ---- bytes

#[test]
fn a_create_crosses_with_the_clients_own_bytes() {
    let mut bench = Bench::new();
    // key "k", start_revision 5, prev_kv, watch_id 8, an unknown field 99; beside the union an unknown field 50.
    let create = b"\x0a\x01k\x18\x05\x30\x01\x38\x08\x98\x06\x2a";
    let mut message = vec![0x0a, u8::try_from(create.len()).unwrap()];
    message.extend_from_slice(create);
    message.extend_from_slice(b"\x92\x03\x02hi");
    bench.input(Input::Client(message.into()));
    bench.out.clear();
    bench.input(Input::Opened { stream: StreamId(1), traits: NEW });
    let Output::Send { message, .. } = bench.only() else { panic!() };
    let sent = b"\x0a\x01k\x30\x01\x98\x06\x2a\x18\x05\x20\x01\x38\x01\x40\x01";
    let mut expected = vec![0x0a, u8::try_from(sent.len()).unwrap()];
    expected.extend_from_slice(sent);
    expected.extend_from_slice(b"\x92\x03\x02hi");
    assert_eq!(message, expected);
}

#[test]
fn fields_that_we_do_not_know_cross_in_header_event_and_response() {
    let mut bench = Bench::watching(MIDDLE);
    // header { cluster 7, revision 9, leader_id 5 (of 3.8) }, watch 1, one event { kv { mod_revision 9 }, field 20 },
    // and field 15 beside them.
    let header = b"\x0a\x06\x08\x07\x18\x09\x28\x05";
    let event = b"\x5a\x07\x12\x02\x18\x09\xa0\x01\x01";
    let unknown = b"\x78\x2a";
    let message = [&header[..], b"\x10\x01", event, unknown].concat();
    bench.input(Input::Upstream { stream: StreamId(1), message: message.into() });
    let Output::Emit(told) = bench.only() else { panic!() };
    assert_eq!(told, [&header[..], event, unknown].concat(), "watch id 0 is left out, all else as it came");
    // Ahead of what is delivered: only the revision is another.
    let header = b"\x0a\x06\x08\x07\x18\x32\x28\x05";
    let event = b"\x5a\x07\x12\x02\x18\x0a\xa0\x01\x01";
    let message = [&header[..], b"\x10\x01", event, unknown].concat();
    bench.input(Input::Upstream { stream: StreamId(1), message: message.into() });
    let Output::Emit(told) = bench.only() else { panic!() };
    assert_eq!(told, [b"\x0a\x06\x08\x07\x18\x0a\x28\x05", &event[..], unknown].concat());
}
