//! Must show 4: the member that carries thousands of watches is killed while writes go on. All watches are resumed, each is told every
//! event once and in order. Printed: the time to the last resume (aim: 10 s), and what an idle connection (aim: 24 KiB) and an idle
//! watch (aim: 4 KiB) cost.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use keyward::tasks::Tasks;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use crate::harness::binary::{Version, full};
use crate::harness::keyward::{Keyward, Site, program};
use crate::harness::relay::Relay;
use crate::harness::{Cluster, Options, versions, wait};
use crate::streams::{Asks, Connection, Says, watch_of};

/// Far above what anything here takes; a limit, never a pause.
const LIMIT: Duration = Duration::from_secs(120);
/// How often all keys are written: every watch is told something, so this is how exactly its resume is seen.
const EVERY: Duration = Duration::from_millis(250);

/// Below the 128 operations that a transaction may have.
const KEYS: usize = 100;

/// How many watches, and how they are spread.
#[derive(Clone, Copy)]
struct Shape {
    connections: usize,
    streams: usize,
    watches: usize,
    /// All watches are of one key: they share a watch at etcd on each shard of Keyward.
    shared: bool,
}

impl Shape {
    fn all(self) -> usize {
        self.connections * self.streams * self.watches
    }
}

/// As Go clients have them, a stream per connection; at full length also as clients have them that open a stream per watch, and all
/// on one stream.
fn shapes() -> Vec<Shape> {
    if full() {
        let connections = 50;
        vec![
            Shape { connections, streams: 1, watches: 100, shared: false },
            Shape { connections, streams: 100, watches: 1, shared: false },
            Shape { connections: 1, streams: 1, watches: 5000, shared: false },
            Shape { connections, streams: 100, watches: 1, shared: true },
        ]
    } else {
        let connections = 10;
        vec![
            Shape { connections, streams: 1, watches: 50, shared: false },
            Shape { connections, streams: 20, watches: 1, shared: true },
        ]
    }
}

/// What every watch was told.
#[derive(Default)]
struct Told {
    /// By watch: the revisions of its events.
    revisions: RefCell<Vec<Vec<i64>>>,
    /// By watch: when it was first told something later than `mark`.
    after: RefCell<Vec<Option<Instant>>>,
    mark: Cell<i64>,
    created: Cell<usize>,
    /// Streams that ended, and answers that are neither Created nor events.
    odd: Cell<usize>,
    news: Notify,
}

impl Told {
    async fn until(&self, what: &str, done: impl Fn(&Told) -> bool) {
        let waited = timeout(LIMIT, async {
            while !done(self) {
                self.news.notified().await;
            }
        });
        assert!(waited.await.is_ok(), "not within {LIMIT:?}: {what}");
    }

    /// Whether a watch that came back has yet to be told of `revision`.
    fn some_are_behind(&self, revision: i64) -> bool {
        let (after, revisions) = (self.after.borrow(), self.revisions.borrow());
        let mut both = after.iter().zip(revisions.iter());
        both.any(|(after, told)| after.is_some() && told.last().is_none_or(|last| *last < revision))
    }

    fn all_reached(&self, revision: i64) -> bool {
        self.revisions.borrow().iter().all(|told| told.last().is_some_and(|last| *last >= revision))
    }
}

/// Listens to one stream whose watches are `first..` by the order of their creates.
async fn listen(told: Rc<Told>, mut says: Says, first: usize) {
    while let Some(response) = says.next().await {
        if response.created && !response.canceled {
            told.created.set(told.created.get() + 1);
        } else if response.events.is_empty() || response.canceled {
            told.odd.set(told.odd.get() + 1);
        } else {
            let watch = first + usize::try_from(response.watch_id).expect("ids go upward from 0");
            for kv in response.events.iter().filter_map(|event| event.kv.as_ref()) {
                told.revisions.borrow_mut()[watch].push(kv.mod_revision);
                if kv.mod_revision > told.mark.get() {
                    told.after.borrow_mut()[watch].get_or_insert_with(Instant::now);
                }
            }
        }
        told.news.notify_one();
    }
    told.odd.set(told.odd.get() + 1);
    told.news.notify_one();
}

fn key(watch: usize) -> String {
    format!("k{:03}", watch % KEYS)
}

/// A transaction that writes every key.
async fn write(to: &Connection) -> Option<i64> {
    to.put((0..KEYS).map(|watch| (key(watch), b"value".to_vec()))).await
}

/// The same at a cluster that has all its members.
async fn write_to_whole(to: &Connection) -> i64 {
    let written = timeout(LIMIT, write(to)).await.expect("a cluster that is whole answers");
    written.expect("a cluster that is whole takes writes")
}

/// The revisions that there were after `start`, by a member's own word.
async fn truth(tasks: &Tasks, cluster: &Cluster, member: usize, start: i64, head: i64) -> Vec<i64> {
    let direct = Connection::open(tasks, cluster.address(member)).await;
    let mut stream = direct.watch().await;
    stream.asks.create(watch_of(&key(0), false, start + 1));
    let mut revisions = Vec::new();
    while revisions.last().is_none_or(|last| *last < head) {
        let response =
            timeout(LIMIT, stream.says.next()).await.expect("the member answers").expect("goes on");
        revisions
            .extend(response.events.iter().filter_map(|event| event.kv.as_ref()).map(|kv| kv.mod_revision));
    }
    revisions
}

/// Whether Keyward sends calls to this member.
async fn used(keyward: &Keyward, cluster: &Cluster, member: usize) {
    let label = format!("{:x}", cluster.member_id(member).await);
    let ready = async || {
        let ready = keyward.metric("keyward_member_ready", &[("member", &label)]).await;
        (ready == 1.0).then_some(())
    };
    wait::until(LIMIT, "keyward uses the member", ready).await;
}

async fn idle_connections(tasks: &Tasks, keyward: &Keyward, count: usize) -> Vec<Connection> {
    let mut connections = Vec::new();
    for _ in 0..count {
        let connection = Connection::open(tasks, keyward.site().listen).await;
        connection.head().await;
        connections.push(connection);
    }
    connections
}

/// A cluster whose leader alone can be reached, and a Keyward in front of it.
struct Scene {
    tasks: Tasks,
    relays: Vec<Relay>,
    cluster: Cluster,
    leader: usize,
    keyward: Keyward,
}

/// Watches that stand, and what it took.
struct Watching {
    told: Rc<Told>,
    /// The revision before the first.
    start: i64,
    /// Resident before the connections, before the watches, and with both.
    memory: [usize; 3],
    _open: (Vec<Connection>, Vec<Asks>),
}

impl Scene {
    async fn start(version: &Version) -> Scene {
        let tasks = Tasks::default();
        let mut relays = Vec::new();
        for _ in 0..3 {
            relays.push(Relay::start(&tasks).await);
        }
        let advertise = relays.iter().map(|relay| relay.address).collect();
        let options = Options { members: 3, advertise, ..Options::default() };
        let cluster = Cluster::start(version, options).await;
        let leader = cluster.leader().await;
        relays[leader].open(cluster.address(leader));
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        Scene { tasks, relays, cluster, leader, keyward }
    }

    async fn watch(&self, shape: Shape) -> Watching {
        // What the first clients cost is no client's: buffers of the allocator, threads, upstream connections.
        drop(idle_connections(&self.tasks, &self.keyward, 8).await);
        let empty = self.keyward.resident();
        let connections = idle_connections(&self.tasks, &self.keyward, shape.connections).await;
        let connected = self.keyward.resident();
        let start = connections[0].head().await;
        let watches = shape.all();
        let told = Rc::new(Told {
            revisions: RefCell::new(vec![Vec::new(); watches]),
            after: RefCell::new(vec![None; watches]),
            mark: Cell::new(i64::MAX),
            ..Told::default()
        });
        let (mut asks, mut first) = (Vec::new(), 0);
        for connection in &connections {
            for _ in 0..shape.streams {
                let mut stream = connection.watch().await;
                for watch in first..first + shape.watches {
                    // From now, and from a revision on.
                    let from = if watch % 2 == 0 { 0 } else { start + 1 };
                    let key = key(if shape.shared { 0 } else { watch });
                    stream.asks.create(watch_of(&key, false, from));
                }
                self.tasks.spawn("listens", listen(Rc::clone(&told), stream.says, first)).detach();
                asks.push(stream.asks);
                first += shape.watches;
            }
        }
        told.until("every watch is created", |told| told.created.get() == watches).await;
        let memory = [empty, connected, self.keyward.resident()];
        let carried = self.cluster.counter(self.leader, "etcd_debugging_mvcc_watcher_total", &[]).await;
        assert!(shape.shared || carried >= watches as f64, "the leader carries {carried} of {watches}");
        Watching { told, start, memory, _open: (connections, asks) }
    }

    /// Writes until all watches share a few watches at etcd.
    async fn share(&self, shape: Shape, told: &Told) {
        let writer = Connection::open(&self.tasks, self.cluster.address(self.leader)).await;
        let joined = async || {
            let revision = write_to_whole(&writer).await;
            told.until("an event", |told| told.all_reached(revision)).await;
            let joins = self.keyward.metric("keyward_watch_feed_joins_total", &[]).await;
            (joins >= shape.all() as f64).then_some(())
        };
        wait::until(LIMIT, "all watches are shared", joined).await;
        let few = async || {
            let carried = self.cluster.counter(self.leader, "etcd_debugging_mvcc_watcher_total", &[]).await;
            (carried <= 8.0).then_some(())
        };
        wait::until(LIMIT, "etcd has a few watches", few).await;
    }

    /// Lets Keyward reach the other members, too.
    async fn open_all(&self) {
        for (at, relay) in self.relays.iter().enumerate() {
            relay.open(self.cluster.address(at));
            used(&self.keyward, &self.cluster, at).await;
        }
    }

    fn survivor(&self) -> usize {
        (self.leader + 1) % 3
    }

    async fn resumes(&self) -> f64 {
        self.keyward.metric("keyward_watch_resumes_total", &[]).await
    }

    /// Kills the leader and writes until every watch was told so. The last revision; how long until a write was taken, until half
    /// of the watches were told something, and all.
    async fn kill(&mut self, told: &Told) -> (i64, [Duration; 3]) {
        let writer = Connection::open(&self.tasks, self.cluster.address(self.survivor())).await;
        let before = write_to_whole(&writer).await;
        told.until("the first event", |told| told.all_reached(before)).await;
        told.mark.set(before);
        let killed = Instant::now();
        self.cluster.kill(self.leader);
        let mut pace = interval(EVERY);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut head, mut taken) = (0, None);
        let resumed = async {
            while head == 0 || told.after.borrow().iter().any(Option::is_none) {
                pace.tick().await;
                // A build for tests is slow: what came back is told everything before more is written.
                if told.some_are_behind(head) {
                    continue;
                }
                // What a member that knows no leader took may be lost: it is not waited for long.
                if let Some(revision) = timeout(2 * EVERY, write(&writer)).await.ok().flatten() {
                    head = revision;
                    taken.get_or_insert_with(|| killed.elapsed());
                }
            }
        };
        assert!(timeout(LIMIT, resumed).await.is_ok(), "a watch did not come back");
        told.until("the last event", |told| told.all_reached(head)).await;
        let mut times: Vec<_> = told.after.borrow().iter().flatten().map(|at| *at - killed).collect();
        times.sort_unstable();
        (head, [taken.unwrap_or_default(), times[times.len() / 2], times[times.len() - 1]])
    }
}

async fn survives(version: &Version, shape: Shape) {
    let mut scene = Scene::start(version).await;
    let watching = scene.watch(shape).await;
    if shape.shared {
        scene.share(shape, &watching.told).await;
    }
    scene.open_all().await;
    let resumes = scene.resumes().await;
    let (head, [taken, half, last]) = scene.kill(&watching.told).await;
    let resumes = scene.resumes().await - resumes;
    let truth = truth(&scene.tasks, &scene.cluster, scene.survivor(), watching.start, head).await;
    for (watch, revisions) in watching.told.revisions.borrow().iter().enumerate() {
        assert_eq!(*revisions, truth, "{version}: watch {watch}");
    }
    assert_eq!(watching.told.odd.get(), 0, "no stream ended, nothing else was said");
    println!(
        "{version}: {} watches on {} connections, {} a stream: {} events each, all told once; {resumes} streams resumed; after the \
         kill a write was taken in {taken:?}, half of the watches were told something in {half:?}, the last in {last:?}",
        shape.all(),
        shape.connections,
        shape.watches,
        truth.len(),
    );
    let [empty, connected, all] = watching.memory;
    println!(
        "{version}: {}: {} bytes an idle connection, {} bytes an idle watch ({} KiB, {} KiB, {} KiB resident)",
        program().display(),
        connected.saturating_sub(empty) / shape.connections,
        all.saturating_sub(connected) / shape.all(),
        empty / 1024,
        connected / 1024,
        all / 1024,
    );
}

/// On a runtime for tasks of this thread alone.
pub(crate) fn local<T>(test: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
    runtime.expect("a runtime").block_on(test)
}

#[test]
fn all_watches_of_a_killed_member_are_resumed_and_told_everything_once() {
    local(async {
        for version in versions() {
            for shape in shapes() {
                survives(&version, shape).await;
            }
        }
    });
}
