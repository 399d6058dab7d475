//! `keyward doctor` (story 7 of the design, and its sisters): what is wrong with a real cluster is named with its fix, and nothing is
//! said of one that is well.

use std::time::Duration;

use futures_util::StreamExt as _;
use keyward::pb::etcdserverpb::PutRequest;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use serde_json::Value;
use tonic::transport::Endpoint;

use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, every_version, newest, side_by_side, wait};
use crate::revocations::command;

const LIMIT: Duration = Duration::from_secs(60);
/// More than are kept without a word where nothing was ever compacted.
const MANY: usize = 10_100;

/// A replica as it should be: with a key file, and revocations in etcd.
async fn start(cluster: &Cluster, lines: &str) -> Keyward {
    let site = Site::new();
    let key = site.write("session.key", &"0123456789abcdef".repeat(4));
    let config = format!(
        "{}admin.socket = \"admin.sock\"\nsession.key_files = [{key:?}]\nrevocation.etcd_prefix = \"/keyward/\"\n{lines}",
        site.in_front_of(cluster)
    );
    Keyward::start(site, &config).await
}

/// The exit code, and what was found: severity, check, and all that is said. None while something could not be looked at.
async fn doctor(keyward: &Keyward) -> Option<(i32, Vec<(String, String, String)>)> {
    let (code, said) = command(keyward, &["doctor", "-o", "json"]).await;
    let report: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}"));
    if report["unseen"] != Value::Array(Vec::new()) {
        return None;
    }
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let found = report["findings"].as_array().expect("findings").iter();
    let found = found.map(|one| (text(&one["severity"]), text(&one["check"]), one.to_string()));
    Some((code.expect("it ends by itself"), found.collect()))
}

/// Waits until exactly these are found, and returns what is said of them.
async fn finds(keyward: &Keyward, code: i32, wanted: &[(&str, &str)]) -> Vec<String> {
    let last = std::cell::RefCell::new(None);
    let look = async || {
        let (ended, found) = doctor(keyward).await?;
        let mut seen: Vec<(&str, &str)> =
            found.iter().map(|(how, what, _)| (how.as_str(), what.as_str())).collect();
        seen.sort_unstable();
        // The holes of old versions are the subject of one test.
        seen.retain(|(how, _)| *how != "note");
        let old = seen.iter().position(|(_, what)| *what == "open_holes").map(|at| seen.remove(at)).is_some();
        let code = if old { code.max(1) } else { code };
        let mut wanted = wanted.to_vec();
        wanted.sort_unstable();
        let same = (ended, seen) == (code, wanted);
        let said = found.iter().map(|(_, _, said)| said.clone()).collect::<Vec<_>>();
        last.replace(Some((ended, said.clone())));
        same.then_some(said)
    };
    let found = wait::within_limit(LIMIT, look).await;
    found.unwrap_or_else(|| panic!("{code} {wanted:?}, but {:?}", last.into_inner()))
}

/// So many revisions of one key.
async fn write(cluster: &Cluster, count: usize, size: usize) -> usize {
    let endpoint = Endpoint::from_shared(cluster.url(0)).expect("a URL").connect().await.expect("it listens");
    let puts = futures_util::stream::iter(0..count).map(|_| {
        let mut kv = KvClient::new(endpoint.clone());
        let request =
            PutRequest { key: "/k".into(), value: vec![b'v'; size].into(), ..PutRequest::default() };
        async move { kv.put(request).await.is_ok() }
    });
    puts.buffer_unordered(64).filter(|done| std::future::ready(*done)).count().await
}

#[tokio::test]
async fn nothing_is_found_where_nothing_is_wrong() {
    for version in every_version() {
        let auth = Auth::On { extra_users: 0 };
        let cluster = Cluster::start(&version, Options { members: 3, auth, ..Options::default() }).await;
        let keyward = start(&cluster, "").await;
        finds(&keyward, 0, &[]).await;
        let (code, said) = command(&keyward, &["doctor"]).await;
        // From 3.5.33 on, of the versions under test: docs/etcd-facts.md#v12.
        if version.at_least("3.5.33") {
            assert!(code == Some(0) && said.starts_with("nothing found\n"), "{version}: {said}");
            let is_noted = said.contains("note [member_weaknesses]");
            assert_eq!(is_noted, !version.at_least("3.7.0"), "{version}: {said}");
        } else {
            assert!(code == Some(1) && said.contains("CVE-2026-33413"), "{version}: {said}");
            assert_eq!(said.matches("warning").count(), 1, "{version}: {said}");
        }
    }
}

/// Story 7: auto-compaction is silently off, the database grows to its quota, and writes stop.
#[tokio::test]
async fn a_database_that_nobody_compacts_is_found_before_and_after_it_is_full() {
    for version in every_version() {
        let cluster = Cluster::start(&version, Options::default()).await;
        let keyward = start(&cluster, "").await;
        let open = [("warning", "auth_off"), ("warning", "revocation_open")];
        finds(&keyward, 1, &open).await;
        assert_eq!(write(&cluster, MANY, 10).await, MANY);
        let kept = finds(&keyward, 1, &[&open[..], &[("warning", "no_compaction")]].concat()).await;
        let told = kept.iter().find(|said| said.contains("no_compaction")).expect("found");
        println!("{version}: {told}");
        assert!(told.contains("auto-compaction-mode"), "{told}");
        cluster.ctl().ok(&["compact", "10000"]).await;
        finds(&keyward, 1, &open).await;

        let flags = vec!["--quota-backend-bytes=8388608".into()];
        let quota = Options { members: 3, flags, ..Options::default() };
        let full = Cluster::start(&version, quota).await;
        let keyward = start(&full, "").await;
        let written = write(&full, 256, 256 * 1024).await;
        assert!(written < 256, "its quota is used up");
        // One alarm of the cluster, which every member tells, and three full databases.
        let full_stores = [("error", "db_quota"); 3];
        let wanted = [&open[..], &[("error", "alarm_nospace")], &full_stores].concat();
        let said = finds(&keyward, 2, &wanted).await;
        println!("{version}: {}", command(&keyward, &["doctor"]).await.1);
        assert!(said.iter().any(|said| said.contains("etcdctl alarm disarm")), "{said:?}");
    }
}

#[tokio::test]
async fn members_that_do_not_serve_are_found_each_with_its_reason() {
    let of_version = async |version: &Version| {
        let auth = Auth::On { extra_users: 0 };
        let mut cluster = Cluster::start(version, Options { members: 3, auth, ..Options::default() }).await;
        cluster.add_learner().await;
        let keyward = start(&cluster, "").await;
        let learner = ("warning", "learner");
        let said = finds(&keyward, 1, &[learner]).await;
        assert!(said[0].contains("etcdctl member promote"), "{said:?}");
        let follower = (cluster.leader().await + 1) % 3;
        cluster.kill(follower);
        let unreachable = async || {
            let (code, said) = command(&keyward, &["doctor"]).await;
            (code == Some(2) && said.contains("member_unreachable")).then_some(said)
        };
        let unreachable = wait::until(LIMIT, "the killed member is missed", unreachable);
        println!("{version}: {}", unreachable.await);
        let named = format!("name=\"m{follower}\"");
        let is_named = |line: &str| line.contains("member is not ready") && line.contains(&named);
        keyward.logged("the member by the name that operators gave it", is_named).await;
        cluster.restart(follower).await;
        finds(&keyward, 1, &[learner]).await;
        let ctl = cluster.ctl_as_root();
        ctl.promote(cluster.member_id(3).await).await;
        finds(&keyward, 0, &[]).await;
        // Never started.
        ctl.add_unstarted_learner("ghost", "http://127.0.0.1:1").await;
        let said = finds(&keyward, 1, &[("warning", "member_unstarted")]).await;
        assert!(said[0].contains("etcdctl member remove"), "{said:?}");
    };
    side_by_side(&every_version(), of_version).await;
}

#[tokio::test]
async fn members_of_different_versions_are_found() {
    let (old, new) = (newest("3.5"), newest("3.6"));
    let auth = Auth::On { extra_users: 0 };
    let mut cluster = Cluster::start(&old, Options { members: 3, auth, ..Options::default() }).await;
    let keyward = start(&cluster, "").await;
    cluster.bounce(1, Some(&new)).await;
    let said = finds(&keyward, 1, &[("warning", "version_skew")]).await;
    assert!(said[0].contains(&old.to_string()) && said[0].contains(&new.to_string()), "{said:?}");
}

/// What the configuration leaves open.
#[tokio::test]
async fn what_a_restart_would_lose_is_found() {
    let version = newest("3.5");
    let auth = Auth::On { extra_users: 0 };
    let cluster = Cluster::start(&version, Options { auth, ..Options::default() }).await;
    let site = Site::new();
    let config = format!("{}admin.socket = \"admin.sock\"\n", site.in_front_of(&cluster));
    let keyward = Keyward::start(site, &config).await;
    finds(&keyward, 1, &[("warning", "session_keys"), ("warning", "revocation_forgotten")]).await;
}

/// Whoever has the role root is root, whatever the name: a rule for many that leads there is named.
#[tokio::test]
async fn a_rule_for_many_that_leads_to_a_user_with_the_role_root_is_found() {
    for version in every_version() {
        let auth = Auth::On { extra_users: 0 };
        let cluster = Cluster::start(&version, Options { auth, ..Options::default() }).await;
        let root = cluster.ctl_as_root();
        // The probing user may see its own roles only; of users whom Keyward proves, each is asked itself.
        for (user, password) in [("root", "root-secret"), ("probe", "p")] {
            if user == "probe" {
                root.ok(&["user", "add", "probe:p"]).await;
            }
            let rows = "[[user]]\nname = \"alice\"\npassword_file = \"alice\"\n\
                        [[user]]\nname = \"bob\"\npassword_file = \"bob\"\n\
                        [[map]]\npeer = \"listener:*\"\nas = \"alice\"\n\
                        [mapping]\ndefault = \"bob\"\n";
            let site = Site::new();
            let key = site.write("session.key", &"0123456789abcdef".repeat(4));
            site.write("alice", &crate::harness::password("alice"));
            site.write("bob", &crate::harness::password("bob"));
            let before = site.in_front_of(&cluster);
            let file = site.write("probe-password", password);
            let probed = format!("cluster.probe.user = {user:?}\ncluster.probe.password_file = {file:?}\n");
            let lines: String = before
                .lines()
                .filter(|line| !line.contains("cluster.probe"))
                .map(|line| format!("{line}\n"))
                .collect();
            let config = format!(
                "{lines}{probed}admin.socket = \"admin.sock\"\nsession.key_files = [{key:?}]\n\
                 revocation.state_file = \"revoked\"\n{rows}"
            );
            let keyward = Keyward::start(site, &config).await;
            let found = async || {
                let (_, said) = command(&keyward, &["doctor", "-o", "json"]).await;
                let report: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}"));
                assert!(!report["unseen"].to_string().contains("role root"), "{said}");
                let findings = report["findings"].as_array().expect("findings").clone();
                let about = findings.iter().filter(|one| one["check"] == "root_by_pattern");
                about.map(|one| one["about"].as_str().expect("a text").to_owned()).collect::<Vec<_>>()
            };
            assert_eq!(found().await, Vec::<String>::new(), "{version}: asked as {user}");
            root.ok(&["user", "grant-role", "alice", "root"]).await;
            assert_eq!(found().await, ["user alice"], "{version}: asked as {user}");
            root.ok(&["user", "revoke-role", "alice", "root"]).await;
            assert_eq!(found().await, Vec::<String>::new(), "{version}: asked as {user}");
        }
    }
}
