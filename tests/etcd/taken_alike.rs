//! Requests that etcd takes although no client of today writes them: Txns nested as deep as etcd allows, and varints that are longer than
//! they need to be. Beside a member: the same code, the same text, the same effect. And HTTP/1, which etcd answers and Keyward does
//! not: an operator sees who still speaks it.

use std::net::SocketAddr;
use std::time::Duration;

use keyward::pb::etcdserverpb::{PutRequest, RangeRequest, RangeResponse};
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Cluster, Options, versions, wait};
use crate::raw::{Answer, Call, Endpoint};

const PUT: &str = "/etcdserverpb.KV/Put";
const RANGE: &str = "/etcdserverpb.KV/Range";
const TXN: &str = "/etcdserverpb.KV/Txn";
/// etcd's `--max-txn-ops` by default; each level of a nested Txn uses one up.
const DEEPEST: usize = 128;
const LIMIT: Duration = Duration::from_secs(10);

struct Scene {
    version: Version,
    cluster: Cluster,
    keyward: Keyward,
    direct: Endpoint,
    through: Endpoint,
}

impl Scene {
    async fn start(version: Version) -> Scene {
        let cluster = Cluster::start(&version, Options::default()).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let (direct, through) = (Endpoint::plain(cluster.address(0)), Endpoint::plain(keyward.site().listen));
        Scene { version, cluster, keyward, direct, through }
    }

    /// The outcome of this call, which is the same both ways; `key` is the key that `call` is about.
    async fn alike(&self, what: &str, call: impl Fn(&str) -> Call) -> Option<u32> {
        let direct = told(&self.direct.call(&call(&format!("{what}/direct"))).await);
        let through = told(&self.through.call(&call(&format!("{what}/through"))).await);
        println!("{}: {what}: directly {direct:?}, through Keyward {through:?}", self.version);
        assert_eq!(through, direct, "{}: {what}", self.version);
        for way in ["direct", "through"] {
            let is_there = self.value(&format!("{what}/{way}")).await.is_some_and(|value| value == "v");
            assert_eq!(is_there, direct.0 == Some(0), "{}: {what}/{way}", self.version);
        }
        direct.0
    }

    /// What the member has at this key.
    async fn value(&self, key: &str) -> Option<bytes::Bytes> {
        let range = RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() };
        let answer = self.direct.call(&Call::unary(RANGE, &range.encode_to_vec())).await;
        let answer = RangeResponse::decode(answer.messages().remove(0)).expect("an answer");
        answer.kvs.into_iter().next().map(|kv| kv.value)
    }
}

fn told(answer: &Answer) -> (Option<u32>, String) {
    (answer.code(), answer.message())
}

fn field(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    let mut length = body.len();
    while length >= 0x80 {
        out.push(length.to_le_bytes()[0] | 0x80);
        length >>= 7;
    }
    out.push(length.to_le_bytes()[0]);
    out.extend_from_slice(body);
    out
}

/// A put within so many Txns.
fn nested_put(depth: usize, key: &str) -> Call {
    let put = PutRequest { key: key.to_owned().into(), value: "v".into(), ..PutRequest::default() };
    // RequestOp.request_put, then per level TxnRequest.success and RequestOp.request_txn.
    let innermost = field(2 << 3 | 2, &field(2 << 3 | 2, &put.encode_to_vec()));
    let txn = (1..depth).fold(innermost, |inner, _| field(2 << 3 | 2, &field(4 << 3 | 2, &inner)));
    Call::unary(TXN, &txn)
}

/// A varint of as many bytes, most of which say nothing.
fn long_varint(value: u8, length: usize) -> Vec<u8> {
    let mut out = vec![value | 0x80];
    out.resize(length - 1, 0x80);
    out.push(0);
    out
}

/// A put with every varint longer than it needs to be: tags of `tag` bytes, lengths and numbers of `value` bytes.
fn long_put(tag: usize, value: usize, key: &str) -> Call {
    let length = u8::try_from(key.len()).expect("short");
    let parts = [
        long_varint(1 << 3 | 2, tag),
        long_varint(length, value),
        key.as_bytes().to_vec(),
        long_varint(2 << 3 | 2, tag),
        long_varint(1, value),
        b"v".to_vec(),
        // No lease, which is written all the same.
        long_varint(3 << 3, tag),
        long_varint(0, value),
    ];
    Call::unary(PUT, &parts.concat())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deep_txns_and_long_varints_are_taken_as_a_member_takes_them() {
    for version in versions() {
        let scene = Scene::start(version).await;
        let version = &scene.version;
        for depth in [2, 17, 60, DEEPEST] {
            let code = scene.alike(&format!("deep/{depth}"), |key| nested_put(depth, key)).await;
            assert_eq!(code, Some(0), "etcd {version}, {depth}");
        }
        // Past etcd's own limit it is etcd that answers.
        scene.alike("deep/past", |key| nested_put(DEEPEST + 1, key)).await;
        for (tag, value) in [(1, 2), (2, 2), (5, 5), (5, 10)] {
            let what = format!("long/{tag}/{value}");
            let put = |key: &str| match tag {
                1 => short_tags(value, key),
                _ => long_put(tag, value, key),
            };
            assert_eq!(scene.alike(&what, put).await, Some(0), "etcd {version}, {what}");
        }
        assert_eq!(scene.keyward.metric("keyward_calls_not_canonical_total", &[]).await, 0.0);
        assert_eq!(scene.keyward.metric("keyward_panics_total", &[]).await, 0.0);
    }
}

/// The same with tags as they should be.
fn short_tags(value: usize, key: &str) -> Call {
    let length = u8::try_from(key.len()).expect("short");
    let parts = [
        vec![1 << 3 | 2],
        long_varint(length, value),
        key.as_bytes().to_vec(),
        vec![2 << 3 | 2],
        long_varint(1, value),
        b"v".to_vec(),
    ];
    Call::unary(PUT, &parts.concat())
}

/// The status line and the rest of the answer to one HTTP/1.1 request.
async fn http1(address: SocketAddr, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    stream.write_all(request.as_bytes()).await.expect("it reads");
    let mut answer = Vec::new();
    let read = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer)).await;
    read.expect("the answer comes").expect("the connection ends in order");
    let answer = String::from_utf8(answer).expect("text");
    let (status, rest) = answer.split_once("\r\n").expect("a status line");
    (status.to_owned(), rest.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_grpc_are_answered_as_by_a_member_counted_and_logged() {
    for version in versions() {
        let scene = Scene::start(version).await;
        let version = &scene.version;
        let end = "Host: etcd\r\nUser-Agent: old-script/1\r\nConnection: close\r\n";
        let range = format!(
            "POST /v3/kv/range HTTP/1.1\r\n{end}Content-Type: application/json\r\nContent-Length: 14\r\n\r\n{{\"key\":\"bm8=\"}}"
        );
        let health = format!("GET /health HTTP/1.1\r\n{end}\r\n");
        let page = format!("GET /version HTTP/1.1\r\n{end}\r\n");
        let requests = [
            (&range, "/v3/", "/etcdserverpb.KV/Range"),
            (&health, "/health", "/health"),
            (&page, "/version", "/version"),
        ];
        for (request, label, path) in requests {
            let (direct, _) = http1(scene.cluster.address(0), request).await;
            assert_eq!(direct, "HTTP/1.1 200 OK", "etcd {version}: {path}");
            let (through, rest) = http1(scene.keyward.site().listen, request).await;
            println!("{version}: {path}: directly {direct:?}, through Keyward {through:?}");
            assert_eq!(through, direct, "etcd {version}: {path}: {rest}");
            let labels = [("path", label), ("status", "200")];
            let counted = scene.keyward.metric("keyward_rest_requests_total", &labels).await;
            assert_eq!(counted, 1.0, "etcd {version}: {path}");
            let is_logged = async || {
                let log = scene.keyward.log();
                // A JSON request is a call, with the record of a call; every other request has a record of its own.
                log.lines().any(|line| line.contains("keyward::access") && line.contains(path)).then_some(())
            };
            wait::until(LIMIT, "the request is in the log", is_logged).await;
        }
    }
}
