//! A Lock or Campaign that waits outlives its member and its token, and one that fails leaves no key in line (rules 28).

use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::request_op::Request;
use keyward::pb::etcdserverpb::response_op::Response;
use keyward::pb::etcdserverpb::{RangeResponse, ResponseOp, TxnRequest, TxnResponse};
use keyward::pb::mvccpb::KeyValue;
use keyward::pb::v3electionpb::{CampaignRequest, CampaignResponse, LeaderKey};
use keyward::pb::v3lockpb::{LockRequest, LockResponse};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::{Instant, timeout};

use crate::client::{Client, Stream};
use crate::member::{Call, Member, next_called};
use crate::rig::{Keyward, paused, settled, three};
use crate::words::{INVALID_TOKEN, LOST, PUT, TXN, header, put, was_put};

const LOCK: &str = "/v3lockpb.Lock/Lock";
const CAMPAIGN: &str = "/v3electionpb.Election/Campaign";
const LEASE: i64 = 0x1f;
const KEY: &str = "n/1f";

/// Where the ticket stands: the create revisions of its own key and of the first in line.
type Line = (Option<i64>, Option<i64>);
const BEHIND: Line = (Some(5), Some(3));
const FIRST: Line = (Some(5), Some(5));
const ABSENT: Line = (None, Some(3));

fn lock(lease: i64) -> Vec<u8> {
    LockRequest { name: "n".into(), lease }.encode_to_vec()
}

fn locked() -> Vec<u8> {
    LockResponse { header: Some(header(9)), key: KEY.into() }.encode_to_vec()
}

fn elected(rev: i64) -> Vec<u8> {
    let leader = LeaderKey { name: "n".into(), key: KEY.into(), rev, lease: LEASE };
    CampaignResponse { header: Some(header(9)), leader: Some(leader) }.encode_to_vec()
}

/// The key that a removal is for and the create revision above which it removes; none for a look.
fn removal(message: &Bytes) -> Option<(Bytes, i64)> {
    let txn = TxnRequest::decode(message.clone()).expect("a Txn");
    let [compare] = &txn.compare[..] else {
        assert_eq!((txn.compare.len(), txn.success.len(), txn.failure.len()), (0, 2, 0), "a look");
        return None;
    };
    let [op] = &txn.success[..] else { panic!("one delete") };
    let Some(Request::RequestDeleteRange(delete)) = &op.request else { panic!("{op:?}") };
    assert!(delete.range_end.is_empty() && compare.key == delete.key, "one key");
    match compare.target_union {
        Some(keyward::pb::etcdserverpb::compare::TargetUnion::CreateRevision(above)) => {
            Some((delete.key.clone(), above))
        }
        _ => panic!("{compare:?}"),
    }
}

fn looked(line: Line) -> Vec<u8> {
    let range = |created: Option<i64>| {
        let kvs = created.map(|create_revision| KeyValue { create_revision, ..KeyValue::default() });
        let range = RangeResponse { kvs: kvs.into_iter().collect(), ..RangeResponse::default() };
        ResponseOp { response: Some(Response::ResponseRange(range)) }
    };
    let responses = vec![range(line.0), range(line.1)];
    TxnResponse { header: Some(header(8)), succeeded: true, responses }.encode_to_vec()
}

/// Answers a look.
async fn look(member: &Member, line: Line) {
    let mut call = member.called(TXN).await;
    assert_eq!(removal(&call.message().await), None, "a look");
    call.reply(&looked(line)).await;
}

/// Takes a removal; returns the revision above which the key is removed.
async fn removed(member: &Member) -> i64 {
    let mut call = member.called(TXN).await;
    let (key, above) = removal(&call.message().await).expect("a removal");
    assert_eq!(key, KEY);
    call.reply(&TxnResponse { header: Some(header(9)), succeeded: true, responses: vec![] }.encode_to_vec())
        .await;
    above
}

fn one() -> (Member, Keyward) {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::before(&[&member]);
    (member, keyward)
}

/// Whichever member is asked where the ticket stands.
async fn look_at(members: &[Member], line: Line) {
    let (_, mut call) = next_called(members, TXN).await;
    assert_eq!(removal(&call.message().await), None, "a look");
    call.reply(&looked(line)).await;
}

/// Time passes for a call in line: it is looked at where it stands, now and then.
async fn in_line(members: &[Member], time: Duration) {
    let looks = async {
        loop {
            look_at(members, BEHIND).await;
        }
    };
    tokio::select! {
        () = looks => {}
        () = tokio::time::sleep(time) => {}
    }
}

/// Time for whatever may still come.
async fn nothing_more(member: &Member) {
    tokio::time::sleep(Duration::from_secs(90)).await;
    assert!(member.was_called_again().is_none(), "no call but these");
}

/// A Lock that stands in line behind another.
async fn waiting(client: &Client, member: &Member) -> (Stream, Call) {
    let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
    let call = member.called(LOCK).await;
    look(member, BEHIND).await;
    settled().await;
    (stream, call)
}

#[test]
fn a_client_that_leaves_the_line_leaves_no_key() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let (stream, mut call) = waiting(&client, &member).await;
        stream.cancel();
        assert_eq!(call.canceled().await, Reason::CANCEL, "upstream is told");
        assert_eq!(removed(&member).await, 4, "created at 5 or later");
        nothing_more(&member).await;
        assert_eq!(keyward.metrics.lock_keys_removed.get(), 1);
        // As one whose connection dies.
        let other = keyward.client().await;
        let (stream, call) = waiting(&other, &member).await;
        drop((stream, other, call));
        keyward.tasks.abort_all();
        assert_eq!(removed(&member).await, 4);
        nothing_more(&member).await;
    });
}

#[test]
fn a_deadline_and_a_late_refusal_leave_no_key_and_are_told_after_it_is_gone() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await.header("grpc-timeout", "300m");
        let (stream, _call) = waiting(&client, &member).await;
        let (outcome, above) = tokio::join!(stream.finish(), removed(&member));
        assert_eq!(above, 4);
        assert_eq!(outcome.end.told(), (Code::DeadlineExceeded, "context deadline exceeded"));
        let client = keyward.client().await;
        let (stream, call) = waiting(&client, &member).await;
        call.refuse(Code::Unknown, "etcdserver: permission denied");
        let mut ended = std::pin::pin!(stream.finish());
        tokio::select! {
            biased;
            _ = &mut ended => panic!("told before the key was removed"),
            above = removed(&member) => assert_eq!(above, 4),
        }
        assert_eq!(ended.await.end.told(), (Code::Unknown, "etcdserver: permission denied"));
        nothing_more(&member).await;
    });
}

#[test]
fn a_drain_ends_the_wait_at_once_and_leaves_no_key() {
    paused(async {
        let (member, mut keyward) = one();
        let client = keyward.client().await;
        let (stream, _call) = waiting(&client, &member).await;
        keyward.drain(Duration::from_secs(30));
        let began = Instant::now();
        let (outcome, above) = tokio::join!(stream.finish(), removed(&member));
        assert_eq!(above, 4);
        assert_eq!(outcome.end.told(), (Code::Unavailable, "etcdserver: server stopped"));
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        drop(client);
        keyward.ended().await;
    });
}

#[test]
fn a_lock_that_was_granted_is_never_removed() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let script = async {
            member.called(LOCK).await.reply(&locked()).await;
        };
        let (outcome, ()) = tokio::join!(client.call(LOCK, lock(LEASE)), script);
        assert_eq!(outcome.message()[..], locked()[..]);
        // After a wait the success is looked at before it is told.
        let (stream, call) = waiting(&client, &member).await;
        let script = async {
            call.reply(&locked()).await;
            look(&member, FIRST).await;
        };
        let (outcome, ()) = tokio::join!(stream.finish(), script);
        assert_eq!(outcome.message()[..], locked()[..]);
        drop(client);
        nothing_more(&member).await;
    });
}

/// A member answers a lookup after the end of its wait: Keyward has not reset the stream, and reads the answer.
async fn lookup_goes_on(mut lookup: Call) {
    let time = Duration::from_secs(1);
    assert!(timeout(time, lookup.canceled()).await.is_err(), "the member still executes the lookup");
    lookup.say(&looked(BEHIND)).await.expect("the stream is open");
    assert!(timeout(time, lookup.canceled()).await.is_err(), "the answer is read to its end");
    lookup.end(Code::Ok, "");
}

/// A cancelled read-only Txn may crash a member of 3.5.0 to 3.5.6 (docs/etcd-facts.md#cancelled-txn).
#[test]
fn the_end_of_a_wait_cancels_no_lookup() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        let call = member.called(LOCK).await;
        let mut lookup = member.called(TXN).await;
        assert_eq!(removal(&lookup.message().await), None, "a look");
        call.reply(&locked()).await;
        assert_eq!(stream.finish().await.message()[..], locked()[..]);
        lookup_goes_on(lookup).await;
        // The same for a lookup at a member's own state, when the client leaves.
        let (stream, _call) = waiting(&client, &member).await;
        let mut lookup = member.called(TXN).await;
        assert_eq!(removal(&lookup.message().await), None, "a glance");
        stream.cancel();
        assert_eq!(removed(&member).await, 4);
        lookup_goes_on(lookup).await;
        nothing_more(&member).await;
    });
}

/// The lease may have held the lock before: a Lock that it asks for again is answered at once, and this one was not seen
/// to wait.
#[test]
fn a_key_that_was_never_seen_in_line_is_removed_only_from_the_line() {
    paused(async {
        for (line, gone) in [(FIRST, false), (BEHIND, true)] {
            let (member, keyward) = one();
            let client = keyward.client().await;
            let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
            let _call = member.called(LOCK).await;
            stream.cancel();
            look(&member, line).await;
            if gone {
                assert_eq!(removed(&member).await, 4);
                // What was sent and not seen may still come: it is looked for once more.
                look(&member, FIRST).await;
            }
            nothing_more(&member).await;
        }
    });
}

#[test]
fn a_key_that_comes_late_is_removed_when_it_comes() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        drop(member.called(LOCK).await);
        stream.cancel();
        look(&member, ABSENT).await;
        look(&member, ABSENT).await;
        look(&member, BEHIND).await;
        assert_eq!(removed(&member).await, 4);
        look(&member, FIRST).await;
        nothing_more(&member).await;
    });
}

#[test]
fn a_refusal_at_once_leaves_nothing_to_look_for() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let script = async {
            member.called(LOCK).await.refuse(Code::Unknown, "etcdserver: requested lease not found");
        };
        let (outcome, ()) = tokio::join!(client.call(LOCK, lock(LEASE)), script);
        assert_eq!(outcome.end.told(), (Code::Unknown, "etcdserver: requested lease not found"));
        nothing_more(&member).await;
    });
}

#[test]
fn nothing_is_removed_while_another_call_waits_with_that_key() {
    paused(async {
        let (member, keyward) = one();
        let (client, other) = (keyward.client().await, keyward.client().await);
        let (first, _call) = waiting(&client, &member).await;
        let (second, mut call) = waiting(&other, &member).await;
        second.cancel();
        call.canceled().await;
        in_line(std::slice::from_ref(&member), Duration::from_secs(90)).await;
        // The last one that fails has it removed.
        first.cancel();
        assert_eq!(removed(&member).await, 4);
        nothing_more(&member).await;
        // One that succeeds keeps it.
        let (first, granted) = waiting(&client, &member).await;
        let (second, mut call) = waiting(&other, &member).await;
        second.cancel();
        call.canceled().await;
        let script = async {
            granted.reply(&locked()).await;
            look(&member, FIRST).await;
        };
        let (outcome, ()) = tokio::join!(first.finish(), script);
        outcome.message();
        nothing_more(&member).await;
    });
}

/// Else it would find its key in line, and wait with a key that is gone the next moment.
#[test]
fn a_new_call_waits_for_the_end_of_a_removal() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let (stream, _call) = waiting(&client, &member).await;
        stream.cancel();
        let mut removing = member.called(TXN).await;
        assert!(removal(&removing.message().await).is_some());
        let _again = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        settled().await;
        assert!(member.was_called_again().is_none(), "the new call waits");
        let done = TxnResponse { header: Some(header(9)), succeeded: true, responses: vec![] };
        removing.reply(&done.encode_to_vec()).await;
        member.called(LOCK).await;
    });
}

/// Nobody but etcd knows the key: it is never asked again, and nothing is removed.
#[test]
fn a_lock_without_a_lease_is_sent_once() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let stream = client.begin(LOCK, lock(0)).await.expect("sent");
        let (_, call) = next_called(&members, LOCK).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        call.reset(Reason::INTERNAL_ERROR);
        assert_eq!(stream.finish().await.end.told(), (Code::Unavailable, LOST));
        for member in &members {
            nothing_more(member).await;
        }
    });
}

#[test]
fn a_member_that_is_lost_during_the_wait_is_replaced() {
    paused(async {
        for (path, asked, answer) in [
            (LOCK, lock(LEASE), locked()),
            (
                CAMPAIGN,
                CampaignRequest { name: "n".into(), lease: LEASE, value: "v".into() }.encode_to_vec(),
                elected(5),
            ),
        ] {
            let (members, keyward) = three();
            let client = keyward.client().await;
            let stream = client.begin(path, &asked).await.expect("sent");
            let (first, mut call) = next_called(&members, path).await;
            call.message().await;
            look_at(&members, BEHIND).await;
            in_line(&members, Duration::from_secs(600)).await;
            members[first].refuse_connections(true);
            members[first].cut();
            let (second, mut call) = next_called(&members, path).await;
            assert_ne!(first, second);
            assert_eq!(call.message().await[..], asked[..], "the same bytes");
            let script = async {
                call.reply(&answer).await;
                look_at(&members, FIRST).await;
            };
            let (outcome, ()) = tokio::join!(stream.finish(), script);
            assert_eq!(outcome.message()[..], answer[..]);
        }
    });
}

/// A member that lost us removes the key where auth is off, also when the call waits elsewhere already: Campaign, and
/// Lock before 3.5, then say "yours" of a key that is gone.
#[test]
fn a_success_without_a_key_is_not_believed() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let asked = CampaignRequest { name: "n".into(), lease: LEASE, value: "v".into() }.encode_to_vec();
        let stream = client.begin(CAMPAIGN, &asked).await.expect("sent");
        let call = member.called(CAMPAIGN).await;
        look(&member, BEHIND).await;
        settled().await;
        call.reply(&elected(5)).await;
        look(&member, ABSENT).await;
        let call = member.called(CAMPAIGN).await;
        let script = async {
            call.reply(&elected(12)).await;
            look(&member, (Some(12), Some(12))).await;
        };
        let (outcome, ()) = tokio::join!(stream.finish(), script);
        assert_eq!(outcome.message()[..], elected(12)[..]);
        nothing_more(&member).await;
    });
}

#[test]
fn an_expired_session_is_believed_only_of_a_call_that_was_not_sent_again() {
    paused(async {
        let expired = "mutex: session is expired";
        let (member, keyward) = one();
        let client = keyward.client().await;
        let (stream, call) = waiting(&client, &member).await;
        call.refuse(Code::Unknown, expired);
        // Whoever removed the key: there is none of ours.
        let (outcome, _) = tokio::join!(stream.finish(), removed(&member));
        assert_eq!(outcome.end.told(), (Code::Unknown, expired));
        let (stream, call) = waiting(&client, &member).await;
        call.refuse(Code::Unknown, "etcdserver: server stopped");
        member.called(LOCK).await.refuse(Code::Unknown, expired);
        let script = async {
            member.called(LOCK).await.reply(&locked()).await;
            look(&member, FIRST).await;
        };
        let (outcome, ()) = tokio::join!(stream.finish(), script);
        outcome.message();
    });
}

#[test]
fn a_long_wait_leaves_all_of_the_patience_for_what_comes_after_it() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let (stream, call) = waiting(&client, &member).await;
        in_line(std::slice::from_ref(&member), Duration::from_secs(600)).await;
        member.refuse_connections(true);
        member.cut();
        drop(call);
        tokio::time::sleep(Duration::from_secs(5)).await;
        member.refuse_connections(false);
        keyward.probed();
        let call = member.called(LOCK).await;
        look(&member, BEHIND).await;
        settled().await;
        member.refuse_connections(true);
        member.cut();
        drop(call);
        let began = Instant::now();
        let outcome = stream.finish().await;
        assert_eq!(outcome.end.code(), Some(Code::Unavailable));
        let took = began.elapsed();
        assert!(took > Duration::from_secs(6) && took < Duration::from_secs(9), "{took:?}");
        // The key is removed as soon as a member can be reached; so late only from the line.
        tokio::time::sleep(Duration::from_secs(2)).await;
        member.refuse_connections(false);
        keyward.probed();
        look(&member, BEHIND).await;
        assert_eq!(removed(&member).await, 4);
    });
}

/// A wait in line is counted once, not for each login that fails after it.
#[test]
fn a_login_that_fails_after_the_wait_does_not_make_it_endless() {
    paused(async {
        let tasks = Tasks::default();
        let members: Vec<_> = (1..=2).map(|id| Member::new(id, &tasks)).collect();
        let keyward = Keyward::with_auth(&members.iter().collect::<Vec<_>>());
        let client = keyward.logged_in("alice").await;
        let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        let (_, call) = next_called(&members, LOCK).await;
        look_at(&members, BEHIND).await;
        settled().await;
        let began = Instant::now();
        for member in &members {
            member.refuse_connections(true);
            member.cut();
        }
        drop(call);
        assert_eq!(stream.finish().await.end.code(), Some(Code::Unavailable));
        let took = began.elapsed();
        assert!(took > Duration::from_secs(6) && took < Duration::from_secs(12), "{took:?}");
    });
}

/// Each time that it was seen to wait, one refusal of its token is healed: for months, if need be.
#[test]
fn a_token_that_dies_under_the_wait_is_renewed_each_time() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.logged_in("alice").await;
        let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        for number in 1..4 {
            let call = member.called(LOCK).await;
            assert_eq!(call.token(), Some(&*format!("alice.{number}")));
            look(&member, BEHIND).await;
            settled().await;
            call.refuse(Code::Unknown, INVALID_TOKEN);
        }
        let script = async {
            member.called(LOCK).await.reply(&locked()).await;
            look(&member, FIRST).await;
        };
        let (outcome, ()) = tokio::join!(stream.finish(), script);
        outcome.message();
        // Two refusals in a row are the truth.
        let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        for _ in 0..2 {
            member.called(LOCK).await.refuse(Code::Unknown, INVALID_TOKEN);
        }
        assert_eq!(stream.finish().await.end.told(), (Code::Unauthenticated, INVALID_TOKEN));
    });
}

const ANOTHERS: &str = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";

/// etcd's own watch goes by the token of whoever made it first on that member (etcd-io/etcd#14850).
#[test]
fn a_refusal_in_anothers_name_sends_the_call_elsewhere() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        let (first, call) = next_called(&members, LOCK).await;
        call.refuse(Code::Unknown, ANOTHERS);
        look_at(&members, BEHIND).await;
        let (second, call) = next_called(&members, LOCK).await;
        assert_ne!(first, second);
        look_at(&members, BEHIND).await;
        settled().await;
        let script = async {
            call.reply(&locked()).await;
            look_at(&members, FIRST).await;
        };
        let (outcome, ()) = tokio::join!(stream.finish(), script);
        outcome.message();
    });
}

/// Where no member can keep it waiting, it asks whether its turn has come, for as long as it takes.
#[test]
fn a_call_that_every_member_refuses_in_anothers_name_asks_at_leisure() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        let began = Instant::now();
        for _ in 0..30 {
            member.called(LOCK).await.refuse(Code::Unknown, ANOTHERS);
            look(&member, BEHIND).await;
        }
        assert!(began.elapsed() >= Duration::from_secs(20), "{:?}", began.elapsed());
        let script = async {
            member.called(LOCK).await.reply(&locked()).await;
            look(&member, FIRST).await;
        };
        let (outcome, ()) = tokio::join!(stream.finish(), script);
        outcome.message();
    });
}

/// With auth on, one watch of the member's own serves all who wait there; in 3.4 it goes silent when the token of whoever was
/// first has expired.
#[test]
fn a_member_that_does_not_tell_whose_turn_it_is_is_left() {
    paused(async {
        let tasks = Tasks::default();
        let members: Vec<_> = (1..=2).map(|id| Member::new(id, &tasks)).collect();
        let keyward = Keyward::with_auth(&members.iter().collect::<Vec<_>>());
        let client = keyward.logged_in("alice").await;
        let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        let (first, mut call) = next_called(&members, LOCK).await;
        in_line(&members, Duration::from_secs(60)).await;
        // The glance, the look, and the look that gives it time.
        for _ in 0..3 {
            look_at(&members, FIRST).await;
        }
        assert_eq!(call.canceled().await, Reason::CANCEL);
        let (second, call) = next_called(&members, LOCK).await;
        assert_ne!(first, second);
        let script = async {
            call.reply(&locked()).await;
            look_at(&members, FIRST).await;
        };
        let (outcome, ()) = tokio::join!(stream.finish(), script);
        outcome.message();
    });
}

/// Who may not read the line is refused in truth; without a lease of its own nobody can tell.
#[test]
fn a_refusal_in_ones_own_name_is_told() {
    paused(async {
        let (member, keyward) = one();
        let client = keyward.client().await;
        let stream = client.begin(LOCK, lock(LEASE)).await.expect("sent");
        member.called(LOCK).await.refuse(Code::Unknown, ANOTHERS);
        member.called(TXN).await.refuse(Code::PermissionDenied, "etcdserver: permission denied");
        // It may have put its key in line before; it may not remove it, either.
        member.called(TXN).await.refuse(Code::PermissionDenied, "etcdserver: permission denied");
        assert_eq!(stream.finish().await.end.told(), (Code::Unknown, ANOTHERS));
        let stream = client.begin(LOCK, lock(0)).await.expect("sent");
        member.called(LOCK).await.refuse(Code::Unknown, ANOTHERS);
        assert_eq!(stream.finish().await.end.told(), (Code::Unknown, ANOTHERS));
        nothing_more(&member).await;
    });
}

/// Thousands of blocked calls must not keep others from being sent, nor fill the memory.
#[test]
fn blocked_calls_have_a_budget_of_their_own() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[limits]\nreplay_buffer = \"2MiB\"\n[runtime]\nshards = 1\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        let client = keyward.client().await;
        let value: Bytes = vec![7; 1 << 20].into();
        let asked = CampaignRequest { name: "n".into(), lease: LEASE, value }.encode_to_vec();
        let mut waiting = Vec::new();
        for _ in 0..2 {
            let stream = client.begin(CAMPAIGN, &asked).await.expect("sent");
            waiting.push((stream, member.called(CAMPAIGN).await));
        }
        // A third of what is left is one connection's.
        let outcome = client.call(CAMPAIGN, &asked).await;
        assert_eq!(outcome.end.told(), (Code::ResourceExhausted, "etcdserver: too many requests"));
        let script = async { member.called(PUT).await.reply(&was_put(3)).await };
        let (outcome, ()) = tokio::join!(client.call(PUT, put(1_000_000)), script);
        outcome.message();
    });
}
