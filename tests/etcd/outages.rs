//! While no member serves, a client sees through Keyward what it sees at etcd: its watches outlive a restart of all members, and its
//! streams end where the members that are left have no leader.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, WatchRequest, watch_request::RequestUnion,
};
use keyward::pb::v3electionpb::LeaderRequest;
use keyward::tasks::Tasks;
use serde_json::json;

use crate::harness::binary::{Version, full};
use crate::harness::client::{Client, Record, lifetime};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, newest, versions, wait};
use crate::streams::{Connection, Stream, watch_of};

const WATCHES: usize = 10;
const LEADER: [(&str, &str); 1] = [("hasleader", "true")];
const WATCH: &str = "/etcdserverpb.Watch/Watch";
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const OBSERVE: &str = "/v3electionpb.Election/Observe";
/// Far past etcd's own five seconds at most.
const LIMIT: Duration = Duration::from_secs(30);

fn tested() -> Vec<Version> {
    if full() { versions() } else { vec![newest("3.5")] }
}

/// Watches of one key each, and of all of them.
fn spec(site: &Site) -> String {
    let watch = |name: String, key: String, range_end: &str| {
        json!({"name": name, "key": key, "range_end": range_end, "start_revision": 0, "prev_kv": false,
               "progress_notify": false, "fragment": false, "filters": []})
    };
    let mut watches: Vec<_> = (0..WATCHES).map(|i| watch(format!("w{i}"), format!("/a/w{i}"), "")).collect();
    watches.push(watch("all".into(), "/a/w".into(), "/a/x"));
    site.write("watches.json", &json!({ "watches": watches }).to_string()).display().to_string()
}

/// One write of each key. How many events all watches show of it.
async fn write(cluster: &Cluster, value: &str) -> usize {
    let ctl = cluster.ctl_as_root();
    for i in 0..WATCHES {
        ctl.ok(&["put", &format!("/a/w{i}"), value]).await;
    }
    2 * WATCHES
}

/// The values that each watch showed, and how many watches ended.
fn shown(record: &Record) -> (BTreeMap<String, Vec<String>>, usize) {
    let mut shown: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in record.all("response") {
        let of_watch = shown.entry(line["watch"].as_str().expect("a name").to_owned()).or_default();
        let events = line["events"].as_array().expect("events");
        of_watch.extend(events.iter().map(|event| format!("{}={}", event[1], event[2])));
    }
    (shown, record.all("ended").count() + record.all("compacted").count())
}

/// Clients of one version that watch until all members were away for `away` and are back: direct, and through Keyward.
async fn over_an_outage(cluster: &mut Cluster, version: &str, away: Duration) -> [Record; 2] {
    let site = Site::new();
    let (config, spec) = (site.in_front_of(cluster), spec(&site));
    let through = [site.listen.to_string()];
    let keyward = Keyward::start(site, &config).await;
    let direct: Vec<String> = (0..cluster.len()).map(|i| cluster.address(i).to_string()).collect();
    let args = ["--spec", &spec, "--require-leader"];
    let clients = [&direct[..], &through[..]]
        .map(|endpoints| Client::start(version, "watchers", "alice", endpoints, &args));
    for client in &clients {
        client.says("ready").await;
    }
    // Some of it is on its way when the members die.
    let mut written = write(cluster, "before").await;
    (0..cluster.len()).for_each(|i| cluster.kill(i));
    lifetime(away).await;
    (0..cluster.len()).for_each(|i| cluster.relaunch(i));
    for i in 0..cluster.len() {
        cluster.serving(i).await;
    }
    written += write(cluster, "after").await;
    for client in &clients {
        client.has_seen(written).await;
        client.finish();
    }
    let [direct, through] = clients;
    let records = [direct.record().await, through.record().await];
    drop(keyward);
    records
}

#[tokio::test]
async fn watches_outlive_a_restart_of_all_members_as_directly() {
    let seconds = if full() { &[2, 8, 30][..] } else { &[2, 8] };
    let clients = if full() { &["3.5.11", "3.6.16"][..] } else { &["3.6.16"] };
    for version in tested() {
        let mut cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        for client in clients {
            for away in seconds {
                let [direct, through] =
                    over_an_outage(&mut cluster, client, Duration::from_secs(*away)).await;
                let ((seen_directly, ended_directly), (seen, ended)) = (shown(&direct), shown(&through));
                println!(
                    "{version}, clientv3 {client}, away for {away} s: of {} watches {ended_directly} ended directly, {ended} through Keyward",
                    WATCHES + 1
                );
                assert!(ended <= ended_directly, "{}", through.tail());
                let of_key = |i: usize| ["before", "after"].map(|value| format!("\"/a/w{i}\"=\"{value}\""));
                let all = ["before", "after"]
                    .into_iter()
                    .flat_map(|value| (0..WATCHES).map(move |i| format!("\"/a/w{i}\"=\"{value}\"")));
                let mut expected: BTreeMap<_, _> =
                    (0..WATCHES).map(|i| (format!("w{i}"), of_key(i).to_vec())).collect();
                expected.insert("all".into(), all.collect());
                assert_eq!(seen, expected, "each event once, in order");
                assert_eq!(seen_directly, expected, "directly");
            }
        }
    }
}

/// With auth on the tokens are gone with the members, and Keyward renews them.
#[tokio::test]
async fn watches_of_a_user_outlive_a_restart_of_all_members() {
    let version = newest("3.5");
    let auth = Auth::On { extra_users: 0 };
    let mut cluster = Cluster::start(&version, Options { members: 3, auth, ..Options::default() }).await;
    let site = Site::new();
    let (config, spec) = (site.in_front_of(&cluster), spec(&site));
    let through = [site.listen.to_string()];
    let _keyward = Keyward::start(site, &config).await;
    let client =
        Client::start("3.6.16", "watchers", "alice", &through, &["--spec", &spec, "--require-leader"]);
    client.says("ready").await;
    let mut written = write(&cluster, "before").await;
    (0..3).for_each(|i| cluster.kill(i));
    lifetime(Duration::from_secs(5)).await;
    (0..3).for_each(|i| cluster.relaunch(i));
    for i in 0..3 {
        cluster.serving(i).await;
    }
    written += write(&cluster, "after").await;
    client.has_seen(written).await;
    client.finish();
    let (seen, ended) = shown(&client.record().await);
    assert_eq!(ended, 0);
    let seen: usize = seen.values().map(Vec::len).sum();
    assert_eq!(seen, written, "each event once");
}

/// A stream that is open, by its name.
type Named = (&'static str, Stream);

/// Streams of each kind; each has had its first answer where it gets one.
async fn one_of_each(connection: &Connection, fields: &[(&str, &str)]) -> Vec<Named> {
    let mut watch = connection.open_with(WATCH, fields).await;
    let create = RequestUnion::CreateRequest(watch_of("k", false, 0));
    watch.asks.send(&WatchRequest { request_union: Some(create) }, false);
    assert!(watch.says.next().await.expect("created").created);
    let grant = LeaseGrantRequest { ttl: 600, id: 0 };
    let granted: Option<LeaseGrantResponse> = connection.call("/etcdserverpb.Lease/LeaseGrant", &grant).await;
    let mut renewal = connection.open_with(KEEP_ALIVE, fields).await;
    renewal.asks.send(&LeaseKeepAliveRequest { id: granted.expect("a lease").id }, false);
    renewal.says.message().await.expect("renewed");
    let mut observe = connection.open_with(OBSERVE, fields).await;
    observe.asks.send(&LeaderRequest { name: "nobody".into() }, true);
    vec![
        ("watch", watch),
        ("keepalive", renewal),
        ("observe", observe),
        ("idle watch", connection.open_with(WATCH, fields).await),
        ("idle keepalive", connection.open_with(KEEP_ALIVE, fields).await),
    ]
}

/// How each stream ended and after how long; none where it did not.
async fn ends(
    streams: &mut [Named],
    began: Instant,
    limit: Duration,
) -> Vec<Option<(Duration, Option<(String, String)>)>> {
    let end = async |stream: &mut Stream| {
        let status = tokio::time::timeout(limit, stream.says.status()).await.ok()?;
        Some((began.elapsed(), status))
    };
    join_all(streams.iter_mut().map(|(_, stream)| end(stream))).await
}

#[tokio::test(flavor = "local")]
async fn every_stream_ends_without_a_leader_as_at_etcd() {
    let no_leader = Some(("14".to_owned(), "etcdserver: no leader".to_owned()));
    for version in tested() {
        let mut cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        let site = Site::new();
        let (config, listen) = (site.in_front_of(&cluster), site.listen);
        let keyward = Keyward::start(site, &config).await;
        let tasks = Tasks::default();
        let left = (cluster.leader().await + 1) % 3;
        let direct = Connection::open(&tasks, cluster.address(left)).await;
        let through = Connection::open(&tasks, listen).await;
        let mut asked = [one_of_each(&direct, &LEADER).await, one_of_each(&through, &LEADER).await];
        let mut plain = [direct.open_with(WATCH, &[]).await, through.open_with(WATCH, &[]).await];
        for stream in &mut plain {
            stream.asks.create(watch_of("k", false, 0));
            assert!(stream.says.next().await.expect("created").created);
        }
        let began = Instant::now();
        (0..3).filter(|i| *i != left).for_each(|i| cluster.kill(i));
        let [at_etcd, here] = &mut asked;
        let (at_etcd_ends, here_ends) = tokio::join!(ends(at_etcd, began, LIMIT), ends(here, began, LIMIT));
        for (((name, _), at_etcd), here) in at_etcd.iter().zip(at_etcd_ends).zip(here_ends) {
            println!("{version} {name}: directly {at_etcd:?}, through Keyward {here:?}");
            let (at_etcd, (_, status)) = (at_etcd.expect("etcd ends it"), here.expect(name));
            assert_eq!(status, no_leader, "{version} {name}");
            assert!(at_etcd.1.is_some(), "{version} {name}: not by etcd");
        }
        for stream in &mut plain {
            let ended = tokio::time::timeout(Duration::from_secs(2), stream.says.next()).await;
            assert!(ended.is_err(), "{version}: who did not ask for a leader is not told");
        }
        for i in (0..3).filter(|i| *i != left) {
            cluster.relaunch(i);
        }
        cluster.leader().await;
        // What was not ended goes on, and who asks anew is served.
        let revision = async || through.put([("k".to_owned(), b"v".to_vec())].into_iter()).await;
        let revision = wait::until(LIMIT, "a write is taken", revision).await;
        for stream in &mut plain {
            let told =
                tokio::time::timeout(LIMIT, stream.says.next()).await.expect("in time").expect("it lives");
            assert_eq!(told.events.len(), 1, "{version}");
            let kv = told.events[0].kv.as_ref().expect("a key");
            assert_eq!(kv.mod_revision, revision, "{version}");
        }
        let mut again = through.open_with(WATCH, &LEADER).await;
        again.asks.create(watch_of("k", false, 0));
        assert!(again.says.next().await.expect("created").created, "{version}");
        drop(keyward);
    }
}
