//! The first minutes with a running cluster: `keyward init` writes a configuration that `keyward check --dial` accepts and that
//! serves; a start by flags alone serves too; a wrong password, a silent member, and what a start would wait for are found before a start.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::harness::ctl::Ctl;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, Tls, evidence, newest, password, versions, wait};

const LIMIT: Duration = Duration::from_secs(60);
const PROGRAM: &str = env!("CARGO_BIN_EXE_keyward");

/// The exit code, stdout and stderr of a command without a running Keyward.
async fn keyward(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = tokio::process::Command::new(PROGRAM);
    command.args(arguments).env_remove("KEYWARD_CONFIG").stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.expect("keyward runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    evidence::text(&format!("keyward {}", arguments.join(" ")), &format!("{stdout}{stderr}"));
    (output.status.code(), stdout, stderr)
}

fn name(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// The flags for this cluster, with the first member alone as the endpoint.
fn flags(site: &Site, cluster: &Cluster) -> Vec<String> {
    let mut flags = vec!["--endpoints".to_owned(), cluster.url(0)];
    flags.extend([
        "--listen".to_owned(),
        site.listen.to_string(),
        "--admin".to_owned(),
        site.admin.to_string(),
    ]);
    if cluster.options().tls != Tls::Off {
        flags.extend(["--cacert".to_owned(), name(&cluster.pki().ca)]);
    }
    if cluster.options().tls == Tls::Mutual {
        let pair = cluster.pki().nobody();
        flags.extend(["--cert".to_owned(), name(&pair.cert), "--key".to_owned(), name(&pair.key)]);
    }
    if cluster.options().auth != Auth::Off {
        let file = name(&site.write("root-password", &password("root")));
        flags.extend([
            "--probe-user".to_owned(),
            "root".to_owned(),
            "--probe-password-file".to_owned(),
            file,
        ]);
    }
    flags
}

fn strings(flags: &[String]) -> Vec<&str> {
    flags.iter().map(|flag| &**flag).collect()
}

/// The severity and name of each finding of `keyward check --dial`, with its exit code.
pub(crate) async fn dialled(config: &str) -> (Option<i32>, Vec<String>, Value) {
    let (code, stdout, stderr) = keyward(&["check", "--dial", "-o", "json", "--config", config]).await;
    let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
    let findings = report["findings"].as_array().expect("findings").iter();
    let names = findings.map(|one| format!("{} {}", one["severity"], one["check"]).replace('"', ""));
    (code, names.collect(), report)
}

/// A put through Keyward, seen at the cluster.
async fn serves(keyward: &Keyward, cluster: &Cluster) {
    let through = Ctl::new(cluster.version(), vec![keyward.url()]);
    let through = match cluster.options().auth {
        Auth::Off => through,
        Auth::On { .. } => through.as_user("root"),
    };
    through.ok(&["put", "first", "minutes"]).await;
    assert!(cluster.ctl_as_root().ok(&["get", "first"]).await.contains("minutes"));
}

async fn written_for(cluster: &Cluster) {
    let site = Site::new();
    let (flags, file) = (flags(&site, cluster), name(&site.file("written.toml")));
    let init = [&["init", "-o", &file][..], &strings(&flags)].concat();
    let (code, stdout, stderr) = keyward(&init).await;
    let next =
        format!("next:    keyward check --dial --config {file}\n         keyward serve --config {file}\n");
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let key = name(&site.file("session.key"));
    assert_eq!(stdout, format!("written: {file}, {key} (new, the same on every replica)\n{next}"));
    assert_eq!(std::fs::metadata(&file).expect("it is written").permissions().mode() & 0o777, 0o600);
    let text = std::fs::read_to_string(&file).expect("it is ours");
    assert!(!text.contains(&password("root")), "{text}");
    assert!(text.contains(&format!("etcd {}", cluster.version())), "{text}");
    for i in 0..cluster.len() {
        assert!(text.contains(&cluster.url(i)), "every member is found from the first: {text}");
    }
    let ttl = cluster.options().token_ttl.map(|seconds| format!("\ntoken_ttl = \"{seconds}s\"\n"));
    if cluster.options().auth != Auth::Off {
        assert!(text.contains(&ttl.expect("a TTL")), "etcd's command line names the TTL: {text}");
    }
    assert_eq!(keyward(&init).await.0, Some(1), "no file is replaced unasked");
    let made = std::fs::read(&key).expect("the key is made");
    let (code, stdout, _) = keyward(&[&init[..], &["--force"]].concat()).await;
    assert_eq!((code, stdout), (Some(0), format!("written: {file}\n{next}")));
    assert_eq!(std::fs::read(&key).expect("it is ours"), made, "no key is replaced");
    println!("{}: {}", cluster.version(), text.lines().count());

    let (code, _, stderr) = keyward(&["check", "--strict", "--config", &file]).await;
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let (code, findings, report) = dialled(&file).await;
    let harmless = |one: &String| one.starts_with("warning ") || one.starts_with("note ");
    assert!(code == Some(0) && findings.iter().all(harmless), "{report}");
    assert!(!findings.iter().any(|one| one.contains("unanswered") || one.contains("probe")), "{report}");
    // The default socket of the machine may be served by another process.
    let socket = format!("[admin]\nsocket = {:?}\n", site.file("admin.sock"));
    let with_socket = text.replace("[admin]\n", &socket);
    assert_ne!(with_socket, text);
    let serving = Keyward::start(site, &with_socket).await;
    serves(&serving, cluster).await;
    if cluster.options().auth != Auth::Off {
        let socket = name(&serving.site().file("admin.sock"));
        let (code, stdout, stderr) = keyward(&["doctor", "-o", "json", "--socket", &socket]).await;
        let report: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
        let of_file = ["revocation", "session", "no_probe", "admin", "plaintext_listener"];
        let findings = report["findings"].as_array().expect("findings").iter();
        let ours: Vec<&Value> = findings
            .filter(|one| {
                of_file.iter().any(|name| one["check"].as_str().is_some_and(|it| it.contains(name)))
            })
            .collect();
        assert!(ours.is_empty() && code.is_some_and(|code| code < 2), "{report}");
    }
}

#[tokio::test]
async fn a_written_configuration_is_checked_and_serves() {
    for version in versions() {
        let on = Auth::On { extra_users: 0 };
        for (auth, tls, members) in
            [(Auth::Off, Tls::Off, 3), (on, Tls::Off, 1), (on, Tls::Mutual, 1), (on, Tls::Server, 3)]
        {
            let options = Options { members, auth, tls, token_ttl: Some(77), ..Options::default() };
            written_for(&Cluster::start(&version, options).await).await;
        }
    }
}

#[tokio::test]
async fn flags_alone_serve_a_cluster_with_auth() {
    let options = Options { auth: Auth::On { extra_users: 0 }, ..Options::default() };
    let cluster = Cluster::start(&newest("3.5"), options).await;
    let site = Site::new();
    let flags = flags(&site, &cluster);
    let serving = Keyward::start_by_flags(site, &strings(&flags)).await;
    serves(&serving, &cluster).await;
}

/// What `serve` would wait for without an end is an error before a start, and told truly while it waits.
#[tokio::test]
async fn a_prefix_that_keyward_may_not_read_is_found_before_a_start() {
    for version in versions() {
        let options = Options { auth: Auth::On { extra_users: 1 }, ..Options::default() };
        let cluster = Cluster::start(&version, options).await;
        let site = Site::new();
        let whole = site.in_front_of(&cluster) + "revocation.etcd_prefix = \"/keyward/revocations/\"\n";
        let file = |text: &str| name(&site.write("keyward.toml", text));
        let (code, findings, report) = dialled(&file(&whole)).await;
        assert!(code == Some(0) && !findings.iter().any(|one| one.contains("unknown")), "{report}");

        let without_probe: Vec<&str> =
            whole.lines().filter(|line| !line.starts_with("cluster.probe")).collect();
        let nobody = without_probe.join("\n") + "\n";
        let (code, findings, report) = dialled(&file(&nobody)).await;
        assert!(code == Some(1) && findings.contains(&"error revocation_unknown".to_owned()), "{report}");
        assert!(report.to_string().contains("needs cluster.probe: auth is on"), "{report}");
        let (code, stdout, stderr) = keyward(&["check", "--config", &file(&nobody)]).await;
        assert!(
            code == Some(0) && stderr.contains("revocation.etcd_prefix: no user reads"),
            "{stdout}{stderr}"
        );

        // The policy below a prefix of its own, for a user without a role for it.
        let stranger =
            "policy.etcd_prefix = \"/keyward/policy/\"\npolicy.mode = \"shadow\"\npolicy.user = \"alice\"\n";
        let row = format!(
            "[[user]]\nname = \"alice\"\npassword_file = {:?}\n",
            site.write("alice", &password("alice"))
        );
        let (code, findings, report) = dialled(&file(&(whole.clone() + stranger + &row))).await;
        assert!(code == Some(1) && findings.contains(&"error policy_unknown".to_owned()), "{report}");
        assert!(report.to_string().contains("permission denied"), "{report}");

        let waiting = Keyward::start_unready(site, &nobody).await;
        let told = async || {
            let (status, text) = waiting.admin("/readyz").await;
            (status == 503 && text.contains("needs cluster.probe: auth is on")).then_some(text)
        };
        let text = wait::until(LIMIT, "/readyz has the reason", told).await;
        assert!(text.starts_with("the revocations are not known: "), "{text}");
        waiting
            .logged("the reason", |line| {
                line.contains("revocations cannot be read") && line.contains("needs cluster.probe")
            })
            .await;
    }
}

#[tokio::test]
async fn a_wrong_password_and_a_silent_member_are_found_before_a_start() {
    for version in versions() {
        let auth = Auth::On { extra_users: 0 };
        let mut cluster = Cluster::start(&version, Options { members: 3, auth, ..Options::default() }).await;
        let site = Site::new();
        let config = name(&site.write("keyward.toml", &site.in_front_of(&cluster)));
        let (code, findings, report) = dialled(&config).await;
        assert!(code == Some(0) && !findings.iter().any(|one| one.starts_with("error")), "{report}");

        // Members of older versions answer every question of a probe without a login.
        site.write("root-password", "another");
        let (code, findings, report) = dialled(&config).await;
        assert!(code == Some(1) && findings.contains(&"error probe_login_refused".to_owned()), "{report}");
        let (code, stdout, stderr) = keyward(&[
            "init",
            "--endpoints",
            &cluster.url(0),
            "--probe-user",
            "root",
            "--probe-password-file",
            &name(&site.file("root-password")),
        ])
        .await;
        assert!(code == Some(1) && stdout.is_empty() && stderr.contains("refuses the name"), "{stderr}");
        let (code, _, _) = keyward(&["check", "--config", &config]).await;
        assert_eq!(code, Some(0), "nothing is dialled unasked");

        site.write("root-password", &password("root"));
        cluster.kill(2);
        let (code, findings, report) = dialled(&config).await;
        let is_told = |name: &str| findings.iter().any(|one| one.ends_with(name));
        assert!(is_told(" member_unreachable") || is_told(" address_unanswered"), "{report}");
        assert!(!is_told(" probe_login_refused"), "{report}");
        println!("{version}: {code:?} {findings:?}");
    }
}
