//! What a client may use: header, request, streams, and the time to introduce itself.

use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::AuthenticateRequest;
use keyward::refusal::{Code, Refusal};
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use crate::member::Member;
use crate::rig::{Keyward, one_member, paused, settled, watching};
use crate::wire::End;
use crate::words::{PUT, RANGE, WATCH, put, range, ranged, watch};

const MAX: usize = 2 * 1024 * 1024;
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";

#[test]
fn a_message_of_one_byte_too_much_is_refused_in_etcds_words() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let told = |got: usize| format!("grpc: received message larger than max ({got} vs. {MAX})");
        for got in [MAX + 1, 5 * MAX] {
            let outcome = client.call(PUT, &vec![0; got]).await;
            assert_eq!(outcome.end.told(), (Code::ResourceExhausted, &*told(got)));
        }
        // By its prefix alone, whatever follows.
        let mut stream = client.open(PUT).await.expect("open");
        let prefix = bytes::Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff]);
        crate::wire::say_framed(&mut stream.send, prefix, false).await.expect("taken");
        assert_eq!(stream.finish().await.end.told(), (Code::ResourceExhausted, &*told(u32::MAX as usize)));
        // A watch's requests as well.
        let mut stream = client.open(WATCH).await.expect("open");
        let prefix = bytes::Bytes::from_static(&[0, 0, 0x30, 0, 0]);
        crate::wire::say_framed(&mut stream.send, prefix, false).await.expect("taken");
        assert_eq!(stream.finish().await.end.told(), (Code::ResourceExhausted, &*told(0x30_0000)));
        settled().await;
        assert!(member.was_called_again().is_none(), "nothing was sent");
        assert!(!client.is_closed());
    });
}

#[test]
fn a_message_of_just_the_limit_passes() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let largest = put(MAX - 7);
        assert_eq!(largest.len(), MAX - 7 + 3 + 4);
        let script = async {
            let mut call = member.called(PUT).await;
            assert_eq!(call.message().await.len(), largest.len());
            call.reply(b"").await;
        };
        let (outcome, ()) = tokio::join!(client.call(PUT, &largest[..MAX.min(largest.len())]), script);
        outcome.message();
    });
}

/// Requests that are held are within one budget, from their first byte (rules 8).
#[test]
fn requests_that_never_come_whole_cannot_use_up_memory() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(
            &[&member],
            AuthSetting::Off,
            "[limits]\nreplay_buffer = \"8MiB\"\n[runtime]\nshards = 1\n",
        );
        let mut held = Vec::new();
        let mut refused = 0;
        let clients = [keyward.client().await, keyward.client().await, keyward.client().await];
        for client in clients.iter().flat_map(|client| [client; 8]) {
            if held.len() == 8 {
                // One connection has what one may have: there is room for others.
                let script = async { member.called(PUT).await.reply(b"").await };
                tokio::join!(clients[1].call(PUT, put(1_500_000)), script).0.message();
            }
            let mut stream = client.open(PUT).await.expect("open");
            let framed = keyward::rpc::frame::encode(&put(1_000_000)).slice(..900_000);
            // Refused while it is being sent, or at once after.
            drop(crate::wire::say_framed(&mut stream.send, framed, false).await);
            settled().await;
            held.push(stream);
        }
        let mut open = Vec::new();
        for mut stream in held {
            let ended = tokio::time::timeout(Duration::from_millis(1), stream.next()).await;
            match ended {
                Ok(end) => {
                    let told = (Code::ResourceExhausted, "etcdserver: too many requests");
                    assert_eq!(end.expect_err("no message").told(), told);
                    refused += 1;
                }
                Err(_) => open.push(stream),
            }
        }
        // Two of each connection: this budget has no room for more of the largest requests.
        assert!((17..=19).contains(&refused), "{refused} of 24 were refused");
        let [client, ..] = clients;
        drop(open);
        settled().await;
        let script = async { member.called(PUT).await.reply(b"").await };
        let (outcome, ()) = tokio::join!(client.call(PUT, put(1_000_000)), script);
        outcome.message();
    });
}

#[test]
fn a_header_list_over_the_limit_ends_only_its_stream() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let within = keyward.client().await.header("user-agent", &"x".repeat(60 * 1024));
        let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
        tokio::join!(within.call(RANGE, range("k")), script).0.message();
        let large = keyward.client().await.header("user-agent", &"x".repeat(65 * 1024));
        let outcome = large.call(RANGE, range("k")).await;
        assert!(outcome.end.code() != Some(Code::Ok), "{:?}", outcome.end);
        assert!(member.was_called_again().is_none());
        let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        outcome.message();
    });
}

/// And not held back in silence, as a client does with streams beyond the announced limit.
#[test]
fn a_stream_over_the_limit_is_refused_at_once_and_calls_have_room_beside_streams() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[limits]\nstreams_per_connection = 104\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        let client = keyward.client().await;
        // The announced limit is told with the first answer.
        let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
        tokio::join!(client.call(RANGE, range("k")), script).0.message();
        let mut watches = Vec::new();
        for _ in 0..91 {
            watches.push(watching(&client, &member).await);
        }
        let refused = client.call(WATCH, watch("k", 1)).await;
        assert_eq!(refused.end.told(), (Code::ResourceExhausted, Refusal::TOO_MANY_REQUESTS.message()));
        let mut calls = Vec::new();
        for _ in 0..13 {
            calls.push((client.begin(RANGE, range("k")).await.expect("sent"), member.called(RANGE).await));
        }
        for _ in 0..200 {
            let refused = client.call(RANGE, range("k")).await;
            assert_eq!(refused.end.told(), (Code::ResourceExhausted, Refusal::TOO_MANY_REQUESTS.message()));
        }
        for (stream, call) in calls {
            call.reply(&ranged(1)).await;
            stream.finish().await.message();
        }
        let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
        tokio::join!(client.call(RANGE, range("k")), script).0.message();
    });
}

/// Nothing, garbage that is too short, half a preface: gone after the limit. A client that did introduce itself stays.
#[test]
fn a_peer_that_does_not_introduce_itself_is_gone_in_time() {
    paused(async {
        let (_member, keyward) = one_member();
        for said in [&b""[..], b"P", b"PRI * HTTP/2"] {
            let began = Instant::now();
            let mut peer = keyward.connect();
            peer.write_all(said).await.expect("taken");
            let mut rest = Vec::new();
            peer.read_to_end(&mut rest).await.expect("closed");
            assert_eq!(began.elapsed(), Duration::from_secs(10), "{said:?}");
        }
        let failed = keyward.metrics.handshakes_failed.get();
        assert_eq!(failed, 3);
        let idle = keyward.client().await;
        tokio::time::advance(Duration::from_secs(600)).await;
        settled().await;
        assert!(!idle.is_closed());
    });
}

#[test]
fn garbage_ends_its_own_connection_only() {
    paused(async {
        let (member, keyward) = one_member();
        let mut peer = keyward.connect();
        peer.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("taken");
        let mut rest = Vec::new();
        peer.read_to_end(&mut rest).await.expect("closed");
        let client = keyward.client().await;
        let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
        tokio::join!(client.call(RANGE, range("k")), script).0.message();
    });
}

/// Rules 1 to 3: refused with gRPC's words, and nothing reaches a member.
#[test]
fn what_could_be_read_in_two_ways_is_not_sent() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        for path in ["/etcdserverpb.KV/R%61nge", "/etcdserverpb.KV/Range?x=1", "/etcdserverpb.KV/Range/"] {
            let outcome = client.call(path, range("k")).await;
            assert_eq!(outcome.end.code(), Some(Code::Unimplemented), "{path}");
        }
        let two =
            [keyward::rpc::frame::encode(&range("a")), keyward::rpc::frame::encode(&range("b"))].concat();
        let compressed = b"\x01\0\0\0\x03\x0a\x01k".to_vec();
        let past_32_bits = b"\0\0\0\0\x08\x92\x80\x80\x80\x80\x01\x01k".to_vec();
        for (framed, code) in [
            (two, Code::InvalidArgument),
            (compressed, Code::Internal),
            (past_32_bits, Code::InvalidArgument),
        ] {
            let mut stream = client.open(RANGE).await.expect("open");
            match crate::wire::say_framed(&mut stream.send, framed.into(), true).await {
                Ok(()) | Err(End::Reset(h2::Reason::NO_ERROR)) => {}
                Err(end) => panic!("{end:?}"),
            }
            assert_eq!(stream.finish().await.end.code(), Some(code));
        }
        assert!(member.was_called_again().is_none(), "nothing was sent");
    });
}

/// Whoever asks need not be anybody: such a pair would be kept, logged and sent to a member, a thousand at a time.
#[test]
fn a_name_or_password_that_fits_into_no_session_is_not_even_asked_about() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        for (name, password) in [(4097, 1), (1, 4097), (40_000, 1)] {
            let login = AuthenticateRequest { name: "n".repeat(name), password: "p".repeat(password) };
            let outcome = client.call(AUTHENTICATE, login.encode_to_vec()).await;
            let told =
                (Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password");
            assert_eq!(outcome.end.told(), told);
        }
        let login = AuthenticateRequest { name: "n".repeat(1_000_000), password: "p".into() };
        let outcome = client.call(AUTHENTICATE, login.encode_to_vec()).await;
        let told = "grpc: received message larger than max (1000007 vs. 65536)";
        assert_eq!(outcome.end.told(), (Code::ResourceExhausted, told));
        assert_eq!(member.logins(), 0);
    });
}

/// What anybody may send, named or not, is of their own connection's and little: it takes nothing from those who are known.
#[test]
fn who_has_not_said_who_it_is_cannot_keep_others_from_being_heard() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[limits]\nreplay_buffer = \"2MiB\"\n[runtime]\nshards = 1\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        let (mut clients, mut kept) = (Vec::new(), Vec::new());
        for path in [AUTHENTICATE, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"] {
            let client = keyward.client().await;
            for _ in 0..80 {
                let mut stream = client.open(path).await.expect("open");
                let half = keyward::rpc::frame::encode(&vec![0; 60_000]).slice(..30_000);
                drop(crate::wire::say_framed(&mut stream.send, half, false).await);
                kept.push(stream);
            }
            settled().await;
            clients.push(client);
        }
        let mut refused = 0;
        for stream in &mut kept {
            if let Ok(end) = tokio::time::timeout(Duration::from_millis(1), stream.next()).await {
                let told = (Code::ResourceExhausted, "etcdserver: too many requests");
                assert_eq!(end.expect_err("no message").told(), told);
                refused += 1;
            }
        }
        assert!(
            (220..=236).contains(&refused),
            "{refused} of 240: they have a quarter as much as all others"
        );
        // All that there is for the others.
        let script = async { member.called(PUT).await.reply(b"").await };
        let client = keyward.client().await;
        tokio::join!(client.call(PUT, put(MAX - 100)), script).0.message();
    });
}

/// The budget for requests is everybody's: who never ends one must not keep a part of it for ever.
#[test]
fn a_request_that_does_not_end_is_given_up() {
    paused(async {
        let (_member, keyward) = one_member();
        let client = keyward.client().await;
        for path in [PUT, AUTHENTICATE] {
            let began = Instant::now();
            let mut stream = client.open(path).await.expect("open");
            let half = keyward::rpc::frame::encode(&put(1000)).slice(..500);
            crate::wire::say_framed(&mut stream.send, half, false).await.expect("taken");
            let told = (Code::Unavailable, "there is no connection available");
            assert_eq!(stream.finish().await.end.told(), told);
            assert_eq!(began.elapsed(), Duration::from_secs(30));
        }
    });
}
