//! Must show 8: two replicas that clients list both are restarted in turn under load. No event is lost or doubled, no read fails, no
//! lease or lock is lost; writes that fail are counted, and each must be one whose outcome nobody can know.

use std::time::{Duration, Instant};

use crate::harness::binary::{self, Version};
use crate::harness::client::{Client, Record, lifetime};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, newest, versions, wait};
use crate::steady::{failed, of_each, tally};

/// The clientv3 of the load, each with a record of its own.
pub(crate) const CLIENTS: [&str; 2] = ["3.5.11", "3.6.16"];
/// What a client may be told of a write that it cannot know the outcome of.
const UNKNOWN: [&str; 3] = [
    "etcdserver: request timed out",
    "etcdserver: request timed out, possibly due to connection lost",
    "etcdserver: request timed out, possibly due to previous leader failure",
];
/// How long clients may take to come back: grpc-go waits some seconds once it was refused.
const BACK: Duration = Duration::from_secs(60);
/// Between two restarts the load goes on as it does on a quiet day.
const QUIET: Duration = Duration::from_secs(1);

/// A run in which etcd elected another leader by itself proves nothing, and is repeated this often.
const REPEATS: usize = 2;

/// Two replicas of one key file, as an operator runs them.
struct Pair {
    replicas: Vec<Keyward>,
    configs: [String; 2],
    /// How long each took from SIGTERM to its end, and from there to ready.
    took: Vec<[Duration; 2]>,
}

impl Pair {
    async fn start(cluster: &Cluster, shared: &Site) -> Pair {
        let key = shared.write("session.key", &"0123456789abcdef".repeat(4));
        let sites = [Site::new(), Site::new()];
        let configs = sites
            .each_ref()
            .map(|site| format!("{}session.key_files = [{key:?}]\n", site.in_front_of(cluster)));
        let mut replicas = Vec::new();
        for (site, config) in sites.into_iter().zip(&configs) {
            replicas.push(Keyward::start(site, config).await);
        }
        Pair { replicas, configs, took: Vec::new() }
    }

    fn addresses(&self) -> Vec<String> {
        self.replicas.iter().map(|replica| replica.site().listen.to_string()).collect()
    }

    async fn connections(&self, replica: usize) -> f64 {
        self.replicas[replica].metric("keyward_downstream_connections", &[]).await
    }

    /// Restarts one, and returns when it is ready and its clients are back: who takes the next before loses both at once.
    async fn roll(&mut self, replica: usize) {
        let before = self.connections(replica).await;
        let old = self.replicas.remove(replica);
        let asked = Instant::now();
        let (status, site) = old.terminate().await;
        let ended = asked.elapsed();
        assert_eq!(status.code(), Some(0), "it drains and ends well");
        let new = Keyward::start(site, &self.configs[replica]).await;
        self.took.push([ended, asked.elapsed() - ended]);
        self.replicas.insert(replica, new);
        let back = async || (self.connections(replica).await >= before).then_some(());
        wait::until(BACK, "its clients are back", back).await;
    }
}

/// What the record of one load proves.
pub(crate) fn judge(version: &Version, client: &str, record: &Record) {
    assert_eq!(record.exit.code(), Some(0), "{}", record.tail());
    let failed = failed(record);
    println!("{version} clientv3 {client}: {} failed: {:?}", record.the("summary"), tally(&failed));
    assert!(record.the("verify")["history"].as_i64().is_some_and(|events| events > 0), "no history");
    assert!(
        record.summed("acknowledged") > 0 && record.summed("watchers") > 0 && record.summed("leases") > 0
    );
    for nothing in ["violations", "watches_closed", "watchers_behind", "leases_lost", "stale_reads"] {
        assert_eq!(record.summed(nothing), 0, "{nothing}");
    }
    let wrongly: Vec<_> = failed
        .iter()
        .filter(|call| !["put", "txn"].contains(&&*call.op) || !UNKNOWN.contains(&&*call.message))
        .collect();
    assert!(wrongly.is_empty(), "{version} {client}: {wrongly:?}");
}

#[tokio::test]
async fn replicas_that_are_restarted_in_turn_lose_nothing() {
    let all = if binary::full() { versions() } else { vec![newest("3.5")] };
    for version in all {
        for void in 0.. {
            let auth = Auth::On { extra_users: 0 };
            let cluster = Cluster::start(&version, Options { members: 3, auth, ..Options::default() }).await;
            let before = leader_changes(&cluster).await;
            let (loads, lock, took) = rolled(&cluster).await;
            let elected = leader_changes(&cluster).await != before;
            println!("{version}: restarts (to the end, to ready): {took:?}; lock {}", lock.the("summary"));
            if elected && void < REPEATS {
                println!("{version}: void run: an election that no restart of Keyward explains");
                continue;
            }
            for (client, record) in CLIENTS.iter().zip(&loads) {
                judge(&version, client, record);
            }
            let summary = lock.the("summary");
            assert_eq!((&summary["result"], &summary["early"]), (&"ok".into(), &false.into()), "{summary}");
            assert_eq!(lock.errors(), Vec::<String>::new());
            break;
        }
    }
}

async fn leader_changes(cluster: &Cluster) -> Vec<f64> {
    of_each(cluster, "etcd_server_leader_changes_seen_total", &[]).await
}

/// The loads' records, the lock's, and how long restarts took.
async fn rolled(cluster: &Cluster) -> (Vec<Record>, Record, Vec<[Duration; 2]>) {
    let rounds = if binary::full() { 10 } else { 2 };
    let shared = Site::new();
    let mut pair = Pair::start(cluster, &shared).await;
    let addresses = pair.addresses();
    let truth = cluster.address(0).to_string();
    let mut loads = Vec::new();
    for client in CLIENTS {
        let prefix = format!("/a/{client}/");
        let args = ["--length", "1h", "--history", &truth, "--prefix", &prefix];
        loads.push(Client::start(client, "load", "alice", &addresses, &args));
    }
    let hold = ["--age", "1s", "--hold", "0"];
    let lock = Client::start(CLIENTS[0], "mutex", "alice", &addresses, &hold);
    for load in &loads {
        load.says("ready").await;
    }
    lock.says("wait_called").await;
    for _ in 0..rounds {
        for replica in 0..2 {
            pair.roll(replica).await;
            lifetime(QUIET).await;
        }
    }
    assert_eq!(pair.took.len(), 2 * rounds);
    loads.iter().for_each(Client::finish);
    lock.finish();
    let mut records = Vec::new();
    for load in loads {
        records.push(load.record().await);
    }
    (records, lock.record().await, pair.took)
}
