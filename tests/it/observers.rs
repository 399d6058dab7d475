//! An observer of an election outlives members and tokens, and is told of each leader once and in order.

use std::time::Duration;

use h2::Reason;
use keyward::pb::etcdserverpb::{RangeRequest, RangeResponse};
use keyward::pb::mvccpb::KeyValue;
use keyward::pb::v3electionpb::{LeaderRequest, LeaderResponse};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::Instant;

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, one_member, paused, settled, three};
use crate::words::{INVALID_TOKEN, RANGE, header, ranged};

const OBSERVE: &str = "/v3electionpb.Election/Observe";
const DENIED: &str = "etcdserver: permission denied";
const NO_LEADER: &str = "etcdserver: no leader";

fn request() -> Vec<u8> {
    LeaderRequest { name: "n".into() }.encode_to_vec()
}

/// A proclamation, by the create and mod revision of its leader's key.
fn leader((create_revision, mod_revision): (i64, i64)) -> Vec<u8> {
    let kv = KeyValue { key: "n/1f".into(), create_revision, mod_revision, ..KeyValue::default() };
    LeaderResponse { header: Some(header(mod_revision)), kv: Some(kv) }.encode_to_vec()
}

/// The next call at a member but a look at who leads, which stays without an answer.
async fn next_at(member: &Member) -> (Call, bytes::Bytes) {
    loop {
        let mut call = member.call().await;
        let message = call.message().await;
        let range = || RangeRequest::decode(message.clone()).expect("a Range");
        if call.path() != RANGE || !range().serializable {
            return (call, message);
        }
    }
}

async fn next_of(members: &[Member]) -> (usize, Call) {
    let all = members.iter().map(|member| Box::pin(next_at(member)));
    let ((call, message), at, _) = futures_util::future::select_all(all).await;
    assert_eq!((call.path(), &message[..]), (OBSERVE, &request()[..]), "the same request, and its end");
    (at, call)
}

async fn observing(client: &Client) -> Stream {
    client.begin(OBSERVE, request()).await.expect("sent")
}

async fn told(call: &mut Call, stream: &mut Stream, leaders: &[(i64, i64)]) {
    for one in leaders {
        call.say(&leader(*one)).await.expect("taken");
        assert_eq!(stream.next().await.expect("a leader")[..], leader(*one)[..], "as it came");
    }
}

/// The read by which Keyward finds out whether the election may be read.
async fn proof(member: &Member) -> Call {
    let (call, message) = next_at(member).await;
    assert_eq!(call.path(), RANGE);
    let range = RangeRequest::decode(message).expect("a Range");
    assert_eq!((&range.key[..], &range.range_end[..], range.limit), (&b"n/"[..], &b"n0"[..], 1));
    assert!(range.keys_only);
    call
}

fn silent(call: Call) {
    call.refuse_in_trailers(Code::Ok, "");
}

#[test]
fn a_lost_member_is_replaced_and_no_leader_is_told_twice() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = observing(&client).await;
        let (first, mut call) = next_of(&members).await;
        told(&mut call, &mut stream, &[(3, 3), (3, 5)]).await;
        members[first].refuse_connections(true);
        members[first].cut();
        let (second, mut call) = next_of(&members).await;
        assert_ne!(first, second);
        // What the next member tells first is known already.
        call.say(&leader((3, 5))).await.expect("taken");
        // Who leads now proclaimed while it was in line.
        told(&mut call, &mut stream, &[(3, 8), (4, 6)]).await;
        call.end(Code::Unavailable, NO_LEADER);
        let (_, mut call) = next_of(&members).await;
        told(&mut call, &mut stream, &[(4, 9)]).await;
        assert_eq!(keyward.metrics.observe_resumes.get(), 2);
    });
}

#[test]
fn a_history_that_goes_back_ends_the_stream() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = observing(&client).await;
        let (_, mut call) = next_of(&members).await;
        told(&mut call, &mut stream, &[(30, 35)]).await;
        call.reset(Reason::INTERNAL_ERROR);
        let (_, mut call) = next_of(&members).await;
        call.say(&leader((3, 5))).await.expect("taken");
        assert_eq!(stream.next().await.expect_err("ended").told().0, Code::Unavailable);
        call.canceled().await;
    });
}

async fn with_auth() -> (Member, Keyward, Client) {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::with_auth(&[&member]);
    let client = keyward.logged_in("alice").await;
    (member, keyward, client)
}

#[test]
fn a_silent_end_is_healed_at_the_start_and_later() {
    paused(async {
        let (member, _keyward, client) = with_auth().await;
        let mut stream = observing(&client).await;
        for (token, next) in [("alice.1", "alice.2"), ("alice.2", "alice.3")] {
            let mut call = member.called(OBSERVE).await;
            assert_eq!(call.token(), Some(token));
            if token == "alice.2" {
                told(&mut call, &mut stream, &[(3, 3)]).await;
                call.end(Code::Ok, "");
            } else {
                silent(call);
            }
            proof(&member).await.refuse(Code::Unauthenticated, INVALID_TOKEN);
            let read = proof(&member).await;
            assert_eq!(read.token(), Some(next));
            read.reply(&ranged(3)).await;
        }
        let mut call = member.called(OBSERVE).await;
        assert_eq!(call.token(), Some("alice.3"));
        call.say(&leader((3, 3))).await.expect("taken");
        told(&mut call, &mut stream, &[(3, 4)]).await;
        assert_eq!(member.logins(), 3);
    });
}

/// etcd tells an observer without the right nothing but the end; so do we, once it is sure.
#[test]
fn who_may_not_read_the_election_is_told_as_etcd_tells_it() {
    paused(async {
        let (member, _keyward, client) = with_auth().await;
        let script = async {
            silent(member.called(OBSERVE).await);
            proof(&member).await.refuse(Code::PermissionDenied, DENIED);
        };
        let (outcome, ()) = tokio::join!(client.call(OBSERVE, request()), script);
        assert!(outcome.messages.is_empty());
        assert_eq!(outcome.end.told(), (Code::Ok, ""));
        assert_eq!(member.logins(), 1, "the token was good");
        settled().await;
        assert!(member.was_called_again().is_none());
    });
}

/// Whatever etcd means by it.
#[test]
fn a_second_silent_end_at_once_is_the_truth_and_a_late_one_is_not() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let script = async {
            // The late one begins a new count.
            for late in [false, true, false] {
                let (call, _) = next_at(&member).await;
                if late {
                    tokio::time::sleep(Duration::from_secs(60)).await;
                }
                silent(call);
                proof(&member).await.reply(&ranged(3)).await;
            }
        };
        let (outcome, ()) = tokio::join!(client.call(OBSERVE, request()), script);
        assert_eq!(outcome.end.told(), (Code::Ok, ""));
        assert!(outcome.messages.is_empty() && member.was_called_again().is_none());
    });
}

/// etcd's own watch goes by the token of whoever made it first on that member (etcd-io/etcd#14850): each stream then tells the
/// leader of the moment and ends. That is no refusal, and no reason to ask as fast as it goes.
#[test]
fn members_that_refuse_it_in_anothers_name_are_asked_in_turn_and_at_leisure() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = observing(&client).await;
        let began = Instant::now();
        let mut asked = [0; 3];
        let script = async {
            for round in 0..40 {
                let (at, mut call) = next_of(&members).await;
                asked[at] += 1;
                let news = if round == 39 { (4, 9) } else { (3, 3) };
                call.say(&leader(news)).await.expect("taken");
                call.end(Code::Ok, "");
                proof(&members[at]).await.reply(&ranged(9)).await;
            }
        };
        let told = async { [stream.next().await, stream.next().await].map(|one| one.expect("a leader")) };
        let ([first, second], ()) = tokio::join!(told, script);
        assert_eq!((&first[..], &second[..]), (&leader((3, 3))[..], &leader((4, 9))[..]));
        assert!(asked.iter().all(|times| *times > 5), "{asked:?}");
        assert!(began.elapsed() > Duration::from_secs(15), "{:?}", began.elapsed());
    });
}

fn leads((create_revision, mod_revision): (i64, i64)) -> Vec<u8> {
    let kv = KeyValue { create_revision, mod_revision, ..KeyValue::default() };
    RangeResponse { header: Some(header(9)), kvs: vec![kv], ..RangeResponse::default() }.encode_to_vec()
}

/// In 3.4 a member's own watch goes silent when the token of whoever made it has expired.
#[test]
fn a_member_that_keeps_a_leader_back_is_left() {
    paused(async {
        let tasks = Tasks::default();
        let members: Vec<_> = (1..=2).map(|id| Member::new(id, &tasks)).collect();
        let keyward = Keyward::with_auth(&members.iter().collect::<Vec<_>>());
        let client = keyward.logged_in("alice").await;
        let mut stream = observing(&client).await;
        let (first, mut call) = next_of(&members).await;
        told(&mut call, &mut stream, &[(3, 3)]).await;
        // Nothing new; something new that it tells in time; something that it does not.
        for (seen, tells) in [((3, 3), None), ((3, 4), Some((3, 4))), ((4, 4), None), ((4, 4), None)] {
            let looks = members.iter().map(|member| Box::pin(member.called(RANGE)));
            let (look, ..) = futures_util::future::select_all(looks).await;
            look.reply(&leads(seen)).await;
            settled().await;
            if let Some(news) = tells {
                told(&mut call, &mut stream, &[news]).await;
            }
        }
        assert_eq!(call.canceled().await, Reason::CANCEL);
        let (second, mut call) = next_of(&members).await;
        assert_ne!(first, second);
        told(&mut call, &mut stream, &[(4, 4)]).await;
    });
}

/// A read that fails tells nothing of the right.
#[test]
fn trouble_is_no_refusal() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = observing(&client).await;
        for _ in 0..5 {
            let (at, call) = next_of(&members).await;
            silent(call);
            proof(&members[at]).await.refuse(Code::Unavailable, "etcdserver: request timed out");
        }
        let (_, mut call) = next_of(&members).await;
        told(&mut call, &mut stream, &[(3, 3)]).await;
    });
}

/// Whether the whole cluster has none is said by its members' probes: see `outages`.
#[test]
fn a_member_that_has_no_leader_is_left_for_another() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await.header("hasleader", "true");
        let mut stream = observing(&client).await;
        let (_, mut call) = next_of(&members).await;
        assert_eq!(call.headers["hasleader"], "true");
        told(&mut call, &mut stream, &[(3, 3)]).await;
        call.end(Code::Unavailable, NO_LEADER);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(20) {
            next_of(&members).await.1.refuse(Code::Unavailable, NO_LEADER);
        }
        let (_, mut call) = next_of(&members).await;
        told(&mut call, &mut stream, &[(3, 7)]).await;
    });
}

/// An election that nobody leads says nothing: that is no lack of a leader of the cluster.
#[test]
fn an_open_stream_that_says_nothing_has_a_leader() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await.header("hasleader", "true");
        let mut stream = observing(&client).await;
        next_of(&members).await.1.refuse(Code::Unavailable, NO_LEADER);
        let (_, mut call) = next_of(&members).await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        told(&mut call, &mut stream, &[(3, 3)]).await;
    });
}

#[test]
fn the_client_leaving_its_deadline_and_a_drain_end_it() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let stream = observing(&client).await;
        let (_, mut call) = next_of(&members).await;
        stream.cancel();
        assert_eq!(call.canceled().await, Reason::CANCEL);

        let hurried = keyward.client().await.header("grpc-timeout", "90S");
        let began = Instant::now();
        let mut stream = observing(&hurried).await;
        let (_, call) = next_of(&members).await;
        assert!(!call.headers.contains_key("grpc-timeout"));
        assert_eq!(stream.next().await.expect_err("ended").told().0, Code::DeadlineExceeded);
        assert_eq!(began.elapsed(), Duration::from_secs(90));

        let mut stream = observing(&client).await;
        let (_, mut call) = next_of(&members).await;
        told(&mut call, &mut stream, &[(3, 3)]).await;
        keyward.drain(Duration::from_secs(30));
        let end = stream.next().await.expect_err("ended");
        assert_eq!(end.told(), (Code::Unavailable, "etcdserver: server stopped"));
    });
}

/// What a client does not read waits at its member, not here.
#[test]
fn a_client_that_does_not_read_holds_back_its_own_stream() {
    paused(async {
        let (members, keyward) = three();
        let slow = keyward.connect();
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1024);
        let client = Client::with(slow, &keyward.tasks, &builder).await;
        let mut stream = observing(&client).await;
        let (_, mut call) = next_of(&members).await;
        let kv = KeyValue { create_revision: 3, value: vec![7; 32 << 10].into(), ..KeyValue::default() };
        let big = |revision| {
            let kv = KeyValue { mod_revision: revision, ..kv.clone() };
            LeaderResponse { header: Some(header(revision)), kv: Some(kv) }.encode_to_vec()
        };
        let mut taken = 0;
        while taken < 100
            && tokio::time::timeout(Duration::from_millis(10), call.say(&big(taken + 3))).await.is_ok()
        {
            taken += 1;
        }
        assert!((2..=40).contains(&taken), "{taken} messages were taken");
        for revision in 0..taken {
            assert_eq!(stream.next().await.expect("a leader")[..], big(revision + 3)[..]);
        }
    });
}

/// Leaders with a large value, which the client does not read.
#[test]
fn unread_leaders_are_counted_until_they_are_read() {
    paused(async {
        let (member, keyward) = one_member();
        let builder = h2::client::Builder::new();
        let client = Client::with(keyward.connect(), &keyward.tasks, &builder).await;
        let mut stream = observing(&client).await;
        let (mut call, _) = next_at(&member).await;
        let size = 1_000_000;
        let large = |revision| {
            let kv = KeyValue {
                key: "n/1f".into(),
                value: vec![7; size].into(),
                create_revision: 3,
                mod_revision: revision,
                ..KeyValue::default()
            };
            LeaderResponse { header: Some(header(revision)), kv: Some(kv) }.encode_to_vec()
        };
        let held = || usize::try_from(keyward.metrics.watch_held_bytes.get()).expect("held");
        for revision in 3..6 {
            call.say(&large(revision)).await.expect("taken");
            settled().await;
        }
        assert!((2 * size..4 * size).contains(&held()), "{} bytes", held());
        for revision in 3..6 {
            assert_eq!(stream.next().await.expect("a leader")[..], large(revision)[..]);
        }
        settled().await;
        // HTTP/2 has taken the last message: it counts until the stream is asked for the next one.
        assert!(held() <= size + 100, "{} bytes", held());
        drop(stream);
        settled().await;
        assert_eq!(held(), 0);
    });
}
