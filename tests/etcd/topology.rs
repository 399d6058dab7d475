//! Every member through its own address at Keyward: what `etcdctl --cluster` and whoever follows the member list do there.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;

use crate::harness::ctl::Ctl;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, Tls, ports, versions, wait};

/// Time for Keyward to see a change of its members.
const LIMIT: Duration = Duration::from_secs(30);

/// Keyward with a listener for everybody and one for each of `members`, over TLS where the cluster is.
pub(crate) struct Front {
    pub(crate) keyward: Keyward,
    /// By the member's index.
    pub(crate) own: Vec<SocketAddr>,
    scheme: &'static str,
}

impl Front {
    /// `members` may be more than there are, for those that are to come.
    pub(crate) async fn before(cluster: &Cluster, members: usize, further: &str) -> Front {
        let site = Site::new();
        let own: Vec<SocketAddr> = (0..members).map(|_| ports::free()).collect();
        let tls = if cluster.options().tls == Tls::Off {
            String::new()
        } else {
            let pair = cluster.pki().server();
            format!(", tls.cert = {:?}, tls.key = {:?}", pair.cert, pair.key)
        };
        let mut fields = tls.clone();
        for (i, address) in own.iter().enumerate() {
            fields += &format!(" }}, {{ name = \"of-m{i}\", address = \"{address}\", member = \"m{i}\"{tls}");
        }
        // `--cluster` of etcdctl 3.5.1 asks for the members without a token.
        let config = site.listening(cluster, &fields) + "policy.require_identity = \"as-etcd\"\n" + further;
        let keyward = Keyward::start(site, &config).await;
        let scheme = if tls.is_empty() { "http" } else { "https" };
        Front { keyward, own, scheme }
    }

    /// The address that is everybody's.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.keyward.site().listen)
    }

    /// That of one member.
    pub(crate) fn of(&self, i: usize) -> String {
        format!("{}://{}", self.scheme, self.own[i])
    }

    /// etcdctl as root, for the address that is everybody's.
    pub(crate) fn root(&self, cluster: &Cluster) -> Ctl {
        let ctl = Ctl::new(cluster.version(), vec![self.url()]).as_user("root");
        if cluster.options().tls == Tls::Off { ctl } else { ctl.with_tls(cluster.pki(), None) }
    }
}

fn three(tls: Tls) -> Options {
    Options { members: 3, auth: Auth::On { extra_users: 0 }, tls, ..Options::default() }
}

/// What `endpoint status -w json` says of each endpoint.
async fn statuses(ctl: &Ctl, args: &[&str]) -> BTreeMap<String, Value> {
    rows(&ctl.ok(args).await, "Status")
}

fn rows(text: &str, of: &str) -> BTreeMap<String, Value> {
    let all: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let row = |row: &Value| (row["Endpoint"].as_str().expect("an endpoint").to_owned(), row[of].clone());
    all.as_array().expect("a list").iter().map(row).collect()
}

fn member_of(status: &Value) -> u64 {
    status["header"]["member_id"].as_u64().expect("a member's id")
}

#[tokio::test]
async fn every_command_of_etcdctl_about_a_member_reaches_that_member() {
    for version in versions() {
        // Both forms in which members refuse: over TLS they come as trailers.
        for tls in [Tls::Off, Tls::Server] {
            let cluster = Cluster::start(&version, three(tls)).await;
            let front = Front::before(&cluster, 4, "").await;
            let root = front.root(&cluster);
            listed(&cluster, &front, &root).await;
            looked_at(&cluster, &front, &root).await;
            leadership_moves(&cluster, &front, &root).await;
            worked_on(&cluster, &front, &root).await;
            println!("{version} {tls:?}: etcdctl --cluster through Keyward: all worked");
        }
    }
}

async fn ids(cluster: &Cluster) -> Vec<u64> {
    let mut ids = Vec::new();
    for i in 0..cluster.len() {
        ids.push(cluster.member_id(i).await);
    }
    ids
}

async fn listed(cluster: &Cluster, front: &Front, root: &Ctl) {
    let list = root.ok(&["member", "list"]).await;
    assert_eq!(list.lines().count(), 3, "{list}");
    for (i, id) in ids(cluster).await.into_iter().enumerate() {
        let line = list.lines().find(|line| line.contains(&format!("{id:x}"))).expect("it is listed");
        assert!(line.contains(&front.of(i)), "m{i} has a URL of its own: {list}");
        assert!(!list.contains(&cluster.url(i)), "a client would go past us: {list}");
    }
}

/// Status, health and hashes of all members: each says what the member itself says.
async fn looked_at(cluster: &Cluster, front: &Front, root: &Ctl) {
    let (ids, leader) = (ids(cluster).await, cluster.leader().await);
    let through = statuses(root, &["endpoint", "status", "--cluster", "-w", "json"]).await;
    let direct = cluster.ctl_as_root();
    let bare = statuses(&direct, &["endpoint", "status", "-w", "json"]).await;
    assert_eq!(through.len(), 3, "{through:?}");
    for (i, id) in ids.iter().enumerate() {
        let (ours, theirs) = (&through[&front.of(i)], &bare[&cluster.url(i)]);
        assert_eq!(member_of(ours), *id, "m{i}: {ours}");
        assert_eq!(ours["leader"].as_u64(), Some(ids[leader]));
        for field in ["version", "leader", "raftTerm"] {
            assert_eq!(ours[field], theirs[field], "m{i}: {field}");
        }
    }
    let table = root.ok(&["endpoint", "status", "--cluster", "-w", "table"]).await;
    println!("{}: etcdctl endpoint status --cluster -w table\n{table}", cluster.version());
    for (i, id) in ids.iter().enumerate() {
        let line = table.lines().find(|line| line.contains(&front.of(i))).expect("a line");
        assert!(line.contains(&format!("{id:x}")), "{table}");
    }
    let health = root.run(&["endpoint", "health", "--cluster"]).await;
    assert_eq!(health.code, Some(0), "{health:?}");
    let said = health.stdout + &health.stderr;
    assert!((0..3).all(|i| said.contains(&format!("{} is healthy", front.of(i)))), "{said}");
    let hashes = rows(&root.ok(&["endpoint", "hashkv", "--cluster", "-w", "json"]).await, "HashKV");
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(member_of(&hashes[&front.of(i)]), *id, "m{i}");
    }
    let same: Vec<_> = hashes.values().map(|hash| (&hash["hash"], &hash["compact_revision"])).collect();
    assert!(same.windows(2).all(|pair| pair[0] == pair[1]), "{hashes:?}");
    // Whoever names no member is told of one, the leader.
    let shared = statuses(root, &["endpoint", "status", "-w", "json"]).await;
    assert_eq!(member_of(&shared[&front.url()]), ids[leader]);
}

async fn leadership_moves(cluster: &Cluster, front: &Front, root: &Ctl) {
    let ids = ids(cluster).await;
    let all = root.to((0..3).map(|i| front.of(i)).collect());
    let leader = cluster.leader().await;
    let (next, last) = ((leader + 1) % 3, (leader + 2) % 3);
    let said = all.ok(&["move-leader", &format!("{:x}", ids[next])]).await;
    assert!(said.contains("Leadership transferred"), "{said}");
    assert_eq!(cluster.leader().await, next, "it leads that was named");
    // Through the address that is everybody's, too: it is steered to whoever leads, once that member is ready. A probe
    // during the transfer may have found it without a leader.
    let id = format!("{:x}", ids[next]);
    let leads = async || {
        let gauge = async |name| front.keyward.metric(name, &[("member", &id)]).await;
        let is_ready_leader =
            gauge("keyward_member_leader").await == 1.0 && gauge("keyward_member_ready").await == 1.0;
        is_ready_leader.then_some(())
    };
    wait::until(LIMIT, "the new leader is ready for calls", leads).await;
    root.ok(&["move-leader", &format!("{:x}", ids[last])]).await;
    assert_eq!(cluster.leader().await, last);
    // Of a follower's own address etcdctl finds no leader, as directly.
    let follower = root.to(vec![front.of(next)]).run(&["move-leader", &format!("{:x}", ids[next])]).await;
    let direct = cluster.ctl_as_root().to(vec![cluster.url(next)]);
    let direct = direct.run(&["move-leader", &format!("{:x}", ids[next])]).await;
    assert_eq!((follower.code, direct.code), (Some(128), Some(128)), "{follower:?} {direct:?}");
}

/// Snapshot, defragmentation and promotion.
async fn worked_on(cluster: &Cluster, front: &Front, root: &Ctl) {
    let calls = async |method: &str| {
        let mut calls = Vec::new();
        for i in 0..3 {
            calls.push(cluster.counter(i, "grpc_server_started_total", &[("grpc_method", method)]).await);
        }
        calls
    };
    let file = cluster.folder().join("of-m1.db");
    root.to(vec![front.of(1)]).ok(&["snapshot", "save", &file.display().to_string()]).await;
    let size = std::fs::metadata(&file).expect("the snapshot was written").len();
    assert_eq!(size % 512, 32, "etcd's own test of a whole snapshot: data and a sha256");
    assert_eq!(calls("Snapshot").await, [0.0, 1.0, 0.0]);
    let said = root.ok(&["defrag", "--cluster"]).await;
    assert_eq!(said.matches("Finished defragmenting").count(), 3, "{said}");
    assert_eq!(calls("Defragment").await, [1.0, 1.0, 1.0], "each member once");
}

/// clientv3 before 3.4.20 and 3.5.3 takes learners into its endpoints too. Here that is an address of ours, where what a
/// learner would refuse is answered by a voter, and what is about the learner by the learner.
#[tokio::test]
async fn a_learner_has_an_address_too_and_is_promoted() {
    for version in versions() {
        let mut cluster = Cluster::start(&version, three(Tls::Off)).await;
        let front = Front::before(&cluster, 4, "").await;
        let root = front.root(&cluster);
        let learner = cluster.add_learner().await;
        let id = cluster.member_id(learner).await;
        let at = root.to(vec![front.of(learner)]);
        let is_learner = async || {
            let told = at.run(&["endpoint", "status", "-w", "json"]).await;
            // Not yet known here, or not yet listening.
            (told.code == Some(0)).then(|| rows(&told.stdout, "Status").remove(&front.of(learner))).flatten()
        };
        let limit = Duration::from_secs(30);
        let status = wait::until(limit, "the learner's status", is_learner).await;
        assert_eq!((member_of(&status), &status["isLearner"]), (id, &Value::Bool(true)), "{status}");
        let list = root.ok(&["member", "list"]).await;
        let line = list.lines().find(|line| line.contains(&format!("{id:x}"))).expect("it is listed");
        assert!(line.contains(&front.of(learner)) && line.ends_with("true"), "{list}");
        // What a learner refuses.
        at.ok(&["put", "/a/k", "v"]).await;
        assert_eq!(at.ok(&["get", "/a/k", "--print-value-only"]).await, "v\n");
        at.ok(&["lease", "grant", "60"]).await;
        assert_eq!(at.ok(&["member", "list"]).await, list);
        // What is about it is its own to refuse.
        let direct = cluster.ctl_as_root().to(vec![cluster.url(learner)]);
        let refused = at.run(&["endpoint", "hashkv"]).await;
        assert!(
            refused.stderr.contains("rpc not supported for learner"),
            "{refused:?} {:?}",
            direct.run(&["endpoint", "hashkv"]).await
        );

        let said = root.ok(&["member", "promote", &format!("{id:x}")]).await;
        assert!(said.contains("promoted"), "{said}");
        let list = root.ok(&["member", "list"]).await;
        let line = list.lines().find(|line| line.contains(&format!("{id:x}"))).expect("it is listed");
        assert!(line.contains(&front.of(learner)) && line.ends_with("false"), "{list}");
        println!("{version}: a learner behind its own address: status its own, calls served, promoted");
    }
}
