//! Clients that only renew, lock, wait and observe come through learning, shadow and enforcing without losing a lease; and a policy
//! that lacks their grants names each of them in shadow.
//!
//! Their leases, and the keys of these, are older than the audit log: shadow names the keys, and they are learned from what it lets
//! pass.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use keyward::pb::etcdserverpb as pb;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::v3electionpb::LeaderResponse;
use serde_json::Value;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use crate::caller::{Caller, Kind};
use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site, program};
use crate::harness::{Cluster, Options, ports, wait};
use crate::revocations::{command, done};
use crate::rewatch::local;

const LIMIT: Duration = Duration::from_secs(60);
const CLIENTS: [&str; 6] = ["renewer", "holder", "queued", "standby", "observer", "mutex"];
/// The clients with a lease, in the order of [`CLIENTS`].
const LEASES: usize = 4;
/// Seconds that no slow machine needs for this test.
const TTL: i64 = 3600;
const LOCK: &str = "/teams/a/locks/job";
const ELECTION: &str = "/teams/a/elections/e";
/// Renewals of each lease in each phase.
const ROUNDS: usize = 3;
/// Nobody's grants.
const LACKING: &str = "[[role]]\nname = \"r\"\n[[role.allow]]\nactions = [\"read\"]\nkey = \"/none\"\n\
                       [[binding]]\neveryone = true\nroles = [\"r\"]\n";

/// A keepalive stream.
struct Renewals {
    client: &'static str,
    requests: mpsc::Sender<pb::LeaseKeepAliveRequest>,
    answers: Streaming<pb::LeaseKeepAliveResponse>,
    lease: i64,
}

impl Renewals {
    async fn open(client: &'static str, caller: &Caller, lease: i64) -> Renewals {
        let (requests, receiver) = mpsc::channel(1);
        requests.send(pb::LeaseKeepAliveRequest { id: lease }).await.expect("there is room");
        let asked = futures_util::stream::unfold(receiver, async |mut receiver| {
            Some((receiver.recv().await?, receiver))
        });
        let answers = LeaseClient::new(caller.channel.clone()).lease_keep_alive(asked).await;
        let mut renewals = Renewals { client, requests, answers: answers.expect("open").into_inner(), lease };
        renewals.answered().await;
        renewals
    }

    async fn answered(&mut self) {
        let answer = self.answers.message().await;
        let answer = answer.unwrap_or_else(|status| panic!("{} lost its lease: {status}", self.client));
        assert!(answer.expect("the stream goes on").ttl > 0, "{} lost its lease", self.client);
    }

    async fn renew(&mut self) {
        self.requests.send(pb::LeaseKeepAliveRequest { id: self.lease }).await.expect("the stream goes on");
        self.answered().await;
    }
}

type Wait = Pin<Box<dyn Future<Output = Result<Bytes, Status>>>>;

/// All clients at work, through one Keyward.
struct Clients {
    callers: Vec<Caller>,
    renewals: Vec<Renewals>,
    waits: Vec<Wait>,
    leaders: Streaming<LeaderResponse>,
}

impl Clients {
    async fn begin(keyward: &Keyward, doors: &[std::net::SocketAddr], leases: &[i64]) -> Clients {
        let mut callers = Vec::new();
        for door in doors {
            callers.push(Caller::anybody(*door).await);
        }
        let [_, holder, queued, standby, observer, _] = &callers[..] else { panic!("{} doors", doors.len()) };
        holder.queue(Kind::Lock, LOCK, leases[1], "").await.expect("locked");
        let wait = |caller: &Caller, kind, name, lease| -> Wait {
            let caller = caller.clone();
            Box::pin(async move { caller.queue(kind, name, lease, "v").await })
        };
        let mut waits = vec![
            wait(queued, Kind::Lock, LOCK, leases[2]),
            wait(standby, Kind::Campaign, ELECTION, leases[3]),
        ];
        let listed = wait::until(LIMIT, "both wait", async || {
            let (_, said) = command(keyward, &["show", "locks"]).await;
            (said.contains("/locks/job") && said.contains("/elections/e")).then_some(())
        });
        tokio::select! {
            ended = futures_util::future::select_all(&mut waits) => panic!("{:?}", ended.0),
            () = listed => {}
        }
        let mut leaders = observer.observe(ELECTION).await.expect("admitted");
        leaders.message().await.expect("admitted").expect("a leader");
        let mut renewals = Vec::new();
        for ((client, caller), lease) in CLIENTS.into_iter().zip(&callers).zip(leases) {
            renewals.push(Renewals::open(client, caller, *lease).await);
        }
        let mut clients = Clients { callers, renewals, waits, leaders };
        clients.go_on().await;
        clients
    }

    /// Each lease is renewed again, and a lock is taken with a lease of its own, as the Go client's Mutex does.
    async fn go_on(&mut self) {
        for _ in 1..ROUNDS {
            for renewals in &mut self.renewals {
                renewals.renew().await;
            }
        }
        let mutex = self.callers.last().expect("the mutex");
        let lease = mutex.grant(TTL).await;
        let key = format!("/teams/a/mutex/{lease:x}");
        mutex.put(&key, Vec::new(), lease).await.expect("taken");
        mutex.delete(key).await;
        for wait in &mut self.waits {
            assert!(futures_util::poll!(wait).is_pending(), "it still waits");
        }
        let next = Box::pin(self.leaders.message());
        assert!(futures_util::poll!(next).is_pending(), "it still observes");
    }
}

/// A listener for each client, whose peer is `listener:NAME`.
fn config(site: &Site, cluster: &Cluster, further: &str) -> (String, Vec<std::net::SocketAddr>) {
    let doors: Vec<_> = CLIENTS.iter().map(|_| ports::free()).collect();
    let fields: String = CLIENTS
        .iter()
        .zip(&doors)
        .map(|(name, address)| format!(" }}, {{ name = {name:?}, address = \"{address}\""))
        .collect();
    let text = site.listening(cluster, &fields) + "admin.socket = \"admin.sock\"\n" + further;
    (text, doors)
}

/// The rows of `keyward policy shadow`: client, action, keys.
async fn missing(keyward: &Keyward) -> BTreeSet<(String, String, Option<String>)> {
    let (code, said) = command(keyward, &["policy", "shadow", "-o", "json"]).await;
    assert_eq!(code, Some(0), "{said}");
    let view: Value = serde_json::from_str(&said).expect("JSON");
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let rows = view["rows"].as_array().expect("rows").iter();
    rows.map(|row| {
        let peer = text(&row["peer"]).expect("a peer");
        let client = peer.strip_prefix("listener:").expect("a listener's").to_owned();
        assert!(row["requests"].as_u64() > Some(0), "{row}");
        (client, text(&row["action"]).expect("an action"), text(&row["keys"]))
    })
    .collect()
}

fn audited(site: &Site, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(site.file(name)).expect("written");
    // The last line may be under way.
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole.map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn learn(site: &Site, files: &[&str]) -> String {
    let output = std::process::Command::new(program())
        .args(["policy", "learn"])
        .args(files.iter().map(|name| site.file(name)))
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

async fn a_policy_that_lacks_all_names_each(cluster: &Cluster, site: Site, leases: &[i64]) -> Site {
    let file = site.write("lacking.toml", LACKING);
    let audit = site.file("shadow.log");
    let lines = format!(
        "audit.file = {audit:?}\naudit.events = [\"refusals\"]\npolicy.mode = \"shadow\"\npolicy.file = {file:?}\n"
    );
    let (text, doors) = config(&site, cluster, &lines);
    let keyward = Keyward::start(site, &text).await;
    let clients = Clients::begin(&keyward, &doors, leases).await;
    let named = missing(&keyward).await;
    println!("{}", command(&keyward, &["policy", "shadow"]).await.1);
    for (client, action, keys) in [
        ("renewer", "lease", None),
        ("holder", "lease", None),
        ("holder", "lock", Some("/teams/a/locks/job/*")),
        ("queued", "lease", None),
        ("queued", "lock", Some("/teams/a/locks/job/*")),
        ("standby", "lease", None),
        ("standby", "lock", Some("/teams/a/elections/e/*")),
        ("observer", "lock", Some("/teams/a/elections/e/*")),
        ("mutex", "lease", None),
    ] {
        let row = (client.to_owned(), action.to_owned(), keys.map(str::to_owned));
        assert!(named.contains(&row), "{row:?} is not in {named:?}");
    }
    let of_mutex = |(client, action, keys): &(String, String, Option<String>)| {
        client == "mutex"
            && action == "write"
            && keys.as_ref().is_some_and(|keys| keys.starts_with("/teams/a/mutex/"))
    };
    assert!(named.iter().any(of_mutex), "{named:?}");
    drop(clients);
    let (_, site) = keyward.terminate().await;
    let records = audited(&site, "shadow.log");
    for client in &CLIENTS[..LEASES] {
        let of_stream = |record: &&Value| {
            record["listener"] == *client && record["method"] == "/etcdserverpb.Lease/LeaseKeepAlive"
        };
        let found: Vec<_> = records.iter().filter(of_stream).collect();
        let [record] = &found[..] else { panic!("{client}: {found:#?}") };
        assert_eq!((&record["verdict"], &record["code"]), (&"would_refuse".into(), &"OK".into()));
        assert_eq!(record["rule"], "no_grant: lease", "{client}: one record for {ROUNDS} renewals");
    }
    site
}

/// The policy in shadow names the keys of the leases, and what shadow let pass completes the policy, which is enforced then.
async fn from_shadow_to_enforcing(cluster: &Cluster, site: Site, leases: &[i64], policy: &str) {
    let file = site.write("policy.toml", policy);
    let again = site.file("again.log");
    let (text, doors) = config(
        &site,
        cluster,
        &format!("audit.file = {again:?}\naudit.events = [\"refusals\"]\npolicy.file = {file:?}\n"),
    );
    let in_mode = |mode: &str| format!("{text}policy.mode = {mode:?}\n");
    let keyward = Keyward::start(site, &in_mode("shadow")).await;
    let mut clients = Clients::begin(&keyward, &doors, leases).await;
    let keys = |client: &&str| {
        let key = format!("/alive/{client}");
        ((*client).to_owned(), "write".to_owned(), Some(key))
    };
    let of_leases: BTreeSet<_> = CLIENTS[..LEASES].iter().map(keys).collect();
    // A Lock and a Campaign ask for the other keys of their lease as well.
    let named: BTreeSet<_> = missing(&keyward).await.into_iter().filter(|row| row.1 != "lock").collect();
    assert_eq!(named, of_leases, "the keys that are older than the log");
    wait::until(LIMIT, "each is in the log", async || {
        let records = audited(keyward.site(), "again.log");
        let is_denied = |record: &&Value| {
            record["verdict"] == "would_refuse" && record["method"] == "/etcdserverpb.Lease/LeaseKeepAlive"
        };
        (records.iter().filter(is_denied).count() == LEASES).then_some(())
    })
    .await;
    let policy = learn(keyward.site(), &["learning.log", "again.log"]);
    println!("{policy}");
    keyward.site().write("policy.toml", &policy);
    done(&keyward, &["reload"]).await;
    wait::until(LIMIT, "the other policy is followed", async || {
        missing(&keyward).await.is_empty().then_some(())
    })
    .await;
    clients.go_on().await;
    assert_eq!(missing(&keyward).await, BTreeSet::new(), "nothing would be refused");
    keyward.site().write("keyward.toml", &in_mode("enforce"));
    done(&keyward, &["reload"]).await;
    let stranger = Caller::anybody(doors[0]).await;
    wait::until(LIMIT, "the policy is enforced", async || {
        stranger.put("/foreign", Vec::new(), 0).await.err().map(|status| {
            assert_eq!(status.code(), tonic::Code::PermissionDenied);
        })
    })
    .await;
    clients.go_on().await;
    println!("{} leases, {} waits and an Observe: none lost", leases.len() + 1, clients.waits.len());
}

#[test]
fn clients_that_only_renew_lock_and_observe_keep_their_leases_from_learning_to_enforcing() {
    local(async {
        let cluster = Cluster::start(&Version::parse("3.5.35"), Options::default()).await;
        let direct = Caller::anybody(cluster.address(0)).await;
        let mut leases = Vec::new();
        for client in &CLIENTS[..LEASES] {
            leases.push(direct.grant(TTL).await);
            let lease = *leases.last().expect("granted");
            direct.put(&format!("/alive/{client}"), Vec::new(), lease).await.expect("put");
        }
        let lead = direct.grant(TTL).await;
        direct.queue(Kind::Campaign, ELECTION, lead, "leader").await.expect("elected");

        let site = a_policy_that_lacks_all_names_each(&cluster, Site::new(), &leases).await;

        let lines = format!(
            "audit.file = {:?}\naudit.events = [\"changes\", \"reads\", \"watches\", \"leases\"]\n",
            site.file("learning.log")
        );
        let (text, doors) = config(&site, &cluster, &lines);
        let keyward = Keyward::start(site, &text).await;
        let mut clients = Clients::begin(&keyward, &doors, &leases).await;
        // Learned while all of them still renew, wait and observe.
        wait::until(LIMIT, "what lasts is in the log", async || {
            let records = audited(keyward.site(), "learning.log");
            let begun = records.iter().filter(|record| record["event"] == "begin").count();
            (begun == LEASES + 3).then_some(())
        })
        .await;
        let policy = learn(keyward.site(), &["learning.log"]);
        println!("{policy}");
        clients.go_on().await;
        drop(clients);
        let (_, site) = keyward.terminate().await;

        from_shadow_to_enforcing(&cluster, site, &leases, &policy).await;
    });
}
