//! Story 10: two of three members cannot be reached, then the names lead to another cluster with other users' tokens. The client
//! process goes on as it is.
//!
//! Where the machine lets a test mount a file (`unshare`), the names stand in a hosts file of Keyward's own; elsewhere a name
//! server on loopback says where they lead.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use keyward::tasks::Tasks;
use serde_json::Value;

use crate::harness::client::{Client, Record};
use crate::harness::dns::{self, Dns};
use crate::harness::keyward::{Keyward, Site, namespace};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, ports, versions};

const CLIENT: &str = "3.5.11";
const NAMES: [&str; 3] = ["etcd-1.keyward.test", "etcd-2.keyward.test", "etcd-3.keyward.test"];
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

    async fn cluster(&self, version: &crate::harness::binary::Version) -> Cluster {
        let options = Options {
            members: 3,
            auth: Auth::On { extra_users: 0 },
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
    let endpoints: Vec<String> =
        NAMES.iter().zip(ports).map(|(name, port)| format!("http://{name}:{port}")).collect();
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
    tokio::task::LocalSet::new()
        .run_until(async {
            for version in versions() {
                let tasks = Tasks::default();
                let ports = [0; 3].map(|_: u16| ports::free().port());
                let (old_place, new_place) = (Place::new(1, ports), Place::new(2, ports));
                let (old, new) = tokio::join!(old_place.cluster(&version), new_place.cluster(&version));
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
                told(&version.to_string(), &record, &leads, (&old_id, &new_id), changed);
                assert_eq!(keyward.metric("keyward_cluster_changes_total", &[]).await, 1.0);
                drop((keyward, members));
            }
        })
        .await;
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
