//! The way out: GOAWAY, open calls finish, streams end with a code that clients resume, all in bounded time.

use std::time::Duration;

use keyward::refusal::Code;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use crate::rig::{self, one_member, paused, settled};
use crate::words::{RANGE, range, ranged};

/// Of a paused clock, which moves only when nothing is left to do but wait: whoever waits for a limit waits longer.
const LITTLE: Duration = Duration::from_millis(10);

#[test]
fn open_calls_finish_and_new_ones_are_not_taken() {
    paused(async {
        let (member, mut keyward) = one_member();
        let client = keyward.client().await;
        let open = client.begin(RANGE, range("k")).await.expect("sent");
        let call = member.called(RANGE).await;
        let began = Instant::now();
        keyward.drain(Duration::from_secs(30));
        settled().await;
        assert!(client.begin(RANGE, range("k")).await.is_err(), "GOAWAY was sent");
        let finish = async {
            call.reply(&ranged(1)).await;
            open.finish().await
        };
        let (outcome, ()) = tokio::join!(finish, keyward.ended());
        outcome.message();
        assert!(began.elapsed() < LITTLE, "nobody waited for any limit: {:?}", began.elapsed());
    });
}

/// Its call may be on the way: a reset would leave it to guess.
#[test]
fn a_client_that_was_accepted_and_has_said_nothing_yet_is_told_by_goaway() {
    paused(async {
        for early in [true, false] {
            let (_member, keyward) = one_member();
            let mut peer = keyward.connect();
            let begun = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
            if early {
                peer.write_all(begun).await.expect("taken");
            }
            keyward.drain(Duration::from_secs(5));
            settled().await;
            if !early {
                peer.write_all(begun).await.expect("taken");
            }
            let mut said = Vec::new();
            peer.read_to_end(&mut said).await.expect("closed");
            assert!(frames(&said).contains(&GOAWAY), "{:?}", frames(&said));
        }
    });
}

const GOAWAY: u8 = 7;

/// The types of the HTTP/2 frames.
fn frames(mut bytes: &[u8]) -> Vec<u8> {
    let mut types = Vec::new();
    while let [a, b, c, kind, rest @ ..] = bytes {
        types.push(*kind);
        let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
        bytes = rest.get(5 + length..).unwrap_or_default();
    }
    types
}

#[test]
fn streams_end_with_a_code_that_clients_resume() {
    paused(async {
        let (member, mut keyward) = one_member();
        let client = keyward.client().await;
        let (watching, _watched) = rig::watching(&client, &member).await;
        let (renewing, _renewals) = rig::renewing(&client, &member).await;

        let began = Instant::now();
        keyward.drain(Duration::from_secs(30));
        let ends = async { (watching.finish().await, renewing.finish().await) };
        let ((watching, renewing), ()) = tokio::join!(ends, keyward.ended());
        for outcome in [watching, renewing] {
            assert_eq!(outcome.end.told(), (Code::Unavailable, "etcdserver: server stopped"));
        }
        assert!(began.elapsed() < LITTLE, "{:?}", began.elapsed());
    });
}

#[test]
fn what_does_not_end_by_itself_is_ended_at_the_limit() {
    paused(async {
        let (member, mut keyward) = one_member();
        let client = keyward.client().await;
        let open = client.begin(RANGE, range("k")).await.expect("sent");
        let _never_answered = member.called(RANGE).await;
        let silent = keyward.connect();
        let began = Instant::now();
        keyward.drain(Duration::from_secs(5));
        let (_, ()) = tokio::join!(open.finish(), keyward.ended());
        let took = began.elapsed();
        assert!(took >= Duration::from_secs(5) && took <= Duration::from_secs(7), "{took:?}");
        drop(silent);
    });
}
