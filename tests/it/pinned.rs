//! Snapshot and RangeStream come from one member: asked again elsewhere before the first byte, never after it, and for as
//! long as they take.

use std::time::Duration;

use h2::Reason;
use keyward::refusal::Code;
use tokio::time::Instant;

use crate::member::{Call, Member, next_called};
use crate::rig::{paused, settled, three};
use crate::wire::{End, Form};
use crate::words::{LOST, range, ranged_value};

const SNAPSHOT: &str = "/etcdserverpb.Maintenance/Snapshot";
const RANGE_STREAM: &str = "/etcdserverpb.KV/RangeStream";
/// What a member sends at a time: 32 KiB and what surrounds it.
const CHUNK: usize = 32 * 1024;

fn both() -> [(&'static str, Vec<u8>); 2] {
    [(SNAPSHOT, Vec::new()), (RANGE_STREAM, range("k"))]
}

#[test]
fn a_cut_after_the_first_byte_ends_honestly_and_nothing_is_asked_again() {
    paused(async {
        type Cut = fn(&Member, Call);
        let cuts: [Cut; 4] = [
            |member, call| {
                member.cut();
                drop(call);
            },
            |_, call| call.reset(Reason::CANCEL),
            |_, call| call.reset(Reason::REFUSED_STREAM),
            |_, call| call.end_without_status(),
        ];
        for cut in cuts {
            for (path, asked) in both() {
                let (members, keyward) = three();
                let client = keyward.client().await;
                let mut stream = client.begin(path, &asked).await.expect("sent");
                let (at, mut call) = next_called(&members, path).await;
                call.say(&ranged_value(CHUNK)).await.expect("taken");
                stream.next().await.expect("the first message");
                cut(&members[at], call);
                let end = stream.next().await.expect_err("an end");
                assert_eq!(end.told(), (Code::Unavailable, LOST), "{path}");
                assert!(matches!(end, End::Status(_, Form::Trailers)), "{path}: {end:?}");
                settled().await;
                tokio::time::sleep(Duration::from_secs(60)).await;
                assert!(members.iter().all(|member| member.was_called_again().is_none()), "{path}");
                assert!(!client.is_closed());
            }
        }
    });
}

#[test]
fn a_loss_before_the_first_byte_is_nobodys_business() {
    paused(async {
        for (path, asked) in both() {
            let (members, keyward) = three();
            let client = keyward.client().await;
            let script = async {
                let (first, call) = next_called(&members, path).await;
                call.reset(Reason::INTERNAL_ERROR);
                // A header is no byte of the file.
                let (second, mut call) = next_called(&members, path).await;
                assert_ne!(first, second);
                call.begin();
                settled().await;
                call.reset(Reason::CANCEL);
                let (third, call) = next_called(&members, path).await;
                assert!(third != first && third != second);
                call.reply(&ranged_value(CHUNK)).await;
            };
            let (outcome, ()) = tokio::join!(client.call(path, &asked), script);
            assert_eq!(outcome.message()[..], ranged_value(CHUNK)[..]);
        }
    });
}

/// No time of ours, neither in all nor between two messages; all from the one member.
#[test]
fn it_may_take_as_long_as_it_takes() {
    paused(async {
        for (path, asked) in both() {
            let (members, keyward) = three();
            let client = keyward.client().await;
            let began = Instant::now();
            let script = async {
                let (_, mut call) = next_called(&members, path).await;
                assert!(!call.headers.contains_key("grpc-timeout"));
                for _ in 0..12 {
                    tokio::time::sleep(Duration::from_secs(120)).await;
                    call.say(&ranged_value(CHUNK)).await.expect("taken");
                }
                call.end(Code::Ok, "");
            };
            let (outcome, ()) = tokio::join!(client.call(path, &asked), script);
            assert_eq!((outcome.messages.len(), outcome.end.code()), (12, Some(Code::Ok)));
            assert_eq!(began.elapsed(), Duration::from_secs(12 * 120));
            assert!(members.iter().all(|member| member.was_called_again().is_none()));
        }
    });
}

/// A member's own words at the end are its own.
#[test]
fn a_status_after_the_first_byte_is_passed_on() {
    paused(async {
        for (path, asked) in both() {
            let (members, keyward) = three();
            let client = keyward.client().await;
            let script = async {
                let (_, mut call) = next_called(&members, path).await;
                call.say(&ranged_value(CHUNK)).await.expect("taken");
                call.end(Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted");
            };
            let (outcome, ()) = tokio::join!(client.call(path, &asked), script);
            assert_eq!(outcome.messages.len(), 1);
            let compacted = "etcdserver: mvcc: required revision has been compacted";
            assert_eq!(outcome.end.told(), (Code::OutOfRange, compacted));
        }
    });
}
