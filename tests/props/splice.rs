//! What crosses a watch: events reach the client as the very bytes that the member sent, whatever else stands beside them,
//! and a create reaches the member with every field that is not ours to set.

use bytes::Bytes;
use keyward::pb::etcdserverpb as pb;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::rpc::canonical;
use keyward::rpc::scan::WireFields;
use keyward::rpc::schema::MessageId;
use keyward::watch::hub::{Hub, HubInput, HubOutput, HubTiming, UpstreamStreamId, WatchTraits};
use prost::Message as _;
use tokio::time::Instant;

use crate::bodies::{Style, body, put_bytes, put_varint};
use crate::choices::Choices;

pub(crate) const TARGETS: [fn(&[u8]); 3] = [events_cross, a_create_crosses, any_response];

/// Where the watch begins, so that no read is needed before.
const START: u64 = 5;

/// A hub with one watch that stands upstream.
struct Standing {
    hub: Hub,
    now: Instant,
    stream: UpstreamStreamId,
    /// The watch's id upstream, and the client's.
    upstream: i64,
    client: i64,
    /// The create that was sent.
    sent: Bytes,
}

/// The hub after this create, a WatchRequest from revision [`START`]; none where it is not a create.
fn standing(request: Vec<u8>) -> Option<Standing> {
    let timing = HubTiming { idle_progress: None, progress_grace: std::time::Duration::from_secs(1) };
    let now = Instant::now();
    let mut hub = Hub::new(now, timing);
    let mut out = Vec::new();
    hub.handle(now, HubInput::Client(request.into()), &mut out);
    let stream = out.iter().find_map(|output| match output {
        HubOutput::Open { stream, .. } => Some(*stream),
        _ => None,
    })?;
    out.clear();
    let traits = WatchTraits { late_created: false, ..WatchTraits::UNKNOWN };
    hub.handle(now, HubInput::Opened { stream, traits }, &mut out);
    let sent = out.iter().find_map(|output| match output {
        HubOutput::Send { message, .. } => Some(message.clone()),
        _ => None,
    })?;
    let create = pb::WatchRequest::decode(sent.clone()).expect("a request").request_union;
    let Some(RequestUnion::CreateRequest(create)) = create else { panic!("no create was sent") };
    let mut standing = Standing { hub, now, stream, upstream: create.watch_id, client: 0, sent };
    let created = pb::WatchResponse {
        header: header(4),
        watch_id: create.watch_id,
        created: true,
        ..Default::default()
    };
    let told = standing.hears(created.encode_to_vec());
    let told = told.iter().map(|told| pb::WatchResponse::decode(told.clone()).expect("a response"));
    standing.client = told.into_iter().find(|told| told.created)?.watch_id;
    Some(standing)
}

fn header(revision: i64) -> Option<pb::ResponseHeader> {
    Some(pb::ResponseHeader { cluster_id: 7, member_id: 1, revision, raft_term: 3 })
}

impl Standing {
    /// What the client is told of this message of the member's.
    fn hears(&mut self, message: Vec<u8>) -> Vec<Bytes> {
        let mut out = Vec::new();
        let input = HubInput::Upstream { stream: self.stream, message: message.into() };
        self.hub.handle(self.now, input, &mut out);
        let emitted = out.into_iter().filter_map(|output| match output {
            HubOutput::Emit(told) => Some(told),
            _ => None,
        });
        emitted.collect()
    }
}

/// The fields of that number, each as its bytes.
fn fields_of(message: &[u8], number: u32) -> Vec<Vec<u8>> {
    let fields = WireFields::new(message).map(|field| field.expect("canonical"));
    let wanted = fields.filter(|field| field.number == number);
    wanted.map(|field| message[field.range].to_vec()).collect()
}

/// A field that etcd may add one day, of any wire type.
fn unknown(choices: &mut Choices<'_>, out: &mut Vec<u8>) {
    if !choices.one_in(3) {
        return;
    }
    let number = 40 + u64::from(choices.byte() % 20);
    match choices.below(3) {
        0 => {
            put_varint(number << 3, out);
            put_varint(choices.number(), out);
        }
        1 => put_bytes(number, choices.bytes(6), out),
        _ => {
            put_varint(number << 3 | 5, out);
            out.extend(&choices.number().to_le_bytes()[..4]);
        }
    }
}

fn event(choices: &mut Choices<'_>, revision: u64) -> Vec<u8> {
    let mut kv = Vec::new();
    put_bytes(1, choices.bytes(5), &mut kv);
    unknown(choices, &mut kv);
    put_varint(3 << 3, &mut kv);
    put_varint(revision, &mut kv);
    put_bytes(5, choices.bytes(9), &mut kv);
    unknown(choices, &mut kv);
    let mut event = Vec::new();
    if choices.flag() {
        put_varint(1 << 3, &mut event);
        put_varint(1, &mut event);
    }
    unknown(choices, &mut event);
    put_bytes(2, &kv, &mut event);
    unknown(choices, &mut event);
    let mut field = Vec::new();
    put_bytes(11, &event, &mut field);
    field
}

fn watch_from_start() -> Vec<u8> {
    let start_revision = START.cast_signed();
    let create = pb::WatchCreateRequest { key: "a".into(), start_revision, ..Default::default() };
    pb::WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }.encode_to_vec()
}

fn events_cross(input: &[u8]) {
    let mut choices = Choices::new(input);
    let mut standing = standing(watch_from_start()).expect("a watch");
    let (mut revision, mut sent, mut told) = (START, Vec::new(), Vec::new());
    for _ in 0..=choices.below(4) {
        let mut message = Vec::new();
        let mut events = Vec::new();
        for _ in 0..=choices.below(3) {
            events.push(event(&mut choices, revision));
            revision += u64::from(choices.flag());
        }
        revision += 1;
        put_bytes(1, &header(revision.cast_signed()).expect("one").encode_to_vec(), &mut message);
        unknown(&mut choices, &mut message);
        put_varint(2 << 3, &mut message);
        put_varint(standing.upstream.cast_unsigned(), &mut message);
        unknown(&mut choices, &mut message);
        message.extend(events.concat());
        unknown(&mut choices, &mut message);
        sent.extend(events);
        told.extend(standing.hears(message));
        revision += 1;
    }
    // The last revision is held back until its end is seen.
    let progress = pb::WatchResponse {
        header: header(revision.cast_signed() + 1),
        watch_id: standing.upstream,
        ..Default::default()
    };
    told.extend(standing.hears(progress.encode_to_vec()));
    let mut crossed = Vec::new();
    for message in &told {
        let read = pb::WatchResponse::decode(message.clone()).expect("a response");
        assert!(read.watch_id == standing.client && !read.canceled && !read.created, "{read:?}");
        crossed.extend(fields_of(message, 11));
    }
    assert_eq!(crossed, sent, "the events are the very bytes, in their order");
}

fn a_create_crosses(input: &[u8]) {
    let mut choices = Choices::new(input);
    let style = if choices.one_in(4) { Style::Odd } else { Style::Canonical };
    let mut create = Vec::new();
    put_bytes(1, b"a", &mut create);
    put_varint(3 << 3, &mut create);
    put_varint(START, &mut create);
    let rest = body(&mut choices, MessageId::WatchCreateRequest, style, 0);
    // Fields that are there already would make it no create at all.
    for field in WireFields::new(&rest) {
        let Ok(field) = field else { break };
        if ![1, 3, 7].contains(&field.number) {
            create.extend(&rest[field.range]);
        }
    }
    let mut request = Vec::new();
    put_bytes(1, &create, &mut request);
    unknown(&mut choices, &mut request);
    let good = canonical::check(MessageId::WatchRequest, &request).is_ok();
    let Some(standing) = standing(request.clone()) else {
        return assert!(!good, "a good create is not sent: {request:02x?}");
    };
    assert!(good);
    let asked = pb::WatchRequest::decode(&*request).expect("canonical").request_union;
    let sent = pb::WatchRequest::decode(standing.sent.clone()).expect("a request").request_union;
    let (Some(RequestUnion::CreateRequest(mut asked)), Some(RequestUnion::CreateRequest(sent))) =
        (asked, sent)
    else {
        panic!("no creates");
    };
    asked.watch_id = sent.watch_id;
    (asked.progress_notify, asked.fragment) = (true, true);
    // Old members check the key alone of a watch without an end (V12): such a watch is sent with the last end.
    let open_end = asked.range_end[..] == *b"\0";
    if open_end {
        assert_eq!(sent.range_end[..], [0xff; 64]);
        asked.range_end.clone_from(&sent.range_end);
    }
    assert_eq!(sent, asked);
    let inside = |message: &[u8], wanted: &dyn Fn(u32) -> bool| -> Vec<Vec<u8>> {
        let fields = WireFields::new(message).map(|field| field.expect("canonical"));
        fields.filter(|field| wanted(field.number)).map(|field| message[field.range].to_vec()).collect()
    };
    let create_of = |message: &[u8]| {
        let field = WireFields::new(message).next().expect("a field").expect("canonical");
        field.value.bytes().expect("a message").to_vec()
    };
    let set_by_us = |number: u32| [3, 4, 7, 8].contains(&number) || open_end && number == 2;
    let kept = |number: u32| !set_by_us(number);
    assert_eq!(inside(&create_of(&standing.sent), &kept), inside(&create_of(&request), &kept));
    let beside = |number: u32| number > 3;
    assert_eq!(inside(&standing.sent, &beside), inside(&request, &beside));
}

/// A member may send anything; what the client is told is always a message.
fn any_response(input: &[u8]) {
    let mut standing = standing(watch_from_start()).expect("a watch");
    for told in standing.hears(input.to_vec()) {
        let read = pb::WatchResponse::decode(told.clone());
        assert!(read.is_ok(), "{read:?} of {told:x?}");
    }
}
