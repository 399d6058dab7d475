//! One run: a seed makes a world, shakes it, lets it come to rest, and says what was broken.
//!
//! Owns: the world's dice, its clients, the order of things, the end of a run. Must not know: how Keyward works.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use keyward::identity::MemberId;
use keyward::members::membership::{AuthSetting, Readiness, UnreadyReason};
use keyward::members::version::Version;
use keyward::pb::etcdserverpb::WatchResponse;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::checker::{Checker, Exact, Surroundings};
use crate::client::{Connection, End, Stream};
use crate::cluster::{Cluster, MOVES, Node, Reply, Shared, words};
use crate::counts::{Counts, What};
use crate::dice::Dice;
use crate::model::flavor::Flavor;
use crate::model::member::Member;
use crate::model::stream::Limits;
use crate::rig::{Address, Keyward, with_readiness};
use crate::truth::Truth;
use crate::wire;

/// The cluster's id at first.
const NO_LEADER: &str = "etcdserver: no leader";
const NO_MEMBER: &str = "etcdserver: request timed out, possibly due to connection lost";
const CLUSTER: u64 = 0xc1;
const MEMBERS: usize = 3;
/// Longer than any back-off or grace of Keyward's: when nothing moved for so long, nothing will.
const QUIET: Duration = Duration::from_millis(3_500);
/// Rounds until a world that does not rest is given up.
const ROUNDS: usize = 4_000;
/// A run that hangs, in words.
pub(crate) const RESTLESS: &str = "it never came to rest";
pub(crate) const BUSY: &str = "something waits for ever";

/// How a run ended.
pub(crate) struct Outcome {
    pub(crate) counts: Counts,
    /// What was broken, if anything.
    pub(crate) violation: Option<String>,
    pub(crate) trace: Vec<String>,
}

impl Outcome {
    /// The same for the same seed.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.trace.hash(&mut hasher);
        hasher.finish()
    }
}

/// A client stream, and what it must see.
pub(crate) struct Watcher {
    pub(crate) stream: Stream,
    pub(crate) checker: Checker,
    /// Until which step nothing is read.
    pub(crate) slow_until: usize,
    pub(crate) wants_leader: bool,
    pub(crate) name: usize,
    /// Its place among the connections.
    pub(crate) connection: usize,
}

/// Everything of a run.
pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) cluster: Shared,
    pub(crate) keyward: Keyward,
    pub(crate) connections: Vec<Option<Connection>>,
    /// The highest header.revision that each connection's streams were shown, and its era: a client may begin a watch behind what
    /// another stream of its connection was shown.
    pub(crate) shown: Vec<(usize, i64)>,
    pub(crate) watchers: Vec<Watcher>,
    /// Steps at which a client comes.
    pub(crate) late: Vec<usize>,
    pub(crate) flavors: [Flavor; MEMBERS],
    pub(crate) step: usize,
    pub(crate) serial: u64,
    pub(crate) value: u64,
    /// Whether history has been exchanged already.
    pub(crate) exchanged: bool,
    /// Whether a revision is still to be written that is too large for one fragment.
    pub(crate) large: bool,
    pub(crate) wide: bool,
    pub(crate) gone_counts: Counts,
    names: usize,
}

/// Runs one seed to its end.
pub(crate) fn run(seed: u64) -> Outcome {
    let mut builder = Builder::new_current_thread();
    builder.enable_time().start_paused(true);
    let runtime = builder.build_local(LocalOptions::default()).expect("a runtime");
    runtime.block_on(async {
        let tasks = Tasks::default();
        let mut world = World::new(seed, &tasks).await;
        let result = world.live().await;
        let mut cluster = world.cluster.borrow_mut();
        let mut counts = cluster.counts;
        for watcher in &world.watchers {
            counts.add(&watcher.checker.counts);
        }
        counts.add(&world.gone_counts);
        counts.more(What::Joins, world.keyward.joins());
        let trace = std::mem::take(&mut cluster.trace);
        drop(cluster);
        Outcome { counts, violation: result.err(), trace }
    })
}

fn flavors(dice: &mut Dice) -> [Flavor; MEMBERS] {
    match dice.below(10) {
        0..2 => [Flavor::V3_4_23; MEMBERS],
        2..4 => [Flavor::V3_5_1; MEMBERS],
        4 => [Flavor::V3_5_16; MEMBERS],
        5..8 => [Flavor::V3_5_35; MEMBERS],
        _ => std::array::from_fn(|_| dice.pick(&Flavor::ALL)),
    }
}

fn version(flavor: Flavor) -> Version {
    let text = match flavor {
        Flavor::V3_4_23 => "3.4.23",
        Flavor::V3_5_1 => "3.5.1",
        Flavor::V3_5_16 => "3.5.16",
        _ => "3.5.35",
    };
    Version::parse(text).expect("a version")
}

impl World {
    async fn new(seed: u64, tasks: &Tasks) -> Self {
        let mut dice = Dice::new(seed);
        let flavors = flavors(&mut dice);
        let shares = seed.is_multiple_of(2);
        let limits = limits(&mut dice, &flavors, shares);
        let mut nodes = Vec::new();
        let mut addresses = Vec::new();
        let mut dialled = Vec::new();
        for (at, flavor) in flavors.iter().enumerate() {
            let id = at as u64 + 1;
            let (sender, receiver) = mpsc::channel(64);
            let address =
                Address { id: MemberId(id), dialled: sender, listens: Arc::new(AtomicBool::new(true)) };
            addresses.push((address.clone(), version(*flavor)));
            dialled.push(receiver);
            nodes.push(Node {
                model: Member::new(id, 2),
                flavor: *flavor,
                address,
                up: true,
                leaderless: false,
                valid_from: 1,
            });
        }
        let auth = !dice.one_in(5);
        let cluster = wire::shared(Cluster::new(Truth::new(CLUSTER), nodes, limits, auth));
        for (node, dialled) in dialled.into_iter().enumerate() {
            let accept = wire::accept(cluster.clone(), node, dialled, tasks.clone());
            tasks.spawn("simulated address", accept).detach();
        }
        let known = if auth { AuthSetting::On } else { AuthSetting::Off };
        cluster.borrow_mut().shares = shares;
        let keyward = Keyward::before(&addresses, CLUSTER, known, dice.next(), shares, tasks);
        let large = dice.one_in(25);
        let late = (0..1 + dice.below(if shares { 7 } else { 3 }))
            .map(|at| if at == 0 { 0 } else { dice.below(80) })
            .collect();
        let mut world = Self {
            dice,
            cluster,
            keyward,
            connections: Vec::new(),
            shown: Vec::new(),
            watchers: Vec::new(),
            late,
            flavors,
            step: 0,
            serial: 0,
            value: 0,
            exchanged: false,
            large,
            wide: large,
            gone_counts: Counts::default(),
            names: 0,
        };
        for _ in 0..world.dice.below(12) {
            world.write();
        }
        world
    }

    async fn live(&mut self) -> Result<(), String> {
        let steps = 60 + self.dice.below(120);
        for step in 0..steps {
            self.step = step;
            self.arrivals().await;
            self.act().await?;
            self.background();
            let all_ran = self.breathe().await;
            let heard = self.listen()?;
            if all_ran && !heard && self.watchers.iter().all(|watcher| watcher.slow_until <= self.step) {
                self.cluster.borrow_mut().settled();
            }
        }
        self.late.clear();
        self.calm();
        self.rest(true).await?;
        self.check_arrived()?;
        self.check_progress("after all came to rest").await?;
        if self.dice.one_in(2) {
            // A resume on a cluster where nothing is written any more.
            self.cut_everything();
            self.rest(true).await?;
            self.check_arrived()?;
            self.check_progress("after a resume without a write").await?;
        }
        self.check_arrived()
    }

    /// Clients that come now.
    async fn arrivals(&mut self) {
        let (now, later): (Vec<usize>, Vec<usize>) = self.late.iter().partition(|step| **step <= self.step);
        self.late = later;
        for step in now {
            if step > 0 {
                self.cluster.borrow_mut().counts.one(What::Late);
            }
            let open: Vec<usize> =
                (0..self.connections.len()).filter(|at| self.connections[*at].is_some()).collect();
            let shared = if self.dice.one_in(2) { self.dice.maybe_pick(&open) } else { None };
            let at = match shared {
                Some(at) => at,
                None => {
                    let windows = [65_535, 65_535, 1 << 20, 1_024, 256];
                    // What is large would take for ever through the small ones.
                    let window = self.dice.pick(if self.wide { &windows[..3] } else { &windows[..] });
                    let pipe = self.keyward.connect();
                    self.connections.push(Some(Connection::over(pipe, window, &self.keyward.tasks).await));
                    self.shown.push((0, 0));
                    self.connections.len() - 1
                }
            };
            let wants_leader = self.dice.one_in(8);
            let Some(connection) = &mut self.connections[at] else { continue };
            let Ok(stream) = connection.watch(wants_leader) else { continue };
            let name = self.names;
            self.names += 1;
            let place = self.watchers.len();
            self.watchers.push(Watcher {
                stream,
                checker: Checker::default(),
                slow_until: 0,
                wants_leader,
                name,
                connection: at,
            });
            for _ in 0..1 + self.dice.below(3) {
                self.ask_create(place);
            }
        }
    }

    /// Lets tasks run: for a few turns, until nothing is left to do, or for some time. Whether nothing was left.
    async fn breathe(&mut self) -> bool {
        match self.dice.below(8) {
            0..3 => {
                for _ in 0..1 + self.dice.below(12) {
                    tokio::task::yield_now().await;
                }
                false
            }
            3..7 => {
                tokio::time::sleep(Duration::from_millis(1)).await;
                true
            }
            _ => {
                tokio::time::sleep(Duration::from_millis(self.dice.next() % 60)).await;
                false
            }
        }
    }

    /// What members do by themselves.
    pub(crate) fn background(&mut self) {
        let mut cluster = self.cluster.borrow_mut();
        for _ in 0..3 + self.dice.below(9) {
            let numbers: Vec<u64> = cluster.streams.keys().copied().collect();
            match self.dice.below(10) {
                0..2 => {
                    let node = self.dice.below(MEMBERS);
                    if cluster.nodes[node].up && !cluster.nodes[node].leaderless {
                        cluster.apply(node);
                    }
                }
                2..4 if !cluster.calls.is_empty() => {
                    let at = self.dice.below(cluster.calls.len());
                    let reply = match self.dice.below(24) {
                        0 => Reply::Unavailable,
                        1 => Reply::Reset,
                        _ => Reply::Honest,
                    };
                    cluster.answer(at, reply);
                }
                _ => {
                    let Some(number) = self.dice.maybe_pick(&numbers) else { continue };
                    for _ in 0..1 + self.dice.below(3) {
                        cluster.move_one(number, self.dice.below(MOVES));
                    }
                    cluster.send_out(number);
                }
            }
        }
    }

    /// Everybody who reads reads, and the checker sees it.
    pub(crate) fn listen(&mut self) -> Result<bool, String> {
        let mut heard = false;
        let exact = self.exact();
        let mut cluster = self.cluster.borrow_mut();
        if let Some(why) = cluster.violation.take() {
            return Err(why);
        }
        let mut at = 0;
        while let Some(watcher) = self.watchers.get_mut(at) {
            at += 1;
            if watcher.slow_until > self.step {
                continue;
            }
            let was_slow = std::mem::take(&mut watcher.slow_until) > 0;
            let mut some = false;
            let received = watcher.stream.received();
            while let Some(message) = watcher.stream.next() {
                some = true;
                let response = WatchResponse::decode(message).map_err(|error| error.to_string())?;
                let name = watcher.name;
                cluster.note(|| format!("client {name} > {}", words(&response)));
                let around = Surroundings {
                    truth: &cluster.truth,
                    terms: cluster.term,
                    members: MEMBERS,
                    refusals: &cluster.refusals,
                    without_previous: &cluster.without_previous,
                    shares: cluster.shares,
                    exact,
                    auth: cluster.auth,
                };
                watcher.checker.saw(&around, &response).map_err(|why| format!("client {name}: {why}"))?;
                let (era, revision) = watcher.checker.highest();
                if revision > self.shown[watcher.connection].1 {
                    self.shown[watcher.connection] = (era, revision);
                }
            }
            if was_slow && some {
                cluster.counts.one(What::Slow);
            }
            heard |= watcher.stream.received() > received;
            if let Some(end) = watcher.stream.end() {
                let told = |text: &str| *end == End::Status(Code::Unavailable, text.to_owned());
                let leaderless = watcher.wants_leader && self.keyward.has_lacked_leader();
                let unreachable = self.keyward.has_lacked_members();
                if !(leaderless && told(NO_LEADER) || unreachable && told(NO_MEMBER)) {
                    return Err(format!("client {}: the stream ended: {end:?}", watcher.name));
                }
                cluster.note(|| format!("a client was told of an outage: {end:?}"));
                self.gone_counts.add(&watcher.checker.counts);
                at -= 1;
                self.watchers.remove(at);
            }
        }
        Ok(heard)
    }

    fn exact(&self) -> Exact {
        let exact = self.flavors.iter().filter(|flavor| flavor.exact_refusals).count();
        match exact {
            MEMBERS => Exact::All,
            0 => Exact::None,
            _ => Exact::Some,
        }
    }

    /// Ends all faults.
    fn calm(&mut self) {
        let mut cluster = self.cluster.borrow_mut();
        cluster.note(|| "calm".to_owned());
        for node in &mut cluster.nodes {
            node.up = true;
            node.leaderless = false;
            node.address.listens.store(true, Ordering::Relaxed);
        }
        for stream in cluster.streams.values_mut() {
            stream.cut = None;
        }
        drop(cluster);
        for watcher in &mut self.watchers {
            watcher.slow_until = watcher.slow_until.min(self.step);
        }
        self.probe(true);
    }

    /// Members are asked how they are, and what they say is published.
    pub(crate) fn probe(&mut self, always: bool) {
        if !self.keyward.hinted() && !always {
            return;
        }
        let cluster = self.cluster.borrow();
        let id = cluster.truth.now().store.cluster_id();
        let well: Vec<Option<UnreadyReason>> = cluster
            .nodes
            .iter()
            .map(|node| match (node.up, node.leaderless) {
                (false, _) => Some(UnreadyReason::Unreachable),
                (_, true) => Some(UnreadyReason::NoLeader),
                _ => None,
            })
            .collect();
        let term = cluster.term;
        drop(cluster);
        self.keyward.publish(|membership| {
            membership.cluster = Some(keyward::identity::ClusterId(id));
            membership.term = term;
            for (member, trouble) in membership.members.iter_mut().zip(well) {
                let readiness = trouble.map_or(Readiness::Ready, Readiness::NotReady);
                *member = with_readiness(member, readiness);
                if trouble.is_none() {
                    member.suspicion.clear(member.suspicion.mark());
                }
            }
        });
    }

    /// Until nothing moves any more, without faults.
    pub(crate) async fn rest(&mut self, honest: bool) -> Result<(), String> {
        let mut quiet_since = Instant::now();
        for _ in 0..ROUNDS {
            let mut moved = {
                let mut cluster = self.cluster.borrow_mut();
                let before = cluster.activity;
                if !honest && !cluster.calls.is_empty() && self.dice.one_in(3) {
                    cluster.answer(0, Reply::Unavailable);
                }
                cluster.move_all(&mut self.dice);
                cluster.activity > before
            };
            moved |= self.listen()?;
            if self.keyward.hinted() {
                self.probe(true);
                moved = true;
            }
            if moved {
                quiet_since = Instant::now();
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            self.cluster.borrow_mut().settled();
            if quiet_since.elapsed() >= QUIET {
                let busy = self.cluster.borrow().busy();
                return busy.map_or(Ok(()), |what| Err(format!("{BUSY}: {what}")));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Err(RESTLESS.to_owned())
    }

    fn check_arrived(&mut self) -> Result<(), String> {
        let cluster = self.cluster.borrow();
        for watcher in &self.watchers {
            let checked = watcher.checker.check_all_arrived(&cluster.truth);
            checked.map_err(|why| format!("client {}: {why}", watcher.name))?;
        }
        Ok(())
    }

    /// Questions for progress are answered, the last of a few up to the newest revision: a member that dropped questions
    /// before leaves Keyward unsure of which one it answers, and what is sure is told meanwhile.
    async fn check_progress(&mut self, when: &str) -> Result<(), String> {
        if !self.flavors.iter().all(|flavor| flavor.ordered_progress) {
            return Ok(());
        }
        let mut behind = Vec::new();
        for at in 0..self.watchers.len() {
            if self.owes_progress(at) {
                behind.push(self.watchers[at].name);
            }
        }
        for last in [false, false, false, true] {
            behind = self.ask_those(&behind, when, last).await?;
        }
        Ok(())
    }

    fn owes_progress(&self, at: usize) -> bool {
        let watcher = &self.watchers[at];
        !watcher.stream.is_half_closed() && watcher.checker.progress_is_due(&self.cluster.borrow().truth)
    }

    /// Asks for those clients, and returns those that were told less than there is; none is if this is the `last` time.
    async fn ask_those(&mut self, names: &[usize], when: &str, last: bool) -> Result<Vec<usize>, String> {
        let mut asked = Vec::new();
        for at in 0..self.watchers.len() {
            let name = self.watchers[at].name;
            if names.contains(&name) && self.owes_progress(at) {
                asked.push((name, self.watchers[at].checker.progress_told));
                self.ask_progress(at);
            }
        }
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        self.rest(true).await?;
        let head = self.cluster.borrow().truth.now().head();
        let mut behind = Vec::new();
        for (name, before) in asked {
            let Some(at) = self.watchers.iter().position(|watcher| watcher.name == name) else { continue };
            // A question of who has no watch any more, as after a denial, is dropped.
            if !self.owes_progress(at) {
                continue;
            }
            let checker = &self.watchers[at].checker;
            let told = checker.told_progress();
            if checker.progress_told == before || (last && told != head) {
                let ids = checker.ids();
                return Err(format!(
                    "client {name}: no progress {when} at {head}, told {told}, watches {ids:?}"
                ));
            }
            if told == head {
                self.cluster.borrow_mut().counts.one(What::ProgressAnswered);
            } else {
                behind.push(name);
            }
        }
        Ok(behind)
    }
}

fn limits(dice: &mut Dice, flavors: &[Flavor], shares: bool) -> Limits {
    // Where a version forgets to tell a compaction through a full channel, its channel is never full: what etcd
    // itself loses is not ours to check.
    let always_told = flavors.iter().all(|flavor| flavor.compaction_always_told);
    let small = always_told && dice.one_in(2);
    Limits {
        channel: match small {
            true => 2 + dice.below(8),
            // Where watches share, more is written between two faults.
            false if shares && !always_told => 4096,
            false => 128,
        },
        control: 16,
        revisions: 2 + dice.below(4),
        fragment: dice.pick(&[120, 200, 400, 2 << 20]),
    }
}
