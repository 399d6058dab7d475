//! Erlang's eetcd (RabbitMQ, EMQX) behind Keyward, as Debian's RabbitMQ carries it: eetcd 0.3.6 on gun 1.3.3.
//!
//! It relies on what etcd does and gRPC leaves open: it takes one message from a DATA frame, drops every stream at a GOAWAY, and asks for
//! Status before it logs in. Beside it one that is connected to etcd.

use std::net::SocketAddr;
use std::process::ExitStatus;
use std::time::Duration;

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::PutRequest;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use serde_json::Value;
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use crate::harness::binary::Version;
use crate::harness::client::{lifetime, lines};
use crate::harness::client_program::client_program;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::process::Process;
use crate::harness::{Auth, Cluster, Options, password, versions, versions_that_survive_kills};

const LIMIT: Duration = Duration::from_secs(60);
/// Puts of a burst.
const BURST: usize = 60;
const BURSTS: usize = 3;
/// Seconds of a lease; eetcd renews it every two.
const TTL: u64 = 6;
/// A connection is old after this time, more or less a tenth.
const AGE: Duration = Duration::from_secs(4);
/// Status before a login is answered by this version, and refused since 3.5.28 (CVE-2026-33413).
const OPEN_STATUS: &str = "3.5.1";

/// A running application on eetcd.
struct Application {
    process: Process,
    prefix: &'static str,
    /// After the process, whose log is in it.
    _folder: TempDir,
}

impl Application {
    /// Starts it and waits until its watch and its lease stand.
    async fn start(address: SocketAddr, prefix: &'static str) -> Application {
        let application = Application::begin(address, prefix, None);
        application.is_ready().await.expect("it connects");
        application
    }

    fn begin(address: SocketAddr, prefix: &'static str, user: Option<&str>) -> Application {
        let folder = tempfile::Builder::new().prefix("eetcd-").tempdir().expect("a temporary folder");
        let mut args = vec![address.to_string(), prefix.to_owned(), TTL.to_string()];
        if let Some(user) = user {
            let secret = folder.path().join("password");
            std::fs::write(&secret, password(user)).expect("a file can be written");
            args.extend([user.to_owned(), secret.display().to_string()]);
        }
        let program = client_program("erlang", &[]);
        let process = Process::start("eetcd", &program, args, &[], &folder.path().join("record"));
        Application { process, prefix, _folder: folder }
    }

    /// Waits until its watch and its lease stand.
    ///
    /// # Errors
    /// It ended before, with this reason.
    async fn is_ready(&self) -> Result<(), String> {
        let ready = |output: &str, exit: Option<ExitStatus>| {
            let lines = lines(output);
            let fatal = lines.iter().find(|line| line["kind"] == "fatal");
            match fatal.map(|line| line["why"].as_str().unwrap_or_default().to_owned()) {
                Some(why) => Some(Err(why)),
                None if exit.is_some() => Some(Err(output.to_owned())),
                None => lines.iter().any(|line| line["kind"] == "ready").then_some(Ok(())),
            }
        };
        self.process.wrote_or_ended(LIMIT, "that it is ready", ready).await
    }

    /// The values of its events.
    fn values(output: &str) -> Vec<String> {
        let text = |line: &Value| line["value"].as_str().map(str::to_owned);
        lines(output).iter().filter(|line| line["kind"] == "event").filter_map(text).collect()
    }

    /// Waits until its watch has shown so many events in all, and returns their values.
    async fn has_seen(&self, events: usize) -> Vec<String> {
        let seen = |output: &str| {
            let values = Application::values(output);
            (values.len() >= events).then_some(values)
        };
        self.process.wrote(LIMIT, &format!("{events} events of {}", self.prefix), seen).await
    }

    /// Why its watch ended or its lease is not kept any more.
    fn ends(&self) -> Vec<Value> {
        let ended = |line: &Value| line["kind"] == "ended" || line["kind"] == "halted";
        lines(&self.process.output()).into_iter().filter(ended).collect()
    }

    fn put(&self, value: &str) -> PutRequest {
        PutRequest {
            key: format!("{}watched/k", self.prefix).into(),
            value: value.to_owned().into(),
            ..PutRequest::default()
        }
    }
}

async fn kv(address: SocketAddr) -> KvClient<Channel> {
    let endpoint = Endpoint::new(format!("http://{address}")).expect("an address");
    KvClient::new(endpoint.connect().await.expect("a connection"))
}

/// Etcd sends a DATA frame for each message, and eetcd stays behind for ever where one frame has two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bursts_of_puts_are_seen_whole() {
    for version in versions() {
        let cluster = Cluster::start(&version, Options::default()).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let directly = Application::start(cluster.address(0), "/directly/").await;
        let through = Application::start(keyward.site().listen, "/through/").await;
        let kv = kv(cluster.address(0)).await;
        for burst in 1..=BURSTS {
            for application in [&directly, &through] {
                let puts = (0..BURST).map(|number| {
                    let mut kv = kv.clone();
                    let put = application.put(&format!("{burst} {number:02}"));
                    async move { kv.put(put).await.expect("a put") }
                });
                join_all(puts).await;
                let mut values = application.has_seen(burst * BURST).await.split_off((burst - 1) * BURST);
                // The order of puts that were open together is etcd's.
                values.sort_unstable();
                let written: Vec<String> = (0..BURST).map(|number| format!("{burst} {number:02}")).collect();
                assert_eq!(values, written, "{version}: {}", application.prefix);
            }
        }
        for application in [directly, through] {
            assert_eq!(application.ends(), Vec::<Value>::new(), "{version}: {}", application.prefix);
        }
    }
}

#[tokio::test]
async fn its_watch_and_its_lease_outlive_three_rounds_of_member_kills() {
    /// How long Keyward may take to send calls to a member that is back.
    const BACK: Duration = Duration::from_secs(30);
    for version in versions_that_survive_kills() {
        let mut cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let application = Application::start(keyward.site().listen, "/a/").await;
        let mut kv = kv(keyward.site().listen).await;
        let mut written = Vec::new();
        for round in 0..3 {
            let member = cluster.leader().await;
            let id = cluster.member_id(member).await;
            cluster.kill(member);
            cluster.leader().await;
            written.push(format!("{round} without"));
            kv.put(application.put(&written[written.len() - 1])).await.expect("a put");
            cluster.restart(member).await;
            keyward.uses(id, BACK).await;
            written.push(format!("{round} again"));
            kv.put(application.put(&written[written.len() - 1])).await.expect("a put");
            assert_eq!(application.has_seen(written.len()).await, written, "{version}");
        }
        // An election gives each lease its whole time once more: past that it is there only if it is renewed.
        lifetime(Duration::from_secs(TTL + 2)).await;
        assert_eq!(application.ends(), Vec::<Value>::new(), "{version}");
        assert_eq!(cluster.ctl().ok(&["get", "/a/leased", "--print-value-only"]).await, "v\n", "{version}");
    }
}

#[tokio::test]
async fn it_keeps_its_streams_at_the_age_of_connections_which_it_would_lose() {
    let version = versions().pop().expect("a version");
    let cluster = Cluster::start(&version, Options::default()).await;
    let of_listener = async |fields: &str| {
        let site = Site::new();
        let config =
            site.listening(&cluster, fields) + &format!("limits.connection_age = \"{}s\"\n", AGE.as_secs());
        Keyward::start(site, &config).await
    };
    let keyward = of_listener("").await;
    let unspared = of_listener(", connection_age_spares = []").await;
    let kept = Application::start(keyward.site().listen, "/kept/").await;
    // On a busy machine its connection may be old before its watch stands.
    let lost = Application::begin(unspared.site().listen, "/lost/", None);
    let ended = |output: &str| lines(output).into_iter().find(|line| line["kind"] == "ended");
    let why = lost.process.wrote(LIMIT, "the end of its watch", ended).await["why"].clone();
    assert!(why.as_str().is_some_and(|why| why.contains("goaway")), "{why}");
    lifetime(AGE).await;
    let mut kv = kv(cluster.address(0)).await;
    kv.put(kept.put("late")).await.expect("a put");
    assert_eq!(kept.has_seen(1).await, ["late"]);
    assert_eq!(kept.ends(), Vec::<Value>::new());
}

#[tokio::test]
async fn it_logs_in_where_status_is_answered_before_a_login() {
    let options = Options { auth: Auth::On { extra_users: 0 }, ..Options::default() };
    let cluster = Cluster::start(&Version::parse(OPEN_STATUS), options).await;
    let of_config = async |lines: &str| {
        let site = Site::new();
        let config = site.in_front_of(&cluster) + lines;
        Keyward::start(site, &config).await
    };
    let strict = of_config("").await;
    let as_etcd = of_config("policy.require_identity = \"as-etcd\"\n").await;
    for (place, address, is_refused) in [
        ("at etcd", cluster.address(0), false),
        ("strict", strict.site().listen, true),
        ("as-etcd", as_etcd.site().listen, false),
    ] {
        let application = Application::begin(address, "/a/", Some("alice"));
        match application.is_ready().await {
            Ok(()) => assert!(!is_refused, "{place}"),
            Err(why) => assert!(is_refused && why.contains("user name is empty"), "{place}: {why}"),
        }
    }
}
