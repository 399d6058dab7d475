//! A frame that nothing follows is sent at once, and large messages cross in both directions.

use tokio::time::Instant;

use crate::rig::{one_member, paused};
use crate::words::{PUT, RANGE, put, range, ranged, ranged_value, was_put};

/// The paused clock moves only when everything waits: a frame that waited for a timer would be seen.
#[test]
fn a_lone_call_is_answered_without_waiting_for_anything() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        for number in 0..3 {
            let began = Instant::now();
            let script = async { member.called(RANGE).await.reply(&ranged(number)).await };
            let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
            assert_eq!(outcome.message()[..], ranged(number)[..]);
            assert_eq!(Instant::now(), began, "nothing waited for a timer");
        }
    });
}

#[test]
fn large_messages_cross_both_ways_as_they_are() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let (request, reply) = (put(2 * 1024 * 1024 - 64), ranged_value(24 << 20));
        let script = async {
            let mut call = member.called(PUT).await;
            assert_eq!(call.message().await[..], request[..]);
            call.reply(&was_put(3)).await;
            member.called(RANGE).await.reply(&reply).await;
        };
        let asked = async {
            assert_eq!(client.call(PUT, &request).await.message()[..], was_put(3)[..]);
            assert_eq!(client.call(RANGE, range("k")).await.message()[..], reply[..]);
        };
        tokio::join!(script, asked);
    });
}

#[test]
fn many_large_writes_at_once_all_arrive() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let request = put(600 * 1024);
        let script = async {
            for _ in 0..20 {
                let mut call = member.called(PUT).await;
                assert_eq!(call.message().await.len(), request.len());
                call.reply(&was_put(3)).await;
            }
        };
        let all = futures_util::future::join_all((0..20).map(|_| client.call(PUT, &request)));
        let (outcomes, ()) = tokio::join!(all, script);
        for outcome in &outcomes {
            outcome.message();
        }
    });
}
