//! Must show 5: a revision of ten megabytes, with the upstream connection cut in the middle of it, reaches each client whole and once:
//! in one response where the client did not ask for fragments, in contiguous pieces where it did.

use std::time::Duration;

use keyward::pb::etcdserverpb::WatchResponse;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::timeout;

use crate::caller::Caller;
use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::relay::Relay;
use crate::harness::{Cluster, Options, versions};
use crate::rewatch::local;
use crate::streams::{Connection, Says, Stream, watch_of};

const LIMIT: Duration = Duration::from_secs(60);
/// As many operations as a transaction may have.
const KEYS: usize = 128;
const VALUE: usize = 80 * 1024;
/// Of the ten megabytes, how much comes before each cut.
const PART: usize = 4 << 20;
/// etcd cuts fragments at its default request limit and 512 KiB.
const PIECE: usize = 2 << 20;
/// Of a response beside its events.
const HEADER: usize = 64;
/// On each stream, so that pieces of the two could mix.
const WATCHES: i64 = 2;

struct Scene {
    tasks: Tasks,
    relays: Vec<Relay>,
    cluster: Cluster,
    keyward: Keyward,
    direct: Connection,
}

impl Scene {
    async fn start(version: &Version, flags: Vec<String>) -> Scene {
        let tasks = Tasks::default();
        let mut relays = Vec::new();
        for _ in 0..3 {
            relays.push(Relay::start(&tasks).await);
        }
        let advertise = relays.iter().map(|relay| relay.address).collect();
        // Ten megabytes keep a busy machine from its heartbeats, and an election would end the write.
        let timing = Some((250, 2500));
        let options = Options { members: 3, advertise, flags, timing, ..Options::default() };
        let cluster = Cluster::start(version, options).await;
        relays.iter().enumerate().for_each(|(at, relay)| relay.open(cluster.address(at)));
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let direct = Connection::open(&tasks, cluster.address(0)).await;
        Scene { tasks, relays, cluster, keyward, direct }
    }

    /// Every member has what was written: one that lags has an earlier "now".
    async fn in_step(&self) {
        for at in 0..self.cluster.len() {
            Caller::anybody(self.cluster.address(at)).await.keys("none").await;
        }
    }

    /// A client of its own with two watches of all keys.
    async fn client(&self, fragment: bool) -> (Connection, Stream) {
        let connection = Connection::open(&self.tasks, self.keyward.site().listen).await;
        let mut stream = connection.watch().await;
        for _ in 0..WATCHES {
            let mut create = watch_of("k", true, 0);
            create.fragment = fragment;
            create.prev_kv = true;
            stream.asks.create(create);
        }
        for _ in 0..WATCHES {
            assert!(next(&mut stream.says).await.created);
        }
        (connection, stream)
    }

    /// Has every relay cut once, when part of the revision has passed it.
    fn cut_each(&self) {
        self.relays.iter().for_each(|relay| relay.cut_after(PART));
    }

    fn cuts(&self) -> usize {
        self.relays.iter().map(Relay::cuts).sum()
    }

    async fn resumes(&self) -> f64 {
        self.keyward.metric("keyward_watch_resumes_total", &[]).await
    }

    /// Both clients are told `revision`, which `write` made while the connections were cut, with an event for every key.
    async fn told_whole(
        &self,
        what: &str,
        plain: &mut Says,
        fragmenting: &mut Says,
        write: impl Future<Output = i64>,
    ) {
        let (cuts, resumes) = (self.cuts(), self.resumes().await);
        self.cut_each();
        let revision = write.await;
        let mut largest = 0;
        for _ in 0..WATCHES {
            let response = next(plain).await;
            largest = response.encoded_len();
            assert!(!response.fragment, "fragments that nobody asked for");
            assert_eq!(keys(&response, revision), all_keys());
        }
        let mut pieces = 0;
        for _ in 0..WATCHES {
            let (mut told, mut watch) = (Vec::new(), None);
            loop {
                let piece = next(fragmenting).await;
                assert_eq!(*watch.get_or_insert(piece.watch_id), piece.watch_id, "between two pieces");
                assert!(piece.encoded_len() <= PIECE + HEADER, "a piece of {}", piece.encoded_len());
                told.extend(keys(&piece, revision));
                pieces += 1;
                if !piece.fragment {
                    break;
                }
            }
            assert_eq!(told, all_keys());
        }
        let (cuts, resumes) = (self.cuts() - cuts, self.resumes().await - resumes);
        println!(
            "{what}: {largest} bytes whole, {pieces} pieces for {WATCHES} watches; {cuts} cuts, {resumes} resumes"
        );
        assert!(pieces > 2 * WATCHES, "{pieces} pieces");
        assert!(cuts > 0 && resumes >= 2.0, "both clients lost their stream: {cuts} cuts, {resumes} resumes");
    }

    /// Nothing else is told before the next small event.
    async fn told_once(&self, plain: &mut Says, fragmenting: &mut Says) {
        let marker = self.direct.put([("k".into(), Vec::new())].into_iter()).await.expect("written");
        for says in [plain, fragmenting] {
            for _ in 0..WATCHES {
                assert_eq!(keys(&next(says).await, marker), ["k"]);
            }
        }
    }
}

async fn next(says: &mut Says) -> WatchResponse {
    let next = timeout(LIMIT, says.next()).await.expect("something comes");
    next.expect("the stream goes on")
}

fn key(at: usize) -> String {
    format!("k{at:03}")
}

fn all_keys() -> Vec<String> {
    (0..KEYS).map(key).collect()
}

/// The keys of the events, in order; all of `revision`.
fn keys(response: &WatchResponse, revision: i64) -> Vec<String> {
    let kvs = response.events.iter().filter_map(|event| event.kv.as_ref());
    kvs.map(|kv| {
        assert_eq!(kv.mod_revision, revision);
        String::from_utf8(kv.key.to_vec()).expect("a key of ours")
    })
    .collect()
}

fn pair(at: usize) -> (String, Vec<u8>) {
    (key(at), vec![b'v'; VALUE])
}

/// One transaction of all keys: the member tells it in one message.
async fn written_at_once(version: &Version) {
    let flags = vec!["--max-request-bytes=16777216".into()];
    let scene = Scene::start(version, flags).await;
    let (_one, mut plain) = scene.client(false).await;
    let (_other, mut fragmenting) = scene.client(true).await;
    let (plain, fragmenting) = (&mut plain.says, &mut fragmenting.says);
    let write = async { scene.direct.put((0..KEYS).map(pair)).await.expect("written") };
    scene.told_whole(&format!("{version}: a put of all keys"), plain, fragmenting, write).await;
    scene.told_once(plain, fragmenting).await;
    drop(scene.cluster);
}

/// A deletion of all keys, with what was there before: the member tells it in fragments.
async fn deleted_at_once(version: &Version) {
    let scene = Scene::start(version, Vec::new()).await;
    for at in 0..KEYS {
        scene.direct.put([pair(at)].into_iter()).await.expect("written");
    }
    scene.in_step().await;
    let (_one, mut plain) = scene.client(false).await;
    let (_other, mut fragmenting) = scene.client(true).await;
    let (plain, fragmenting) = (&mut plain.says, &mut fragmenting.says);
    let write = async { scene.direct.delete("k").await.expect("deleted") };
    scene.told_whole(&format!("{version}: a deletion of all keys"), plain, fragmenting, write).await;
    scene.told_once(plain, fragmenting).await;
    drop(scene.cluster);
}

#[test]
fn a_revision_of_ten_megabytes_is_told_whole_and_once_over_a_cut() {
    local(async {
        for version in versions() {
            written_at_once(&version).await;
            deleted_at_once(&version).await;
        }
    });
}
