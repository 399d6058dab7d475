//! Keyward as `docs/migrate-to-tls.md` has it: two replicas with one session key, and what each stage changes in their files.
//!
//! Owns: the configuration of each stage, which is read from the page, how it is changed, and what operators look at. Must not know
//! the application. Invariant: what changes while they run is what the page says, and in the way that it says.

use std::fs;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::harness::keyward::{Keyward, NOBODY_IN_FILE, Site, program};
use crate::harness::pki::Pki;
use crate::harness::{Cluster, page, password, wait};

const LIMIT: Duration = Duration::from_secs(60);

/// What the configuration says beside what it says from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// Passwords are checked by etcd, and go upstream.
    One,
    /// Users are proved upstream by minted certificates.
    Two,
    /// Passwords are in the users file.
    Three,
    /// Clients may show certificates.
    Four,
}

/// The page; what it has in TOML is what each stage adds.
const PAGE: &str = include_str!("../../../docs/migrate-to-tls.md");

/// The two replicas.
pub(super) struct Front {
    replicas: Vec<Keyward>,
    /// What each of them has from the beginning.
    bases: Vec<String>,
    /// What the later stages add.
    added: Vec<(Stage, String)>,
    /// The authority of clients: another than the one that members trust.
    pub(super) clients: Pki,
}

impl Front {
    /// Starts them as stage 1 has them.
    pub(super) async fn start(cluster: &Cluster) -> Front {
        let clients = Pki::new(&cluster.folder().join("clients-pki"));
        // The page's policy is a file of its own, and no part of the configuration.
        let is_policy = |block: &String| block.starts_with("[[role]]");
        let mut blocks = page::blocks(PAGE, "toml").into_iter().filter(|block| !is_policy(block));
        let base = blocks.next().expect("stage 1 has a configuration");
        let blocks =
            blocks.map(|block| block.replace("key = \"mint.key\"", "key = \"mint.key\"\nlifetime = \"5s\""));
        let stages = [Stage::Two, Stage::Three, Stage::Four];
        let mut front = Front {
            replicas: Vec::new(),
            bases: Vec::new(),
            added: stages.into_iter().zip(blocks).collect(),
            clients,
        };
        assert_eq!(front.added.len(), stages.len(), "each stage adds something");
        for _ in 0..2 {
            let site = Site::new();
            front.files(cluster, &site);
            // The stages of the page are told by access records.
            let base = format!("log.access = \"all\"\n{}", placed(&base, cluster, &site));
            front.replicas.push(Keyward::start(site, &base).await);
            front.bases.push(base);
        }
        front
    }

    /// The files of which the page speaks.
    fn files(&self, cluster: &Cluster, site: &Site) {
        let pki = cluster.pki();
        let pairs = [("server", pki.server()), ("keyward", pki.nobody()), ("mint", pki.mint())];
        let pems = pairs
            .into_iter()
            .flat_map(|(name, pair)| [(format!("{name}.crt"), pair.cert), (format!("{name}.key"), pair.key)]);
        let authorities = [("etcd-ca.crt", &pki.ca), ("clients-ca.crt", &self.clients.ca)];
        let authorities = authorities.map(|(name, path)| (name.to_owned(), path.clone()));
        for (name, from) in pems.chain(authorities) {
            site.write(&name, &fs::read_to_string(from).expect("it was written"));
        }
        site.write("session.key", &"0123456789abcdef".repeat(4));
        site.write("probe.password", &password("keyward"));
        site.write("users", NOBODY_IN_FILE);
    }

    /// Where clients reach the replicas.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.replicas.iter().map(|replica| replica.site().listen).collect()
    }

    fn config(&self, replica: usize, stage: Stage) -> String {
        let added = self.added.iter().filter(|(from, _)| *from <= stage).map(|(_, lines)| &**lines);
        self.bases[replica].clone() + &added.collect::<String>()
    }

    /// Changes the configuration on one replica after the other, and asks each to read it.
    pub(super) async fn becomes(&self, stage: Stage) {
        for (i, replica) in self.replicas.iter().enumerate() {
            read(replica, || replica.reload(&self.config(i, stage))).await;
        }
    }

    /// Changes the users file on one replica after the other, which follows it by itself.
    pub(super) async fn has_users(&self, users: &str) {
        for replica in &self.replicas {
            read(replica, || drop(replica.site().write("users", users))).await;
        }
    }

    /// Waits until every replica calls every member ready.
    pub(super) async fn see_all_ready(&self, members: usize) {
        let members = f64::from(u32::try_from(members).expect("a few"));
        for replica in &self.replicas {
            let ready = async || (replica.metric("keyward_member_ready", &[]).await == members).then_some(());
            wait::until(LIMIT, "all members are ready", ready).await;
        }
    }

    /// The sum over the replicas.
    pub(super) async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let mut sum = 0.0;
        for replica in &self.replicas {
            sum += replica.metric(name, labels).await;
        }
        sum
    }

    /// Access records of calls of `peer`, of this method.
    pub(super) fn records(&self, peer: &str, method: &str) -> usize {
        let of = |line: &&str| line.contains(&format!("peer=\"{peer}\"")) && line.contains(method);
        self.replicas.iter().map(|replica| replica.log().lines().filter(of).count()).sum()
    }

    /// Restarts the second replica with what its files say.
    pub(super) async fn restart(&mut self, stage: Stage) {
        let replica = self.replicas.pop().expect("there are two");
        let (exit, site) = replica.terminate().await;
        assert_eq!(exit.code(), Some(0));
        let config = self.config(1, stage);
        self.replicas.push(Keyward::start(site, &config).await);
    }

    /// Ends them.
    pub(super) async fn end(self) {
        for replica in self.replicas {
            let (exit, _) = replica.terminate().await;
            assert_eq!(exit.code(), Some(0));
        }
    }
}

/// The page's configuration on loopback, where a certificate that is minted lives for seconds, and tokens have to be kept alive.
fn placed(base: &str, cluster: &Cluster, site: &Site) -> String {
    let (listen, urls) = (site.listen, cluster.urls());
    let places = [
        ("\"0.0.0.0:2379\"", format!("\"{listen}\"")),
        ("[\"https://etcd-1.example.com:2379\"]", format!("{urls:?}\ntoken_ttl = \"3s\"")),
        ("https://etcd.example.com:2379", format!("https://{listen}")),
    ];
    let placed = page::placed(base, &places);
    format!("{placed}[admin]\naddress = \"{}\"\n", site.admin)
}

/// Does `change`, and returns when the replica has taken it.
async fn read(replica: &Keyward, change: impl FnOnce()) {
    let count = async |name| replica.metric(name, &[]).await;
    let before = count("keyward_config_reloads_total").await;
    change();
    let taken = async || (count("keyward_config_reloads_total").await > before).then_some(());
    wait::until(LIMIT, "the files are read", taken).await;
    assert_eq!(count("keyward_config_reloads_refused_total").await, 0.0, "{}", replica.log());
}

/// A line of a users file, made as an operator makes it.
pub(super) async fn line(user: &str, password: &str) -> String {
    let mut command = Command::new(program());
    command.arg("hash-password").stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().expect("keyward runs");
    let mut typed = child.stdin.take().expect("it was piped");
    typed.write_all(format!("{password}\n").as_bytes()).await.expect("it reads");
    drop(typed);
    let ended = child.wait_with_output().await.expect("it ends");
    assert!(ended.status.success(), "{ended:?}");
    format!("{user}:{}", String::from_utf8(ended.stdout).expect("a hash is text"))
}
