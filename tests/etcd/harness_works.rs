//! The harness keeps its own promises. What other tests conclude from it is worth no more than this.

use std::{fs, path::Path, time::Duration};

use crate::harness::{Auth, Cluster, Options, Tls, newest, ports, versions};

const SOON: Duration = Duration::from_secs(10);

fn three_with_auth() -> Options {
    Options { members: 3, auth: Auth::On { extra_users: 2 }, token_ttl: Some(2), ..Options::default() }
}

#[tokio::test]
async fn a_cluster_survives_its_leader_and_takes_it_back() {
    for version in versions() {
        let mut cluster = Cluster::start(&version, three_with_auth()).await;
        let alice = cluster.ctl().as_user("alice");
        let old = cluster.leader().await;
        alice.ok(&["put", "/a/k", "before"]).await;

        cluster.kill(old);
        let new = cluster.leader().await;
        assert_ne!(new, old, "{version}: the killed member leads");
        let rest: Vec<String> = (0..cluster.len()).filter(|i| *i != old).map(|i| cluster.url(i)).collect();
        assert_eq!(
            alice.to(rest.clone()).ok(&["get", "/a/k", "--print-value-only"]).await,
            "before\n",
            "{version}"
        );
        alice.to(rest).ok(&["put", "/a/k", "after"]).await;

        cluster.restart(old).await;
        let restarted = alice.to(vec![cluster.url(old)]);
        assert_eq!(restarted.ok(&["get", "/a/k", "--print-value-only"]).await, "after\n", "{version}");
        let logins = [("grpc_service", "etcdserverpb.Auth"), ("grpc_method", "Authenticate")];
        assert_eq!(cluster.counter(old, "grpc_server_started_total", &logins).await, 1.0, "{version}");
        assert_eq!(
            cluster.counter(old, "grpc_server_started_total", &[("grpc_method", "Put")]).await,
            0.0,
            "{version}"
        );
    }
}

#[tokio::test]
async fn a_stopped_leader_is_replaced_and_follows_when_resumed() {
    for version in versions() {
        let mut cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        let old = cluster.leader().await;
        cluster.stop(old);
        let new = cluster.leader().await;
        assert_ne!(new, old, "{version}");
        cluster.resume(old);
        cluster.serving(old).await;
        assert_eq!(cluster.leader().await, new, "{version}");
    }
}

#[tokio::test]
async fn users_may_do_what_the_harness_says() {
    for version in versions() {
        let options = Options { auth: Auth::On { extra_users: 2 }, ..Options::default() };
        let cluster = Cluster::start(&version, options).await;
        let ctl = cluster.ctl();
        cluster.ctl_as_root().ok(&["put", "anything", "v"]).await;
        ctl.as_user("alice").ok(&["put", "/a/k", "v"]).await;
        ctl.as_user("u01").ok(&["put", "/u/k", "v"]).await;
        for (user, key) in [("alice", "/u/k"), ("bob", "/a/k"), ("u01", "/a/k")] {
            let refused = ctl.as_user(user).run(&["get", key]).await;
            assert!(refused.stderr.contains("permission denied"), "{version} {user} {key}: {refused:?}");
        }
        let refused = ctl.with_password("alice", "wrong").run(&["get", "/a/k"]).await;
        assert!(refused.stderr.contains("authentication failed"), "{version}: {refused:?}");
        let refused = ctl.run(&["get", "/a/k"]).await;
        assert!(refused.stderr.contains("user name is empty"), "{version}: {refused:?}");
    }
}

#[tokio::test]
async fn tls_is_served_and_client_certificates_are_users() {
    for version in versions() {
        let auth = Auth::On { extra_users: 0 };
        let server = Cluster::start(&version, Options { auth, tls: Tls::Server, ..Options::default() }).await;
        server.ctl().as_user("alice").ok(&["put", "/a/k", "v"]).await;

        let mutual = Cluster::start(&version, Options { auth, tls: Tls::Mutual, ..Options::default() }).await;
        let alice = mutual.ctl().with_tls(mutual.pki(), Some(mutual.pki().client("alice")));
        alice.ok(&["put", "/a/k", "v"]).await;
        let bob = mutual.ctl().with_tls(mutual.pki(), Some(mutual.pki().client("bob")));
        assert!(bob.run(&["get", "/a/k"]).await.stderr.contains("permission denied"), "{version}");
        let without = mutual.ctl().with_tls(mutual.pki(), None);
        assert_ne!(
            without.as_user("alice").run(&["get", "/a/k", "--command-timeout=1s"]).await.code,
            Some(0),
            "{version}"
        );
    }
}

#[tokio::test]
async fn a_learner_joins_and_can_be_promoted() {
    for version in versions() {
        let mut cluster = Cluster::start(&version, Options { members: 2, ..Options::default() }).await;
        let learner = cluster.add_learner().await;
        let leader = cluster.leader().await;
        assert_ne!(leader, learner, "{version}");
        let refused = cluster.ctl().to(vec![cluster.url(learner)]).run(&["put", "k", "v"]).await;
        assert!(refused.stderr.contains("rpc not supported for learner"), "{version}: {refused:?}");
        let id = format!("{:x}", cluster.member_id(learner).await);
        let promoted = cluster.ctl().to(vec![cluster.url(leader)]).ok(&["member", "promote", &id]).await;
        assert!(promoted.contains(&id), "{version}: {promoted}");
    }
}

#[tokio::test]
async fn a_command_that_goes_on_is_seen_while_it_runs() {
    let cluster = Cluster::start(&newest("3.5"), Options::default()).await;
    let watch = cluster.ctl().start(&["watch", "k", "--rev=1"], &cluster.folder().join("watch.log"));
    cluster.ctl().ok(&["put", "k", "seen"]).await;
    watch.wrote(SOON, "the event", |text| text.contains("PUT\nk\nseen\n").then_some(())).await;
    assert!(watch.exit().is_none());
    let of_the_child = format!("/proc/{}", watch.id());
    assert!(Path::new(&of_the_child).exists());
    drop(watch);
    assert!(!Path::new(&of_the_child).exists(), "a dropped process runs on");
}

#[tokio::test]
async fn a_cluster_leaves_nothing_behind() {
    let cluster = Cluster::start(&newest("3.5"), Options::default()).await;
    let (folder, address) = (cluster.folder().to_owned(), cluster.address(0));
    assert!(fs::exists(&folder).unwrap());
    drop(cluster);
    assert!(!fs::exists(&folder).unwrap());
    std::net::TcpListener::bind(address).expect("nobody listens there any more");
}

#[test]
fn ports_are_handed_out_once() {
    let mut all: Vec<_> = (0..100).map(|_| ports::free()).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 100);
}
