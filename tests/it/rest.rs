//! A JSON request is a call like any other: the same identities, one gRPC request upstream, the answer in JSON; a
//! request that is not understood whole sends nothing.

use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{PutRequest, RangeRequest};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::http1::told;
use crate::member::Member;
use crate::rig::{Keyward, one_member, paused, settled};
use crate::unproved_logins::logged_in;
use crate::words::{PUT, RANGE, ranged, ranged_value, was_put};

/// A POST as curl sends it, on a connection that ends with the answer.
pub(crate) fn post(path: &str, fields: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{fields}Content-Length: {length}\r\n\r\n{body}"
    )
}

/// Status, head and body of an answer.
pub(crate) fn parts(answer: &str) -> (u16, String, &str) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {answer:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, head.to_ascii_lowercase(), body)
}

fn error_of(answer: &str) -> (u16, u64, String) {
    let (status, _, body) = parts(answer);
    let error: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("no JSON: {answer}"));
    assert_eq!(error["error"], error["message"], "clients of each release line find the text");
    let (code, text) = (error["code"].as_u64().expect("a code"), error["message"].as_str().expect("a text"));
    (status, code, text.to_owned())
}

#[test]
fn a_put_and_a_range_reach_the_member_as_grpc_and_come_back_as_json() {
    paused(async {
        let (member, keyward) = one_member();
        let put =
            post("/v3/kv/put", "", r#"{"key":"a2V5","value":"_w==","lease":"7","prevKv":true,"new":[1]}"#);
        let script = async {
            let mut call = member.called(PUT).await;
            let request = PutRequest::decode(call.message().await).expect("a PutRequest");
            assert_eq!((&request.key[..], &request.value[..]), (&b"key"[..], &b"\xff"[..]));
            assert_eq!((request.lease, request.prev_kv), (7, true));
            call.reply(&was_put(12)).await;
        };
        let (answer, ()) = tokio::join!(told(keyward.connect(), put.as_bytes()), script);
        let (status, head, body) = parts(&answer);
        assert_eq!(status, 200, "{answer}");
        assert!(head.contains("content-type: application/json"), "{answer}");
        let length = format!("content-length: {}", body.len());
        assert!(head.contains(&length), "{answer}");
        assert_eq!(
            body,
            r#"{"header":{"cluster_id":"193","member_id":"1","revision":"12","raft_term":"2"}}"#
        );
        for path in ["/v3/kv/range", "/v3beta/kv/range"] {
            let range = post(path, "", r#"{"key":"aw==","limit":"5"}"#);
            let script = async {
                let mut call = member.called(RANGE).await;
                let request = RangeRequest::decode(call.message().await);
                assert_eq!(request.expect("a RangeRequest").limit, 5);
                call.reply(&ranged_value(2)).await;
            };
            let (answer, ()) = tokio::join!(told(keyward.connect(), range.as_bytes()), script);
            let body: Value = serde_json::from_str(parts(&answer).2).expect("JSON");
            assert_eq!(body["kvs"], json!([{"key": "aw==", "value": "Bwc="}]), "{answer}");
        }
    });
}

#[test]
fn a_request_that_is_not_understood_whole_sends_nothing() {
    paused(async {
        let (member, keyward) = one_member();
        let before = keyward.metrics.not_canonical.get();
        let deep = format!("{{\"x\":{}1{}}}", "[".repeat(5000), "]".repeat(5000));
        let bodies = [
            "{",
            "nonsense",
            "[]",
            r#"{"key":"a*b"}"#,
            r#"{"key":1}"#,
            r#"{"key":"aw==","key":"aw=="}"#,
            r#"{"range_end":"aw==","rangeEnd":"aw=="}"#,
            r#"{"key":"aw==","limit":1.5}"#,
            r#"{"key":"aw==","limit":"9223372036854775808"}"#,
            r#"{"key":"aw==","sort_order":"NOPE"}"#,
            r#"{"key":"aw=="} x"#,
            r#"{"key":"aw=="}{"key":"aw=="}"#,
            deep.as_str(),
        ];
        for body in bodies {
            let answer = told(keyward.connect(), post("/v3/kv/range", "", body).as_bytes()).await;
            let (status, code, text) = error_of(&answer);
            assert_eq!((status, code), (400, 3), "{answer}");
            assert!(
                !text.contains("aw==") && text.starts_with("keyward: "),
                "no value of the document: {text}"
            );
        }
        assert_eq!(keyward.metrics.not_canonical.get() - before, bodies.len() as u64, "each is counted");
        let encoded = post("/v3/kv/range", "Content-Encoding: gzip\r\n", r#"{"key":"aw=="}"#);
        assert_eq!(error_of(&told(keyward.connect(), encoded.as_bytes()).await).0, 400);
        let answer =
            told(keyward.connect(), post("/v3/kv/range", "Grpc-Timeout: 5x\r\n", "{}").as_bytes()).await;
        assert_eq!(error_of(&answer), (400, 3, "invalid grpc-timeout: 5x".into()));
        settled().await;
        assert!(member.was_called_again().is_none());
    });
}

#[test]
fn a_body_is_bounded_in_size_and_time() {
    paused(async {
        let (member, keyward) = one_member();
        let mut io = keyward.connect();
        let head = "POST /v3/kv/put HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{\"value\":\"";
        io.write_all(head.as_bytes()).await.expect("room");
        let (mut reader, mut writer) = tokio::io::split(io);
        let flood = async {
            let piece = "A".repeat(64 * 1024);
            // The connection closes in the middle.
            while writer.write_all(piece.as_bytes()).await.is_ok() {}
        };
        let mut heard = Vec::new();
        let read = async { drop(reader.read_to_end(&mut heard).await) };
        tokio::join!(read, flood);
        let heard = String::from_utf8(heard).expect("text");
        let (status, code, _) = error_of(&heard);
        assert_eq!((status, code), (429, 8), "{heard}");
        // A body that does not arrive.
        let began = tokio::time::Instant::now();
        let slow = "POST /v3/kv/put HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 10\r\n\r\n{";
        let (status, _, _) = error_of(&told(keyward.connect(), slow.as_bytes()).await);
        assert_eq!((status, began.elapsed()), (503, Duration::from_secs(30)));
        settled().await;
        assert!(member.was_called_again().is_none());
    });
}

#[test]
fn a_members_refusal_keeps_code_and_text() {
    paused(async {
        let (member, keyward) = one_member();
        for (code, http, text) in [
            (Code::OutOfRange, 400, "etcdserver: mvcc: required revision has been compacted"),
            (Code::NotFound, 404, "etcdserver: requested lease not found"),
            (Code::PermissionDenied, 403, "etcdserver: permission denied"),
            (Code::FailedPrecondition, 400, "etcdserver: lease \"x\" already exists"),
        ] {
            let script = async { member.called(RANGE).await.refuse(code, text) };
            let range = post("/v3/kv/range", "", r#"{"key":"aw=="}"#);
            let (answer, ()) = tokio::join!(told(keyward.connect(), range.as_bytes()), script);
            assert_eq!(error_of(&answer), (http, code as u64, text.to_owned()), "{answer}");
        }
    });
}

#[test]
fn a_token_identifies_the_caller_and_other_headers_assert_nothing() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let login = post("/v3/auth/authenticate", "", r#"{"name":"alice","password":"right"}"#);
        let answer = told(keyward.connect(), login.as_bytes()).await;
        let body: Value = serde_json::from_str(parts(&answer).2).expect("JSON");
        let token = body["token"].as_str().unwrap_or_else(|| panic!("{answer}"));
        for field in [
            format!("Authorization: {token}\r\n"),
            format!("Authorization: Bearer {token}\r\n"),
            format!("Grpc-Metadata-Token: {token}\r\n"),
            format!("Authorization: nonsense\r\nGrpc-Metadata-Token: {token}\r\n"),
        ] {
            let range = post("/v3/kv/range", &field, r#"{"key":"aw=="}"#);
            let script = async {
                let call = member.called(RANGE).await;
                let shown = call.token().map(str::to_owned);
                call.reply(&ranged(1)).await;
                shown
            };
            let (answer, shown) = tokio::join!(told(keyward.connect(), range.as_bytes()), script);
            assert_eq!(parts(&answer).0, 200, "{answer}");
            assert!(shown.is_some_and(|shown| !shown.starts_with("kw1_")), "the member's own token");
        }
        let field = |name: &str| format!("{name}: {token}\r\n");
        for name in
            ["Token", "Grpcgateway-Authorization", "Cookie", "X-Token", "Grpc-Metadata-Grpcgateway-Token"]
        {
            let range = post("/v3/kv/range", &field(name), r#"{"key":"aw=="}"#);
            let answer = told(keyward.connect(), range.as_bytes()).await;
            assert_eq!(error_of(&answer), (400, 3, "etcdserver: user name is empty".into()), "{name}");
        }
        let range = post("/v3/kv/range", "Authorization: kw1_forged\r\n", r#"{"key":"aw=="}"#);
        let answer = told(keyward.connect(), range.as_bytes()).await;
        assert_eq!(error_of(&answer), (401, 16, "etcdserver: invalid auth token".into()));
        settled().await;
        assert!(member.was_called_again().is_none());
        // A session of a gRPC login is good for JSON, too.
        drop(logged_in(&keyward, "alice", "right").await);
    });
}

#[test]
fn other_methods_and_paths_are_answered_as_by_etcd_3_5() {
    paused(async {
        let (member, keyward) = one_member();
        let get = |method: &str, path: &str| {
            format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        };
        for (method, path, status, body) in [
            ("GET", "/v3/kv/range", 405, "Method Not Allowed\n"),
            ("POST", "/v3/nope", 404, "Not Found\n"),
            ("POST", "/v3/kv/r%61nge", 404, "Not Found\n"),
            ("POST", "/v3//kv/range", 404, "Not Found\n"),
            ("POST", "/v3alpha/kv/range", 404, "404 page not found\n"),
            ("GET", "/v2/keys/x", 404, "404 page not found\n"),
            ("GET", "/debug/vars", 404, "404 page not found\n"),
            ("GET", "/metrics", 404, "404 page not found\n"),
            ("POST", "/version", 405, "Method Not Allowed\n"),
            ("OPTIONS", "/v3/kv/range", 200, ""),
            ("GET", "/version", 200, r#"{"etcdserver":"3.5.30","etcdcluster":"3.5.0"}"#),
            ("GET", "/health", 200, r#"{"health":"true","reason":""}"#),
            ("GET", "/health?serializable=true", 200, r#"{"health":"true","reason":""}"#),
            ("GET", "/livez", 200, "ok\n"),
            (
                "GET",
                "/readyz?verbose",
                200,
                "[+]data_corruption ok\n[+]serializable_read ok\n\
                                             [+]linearizable_read ok\n[+]non_learner ok\nok\n",
            ),
            ("GET", "/readyz/data_corruption", 200, "ok\n"),
            ("GET", "/readyz/nope", 404, "404 page not found\n"),
        ] {
            let answer = told(keyward.connect(), get(method, path).as_bytes()).await;
            let (found, head, text) = parts(&answer);
            assert_eq!((found, text), (status, body), "{method} {path}");
            assert!(!head.contains("access-control"), "no origin is allowed by default: {head}");
        }
        let answer = told(keyward.connect(), get("HEAD", "/v3/kv/range").as_bytes()).await;
        let (status, head, body) = parts(&answer);
        assert_eq!((status, body), (405, ""));
        assert!(head.contains("content-length: 19"), "{head}");
        settled().await;
        assert!(member.was_called_again().is_none());
    });
}

/// The protection of etcd's `--host-whitelist`: the page of a site whose name points here is of its own host.
#[test]
fn a_listener_with_hosts_answers_requests_for_these_alone() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let folder = tempfile::tempdir().expect("a folder");
        let listener = "hosts = [\"etcd.example.com\"]\n";
        let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), listener, "");
        for (host, status) in [
            ("etcd.example.com:2379", 200),
            ("ETCD.example.com", 200),
            ("127.0.0.1:2379", 200),
            ("localhost", 200),
            ("evil.example", 421),
            ("etcd.example.com.evil.example", 421),
        ] {
            for request in [
                format!("GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"),
                format!("GET http://{host}/version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
            ] {
                let answer = told(keyward.connect(), request.as_bytes()).await;
                assert_eq!(parts(&answer).0, status, "{request}{answer}");
            }
        }
        let anonymous = b"GET /version HTTP/1.0\r\n\r\n";
        assert_eq!(parts(&told(keyward.connect(), anonymous).await).0, 421);
        let open = Keyward::before(&[&member]);
        assert_eq!(parts(&told(open.connect(), anonymous).await).0, 200);
    });
}

#[test]
fn a_listener_without_the_face_answers_404_and_one_with_a_metrics_page_shows_it() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let folder = tempfile::tempdir().expect("a folder");
        let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), "rest = false\n", "");
        for request in ["GET /version HTTP/1.1", "POST /v3/kv/range HTTP/1.1"] {
            let request = format!("{request}\r\nHost: x\r\nConnection: close\r\n\r\n");
            let answer = told(keyward.connect(), request.as_bytes()).await;
            assert!(parts(&answer).0 == 404 && answer.contains("gRPC"), "{answer}");
        }
        let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), "metrics_page = true\n", "");
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        told(keyward.connect(), request).await;
        let answer = told(keyward.connect(), request).await;
        assert!(parts(&answer).0 == 200 && answer.contains("\nkeyward_rest_requests_total"), "{answer}");
        assert!(
            answer.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
            "{answer}"
        );
        let accept = "Accept: application/openmetrics-text\r\n";
        let request = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{accept}\r\n");
        let answer = told(keyward.connect(), request.as_bytes()).await;
        assert!(answer.contains("\r\nContent-Type: application/openmetrics-text; version=1.0.0"), "{answer}");
        assert!(answer.contains("\n# EOF\n"), "{answer}");
    });
}

#[test]
fn only_listed_origins_may_read_answers() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[rest]\ncors = [\"https://ui.example.com\"]\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        for (origin, allowed) in [("https://ui.example.com", true), ("https://evil.example.com", false)] {
            for method in ["OPTIONS", "GET"] {
                let request = format!(
                    "{method} /version HTTP/1.1\r\nHost: x\r\nOrigin: {origin}\r\nConnection: close\r\n\r\n"
                );
                let answer = told(keyward.connect(), request.as_bytes()).await;
                let (status, head, _) = parts(&answer);
                let told_origin = head.contains(&format!("access-control-allow-origin: {origin}\r\n"));
                assert_eq!((status, told_origin, head.contains("access-control")), (200, allowed, allowed));
            }
        }
    });
}

/// A browser hides the answer from the page, and not the effect; and of a WebSocket it hides nothing.
#[test]
fn what_a_web_page_of_another_site_sends_is_refused() {
    paused(async {
        let tasks = Tasks::default();
        let member = Member::new(1, &tasks);
        let lines = "[rest]\ncors = [\"https://ui.example.com\"]\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        let put = |fields: &str| post("/v3/kv/put", fields, r#"{"key":"aw==","value":"dg=="}"#);
        let upgrade = "GET /v3/watch HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\
                       Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
        for foreign in
            ["Origin: http://evil.example\r\n", "Origin: null\r\n", "Sec-Fetch-Site: cross-site\r\n"]
        {
            for request in [put(foreign), format!("{upgrade}{foreign}\r\n")] {
                let answer = told(keyward.connect(), request.as_bytes()).await;
                assert_eq!(parts(&answer).0, 403, "{request}{answer}");
            }
        }
        settled().await;
        assert!(member.was_called_again().is_none());
        for known in
            ["Origin: http://x\r\n", "Origin: https://ui.example.com\r\n", "Sec-Fetch-Site: none\r\n", ""]
        {
            let request = put(known);
            let script = async { member.called(PUT).await.reply(&was_put(3)).await };
            let (answer, ()) = tokio::join!(told(keyward.connect(), request.as_bytes()), script);
            assert_eq!(parts(&answer).0, 200, "{known}{answer}");
        }
    });
}
