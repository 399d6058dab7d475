//! Without a quorum a member that is left answers what it can answer from its own store, and nothing else is asked of it.

use std::sync::Arc;
use std::time::SystemTime;

use keyward::downstream::session::{RevocationChange, Revocations};
use keyward::members::membership::{Readiness, ServingState, UnreadyReason};
use keyward::pb::etcdserverpb::{
    MemberListRequest, MemberListResponse, RangeRequest, RequestOp, SnapshotResponse, StatusResponse,
    TxnRequest, request_op::Request,
};
use keyward::refusal::Code;
use prost::Message as _;
use tokio::time::Instant;

use crate::client::{Client, Outcome};
use crate::member::{Member, next_of};
use crate::rig::{Keyward, paused, three};
use crate::words::{
    INVALID_TOKEN, KEEP_ALIVE, PUT, RANGE, TXN, WATCH, header, put, range, ranged, renew, txn_done, was_put,
    watch,
};

const MEMBER_LIST: &str = "/etcdserverpb.Cluster/MemberList";
const STATUS: &str = "/etcdserverpb.Maintenance/Status";
const SNAPSHOT: &str = "/etcdserverpb.Maintenance/Snapshot";
const NO_LEADER: &str = "etcdserver: no leader";

/// Publishes that the members of these places answer and see no leader, and that the others do not answer.
fn lose_quorum(keyward: &Keyward, left: &[usize]) {
    keyward.publish(|membership| {
        membership.leader = None;
        for (place, member) in membership.members.iter_mut().enumerate() {
            let mut changed = keyward::members::membership::Member::clone(member);
            let reason =
                if left.contains(&place) { UnreadyReason::NoLeader } else { UnreadyReason::Unreachable };
            changed.readiness = Readiness::NotReady(reason);
            *member = changed.into();
        }
    });
}

/// Publishes that all members are ready.
fn regain_quorum(keyward: &Keyward) {
    keyward.publish(|membership| {
        membership.leader = membership.members.first().map(|member| member.id);
        for member in &mut membership.members {
            let mut changed = keyward::members::membership::Member::clone(member);
            changed.readiness = Readiness::Ready;
            *member = changed.into();
        }
    });
}

fn local() -> Vec<u8> {
    RangeRequest { key: "k".into(), serializable: true, ..RangeRequest::default() }.encode_to_vec()
}

/// The call's outcome, where this member answers it so.
async fn answered(client: &Client, member: &Member, path: &str, body: &[u8], answer: &[u8]) -> Outcome {
    let script = async { member.called(path).await.reply(answer).await };
    tokio::join!(client.call(path, body), script).0
}

#[track_caller]
fn assert_refused(outcome: &Outcome, code: Code, text: &str) {
    assert_eq!(outcome.end.code(), Some(code), "{outcome:?}");
    assert!(format!("{:?}", outcome.end).contains(text), "{outcome:?}");
    assert!(outcome.messages.is_empty());
}

#[test]
fn what_needs_no_quorum_is_answered_by_the_member_that_is_left() {
    paused(async {
        let (members, keyward) = three();
        lose_quorum(&keyward, &[1]);
        assert_eq!(keyward.members.snapshot.load().serving(), ServingState::LocalReadsOnly);
        let client = keyward.client().await;
        let left = &members[1];
        let read =
            RequestOp { request: Some(Request::RequestRange(RangeRequest::decode(&*local()).unwrap())) };
        let txn = TxnRequest { success: vec![read], ..TxnRequest::default() }.encode_to_vec();
        let list = MemberListResponse { header: Some(header(0)), members: Vec::new() }.encode_to_vec();
        let status = StatusResponse { header: Some(header(5)), ..StatusResponse::default() }.encode_to_vec();
        let snapshot = SnapshotResponse { blob: "all".into(), ..SnapshotResponse::default() }.encode_to_vec();
        let cases: [(&str, &[u8], &[u8]); 5] = [
            (RANGE, &local(), &ranged(5)),
            (TXN, &txn, &txn_done(5)),
            (MEMBER_LIST, &[], &list),
            (STATUS, &[], &status),
            (SNAPSHOT, &[], &snapshot),
        ];
        for (path, body, answer) in cases {
            let began = Instant::now();
            let outcome = answered(&client, left, path, body, answer).await;
            assert_eq!(outcome.message().as_ref(), answer, "{path}");
            assert_eq!(began.elapsed().as_secs(), 0, "{path}: at once");
        }
        assert!(members.iter().all(|member| member.was_called_again().is_none()));
    });
}

#[test]
fn what_needs_a_quorum_is_refused_as_before_and_sent_to_nobody() {
    paused(async {
        let (members, keyward) = three();
        lose_quorum(&keyward, &[1]);
        let client = keyward.client().await;
        let list = MemberListRequest { linearizable: true }.encode_to_vec();
        for (path, body) in [(RANGE, range("k")), (PUT, put(1)), (MEMBER_LIST, list)] {
            let began = Instant::now();
            assert_refused(&client.call(path, body).await, Code::Unavailable, NO_LEADER);
            assert_eq!(began.elapsed().as_secs(), 6, "{path}: as long as etcd tries");
        }
        assert!(members.iter().all(|member| member.was_called_again().is_none()));
    });
}

/// Though a member alone would answer: its answer does not tell how old it is.
#[test]
fn leases_are_not_listed_without_a_leader() {
    paused(async {
        let (members, keyward) = three();
        lose_quorum(&keyward, &[1]);
        let outcome = keyward.client().await.call("/etcdserverpb.Lease/LeaseLeases", b"").await;
        assert_refused(&outcome, Code::Unavailable, NO_LEADER);
        assert!(members.iter().all(|member| member.was_called_again().is_none()));
    });
}

#[test]
fn a_client_is_not_shown_less_than_it_was_shown_by_a_member_that_is_lost() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let (written, at) = tokio::join!(client.call(PUT, put(1)), async {
            let (at, call) = next_of(&members).await;
            call.reply(&was_put(10)).await;
            at
        });
        written.message();
        let left = (at + 1) % 3;
        lose_quorum(&keyward, &[left]);
        let outcome = answered(&client, &members[left], RANGE, &local(), &ranged(9)).await;
        assert_refused(&outcome, Code::Unavailable, NO_LEADER);
        let fresh = keyward.client().await;
        let outcome = answered(&fresh, &members[left], RANGE, &local(), &ranged(9)).await;
        assert_eq!(
            outcome.message().as_ref(),
            ranged(9),
            "a client that was shown nothing reads what is left"
        );
        let outcome = answered(&client, &members[left], RANGE, &local(), &ranged(10)).await;
        assert_eq!(outcome.message().as_ref(), ranged(10), "enough for the first one");
    });
}

/// A login is a raft entry, so a token that any member issued is known to the one that is left.
#[test]
fn a_session_is_proved_to_the_member_that_is_left_by_another_members_token() {
    paused(async {
        let tasks = keyward::tasks::Tasks::default();
        let members: Vec<_> = (1..=3).map(|id| Member::new(id, &tasks)).collect();
        let keyward = Keyward::with_auth(&members.iter().collect::<Vec<_>>());
        let client = keyward.logged_in("alice").await;
        let issuer = members.iter().position(|member| member.logins() == 1).expect("one login");
        let (left, logins) = ((issuer + 1) % 3, || members.iter().map(Member::logins).sum::<usize>());
        lose_quorum(&keyward, &[left]);
        let script = async {
            let call = members[left].called(RANGE).await;
            assert_eq!(call.token(), Some("alice.1"));
            call.reply(&ranged(5)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, local()), script);
        assert_eq!(outcome.message().as_ref(), ranged(5));
        assert_eq!(logins(), 1, "no member was asked for another");
        // The member may not have applied that login: the client hears so.
        let script = async {
            let call = members[left].called(RANGE).await;
            call.refuse(Code::Unauthenticated, INVALID_TOKEN);
            let call = members[left].called(RANGE).await;
            call.refuse(Code::Unauthenticated, INVALID_TOKEN);
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, local()), script);
        assert_refused(&outcome, Code::Unauthenticated, INVALID_TOKEN);
    });
}

/// As etcd tells a call with `hasleader`; without, it waits for a leader.
#[test]
fn a_call_that_wants_a_leader_is_told_at_once_that_there_is_none() {
    paused(async {
        let (members, keyward) = three();
        lose_quorum(&keyward, &[1]);
        let wants_leader = keyward.client().await.header("hasleader", "true");
        for (path, body) in [(RANGE, range("k")), (PUT, put(1))] {
            let began = Instant::now();
            assert_refused(&wants_leader.call(path, body).await, Code::Unavailable, NO_LEADER);
            assert_eq!(began.elapsed().as_secs(), 0, "{path}: at once");
        }
        let began = Instant::now();
        assert_refused(&keyward.client().await.call(PUT, put(1)).await, Code::Unavailable, NO_LEADER);
        assert!(began.elapsed().as_secs() >= 6, "without, it waits");
        assert!(members.iter().all(|member| member.was_called_again().is_none()));
    });
}

/// Keyward has not noticed yet.
#[test]
fn a_call_that_wants_a_leader_asks_each_member_once() {
    paused(async {
        for served_by_the_last in [false, true] {
            let (members, keyward) = three();
            let wants_leader = keyward.client().await.header("hasleader", "true");
            let script = async {
                for _ in 0..2 {
                    next_of(&members).await.1.refuse(Code::Unavailable, NO_LEADER);
                }
                let (_, last) = next_of(&members).await;
                if served_by_the_last {
                    last.reply(&was_put(3)).await;
                } else {
                    last.refuse(Code::Unavailable, NO_LEADER);
                }
            };
            let began = Instant::now();
            let (outcome, ()) = tokio::join!(wants_leader.call(PUT, put(1)), script);
            assert_eq!(began.elapsed().as_secs(), 0, "at once");
            if served_by_the_last {
                outcome.message();
            } else {
                assert_refused(&outcome, Code::Unavailable, NO_LEADER);
            }
        }
    });
}

/// Past `revocation.max_age` without a quorum.
#[test]
fn with_revocations_for_local_reads_alone_nothing_else_is_sent_also_when_a_quorum_is_back() {
    paused(async {
        let tasks = keyward::tasks::Tasks::default();
        let members: Vec<_> = (1..=3).map(|id| Member::new(id, &tasks)).collect();
        let keyward = Keyward::with_auth(&members.iter().collect::<Vec<_>>());
        let alice = keyward.logged_in("alice").await;
        let bob = keyward.logged_in("bob").await;
        lose_quorum(&keyward, &[1]);
        let none = Revocations::default();
        let block = none.entry(&RevocationChange::Block("bob".into()), SystemTime::now());
        let known = Arc::new(none.with(block).expect("there is room"));
        keyward.sealer.apply_to_local_reads(&known);
        let outcome = answered(&alice, &members[1], RANGE, &local(), &ranged(5)).await;
        assert_eq!(outcome.message().as_ref(), ranged(5));
        assert_refused(&bob.call(RANGE, local()).await, Code::Unauthenticated, INVALID_TOKEN);
        let began = Instant::now();
        let defragment = "/etcdserverpb.Maintenance/Defragment";
        let others: [(&str, Vec<u8>); 6] = [
            (PUT, put(1)),
            (RANGE, range("k")),
            (WATCH, watch("k", 0)),
            (KEEP_ALIVE, renew(1)),
            (defragment, Vec::new()),
            ("/later.Service/Unknown", Vec::new()),
        ];
        for (path, body) in &others {
            assert_refused(&alice.call(path, body.clone()).await, Code::Unavailable, NO_LEADER);
        }
        assert_eq!(began.elapsed().as_secs(), 0, "at once");

        // A read that has waited for its member meets a quorum.
        regain_quorum(&keyward);
        let again = (RANGE, local());
        for (path, body) in others.iter().chain([&again]) {
            let nothing_sent = "there is no connection available";
            assert_refused(&alice.call(path, body.clone()).await, Code::Unavailable, nothing_sent);
        }
        assert!(members.iter().all(|member| member.was_called_again().is_none()));
        keyward.sealer.apply_revocations(Some(&known));
        let (outcome, ()) = tokio::join!(alice.call(PUT, put(1)), async {
            next_of(&members).await.1.reply(&was_put(10)).await;
        });
        outcome.message();
    });
}
