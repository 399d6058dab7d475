//! The application that goes through all stages, and the record of what happened when.
//!
//! Owns: the application's process, the name that is its endpoint, the list of stages and switches, and the judging of its record.
//! Must not know what a stage is. Invariants: a stage counts only when writes, reads and events were seen in it, at full length
//! keepalives too; what happened is read from etcd itself; outside a switch no call may fail.

use std::collections::BTreeSet;
use std::time::Instant;

use keyward::tasks::Tasks;
use serde_json::Value;

use crate::harness::binary::{Version, full};
use crate::harness::client::{Client, Record};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, Tls, password};
use crate::rounds::{Application, Did};
use crate::steady::{failed, tally, unix_ms};

/// The client of the issue.
const CLIENT: &str = "3.5.1";
const WRITERS: &str = "4";
/// Writes that must be acknowledged in a stage: some seconds of them.
const ACKNOWLEDGED: usize = 40;
const RENEWED: usize = 1;
/// How a member begins to say that a write is lost which it had passed on to a leader that ended. Which words follow is chosen when it
/// gives up, by when it learnt of the new leader and whether it is connected to that one (`parseProposeCtxErr`, the same from etcd 3.4 to
/// 3.7): none when both are well by then. It waits for longer than this, in milliseconds, for 5 s and twice its election timeout. A
/// connection that ends fails its write at once, with words that begin alike.
const LOST_WITH_LEADER: (&str, i64) = ("etcdserver: request timed out", 5_000);

/// What happened, from one moment to the next: a stage, or a change that breaks nothing.
struct Phase {
    name: &'static str,
    /// By the system's clock in milliseconds.
    from: i64,
    /// What the application had done by then.
    before: Value,
    is_stage: bool,
}

/// A change that ends connections: from when to when it took place.
struct Switch {
    name: String,
    from: i64,
    to: i64,
    /// Whether the member that leads ended in it: etcd may lose what a follower had passed on to that one.
    elects: bool,
}

/// The application and all that it is led to.
pub(super) struct Scene {
    pub(super) cluster: Cluster,
    pub(super) relay: Relay,
    /// The library that never logs in twice, from where it takes part.
    pub(super) python: Option<Application>,
    client: Client,
    phases: Vec<Phase>,
    switches: Vec<Switch>,
    /// What a stage has to be seen to have done is counted from here.
    rounds: Vec<(&'static str, usize)>,
}

impl Scene {
    /// Three members, TLS without client certificates, and the application straight on one of them.
    pub(super) async fn start(version: &Version, tasks: &Tasks) -> Scene {
        let (auth, tls) = (Auth::On { extra_users: 0 }, Tls::Server);
        let options = Options { members: 3, auth, tls, strangers: true, ..Options::default() };
        let cluster = Cluster::start(version, options).await;
        // While nobody writes, as the page has it: 3.5.1 refuses what is in flight when users change.
        let keyward = format!("keyward:{}", password("keyward"));
        cluster.ctl_as_root().ok(&["user", "add", &keyward]).await;
        let relay = Relay::start(tasks).await;
        relay.open(cluster.address(0));
        let (ca, truth) = (cluster.pki().ca.display().to_string(), cluster.address(1).to_string());
        let args =
            ["--writers", WRITERS, "--rate", "80", "--clients", "2", "--watchers", "4", "--leases", "4"];
        // Longer than a busy machine may stand still.
        let more = ["--ttl", "15", "--length", "30m", "--cacert", &ca, "--history", &truth];
        let endpoint = [relay.address.to_string()];
        let client = Client::start(CLIENT, "load", "alice", &endpoint, &[&args[..], &more].concat());
        client.says("ready").await;
        Scene {
            cluster,
            relay,
            python: None,
            client,
            phases: Vec::new(),
            switches: Vec::new(),
            rounds: Vec::new(),
        }
    }

    /// What the application does from here on counts as done in `name`.
    pub(super) async fn begins(&mut self, name: &'static str) {
        let before = self.client.so_far().await;
        self.phases.push(Phase { name, from: unix_ms(), before, is_stage: false });
    }

    /// A stage: returns when the application has done enough in it, and the python application each thing once.
    pub(super) async fn stage(&mut self, name: &'static str) {
        self.begins(name).await;
        self.phases.last_mut().expect("it has begun").is_stage = true;
        let begun = Instant::now();
        self.client.says_more("put", ACKNOWLEDGED).await;
        // At short length the leases that live at the end have been kept over several stages.
        if full() {
            self.client.says_more("keepalive", RENEWED).await;
        }
        self.python_does(name).await;
        println!("stage {name}: {:?}", begun.elapsed());
    }

    async fn python_does(&mut self, name: &'static str) {
        if let Some(python) = &self.python {
            let did = all_well(python, &self.cluster).await;
            self.rounds.push((name, did));
        }
    }

    /// The python application does each thing once more, and ends.
    pub(super) async fn python_ends(&mut self, name: &'static str) {
        self.python_does(name).await;
        self.python = None;
    }

    /// A change that may end connections.
    pub(super) async fn switch(&mut self, name: &str, doing: impl AsyncFnOnce(&mut Scene)) {
        self.took_place(name, false, doing).await;
    }

    /// A member restarts with other flags.
    pub(super) async fn restarts(&mut self, i: usize, tls: Tls) {
        let elects = self.cluster.leader().await == i;
        let name = format!("member {i} restarts with {tls:?}");
        self.took_place(&name, elects, async |scene| scene.cluster.roll(i, tls).await).await;
    }

    async fn took_place(&mut self, name: &str, elects: bool, doing: impl AsyncFnOnce(&mut Scene)) {
        let from = unix_ms();
        doing(self).await;
        let to = unix_ms();
        println!("switch {name}: {} ms, elects: {elects}", to - from);
        self.switches.push(Switch { name: name.into(), from, to, elects });
    }

    /// Ends the application, judges what it saw, and prints the table.
    pub(super) async fn judged(mut self) {
        self.begins("end").await;
        let Scene { client, phases, switches, rounds, cluster, .. } = self;
        client.finish();
        let record = client.record().await;
        assert_eq!(record.exit.code(), Some(0), "{}", record.tail());
        println!("{}", record.the("summary"));
        held(&record);
        only_writes_in_flight_failed(&record, &phases, &switches);
        let errors: Vec<i64> = failed(&record).iter().map(|failed| failed.end).collect();
        println!(
            "| etcd | phase | writes | reads | keepalives | events | writes that failed | python's calls |"
        );
        println!("|---|---|---|---|---|---|---|---|");
        for pair in phases.windows(2) {
            let [now, next] = pair else { continue };
            let calls = |op: &str| did(next, &["calls", op]) - did(now, &["calls", op]);
            let (writes, reads) = (calls("put ok"), calls("get ok") + calls("serializable_get ok"));
            let [renewed, events] = ["keepalives", "events"].map(|of| did(next, &[of]) - did(now, &[of]));
            let failed = errors.iter().filter(|at| (now.from..next.from).contains(at)).count();
            let python =
                rounds.iter().filter(|(stage, _)| *stage == now.name).map(|(_, did)| did).sum::<usize>();
            println!(
                "| {} | {} | {writes} | {reads} | {renewed} | {events} | {failed} | {python} |",
                cluster.version(),
                now.name
            );
            let nothing = [writes, reads, events].contains(&0) || (full() && renewed == 0);
            assert!(!(now.is_stage && nothing), "{}: not all of it was done", now.name);
        }
    }
}

fn did(phase: &Phase, path: &[&str]) -> i64 {
    path.iter().fold(&phase.before, |value, name| &value[*name]).as_i64().unwrap_or_default()
}

/// All that it does at a time succeeds; returns how much that is.
pub(super) async fn all_well(application: &Application, cluster: &Cluster) -> usize {
    let did = application.round(cluster).await;
    assert!(did.len() == 6 && did.iter().all(Did::ok), "{}: {did:?}", application.family.name);
    did.len()
}

/// Nothing was lost, doubled, reordered or invented, no watch closed, no lease lost, nothing old was read.
fn held(record: &Record) {
    let verify = record.the("verify");
    assert_eq!(verify["by_kind"], Value::Object(serde_json::Map::new()), "{verify}");
    assert!(verify["history"].as_i64().is_some_and(|events| events > 0), "no history");
    assert!(record.summed("watchers") > 0 && record.summed("leases") > 0, "nothing was held");
    for nothing in ["violations", "watches_closed", "watchers_behind", "leases_lost", "stale_reads"] {
        assert_eq!(record.summed(nothing), 0, "{nothing}: {}", record.the("summary"));
    }
}

/// No read, watch or keepalive failed. A write failed only as Unavailable, while it was in flight at a switch, and at most once per
/// writer and switch; where the leader restarted, at most once more because etcd lost the write with its leader. A write that was in
/// flight at several counts for one of them.
fn only_writes_in_flight_failed(record: &Record, phases: &[Phase], switches: &[Switch]) {
    let all = failed(record);
    println!("errors that the application saw: {:?}", tally(&all));
    let mut taken: BTreeSet<(&str, String, bool)> = BTreeSet::new();
    for one in all {
        let phase = phases.iter().rfind(|phase| phase.from <= one.start).map(|phase| phase.name);
        assert_eq!((one.op.as_str(), one.code.as_str()), ("put", "Unavailable"), "{phase:?}: {one:?}");
        let near = || switches.iter().filter(|switch| one.start <= switch.to && one.end >= switch.from);
        let (words, wait) = LOST_WITH_LEADER;
        let is_lost = one.message.starts_with(words) && one.end - one.start > wait;
        let with_leader = near().filter(|switch| is_lost && switch.elects).map(|switch| (switch, true));
        let with_connection = near().map(|switch| (switch, false));
        // The writes of a writer come one after the other, and so do switches: each write takes the first that is free.
        let is_free = with_leader
            .chain(with_connection)
            .any(|(switch, by_leader)| taken.insert((&switch.name, one.keys.clone(), by_leader)));
        let names: Vec<&str> = near().map(|switch| switch.name.as_str()).collect();
        assert!(is_free, "{phase:?}: {names:?} broke more than the write in flight: {one:?}");
    }
}
