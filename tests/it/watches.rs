//! A client's watch outlives its upstream streams: what it is told is one history, without gap or double.

use std::sync::Arc;
use std::time::Duration;

use h2::Reason;
use keyward::members::membership::{Readiness, UnreadyReason as Unfit};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use tokio::time::Instant;

use crate::client::{Client, Stream};
use crate::member::{Call, Member, next_of};
use crate::rig::{Keyward, paused, settled, three};
use crate::words::{
    INVALID_TOKEN, RANGE, TXN, WATCH, create_of, created, event, ranged, refused, revisions, txn_done, watch,
    watched,
};

/// The next call of any member that is a watch; reads of a revision are answered on the way.
async fn next_watch(members: &[Member]) -> (usize, Call) {
    loop {
        let (at, call) = next_of(members).await;
        match call.path() {
            WATCH => return (at, call),
            TXN => call.reply(&txn_done(20)).await,
            path => panic!("{path}"),
        }
    }
}

/// Answers the next create on the stream. Its id, and where it begins.
async fn accept(call: &mut Call, revision: i64) -> (i64, i64) {
    let create = create_of(&call.messages.next().await.expect("a request")).expect("a create");
    call.say(&created(create.watch_id, revision)).await.expect("taken");
    (create.watch_id, create.start_revision)
}

async fn watching(client: &Client, start: i64) -> Stream {
    let mut stream = client.open(WATCH).await.expect("open");
    stream.say(&watch("k", start)).await;
    stream
}

async fn told(stream: &mut Stream) -> Vec<i64> {
    revisions(&watched(&stream.next().await.expect("the watch lives")))
}

fn publish_all(keyward: &Keyward, readiness: Readiness) {
    keyward.publish(|membership| {
        for member in &mut membership.members {
            Arc::make_mut(member).readiness = readiness;
        }
    });
}

/// A member that hangs keeps its connections; only its probes say so.
#[test]
fn leaves_a_member_that_stopped_serving_without_a_word() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = watching(&client, 10).await;
        let (first, mut silent) = next_watch(&members).await;
        accept(&mut silent, 9).await;
        assert!(watched(&stream.next().await.expect("created")).created);
        let hung = members[first].address.id;
        let began = Instant::now();
        keyward.publish(|membership| {
            for member in membership.members.iter_mut().filter(|member| member.id == hung) {
                Arc::make_mut(member).readiness = Readiness::NotReady(Unfit::Unreachable);
            }
        });
        let (second, mut call) = next_watch(&members).await;
        assert_ne!(first, second, "another member");
        assert!(began.elapsed() < Duration::from_secs(5), "long before HTTP/2's pings fail");
        let (id, start) = accept(&mut call, 14).await;
        assert_eq!(start, 10);
        call.say(&event(id, 11, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, [11]);
    });
}

#[test]
fn resumes_after_a_cut_without_gap_and_without_double() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = watching(&client, 10).await;
        let (first, mut call) = next_watch(&members).await;
        let (id, start) = accept(&mut call, 9).await;
        assert_eq!(start, 10);
        assert!(watched(&stream.next().await.expect("created")).created);
        for revision in [10, 11] {
            call.say(&event(id, revision, 5)).await.expect("taken");
            assert_eq!(told(&mut stream).await, [revision]);
        }
        members[first].cut();
        let (second, mut call) = next_watch(&members).await;
        assert_ne!(first, second, "another member");
        let (id, start) = accept(&mut call, 14).await;
        assert_eq!(
            start, 11,
            "the last one that was told, to be dropped: V4 answers no progress from the future"
        );
        for revision in [11, 12, 13] {
            call.say(&event(id, revision, 5)).await.expect("taken");
        }
        assert_eq!(told(&mut stream).await, [12]);
        assert_eq!(told(&mut stream).await, [13]);
        assert_eq!(keyward.metrics.watch_resumes.get(), 1);
    });
}

#[test]
fn every_way_of_ending_resumes() {
    paused(async {
        let ends: [fn(Call); 5] = [
            |call| call.reset(Reason::CANCEL),
            |call| call.reset(Reason::INTERNAL_ERROR),
            |call| call.end(Code::Unavailable, "etcdserver: no leader"),
            |call| call.end(Code::Canceled, "etcdserver: watch canceled"),
            Call::end_without_status,
        ];
        for end in ends {
            let (members, keyward) = three();
            let client = keyward.client().await;
            let mut stream = watching(&client, 10).await;
            let (_, mut call) = next_watch(&members).await;
            let (id, _) = accept(&mut call, 9).await;
            stream.next().await.expect("created");
            call.say(&event(id, 10, 5)).await.expect("taken");
            assert_eq!(told(&mut stream).await, [10]);
            end(call);
            let (_, mut call) = next_watch(&members).await;
            let (id, start) = accept(&mut call, 10).await;
            assert_eq!(start, 10);
            for revision in [10, 11] {
                call.say(&event(id, revision, 5)).await.expect("taken");
            }
            assert_eq!(told(&mut stream).await, [11]);
        }
    });
}

/// A watch from now begins where its Created said (V5: or a little before, which is dropped), on whichever member.
#[test]
fn a_watch_from_now_keeps_its_beginning_over_a_loss() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = watching(&client, 0).await;
        let (first, mut call) = next_watch(&members).await;
        let (id, start) = accept(&mut call, 20).await;
        assert_eq!(start, 0, "nothing is read before it");
        let answer = watched(&stream.next().await.expect("created"));
        assert_eq!(answer.header.map(|header| header.revision), Some(20), "where the client resumes from");
        call.say(&event(id, 19, 5)).await.expect("taken");
        settled().await;
        members[first].cut();
        let (_, mut call) = next_watch(&members).await;
        let (id, start) = accept(&mut call, 30).await;
        assert_eq!(start, 20, "its beginning, to be dropped: V4 answers no progress from the future");
        for revision in [20, 22] {
            call.say(&event(id, revision, 5)).await.expect("taken");
        }
        assert_eq!(told(&mut stream).await, [22]);
    });
}

async fn with_auth() -> (Member, Keyward, Client) {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::with_auth(&[&member]);
    let client = keyward.logged_in("alice").await;
    (member, keyward, client)
}

/// Story 1's moment: the token died under a live stream, and a second watch is created on it.
#[test]
fn a_token_refused_at_create_is_healed_on_a_stream_of_its_own() {
    paused(async {
        let (member, _keyward, client) = with_auth().await;
        let mut stream = watching(&client, 10).await;
        let mut first = member.called(WATCH).await;
        let (old, _) = accept(&mut first, 9).await;
        stream.next().await.expect("created");
        stream.say(&watch("k2", 10)).await;
        create_of(&first.messages.next().await.expect("a request")).expect("a create");
        let reason = format!("rpc error: code = Unauthenticated desc = {INVALID_TOKEN}");
        first.say(&refused(&reason)).await.expect("taken");
        // The token is proven before the create is sent again: the member does not know it.
        member.called(TXN).await.refuse(Code::Unauthenticated, INVALID_TOKEN);
        let proof = member.called(TXN).await;
        assert_eq!(proof.token(), Some("alice.2"));
        proof.reply(&txn_done(9)).await;
        let mut second = member.called(WATCH).await;
        assert_eq!(second.token(), Some("alice.2"));
        let (new, _) = accept(&mut second, 9).await;
        let answer = watched(&stream.next().await.expect("created"));
        assert!(answer.created && !answer.canceled && answer.watch_id == 1, "{answer:?}");
        // The first watch lives on its old stream.
        first.say(&event(old, 10, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, [10]);
        second.say(&event(new, 10, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, [10]);
    });
}

/// Auth was off and is turned on: the refusal of a create that went without a token says so.
#[test]
fn auth_that_was_turned_on_is_noticed_by_a_create() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::before(&[&member]);
        let client = keyward.logged_in("alice").await;
        let mut stream = watching(&client, 10).await;
        let mut call = member.called(WATCH).await;
        assert_eq!(call.token(), None);
        call.messages.next().await.expect("a create");
        call.say(&refused("rpc error: code = InvalidArgument desc = etcdserver: user name is empty"))
            .await
            .expect("taken");
        let proof = member.called(TXN).await;
        assert_eq!(proof.token(), Some("alice.1"));
        proof.reply(&txn_done(9)).await;
        let mut call = member.called(WATCH).await;
        assert_eq!(call.token(), Some("alice.1"));
        accept(&mut call, 9).await;
        let answer = watched(&stream.next().await.expect("created"));
        assert!(answer.created && !answer.canceled, "{answer:?}");
    });
}

#[test]
fn a_watch_ends_at_its_clients_deadline() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await.header("grpc-timeout", "90S");
        let mut stream = watching(&client, 10).await;
        let (_, mut call) = next_watch(&members).await;
        assert!(!call.headers.contains_key("grpc-timeout"), "it would begin anew with each stream");
        accept(&mut call, 9).await;
        stream.next().await.expect("created");
        let began = Instant::now();
        let end = stream.next().await.expect_err("ended");
        assert_eq!(end.told(), (Code::DeadlineExceeded, "context deadline exceeded"));
        assert!(began.elapsed().abs_diff(Duration::from_secs(90)) < Duration::from_secs(1));
        assert_eq!(call.canceled().await, Reason::CANCEL);
    });
}

#[test]
fn a_create_that_stays_refused_is_told_once_as_etcd_tells_it() {
    paused(async {
        let (member, _keyward, client) = with_auth().await;
        let mut stream = watching(&client, 10).await;
        let reason = format!("rpc error: code = Unauthenticated desc = {INVALID_TOKEN}");
        let mut call = member.called(WATCH).await;
        call.messages.next().await.expect("a create");
        call.say(&refused(&reason)).await.expect("taken");
        member.called(TXN).await.reply(&txn_done(9)).await;
        let mut call = member.called(WATCH).await;
        call.messages.next().await.expect("a create");
        call.say(&refused(&reason)).await.expect("taken");
        let answer = watched(&stream.next().await.expect("an answer"));
        assert!(answer.created && answer.canceled && answer.watch_id == -1);
        assert_eq!(answer.cancel_reason, reason);
        settled().await;
        assert!(member.was_called_again().is_none(), "no endless loop");
    });
}

/// The refusal might be cured by a login, and no login is to be had: the client hears etcd's first word, once.
#[test]
fn a_password_that_is_wrong_by_now_ends_a_create_and_is_tried_once() {
    paused(async {
        let (member, _keyward, client) = with_auth().await;
        let mut stream = watching(&client, 10).await;
        let mut call = member.called(WATCH).await;
        let (id, _) = accept(&mut call, 9).await;
        stream.next().await.expect("created");
        member.change_password("another");
        stream.say(&watch("k2", 10)).await;
        create_of(&call.messages.next().await.expect("a request")).expect("a create");
        let reason = format!("rpc error: code = Unauthenticated desc = {INVALID_TOKEN}");
        call.say(&refused(&reason)).await.expect("taken");
        let logins = member.logins();
        member.called(TXN).await.refuse(Code::Unauthenticated, INVALID_TOKEN);
        let answer = watched(&stream.next().await.expect("an answer"));
        assert!(answer.created && answer.canceled, "{answer:?}");
        assert_eq!(answer.cancel_reason, reason);
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert!(member.was_called_again().is_none(), "no endless loop");
        assert_eq!(member.logins(), logins + 1, "a wrong password is costly to check");
        // What lives goes on: etcd asks a running watch for nothing.
        call.say(&event(id, 10, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, [10]);
    });
}

/// A member that could not answer has proven nothing: a second refusal of the same token would not be the truth.
#[test]
fn a_token_that_could_not_be_proven_is_not_tried_again() {
    paused(async {
        let (member, _keyward, client) = with_auth().await;
        let mut stream = watching(&client, 10).await;
        let mut call = member.called(WATCH).await;
        call.messages.next().await.expect("a create");
        let reason = format!("rpc error: code = Unauthenticated desc = {INVALID_TOKEN}");
        call.say(&refused(&reason)).await.expect("taken");
        member.called(TXN).await.refuse(Code::Unavailable, "etcdserver: leader changed");
        // It is proven on the next attempt, before anything is created.
        member.called(TXN).await.refuse(Code::Unauthenticated, INVALID_TOKEN);
        let proof = member.called(TXN).await;
        assert_eq!(proof.token(), Some("alice.2"));
        proof.reply(&txn_done(9)).await;
        let mut call = member.called(WATCH).await;
        assert_eq!(call.token(), Some("alice.2"));
        accept(&mut call, 9).await;
        let answer = watched(&stream.next().await.expect("an answer"));
        assert!(answer.created && !answer.canceled, "{answer:?}");
    });
}

/// A member that has less than the client was shown is behind, or the cluster's history is another now: then "from now"
/// must not wait for what was shown.
#[test]
fn from_now_is_not_above_a_history_that_went_back() {
    paused(async {
        for (whole, now) in [(60, 50), (30, 30)] {
            let (members, keyward) = three();
            let client = keyward.client().await;
            let mut stream = watching(&client, 50).await;
            let (at, mut call) = next_watch(&members).await;
            let (id, _) = accept(&mut call, 49).await;
            stream.next().await.expect("created");
            call.say(&event(id, 50, 5)).await.expect("taken");
            assert_eq!(told(&mut stream).await, [50]);
            let mut other = client.open(WATCH).await.expect("open");
            other.say(&watch("b", 0)).await;
            let mut second = members[at].called(WATCH).await;
            accept(&mut second, 20).await;
            members[at].called(RANGE).await.reply(&ranged(whole)).await;
            let cancel = second.messages.next().await.expect("a request");
            assert!(create_of(&cancel).is_none());
            let (_, from) = accept(&mut second, 30).await;
            assert_eq!(from, 0);
            let answer = watched(&other.next().await.expect("created"));
            let begins = answer.header.expect("a header").revision;
            assert_eq!(begins, now, "where the whole cluster is at {whole}");
        }
    });
}

#[test]
fn a_client_that_leaves_ends_its_upstream_streams() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = watching(&client, 10).await;
        let (_, mut call) = next_watch(&members).await;
        accept(&mut call, 9).await;
        stream.next().await.expect("created");
        stream.cancel();
        assert_eq!(call.canceled().await, Reason::CANCEL);
        // And one that had nothing more to ask.
        let mut stream = watching(&client, 10).await;
        stream.half_close();
        let (_, mut call) = next_watch(&members).await;
        accept(&mut call, 9).await;
        stream.next().await.expect("created");
        stream.cancel();
        assert_eq!(call.canceled().await, Reason::CANCEL);
        settled().await;
        assert_eq!(keyward.metrics.calls_with(Code::Canceled as u8), 2);
    });
}

#[test]
fn a_half_close_does_not_end_a_watch() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = watching(&client, 10).await;
        stream.half_close();
        let (_, mut call) = next_watch(&members).await;
        let (id, _) = accept(&mut call, 9).await;
        stream.next().await.expect("created");
        settled().await;
        call.say(&event(id, 10, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, [10]);
    });
}

#[test]
fn hasleader_always_goes_up_and_ends_only_those_who_asked() {
    paused(async {
        let (members, keyward) = three();
        let plain = keyward.client().await;
        let leader = keyward.client().await.header("hasleader", "true");
        let mut streams = Vec::new();
        for client in [&plain, &leader] {
            let mut stream = watching(client, 10).await;
            let (_, mut call) = next_watch(&members).await;
            assert_eq!(call.headers["hasleader"], "true");
            accept(&mut call, 9).await;
            stream.next().await.expect("created");
            streams.push((stream, call));
        }
        publish_all(&keyward, Readiness::NotReady(Unfit::NoLeader));
        // etcd's default election timeout: before it, a member that ends a stream may have been cut off alone.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let began = Instant::now();
        let (mut asked, call) = streams.pop().expect("two");
        let (mut plain, other) = streams.pop().expect("two");
        call.end(Code::Unavailable, "etcdserver: no leader");
        other.end(Code::Unavailable, "etcdserver: no leader");
        let end = asked.next().await.expect_err("ended");
        assert_eq!(end.told(), (Code::Unavailable, "etcdserver: no leader"));
        assert_eq!(began.elapsed(), Duration::ZERO, "its member has looked often enough");
        // The other goes on as soon as there is a leader.
        publish_all(&keyward, Readiness::Ready);
        let (_, mut call) = next_watch(&members).await;
        let (id, start) = accept(&mut call, 10).await;
        assert_eq!(start, 10);
        call.say(&event(id, 10, 5)).await.expect("taken");
        assert_eq!(told(&mut plain).await, [10]);
    });
}

/// A member that ends streams with `no leader` speaks for itself: it may be cut off from the others.
#[test]
fn a_member_that_has_no_leader_ends_no_stream_while_another_has_one() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await.header("hasleader", "true");
        let mut stream = watching(&client, 10).await;
        for _ in 0..20 {
            let (_, call) = next_watch(&members).await;
            call.refuse(Code::Unavailable, "etcdserver: no leader");
        }
        let (_, mut call) = next_watch(&members).await;
        accept(&mut call, 9).await;
        assert!(watched(&stream.next().await.expect("the stream lives")).created);
    });
}

/// A cluster that is away for a while: attempts are paced, and the watch goes on when it is back.
#[test]
fn an_outage_is_waited_out_without_a_storm() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = watching(&client, 10).await;
        let (_, mut call) = next_watch(&members).await;
        accept(&mut call, 9).await;
        stream.next().await.expect("created");
        members.iter().for_each(|member| member.refuse_connections(true));
        members.iter().for_each(Member::cut);
        let until = Instant::now() + Duration::from_secs(60);
        tokio::time::sleep_until(until).await;
        let dials: usize = members.iter().map(Member::dials).sum();
        assert!((20..200).contains(&dials), "{dials} connections were tried in a minute");
        members.iter().for_each(|member| member.refuse_connections(false));
        keyward.probed();
        let (_, mut call) = next_watch(&members).await;
        let (id, start) = accept(&mut call, 10).await;
        assert_eq!(start, 10);
        call.say(&event(id, 10, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, [10]);
    });
}

/// Keys may be as large as a request: what waits for its answer is bounded in bytes, too.
#[test]
fn large_creates_that_nobody_answers_are_not_read_without_end() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = client.open(WATCH).await.expect("open");
        let large = watch(&"k".repeat(512 * 1024), 5);
        let mut taken = 0;
        while taken < 100 && tokio::time::timeout(Duration::from_millis(10), stream.say(&large)).await.is_ok()
        {
            taken += 1;
        }
        // Four megabytes, what the stream's window lets through, and the pipe's own buffer.
        assert!((8..=11).contains(&taken), "{taken} creates were taken");
        let (_, mut call) = next_watch(&members).await;
        for _ in 0..taken {
            accept(&mut call, 9).await;
            assert!(watched(&stream.next().await.expect("created")).created);
        }
        stream.cancel();
    });
}
