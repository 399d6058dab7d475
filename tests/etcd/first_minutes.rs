//! The first minutes with a running cluster: `keyward init` writes a configuration that `keyward check --dial` accepts and that
//! serves; a start by flags alone serves too; a wrong password and a silent member are found before a start.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::harness::ctl::Ctl;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, Tls, evidence, newest, password, versions};

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
async fn dialled(config: &str) -> (Option<i32>, Vec<String>, Value) {
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
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (Some(0), "", ""));
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
    assert_eq!(keyward(&[&init[..], &["--force"]].concat()).await.0, Some(0));
    println!("{}: {}", cluster.version(), text.lines().count());

    assert_eq!(keyward(&["check", "--config", &file]).await.0, Some(0));
    let (code, findings, report) = dialled(&file).await;
    let harmless = |one: &String| one.starts_with("warning ") || one.starts_with("note ");
    assert!(code == Some(0) && findings.iter().all(harmless), "{report}");
    assert!(!findings.iter().any(|one| one.contains("unanswered") || one.contains("probe")), "{report}");
    let serving = Keyward::start(site, &text).await;
    serves(&serving, cluster).await;
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
