//! An operator's evening: five incidents at once, and for each the one command that names the culprit, with its key presses and its
//! time; beside it what etcd's own tools tell.

use std::time::{Duration, Instant};

use keyward::pb::etcdserverpb::AuthenticateRequest;
use keyward::pb::etcdserverpb::auth_client::AuthClient;
use rcgen::{CertificateParams, KeyPair};
use time::OffsetDateTime;
use tokio::time::sleep;

use crate::caller::Caller;
use crate::console::{Loop, watch};
use crate::harness::keyward::{ALL_CALLS, Keyward, Site};
use crate::harness::{Auth, Cluster, Options, newest, ports, wait};
use crate::revocations::command;

const LIMIT: Duration = Duration::from_secs(60);
/// Watches that one client leaks.
const LEAKED: usize = 500;

/// What an operator typed, how long the answer took, and what names the culprit.
struct Finding {
    incident: &'static str,
    typed: String,
    took: Duration,
    culprit: String,
    etcd_says: String,
}

/// Types a command until its answer has a line with all of these texts. The time is that of the answer with the line: before it, the
/// incident has not shown yet.
async fn find(
    keyward: &Keyward,
    incident: &'static str,
    arguments: &[&str],
    names: &[&str],
    etcd_says: String,
) -> Finding {
    let look = async || {
        let began = Instant::now();
        let (_, said) = command(keyward, arguments).await;
        let took = began.elapsed();
        let line = said.lines().find(|line| names.iter().all(|name| line.contains(name)))?;
        Some((took, line.split_whitespace().collect::<Vec<_>>().join(" ")))
    };
    let typed = format!("keyward {}", arguments.join(" "));
    let (took, culprit) = wait::until(LIMIT, &format!("`{typed}` names {names:?}"), look).await;
    Finding { incident, typed, took, culprit, etcd_says }
}

/// The samples of these metrics of a member, without the comments.
async fn told_by_metrics(cluster: &Cluster, metrics: &[&str]) -> String {
    let mut told = Vec::new();
    for metric in metrics {
        told.push(format!("{metric} {}", cluster.counter(0, metric, &[]).await));
    }
    format!("/metrics: {}, without a client", told.join(", "))
}

/// A job with an old password: a connection, a login, an end.
async fn run_job(keyward: &Keyward) {
    let caller = Caller::anybody(keyward.site().listen).await;
    let login = AuthenticateRequest { name: "alice".into(), password: "the old one".into() };
    assert!(AuthClient::new(caller.channel).authenticate(login).await.is_err(), "the password is wrong");
}

/// The line about a refused login in a member's log.
fn said_of_logins(log: &str) -> Option<String> {
    let line = log.lines().rfind(|line| line.contains("authenticat") && line.contains("alice"))?;
    Some(format!("its log: {line}"))
}

/// The record of the job's login in the log.
async fn job_in_log(keyward: &Keyward, etcd_says: String) -> Finding {
    let began = Instant::now();
    let look = async || {
        let log = keyward.log();
        let is_job = |line: &&str| {
            let texts =
                ["Authenticate", "code=\"InvalidArgument\"", "reason=\"etcdserver: authentication failed"];
            texts.iter().all(|text| line.contains(text))
        };
        log.lines().rfind(is_job).map(str::to_owned)
    };
    let line = wait::until(LIMIT, "the login is in the log", look).await;
    assert!(
        line.contains("user=\"alice\"")
            && line.contains("remote=127.0.0.1:")
            && line.contains("user_agent=\"tonic/"),
        "{line}"
    );
    Finding {
        incident: "a wrong password in a job",
        typed: "journalctl -u keyward -g Authenticate -n 1".into(),
        took: began.elapsed(),
        culprit: line,
        etcd_says,
    }
}

/// Stalls a member again and again, as a disk does that is too slow, while `work` is done.
async fn with_stalls<T>(cluster: &mut Cluster, member: usize, work: impl Future<Output = T>) -> T {
    let cluster = std::cell::RefCell::new(cluster);
    let stalls = async {
        loop {
            cluster.borrow_mut().stop(member);
            sleep(Duration::from_millis(150)).await;
            cluster.borrow_mut().resume(member);
            sleep(Duration::from_millis(50)).await;
        }
    };
    let done = tokio::select! {
        done = work => done,
        () = stalls => unreachable!("they do not end"),
    };
    cluster.borrow_mut().resume(member);
    done
}

#[tokio::test]
async fn each_of_five_incidents_is_named_by_one_command() {
    let auth = Auth::On { extra_users: 0 };
    let options = Options { members: 3, auth, ..Options::default() };
    let mut cluster = Cluster::start(&newest("3.6"), options).await;
    let site = Site::new();
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
    params.not_after = OffsetDateTime::now_utc() + time::Duration::days(3);
    let key = KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("it signs itself");
    site.write("ending.key", &key.serialize_pem());
    site.write("ending.crt", &certificate.pem());
    let ending = format!(
        "listener = [{{ name = \"ending\", address = \"{}\", tls = {{ cert = \"ending.crt\", key = \"ending.key\" }} }}, ",
        ports::free()
    );
    let config = site.in_front_of(&cluster).replace(ALL_CALLS, "").replacen("listener = [", &ending, 1)
        + "admin.socket = \"admin.sock\"\n";
    let keyward = Keyward::start(site, &config).await;
    let address = keyward.site().listen;

    let looping = Loop::start(Caller::log_in(address, "root").await);
    let leaking = Caller::log_in(address, "alice").await;
    let _leaked = watch(&leaking, "/a/leak/", LEAKED).await;
    looping.goes_on(200).await;
    run_job(&keyward).await;

    let mut findings = Vec::new();
    let say = told_by_metrics(&cluster, &["grpc_server_handled_total"]).await;
    let arguments = ["show", "clients", "--over", "1s", "--sort", "calls_per_second"];
    let mut found = find(&keyward, "a client in a loop", &arguments, &["root"], say).await;
    // The first row, not just any.
    let (_, said) =
        command(&keyward, &["show", "clients", "--over", "1s", "--sort", "calls_per_second", "-o", "json"])
            .await;
    let view: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(view["rows"][0]["user"], "root", "{said}");
    found.culprit = format!("{} at {}", view["rows"][0]["user"], view["rows"][0]["address"]);
    findings.push(found);
    let say = told_by_metrics(&cluster, &["etcd_debugging_mvcc_watcher_total"]).await;
    findings.push(
        find(&keyward, "a leaked watch", &["show", "watches"], &["500", "/a/leak/*", "alice"], say).await,
    );
    let say = "nothing: the certificate is Keyward's; of its own, etcd tells the expiry of none".to_owned();
    findings.push(find(&keyward, "an ending certificate", &["doctor"], &["ending", "it ends in"], say).await);
    let says = (0..3).flat_map(|member| said_of_logins(&cluster.log(member))).next();
    findings.push(job_in_log(&keyward, says.unwrap_or_else(|| "its log: nothing".to_owned())).await);

    let leader = cluster.leader().await;
    let slow = (0..3).find(|member| *member != leader).expect("a follower");
    let url = cluster.url(slow);
    let say =
        cluster.ctl_as_root().ok(&["endpoint", "health"]).await.lines().next().unwrap_or_default().to_owned();
    let slowest = async {
        let arguments = ["show", "members", "--sort", "latency_micros", "-o", "json"];
        let began = Instant::now();
        let look = async || {
            let (_, said) = command(&keyward, &arguments).await;
            let view: serde_json::Value = serde_json::from_str(&said).ok()?;
            let first = view["rows"][0].clone();
            (first["endpoint"] == *url && first["latency_micros"].as_u64() > Some(20_000)).then_some(first)
        };
        let row = wait::until(LIMIT, "the slow member stands at the top", look).await;
        Finding {
            incident: "a member that stalls",
            typed: "keyward show members --sort latency_micros".into(),
            took: began.elapsed(),
            culprit: format!("{} latency {} us", row["name"], row["latency_micros"]),
            etcd_says: format!("endpoint health, all members asked once: {say}"),
        }
    };
    findings.push(with_stalls(&mut cluster, slow, slowest).await);
    assert_eq!(looping.stop().await, [""; 0]);

    for Finding { incident, typed, took, culprit, etcd_says } in &findings {
        println!(
            "{incident}\n    $ {typed}    ({} key presses, {} ms)\n    {culprit}\n    etcd: {etcd_says}",
            typed.len() + 1,
            took.as_millis()
        );
    }
    assert_eq!(findings.len(), 5);
}
