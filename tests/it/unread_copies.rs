//! Answers that Keyward holds whole, as JSON or without their namespace, are counted until the connection has taken their
//! last byte, and are bounded in bytes and in time like all others.

use std::time::Duration;

use futures_util::future::join_all;
use h2::client::ResponseFuture;
use keyward::refusal::Code;
use keyward::telemetry::unread_metrics::GiveUpReason;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::sleep;

use crate::client::Client;
use crate::rest_http2::post;
use crate::rig::{one_member, paused, settled};
use crate::unread_answers::{LARGE, MIB, Site, others_get_everything};
use crate::words::{RANGE, WATCH, create_of, created, event, range};

/// Gets the key `large`.
const GET: &str = r#"{"key":"bGFyZ2U="}"#;
const IN_TIME: &str = "[limits]\nunread_timeout = \"20s\"\n[runtime]\nshards = 1\n";
/// The least buffer, half of it for one connection.
const LITTLE: &str = "[limits]\nunread_buffer = \"16MiB\"\nunread_timeout = \"20s\"\n[runtime]\nshards = 1\n";
const IN_BYTES: &str = "[limits]\nunread_buffer = \"128MiB\"\n[runtime]\nshards = 1\n";
const UNREAD: usize = 60;

/// The length of the large value as JSON.
fn json_length() -> i64 {
    i64::try_from(LARGE * 4 / 3).expect("small")
}

async fn http2(site: &Site) -> Client {
    Client::with(site.keyward.connect(), &site.keyward.tasks, &h2::client::Builder::new()).await
}

async fn unread_json(client: &Client, count: usize) -> Vec<ResponseFuture> {
    let mut asked = Vec::new();
    for _ in 0..count {
        asked.push(post(client, "/v3/kv/range", GET, true).await.0);
    }
    asked
}

/// The bytes of a body, and its end.
async fn read_all(mut body: h2::RecvStream) -> (Vec<u8>, Result<(), h2::Error>) {
    let mut read = Vec::new();
    loop {
        match body.data().await {
            None => return (read, Ok(())),
            Some(Err(error)) => return (read, Err(error)),
            Some(Ok(data)) => {
                body.flow_control().release_capacity(data.len()).expect("released");
                read.extend_from_slice(&data);
            }
        }
    }
}

/// The fourth waits for room within its connection's half.
#[test]
fn unread_json_over_http2_is_counted_and_given_up_for_another() {
    paused(async {
        let site = Site::of(1, LITTLE);
        let client = http2(&site).await;
        let mut answers = Vec::new();
        for expected in [0, 0, 0, 1] {
            answers.extend(join_all(unread_json(&client, 1).await).await);
            settled().await;
            assert!(site.bytes() >= json_length() - MIB, "{} bytes", site.bytes());
            assert_eq!(site.given_up(GiveUpReason::ForTime), expected);
            sleep(Duration::from_secs(600)).await;
            assert_eq!(site.given_up(GiveUpReason::ForTime), expected, "nobody needs its room");
        }
        let read = answers.into_iter().map(|answer| read_all(answer.expect("a response").into_body()));
        for (at, (read, end)) in join_all(read).await.into_iter().enumerate() {
            assert_eq!(end.is_ok_and(|()| read.len() > LARGE), at > 0, "{at}: {} bytes", read.len());
        }
        settled().await;
        assert_eq!(site.bytes(), 0);
    });
}

#[test]
fn unread_json_over_http1_is_counted_and_given_up_for_another() {
    paused(async {
        let site = Site::of(1, LITTLE);
        let request = format!(
            "POST /v3/kv/range HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{GET}",
            GET.len()
        );
        let mut connections = Vec::new();
        while site.given_up(GiveUpReason::ForTime) == 0 {
            let mut connection = site.keyward.connect();
            connection.write_all(request.as_bytes()).await.expect("room");
            let mut head = [0; 15];
            connection.read_exact(&mut head).await.expect("an answer");
            assert_eq!(&head, b"HTTP/1.1 200 OK");
            connections.push(connection);
            settled().await;
            // What the connection has not taken of the answers, and the copies of the newest.
            assert!(site.bytes() >= json_length() - MIB, "{} bytes", site.bytes());
            assert!(connections.len() < 16, "one takes the place of another");
            sleep(Duration::from_secs(60)).await;
        }
        assert!(connections.len() > 6, "nothing is given up without need: {}", connections.len());
        for (at, mut connection) in connections.into_iter().enumerate() {
            let mut rest = Vec::new();
            connection.read_to_end(&mut rest).await.expect("the end");
            assert_eq!(rest.len() > LARGE, at > 0, "{at}: {} bytes", rest.len());
        }
        assert_eq!(site.given_up(GiveUpReason::ForTime), 1, "no more than needed");
        settled().await;
        assert_eq!(site.bytes(), 0);
    });
}

/// By one connection and by many.
#[test]
fn unread_json_stays_within_the_buffer_and_holds_up_nobody_else() {
    for connections in [1, 16] {
        paused(async move {
            let site = Site::of(1, IN_BYTES);
            let clients = join_all((0..connections).map(|_| http2(&site))).await;
            let unread = join_all(clients.iter().map(|client| unread_json(client, UNREAD))).await;
            settled().await;
            assert!(site.bytes() >= 32 * MIB, "{} bytes are counted", site.bytes());
            others_get_everything(&site).await;
            assert!(site.bytes() <= 128 * MIB, "{} bytes", site.bytes());
            drop((unread, clients));
            settled().await;
            assert_eq!(site.bytes(), 0, "all room was given back");
        });
    }
}

#[test]
fn json_that_is_read_comes_whole_and_leaves_nothing() {
    paused(async {
        let site = Site::of(1, IN_TIME);
        let client = http2(&site).await;
        let answers = join_all(unread_json(&client, 3).await).await;
        let read = answers.into_iter().map(|answer| read_all(answer.expect("a response").into_body()));
        for (read, end) in join_all(read).await {
            end.expect("a regular end");
            let json: serde_json::Value = serde_json::from_slice(&read).expect("JSON");
            assert_eq!(json["kvs"][0]["value"].as_str().map(str::len), Some(LARGE.div_ceil(3) * 4));
        }
        settled().await;
        assert_eq!((site.bytes(), site.given_up(GiveUpReason::ForTime)), (0, 0));
    });
}

/// An answer without room is not read from its member: the bytes that have arrived are dropped, and the read is repeated.
#[test]
fn answers_of_a_namespace_wait_at_their_member_and_not_in_memory() {
    paused(async {
        let site = Site::at(1, "namespace = '/n/'\n", IN_BYTES, "/n/k");
        let (_client, streams) = site.unread_of("huge", UNREAD).await;
        settled().await;
        let held = site.asked.get() - site.canceled.get();
        // Each is held twice while its prefix is taken away, and once afterwards.
        assert!(held <= 128 / 5, "{held} of {} answers are held", site.asked.get());
        assert!((32 * MIB..=128 * MIB).contains(&site.bytes()), "{} bytes", site.bytes());
        let other = site.keyward.client().await;
        let outcome = other.call(RANGE, range("huge")).await;
        assert_eq!((outcome.end.code(), outcome.message().len() > LARGE), (Some(Code::Ok), true));
        drop(streams);
        settled().await;
        assert_eq!(site.bytes(), 0);
    });
}

/// An event is held as it came and as a line of JSON, which is larger.
#[test]
fn an_unread_event_counts_with_its_json() {
    paused(async {
        let (member, keyward) = one_member();
        let builder = h2::client::Builder::new();
        let client = Client::with(keyward.connect(), &keyward.tasks, &builder).await;
        let create = r#"{"create_request":{"key":"aw==","start_revision":"10"}}"#;
        let (response, _half) = post(&client, "/v3/watch", create, false).await;
        let mut call = member.called(WATCH).await;
        let id = create_of(&call.messages.next().await.expect("a request")).expect("a create").watch_id;
        call.say(&created(id, 9)).await.expect("taken");
        let body = response.await.expect("an answer").into_body();
        call.say(&event(id, 11, LARGE)).await.expect("taken");
        settled().await;
        let held = keyward.metrics.watch_held_bytes.get();
        let large = i64::try_from(LARGE).expect("small");
        assert!((3 * large..4 * large).contains(&held), "{held} bytes");
        drop((body, client));
        settled().await;
        assert_eq!(keyward.metrics.watch_held_bytes.get(), 0);
    });
}
