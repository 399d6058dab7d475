//! Namespaces, shown by real clients: a client in a namespace gets the answers that clientv3's own `namespace` package gives, and the
//! clients of two namespaces of one cluster know nothing of each other, also while a member dies and their tokens expire.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use futures_util::future::join_all;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::chaos::run::keyward_with;
use crate::harness::binary::{self, Version};
use crate::harness::client::{Client, Record, lifetime, lines};
use crate::harness::ctl::Ctl;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::process::Process;
use crate::harness::{Auth, Cluster, Options, newest, password, versions, wait};
use crate::rounds::{FAMILIES, Family};
use crate::steady::{TTL, resumes};

/// A clientv3 whose package has all that it has today.
const CLIENT: &str = "3.6.16";
/// The client of the load, and of the recipes.
const OLDER: &str = "3.5.11";
const LIMIT: Duration = Duration::from_secs(120);

fn options() -> Options {
    let auth = Auth::On { extra_users: 1 };
    Options { members: 3, auth, token_ttl: Some(TTL), ..Options::default() }
}

/// Writes the policy beside the configuration, and returns the line that names it.
fn policy(site: &Site, bindings: &str) -> String {
    site.write("policy.toml", bindings);
    "policy.file = \"policy.toml\"\n".to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Random requests through Keyward, beside clientv3's own package at a member, with prefixes of every kind of end.
#[tokio::test]
async fn answers_are_those_of_clientv3s_own_namespaces() {
    let (seeds, steps) = if binary::full() { (12, "1500") } else { (2, "300") };
    let prefixes: [(&str, &[u8], &[u8]); 3] = [
        ("/a/{user}/", b"/a/alice/", b"/a/ref/"),
        ("/a/{user}/\\xff", b"/a/alice/\xff", b"/a/ref/\xff\xff"),
        ("/a/{user}\\x00\\xff\\xff", b"/a/alice\0\xff\xff", b"/a/ref\0"),
    ];
    for version in versions() {
        let cluster = Cluster::start(&version, Options { members: 1, ..options() }).await;
        let member = cluster.address(0).to_string();
        for (at, (template, own, reference)) in prefixes.into_iter().enumerate() {
            let site = Site::new();
            let binding = format!("[[binding]]\npeer = 'password:alice'\nnamespace = '{template}'\n");
            let config = site.in_front_of(&cluster) + &policy(&site, &binding);
            let through = [site.listen.to_string()];
            let keyward = Keyward::start(site, &config).await;
            for seed in 0..seeds {
                let seed = (100 * at + seed).to_string();
                let args = ["--beside", &member, "--own", &hex(own), "--reference", &hex(reference)];
                let args = [&args[..], &["--seed", &seed, "--steps", steps]].concat();
                let record = Client::start(CLIENT, "namespaced", "alice", &through, &args).record().await;
                let mismatches: Vec<_> = record.all("mismatch").take(5).collect();
                assert!(mismatches.is_empty(), "{version} {template} seed {seed}: {mismatches:#?}");
                assert_eq!(record.exit.code(), Some(0), "{version}: {}", record.tail());
                assert!(
                    record.summed("ops") > 300 && record.summed("events") > 50,
                    "{}",
                    record.the("summary")
                );
                println!("{version} {template} seed {seed}: {}", record.the("summary"));
                // The next seed begins with nothing.
                cluster.ctl_as_root().ok(&["del", "/a/", "--prefix"]).await;
            }
            drop(keyward);
        }
    }
}

/// One of the two namespaces.
#[derive(Clone, Copy, Debug)]
struct Tenant {
    user: &'static str,
    namespace: &'static str,
}

const TENANTS: [Tenant; 2] =
    [Tenant { user: "alice", namespace: "/a/one/" }, Tenant { user: "u00", namespace: "/u/two/" }];

/// A `rounds` program of a tenant. Its keys have the same names in every namespace.
struct Rounds {
    tenant: Tenant,
    family: &'static Family,
    process: Process,
    _folder: TempDir,
}

impl Rounds {
    async fn start(
        family: &'static Family,
        program: PathBuf,
        tenant: Tenant,
        front: SocketAddr,
        ca: &str,
    ) -> Rounds {
        let folder = tempfile::Builder::new().prefix("rounds-").tempdir().expect("a temporary folder");
        let secret = folder.path().join("password");
        std::fs::write(&secret, password(tenant.user)).expect("a file can be written");
        let (secret, front, prefix) =
            (secret.display().to_string(), front.to_string(), Rounds::prefix(family));
        let mut args = vec!["rounds", "--endpoints", &front, "--prefix", &prefix];
        args.extend(["--user", tenant.user, "--password-file", &secret]);
        if family.tls {
            args.extend(["--cacert", ca]);
        }
        let process = Process::start(family.name, &program, args.iter(), &[], &folder.path().join("record"));
        let rounds = Rounds { tenant, family, process, _folder: folder };
        let ready = |output: &str, exit: Option<ExitStatus>| {
            assert!(exit.is_none(), "{} ended: {}", family.name, rounds.process.tail());
            lines(output).iter().any(|line| line["kind"] == "ready").then_some(())
        };
        rounds.process.wrote_or_ended(LIMIT, "that it is ready", ready).await;
        rounds
    }

    fn prefix(family: &Family) -> String {
        format!("/{}/", family.name.replace(' ', "-"))
    }

    /// Does one thing of each kind. The watched value is written straight to the cluster, at its real key.
    async fn round(&self, root: &Ctl, number: u32) {
        let key = format!("{}{}watched", self.tenant.namespace, Rounds::prefix(self.family));
        let value = number.to_string();
        let written = async || (root.run(&["put", &key, &value]).await.code == Some(0)).then_some(());
        wait::until(LIMIT, "the watched value is written", written).await;
        self.process.signal(Signal::USR2);
        let done = |output: &str, exit: Option<ExitStatus>| {
            assert!(exit.is_none(), "{} ended: {}", self.family.name, self.process.tail());
            let lines = lines(output);
            lines.iter().any(|line| line["kind"] == "round" && line["round"] == number).then_some(lines)
        };
        let lines = self.process.wrote_or_ended(LIMIT, "the end of a round", done).await;
        let did: Vec<_> =
            lines.iter().filter(|line| line["kind"] == "did" && line["round"] == number).collect();
        assert_eq!(did.len(), 6, "{} in {}: {did:?}", self.family.name, self.tenant.namespace);
        for did in did {
            assert_eq!(did["code"], "OK", "{} in {}: {did}", self.family.name, self.tenant.namespace);
        }
    }
}

/// Nothing lost, doubled, reordered or of somebody else, by the history at a member.
fn held(tenant: Tenant, record: &Record) {
    assert_eq!(record.exit.code(), Some(0), "{tenant:?}: {}", record.tail());
    let verify = record.the("verify");
    assert_eq!(verify["by_kind"], Value::Object(serde_json::Map::new()), "{tenant:?}: {verify}");
    assert!(verify["history"].as_i64().is_some_and(|events| events > 0), "no history: {verify}");
    for nothing in ["violations", "watches_closed", "watchers_behind", "leases_lost", "stale_reads"] {
        assert_eq!(record.summed(nothing), 0, "{tenant:?} {nothing}: {}", record.the("summary"));
    }
    assert!(
        record.summed("acknowledged") > 0 && record.summed("watchers") > 0,
        "{tenant:?}: nothing was done"
    );
}

/// Everything that etcdctl shows in a namespace, run in both with the same names and other values.
async fn etcdctl(ctl: &Ctl, other: &str) {
    let own = &ctl.ok(&["get", "/ctl/who", "--print-value-only"]).await;
    assert_ne!(own.trim(), other, "the other's value");
    // Other clients of the namespace write meanwhile, so two listings may differ.
    for whole in ["--prefix", "--from-key"] {
        let all = ctl.ok(&["get", "", whole, "--keys-only"]).await;
        let foreign = ["/a/one", "/u/two"].iter().any(|other| all.contains(other));
        assert!(all.contains("/ctl/who") && !foreign, "{whole}: {all}");
    }
    let txn = "value(\"/ctl/who\") = \"nobody\"\n\nput /ctl/t yes\n\nput /ctl/t no\nget /ctl/who\n\n";
    let txn = ctl.run_with(&["txn"], txn).await;
    assert!(txn.stdout.contains("FAILURE") && txn.stdout.contains("/ctl/who"), "{txn:?}");
    assert_eq!(ctl.ok(&["del", "/ctl/t"]).await, "1\n");
    let granted = ctl.ok(&["lease", "grant", "60"]).await;
    let lease = granted.split_whitespace().nth(1).expect("lease ID granted").to_owned();
    ctl.ok(&["put", "/ctl/leased", "v", "--lease", &lease]).await;
    assert!(ctl.ok(&["lease", "timetolive", &lease, "--keys"]).await.contains("[/ctl/leased]"));
    // etcd itself lists leases only to a user that may read the keys of all, and the other has leases with keys.
    let listed = ctl.run(&["lease", "list"]).await;
    assert!(listed.stdout.contains(&lease) || listed.stderr.contains("permission denied"), "{listed:?}");
    ctl.ok(&["lease", "revoke", &lease]).await;
    assert_eq!(ctl.ok(&["get", "/ctl/leased"]).await, "");
    for refused in [&["compaction", "2"][..], &["snapshot", "save", "/dev/null"], &["user", "list"]] {
        let refused = ctl.run(refused).await;
        assert!(refused.stderr.contains("permission denied"), "{refused:?}");
    }
    let empty = ctl.run(&["put", "", "v"]).await;
    assert!(empty.stderr.contains("etcdserver: key is not provided"), "{empty:?}");
}

/// All clients of a tenant: what they do until their end.
fn recipes(tenant: Tenant, through: &[String]) -> Vec<(&'static str, Client)> {
    let start = |scenario: &'static str, version, args: &[&str]| {
        let prefix = format!("/r/{scenario}/");
        let args = [args, &["--prefix", &prefix]].concat();
        (scenario, Client::start(version, scenario, tenant.user, through, &args))
    };
    let queue = ["--gap", "4s", "--items", "20", "--over", "12s"];
    vec![
        start("queue", OLDER, &queue),
        start("priority-queue", CLIENT, &queue),
        start("mutex", OLDER, &["--age", "4s", "--hold", "10s"]),
        start("election", CLIENT, &["--age", "4s", "--hold", "10s"]),
    ]
}

fn ended_well(tenant: Tenant, scenario: &str, record: &Record) {
    assert_eq!(record.exit.code(), Some(0), "{tenant:?} {scenario}: {}", record.tail());
    let summary = record.the("summary");
    if scenario.contains("queue") {
        // An item that was being written when the leader died may be there or not, and its writer was told so;
        // one that was being taken may be gone, and its reader was told so.
        let [delivered, enqueued, ambiguous, untold] =
            ["delivered", "enqueued", "ambiguous", "dequeue_errors"].map(|count| record.summed(count));
        assert_eq!(enqueued + ambiguous, 20, "{tenant:?} {scenario}: {summary}");
        assert!(ambiguous <= 5, "{tenant:?} {scenario}: {summary}");
        assert!((enqueued - untold.min(5)..=20).contains(&delivered), "{tenant:?} {scenario}: {summary}");
        let missing = i64::try_from(record.listed("missing")).expect("small");
        assert!(missing <= untold.min(5), "{tenant:?} {scenario}: {summary}");
        for list in ["doubled", "foreign"] {
            assert_eq!(record.listed(list), 0, "{tenant:?} {scenario}, {list}: {summary}");
        }
    } else {
        assert_eq!(
            (&summary["result"], &summary["early"]),
            (&"ok".into(), &false.into()),
            "{tenant:?} {scenario}: {summary}"
        );
    }
}

/// Every key of the cluster is in one of the namespaces.
async fn nothing_outside(version: &Version, root: &Ctl) {
    let keys = root.ok(&["get", "", "--prefix", "--keys-only"]).await;
    let outside = keys.lines().filter(|key| !key.is_empty());
    let outside: Vec<_> =
        outside.filter(|key| !TENANTS.iter().any(|tenant| key.starts_with(tenant.namespace))).collect();
    assert!(outside.is_empty(), "{version}: keys outside of both namespaces: {outside:?}");
    for tenant in TENANTS {
        assert!(keys.contains(&format!("{}/ctl/who", tenant.namespace)), "{version}: {keys}");
    }
}

/// Watch streams at each member.
async fn watch_streams(cluster: &Cluster, keyward: &Keyward) -> Vec<f64> {
    let mut streams = Vec::new();
    for member in 0..cluster.len() {
        let id = format!("{:x}", cluster.member_id(member).await);
        streams.push(keyward.metric("keyward_member_streams", &[("member", &id), ("kind", "watch")]).await);
    }
    streams
}

/// A member with lasting watches, the leader if it has some; never the member that tells the history, the first.
async fn member_to_kill(cluster: &Cluster, lasting: &[f64]) -> usize {
    let leader = cluster.leader().await;
    let others = (1..cluster.len()).map(|member| (lasting[member] > 0.0, member == leader, member));
    let (has_watches, _, member) = others.max().expect("more than one member");
    assert!(has_watches, "every watch is at the first member");
    member
}

async fn two_namespaces(version: &Version) {
    let families: Vec<_> = FAMILIES
        .iter()
        .filter(|family| {
            ["clientv3 3.6.16", "npm", "python", "aetcd"].iter().any(|name| family.name.starts_with(name))
        })
        .map(|family| (family, family.program()))
        .collect();
    assert_eq!(families.len(), 4);
    let mut cluster = Cluster::start(version, options()).await;
    let binding = |tenant: Tenant| {
        format!("[[binding]]\npeer = 'password:{}'\nnamespace = '{}'\n", tenant.user, tenant.namespace)
    };
    let file = cluster.folder().join("policy.toml");
    std::fs::write(&file, TENANTS.map(binding).concat()).expect("the policy can be written");
    let line = format!("policy.file = {file:?}\n");
    let (keyward, doors) = keyward_with(&cluster, "", &line).await;
    let through = [doors.plain.to_string()];
    let (ca, truth) = (cluster.pki().ca.display().to_string(), cluster.address(0).to_string());
    let root = cluster.ctl_as_root();

    let loads = TENANTS.map(|tenant| {
        let args =
            ["--history", &truth, "--namespace", tenant.namespace, "--prefix", "/load/", "--length", "10m"];
        Client::start(OLDER, "load", tenant.user, &through, &args)
    });
    for load in &loads {
        load.says("ready").await;
    }
    let starts = TENANTS.iter().flat_map(|tenant| families.iter().map(move |family| (*tenant, family)));
    let starts = starts.map(|(tenant, (family, program))| {
        let front = if family.tls { doors.tls } else { doors.plain };
        Rounds::start(family, program.clone(), tenant, front, &ca)
    });
    let rounds = join_all(starts).await;
    // No other watch is open yet: each of these is at its member until that is killed, or is resumed elsewhere before.
    let lasting = watch_streams(&cluster, &keyward).await;
    join_all(rounds.iter().map(|one| one.round(&root, 1))).await;
    let recipes = TENANTS.map(|tenant| (tenant, recipes(tenant, &through)));
    let ctls = TENANTS.map(|tenant| cluster.ctl().as_user(tenant.user).to(vec![keyward.url()]));
    for (tenant, ctl) in TENANTS.iter().zip(&ctls) {
        ctl.ok(&["put", "/ctl/who", tenant.user]).await;
    }

    // A Lock's own write that is under way when the leader dies may end with an unknown outcome: the waiting clients are in line before.
    let waiting = recipes.iter().flat_map(|(_, recipes)| recipes);
    for (_, client) in waiting.filter(|(scenario, _)| !scenario.contains("queue")) {
        client.says("wait_called").await;
    }
    lifetime(Duration::from_secs(u64::from(TTL) + 1)).await;
    let killed = member_to_kill(&cluster, &lasting).await;
    cluster.kill(killed);
    cluster.leader().await;
    join_all(rounds.iter().map(|one| one.round(&root, 2))).await;
    etcdctl(&ctls[0], TENANTS[1].user).await;
    etcdctl(&ctls[1], TENANTS[0].user).await;
    cluster.restart(killed).await;
    for (tenant, recipes) in recipes {
        for (scenario, client) in recipes {
            ended_well(tenant, scenario, &client.record().await);
        }
    }
    join_all(rounds.iter().map(|one| one.round(&root, 3))).await;
    loads.iter().for_each(Client::finish);
    for (tenant, load) in TENANTS.into_iter().zip(loads) {
        let record = load.record().await;
        held(tenant, &record);
        println!("{version} {tenant:?}: {}", record.the("summary"));
    }
    let resumed = resumes(&keyward).await;
    assert!(resumed[0] > 0.0, "{version}: no watch was at the killed member");
    nothing_outside(version, &root).await;
}

#[test]
fn clients_of_two_namespaces_know_nothing_of_each_other() {
    crate::rewatch::local(async {
        let versions = if binary::full() { versions() } else { vec![newest("3.6")] };
        for version in versions {
            two_namespaces(&version).await;
        }
    });
}
