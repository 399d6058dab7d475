//! One client must not hold, starve or fill the server for the others: hostile and hanging clients beside well-behaved ones.
//!
//! Each attack runs against Keyward; at full length against etcd itself and through `etcd grpc-proxy` too, and prints one table:
//!
//! ```text
//! cargo build --release --locked
//! KEYWARD_TEST_FULL=1 KEYWARD_TEST_PROGRAM=target/release/keyward cargo test --profile ci --locked --test etcd -- --nocapture attacks::
//! ```
//!
//! `KEYWARD_TEST_PROGRAM` is the build that is attacked. `KEYWARD_TEST_BEFORE` names an older build of Keyward that is attacked too, and
//! of which nothing is asserted; `KEYWARD_TEST_SECONDS` says how long an attack lasts at full length, and after how many more seconds at
//! least the memory is read (`10,60`); `KEYWARD_TEST_ATTACK` chooses the attacks whose name contains it. The assertions are about counts and bytes of Keyward; latencies are printed only, since they are
//! the machine's as much as the server's.

mod attack;
mod connection;
mod others;

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::sleep;

use crate::caller::Caller;
use crate::harness::binary::full;
use crate::harness::keyward::{Keyward, Site, program};
use crate::harness::process::Process;
use crate::harness::{Auth, Cluster, Options, http, newest, ports, wait};
use crate::revocations::command;

use attack::{Attack, LARGE_KEY, LIST};
use others::{Connecting, Others, Record};

const LIMIT: Duration = Duration::from_secs(60);
const MIB: usize = 1024 * 1024;
/// What an attack may make Keyward hold beside what it holds without one: the sum of the configured budgets.
const MOST_HELD: usize = 400 * MIB;
/// Bytes that an attack may add to the audit log: none of them changes anything.
const MOST_LOGGED: usize = 4 * MIB;
/// Counters of Keyward that say which defence acted. Shown where an attack moved them.
const DEFENCES: [&str; 4] = ["refused", "limit", "ended", "reset"];

/// Whom an attack is made against.
enum Target {
    Etcd { id: u32, address: SocketAddr },
    GrpcProxy { process: Process, address: SocketAddr },
    Keyward { keyward: Box<Keyward>, name: &'static str },
}

/// One line of the table.
struct Row {
    attack: String,
    members: usize,
    target: &'static str,
    made: u64,
    record: Record,
    before: usize,
    peak: usize,
    after: usize,
    logged: usize,
    told: String,
}

impl Target {
    fn etcd(cluster: &Cluster) -> Target {
        Target::Etcd { id: cluster.process_id(0), address: cluster.address(0) }
    }

    async fn grpc_proxy(cluster: &Cluster) -> Target {
        let address = ports::free();
        let args = [
            "grpc-proxy".into(),
            "start".into(),
            format!("--endpoints={}", cluster.urls().join(",")),
            format!("--listen-addr={address}"),
            // grpc-proxy dials this address itself, and ends where nobody answers there.
            format!("--advertise-client-url={address}"),
        ];
        let log = cluster.folder().join("grpc-proxy.log");
        let process = Process::start("grpc-proxy", &cluster.version().etcd(), args, &[], &log);
        let listens = async || tokio::net::TcpStream::connect(address).await.ok();
        wait::until(LIMIT, "grpc-proxy listens", listens).await;
        Target::GrpcProxy { process, address }
    }

    async fn keyward(cluster: &Cluster, program: PathBuf, name: &'static str) -> Target {
        let site = Site::new();
        let config =
            site.in_front_of(cluster) + "admin.socket = \"admin.sock\"\naudit.file = \"audit.log\"\n";
        let keyward = Keyward::start_build(&program, site, &config).await;
        keyward.ready().await;
        Target::Keyward { keyward: Box::new(keyward), name }
    }

    fn name(&self) -> &'static str {
        match self {
            Target::Etcd { .. } => "etcd",
            Target::GrpcProxy { .. } => "grpc-proxy",
            Target::Keyward { name, .. } => name,
        }
    }

    fn address(&self) -> SocketAddr {
        match self {
            Target::Etcd { address, .. } | Target::GrpcProxy { address, .. } => *address,
            Target::Keyward { keyward, .. } => keyward.site().listen,
        }
    }

    fn id(&self) -> u32 {
        match self {
            Target::Etcd { id, .. } => *id,
            Target::GrpcProxy { process, .. } => process.id(),
            Target::Keyward { keyward, .. } => keyward.id(),
        }
    }

    /// A line of `/proc/PID/status` that is in kB, in bytes.
    fn memory(&self, line: &str) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id())).expect("it runs");
        let found = status.lines().find_map(|text| text.strip_prefix(line)).expect("every process has it");
        found.trim_matches([':', '\t', ' ', 'k', 'B']).parse::<usize>().expect("a number") * 1024
    }

    /// Makes the peak of its memory begin anew.
    fn forget_peak(&self) {
        let path = format!("/proc/{}/clear_refs", self.id());
        fs::write(Path::new(&path), "5").expect("the process is ours");
    }

    /// Keyward's counters, by name, with the labels left out.
    async fn counters(&self) -> std::collections::BTreeMap<String, f64> {
        let mut counters = std::collections::BTreeMap::new();
        if let Target::Keyward { keyward, .. } = self {
            let (_, text) = keyward.admin("/metrics").await;
            for (sample, value) in text.lines().filter_map(|line| line.rsplit_once(' ')) {
                let name = sample.split('{').next().unwrap_or(sample);
                if let (true, Ok(value)) = (name.ends_with("_total"), value.parse::<f64>()) {
                    *counters.entry(name.to_owned()).or_default() += value;
                }
            }
        }
        counters
    }

    /// The checks of which `keyward doctor` has findings.
    async fn findings(&self) -> BTreeSet<String> {
        let Target::Keyward { keyward, .. } = self else { return BTreeSet::new() };
        let Ok((_, text)) = tokio::time::timeout(LIMIT, command(keyward, &["doctor"])).await else {
            return ["no answer".to_owned()].into();
        };
        let checks =
            text.lines().filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned()));
        checks.collect()
    }

    /// Bytes of the audit log.
    fn logged(&self) -> usize {
        let Target::Keyward { keyward, .. } = self else { return 0 };
        let audit = fs::metadata(keyward.site().file("audit.log")).map_or(0, |file| file.len());
        usize::try_from(audit).expect("it fits")
    }

    /// How many lines of its log are warnings or errors.
    fn warnings(&self) -> usize {
        let Target::Keyward { keyward, .. } = self else { return 0 };
        let log = keyward.log();
        log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).count()
    }
}

/// Makes an attack beside well-behaved clients, for `during`.
async fn attacked(target: &Target, members: usize, attack: Attack, during: Duration) -> Row {
    let alice = Caller::log_in(target.address(), "alice").await;
    let connecting = match attack {
        Attack::IdleConnections { .. } => Connecting::EachTime,
        _ => Connecting::Once,
    };
    let (counters, findings) = (target.counters().await, target.findings().await);
    let (warnings, logged_before) = (target.warnings(), target.logged());
    target.forget_peak();
    let before = target.memory("VmRSS");
    let running = attack.start(target.address(), alice.token());
    let others = Others::start(target.address(), alice.token(), connecting);
    sleep(during).await;
    let record = tokio::task::block_in_place(|| others.stop());
    let found: Vec<_> = target.findings().await.difference(&findings).cloned().collect();
    let made = running.made();
    tokio::task::block_in_place(|| running.stop());
    let peak = target.memory("VmHWM");
    let mut told = Vec::new();
    for (name, value) in target.counters().await {
        let moved = value - counters.get(&name).copied().unwrap_or_default();
        if moved > 0.0 && DEFENCES.iter().any(|word| name.contains(word)) {
            told.push(format!("{} {moved}", name.trim_start_matches("keyward_")));
        }
    }
    let warned = target.warnings() - warnings;
    if warned > 0 {
        told.push(format!("{warned} warnings logged"));
    }
    let logged = target.logged() - logged_before;
    if logged > MIB / 16 {
        told.push(format!("{} KiB of audit", logged / 1024));
    }
    if !found.is_empty() {
        told.push(format!("doctor: {}", found.join(" ")));
    }
    let (attack, target) = (attack.name(), target.name());
    Row { attack, members, target, made, record, before, peak, after: 0, logged, told: told.join(", ") }
}

impl Row {
    /// The table's head.
    fn head() -> String {
        format!(
            "{:<26} {:>3} {:<10} {:>9} {:>6} {:>8} {:>8} {:>8} {:>8} {:>6} {:>6} {:>6} {:>6}  {}",
            "attack",
            "n",
            "target",
            "made",
            "gets",
            "p50 ms",
            "p99 ms",
            "max ms",
            "timeouts",
            "failed",
            "before",
            "peak",
            "after",
            "MiB; which defences acted; first failure"
        )
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = |share| self.record.quantile(share).as_secs_f64() * 1e3;
        write!(
            f,
            "{:<26} {:>3} {:<10} {:>9} {:>6} {:>8.1} {:>8.1} {:>8.1} {:>8} {:>6} {:>6} {:>6} {:>6}  {} {}",
            self.attack,
            self.members,
            self.target,
            self.made,
            self.record.latencies.len(),
            ms(0.5),
            ms(0.99),
            ms(1.0),
            self.record.timed_out,
            self.record.failed,
            self.before / MIB,
            self.peak / MIB,
            self.after / MIB,
            self.told,
            self.record.reason.as_deref().unwrap_or_default(),
        )
    }
}

async fn cluster(members: usize) -> Cluster {
    let options =
        Options { members, auth: Auth::On { extra_users: 0 }, strangers: true, ..Options::default() };
    let cluster = Cluster::start(&newest("3.5"), options).await;
    let alice = Caller::log_in(cluster.address(0), "alice").await;
    alice.put("/a/small", vec![b's'; 256], 0).await.expect("written");
    alice.put(LARGE_KEY, vec![b'l'; 1_400_000], 0).await.expect("written");
    for i in 0..40 {
        alice.put(&format!("{}{i:02}", LIST.0), vec![b'v'; 64 * 1024], 0).await.expect("written");
    }
    cluster
}

/// Every attack, and the number of members it is made with.
fn attacks() -> Vec<(usize, Attack)> {
    let unread = |connections| Attack::UnreadGets { connections, gets: 60 };
    let lists = |connections| Attack::UnreadLists { connections, lists: 40 };
    let (held, idle) = if full() { (2_000, 10_000) } else { (400, 600) };
    let mut attacks = vec![
        (1, Attack::Calm),
        (1, unread(1)),
        (1, unread(2)),
        (1, lists(1)),
        (3, unread(2)),
        (1, Attack::UnreadJson { connections: 2, gets: 150 }),
        (1, Attack::UnreadHttp1 { gets: 150 }),
        (1, Attack::EmptyFragments),
        (1, Attack::WebSocketPings),
        (1, Attack::UnfinishedMessages { connections: 40 }),
        (1, Attack::RefusedTxns),
        (1, Attack::ResetRanges),
        (1, Attack::ResetUnauthenticated),
        (1, Attack::ResetWatches),
        (1, Attack::HeaderBomb),
        (1, Attack::HeadersOnly { streams: held }),
        (1, Attack::HealthWatches { streams: held * 5 }),
        (1, Attack::Pings),
        (1, Attack::Settings),
        (1, Attack::IdleConnections { connections: idle }),
    ];
    if full() {
        attacks.extend([(1, unread(64)), (1, lists(64)), (3, unread(1)), (3, unread(64)), (3, lists(64))]);
        attacks.sort_by_key(|(members, _)| *members);
    }
    attacks
}

/// Whether the attack is among those that `KEYWARD_TEST_ATTACK` names by a part of their name.
fn is_chosen(attack: Attack) -> bool {
    std::env::var("KEYWARD_TEST_ATTACK").map_or(true, |part| attack.name().contains(&part))
}

/// How long an attack lasts, and how much later the memory is looked at.
fn seconds() -> (u64, u64) {
    let Ok(told) = std::env::var("KEYWARD_TEST_SECONDS") else { return (10, 60) };
    let parsed =
        told.split_once(',').and_then(|(during, later)| Some((during.parse().ok()?, later.parse().ok()?)));
    parsed.expect("KEYWARD_TEST_SECONDS is two numbers with a comma between them")
}

/// Kinds of targets, in the order in which they are attacked.
enum Kind {
    Etcd,
    GrpcProxy,
    Keyward(PathBuf, &'static str),
}

fn kinds() -> Vec<Kind> {
    let mut kinds = Vec::new();
    if full() {
        kinds.extend([Kind::Etcd, Kind::GrpcProxy]);
        let before = std::env::var_os("KEYWARD_TEST_BEFORE");
        kinds.extend(before.map(|program| Kind::Keyward(program.into(), "before")));
    }
    kinds.push(Kind::Keyward(program(), "Keyward"));
    kinds
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn others_go_on_beside_a_hostile_client() {
    // What is held later is told, and asserted by nothing: only the full run waits for it.
    let (during, later) = if full() { seconds() } else { (2, 0) };
    let (during, later) = (Duration::from_secs(during), Duration::from_secs(later));
    let mut rows = Vec::new();
    println!("{}", Row::head());
    for members in [1, 3] {
        let cluster = cluster(members).await;
        for (_, attack) in
            attacks().into_iter().filter(|(with, attack)| *with == members && is_chosen(*attack))
        {
            let mut attacked_targets = Vec::new();
            for kind in kinds() {
                let target = match kind {
                    Kind::Etcd => Target::etcd(&cluster),
                    Kind::GrpcProxy => Target::grpc_proxy(&cluster).await,
                    Kind::Keyward(program, name) => Target::keyward(&cluster, program, name).await,
                };
                let row = attacked(&target, members, attack, during).await;
                if let ("Keyward", Target::Keyward { keyward, .. }) = (target.name(), &target) {
                    let (_, text) = keyward.admin("/metrics").await;
                    let panics = http::sum(&text, "keyward_panics_total", &[]);
                    assert_eq!(panics, 0.0, "{}: a step panicked", row.attack);
                }
                attacked_targets.push((row, target));
            }
            sleep(later).await;
            for (mut row, target) in attacked_targets {
                row.after = target.memory("VmRSS");
                println!("{row}");
                rows.push(row);
            }
        }
    }
    assert!(rows.iter().any(|row| row.target == "Keyward" && row.made > 0), "an attack was made");
    for row in rows.iter().filter(|row| row.target == "Keyward") {
        assert!(!row.record.latencies.is_empty(), "{row}");
        assert_eq!((row.record.timed_out, row.record.failed), (0, 0), "{row}");
        assert!(row.peak.saturating_sub(row.before) < MOST_HELD, "{row}");
        assert!(row.logged < MOST_LOGGED, "{row}: {} bytes", row.logged);
    }
}
