//! Requests compressed with gzip: a member receives their messages uncompressed, decisions are made on the inflated bytes,
//! and nothing that inflates past a limit is held. Answers are uncompressed, which every client accepts.

use std::io::Write as _;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, PutRequest};
use keyward::refusal::Code;
use keyward::rpc::frame::encode;
use keyward::tasks::Tasks;
use prost::Message as _;

use crate::client::{Client, Outcome, Stream};
use crate::member::Member;
use crate::rig::{Keyward, one_member, paused, settled};
use crate::wire::{End, say_framed};
use crate::words::{
    KEEP_ALIVE, PUT, RANGE, WATCH, create_of, created, put, range, ranged, ranged_value, renew, renewal,
    renewal_of, renewed, was_put, watch, watched,
};

const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
/// The default of `limits.request_size`.
const MAX: usize = 2 << 20;

fn gzip(message: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(message).expect("memory");
    encoder.finish().expect("memory")
}

/// A frame whose flag says that it is compressed.
fn compressed_frame(payload: &[u8]) -> Bytes {
    let mut framed = encode(payload).to_vec();
    framed[0] = 1;
    framed.into()
}

async fn send(client: &Client, path: &str, framed: Bytes) -> Outcome {
    let mut stream = client.open(path).await.expect("open");
    match say_framed(&mut stream.send, framed, true).await {
        // A refusal may come before the message was sent whole.
        Ok(()) | Err(End::Reset(h2::Reason::NO_ERROR) | End::Gone) => stream.finish().await,
        Err(end) => panic!("{end:?}"),
    }
}

async fn say_compressed(stream: &mut Stream, message: &[u8]) {
    say_framed(&mut stream.send, compressed_frame(&gzip(message)), false).await.expect("taken");
}

#[test]
fn a_member_receives_the_inflated_message_and_the_answer_is_not_compressed() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await.header("grpc-encoding", "gzip");
        // A small one, one of many steps, and the largest that is allowed.
        for value in [10, 1 << 20, MAX - 9] {
            let message = put(value);
            let script = async {
                let mut call = member.called(PUT).await;
                assert!(!call.headers.contains_key("grpc-encoding"));
                assert_eq!(call.message().await, message);
                call.reply(&was_put(7)).await;
            };
            let call = send(&client, PUT, compressed_frame(&gzip(&message)));
            let (outcome, ()) = tokio::join!(call, script);
            assert_eq!(outcome.message(), &was_put(7));
            assert!(!outcome.headers.contains_key("grpc-encoding"));
        }
        // An encoding says that messages may be compressed, not that all are.
        let script = async {
            let mut call = member.called(RANGE).await;
            assert_eq!(call.message().await, range("k"));
            call.reply(&ranged_value(100_000)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        assert_eq!(outcome.message(), &ranged_value(100_000));
    });
}

#[test]
fn what_inflates_past_the_limit_is_refused_and_not_sent() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await.header("grpc-encoding", "gzip");
        let mut lying = gzip(&vec![0; 64 << 20]);
        let size = lying.len() - 4;
        lying[size..].copy_from_slice(&9_u32.to_le_bytes());
        for bomb in [gzip(&put(MAX)), gzip(&vec![0; 64 << 20]), lying] {
            let outcome = send(&client, PUT, compressed_frame(&bomb)).await;
            let told = "grpc: received message after decompression larger than max 2097152";
            assert_eq!(outcome.end.told(), (Code::ResourceExhausted, told));
            let mut stream = client.open(WATCH).await.expect("open");
            say_framed(&mut stream.send, compressed_frame(&bomb), false).await.expect("taken");
            assert_eq!(stream.finish().await.end.told(), (Code::ResourceExhausted, told));
        }
        let outcome = send(&client, AUTHENTICATE, compressed_frame(&gzip(&[0; 100_000]))).await;
        // The budget of whoever has not logged in ends there too.
        assert_eq!(outcome.end.code(), Some(Code::ResourceExhausted));
        assert!(member.was_called_again().is_none(), "nothing was sent");
    });
}

/// A kilobyte of gzip counts as what it inflates to.
#[test]
fn inflated_bytes_are_counted_in_the_budget_for_requests() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[limits]\nreplay_buffer = \"2MiB\"\n[runtime]\nshards = 1\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        let client = keyward.client().await.header("grpc-encoding", "gzip");
        let small = compressed_frame(&gzip(&put(1_200_000)));
        assert!(small.len() < 10_000);
        let mut first = client.open(PUT).await.expect("open");
        say_framed(&mut first.send, small.clone(), true).await.expect("taken");
        let call = member.called(PUT).await;
        let outcome = send(&client, PUT, small.clone()).await;
        assert_eq!(outcome.end.told(), (Code::ResourceExhausted, "etcdserver: too many requests"));
        call.reply(&was_put(7)).await;
        first.finish().await.message();
        settled().await;
        let script = async { member.called(PUT).await.reply(&was_put(8)).await };
        tokio::join!(send(&client, PUT, small), script).0.message();
    });
}

#[test]
fn a_decision_is_made_on_the_inflated_bytes() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await.header("grpc-encoding", "gzip");
        let twice = [range("a"), range("b")].concat();
        let told = "keyward: request body is not canonical: a field given twice in etcdserverpb.RangeRequest";
        let outcome = send(&client, RANGE, compressed_frame(&gzip(&twice))).await;
        assert_eq!(outcome.end.told(), (Code::InvalidArgument, told));
        let two = [compressed_frame(&gzip(&range("a"))), encode(&range("b"))].concat();
        assert_eq!(send(&client, RANGE, two.into()).await.end.code(), Some(Code::InvalidArgument));
        assert_eq!(keyward.metrics.not_canonical.get(), 2);
        assert!(member.was_called_again().is_none(), "nothing was sent");
    });
}

#[test]
fn what_is_no_gzip_and_unknown_encodings_are_refused_in_the_words_of_grpc_go() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await.header("grpc-encoding", "gzip");
        let cut = gzip(&range("k"));
        let cut = &cut[..cut.len() - 9];
        let cases: [(&[u8], &str); 3] = [
            (b"", "grpc: failed to decompress the message: EOF"),
            (b"this is no gzip at all", "grpc: failed to decompress the message: gzip: invalid header"),
            (cut, "grpc: failed to read decompressed data: unexpected EOF"),
        ];
        for (payload, told) in cases {
            for path in [RANGE, WATCH, KEEP_ALIVE, AUTHENTICATE] {
                let outcome = send(&client, path, compressed_frame(payload)).await;
                assert_eq!(outcome.end.told(), (Code::Internal, told), "{path}");
            }
        }
        let client = keyward.client().await.header("grpc-encoding", "deflate");
        for path in [RANGE, WATCH, KEEP_ALIVE, AUTHENTICATE] {
            let told = "grpc: Decompressor is not installed for grpc-encoding \"deflate\"";
            let outcome = send(&client, path, encode(&range("k"))).await;
            assert_eq!(outcome.end.told(), (Code::Unimplemented, told), "{path}");
        }
        assert!(member.was_called_again().is_none(), "nothing was sent");
    });
}

#[test]
fn a_login_may_be_compressed() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await.header("grpc-encoding", "gzip");
        let login = AuthenticateRequest { name: "alice".into(), password: "right".into() };
        let outcome = send(&client, AUTHENTICATE, compressed_frame(&gzip(&login.encode_to_vec()))).await;
        let answer = AuthenticateResponse::decode(outcome.message().clone()).expect("an answer");
        let client = client.header("token", &answer.token);
        let script = async {
            let call = member.called(RANGE).await;
            assert_eq!(call.token(), Some("alice.1"));
            call.reply(&ranged(1)).await;
        };
        let call = send(&client, RANGE, compressed_frame(&gzip(&range("k"))));
        tokio::join!(call, script).0.message();
    });
}

/// On one stream some messages may be compressed and others not, each cut into any chunks.
#[test]
fn messages_of_streams_may_be_compressed() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await.header("grpc-encoding", "gzip");
        let mut stream = client.open(WATCH).await.expect("open");
        let framed = compressed_frame(&gzip(&watch("k", 5)));
        for byte in &framed {
            say_framed(&mut stream.send, Bytes::copy_from_slice(&[*byte]), false).await.expect("taken");
        }
        let mut call = member.called(WATCH).await;
        assert!(!call.headers.contains_key("grpc-encoding"));
        let create = create_of(&call.messages.next().await.expect("a request")).expect("a create");
        assert_eq!((&create.key[..], create.start_revision), (&b"k"[..], 5));
        call.say(&created(create.watch_id, 4)).await.expect("taken");
        let told = watched(&stream.next().await.expect("created"));
        assert!(told.created);
        stream.say(&watch("plain", 6)).await;
        let create = create_of(&call.messages.next().await.expect("a request")).expect("a create");
        assert_eq!(&create.key[..], b"plain");

        let mut stream = client.open(KEEP_ALIVE).await.expect("open");
        say_compressed(&mut stream, &renew(3)).await;
        let mut call = member.called(KEEP_ALIVE).await;
        assert!(!call.headers.contains_key("grpc-encoding"));
        assert_eq!(renewal_of(&call.messages.next().await.expect("a renewal")), 3);
        call.say(&renewed(3, 60)).await.expect("taken");
        assert_eq!(renewal(&stream.next().await.expect("an answer")), (3, 60));
        assert!(!stream.headers.contains_key("grpc-encoding"));
    });
}

/// Whoever sends a bomb holds up nobody for longer than a step takes.
#[test]
fn others_are_served_while_a_large_message_is_inflated() {
    paused(async {
        let (member, keyward) = one_member();
        let bomber = keyward.client().await.header("grpc-encoding", "gzip");
        let other = keyward.client().await;
        let request =
            PutRequest { key: "k".into(), value: vec![0; MAX - 20].into(), ..PutRequest::default() };
        let bomb = compressed_frame(&gzip(&request.encode_to_vec()));
        let mut large = Vec::new();
        for _ in 0..8 {
            let mut stream = bomber.open(PUT).await.expect("open");
            say_framed(&mut stream.send, bomb.clone(), true).await.expect("taken");
            large.push(stream);
        }
        let small = other.begin(RANGE, range("k")).await.expect("open");
        let mut before = 0;
        loop {
            let call = member.call().await;
            if call.path() == RANGE {
                call.reply(&ranged(1)).await;
                break;
            }
            before += 1;
            call.reply(&was_put(2)).await;
        }
        small.finish().await.message();
        assert_eq!(before, 0, "a small call waits for no large one");
    });
}
