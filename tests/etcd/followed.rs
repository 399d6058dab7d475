//! Story 10: two of three members cannot be reached, then the names lead to another cluster with other users' tokens. The client
//! process goes on as it is.
//!
//! Where the machine lets a test mount a file (`unshare`), the names stand in a hosts file of Keyward's own; elsewhere a name
//! server on loopback says where they lead.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, PutRequest, PutResponse};
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::Value;

use crate::harness::binary::{Version, full};
use crate::harness::client::{Client, Record};
use crate::harness::dns::{self, Dns};
use crate::harness::keyward::{Keyward, Site, namespace};
use crate::harness::pki::{NAMES, Pki};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, Tls, newest, password, ports, versions, wait};
use crate::raw::{Call, Endpoint};

const LIMIT: Duration = Duration::from_secs(60);
const CLIENT: &str = "3.5.11";
/// How long Keyward wants all endpoints to agree (rules 20).
const AGREED: i64 = 3000;

/// Three addresses at which members of a cluster are reached, if at all.
struct Place {
    addresses: [SocketAddr; 3],
}

impl Place {
    /// In a network of its own on loopback; `ports` are the same in all of them, since names have no ports.
    fn new(network: u8, ports: [u16; 3]) -> Place {
        let at = |i: u8| Ipv4Addr::new(127, 0, network, i + 1);
        let addresses = [0, 1, 2].map(|i| SocketAddr::from((at(i), ports[usize::from(i)])));
        Place { addresses }
    }

    async fn cluster(&self, version: &Version, tls: Tls, authority: &Arc<Pki>) -> Cluster {
        let options = Options {
            members: 3,
            auth: Auth::On { extra_users: 0 },
            tls,
            authority: Some(Arc::clone(authority)),
            advertise: self.addresses.to_vec(),
            strangers: true,
            ..Options::default()
        };
        Cluster::start(version, options).await
    }

    async fn relay(&self, i: usize, cluster: &Cluster, tasks: &Tasks) -> Relay {
        let relay = Relay::at(self.addresses[i], tasks).await;
        relay.open(cluster.address(i));
        relay
    }

    fn ips(&self) -> [Ipv4Addr; 3] {
        self.addresses.map(|address| match address {
            SocketAddr::V4(address) => *address.ip(),
            SocketAddr::V6(_) => unreachable!("they are of loopback's first version"),
        })
    }
}

/// Where names lead: in a file of Keyward's own, or by a name server.
enum Leads {
    File(PathBuf, &'static str),
    Server(Dns),
}

impl Leads {
    async fn start(site: &Site, tasks: &Tasks) -> Leads {
        match namespace() {
            Some(flags) => Leads::File(site.write("hosts", "127.0.0.1 localhost\n"), flags),
            None => Leads::Server(Dns::start(tasks).await),
        }
    }

    fn to(&self, place: &Place) {
        match self {
            Leads::File(path, _) => {
                let lines = NAMES.iter().zip(place.ips()).map(|(name, ip)| format!("{ip} {name}\n"));
                // In place: another file of that name would not be the one that is mounted.
                std::fs::write(path, lines.collect::<String>()).expect("the hosts file can be written");
            }
            Leads::Server(dns) => {
                dns.says(
                    NAMES.into_iter().zip(place.ips()).map(|(name, ip)| (name, dns::Record::A(ip))).collect(),
                );
            }
        }
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is right");
    i64::try_from(since.as_millis()).expect("not that late")
}

/// The configuration with the names in place of addresses.
fn config(site: &Site, cluster: &Cluster, ports: [u16; 3], leads: &Leads, more: &str) -> String {
    let scheme = if cluster.options().tls == Tls::Off { "http" } else { "https" };
    let endpoints: Vec<String> =
        NAMES.iter().zip(ports).map(|(name, port)| format!("{scheme}://{name}:{port}")).collect();
    let listed = |line: &str| !line.starts_with("cluster.endpoints");
    let mut lines: Vec<String> =
        site.in_front_of(cluster).lines().filter(|line| listed(line)).map(str::to_owned).collect();
    lines.push(format!("cluster.endpoints = {endpoints:?}"));
    if let Leads::Server(dns) = leads {
        lines.push(format!("cluster.dns = [\"{}\"]", dns.address));
    }
    lines.push(more.to_owned());
    lines.join("\n") + "\n"
}

async fn started(site: Site, config: &str, leads: &Leads) -> Keyward {
    match leads {
        Leads::File(path, flags) => Keyward::start_with_hosts(site, config, path, flags).await,
        Leads::Server(_) => Keyward::start(site, config).await,
    }
}

/// When this cluster answered first, by what.
fn first<'a>(record: &'a Record, op: &str, cluster: &str) -> Option<&'a Value> {
    record.all("served").find(|line| line["op"] == op && line["cluster"] == cluster)
}

async fn cluster_id(cluster: &Cluster) -> String {
    let told = cluster.ctl_as_root().ok(&["endpoint", "status", "-w", "json"]).await;
    let status: Value = serde_json::from_str(&told).expect("JSON");
    let id = status[0]["Status"]["header"]["cluster_id"].as_u64().expect("a cluster has an id");
    format!("{id:x}")
}

#[tokio::test]
async fn the_same_client_goes_on_when_its_names_lead_to_another_cluster() {
    let moved = async {
        for version in versions() {
            move_to_another_cluster(&version, Tls::Off).await;
            // Under the same authority, or nobody could follow.
            if full() {
                move_to_another_cluster(&version, Tls::Mutual).await;
            }
        }
    };
    tokio::task::LocalSet::new().run_until(moved).await;
}

async fn move_to_another_cluster(version: &Version, tls: Tls) {
    let tasks = Tasks::default();
    let ports = [0; 3].map(|_: u16| ports::free().port());
    let (old_place, new_place) = (Place::new(1, ports), Place::new(2, ports));
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Arc::new(Pki::new(folder.path()));
    let (old, new) = tokio::join!(
        old_place.cluster(version, tls, &authority),
        new_place.cluster(version, tls, &authority)
    );
    let (old_id, new_id) = (cluster_id(&old).await, cluster_id(&new).await);
    assert_ne!(old_id, new_id);
    // Of three names two lead nowhere.
    let reachable = old_place.relay(0, &old, &tasks).await;
    let site = Site::new();
    let leads = Leads::start(&site, &tasks).await;
    leads.to(&old_place);
    let config = config(&site, &old, ports, &leads, "cluster.identity = \"follow\"");
    let through = vec![site.listen.to_string()];
    let keyward = started(site, &config, &leads).await;
    let client = Client::start(CLIENT, "tenant", "alice", &through, &["--prefix", "/a/"]);
    client.says("ready").await;
    client.serves(&["read", "write", "watch"], &old_id).await;
    client.serves(&["read", "write", "watch"], &old_id).await;

    let mut members = Vec::new();
    for i in 0..3 {
        members.push(new_place.relay(i, &new, &tasks).await);
    }
    drop(reachable);
    let changed = now();
    leads.to(&new_place);
    client.serves(&["read", "write", "watch"], &new_id).await;
    client.finish();
    let record = client.record().await;
    told(&format!("{version} {tls:?}"), &record, &leads, (&old_id, &new_id), changed);
    assert_eq!(keyward.metric("keyward_cluster_changes_total", &[]).await, 1.0);
    drop((keyward, members));
}

/// Prints how long it took, and holds the record against what is promised.
fn told(version: &str, record: &Record, leads: &Leads, (old, new): (&str, &str), changed: i64) {
    assert_eq!(record.exit.code(), Some(0), "{}", record.tail());
    for op in ["read", "write", "watch"] {
        assert!(first(record, op, old).is_some(), "{op} began on the first cluster: {}", record.tail());
    }
    let after = |op| first(record, op, new).and_then(|line| line["unix_ms"].as_i64()).expect(op) - changed;
    let (read, write, watch) = (after("read"), after("write"), after("watch"));
    let by = match leads {
        Leads::File(..) => "hosts file",
        Leads::Server(_) => "name server",
    };
    let compacted = record.the("compacted");
    println!(
        "{version} ({by}): after the change the new cluster answered the same client's read after {read} ms, its write after \
         {write} ms, its watch after {watch} ms; {AGREED} ms of that are the agreement of rules 20: {} ms more; {compacted}; {}",
        read.min(write) - AGREED,
        record.the("summary")
    );
    for failing in record.all("failing") {
        println!("{version}: {failing}");
    }
    assert!(read.min(write) >= AGREED, "nothing is followed sooner than they have agreed for long enough");
    assert_eq!(compacted["canceled"], true, "{compacted}");
    assert!(compacted["compact_revision"].as_i64() > Some(0), "{compacted}");
    assert_eq!(compacted["message"], "etcdserver: mvcc: required revision has been compacted");
    assert_eq!(
        record.the("lease")["message"],
        "etcdserver: requested lease not found",
        "it is not the new cluster's"
    );
    assert_eq!(record.all("ended").count(), 0, "{}", record.tail());
}

async fn log_in(through: &Endpoint, user: &str) -> String {
    let request = AuthenticateRequest { name: user.into(), password: password(user) };
    let call = Call::unary("/etcdserverpb.Auth/Authenticate", &request.encode_to_vec());
    let answer = through.call(&call).await;
    assert_eq!(answer.code(), Some(0), "{}", answer.message());
    AuthenticateResponse::decode(answer.messages().remove(0)).expect("etcd's message").token
}

/// What a write with this token is answered: its code and text, and where it was done by which cluster.
async fn put(through: &Endpoint, token: &str, key: &str) -> (u32, String, String) {
    let request = PutRequest { key: key.to_owned().into(), value: "v".into(), ..PutRequest::default() };
    let call = Call::unary("/etcdserverpb.KV/Put", &request.encode_to_vec()).with("token", token);
    let answer = through.call(&call).await;
    let done = answer.messages().first().and_then(|message| PutResponse::decode(message.clone()).ok());
    let cluster = done.and_then(|done| done.header).map_or(0, |header| header.cluster_id);
    (answer.code().expect("a status"), answer.message(), format!("{cluster:x}"))
}

/// A cluster of one member whose clients reach it at `address`.
async fn behind(version: &Version, address: SocketAddr, tasks: &Tasks) -> (Cluster, Relay) {
    let auth = Auth::On { extra_users: 2 };
    let options = Options { auth, advertise: vec![address], strangers: true, ..Options::default() };
    let cluster = Cluster::start(version, options).await;
    let relay = Relay::at(address, tasks).await;
    relay.open(cluster.address(0));
    (cluster, relay)
}

/// There u00 has another password, and u01 is blocked.
async fn differ(new: &Cluster) {
    let root = new.ctl_as_root();
    root.ok(&["user", "delete", "u00"]).await;
    root.ok(&["user", "add", "u00:another-secret"]).await;
    root.ok(&["user", "grant-role", "u00", "ru"]).await;
    let blocked = r#"{"user":{"name":"u01","generation":0,"blocked":true}}"#;
    root.ok(&["put", "/keyward/user/u01", blocked]).await;
}

/// The tokens are those of before, and nobody logs in again.
#[tokio::test]
async fn sessions_prove_themselves_to_the_new_cluster_and_who_is_blocked_there_is_never_let_in() {
    let moved = Box::pin(async {
        let (version, tasks) = (newest("3.5"), Tasks::default());
        let name = "etcd.keyward.test";
        let port = ports::free().port();
        let ips = [1, 2].map(|network| Ipv4Addr::new(127, 0, network, 9));
        let addresses = ips.map(|ip| SocketAddr::from((ip, port)));
        let [(old, old_relay), (new, new_relay)] =
            [behind(&version, addresses[0], &tasks).await, behind(&version, addresses[1], &tasks).await];
        let (old_id, new_id) = (cluster_id(&old).await, cluster_id(&new).await);
        differ(&new).await;

        let dns = Dns::start(&tasks).await;
        dns.says(vec![(name, dns::Record::A(ips[0]))]);
        let site = Site::new();
        let listed = |line: &&str| !line.starts_with("cluster.endpoints");
        let config = site.in_front_of(&old).lines().filter(listed).collect::<Vec<_>>().join("\n");
        let config = format!(
            "{config}\ncluster.endpoints = [\"http://{name}:{port}\"]\ncluster.dns = [\"{}\"]\n\
                 cluster.identity = \"follow\"\nrevocation.etcd_prefix = \"/keyward/\"\n",
            dns.address
        );
        let keyward = Keyward::start(site, &config).await;
        let through = Endpoint::plain(keyward.site().listen);
        let (alice, other, blocked) =
            (log_in(&through, "alice").await, log_in(&through, "u00").await, log_in(&through, "u01").await);
        for (token, key) in [(&alice, "/a/k"), (&other, "/u/k"), (&blocked, "/u/l")] {
            assert_eq!(put(&through, token, key).await, (0, String::new(), old_id.clone()));
        }
        drop(old_relay);
        dns.says(vec![(name, dns::Record::A(ips[1]))]);
        // Whoever is blocked there knocks all the time, and is let in at no moment.
        let knocks = std::cell::Cell::new(0);
        let knock = async {
            loop {
                let (code, message, cluster) = put(&through, &blocked, "/u/l").await;
                assert_ne!(cluster, new_id, "{message}");
                knocks.set(knocks.get() + 1);
                if code == 16 {
                    return message;
                }
                assert!(code == 0 && cluster == old_id || code == 14, "{code} {message}");
            }
        };
        let refused = tokio::time::timeout(LIMIT, knock).await.expect("it is refused in the end");
        assert_eq!(refused, "etcdserver: invalid auth token");
        let answered = async |token: &str, key: &str| {
            let look = async || Some(put(&through, token, key).await).filter(|(code, ..)| *code != 14);
            wait::until(LIMIT, "an answer", look).await
        };
        assert_eq!(
            answered(&alice, "/a/k").await,
            (0, String::new(), new_id.clone()),
            "her token is good as it is"
        );
        let (code, message, _) = answered(&other, "/u/k").await;
        assert_eq!(
            (code, &*message),
            (16, "etcdserver: invalid auth token"),
            "its password is another there"
        );
        assert_eq!(keyward.metric("keyward_cluster_changes_total", &[]).await, 1.0);
        println!("{version}: {} knocks of one who is blocked, all refused", knocks.get());
        drop((keyward, dns, new_relay));
    });
    tokio::task::LocalSet::new().run_until(moved).await;
}
