//! Requests compressed with gzip, as etcd itself takes them since 3.5: real clients that compress everything, and frame by
//! frame beside a member.

use std::io::Write as _;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use keyward::pb::etcdserverpb::{
    LeaseKeepAliveRequest, LeaseKeepAliveResponse, PutRequest, RangeRequest, RangeResponse,
    WatchCreateRequest, WatchRequest, WatchResponse, watch_request::RequestUnion,
};
use prost::Message as _;
use tokio::net::TcpListener;

use crate::harness::keyward::{Keyward, Site};
use crate::harness::process::Process;
use crate::harness::{Auth, Cluster, Options, every_version, password};
use crate::raw::{Answer, Call, Endpoint, Shape, frame, framed};
use crate::rounds::{Application, Did, FAMILIES, Family};

const PUT: &str = "/etcdserverpb.KV/Put";
const RANGE: &str = "/etcdserverpb.KV/Range";
const WATCH: &str = "/etcdserverpb.Watch/Watch";
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
/// Those that can be told to compress.
const COMPRESSING: [&str; 5] =
    ["clientv3 3.4.23", "clientv3 3.5.1", "clientv3 3.5.11", "clientv3 3.6.16", "python etcd3 0.12.0"];

fn families() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().filter(|family| COMPRESSING.contains(&family.name))
}

fn gzip(message: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(message).expect("memory");
    encoder.finish().expect("memory")
}

fn put(key: &str, value: Vec<u8>) -> Vec<u8> {
    PutRequest { key: key.to_owned().into(), value: value.into(), ..PutRequest::default() }.encode_to_vec()
}

fn read(key: &str) -> Vec<u8> {
    RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() }.encode_to_vec()
}

/// A call of these frames that says that they may be compressed.
fn call(path: &str, body: Vec<Bytes>) -> Call {
    Call { path: path.into(), body, ..Call::default() }.with("grpc-encoding", "gzip")
}

fn compressed(path: &str, message: &[u8]) -> Call {
    call(path, vec![framed(1, &gzip(message))])
}

fn told(answer: &Answer) -> (Option<u32>, String) {
    (answer.code(), answer.message())
}

/// The `grpc-encoding` of the first request that a client sends to a server that knows no method.
async fn first_encoding(family: &'static Family) -> Option<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let folder = tempfile::tempdir().expect("a folder");
    let secret = folder.path().join("password");
    std::fs::write(&secret, password("alice")).expect("written");
    let secret = secret.display().to_string();
    let args = ["rounds", "--gzip", "--endpoints", &address, "--prefix", "/a/", "--user", "alice"];
    let args = args.iter().copied().chain(["--password-file", &secret]);
    let record = folder.path().join("record");
    let _process = Process::start(family.name, &family.program(), args, &[], &record);
    loop {
        let (tcp, _) = listener.accept().await.expect("a connection");
        let Ok(mut connection) = h2::server::handshake(tcp).await else { continue };
        if let Some(Ok((request, _))) = connection.accept().await {
            let encoding = request.headers().get("grpc-encoding")?;
            return Some(encoding.to_str().expect("text").to_owned());
        }
    }
}

/// Else the test below would show nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clients_compress_their_requests() {
    for family in families() {
        drop(family.program());
        let first = tokio::time::timeout(Duration::from_secs(60), first_encoding(family)).await;
        assert_eq!(first.expect("it calls").as_deref(), Some("gzip"), "{}", family.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_clients_that_compress_are_served() {
    for family in families() {
        drop(family.program());
    }
    for version in every_version() {
        let auth = Auth::On { extra_users: 0 };
        let cluster = Cluster::start(&version, Options { auth, ..Options::default() }).await;
        let server = cluster.pki().server();
        let site = Site::new();
        let tls = crate::harness::ports::free();
        let both = format!(
            "{{ name = \"main\", address = \"{}\" }}, {{ name = \"tls\", address = \"{tls}\", tls.cert = {:?}, tls.key = {:?} }}",
            site.listen, server.cert, server.key
        );
        let plain = format!("{{ name = \"main\", address = \"{}\" }}", site.listen);
        let config = site.in_front_of(&cluster).replace(&plain, &both);
        let listen = site.listen;
        let keyward = Keyward::start(site, &config).await;
        for family in families() {
            let address = if family.tls { tls } else { listen };
            let application = Application::start_compressing(family, address, &cluster).await;
            for _ in 0..2 {
                let did = application.round(&cluster).await;
                let failed: Vec<_> = did.iter().filter(|did| !did.ok()).map(Did::to_string).collect();
                assert!(did.len() >= 5 && failed.is_empty(), "etcd {version}, {}: {failed:?}", family.name);
            }
        }
        assert_eq!(keyward.metric("keyward_panics_total", &[]).await, 0.0);
    }
}

/// The same codes as at a member, and from 3.5.35 on the same texts. 3.4.23 knows no gzip; Keyward takes it there too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compressed_frames_are_answered_as_a_member_answers_them() {
    for version in every_version() {
        let cluster = Cluster::start(&version, Options::default()).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let through = Endpoint::plain(site.listen);
        let keyward = Keyward::start(site, &config).await;
        let direct = Endpoint::plain(cluster.address(0));
        let knows = version.at_least("3.5.0");

        // What is put compressed is stored as it was before.
        let value: Vec<u8> = (0..300_000_u32).flat_map(|at| (at / 100).to_le_bytes()).collect();
        let answer = through.call(&compressed(PUT, &put("large", value.clone()))).await;
        assert_eq!(told(&answer), (Some(0), String::new()), "etcd {version}");
        let answer = through.call(&compressed(RANGE, &read("large"))).await;
        let (_, head) = answer.head.clone().expect("a header");
        assert!(!head.contains_key("grpc-encoding"), "the answer is not compressed");
        let stored = RangeResponse::decode(answer.messages().remove(0)).expect("an answer");
        assert_eq!(stored.kvs[0].value, value, "etcd {version}");
        let answer = direct.call(&compressed(RANGE, &read("large"))).await;
        assert_eq!(answer.code(), Some(if knows { 0 } else { 12 }), "etcd {version}");
        // etcd compresses its answer exactly where the request was, whatever the client says that it accepts.
        let encoding = answer.head.as_ref().and_then(|(_, head)| head.get("grpc-encoding"));
        assert_eq!(encoding.is_some_and(|encoding| encoding == "gzip"), knows, "etcd {version}");

        let whole = gzip(&read("large"));
        let mut lying = gzip(&vec![0; 64 << 20]);
        let size = lying.len() - 4;
        lying[size..].copy_from_slice(&9_u32.to_le_bytes());
        let cases = [
            ("a plain frame", call(RANGE, vec![frame(&read("large"))])),
            ("two members", call(RANGE, vec![framed(1, &[gzip(b"\x0a\x01k"), gzip(b"")].concat())])),
            ("no gzip", call(RANGE, vec![framed(1, b"this is no gzip, whatever it says")])),
            ("nothing", call(RANGE, vec![framed(1, b"")])),
            ("garbage behind it", call(RANGE, vec![framed(1, &[&whole[..], &[0; 20]].concat())])),
            ("garbage behind nothing", call(RANGE, vec![framed(1, &[&gzip(b"")[..], &[0; 20]].concat())])),
            ("half a header behind it", call(RANGE, vec![framed(1, &[&whole[..], &whole[..5]].concat())])),
            ("half a header", call(RANGE, vec![framed(1, &whole[..5])])),
            // By one byte: 3.5.1 takes the last four for the size, whatever they are.
            ("a trailer that ends too early", call(RANGE, vec![framed(1, &whole[..whole.len() - 1])])),
            ("a bomb", compressed(PUT, &put("bomb", vec![0; 3 << 20]))),
            ("a bomb that lies", call(PUT, vec![framed(1, &lying)])),
            ("one watch", Call { shape: Shape::Once, ..call(WATCH, vec![framed(1, &lying)]) }),
        ];
        for (what, call) in cases {
            let (ours, theirs) = (told(&through.call(&call).await), told(&direct.call(&call).await));
            if !knows {
                assert_eq!(theirs.0, Some(12), "etcd {version}, {what}: {theirs:?}");
            } else if version.at_least("3.5.35") {
                assert_eq!(ours, theirs, "etcd {version}, {what}");
            } else {
                assert_eq!(ours.0, theirs.0, "etcd {version}, {what}: {ours:?} {theirs:?}");
            }
        }
        for encoding in ["deflate", "GZIP"] {
            let call = Call { headers: vec![("grpc-encoding", encoding.into())], ..compressed(RANGE, b"") };
            let (ours, theirs) = (told(&through.call(&call).await), told(&direct.call(&call).await));
            assert_eq!(ours, theirs, "etcd {version}");
            assert_eq!(ours.0, Some(12), "etcd {version}");
        }
        streams(&through, &direct, knows).await;
        assert_eq!(keyward.metric("keyward_panics_total", &[]).await, 0.0);
    }
}

/// A watch and a keepalive whose requests are compressed, all or some.
async fn streams(through: &Endpoint, direct: &Endpoint, knows: bool) {
    let create = |key: &str| {
        let create =
            WatchCreateRequest { key: key.to_owned().into(), start_revision: 1, ..Default::default() };
        WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }.encode_to_vec()
    };
    let watch = Call {
        shape: Shape::Stream { at_least: 3 },
        ..call(WATCH, vec![framed(1, &gzip(&create("large"))), frame(&create("other"))])
    };
    let answer = through.call(&watch).await;
    let told: Vec<WatchResponse> =
        answer.messages().into_iter().map(|told| WatchResponse::decode(told).expect("a response")).collect();
    assert_eq!(told.iter().filter(|told| told.created && !told.canceled).count(), 2);
    assert_eq!(told.iter().map(|told| told.events.len()).sum::<usize>(), 1, "the put of `large`");
    assert_eq!(direct.call(&watch).await.code() == Some(12), !knows);

    let renewal = LeaseKeepAliveRequest { id: 7 }.encode_to_vec();
    let shape = Shape::Stream { at_least: 1 };
    let keep_alive = Call { shape, ..call(KEEP_ALIVE, vec![framed(1, &gzip(&renewal))]) };
    let answer = through.call(&keep_alive).await;
    let told = LeaseKeepAliveResponse::decode(answer.messages().remove(0)).expect("a renewal");
    assert_eq!((told.id, told.ttl), (7, 0), "there is no such lease");
}
