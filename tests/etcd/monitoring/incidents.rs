//! An operator's bad day: each incident fires its alert, and its alert alone is waited for; each repair resolves the alert.
//!
//! A minute of the rules is a second here (`harness::prometheus`). The incidents of different replicas happen at the same time.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io::{PipeReader, Read as _};
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use http::uri::PathAndQuery;
use keyward::pb::etcdserverpb::auth_client::AuthClient;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    AuthenticateRequest, RangeRequest, RangeResponse, WatchCreateRequest, WatchRequest, WatchResponse,
};
use rcgen::{CertificateParams, KeyPair};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use time::OffsetDateTime;
use tonic::Streaming;
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use super::{NOT_PROVOKED, alerts};
use crate::audit_sinks::{Collector, Fault};
use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::prometheus::{FiringAlert, Prometheus};
use crate::harness::{Auth, Cluster, Options, newest, ports, wait};

/// Answers that a client leaves unread on a connection: more than may be unread for longer than `limits.unread_timeout`.
const UNREAD: usize = 18;
const LIMIT: Duration = Duration::from_secs(90);
/// Seconds without any alert: as many minutes of the rules.
const QUIET: f64 = 15.0;
const MIB: usize = 1 << 20;

/// The alerts that have fired and were resolved.
struct Evening<'a> {
    prometheus: &'a Prometheus,
    fired: RefCell<BTreeSet<String>>,
    resolved: RefCell<BTreeSet<String>>,
}

/// Nothing is left to do but wait.
async fn nothing() {}

impl Evening<'_> {
    async fn find(&self, name: &str, instance: &str) -> Option<FiringAlert> {
        let firing = self.prometheus.firing().await;
        firing.into_iter().find(|alert| alert.name == name && alert.instance == instance)
    }

    /// Does `provoke` again and again until the alert fires for this replica.
    async fn fires(&self, name: &str, replica: SocketAddr, provoke: impl AsyncFn()) -> FiringAlert {
        let look = async || {
            provoke().await;
            self.find(name, &replica.to_string()).await
        };
        let alert = wait::until(LIMIT, &format!("{name} fires"), look).await;
        for text in ["summary", "description", "runbook_url"] {
            let text = alert.annotations[text].as_str().expect("every alert has it");
            assert!(!text.is_empty() && !text.contains("<error") && !text.contains("no value"), "{alert:?}");
        }
        assert!(["critical", "warning"].contains(&alert.labels["severity"].as_str().expect("a text")));
        println!("{name} fires: {}", alert.annotations["summary"]);
        self.fired.borrow_mut().insert(name.to_owned());
        alert
    }

    /// Waits until an alert that has fired is resolved.
    async fn resolved(&self, name: &str, replica: SocketAddr) {
        assert!(self.fired.borrow().contains(name), "{name} has not fired");
        let look = async || self.find(name, &replica.to_string()).await.is_none().then_some(());
        wait::until(LIMIT, &format!("{name} is resolved"), look).await;
        self.resolved.borrow_mut().insert(name.to_owned());
    }
}

/// Puts a certificate that ends in so many days into the files of this name.
fn certify(site: &Site, name: &str, days: i64) {
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
    params.not_after = OffsetDateTime::now_utc() + time::Duration::days(days);
    let key = KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("it signs itself");
    site.write(&format!("{name}.key"), &key.serialize_pem());
    site.write(&format!("{name}.crt"), &certificate.pem());
}

/// Logs in with a wrong password, as a job with an old one does.
async fn log_in_wrongly(address: SocketAddr) {
    let channel = Caller::anybody(address).await.channel;
    let login = AuthenticateRequest { name: "alice".into(), password: "an old one".into() };
    let mut client = AuthClient::new(channel);
    let refused = tokio::time::timeout(Duration::from_secs(1), client.authenticate(login)).await;
    assert!(!matches!(refused, Ok(Ok(_))), "the password is wrong");
}

async fn put(caller: &Caller, key: &str, size: usize) -> bool {
    let put = tokio::time::timeout(Duration::from_secs(5), caller.put(key, vec![b'v'; size], 0)).await;
    matches!(put, Ok(Ok(_)))
}

/// A write that may fail.
async fn attempt(caller: &Caller, key: &str, size: usize) {
    put(caller, key, size).await;
}

/// Writes without a quorum, without end: each waits as long as at etcd, and fails; one begins after the other.
async fn write_in_vain(caller: &Caller) {
    let writers = (0..16).map(|number| async move {
        tokio::time::sleep(Duration::from_millis(450) * number).await;
        loop {
            let key = format!("/a/lost/{number}");
            assert!(caller.put(&key, b"v".to_vec(), 0).await.is_err(), "there is no quorum");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    futures_util::future::join_all(writers).await;
}

/// The limits on descriptors that the process has now.
fn descriptors(keyward: &Keyward) -> Rlimit {
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", keyward.id())).expect("it runs");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a limit");
    let mut numbers = line.split_whitespace().skip(3).map(|limit| limit.parse().ok());
    Rlimit { current: numbers.next().expect("a soft limit"), maximum: numbers.next().expect("a hard limit") }
}

/// Leaves the process a fifth more descriptors than it has open.
fn shorten_descriptors(keyward: &Keyward) {
    let open = std::fs::read_dir(format!("/proc/{}/fd", keyward.id())).expect("the process is ours").count();
    let open = u64::try_from(open).expect("a number of files");
    set_descriptors(keyward, Rlimit { current: Some(open * 6 / 5), ..descriptors(keyward) });
}

fn set_descriptors(keyward: &Keyward, limit: Rlimit) {
    let pid = i32::try_from(keyward.id()).ok().and_then(Pid::from_raw).expect("a process id");
    prlimit(Some(pid), Resource::Nofile, limit).expect("the process is ours");
}

/// A replica before three members: a refused configuration, ending certificates, wrong passwords, a client at its limit, few
/// descriptors, then the loss of one member and of the quorum.
struct Front {
    keyward: Keyward,
    config: String,
    limited: SocketAddr,
}

impl Front {
    async fn start(cluster: &Cluster) -> Front {
        let (site, limited) = (Site::new(), ports::free());
        for name in ["soon", "sooner"] {
            certify(&site, name, 100);
        }
        let listeners = format!(
            "listener = [\n{}, {},\n{{ name = \"limited\", address = \"{limited}\", \
             limits = {{ calls_per_second = 1 }} }}, ",
            listener("soon"),
            listener("sooner"),
        );
        let config = site.in_front_of(cluster).replacen("listener = [", &listeners, 1);
        let keyward = Keyward::start(site, &config).await;
        Front { keyward, config, limited }
    }

    fn admin(&self) -> SocketAddr {
        self.keyward.site().admin
    }

    async fn files_and_clients(&self, evening: &Evening<'_>) {
        let (site, admin) = (self.keyward.site(), self.admin());
        let limited = Caller::log_in(self.limited, "alice").await;
        certify(site, "soon", 20);
        certify(site, "sooner", 5);
        let before = descriptors(&self.keyward);
        tokio::join!(
            evening.fires("KeywardCertificateExpiresSoon", admin, nothing),
            evening.fires("KeywardCertificateExpires", admin, nothing),
            evening.fires("KeywardLoginsRefused", admin, || log_in_wrongly(site.listen)),
            evening.fires("KeywardLimitRefuses", admin, async || attempt(&limited, "/a/limited", 1).await),
            evening.fires("KeywardFileDescriptorsShort", admin, async || shorten_descriptors(&self.keyward)),
        );
        set_descriptors(&self.keyward, before);
        certify(site, "soon", 100);
        certify(site, "sooner", 100);
        tokio::join!(
            evening.resolved("KeywardCertificateExpiresSoon", admin),
            evening.resolved("KeywardCertificateExpires", admin),
            evening.resolved("KeywardLoginsRefused", admin),
            evening.resolved("KeywardLimitRefuses", admin),
            evening.resolved("KeywardFileDescriptorsShort", admin),
        );
        self.keyward.reload(&format!("{}nothing.like = \"this\"\n", self.config));
        evening.fires("KeywardConfigRefused", admin, nothing).await;
        self.keyward.reload(&self.config);
        evening.resolved("KeywardConfigRefused", admin).await;
    }

    async fn members(&self, evening: &Evening<'_>, cluster: &mut Cluster) {
        let admin = self.admin();
        let alice = Caller::log_in(self.keyward.site().listen, "alice").await;
        cluster.kill(0);
        let alert = evening.fires("KeywardMemberNotReady", admin, nothing).await;
        assert_eq!(alert.labels["severity"], "warning");
        cluster.kill(1);
        evening.fires("KeywardQuorumLost", admin, nothing).await;
        tokio::select! {
            _ = evening.fires("KeywardErrorRatio", admin, nothing) => {}
            () = write_in_vain(&alice) => {}
        }
        cluster.relaunch(0);
        cluster.relaunch(1);
        tokio::join!(
            evening.resolved("KeywardQuorumLost", admin),
            evening.resolved("KeywardMemberNotReady", admin),
            evening.resolved("KeywardErrorRatio", admin),
        );
    }
}

/// A listener with the certificate of its own name.
fn listener(name: &str) -> String {
    let address = ports::free();
    format!(
        "{{ name = \"{name}\", address = \"{address}\", \
         tls = {{ cert = \"{name}.crt\", key = \"{name}.key\" }} }}"
    )
}

/// A replica with its policy and its revocations in a cluster of one member with a small quota: a full database, a member that
/// stalls, then no member at all.
async fn lone(evening: &Evening<'_>, cluster: &mut Cluster, keyward: &Keyward) {
    let admin = keyward.site().admin;
    let direct = Caller::log_in(cluster.address(0), "alice").await;
    let nospace = evening.fires("KeywardMemberAlarm", admin, async || attempt(&direct, "/a/k", MIB).await);
    let (_, alert) = tokio::join!(evening.fires("KeywardDatabaseNearQuota", admin, nothing), nospace);
    assert_eq!(alert.labels["alarm"], "nospace");
    let ctl = cluster.ctl_as_root();
    let status = ctl.ok(&["endpoint", "status", "-w", "json"]).await;
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    let revision = status[0]["Status"]["header"]["revision"].to_string();
    ctl.ok(&["compact", &revision]).await;
    ctl.ok(&["defrag"]).await;
    ctl.ok(&["alarm", "disarm"]).await;
    tokio::join!(
        evening.resolved("KeywardMemberAlarm", admin),
        evening.resolved("KeywardDatabaseNearQuota", admin),
    );

    let through = Caller::log_in(keyward.site().listen, "alice").await;
    let cell = RefCell::new(cluster);
    let stalls = async || {
        cell.borrow_mut().stop(0);
        let calls = (0..4).map(|number| {
            let through = through.clone();
            async move { put(&through, &format!("/a/{number}"), 1).await }
        });
        let calls = futures_util::future::join_all(calls);
        let pause = async {
            tokio::time::sleep(Duration::from_millis(1200)).await;
            cell.borrow_mut().resume(0);
        };
        tokio::join!(calls, pause);
    };
    evening.fires("KeywardSlowCalls", admin, stalls).await;
    evening.resolved("KeywardSlowCalls", admin).await;

    let cluster = cell.into_inner();
    cluster.kill(0);
    tokio::join!(
        evening.fires("KeywardNotReady", admin, nothing),
        evening.fires("KeywardPolicyOld", admin, nothing),
        evening.fires("KeywardRevocationsOld", admin, nothing),
    );
    cluster.restart(0).await;
    tokio::join!(
        evening.resolved("KeywardNotReady", admin),
        evening.resolved("KeywardPolicyOld", admin),
        evening.resolved("KeywardRevocationsOld", admin),
    );
}

/// Ranges whose answers nobody reads, over a connection with small windows.
async fn unread_ranges(address: SocketAddr, like: &Caller) -> Vec<Streaming<RangeResponse>> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let endpoint = endpoint.initial_stream_window_size(65_535).initial_connection_window_size(65_535);
    let channel = endpoint.connect().await.expect("it listens");
    let range =
        RangeRequest { key: "/a/big/".into(), range_end: "/a/big0".into(), ..RangeRequest::default() };
    let mut answers = Vec::new();
    for _ in 0..UNREAD {
        let mut grpc = Grpc::new(channel.clone()).max_decoding_message_size(usize::MAX);
        grpc.ready().await.expect("a connection");
        let codec = ProstCodec::<RangeRequest, RangeResponse>::default();
        let path = PathAndQuery::from_static("/etcdserverpb.KV/Range");
        let begun = grpc.server_streaming(like.request(range.clone()), path, codec).await;
        answers.push(begun.expect("an answer begins").into_inner());
    }
    answers
}

/// A watch that nobody reads until it is polled.
async fn unread_watch(caller: &Caller, key: &str) -> Streaming<WatchResponse> {
    let create = WatchCreateRequest { key: key.to_owned().into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let asked = caller.request(stream::iter([create]).chain(stream::pending()));
    let answers = WatchClient::new(caller.channel.clone()).max_decoding_message_size(usize::MAX);
    let mut answers = { answers }.watch(asked).await.expect("a watch").into_inner();
    answers.message().await.expect("no error").expect("created");
    answers
}

/// A replica with small buffers, a log that nobody reads and an audit collector that takes nothing any more.
async fn small(
    evening: &Evening<'_>,
    cluster: &Cluster,
    keyward: &Keyward,
    log: PipeReader,
    collector: &Collector,
) {
    collector.set(Fault::Answer("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"));
    let (address, admin) = (keyward.site().listen, keyward.site().admin);
    let alice = Caller::log_in(address, "alice").await;
    let direct = Caller::log_in(cluster.address(2), "alice").await;
    let calls = Cell::new(0);
    let many = async || {
        for _ in 0..100 {
            calls.set(calls.get() + 1);
            assert!(put(&alice, "/a/written", 1).await, "the log and the audit log delay no call");
        }
    };
    tokio::join!(
        evening.fires("KeywardLogRecordsLost", admin, many),
        evening.fires("KeywardAuditRecordsLost", admin, nothing),
        evening.fires("KeywardAuditSinkFails", admin, nothing),
    );
    collector.set(Fault::None);
    let reading = std::thread::spawn(move || {
        let (mut log, mut part) = (log, vec![0; 64 * 1024]);
        while log.read(&mut part).is_ok_and(|read| read > 0) {}
    });
    for number in 0..4 {
        assert!(put(&direct, &format!("/a/big/{number}"), MIB).await);
    }
    let mut watch = unread_watch(&alice, "/a/held").await;
    for _ in 0..4 {
        assert!(put(&direct, "/a/held", MIB).await);
    }
    let connections: Vec<Caller> =
        stream::iter(0..38).then(|_| Caller::anybody(address)).collect::<Vec<_>>().await;
    let unread = RefCell::new(Vec::new());
    tokio::join!(
        evening.fires("KeywardBuffersFull", admin, nothing),
        evening.fires("KeywardConnectionsFull", admin, nothing),
        evening.fires("KeywardClientsNotReading", admin, async || {
            if unread.borrow().is_empty() {
                let ranges = unread_ranges(address, &alice).await;
                unread.borrow_mut().extend(ranges);
            }
        }),
    );
    drop((connections, unread));
    for _ in 0..4 {
        watch.message().await.expect("no event is lost").expect("an event");
    }
    tokio::join!(
        evening.resolved("KeywardBuffersFull", admin),
        evening.resolved("KeywardConnectionsFull", admin),
        evening.resolved("KeywardClientsNotReading", admin),
        evening.resolved("KeywardLogRecordsLost", admin),
        evening.resolved("KeywardAuditRecordsLost", admin),
        evening.resolved("KeywardAuditSinkFails", admin),
    );
    keyward.kill_only();
    reading.join().expect("the log ends with its process");
}

/// A replica that is gone, and one that starts again and again.
async fn unsteady(evening: &Evening<'_>, keyward: Keyward, config: &str) {
    let admin = keyward.site().admin;
    let site = keyward.kill();
    evening.fires("KeywardDown", admin, nothing).await;
    let running = RefCell::new(Some(Keyward::start_unready(site, config).await));
    evening.resolved("KeywardDown", admin).await;
    let scraped = Cell::new(-1.0);
    let again = async || {
        // Each start is seen by Prometheus before the next.
        let query = format!("process_start_time_seconds{{instance=\"{admin}\"}}");
        let start = evening.prometheus.query(&query).await.first().map_or(-1.0, |(_, start)| *start);
        if start > scraped.get() {
            scraped.set(start);
            let before = running.take().expect("it runs");
            let site = before.kill();
            running.replace(Some(Keyward::start_unready(site, config).await));
        }
    };
    evening.fires("KeywardRestarting", admin, again).await;
    evening.resolved("KeywardRestarting", admin).await;
}

#[tokio::test]
async fn every_alert_that_can_be_provoked_fires_and_is_resolved() {
    let version = newest("3.6");
    let auth = Auth::On { extra_users: 0 };
    let flags = vec!["--quota-backend-bytes=16777216".to_owned()];
    let (mut three, mut one) = tokio::join!(
        Cluster::start(&version, Options { members: 3, auth, ..Options::default() }),
        Cluster::start(&version, Options { auth, flags, ..Options::default() }),
    );
    let front = Front::start(&three).await;
    let site = Site::new();
    let lines = "policy = { mode = \"shadow\", etcd_prefix = \"/keyward/policy/\" }\n\
                 revocation.etcd_prefix = \"/keyward/revocations/\"\n";
    let config = site.in_front_of(&one) + lines;
    let alone = Keyward::start(site, &config).await;
    let site = Site::new();
    let collector = Collector::new(Fault::None);
    let lines = format!(
        "limits = {{ connections = 40, connections_per_address = 40, unread_timeout = \"1s\" }}\nwatch.buffer = \"1MiB\"\n\
         log.buffer = \"64KiB\"\naudit = {{ on_full = \"drop\", queue = \"64KiB\", otlp.url = \"http://{}\" }}\n",
        collector.address
    );
    let config = site.in_front_of(&three) + &lines;
    let (smaller, log) = Keyward::start_with_pipe(site, &config).await;
    let site = Site::new();
    let config = site.in_front_of(&three);
    let restarted = Keyward::start(site, &config).await;
    let replicas = [&front.keyward, &alone, &smaller, &restarted].map(|keyward| keyward.site().admin);
    let prometheus = Prometheus::start(&replicas).await;

    // Waited for, not asserted at once: a busy machine may miss scrapes, and before the first scrape there is no target. An alert
    // that comes and goes on a healthy replica leaves no such time.
    let quiet = async || {
        let samples = prometheus.query(&format!("count_over_time(keyward_ready[{QUIET}s])")).await;
        let fired = format!("max_over_time(ALERTS{{alertstate=\"firing\"}}[{QUIET}s])");
        let is_seen = samples.len() == 4 && samples.iter().all(|(_, count)| *count > QUIET / 2.0);
        (is_seen && prometheus.query(&fired).await.is_empty()).then_some(())
    };
    wait::until(LIMIT, "healthy and idle replicas raise no alert for a while", quiet).await;

    let evening =
        Evening { prometheus: &prometheus, fired: RefCell::default(), resolved: RefCell::default() };
    tokio::join!(lone(&evening, &mut one, &alone), unsteady(&evening, restarted, &config), async {
        tokio::join!(small(&evening, &three, &smaller, log, &collector), front.files_and_clients(&evening),);
        // The others need their quorum until here.
        front.members(&evening, &mut three).await;
    },);
    let (fired, resolved) = (evening.fired.into_inner(), evening.resolved.into_inner());
    assert_eq!(fired, resolved);
    let mut all = alerts();
    all.retain(|alert| !NOT_PROVOKED.contains(&alert.as_str()));
    assert_eq!(fired, all);
    println!("{} alerts fired and were resolved; by promtool alone: {NOT_PROVOKED:?}", fired.len());
}
