//! Password credentials against real members: what a login costs, what keeps a token alive, what ends it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::future::join_all;
use keyward::credentials::{CredentialSettings, Credentials, LoginFailure};
use keyward::identity::MemberId;
use keyward::members::membership::ControlChannels;
use keyward::pb::etcdserverpb::AuthUserChangePasswordRequest;
use keyward::pb::etcdserverpb::auth_client::AuthClient;
use keyward::secret::Secret;
use keyward::tasks::Tasks;
use tokio::task::LocalSet;
use tonic::Request;
use tonic::transport::Endpoint;

use crate::harness::binary::full;
use crate::harness::{Auth, Cluster, Options, password, versions, wait};

const SOON: Duration = Duration::from_secs(60);

/// Credentials over `cluster`, their control side among `tasks`, and its members.
async fn credentials(cluster: &Cluster, ttl: u64, tasks: &Tasks) -> (Arc<Credentials>, Vec<MemberId>) {
    let mut channels = HashMap::new();
    let mut members = Vec::new();
    for i in 0..cluster.len() {
        let id = MemberId(cluster.member_id(i).await);
        channels.insert(id, Endpoint::from_shared(cluster.url(i)).unwrap().connect_lazy());
        members.push(id);
    }
    let settings =
        CredentialSettings { token_ttl: Duration::from_secs(ttl), ..CredentialSettings::default() };
    let published = ControlChannels::default();
    published.store(Arc::new(channels));
    let (credentials, control) = Credentials::new(settings, published).unwrap();
    tasks.spawn("credentials", control.run(tasks.clone())).detach();
    (credentials, members)
}

async fn logins(cluster: &Cluster) -> Vec<f64> {
    let each = (0..cluster.len())
        .map(|i| cluster.counter(i, "grpc_server_started_total", &[("grpc_method", "Authenticate")]));
    join_all(each).await
}

fn secret(text: &str) -> Secret<String> {
    Secret::new(text.to_owned())
}

#[tokio::test]
async fn a_storm_of_logins_costs_at_most_one_per_user_and_member() {
    LocalSet::new()
        .run_until(async {
            for version in versions() {
                let auth = Auth::On { extra_users: 20 };
                let cluster =
                    Cluster::start(&version, Options { members: 3, auth, ..Options::default() }).await;
                let tasks = Tasks::default();
                let (credentials, members) = credentials(&cluster, 300, &tasks).await;
                let before = logins(&cluster).await;
                let clients: Vec<_> = (0..250)
                    .map(|n| {
                        let user = format!("u{:02}", n % 20);
                        let right = n >= 50;
                        let shown = if right { password(&user) } else { format!("wrong{n}") };
                        let mut order = members.clone();
                        order.rotate_left(n % 3);
                        (user, shown, right, order)
                    })
                    .collect();
                let outcomes = join_all(clients.iter().map(async |(user, shown, right, order)| {
                    (right, credentials.verify(&user.as_str().into(), &secret(shown), order).await)
                }))
                .await;
                for (right, outcome) in outcomes {
                    match outcome {
                        Ok(_) => assert!(right, "{version}: a wrong password was admitted"),
                        Err(LoginFailure::WrongPassword) => assert!(!right, "{version}"),
                        Err(other) => panic!("{version}: {other}"),
                    }
                }
                assert_eq!(credentials.counters().logins_accepted.load(Relaxed), 20, "{version}");
                let after = logins(&cluster).await;
                let cost: f64 = after.iter().zip(&before).map(|(after, before)| after - before).sum();
                assert_eq!(cost, 70.0, "{version}: 20 right ones, 50 wrong ones");
                tasks.abort_all();
            }
        })
        .await;
}

#[tokio::test]
async fn a_token_that_is_held_outlives_its_ttl_also_for_a_user_without_rights() {
    LocalSet::new()
        .run_until(async {
            for version in versions() {
                let options = Options {
                    members: 1,
                    auth: Auth::On { extra_users: 0 },
                    token_ttl: Some(2),
                    ..Options::default()
                };
                let cluster = Cluster::start(&version, options).await;
                let tasks = Tasks::default();
                let (credentials, members) = credentials(&cluster, 2, &tasks).await;
                let member = members[0];
                let bob = credentials.identity(&"bob".into(), &secret(&password("bob")));
                let stream = bob.hold();
                let token = bob.token(member).await.unwrap();
                let before = logins(&cluster).await;
                // Ten touches are more than two lives.
                let touches = if full() { 30 } else { 10 };
                let counters = credentials.counters();
                wait::until(SOON, "touches", async || {
                    (counters.touches_alive.load(Relaxed) >= touches).then_some(())
                })
                .await;
                assert_eq!(bob.current(member).unwrap().header(), token.header(), "{version}");
                assert_eq!(counters.touches_dead.load(Relaxed), 0, "{version}");
                assert_eq!(logins(&cluster).await, before, "{version}: touched, not renewed");
                drop(stream);
                tasks.abort_all();
            }
        })
        .await;
}

#[tokio::test]
async fn a_changed_password_is_noticed_by_the_next_touch() {
    LocalSet::new()
        .run_until(async {
            for version in versions() {
                let auth = Auth::On { extra_users: 0 };
                let cluster =
                    Cluster::start(&version, Options { auth, token_ttl: Some(4), ..Options::default() })
                        .await;
                let tasks = Tasks::default();
                let (credentials, members) = credentials(&cluster, 4, &tasks).await;
                let alice = "alice".into();
                let old = credentials.verify(&alice, &secret(&password("alice")), &members).await.unwrap();
                let stream = old.hold();
                let root = credentials.verify(&"root".into(), &secret(&password("root")), &members).await;
                let token = root.unwrap().current(members[0]).unwrap();
                let mut change = Request::new(AuthUserChangePasswordRequest {
                    name: "alice".into(),
                    password: "new".into(),
                    ..Default::default()
                });
                change.metadata_mut().insert("token", token.header().to_str().unwrap().parse().unwrap());
                let channel = Endpoint::from_shared(cluster.url(0)).unwrap().connect_lazy();
                AuthClient::new(channel).user_change_password(change).await.unwrap();
                wait::until(SOON, "the dead token is dropped", async || {
                    old.current(members[0]).is_none().then_some(())
                })
                .await;
                let refused = old.token(members[0]).await;
                assert!(matches!(refused, Err(LoginFailure::WrongPassword)), "{version}: {refused:?}");
                let new = credentials.verify(&alice, &secret("new"), &members).await.unwrap();
                assert!(new.current(members[0]).is_some() && old.current(members[0]).is_none(), "{version}");
                drop(stream);
                tasks.abort_all();
            }
        })
        .await;
}

#[tokio::test]
async fn a_cluster_without_auth_says_so() {
    LocalSet::new()
        .run_until(async {
            for version in versions() {
                let cluster = Cluster::start(&version, Options::default()).await;
                let tasks = Tasks::default();
                let (credentials, members) = credentials(&cluster, 300, &tasks).await;
                let outcome = credentials.verify(&"alice".into(), &secret("x"), &members).await;
                assert!(matches!(outcome, Err(LoginFailure::AuthDisabled)), "{version}: {outcome:?}");
                tasks.abort_all();
            }
        })
        .await;
}

#[tokio::test]
async fn a_user_without_a_password_is_told_apart() {
    LocalSet::new()
        .run_until(async {
            for version in versions() {
                let auth = Auth::On { extra_users: 0 };
                let cluster = Cluster::start(&version, Options { auth, ..Options::default() }).await;
                cluster.ctl_as_root().ok(&["user", "add", "cert", "--no-password"]).await;
                let tasks = Tasks::default();
                let (credentials, members) = credentials(&cluster, 300, &tasks).await;
                let outcome = credentials.verify(&"cert".into(), &secret("x"), &members).await;
                assert!(matches!(outcome, Err(LoginFailure::NoPassword)), "{version}: {outcome:?}");
                let outcome = credentials.verify(&"".into(), &secret("x"), &members).await;
                assert!(matches!(outcome, Err(LoginFailure::WrongPassword)), "{version}: {outcome:?}");
                tasks.abort_all();
            }
        })
        .await;
}
