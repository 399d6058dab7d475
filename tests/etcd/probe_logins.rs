//! As whom members are probed: versions that guard Status let the probing user log in, once per member; nobody who may be somebody else's
//! member is shown the password, and a wrong password costs its cluster little.
//!
//! Runs the members' task alone against real clusters.

use std::sync::Arc;
use std::time::Duration;

use keyward::members::membership::{AuthSetting, Membership, MembershipHint, ServingState};
use keyward::tasks::Tasks;

use crate::harness::binary::Version;
use crate::harness::relay::Relay;
use crate::harness::{Cluster, Options, every_version, password, side_by_side, wait};
use crate::members::{Followed, alone, applied, config, login, logins, logins_of_all, ready, with_auth};

/// For what takes an election or a look at the member list: a limit, never a pause.
const LIMIT: Duration = Duration::from_secs(40);

/// A guarded version asks the probing user to log in, once per member; the others do not.
#[tokio::test]
async fn a_probing_user_logs_in_once_per_member_and_only_where_it_must() {
    alone(async {
        let of_version = async |version: &Version| {
            let cluster = Cluster::start(version, with_auth(3)).await;
            let before = logins_of_all(&cluster).await;
            let followed = Followed::start(&config(&cluster, &[0, 1, 2], Some("root")));
            let first = followed.until("three are ready", |now| ready(now) == 3).await;
            followed.until_auth(AuthSetting::On).await;
            // Four more rounds of probes, seen by their answers: raft moves with every write.
            for round in 0..4 {
                cluster.ctl_as_root().to(vec![cluster.url(0)]).ok(&["put", "k", &round.to_string()]).await;
            }
            let lowest = |now: &Membership| now.members.iter().map(|member| applied(member)).min();
            let target = lowest(&first).unwrap() + 4;
            let mut turns = tokio::time::interval(Duration::from_millis(20));
            let seen = async {
                while lowest(&followed.handle.snapshot.load()) < Some(target) {
                    turns.tick().await;
                }
            };
            tokio::time::timeout(LIMIT, seen).await.expect("the probes see what was written");
            let allowed = if guarded(version) { 1.0 } else { 0.0 };
            for (i, before) in before.into_iter().enumerate() {
                // etcdctl wrote through member 0, and logs in for each.
                let ours = logins(&cluster, i).await - before - if i == 0 { 4.0 } else { 0.0 };
                assert_eq!(ours, allowed, "{version} member {i}");
            }
        };
        side_by_side(&every_version(), of_version).await;
    })
    .await;
}

/// Whether Status asks for a user: rows of these tests' own versions, written down a second time on purpose.
fn guarded(version: &Version) -> bool {
    version.at_least("3.5.28")
}

/// What the member list names may be anybody's by now. Without TLS only the cluster's own name is known of whoever answers there.
#[tokio::test]
async fn the_probing_users_password_goes_to_no_address_where_another_cluster_answers() {
    alone(async {
        for version in every_version().into_iter().filter(guarded) {
            let tasks = Tasks::default();
            let (first, second) = (Relay::start(&tasks).await, Relay::start(&tasks).await);
            let advertise = vec![first.address, second.address];
            let cluster = Cluster::start(&version, Options { advertise, ..with_auth(2) }).await;
            let stranger = Cluster::start(&version, with_auth(1)).await;
            first.open(cluster.address(0));
            second.open(stranger.address(0));
            let before = logins(&stranger, 0).await;
            let followed = Followed::start(&config(&cluster, &[0], Some("root")));
            let now = followed.until("the other one is told apart", |now| !now.foreign.is_empty()).await;
            assert_eq!(now.foreign[0].endpoint.port, second.address.port(), "{version}");
            followed
                .until("ours is asked as root", |now| now.members.iter().any(|member| applied(member) > 0))
                .await;
            assert_eq!(logins(&stranger, 0).await, before, "{version}: nobody logged in there");
            // Where the address leads to a member again, that is asked as root too.
            second.turn_to(cluster.address(1));
            let both =
                |now: &Membership| now.members.iter().filter(|member| applied(member) > 0).count() == 2;
            followed.until("both are asked as root", both).await;
            assert_eq!(logins(&stranger, 0).await, before, "{version}");
        }
    })
    .await;
}

/// A wrong password costs its cluster one bcrypt per member and half a minute, not one per probe.
#[tokio::test]
async fn a_wrong_password_of_the_probing_user_is_no_storm() {
    alone(async {
        for version in every_version().into_iter().filter(guarded) {
            let cluster = Cluster::start(&version, with_auth(1)).await;
            let before = logins(&cluster, 0).await;
            let mut config = config(&cluster, &[0], None);
            config.probe = Some(login("root", "wrong"));
            let followed = Followed::start(&config);
            followed.until("it is found without", |now| now.serving() == ServingState::Ready).await;
            let member = followed.handle.snapshot.load().members[0].clone();
            for _ in 0..5 {
                member.suspect();
                followed.handle.hints.send(MembershipHint::Unreachable(member.id));
                followed.until("another probe", |now| ready(now) == 1).await;
            }
            assert_eq!(logins(&cluster, 0).await - before, 1.0, "{version}");
            // Only Status tells what a member has applied, and this user's is refused.
            let raft = || applied(&followed.handle.snapshot.load().members[0]);
            assert_eq!(raft(), 0, "{version}");
            followed.login.store(Some(Arc::new(login("root", &password("root")))));
            wait::until(LIMIT, "it probes as whom it is told to", async || (raft() > 0).then_some(())).await;
        }
    })
    .await;
}
