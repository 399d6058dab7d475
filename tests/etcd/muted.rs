//! Must show 6: etcd 3.5.1 answers a refused create with the id of an innocent watch of the same stream, 0, and mutes that for ever. A
//! client behind Keyward never notices. 3.4.23 answers with an id of its own, and newer versions mute nobody.

use std::time::Duration;

use futures_util::stream;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCreateRequest, WatchRequest, WatchResponse};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Streaming;

use crate::caller::Caller;
use crate::harness::binary::Version;
use crate::harness::client::lifetime;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, every_version, side_by_side};
use crate::steady::TTL;

const SOON: Duration = Duration::from_secs(30);
/// How long a member that has delivered to one watch may take to deliver the same event to another.
const QUIET: Duration = Duration::from_secs(1);
const WRITES: usize = 3;

/// Why a create is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    OutsideTheRole,
    TokenExpired,
}

/// What a stream showed.
#[derive(Debug)]
struct Shown {
    /// The answer to the create in question: id, created, canceled, reason.
    answer: (i64, bool, bool, String),
    /// Events of the first watch and of the second, on the same key, after it.
    events: [usize; 2],
}

struct Watches {
    asks: mpsc::Sender<WatchRequest>,
    answers: Streaming<WatchResponse>,
}

impl Watches {
    async fn of(caller: &Caller) -> Watches {
        let (asks, asked) = mpsc::channel(1);
        let asked = stream::unfold(asked, |mut asked| async { asked.recv().await.map(|one| (one, asked)) });
        // A member answers the stream with its first message.
        asks.send(create("/a/x")).await.expect("room");
        let answers = WatchClient::new(caller.channel.clone()).watch(caller.request(asked)).await;
        Watches { asks, answers: answers.expect("a stream").into_inner() }
    }

    async fn next(&mut self) -> WatchResponse {
        let next = timeout(SOON, self.answers.message()).await.expect("something comes");
        next.expect("no error").expect("not the end")
    }

    async fn ask(&mut self, key: &str) -> WatchResponse {
        self.asks.send(create(key)).await.expect("the stream is open");
        self.next().await
    }
}

fn create(key: &str) -> WatchRequest {
    let create = WatchCreateRequest { key: key.to_owned().into(), ..WatchCreateRequest::default() };
    WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }
}

async fn show(cluster: &Cluster, caller: Caller, why: Refused, wait_for_both: bool) -> Shown {
    let mut watches = Watches::of(&caller).await;
    let first = watches.next().await;
    let second = watches.ask("/a/x").await;
    assert!([&first, &second].iter().all(|answer| answer.created && !answer.canceled));
    let key = match why {
        Refused::OutsideTheRole => "/b/x",
        Refused::TokenExpired => {
            lifetime(Duration::from_secs(3 * u64::from(TTL))).await;
            "/a/y"
        }
    };
    let refused = watches.ask(key).await;
    let answer = (refused.watch_id, refused.created, refused.canceled, refused.cancel_reason);
    let root = Caller::log_in(cluster.address(0), "root").await;
    for _ in 0..WRITES {
        root.put("/a/x", b"v".to_vec(), 0).await.expect("written");
    }
    let mut events = [0; 2];
    let ids = [first.watch_id, second.watch_id];
    let count = |events: &mut [usize; 2], answer: &WatchResponse| {
        for (id, events) in ids.iter().zip(events) {
            *events += if answer.watch_id == *id { answer.events.len() } else { 0 };
        }
    };
    while events[1] < WRITES || (wait_for_both && events[0] < WRITES) {
        let answer = watches.next().await;
        assert!(!answer.canceled, "{answer:?}");
        count(&mut events, &answer);
    }
    while let Ok(Ok(Some(answer))) = timeout(QUIET, watches.answers.message()).await {
        count(&mut events, &answer);
    }
    Shown { answer, events }
}

#[tokio::test]
async fn a_refused_create_never_mutes_another_watch() {
    side_by_side(&every_version(), mutes_no_other).await;
}

async fn mutes_no_other(version: &Version) {
    let options = Options { auth: Auth::On { extra_users: 0 }, token_ttl: Some(TTL), ..Options::default() };
    let cluster = Cluster::start(version, options).await;
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &config).await;
    for why in [Refused::OutsideTheRole, Refused::TokenExpired] {
        let alice = async |address| Caller::log_in(address, "alice").await;
        let direct = show(&cluster, alice(cluster.address(0)).await, why, false).await;
        let through = show(&cluster, alice(keyward.site().listen).await, why, true).await;
        println!("{version}, {why:?}, directly: {direct:?}");
        println!("{version}, {why:?}, through Keyward: {through:?}");
        assert_eq!(through.events, [WRITES; 2], "{version} {why:?}: each event once");
        let denied = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";
        match why {
            Refused::OutsideTheRole => assert_eq!(through.answer, (-1, true, true, denied.into())),
            // Nothing is refused: the token is renewed.
            Refused::TokenExpired => assert_eq!(through.answer, (2, true, false, String::new())),
        }
        if *version == Version::parse("3.5.1") {
            assert_eq!(direct.answer, (0, true, true, denied.into()));
            assert_eq!(direct.events, [0, WRITES], "directly the first watch is mute");
        }
    }
}
