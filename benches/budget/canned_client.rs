//! A client of one connection that sends the same call again and again, and checks every answer.
//!
//! Owns: the requests' bytes, with the header fields of etcd's Go client. Must not know: if Keyward or the member
//! answers.

use std::collections::BTreeMap;
use std::task::Context;

use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    AuthenticateRequest, AuthenticateResponse, WatchCreateRequest, WatchRequest, WatchResponse,
};
use keyward::rpc::frame::encode;
use prost::Message as _;
use tokio::io::DuplexStream;

use crate::canned_member::messages;
use crate::http2_pipe::{
    DATA, END_HEADERS, END_STREAM, FieldIndexing, FrameTemplate, HEADERS, Http2Frame, Http2Pipe,
    append_field, append_frame, append_kept,
};
use crate::workload::{KEY, PASSWORD, USER};

/// `:method: POST` and `:scheme: http`, from HTTP/2's static table.
const POST_HTTP: [u8; 2] = [0x83, 0x86];
/// The client's time limit: long enough for the slowest machine, short enough to be a limit.
const TIME_LIMIT: &str = "99999m";

pub(crate) struct CannedClient {
    pipe: Http2Pipe,
    next_stream: u32,
    call: UnaryCall,
    received: ReceivedAnswers,
}

/// A unary call.
#[derive(Default)]
struct UnaryCall {
    first: FrameTemplate,
    later: FrameTemplate,
    was_sent: bool,
    /// The gRPC frame of the answer; empty if any answer is right.
    answer: Vec<u8>,
}

/// Answers since the last call of [`CannedClient::begin`].
#[derive(Default)]
struct ReceivedAnswers {
    ended: usize,
    messages: usize,
    last: Vec<u8>,
    /// The answers of several DATA frames, by stream: the bytes received so far.
    in_parts: BTreeMap<u32, usize>,
}

impl ReceivedAnswers {
    fn take_frame(&mut self, frame: &Http2Frame<'_>, expected: &[u8]) {
        if frame.kind == DATA && !frame.payload.is_empty() {
            self.take_data(frame, expected);
        }
        if frame.ends_stream() {
            self.ended += 1;
            assert!(!self.in_parts.contains_key(&frame.stream), "an answer ends too early");
        }
    }

    fn take_data(&mut self, frame: &Http2Frame<'_>, expected: &[u8]) {
        if frame.payload.len() < expected.len() {
            return self.take_part(frame, expected);
        }
        assert!(expected.is_empty() || frame.payload == expected, "another answer: {:?}", frame.payload);
        for message in messages(frame.payload) {
            self.messages += 1;
            self.last.clear();
            self.last.extend_from_slice(message);
        }
    }

    fn take_part(&mut self, frame: &Http2Frame<'_>, expected: &[u8]) {
        let begin = self.in_parts.remove(&frame.stream).unwrap_or_default();
        let end = begin + frame.payload.len();
        assert!(expected.get(begin..end) == Some(frame.payload), "another answer, from byte {begin} on");
        if end == expected.len() {
            self.messages += 1;
        } else {
            self.in_parts.insert(frame.stream, end);
        }
    }
}

/// The header fields of a call by etcd's Go client, as header blocks: the first in full, the later with the fields
/// kept by the receiver.
fn header_blocks(path: &str, token: &str, time_limit: Option<&str>) -> [Vec<u8>; 2] {
    let fields = [
        (":path", path),
        (":authority", "etcd.test:2379"),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-go/1.71.1"),
        ("te", "trailers"),
        ("client-api-version", "3.6.16"),
        ("hasleader", "true"),
        ("token", token),
    ];
    let (mut first, mut later) = (POST_HTTP.to_vec(), POST_HTTP.to_vec());
    for (name, value) in fields {
        append_field(&mut first, FieldIndexing::Kept, name, value);
    }
    append_kept(&mut later, fields.len());
    if let Some(limit) = time_limit {
        for block in [&mut first, &mut later] {
            append_field(block, FieldIndexing::NotKept, "grpc-timeout", limit);
        }
    }
    [first, later]
}

impl CannedClient {
    pub(crate) fn over(stream: DuplexStream) -> Self {
        let pipe = Http2Pipe::of_client(stream);
        Self { pipe, next_stream: 1, call: UnaryCall::default(), received: ReceivedAnswers::default() }
    }

    /// Sends a login. The answer is [`Self::token`].
    pub(crate) fn log_in(&mut self) {
        let login = AuthenticateRequest { name: USER.into(), password: PASSWORD.into() };
        let mut head = POST_HTTP.to_vec();
        let fields = [
            (":path", "/etcdserverpb.Auth/Authenticate"),
            (":authority", "etcd.test:2379"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ];
        for (name, value) in fields {
            append_field(&mut head, FieldIndexing::NotKept, name, value);
        }
        let (stream, outgoing) = (self.next_stream, &mut self.pipe.outgoing);
        append_frame(outgoing, HEADERS, END_HEADERS, stream, &head);
        append_frame(outgoing, DATA, END_STREAM, stream, &encode(&login.encode_to_vec()));
        self.next_stream += 2;
    }

    /// The token in the answer to the login.
    pub(crate) fn token(&self) -> String {
        AuthenticateResponse::decode(&*self.received.last).expect("a login's answer").token
    }

    /// The calls from now on.
    pub(crate) fn set_call(&mut self, path: &str, token: &str, message: &[u8], answer: &[u8]) {
        let template = |head: &Vec<u8>| {
            FrameTemplate::default().with(HEADERS, END_HEADERS, head).with(DATA, END_STREAM, &encode(message))
        };
        let [first, later] = header_blocks(path, token, Some(TIME_LIMIT)).each_ref().map(template);
        self.call = UnaryCall { first, later, was_sent: false, answer: encode(answer).to_vec() };
    }

    /// Begins to count answers.
    pub(crate) fn begin(&mut self) {
        (self.received.ended, self.received.messages) = (0, 0);
    }

    /// Sends a unary call.
    pub(crate) fn send_call(&mut self) {
        let UnaryCall { first, later, was_sent, .. } = &mut self.call;
        let template = if *was_sent { later } else { first };
        template.append(self.next_stream, &mut self.pipe.outgoing);
        (*was_sent, self.next_stream) = (true, self.next_stream + 2);
    }

    /// Opens `streams` watch streams, each with `watches` watches of the key from now on.
    pub(crate) fn open_watches(&mut self, token: &str, streams: usize, watches: usize) {
        let create = WatchCreateRequest { key: KEY.into(), ..WatchCreateRequest::default() };
        let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let create = encode(&create.encode_to_vec());
        let [first, later] = header_blocks("/etcdserverpb.Watch/Watch", token, None);
        for stream in 0..streams {
            let (head, outgoing) = (if stream == 0 { &first } else { &later }, &mut self.pipe.outgoing);
            append_frame(outgoing, HEADERS, END_HEADERS, self.next_stream, head);
            for _ in 0..watches {
                append_frame(outgoing, DATA, 0, self.next_stream, &create);
            }
            self.next_stream += 2;
        }
    }

    /// Receives; the numbers of messages and of ended streams since [`Self::begin`].
    pub(crate) fn poll_answers(&mut self, cx: &mut Context<'_>) -> (usize, usize) {
        let Self { pipe, call, received, .. } = self;
        pipe.poll_frames(cx, |frame, _| received.take_frame(&frame, &call.answer));
        (received.messages, received.ended)
    }

    /// The last message, which is of a watch.
    pub(crate) fn last_watch_response(&self) -> WatchResponse {
        WatchResponse::decode(&*self.received.last).expect("a WatchResponse")
    }
}
