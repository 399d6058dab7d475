//! Must show 7: locks and elections that are waited for far beyond a token's life, and no key of a failed caller left behind. Beside
//! it, printed: what etcd does alone.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join;
use keyward::pb::v3electionpb::CampaignRequest;
use keyward::pb::v3lockpb::LockRequest;
use prost::Message as _;

use crate::bench::{Bench, LEASE, Open, SOON, THREE, told};
use crate::caller::{Caller, Kind};
use crate::harness::client::lifetime;
use crate::harness::{Auth, Options, versions, wait};
use crate::raw;
use crate::steady::TTL;

/// One waits for what another holds; after three lives of a token it is released. How the wait ended, and who is in line then.
async fn held_and_awaited(bench: &Bench, caller: Caller, kind: Kind, name: &str) -> (String, bool) {
    let (held, awaited) = (caller.grant(LEASE).await, caller.grant(LEASE).await);
    let key = caller.queue(kind, name, held, "v").await.expect("nobody else is in line");
    let waiter = Open::queue(&caller, kind, name, awaited, "v");
    bench.in_line(name, 2).await;
    lifetime(THREE).await;
    assert!(!waiter.is_finished(), "{name}: the wait ended before the release");
    bench.direct("root").await.delete(key).await;
    let mine = format!("{name}/{awaited:x}");
    let line = async || bench.line(0, name).await;
    match waiter.ended().await {
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
    address: SocketAddr,
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
            let waiter = Open::queue(&caller, kind, name, lost, "v");
            bench.in_line(name, 2).await;
            lifetime(Duration::from_millis(300)).await;
            drop(waiter);
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
        let waiter = Open::queue(&caller, Kind::Lock, "/a/l", lost, "v");
        let root = Caller::log_in(cluster.address(0), "root").await;
        let two = async || (root.keys("/a/l/").await.len() == 2).then_some(());
        wait::until(SOON, "two in line", two).await;
        lifetime(Duration::from_millis(300)).await;
        let (_, _site) = keyward.terminate().await;
        let status = waiter.ended().await.expect_err("the replica ends");
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
            let first = Open::queue(&caller, kind, name, leases[1], "v");
            bench.in_line(name, 2).await;
            let carrier = bench.carrier(kind.method()).await;
            let second = Open::queue(&caller, kind, name, leases[2], "v");
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
            let key = first.ended().await.unwrap_or_else(|status| panic!("{version} {kind:?}: {status:?}"));
            assert_eq!(key, before[1]);
            assert!(!second.is_finished());
            Caller::log_in(bench.cluster.address(leader), "root").await.delete(key).await;
            let key = second.ended().await.unwrap_or_else(|status| panic!("{version} {kind:?}: {status:?}"));
            assert_eq!(key, before[2]);
            println!(
                "{version}: {kind:?}: the member of the first of two was killed; both were granted, in order"
            );
        }
    }
}

/// A member makes one stream for the watches of all who wait there, and looks at the token of whoever was first (etcd-io/etcd#14850):
/// directly, a user without a right to the other's lock cannot wait for his own.
#[tokio::test]
async fn two_users_wait_at_one_member() {
    for version in versions() {
        let options =
            Options { auth: Auth::On { extra_users: 1 }, token_ttl: Some(TTL), ..Options::default() };
        let bench = Bench::with(&version, options).await;
        for (direct, address) in [(false, bench.keyward.site().listen), (true, bench.cluster.address(0))] {
            let side = if direct { "direct" } else { "through" };
            let mut waiting = Vec::new();
            for (user, name) in [("u00", format!("/u/{side}")), ("alice", format!("/a/{side}"))] {
                let caller = Caller::log_in(address, user).await;
                let (held, awaited) = (caller.grant(LEASE).await, caller.grant(LEASE).await);
                let key = caller.queue(Kind::Lock, &name, held, "v").await.expect("nobody else is in line");
                let waiter = Open::queue(&caller, Kind::Lock, &name, awaited, "v");
                bench.in_line(&name, 2).await;
                waiting.push((user, key, waiter));
            }
            lifetime(Duration::from_secs(1)).await;
            // The first one's stays until the second had its turn.
            let (user, key, waiter) = waiting.pop().expect("two");
            bench.direct("root").await.delete(key).await;
            let ended = waiter.ended().await;
            println!(
                "{version}: {user} waits beside another user, directly: {direct}: {:?}",
                ended.as_ref().map_err(told)
            );
            assert!(direct || ended.is_ok(), "{version}: {ended:?}");
            if !direct {
                assert!(!waiting[0].2.is_finished());
            }
        }
    }
}
