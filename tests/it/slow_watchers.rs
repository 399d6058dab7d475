//! A watch that nobody reads holds up itself and nobody else (rules 37; must-show 10).

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use hyper_util::rt::{TokioExecutor, TokioIo};
use keyward::tasks::Tasks;

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused, settled};
use crate::words::{WATCH, create_of, created, event, revisions, watch, watched};

/// What one reading watch gets, beside the unread ones. With hyper's own windows one unread watch ends the connection
/// after some 16,000 events.
const EVENTS: i64 = 3_000;
/// What each unread watch would get if it were read.
const UNREAD: i64 = 40_000;
const ALL: usize = 20;

/// A client as real ones are: a window per stream, and one for the connection that no stream can use up.
async fn watcher(keyward: &Keyward) -> Client {
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(64 * 1024).initial_connection_window_size(1 << 30);
    Client::with(keyward.connect(), &keyward.tasks, &builder).await
}

/// Tells `count` events of `size` bytes to a watch, as fast as they are taken.
async fn tell(mut call: Call, id: i64, count: i64, size: usize) {
    for revision in 10..10 + count {
        if call.say(&event(id, revision, size)).await.is_err() {
            return;
        }
    }
    // The watch lives on.
    call.canceled().await;
}

async fn opened(client: &Client, member: &Member) -> (Stream, Call, i64) {
    let mut stream = client.open(WATCH).await.expect("open");
    stream.say(&watch("k", 10)).await;
    let mut call = member.called(WATCH).await;
    let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
    // As far as any watch's events will go.
    call.say(&created(create.watch_id, 10 + UNREAD)).await.expect("taken");
    assert!(watched(&stream.next().await.expect("created")).created);
    (stream, call, create.watch_id)
}

/// `unread` of twenty watches are never read; the others get everything, in order.
async fn others_get_everything(unread: usize, size: usize) {
    let tasks = Tasks::default();
    let member = Member::new(1, &tasks);
    let keyward = Keyward::before(&[&member]);
    let client = watcher(&keyward).await;
    let mut ignored = Vec::new();
    for _ in 0..unread {
        let (stream, call, id) = opened(&client, &member).await;
        tasks.spawn("events", tell(call, id, UNREAD, size)).detach();
        ignored.push(stream);
    }
    let mut readers = Vec::new();
    for _ in unread..ALL {
        let (stream, call, id) = opened(&client, &member).await;
        tasks.spawn("events", tell(call, id, EVENTS, size)).detach();
        readers.push(stream);
    }
    assert_eq!(member.dials(), 1, "all on one upstream connection");
    join_all(readers.iter_mut().map(async |stream| {
        let mut next = 10;
        while next < 10 + EVENTS {
            for revision in revisions(&watched(&stream.next().await.expect("the watch lives"))) {
                assert_eq!(revision, next);
                next += 1;
            }
        }
    }))
    .await;
    settled().await;
    assert_eq!(member.dials(), 1, "no connection was lost");
    assert!(!client.is_closed());
    // The unread ones were held back, not dropped: they go on where they stood.
    for stream in &mut ignored {
        let mut next = 10;
        while next < 10 + EVENTS {
            for revision in revisions(&watched(&stream.next().await.expect("the watch lives"))) {
                assert_eq!(revision, next);
                next += 1;
            }
        }
    }
}

#[test]
fn one_unread_watch_of_small_events() {
    paused(others_get_everything(1, 40));
}

#[test]
fn one_unread_watch_of_large_events() {
    paused(others_get_everything(1, 2048));
}

#[test]
fn four_unread_watches_of_small_events() {
    paused(others_get_everything(4, 40));
}

#[test]
fn four_unread_watches_of_large_events() {
    paused(others_get_everything(4, 2048));
}

/// Flow control reaches etcd: of what an unread watch would get, only so much is taken as the windows and pipes between
/// its member and its client hold.
#[test]
fn an_unread_watch_stops_its_own_member() {
    paused(async {
        let tasks = Tasks::default();
        let member = Member::new(1, &tasks);
        let keyward = Keyward::before(&[&member]);
        let client = watcher(&keyward).await;
        let (mut stream, mut call, id) = opened(&client, &member).await;
        let mut taken = 0;
        while taken < UNREAD {
            let next = event(id, 10 + taken, 2048);
            match tokio::time::timeout(Duration::from_secs(10), call.say(&next)).await {
                Ok(said) => said.expect("the watch lives"),
                Err(_held_back) => break,
            }
            taken += 1;
        }
        // Twice a stream's 64 KiB, twice a pipe's 256 KiB, and what is between: 320 events make 640 KiB.
        assert!((30..1000).contains(&taken), "{taken} events were taken from the member");
        for revision in 10..10 + taken {
            assert_eq!(revisions(&watched(&stream.next().await.expect("the watch lives"))), [revision]);
        }
    });
}

/// Why the windows are as they are: on hyper's own, one unread watch of small events ends the connection under all.
#[test]
fn on_hypers_own_windows_one_unread_watch_ends_all_of_them() {
    paused(async {
        let tasks = Tasks::default();
        let member = Member::new(1, &tasks);
        let pipe = member.address.dial().expect("dialled");
        let (mut send, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(pipe))
                .await
                .expect("HTTP/2");
        let ended = tasks.spawn("connection", async move { drop(connection.await) });
        let mut responses = Vec::new();
        for _ in 0..2 {
            let body = http_body_util::Full::new(Bytes::new());
            let request = http::Request::post("http://member.test/w").body(body).expect("a request");
            let answering = send.send_request(request);
            let script = async {
                let mut call = member.call().await;
                call.say(b"created").await.expect("taken");
                call
            };
            let (response, call) = tokio::join!(answering, script);
            responses.push((response.expect("begun"), call));
        }
        let (_never_read, unread) = responses.swap_remove(0);
        tasks.spawn("events", tell(unread, 1, UNREAD, 40)).detach();
        settled().await;
        assert!(ended.is_finished(), "the connection was ended by h2's own guard");
    });
}
