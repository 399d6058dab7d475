//! Keyward knows who the members are, who leads and who may take traffic, whatever happens to them.
//!
//! Runs the members' task alone against real clusters: what it publishes is what is promised.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use keyward::config::{
    ClientTls, Cluster as Config, ClusterPin, Discovery, Endpoint, EtcdLogin, MemberPreference, MemberTrust,
    Scheme,
};
use keyward::dial::connect::Connector;
use keyward::dial::member_tls;
use keyward::identity::{ClusterId, MemberId};
use keyward::members::discovery::{Members, ProbeLogin};
use keyward::members::membership::{
    AuthSetting as AuthNow, ControlChannels, Member, MembersHandle, Membership, MembershipHint, Readiness,
    Role, ServingState, UnreadyReason,
};
use keyward::pem::{Chain, KeyPair, PrivateKey, Roots};
use keyward::secret::Secret;
use keyward::tasks::Tasks;
use keyward::trust::Strictness;

use crate::harness::pki::Pair;
use crate::harness::{Auth, Cluster, Options, Tls, password, versions, wait};

/// For what takes an election or a look at the member list: a limit, never a pause.
const LIMIT: Duration = Duration::from_secs(40);

/// The members' task in front of a cluster.
pub(crate) struct Followed {
    pub(crate) handle: MembersHandle,
    channels: ControlChannels,
    pub(crate) login: ProbeLogin,
    /// Ends the task when dropped.
    _tasks: Tasks,
}

/// Runs a test on one thread, as the control runtime does.
pub(crate) async fn alone(test: impl Future<Output = ()>) {
    tokio::task::LocalSet::new().run_until(test).await;
}

pub(crate) fn config(cluster: &Cluster, members: &[usize], probe: Option<&str>) -> Config {
    let scheme = if cluster.options().tls == Tls::Off { Scheme::Http } else { Scheme::Https };
    let endpoint = |i: &usize| {
        let address = cluster.address(*i);
        Endpoint { scheme, host: address.ip().to_string(), port: address.port() }
    };
    let identity = (cluster.options().tls == Tls::Mutual).then(|| key_pair(&cluster.pki().nobody()));
    let roots = || Roots::read(&cluster.pki().ca).unwrap();
    Config {
        endpoints: members.iter().map(endpoint).collect(),
        tls: (scheme == Scheme::Https)
            .then(|| ClientTls { trust: MemberTrust::Authorities(roots(), Strictness::AsEtcd), identity }),
        connect_timeout: Duration::from_secs(2),
        idle_timeout: Duration::from_secs(60),
        token_ttl: Duration::from_secs(300),
        pin: ClusterPin::FirstAnswer,
        reads: MemberPreference::Any,
        writes: MemberPreference::Any,
        near: Vec::new(),
        hedge_after: None,
        outage: keyward::config::OutageTimes::default(),
        probe: probe.map(|user| login(user, &password(user))),
        discovery: Discovery::default(),
    }
}

fn key_pair(pair: &Pair) -> KeyPair {
    let (chain, key) = (Chain::read(&pair.cert).unwrap(), PrivateKey::read(&pair.key).unwrap());
    KeyPair::new(chain, key).unwrap()
}

pub(crate) fn login(user: &str, password: &str) -> EtcdLogin {
    EtcdLogin { user: user.into(), password: Arc::new(Secret::new(password.to_owned())) }
}

impl Followed {
    pub(crate) fn start(config: &Config) -> Self {
        let tls = config.tls.as_ref().map(|tls| member_tls::client_config(tls).unwrap());
        let connector = Connector::tcp(tls, config.connect_timeout);
        let tasks = Tasks::default();
        let members = Members::new(config, connector);
        let (channels, login) = (members.channels(), members.login());
        Self { channels, login, handle: members.start(&tasks), _tasks: tasks }
    }

    /// Waits until the snapshot satisfies `wanted`, woken by the change signal.
    pub(crate) async fn until(&self, what: &str, wanted: impl Fn(&Membership) -> bool) -> Arc<Membership> {
        let mut changes = self.handle.changes.clone();
        let look = async {
            loop {
                changes.mark_unchanged();
                let now = self.handle.snapshot.load_full();
                if wanted(&now) {
                    return now;
                }
                changes.changed().await.unwrap();
            }
        };
        match tokio::time::timeout(LIMIT, look).await {
            Ok(now) => now,
            Err(_) => panic!("not within {LIMIT:?}: {what}; {:#?}", self.handle.snapshot.load()),
        }
    }

    pub(crate) async fn until_auth(&self, wanted: AuthNow) {
        let mut changes = self.handle.changes.clone();
        let look = async {
            while self.handle.auth.now() != wanted {
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(LIMIT, look).await.unwrap_or_else(|_| panic!("auth never was {wanted:?}"));
    }
}

pub(crate) fn ready(now: &Membership) -> usize {
    now.ready_voters().count()
}

/// How much of the raft log it has applied; 0 where it does not tell.
pub(crate) fn applied(member: &Member) -> u64 {
    member.store_status.as_ref().map_or(0, |store_status| store_status.applied)
}

fn readiness(now: &Membership, id: MemberId) -> Option<Readiness> {
    now.get(id).map(|member| member.readiness)
}

async fn id(cluster: &Cluster, i: usize) -> MemberId {
    MemberId(cluster.member_id(i).await)
}

pub(crate) fn with_auth(members: usize) -> Options {
    Options { members, auth: Auth::On { extra_users: 0 }, ..Options::default() }
}

pub(crate) async fn logins(cluster: &Cluster, i: usize) -> f64 {
    cluster.counter(i, "grpc_server_started_total", &[("grpc_method", "Authenticate")]).await
}

pub(crate) async fn logins_of_all(cluster: &Cluster) -> Vec<f64> {
    let mut all = Vec::new();
    for i in 0..cluster.len() {
        all.push(logins(cluster, i).await);
    }
    all
}

#[tokio::test]
async fn all_members_are_found_behind_one_endpoint() {
    alone(async {
        for version in versions() {
            for tls in [Tls::Off, Tls::Server, Tls::Mutual] {
                let cluster = Cluster::start(&version, Options { tls, ..with_auth(3) }).await;
                let followed = Followed::start(&config(&cluster, &[0], Some("root")));
                let now =
                    followed.until("three are ready", |now| ready(now) == 3 && now.leader.is_some()).await;
                assert_eq!(now.leader, Some(id(&cluster, cluster.leader().await).await), "{version} {tls:?}");
                for i in 0..3 {
                    let member = now.get(id(&cluster, i).await).unwrap();
                    assert_eq!(*member.name, *format!("m{i}"));
                    assert_eq!(member.endpoint.port, cluster.address(i).port());
                    assert_eq!(member.version.unwrap().to_string(), version.to_string());
                    assert!(applied(member) > 0 && member.term == now.term && now.term > 0);
                    assert!(followed.channels.load().contains_key(&member.id));
                }
                followed.until_auth(AuthNow::On).await;
            }
        }
    })
    .await;
}

/// Without a user who may ask, members are still told apart, and their leader found.
#[tokio::test]
async fn without_a_probing_user_the_configured_endpoints_still_serve() {
    alone(async {
        for version in versions() {
            for tls in [Tls::Off, Tls::Server] {
                let cluster = Cluster::start(&version, Options { tls, ..with_auth(3) }).await;
                let before = logins_of_all(&cluster).await;
                let followed = Followed::start(&config(&cluster, &[0, 1, 2], None));
                let now =
                    followed.until("three are ready", |now| ready(now) == 3 && now.leader.is_some()).await;
                assert_eq!(now.leader, Some(id(&cluster, cluster.leader().await).await), "{version} {tls:?}");
                let ours = now.cluster.expect("the answer that refuses a watch tells the cluster");
                for member in &now.members {
                    assert_eq!(member.version.unwrap().to_string(), version.to_string());
                }
                followed.until_auth(AuthNow::On).await;
                drop(followed);
                // Nobody counts by being nameless: who is asked for by its id is found, and nobody else is.
                let config = config(&cluster, &[0, 1, 2], None);
                let named = Config { pin: ClusterPin::Id(ours), ..config.clone() };
                Followed::start(&named).until("three are ready by id", |now| ready(now) == 3).await;
                let other = Config { pin: ClusterPin::Id(ClusterId(1)), ..config };
                let now =
                    Followed::start(&other).until("all are told apart", |now| now.foreign.len() == 3).await;
                assert!(now.members.is_empty(), "{version} {tls:?}");
                for (i, before) in before.into_iter().enumerate() {
                    assert_eq!(logins(&cluster, i).await, before, "{version}: nobody to log in as");
                }
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_killed_leader_is_left_and_taken_back() {
    alone(async {
        for version in versions() {
            let mut cluster = Cluster::start(&version, with_auth(3)).await;
            let followed = Followed::start(&config(&cluster, &[0, 1, 2], Some("root")));
            let old = cluster.leader().await;
            let old_id = id(&cluster, old).await;
            followed.until("the leader is known", |now| now.leader == Some(old_id) && ready(now) == 3).await;
            cluster.kill(old);
            let lost = Readiness::NotReady(UnreadyReason::Unreachable);
            followed.until("it is unreachable", |now| readiness(now, old_id) == Some(lost)).await;
            let now = followed
                .until("another leads", |now| now.leader.is_some_and(|id| id != old_id) && ready(now) == 2)
                .await;
            let new = id(&cluster, cluster.leader().await).await;
            assert_eq!(now.leader().unwrap().id, new, "{version}");
            assert_eq!(now.serving(), ServingState::Ready);
            cluster.restart(old).await;
            followed.until("it is back", |now| ready(now) == 3).await;
        }
    })
    .await;
}

/// The kernel of a stopped member keeps its connections: only the missing answers tell.
#[tokio::test]
async fn a_stopped_leader_is_left_and_taken_back() {
    alone(async {
        for version in versions() {
            let mut cluster = Cluster::start(&version, with_auth(3)).await;
            let followed = Followed::start(&config(&cluster, &[0, 1, 2], Some("root")));
            let old = cluster.leader().await;
            let old_id = id(&cluster, old).await;
            followed.until("three are ready", |now| ready(now) == 3).await;
            cluster.stop(old);
            let lost = Readiness::NotReady(UnreadyReason::Unreachable);
            followed
                .until("it is unreachable and another leads", |now| {
                    readiness(now, old_id) == Some(lost) && now.leader.is_some_and(|id| id != old_id)
                })
                .await;
            cluster.resume(old);
            let now = followed.until("it is back", |now| ready(now) == 3).await;
            assert_ne!(now.leader, Some(old_id), "{version}");
        }
    })
    .await;
}

#[tokio::test]
async fn without_a_quorum_nobody_is_ready() {
    alone(async {
        for version in versions() {
            let mut cluster = Cluster::start(&version, with_auth(3)).await;
            let followed = Followed::start(&config(&cluster, &[0, 1, 2], Some("root")));
            followed.until("three are ready", |now| ready(now) == 3).await;
            let alive = id(&cluster, 0).await;
            cluster.kill(1);
            cluster.kill(2);
            let leaderless = Readiness::NotReady(UnreadyReason::NoLeader);
            let now = followed
                .until("the last one sees no leader", |now| readiness(now, alive) == Some(leaderless))
                .await;
            assert_ne!(now.serving(), ServingState::Ready, "{version}");
            // It goes on answering, which confirms nothing.
            let seen = std::cell::RefCell::new((Arc::clone(&now), 0));
            let another = async || {
                let mut seen = seen.borrow_mut();
                let later = followed.handle.snapshot.load_full();
                if !Arc::ptr_eq(&seen.0, &later) {
                    *seen = (later, seen.1 + 1);
                }
                (seen.1 > 8).then(|| seen.0.confirmed)
            };
            let confirmed = wait::within_limit(LIMIT, another).await.expect("it is asked again");
            assert_eq!(confirmed, now.confirmed, "{version}");
            cluster.relaunch(1);
            let now = followed
                .until("two are ready", |now| ready(now) == 2 && now.serving() == ServingState::Ready)
                .await;
            assert!(now.confirmed > confirmed, "{version}");
        }
    })
    .await;
}

#[tokio::test]
async fn learners_are_shown_and_take_no_traffic_and_removed_members_go() {
    alone(async {
        for version in versions() {
            let mut cluster = Cluster::start(&version, with_auth(1)).await;
            let followed = Followed::start(&config(&cluster, &[0], Some("root")));
            followed.until("one is ready", |now| ready(now) == 1).await;
            let learner = cluster.add_learner().await;
            let learner_id = id(&cluster, learner).await;
            let learns = Readiness::NotReady(UnreadyReason::Learner);
            let now = followed
                .until("the learner is found", |now| readiness(now, learner_id) == Some(learns))
                .await;
            assert_eq!(now.get(learner_id).unwrap().role, Role::Learner);
            assert_eq!(ready(&now), 1, "{version}");

            let root = cluster.ctl_as_root();
            root.to(vec![cluster.url(0)]).promote(learner_id.0).await;
            followed.until("it votes", |now| ready(now) == 2).await;
            let first = root.to(vec![cluster.url(0)]);
            first.remove_member(learner_id.0).await;
            let now = followed.until("it is gone", |now| now.members.len() == 1).await;
            assert_eq!((ready(&now), now.absent.len()), (1, 0), "{version}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_member_of_another_cluster_is_never_used() {
    alone(async {
        for version in versions() {
            let cluster = Cluster::start(&version, Options { members: 2, ..Options::default() }).await;
            let stranger = Cluster::start(&version, Options::default()).await;
            let mut mixed = config(&stranger, &[0], None);
            mixed.endpoints.extend(config(&cluster, &[0, 1], None).endpoints);
            let followed = Followed::start(&mixed);
            let now = followed.until("the cluster is found", |now| ready(now) == 2).await;
            let strange = now.foreign.first().expect("the other one is told");
            assert_eq!(strange.endpoint.port, stranger.address(0).port());
            assert_ne!(Some(strange.cluster), now.cluster);
            assert_eq!(now.members.len(), 2);
            assert!(now.get(id(&stranger, 0).await).is_none());

            // Named by its id it is served, and the majority is not.
            let pinned = Config { pin: ClusterPin::Id(strange.cluster), ..mixed.clone() };
            let now = Followed::start(&pinned).until("the named one is found", |now| ready(now) == 1).await;
            assert_eq!(now.members[0].id, id(&stranger, 0).await);
            let nobody = Config { pin: ClusterPin::Id(ClusterId(1)), ..mixed };
            let now =
                Followed::start(&nobody).until("all are told apart", |now| now.foreign.len() == 3).await;
            assert_eq!(now.serving(), ServingState::NothingKnown);
        }
    })
    .await;
}

#[tokio::test]
async fn a_cluster_that_is_down_at_the_start_is_taken_when_it_comes() {
    alone(async {
        for version in versions() {
            let mut cluster = Cluster::start(&version, with_auth(1)).await;
            let only = id(&cluster, 0).await;
            cluster.kill(0);
            let followed = Followed::start(&config(&cluster, &[0], Some("root")));
            assert_eq!(followed.handle.snapshot.load().serving(), ServingState::NothingKnown);
            cluster.relaunch(0);
            let now = followed.until("it is ready", |now| now.serving() == ServingState::Ready).await;
            assert_eq!(now.leader, Some(only), "{version}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_suspected_member_comes_back_with_the_probe_that_the_hint_asks_for() {
    alone(async {
        for version in versions() {
            let cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
            let followed = Followed::start(&config(&cluster, &[0, 1, 2], None));
            let now = followed.until("three are ready", |now| ready(now) == 3).await;
            let member = Arc::clone(&now.members[1]);
            member.suspect();
            assert_eq!(ready(&followed.handle.snapshot.load()), 2, "{version}");
            followed.handle.hints.send(MembershipHint::Unreachable(member.id));
            followed.until("it is back", |now| ready(now) == 3).await;
        }
    })
    .await;
}

#[tokio::test]
async fn auth_that_is_turned_on_or_off_is_noticed() {
    alone(async {
        for version in versions() {
            let cluster = Cluster::start(&version, Options::default()).await;
            let followed = Followed::start(&config(&cluster, &[0], Some("root")));
            followed.until("it is ready", |now| ready(now) == 1).await;
            followed.until_auth(AuthNow::Off).await;
            let nobody = cluster.ctl();
            for words in [
                &["user", "add", "root", "--new-user-password=root-secret"][..],
                &["role", "add", "root"],
                &["user", "grant-role", "root", "root"],
                &["auth", "enable"],
            ] {
                nobody.ok(words).await;
            }
            followed.handle.hints.send(MembershipHint::AuthOn);
            followed.until_auth(AuthNow::On).await;
            cluster.ctl().as_user("root").ok(&["auth", "disable"]).await;
            followed.handle.hints.send(MembershipHint::AuthOff);
            followed.until_auth(AuthNow::Off).await;
            followed.until("it is still ready", |now| ready(now) == 1).await;
            // What the data path concluded wrongly, as from a member that lags behind, is put right.
            followed.handle.auth.set(AuthNow::On);
            followed.handle.hints.send(MembershipHint::AuthOn);
            followed.until_auth(AuthNow::Off).await;
        }
    })
    .await;
}

/// etcd then answers a read without a token as that user, as if auth were off.
#[tokio::test]
async fn auth_is_seen_to_be_on_although_our_certificate_names_root() {
    alone(async {
        for version in versions() {
            let cluster = Cluster::start(&version, Options { tls: Tls::Mutual, ..with_auth(1) }).await;
            let mut config = config(&cluster, &[0], None);
            config.tls.as_mut().unwrap().identity = Some(key_pair(&cluster.pki().client("root")));
            let followed = Followed::start(&config);
            let now = followed.until("it is ready", |now| now.serving() == ServingState::Ready).await;
            assert!(now.cluster.is_some(), "{version}: as root everything is told");
            let mut changes = followed.handle.changes.clone();
            while followed.handle.auth.now() == AuthNow::Unknown {
                tokio::time::timeout(LIMIT, changes.changed()).await.expect("it is found out").unwrap();
            }
            assert_eq!(followed.handle.auth.now(), AuthNow::On, "{version}");
        }
    })
    .await;
}
