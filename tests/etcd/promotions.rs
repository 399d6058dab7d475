//! Story 5: with auth on, a promotion that lands on a follower is passed on without credentials, and times out. Through Keyward
//! it never lands there.

use std::time::{Duration, Instant};

use crate::harness::binary::full;
use crate::harness::ctl::{Ctl, Ended};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, every_version, wait};
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
    root.remove_member(id).await;
    cluster.forget_newest();
}

#[tokio::test]
async fn members_are_promoted_whoever_is_asked() {
    let (rounds, direct_rounds) = if full() { (20, 5) } else { (3, 1) };
    for version in every_version() {
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

/// It was added, promoted and made the leader behind Keyward's back, since Keyward last asked for the member list.
#[tokio::test]
async fn a_promotion_finds_a_leader_that_was_added_a_moment_ago() {
    for version in every_version() {
        let mut cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        let site = Site::new();
        let (config, listen) = (site.in_front_of(&cluster), site.listen);
        let keyward = Keyward::start(site, &config).await;
        let through = cluster.ctl().to(vec![format!("http://{listen}")]);
        let direct = cluster.ctl();
        let next = cluster.add_learner().await;
        let next_id = cluster.member_id(next).await;
        assert_eq!(promoted(&direct, next_id).await.code, Some(0));
        let learner = cluster.add_learner().await;
        let learner_id = cluster.member_id(learner).await;
        let leader = cluster.leader().await;
        direct.to(vec![cluster.url(leader)]).ok(&["move-leader", &format!("{next_id:x}")]).await;
        let began = Instant::now();
        let said = promoted(&through, learner_id).await;
        println!("{version}: promoted after {:?}: {said:?}", began.elapsed());
        assert_eq!(said.code, Some(0), "{version}");
        assert_eq!(cluster.leader().await, next, "{version}: it led all the time");
        drop(keyward);
    }
}
