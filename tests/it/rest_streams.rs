//! Streams over HTTP/1: one line of JSON for each message, resumed like a stream of gRPC, ended in order or visibly
//! broken, and released with the client.

use std::time::Duration;

use keyward::refusal::Code;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

use crate::http1::told;
use crate::member::Call;
use crate::rest::{parts, post};
use crate::rig::{one_member, paused, settled, three};
use crate::words::{KEEP_ALIVE, TXN, WATCH, create_of, created, event, renewed, txn_done};

/// A client's connection with an answer in chunks.
pub(crate) struct ChunkedAnswer {
    io: DuplexStream,
    heard: Vec<u8>,
    /// Bytes of the head and of the chunks read before.
    taken: usize,
}

impl ChunkedAnswer {
    pub(crate) async fn of(io: DuplexStream, request: &str) -> Self {
        let mut answer = Self { io, heard: Vec::new(), taken: 0 };
        answer.io.write_all(request.as_bytes()).await.expect("room");
        answer
    }

    /// Reads up to this text, and takes it with everything before.
    async fn up_to(&mut self, end: &[u8]) -> Vec<u8> {
        loop {
            let rest = &self.heard[self.taken..];
            if let Some(at) = rest.windows(end.len()).position(|window| window == end) {
                let taken = rest[..at].to_vec();
                self.taken += at + end.len();
                return taken;
            }
            let read = self.io.read_buf(&mut self.heard).await.expect("readable");
            assert!(read > 0, "the connection ended: {:?}", String::from_utf8_lossy(&self.heard));
        }
    }

    pub(crate) async fn head(&mut self) -> String {
        String::from_utf8(self.up_to(b"\r\n\r\n").await).expect("text")
    }

    /// The next chunk; `None` for the last.
    pub(crate) async fn chunk(&mut self) -> Option<String> {
        let size = String::from_utf8(self.up_to(b"\r\n").await).expect("text");
        let size = usize::from_str_radix(&size, 16).unwrap_or_else(|_| panic!("no size: {size:?}"));
        let chunk = self.up_to(b"\r\n").await;
        assert_eq!(chunk.len(), size);
        (size > 0).then(|| String::from_utf8(chunk).expect("text"))
    }

    pub(crate) async fn line(&mut self) -> Value {
        let chunk = self.chunk().await.expect("the stream lives");
        serde_json::from_str(&chunk).unwrap_or_else(|_| panic!("no JSON: {chunk}"))
    }
}

async fn accept(call: &mut Call, revision: i64) -> (i64, i64) {
    let create = create_of(&call.messages.next().await.expect("a request")).expect("a create");
    call.say(&created(create.watch_id, revision)).await.expect("taken");
    (create.watch_id, create.start_revision)
}

const CREATE: &str = r#"{"create_request":{"key":"aw==","start_revision":"10"}}"#;

#[test]
fn a_watch_is_resumed_at_another_member_and_its_lines_have_no_gap() {
    paused(async {
        let (members, keyward) = three();
        let request = post("/v3/watch", "", CREATE);
        let mut answer = ChunkedAnswer::of(keyward.connect(), &request).await;
        let (first, mut call) = crate::member::next_called(&members, WATCH).await;
        let (id, start) = accept(&mut call, 9).await;
        assert_eq!(start, 10);
        let head = answer.head().await;
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("chunked"), "{head}");
        assert_eq!(answer.line().await["result"]["created"], json!(true));
        call.say(&event(id, 11, 2)).await.expect("taken");
        let line = answer.line().await;
        assert_eq!(line["result"]["events"][0]["kv"]["mod_revision"], json!("11"), "{line}");
        members[first].cut();
        let mut call = loop {
            let (_, call) = crate::member::next_of(&members).await;
            match call.path() {
                WATCH => break call,
                TXN => call.reply(&txn_done(20)).await,
                path => panic!("{path}"),
            }
        };
        let (id, start) = accept(&mut call, 20).await;
        assert_eq!(start, 11, "revision 11 may have had further events");
        for revision in [11, 12] {
            call.say(&event(id, revision, 2)).await.expect("taken");
        }
        assert_eq!(answer.line().await["result"]["events"][0]["kv"]["mod_revision"], json!("12"));
    });
}

#[test]
fn a_client_that_left_ends_its_watch_at_the_member() {
    paused(async {
        let (member, keyward) = one_member();
        let mut answer = ChunkedAnswer::of(keyward.connect(), &post("/v3/watch", "", CREATE)).await;
        let mut call = member.called(WATCH).await;
        accept(&mut call, 9).await;
        answer.head().await;
        assert_eq!(keyward.metrics.streams_open.get(), 1);
        drop(answer);
        call.canceled().await;
        settled().await;
        assert_eq!(keyward.metrics.streams_open.get(), 0);
    });
}

#[test]
fn several_requests_stand_in_one_body_and_a_faulty_one_ends_the_stream_with_an_error() {
    paused(async {
        let (_member, keyward) = one_member();
        let body = format!("{CREATE}\n{CREATE} {{\"create_request\":{{\"key\":1}}}}");
        let answer = told(keyward.connect(), post("/v3/watch", "", &body).as_bytes()).await;
        let (status, _, body) = parts(&answer);
        let told: Value = serde_json::from_str(body).expect("JSON");
        assert_eq!((status, &told["code"]), (400, &json!(3)), "{answer}");
    });
}

#[test]
fn keepalives_are_answered_each_and_the_end_of_the_body_ends_the_stream() {
    paused(async {
        let (member, keyward) = one_member();
        let request = post("/v3/lease/keepalive", "", r#"{"ID":"7"}{"ID":"8"}"#);
        let script = async {
            let mut call = member.called(KEEP_ALIVE).await;
            for id in [7, 8] {
                call.messages.next().await.expect("a renewal");
                call.say(&renewed(id, 60)).await.expect("taken");
            }
            while call.messages.next().await.is_ok() {}
        };
        let (answer, ()) = tokio::join!(told(keyward.connect(), request.as_bytes()), script);
        let (status, _, body) = parts(&answer);
        assert_eq!(status, 200, "{answer}");
        for id in [7, 8] {
            assert!(body.contains(&format!("\"ID\":\"{id}\",\"TTL\":\"60\"}}}}\n")), "{answer}");
        }
        assert!(body.ends_with("0\r\n\r\n"), "{answer}");
    });
}

#[test]
fn a_time_limit_ends_a_watch_with_the_line_of_an_error() {
    paused(async {
        let (member, keyward) = one_member();
        let request = post("/v3/watch", "Grpc-Timeout: 5S\r\n", CREATE);
        let mut answer = ChunkedAnswer::of(keyward.connect(), &request).await;
        let mut call = member.called(WATCH).await;
        accept(&mut call, 9).await;
        answer.head().await;
        answer.line().await;
        let began = tokio::time::Instant::now();
        let line = answer.line().await;
        assert_eq!(line["error"]["grpc_code"], json!(4), "{line}");
        assert!(began.elapsed() <= Duration::from_secs(5));
        assert_eq!(answer.chunk().await, None);
    });
}

/// A snapshot that breaks off must not look complete.
#[test]
fn an_answer_that_breaks_off_has_no_regular_end() {
    paused(async {
        let (member, keyward) = one_member();
        let mut answer =
            ChunkedAnswer::of(keyward.connect(), &post("/v3/maintenance/snapshot", "", "{}")).await;
        let mut call = member.called("/etcdserverpb.Maintenance/Snapshot").await;
        call.say(b"\x1a\x03abc").await.expect("taken");
        answer.head().await;
        assert_eq!(answer.line().await["result"]["blob"], json!("YWJj"));
        call.end(Code::Unavailable, "etcdserver: server stopped");
        let line = answer.line().await;
        assert_eq!(line["error"]["message"], json!("etcdserver: server stopped"), "{line}");
        assert_eq!(answer.chunk().await, None);
    });
}
