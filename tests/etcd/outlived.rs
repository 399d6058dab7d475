//! Must show 7: a keepalive and an observer that outlive tokens, members and leaders.

use std::time::Duration;

use futures_util::stream;
use keyward::pb::etcdserverpb::LeaseKeepAliveRequest;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::bench::{Bench, LEASE, Open, SOON, THREE};
use crate::caller::{Caller, Kind};
use crate::harness::client::lifetime;
use crate::harness::keyward::Keyward;
use crate::harness::versions;
use crate::steady::TTL;

/// A leader as an observer is told: create and mod revision, value.
type Leader = (i64, i64, String);

/// Ten lives of a token, a leader moved and a leader killed: every answer comes, in order, and says that the lease lives.
#[tokio::test]
async fn a_keepalive_outlives_ten_tokens_and_two_leaders() {
    const ROUNDS: u64 = 10 * TTL as u64;
    for version in versions() {
        let mut bench = Bench::of(&version).await;
        let alice = bench.through("alice").await;
        let lease = alice.grant(10).await;
        alice.put("/a/leased", b"v".to_vec(), lease).await.expect("written");
        let (asks, asked) = mpsc::channel(1);
        let requests = stream::unfold(asked, |mut asked| async {
            asked.recv().await.map(|one: LeaseKeepAliveRequest| (one, asked))
        });
        let mut answers = LeaseClient::new(alice.channel.clone())
            .lease_keep_alive(alice.request(requests))
            .await
            .expect("a stream")
            .into_inner();
        let (mut least, mut killed) = (i64::MAX, None);
        for round in 0..ROUNDS {
            if round == ROUNDS / 3 {
                let leader = bench.cluster.leader().await;
                let next = bench.cluster.member_id((leader + 1) % 3).await;
                let at_leader = bench.cluster.ctl_as_root().to(vec![bench.cluster.url(leader)]);
                at_leader.ok(&["move-leader", &format!("{next:x}")]).await;
            }
            if round == 2 * ROUNDS / 3 {
                let leader = bench.cluster.leader().await;
                bench.cluster.kill(leader);
                killed = Some(leader);
            }
            asks.send(LeaseKeepAliveRequest { id: lease }).await.expect("the stream is open");
            let answer = timeout(SOON, answers.message()).await.expect("an answer in time");
            let answer =
                answer.unwrap_or_else(|status| panic!("{version}: {status:?}")).expect("not the end");
            assert_eq!(answer.id, lease);
            assert!(answer.ttl > 0, "{version}: told as gone in round {round}");
            least = least.min(answer.ttl);
            lifetime(Duration::from_secs(1)).await;
        }
        drop(asks);
        assert!(answers.message().await.expect("an honest end").is_none(), "a half-close is answered by OK");
        let other = (killed.expect("one was killed") + 1) % 3;
        let root = Caller::log_in(bench.cluster.address(other), "root").await;
        assert_eq!(root.keys("/a/leased").await.len(), 1, "{version}: the lease was lost");
        println!(
            "{version}: a keepalive over {ROUNDS} s, token TTL {TTL} s, leader moved and killed: {ROUNDS} answers, least TTL {least}"
        );
    }
}

/// What an observer sees, as it comes; how its stream ended.
async fn follow(caller: Caller, name: &str, seen: mpsc::Sender<Leader>) -> Result<(), String> {
    let said = |status: tonic::Status| status.message().to_owned();
    // etcd answers a stream with its first message.
    let mut leaders = caller.observe(name).await.map_err(said)?;
    while let Some(answer) = leaders.message().await.map_err(said)? {
        let leader = answer.kv.expect("a leader");
        let value = String::from_utf8_lossy(&leader.value).into_owned();
        let one = (leader.create_revision, leader.mod_revision, value);
        seen.send(one).await.expect("the test reads");
    }
    Ok(())
}

async fn resumes(keyward: &Keyward) -> f64 {
    keyward.metric("keyward_observe_resumes_total", &[]).await
}

/// Reads up to the leader with this value.
async fn until(told: &mut mpsc::Receiver<Leader>, all: &mut Vec<Leader>, value: &str) {
    while all.last().is_none_or(|last| last.2 != value) {
        let next = timeout(SOON, told.recv()).await.unwrap_or_else(|_| panic!("{value} after {all:?}"));
        all.push(next.unwrap_or_else(|| panic!("the observer ended before {value}, after {all:?}")));
    }
}

/// Proclamations over three lives of a token, a change of leaders and the kill of the observer's member.
#[tokio::test]
async fn an_observer_sees_each_leader_once_and_in_order() {
    const NAME: &str = "/a/e";
    for version in versions() {
        let mut bench = Bench::of(&version).await;
        let alice = bench.through("alice").await;
        let (direct, mut seen_directly) = mpsc::channel(64);
        let alone = Open::start(follow(bench.direct("alice").await, NAME, direct));
        let (through, mut told) = mpsc::channel(64);
        let observer = Open::start(follow(alice.clone(), NAME, through));
        let (one, two) = (alice.grant(LEASE).await, alice.grant(LEASE).await);
        let proclaim = async |lease: i64, value: &str| {
            alice.queue(Kind::Campaign, NAME, lease, value).await.expect("it leads");
        };
        let mut all = Vec::new();
        for value in ["1", "2"] {
            proclaim(one, value).await;
            until(&mut told, &mut all, value).await;
        }
        lifetime(THREE).await;
        // A new leader has to be read, with the token of the stream.
        let next = Open::queue(&alice, Kind::Campaign, NAME, two, "3");
        bench.in_line(NAME, 2).await;
        bench.direct("root").await.delete(format!("{NAME}/{one:x}")).await;
        next.ended().await.expect("elected");
        until(&mut told, &mut all, "3").await;
        let mut directly = Vec::new();
        while let Ok(one) = seen_directly.try_recv() {
            directly.push(one);
        }
        let end = if alone.is_finished() {
            format!("{:?}", alone.ended().await)
        } else {
            drop(alone);
            "goes on".into()
        };
        let before = resumes(&bench.keyward).await;
        let carrier = bench.carrier("Observe").await;
        bench.cluster.kill(carrier);
        bench.cluster.leader().await;
        for value in ["4", "5"] {
            proclaim(two, value).await;
            until(&mut told, &mut all, value).await;
        }
        assert!(resumes(&bench.keyward).await > before, "{version}: its member was killed");
        let rising = all.windows(2).all(|pair| (pair[0].0, pair[0].1) < (pair[1].0, pair[1].1));
        assert!(rising, "{version}: in order, none twice: {all:?}");
        assert!(!observer.is_finished() && told.is_empty());
        let values = |leaders: &[Leader]| leaders.iter().map(|one| one.2.clone()).collect::<Vec<_>>();
        println!("{version}: observed {:?}; directly {:?}, then {end}", values(&all), values(&directly));
    }
}
