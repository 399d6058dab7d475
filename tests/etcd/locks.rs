//! Must show 7: locks and elections that are waited for far beyond a token's life; no key of a failed caller left behind; an
//! observer and a keepalive that outlive tokens, members and leaders. Beside it, printed: what etcd does alone.

use std::time::Duration;

use futures_util::future::join;
use keyward::pb::etcdserverpb::LeaseKeepAliveRequest;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::v3electionpb::CampaignRequest;
use keyward::pb::v3lockpb::LockRequest;
use prost::Message as _;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::Status;

use crate::caller::{Caller, Kind};
use crate::harness::binary::{self, Version};
use crate::harness::client::lifetime;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Cluster, versions, wait};
use crate::raw;
use crate::steady::{TTL, options};

const SOON: Duration = Duration::from_secs(30);
/// Three lives of a token.
const THREE: Duration = Duration::from_secs(3 * TTL as u64);
/// Longer than any test: it never ends a lease here.
const LEASE: i64 = 300;
/// etcd's own defaults.
const TIMING: (u32, u32) = (100, 1000);

struct Bench {
    cluster: Cluster,
    keyward: Keyward,
}

impl Bench {
    async fn of(version: &Version) -> Bench {
        let cluster = Cluster::start(version, options(TIMING)).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        Bench { cluster, keyward }
    }

    async fn through(&self, user: &str) -> Caller {
        Caller::log_in(self.keyward.site().listen, user).await
    }

    async fn direct(&self, user: &str) -> Caller {
        Caller::log_in(self.cluster.address(0), user).await
    }

    /// The keys in line, oldest first, read at a member with a token of its own.
    async fn line(&self, member: usize, name: &str) -> Vec<String> {
        Caller::log_in(self.cluster.address(member), "root").await.keys(&format!("{name}/")).await
    }

    async fn in_line(&self, name: &str, count: usize) {
        let look = async || (self.line(0, name).await.len() == count).then_some(());
        wait::until(SOON, &format!("{count} in line under {name}"), look).await;
    }

    /// The member that has an open call of this method.
    async fn carrier(&self, method: &str) -> usize {
        let look = async || {
            for member in 0..self.cluster.len() {
                let of = [("grpc_method", method)];
                let started = self.cluster.counter(member, "grpc_server_started_total", &of).await;
                let handled = self.cluster.counter(member, "grpc_server_handled_total", &of).await;
                if started > handled {
                    return Some(member);
                }
            }
            None
        };
        wait::until(SOON, &format!("a member carries {method}"), look).await
    }
}

fn queue(caller: &Caller, kind: Kind, name: &str, lease: i64) -> JoinHandle<Result<bytes::Bytes, Status>> {
    let (caller, name) = (caller.clone(), name.to_owned());
    tokio::spawn(async move { caller.queue(kind, &name, lease, "v").await })
}

async fn ended<T>(call: JoinHandle<T>) -> T {
    timeout(SOON, call).await.expect("the call ends").expect("no panic")
}

fn told(status: &Status) -> (i32, &str) {
    (status.code().into(), status.message())
}

/// One waits for what another holds; after three lives of a token it is released. How the wait ended, and who is in line then.
async fn held_and_awaited(bench: &Bench, caller: Caller, kind: Kind, name: &str) -> (String, bool) {
    let (held, awaited) = (caller.grant(LEASE).await, caller.grant(LEASE).await);
    let key = caller.queue(kind, name, held, "v").await.expect("nobody else is in line");
    let waiter = queue(&caller, kind, name, awaited);
    bench.in_line(name, 2).await;
    lifetime(THREE).await;
    assert!(!waiter.is_finished(), "{name}: the wait ended before the release");
    bench.direct("root").await.delete(key).await;
    let mine = format!("{name}/{awaited:x}");
    let line = async || bench.line(0, name).await;
    match ended(waiter).await {
        Ok(key) => {
            assert_eq!(key, mine);
            assert_eq!(line().await, [mine]);
            ("granted".into(), true)
        }
        Err(status) => (format!("{:?}, and in line is left {:?}", told(&status), line().await), false),
    }
}

#[tokio::test]
async fn a_wait_of_three_lives_of_a_token_is_granted() {
    for version in versions() {
        let bench = Bench::of(&version).await;
        for kind in Kind::BOTH {
            let through = held_and_awaited(&bench, bench.through("alice").await, kind, "/a/through");
            let direct = held_and_awaited(&bench, bench.direct("alice").await, kind, "/a/direct");
            let ((through, granted), (direct, _)) = join(through, direct).await;
            println!(
                "{version}: {kind:?} held and awaited for {THREE:?} with token TTL {TTL} s: {through}; directly: {direct}"
            );
            assert!(granted, "{version} {kind:?}: {through}");
            for name in ["/a/through", "/a/direct"] {
                for key in bench.line(0, name).await {
                    bench.direct("root").await.delete(key).await;
                }
            }
        }
    }
}

/// How a caller in line fails.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Cancels,
    Dies,
    RunsOutOfTime,
}

/// Whether the failed caller's key was still there after `patience`.
async fn fails(
    bench: &Bench,
    address: std::net::SocketAddr,
    kind: Kind,
    how: Failure,
    name: &str,
    patience: Duration,
) -> bool {
    let caller = Caller::log_in(address, "alice").await;
    let (held, lost) = (caller.grant(LEASE).await, caller.grant(LEASE).await);
    caller.queue(kind, name, held, "v").await.expect("nobody else is in line");
    match how {
        Failure::Cancels => {
            let waiter = queue(&caller, kind, name, lost);
            bench.in_line(name, 2).await;
            lifetime(Duration::from_millis(300)).await;
            waiter.abort();
        }
        Failure::Dies | Failure::RunsOutOfTime => {
            let (path, message) = match kind {
                Kind::Lock => (
                    "/v3lockpb.Lock/Lock",
                    LockRequest { name: name.to_owned().into(), lease: lost }.encode_to_vec(),
                ),
                Kind::Campaign => {
                    let (name, value) = (name.to_owned().into(), "v".into());
                    (
                        "/v3electionpb.Election/Campaign",
                        CampaignRequest { name, lease: lost, value }.encode_to_vec(),
                    )
                }
            };
            let mut call = raw::Call::unary(path, &message).with("token", caller.token());
            if matches!(how, Failure::RunsOutOfTime) {
                call = call.with("grpc-timeout", "1S");
            }
            let endpoint = raw::Endpoint::plain(address);
            let stands = async {
                bench.in_line(name, 2).await;
                lifetime(Duration::from_millis(300)).await;
                if matches!(how, Failure::RunsOutOfTime) {
                    std::future::pending::<()>().await;
                }
            };
            // Dropped with its socket: no reset, no goodbye.
            tokio::select! {
                answer = endpoint.call(&call) => {
                    assert!(matches!(how, Failure::RunsOutOfTime), "{answer:?}");
                }
                () = stands => {}
            }
        }
    }
    let only = [format!("{name}/{held:x}")];
    let gone = async || (bench.line(0, name).await == only).then_some(());
    let left = wait::within_limit(patience, gone).await.is_none();
    for key in bench.line(0, name).await {
        bench.direct("root").await.delete(key).await;
    }
    left
}

#[tokio::test]
async fn a_failed_caller_leaves_no_key() {
    for version in versions() {
        let bench = Bench::of(&version).await;
        let (through, direct) = (bench.keyward.site().listen, bench.cluster.address(0));
        for kind in Kind::BOTH {
            for how in [Failure::Cancels, Failure::Dies, Failure::RunsOutOfTime] {
                let left = fails(&bench, through, kind, how, "/a/through", SOON).await;
                // etcd does not try for longer than that.
                let alone = fails(&bench, direct, kind, how, "/a/direct", Duration::from_secs(3)).await;
                println!(
                    "{version}: {kind:?}, the caller in line {how:?}: key left behind: {left}; directly: {alone}"
                );
                assert!(!left, "{version} {kind:?} {how:?}");
            }
        }
        let removed = bench.keyward.metric("keyward_lock_keys_removed_total", &[]).await;
        assert_eq!(removed, 6.0, "{version}: each by Keyward, since etcd cannot");
    }
}

#[tokio::test]
async fn a_drained_replica_leaves_no_key() {
    for version in versions() {
        let Bench { cluster, keyward } = Bench::of(&version).await;
        let caller = Caller::log_in(keyward.site().listen, "alice").await;
        let (held, lost) = (caller.grant(LEASE).await, caller.grant(LEASE).await);
        caller.queue(Kind::Lock, "/a/l", held, "v").await.expect("nobody else is in line");
        let waiter = queue(&caller, Kind::Lock, "/a/l", lost);
        let root = Caller::log_in(cluster.address(0), "root").await;
        let two = async || (root.keys("/a/l/").await.len() == 2).then_some(());
        wait::until(SOON, "two in line", two).await;
        lifetime(Duration::from_millis(300)).await;
        let (_, _site) = keyward.terminate().await;
        let status = ended(waiter).await.expect_err("the replica ends");
        assert_eq!(told(&status), (14, "etcdserver: server stopped"));
        let root = Caller::log_in(cluster.address(0), "root").await;
        assert_eq!(root.keys("/a/l/").await, [format!("/a/l/{held:x}")], "{version}");
    }
}

/// Two wait; the member that carries the first is killed. Both get their turn, in the order in which they came.
#[tokio::test]
async fn a_wait_outlives_its_member_and_keeps_its_place() {
    for version in versions() {
        for kind in Kind::BOTH {
            let mut bench = Bench::of(&version).await;
            let caller = bench.through("alice").await;
            let mut leases = Vec::new();
            for _ in 0..3 {
                leases.push(caller.grant(LEASE).await);
            }
            let name = "/a/l";
            let key = caller.queue(kind, name, leases[0], "v").await.expect("nobody else is in line");
            let first = queue(&caller, kind, name, leases[1]);
            bench.in_line(name, 2).await;
            let carrier = bench.carrier(kind.method()).await;
            let second = queue(&caller, kind, name, leases[2]);
            bench.in_line(name, 3).await;
            let before = bench.line(0, name).await;
            bench.cluster.kill(carrier);
            let other = (carrier + 1) % 3;
            let leader = bench.cluster.leader().await;
            lifetime(THREE).await;
            let root = Caller::log_in(bench.cluster.address(leader), "root").await;
            assert_eq!(bench.line(other, name).await, before, "{version} {kind:?}: nobody lost his place");
            assert!(!first.is_finished() && !second.is_finished());
            root.delete(key).await;
            let key = ended(first).await.unwrap_or_else(|status| panic!("{version} {kind:?}: {status:?}"));
            assert_eq!(key, before[1]);
            assert!(!second.is_finished());
            Caller::log_in(bench.cluster.address(leader), "root").await.delete(key).await;
            let key = ended(second).await.unwrap_or_else(|status| panic!("{version} {kind:?}: {status:?}"));
            assert_eq!(key, before[2]);
            println!(
                "{version}: {kind:?}: the member of the first of two was killed; both were granted, in order"
            );
        }
    }
}

/// Ten lives of a token, a leader moved and a leader killed: every answer comes, in order, and says that the lease lives.
#[tokio::test]
async fn a_keepalive_outlives_ten_tokens_and_two_leaders() {
    const ROUNDS: u64 = 10 * TTL as u64;
    for version in versions() {
        let mut bench = Bench::of(&version).await;
        let alice = bench.through("alice").await;
        let lease = alice.grant(10).await;
        alice.put("/a/leased", b"v".to_vec(), lease).await.expect("written");
        let (asks, asked) = tokio::sync::mpsc::channel(1);
        let stream = futures_util::stream::unfold(asked, |mut asked| async {
            asked.recv().await.map(|one: LeaseKeepAliveRequest| (one, asked))
        });
        let mut answers = LeaseClient::new(alice.channel.clone())
            .lease_keep_alive(alice.request(stream))
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

/// Proclamations over three lives of a token, a change of leaders and the kill of the observer's member.
#[tokio::test]
async fn an_observer_sees_each_leader_once_and_in_order() {
    for version in versions() {
        let mut bench = Bench::of(&version).await;
        let name = "/a/e";
        let alice = bench.through("alice").await;
        let alone = tokio::spawn(record(bench.direct("alice").await, name));
        let mut observer = alice.observe(name).await.expect("a stream");
        let (seen, mut told) = tokio::sync::mpsc::unbounded_channel();
        let follow = tokio::spawn(async move {
            loop {
                match observer.message().await {
                    Ok(Some(answer)) => {
                        let leader = answer.kv.expect("a leader");
                        let at = (leader.create_revision, leader.mod_revision);
                        seen.send((at, String::from_utf8_lossy(&leader.value).into_owned())).expect("read");
                    }
                    end => return end.map(|_| ()),
                }
            }
        });
        let (one, two) = (alice.grant(LEASE).await, alice.grant(LEASE).await);
        let proclaim = async |lease: i64, value: &str| {
            alice.queue(Kind::Campaign, name, lease, value).await.expect("it leads");
        };
        let mut all = Vec::new();
        let mut expect = async |value: &str| {
            let next = async {
                loop {
                    let one = told.recv().await.expect("the observer goes on");
                    let last = one.1 == value;
                    all.push(one);
                    if last {
                        return;
                    }
                }
            };
            timeout(SOON, next)
                .await
                .unwrap_or_else(|_| panic!("{version}: {value} was not told: {:?}", follow.is_finished()));
        };
        proclaim(one, "1").await;
        expect("1").await;
        proclaim(one, "2").await;
        expect("2").await;
        lifetime(THREE).await;
        // A new leader has to be read, with the token of the stream.
        let next = queue_value(&alice, name, two, "3");
        bench.in_line(name, 2).await;
        bench.direct("root").await.delete(format!("{name}/{one:x}")).await;
        ended(next).await.expect("elected");
        expect("3").await;
        let carrier = bench.carrier("Observe").await;
        bench.cluster.kill(carrier);
        bench.cluster.leader().await;
        for value in ["4", "5"] {
            proclaim(two, value).await;
            expect(value).await;
        }
        assert!(
            all.windows(2).all(|pair| pair[0].0 < pair[1].0),
            "{version}: order, and no leader twice: {all:?}"
        );
        assert!(!follow.is_finished());
        let alone = if alone.is_finished() {
            format!("{:?}", alone.await.expect("no panic"))
        } else {
            "goes on".into()
        };
        println!(
            "{version}: observed {:?}; directly: {alone}",
            all.iter().map(|one| &one.1[..]).collect::<Vec<_>>()
        );
        follow.abort();
        if binary::full() {
            assert!(bench.keyward.metric("keyward_observe_resumes_total", &[]).await >= 1.0);
        }
    }
}

fn queue_value(
    caller: &Caller,
    name: &str,
    lease: i64,
    value: &str,
) -> JoinHandle<Result<bytes::Bytes, Status>> {
    let (caller, name, value) = (caller.clone(), name.to_owned(), value.to_owned());
    tokio::spawn(async move { caller.queue(Kind::Campaign, &name, lease, &value).await })
}

/// What an observer saw, and how its stream ended.
async fn record(caller: Caller, name: &str) -> (Vec<String>, Result<(), String>) {
    let mut seen = Vec::new();
    // etcd answers a stream with its first message.
    let mut stream = match caller.observe(name).await {
        Ok(stream) => stream,
        Err(status) => return (seen, Err(status.message().to_owned())),
    };
    loop {
        match stream.message().await {
            Ok(Some(answer)) => {
                seen.push(String::from_utf8_lossy(&answer.kv.expect("a leader").value).into_owned());
            }
            Ok(None) => return (seen, Ok(())),
            Err(status) => return (seen, Err(status.message().to_owned())),
        }
    }
}
