//! Two of three members are dead: the member that is left answers through Keyward what it answers directly, `etcdctl snapshot save` first.

use std::time::{Duration, Instant};

use crate::harness::ctl::Ctl;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, versions, wait};

const LIMIT: Duration = Duration::from_secs(60);

/// etcdctl's exit code, what it printed, and how long it took.
async fn run(ctl: &Ctl, args: &[&str]) -> (Option<i32>, String, Duration) {
    let began = Instant::now();
    let ended = ctl.run(args).await;
    (ended.code, ended.stdout + &ended.stderr, began.elapsed())
}

/// A three-member cluster that holds one key and has lost its members 1 and 2, and Keyward in front of it.
async fn without_quorum(
    options: Options,
    version: &crate::harness::binary::Version,
) -> (Cluster, Keyward, Ctl) {
    let mut cluster = Cluster::start(version, options).await;
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &config).await;
    let through = cluster.ctl_as_root().to(vec![keyward.url()]);
    through.ok(&["put", "k", "kept"]).await;
    // Each member has the key before two of them die.
    for member in 0..3 {
        cluster.ctl_as_root().to(vec![cluster.url(member)]).ok(&["get", "k"]).await;
    }
    cluster.kill(1);
    cluster.kill(2);
    let degraded = async || {
        let (code, text) = keyward.admin("/readyz").await;
        text.starts_with("degraded: ").then_some((code, text))
    };
    let (code, text) = wait::until(LIMIT, "readyz tells that only local reads are served", degraded).await;
    assert_eq!((code, text.as_str()), (200, "degraded: local reads only\n"));
    (cluster, keyward, through)
}

#[tokio::test]
async fn the_member_that_is_left_answers_local_reads_and_gives_its_snapshot() {
    for version in versions() {
        let options = Options { members: 3, ..Options::default() };
        let (cluster, keyward, through) = without_quorum(options, &version).await;
        let direct = cluster.ctl().to(vec![cluster.url(0)]);
        let file = |name: &str| keyward.site().file(name).display().to_string();
        let (ours, theirs) = (file("through.db"), file("direct.db"));
        let commands = ["get k --consistency=s", "endpoint status", "endpoint hashkv", "snapshot save"];
        for name in commands {
            let args = |file| {
                let file = (name == "snapshot save").then_some(file);
                name.split(' ').chain(file).collect::<Vec<&str>>()
            };
            let at_etcd = run(&direct, &args(&theirs)).await;
            let at_keyward = run(&through, &args(&ours)).await;
            println!(
                "{version}: two of three members dead, etcdctl {name}: directly exit {:?} after {:.0?}, through Keyward {:?} after {:.0?}",
                at_etcd.0, at_etcd.2, at_keyward.0, at_keyward.2
            );
            assert_eq!(
                (at_etcd.0, at_keyward.0),
                (Some(0), Some(0)),
                "{version} {name}: {at_etcd:?} {at_keyward:?}"
            );
        }
        let sizes = [&ours, &theirs].map(|file| std::fs::metadata(file).expect("a snapshot").len());
        assert!(sizes[0] > 20_000 && sizes[0] == sizes[1], "{version}: {sizes:?} bytes");
        // A restored member has the key.
        let status = through.ok(&["snapshot", "status", &ours]).await;
        let expected = through.ok(&["snapshot", "status", &theirs]).await;
        assert_eq!(status, expected, "{version}: hash, revision, keys and size of both snapshots");
        let refused = run(&through, &["put", "k", "lost"]).await;
        assert_ne!(refused.0, Some(0), "{version}: a write needs a quorum");
    }
}

#[tokio::test]
async fn a_user_who_logged_in_before_takes_a_snapshot_without_a_quorum() {
    for version in versions() {
        let options = Options { members: 3, auth: Auth::On { extra_users: 0 }, ..Options::default() };
        let (cluster, keyward, through) = without_quorum(options, &version).await;
        let direct = cluster.ctl_as_root().to(vec![cluster.url(0)]);
        let file = keyward.site().file("through.db").display().to_string();
        let theirs = keyward.site().file("direct.db").display().to_string();
        let at_etcd = run(&direct, &["snapshot", "save", &theirs]).await;
        let at_keyward = run(&through, &["snapshot", "save", &file]).await;
        println!(
            "{version}: the same with auth, as root: directly exit {:?} after {:.0?}, through Keyward {:?} after {:.0?}",
            at_etcd.0, at_etcd.2, at_keyward.0, at_keyward.2
        );
        assert_eq!(at_keyward.0, Some(0), "{version}: {at_keyward:?}");
    }
}
