//! A client's keepalive stream outlives its upstream ones, answers in order, and never makes up a TTL.

use std::time::Duration;

use h2::Reason;
use keyward::members::version::Version;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use tokio::time::Instant;

use crate::client::{Client, Stream};
use crate::member::{Call, Member, next_called};
use crate::rig::{Keyward, paused, settled, three};
use crate::words::{INVALID_TOKEN, KEEP_ALIVE, RANGE, ranged, renew, renewal, renewal_of, renewed};

async fn renewing(client: &Client, leases: &[i64]) -> Stream {
    let mut stream = client.open(KEEP_ALIVE).await.expect("open");
    for lease in leases {
        stream.say(&renew(*lease)).await;
    }
    stream
}

async fn asked(call: &mut Call) -> i64 {
    renewal_of(&call.messages.next().await.expect("a renewal"))
}

async fn told(stream: &mut Stream) -> (i64, i64) {
    renewal(&stream.next().await.expect("an answer"))
}

#[test]
fn the_leader_is_asked_and_answers_come_back_in_order() {
    paused(async {
        let (members, keyward) = three();
        keyward.publish(|membership| membership.leader = Some(members[1].address.id));
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1, 2, 3]).await;
        let mut call = members[1].called(KEEP_ALIVE).await;
        for lease in 1..=3 {
            assert_eq!(asked(&mut call).await, lease);
            call.say(&renewed(lease, 10 + lease)).await.expect("taken");
            assert_eq!(told(&mut stream).await, (lease, 10 + lease));
        }
    });
}

#[test]
fn what_was_not_answered_is_asked_again_on_another_stream() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1, 2, 3]).await;
        let mut call = members[0].called(KEEP_ALIVE).await;
        assert_eq!(asked(&mut call).await, 1);
        call.say(&renewed(1, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, (1, 5));
        members[0].cut();
        members[0].refuse_connections(true);
        let (_, mut call) = next_called(&members[1..], KEEP_ALIVE).await;
        for lease in [2, 3] {
            assert_eq!(asked(&mut call).await, lease);
            call.say(&renewed(lease, 6)).await.expect("taken");
            assert_eq!(told(&mut stream).await, (lease, 6));
        }
        assert_eq!(keyward.metrics.keepalive_resumes.get(), 1);
    });
}

#[test]
fn a_half_close_ends_the_stream_only_after_everything_was_answered() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1, 2]).await;
        stream.half_close();
        let mut call = members[0].called(KEEP_ALIVE).await;
        settled().await;
        for lease in [1, 2] {
            assert_eq!(asked(&mut call).await, lease);
            call.say(&renewed(lease, 6)).await.expect("taken");
        }
        let outcome = stream.finish().await;
        assert_eq!(outcome.messages.len(), 2);
        assert_eq!(outcome.end.code(), Some(Code::Ok));
        call.canceled().await;
    });
}

#[test]
fn a_client_that_leaves_ends_the_upstream_stream() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1]).await;
        let mut call = members[0].called(KEEP_ALIVE).await;
        call.say(&renewed(1, 6)).await.expect("taken");
        told(&mut stream).await;
        stream.cancel();
        assert_eq!(call.canceled().await, Reason::CANCEL);
    });
}

/// A loss tells nothing of the lease: only a member's own TTL goes to the client.
#[test]
fn no_answer_is_made_up_while_no_member_can_tell() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1]).await;
        drop(members[0].called(KEEP_ALIVE).await);
        let began = Instant::now();
        members.iter().for_each(|member| member.refuse_connections(true));
        members.iter().for_each(Member::cut);
        let end = stream.next().await.expect_err("no answer");
        assert_eq!(end.told().0, Code::Unavailable);
        let took = began.elapsed();
        assert!(took >= Duration::from_secs(7) && took < Duration::from_secs(9), "{took:?}");
        let dials: usize = members.iter().map(Member::dials).sum();
        assert!(dials < 100, "{dials} connections were tried in 7 s");
    });
}

/// Patience is per trouble: an old loss does not shorten a new one's time.
#[test]
fn a_loss_of_long_ago_does_not_count() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1]).await;
        let mut call = members[0].called(KEEP_ALIVE).await;
        asked(&mut call).await;
        call.say(&renewed(1, 6)).await.expect("taken");
        told(&mut stream).await;
        call.refuse_later();
        settled().await;
        tokio::time::advance(Duration::from_secs(60)).await;
        stream.say(&renew(1)).await;
        let (_, call) = next_called(&members, KEEP_ALIVE).await;
        call.reset(Reason::INTERNAL_ERROR);
        let (_, mut call) = next_called(&members, KEEP_ALIVE).await;
        call.say(&renewed(1, 9)).await.expect("taken");
        assert_eq!(told(&mut stream).await, (1, 9));
    });
}

/// A member that takes requests and says nothing is left for another.
#[test]
fn a_member_that_never_answers_is_left() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1]).await;
        let mut silent = members[0].called(KEEP_ALIVE).await;
        asked(&mut silent).await;
        let (_, mut call) = next_called(&members[1..], KEEP_ALIVE).await;
        assert_eq!(asked(&mut call).await, 1);
        call.say(&renewed(1, 9)).await.expect("taken");
        assert_eq!(told(&mut stream).await, (1, 9));
    });
}

async fn with_auth() -> (Member, Keyward, Client) {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::with_auth(&[&member]);
    let client = keyward.logged_in("alice").await;
    (member, keyward, client)
}

#[test]
fn a_refused_token_is_renewed_and_nobody_notices() {
    paused(async {
        let (member, _keyward, client) = with_auth().await;
        let mut stream = renewing(&client, &[1, 2]).await;
        let call = member.called(KEEP_ALIVE).await;
        assert_eq!(call.token(), Some("alice.1"));
        call.refuse(Code::Unauthenticated, INVALID_TOKEN);
        let mut call = member.called(KEEP_ALIVE).await;
        assert_eq!(call.token(), Some("alice.2"));
        for lease in [1, 2] {
            assert_eq!(asked(&mut call).await, lease);
            call.say(&renewed(lease, 6)).await.expect("taken");
            assert_eq!(told(&mut stream).await, (lease, 6));
        }
    });
}

/// Rules 26: etcd 3.5.28 ends the whole stream for one lease that may not be renewed.
#[test]
fn one_forbidden_lease_is_withheld_and_the_others_go_on() {
    paused(async {
        let (member, _keyward, client) = with_auth().await;
        let denied = "etcdserver: permission denied";
        let mut stream = renewing(&client, &[666, 1, 2]).await;
        for _ in 0..2 {
            let mut call = member.called(KEEP_ALIVE).await;
            assert_eq!(asked(&mut call).await, 666);
            call.refuse(Code::PermissionDenied, denied);
        }
        let mut call = member.called(KEEP_ALIVE).await;
        for lease in [1, 2] {
            assert_eq!(asked(&mut call).await, lease);
            call.say(&renewed(lease, 6)).await.expect("taken");
            assert_eq!(told(&mut stream).await, (lease, 6));
        }
        // Alone in line it is withheld as well: the stream keeps other leases.
        stream.say(&renew(666)).await;
        assert_eq!(asked(&mut call).await, 666);
        call.end(Code::PermissionDenied, denied);
        member.called(KEEP_ALIVE).await.refuse(Code::PermissionDenied, denied);
        stream.say(&renew(1)).await;
        let mut call = member.called(KEEP_ALIVE).await;
        assert_eq!(asked(&mut call).await, 1);
        call.say(&renewed(1, 6)).await.expect("taken");
        assert_eq!(told(&mut stream).await, (1, 6));
        // The only lease of its stream ends that in etcd's words.
        let mut stream = renewing(&client, &[666]).await;
        for _ in 0..2 {
            member.called(KEEP_ALIVE).await.refuse(Code::PermissionDenied, denied);
        }
        let end = stream.next().await.expect_err("ended");
        assert_eq!(end.told(), (Code::PermissionDenied, denied));
    });
}

/// Rules 26: old leaders say "gone" of a lease that a follower just granted.
#[test]
fn a_doubtful_zero_is_confirmed_by_a_read_and_a_second_renewal() {
    paused(async {
        let tasks = Tasks::default();
        let mut member = Member::new(1, &tasks);
        member.version = Version::parse("3.5.1").expect("a version");
        let keyward = Keyward::before(&[&member]);
        let client = keyward.client().await;
        for (second, expected) in [(8, 8), (0, 0)] {
            let mut stream = renewing(&client, &[1]).await;
            let mut call = member.called(KEEP_ALIVE).await;
            asked(&mut call).await;
            call.say(&renewed(1, 0)).await.expect("taken");
            member.called(RANGE).await.reply(&ranged(5)).await;
            let mut call = member.called(KEEP_ALIVE).await;
            assert_eq!(asked(&mut call).await, 1);
            call.say(&renewed(1, second)).await.expect("taken");
            assert_eq!(told(&mut stream).await, (1, expected));
        }
    });
}

#[test]
fn a_new_members_zero_is_the_truth() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1]).await;
        let mut call = members[0].called(KEEP_ALIVE).await;
        call.say(&renewed(1, 0)).await.expect("taken");
        assert_eq!(told(&mut stream).await, (1, 0));
        assert!(members[0].was_called_again().is_none());
    });
}

#[test]
fn the_stream_ends_at_its_clients_deadline() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await.header("grpc-timeout", "90S");
        let began = Instant::now();
        let mut stream = renewing(&client, &[1]).await;
        let mut call = members[0].called(KEEP_ALIVE).await;
        assert!(!call.headers.contains_key("grpc-timeout"));
        asked(&mut call).await;
        call.say(&renewed(1, 9)).await.expect("taken");
        told(&mut stream).await;
        let end = stream.next().await.expect_err("ended");
        assert_eq!(end.told(), (Code::DeadlineExceeded, "context deadline exceeded"));
        assert_eq!(began.elapsed(), Duration::from_secs(90));
    });
}

/// Nothing to ask: nothing is opened.
#[test]
fn no_upstream_stream_is_held_for_a_client_that_asks_nothing() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let _stream = client.open(KEEP_ALIVE).await.expect("open");
        settled().await;
        assert!(members.iter().all(|member| member.dials() == 0));
    });
}

/// A request may be padded with fields that nobody knows: what waits is bounded in bytes, too.
#[test]
fn padded_requests_that_nobody_answers_are_not_read_without_end() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1]).await;
        let mut call = members[0].called(KEEP_ALIVE).await;
        assert_eq!(asked(&mut call).await, 1);
        // Field 15, of 60 KiB.
        let padded = [&renew(2)[..], b"\x7a\x80\xe0\x03", &[0; 60 * 1024]].concat();
        let mut taken = 0;
        while taken < 100
            && tokio::time::timeout(Duration::from_millis(10), stream.say(&padded)).await.is_ok()
        {
            taken += 1;
        }
        // What Keyward holds, what the stream's window lets through, and the pipe's own buffer.
        assert!((2..=12).contains(&taken), "{taken} requests were taken");
        call.say(&renewed(1, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, (1, 5));
        assert_eq!(asked(&mut call).await, 2);
        call.say(&renewed(2, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, (2, 5));
    });
}

/// Each member knows tokens of its own: after a restart of them all, the leader may move before anybody answered.
#[test]
fn a_token_that_is_old_on_each_of_two_members_does_not_end_the_stream() {
    paused(async {
        let tasks = Tasks::default();
        let members: Vec<_> = (1..=2).map(|id| Member::new(id, &tasks)).collect();
        let keyward = Keyward::with_auth(&members.iter().collect::<Vec<_>>());
        let client = keyward.logged_in("alice").await;
        let mut stream = renewing(&client, &[1]).await;
        let first = members[0].called(KEEP_ALIVE).await;
        keyward.publish(|membership| membership.leader = Some(members[1].address.id));
        first.refuse(Code::Unauthenticated, INVALID_TOKEN);
        let second = members[1].called(KEEP_ALIVE).await;
        let old = second.token().map(str::to_owned);
        second.refuse(Code::Unauthenticated, INVALID_TOKEN);
        let mut third = members[1].called(KEEP_ALIVE).await;
        assert_ne!(third.token().map(str::to_owned), old);
        assert_eq!(asked(&mut third).await, 1);
        third.say(&renewed(1, 5)).await.expect("taken");
        assert_eq!(told(&mut stream).await, (1, 5));
    });
}

/// What a member says of itself is no answer: the next one is asked the same, in both forms in which etcd ends a stream.
#[test]
fn what_a_member_cannot_do_is_asked_elsewhere() {
    type Refuse = fn(Call, Code, &'static str);
    let forms: [Refuse; 2] = [Call::refuse, Call::refuse_in_trailers];
    let of_members = [
        (Code::Unknown, "not a primary lessor"),
        (Code::Unavailable, "etcdserver: no leader"),
        (Code::Unavailable, "etcdserver: request timed out"),
        (Code::Unavailable, "etcdserver: request timed out, waiting for the applied index took too long"),
        (Code::Unavailable, "etcdserver: rpc not supported for learner"),
    ];
    paused(async {
        for (code, text) in of_members {
            for refuse in forms {
                let (members, keyward) = three();
                let client = keyward.client().await;
                let mut stream = renewing(&client, &[1]).await;
                let mut call = members[0].called(KEEP_ALIVE).await;
                assert_eq!(asked(&mut call).await, 1);
                refuse(call, code, text);
                let (_, mut call) = next_called(&members[1..], KEEP_ALIVE).await;
                assert_eq!(asked(&mut call).await, 1);
                call.say(&renewed(1, 9)).await.expect("taken");
                assert_eq!(told(&mut stream).await, (1, 9), "{text}");
            }
        }
    });
}

/// Every way in which etcd says that the stream's credential is not good.
#[test]
fn whatever_is_wrong_with_the_credential_it_is_renewed() {
    paused(async {
        for (code, text) in [
            (Code::Unauthenticated, INVALID_TOKEN),
            (Code::InvalidArgument, "etcdserver: revision of auth store is old"),
            (Code::InvalidArgument, "etcdserver: user name is empty"),
        ] {
            let (member, _keyward, client) = with_auth().await;
            let mut stream = renewing(&client, &[1, 2]).await;
            let mut call = member.called(KEEP_ALIVE).await;
            assert_eq!(asked(&mut call).await, 1);
            call.say(&renewed(1, 6)).await.expect("taken");
            assert_eq!(told(&mut stream).await, (1, 6));
            call.end(code, text);
            let mut call = member.called(KEEP_ALIVE).await;
            assert_eq!(call.token(), Some("alice.2"), "{text}");
            assert_eq!(asked(&mut call).await, 2, "the answered one is not asked again");
            call.say(&renewed(2, 6)).await.expect("taken");
            assert_eq!(told(&mut stream).await, (2, 6));
        }
    });
}

/// Auth that is turned on under the stream: it went without a token, and goes on with one.
#[test]
fn auth_that_is_turned_on_does_not_end_the_stream() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::before(&[&member]);
        let client = keyward.logged_in("alice").await;
        let mut stream = renewing(&client, &[1]).await;
        let call = member.called(KEEP_ALIVE).await;
        assert_eq!(call.token(), None);
        call.refuse(Code::InvalidArgument, "etcdserver: user name is empty");
        let mut call = member.called(KEEP_ALIVE).await;
        assert_eq!(call.token(), Some("alice.1"));
        call.say(&renewed(1, 6)).await.expect("taken");
        assert_eq!(told(&mut stream).await, (1, 6));
    });
}

/// The client hears of a drain at once, whatever waits, and resumes elsewhere.
#[test]
fn a_drain_ends_the_stream() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = renewing(&client, &[1]).await;
        let mut call = members[0].called(KEEP_ALIVE).await;
        asked(&mut call).await;
        keyward.drain(Duration::from_secs(30));
        let end = stream.next().await.expect_err("ended");
        assert_eq!(end.told(), (Code::Unavailable, "etcdserver: server stopped"));
        call.canceled().await;
    });
}
