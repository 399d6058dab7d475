//! Must show 9 of the right member: every member restarted in turn, one replaced, and a live cluster upgraded, with clients on. Nobody
//! sees an error but a write's that was open while there was no leader, or at an old member that ended: those of 3.4.23 and 3.5.1 close
//! their connections before their last answers are out, and nobody can say whether they were good.

use std::time::Duration;

use crate::harness::binary::{self, Version};
use crate::harness::client::lifetime;
use crate::harness::ctl::Ctl;
use crate::harness::{Cluster, versions, wait};
use crate::steady::{Ended, Failed, Load, options, tally, unix_ms};

/// etcd's own defaults.
const TIMING: (u32, u32) = (100, 1000);
/// How long Keyward may take to send calls to a member that is back.
const BACK: Duration = Duration::from_secs(30);
/// The first pinned version that was never seen to cut an answer.
const FINISHES: &str = "3.5.35";
/// For what an operator would wait for, too.
const LIMIT: Duration = Duration::from_secs(60);

/// A step: from its begin to the sight of one leader, in milliseconds of the system's clock.
struct Step {
    what: String,
    began: i64,
    leader: i64,
    /// Whether there may have been no leader for a while.
    elects: bool,
    /// Whether a member ended that does not finish its answers.
    cuts: bool,
}

impl Step {
    fn may_fail(&self, call: &Failed) -> bool {
        let write = call.op == "put" || call.op == "txn";
        let open = call.start <= self.leader && call.end >= self.began;
        (self.elects || self.cuts) && write && call.code == "Unavailable" && open
    }
}

/// A cluster whose clients go through Keyward, and what was done to it.
struct Rolling {
    cluster: Cluster,
    load: Load,
    steps: Vec<Step>,
}

impl Rolling {
    async fn start(version: &Version) -> Rolling {
        let cluster = Cluster::start(version, options(TIMING)).await;
        let load = Load::start(&cluster, 0, &["--length", "10m"]).await;
        Rolling { cluster, load, steps: Vec::new() }
    }

    /// Restarts each member in turn, the leader too, as another etcd where that is given.
    async fn roll(&mut self, version: Option<&Version>) {
        for member in 0..self.cluster.len() {
            let (led, began) = (self.cluster.leader().await, unix_ms());
            self.cluster.bounce(member, version).await;
            let what = match version {
                None => format!("m{member} restarted"),
                Some(version) => format!("m{member} restarted as {version}"),
            };
            let cuts = !self.cluster.version().at_least(FINISHES);
            self.took(what, began, led == member, cuts).await;
            self.used(member).await;
        }
    }

    /// The step is over when there is a leader.
    async fn took(&mut self, what: String, began: i64, elects: bool, cuts: bool) {
        self.cluster.leader().await;
        self.steps.push(Step { what, began, leader: unix_ms(), elects, cuts });
    }

    /// Waits until Keyward sends calls to the member, and for some more.
    async fn used(&self, member: usize) {
        self.load.keyward().uses(self.cluster.member_id(member).await, BACK).await;
        lifetime(Duration::from_secs(if binary::full() { 5 } else { 2 })).await;
    }

    /// etcdctl as root, through Keyward.
    fn ctl(&self) -> Ctl {
        Ctl::new(self.cluster.version(), vec![self.load.keyward().url()]).as_user("root")
    }

    /// Takes a member out, adds a learner instead and promotes it, all through Keyward.
    async fn replace(&mut self, member: usize) {
        let (led, began) = (self.cluster.leader().await, unix_ms());
        let id = self.cluster.member_id(member).await;
        let ctl = self.ctl();
        ctl.remove_member(id).await;
        self.cluster.removed(member).await;
        self.took(format!("m{member} removed"), began, led == member, false).await;
        let began = unix_ms();
        let learner = self.cluster.add_learner_by(&ctl).await;
        let id = format!("{:x}", self.cluster.member_id(learner).await);
        let promoted = async || {
            let ended = ctl.run(&["member", "promote", &id]).await;
            let early = ended.stderr.contains("learner member which is in sync with leader");
            assert!(ended.code == Some(0) || early, "{}", ended.stderr);
            (ended.code == Some(0)).then_some(())
        };
        wait::until(LIMIT, "the learner is promoted", promoted).await;
        self.took(format!("m{learner} added and promoted"), began, false, false).await;
        self.used(learner).await;
    }

    /// What the clients saw of it all.
    async fn judge(self) {
        let Rolling { cluster, load, steps } = self;
        load.finish();
        let ended: Ended = load.ended().await;
        let (version, failed) = (cluster.version(), ended.failed());
        for step in &steps {
            let here = failed.iter().filter(|call| call.start <= step.leader && call.end >= step.began);
            println!(
                "{version}: {}, may elect: {}, a leader after {} ms, errors {:?}",
                step.what,
                step.elects,
                step.leader - step.began,
                tally(here),
            );
        }
        println!("{version}: {}", ended.record.the("summary"));
        let wrongly: Vec<_> =
            failed.iter().filter(|call| !steps.iter().any(|step| step.may_fail(call))).collect();
        assert!(wrongly.is_empty(), "{version}: {:?}: {wrongly:?}", tally(wrongly.iter().copied()));
        assert!(steps.iter().any(|step| step.elects), "no leader was restarted");
        ended.streams_held();
    }
}

#[tokio::test]
async fn a_rolling_restart_and_a_replaced_member_are_seen_by_nobody() {
    for version in versions() {
        let mut rolling = Rolling::start(&version).await;
        rolling.roll(None).await;
        // Not the member that tells the history in the end.
        rolling.replace(1).await;
        rolling.judge().await;
    }
}

#[tokio::test]
async fn an_upgrade_of_a_live_cluster_is_seen_by_nobody() {
    let newest = binary::newest("3.5");
    let steps = if binary::full() {
        vec![(Version::parse("3.5.1"), newest.clone()), (newest, binary::newest("3.6"))]
    } else {
        vec![(Version::parse("3.5.1"), newest)]
    };
    for (from, to) in steps {
        let mut rolling = Rolling::start(&from).await;
        rolling.roll(Some(&to)).await;
        rolling.judge().await;
    }
}
