//! Story 4 of the design with clientv3 3.5.0 itself: its endpoints follow the member list, a learner is in it, and what it sends as
//! `:authority` no HTTP/2 library of Rust takes. Directly it ends up at the learner; through Keyward it stays there and knows of nothing.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use keyward::tasks::Tasks;
use serde_json::Value;

use crate::harness::client::{Client, Record};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, binary, versions, wait};
use crate::rewatch::local;

const CLIENT: &str = "3.5.0";
const LEARNER: usize = 3;
const LIMIT: Duration = Duration::from_secs(60);
/// What a client may want of a member; Keyward asks a learner for nothing of it.
const SERVICES: [&str; 5] =
    ["etcdserverpb.KV", "etcdserverpb.Watch", "etcdserverpb.Lease", "v3lockpb.Lock", "v3electionpb.Election"];

/// Three voters and a learner, each of which tells clients the address of a relay of its own.
struct Scene {
    cluster: Cluster,
    relays: Vec<Relay>,
}

impl Scene {
    async fn new(version: &binary::Version, tasks: &Tasks) -> Scene {
        let relays = join_all((0..4).map(|_| Relay::start(tasks))).await;
        let advertise = relays.iter().map(|relay| relay.address).collect();
        let auth = Auth::On { extra_users: 0 };
        let options = Options { members: 3, auth, advertise, ..Options::default() };
        let mut cluster = Cluster::start(version, options).await;
        cluster.add_learner().await;
        (0..4).for_each(|i| relays[i].open(cluster.address(i)));
        Scene { cluster, relays }
    }

    /// The configuration that names the members' own addresses: nobody needs the relays, then.
    fn config(&self, site: &Site, fields: &str) -> String {
        let text = site.listening(&self.cluster, fields);
        let told = |i| (self.cluster.advertised(i), self.cluster.url(i));
        (0..4).map(told).fold(text, |text, (relay, own)| text.replace(&relay, &own))
    }

    /// Connections that somebody made where members say that they are.
    fn bypasses(&self) -> usize {
        self.relays.iter().map(Relay::accepted).sum()
    }

    /// What the learner was asked for that clients ask for, and refused to read. Keyward itself looks there whether it serves, by a
    /// serializable read, where it may not ask for its status.
    async fn learner_was_asked(&self) -> [f64; 3] {
        let counter =
            async |metric: &str, labels: &[(&str, &str)]| self.cluster.counter(LEARNER, metric, labels).await;
        let started = "grpc_server_started_total";
        let mut asked = 0.0;
        for service in SERVICES {
            asked += counter(started, &[("grpc_service", service)]).await;
        }
        let reads = counter(started, &[("grpc_service", "etcdserverpb.KV"), ("grpc_method", "Range")]).await;
        let refused = [("grpc_method", "Range"), ("grpc_code", "Unavailable")];
        let other = counter(started, &[("grpc_method", "Snapshot")]).await;
        [asked - reads, counter("grpc_server_handled_total", &refused).await, other]
    }

    /// Which member answered is in Keyward's record of each call. Returns how many there were.
    async fn assert_no_call_at_the_learner(&self, keyward: &Keyward) -> usize {
        let learner = format!("member={:x}", self.cluster.member_id(LEARNER).await);
        let log = keyward.log();
        let answered = log.lines().filter(|line| line.contains(" member=")).count();
        assert!(answered > 100, "{answered} calls were recorded");
        let there = log.lines().find(|line| line.contains("method=") && line.contains(&learner));
        assert_eq!(there, None);
        answered
    }
}

fn length() -> &'static str {
    if binary::full() { "60s" } else { "5s" }
}

async fn run(endpoint: String, place: &str, more: &[&str]) -> Record {
    let prefix = format!("/a/{place}/");
    let mut args = vec!["--auto-sync", "1s", "--length", length(), "--prefix", &prefix];
    args.extend(more);
    Client::start(CLIENT, "sync", "alice", &[endpoint], &args).record().await
}

/// It worked, and whatever it dialed and took for an endpoint is that.
fn stayed_at(record: &Record, listen: SocketAddr, given: &str, url: &str) {
    assert_eq!(record.exit.code(), Some(0), "{}", record.tail());
    assert_eq!(record.errors(), Vec::<String>::new());
    let only = |counts: &Value| counts.as_object().map(|counts| counts.keys().cloned().collect::<Vec<_>>());
    assert_eq!(only(&record.the("wire")["dialed"]), Some(vec![listen.to_string()]), "it dialed nobody else");
    // Before its first sync it has what it was given; then each member's address is this one.
    let lists = only(&record.the("summary")["endpoints"]).expect("lists");
    let synced = lists.iter().filter(|list| *list != given);
    let members: BTreeSet<&str> = synced.flat_map(|list| list.split(' ')).collect();
    assert_eq!(members, BTreeSet::from([url]), "{lists:?}");
    let calls = &record.the("summary")["calls"];
    for op in ["put", "get", "serializable", "txn"] {
        assert!(calls[format!("{op} ok")].as_u64().is_some_and(|count| count > 20), "{op}: {calls}");
    }
    assert_eq!(calls["watch ok"], 4, "each client's watch showed its last value");
    assert_eq!(calls["keepalive ok"], 4);
}

#[test]
fn clientv3_3_5_0_follows_the_member_list_and_never_leaves_keyward() {
    local(async {
        for version in versions() {
            story_4(&version).await;
        }
    });
}

async fn story_4(version: &binary::Version) {
    let tasks = Tasks::default();
    let scene = Scene::new(version, &tasks).await;
    through_keyward(&scene, Transport::Plain).await;
    through_keyward(&scene, Transport::Tls).await;

    let bypasses = scene.bypasses();
    let bad = run(scene.relays[0].address.to_string(), "direct", &[]).await;
    let summary = bad.all("summary").next().map(ToString::to_string);
    println!("{version} {CLIENT} directly: {:?} {summary:?}, first {:?}", bad.exit, bad.errors().first());
    assert!(scene.bypasses() > bypasses + 4, "directly it goes where the members say that they are");
    let met = |error: &String| error.contains("etcdserver: rpc not supported for learner");
    assert!(bad.errors().iter().any(met), "directly it meets the learner: {}", bad.tail());
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Transport {
    Plain,
    /// The name by which it checks the server is that of the address, whatever it sends as its authority.
    Tls,
}

async fn through_keyward(scene: &Scene, transport: Transport) {
    let pki = scene.cluster.pki();
    let (ca, pair) = (pki.ca.display().to_string(), pki.server());
    let (fields, scheme, more) = match transport {
        Transport::Plain => (String::new(), "http", vec![]),
        Transport::Tls => (
            format!(", tls.cert = {:?}, tls.key = {:?}", pair.cert, pair.key),
            "https",
            vec!["--cacert", &*ca],
        ),
    };
    let site = Site::new();
    let config = scene.config(&site, &fields);
    let listen = site.listen;
    let keyward = Keyward::start(site, &config).await;
    let known = async || (keyward.metric("keyward_member_ready", &[]).await == 3.0).then_some(());
    wait::until(LIMIT, "all voters are ready", known).await;
    // Keyward may have asked there while it did not know who answers at the addresses that it was given.
    let (bypasses, asked) = (scene.bypasses(), scene.learner_was_asked().await);

    let given = if transport == Transport::Tls { format!("https://{listen}") } else { listen.to_string() };
    let good = run(given.clone(), "through", &more).await;
    let version = scene.cluster.version();
    println!(
        "{version} {CLIENT} {transport:?} through Keyward: {} {}",
        good.the("summary"),
        good.the("wire")
    );
    stayed_at(&good, listen, &given, &format!("{scheme}://{listen}"));
    let (bypassed, asked_since) = (scene.bypasses() - bypasses, scene.learner_was_asked().await);
    let calls = scene.assert_no_call_at_the_learner(&keyward).await;
    println!(
        "{version} {CLIENT} {transport:?}, {}: {} errors; {bypassed} connections past Keyward; of {calls} calls 0 at the learner, \
         which was asked {:?} times more",
        length(),
        good.errors().len(),
        [0, 1, 2].map(|i| asked_since[i] - asked[i]),
    );
    assert_eq!(bypassed, 0, "nobody went where the members say that they are");
    assert_eq!(asked_since, asked);
    let odd = keyward.metric("keyward_odd_authority_connections_total", &[]).await;
    assert!(odd >= 4.0, "{odd} connections were odd");
    assert_eq!(keyward.metric("keyward_odd_authority_refused_total", &[]).await, 0.0);
}
