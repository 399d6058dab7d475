//! WebSocket on a JSON route: a message for each document and for each line, with the token in the subprotocol; the
//! call ends with the connection.

use futures_util::{SinkExt as _, StreamExt as _};
use keyward::tasks::Tasks;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use crate::http1::told;
use crate::member::Member;
use crate::rest::parts;
use crate::rig::{Keyward, log_in_with, one_member, paused, settled};
use crate::words::{RANGE, WATCH, create_of, created, event, ranged};

fn handshake(path: &str, fields: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{fields}\r\n")
}

/// The fields of a client's handshake, with the example key of RFC 6455.
const FIELDS: &str = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n";

/// A client's handshake.
pub(crate) fn asking(path: &str, fields: &str) -> String {
    handshake(path, &format!("{FIELDS}{fields}"))
}

async fn open(keyward: &Keyward, path: &str, fields: &str) -> WebSocketStream<DuplexStream> {
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
