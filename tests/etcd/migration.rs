//! Must show 1 of identities: one unchanged application, on a clientv3 of 2021 and with its user and password, over the stages of
//! `deploy/migrate-to-tls.md`. The name that is its endpoint leads to etcd, then to Keyward, then back; the flags of etcd change
//! by rolling restarts.
//!
//! Invariants of the judging: a stage counts only when writes were acknowledged in it; what happened is read from etcd itself.

use std::collections::BTreeMap;
use std::time::Instant;

use keyward::tasks::Tasks;
use serde_json::Value;

use crate::harness::binary::{Version, full};
use crate::harness::client::{Client, Record};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, Tls, newest, versions};
use crate::rewatch::local;
use crate::rounds::{Application, Did, FAMILIES, Family};
use crate::steady::{failed, tally, unix_ms};

/// The client of the issue.
const CLIENT: &str = "3.5.1";
const WRITERS: &str = "4";
/// Writes that must be acknowledged in a stage: some seconds of them.
const ACKNOWLEDGED: usize = 60;

/// What is between two stages: its name, and from when to when it took place, by the system's clock in milliseconds.
struct Switch {
    name: &'static str,
    from: i64,
    to: i64,
    /// How many calls that a writer has in flight it may break: connections that it ends, one after the other.
    breaks: usize,
}

/// The application and all that it is led to.
struct Scene {
    cluster: Cluster,
    relay: Relay,
    client: Client,
    switches: Vec<Switch>,
}

impl Scene {
    /// Stage 0: three members, TLS without client certificates, and the application straight on one of them.
    async fn start(version: &Version, tasks: &Tasks) -> Scene {
        let (auth, tls) = (Auth::On { extra_users: 0 }, Tls::Server);
        let cluster =
            Cluster::start(version, Options { members: 3, auth, tls, strangers: true, ..Options::default() })
                .await;
        let relay = Relay::start(tasks).await;
        relay.open(cluster.address(0));
        let (ca, truth) = (cluster.pki().ca.display().to_string(), cluster.address(1).to_string());
        let args =
            ["--writers", WRITERS, "--rate", "80", "--clients", "2", "--watchers", "4", "--leases", "4"];
        let more = ["--length", "30m", "--cacert", &ca, "--history", &truth];
        let client = Client::start(
            CLIENT,
            "load",
            "alice",
            &[relay.address.to_string()],
            &[&args[..], &more].concat(),
        );
        client.says("ready").await;
        let scene = Scene { cluster, relay, client, switches: Vec::new() };
        scene.stage("0, straight to etcd").await;
        scene
    }

    /// Returns when the application has done enough where it is now.
    async fn stage(&self, name: &str) {
        let begun = Instant::now();
        self.client.says_more("put", ACKNOWLEDGED).await;
        self.client.says_more("keepalive", 4).await;
        println!("stage {name}: {ACKNOWLEDGED} more writes in {:?}", begun.elapsed());
    }

    async fn switch(&mut self, name: &'static str, breaks: usize, doing: impl AsyncFnOnce(&mut Scene)) {
        let from = unix_ms();
        doing(self).await;
        let to = unix_ms();
        println!("switch {name}: {} ms", to - from);
        self.switches.push(Switch { name, from, to, breaks });
    }

    /// Ends the application, and judges what it saw.
    async fn judged(self) {
        let Scene { client, switches, .. } = self;
        client.finish();
        let record = client.record().await;
        assert_eq!(record.exit.code(), Some(0), "{}", record.tail());
        println!("{}", record.the("summary"));
        println!("{}", record.the("wire"));
        held(&record);
        only_writes_in_flight_failed(&record, &switches);
    }
}

/// Nothing was lost, doubled, reordered or invented, no watch closed, no lease lost, nothing old was read.
fn held(record: &Record) {
    assert_eq!(
        record.the("verify")["by_kind"],
        Value::Object(serde_json::Map::new()),
        "{}",
        record.the("verify")
    );
    assert!(record.the("verify")["history"].as_i64().is_some_and(|events| events > 0), "no history");
    assert!(record.summed("watchers") > 0 && record.summed("leases") > 0, "nothing was held");
    for nothing in ["violations", "watches_closed", "watchers_behind", "leases_lost", "stale_reads"] {
        assert_eq!(record.summed(nothing), 0, "{nothing}: {}", record.the("summary"));
    }
}

/// No read, watch or keepalive failed. A write failed only as Unavailable, while it was in flight at a switch, and at most once per
/// writer and connection that ended there.
fn only_writes_in_flight_failed(record: &Record, switches: &[Switch]) {
    let all = failed(record);
    println!("errors that the application saw: {:?}", tally(&all));
    let mut at_switch: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for one in all {
        assert_eq!((one.op.as_str(), one.code.as_str()), ("put", "Unavailable"), "{one:?}");
        let switch = switches.iter().find(|switch| one.start <= switch.to && one.end >= switch.from);
        let switch = switch.unwrap_or_else(|| panic!("no switch was near: {one:?}"));
        let count = at_switch.entry((switch.name, one.keys.clone())).or_default();
        *count += 1;
        assert!(*count <= switch.breaks, "{} broke too much: {one:?}", switch.name);
    }
}

/// The library that never logs in twice: it takes part from where it is behind Keyward.
fn python() -> &'static Family {
    FAMILIES.iter().find(|family| family.tls).expect("python etcd3 is among them")
}

async fn all_well(application: &Application, cluster: &Cluster) {
    let did = application.round(cluster).await;
    assert!(did.len() == 6 && did.iter().all(Did::ok), "{}: {did:?}", application.family.name);
}

/// Stages 0 and 1, with etcd's flags changed while clients are behind Keyward, and back.
#[test]
fn an_unchanged_client_goes_to_keyward_and_back_while_etcd_changes_its_flags() {
    local(async {
        let all = if full() { versions() } else { vec![newest("3.5")] };
        for version in all {
            println!("etcd {version}:");
            there_and_back(&version).await;
        }
    });
}

async fn there_and_back(version: &Version) {
    let tasks = Tasks::default();
    let mut scene = Scene::start(version, &tasks).await;
    // With a certificate from the start, which a member without --client-cert-auth does not ask for.
    let (site, pair) = (Site::new(), scene.cluster.pki().server());
    let shown = scene.cluster.pki().nobody();
    let listener = format!(", tls.cert = {:?}, tls.key = {:?}", pair.cert, pair.key);
    let mut config = site.listening(&scene.cluster, &listener);
    config += &format!("cluster.tls.cert = {:?}\ncluster.tls.key = {:?}\n", shown.cert, shown.key);
    let front = site.listen;
    let keyward = Keyward::start(site, &config).await;

    scene.switch("to Keyward", 1, async |scene| scene.relay.turn_all_to(front).await).await;
    scene.stage("1, through Keyward").await;
    let python = Application::start(python(), scene.relay.address, &scene.cluster).await;
    all_well(&python, &scene.cluster).await;

    scene
        .switch("etcd with --client-cert-auth", 3, async |scene| scene.cluster.roll(Tls::Mutual).await)
        .await;
    scene.stage("1, through Keyward, client certificates at etcd").await;
    all_well(&python, &scene.cluster).await;

    scene
        .switch("etcd without --client-cert-auth", 3, async |scene| scene.cluster.roll(Tls::Server).await)
        .await;
    all_well(&python, &scene.cluster).await;
    // Before the stage, so that its connection is not among those that must come anew.
    drop(python);
    scene.stage("1 again").await;

    let straight = scene.cluster.address(0);
    scene.switch("back to etcd", 1, async |scene| scene.relay.turn_all_to(straight).await).await;
    scene.stage("0 again").await;
    drop(keyward);
    scene.judged().await;
}
