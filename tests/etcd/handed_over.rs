//! Must show 6 of the operators' issue: a new process takes the listening sockets of the one that serves, again and again, under load.
//! No connection is refused or cut before it was served, no event is lost or doubled, no read fails; and a start that fails changes
//! nothing.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::harness::binary::{self, Version};
use crate::harness::client::{Client, lifetime};
use crate::harness::keyward::{Keyward, Site, program};
use crate::harness::{Auth, Cluster, Options, PeerTls, Tls, newest, wait};
use crate::rolling::{CLIENTS, judge};

/// The preface of HTTP/2, and an empty SETTINGS frame.
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
/// Between two new connections.
const PAUSE: Duration = Duration::from_millis(5);
/// For an answer to a new connection; only a connection that nobody serves takes so long.
const ANSWER: Duration = Duration::from_secs(20);
/// For what a process does after a signal.
const LIMIT: Duration = Duration::from_secs(30);
/// Between two hand-overs.
const QUIET: Duration = Duration::from_millis(500);

/// Opens connection after connection, and counts those that were served and those that were not.
#[derive(Default)]
struct Knocker {
    served: Cell<u32>,
    unserved: Cell<u32>,
}

impl Knocker {
    /// Never ends.
    async fn run(&self, site: std::net::SocketAddr) {
        loop {
            let count = match timeout(ANSWER, hello(site)).await {
                Ok(Ok(())) => &self.served,
                failed => {
                    println!("a connection was not served: {failed:?}");
                    &self.unserved
                }
            };
            count.set(count.get() + 1);
            sleep(PAUSE).await;
        }
    }
}

/// A connection whose server says hello, as HTTP/2 servers do first.
async fn hello(to: std::net::SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(to).await?;
    stream.write_all(HELLO).await?;
    let mut frame = [0; 9];
    stream.read_exact(&mut frame).await?;
    assert_eq!(frame[3], 4, "a SETTINGS frame");
    Ok(())
}

/// What a Keyward has that one process alone may have, or that is looked at before it serves.
#[derive(Clone, Copy, Debug, Default)]
struct Has {
    mint: bool,
    audit: bool,
}

impl Has {
    fn options(self) -> Options {
        let (auth, usual) = (Auth::On { extra_users: 0 }, Options { members: 3, ..Options::default() });
        if !self.mint {
            return Options { auth, ..usual };
        }
        Options { auth, tls: Tls::Mutual, peer_tls: PeerTls::Own, ..usual }
    }

    fn tables(self, site: &Site, cluster: &Cluster) -> String {
        let mut tables = String::new();
        if self.audit {
            let key = site.file("audit.key");
            let made = Command::new(program()).args(["audit", "keygen"]).arg(&key).output().expect("it runs");
            assert!(made.status.success());
            tables += &format!("[audit]\nfile = {:?}\nsigning_key_file = {key:?}\n", site.file("audit.log"));
        }
        if self.mint {
            let pair = cluster.pki().mint();
            tables += &format!(
                "[[user]]\nname = \"*\"\nmint = true\n[mint]\nca = {:?}\nkey = {:?}\n",
                pair.cert, pair.key
            );
        }
        tables
    }

    /// The chain of all processes is whole, and has each change that was acknowledged.
    fn judge_audit(self, site: &Site, rounds: usize, acknowledged: u64) {
        if !self.audit {
            return;
        }
        let (log, public) = (site.file("audit.log"), site.file("audit.key.pub"));
        let verified =
            Command::new(program()).args(["audit", "verify", "--public-key"]).args([&public, &log]).output();
        let verified = verified.expect("it runs");
        let said = String::from_utf8_lossy(&[verified.stdout, verified.stderr].concat()).into_owned();
        assert_eq!(verified.status.code(), Some(0), "{said}");
        let text = std::fs::read_to_string(&log).expect("the log");
        let records = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let (mut changes, mut puts, mut events) = (0, HashSet::new(), HashMap::new());
        for record in records {
            let event = record["event"].as_str().expect("an event").to_owned();
            if event == "change" && record["code"] == "OK" {
                changes += 1;
                // Each Put has a revision of its own.
                let is_put = record["method"] == "/etcdserverpb.KV/Put";
                assert!(!is_put || puts.insert(record["revision"].as_u64()), "twice: {record}");
            }
            *events.entry(event).or_insert(0_usize) += 1;
        }
        println!("{said}; acknowledged {acknowledged}, records of changes {changes}, by event {events:?}");
        assert_eq!((events["start"], events["succession"], events["stop"]), (rounds + 1, rounds, 1));
        assert!(acknowledged > 0 && changes >= acknowledged && !puts.is_empty());
        assert!(!events.contains_key("lost"));
    }
}

/// The configuration of a Keyward that can be succeeded.
fn configured(site: &Site, cluster: &Cluster) -> String {
    let key = site.write("session.key", &"0123456789abcdef".repeat(4));
    format!(
        "{}session.key_files = [{key:?}]\nadmin.socket = {:?}\ndrain.wait = \"1h\"\ndrain.timeout = \"2s\"\n",
        site.in_front_of(cluster),
        site.file("admin.sock"),
    )
}

async fn handed_over(version: &Version, rounds: usize, has: Has) {
    let cluster = Cluster::start(version, has.options()).await;
    let site = Site::new();
    let config = configured(&site, &cluster) + &has.tables(&site, &cluster);
    let mut keyward = Keyward::start(site, &config).await;
    let addresses = [keyward.site().listen.to_string()];
    // Clients have no certificate for the members: another Keyward tells what there is.
    let beside = Site::new();
    let beside_config = beside.in_front_of(&cluster);
    let beside = Keyward::start(beside, &beside_config).await;
    let truth = beside.site().listen.to_string();
    let mut loads = Vec::new();
    for client in CLIENTS {
        let prefix = format!("/a/{client}/");
        let args = ["--length", "1h", "--history", &truth, "--prefix", &prefix];
        loads.push(Client::start(client, "load", "alice", &addresses, &args));
    }
    for load in &loads {
        load.says("ready").await;
    }
    let (knocker, listen) = (Knocker::default(), keyward.site().listen);
    let succeed = async {
        for round in 1..=rounds {
            let before = keyward.id();
            // The last one ends by a signal.
            let config = if round == rounds { config.replace("1h", "0s") } else { config.clone() };
            let (ended, next) = keyward.succeeded(&config).await;
            assert_eq!(ended.code(), Some(0), "the process before drains and ends well");
            assert_ne!(next.id(), before);
            keyward = next;
            lifetime(QUIET).await;
        }
        keyward
    };
    let keyward = tokio::select! {
        last = succeed => last,
        () = knocker.run(listen) => unreachable!("it knocks for ever"),
    };
    loads.iter().for_each(Client::finish);
    let mut acknowledged = 0;
    for (client, load) in CLIENTS.iter().zip(loads) {
        let record = load.record().await;
        judge(version, client, &record);
        acknowledged += record.summed("acknowledged");
    }
    let (served, unserved) = (knocker.served.get(), knocker.unserved.get());
    println!("{version}, {has:?}: {rounds} hand-overs, {served} new connections served, {unserved} not");
    assert_eq!(unserved, 0);
    assert!(served > 10, "{served}");
    let (status, site) = keyward.terminate().await;
    assert_eq!(status.code(), Some(0));
    has.judge_audit(&site, rounds, acknowledged.unsigned_abs());
}

#[tokio::test]
async fn no_connection_is_refused_and_no_event_lost_while_processes_succeed_each_other() {
    let rounds = if binary::full() { 100 } else { 3 };
    handed_over(&newest("3.5"), rounds, Has::default()).await;
}

/// `[mint]`: readiness waits for the look at the members' peer URLs. `audit.file`: one process at a time writes it.
#[tokio::test]
async fn a_process_that_mints_and_one_with_an_audit_file_hand_over_too() {
    let (rounds, all) = if binary::full() { (20, 3) } else { (3, 1) };
    let [both, audit, mint] = [(true, true), (false, true), (true, false)];
    for (mint, audit) in [both, audit, mint].into_iter().take(all) {
        handed_over(&newest("3.5"), rounds, Has { mint, audit }).await;
    }
}

#[tokio::test]
async fn a_successor_that_cannot_serve_changes_nothing_and_without_a_predecessor_it_just_starts() {
    let cluster = Cluster::start(&newest("3.6"), Options::default()).await;
    let site = Site::new();
    let config = configured(&site, &cluster).replace("1h", "0s");
    let keyward = Keyward::start_taking_over(site, &config).await;
    keyward.logged("an ordinary start", |line| line.contains("an ordinary start")).await;
    let before = keyward.id();
    // A listener that somebody else has.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound");
    let further = format!("{{ name = \"further\", address = \"{address}\" }}, {{ name = \"main\"");
    let other = config.replace("{ name = \"main\"", &further);
    let (status, log) = keyward.not_succeeded("taken.toml", &other).await;
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("cannot listen on"), "{log}");
    let (status, log) = keyward.not_succeeded("faulty.toml", "nonsense = 1\n").await;
    assert_eq!(status.code(), Some(64), "{log}");
    hello(keyward.site().listen).await.expect("it serves as before");
    assert_eq!(keyward.admin("/readyz").await.0, 200);
    let (ended, next) = keyward.succeeded(&config).await;
    assert_eq!(ended.code(), Some(0));
    assert_ne!(next.id(), before);
    hello(next.site().listen).await.expect("its successor serves");
    let (status, site) = next.terminate().await;
    assert_eq!(status.code(), Some(0));
    assert!(hello(site.listen).await.is_err(), "no copy of the socket is left behind");
}

/// A listener that the successor does not have closes as at a reload: whoever has connected is served, and its file goes.
#[tokio::test]
async fn a_listener_that_the_successor_does_not_have_resets_nobody() {
    let cluster = Cluster::start(&newest("3.6"), Options::default()).await;
    let site = Site::new();
    let path = site.file("further.sock");
    let without = configured(&site, &cluster).replace("1h", "0s");
    let further =
        format!("{{ name = \"further\", address = \"unix:{}\" }}, {{ name = \"main\"", path.display());
    let with = without.replace("{ name = \"main\"", &further);
    let mut keyward = Keyward::start(site, &with).await;
    let mut served = 0;
    for _ in 0..3 {
        let loops = (0..6).map(|_| connected_until_refused(&path));
        let (mut counts, (ended, next)) =
            futures_util::future::join(futures_util::future::join_all(loops), keyward.succeeded(&without))
                .await;
        assert_eq!(ended.code(), Some(0));
        served += counts.drain(..).sum::<u32>();
        assert!(!path.exists(), "the socket's file goes with its listener");
        let (_, again) = next.succeeded(&with).await;
        keyward = again;
    }
    println!("{served} connections served");
    assert!(served > 30);
}

/// Connects again and again until nobody listens. Every connection is served.
async fn connected_until_refused(path: &std::path::Path) -> u32 {
    let mut served = 0;
    while let Ok(mut stream) = tokio::net::UnixStream::connect(path).await {
        stream.write_all(HELLO).await.expect("a connection takes bytes");
        let mut frame = [0; 9];
        stream.read_exact(&mut frame).await.expect("whoever has connected is served");
        served += 1;
    }
    served
}

/// Ends a process that is no child of ours, when dropped too.
struct Adopted(rustix::process::Pid);

impl Adopted {
    fn signal(&self, signal: Signal) {
        kill_process(self.0, signal).ok();
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

#[tokio::test]
async fn at_sigusr2_a_process_starts_its_successor() {
    let cluster = Cluster::start(&newest("3.6"), Options::default()).await;
    let site = Site::new();
    let config = configured(&site, &cluster);
    let keyward = Keyward::start(site, &config).await;
    let (id, listen) = (keyward.id(), keyward.site().listen);
    // A successor that fails changes nothing, and another may be started after it.
    keyward.site().write("keyward.toml", "nonsense = 1\n");
    keyward.signal(Signal::USR2);
    let failed = async || keyward.log().contains("the successor has ended").then_some(());
    wait::until(LIMIT, "the failed successor is reported", failed).await;
    keyward.site().write("keyward.toml", &config);
    keyward.signal(Signal::USR2);
    let child = async || {
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok().and_then(rustix::process::Pid::from_raw)
    };
    let successor = Adopted(wait::until(LIMIT, "a successor is started", child).await);
    let (status, site) = keyward.ended().await;
    assert_eq!(status.code(), Some(0), "the process before drains and ends well");
    hello(listen).await.expect("its successor serves");
    drop(successor);
    let gone = async || hello(listen).await.is_err().then_some(());
    wait::until(LIMIT, "the successor is gone", gone).await;
    drop(site);
}
