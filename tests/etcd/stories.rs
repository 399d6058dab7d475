//! Story 1 of the design, literally, and its sisters: clientv3's own recipes, whose watch stream is older than its
//! token. Directly they panic or lie; through Keyward nobody notices.

use std::time::Duration;

use crate::harness::binary::Version;
use crate::harness::client::{Client, Record};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, binary, every_version, side_by_side};

const TTL: u32 = 5;
const CLIENT: &str = "3.5.11";

fn with_auth(members: usize) -> Options {
    Options { members, auth: Auth::On { extra_users: 0 }, token_ttl: Some(TTL), ..Options::default() }
}

async fn keyward(cluster: &Cluster) -> (Keyward, Vec<String>) {
    let site = Site::new();
    let config = site.in_front_of(cluster);
    let endpoints = vec![site.listen.to_string()];
    (Keyward::start(site, &config).await, endpoints)
}

/// alice may use the place where the recipe `PriorityQueue` keeps its counter.
async fn allow_counter(cluster: &Cluster) {
    let root = cluster.ctl_as_root();
    root.ok(&["role", "grant-permission", "ra", "--prefix=true", "readwrite", "__/a/"]).await;
}

fn direct(cluster: &Cluster) -> Vec<String> {
    (0..cluster.len()).map(|i| cluster.address(i).to_string()).collect()
}

fn delivered_all(record: &Record, items: usize) {
    assert_eq!(record.exit.code(), Some(0), "{}", record.tail());
    assert_eq!(record.errors(), Vec::<String>::new());
    assert_eq!(record.summed("delivered"), i64::try_from(items).expect("small"));
    for list in ["missing", "doubled", "foreign"] {
        assert_eq!(record.listed(list), 0, "{list}: {}", record.the("summary"));
    }
}

#[tokio::test]
async fn queues_go_on_when_the_token_of_their_watch_stream_has_expired() {
    let (items, over) = if binary::full() { (100, "60s") } else { (30, "12s") };
    let of_version = async |version: &Version| {
        let cluster = Cluster::start(version, with_auth(1)).await;
        allow_counter(&cluster).await;
        let (keyward, through) = keyward(&cluster).await;
        let count = items.to_string();
        for queue in ["queue", "priority-queue"] {
            let bad = Client::start(
                CLIENT,
                queue,
                "alice",
                &direct(&cluster),
                &["--gap", "7s", "--items", "5", "--over", "2s", "--prefix", "/a/direct/"],
            );
            let good = Client::start(
                CLIENT,
                queue,
                "alice",
                &through,
                &["--gap", "6s", "--items", &count, "--over", over, "--prefix", "/a/through/"],
            );
            let (bad, good) = (bad.record().await, good.record().await);
            assert_eq!(bad.exit.code(), Some(2), "{version} {queue} directly: {}", bad.tail());
            let at = bad.the("panic")["at"].as_str().unwrap_or_default().to_owned();
            delivered_all(&good, items);
            println!("{version} {queue}: directly panics at {at}; through Keyward {}", good.the("summary"));
        }
        drop(keyward);
    };
    side_by_side(&every_version(), of_version).await;
}

/// Runs a scenario whose client has a watch open for longer than the token lives.
fn aged(scenario: &str, endpoints: &[String], place: &str) -> Client {
    let prefix = format!("/a/{place}/{scenario}/");
    Client::start(CLIENT, scenario, "alice", endpoints, &["--age", "7s", "--prefix", &prefix])
}

fn holds(version: &impl std::fmt::Display, scenario: &str, bad: &Record, good: &Record) {
    let (bad, good) = (bad.the("summary"), good.the("summary"));
    println!("{version} {scenario}: directly {bad}; through Keyward {good}");
    if scenario == "barrier" {
        assert_eq!(bad["early"], true, "directly");
    } else {
        assert_eq!(bad["result"], "error", "directly");
    }
    assert_eq!(good["result"], "ok");
    assert_eq!(good["early"], false);
    assert_eq!(good["aged_watch_alive"], true);
}

/// The recipe waits from the revision of its own read, so that any other write in between makes it wait for ever, on
/// etcd too: it has the cluster to itself.
#[tokio::test]
async fn a_barrier_holds_on_an_aged_client() {
    let of_version = async |version: &Version| {
        let cluster = Cluster::start(version, with_auth(1)).await;
        let (keyward, through) = keyward(&cluster).await;
        let good = aged("barrier", &through, "through").record().await;
        let bad = aged("barrier", &direct(&cluster), "direct").record().await;
        holds(version, "barrier", &bad, &good);
        drop(keyward);
    };
    side_by_side(&every_version(), of_version).await;
}

#[tokio::test]
async fn mutexes_and_elections_work_on_an_aged_client() {
    let of_version = async |version: &Version| {
        let cluster = Cluster::start(version, with_auth(1)).await;
        let (keyward, through) = keyward(&cluster).await;
        let scenarios = ["mutex", "election"];
        let bad = scenarios.map(|scenario| aged(scenario, &direct(&cluster), "direct"));
        let good = scenarios.map(|scenario| aged(scenario, &through, "through"));
        for ((scenario, bad), good) in scenarios.into_iter().zip(bad).zip(good) {
            holds(version, scenario, &bad.record().await, &good.record().await);
        }
        drop(keyward);
    };
    side_by_side(&every_version(), of_version).await;
}

#[tokio::test]
async fn no_watch_with_a_fresh_token_is_refused() {
    for version in every_version() {
        no_watch_is_refused(&version).await;
    }
}

async fn no_watch_is_refused(version: &Version) {
    let cluster = Cluster::start(version, with_auth(3)).await;
    let (keyward, through) = keyward(&cluster).await;
    let bad = Client::start(CLIENT, "watch-storm", "alice", &direct(&cluster), &["--prefix", "/a/direct/"]);
    let bad = bad.record().await;
    let good = Client::start(CLIENT, "watch-storm", "alice", &through, &["--prefix", "/a/through/"]);
    let good = good.record().await;
    println!("{version} 300 watches directly: {}", bad.the("summary"));
    println!("{version} 300 watches through Keyward: {}", good.the("summary"));
    assert_eq!(good.summed("refused"), 0, "{:?}", good.errors());
    assert_eq!(good.summed("silent"), 0);
    assert_eq!(good.summed("delivered"), 300);
    assert_eq!(good.exit.code(), Some(0), "{}", good.tail());
    let logins = keyward.metric("keyward_upstream_logins_total", &[("result", "accepted")]).await;
    assert!(logins <= 6.0, "300 logins of one user cost {logins} upstream: one per user and member");
}

#[tokio::test]
async fn a_second_watch_on_an_expired_stream_is_served_beside_the_first() {
    let of_version = async |version: &Version| {
        let cluster = Cluster::start(version, with_auth(1)).await;
        let (keyward, _) = keyward(&cluster).await;
        let through = cluster.ctl().as_user("alice").to(vec![keyward.url()]);
        // etcdctl holds one stream; it logs in once.
        let watch = through.start(&["watch", "--prefix", "/a/"], &cluster.folder().join("watch.log"));
        crate::harness::client::lifetime(Duration::from_secs(u64::from(TTL) + 2)).await;
        through.ok(&["put", "/a/k", "after"]).await;
        watch.wrote(Duration::from_secs(10), "the event", |text| text.contains("after").then_some(())).await;
    };
    side_by_side(&every_version(), of_version).await;
}
