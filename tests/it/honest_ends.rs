//! Whatever breaks upstream, a client sees trailers with etcd's words; never a reset that it did not cause (rules 38).

use h2::Reason;
use keyward::refusal::Code;

use crate::client::Outcome;
use crate::member::{Call, Member};
use crate::rig::{Keyward, one_member, paused, settled};
use crate::wire::{End, Form};
use crate::words::{LOST, PUT, RANGE, put, range, ranged, ranged_value, was_put};

const SNAPSHOT: &str = "/etcdserverpb.Maintenance/Snapshot";

fn assert_lost(outcome: &Outcome) {
    assert_eq!(outcome.end.told(), (Code::Unavailable, LOST), "{outcome:?}");
}

/// What a write ends with when `script` breaks its reply.
async fn write_broken_by<F: Future<Output = ()>>(script: impl FnOnce(Call) -> F) -> (Outcome, Option<Call>) {
    let (member, keyward) = one_member();
    let client = keyward.client().await;
    let broken = async { script(member.called(PUT).await).await };
    let (outcome, ()) = tokio::join!(client.call(PUT, put(10)), broken);
    settled().await;
    assert!(!client.is_closed(), "the client's connection lives");
    (outcome, member.was_called_again())
}

#[test]
fn a_reset_of_a_write_is_unavailable_and_not_sent_again() {
    paused(async {
        for reason in [Reason::CANCEL, Reason::INTERNAL_ERROR, Reason::NO_ERROR] {
            let (outcome, again) = write_broken_by(|call| async move { call.reset(reason) }).await;
            assert_lost(&outcome);
            assert!(again.is_none(), "{reason:?}");
        }
    });
}

#[test]
fn a_write_whose_reply_breaks_half_way_is_unavailable_and_not_sent_again() {
    paused(async {
        let half = |mut call: Call| async move {
            call.say_half(&was_put(3)).await;
            call.reset(Reason::CANCEL);
        };
        let no_status = |mut call: Call| async move {
            call.say(&was_put(3)).await.expect("taken");
            call.end_without_status();
        };
        for (outcome, again) in [write_broken_by(half).await, write_broken_by(no_status).await] {
            assert_lost(&outcome);
            assert!(again.is_none());
        }
    });
}

#[test]
fn a_reply_that_breaks_after_it_began_ends_with_trailers() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        for end in [Call::reset_canceled, Call::end_without_status] {
            let script = async {
                let mut call = member.called(SNAPSHOT).await;
                for _ in 0..3 {
                    call.say(&ranged_value(50_000)).await.expect("taken");
                }
                // What is in a member's own buffers goes with a reset.
                settled().await;
                end(call);
            };
            let (outcome, ()) = tokio::join!(client.call(SNAPSHOT, b""), script);
            assert_eq!(outcome.messages.len(), 3, "what came is delivered");
            assert_eq!(outcome.end.told(), (Code::Unavailable, LOST));
            assert!(matches!(outcome.end, End::Status(_, Form::Trailers)));
        }
    });
}

#[test]
fn trailers_without_a_status_are_no_end() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let script = async {
            let mut call = member.called(SNAPSHOT).await;
            call.say(&ranged_value(5)).await.expect("taken");
            call.end_with_empty_trailers();
        };
        let (outcome, ()) = tokio::join!(client.call(SNAPSHOT, b""), script);
        assert_eq!(outcome.end.told(), (Code::Unavailable, LOST));
        // A whole reply, too: whether the write was applied is not said.
        let script = async {
            let mut call = member.called(PUT).await;
            call.say(b"").await.expect("taken");
            call.end_with_empty_trailers();
        };
        let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
        assert_eq!(outcome.end.told(), (Code::Unavailable, LOST));
    });
}

#[test]
fn a_connection_that_is_cut_ends_every_stream_with_trailers() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let script = async {
            let put = member.called(PUT).await;
            let mut snapshot = member.called(SNAPSHOT).await;
            snapshot.say(&ranged_value(5)).await.expect("taken");
            settled().await;
            member.cut();
            drop((put, snapshot));
        };
        let calls = async {
            let write = client.begin(PUT, put(10)).await.expect("sent");
            settled().await;
            let stream = client.begin(SNAPSHOT, b"").await.expect("sent");
            tokio::join!(write.finish(), stream.finish())
        };
        let ((write, stream), ()) = tokio::join!(calls, script);
        assert_lost(&write);
        assert_lost(&stream);
        assert!(!client.is_closed());
    });
}

#[test]
fn a_call_that_its_client_left_is_recorded_as_canceled() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let stream = client.begin(RANGE, range("k")).await.expect("sent");
        let mut call = member.called(RANGE).await;
        stream.cancel();
        assert_eq!(call.canceled().await, Reason::CANCEL, "upstream is told");
        settled().await;
        assert_eq!(keyward.metrics.calls_with(Code::Canceled as u8), 1);
        assert_eq!(keyward.metrics.calls_with(Code::Unavailable as u8), 0);
    });
}

#[test]
fn a_call_without_any_member_is_refused_in_etcds_time() {
    paused(async {
        let member = Member::new(1, &keyward::tasks::Tasks::default());
        let keyward = Keyward::before(&[&member]);
        member.refuse_connections(true);
        let client = keyward.client().await;
        let began = tokio::time::Instant::now();
        let outcome = client.call(PUT, put(1)).await;
        assert_eq!(outcome.end.told(), (Code::Unavailable, "there is no connection available"));
        assert!(began.elapsed() <= keyward::gateway::retries::PATIENCE);
        assert!(member.dials() > 3, "it was tried");
    });
}

/// A method that we do not know is refused by the member, and the record says so.
#[test]
fn the_status_of_an_unknown_method_is_recorded() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let script = async {
            member.called("/etcdserverpb.KV/New").await.refuse(Code::Unimplemented, "unknown method New");
        };
        let (outcome, ()) = tokio::join!(client.call("/etcdserverpb.KV/New", ranged(1)), script);
        assert_eq!(outcome.headers["grpc-status"], "12", "in the form that it came in");
        assert_eq!(outcome.end.told(), (Code::Unimplemented, "unknown method New"));
        settled().await;
        assert_eq!(keyward.metrics.calls_with(Code::Unimplemented as u8), 1);
        assert_eq!(keyward.metrics.calls_with(Code::Canceled as u8), 0);
    });
}
