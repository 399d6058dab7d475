//! The first minutes with Keyward: a start without a file, keys from the environment and from included files, and `keyward check`
//! as a judge for people and for scripts.

use std::io::BufRead as _;

use serde_json::Value;

use super::*;

/// Starts a process and waits for a line of its log; the process is killed.
fn logged(command: &mut Command, text: &str) -> String {
    let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("keyward starts");
    let stderr = std::io::BufReader::new(child.stderr.take().expect("piped"));
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || stderr.lines().for_each(|line| drop(sender.send(line.expect("UTF-8")))));
    let found = loop {
        match lines.recv_timeout(LIMIT) {
            Ok(line) if !line.contains(text) => {}
            found => break found,
        }
    };
    child.kill().and_then(|()| child.wait()).expect("it is ours");
    found.expect("the line is logged")
}

const FLAGS: [&str; 6] = [
    "--endpoints",
    "http://127.0.0.1:1,http://127.0.0.1:2",
    "--listen",
    "127.0.0.1:0",
    "--admin",
    "127.0.0.1:0",
];

#[test]
fn flags_serve_without_a_file() {
    let line = logged(keyward(&["serve"]).args(FLAGS).env("KEYWARD_LOG__FORMAT", "json"), "listening");
    let record: Value = serde_json::from_str(&line).expect("the variable counts");
    assert_eq!(
        record["fields"]["listener"].as_str().or(record["listener"].as_str()),
        Some("clients"),
        "{line}"
    );
}

#[test]
fn without_any_key_the_ways_to_give_one_are_told() {
    let (code, stdout, stderr) = run(&mut keyward(&["serve"]));
    assert_eq!((code, stdout.as_str()), (64, ""));
    assert_eq!(paths(&stderr)[..2], ["cluster.endpoints", "listener"], "{stderr}");
    for way in ["--config FILE", "--endpoints URLS", "--listen ADDRESS", "KEYWARD_CLUSTER__ENDPOINTS="] {
        assert!(stderr.contains(way), "{way} in {stderr}");
    }
}

/// A flag with a fault is no lack of a flag.
#[test]
fn a_fault_of_a_flag_is_told_alone() {
    let given = ["--endpoints", "http://127.0.0.1:1", "--listen", "127.0.0.1:7"];
    for (flags, key) in [
        (&["--admin", "127.0.0.1:7"][..], "admin.address"),
        (&["--listen", "127.0.0.1:bad"], "listener[0].address"),
        (&["--endpoints", ""], "cluster.endpoints"),
    ] {
        let mut arguments = given.to_vec();
        if let Some(at) = arguments.iter().position(|given| *given == flags[0]) {
            arguments.drain(at..at + 2);
        }
        for command in ["check", "serve"] {
            let (code, _, stderr) = run(&mut keyward(&[&[command], &arguments[..], flags].concat()));
            assert!(code == 64 && !stderr.contains("no configuration file is named"), "{stderr}");
            assert_eq!(paths(&stderr), [key], "{stderr}");
        }
    }
    let (_, _, stderr) = run(&mut keyward(&["check", "--endpoints", "http://127.0.0.1:1"]));
    assert!(stderr.contains("no configuration file is named"), "a listener is lacking: {stderr}");
}

/// What only the cluster can tell is a warning before somebody asks it.
#[test]
fn a_prefix_that_nobody_reads_and_an_authority_of_the_members_are_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let local = "address = '127.0.0.1:7'";
    let judged_with = |lines: &str| {
        let config = tidy(folder.path(), 90, local, lines);
        let text =
            fs::read_to_string(&config).unwrap().replace("revocation.state_file = 'revocations'\n", "");
        write(folder.path(), "keyward.toml", &text);
        judged(&["--config", &config])
    };
    let found = |name: &str| (0, "warnings".to_owned(), vec![format!("warning {name}")]);
    assert_eq!(judged_with(""), found("revocation_forgotten"));
    assert_eq!(judged_with("revocation.etcd_prefix = '/keyward/revocations/'"), found("revocation_unknown"));
    write(folder.path(), "password", "secret");
    let probe = "cluster.probe = { user = 'keyward', password_file = 'password' }\n";
    let both = format!("{probe}revocation.etcd_prefix = '/keyward/revocations/'");
    assert_eq!(judged_with(&both), (0, "fine".into(), vec![]));
}

#[test]
fn faults_of_all_sources_are_told_at_once_each_with_its_source() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "more.toml", "[limits]\nconnections = 0\n");
    let config = write(folder.path(), "keyward.toml", "include = ['more.toml']\n[log]\nlevel = 'loud'\n");
    let mut command = keyward(&["check", "--config", &config, "--listen", "nowhere"]);
    command.env("KEYWARD_CLUSTER__ENDPOINTS", "ftp://a").env("KEYWARD_CLUSTER__PROBE__PASWORD_FILE", SECRET);
    let (code, stdout, stderr) = run(&mut command);
    assert_eq!((code, stdout.as_str()), (64, ""));
    let more = folder.path().join("more.toml");
    let expected = [
        "log.level: is none of off, error, warn, info, debug, trace (line 3)".to_owned(),
        "KEYWARD_CLUSTER__PROBE__PASWORD_FILE: names no key; the nearest is \
         KEYWARD_CLUSTER__PROBE__PASSWORD_FILE"
            .to_owned(),
        format!("limits.connections: must be from 1 to 16777216 (line 2 of {})", more.display()),
        "cluster.endpoints[0]: an endpoint is \"http://host:port\" or \"https://host:port\", nothing more \
         (environment variable KEYWARD_CLUSTER__ENDPOINTS)"
            .to_owned(),
    ];
    let told: Vec<&str> = stderr.lines().collect();
    assert_eq!(told[..4], expected, "{stderr}");
    assert!(told[4].starts_with("listener[0].address: ") && told[4].ends_with("(flag --listen)"), "{stderr}");
    assert_eq!(told.len(), 5, "{stderr}");
}

/// A certificate for a listener that ends in so many days, with its key.
fn certificate(folder: &Path, days: i64) {
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::new(["keyward.test".to_owned()]).expect("a name");
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    let now = time::OffsetDateTime::now_utc();
    params.not_after = now + time::Duration::days(days) + time::Duration::hours(1);
    write(folder, "server.crt", &params.self_signed(&key).expect("a certificate").pem());
    write(folder, "server.key", &key.serialize_pem());
}

/// A configuration without any finding, apart from the certificate, with these lines more.
fn tidy(folder: &Path, days: i64, listener: &str, lines: &str) -> String {
    certificate(folder, days);
    write(folder, "session.key", &"0123456789abcdef".repeat(4));
    let scheme = if listener.contains("tls") { "https" } else { "http" };
    let text = format!(
        "cluster.endpoints = ['http://127.0.0.1:1']\nsession.key_files = ['session.key']\n\
         revocation.state_file = 'revocations'\n\
         advertise.client_urls = ['{scheme}://etcd.example.com:2379']\n{lines}\n\
         [[listener]]\nname = 'a'\n{listener}\n"
    );
    write(folder, "keyward.toml", &text)
}

/// The code, the verdict, and the severity and name of each finding.
fn judged(arguments: &[&str]) -> (i32, String, Vec<String>) {
    let (code, stdout, stderr) = run(&mut keyward(&[&["check", "-o", "json"], arguments].concat()));
    assert_eq!(stderr, "");
    let report: Value = serde_json::from_str(&stdout).expect("one line of JSON");
    let findings = report["findings"].as_array().expect("findings").iter();
    let name = |one: &Value| format!("{} {}", one["severity"], one["check"]).replace('"', "");
    for one in findings.clone() {
        assert!(one["about"].is_string() && one["what"].is_string() && one["fix"].is_string(), "{one}");
    }
    assert!(report["unseen"].is_array() && report["valid"] == (code != 64), "{report}");
    (code, report["verdict"].as_str().expect("a verdict").to_owned(), findings.map(name).collect())
}

#[test]
fn a_script_reads_the_verdict_from_the_code_and_the_reasons_from_json() {
    let folder = tempfile::tempdir().unwrap();
    let tls = "address = '0.0.0.0:7'\ntls = { cert = 'server.crt', key = 'server.key' }";
    let of = |days, listener: &str, lines: &str, arguments: &[&str]| {
        let config = tidy(folder.path(), days, listener, lines);
        judged(&[&["--config", &config], arguments].concat())
    };
    let found = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    assert_eq!(of(90, tls, "", &["--strict"]), (0, "fine".into(), vec![]));
    let soon = found(&["warning certificate"]);
    assert_eq!(of(20, tls, "", &[]), (0, "warnings".into(), soon.clone()));
    assert_eq!(of(20, tls, "", &["--strict"]), (1, "warnings".into(), soon));
    assert_eq!(of(-2, tls, "", &[]), (1, "errors".into(), found(&["error certificate"])));

    let open = "address = '0.0.0.0:7'";
    let admin = "admin.address = '0.0.0.0:8'";
    let both = found(&["warning admin_open", "warning plaintext_listener"]);
    assert_eq!(of(90, open, admin, &[]), (0, "warnings".into(), both));
    // Nobody logs in there, and this machine alone reaches the other.
    let local = "address = '127.0.0.1:7'";
    assert_eq!(of(90, local, "admin.address = '[::1]:8'", &["--strict"]), (0, "fine".into(), vec![]));

    let config = tidy(folder.path(), 90, local, "");
    fs::set_permissions(folder.path().join("session.key"), fs::Permissions::from_mode(0o644)).unwrap();
    let readable = found(&["warning configuration"]);
    assert_eq!(judged(&["--config", &config, "--strict"]), (1, "warnings".into(), readable));
    let faults = found(&["error fault", "error fault"]);
    assert_eq!(of(90, local, "log.levl = 1\nwatch.buffer = 'x'", &[]), (64, "errors".into(), faults));
}

/// `serve` starts with such rules: another replica, with the same policy, may have callers for them.
#[test]
fn rules_of_no_caller_are_errors_and_no_faults() {
    let folder = tempfile::tempdir().unwrap();
    let local = "address = '127.0.0.1:7'";
    let policy = |bindings: &str| write(folder.path(), "policy.toml", bindings);
    let bound = |peer: &str| format!("[[binding]]\npeer = '{peer}'\nnamespace = '/{peer}/'\n");
    let denied = |peer: &str| format!("[[map]]\npeer = '{peer}'\ndeny = true\n");
    let lines = |rules: &str| format!("policy.file = 'policy.toml'\npolicy.mode = 'off'\n{rules}");
    let check = |rules: &str| judged(&["--config", &tidy(folder.path(), 90, local, &lines(rules))]);
    policy(&bound("password:a"));
    assert_eq!(check(&denied("password:x")), (0, "fine".into(), vec![]));
    let found = |count| vec!["error rule_unreachable".to_owned(); count];
    assert_eq!(check(&(denied("password:*") + &denied("password:x"))), (1, "errors".into(), found(1)));
    let file = policy(&(bound("password:a") + &bound("file:a")));
    assert_eq!(check(&denied("file:x")), (1, "errors".into(), found(2)));
    let config = tidy(folder.path(), 90, local, &lines(""));
    let (code, stdout, stderr) = run(&mut keyward(&["policy", "check", &file, "--config", &config]));
    assert_eq!((code, &*stdout), (1, "policy can be loaded, and has errors\n"), "{stderr}");
    assert!(stderr.contains("error: policy: binding[1]") && stderr.contains("login.sources"), "{stderr}");
    assert!(!stderr.contains("binding[0]"), "{stderr}");

    // Grants that no mode judges, because none is said.
    policy(
        "[[role]]\nname = 'r'\ndeny = [{ actions = ['write'], everything = true }]\n\
        [[binding]]\neveryone = true\nroles = ['r']\n",
    );
    let unsaid = tidy(folder.path(), 90, local, "policy.file = 'policy.toml'\naudit.events = ['changes']\n");
    let warned = vec!["warning configuration".to_owned(); 2];
    assert_eq!(judged(&["--config", &unsaid]), (0, "warnings".into(), warned));
}

#[test]
fn a_dial_tells_that_no_member_answers() {
    let folder = tempfile::tempdir().unwrap();
    let config = tidy(folder.path(), 90, "address = '127.0.0.1:7'", "");
    assert_eq!(judged(&["--config", &config]).0, 0, "nothing is dialled");
    let (code, verdict, findings) = judged(&["--config", &config, "--dial"]);
    assert_eq!((code, verdict.as_str()), (1, "errors"), "{findings:?}");
    assert!(findings.contains(&"error serving".to_owned()), "{findings:?}");
    assert!(findings.contains(&"warning address_unanswered".to_owned()), "{findings:?}");
    let (code, stdout, stderr) = run(&mut keyward(&["check", "--config", &config, "--dial"]));
    assert_eq!((code, stdout.as_str()), (1, "configuration can be loaded, and has errors\n"));
    assert!(stderr.contains("error: cluster: no calls can be served"), "{stderr}");
}

#[test]
fn init_tells_why_no_member_answers_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keyward.toml");
    let output = file.to_str().unwrap();
    let (code, stdout, stderr) =
        run(&mut keyward(&["init", "--endpoints", "http://127.0.0.1:1", "-o", output]));
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    assert!(stderr.starts_with("no member answers\nhttp://127.0.0.1:1: "), "{stderr}");
    assert!(!file.exists());
    assert!(stderr.contains("for a cluster with TLS write https://"), "{stderr}");
    // A closed port where TLS was tried: the hint to try it would be no help.
    certificate(folder.path(), 90);
    let ca = folder.path().join("server.crt");
    let (code, _, stderr) =
        run(&mut keyward(&["init", "--endpoints", "https://127.0.0.1:1", "--cacert", ca.to_str().unwrap()]));
    assert!(code == 1 && stderr.starts_with("no member answers\nhttps://127.0.0.1:1: "), "{stderr}");
    assert!(!stderr.contains("write https://"), "{stderr}");
    let (code, _, stderr) = run(&mut keyward(&["init", "--endpoints", "https://127.0.0.1:1"]));
    assert!(code == 64 && stderr.starts_with("cluster.tls.ca: "), "{code}: {stderr}");
    write(folder.path(), "keyward.toml", "kept");
    let (code, _, stderr) = run(&mut keyward(&["init", "--endpoints", "http://127.0.0.1:1", "-o", output]));
    assert!(code == 1 && stderr.contains("exists; --force replaces it"), "{code}: {stderr}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
}

#[test]
fn an_included_file_is_followed_and_its_fault_is_told_by_doctor() {
    let served = Served::start("include = ['more.toml']\n", |_, folder| {
        write(folder, "more.toml", "[limits]\nconnections = 70\n");
    });
    let folder = served.folder.path();
    write(folder, "more.toml", "[limits]\nconnections = 80\n");
    let line = served.logged("configuration reloaded");
    assert!(line.contains("limits"), "{line}");

    write(folder, "more.toml", "[limits]\nconnections = 'many'\n");
    served.logged("configuration not reloaded");
    let (code, stdout, _) = served.ask(&["doctor", "-o", "json"]);
    assert_eq!(code, 2, "{stdout}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let of = |report: &Value| {
        let all = report["findings"].as_array().expect("findings").clone();
        all.into_iter().find(|one| one["check"] == "config_not_reloaded")
    };
    let what = of(&report).expect("it is told")["what"].to_string();
    let place = format!("(line 2 of {})", folder.join("more.toml").display());
    assert!(what.contains("limits.connections: ") && what.contains(&place), "{what}");
    write(folder, "more.toml", "[limits]\nconnections = 70\n");
    served.logged("configuration reloaded");
    let (_, stdout, _) = served.ask(&["doctor", "-o", "json"]);
    assert!(of(&serde_json::from_str(&stdout).unwrap()).is_none(), "{stdout}");
}

#[test]
fn a_reload_tells_new_warnings_and_counts_the_standing() {
    let served = Served::start("", |_, _| {});
    let reloaded = || {
        let (code, stdout, _) = served.ask(&["reload"]);
        assert_eq!(code, 0, "{stdout}");
        let new: Vec<_> =
            stdout.lines().filter(|line| line.starts_with("warning: ")).map(str::to_owned).collect();
        let counted = stdout.lines().find(|line| line.ends_with("as before: keyward check prints them"));
        let count = counted.and_then(|line| line.split(' ').next()?.parse::<usize>().ok());
        (new, count.unwrap_or_else(|| panic!("{stdout}")))
    };
    let (new, standing) = reloaded();
    assert!(new.is_empty() && standing > 1, "{new:?} {standing}");
    served.configure("policy.mode = 'enforce'\n");
    let (new, still) = reloaded();
    assert!(
        new.len() == 1 && new[0].starts_with("warning: policy.mode: ") && still == standing,
        "{new:?} {still}"
    );
    assert_eq!(reloaded(), (vec![], standing + 1));
    let logged = |name: &str| {
        let (_, stdout, _) = served.ask(&["doctor", "-o", "json"]);
        let report: Value = serde_json::from_str(&stdout).expect("JSON");
        let found = report["findings"].as_array().expect("findings").iter();
        found.filter(|one| one["check"] == "logged" && one["about"] == name).count()
    };
    assert_eq!(logged("configuration_warning"), 1);
    served.configure("");
    assert_eq!(reloaded(), (vec![], standing));
    assert_eq!((logged("configuration_warning"), logged("configuration_warnings_stand")), (0, 1));
}

#[test]
fn a_command_finds_the_socket_in_a_variable_or_an_included_file() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "more.toml", "admin.socket = 'included.sock'\n");
    let config =
        write(folder.path(), "keyward.toml", "include = ['more.toml', 'absent.toml']\nnonsense = 1\n");
    let (code, _, stderr) = run(&mut keyward(&["status", "--config", &config]));
    let included = folder.path().join("included.sock");
    assert!(code == 69 && stderr.starts_with(included.to_str().unwrap()), "{code}: {stderr}");
    let mut command = keyward(&["status", "--config", &config]);
    let (code, _, stderr) = run(command.env("KEYWARD_ADMIN__SOCKET", "/nowhere/variable.sock"));
    assert!(code == 69 && stderr.starts_with("/nowhere/variable.sock: "), "{code}: {stderr}");
    let (code, _, stderr) = run(keyward(&["status"]).env("KEYWARD_ADMIN__SOCKET", ""));
    assert!(code == 64 && stderr.contains("KEYWARD_ADMIN__SOCKET"), "{code}: {stderr}");
}
