//! A client creates a watch "from now" and sends a put right behind it on the same connection, without waiting for Created, as jetcd's
//! callers do: the put is among the watch's events, directly and through Keyward, while others write.

use std::net::SocketAddr;
use std::time::Duration;

use keyward::pb::etcdserverpb::PutResponse;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::{Instant, timeout};

use crate::harness::binary::{Version, full};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Cluster, Options, versions};
use crate::rewatch::local;
use crate::streams::{Connection, Stream, watch_of};

const LIMIT: Duration = Duration::from_secs(30);

/// Where the create goes.
#[derive(Clone, Copy, Debug)]
enum Shape {
    NewConnection,
    NewStream,
    OldStream,
}

/// What came of all tries.
#[derive(Default)]
struct Outcome {
    tries: usize,
    /// The watch was told to begin at or above the put.
    missed: usize,
    /// From the create to the put's event.
    times: Vec<Duration>,
}

impl Outcome {
    fn median(&self) -> Duration {
        let mut times = self.times.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }
}

/// Creates a watch and puts its key behind the create. `watches` counts those on the stream.
async fn create_and_put(
    connection: &Connection,
    stream: &mut Stream,
    watches: &mut i64,
    key: &str,
    outcome: &mut Outcome,
) {
    let began = Instant::now();
    stream.asks.create(watch_of(key, false, 0));
    let mut put = connection.send_put(key).await;
    let put = PutResponse::decode(put.message().await.expect("the put is answered")).expect("a PutResponse");
    let written = put.header.expect("a header").revision;
    let mut created = stream.says.next().await.expect("the stream lives");
    while !created.created && created.watch_id < *watches {
        // The event of an earlier try: the watch began before the put, although Created told a later revision
        // (docs/etcd-facts.md#v5).
        outcome.missed = outcome.missed.checked_sub(1).expect("no watch is told an event twice");
        created = stream.says.next().await.expect("the stream lives");
    }
    let begins = created.header.as_ref().expect("a header").revision;
    assert!(created.created && !created.canceled && created.watch_id == *watches, "{created:?}");
    *watches += 1;
    outcome.tries += 1;
    if begins >= written {
        outcome.missed += 1;
        return;
    }
    let told = stream.says.next().await.expect("the stream lives");
    let revisions: Vec<i64> =
        told.events.iter().map(|event| event.kv.as_ref().expect("a key").mod_revision).collect();
    assert_eq!((told.watch_id, &revisions[..]), (created.watch_id, &[written][..]), "from {begins} on");
    outcome.times.push(began.elapsed());
}

async fn try_all(tasks: &Tasks, address: SocketAddr, shape: Shape, tries: usize, name: &str) -> Outcome {
    let mut outcome = Outcome::default();
    let mut connection = Connection::open(tasks, address).await;
    let (mut stream, mut watches) = (connection.watch().await, 0);
    for number in 0..tries {
        match shape {
            Shape::NewConnection => {
                connection = Connection::open(tasks, address).await;
                (stream, watches) = (connection.watch().await, 0);
            }
            Shape::NewStream => (stream, watches) = (connection.watch().await, 0),
            Shape::OldStream => {}
        }
        let key = format!("{name}/{shape:?}/{number}");
        let tried = create_and_put(&connection, &mut stream, &mut watches, &key, &mut outcome);
        timeout(LIMIT, tried).await.unwrap_or_else(|_| panic!("{key} takes longer than {LIMIT:?}"));
    }
    outcome
}

async fn misses_none(version: &Version) {
    let tasks = Tasks::default();
    let cluster = Cluster::start(version, Options { members: 3, ..Options::default() }).await;
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &config).await;
    let others = Connection::open(&tasks, cluster.address(1)).await;
    let writing = async move {
        loop {
            others.put(std::iter::once(("other".to_owned(), b"v".to_vec()))).await;
        }
    };
    let _writing = tasks.spawn("others write", writing);
    let tries = if full() { 134 } else { 34 };
    for shape in [Shape::NewConnection, Shape::NewStream, Shape::OldStream] {
        let direct = try_all(&tasks, cluster.address(0), shape, tries, "direct").await;
        let through = try_all(&tasks, keyward.site().listen, shape, tries, "through").await;
        println!(
            "{version}: {shape:?}: directly {} of {} puts missed, first event after {:?}; through Keyward {} of {}, {:?} (medians)",
            direct.missed,
            direct.tries,
            direct.median(),
            through.missed,
            through.tries,
            through.median(),
        );
        assert_eq!((through.missed, through.tries), (0, tries), "{version}: {shape:?}");
    }
}

#[test]
fn a_put_behind_a_create_is_among_the_events_of_the_watch() {
    local(async {
        for version in versions() {
            misses_none(&version).await;
        }
    });
}
