//! The alerts and the dashboard of `deploy/monitoring`, in a real Prometheus that scrapes Keyward in front of real etcd servers: each
//! alert that can be provoked fires and is resolved, a healthy replica raises none, and every panel has data. The alerts that cannot
//! be provoked in a test's time are fired and resolved by `promtool test rules` alone, as all the others are too.

mod incidents;
mod panels;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::client_program::client_program;
use crate::harness::prometheus::{RULES, programs};

/// The alerts that only `promtool test rules` fires: audit files that are too few for the records of an hour, a member so slow that it is
/// ejected for good, 5,000 raft entries behind, name servers and a disk that fail (`tests/it/name_servers.rs`, `tests/cli/state_files.rs`), an
/// error that has no other alert, and a bug of Keyward.
const NOT_PROVOKED: [&str; 7] = [
    "KeywardAuditKeptTooShort",
    "KeywardLoggedError",
    "KeywardMemberEjected",
    "KeywardMemberLagging",
    "KeywardNamesFail",
    "KeywardPanicked",
    "KeywardStateFileUnwritten",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn read(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|fault| panic!("{name}: {fault}"))
}

/// The names of all alerts.
fn alerts() -> BTreeSet<String> {
    let rules = read(RULES);
    let names = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let names: BTreeSet<String> = names.map(str::to_owned).collect();
    assert!(names.len() > 11, "{names:?}");
    names
}

/// Runs promtool with this input, and returns its output.
fn promtool(args: &[&str], input: &str) -> String {
    let mut command = Command::new(programs().join("promtool"));
    command.args(args).current_dir(root()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().expect("promtool runs");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(input.as_bytes()).expect("promtool reads its input");
    drop(stdin);
    let ended = child.wait_with_output().expect("promtool ends");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = text(&ended.stdout) + &text(&ended.stderr);
    assert!(ended.status.success(), "promtool {args:?}: {said}");
    said
}

/// The tests themselves are checked, too: each fires its alert and no other, and has no alert at its end.
#[test]
fn promtool_finds_no_fault_and_fires_and_resolves_every_alert() {
    let checked = promtool(&["check", "rules", RULES], "");
    assert!(checked.contains("SUCCESS"), "{checked}");
    let tests = read("deploy/monitoring/alerts_test.yaml");
    for alert in alerts() {
        let test = tests.split("\n  - name: ").find(|test| test.lines().next() == Some(&alert));
        let test = test.unwrap_or_else(|| panic!("no test of {alert}"));
        assert!(test.contains(&format!("exp_samples: [{{labels: '{{alertname=\"{alert}\"}}', value: 1}}]")));
        assert!(
            test.trim_end().lines().last().is_some_and(|line| line.ends_with("exp_samples: []}")),
            "{test}"
        );
    }
    let tested = promtool(&["test", "rules", "deploy/monitoring/alerts_test.yaml"], "");
    assert!(tested.contains("SUCCESS"), "{tested}");
}

/// Reads the dashboard by the types of Grafana's own schema.
#[test]
fn grafanas_schema_accepts_the_dashboard() {
    let program = client_program("dashboard", &[]);
    let check = |dashboard: &str| {
        let mut child = Command::new(&program);
        let child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("the program runs");
        child.stdin.take().expect("piped").write_all(dashboard.as_bytes()).expect("it reads its input");
        let ended = child.wait_with_output().expect("it ends");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (ended.status.code(), text(&ended.stdout) + &text(&ended.stderr))
    };
    let dashboard = read(panels::DASHBOARD);
    let panels = panels::panels(&dashboard).len();
    assert_eq!(check(&dashboard), (Some(0), format!("Keyward: {panels} panels\n")));
    let (code, said) = check(&dashboard.replacen("\"legendFormat\"", "\"legend\"", 1));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("unexpected field 'legend'"), "{said}");
}
