//! A member that is removed ends by itself, whoever probes it: etcd panics where it is asked for its Status in the second between
//! its removal and its end.

use std::time::Duration;

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::StatusRequest;
use keyward::pb::etcdserverpb::maintenance_client::MaintenanceClient;
use tonic::transport::Endpoint;

use crate::harness::binary::{Version, full, side_by_side};
use crate::harness::ctl::Ctl;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, versions, wait};

const LIMIT: Duration = Duration::from_secs(60);
/// Versions that are run against at the same time: they mostly wait.
const AT_A_TIME: usize = 2;
/// Direct clients that ask for Status at the same time.
const ASKERS: usize = 16;
/// Removals at most until a direct client asks in the moment that counts, which is usually the first.
const MOST_CONTROLS: usize = 20;
/// What a member writes that crashes for being asked for its Status.
const PANIC: &str = "failed to find local ID";

/// Removes the leader, which always lives on for a second: a follower may end at once. How it ended, and whether it panicked.
async fn remove_leader(cluster: &mut Cluster, by: impl Fn(&Cluster, usize) -> Ctl) -> (Option<i32>, bool) {
    let leader = cluster.leader().await;
    let id = cluster.member_id(leader).await;
    by(cluster, leader).remove_member(id).await;
    let (status, output) = cluster.removed_with_output(leader).await;
    (status.code(), output.contains(PANIC))
}

fn any_but(cluster: &Cluster, leader: usize) -> Ctl {
    let others = cluster.urls().into_iter().filter(|url| *url != cluster.url(leader));
    cluster.ctl_as_root().to(others.collect())
}

async fn all_ready(keyward: &Keyward, members: usize) {
    let ready = async || (keyward.metric("keyward_member_ready", &[]).await == members as f64).then_some(());
    wait::until(LIMIT, "all members are ready", ready).await;
}

/// What a direct client does with a Status in a loop, which is what a probe without care is.
async fn control(version: &Version) -> (Option<i32>, bool) {
    let mut cluster = Cluster::start(version, Options { members: 3, ..Options::default() }).await;
    let leader = cluster.leader().await;
    let url = cluster.url(leader);
    let asking = join_all((0..ASKERS).map(|_| {
        // Each on a connection of its own: one connection that waits for another attempt asks nothing.
        let mut client = MaintenanceClient::new(Endpoint::from_shared(url.clone()).unwrap().connect_lazy());
        async move {
            loop {
                drop(client.status(StatusRequest {}).await);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    }));
    tokio::select! {
        _ = asking => unreachable!(),
        ended = remove_leader(&mut cluster, any_but) => ended,
    }
}

#[tokio::test]
async fn a_removed_member_ends_without_a_panic_while_it_is_probed() {
    for pair in versions().chunks(AT_A_TIME) {
        tokio::task::LocalSet::new().run_until(side_by_side(pair, ends_without_a_panic)).await;
    }
}

async fn ends_without_a_panic(version: &Version) {
    // A request must fall into the moment between the removal and the end.
    let mut direct = (None, false);
    for _ in 0..MOST_CONTROLS {
        direct = control(version).await;
        if direct.1 {
            break;
        }
    }
    assert!(direct.1, "{version}: Status crashes a member that was removed, {direct:?}");
    let (mut through, mut past) = (Vec::new(), Vec::new());
    let rounds = if full() { 5 } else { 1 };
    for round in 0..rounds {
        let auth = if round % 2 == 0 { Auth::Off } else { Auth::On { extra_users: 0 } };
        let options = Options { members: 3, auth, ..Options::default() };
        let mut cluster = Cluster::start(version, options).await;
        let start = async |members: usize| {
            let site = Site::new();
            let config = site.in_front_of(&cluster);
            let keyward = Keyward::start(site, &config).await;
            all_ready(&keyward, members).await;
            keyward
        };
        // The first makes the removal, the second only sees that the member is gone.
        let all = [start(3).await, start(3).await, start(3).await];
        let url = all[0].url();
        let by_us = |cluster: &Cluster, _| cluster.ctl_as_root().to(vec![url.clone()]);
        through.push(remove_leader(&mut cluster, by_us).await);
        for keyward in &all {
            all_ready(keyward, 2).await;
        }
        past.push(remove_leader(&mut cluster, any_but).await);
        for keyward in &all {
            all_ready(keyward, 1).await;
        }
    }
    println!(
        "{version}: a removed leader that is asked for Status in a loop ended with {direct:?} (exit code, panic); \
         probed by three Keywards, removed through one of them {through:?}, directly {past:?}"
    );
    for (code, panicked) in through.into_iter().chain(past) {
        assert_eq!((code, panicked), (Some(0), false), "{version}");
    }
}
