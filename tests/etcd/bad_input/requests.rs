//! Paths and bodies that are not what they seem (`rules.md` 1-3).

use bytes::Bytes;
use keyward::pb::etcdserverpb::{DeleteRangeRequest, RangeRequest, RequestOp, request_op::Request};
use prost::Message;

use super::{PUT, Scene, arrived, cluster, log_in, password, put, put_request, started, told};
use crate::{
    harness::{Tls, every_version},
    raw::{Call, End, frame, framed},
};

/// A call that must be refused before anything of it is sent.
struct Bad {
    what: &'static str,
    call: Call,
    expected: Expected,
}

enum Expected {
    /// This code and this text.
    Ours(u32, String),
    /// What etcd itself answers, which is this code.
    AsEtcd(u32),
    /// What etcd answers on a plain port, which is Unimplemented: there it takes paths byte by byte.
    AsPlain,
}

const NOT_CANONICAL: &str = "keyward: request body is not canonical: ";

/// Each key is met in one call only, so etcd's log tells whether that call arrived.
fn malformed_paths() -> Vec<Bad> {
    let paths = [
        "/etcdserverpb.KV/P%75t",
        "/etcdserverpb.KV/Put?x=1",
        "/etcdserverpb.KV/Put?",
        "/etcdserverpb.KV/Put/",
        "//etcdserverpb.KV/Put",
        "/etcdserverpb.KV//Put",
        "/etcdserverpb.KV/./Put",
        "/etcdserverpb%2eKV/Put",
    ];
    let bad = |path: &str| Bad {
        what: "a path that is not canonical",
        call: Call { path: path.into(), ..put(&format!("/a/path/{path}")) },
        expected: Expected::AsPlain,
    };
    // Without two parts: older etcd has another code for it.
    let half = |path: &str| Bad {
        expected: Expected::Ours(12, format!("malformed method name: {path:?}")),
        ..bad(path)
    };
    paths.into_iter().map(bad).chain(["/etcdserverpb.KV", "/"].into_iter().map(half)).collect()
}

fn other_cases() -> Vec<Bad> {
    vec![
        Bad {
            what: "another case of the letters",
            call: Call { path: "/etcdserverpb.KV/put".into(), ..put("/a/case") },
            expected: Expected::AsEtcd(12),
        },
        Bad {
            what: "a method that nobody knows",
            call: Call { path: "/etcdserverpb.KV/Nope".into(), ..put("/a/method") },
            expected: Expected::AsEtcd(12),
        },
        Bad {
            what: "a service that nobody knows",
            call: Call { path: "/etcdserverpb.Nope/Put".into(), ..put("/a/service") },
            expected: Expected::AsEtcd(12),
        },
    ]
}

fn bad_frames() -> Vec<Bad> {
    let body = |body: Vec<Bytes>| Call { path: PUT.into(), body, ..Call::default() };
    let trailing = || Expected::Ours(3, format!("{NOT_CANONICAL}bytes after the only frame"));
    let incomplete = || Expected::Ours(3, format!("{NOT_CANONICAL}the body ends within a frame"));
    let large = put_request(&format!("/a/large/{}", "x".repeat(2 << 20)));
    vec![
        Bad {
            what: "two frames",
            call: body(vec![frame(&put_request("/a/two/1")), frame(&put_request("/a/two/2"))]),
            expected: trailing(),
        },
        Bad {
            what: "two frames in one piece",
            call: body(vec![
                [frame(&put_request("/a/piece/1")), frame(&put_request("/a/piece/2"))].concat().into(),
            ]),
            expected: trailing(),
        },
        Bad {
            what: "a byte after the frame",
            call: body(vec![frame(&put_request("/a/byte")), Bytes::from_static(b"\0")]),
            expected: trailing(),
        },
        Bad {
            what: "a compressed frame, with its encoding",
            call: body(vec![framed(1, &put_request("/a/snappy"))]).with("grpc-encoding", "snappy"),
            expected: Expected::AsEtcd(12),
        },
        Bad {
            what: "a compressed frame, without an encoding",
            call: body(vec![framed(1, &put_request("/a/flag"))]),
            expected: Expected::AsEtcd(13),
        },
        Bad {
            what: "an encoding, and a frame that is not compressed",
            call: put("/a/encoding").with("grpc-encoding", "snappy"),
            expected: Expected::AsEtcd(12),
        },
        Bad {
            what: "a flag that is none",
            call: body(vec![framed(7, &put_request("/a/seven"))]),
            expected: Expected::AsEtcd(13),
        },
        Bad {
            what: "a frame larger than 2 MiB",
            call: body(vec![frame(&large)]),
            expected: Expected::AsEtcd(8),
        },
        Bad {
            what: "a frame that says it is larger",
            call: body(vec![Bytes::from_static(b"\0\x7f\xff\xff\xff/a/says")]),
            expected: Expected::AsEtcd(8),
        },
        Bad {
            what: "a frame that ends too early",
            call: body(vec![frame(&put_request("/a/early")).slice(..9)]),
            expected: incomplete(),
        },
        Bad { what: "no frame", call: body(Vec::new()), expected: incomplete() },
        Bad { what: "half a prefix", call: body(vec![Bytes::from_static(b"\0\0")]), expected: incomplete() },
    ]
}

fn bad_messages() -> Vec<Bad> {
    let bad = |what, path: &str, message: &[u8], reason: &str| Bad {
        what,
        call: Call::unary(path, message),
        expected: Expected::Ours(3, format!("{NOT_CANONICAL}{reason}")),
    };
    let put = put_request("/a/message");
    let with = |more: &[u8]| [put.as_slice(), more].concat();
    vec![
        bad("a oneof given twice", "/etcdserverpb.KV/Txn", &two_faced("/a/oneof/1", "/a/oneof/2"), TWICE),
        bad("a field given twice", PUT, &with(&put), "a field given twice in etcdserverpb.PutRequest"),
        bad(
            "a tag past 32 bits",
            PUT,
            &far_field("/a/tag"),
            "a tag of more than 32 bits in etcdserverpb.PutRequest",
        ),
        bad("a group", PUT, &with(b"\x3b\x3c"), "a group or an unknown wire type in etcdserverpb.PutRequest"),
        bad(
            "a field that ends too early",
            PUT,
            &with(b"\x0a\x7fx"),
            "the body ends within a field in etcdserverpb.PutRequest",
        ),
        bad(
            "no message at all",
            PUT,
            b"\xff\xff\xff",
            "the body ends within a field in etcdserverpb.PutRequest",
        ),
        bad(
            "the wrong wire type",
            PUT,
            b"\x08\x01",
            "a field of the wrong wire type in etcdserverpb.PutRequest",
        ),
        bad(
            "a Txn too deep",
            "/etcdserverpb.KV/Txn",
            &deep(1025),
            "too deep a Txn in etcdserverpb.TxnRequest",
        ),
    ]
}

const TWICE: &str = "a field given twice in etcdserverpb.RequestOp";

/// A put whose key stands in field 2^32 + 1: etcd reads field 1.
fn far_field(key: &str) -> Vec<u8> {
    let mut put = b"\x8a\x80\x80\x80\x80\x01".to_vec();
    put.push(u8::try_from(key.len()).expect("short"));
    put.extend(key.bytes());
    put.extend(b"\x12\x01x");
    put
}

/// A Txn whose only operation names `request_range` twice: what etcd before 3.7 reads is the second, what others read is both.
fn two_faced(first: &str, second: &str) -> Vec<u8> {
    let op = |key: &str| {
        let range = RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() };
        RequestOp { request: Some(Request::RequestRange(range)) }.encode_to_vec()
    };
    let both = [op(first), op(second)].concat();
    let mut txn = vec![0x12, u8::try_from(both.len()).expect("short")];
    txn.extend(both);
    txn
}

fn deep(depth: usize) -> Vec<u8> {
    let field = |tag: u8, body: &[u8]| {
        let mut out = vec![tag];
        let mut length = body.len();
        while length >= 0x80 {
            out.push(length.to_le_bytes()[0] | 0x80);
            length >>= 7;
        }
        out.push(length.to_le_bytes()[0]);
        [&out[..], body].concat()
    };
    // The success of a Txn, and in it the Txn of an op.
    (1..depth).fold(Vec::new(), |inner, _| field(2 << 3 | 2, &field(4 << 3 | 2, &inner)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_canonical_is_refused_and_not_sent() {
    for version in every_version() {
        // A TLS port: etcd serves `P%75t` there.
        let mut scene = Scene::start(&version, Tls::Server).await;
        let plain_cluster = cluster(&version, Tls::Off).await;
        let plain = plain_cluster.endpoint(0);
        let token = scene.session("alice").await;
        let before = (started(&scene.cluster, "Put").await, started(&scene.cluster, "Txn").await);
        let cases = [malformed_paths(), other_cases(), bad_frames(), bad_messages()];
        for bad in cases.into_iter().flatten() {
            let call = bad.call.clone().with("token", &token);
            let answer = scene.through.call(&call).await;
            let expected = match bad.expected {
                Expected::Ours(code, text) => (Some(code), text),
                Expected::AsEtcd(code) => {
                    let direct = told(&scene.etcd.call(&bad.call).await);
                    assert_eq!(direct.0, Some(code), "etcd {version} answers to {}: {direct:?}", bad.what);
                    direct
                }
                Expected::AsPlain => {
                    let direct = told(&plain.call(&bad.call).await);
                    assert_eq!(direct.0, Some(12), "etcd {version} answers to {}: {direct:?}", bad.call.path);
                    direct
                }
            };
            assert_eq!(told(&answer), expected, "etcd {version}: {} ({})", bad.what, bad.call.path);
            assert_eq!(answer.end, End::Ended, "etcd {version}: {}", bad.what);
        }
        let after = (started(&scene.cluster, "Put").await, started(&scene.cluster, "Txn").await);
        assert_eq!(after, before, "something arrived");
        for key in ["/a/path", "/a/two", "/a/piece", "/a/byte", "/a/oneof", "/a/message", "/a/tag"] {
            assert!(!arrived(&scene.cluster, key), "etcd {version} was asked for {key}");
        }
        scene.is_unharmed().await;
    }
}

/// What the test above would miss were it not so: etcd serves some of it, and its log and its counters show that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_itself_takes_what_is_not_canonical() {
    for version in every_version() {
        let cluster = cluster(&version, Tls::Server).await;
        let etcd = cluster.endpoint(0);
        let token = log_in(&etcd, "alice", &password("alice")).await.expect("the password is right");
        let two = vec![frame(&put_request("/a/served/two")), frame(&put_request("/a/served/second"))];
        let mut calls = vec![
            ("/a/served/path", Call { path: "/etcdserverpb.KV/P%75t".into(), ..put("/a/served/path") }),
            ("/a/served/query", Call { path: "/etcdserverpb.KV/Put?x=1".into(), ..put("/a/served/query") }),
            ("/a/served/two", Call { path: PUT.into(), body: two, ..Call::default() }),
        ];
        // 3.7 has another decoder, which refuses that.
        if !version.at_least("3.7") {
            calls.push(("/a/served/tag", Call::unary(PUT, &far_field("/a/served/tag"))));
        }
        for (key, call) in calls {
            let before = started(&cluster, "Put").await;
            let answer = etcd.call(&call.with("token", &token)).await;
            assert_eq!(told(&answer), (Some(0), String::new()), "etcd {version}: {key}");
            assert_eq!(started(&cluster, "Put").await, before + 1.0, "etcd {version} does not count {key}");
            assert!(arrived(&cluster, key), "etcd {version} does not log {key}");
        }
    }
}

/// `Range` itself, by the paths that the rule names. Keyward asks for ranges of its own, so only the log tells.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_range_by_another_path_is_not_sent() {
    for version in every_version() {
        let mut scene = Scene::start(&version, Tls::Server).await;
        let token = scene.session("root").await;
        let range = |key: &str| {
            RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() }.encode_to_vec()
        };
        for path in ["/etcdserverpb.KV/R%61nge", "/etcdserverpb.KV/Range?x=1"] {
            let answer =
                scene.through.call(&Call::unary(path, &range("/a/hidden")).with("token", &token)).await;
            assert_eq!(told(&answer).0, Some(12));
        }
        let delete =
            DeleteRangeRequest { key: "/a/hidden".into(), ..DeleteRangeRequest::default() }.encode_to_vec();
        let answer = scene
            .through
            .call(&Call::unary("/etcdserverpb.KV/DeleteR%61nge", &delete).with("token", &token))
            .await;
        assert_eq!(told(&answer).0, Some(12));
        assert!(!arrived(&scene.cluster, "/a/hidden"), "etcd {version} was asked");
        assert_eq!(started(&scene.cluster, "DeleteRange").await, 0.0);
        let answer = scene
            .through
            .call(&Call::unary("/etcdserverpb.KV/Range", &range("/a/shown")).with("token", &token))
            .await;
        assert_eq!(told(&answer).0, Some(0));
        assert!(arrived(&scene.cluster, "/a/shown"), "etcd {version} does not log a range");
        scene.is_unharmed().await;
    }
}
