//! `etcdctl` as it is, with `--user`, through Keyward: everything that an operator does on an ordinary day.

use std::time::Duration;

use crate::harness::ctl::Ctl;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, versions};

const SOON: Duration = Duration::from_secs(20);

async fn through(cluster: &Cluster) -> (Keyward, Ctl) {
    let site = Site::new();
    // `--cluster` of etcdctl 3.5.1 asks for the members without a token.
    let config = site.in_front_of(cluster) + "policy.require_identity = \"as-etcd\"\n";
    let keyward = Keyward::start(site, &config).await;
    // That of 3.4 names a whole URL as its `:authority` for calls that name an endpoint (status, defrag, hashkv, snapshot).
    let ctl = Ctl::new(cluster.version(), vec![keyward.url()]);
    (keyward, ctl)
}

fn three_with_auth() -> Options {
    Options { members: 3, auth: Auth::On { extra_users: 0 }, token_ttl: Some(5), ..Options::default() }
}

#[tokio::test]
async fn etcdctl_works_unchanged_through_keyward() {
    for version in versions() {
        let cluster = Cluster::start(&version, three_with_auth()).await;
        let (keyward, ctl) = through(&cluster).await;
        let (root, alice) = (ctl.as_user("root"), ctl.as_user("alice"));

        keys(&alice).await;
        streams(&cluster, &alice).await;
        members(&cluster, &keyward, &root).await;
        users(&ctl, &root).await;
        maintenance(&cluster, &root).await;

        let refused = ctl.as_user("bob").run(&["get", "/a/k"]).await;
        assert!(refused.stderr.contains("etcdserver: permission denied"), "{version}: {refused:?}");
        let wrong = ctl.with_password("alice", "wrong").run(&["get", "/a/k"]).await;
        let text = "etcdserver: authentication failed, invalid user ID or password";
        assert!(wrong.stderr.contains(text), "{version}: {wrong:?}");
        let log = keyward.log();
        for user in ["root", "alice", "bob"] {
            let password = crate::harness::password(user);
            assert!(!log.contains(&password), "{version}: the log holds the password of {user}");
        }
        assert!(!log.contains("kw1_"), "{version}: the log holds a session token");
        println!("{version}: etcdctl through Keyward: all worked");
    }
}

async fn keys(alice: &Ctl) {
    assert_eq!(alice.ok(&["put", "/a/k", "v1"]).await, "OK\n");
    assert_eq!(alice.ok(&["get", "/a/k", "--print-value-only"]).await, "v1\n");
    let txn = alice.run_with(&["txn"], "value(\"/a/k\") = \"v1\"\n\nput /a/t yes\n\nput /a/t no\n\n").await;
    assert!(txn.stdout.contains("SUCCESS"), "{txn:?}");
    assert_eq!(alice.ok(&["get", "/a/t", "--print-value-only"]).await, "yes\n");
    assert_eq!(alice.ok(&["del", "/a/k"]).await, "1\n");
    assert_eq!(alice.ok(&["get", "/a/k"]).await, "");
}

async fn streams(cluster: &Cluster, alice: &Ctl) {
    let log = |name: &str| cluster.folder().join(name);
    let watch = alice.start(&["watch", "/a/w"], &log("watch.log"));
    // The watch says nothing when it stands: writes go on until one is seen.
    let seen = watch.wrote(SOON, "an event", |text| text.contains("/a/w").then_some(()));
    let write = async {
        loop {
            alice.ok(&["put", "/a/w", "v"]).await;
        }
    };
    tokio::select! {
        () = seen => {}
        () = write => {}
    }

    let granted = alice.ok(&["lease", "grant", "60"]).await;
    let lease = granted.split_whitespace().nth(1).expect("lease ID granted").to_owned();
    let kept = alice.start(&["lease", "keep-alive", &lease], &log("keepalive.log"));
    kept.wrote(SOON, "a keepalive", |text| text.contains("keepalived").then_some(())).await;
    assert!(alice.ok(&["lease", "timetolive", &lease]).await.contains("remaining"));
    assert!(alice.ok(&["lease", "revoke", &lease]).await.contains("revoked"));

    let holder = alice.start(&["lock", "/a/lock"], &log("holder.log"));
    holder.wrote(SOON, "its key", |text| text.contains("/a/lock/").then_some(())).await;
    let waiter = alice.start(&["lock", "/a/lock"], &log("waiter.log"));
    holder.signal(rustix::process::Signal::INT);
    waiter.wrote(SOON, "its key", |text| text.contains("/a/lock/").then_some(())).await;

    let elected = alice.start(&["elect", "/a/election", "me"], &log("elect.log"));
    elected.wrote(SOON, "that it was elected", |text| text.contains("me").then_some(())).await;
    let listened = alice.start(&["elect", "--listen", "/a/election"], &log("listen.log"));
    listened.wrote(SOON, "who was elected", |text| text.contains("me").then_some(())).await;
}

async fn members(cluster: &Cluster, keyward: &Keyward, root: &Ctl) {
    let list = root.ok(&["member", "list"]).await;
    assert_eq!(list.lines().count(), 3, "{list}");
    for (i, line) in list.lines().enumerate() {
        assert!(line.contains(&keyward.url()), "a client would go past us: {line}");
        assert!(!list.contains(&cluster.url(i)), "{list}");
    }
    for i in 0..cluster.len() {
        assert!(list.contains(&format!("{:x}", cluster.member_id(i).await)), "the ids are real: {list}");
    }
    let status = root.ok(&["endpoint", "status"]).await;
    let leader = cluster.leader().await;
    assert!(status.contains(&format!("{:x}", cluster.member_id(leader).await)), "{status}");
    let health = root.run(&["endpoint", "health"]).await;
    assert_eq!(health.code, Some(0), "{health:?}");
    // The client syncs its endpoints: all of them are Keyward.
    let synced = root.ok(&["--insecure-discovery=true", "endpoint", "status", "--cluster"]).await;
    assert!(synced.lines().all(|line| line.starts_with(&keyward.url())), "{synced}");
}

async fn users(ctl: &Ctl, root: &Ctl) {
    root.ok(&["role", "add", "rc"]).await;
    root.ok(&["role", "grant-permission", "rc", "--prefix=true", "readwrite", "/c/"]).await;
    root.ok(&["user", "add", "carol:carol-first"]).await;
    root.ok(&["user", "grant-role", "carol", "rc"]).await;
    let first = ctl.with_password("carol", "carol-first");
    first.ok(&["put", "/c/k", "v"]).await;
    assert!(root.ok(&["user", "list"]).await.contains("carol"));
    assert!(root.ok(&["role", "get", "rc"]).await.contains("/c/"));
    root.ok(&["user", "delete", "carol"]).await;
    let gone = first.run(&["get", "/c/k"]).await;
    assert_ne!(gone.code, Some(0), "a deleted user still reads: {gone:?}");
    root.ok(&["user", "add", "carol:carol-second"]).await;
    root.ok(&["user", "grant-role", "carol", "rc"]).await;
    ctl.with_password("carol", "carol-second").ok(&["get", "/c/k"]).await;
    let old = first.run(&["get", "/c/k"]).await;
    assert_ne!(old.code, Some(0), "the old password still works: {old:?}");
}

async fn maintenance(cluster: &Cluster, root: &Ctl) {
    let file = cluster.folder().join("snapshot.db");
    root.ok(&["snapshot", "save", &file.display().to_string()]).await;
    let size = std::fs::metadata(&file).expect("the snapshot was written").len();
    assert_eq!(size % 512, 32, "etcd's own test of a whole snapshot: data and a sha256");
    root.ok(&["defrag"]).await;
    assert_eq!(root.ok(&["alarm", "list"]).await, "");
    root.ok(&["compaction", "2"]).await;
    root.ok(&["endpoint", "hashkv"]).await;
}
