//! WebSocket on a JSON route: a message for each document and for each line, with the token in the subprotocol; the
//! call ends with the connection.

use std::cell::Cell;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};
use tokio_tungstenite::tungstenite::protocol::frame::{Frame, FrameHeader};
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role};

use crate::http1::told;
use crate::member::Member;
use crate::rest::parts;
use crate::rig::{Keyward, log_in_with, one_member, paused, settled};
use crate::words::{RANGE, WATCH, create_of, created, event, range, ranged, ranged_value};

const LOGIN: &str = "/v3/auth/authenticate";
const LOCK: &str = "/v3lockpb.Lock/Lock";
const LOCK_NAME: &str = r#"{"name":"bA=="}"#;
const MIB: usize = 1 << 20;

fn handshake(path: &str, fields: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{fields}\r\n")
}

/// The fields of a client's handshake, with the example key of RFC 6455.
const FIELDS: &str = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n";

/// A client's handshake.
pub(crate) fn asking(path: &str, fields: &str) -> String {
    handshake(path, &format!("{FIELDS}{fields}"))
}

pub(crate) async fn open(keyward: &Keyward, path: &str, fields: &str) -> WebSocketStream<DuplexStream> {
    let mut io = keyward.connect();
    io.write_all(asking(path, fields).as_bytes()).await.expect("room");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(io.read_u8().await.expect("a head"));
    }
    let head = String::from_utf8(head).expect("text").to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 101"), "{head}");
    // The answer to the example key, from the RFC.
    assert!(head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="), "{head}");
    assert_eq!(head.contains("sec-websocket-protocol: bearer"), !fields.is_empty(), "{head}");
    WebSocketStream::from_raw_socket(io, Role::Client, None).await
}

async fn json_of(socket: &mut WebSocketStream<DuplexStream>) -> Value {
    loop {
        match socket.next().await.expect("it lives").expect("a message") {
            Message::Text(text) => return serde_json::from_str(&text).expect("JSON"),
            Message::Ping(_) | Message::Pong(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_watch_takes_documents_and_gives_lines_until_the_client_leaves() {
    paused(async {
        let (member, keyward) = one_member();
        let mut socket = open(&keyward, "/v3/watch", "").await;
        let create = r#"{"create_request":{"key":"aw==","start_revision":"10"}}"#;
        socket.send(Message::text(create)).await.expect("sent");
        let mut call = member.called(WATCH).await;
        let create = create_of(&call.messages.next().await.expect("a request")).expect("a create");
        call.say(&created(create.watch_id, 9)).await.expect("taken");
        assert_eq!(json_of(&mut socket).await["result"]["created"], json!(true));
        socket.send(Message::Ping("p".into())).await.expect("sent");
        call.say(&event(create.watch_id, 11, 2)).await.expect("taken");
        let line = json_of(&mut socket).await;
        assert_eq!(line["result"]["events"][0]["kv"]["mod_revision"], json!("11"), "{line}");
        socket.close(None).await.expect("closed");
        assert!(matches!(socket.next().await, Some(Ok(Message::Close(_)))), "the Close is answered");
        call.canceled().await;
        settled().await;
        assert_eq!(keyward.metrics.streams_open.get(), 0);
    });
}

#[test]
fn a_unary_call_takes_one_document_and_closes_the_connection() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        let token = log_in_with(&client, "alice", "right").await;
        let fields = format!("Sec-WebSocket-Protocol: Bearer, {token}\r\n");
        let mut socket = open(&keyward, "/v3/kv/range", &fields).await;
        socket.send(Message::text(r#"{"key":"aw=="}"#)).await.expect("sent");
        member.called(RANGE).await.reply(&ranged(7)).await;
        assert_eq!(json_of(&mut socket).await["header"]["revision"], json!("7"));
        assert!(matches!(socket.next().await, Some(Ok(Message::Close(_)))));
        // A bad token is refused before any document.
        let mut socket =
            open(&keyward, "/v3/kv/range", "Sec-WebSocket-Protocol: Bearer, kw1_forged\r\n").await;
        assert_eq!(json_of(&mut socket).await["code"], json!(16));
    });
}

#[test]
fn a_handshake_with_a_fault_is_refused() {
    paused(async {
        let (member, keyward) = one_member();
        for (fields, status) in [
            ("Sec-WebSocket-Version: 13\r\n", 400),
            ("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 8\r\n", 400),
            ("Sec-WebSocket-Key: c2hvcnQ=\r\nSec-WebSocket-Version: 13\r\n", 400),
        ] {
            let request = handshake("/v3/watch", &format!("{fields}Connection: close\r\n"));
            let answer = told(keyward.connect(), request.as_bytes()).await;
            let (found, head, _) = parts(&answer);
            assert_eq!(found, status, "{answer}");
            assert!(head.contains("sec-websocket-version: 13"), "{answer}");
        }
        settled().await;
        assert!(member.was_called_again().is_none());
    });
}

/// A fragment of a text message.
fn fragment(text: &str, is_first: bool, is_last: bool) -> Message {
    let opcode = OpCode::Data(if is_first { Data::Text } else { Data::Continue });
    let header = FrameHeader { is_final: is_last, opcode, ..FrameHeader::default() };
    Message::Frame(Frame::from_payload(header, text.as_bytes().to_vec().into()))
}

/// The status with which the connection is closed.
async fn closed(socket: &mut WebSocketStream<DuplexStream>) -> u16 {
    loop {
        match socket.next().await.expect("a Close").expect("a message") {
            Message::Close(Some(CloseFrame { code, .. })) => return code.into(),
            Message::Close(None) => return 0,
            _ => {}
        }
    }
}

#[test]
fn a_document_comes_in_fragments_and_a_large_answer_goes_in_fragments() {
    paused(async {
        let (member, keyward) = one_member();
        let mut socket = open(&keyward, "/v3/kv/range", "").await;
        socket.send(fragment(r#"{"ke"#, true, false)).await.expect("sent");
        socket.send(Message::Ping("p".into())).await.expect("sent");
        socket.send(fragment("", false, false)).await.expect("sent");
        socket.send(fragment(r#"y":"aw=="}"#, false, true)).await.expect("sent");
        let answer = async {
            let mut call = member.called(RANGE).await;
            assert_eq!(call.message().await, range("k"));
            call.reply(&ranged_value(MIB)).await;
        };
        let (answered, ()) = tokio::join!(json_of(&mut socket), answer);
        let value = answered["kvs"][0]["value"].as_str().map(str::len);
        assert_eq!(value, Some(MIB.div_ceil(3) * 4), "as one message");
        assert!(matches!(socket.next().await, Some(Ok(Message::Close(_)))));
    });
}

/// Forty strangers with an unfinished message of 1 MiB each.
#[test]
fn unfinished_messages_are_in_the_budget_of_those_who_are_nobody() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[limits]\nreplay_buffer = \"64MiB\"\n[runtime]\nshards = 1\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::On, lines);
        let mut sockets = Vec::new();
        let begun = format!(r#"{{"name":"{}"#, "x".repeat(MIB));
        let mut refused = 0;
        for _ in 0..40 {
            let mut socket = open(&keyward, LOGIN, "").await;
            let sent = timeout(Duration::from_millis(100), socket.send(fragment(&begun, true, false)));
            drop(sent.await);
            if let Ok(Some(_)) = timeout(Duration::from_millis(1), socket.next()).await {
                refused += 1;
            }
            sockets.push(socket);
        }
        let held = usize::try_from(keyward.metrics.request_memory.bytes.get()).expect("held");
        assert!((8 * MIB..=17 * MIB).contains(&held), "{held} bytes are charged");
        assert!(refused >= 20, "{refused} are refused");
        drop(sockets);
        settled().await;
        assert_eq!(keyward.metrics.request_memory.bytes.get(), 0);
    });
}

#[test]
fn behind_the_only_document_nothing_is_read_but_pings() {
    paused(async {
        let (member, keyward) = one_member();
        let mut socket = open(&keyward, "/v3/lock/lock", "").await;
        socket.send(Message::text(LOCK_NAME)).await.expect("sent");
        let mut call = member.called(LOCK).await;
        call.message().await;
        socket.send(Message::Ping("p".into())).await.expect("sent");
        assert_eq!(socket.next().await.expect("lives").expect("a Pong"), Message::Pong("p".into()));
        let more = Message::binary(vec![b' '; MIB]);
        let sent = timeout(Duration::from_secs(60), socket.send(more)).await;
        assert!(sent.is_err(), "a second document is not read");
        let held = keyward.metrics.request_memory.bytes.get();
        assert!(held < 64 * 1024, "{held} bytes");
        call.reply(&ranged(7)).await;
        assert_eq!(json_of(&mut socket).await["header"]["revision"], json!("7"));
    });
}

#[test]
fn a_message_has_a_number_of_fragments_and_a_time() {
    paused(async {
        let (member, keyward) = one_member();
        let mut socket = open(&keyward, "/v3/watch", "").await;
        let begun = Instant::now();
        socket.feed(fragment("{", true, false)).await.expect("sent");
        for _ in 0..10_000 {
            if socket.feed(fragment("", false, false)).await.is_err() {
                break;
            }
        }
        drop(timeout(Duration::from_secs(1), socket.flush()).await);
        assert_eq!(closed(&mut socket).await, 1008);
        assert!(begun.elapsed().as_secs() < 10, "by the number, not by the time");

        let mut socket = open(&keyward, "/v3/watch", "").await;
        // No message is begun: the stream may wait for as long as it likes.
        sleep(Duration::from_secs(600)).await;
        let begun = Instant::now();
        socket.send(fragment("{", true, false)).await.expect("sent");
        sleep(Duration::from_secs(29)).await;
        socket.send(fragment(r#""x""#, false, false)).await.expect("sent");
        assert_eq!(closed(&mut socket).await, 1008);
        assert_eq!(begun.elapsed().as_secs(), 30);
        // The client has a second to answer the Close.
        sleep(Duration::from_secs(2)).await;
        assert!(keyward.metrics.streams_open.get() == 0 && member.was_called_again().is_none());
    });
}

#[test]
fn an_upgrade_without_a_call_ends_at_the_time_of_the_first_call() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[limits]\nfirst_call_timeout = \"5s\"\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::On, lines);
        let began = Instant::now();
        let mut socket = open(&keyward, LOGIN, "").await;
        while let Some(Ok(_)) = socket.next().await {}
        assert!((5..=7).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    });
}

/// What fits into the pipe of a connection unread.
const PIPE: usize = 256 * 1024;

/// Lets every ready task run once. `yield_now` lets the runtime run many tasks, some of them several times.
async fn back_of_the_queue() {
    let mut has_waited = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut has_waited, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Four strangers send fragments without a byte: how many bytes of theirs are read between two turns of another
/// task.
#[test]
fn fragments_of_strangers_leave_turns_to_others() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], AuthSetting::On, "[runtime]\nshards = 1\n");
        let read = Rc::<Cell<usize>>::default();
        let tasks = Tasks::default();
        for _ in 0..4 {
            let mut io = open(&keyward, LOGIN, "").await.into_inner();
            let read = Rc::clone(&read);
            let flood = async move {
                let empty = b"\x00\x80\0\0\0\0".repeat(64);
                io.write_all(b"\x01\x81\0\0\0\0{").await.expect("open");
                while io.write_all(&empty).await.is_ok() {
                    read.set(read.get() + empty.len());
                }
            };
            tasks.spawn("a flood", flood).detach();
        }
        let client = keyward.client().await;
        let rounds = Rc::<Cell<usize>>::default();
        let counted = Rc::clone(&rounds);
        let count = async move {
            loop {
                counted.set(counted.get() + 1);
                back_of_the_queue().await;
            }
        };
        tasks.spawn("another task", count).detach();
        let before = (read.get(), rounds.get());
        for _ in 0..10 {
            let outcome = client.call("/grpc.health.v1.Health/Check", Vec::new()).await;
            assert_eq!(outcome.end.code(), Some(Code::Ok));
        }
        let (during, turns) = (read.get() - before.0, rounds.get() - before.1);
        assert!(during > 0, "they flood on");
        assert!(during <= 4 * (PIPE + turns * 2 * 4096), "{during} bytes of frames in {turns} turns");
    });
}
