//! The authority shim: what HTTP/2's library reads behind it is what it would read without it, if the authority were one; and any
//! bytes at all pass, are written anew, or end the connection.

use std::collections::VecDeque;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures_util::FutureExt as _;
use h2::{Reason, RecvStream};
use http::{HeaderMap, Request};
use keyward::downstream::odd_authority::{
    AUTHORITY, AuthorityShim, FRAMES, LARGEST, ShimState, TABLE, WAITING,
};
use tokio::io::AsyncReadExt as _;

use crate::choices::{Choices, for_any_bytes};

/// For fuzzers.
pub(crate) const TARGETS: [fn(&[u8]); 3] = [
    the_library_reads_behind_it_what_it_reads_without_it,
    what_the_library_writes_is_read_alike,
    anything_passes_or_is_written_anew_or_ends,
];

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const GOOD: &str = "etcd.example.com:2379";
const ODD: [&str; 4] =
    ["#initially=[127.0.0.1:2379]", "/run/keyward.sock", "run%2Fkeyward.sock", "#initially=[a:1;b:2;c:3]"];
const LIST: usize = 64 * 1024;
/// No frame of a block is longer.
const FRAME: usize = 16 * 1024 + 9;
/// What the offence is that ends a connection.
const OFFENCE: [u8; 9] = [0; 9];

/// A request as the library hands it on, without its authority.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    method: String,
    path: Option<String>,
    headers: Vec<(String, Vec<u8>, bool)>,
    body: Vec<u8>,
    trailers: Option<Vec<(String, Vec<u8>, bool)>>,
    ended: bool,
}

/// What the library makes of a connection: its requests, their authorities, and why it ended.
#[derive(Debug, PartialEq, Eq)]
struct Heard {
    requests: Vec<Seen>,
    authorities: Vec<Option<String>>,
    ended: Option<Reason>,
}

fn listed(headers: &HeaderMap) -> Vec<(String, Vec<u8>, bool)> {
    let told = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
        (name.to_string(), value.as_bytes().to_vec(), value.is_sensitive())
    };
    headers.iter().map(told).collect()
}

/// Everything that can be heard now: the other side stays open and says no more.
fn heard(bytes: &[u8]) -> Heard {
    let mut cx = Context::from_waker(Waker::noop());
    let (_open, silence) = tokio::io::duplex(1);
    let io = tokio::io::join(bytes.chain(silence), tokio::io::sink());
    let mut builder = h2::server::Builder::new();
    builder.max_header_list_size(u32::try_from(LIST).expect("32 bits"));
    let mut begun = pin!(builder.handshake::<_, Bytes>(io));
    let mut connection = match begun.as_mut().poll(&mut cx) {
        Poll::Ready(Ok(connection)) => connection,
        Poll::Ready(Err(error)) => {
            return Heard { requests: Vec::new(), authorities: Vec::new(), ended: error.reason() };
        }
        Poll::Pending => return Heard { requests: Vec::new(), authorities: Vec::new(), ended: None },
    };
    let (mut taken, mut ended) = (Vec::new(), None);
    while let Poll::Ready(Some(accepted)) = connection.poll_accept(&mut cx) {
        match accepted {
            Ok((request, respond)) => taken.push((request, respond)),
            Err(error) => {
                ended = error.reason();
                break;
            }
        }
    }
    let authority = |request: &Request<RecvStream>| request.uri().authority().map(ToString::to_string);
    let authorities = taken.iter().map(|(request, _)| authority(request)).collect();
    let requests = taken.iter_mut().map(|(request, _)| seen(request, &mut cx)).collect();
    Heard { requests, authorities, ended }
}

fn seen(request: &mut Request<RecvStream>, cx: &mut Context<'_>) -> Seen {
    let (method, headers) = (request.method().to_string(), listed(request.headers()));
    let path = request.uri().path_and_query().map(ToString::to_string);
    let (stream, mut body) = (request.body_mut(), Vec::new());
    let ended = loop {
        match stream.poll_data(cx) {
            Poll::Ready(Some(Ok(data))) => body.extend_from_slice(&data),
            Poll::Ready(Some(Err(_))) | Poll::Pending => break false,
            Poll::Ready(None) => break true,
        }
    };
    let trailers = match stream.poll_trailers(cx) {
        Poll::Ready(Ok(Some(trailers))) if ended => Some(listed(&trailers)),
        _ => None,
    };
    Seen { method, path, headers, body, trailers, ended }
}

/// A client's table, and how it says fields by it: in any way that RFC 7541 allows.
struct Encoder {
    table: VecDeque<(Vec<u8>, Vec<u8>)>,
    size: usize,
}

impl Encoder {
    fn new() -> Self {
        Self { table: VecDeque::new(), size: TABLE as usize }
    }

    fn integer(first: u8, prefix: u32, number: usize, out: &mut Vec<u8>) {
        let most = (1 << prefix) - 1;
        let small = |number: usize| u8::try_from(number).expect("small");
        if number < most {
            return out.push(first | small(number));
        }
        out.push(first | small(most));
        let mut left = number - most;
        while left >= 128 {
            out.push(small(left % 128) | 128);
            left /= 128;
        }
        out.push(small(left));
    }

    fn string(text: &[u8], out: &mut Vec<u8>) {
        Self::integer(0, 7, text.len(), out);
        out.extend_from_slice(text);
    }

    fn shrink(&mut self) {
        let held = |table: &VecDeque<(Vec<u8>, Vec<u8>)>| -> usize {
            table.iter().map(|(name, value)| name.len() + value.len() + 32).sum()
        };
        while held(&self.table) > self.size {
            self.table.pop_back();
        }
    }

    /// Another size of the table, sometimes.
    fn resize(&mut self, choices: &mut Choices<'_>, out: &mut Vec<u8>) {
        if choices.one_in(5) {
            self.size = [0, 40, 300, TABLE as usize][choices.below(4)];
            Self::integer(0x20, 5, self.size, out);
            self.shrink();
        }
    }

    fn field(&mut self, name: &str, value: &[u8], choices: &mut Choices<'_>, out: &mut Vec<u8>) {
        let place = |found: usize| 62 + found;
        let whole = self.table.iter().position(|entry| entry.0 == name.as_bytes() && entry.1 == value);
        let named = self.table.iter().position(|entry| entry.0 == name.as_bytes());
        // Both always, or the rest would mean something else where the table is another.
        let (way, by_index) = (choices.below(4), choices.flag());
        if let (0, Some(found)) = (way, whole) {
            return Self::integer(0x80, 7, place(found), out);
        }
        let (first, prefix) = [(0x40, 6), (0x40, 6), (0, 4), (0x10, 4)][way];
        let known = match name {
            ":authority" => Some(1),
            ":path" => Some(4),
            _ => None,
        };
        let index = named.map(place).filter(|_| by_index).or(known);
        Self::integer(first, prefix, index.unwrap_or(0), out);
        if index.is_none() {
            Self::string(name.as_bytes(), out);
        }
        Self::string(value, out);
        if first == 0x40 {
            self.table.push_front((name.as_bytes().to_vec(), value.to_vec()));
            self.shrink();
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&u32::try_from(payload.len()).expect("short").to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// A block in one HEADERS frame and up to three more, padded, with a priority, or not.
fn headers(block: &[u8], last: bool, stream: u32, choices: &mut Choices<'_>, out: &mut Vec<u8>) {
    let mut cuts: Vec<usize> = (0..choices.below(4)).map(|_| choices.below(64).min(block.len())).collect();
    cuts.sort_unstable();
    let (mut flags, mut payload) = (u8::from(last), Vec::new());
    let padding = choices.one_in(3).then(|| choices.byte());
    if let Some(padding) = padding {
        flags |= 0x8;
        payload.push(padding);
    }
    if choices.one_in(3) {
        flags |= 0x20;
        payload.extend_from_slice(&[0, 0, 0, 0, choices.byte()]);
    }
    let first = cuts.first().copied().unwrap_or(block.len());
    payload.extend_from_slice(&block[..first]);
    payload.resize(payload.len() + usize::from(padding.unwrap_or(0)), 7);
    frame(1, flags | if cuts.is_empty() { 4 } else { 0 }, stream, &payload, out);
    for (at, cut) in cuts.iter().enumerate() {
        let next = cuts.get(at + 1);
        let part = &block[*cut..next.copied().unwrap_or(block.len())];
        frame(9, if next.is_none() { 4 } else { 0 }, stream, part, out);
    }
}

/// Fields that any request may have, some again and again.
fn fields(choices: &mut Choices<'_>, encoder: &mut Encoder, block: &mut Vec<u8>) {
    for _ in 0..choices.below(6) {
        let name = ["token", "te", "grpc-timeout", "user-agent", "x", "hasleader"][choices.below(6)];
        let value: Vec<u8> = choices.bytes(12).iter().map(|byte| b' ' + byte % 95).collect();
        let value: &[u8] = if name == "te" { b"trailers" } else { value.trim_ascii() };
        encoder.field(name, value, choices, block);
    }
}

/// What a client may say, with this authority in each request.
fn conversation(input: &[u8], authority: &str) -> Vec<u8> {
    let (mut choices, mut encoder) = (Choices::new(input), Encoder::new());
    let mut out = PREFACE.to_vec();
    frame(4, 0, 0, &[], &mut out);
    for request in 0..=choices.below(4) {
        let stream = u32::try_from(2 * request + 1).expect("few");
        let mut block = Vec::new();
        encoder.resize(&mut choices, &mut block);
        block.extend_from_slice(&[0x83, 0x86]);
        let path = ["/etcdserverpb.KV/Range", "/etcdserverpb.KV/Put"][choices.below(2)];
        encoder.field(":path", path.as_bytes(), &mut choices, &mut block);
        encoder.field(":authority", authority.as_bytes(), &mut choices, &mut block);
        fields(&mut choices, &mut encoder, &mut block);
        let (body, trailers) = (choices.flag(), choices.flag());
        headers(&block, !body && !trailers, stream, &mut choices, &mut out);
        if choices.one_in(3) {
            frame(6, 0, 0, &[1; 8], &mut out);
        }
        if body {
            frame(0, u8::from(!trailers), stream, choices.bytes(20), &mut out);
        }
        if trailers {
            let mut block = Vec::new();
            encoder.resize(&mut choices, &mut block);
            fields(&mut choices, &mut encoder, &mut block);
            headers(&block, true, stream, &mut choices, &mut out);
        }
    }
    out
}

/// Everything that comes out where `bytes` come in pieces.
fn through(shim: &mut AuthorityShim, bytes: &[u8], pieces: &mut Choices<'_>) -> Vec<u8> {
    let (mut made, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let length = if pieces.is_empty() { rest.len() } else { 1 + pieces.below(200) };
        let (piece, after) = rest.split_at(length.min(rest.len()));
        let (piece, after) = if piece.len() > 8192 { rest.split_at(8192) } else { (piece, after) };
        rest = after;
        shim.push(piece);
        loop {
            // A block as it came, twice while it may pass; what was made of one; and a piece.
            assert!(
                shim.buffered_bytes() <= 2 * (LARGEST + 9 * FRAMES) + FRAME + 8192 + WAITING + LIST + 64,
                "{}",
                shim.buffered_bytes()
            );
            let some = shim.output().split();
            if some.is_empty() {
                break;
            }
            made.extend_from_slice(&some);
        }
    }
    made
}

fn the_library_reads_behind_it_what_it_reads_without_it(input: &[u8]) {
    let (cuts, said) = input.split_at(input.len().min(12));
    let odd = ODD[usize::from(cuts.first().copied().unwrap_or(0)) % ODD.len()];
    let good = conversation(said, GOOD);
    let plain = heard(&good);
    assert!(plain.ended.is_none() && !plain.requests.is_empty(), "{plain:?}");

    let mut shim = AuthorityShim::new(LIST);
    assert_eq!(through(&mut shim, &good, &mut Choices::new(cuts)), good);
    assert_eq!(shim.course(), ShimState::Ordinary);

    let wrong = conversation(said, odd);
    assert_eq!(heard(&wrong).requests.len(), 0, "or there were nothing to do");
    for (mut shim, bytes) in [(AuthorityShim::odd(LIST), &good), (AuthorityShim::new(LIST), &wrong)] {
        let made = through(&mut shim, bytes, &mut Choices::new(cuts));
        assert_eq!((shim.course(), shim.buffered_bytes()), (ShimState::Odd, 0));
        let behind = heard(&made);
        assert_eq!((&behind.requests, behind.ended), (&plain.requests, None));
        assert!(behind.authorities.iter().all(|authority| authority.as_deref() == Some(AUTHORITY)));
    }
}

/// With Huffman's code, which the library's own client writes.
fn what_the_library_writes_is_read_alike(input: &[u8]) {
    let mut choices = Choices::new(input);
    let mut cx = Context::from_waker(Waker::noop());
    let (_open, silence) = tokio::io::duplex(1);
    let (near, mut far) = tokio::io::duplex(1 << 20);
    let begun = h2::client::handshake(tokio::io::join(silence, near)).now_or_never();
    let Some(Ok((mut send, mut connection))) = begun else { panic!("the preface does not wait") };
    let mut streams = Vec::new();
    for _ in 0..=choices.below(4) {
        let mut request = Request::post(format!("http://{GOOD}/a.B/C")).body(()).expect("a request");
        for _ in 0..choices.below(5) {
            let name = ["token", "x", "y"][choices.below(3)];
            let Ok(mut value) = http::HeaderValue::from_bytes(choices.bytes(40)) else { continue };
            value.set_sensitive(choices.flag());
            request.headers_mut().append(name, value);
        }
        streams.push(send.send_request(request, true).expect("sent"));
        assert!(connection.poll_unpin(&mut cx).is_pending());
    }
    let mut bytes = vec![0; 1 << 20];
    let mut read = tokio::io::ReadBuf::new(&mut bytes);
    while tokio::io::AsyncRead::poll_read(pin!(&mut far), &mut cx, &mut read).is_ready() {}
    let plain = heard(read.filled());
    assert_eq!(plain.requests.len(), streams.len());
    let mut shim = AuthorityShim::odd(LIST);
    let made = through(&mut shim, read.filled(), &mut choices);
    assert_eq!(shim.course(), ShimState::Odd);
    assert_eq!(heard(&made).requests, plain.requests);
}

/// Garbage, and conversations with some bytes changed.
fn anything_passes_or_is_written_anew_or_ends(input: &[u8]) {
    let mut choices = Choices::new(input);
    let authority = if choices.flag() { ODD[choices.below(ODD.len())] } else { GOOD };
    let changes = choices.below(5);
    let changes: Vec<(usize, u8)> = (0..changes).map(|_| (choices.below(256), choices.byte())).collect();
    let garbage = choices.one_in(4);
    let mut bytes = if garbage { PREFACE.to_vec() } else { conversation(choices.rest(), authority) };
    if garbage {
        bytes.extend_from_slice(choices.rest());
    }
    for (at, byte) in changes {
        let length = bytes.len();
        if let Some(changed) = bytes.get_mut((PREFACE.len() + at) % length) {
            *changed = byte;
        }
    }
    let mut shim = AuthorityShim::new(LIST);
    let made = through(&mut shim, &bytes, &mut Choices::new(&input[..input.len().min(9)]));
    let said = match shim.course() {
        ShimState::Undecided => {
            return assert!(bytes.starts_with(&made) && bytes.len() - made.len() <= shim.buffered_bytes());
        }
        ShimState::Ordinary => return assert_eq!(made, bytes),
        ShimState::Odd => &made[..],
        ShimState::Refused(_) => made.strip_suffix(&OFFENCE).expect("an end"),
    };
    // What was written is its own form: nothing is left to be changed.
    let mut again = AuthorityShim::odd(LIST);
    assert_eq!(through(&mut again, said, &mut Choices::new(&[])), said);
    assert_eq!(again.course(), ShimState::Odd);
}

#[test]
fn a_connection_means_the_same_behind_the_shim() {
    for_any_bytes(300, the_library_reads_behind_it_what_it_reads_without_it);
}

#[test]
fn huffman_code_means_the_same_behind_the_shim() {
    for_any_bytes(200, what_the_library_writes_is_read_alike);
}

#[test]
fn any_bytes_pass_or_are_written_anew_or_end_the_connection() {
    for_any_bytes(300, anything_passes_or_is_written_anew_or_ends);
}
