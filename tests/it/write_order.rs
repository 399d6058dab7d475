//! A write that is sent right behind a create of a watch "from now" is among the watch's events: it goes upstream after a member
//! has registered the watch, or the watch begins before it.

use std::time::Duration;

use keyward::downstream::watch_starts::LONGEST;
use tokio::time::Instant;

use crate::client::{Client, Stream};
use crate::member::{Call, Member, next_called, next_of};
use crate::rig::{paused, settled, three};
use crate::words::{
    PUT, RANGE, WATCH, create_of, created, event, put, range, ranged, refused, revisions, was_put, watch,
    watched,
};

fn nothing_came(members: &[Member]) {
    for member in members {
        let call = member.was_called_again();
        assert!(call.is_none(), "{:?}", call.map(|call| call.path().to_owned()));
    }
}

async fn create_on(call: &mut Call) -> (i64, i64) {
    let create = create_of(&call.messages.next().await.expect("a request")).expect("a create");
    (create.watch_id, create.start_revision)
}

/// A create and a put right behind it, both before anything was answered.
async fn create_and_put(client: &Client) -> (Stream, Stream) {
    let mut stream = client.open(WATCH).await.expect("open");
    stream.say(&watch("k", 0)).await;
    let put = client.begin(PUT, put(5)).await.expect("sent");
    (stream, put)
}

async fn told(stream: &mut Stream) -> Vec<i64> {
    revisions(&watched(&stream.next().await.expect("the watch lives")))
}

async fn created_at(stream: &mut Stream) -> i64 {
    let answer = watched(&stream.next().await.expect("created"));
    assert!(answer.created && !answer.canceled, "{answer:?}");
    answer.header.expect("a header").revision
}

#[test]
fn a_put_behind_a_create_goes_up_when_the_watch_is_registered() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let (mut stream, write) = create_and_put(&client).await;
        let (_, mut call) = next_called(&members, WATCH).await;
        let (id, start) = create_on(&mut call).await;
        assert_eq!(start, 0, "in sync at once");
        settled().await;
        nothing_came(&members);
        // What changes no key, and who is on another connection, does not wait.
        let other = keyward.client().await;
        for (client, path, message) in [(&client, RANGE, range("k")), (&other, PUT, put(5))] {
            let call = client.begin(path, message).await.expect("sent");
            next_called(&members, path).await.1.reply(&ranged(20)).await;
            call.finish().await.message();
        }
        call.say(&created(id, 20)).await.expect("taken");
        next_called(&members, PUT).await.1.reply(&was_put(21)).await;
        call.say(&event(id, 21, 5)).await.expect("taken");
        assert_eq!(created_at(&mut stream).await, 20);
        assert_eq!(told(&mut stream).await, [21]);
        write.finish().await.message();
    });
}

#[test]
fn a_put_behind_the_second_create_of_a_stream_waits_for_that_one() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let (mut stream, write) = create_and_put(&client).await;
        let (_, mut call) = next_called(&members, WATCH).await;
        let (id, _) = create_on(&mut call).await;
        call.say(&created(id, 20)).await.expect("taken");
        next_called(&members, PUT).await.1.reply(&was_put(21)).await;
        write.finish().await.message();
        assert_eq!(created_at(&mut stream).await, 20);
        stream.say(&watch("k", 0)).await;
        let write = client.begin(PUT, put(5)).await.expect("sent");
        let (id, start) = create_on(&mut call).await;
        assert_eq!(start, 0);
        settled().await;
        nothing_came(&members);
        call.say(&created(id, 21)).await.expect("taken");
        next_called(&members, PUT).await.1.reply(&was_put(22)).await;
        assert_eq!(created_at(&mut stream).await, 21);
        write.finish().await.message();
    });
}

/// What is refused, cancelled by its client's going away, or from the past holds up nobody.
#[test]
fn a_put_waits_for_no_create_that_will_not_come_or_begins_in_the_past() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let began = Instant::now();
        let (stream, write) = create_and_put(&client).await;
        let (_, mut call) = next_called(&members, WATCH).await;
        create_on(&mut call).await;
        stream.cancel();
        next_called(&members, PUT).await.1.reply(&was_put(21)).await;
        write.finish().await.message();
        let (mut stream, write) = create_and_put(&client).await;
        let (_, mut call) = next_called(&members, WATCH).await;
        create_on(&mut call).await;
        call.say(&refused("rpc error: code = PermissionDenied desc = etcdserver: permission denied"))
            .await
            .expect("taken");
        next_called(&members, PUT).await.1.reply(&was_put(22)).await;
        write.finish().await.message();
        assert!(watched(&stream.next().await.expect("an answer")).canceled);
        stream.say(&watch("k", 20)).await;
        let write = client.begin(PUT, put(5)).await.expect("sent");
        let mut paths = Vec::new();
        for _ in 0..2 {
            let (_, call) = next_of(&members).await;
            paths.push(call.path().to_owned());
            if call.path() == PUT {
                call.reply(&was_put(23)).await;
                break;
            }
        }
        assert!(paths.contains(&PUT.to_owned()), "{paths:?}");
        write.finish().await.message();
        assert!(began.elapsed() < LONGEST);
    });
}

async fn overtaken(client: &Client, members: &[Member]) -> (Stream, Stream, Call, i64) {
    let read = client.begin(RANGE, range("k")).await.expect("sent");
    next_called(members, RANGE).await.1.reply(&ranged(20)).await;
    read.finish().await.message();
    let began = Instant::now();
    let (stream, write) = create_and_put(client).await;
    let (_, mut call) = next_called(members, WATCH).await;
    let (id, start) = create_on(&mut call).await;
    assert_eq!(start, 0);
    next_called(members, PUT).await.1.reply(&was_put(23)).await;
    assert!(began.elapsed() >= LONGEST);
    (stream, write, call, id)
}

/// A create that takes too long is overtaken, and begins before the write all the same.
#[test]
fn a_watch_that_was_overtaken_begins_before_the_put() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let (mut stream, write, mut call, id) = overtaken(&client, &members).await;
        write.finish().await.message();
        call.say(&created(id, 25)).await.expect("taken");
        // The member registered it behind the put: again, from before it.
        let cancel = call.messages.next().await.expect("a request");
        assert!(create_of(&cancel).is_none());
        let (id, start) = create_on(&mut call).await;
        assert_eq!(start, 20, "what was known then, to be dropped: V4 answers no progress from the future");
        call.say(&created(id, 25)).await.expect("taken");
        for revision in [20, 23] {
            call.say(&event(id, revision, 5)).await.expect("taken");
        }
        assert_eq!(created_at(&mut stream).await, 20);
        assert_eq!(told(&mut stream).await, [23]);
    });
}

#[test]
fn a_watch_that_was_overtaken_and_is_registered_in_time_stays() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let (mut stream, write, mut call, id) = overtaken(&client, &members).await;
        call.say(&created(id, 20)).await.expect("taken");
        call.say(&event(id, 23, 5)).await.expect("taken");
        assert_eq!(created_at(&mut stream).await, 20);
        assert_eq!(told(&mut stream).await, [23]);
        write.finish().await.message();
    });
}

/// A call that has less time than that is not held up past its own end.
#[test]
fn a_put_with_a_deadline_is_refused_at_its_deadline() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("k", 0)).await;
        let (_, _call) = next_called(&members, WATCH).await;
        let hurried = client.again().header("grpc-timeout", "50m");
        let began = Instant::now();
        let outcome = hurried.call(PUT, put(5)).await;
        assert_eq!(outcome.end.code(), Some(keyward::refusal::Code::DeadlineExceeded));
        assert!(began.elapsed() < Duration::from_millis(100));
    });
}
