//! Story 5: with auth on, a promotion that lands on a follower is passed on without credentials, and times out. Through Keyward
//! it never lands there.

use std::time::Duration;

use crate::harness::binary::{Version, full};
use crate::harness::ctl::{Ctl, Ended};
use crate::harness::{Auth, Cluster, Options, newest, wait};
use crate::topology::Front;

const LIMIT: Duration = Duration::from_secs(60);
/// What etcd says to a promotion that comes too early, whoever leads.
const TOO_EARLY: &str = "can only promote a learner member which is in sync with leader";

/// Promotes the newest member, once it has caught up in its leader's eyes.
async fn promoted(ctl: &Ctl, id: u64) -> Ended {
    let id = format!("{id:x}");
    let look = async || {
        let said = ctl.run(&["member", "promote", &id]).await;
        (!said.stderr.contains(TOO_EARLY)).then_some(said)
    };
    wait::until(LIMIT, "the learner is in sync", look).await
}

async fn removed(cluster: &mut Cluster, root: &Ctl, id: u64) {
    root.ok(&["member", "remove", &format!("{id:x}")]).await;
    cluster.forget_newest();
}

#[tokio::test]
async fn members_are_promoted_whoever_is_asked() {
    let (rounds, direct_rounds) = if full() { (20, 5) } else { (3, 1) };
    let oldest = Version::parse("3.5.1");
    let versions = if full() { vec![Version::parse("3.4.23"), oldest, newest("3.5")] } else { vec![oldest] };
    for version in versions {
        let options = Options { members: 3, auth: Auth::On { extra_users: 0 }, ..Options::default() };
        let mut cluster = Cluster::start(&version, options).await;
        let front = Front::before(&cluster, 4, "").await;
        let root = front.root(&cluster);

        let mut failed = Vec::new();
        for _ in 0..direct_rounds {
            let learner = cluster.add_learner().await;
            let id = cluster.member_id(learner).await;
            let follower = (cluster.leader().await + 1) % 3;
            let direct = cluster.ctl_as_root().to(vec![cluster.url(follower)]);
            let said = promoted(&direct, id).await;
            if said.code != Some(0) {
                failed.push(said.stderr.lines().last().unwrap_or_default().to_owned());
            }
            removed(&mut cluster, &root, id).await;
        }
        println!(
            "{version}: {} of {direct_rounds} promotions at a follower failed: {failed:?}",
            failed.len()
        );

        for round in 0..rounds {
            let learner = cluster.add_learner().await;
            let id = cluster.member_id(learner).await;
            let said = promoted(&root, id).await;
            assert_eq!(said.code, Some(0), "{version} round {round}: {said:?}");
            let list = root.ok(&["member", "list"]).await;
            let line = list.lines().find(|line| line.contains(&format!("{id:x}"))).expect("it is listed");
            assert!(line.ends_with("false"), "{version} round {round}: no learner any more: {list}");
            removed(&mut cluster, &root, id).await;
        }
        println!("{version}: {rounds} of {rounds} promotions through Keyward succeeded");
    }
}
