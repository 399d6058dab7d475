//! A read whose reply is lost with the connection may be what ended the member: it does not end the next one too (rules 68).

use std::time::Duration;

use keyward::members::membership::{Readiness, UnreadyReason};
use keyward::pb::etcdserverpb::{RangeRequest, RequestOp, TxnRequest, request_op::Request};
use keyward::refusal::{Code, Refusal};
use keyward::usage::suspect_reads::SUSPECTED_FOR;
use prost::Message as _;
use tokio::time::sleep;

use crate::client::{Client, Outcome};
use crate::member::{Call, Member, next_of};
use crate::rig::{paused, settled, three, three_with};
use crate::words::{LOST, RANGE, TXN, range, ranged, ranged_value};

fn list(limit: i64) -> RangeRequest {
    RangeRequest { key: "a".into(), range_end: "b".into(), limit, ..RangeRequest::default() }
}

fn in_txn(range: RangeRequest) -> Vec<u8> {
    let success = vec![RequestOp { request: Some(Request::RequestRange(range)) }];
    TxnRequest { success, ..TxnRequest::default() }.encode_to_vec()
}

/// The member at which the call arrives loses all its connections; the outcome if nobody else is asked.
async fn lost_once(client: &Client, members: &[Member], path: &str, message: &[u8]) -> (usize, Outcome) {
    let script = async {
        let (at, mut call) = next_of(members).await;
        call.message().await;
        members[at].cut();
        at
    };
    let (outcome, at) = tokio::join!(client.call(path, message), script);
    settled().await;
    (at, outcome)
}

fn nobody_is_asked(members: &[Member]) {
    assert!(members.iter().all(|member| member.was_called_again().is_none()));
}

fn assert_suspect(outcome: &Outcome) {
    let refusal = Refusal::SUSPECT_READ;
    assert_eq!(outcome.end.told(), (Code::ResourceExhausted, refusal.message()));
}

/// As clientv3 would repeat the read by itself, if it were told Unavailable.
#[test]
fn a_large_read_is_not_repeated_and_is_refused_for_a_minute() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let keys_only = RangeRequest { keys_only: true, ..list(0) };
        let local = RangeRequest { serializable: true, ..list(100_000) };
        for (path, message) in [
            (RANGE, list(0).encode_to_vec()),
            (RANGE, keys_only.encode_to_vec()),
            (RANGE, local.encode_to_vec()),
            (TXN, in_txn(list(0))),
        ] {
            let (_, outcome) = lost_once(&client, &members, path, &message).await;
            assert_suspect(&outcome);
            nobody_is_asked(&members);
            keyward.probed();
            sleep(SUSPECTED_FOR - Duration::from_secs(1)).await;
            assert_suspect(&client.call(path, &message).await);
            nobody_is_asked(&members);
            sleep(Duration::from_secs(1)).await;
            let answer = async { next_of(&members).await.1.reply(&ranged(5)).await };
            tokio::join!(client.call(path, &message), answer).0.message();
        }
    });
}

/// A member may also end while it sends a large answer.
#[test]
fn a_large_read_that_breaks_off_in_the_middle_of_its_answer_is_a_suspect() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let message = list(0).encode_to_vec();
        let half = |cut: bool| {
            let members = &members;
            async move {
                let (at, mut call) = next_of(members).await;
                call.say_half(&ranged_value(500_000)).await;
                settled().await;
                if cut { members[at].cut() } else { call.reset_canceled() }
            }
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, &message), half(false));
        assert_eq!(outcome.end.told(), (Code::Unavailable, LOST), "the stream alone broke");
        let (outcome, ()) = tokio::join!(client.call(RANGE, &message), half(true));
        assert_suspect(&outcome);
        keyward.probed();
        assert_suspect(&client.call(RANGE, &message).await);
        nobody_is_asked(&members);
    });
}

#[test]
fn while_one_read_is_a_suspect_all_others_are_served() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        assert_suspect(&lost_once(&client, &members, RANGE, &list(0).encode_to_vec()).await.1);
        keyward.probed();
        for message in [list(1).encode_to_vec(), list(2000).encode_to_vec(), range("k")] {
            let answer = async { next_of(&members).await.1.reply(&ranged(5)).await };
            tokio::join!(client.call(RANGE, message), answer).0.message();
        }
    });
}

#[test]
fn a_small_read_is_repeated_once() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let counted = RangeRequest { count_only: true, ..list(0) };
        for (path, message) in [
            (RANGE, range("k")),
            (RANGE, list(1000).encode_to_vec()),
            (RANGE, counted.encode_to_vec()),
            (TXN, in_txn(list(10))),
        ] {
            for is_lost_again in [false, true] {
                let script = async {
                    let (first, call) = next_of(&members).await;
                    members[first].cut();
                    drop(call);
                    let (second, call) = next_of(&members).await;
                    assert_ne!(first, second, "on another member");
                    if is_lost_again {
                        members[second].cut();
                    } else {
                        call.reply(&ranged(5)).await;
                    }
                };
                let (outcome, ()) = tokio::join!(client.call(path, &message), script);
                if is_lost_again {
                    assert_eq!(outcome.end.told(), (Code::Unavailable, LOST), "{path}");
                } else {
                    outcome.message();
                }
                settled().await;
                nobody_is_asked(&members);
                keyward.probed();
            }
        }
    });
}

/// The stream alone breaks, so the member lives.
#[test]
fn a_large_read_whose_stream_is_reset_is_read_elsewhere() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let script = async {
            Call::reset_canceled(next_of(&members).await.1);
            next_of(&members).await.1.reply(&ranged(5)).await;
        };
        tokio::join!(client.call(RANGE, list(0).encode_to_vec()), script).0.message();
    });
}

#[test]
fn no_read_is_repeated_at_the_last_ready_member() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        keyward.publish(|membership| {
            let member = std::sync::Arc::make_mut(&mut membership.members[0]);
            member.readiness = Readiness::NotReady(UnreadyReason::Unreachable);
        });
        let (_, outcome) = lost_once(&client, &members, RANGE, &range("k")).await;
        assert_eq!(outcome.end.told(), (Code::Unavailable, LOST));
        nobody_is_asked(&members);
    });
}

#[test]
fn a_large_read_is_asked_of_one_member_however_slow() {
    paused(async {
        let (members, keyward) = three_with("hedge_after = \"100ms\"\n");
        let client = keyward.client().await;
        for (message, asked) in [(in_txn(list(10)), 2), (in_txn(list(0)), 1)] {
            let stream = client.begin(TXN, &message).await.expect("sent");
            sleep(Duration::from_secs(2)).await;
            let calls: Vec<_> = members.iter().filter_map(Member::was_called_again).collect();
            assert_eq!(calls.len(), asked);
            stream.cancel();
            settled().await;
        }
    });
}

/// Requests that would end or split members: nothing of them is sent, whatever the door.
#[test]
fn a_request_that_would_end_members_is_sent_to_none() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let sorted = RangeRequest { sort_target: 9, ..list(1) };
        for (path, message) in [(RANGE, sorted.encode_to_vec()), (TXN, in_txn(sorted))] {
            let outcome = client.call(path, message).await;
            assert_eq!(outcome.end.told(), (Code::InvalidArgument, Refusal::SORT_OPTION.message()));
        }
        let grant = client.call("/etcdserverpb.Auth/RoleGrantPermission", b"").await;
        assert_eq!(grant.end.told(), (Code::InvalidArgument, Refusal::NO_PERMISSION_GIVEN.message()));
        let alarm = client.call("/etcdserverpb.Maintenance/Alarm", b"\x08\x09").await;
        assert_eq!(alarm.end.told().0, Code::InvalidArgument);
        nobody_is_asked(&members);
    });
}
