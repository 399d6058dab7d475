//! Answers that nobody reads hold up their own client and nobody else, and are bounded in bytes and in time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::SnapshotResponse;
use keyward::refusal::{Code, Refusal};
use keyward::rpc::frame::encode;
use keyward::tasks::Tasks;
use keyward::telemetry::unread_metrics::GiveUpReason;
use prost::Message as _;
use tokio::time::sleep;

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused, settled};
use crate::words::{RANGE, TXN, range, ranged, ranged_value, ranged_value_of};

/// As large as etcd's default limit for a request allows, nearly.
pub(crate) const LARGE: usize = 1_400_000;
/// More than a member may send while nobody reads.
const HUGE: usize = 5_000_000;
const UNREAD: usize = 60;
/// The calls answered by a stream of large messages.
pub(crate) const STREAMS: [&str; 2] = ["/etcdserverpb.Maintenance/Snapshot", "/etcdserverpb.KV/RangeStream"];
/// The messages of such a stream.
pub(crate) const PARTS: usize = 160;
pub(crate) const MIB: i64 = 1 << 20;

/// Members that answer every get: of the keys `large` and `huge` with such a value, else with a small one.
pub(crate) struct Site {
    pub(crate) keyward: Keyward,
    pub(crate) asked: Rc<Cell<usize>>,
    writes: Rc<Cell<usize>>,
    pub(crate) canceled: Rc<Cell<usize>>,
    members: Vec<Rc<Member>>,
}

impl Site {
    pub(crate) fn of(members: u64, lines: &str) -> Self {
        Self::at(members, "", lines, "k")
    }

    /// The values have the key `key`.
    pub(crate) fn at(members: u64, listener: &str, lines: &str, key: &str) -> Self {
        let tasks = Tasks::default();
        let members: Vec<_> = (1..=members).map(|id| Rc::new(Member::new(id, &tasks))).collect();
        let all: Vec<&Member> = members.iter().map(|member| &**member).collect();
        let folder = tempfile::tempdir().expect("a folder");
        let keyward = Keyward::at(&all, AuthSetting::Off, folder.path(), listener, lines);
        let [asked, writes, canceled] = std::array::from_fn(|_| Rc::<Cell<usize>>::default());
        let large = [LARGE, HUGE].map(|size| encode(&ranged_value_of(key, size)));
        for member in &members {
            let (member, streams, large) = (Rc::clone(member), tasks.clone(), large.clone());
            let [asked, writes, canceled] = [&asked, &writes, &canceled].map(Rc::clone);
            let serve = async move {
                loop {
                    let call = member.call().await;
                    asked.set(asked.get() + 1);
                    writes.set(writes.get() + usize::from(call.path() == TXN));
                    let (large, canceled) = (large.clone(), Rc::clone(&canceled));
                    let answer = async move {
                        if answer(call, large).await.is_err() {
                            canceled.set(canceled.get() + 1);
                        }
                    };
                    streams.spawn("a scripted answer", answer).detach();
                }
            };
            tasks.spawn("a scripted member", serve).detach();
        }
        Self { keyward, asked, writes, canceled, members }
    }

    /// A client with HTTP/2's default windows, and this many gets of large values that it never reads.
    async fn unread(&self, count: usize) -> (Client, Vec<Stream>) {
        self.unread_of("large", count).await
    }

    pub(crate) async fn unread_of(&self, key: &str, count: usize) -> (Client, Vec<Stream>) {
        let builder = h2::client::Builder::new();
        let client = Client::with(self.keyward.connect(), &self.keyward.tasks, &builder).await;
        let mut streams = Vec::new();
        for _ in 0..count {
            streams.push(client.begin(RANGE, range(key)).await.expect("sent"));
        }
        (client, streams)
    }

    pub(crate) fn given_up(&self, why: GiveUpReason) -> u64 {
        self.keyward.metrics.unread.given_up(why).get()
    }

    /// The unread bytes that are counted.
    pub(crate) fn bytes(&self) -> i64 {
        self.keyward.metrics.unread.bytes.get()
    }
}

async fn answer(mut call: Call, [large, huge]: [Bytes; 2]) -> Result<(), crate::wire::End> {
    let message = call.message().await;
    if STREAMS.contains(&call.path()) {
        for at in 0..PARTS {
            call.say(&part(at)).await?;
        }
    } else if message.windows(5).any(|bytes| bytes == b"large") {
        call.say_framed(large).await?;
    } else if message.windows(4).any(|bytes| bytes == b"huge") {
        call.say_framed(huge).await?;
    } else {
        call.say(&ranged(5)).await?;
    }
    call.end(Code::Ok, "");
    Ok(())
}

/// A message of a stream, as large as those of a snapshot; all have one length.
pub(crate) fn part(at: usize) -> Vec<u8> {
    let blob = vec![u8::try_from(at).expect("few"); 32 * 1024].into();
    SnapshotResponse { remaining_bytes: 1, blob, ..SnapshotResponse::default() }.encode_to_vec()
}

/// Small and large gets of clients that read.
pub(crate) async fn others_get_everything(site: &Site) {
    let clients = join_all((0..4).map(|_| site.keyward.client())).await;
    for key in ["small", "large", "small", "large", "small"] {
        let calls = clients.iter().map(|client| client.call(RANGE, range(key)));
        for outcome in join_all(calls).await {
            assert_eq!(outcome.end.code(), Some(Code::Ok), "{:?}", outcome.end);
            assert_eq!(outcome.message().len() > LARGE, key == "large");
        }
    }
}

fn malicious(connections: usize, members: u64) {
    paused(async move {
        let site = Site::of(members, "[limits]\nunread_buffer = \"128MiB\"\n[runtime]\nshards = 1\n");
        let unread = join_all((0..connections).map(|_| site.unread(UNREAD))).await;
        settled().await;
        assert!(site.asked.get() >= UNREAD, "the gets were made");
        others_get_everything(&site).await;
        assert!(site.bytes() <= 128 * MIB, "{} bytes", site.bytes());
        assert_eq!(site.given_up(GiveUpReason::ForTime), 0, "nobody waited for that");
        drop(unread);
        settled().await;
        assert_eq!(site.bytes(), 0, "all room was given back");
        others_get_everything(&site).await;
        let dials: usize = site.members.iter().map(|member| member.dials()).sum();
        assert!(dials < 64, "{dials} connections to members");
    });
}

#[test]
fn one_connection_that_does_not_read_holds_up_nobody_else() {
    malicious(1, 1);
    malicious(1, 3);
}

#[test]
fn two_connections_that_do_not_read_hold_up_nobody_else() {
    malicious(2, 1);
    malicious(2, 3);
}

#[test]
fn sixty_four_connections_that_do_not_read_hold_up_nobody_else() {
    malicious(64, 1);
    malicious(64, 3);
}

/// More at once than there is room for: what does not fit is asked again, and nothing is lost.
#[test]
fn a_client_that_reads_gets_all_it_asked_for_however_much() {
    paused(async {
        let site = Site::of(1, "[limits]\nunread_buffer = \"16MiB\"\n[runtime]\nshards = 1\n");
        let client = site.keyward.client().await;
        let calls = (0..100).map(|_| client.call(RANGE, range("large")));
        for outcome in join_all(calls).await {
            assert_eq!(outcome.message().len() - LARGE, outcome.message().len() % LARGE);
        }
        assert!(site.keyward.metrics.unread.asked_again.get() > 0, "not all had room at once");
        assert_eq!(site.given_up(GiveUpReason::ForRoom) + site.given_up(GiveUpReason::ForTime), 0);
        settled().await;
        assert_eq!(site.bytes(), 0);
    });
}

/// A call that changed something is not made again: its answer waits for room.
#[test]
fn a_write_is_made_once_however_large_its_answer() {
    paused(async {
        let site = Site::of(1, "[limits]\nunread_buffer = \"16MiB\"\n[runtime]\nshards = 1\n");
        let (client, mut streams) = site.unread(0).await;
        for _ in 0..UNREAD {
            streams.push(client.begin(TXN, txn_with_put()).await.expect("sent"));
        }
        settled().await;
        others_get_everything(&site).await;
        assert_eq!(site.writes.get(), UNREAD, "each once");
        assert!(site.bytes() <= 17 * MIB, "{} bytes", site.bytes());
    });
}

fn txn_with_put() -> Vec<u8> {
    use keyward::pb::etcdserverpb::request_op::Request;
    use keyward::pb::etcdserverpb::{PutRequest, RequestOp, TxnRequest};
    let put = PutRequest { key: "large".into(), prev_kv: true, ..PutRequest::default() };
    let op = RequestOp { request: Some(Request::RequestPut(put)) };
    TxnRequest { success: vec![op], ..TxnRequest::default() }.encode_to_vec()
}

/// The fourth of a connection waits in vain for the first: there is room for three.
#[test]
fn an_answer_that_nobody_reads_is_given_up_for_another_and_its_client_is_told_when_it_reads_on() {
    paused(async {
        let lines = "[limits]\nunread_buffer = \"16MiB\"\nunread_timeout = \"20s\"\n[runtime]\nshards = 1\n";
        let site = Site::of(1, lines);
        let (client, mut streams) = site.unread_of("huge", 1).await;
        streams[0].answered().await;
        for at in 1..4 {
            sleep(Duration::from_secs(300)).await;
            assert_eq!((site.canceled.get(), site.given_up(GiveUpReason::ForTime)), (0, 0), "no need");
            streams.push(client.begin(RANGE, range("huge")).await.expect("sent"));
            streams[at].answered().await;
        }
        settled().await;
        assert_eq!(site.given_up(GiveUpReason::ForTime), 1, "no more than needed");
        let all = join_all(streams.into_iter().map(Stream::finish)).await;
        for (at, outcome) in all.into_iter().enumerate() {
            if at == 0 {
                let reason = Refusal::UNREAD_FOR_LONG;
                assert_eq!(outcome.end.told(), (Code::Unavailable, reason.message()));
                assert!(outcome.messages.is_empty(), "no message was whole");
            } else {
                assert!(outcome.message().len() > HUGE);
            }
        }
        settled().await;
        assert_eq!((site.given_up(GiveUpReason::ForTime), site.bytes()), (1, 0));
    });
}

/// Somebody who reads a little now and then is slow, and not gone.
#[test]
fn a_slow_reader_that_makes_progress_gets_everything() {
    paused(async {
        let lines = "[limits]\nunread_timeout = \"20s\"\n[runtime]\nshards = 1\n";
        let site = Site::of(1, lines);
        let (_client, mut streams) = site.unread(1).await;
        let mut stream = streams.remove(0);
        let mut read = 0;
        let mut body = stream.body().await;
        while read < LARGE {
            sleep(Duration::from_secs(15)).await;
            // As much as one frame has.
            let enough = read + 16 * 1024;
            while read < enough.min(LARGE) {
                let data = body.data().await.expect("more comes").expect("it goes on");
                body.flow_control().release_capacity(data.len()).expect("released");
                read += data.len();
            }
        }
        assert_eq!(site.given_up(GiveUpReason::ForTime), 0);
    });
}

/// A member that takes long in the middle of an answer is not its client's fault.
#[test]
fn an_answer_that_waits_for_its_member_is_not_given_up() {
    paused(async {
        let tasks = Tasks::default();
        let member = Member::new(1, &tasks);
        let lines = "[limits]\nunread_timeout = \"20s\"\n[runtime]\nshards = 1\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        let client = keyward.client().await;
        let framed = encode(&ranged_value(LARGE));
        let script = async {
            let mut call = member.called(RANGE).await;
            call.say_framed(framed.slice(..LARGE / 2)).await.expect("taken");
            sleep(Duration::from_secs(100)).await;
            call.say_framed(framed.slice(LARGE / 2..)).await.expect("taken");
            call.end(Code::Ok, "");
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        assert!(outcome.message().len() > LARGE);
        assert_eq!(keyward.metrics.unread.given_up(GiveUpReason::ForTime).get(), 0);
    });
}
