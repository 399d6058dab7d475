//! What requests hold in memory, header lists, messages that do not come whole and streams, is within one budget, whoever makes them; what is
//! refused is told in etcd's words, others have room all the time, and all of it is given back.

use std::rc::Rc;

use keyward::members::membership::AuthSetting;
use keyward::pb::health::HealthCheckRequest;
use keyward::refusal::Code;
use keyward::rpc::frame::encode;
use keyward::tasks::Tasks;
use prost::Message as _;

use crate::client::{Client, Stream};
use crate::member::Member;
use crate::rig::{Keyward, log_in, paused, settled};
use crate::wire::say_framed;
use crate::words::{KEEP_ALIVE, PUT, RANGE, WATCH, put, range, ranged};

const TOO_MANY: (Code, &str) = (Code::ResourceExhausted, "etcdserver: too many requests");
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";
const MIB: usize = 1024 * 1024;
/// The budget of the one shard.
const BUDGET: usize = 16 * MIB;

fn site(auth: AuthSetting) -> (Rc<Member>, Keyward) {
    let member = Rc::new(Member::new(1, &Tasks::default()));
    let lines = "[limits]\nreplay_buffer = \"16MiB\"\n[runtime]\nshards = 1\n\
                 [policy]\nrequire_identity = \"as-etcd\"\n";
    let keyward = Keyward::configured(&[&member], auth, lines);
    (member, keyward)
}

fn held(keyward: &Keyward) -> usize {
    usize::try_from(keyward.metrics.request_memory.bytes.get()).expect("not below nothing")
}

/// Those that are still open, and how many were refused.
async fn refused(streams: Vec<Stream>) -> (Vec<Stream>, usize) {
    let (mut open, mut refused) = (Vec::new(), 0);
    settled().await;
    for mut stream in streams {
        match tokio::time::timeout(std::time::Duration::from_millis(1), stream.next()).await {
            Ok(ended) => {
                assert_eq!(ended.expect_err("no message").told(), TOO_MANY);
                refused += 1;
            }
            Err(_) => open.push(stream),
        }
    }
    (open, refused)
}

async fn open(client: &Client, path: &str, count: usize) -> Vec<Stream> {
    let mut streams = Vec::new();
    for _ in 0..count {
        streams.push(client.open(path).await.expect("open"));
    }
    streams
}

async fn is_served(member: &Member, client: &Client) {
    let script = std::pin::pin!(async { member.called(RANGE).await.reply(&ranged(1)).await });
    let call = std::pin::pin!(client.call(RANGE, range("k")));
    match futures_util::future::select(call, script).await {
        futures_util::future::Either::Left((outcome, _)) => panic!("refused: {:?}", outcome.end),
        futures_util::future::Either::Right(((), call)) => _ = call.await.message(),
    }
}

/// By a client that is let in: the budget is everybody's, and no connection has all of it.
#[test]
fn header_lists_whose_body_never_comes_are_within_the_budget_and_given_back() {
    paused(async {
        let (member, keyward) = site(AuthSetting::Off);
        let others = keyward.client().await;
        let filler = "f".repeat(60_000);
        let (mut all, mut refusals) = (Vec::new(), Vec::new());
        for _ in 0..6 {
            let client = keyward.client().await.header("x-filler", &filler);
            let (open, refused) = refused(open(&client, PUT, 200).await).await;
            refusals.push(refused);
            all.push((client, open));
            is_served(&member, &others).await;
        }
        let kept: Vec<usize> = all.iter().map(|(_, open)| open.len()).collect();
        assert!(kept.is_sorted_by(|one, next| one > next), "each has a quarter of what is left: {kept:?}");
        assert!((60..=72).contains(&kept[0]), "{kept:?} of 200 with 62 KB each");
        assert!(refusals.iter().all(|refused| *refused > 0));
        let counted: usize = kept.iter().sum::<usize>() * 60_000;
        assert!((counted..=BUDGET).contains(&held(&keyward)), "{} bytes", held(&keyward));
        let told = keyward.metrics.request_memory.refused("all").get();
        assert_eq!(told, refusals.iter().sum::<usize>() as u64);
        drop(all);
        settled().await;
        assert_eq!(held(&keyward), 0);
    });
}

/// By those who have not said who they are: they have a quarter of what others have, and whoever has a token needs nothing of it.
#[test]
fn strangers_fill_no_more_than_their_part_and_others_log_in_and_call() {
    paused(async {
        let (member, keyward) = site(AuthSetting::On);
        let filler = "f".repeat(60_000);
        let known = keyward.logged_in("alice").await;
        let mut all = Vec::new();
        // Without a token a Put is somebody's whom etcd is to refuse once it has come whole.
        for path in [AUTHENTICATE, PUT].repeat(10) {
            let client = keyward.client().await.header("x-filler", &filler);
            let (open, _) = refused(open(&client, path, 100).await).await;
            all.push((client, open));
        }
        assert!((BUDGET / 5..=BUDGET * 3 / 10).contains(&held(&keyward)), "{} bytes", held(&keyward));
        assert!(keyward.metrics.request_memory.refused("anybody").get() > 1_000);
        let bob = keyward.client().await;
        let token = log_in(&bob, "bob").await;
        is_served(&member, &bob.header("token", &token)).await;
        is_served(&member, &known.header("x-filler", &filler)).await;
        drop(all);
        settled().await;
        assert_eq!(held(&keyward), 0);
    });
}

#[test]
fn a_connection_has_as_many_health_watches_as_it_may() {
    paused(async {
        let (member, keyward) = site(AuthSetting::On);
        let client = keyward.client().await;
        let mut watches = Vec::new();
        let message = HealthCheckRequest::default().encode_to_vec();
        for _ in 0..16 {
            let mut watch = client.begin(HEALTH_WATCH, &message).await.expect("open");
            watch.next().await.expect("a status");
            watches.push(watch);
        }
        assert!(held(&keyward) >= 16 * 10 * 1024, "{} bytes", held(&keyward));
        for _ in 0..1_000 {
            assert_eq!(client.call(HEALTH_WATCH, &message).await.end.told(), TOO_MANY);
        }
        // Others' are none of its business, and one that ends makes room.
        let other = keyward.client().await;
        let mut watch = other.begin(HEALTH_WATCH, &message).await.expect("open");
        watch.next().await.expect("a status");
        watches.pop().expect("sixteen").cancel();
        settled().await;
        let mut again = client.begin(HEALTH_WATCH, &message).await.expect("open");
        again.next().await.expect("a status");
        drop((watches, watch, again, client, other));
        settled().await;
        assert_eq!(held(&keyward), 0);
        drop(member);
    });
}

/// Messages of streams that are opened for them: half a create, or half a renewal, holds what has come of it.
#[test]
fn messages_of_streams_that_do_not_come_whole_are_within_the_budget() {
    paused(async {
        let (member, keyward) = site(AuthSetting::Off);
        let client = keyward.client().await;
        let half = |length: usize| encode(&put(2 * length)).slice(..length);
        for (path, length, count) in [(WATCH, 900_000, 20), (KEEP_ALIVE, 30_000, 400)] {
            let mut streams = Vec::new();
            for mut stream in open(&client, path, count).await {
                // Refused while it is being sent, or at once after.
                drop(say_framed(&mut stream.send, half(length), false).await);
                settled().await;
                streams.push(stream);
            }
            let (open, refused) = refused(streams).await;
            assert!(refused > 0 && refused < count, "{refused} of {count}");
            assert!((BUDGET / 5..=BUDGET * 3 / 10).contains(&held(&keyward)), "{} bytes", held(&keyward));
            let other = keyward.client().await;
            is_served(&member, &other).await;
            drop(open);
            settled().await;
            assert_eq!(held(&keyward), 0);
        }
    });
}

/// A stream that lives keeps what a member may see of its header, and no more.
#[test]
fn an_open_watch_keeps_little_of_its_header() {
    paused(async {
        let (member, keyward) = site(AuthSetting::Off);
        let client = keyward.client().await.header("x-filler", &"f".repeat(60_000));
        let mut watches = Vec::new();
        for _ in 0..100 {
            watches.push(crate::rig::watching(&client, &member).await);
        }
        settled().await;
        assert!((100 * 2048..100 * 3072).contains(&held(&keyward)), "{} bytes", held(&keyward));
        drop(watches);
        settled().await;
        assert_eq!(held(&keyward), 0);
    });
}

/// Through the authority shim a few bytes name a large field: each stream that does counts with all of it.
#[test]
fn a_few_bytes_of_an_odd_connection_hold_no_more_than_the_budget() {
    paused(async {
        let (member, keyward) = site(AuthSetting::Off);
        let mut raw = keyward.connect();
        let send = async |raw: &mut tokio::io::DuplexStream, kind: u8, stream: u32, payload: &[u8]| {
            let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
            let head = [&length[1..], &[kind, 4], &stream.to_be_bytes()].concat();
            tokio::io::AsyncWriteExt::write_all(raw, &[&head, payload].concat()).await.expect("room");
        };
        tokio::io::AsyncWriteExt::write_all(&mut raw, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await
            .expect("room");
        tokio::io::AsyncWriteExt::write_all(&mut raw, &[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.expect("room");
        let string = |text: &str| [&[u8::try_from(text.len()).expect("short")], text.as_bytes()].concat();
        // POST, http; then, into the table: the path, an authority that is none, content-type, and a filler of 3,500 bytes.
        let filler = [&[0x40][..], &string("x-filler"), &[0x7f, 0xad, 0x1a], &[b'f'; 3_500]].concat();
        let first = [
            &[0x83, 0x86][..],
            &[&[0x44], &string(RANGE)[..]].concat(),
            &[&[0x41], &string("#initially=[127.0.0.1:2379]")[..]].concat(),
            &[&[0x5f], &string("application/grpc")[..]].concat(),
            &filler,
        ]
        .concat();
        send(&mut raw, 1, 1, &first).await;
        // 61 to 65 in the table: the filler is the newest. Four times the filler in eight bytes.
        let again = [0x83, 0x86, 0xc1, 0xc0, 0xbf, 0xbe, 0xbe, 0xbe, 0xbe];
        for nth in 1..3_000 {
            send(&mut raw, 1, 2 * nth + 1, &again).await;
        }
        settled().await;
        assert!((BUDGET / 5..=BUDGET * 3 / 10).contains(&held(&keyward)), "{} bytes", held(&keyward));
        assert!(keyward.metrics.request_memory.refused("all").get() > 2_000);
        assert_eq!(keyward.metrics.odd_authority.connections.get(), 1);
        is_served(&member, &keyward.client().await).await;
        drop(raw);
        settled().await;
        assert_eq!(held(&keyward), 0);
    });
}
