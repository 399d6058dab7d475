//! Must show 3 of the JSON face: the access pattern of Apache APISIX, 200 long polls over HTTP/1.1 with tokens that live for five seconds,
//! sees every event once and in order while a member is killed.
//!
//! The requests are those of APISIX's etcd library, see tests/clients/apisix. The configuration is that of `docs/apisix.md`: who changes
//! one changes the other.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use keyward::pb::etcdserverpb::{DeleteRangeRequest, PutRequest};
use serde_json::Value;
use tempfile::TempDir;

use crate::chaos::door::{Door, within};
use crate::harness::binary::{Version, full};
use crate::harness::client_program::client_program;
use crate::harness::key_history::{self, KeyChange};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::process::Process;
use crate::harness::{Auth, Cluster, Options, newest, page, password, versions, wait};

const PAGE: &str = include_str!("../../docs/apisix.md");
const PATHS: usize = 200;
const TTL: u32 = 5;
const LIMIT: Duration = Duration::from_secs(60);
/// How long events may take, where they come.
const SOON: Duration = Duration::from_secs(15);
/// Between two writes.
const PAUSE: Duration = Duration::from_millis(10);

/// The program that makes APISIX's requests.
struct Gateway {
    process: Process,
    _folder: TempDir,
}

/// What the gateway said.
#[derive(Debug, Default)]
struct GatewayRecord {
    listed: BTreeMap<usize, i64>,
    events: BTreeMap<usize, Vec<KeyChange>>,
    failed: BTreeMap<String, usize>,
    logins: usize,
    ended: usize,
}

impl Gateway {
    async fn start(hosts: &[String], watch_timeout: u32) -> Gateway {
        let folder = tempfile::Builder::new().prefix("apisix-").tempdir().expect("a temporary folder");
        let secret = folder.path().join("password");
        fs::write(&secret, password("apisix")).expect("the folder is ours");
        let (secret, hosts) = (secret.display().to_string(), hosts.join(","));
        let (paths, watch_timeout) = (PATHS.to_string(), watch_timeout.to_string());
        let mut args = vec!["--hosts", &hosts, "--user", "apisix", "--password-file", &secret];
        args.extend(["--prefix", "/apisix/", "--paths", &paths, "--watch-timeout", &watch_timeout]);
        let process = Process::start(
            "apisix",
            &client_program("apisix", &[]),
            args,
            &[],
            &folder.path().join("record"),
        );
        process.wrote(LIMIT, "ready", |text| text.contains("\"kind\": \"ready\"").then_some(())).await;
        Gateway { process, _folder: folder }
    }

    fn record(&self) -> GatewayRecord {
        assert!(self.process.exit().is_none(), "it ended: {}", self.process.tail());
        let output = self.process.output();
        let whole = output.rfind('\n').map_or("", |at| &output[..at]);
        let mut record = GatewayRecord::default();
        for line in whole.lines() {
            let line: Value =
                serde_json::from_str(line).unwrap_or_else(|_| panic!("no line of the contract: {line}"));
            record.take(&line);
        }
        record
    }
}

impl GatewayRecord {
    fn take(&mut self, line: &Value) {
        let text = |field: &str| line[field].as_str().unwrap_or_default().to_owned();
        let path = || line["path"].as_u64().and_then(|path| usize::try_from(path).ok()).expect("a path");
        let revision = || line["revision"].as_i64().expect("a revision");
        match line["kind"].as_str().unwrap_or_default() {
            "authenticated" => self.logins += 1,
            "listed" => {
                self.listed.insert(path(), revision());
            }
            "event" => {
                let value = (text("type") == "PUT").then(|| text("value"));
                let change = KeyChange { revision: revision(), key: text("key"), value };
                self.events.entry(path()).or_default().push(change);
            }
            "failed" => *self.failed.entry(text("why")).or_default() += 1,
            "ended" => self.ended += 1,
            "start" | "ready" | "end" => {}
            other => panic!("no kind of the contract: {other}"),
        }
    }

    /// Paths whose events are not exactly those of the ledger, and how many events are missing or too many.
    fn differs(&self, ledger: &BTreeMap<usize, Vec<KeyChange>>) -> (Vec<usize>, usize, usize) {
        let (mut paths, mut missing, mut doubled) = (Vec::new(), 0, 0);
        for path in 0..PATHS {
            let seen = self.events.get(&path).cloned().unwrap_or_default();
            let written = ledger.get(&path).cloned().unwrap_or_default();
            let listed = self.listed.get(&path).copied().unwrap_or_default();
            let wanted: Vec<_> = written.into_iter().filter(|change| change.revision > listed).collect();
            missing += wanted.iter().filter(|change| !seen.contains(change)).count();
            doubled +=
                seen.len().saturating_sub(wanted.iter().filter(|change| seen.contains(change)).count());
            if seen != wanted {
                paths.push(path);
            }
        }
        (paths, missing, doubled)
    }
}

/// Writes straight to a member, in turn to all paths. Now and then a key is deleted.
#[derive(Default)]
struct RouteWriter {
    written: usize,
    /// Nobody knows what became of these; the history does.
    failed: usize,
}

impl RouteWriter {
    /// Writes for this long, and on until every path had two turns, whatever the machine does beside.
    async fn write(&mut self, cluster: &Cluster, member: usize, duration: Duration) {
        let mut door = Door::open(cluster.address(member), "root").await;
        let begun = Instant::now();
        let mut pace = tokio::time::interval(PAUSE);
        while begun.elapsed() < duration || self.written < 2 * PATHS {
            pace.tick().await;
            let key = format!("/apisix/{:04}/route", self.written * 7 % PATHS);
            // Each path has its turn: rounds and tens are not in step.
            let done = if (self.written + self.written / PATHS) % 10 == 9 {
                let delete = DeleteRangeRequest { key: key.into(), ..Default::default() };
                within(door.kv().delete_range(delete)).await.map(drop)
            } else {
                let value = format!("{{\"uri\":\"/{}\"}}", self.written);
                let put = PutRequest { key: key.into(), value: value.into(), ..Default::default() };
                within(door.kv().put(put)).await.map(drop)
            };
            self.written += 1;
            if done.is_err() {
                self.failed += 1;
                door = Door::open(cluster.address(member), "root").await;
            }
        }
    }
}

/// What was written, by path.
async fn ledger(cluster: &Cluster) -> BTreeMap<usize, Vec<KeyChange>> {
    let mut ledger = BTreeMap::<usize, Vec<KeyChange>>::new();
    for change in key_history::below(cluster, "/apisix/").await {
        let path = change.key.split('/').nth(2).and_then(|path| path.parse().ok());
        ledger.entry(path.expect("a key of ours")).or_default().push(change);
    }
    ledger
}

async fn cluster(version: &Version) -> Cluster {
    let auth = Auth::On { extra_users: 0 };
    let cluster =
        Cluster::start(version, Options { members: 3, auth, token_ttl: Some(TTL), ..Options::default() })
            .await;
    let places = [("APISIX-PASSWORD", password("apisix")), ("KEYWARD-PASSWORD", password("keyward"))];
    for command in page::placed(&page::blocks(PAGE, "sh")[0], &places).lines() {
        let words: Vec<&str> = command.split_whitespace().collect();
        assert_eq!(words[0], "etcdctl", "{command}");
        cluster.ctl_as_root().ok(&words[1..]).await;
    }
    cluster
}

/// The hosts that a configuration of the page names, with those that the test has in their place.
fn hosts(block: usize, places: &[(&str, String)]) -> Vec<String> {
    let text = page::placed(&page::blocks(PAGE, "yaml")[block], places);
    let hosts = text.lines().filter_map(|line| line.trim().strip_prefix("- \""));
    hosts.map(|host| host.trim_end_matches('"').to_owned()).collect()
}

/// Writes, kills a member, writes; the difference between what was written and what was seen.
async fn killed(cluster: &mut Cluster, hosts: &[String], label: &str) -> (Vec<usize>, usize, usize) {
    let (before, after) = if full() { (20, 40) } else { (6, 4) };
    let gateway = Gateway::start(hosts, if full() { 10 } else { 4 }).await;
    let mut writer = RouteWriter::default();
    // Longer than a token lives.
    writer.write(cluster, 0, Duration::from_secs(before)).await;
    let leader = cluster.leader().await;
    cluster.kill(if leader == 0 { 1 } else { leader });
    writer.write(cluster, 0, Duration::from_secs(after)).await;
    let ledger = ledger(cluster).await;
    let all_seen = async || gateway.record().differs(&ledger).0.is_empty().then_some(());
    wait::within_limit(SOON, all_seen).await;
    let record = gateway.record();
    let (paths, missing, doubled) = record.differs(&ledger);
    println!(
        "{} {label}: {} writes ({} failed), {} logins, {} paths differ, {missing} events lost, {doubled} doubled; ended {}, failed {:?}",
        cluster.version(),
        writer.written,
        writer.failed,
        record.logins,
        paths.len(),
        record.ended,
        record.failed
    );
    assert_eq!(ledger.len(), PATHS, "each path was written");
    assert_eq!(record.listed.len(), PATHS);
    (paths, missing, doubled)
}

async fn directly(version: &Version) {
    let mut cluster = cluster(version).await;
    let places: Vec<_> = (0..3).map(|i| format!("http://etcd-{}.example.com:2379", i + 1)).collect();
    let places: Vec<_> = places.iter().enumerate().map(|(i, name)| (name.as_str(), cluster.url(i))).collect();
    let hosts = hosts(0, &places);
    assert_eq!(hosts.len(), 3);
    killed(&mut cluster, &hosts, "directly").await;
}

async fn through_keyward(version: &Version) {
    let mut cluster = cluster(version).await;
    let sites = [Site::new(), Site::new()];
    let urls = sites.each_ref().map(|site| format!("http://{}", site.listen));
    let mut replicas = Vec::new();
    for site in sites {
        site.write("probe.password", &password("keyward"));
        site.write("session.key", &"0123456789abcdef".repeat(4));
        let places = [
            ("\"0.0.0.0:2379\"", format!("\"{}\"", site.listen)),
            ("[\"http://etcd-1.example.com:2379\"]", format!("{:?}\ntoken_ttl = \"{TTL}s\"", cluster.urls())),
            (
                "[\"http://keyward-1.example.com:2379\", \"http://keyward-2.example.com:2379\"]",
                format!("{urls:?}"),
            ),
        ];
        let placed = page::placed(&page::blocks(PAGE, "toml")[0], &places);
        let config = format!("{placed}[admin]\naddress = \"{}\"\n", site.admin);
        replicas.push(Keyward::start(site, &config).await);
    }
    let [first, second] = urls;
    let places =
        [("http://keyward-1.example.com:2379", first), ("http://keyward-2.example.com:2379", second)];
    let differs = killed(&mut cluster, &hosts(1, &places), "through Keyward").await;
    assert_eq!(differs, (vec![], 0, 0), "paths, lost events, doubled events");
}

#[tokio::test]
async fn no_event_of_a_long_poll_is_lost_or_doubled() {
    for version in if full() { versions() } else { vec![newest("3.5")] } {
        if full() {
            directly(&version).await;
        }
        through_keyward(&version).await;
    }
}
