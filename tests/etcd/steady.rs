//! A steady load through Keyward, and what must hold after it.
//!
//! Owns: the load's flags and the judging of its record. Must not know which faults happen meanwhile. Invariants: what happened is
//! read from a member, not through Keyward; a record without calls, watchers or leases is no proof and fails.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::harness::client::{Client, Record};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options};

/// The clientv3 of the load.
const CLIENT: &str = "3.5.11";
/// `--auth-token-ttl`, in seconds.
pub(crate) const TTL: u32 = 2;
/// Who logs in at a member for Keyward: alice, for the load, and root, for the probe.
const IDENTITIES: f64 = 2.0;

/// Three members with auth and a short token life. Heartbeat and election timeout in milliseconds.
pub(crate) fn options(timing: (u32, u32)) -> Options {
    Options {
        members: 3,
        auth: Auth::On { extra_users: 0 },
        token_ttl: Some(TTL),
        timing: Some(timing),
        ..Options::default()
    }
}

/// A load that runs.
pub(crate) struct Load {
    client: Client,
    keyward: Keyward,
    logins: Vec<f64>,
    leader_changes: Vec<f64>,
    history: usize,
}

impl Load {
    /// Starts a Keyward and the load through it; returns when all watches and leases stand. The history comes from member
    /// `history`. `args` are further flags of the scenario.
    pub(crate) async fn start(cluster: &Cluster, history: usize, args: &[&str]) -> Load {
        // Counted from before Keyward's first login.
        let logins = logins(cluster).await;
        let site = Site::new();
        let config = site.in_front_of(cluster);
        let through = [site.listen.to_string()];
        let keyward = Keyward::start(site, &config).await;
        let leader_changes = leader_changes(cluster).await;
        let truth = cluster.address(history).to_string();
        let mut all = vec!["--history", &truth];
        all.extend(args);
        let client = Client::start(CLIENT, "load", "alice", &through, &all);
        client.says("ready").await;
        Load { client, keyward, logins, leader_changes, history }
    }

    /// The Keyward that it goes through.
    pub(crate) fn keyward(&self) -> &Keyward {
        &self.keyward
    }

    /// Asks the load to end its calls now.
    pub(crate) fn finish(&self) {
        self.client.finish();
    }

    /// Waits for the load's end.
    pub(crate) async fn ended(self) -> Ended {
        let Load { client, keyward, logins, leader_changes, history } = self;
        Ended { record: client.record().await, keyward, logins, leader_changes, history }
    }
}

/// A load that has ended.
pub(crate) struct Ended {
    pub(crate) record: Record,
    pub(crate) keyward: Keyward,
    logins: Vec<f64>,
    leader_changes: Vec<f64>,
    history: usize,
}

impl Ended {
    /// Whether no member saw another leader since the load began. Only where no member was restarted.
    pub(crate) async fn leader_stayed(&self, cluster: &Cluster) -> bool {
        leader_changes(cluster).await == self.leader_changes
    }

    /// Nothing that a watcher must see was lost, doubled, reordered or invented; no watch was closed, no lease lost, no stream of a
    /// client ended.
    pub(crate) fn streams_held(&self) {
        let record = &self.record;
        assert_eq!(record.exit.code(), Some(0), "{}", record.tail());
        let verify = record.the("verify");
        assert_eq!(verify["by_kind"], Value::Object(serde_json::Map::new()), "{verify}");
        assert!(verify["history"].as_i64().is_some_and(|events| events > 0), "no history: {verify}");
        let ended: Vec<_> = record.all("stream_ended").collect();
        assert!(ended.is_empty(), "streams ended under the client: {ended:?}");
        assert!(record.summed("acknowledged") > 0, "no write was acknowledged");
        assert!(record.summed("watchers") > 0 && record.summed("leases") > 0, "nothing was held");
        for nothing in ["violations", "watches_closed", "watchers_behind", "leases_lost", "stale_reads"] {
            assert_eq!(record.summed(nothing), 0, "{nothing}: {}", record.the("summary"));
        }
        let answered = |lease: &&Value| lease["responses"].as_i64().is_some_and(|answers| answers > 0);
        assert_eq!(
            record.all("lease").filter(answered).count(),
            record.all("lease").count(),
            "a lease got no answer"
        );
    }

    /// `Authenticate` calls that Keyward made at each member: all but those of the client that read the history.
    pub(crate) async fn logins(&self, cluster: &Cluster) -> Vec<f64> {
        let through = [("method", "/etcdserverpb.Auth/Authenticate")];
        let through = self.keyward.metric("keyward_calls_total", &through).await;
        assert!(through > 0.0, "the load did not log in through Keyward");
        let all = self.record.the("wire")["authenticate"].as_f64().expect("a number");
        let mut made: Vec<f64> =
            logins(cluster).await.iter().zip(&self.logins).map(|(after, before)| after - before).collect();
        made[self.history] -= all - through;
        made
    }

    /// At most one login of each identity reached each member.
    pub(crate) async fn logged_in_once(&self, cluster: &Cluster) {
        let made = self.logins(cluster).await;
        println!("Authenticate at each member, by {IDENTITIES} identities: {made:?}");
        assert!(
            made.iter().all(|logins| *logins <= IDENTITIES),
            "more than one login of an identity: {made:?}"
        );
        assert!(made.iter().sum::<f64>() > 0.0, "nobody logged in at all");
    }

    /// Streams that Keyward opened to go on: of watches, of keepalives.
    pub(crate) async fn resumes(&self) -> [f64; 2] {
        resumes(&self.keyward).await
    }

    /// The errors that the application saw.
    pub(crate) fn failed(&self) -> Vec<Failed> {
        failed(&self.record)
    }
}

/// The errors that an application saw.
pub(crate) fn failed(record: &Record) -> Vec<Failed> {
    let began = record.the("start")["unix_ms"].as_i64().expect("a number");
    let at = |line: &Value, field: &str| began + line[field].as_i64().expect("a number");
    let text = |line: &Value, field: &str| line[field].as_str().unwrap_or_default().to_owned();
    let failed = |line: &Value| Failed {
        op: text(line, "op"),
        code: text(line, "code"),
        message: text(line, "message"),
        keys: line["keys"].to_string(),
        start: at(line, "start"),
        end: at(line, "end"),
    };
    record.all("error").map(failed).collect()
}

/// A call that failed: times in milliseconds of the system's clock.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) op: String,
    pub(crate) code: String,
    pub(crate) message: String,
    /// What a write was about; each writer has keys of its own.
    pub(crate) keys: String,
    pub(crate) start: i64,
    pub(crate) end: i64,
}

/// How often which operation failed with which code and text.
pub(crate) fn tally<'a>(failed: impl IntoIterator<Item = &'a Failed>) -> BTreeMap<String, u32> {
    let mut tally = BTreeMap::new();
    for Failed { op, code, message, .. } in failed {
        *tally.entry(format!("{op}: {code} {message}")).or_default() += 1;
    }
    tally
}

/// Streams that Keyward opened to go on so far: of watches, of keepalives.
pub(crate) async fn resumes(keyward: &Keyward) -> [f64; 2] {
    [
        keyward.metric("keyward_watch_resumes_total", &[]).await,
        keyward.metric("keyward_keepalive_resumes_total", &[]).await,
    ]
}

/// The system's clock, as the load writes it.
pub(crate) fn unix_ms() -> i64 {
    let since: Duration = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is past 1970");
    i64::try_from(since.as_millis()).expect("it is before the year 292278994")
}

async fn logins(cluster: &Cluster) -> Vec<f64> {
    of_each(cluster, "grpc_server_started_total", &[("grpc_method", "Authenticate")]).await
}

async fn leader_changes(cluster: &Cluster) -> Vec<f64> {
    of_each(cluster, "etcd_server_leader_changes_seen_total", &[]).await
}

/// The sum of a metric at each member.
pub(crate) async fn of_each(cluster: &Cluster, metric: &str, labels: &[(&str, &str)]) -> Vec<f64> {
    let all = (0..cluster.len()).map(|i| cluster.counter(i, metric, labels));
    futures_util::future::join_all(all).await
}
