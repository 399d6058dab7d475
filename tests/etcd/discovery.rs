//! Members are found by DNS, and followed where their names lead.
//!
//! The members' task alone against real clusters, with a name server of the test's own; then a whole Keyward whose member moves
//! under its client.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use keyward::config::{Cluster as Config, Discovery, Endpoint, Scheme, Srv};
use keyward::dial::connect::Connector;
use keyward::dial::member_tls;
use keyward::dial::names::NameResolver;
use keyward::identity::pattern::Glob;
use keyward::members::discovery::{Members, SeedList};
use keyward::members::membership::{
    AbsenceReason, AddressFault, Member, MembersHandle, Membership, UnansweredAddress,
};
use keyward::tasks::Tasks;

use crate::harness::client::Client;
use crate::harness::dns::{Dns, Record};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, Tls, newest, ports, wait};
use crate::members::{self, alone};

const LIMIT: Duration = Duration::from_secs(40);
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;

struct Found {
    handle: MembersHandle,
    seeds: SeedList,
    _tasks: Tasks,
}

fn config(cluster: &Cluster, dns: &Dns) -> Config {
    let probe = (cluster.options().auth != Auth::Off).then_some("root");
    let discovery = Discovery { dns: vec![dns.address], ..Discovery::default() };
    Config { discovery, ..members::config(cluster, &[], probe) }
}

fn endpoint(scheme: Scheme, host: &str, port: u16) -> Endpoint {
    Endpoint { scheme, host: host.into(), port }
}

impl Found {
    fn start(config: &Config) -> Self {
        let tls = config.tls.as_ref().map(|tls| member_tls::client_config(tls).unwrap());
        let names = NameResolver::by(&config.discovery.dns, None);
        let (members, tasks) = (
            Members::new(config, Connector::resolving(names, tls, config.connect_timeout)),
            Tasks::default(),
        );
        Self { seeds: members.seeds(), handle: members.start(&tasks), _tasks: tasks }
    }

    async fn until(&self, what: &str, wanted: impl Fn(&Membership) -> bool) -> Arc<Membership> {
        let look = async || Some(self.handle.snapshot.load_full()).filter(|now| wanted(now));
        match wait::within_limit(LIMIT, look).await {
            Some(now) => now,
            None => panic!("not within {LIMIT:?}: {what}; {:#?}", self.handle.snapshot.load()),
        }
    }
}

fn ready(now: &Membership) -> usize {
    now.ready_voters().count()
}

/// The names by which members are reached.
fn hosts(now: &Membership) -> Vec<&str> {
    let mut hosts: Vec<&str> = now.members.iter().map(|member| &*member.endpoint.host).collect();
    hosts.sort_unstable();
    hosts
}

const RECORD: &str = "_etcd-client-blue._tcp.keyward.test";
/// Not of the domain.
const ELSEWHERE: &str = "m0.keyward.test.elsewhere.test";
const TARGETS: [&str; 3] = ["m0.keyward.test", "m1.keyward.test", "m2.keyward.test"];

#[tokio::test]
async fn srv_records_say_which_members_there_are_and_are_followed() {
    alone(async {
        let cluster = Cluster::start(&newest("3.5"), Options { members: 3, ..Options::default() }).await;
        let tasks = Tasks::default();
        let dns = Dns::start(&tasks).await;
        // Of nobody's business, and always among what is told.
        let elsewhere = std::net::TcpListener::bind((LOOPBACK, 0)).unwrap();
        elsewhere.set_nonblocking(true).unwrap();
        let its_port = elsewhere.local_addr().unwrap().port();
        let says = |targets: &[usize]| {
            let services = targets
                .iter()
                .map(|i| (RECORD, Record::Srv(cluster.address(*i).port(), TARGETS[*i].to_owned())));
            let services = services.chain([(RECORD, Record::Srv(its_port, ELSEWHERE.to_owned()))]);
            let names = TARGETS.iter().chain([&ELSEWHERE]);
            dns.says(services.chain(names.map(|name| (*name, Record::A(LOOPBACK)))).collect());
        };
        let mut config = config(&cluster, &dns);
        let srv = Srv { domain: "keyward.test".into(), name: Some("blue".into()), scheme: Scheme::Http };
        config.discovery.srv = Some(srv);
        // As where nothing is configured: what is told is used in this form only; the member list names addresses, which are not.
        config.discovery.allowed_hosts = vec![Glob::new("keyward.test"), Glob::new("*.keyward.test")];
        dns.fails(true);
        let found = Found::start(&config);
        let no_record = |now: &Membership| {
            now.unanswered.iter().any(|one| one.trouble == AddressFault::Name && one.endpoint.port == 0)
        };
        found.until("nobody says who the members are", no_record).await;
        dns.fails(false);
        says(&[0]);
        let now = found
            .until("one is told, and two are listed", |now| ready(now) == 1 && now.absent.len() == 2)
            .await;
        assert_eq!(hosts(&now), ["m0.keyward.test"]);
        assert_eq!(now.members[0].resolved_ip, Some(IpAddr::V4(LOOPBACK)));
        let absent: Vec<AbsenceReason> = now.absent.iter().map(|absent| absent.why).collect();
        assert_eq!(absent, [AbsenceReason::NotAllowed; 2], "their addresses in the list are of another form");
        let not_allowed = |now: &Membership| {
            let of_one =
                |one: &UnansweredAddress| (one.endpoint.host.clone(), one.endpoint.port, one.trouble);
            now.unanswered.iter().map(of_one).collect::<Vec<_>>()
        };
        assert_eq!(not_allowed(&now), [(ELSEWHERE.to_owned(), its_port, AddressFault::NotAllowed)]);
        says(&[0, 1, 2]);
        let now = found.until("three are told", |now| ready(now) == 3).await;
        assert_eq!(hosts(&now), TARGETS);
        says(&[1, 2]);
        let now = found.until("one left", |now| ready(now) == 2).await;
        assert_eq!(hosts(&now), TARGETS[1..]);
        dns.fails(true);
        let asked = dns.questions();
        wait::until(LIMIT, "it is asked again in vain", async || {
            (dns.questions() > asked + 12).then_some(())
        })
        .await;
        let now = found.handle.snapshot.load_full();
        assert_eq!((ready(&now), hosts(&now)), (2, TARGETS[1..].to_vec()), "the last answer stays");
        let refused = elsewhere.accept().expect_err("nobody has ever connected there").kind();
        assert_eq!(refused, std::io::ErrorKind::WouldBlock);
        drop((found, dns, tasks));
    })
    .await;
}

/// A headless service, or a name with an old address among its new ones.
#[tokio::test]
async fn each_address_of_a_name_may_be_a_member() {
    alone(async {
        let port = ports::free().port();
        let ips = [1, 2, 3, 4].map(|i| Ipv4Addr::new(127, 0, 3, i));
        let addresses = ips.map(|ip| SocketAddr::from((ip, port)));
        let options = Options { members: 3, advertise: addresses[..3].to_vec(), ..Options::default() };
        let cluster = Cluster::start(&newest("3.5"), options).await;
        let tasks = Tasks::default();
        let mut relays = Vec::new();
        for (i, address) in addresses[..3].iter().enumerate() {
            let relay = Relay::at(*address, &tasks).await;
            relay.open(cluster.address(i));
            relays.push(relay);
        }
        let dns = Dns::start(&tasks).await;
        let name = "etcd.keyward.test";
        let says = |ips: &[Ipv4Addr]| dns.says(ips.iter().map(|ip| (name, Record::A(*ip))).collect());
        // Nobody is at the last one.
        says(&ips);
        let mut config = config(&cluster, &dns);
        config.endpoints = vec![endpoint(Scheme::Http, name, port)];
        let found = Found::start(&config);
        let now = found.until("three members of one name", |now| ready(now) == 3).await;
        let mut at: Vec<_> = now.members.iter().map(|member| member.resolved_ip).collect();
        at.sort_unstable();
        assert_eq!(at, ips[..3].iter().map(|ip| Some(IpAddr::V4(*ip))).collect::<Vec<_>>());
        assert_eq!(hosts(&now), [name; 3]);
        let nobody = |now: &Membership| {
            now.unanswered.iter().map(|one| (one.at, one.trouble)).collect::<Vec<_>>()
                == [(Some(IpAddr::V4(ips[3])), AddressFault::Connection)]
        };
        found.until("nobody is at the fourth, which is told", nobody).await;
        // In another order, and one at a time: nobody moves.
        let stand = |now: &Membership| {
            let of_one = |member: &Arc<Member>| (member.id, member.endpoint.host.clone(), member.resolved_ip);
            now.members.iter().map(of_one).collect::<Vec<_>>()
        };
        let before = stand(&now);
        for told in [&[ips[2], ips[0], ips[1]][..], &ips[1..2], &ips[..1]] {
            says(told);
            let asked = dns.questions();
            // For either kind of address: when it is asked anew, what it was answered first has been taken in.
            let again = async || (dns.questions() >= asked + 4).then_some(());
            wait::until(LIMIT, "it is asked again", again).await;
            assert_eq!(stand(&found.handle.snapshot.load()), before, "{told:?}");
        }
        // One leaves the name: its own address in the member list is all that is left of it.
        says(&ips[1..3]);
        let by_list = |now: &Membership| ready(now) == 3 && hosts(now) == ["127.0.3.1", name, name];
        let now = found.until("one is found by the list", by_list).await;
        assert_eq!(now.unanswered, []);
        // And endpoints that are replaced while it runs.
        let mut other = config.clone();
        other.endpoints = vec![endpoint(Scheme::Http, "127.0.3.2", port)];
        assert!(found.seeds.replace(&other) && !found.seeds.replace(&other));
        let by_address = |now: &Membership| ready(now) == 3 && !hosts(now).contains(&name);
        found.until("the name is not used any more", by_address).await;
        other.endpoints = vec![endpoint(Scheme::Https, "127.0.3.2", port)];
        assert!(!found.seeds.replace(&other), "never from http to https, nor back");
        drop((found, relays, dns, tasks));
    })
    .await;
}

#[tokio::test]
async fn what_is_wrong_with_an_address_is_told() {
    alone(async {
        let options = Options { tls: Tls::Server, ..Options::default() };
        let cluster = Cluster::start(&newest("3.5"), options).await;
        let tasks = Tasks::default();
        let dns = Dns::start(&tasks).await;
        dns.says(vec![("other.keyward.test", Record::A(LOOPBACK))]);
        let mut config = config(&cluster, &dns);
        let (port, closed) = (cluster.address(0).port(), ports::free().port());
        config.endpoints = vec![
            endpoint(Scheme::Https, "127.0.0.1", port),
            endpoint(Scheme::Https, "127.0.0.1", closed),
            endpoint(Scheme::Https, "other.keyward.test", port),
            endpoint(Scheme::Https, "nowhere.keyward.test", port),
        ];
        let found = Found::start(&config);
        let told = |now: &Membership| ready(now) == 1 && now.unanswered.len() == 3;
        let now = found.until("three troubles are told", told).await;
        let mut troubles: Vec<(&str, AddressFault)> =
            now.unanswered.iter().map(|one| (&*one.endpoint.host, one.trouble)).collect();
        troubles.sort_unstable_by_key(|(host, _)| *host);
        let expected = [
            ("127.0.0.1", AddressFault::Connection),
            ("nowhere.keyward.test", AddressFault::Name),
            ("other.keyward.test", AddressFault::Tls),
        ];
        assert_eq!(troubles, expected);
        for one in &now.unanswered {
            println!("{}: {}", one.endpoint, one.why);
        }
        drop((found, dns, tasks));
    })
    .await;
}

/// Its only member is the same, elsewhere: nothing fails, and nothing is left at the old address.
#[tokio::test]
async fn what_is_open_moves_to_where_a_name_leads_now() {
    alone(async {
        let port = ports::free().port();
        let ips = [1, 2].map(|i| Ipv4Addr::new(127, 0, 4, i));
        let options = Options {
            auth: Auth::On { extra_users: 0 },
            advertise: vec![SocketAddr::from((Ipv4Addr::new(127, 0, 4, 9), port))],
            ..Options::default()
        };
        let cluster = Cluster::start(&newest("3.5"), options).await;
        let tasks = Tasks::default();
        let mut relays = Vec::new();
        for ip in ips {
            let relay = Relay::at(SocketAddr::from((ip, port)), &tasks).await;
            relay.open(cluster.address(0));
            relays.push(relay);
        }
        let dns = Dns::start(&tasks).await;
        let name = "etcd.keyward.test";
        dns.says(vec![(name, Record::A(ips[0]))]);
        let site = Site::new();
        let more =
            format!("cluster.endpoints = [\"http://{name}:{port}\"]\ncluster.dns = [\"{}\"]\n", dns.address);
        let listed = |line: &&str| !line.starts_with("cluster.endpoints");
        let config =
            site.in_front_of(&cluster).lines().filter(listed).collect::<Vec<_>>().join("\n") + "\n" + &more;
        let through = vec![site.listen.to_string()];
        let keyward = Keyward::start(site, &config).await;
        let client = Client::start("3.5.11", "tenant", "alice", &through, &["--prefix", "/a/"]);
        client.says("ready").await;
        assert!(relays[0].live() > 0 && relays[1].live() == 0);
        dns.says(vec![(name, Record::A(ips[1]))]);
        let moved = async || (relays[0].live() == 0 && relays[1].live() > 0).then_some(());
        wait::until(LIMIT, "nothing is left at the old address", moved).await;
        client.finish();
        let record = client.record().await;
        assert_eq!(record.exit.code(), Some(0), "{}", record.tail());
        for kind in ["failing", "ended", "compacted"] {
            assert_eq!(record.all(kind).count(), 0, "{}", record.tail());
        }
        assert_eq!(record.the("lease")["code"], "OK");
        println!("{}", record.the("summary"));
        drop((keyward, relays, dns));
    })
    .await;
}
