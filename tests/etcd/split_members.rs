//! Members with other contents behind the same revision, as after a request that split them, are told by `keyward doctor` and
//! `keyward check --dial`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, every_version, newest, versions, wait};
use crate::revocations::command;

const LIMIT: Duration = Duration::from_secs(60);
const RIGHT: &[u8] = b"the-contents-of-all";
const WRONG: &[u8] = b"the-contents-of-one";

/// The database of a member that has a name like the others.
fn database(cluster: &Cluster, member: usize) -> PathBuf {
    let mut folders: Vec<_> = std::fs::read_dir(cluster.folder())
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path().join("member/snap/db"))
        .filter(|path| path.exists())
        .collect();
    folders.sort();
    folders.swap_remove(member)
}

/// Replaces a value in the database of a member that has ended: bbolt has checksums of its two meta pages only.
fn replace(path: &Path) -> usize {
    let mut bytes = std::fs::read(path).expect("a database");
    let places: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(RIGHT)).collect();
    for at in &places {
        bytes[*at..*at + WRONG.len()].copy_from_slice(WRONG);
    }
    std::fs::write(path, bytes).expect("written");
    places.len()
}

/// A cluster of three members, of which the last has other contents behind the same revision.
async fn split(version: &Version, auth: Auth) -> Cluster {
    let mut cluster = Cluster::start(version, Options { members: 3, auth, ..Options::default() }).await;
    let ctl = cluster.ctl_as_root();
    ctl.ok(&["put", "/k", str::from_utf8(RIGHT).expect("text")]).await;
    let path = database(&cluster, 2);
    wait::until(LIMIT, "the value is in the file", async || {
        let bytes = std::fs::read(&path).expect("a database");
        bytes.windows(RIGHT.len()).any(|window| window == RIGHT).then_some(())
    })
    .await;
    cluster.kill(2);
    assert!(replace(&path) > 0);
    cluster.restart(2).await;
    ctl.ok(&["put", "/after", "v"]).await;
    cluster
}

async fn start(cluster: &Cluster, change: impl FnOnce(String) -> String) -> Keyward {
    let site = Site::new();
    let config = change(format!("{}admin.socket = \"admin.sock\"\n", site.in_front_of(cluster)));
    Keyward::start(site, &config).await
}

/// What a command finds of members that differ, once all members are ready: about whom, and the text.
async fn differing(keyward: &Keyward, arguments: &[&str]) -> Vec<(String, String)> {
    wait::until(LIMIT, "every member is looked at", async || {
        let (_, said) = command(keyward, arguments).await;
        let report: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}"));
        let findings = report["findings"].as_array().expect("findings");
        if findings.iter().any(|one| one["check"] == "member_unreachable" || one["check"] == "serving") {
            return None;
        }
        let unseen = report["unseen"].to_string();
        assert!(!unseen.contains("hash"), "{said}");
        let found = findings.iter().filter(|one| one["check"] == "members_differ");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        Some(found.map(|one| (text(&one["about"]), one.to_string())).collect())
    })
    .await
}

const DOCTOR: [&str; 3] = ["doctor", "-o", "json"];
const CHECK: [&str; 4] = ["check", "--dial", "-o", "json"];

async fn is_told(keyward: &Keyward, cluster: &Cluster, arguments: &[&str]) {
    let found = differing(keyward, arguments).await;
    // A member has no name before it has published it.
    let id = format!("{:x}", cluster.member_id(2).await);
    let [(about, said)] = &found[..] else { panic!("{found:?}") };
    assert!(about.contains(&id) && said.contains("HashKV hashes are"), "{id}: {said}");
    assert!(said.contains("which agree; remove the rest"), "{said}");
}

#[tokio::test]
async fn a_split_that_no_revision_shows_is_told() {
    for version in versions() {
        let cluster = split(&version, Auth::Off).await;
        let keyward = start(&cluster, |config| config).await;
        is_told(&keyward, &cluster, &DOCTOR).await;
        is_told(&keyward, &cluster, &CHECK).await;
    }
}

/// With auth on, etcd tells the hashes to the role root alone.
#[tokio::test]
async fn with_auth_a_split_is_told_to_a_probe_with_the_role_root() {
    let version = newest("3.5");
    let cluster = split(&version, Auth::On { extra_users: 0 }).await;
    let keyward = start(&cluster, |config| config).await;
    is_told(&keyward, &cluster, &DOCTOR).await;
    drop(keyward);
    let ctl = cluster.ctl_as_root();
    ctl.ok(&["user", "add", "probe:p"]).await;
    let as_probe =
        |config: String| config.replace("cluster.probe.user = \"root\"", "cluster.probe.user = \"probe\"");
    let site = Site::new();
    let config = as_probe(format!("{}admin.socket = \"admin.sock\"\n", site.in_front_of(&cluster)));
    std::fs::write(site.file("root-password"), "p").expect("written");
    let keyward = Keyward::start(site, &config).await;
    assert_eq!(differing(&keyward, &DOCTOR).await, []);
    // The role is seen without a restart.
    ctl.ok(&["user", "grant-role", "probe", "root"]).await;
    is_told(&keyward, &cluster, &DOCTOR).await;
}

/// Also where the revision is the compacted one and a deletion, which versions hash differently.
#[tokio::test]
async fn members_of_one_content_do_not_differ() {
    for version in every_version() {
        let cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        let keyward = start(&cluster, |config| config).await;
        let ctl = cluster.ctl();
        for write in [
            &["put", "/k", "1"][..],
            &["put", "/l", "1"],
            &["del", "/k"],
            &["compact", "3"],
            &["put", "/l", "2"],
        ] {
            ctl.ok(write).await;
        }
        for arguments in [&DOCTOR[..], &CHECK] {
            assert_eq!(differing(&keyward, arguments).await, [], "{version}");
        }
        let members = cluster.len();
        let asked = async |member| {
            cluster
                .counter(
                    member,
                    "grpc_server_handled_total",
                    &[("grpc_method", "HashKV"), ("grpc_code", "OK")],
                )
                .await
        };
        let mut hashes = 0.0;
        for member in 0..members {
            hashes += asked(member).await;
        }
        assert!(hashes >= 2.0 * 3.0, "{version}: {hashes} hashes were asked for");
    }
}
