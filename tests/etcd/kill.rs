//! Must show 4: `kill -9` of each member in turn under load. Streams go on whole, reads do not fail, and a write fails only
//! where it was open while there was no leader.

use std::time::Duration;

use crate::harness::binary::{self, Version};
use crate::harness::client::lifetime;
use crate::harness::{Cluster, versions_that_survive_kills};
use crate::steady::{Failed, Load, options, resumes, tally, unix_ms};

/// etcd's own defaults.
const TIMING: (u32, u32) = (100, 1000);
/// A run with an election that no kill explains proves nothing, and is repeated this often.
const REPEATS: usize = 2;
/// How long Keyward may take to send calls to a member that is back.
const BACK: Duration = Duration::from_secs(30);

/// One kill: from the signal to the sight of one leader, in milliseconds of the system's clock.
struct Kill {
    member: usize,
    led: bool,
    killed: i64,
    leader: i64,
    resumed: [f64; 2],
    /// The term before the kill, and that of the leader after it.
    terms: [u64; 2],
}

impl Kill {
    fn may_fail(&self, call: &Failed) -> bool {
        let write = call.op == "put" || call.op == "txn";
        write && call.code == "Unavailable" && call.start <= self.leader && call.end >= self.killed
    }
}

/// Kills a member, and returns when it is back and Keyward uses it again.
async fn kill(cluster: &mut Cluster, load: &Load, member: usize) -> Kill {
    let steady = Duration::from_secs(if binary::full() { 10 } else { 3 });
    lifetime(steady).await;
    let before = resumes(load.keyward()).await;
    let old = cluster.leader().await;
    let id = cluster.member_id(member).await;
    let term = term(cluster, old).await;
    let killed = unix_ms();
    cluster.kill(member);
    let new = cluster.leader().await;
    let leader = unix_ms();
    let terms = [term, self::term(cluster, new).await];
    lifetime(steady).await;
    let after = resumes(load.keyward()).await;
    let resumed = [after[0] - before[0], after[1] - before[1]];
    cluster.restart(member).await;
    load.keyward().uses(id, BACK).await;
    Kill { member, led: old == member, killed, leader, resumed, terms }
}

/// The raft term that a member is in.
async fn term(cluster: &Cluster, member: usize) -> u64 {
    let ctl = cluster.ctl_as_root().to(vec![cluster.url(member)]);
    let status: serde_json::Value =
        serde_json::from_str(&ctl.ok(&["endpoint", "status", "--write-out=json"]).await).expect("JSON");
    status[0]["Status"]["raftTerm"].as_u64().expect("a term")
}

/// Whether there was an election that none of the kills explains; `last` is the term at the end.
fn elected_by_itself(kills: &[Kill], last: u64) -> bool {
    let follower = kills.iter().any(|kill| !kill.led && kill.terms[0] != kill.terms[1]);
    let between = kills.windows(2).any(|pair| pair[0].terms[1] != pair[1].terms[0]);
    follower || between || kills.last().is_some_and(|kill| kill.terms[1] != last)
}

/// Each failed call beside the first kill that it overlaps.
fn tell(version: &Version, kills: &[Kill], failed: &[Failed]) {
    let mut rest = failed.to_vec();
    for kill in kills {
        let (here, later) =
            rest.into_iter().partition(|call| call.start <= kill.leader && call.end >= kill.killed);
        rest = later;
        let here: Vec<Failed> = here;
        println!(
            "{version}: killed m{}, leader: {}, a leader after {} ms, resumes of watches and keepalives {:?}, errors {:?}",
            kill.member,
            kill.led,
            kill.leader - kill.killed,
            kill.resumed,
            tally(&here),
        );
    }
    if !rest.is_empty() {
        println!("{version}: errors beside the kills {:?}", tally(&rest));
    }
}

#[tokio::test]
async fn killing_each_member_in_turn_loses_nothing() {
    for version in versions_that_survive_kills() {
        let mut void = 0;
        loop {
            let mut cluster = Cluster::start(&version, options(TIMING)).await;
            let load = Load::start(&cluster, 0, &["--length", "5m"]).await;
            let mut kills = Vec::new();
            for member in 0..cluster.len() {
                kills.push(kill(&mut cluster, &load, member).await);
            }
            lifetime(Duration::from_secs(2)).await;
            let last = term(&cluster, cluster.leader().await).await;
            load.finish();
            let ended = load.ended().await;
            let failed = ended.failed();
            tell(&version, &kills, &failed);
            println!("{version}: {}", ended.record.the("summary"));
            if elected_by_itself(&kills, last) && void < REPEATS {
                void += 1;
                println!("{version}: void run {void}: an election that no kill explains");
                continue;
            }
            assert!(kills.iter().any(|kill| kill.led), "no leader was killed");
            let wrongly: Vec<_> =
                failed.iter().filter(|call| !kills.iter().any(|kill| kill.may_fail(call))).collect();
            assert!(wrongly.is_empty(), "{version}: {:?}: {wrongly:?}", tally(wrongly.iter().copied()));
            ended.streams_held();
            break;
        }
    }
}
