//! A watch from an old revision, at a member and through Keyward: the same events in the same order. What differs is permitted and
//! has its reason in docs/differences.md, "Watches": how a large catch-up is cut for a client that did not ask for fragments, and which revision
//! the header of a catch-up names.

use std::net::SocketAddr;
use std::time::Duration;

use keyward::pb::etcdserverpb::{WatchCreateRequest, WatchResponse};
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::timeout;

use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Cluster, Options, versions};
use crate::rewatch::local;
use crate::streams::{Connection, watch_of};

const LIMIT: Duration = Duration::from_secs(60);
/// etcd serves at most 1,000 revisions in one response of a catch-up.
const SMALL_REVISIONS: usize = 3000;
/// Sent together before their answers are awaited.
const PIPELINED: usize = 100;
/// 8 MiB in all.
const LARGE_REVISIONS: usize = 40;
const LARGE_VALUE: usize = 200 << 10;
/// A transaction whose events lie in one revision, above what is left in a fragment.
const TXN_EVENTS: usize = 100;
const TXN_VALUE: usize = 10 << 10;
/// etcd cuts fragments below its request limit (1.5 MiB) and 512 KiB of overhead.
const FRAGMENT: usize = 2 << 20;

/// What a watch was told until it had caught up.
struct CatchUp {
    responses: Vec<WatchResponse>,
    largest: usize,
}

/// One event, as far as both ways must agree on it.
type Seen = (i64, Vec<u8>, Vec<u8>);

impl CatchUp {
    async fn read(tasks: &Tasks, address: SocketAddr, create: WatchCreateRequest, until: i64) -> CatchUp {
        let connection = Connection::open(tasks, address).await;
        let mut stream = connection.watch().await;
        stream.asks.create(create);
        let created = stream.says.next().await.expect("the stream lives");
        assert!(created.created && !created.canceled && created.events.is_empty(), "{created:?}");
        let mut caught_up = CatchUp { responses: Vec::new(), largest: 0 };
        loop {
            let message = stream.says.message().await.expect("the stream lives");
            caught_up.largest = caught_up.largest.max(message.len());
            let response = WatchResponse::decode(message).expect("a WatchResponse");
            let is_last = !response.fragment && last_revision(&response) == until;
            caught_up.responses.push(response);
            if is_last {
                return caught_up;
            }
        }
    }

    fn events(&self) -> Vec<Seen> {
        let events = self.responses.iter().flat_map(|response| &response.events);
        let kvs = events.map(|event| event.kv.as_ref().expect("a key"));
        kvs.map(|kv| (kv.mod_revision, kv.key.to_vec(), kv.value.to_vec())).collect()
    }

    fn headers(&self) -> Vec<i64> {
        self.responses.iter().map(|response| response.header.as_ref().expect("a header").revision).collect()
    }

    fn last_revisions(&self) -> Vec<i64> {
        self.responses.iter().map(last_revision).collect()
    }

    fn fragments(&self) -> usize {
        self.responses.iter().filter(|response| response.fragment).count()
    }

    /// Whether no revision has events in two responses.
    fn has_whole_revisions(&self) -> bool {
        self.responses.windows(2).all(|pair| last_revision(&pair[0]) < first_revision(&pair[1]))
    }
}

fn first_revision(response: &WatchResponse) -> i64 {
    response.events.first().and_then(|event| event.kv.as_ref()).map_or(0, |kv| kv.mod_revision)
}

fn last_revision(response: &WatchResponse) -> i64 {
    response.events.last().and_then(|event| event.kv.as_ref()).map_or(0, |kv| kv.mod_revision)
}

/// Small puts, one revision each. The last revision.
async fn write_small(connection: &Connection) -> i64 {
    for batch in 0..SMALL_REVISIONS / PIPELINED {
        let mut answers = Vec::new();
        for number in 0..PIPELINED {
            answers.push(connection.send_put(&format!("small/{batch}/{number}")).await);
        }
        for mut answer in answers {
            answer.message().await.expect("the put is answered");
        }
    }
    connection.head().await
}

/// Large puts, one revision each, and a transaction in their middle. The last revision.
async fn write_large(connection: &Connection) -> i64 {
    let pairs = |name: String, count: usize, size: usize| {
        (0..count).map(move |number| (format!("large/{name}/{number}"), vec![b'v'; size]))
    };
    for number in 0..LARGE_REVISIONS {
        let large = pairs(number.to_string(), 1, LARGE_VALUE);
        connection.put(large).await.expect("the put is answered");
        if number == LARGE_REVISIONS / 2 {
            let txn = pairs("txn".to_owned(), TXN_EVENTS, TXN_VALUE);
            connection.put(txn).await.expect("the transaction is answered");
        }
    }
    connection.head().await
}

struct Scene<'a> {
    version: &'a Version,
    tasks: &'a Tasks,
    direct: SocketAddr,
    through: SocketAddr,
}

impl Scene<'_> {
    /// The same watch both ways, held to each other in all that may not differ.
    async fn both(&self, prefix: &str, start: i64, until: i64, fragment: bool) -> [CatchUp; 2] {
        let create = || WatchCreateRequest { fragment, ..watch_of(prefix, true, start) };
        let direct = CatchUp::read(self.tasks, self.direct, create(), until);
        let direct = timeout(LIMIT, direct).await.expect("the member tells all");
        let through = CatchUp::read(self.tasks, self.through, create(), until);
        let through = timeout(LIMIT, through).await.expect("Keyward tells all");
        for (way, caught_up) in [("directly", &direct), ("through Keyward", &through)] {
            println!(
                "{}: {prefix} fragment={fragment} {way}: {} responses ({} with fragment=true), largest {} bytes, headers {:?}, last events {:?}",
                self.version,
                caught_up.responses.len(),
                caught_up.fragments(),
                caught_up.largest,
                shortened(&caught_up.headers()),
                shortened(&caught_up.last_revisions()),
            );
        }
        assert!(direct.events() == through.events(), "{}: {prefix}: other events", self.version);
        assert_eq!(through.headers(), through.last_revisions(), "nobody may resume behind what was told");
        for (header, last) in direct.headers().iter().zip(direct.last_revisions()) {
            assert!(*header >= last, "{}: {header} {last}", self.version);
        }
        if !fragment {
            for caught_up in [&direct, &through] {
                assert!(caught_up.fragments() == 0 && caught_up.has_whole_revisions(), "{}", self.version);
            }
        }
        [direct, through]
    }
}

fn shortened(revisions: &[i64]) -> &[i64] {
    &revisions[..revisions.len().min(6)]
}

async fn catches_up(version: &Version) {
    let tasks = Tasks::default();
    let cluster = Cluster::start(version, Options::default()).await;
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &config).await;
    let (direct, through) = (cluster.address(0), keyward.site().listen);
    let scene = Scene { version, tasks: &tasks, direct, through };
    let writer = Connection::open(&tasks, direct).await;

    let start = writer.head().await + 1;
    let until = write_small(&writer).await;
    for fragment in [false, true] {
        let [direct, through] = scene.both("small/", start, until, fragment).await;
        assert_eq!(through.events().len(), SMALL_REVISIONS);
        assert_eq!((through.responses.len(), through.fragments()), (direct.responses.len(), 0), "{version}");
        // The permitted difference: a client that resumed behind etcd's first header would lose 2,000 events.
        assert_eq!(direct.headers()[0], until, "{version}");
        assert!(through.headers()[0] < until, "{version}");
    }

    let start = until + 1;
    let until = write_large(&writer).await;
    let [direct, through] = scene.both("large/", start, until, false).await;
    assert_eq!(through.events().len(), LARGE_REVISIONS + TXN_EVENTS);
    assert!(direct.responses.len() == 1 && direct.largest > 4 * FRAGMENT, "{version}");
    // The permitted difference: etcd tells it in one message, which may be above what a client takes.
    assert!(through.responses.len() >= 4, "{version}");
    assert!(through.largest < FRAGMENT + TXN_EVENTS * (TXN_VALUE + 100), "{version}: {}", through.largest);
    let [direct, through] = scene.both("large/", start, until, true).await;
    assert!(direct.largest < FRAGMENT && through.largest < FRAGMENT, "{version}");
    assert!(direct.fragments() >= 4, "{version}");
}

#[test]
fn a_catch_up_is_the_same_events_whole_revisions_and_headers_to_resume_from() {
    local(async {
        for version in versions() {
            catches_up(&version).await;
        }
    });
}
