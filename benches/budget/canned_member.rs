//! A member that answers every call of a measured method with the same bytes.
//!
//! Owns: the member's connections for calls and watches, and the events of watches. Must not know: who calls. Logins
//! arrive on connections of their own (`member_logins.rs`).

use std::task::{Context, Poll};

use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{ResponseHeader, WatchRequest, WatchResponse};
use keyward::pb::mvccpb::{Event, KeyValue};
use keyward::rpc::frame::{PREFIX, encode};
use prost::Message as _;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;

use crate::http2_pipe::{
    DATA, END_HEADERS, END_STREAM, FieldIndexing, FrameTemplate, HEADERS, Http2Frame, Http2Pipe,
    append_field, append_frame, append_kept,
};
use crate::workload::{CLUSTER, FIRST_REVISION, KEY, MEMBER, VALUE};

/// `:status: 200`, from HTTP/2's static table.
const STATUS_200: u8 = 0x88;
/// Bytes of a message in one DATA frame at most, as etcd's server sends.
const LONGEST_DATA: usize = 16 * 1024;

pub(crate) struct CannedMember {
    dialled: mpsc::Receiver<DuplexStream>,
    connections: Vec<MemberConnection>,
    answer: CannedAnswer,
}

struct MemberConnection {
    pipe: Http2Pipe,
    has_answered: bool,
    watches: Vec<RegisteredWatch>,
}

/// A watch on a stream.
#[derive(Clone, Copy)]
struct RegisteredWatch {
    stream: u32,
    id: i64,
}

/// The answer to a unary call.
struct CannedAnswer {
    /// The first answer of a connection: the receiver keeps the fields.
    first: FrameTemplate,
    later: FrameTemplate,
}

impl CannedAnswer {
    fn new(message: &[u8]) -> Self {
        let kept = FieldIndexing::Kept;
        let (mut head, mut trailers) = (vec![STATUS_200], Vec::new());
        append_field(&mut head, kept, "content-type", "application/grpc");
        append_field(&mut trailers, kept, "grpc-status", "0");
        append_field(&mut trailers, kept, "grpc-message", "");
        let mut indices = Vec::new();
        append_kept(&mut indices, 3);
        let later_head = [&[STATUS_200], &indices[..1]].concat();
        let answer = |head: &[u8], trailers: &[u8]| {
            let head = FrameTemplate::default().with(HEADERS, END_HEADERS, head);
            let data = encode(message);
            let pieces = data.chunks(LONGEST_DATA);
            let answer = pieces.fold(head, |answer, piece| answer.with(DATA, 0, piece));
            answer.with(HEADERS, END_HEADERS | END_STREAM, trailers)
        };
        Self { first: answer(&head, &trailers), later: answer(&later_head, &indices[1..]) }
    }
}

impl CannedMember {
    /// A member reached by the connections of `dialled`, answering unary calls with `message`.
    pub(crate) fn new(dialled: mpsc::Receiver<DuplexStream>, message: &[u8]) -> Self {
        Self { dialled, connections: Vec::new(), answer: CannedAnswer::new(message) }
    }

    /// Answers all requests received so far.
    pub(crate) fn poll_requests(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(Some(stream)) = self.dialled.poll_recv(cx) {
            let pipe = Http2Pipe::of_server(stream);
            self.connections.push(MemberConnection { pipe, has_answered: false, watches: Vec::new() });
        }
        for connection in &mut self.connections {
            let MemberConnection { pipe, has_answered, watches } = connection;
            pipe.poll_frames(cx, |frame, outgoing| {
                if frame.ends_stream() {
                    let answer = if *has_answered { &self.answer.later } else { &self.answer.first };
                    answer.append(frame.stream, outgoing);
                    *has_answered = true;
                } else if frame.kind == DATA && !frame.payload.is_empty() {
                    register_watches(&frame, watches, outgoing);
                }
            });
        }
    }

    /// Number of registered watches.
    pub(crate) fn watches(&self) -> usize {
        self.connections.iter().map(|connection| connection.watches.len()).sum()
    }

    /// Sends every watch the event of a put at `revision`.
    pub(crate) fn send_events(&mut self, revision: i64) {
        let kv = KeyValue {
            key: KEY.into(),
            value: vec![b'v'; VALUE].into(),
            create_revision: 1,
            mod_revision: revision,
            version: revision,
            lease: 0,
        };
        let events = vec![Event { kv: Some(kv), ..Event::default() }];
        let mut response =
            WatchResponse { header: Some(header(revision)), events, ..WatchResponse::default() };
        for MemberConnection { pipe, watches, .. } in &mut self.connections {
            for watch in watches {
                response.watch_id = watch.id;
                append_frame(&mut pipe.outgoing, DATA, 0, watch.stream, &encode(&response.encode_to_vec()));
            }
        }
    }
}

/// Answers the creates in a DATA frame of a watch stream.
fn register_watches(frame: &Http2Frame<'_>, watches: &mut Vec<RegisteredWatch>, outgoing: &mut Vec<u8>) {
    for message in messages(frame.payload) {
        let request = WatchRequest::decode(message).expect("a WatchRequest");
        let Some(RequestUnion::CreateRequest(create)) = request.request_union else { continue };
        let on_stream = watches.iter().filter(|watch| watch.stream == frame.stream).count();
        if on_stream == 0 {
            let mut head = vec![STATUS_200];
            append_field(&mut head, FieldIndexing::NotKept, "content-type", "application/grpc");
            append_frame(outgoing, HEADERS, END_HEADERS, frame.stream, &head);
        }
        // As etcd does, the member assigns the ids 0, 1, 2 … of a stream unless the client names an id.
        let assigned = i64::try_from(on_stream).expect("few watches");
        let id = if create.watch_id == 0 { assigned } else { create.watch_id };
        watches.push(RegisteredWatch { stream: frame.stream, id });
        let created = WatchResponse {
            header: Some(header(FIRST_REVISION)),
            watch_id: id,
            created: true,
            ..WatchResponse::default()
        };
        append_frame(outgoing, DATA, 0, frame.stream, &encode(&created.encode_to_vec()));
    }
}

/// The messages of gRPC frames that begin and end in `payload`.
pub(crate) fn messages(mut payload: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (prefix, rest) = payload.split_at_checked(PREFIX)?;
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
        let (message, rest) = rest.split_at(usize::try_from(length).expect("a small message"));
        payload = rest;
        Some(message)
    })
}

/// The header of every answer.
pub(crate) fn header(revision: i64) -> ResponseHeader {
    ResponseHeader { cluster_id: CLUSTER, member_id: MEMBER, revision, raft_term: 2 }
}
