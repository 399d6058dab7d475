//! The frames of HTTP/2 in which answers come, beside etcd's: some clients rely on what etcd's server does and HTTP/2 leaves open.
//!
//! Owns: the exchanges and their client, which writes each frame itself. Invariant: what comes back through Keyward has the frames that come from
//! etcd, but for frames of the connection (SETTINGS, PING, WINDOW_UPDATE), whose times are each server's own.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use keyward::pb::etcdserverpb::{
    LeaseGrantRequest, LeaseKeepAliveRequest, PutRequest, RangeRequest, WatchCreateRequest, WatchRequest,
    watch_request::RequestUnion,
};
use keyward::rpc::frame::{PREFIX, encode};
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::harness::{
    Cluster, Options,
    binary::Version,
    every_version,
    keyward::{Keyward, Site},
    side_by_side,
};

const RANGE: &str = "/etcdserverpb.KV/Range";
const PUT: &str = "/etcdserverpb.KV/Put";
const WATCH: &str = "/etcdserverpb.Watch/Watch";
const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
/// The flag of a HEADERS frame that begins with a priority.
const WITH_PRIORITY: u8 = 0x20;
/// The window for whole answers.
const WINDOW: u32 = 1 << 24;
/// Past every timeout of etcd itself.
const LIMIT: Duration = Duration::from_secs(20);
/// The longest frame.
const LONGEST: usize = 16 * 1024;
/// Bytes of a value in three DATA frames.
const LARGE: usize = 40_000;
/// Events of a burst: more than a stream of Keyward queues.
const BURST: u32 = 200;
/// Bytes of a field's value, for large header lists.
const FIELD: usize = 1000;

/// A client on a connection of its own.
struct FrameClient(TcpStream);

/// A frame that came for a stream.
struct ReceivedFrame {
    kind: u8,
    flags: u8,
    payload: Vec<u8>,
}

impl FrameClient {
    async fn connect(address: SocketAddr) -> FrameClient {
        let tcp = TcpStream::connect(address).await.expect("a listener");
        tcp.set_nodelay(true).expect("TCP takes nodelay");
        let mut client = FrameClient(tcp);
        client.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("open");
        // The window of each stream.
        client.write(SETTINGS, 0, 0, &[&[0, 4], &WINDOW.to_be_bytes()[..]].concat()).await;
        client.write(WINDOW_UPDATE, 0, 0, &WINDOW.to_be_bytes()).await;
        client
    }

    async fn write(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.0.write_all(&frame(kind, flags, stream, payload)).await.expect("open");
    }

    /// Opens a stream with these messages in one DATA frame, if they fit.
    async fn open(&mut self, stream: u32, path: &str, messages: &[Vec<u8>], ends: bool) {
        let bytes = opening(stream, path, messages, ends);
        self.0.write_all(&bytes).await.expect("open");
    }

    /// The next frame of any stream; the end of the connection is a panic.
    async fn next(&mut self) -> (u32, ReceivedFrame) {
        self.next_or_end().await.unwrap_or_else(|end| panic!("{end}"))
    }

    /// The next frame of any stream.
    ///
    /// # Errors
    /// The connection ends: the code and the text of the GOAWAY.
    async fn next_or_end(&mut self) -> Result<(u32, ReceivedFrame), String> {
        loop {
            let mut head = [0; 9];
            let read = timeout(LIMIT, self.0.read_exact(&mut head)).await.expect("in time");
            read.map_err(|_| "closed without a GOAWAY".to_owned())?;
            let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
            timeout(LIMIT, self.0.read_exact(&mut payload)).await.expect("in time").expect("open");
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            let (kind, flags) = (head[3], head[4]);
            match stream {
                0 if kind == GOAWAY => {
                    return Err(format!("GOAWAY {} {}", payload[7], payload[8..].escape_ascii()));
                }
                0 if kind == SETTINGS && flags & ACK == 0 => self.write(SETTINGS, ACK, 0, &[]).await,
                0 => {}
                // Room for the request: each server gives its own.
                _ if kind == WINDOW_UPDATE => {}
                stream => return Ok((stream, ReceivedFrame { kind, flags, payload })),
            }
        }
    }

    /// What came for a stream until its end, in words, or how the connection ended.
    async fn outcome(&mut self, of: u32) -> String {
        let mut frames = Vec::new();
        loop {
            match self.next_or_end().await {
                Err(end) => return end,
                Ok((stream, frame)) if stream == of => {
                    let ended = frame.flags & END_STREAM != 0 || frame.kind == RST_STREAM;
                    frames.push(frame);
                    if ended {
                        return told(&frames);
                    }
                }
                Ok(_) => {}
            }
        }
    }

    /// The frames of a stream until its end, or until so many messages have come.
    async fn frames(&mut self, of: u32, messages: usize) -> Vec<ReceivedFrame> {
        let mut frames: Vec<ReceivedFrame> = Vec::new();
        loop {
            let (stream, frame) = self.next().await;
            if stream != of {
                continue;
            }
            let ended = frame.flags & END_STREAM != 0 || frame.kind == RST_STREAM;
            frames.push(frame);
            let data: Vec<u8> = data(&frames).concat();
            if ended || whole(&data) >= messages {
                return frames;
            }
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn opening(stream: u32, path: &str, messages: &[Vec<u8>], ends: bool) -> Vec<u8> {
    let mut bytes = frame(HEADERS, END_HEADERS, stream, &block(path, Some("etcd")));
    bytes.extend(body(stream, messages, ends));
    bytes
}

/// The fields of a request, each as a literal.
fn block(path: &str, authority: Option<&str>) -> Vec<u8> {
    let pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path)].into_iter();
    let fields = pseudo.chain(authority.map(|authority| (":authority", authority)));
    let fields = fields.chain([("content-type", "application/grpc"), ("te", "trailers")]);
    fields.flat_map(|(name, value)| literal(name, value)).collect()
}

fn literal(name: &str, value: &str) -> Vec<u8> {
    // An integer with a prefix of seven bits (RFC 7541, section 5.1).
    let length = |length: usize| match u8::try_from(length) {
        Ok(length @ ..127) => vec![length],
        _ => {
            let rest = length - 127;
            vec![
                127,
                u8::try_from(rest % 128).expect("seven bits") | 128,
                u8::try_from(rest / 128).expect("short"),
            ]
        }
    };
    [vec![0], length(name.len()), name.into(), length(value.len()), value.into()].concat()
}

/// The messages of a request in DATA frames.
fn body(stream: u32, messages: &[Vec<u8>], ends: bool) -> Vec<u8> {
    let body: Vec<u8> = messages.iter().flat_map(|message| encode(message)).collect();
    let mut bytes = Vec::new();
    let mut parts = body.chunks(LONGEST).peekable();
    while let Some(part) = parts.next() {
        let flags = if ends && parts.peek().is_none() { END_STREAM } else { 0 };
        bytes.extend(frame(DATA, flags, stream, part));
    }
    bytes
}

fn data(frames: &[ReceivedFrame]) -> Vec<Vec<u8>> {
    frames.iter().filter(|frame| frame.kind == DATA).map(|frame| frame.payload.clone()).collect()
}

/// The ends of the whole messages in these bytes.
fn ends(bytes: &[u8]) -> Vec<usize> {
    let (mut ends, mut at) = (Vec::new(), 0);
    while let Some(length) = bytes.get(at + 1..at + PREFIX) {
        let length = u32::from_be_bytes(length.try_into().expect("four")) as usize;
        at += PREFIX + length;
        if at > bytes.len() {
            break;
        }
        ends.push(at);
    }
    ends
}

fn whole(bytes: &[u8]) -> usize {
    ends(bytes).len()
}

/// The frames in words: of each DATA frame its length, if it is the longest, and how many messages begin within it and not at its start. Other
/// lengths differ with the digits of a revision.
fn told(frames: &[ReceivedFrame]) -> String {
    let ends = ends(&data(frames).concat());
    let (mut text, mut at) = (String::new(), 0);
    for frame in frames {
        let last = if frame.flags & END_STREAM == 0 { "" } else { " END_STREAM" };
        let length = frame.payload.len();
        match frame.kind {
            DATA => {
                let within = ends.iter().filter(|end| (at + 1..at + length).contains(*end)).count();
                at += length;
                let length = if length == LONGEST { format!(" {length}") } else { String::new() };
                let within = if within == 0 { String::new() } else { format!(", {within} begin within") };
                write!(text, "DATA{length}{within}{last}; ")
            }
            HEADERS => write!(text, "HEADERS{last}; "),
            RST_STREAM => write!(text, "RST_STREAM {}; ", frame.payload.escape_ascii()),
            kind => write!(text, "kind {kind}{last}; "),
        }
        .expect("a String takes all");
    }
    text.truncate(text.trim_end_matches("; ").len());
    text
}

fn put(key: &str, value: &[u8]) -> Vec<u8> {
    PutRequest { key: key.to_owned().into(), value: value.to_vec().into(), ..PutRequest::default() }
        .encode_to_vec()
}

fn range(key: &str) -> Vec<u8> {
    RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() }.encode_to_vec()
}

fn watch(prefix: &str, end: &str) -> Vec<u8> {
    let create = WatchCreateRequest {
        key: prefix.to_owned().into(),
        range_end: end.to_owned().into(),
        ..WatchCreateRequest::default()
    };
    WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }.encode_to_vec()
}

/// The exchanges at one server, as a name and what came. `side` keeps the keys of the two servers of one cluster apart.
async fn exchanges(address: SocketAddr, side: &str) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    let large = format!("{side}/large");
    for (name, path, message) in [
        ("a put", PUT, put(&format!("{side}/small"), b"v")),
        ("a put refused", PUT, put("", b"v")),
        ("a method that is unknown", "/etcdserverpb.KV/None", Vec::new()),
        ("a put of 40 kB", PUT, put(&large, &[7; LARGE])),
        ("a range of 40 kB", RANGE, range(&large)),
    ] {
        let mut client = FrameClient::connect(address).await;
        client.open(1, path, &[message], true).await;
        all.push((name, told(&client.frames(1, usize::MAX).await)));
    }

    let mut client = FrameClient::connect(address).await;
    client.open(1, WATCH, &[watch(&format!("{side}/watched/"), &format!("{side}/watched0"))], false).await;
    all.push(("a watch is created", told(&client.frames(1, 1).await)));
    let puts: Vec<u8> = (0..BURST)
        .flat_map(|number| {
            let message = put(&format!("{side}/watched/{number}"), b"v");
            opening(3 + 2 * number, PUT, &[message], true)
        })
        .collect();
    client.0.write_all(&puts).await.expect("open");
    let (mut events, mut within) = (0, 0);
    while events < BURST as usize {
        let (stream, frame) = client.next().await;
        if stream == 1 {
            let whole = ends(&frame.payload);
            assert_eq!(whole.last(), Some(&frame.payload.len()), "a small message is in one frame");
            within += whole.len() - 1;
            events += watch_events(&frame.payload);
        }
    }
    all.push(("a burst of events", format!("{within} messages begin within a DATA frame")));

    let mut client = FrameClient::connect(address).await;
    let id = if side == "etcd" { 7001 } else { 7002 };
    client.open(1, GRANT, &[LeaseGrantRequest { ttl: 600, id }.encode_to_vec()], true).await;
    all.push(("a grant", told(&client.frames(1, usize::MAX).await)));
    let renewal = LeaseKeepAliveRequest { id }.encode_to_vec();
    client.open(3, KEEP_ALIVE, &[renewal.clone(), renewal.clone(), renewal], false).await;
    all.push(("three renewals in a DATA frame", told(&client.frames(3, 3).await)));
    client.write(DATA, END_STREAM, 3, &[]).await;
    all.push(("the end of a renewal's stream", told(&client.frames(3, usize::MAX).await)));
    all
}

/// The events in the whole messages of a DATA frame.
fn watch_events(payload: &[u8]) -> usize {
    let mut begin = 0;
    let mut events = 0;
    for end in ends(payload) {
        let message = keyward::pb::etcdserverpb::WatchResponse::decode(&payload[begin + PREFIX..end])
            .expect("an answer");
        events += message.events.len();
        begin = end;
    }
    events
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_come_in_the_frames_in_which_etcd_sends_them() {
    let of_version = async |version: &Version| {
        let cluster = Cluster::start(version, Options::default()).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let directly = exchanges(cluster.address(0), "etcd").await;
        let through = exchanges(keyward.site().listen, "keyward").await;
        let mut faults = String::new();
        println!("etcd {version}");
        for ((name, theirs), (_, ours)) in directly.iter().zip(&through) {
            println!("  {name:<32} {theirs}");
            if theirs != ours {
                println!("  {:<32} {ours}", "through Keyward");
                writeln!(faults, "etcd {version}: {name}: {theirs}, through Keyward {ours}")
                    .expect("a String takes all");
            }
        }
        faults
    };
    let faults = side_by_side(&every_version(), of_version).await.concat();
    assert!(faults.is_empty(), "{faults}");
}

/// A request with further fields of so many bytes in all, in as many frames as they need.
fn opening_with_fields(stream: u32, bytes: usize) -> Vec<u8> {
    let value = "v".repeat(FIELD);
    let mut block = block(RANGE, Some("etcd"));
    (0..bytes / FIELD).for_each(|_| block.extend(literal("x-more", &value)));
    let count = block.chunks(LONGEST).count();
    let mut frames = Vec::new();
    for (number, part) in block.chunks(LONGEST).enumerate() {
        let kind = if number == 0 { HEADERS } else { CONTINUATION };
        let flags = if number + 1 == count { END_HEADERS } else { 0 };
        frames.extend(frame(kind, flags, stream, part));
    }
    frames.extend(body(stream, &[range("k")], true));
    frames
}

/// A request that no client library writes.
struct OddRequest {
    name: &'static str,
    /// Whether it is the first one of its connection.
    is_first: bool,
    bytes: Vec<u8>,
    /// What becomes of it at etcd's plain port.
    at_etcd: fn(&Version) -> &'static str,
    /// The same through Keyward.
    here: &'static str,
}

const SERVED: &str = "HEADERS; DATA; HEADERS END_STREAM";
/// Trailers alone, or an answer of HTTP without a body.
const REFUSED: &str = "HEADERS END_STREAM";
const RESET: &str = "RST_STREAM \\x00\\x00\\x00\\x01";
const LOST: &str = "GOAWAY 11 too_many_continuations";

fn odd_requests() -> Vec<OddRequest> {
    let request = |authority: Option<&str>| {
        [frame(HEADERS, END_HEADERS, 3, &block(RANGE, authority)), body(3, &[range("k")], true)].concat()
    };
    let itself = [&3_u32.to_be_bytes()[..], &[15]].concat();
    let with_priority = [&itself[..], &block(RANGE, Some("etcd"))].concat();
    let head = frame(HEADERS, END_HEADERS | WITH_PRIORITY, 3, &with_priority);
    let depending = [head, body(3, &[range("k")], true)].concat();
    let priority = [frame(PRIORITY, 0, 3, &itself), request(Some("etcd"))].concat();
    let odd = |name, bytes, here| OddRequest { name, is_first: false, bytes, at_etcd: |_| SERVED, here };
    let first = |name, bytes, here| OddRequest { is_first: true, ..odd(name, bytes, here) };
    let newer_refuse: fn(&Version) -> &'static str =
        |version| if version.at_least("3.5.35") { REFUSED } else { SERVED };
    vec![
        first("an empty :authority from the first request on", request(Some("")), SERVED),
        odd("an empty :authority behind an ordinary one", request(Some("")), RESET),
        OddRequest { at_etcd: newer_refuse, ..odd("no :authority", request(None), SERVED) },
        odd("a PRIORITY frame of a stream on itself", priority, RESET),
        odd("a request that depends on itself", depending, RESET),
        odd("a header list of 60 kB", opening_with_fields(3, 60_000), SERVED),
        odd("a header list of 80 kB", opening_with_fields(3, 80_000), REFUSED),
        odd("a header list of 140 kB", opening_with_fields(3, 140_000), LOST),
    ]
}

/// What became of an odd request, in words. An ordinary one behind it on the connection is served, or the connection has ended.
async fn odd_exchange(address: SocketAddr, odd: &OddRequest) -> String {
    let mut client = FrameClient::connect(address).await;
    if !odd.is_first {
        client.open(1, RANGE, &[range("k")], true).await;
        assert_eq!(client.outcome(1).await, SERVED);
    }
    client.0.write_all(&odd.bytes).await.expect("open");
    let outcome = client.outcome(3).await;
    if outcome != LOST {
        client.open(5, RANGE, &[range("k")], true).await;
        assert_eq!(client.outcome(5).await, SERVED, "behind {}: {outcome}", odd.name);
    }
    outcome
}

/// `docs/differences.md` has the rows that differ.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_no_client_library_writes_beside_etcd() {
    let of_version = async |version: &Version| {
        let cluster = Cluster::start(version, Options::default()).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let mut faults = String::new();
        for odd in odd_requests() {
            let came = [
                odd_exchange(cluster.address(0), &odd).await,
                odd_exchange(keyward.site().listen, &odd).await,
            ];
            println!("etcd {version}: {}: {}, through Keyward {}", odd.name, came[0], came[1]);
            let expected = [(odd.at_etcd)(version), odd.here];
            if came != expected {
                writeln!(faults, "etcd {version}: {}: {came:?}, not {expected:?}", odd.name)
                    .expect("a String takes all");
            }
        }
        faults
    };
    let faults = side_by_side(&every_version(), of_version).await.concat();
    assert!(faults.is_empty(), "{faults}");
}
