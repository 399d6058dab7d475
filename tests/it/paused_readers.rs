//! A reader of a long answer may pause for as long as at etcd while nobody waits for its room; an answer given up all the same
//! ends behind a whole message, with the reason.

use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use keyward::refusal::{Code, Refusal, Status};
use keyward::rpc::frame::encode;
use keyward::telemetry::unread_metrics::GiveUpReason;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::client::Client;
use crate::rest::post as post_text;
use crate::rest_http2::post;
use crate::rest_streams::ChunkedAnswer;
use crate::rig::{paused, settled};
use crate::unread_answers::{LARGE, PARTS, STREAMS, Site, others_get_everything, part};
use crate::words::{RANGE, range};

const ALONE: &str = "[runtime]\nshards = 1\n";
/// The least buffer, which is room for seven paused streams and one large answer.
const LITTLE: &str = "[limits]\nunread_buffer = \"16MiB\"\n[runtime]\nshards = 1\n";
const FULL: usize = 7;
const MINUTE: Duration = Duration::from_secs(60);
/// As long as a test may take, nearly.
const LONG: Duration = Duration::from_secs(600);

/// With HTTP/2's default window for a stream, and enough for many streams.
async fn client(site: &Site) -> Client {
    let mut builder = h2::client::Builder::new();
    builder.initial_connection_window_size(64 << 20);
    Client::with(site.keyward.connect(), &site.keyward.tasks, &builder).await
}

fn lost(site: &Site) -> (u64, u64) {
    (site.given_up(GiveUpReason::ForTime), site.given_up(GiveUpReason::ForRoom))
}

/// A stream of gRPC, read by hand: what a message's reader would not show is seen.
struct RawStream {
    body: RecvStream,
    read: Vec<u8>,
}

impl RawStream {
    /// Begins, and reads somewhat more than a message.
    async fn begin(client: &Client, path: &str) -> Self {
        let mut stream =
            client.begin(path, if path == STREAMS[0] { Vec::new() } else { range("k") }).await.expect("sent");
        let mut begun = Self { body: stream.body().await, read: Vec::new() };
        while begun.read.len() <= part(0).len() {
            begun.more().await.expect("data");
        }
        begun
    }

    async fn more(&mut self) -> Option<()> {
        let data = self.body.data().await?.expect("no reset");
        self.body.flow_control().release_capacity(data.len()).expect("released");
        self.read.extend_from_slice(&data);
        Some(())
    }

    /// Reads all, which must be whole messages; their number, and the status.
    async fn finish(mut self) -> (usize, Status) {
        while self.more().await.is_some() {}
        let trailers = self.body.trailers().await.expect("no reset").expect("trailers");
        let length = encode(&part(0)).len();
        assert_eq!(self.read.len() % length, 0, "a message was cut");
        for (at, message) in self.read.chunks(length).enumerate() {
            assert!(*message == encode(&part(at)), "{at}");
        }
        (self.read.len() / length, Status::from_headers(&trailers).expect("a status"))
    }
}

#[test]
fn a_reader_that_pauses_gets_everything_and_others_are_served_meanwhile() {
    for path in STREAMS {
        for pause in [70, 600] {
            paused(async move {
                let site = Site::of(1, ALONE);
                let client = client(&site).await;
                let stream = RawStream::begin(&client, path).await;
                sleep(Duration::from_secs(pause - 10)).await;
                others_get_everything(&site).await;
                sleep(Duration::from_secs(10)).await;
                assert_eq!(stream.finish().await, (PARTS, Status::OK));
                settled().await;
                assert_eq!((lost(&site), site.canceled.get(), site.bytes()), ((0, 0), 0, 0));
            });
        }
    }
}

/// The same for a single message, as gRPC and as JSON.
#[test]
fn a_large_get_whose_reader_pauses_comes_whole() {
    paused(async {
        let site = Site::of(1, ALONE);
        let client = client(&site).await;
        let mut get = client.begin(RANGE, range("huge")).await.expect("sent");
        get.answered().await;
        let (response, _half) = post(&client, "/v3/kv/range", r#"{"key":"bGFyZ2U="}"#, true).await;
        let mut body = response.await.expect("an answer").into_body();
        sleep(LONG).await;
        assert!(get.finish().await.message().len() > LARGE);
        let mut read = Vec::new();
        while let Some(data) = body.data().await {
            let data = data.expect("it goes on");
            body.flow_control().release_capacity(data.len()).expect("released");
            read.extend_from_slice(&data);
        }
        serde_json::from_slice::<Value>(&read).expect("a whole document");
        assert_eq!(lost(&site), (0, 0));
    });
}

/// The one unread for longest makes room, and no other: its reader is told between two messages.
#[test]
fn a_paused_stream_whose_room_is_needed_ends_behind_a_message_with_the_reason() {
    let cases = [
        (5, Refusal::UNREAD_AND_FULL, (0, 1)),
        (61, Refusal::UNREAD_FOR_LONG, (1, 0)),
        (300, Refusal::UNREAD_FOR_LONG, (1, 0)),
    ];
    for path in STREAMS {
        for (pause, reason, expected) in cases.clone() {
            paused(async move {
                let site = Site::of(1, LITTLE);
                let mut clients = Vec::new();
                let mut streams = Vec::new();
                for _ in 0..FULL {
                    clients.push(client(&site).await);
                    streams.push(RawStream::begin(clients.last().expect("one"), path).await);
                    sleep(Duration::from_millis(100)).await;
                }
                let (_other, mut unread) = site.unread_of("large", 1).await;
                unread[0].answered().await;
                sleep(Duration::from_secs(pause)).await;
                assert_eq!(lost(&site), (0, 0), "nobody waits for room");
                let outcome = site.keyward.client().await.call(RANGE, range("large")).await;
                assert!(outcome.message().len() > LARGE);
                settled().await;
                assert_eq!((lost(&site), site.canceled.get()), (expected, 1));
                for (at, stream) in streams.into_iter().enumerate() {
                    let (messages, status) = stream.finish().await;
                    if at == 0 {
                        assert!((1..PARTS).contains(&messages));
                        assert_eq!((status.code, &*status.message), (Code::Unavailable, reason.message()));
                    } else {
                        assert_eq!((messages, status), (PARTS, Status::OK));
                    }
                }
                assert!(unread.remove(0).finish().await.message().len() > LARGE);
                settled().await;
                assert_eq!((lost(&site), site.bytes()), (expected, 0));
            });
        }
    }
}

/// Each holds a stream of a member: a connection has few beyond the time, and loses the oldest beyond that.
#[test]
fn a_connection_has_sixteen_answers_unread_for_longer_than_the_time() {
    paused(async {
        let site = Site::of(1, ALONE);
        let client = client(&site).await;
        let mut streams = Vec::new();
        for _ in 0..20 {
            let mut stream = client.begin(STREAMS[0], Bytes::new()).await.expect("sent");
            stream.answered().await;
            streams.push(stream);
            sleep(Duration::from_secs(1)).await;
        }
        sleep(MINUTE - Duration::from_secs(5)).await;
        assert_eq!(lost(&site), (0, 0), "sixteen may pause");
        sleep(Duration::from_secs(6)).await;
        assert_eq!((lost(&site), site.canceled.get()), ((4, 0), 4));
        sleep(LONG).await;
        assert_eq!(lost(&site), (4, 0));
        for (at, stream) in streams.into_iter().enumerate() {
            let outcome = stream.finish().await;
            let expected = if at < 4 { Some(Code::Unavailable) } else { Some(Code::Ok) };
            assert_eq!(outcome.end.code(), expected, "{at}");
            assert_eq!(outcome.messages.len() == PARTS, at >= 4, "{at}");
        }
    });
}

/// The lines of a snapshot as JSON over HTTP/2.
struct JsonStream {
    body: RecvStream,
    read: Vec<u8>,
}

impl JsonStream {
    async fn begin(client: &Client) -> Self {
        let (response, half) = post(client, "/v3/maintenance/snapshot", "{}", true).await;
        let body = response.await.expect("an answer").into_body();
        drop(half);
        Self { body, read: Vec::new() }
    }

    async fn finish(mut self) -> Vec<Value> {
        while let Some(data) = self.body.data().await {
            let data = data.expect("no reset");
            self.body.flow_control().release_capacity(data.len()).expect("released");
            self.read.extend_from_slice(&data);
        }
        let lines = self.read.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).expect("a line of JSON")).collect()
    }
}

#[test]
fn a_snapshot_as_json_waits_for_its_reader_and_ends_with_a_line_of_the_reason() {
    paused(async {
        let site = Site::of(1, LITTLE);
        let mut http1 =
            ChunkedAnswer::of(site.keyward.connect(), &post_text("/v3/maintenance/snapshot", "", "{}")).await;
        http1.head().await;
        sleep(Duration::from_secs(1)).await;
        let (mut clients, mut http2) = (Vec::new(), Vec::new());
        for _ in 1..FULL {
            let client = client(&site).await;
            http2.push(JsonStream::begin(&client).await);
            clients.push(client);
            sleep(Duration::from_secs(1)).await;
        }
        sleep(LONG).await;
        assert_eq!(lost(&site), (0, 0), "nobody waits for room");
        // Three answers that nobody reads: there is room for the first, the others take the places of the oldest streams.
        let mut gets = Vec::new();
        for _ in 0..3 {
            let (client, mut streams) = site.unread_of("large", 1).await;
            streams[0].answered().await;
            gets.push((client, streams));
        }
        settled().await;
        assert_eq!(lost(&site), (2, 0));
        let mut lines = Vec::new();
        while let Some(chunk) = http1.chunk().await {
            lines.push(serde_json::from_str::<Value>(&chunk).expect("a line of JSON"));
        }
        let mut all = vec![lines];
        for stream in http2 {
            all.push(stream.finish().await);
        }
        for (at, lines) in all.iter().enumerate() {
            let (last, others) = lines.split_last().expect("lines");
            assert!(others.iter().all(|line| line["result"]["blob"].is_string()));
            if at < 2 {
                assert_eq!(last["error"]["grpc_code"], json!(14), "{at}: {last}");
                assert_eq!(last["error"]["message"], json!(Refusal::UNREAD_FOR_LONG.message()));
            } else {
                assert_eq!(lines.len(), PARTS, "{at}");
            }
        }
        drop(gets);
        settled().await;
        assert_eq!((lost(&site), site.bytes()), ((2, 0), 0));
    });
}
