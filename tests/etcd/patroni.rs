//! Must show 2 of the JSON face: Patroni on a real PostgreSQL keeps exactly one primary, and fails over only where it must, through two
//! replicas of Keyward: over the loss of the primary, of each member of etcd and of each replica. The same directly, beside it.
//!
//! The configuration is that of `docs/patroni.md`: who changes one changes the other.

mod database_nodes;
mod role_samples;

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use crate::harness::binary::{Version, full};
use crate::harness::client::lifetime;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, Tls, evidence, key_history, newest, page, password, versions};
use crate::steady::unix_ms;

use database_nodes::{DatabaseNodes, PatroniTiming, SCOPE, seen};
use role_samples::{RoleSamples, ToldBy};

const PAGE: &str = include_str!("../../docs/patroni.md");
const TTL: u32 = 5;
/// What is written between two phases: etcd's own order tells what happened in which.
const MARK: &str = "/marks";

/// How long a run is.
#[derive(Clone, Copy)]
struct Length {
    patroni: PatroniTiming,
    /// How long a member or a replica is away, and how long after that nothing happens.
    away: Duration,
    quiet: Duration,
    /// The faults are repeated until so much time has passed.
    at_least: Duration,
    /// Whether each replica and each member is lost in turn, or the first replica alone.
    all: bool,
}

/// Patroni's own defaults, and longer than `ttl` in each state.
const LONG: Length = Length {
    patroni: PatroniTiming { ttl: 30, loop_wait: 10, retry_timeout: 10 },
    away: Duration::from_secs(40),
    quiet: Duration::from_secs(10),
    at_least: Duration::from_secs(600),
    all: true,
};
/// The least that Patroni takes as its `ttl`.
const SHORT: Length = Length {
    patroni: PatroniTiming { ttl: 20, loop_wait: 2, retry_timeout: 9 },
    away: Duration::from_secs(8),
    quiet: Duration::from_secs(2),
    at_least: Duration::ZERO,
    all: false,
};

/// What is done in a span of time.
struct Phase {
    name: String,
    /// Whether Patroni has to make another node the primary.
    new_primary: bool,
    begun: i64,
}

/// What happened in it.
#[derive(Debug, Default)]
struct Outcome {
    lost: usize,
    holders: usize,
    two_primaries: usize,
    without_primary: i64,
}

/// Two replicas of Keyward in front of a cluster; none where Patroni goes to etcd itself.
struct Scene {
    label: &'static str,
    length: Length,
    cluster: Cluster,
    replicas: Vec<Option<Keyward>>,
    configs: Vec<String>,
    /// Before the nodes, in whose folder its record is.
    roles: RoleSamples,
    nodes: DatabaseNodes,
    phases: Vec<Phase>,
}

impl Scene {
    async fn through_keyward(version: &Version, length: Length) -> Scene {
        let cluster = cluster(version).await;
        let sites = [Site::new(), Site::new()];
        let urls: Vec<String> = sites.iter().map(|site| format!("https://{}", site.listen)).collect();
        let (mut replicas, mut configs) = (Vec::new(), Vec::new());
        for site in sites {
            let config = keyward_config(&cluster, &site, &urls);
            replicas.push(Some(Keyward::start(site, &config).await));
            configs.push(config);
        }
        let hosts: Vec<&str> = urls.iter().map(|url| url.trim_start_matches("https://")).collect();
        let places = [
            ("[\"keyward-1.example.com:2379\", \"keyward-2.example.com:2379\"]", format!("{hosts:?}")),
            ("/etc/patroni/keyward-ca.crt", cluster.pki().ca.display().to_string()),
            ("PATRONI-PASSWORD", password("patroni")),
        ];
        let etcd3 = page::placed(&page::blocks(PAGE, "yaml")[1], &places);
        Scene::begin("through Keyward", length, cluster, &etcd3, (replicas, configs))
    }

    async fn directly(version: &Version, length: Length) -> Scene {
        let cluster = cluster(version).await;
        let hosts: Vec<String> = (0..3).map(|i| cluster.address(i).to_string()).collect();
        let written =
            "[\"etcd-1.example.com:2379\", \"etcd-2.example.com:2379\", \"etcd-3.example.com:2379\"]";
        let places = [
            (written, format!("{hosts:?}")),
            ("/etc/patroni/etcd-ca.crt", cluster.pki().ca.display().to_string()),
            ("PATRONI-PASSWORD", password("patroni")),
        ];
        let etcd3 = page::placed(&page::blocks(PAGE, "yaml")[0], &places);
        Scene::begin("directly", length, cluster, &etcd3, Default::default())
    }

    fn begin(
        label: &'static str,
        length: Length,
        cluster: Cluster,
        etcd3: &str,
        (replicas, configs): (Vec<Option<Keyward>>, Vec<String>),
    ) -> Scene {
        let nodes = DatabaseNodes::start(label, etcd3, length.patroni);
        let (program, args) = nodes.observer();
        let roles = RoleSamples::start(&program, &args, nodes.folder());
        Scene { label, length, cluster, replicas, configs, nodes, roles, phases: Vec::new() }
    }

    async fn run(&mut self) {
        let begun = Instant::now();
        self.phase("bootstrap", true).await;
        self.all_follow().await;
        while {
            self.round().await;
            begun.elapsed() < self.length.at_least
        } {}
        println!("{}: {:?}", self.label, begun.elapsed());
    }

    async fn round(&mut self) {
        self.primary_is_killed().await;
        self.primary_is_switched().await;
        let (replicas, members) =
            if self.length.all { (self.replicas.len(), self.cluster.len()) } else { (1, 0) };
        for replica in 0..replicas.min(self.replicas.len()) {
            self.replica_is_lost(replica).await;
        }
        for member in 0..members {
            self.member_is_lost(member).await;
        }
    }

    async fn phase(&mut self, name: &str, new_primary: bool) {
        let name = format!("{}. {name}", self.phases.len());
        key_history::write(&self.cluster, MARK, &name).await;
        println!("{}: {name}", self.label);
        self.phases.push(Phase { name, new_primary, begun: unix_ms() });
    }

    /// Nothing happens for a moment, in a phase of its own.
    async fn quiet(&mut self) {
        self.phase("quiet", false).await;
        lifetime(self.length.quiet).await;
    }

    fn primary(&self) -> String {
        self.roles.primary().expect("one node is the primary")
    }

    async fn all_follow(&self) {
        let names = self.nodes.names();
        let look = async || {
            let primary = self.roles.primary();
            primary
                .is_some_and(|primary| names.iter().all(|name| *name == primary || self.roles.follows(name)))
        };
        seen("one node is the primary, and all others follow it", look).await;
    }

    async fn primary_is_killed(&mut self) {
        let old = self.primary();
        self.phase(&format!("{old}, the primary, is killed"), true).await;
        self.nodes.cut_power(&old).await;
        seen("another node is the primary", async || self.roles.primary().is_some_and(|new| new != old))
            .await;
        self.nodes.start_again(&old);
        self.all_follow().await;
        self.quiet().await;
    }

    async fn primary_is_switched(&mut self) {
        let old = self.primary();
        let to = self.nodes.names().into_iter().find(|name| *name != old).expect("there are three");
        self.phase(&format!("switchover from {old} to {to}"), true).await;
        let told = self.nodes.switch_over(&old, &to).await;
        assert!(told.contains("Successfully switched over"), "{told}");
        seen("it is the primary", async || self.roles.primary().as_ref() == Some(&to)).await;
        self.all_follow().await;
        self.quiet().await;
    }

    async fn replica_is_lost(&mut self, replica: usize) {
        self.phase(&format!("Keyward {} is killed", replica + 1), false).await;
        let site = self.replicas[replica].take().expect("it runs").kill();
        lifetime(self.length.away).await;
        self.phase(&format!("Keyward {} starts again", replica + 1), false).await;
        self.replicas[replica] = Some(Keyward::start(site, &self.configs[replica]).await);
        lifetime(self.length.quiet).await;
        self.all_follow().await;
    }

    async fn member_is_lost(&mut self, member: usize) {
        self.phase(&format!("etcd member {member} is killed"), false).await;
        self.cluster.kill(member);
        lifetime(self.length.away).await;
        self.phase(&format!("etcd member {member} starts again"), false).await;
        self.cluster.restart(member).await;
        lifetime(self.length.quiet).await;
        self.all_follow().await;
    }

    /// What happened in each phase.
    async fn outcomes(&self) -> Vec<Outcome> {
        let end = unix_ms();
        let samples = self.roles.all();
        let ends = self.phases.iter().skip(1).map(|phase| phase.begun).chain([end]);
        let mut outcomes: Vec<Outcome> = self
            .phases
            .iter()
            .zip(ends)
            .map(|(phase, end)| {
                let within = role_samples::within(&samples, phase.begun - 1000, end);
                Outcome {
                    two_primaries: [ToldBy::Sql, ToldBy::Rest]
                        .iter()
                        .map(|by| role_samples::two_primaries(&within, *by))
                        .sum(),
                    without_primary: role_samples::longest_without_primary(&within),
                    ..Outcome::default()
                }
            })
            .collect();
        let (mut phase, mut holder) = (0, None);
        for change in key_history::below(&self.cluster, "/").await {
            if change.key == MARK {
                let named = |phase: &Phase| Some(&phase.name) == change.value.as_ref();
                phase = self.phases.iter().position(named).expect("a mark of a phase");
            } else if change.key == format!("/service/{SCOPE}/leader") {
                outcomes[phase].lost += usize::from(change.value.is_none());
                outcomes[phase].holders += usize::from(change.value.is_some() && change.value != holder);
                holder = change.value.or(holder);
            }
        }
        outcomes
    }

    /// Prints what happened, and returns what must not have happened.
    async fn judged(&self) -> Vec<String> {
        let outcomes = self.outcomes().await;
        let samples = self.roles.all().len();
        println!("{}: {samples} answers about roles", self.label);
        println!(
            "| phase | leader key lost | new holder | two primaries | longest without primary |\n|---|---|---|---|---|"
        );
        let mut faults = Vec::new();
        for (phase, outcome) in self.phases.iter().zip(&outcomes) {
            let Outcome { lost, holders, two_primaries, without_primary } = outcome;
            println!("| {} | {lost} | {holders} | {two_primaries} | {without_primary} ms |", phase.name);
            let wanted = usize::from(phase.new_primary);
            if *holders != wanted || *lost > wanted || *two_primaries > 0 {
                faults.push(format!("{}: {}: {outcome:?}", self.label, phase.name));
            }
        }
        assert!(samples > 100, "the observer saw hardly anything");
        let complaints = self.complaints();
        println!("{}: Patroni's errors: {complaints:#?}", self.label);
        faults
    }

    /// How often Patroni wrote each error into its logs.
    fn complaints(&self) -> BTreeMap<String, usize> {
        let mut found = BTreeMap::new();
        for name in self.nodes.names() {
            let text = fs::read_to_string(self.nodes.log(&name)).expect("Patroni writes its log");
            let errors = text.lines().filter_map(|line| line.split_once(" ERROR: "));
            for (_, error) in errors {
                // Without the token that Patroni tells, and without what differs from time to time.
                let error: String =
                    error.split([':', '(']).next().unwrap_or_default().chars().take(60).collect();
                *found.entry(error).or_default() += 1;
            }
            if !self.replicas.is_empty() {
                evidence::log(&format!("patroni {name}"), &self.nodes.log(&name));
            }
        }
        found
    }
}

/// Three members with TLS and auth, and the users of the page.
async fn cluster(version: &Version) -> Cluster {
    let auth = Auth::On { extra_users: 0 };
    let options = Options { members: 3, auth, tls: Tls::Server, token_ttl: Some(TTL), ..Options::default() };
    let flags = vec!["--auth-token=simple".into()];
    let cluster = Cluster::start(version, Options { flags, ..options }).await;
    let places = [("PATRONI-PASSWORD", password("patroni")), ("KEYWARD-PASSWORD", password("keyward"))];
    let commands = page::placed(&page::blocks(PAGE, "sh")[0], &places);
    for command in commands.lines() {
        let words: Vec<&str> = command.split_whitespace().collect();
        assert_eq!(words[0], "etcdctl", "{command}");
        cluster.ctl_as_root().ok(&words[1..]).await;
    }
    cluster
}

/// The page's configuration of Keyward on loopback, with the files that it names.
fn keyward_config(cluster: &Cluster, site: &Site, urls: &[String]) -> String {
    let pair = cluster.pki().server();
    let pems = [("server.crt", &pair.cert), ("server.key", &pair.key), ("etcd-ca.crt", &cluster.pki().ca)];
    for (name, from) in pems {
        site.write(name, &fs::read_to_string(from).expect("it was written"));
    }
    site.write("probe.password", &password("keyward"));
    site.write("session.key", &"0123456789abcdef".repeat(4));
    let places = [
        ("\"0.0.0.0:2379\"", format!("\"{}\"", site.listen)),
        ("[\"https://etcd-1.example.com:2379\"]", format!("{:?}\ntoken_ttl = \"{TTL}s\"", cluster.urls())),
        (
            "[\"https://keyward-1.example.com:2379\", \"https://keyward-2.example.com:2379\"]",
            format!("{urls:?}"),
        ),
    ];
    let placed = page::placed(&page::blocks(PAGE, "toml")[0], &places);
    format!("{placed}[admin]\naddress = \"{}\"\n", site.admin)
}

/// A run through Keyward alone.
async fn short(version: &Version) {
    let mut through = Scene::through_keyward(version, SHORT).await;
    through.run().await;
    assert_eq!(through.judged().await, Vec::<String>::new());
}

#[tokio::test]
async fn patroni_has_one_primary_and_fails_over_only_where_it_must() {
    let version = newest("3.5");
    if !full() {
        return short(&version).await;
    }
    let mut through = Scene::through_keyward(&version, LONG).await;
    let mut directly = Scene::directly(&version, LONG).await;
    tokio::join!(through.run(), directly.run());
    println!("directly, not asserted: {:?}", directly.judged().await);
    assert_eq!(through.judged().await, Vec::<String>::new());
    drop((through, directly));
    for version in versions().iter().filter(|other| **other != version) {
        short(version).await;
    }
}
