//! The audit log of a replica that is killed under load: every acknowledged change stands in the log exactly once, except for the
//! last batch before the kill; a changed byte is seen; and a collector of OTLP logs gets every line in order.
//!
//! `KEYWARD_TEST_FULL=1` makes 100,000 changes.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::{PutRequest, RangeRequest};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tonic::Status;
use tonic::transport::Channel;

use crate::harness::binary::{Version, full};
use crate::harness::client_program::client_program;
use crate::harness::keyward::{Keyward, Site, program};
use crate::harness::pki::Pki;
use crate::harness::process::Process;
use crate::harness::{Auth, Cluster, Options, evidence, wait};
use crate::lent::{connection, log_in};
use crate::revocations::command;
use crate::rewatch::local;

const USERS: usize = 20;
/// Calls under way of one user.
const AT_ONCE: usize = 8;
/// Of all changes.
const SHORT: usize = 10_000;
const FULL: usize = 100_000;
const LIMIT: Duration = Duration::from_secs(300);
/// The writer gathers records for 10 ms and syncs them: what was acknowledged earlier than this before the last record of a killed
/// process stands in the log. Threads queue their records in about the order of their ends.
const DISORDER: Duration = Duration::from_millis(50);

/// An acknowledged change.
#[derive(Debug)]
struct Acknowledged {
    at: SystemTime,
    revision: i64,
}

/// The changes of all users.
#[derive(Default)]
struct Ledger {
    acknowledged: BTreeMap<String, Acknowledged>,
    /// The answers to the other changes, of which some may be made.
    failures: Vec<Status>,
}

impl Ledger {
    fn take(&mut self, more: Ledger) {
        self.acknowledged.extend(more.acknowledged);
        self.failures.extend(more.failures);
    }
}

/// Puts keys of its own, each once, until `count` are tried or one fails.
async fn puts(kv: KvClient<Channel>, token: &str, mut keys: impl Iterator<Item = String>) -> Ledger {
    let (mut kv, mut ledger) = (kv, Ledger::default());
    for key in keys.by_ref() {
        let put = PutRequest {
            key: key.clone().into_bytes().into(),
            value: vec![b'v'; 64].into(),
            ..PutRequest::default()
        };
        let mut request = tonic::Request::new(put);
        request.metadata_mut().insert("token", token.parse().expect("a header"));
        match kv.put(request).await {
            Ok(answer) => {
                let revision = answer.into_inner().header.expect("a header").revision;
                ledger.acknowledged.insert(key, Acknowledged { at: SystemTime::now(), revision });
            }
            Err(status) => {
                ledger.failures.push(status);
                break;
            }
        }
    }
    ledger
}

/// The load of all users until `each` keys of each task are tried, or Keyward is gone.
async fn load(keyward: &Keyward, life: usize, each: usize) -> Ledger {
    let tasks = (0..USERS).map(async |user| {
        let name = format!("u{user:02}");
        let channel = connection(&keyward.url()).await;
        let token = log_in(&channel, &name).await;
        let lanes = (0..AT_ONCE).map(|lane| {
            let keys = (0..each).map(move |n| format!("/u/{life}/{user:02}/{lane}/{n:05}"));
            puts(KvClient::new(channel.clone()), &token, keys)
        });
        join_all(lanes).await
    });
    let mut all = Ledger::default();
    join_all(tasks).await.into_iter().flatten().for_each(|ledger| all.take(ledger));
    all
}

/// The files of the log, oldest first.
fn files(site: &Site) -> Vec<PathBuf> {
    let folder = site.file("audit.log").parent().expect("a folder").to_owned();
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let is_log = |path: &PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        name.starts_with("audit.log") && !name.ends_with(".torn")
    };
    let mut files: Vec<_> = entries.filter(is_log).collect();
    files.sort();
    files
}

fn records(files: &[PathBuf]) -> Vec<Value> {
    let texts = files.iter().map(|file| fs::read_to_string(file).expect("UTF-8"));
    let lines: Vec<String> =
        texts.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).collect();
    let mut records: Vec<Value> =
        lines.iter().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    records.sort_by_key(|record| record["seq"].as_u64());
    records
}

fn time_of(record: &Value) -> SystemTime {
    let text = record["time"].as_str().expect("a time");
    OffsetDateTime::parse(text, &Rfc3339).expect("RFC 3339").into()
}

fn verify(files: &[PathBuf]) -> (Option<i32>, String) {
    let output = std::process::Command::new(program())
        .args(["audit", "verify"])
        .args(files)
        .output()
        .expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// Changes single bytes of the log, spread over its files and their lines' ends, each seen by `verify`.
fn every_changed_byte_is_seen(files: &[PathBuf]) -> usize {
    let mut changed = 0;
    for file in files {
        let whole = fs::read(file).expect("a file");
        let step = (whole.len() / 16).max(1);
        for at in (0..whole.len()).step_by(step).chain([whole.len() - 1]) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(file, bytes).expect("written");
            let (code, said) = verify(files);
            assert_eq!(code, Some(1), "byte {at} of {}: {said}", file.display());
            changed += 1;
        }
        fs::write(file, whole).expect("written");
    }
    assert_eq!(verify(files).0, Some(0));
    changed
}

/// The number of records of each key, and of all of them the acknowledged keys without one.
fn judge(ledger: &Ledger, records: &[Value]) -> usize {
    let mut by_key: HashMap<&str, Vec<&Value>> = HashMap::new();
    for record in records.iter().filter(|record| record["event"] == "change" && record["code"] == "OK") {
        by_key.entry(record["ranges"][0]["key"].as_str().expect("a key")).or_default().push(record);
    }
    let starts: Vec<usize> = records
        .iter()
        .enumerate()
        .filter(|(_, record)| record["event"] == "start")
        .map(|(at, _)| at)
        .collect();
    let [_, second] = starts[..] else { panic!("two processes wrote: {starts:?}") };
    let last_written = time_of(&records[second - 1]);
    let mut lost = 0;
    for (key, change) in &ledger.acknowledged {
        match by_key.get(&**key).map_or(&[][..], Vec::as_slice) {
            [record] => {
                assert_eq!(record["revision"], change.revision, "{record}");
                let user = format!("u{}", &key["/u/0/".len().."/u/0/00".len()]);
                assert_eq!(record["user"], user, "{record}");
                assert_eq!(record["peer"], format!("password:{user}"), "{record}");
            }
            [] => {
                assert!(key.starts_with("/u/0/"), "{key} was acknowledged after the restart");
                assert!(
                    change.at + DISORDER > last_written,
                    "{key} was acknowledged long before the last record"
                );
                lost += 1;
            }
            more => panic!("{key} stands in the log {} times", more.len()),
        }
    }
    lost
}

/// What etcd has, by key.
async fn kept(cluster: &Cluster) -> BTreeMap<String, i64> {
    let direct = connection(&cluster.url(0)).await;
    let token = log_in(&direct, "root").await;
    let mut kept = BTreeMap::new();
    let mut kv = KvClient::new(direct).max_decoding_message_size(64 << 20);
    let mut key = b"/u/".to_vec();
    loop {
        let range = RangeRequest {
            key: key.clone().into(),
            range_end: "/u0".into(),
            limit: 10_000,
            keys_only: true,
            ..RangeRequest::default()
        };
        let mut request = tonic::Request::new(range);
        request.metadata_mut().insert("token", token.parse().expect("a header"));
        let answer = kv.range(request).await.expect("read").into_inner();
        for found in &answer.kvs {
            assert_eq!(found.version, 1, "no change was made twice");
            kept.insert(String::from_utf8(found.key.to_vec()).expect("UTF-8"), found.mod_revision);
        }
        let Some(last) = answer.kvs.last().filter(|_| answer.more) else { return kept };
        key = [&last.key[..], b"\0"].concat();
    }
}

fn config(site: &Site, cluster: &Cluster) -> String {
    let file = site.file("audit.log");
    site.in_front_of(cluster)
        + &format!(
            "audit.file = {file:?}\naudit.replica = \"a\"\naudit.max_size = \"8MiB\"\naudit.keep = 0\n"
        )
}

async fn killed_under_load(version: &Version) {
    let count = if full() { FULL } else { SHORT };
    let options = Options { members: 3, auth: Auth::On { extra_users: USERS }, ..Options::default() };
    let cluster = Cluster::start(version, options).await;
    let site = Site::new();
    let text = config(&site, &cluster);
    let keyward = Keyward::start(site, &text).await;
    let each = count / USERS / AT_ONCE;
    // The load goes on against a killed process until each task has had its one failure.
    let written = async {
        let half = async || {
            let written = keyward.metric("keyward_audit_records_total", &[]).await;
            (written >= count as f64 / 2.0).then_some(())
        };
        wait::until(LIMIT, "half of the changes are written", half).await;
    };
    let loading = load(&keyward, 0, each);
    let killing = async {
        written.await;
        keyward.kill_only();
    };
    let (mut ledger, ()) = futures_util::future::join(loading, killing).await;
    assert!(!ledger.failures.is_empty(), "the kill came in the middle");
    let site = keyward.kill();
    let keyward = Keyward::start(site, &text).await;
    let left = count.saturating_sub(ledger.acknowledged.len()) / USERS / AT_ONCE + 1;
    ledger.take(load(&keyward, 1, left).await);
    assert!(ledger.acknowledged.len() >= count, "{}", ledger.acknowledged.len());
    let (exit, site) = keyward.terminate().await;
    assert!(exit.success());

    let files = files(&site);
    let records = records(&files);
    let lost = judge(&ledger, &records);
    let kept = kept(&cluster).await;
    for (key, change) in &ledger.acknowledged {
        assert_eq!(kept.get(key), Some(&change.revision), "{key}");
    }
    let (code, said) = verify(&files);
    assert_eq!(code, Some(0), "{said}");
    let changed = every_changed_byte_is_seen(&files);
    println!(
        "{version}: {} acknowledged changes by {USERS} users, {} of unknown outcome at the kill, {} records in {} files; \
         acknowledged within the last batch before the kill and not in the log: {lost}; verify: green; {changed} changed \
         bytes: red each",
        ledger.acknowledged.len(),
        ledger.failures.len(),
        records.len(),
        files.len(),
    );
}

#[test]
fn every_acknowledged_change_stands_in_the_log_once_past_a_kill() {
    local(async { killed_under_load(&Version::parse("3.5.35")).await });
}

/// A limit on the size of files is as a full disk: the kernel's signal for it would end the process without a word.
#[test]
fn a_limit_on_the_size_of_files_stops_calls_and_not_the_process() {
    local(async {
        let cluster = Cluster::start(&Version::parse("3.5.35"), Options::default()).await;
        let site = Site::new();
        let text = config(&site, &cluster) + "audit.queue = \"64KiB\"\n";
        let keyward = Keyward::start(site, &text).await;
        limit_files(&keyward, Some(64 << 10));
        let readiness = async || keyward.admin("/readyz").await;
        let channel = connection(&keyward.url()).await;
        let written = RefCell::new(BTreeSet::new());
        let filling = async || {
            let count = written.borrow().len();
            let keys = (count..count + 100).map(|n| format!("/full/{n:05}"));
            let ledger = puts(KvClient::new(channel.clone()), "", keys).await;
            written.borrow_mut().extend(ledger.acknowledged.into_keys());
            let (code, why) = readiness().await;
            (code == 503 && why.contains("audit log")).then_some(())
        };
        wait::until(LIMIT, "the audit log is full", filling).await;
        limit_files(&keyward, None);
        let ready = async || (readiness().await.0 == 200).then_some(());
        wait::until(LIMIT, "the audit log is written again", ready).await;
        let (exit, site) = keyward.terminate().await;
        assert!(exit.success());
        let (written, files) = (written.into_inner(), files(&site));
        let (code, said) = verify(&files);
        assert_eq!(code, Some(0), "{said}");
        let records = records(&files);
        let puts = records.iter().filter_map(|record| record["ranges"][0]["key"].as_str());
        let puts: BTreeSet<String> = puts.map(str::to_owned).collect();
        assert!(puts.len() > 100 && written.is_subset(&puts), "{} of {}", puts.len(), written.len());
    });
}

/// A limit on the size of the files that this process writes.
fn limit_files(keyward: &Keyward, bytes: Option<u64>) {
    let pid = i32::try_from(keyward.id()).ok().and_then(Pid::from_raw);
    prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).expect("the process is ours");
}

/// Leaves no room in the audit file, and makes 100 changes, whose records wait in memory.
async fn change_without_room(keyward: &Keyward, name: &str) {
    let channel = connection(&keyward.url()).await;
    let length = async || {
        // The limit is for the process's log too, which is shorter.
        let length = fs::metadata(keyward.site().file("audit.log")).expect("the file").len();
        let keys = (0..100).map(|n| format!("/first/{n:05}"));
        if length < 64 << 10 {
            puts(KvClient::new(channel.clone()), "", keys).await;
        }
        let waiting = keyward.metric("keyward_audit_records_waiting", &[]).await > 0.0;
        (length >= 64 << 10 && !waiting).then_some(length)
    };
    let length = wait::until(LIMIT, "the file is long", length).await;
    limit_files(keyward, Some(length));
    let keys = (0..100).map(|n| format!("/{name}/{n:05}"));
    let answered = puts(KvClient::new(channel.clone()), "", keys).await.acknowledged.len();
    assert_eq!(answered, 100, "calls are answered while the queue has room");
    let waits = async || {
        let waiting = keyward.metric("keyward_audit_records_waiting", &[]).await >= 100.0;
        (waiting && keyward.admin("/readyz").await.0 == 503).then_some(())
    };
    wait::until(LIMIT, "the records wait", waits).await;
}

/// The number of changes below this name with a record.
fn recorded(site: &Site, name: &str) -> usize {
    let begin = format!("/{name}/");
    let records = records(&files(site));
    records
        .iter()
        .filter(|record| record["ranges"][0]["key"].as_str().is_some_and(|key| key.starts_with(&begin)))
        .count()
}

/// A site, with the configuration of an end that waits so long for room.
fn ending_within(cluster: &Cluster, drain: &str) -> (Site, String) {
    let site = Site::new();
    let socket = format!("admin.socket = {:?}\n", site.file("admin.sock"));
    let text = config(&site, cluster) + &socket + &format!("drain.timeout = \"{drain}\"\n");
    (site, text)
}

/// The next process knows of 100 changes and some commands without a record; `verify` tells of the end. Returns the losses.
async fn next_process_tells(site: Site, text: &str) -> u64 {
    let keyward = Keyward::start(site, text).await;
    let (_, said) = command(&keyward, &["doctor"]).await;
    assert!(said.contains("audit_records_lost") && said.contains("audit_not_stopped"), "{said}");
    let lost = keyward.metric("keyward_audit_lost_total", &[("sink", "all")]).await;
    let (exit, site) = keyward.terminate().await;
    assert!(exit.success());
    let records = records(&files(&site));
    let told = records.iter().filter(|record| record["event"] == "lost");
    let told: u64 = told.filter_map(|record| record["count"].as_u64()).sum();
    assert!((100..110).contains(&told), "{told}");
    assert_eq!(format!("{lost}"), told.to_string());
    let (code, said) = verify(&files(&site));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(&format!("{told} records were lost")), "{said}");
    assert_eq!(said.matches("did not end with a stop").count(), 1, "{said}");
    told
}

/// The records of answered calls wait in memory while the disk is full: an end that cannot write them says so.
#[test]
fn a_drain_with_a_full_disk_is_refused_and_its_end_tells_how_many_records_are_lost() {
    local(async {
        let cluster = Cluster::start(&Version::parse("3.5.35"), Options::default()).await;
        let (site, text) = ending_within(&cluster, "1s");
        let keyward = Keyward::start(site, &text).await;
        change_without_room(&keyward, "lost").await;
        let (code, said) = command(&keyward, &["drain"]).await;
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("audit records of answered calls wait in memory"), "{said}");
        assert_eq!(keyward.admin("/livez").await.0, 200, "nothing has changed");
        let (code, said) = command(&keyward, &["drain", "--lose-audit-records"]).await;
        assert_eq!(code, Some(74), "{said}");
        assert!(said.contains("wait for room on the disk") && said.contains("were not written"), "{said}");
        let is_told = |line: &str| line.contains("audit records could not be written before the end");
        keyward.logged("the loss", is_told).await;
        let (exit, site) = keyward.ended().await;
        assert_eq!((exit.code(), recorded(&site, "lost")), (Some(74), 0));
        let told = next_process_tells(site, &text).await;
        assert!(said.contains(&format!("{told} audit records were not written")), "{told}: {said}");
    });
}

#[test]
fn an_end_with_a_full_disk_waits_for_room() {
    local(async {
        let cluster = Cluster::start(&Version::parse("3.5.35"), Options::default()).await;
        let (site, text) = ending_within(&cluster, "60s");
        let keyward = Keyward::start(site, &text).await;
        change_without_room(&keyward, "late").await;
        keyward.signal(rustix::process::Signal::TERM);
        keyward.logged("the wait for room", |line| line.contains("waits for room")).await;
        limit_files(&keyward, None);
        let (exit, site) = keyward.ended().await;
        assert!(exit.success(), "{exit}");
        assert_eq!(recorded(&site, "late"), 100);
        let (code, said) = verify(&files(&site));
        assert!(code == Some(0) && !said.contains("did not end"), "{said}");
    });
}

#[test]
fn a_process_that_is_killed_with_a_full_disk_leaves_the_number_of_records_that_waited() {
    local(async {
        let cluster = Cluster::start(&Version::parse("3.5.35"), Options::default()).await;
        let (site, text) = ending_within(&cluster, "1s");
        let keyward = Keyward::start(site, &text).await;
        change_without_room(&keyward, "killed").await;
        let end = keyward.site().file(".audit.log.end");
        let kept = async || {
            let text = fs::read_to_string(&end).expect("the kept end");
            let waiting: u64 = text.split(' ').nth(2)?.parse().ok()?;
            (waiting >= 100).then_some(())
        };
        wait::until(LIMIT, "the number of waiting records is kept", kept).await;
        next_process_tells(keyward.kill(), &text).await;
    });
}

/// "Who deleted this key?"
#[test]
fn search_names_who_deleted_a_key_by_a_range() {
    local(async {
        let cluster = Cluster::start(
            &Version::parse("3.5.35"),
            Options { auth: Auth::On { extra_users: 0 }, ..Options::default() },
        )
        .await;
        let site = Site::new();
        let text = config(&site, &cluster);
        let keyward = Keyward::start(site, &text).await;
        let ctl = crate::harness::ctl::Ctl::new(cluster.version(), vec![keyward.url()]);
        ctl.as_user("root").ok(&["put", "/a/b", "v"]).await;
        ctl.as_user("alice").ok(&["del", "--prefix", "/a/"]).await;
        let (_, site) = keyward.terminate().await;
        let output =
            search(&site.file("audit.log"), &["--key", "/a/b", "--method", "DeleteRange", "-o", "json"]);
        let found: Vec<Value> =
            output.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(found.len(), 1, "{output}");
        assert_eq!(
            (&found[0]["user"], &found[0]["ranges"][0]["end"]),
            (&"alice".into(), &"/a0".into()),
            "{output}"
        );
    });
}

/// A receiver of OTLP logs that decodes by OpenTelemetry's published types, and is unavailable for the first requests.
struct OtlpReceiver {
    /// Ends before its folder: a log that is gone before its process was searched for secrets by nobody.
    process: Process,
    /// The configuration of Keyward's sink.
    settings: String,
    _folder: Site,
}

impl OtlpReceiver {
    const AUTHORIZATION: &str = "Bearer 6d1f2a07b9c34e58";
    /// The requests that the receiver does not take.
    const UNAVAILABLE: &str = "2";

    async fn start() -> Self {
        let program = client_program("otlp", &[]);
        let site = Site::new();
        let pki = Pki::new(&site.file("collector"));
        let (pair, secret) = (pki.server(), site.write("authorization", Self::AUTHORIZATION));
        evidence::secret("the collector's authorization", Self::AUTHORIZATION);
        let log = site.file("receiver.out");
        let arguments: [&OsStr; 8] = [
            "--cert".as_ref(),
            pair.cert.as_ref(),
            "--key".as_ref(),
            pair.key.as_ref(),
            "--authorization".as_ref(),
            Self::AUTHORIZATION.as_ref(),
            "--unavailable".as_ref(),
            Self::UNAVAILABLE.as_ref(),
        ];
        let process = Process::start("receiver", &program, arguments, &[], &log);
        let ready = |text: &str| Self::of_kind(text, "ready").first().and_then(|line| line["port"].as_u64());
        let port = process.wrote(LIMIT, "ready", ready).await;
        let ca = site.file("collector").join("ca.pem");
        let settings = format!(
            "[audit.otlp]\nurl = \"https://127.0.0.1:{port}\"\nca = {ca:?}\nauthorization_file = {secret:?}\n"
        );
        Self { process, settings, _folder: site }
    }

    /// The lines of one kind in the receiver's output.
    fn of_kind(text: &str, kind: &str) -> Vec<Value> {
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["kind"] == kind).collect()
    }

    /// The bodies of the received records.
    fn bodies(text: &str) -> Vec<String> {
        let records = Self::of_kind(text, "record").into_iter();
        records.map(|record| record["body"].as_str().expect("text").to_owned()).collect()
    }
}

/// A request without an answer in time is sent again (the machine may be busy), so a line may come once more right behind its
/// request; a change may fail for the same reason.
#[test]
fn a_collector_of_otlp_logs_gets_every_line_of_the_file_in_order() {
    local(async {
        let site = Site::new();
        let receiver = OtlpReceiver::start().await;
        let auth = Auth::On { extra_users: USERS };
        let cluster = Cluster::start(&Version::parse("3.5.35"), Options { auth, ..Options::default() }).await;
        let text = config(&site, &cluster) + &receiver.settings;
        let keyward = Keyward::start(site, &text).await;
        let each = 1 + SHORT / USERS / AT_ONCE / 10;
        let ledger = load(&keyward, 0, each).await;
        let failures = &ledger.failures;
        assert!(ledger.acknowledged.len() > each * USERS * AT_ONCE / 2, "{failures:?}");
        // At its end Keyward waits for a moment only: what was kept back by the refusals is sent before.
        let changes = ledger.acknowledged.len();
        let all =
            |text: &str| (BTreeSet::from_iter(OtlpReceiver::bodies(text)).len() >= changes).then_some(());
        receiver.process.wrote(LIMIT, "every change", all).await;
        let (exit, site) = keyward.terminate().await;
        assert!(exit.success());

        let lines: Vec<String> = files(&site)
            .iter()
            .flat_map(|file| {
                fs::read_to_string(file).expect("UTF-8").lines().map(str::to_owned).collect::<Vec<_>>()
            })
            .collect();
        let written =
            |text: &str| (OtlpReceiver::bodies(text).last() == lines.last()).then(|| text.to_owned());
        let said = receiver.process.wrote(LIMIT, "every line", written).await;
        assert_eq!(OtlpReceiver::of_kind(&said, "refused"), [] as [Value; 0]);
        assert_eq!(OtlpReceiver::of_kind(&said, "unavailable").len().to_string(), OtlpReceiver::UNAVAILABLE);
        let received = OtlpReceiver::of_kind(&said, "record");
        let bodies = OtlpReceiver::bodies(&said);
        let bodies: Vec<_> = bodies.iter().map(String::as_str).collect();
        let (in_order, repeated) = without_repetitions(&bodies);
        assert_eq!(in_order, lines, "the chain, in its order");
        for record in &received {
            let line: Value = serde_json::from_str(record["body"].as_str().expect("text")).expect("JSON");
            let since = time_of(&line).duration_since(SystemTime::UNIX_EPOCH).expect("a time");
            assert_eq!(record["time"].as_u64().map(u128::from), Some(since.as_nanos()), "{record}");
            assert_eq!(record["event"], format!("keyward.audit.{}", line["event"].as_str().expect("text")));
            assert_eq!(record["attributes"]["keyward.audit.seq"], line["seq"], "{record}");
            assert_eq!(record["resource"]["service.instance.id"], "a", "{record}");
        }
        println!(
            "{} lines of {} acknowledged changes, in order; sent again without an answer in time: {repeated}; failed changes: {}",
            lines.len(),
            ledger.acknowledged.len(),
            failures.len(),
        );
    });
}

/// Leaves out lines that repeat the last lines before them, as a request does that is sent again. Returns the others, and the number
/// of the lines left out.
fn without_repetitions<'a>(lines: &[&'a str]) -> (Vec<&'a str>, usize) {
    let mut kept: Vec<&str> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut expected = None;
    for line in lines {
        match places.get(line) {
            Some(place) => {
                assert!(expected.is_none_or(|expected| expected == *place), "{line} is out of order");
                expected = Some(place + 1).filter(|next| *next < kept.len());
            }
            None => {
                assert_eq!(expected, None, "a repetition ends before {line}");
                places.insert(line, kept.len());
                kept.push(line);
            }
        }
    }
    let repeated = lines.len() - kept.len();
    (kept, repeated)
}

fn search(file: &Path, arguments: &[&str]) -> String {
    let output = std::process::Command::new(program())
        .args(["audit", "search"])
        .arg(file)
        .args(arguments)
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}
