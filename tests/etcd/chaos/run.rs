//! One run against one etcd version: everything started in order, ended in order, and handed to the report.
//!
//! Owns: the order. Must not know how a part does its work, nor what is right.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use keyward::pb::etcdserverpb::RangeRequest;
use tokio::task::JoinSet;

use super::bare::{Group, Manner, Source};
use super::door::{Door, within};
use super::families::{BARE, FAMILIES, Family, User};
use super::faults::{self, REVOCABLE_ROLE};
use super::oracle::Oracle;
use super::plan::Plan;
use super::program::{Program, Through, last_event};
use super::record::{Record, Watch};
use super::report::{Done, Report, last_of};
use super::seeded::Rng;
use super::writers::{LARGE, REVOCABLE, STEADY, Writer, Written};
use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::ports;
use crate::harness::{Auth, Cluster, Options, password, wait};
use crate::steady::{TTL, resumes};

/// Long-lived watches in all.
const WATCHES: usize = 100;
/// Of these, on each bare stream.
const ON_BARE: usize = 8;
const BARE_STREAMS: [(User, Manner); 4] = [
    (User::Alice, Manner::Asking),
    (User::Alice, Manner::HalfClosed),
    (User::Revocable, Manner::Asking),
    (User::Alice, Manner::Guests),
];
const WRITERS: usize = 5;
/// So much must be written before the watches begin, for some to begin in the past.
const PAST: i64 = 40;
/// For programs to start, and at the end for watches to get to the last keys.
const SOON: Duration = Duration::from_secs(90);
/// etcd's interval of timed progress.
const PROGRESS: &str = "2s";

/// Everything that runs while faults happen.
struct Stage {
    oracle: Arc<Oracle>,
    root: Door,
    through: Through,
    writers: JoinSet<Written>,
    writing: Arc<AtomicBool>,
    groups: Vec<Arc<Group>>,
    bare: JoinSet<()>,
    programs: Vec<Program>,
    watching: Arc<AtomicBool>,
    /// The newest compaction that was asked for.
    compacted: Arc<AtomicI64>,
    /// A revision that was not yet current when all watches were known to stand, or later.
    stood_by: i64,
}

/// Runs for `length`, and judges.
pub(crate) async fn run(version: &Version, seed: u64, length: Duration) -> Report {
    let mut rng = Rng::new(seed);
    // Asking for them blocks, and the oracle's clock must not stand still.
    FAMILIES.iter().for_each(|family| drop(family.program()));
    let mut cluster = Cluster::start(version, options(version)).await;
    users(&cluster).await;
    let (keyward, through) = keyward(&cluster).await;
    let mut stage = Stage::set(&cluster, through, &mut rng).await;

    let (root, writing) = (stage.root.clone(), Arc::clone(&stage.writing));
    let mut compacting = JoinSet::new();
    let (oracle, compacted) = (Arc::clone(&stage.oracle), Arc::clone(&stage.compacted));
    compacting.spawn_local(faults::compact(root.clone(), oracle, compacted, Arc::clone(&writing)));
    let mut roles = JoinSet::new();
    roles.spawn_local(faults::roles(root.clone(), Arc::clone(&writing)));
    let (faults, denials) = faults::faults(&mut cluster, &keyward, &root, rng.fork(), length).await;
    writing.store(false, Ordering::Relaxed);
    let compactions = compacting.join_all().await.concat();
    let role_changes = roles.join_all().await.into_iter().sum();

    let mut written = std::mem::take(&mut stage.writers).join_all().await;
    let last = Writer::new(Door::open(stage.through.plain, "alice").await, WRITERS, rng.fork());
    let (last, put, deleted) = last.last().await;
    written.push(last);
    stage.arrive([put, deleted]).await;
    stage.watching.store(false, Ordering::Relaxed);
    std::mem::take(&mut stage.bare).join_all().await;

    let mut history = match stage.oracle.history(deleted).await {
        Ok(history) => history,
        Err(faults) => panic!("{version}: the oracle does not agree with itself: {faults:#?}"),
    };
    history.compactions = compactions;
    history.denials = denials;
    let resumes = resumes(&keyward).await[0];
    let oracle_reopened = stage.oracle.reopened();
    let mut report = Report::new(Done { seed, length, faults, role_changes, oracle_reopened, resumes });
    let judged = report.gather(stage.programs, &stage.groups, &history).await;
    report.judge(&judged, &history, written, stage.stood_by, [put, deleted]);
    report
}

impl Stage {
    /// Writers first, then watches; returns when all of these stand.
    async fn set(cluster: &Cluster, through: Through, rng: &mut Rng) -> Stage {
        let mut stage = Stage {
            oracle: Arc::new(Oracle::over(cluster)),
            root: Door::open(through.plain, "root").await,
            through,
            writers: JoinSet::new(),
            writing: Arc::new(AtomicBool::new(true)),
            groups: Vec::new(),
            bare: JoinSet::new(),
            programs: Vec::new(),
            watching: Arc::new(AtomicBool::new(true)),
            compacted: Arc::new(AtomicI64::new(0)),
            stood_by: 0,
        };
        for number in 0..WRITERS {
            let writer = Writer::new(Door::open(stage.through.plain, "alice").await, number, rng.fork());
            stage.writers.spawn_local(writer.run(Arc::clone(&stage.writing)));
        }
        let past = async || (stage.oracle.recorded() >= PAST).then_some(());
        wait::until(SOON, "the writers write", past).await;
        let mut plan = Plan::new(rng.fork(), stage.oracle.newest(), 'w');
        stage.start_bare(&mut plan, rng).await;
        stage.programs = programs(&mut plan, &stage.through);
        let all = async || stage.stand().then_some(());
        wait::until(SOON, "all watches stand", all).await;
        stage.stood_by = revision(&stage.root).await;
        stage
    }

    async fn start_bare(&mut self, plan: &mut Plan, rng: &mut Rng) {
        for (user, manner) in BARE_STREAMS {
            let guests = manner == Manner::Guests;
            let count = if guests { 0 } else { ON_BARE };
            let watches = plan.stream(user, BARE, count);
            let group = Arc::new(Group::new(user, manner, watches));
            let source = guests.then(|| Source {
                plan: Plan::new(rng.fork(), self.oracle.newest(), 'g'),
                oracle: Arc::clone(&self.oracle),
                compacted: Arc::clone(&self.compacted),
            });
            let door = Door::open(self.through.plain, user.name()).await;
            self.bare.spawn_local(Arc::clone(&group).run(door, source, Arc::clone(&self.watching)));
            self.groups.push(group);
        }
    }

    /// Whether all watches stand.
    fn stand(&self) -> bool {
        let ready = self.programs.iter().all(|program| program.said().ready);
        ready && self.groups.iter().all(|group| group.manner == Manner::Guests || group.ready())
    }

    /// Waits until all watches show the last keys, or no longer: then the judge says which did not.
    async fn arrive(&self, last: [i64; 2]) {
        let there = |watch: &Watch, record: &Record| last_event(record) >= Some(last_of(watch, last));
        let each = |program: &Program| {
            let said = program.said();
            program.watches.iter().all(|watch| there(watch, &said.records[&watch.name]))
        };
        let group = |group: &Arc<Group>| {
            let guests = group.manner == Manner::Guests;
            guests || group.held().watches.iter().all(|(watch, record)| there(watch, record))
        };
        let all = async || {
            let arrived = self.groups.iter().all(group) && self.programs.iter().all(each);
            arrived.then_some(())
        };
        if wait::within_limit(SOON, all).await.is_none() {
            println!("not all watches showed the last keys within {SOON:?}");
        }
    }
}

fn options(version: &Version) -> Options {
    let flag = if version.at_least("3.6") { "" } else { "experimental-" };
    Options {
        members: 3,
        auth: Auth::On { extra_users: 0 },
        token_ttl: Some(TTL),
        flags: vec![format!("--{flag}watch-progress-notify-interval={PROGRESS}")],
        ..Options::default()
    }
}

/// With two listeners: some libraries send no password without TLS.
pub(crate) async fn keyward(cluster: &Cluster) -> (Keyward, Through) {
    keyward_and(cluster, "").await
}

/// The same, with `further` listeners, each after `}, {`.
pub(crate) async fn keyward_and(cluster: &Cluster, further: &str) -> (Keyward, Through) {
    keyward_with(cluster, further, "").await
}

/// The same, with `lines` of configuration.
pub(crate) async fn keyward_with(cluster: &Cluster, further: &str, lines: &str) -> (Keyward, Through) {
    let (site, pair) = (Site::new(), cluster.pki().server());
    let through = Through { plain: site.listen, tls: ports::free(), ca: cluster.pki().ca.clone() };
    let secure = format!(
        " }}, {{ name = \"tls\", address = \"{}\", tls.cert = {:?}, tls.key = {:?}{further}",
        through.tls, pair.cert, pair.key
    );
    let config = site.listening(cluster, &secure) + lines;
    (Keyward::start(site, &config).await, through)
}

/// Alice may write everywhere; one may read everything; one may read two prefixes, and one of these not always.
async fn users(cluster: &Cluster) {
    let ctl = cluster.ctl_as_root();
    ctl.ok(&["role", "grant-permission", "ra", "readwrite", LARGE, "--prefix"]).await;
    for (user, role) in [(User::Tail, "rt"), (User::Revocable, REVOCABLE_ROLE)] {
        let name = user.name();
        ctl.ok(&["role", "add", role]).await;
        ctl.ok(&["user", "add", &format!("{name}:{}", password(name))]).await;
        ctl.ok(&["user", "grant-role", name, role]).await;
    }
    ctl.ok(&["role", "grant-permission", "rt", "read", "", "--from-key"]).await;
    for prefix in [STEADY, REVOCABLE] {
        ctl.ok(&["role", "grant-permission", REVOCABLE_ROLE, "read", prefix, "--prefix"]).await;
    }
}

/// Deals the rest of the watches to the programs.
fn programs(plan: &mut Plan, through: &Through) -> Vec<Program> {
    let users = |family: &'static Family| family.users.iter().map(move |user| (family, *user));
    let all: Vec<_> = FAMILIES.iter().flat_map(users).collect();
    let (rest, each) = (WATCHES - plan.made(), all.len());
    let start = |(turn, (family, user)): (usize, (&'static Family, User))| {
        let count = rest / each + usize::from(turn < rest % each);
        Program::start(family, user, through, plan.stream(user, family.can, count))
    };
    all.into_iter().enumerate().map(start).collect()
}

async fn revision(root: &Door) -> i64 {
    let request = RangeRequest { key: "k".into(), ..Default::default() };
    let answer = within(root.kv().range(request)).await.expect("nothing is broken yet");
    answer.into_inner().header.expect("etcd answers with a header").revision
}
