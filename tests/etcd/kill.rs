//! Must show 4: `kill -9` of each member in turn under load. Streams go on whole, reads do not fail, and a write fails only
//! where it was open while there was no leader.

use std::time::Duration;

use crate::harness::client::lifetime;
use crate::harness::{Cluster, binary, versions, wait};
use crate::steady::{Failed, Load, options, resumes, tally, unix_ms};

/// etcd's own defaults.
const TIMING: (u32, u32) = (100, 1000);
/// How long Keyward may take to send calls to a member that is back.
const BACK: Duration = Duration::from_secs(30);

/// One kill: from the signal to the sight of one leader, in milliseconds of the system's clock.
struct Kill {
    member: usize,
    led: bool,
    killed: i64,
    leader: i64,
    resumed: [f64; 2],
}

impl Kill {
    fn may_fail(&self, call: &Failed) -> bool {
        let write = call.op == "put" || call.op == "txn";
        write && call.code == "Unavailable" && call.start <= self.leader && call.end >= self.killed
    }
}

/// Kills a member, and returns when it is back and Keyward uses it again.
async fn kill(cluster: &mut Cluster, load: &Load, member: usize) -> Kill {
    let steady = Duration::from_secs(if binary::full() { 8 } else { 3 });
    lifetime(steady).await;
    let before = resumes(load.keyward()).await;
    let led = cluster.leader().await == member;
    let id = cluster.member_id(member).await;
    let killed = unix_ms();
    cluster.kill(member);
    cluster.leader().await;
    let leader = unix_ms();
    lifetime(steady).await;
    let after = resumes(load.keyward()).await;
    let resumed = [after[0] - before[0], after[1] - before[1]];
    cluster.restart(member).await;
    let label = format!("{id:x}");
    let ready = async || {
        let ready = load.keyward().metric("keyward_member_ready", &[("member", &label)]).await;
        (ready == 1.0).then_some(())
    };
    wait::until(BACK, "keyward uses the member again", ready).await;
    Kill { member, led, killed, leader, resumed }
}

#[tokio::test]
async fn killing_each_member_in_turn_loses_nothing() {
    for version in versions() {
        let mut cluster = Cluster::start(&version, options(TIMING)).await;
        let load = Load::start(&cluster, 0, &["--length", "5m"]).await;
        let mut kills = Vec::new();
        for member in 0..cluster.len() {
            kills.push(kill(&mut cluster, &load, member).await);
        }
        lifetime(Duration::from_secs(2)).await;
        load.finish();
        let ended = load.ended().await;
        let failed = ended.failed();
        for kill in &kills {
            let here = failed.iter().filter(|call| call.start <= kill.leader && call.end >= kill.killed);
            println!(
                "{version}: killed m{}, leader: {}, errors {:?}, a leader after {} ms, resumes of watches and keepalives {:?}",
                kill.member,
                kill.led,
                tally(here),
                kill.leader - kill.killed,
                kill.resumed,
            );
        }
        println!("{version}: {}", ended.record.the("summary"));
        assert!(kills.iter().any(|kill| kill.led), "no leader was killed");
        let wrongly: Vec<_> =
            failed.iter().filter(|call| !kills.iter().any(|kill| kill.may_fail(call))).collect();
        assert!(wrongly.is_empty(), "{version}: {:?}: {wrongly:?}", tally(wrongly.iter().copied()));
        ended.streams_held();
    }
}
