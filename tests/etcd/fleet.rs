//! Must show 6: users with certificates cost connections, and these stay within the limit that the configuration states: 200 users on
//! three members, from two shards. Idle ones go; where all are in use, one more is refused.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use http::HeaderMap;
use http::uri::PathAndQuery;
use keyward::config::{self, Config};
use keyward::credentials::{CredentialSettings, Credentials, MetricsPages};
use keyward::dial::connect::Connector;
use keyward::dial::member_tls;
use keyward::members::choose::MemberChooser;
use keyward::members::discovery::Members;
use keyward::members::membership::Member;
use keyward::policy::permit::Permit;
use keyward::rpc::method::{Lane, METHODS};
use keyward::tasks::Tasks;
use keyward::telemetry::metrics::Metrics;
use keyward::upstream::certificate_pool::CertificatePool;
use keyward::upstream::outbox::Outbox;
use keyward::upstream::own_requests::{ReadError, local_revision};
use keyward::upstream::peer_urls::PeerTrustCheck;
use keyward::upstream::pool::ConnectionPool;
use keyward::upstream::resume_limiter::ResumeLimiter;
use keyward::upstream::send::{NoReply, UpstreamClient, UpstreamUser, upstream_headers};
use keyward::upstream::upstream_request::UpstreamRequestBody;
use keyward::upstream::waiting_calls::WaitingCalls;

use crate::harness::binary::{Version, full};
use crate::harness::keyward::Site;
use crate::harness::pki::{Pair, Pki};
use crate::harness::{Auth, Cluster, Options, Tls, versions, wait};
use crate::rewatch::local;

const LIMIT: Duration = Duration::from_secs(120);
const USERS: usize = 200;
/// Fewer than one per user and member.
const CONNECTIONS: usize = 96;
/// The probes open some of their own.
const SLACK: usize = 16;
/// Behind the calls of one user in so many the open connections are counted: the system takes longer to tell them than a call takes.
const COUNTED_USERS: usize = 25;
/// The default, which the full run awaits once.
const MINUTE: &str = "60s";
const IDLE: &str = "2s";

/// Two shards' ways upstream to a real cluster, without clients.
struct Bench {
    cluster: Cluster,
    doors: Vec<Rc<UpstreamClient>>,
    members: Vec<Arc<Member>>,
    metrics: Arc<Metrics>,
    tasks: Tasks,
}

impl Bench {
    async fn start(version: &Version, connections: usize) -> Bench {
        Bench::minting(version, connections, |cluster| cluster.pki().mint()).await
    }

    /// The same with another authority to mint from than that which members trust.
    async fn minting(version: &Version, connections: usize, mint: fn(&Cluster) -> Pair) -> Bench {
        let options =
            Options { members: 3, auth: Auth::On { extra_users: 0 }, tls: Tls::Mutual, ..Options::default() };
        let cluster = Cluster::start(version, options).await;
        let site = Site::new();
        let mint = mint(&cluster);
        let text = format!(
            "{}cluster.idle_timeout = \"{}\"\n[[user]]\nname = \"*\"\nmint = true\n[mint]\nca = {:?}\nkey = {:?}\n",
            site.in_front_of(&cluster),
            if full() && versions().last() == Some(version) { MINUTE } else { IDLE },
            mint.cert,
            mint.key
        );
        let file = site.write("keyward.toml", &text);
        let config: Config = config::load(&file).unwrap_or_else(|faults| panic!("{faults}")).0;
        let tasks = Tasks::default();
        let tls = config.cluster.tls.as_ref().map(member_tls::client_config).transpose().expect("TLS");
        let connector = Connector::tcp(tls, config.cluster.connect_timeout);
        let found = Members::new(&config.cluster, connector.clone());
        let (credentials, control) =
            Credentials::new(CredentialSettings::default(), found.channels()).expect("random bytes");
        tasks.spawn("credentials", control.run(tasks.clone())).detach();
        let handle = found.start(&tasks);
        let pages = MetricsPages { connector: connector.http1(), members: Arc::clone(&handle.snapshot) };
        credentials.act_for(&config.users, &config.cluster, pages).expect("users that can be proved");
        let trust =
            PeerTrustCheck::new(&config.cluster, connector.clone(), handle.clone(), Arc::clone(&credentials));
        let follow = async move { panic!("refused: {}", trust.follow().await) };
        tasks.spawn("peer trust", follow).detach();
        let metrics = Arc::new(Metrics::new(METHODS.iter().map(|method| method.path).collect()));
        let fleet = Arc::new(CertificatePool::new(connections, Arc::clone(&metrics)));
        let door = || {
            let idle = config.cluster.idle_timeout;
            let hints = handle.hints.clone();
            Rc::new(UpstreamClient {
                pool: ConnectionPool::new(connector.clone(), hints, tasks.clone(), Arc::clone(&fleet), idle),
                members: handle.clone(),
                credentials: Arc::clone(&credentials),
                chooser: MemberChooser::default(),
                resumes: ResumeLimiter::default(),
                waiting_calls: WaitingCalls::default(),
                term: Cell::default(),
            })
        };
        let doors = vec![door(), door()];
        let ready = async || {
            let members: Vec<_> = handle.snapshot.load().ready_voters().cloned().collect();
            (members.len() == 3).then_some(members)
        };
        let members = wait::until(LIMIT, "three members are ready", ready).await;
        Bench { cluster, doors, members, metrics, tasks }
    }

    fn user(&self, number: usize) -> UpstreamUser {
        let name = format!("user-{number:03}");
        self.doors[0].credentials.act_as(&name.as_str().into()).expect("all are minted")
    }

    /// Connections to the members that this machine has open at one moment: the system's table takes its time to be read, so
    /// only what is in two readings was there between them.
    fn open(&self) -> usize {
        let addresses: Vec<_> = (0..self.cluster.len()).map(|i| self.cluster.address(i)).collect();
        established(&addresses).intersection(&established(&addresses)).count()
    }

    fn shown(&self) -> i64 {
        self.metrics.certificate_connections.get()
    }
}

/// Established connections to any of these, as the system tells them: where from, and the socket's inode.
fn established(addresses: &[SocketAddr]) -> BTreeSet<(String, String)> {
    let table = std::fs::read_to_string(Path::new("/proc/net/tcp")).expect("Linux");
    // The remote port and the state of a line. The table holds thousands of others: only ours are taken apart.
    let ends: Vec<String> = addresses.iter().map(|address| format!(":{:04X} 01 ", address.port())).collect();
    let ours = table.lines().filter(|line| ends.iter().any(|end| line.contains(end.as_str())));
    let socket = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, _, _, _, _, _, _, _, inode, ..] = fields[..] else { return None };
        Some((local.to_owned(), inode.to_owned()))
    };
    ours.filter_map(socket).collect()
}

#[test]
fn two_hundred_certificates_stay_within_the_limit_and_idle_connections_go() {
    local(async {
        for version in versions() {
            let bench = Bench::start(&version, CONNECTIONS).await;
            // The probes' own.
            let before = bench.open();
            let most = Cell::new(0);
            let rounds = if full() { 5 } else { 2 };
            for round in 0..rounds {
                let users = stream::iter(0..USERS);
                let calls = users.for_each_concurrent(32, async |number| {
                    let whom = bench.user(number);
                    for (turn, member) in bench.members.iter().enumerate() {
                        let door = &bench.doors[(number + turn + round) % 2];
                        let answered = async || {
                            // etcd has no such users, and says so of some: it has seen the certificate. On a busy machine a
                            // handshake may take longer than it may.
                            let asked = local_revision(door, &whom, member).await;
                            matches!(asked, Ok(_) | Err(ReadError::Refused(_))).then_some(())
                        };
                        wait::until(LIMIT, &format!("user {number} is answered"), answered).await;
                        if number.is_multiple_of(COUNTED_USERS) {
                            most.set(most.get().max(bench.open().saturating_sub(before)));
                        }
                        assert!(bench.shown() <= i64::try_from(CONNECTIONS).expect("small"), "{version}");
                    }
                });
                calls.await;
            }
            println!(
                "{version}: {USERS} users, {} calls, at most {} connections of {CONNECTIONS}",
                rounds * USERS * 3,
                most.get()
            );
            let bounds = CONNECTIONS / 2..=CONNECTIONS + SLACK;
            assert!(bounds.contains(&most.get()), "{version}: {}", most.get());
            let gone = async || (bench.shown() == 0 && bench.open() <= before + SLACK).then_some(());
            let quiet = std::time::Instant::now();
            wait::until(LIMIT, "idle connections are gone", gone).await;
            println!("{version}: none is left after {:?}", quiet.elapsed());
            bench.tasks.abort_all();
        }
    });
}

#[test]
fn shards_share_a_users_connections_and_one_too_many_is_refused() {
    local(async {
        for version in versions() {
            let bench = Bench::start(&version, 2).await;
            let member = &bench.members[0];
            let hold = async |shard: usize, user: usize| {
                let door = &bench.doors[shard];
                let whom = bench.user(user);
                let shown = door.credential_for(&whom, member).await.expect("a certificate");
                let head = upstream_headers(&HeaderMap::new(), &shown, Permit::for_own_request());
                let (asks, asked) = Outbox::new();
                let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
                let ping = keyward::pb::etcdserverpb::LeaseKeepAliveRequest { id: 7 };
                let ping = keyward::rpc::frame::encode(&prost::Message::encode_to_vec(&ping));
                asks.send(ping);
                let sent =
                    door.send(member, Lane::Stream, path, head, UpstreamRequestBody::Frames(asked)).await;
                sent.map(|answered| (asks, answered))
            };
            let first = hold(0, 1).await.ok().expect("room");
            let same = hold(1, 1).await.ok().expect("the same connection");
            assert_eq!(bench.shown(), 1, "{version}: two shards, one connection");
            let second = hold(0, 2).await.ok().expect("room");
            assert!(matches!(hold(1, 3).await, Err(NoReply::NoRoom)), "{version}");
            assert_eq!(bench.metrics.certificate_connections_refused.get(), 1);
            assert!(member.is_ready(), "{version}: it is not the member's fault");
            // One that is not in use gives way.
            drop(second);
            let third = hold(1, 3).await;
            assert!(third.is_ok(), "{version}");
            assert_eq!(bench.shown(), 2, "{version}");
            drop((first, same, third));
            bench.tasks.abort_all();
        }
    });
}

#[test]
fn a_certificate_that_no_member_trusts_harms_its_user_alone() {
    local(async {
        for version in versions() {
            let foreign = |cluster: &Cluster| Pki::new(&cluster.folder().join("foreign")).mint();
            let bench = Bench::minting(&version, 8, foreign).await;
            let member = &bench.members[0];
            let asked = local_revision(&bench.doors[0], &bench.user(1), member).await;
            assert!(matches!(asked, Err(ReadError::Lost)), "{version}: {asked:?}");
            assert!(member.is_ready(), "{version}: others still choose it");
            let anybody = local_revision(&bench.doors[0], &UpstreamUser::Nobody, member).await;
            assert!(!matches!(anybody, Err(ReadError::Lost)), "{version}: {anybody:?}");
            wait::until(LIMIT, "its connection is gone", async || (bench.shown() == 0).then_some(())).await;
            bench.tasks.abort_all();
        }
    });
}
