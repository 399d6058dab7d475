//! Must show 4 of the JSON face: the tests that OpenStack's etcd3gw ships, and tooz on top of it, pass through Keyward as directly. With
//! auth on they pass too, as the user of the listener: etcd3gw itself cannot log in, and directly nothing of it works then.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;

use crate::harness::binary::{Version, full};
use crate::harness::client_program::client_program;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::process::Process;
use crate::harness::{Auth, Cluster, Options, newest, password, versions};

const LIMIT: Duration = Duration::from_secs(120);
/// The tests of etcd3gw 2.7.0, and one of tooz.
const ALL: (&str, u64) = ("", 40);
/// One that writes and reads.
const ONE: &str = "test_client_with_keys_and_values";

/// The tests by outcome, with what failed ones said.
async fn suite(
    address: SocketAddr,
    cluster: &Cluster,
    label: &str,
    (only, count): (&str, u64),
) -> BTreeMap<String, Vec<String>> {
    let log = cluster.folder().join(format!("suite {label}"));
    let port = address.port().to_string();
    let process = Process::start(
        "etcd3gw",
        &client_program("etcd3gw", &[]),
        ["--port", &port, "--only", only],
        &[],
        &log,
    );
    let exit = process.ended(LIMIT).await;
    assert!(exit.success(), "{label}: {}", process.tail());
    let mut outcomes = BTreeMap::<String, Vec<String>>::new();
    let mut ran = 0;
    for line in process.output().lines().filter(|line| line.starts_with('{')) {
        let line: Value = serde_json::from_str(line).expect("a line of the contract");
        let Some(outcome) = line["outcome"].as_str() else {
            ran = line["ran"].as_u64().expect("the last line counts");
            continue;
        };
        let told = format!("{}: {}", line["id"], line["detail"]);
        outcomes.entry(outcome.into()).or_default().push(told);
    }
    assert_eq!(ran, count, "{label}");
    let counts: Vec<_> =
        outcomes.iter().map(|(outcome, tests)| format!("{} {outcome}", tests.len())).collect();
    println!("{} {label}: {}", cluster.version(), counts.join(", "));
    outcomes
}

fn all_passed(outcomes: &BTreeMap<String, Vec<String>>, label: &str) {
    let others: Vec<_> = outcomes.iter().filter(|(outcome, _)| *outcome != "passed").collect();
    assert!(others.is_empty(), "{label}: {others:#?}");
}

async fn auth_off(version: &Version) {
    let cluster = Cluster::start(version, Options::default()).await;
    all_passed(&suite(cluster.address(0), &cluster, "directly", ALL).await, "directly");
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &config).await;
    all_passed(&suite(keyward.site().listen, &cluster, "through Keyward", ALL).await, "through Keyward");
}

async fn auth_on(version: &Version) {
    let auth = Auth::On { extra_users: 0 };
    let cluster = Cluster::start(version, Options { auth, token_ttl: Some(5), ..Options::default() }).await;
    let root = cluster.ctl_as_root();
    root.ok(&["role", "add", "openstack"]).await;
    root.ok(&["role", "grant-permission", "openstack", "readwrite", "", "--from-key"]).await;
    root.ok(&["user", "add", &format!("openstack:{}", password("openstack"))]).await;
    root.ok(&["user", "grant-role", "openstack", "openstack"]).await;
    let site = Site::new();
    let secret = site.write("openstack.password", &password("openstack"));
    let config = site.listening(&cluster, ", default_user = \"openstack\"")
        + &format!("[[user]]\nname = \"openstack\"\npassword_file = {secret:?}\n");
    let keyward = Keyward::start(site, &config).await;
    let label = "through Keyward, auth on";
    all_passed(&suite(keyward.site().listen, &cluster, label, ALL).await, label);
    let directly = suite(cluster.address(0), &cluster, "directly, auth on", (ONE, 1)).await;
    assert_eq!(directly["failed"].len(), 1, "etcd3gw cannot log in: {directly:#?}");
}

#[tokio::test]
async fn the_tests_of_etcd3gw_pass_through_keyward() {
    for version in if full() { versions() } else { vec![newest("3.5")] } {
        tokio::join!(auth_off(&version), auth_on(&version));
    }
}
