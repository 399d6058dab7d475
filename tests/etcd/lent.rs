//! Rules 14 on real servers: a login that stands for calls which show nothing, for leases and members only, as long as it is alone
//! on its connection and in force. Whom it does not stand for is told what etcd tells nobody.

use keyward::pb::etcdserverpb::auth_client::AuthClient;
use keyward::pb::etcdserverpb::cluster_client::ClusterClient;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::etcdserverpb::{
    AuthenticateRequest, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseLeasesRequest, MemberListRequest,
    PutRequest, RangeRequest,
};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, every_version, password, ports};
use crate::revocations::done;
use crate::way_out::guards_leases;

const FINE: &str = "";
const NOBODY: &str = "etcdserver: user name is empty";
const ENDED: &str = "etcdserver: invalid auth token";
const LEASE: i64 = 77;

/// One connection, and no more.
pub(crate) async fn connection(url: &str) -> Channel {
    let endpoint = Endpoint::from_shared(url.to_owned()).expect("a URL");
    endpoint.connect().await.expect("somebody listens")
}

/// The token of a login with the user's password.
pub(crate) async fn log_in(channel: &Channel, user: &str) -> String {
    let login = AuthenticateRequest { name: user.into(), password: password(user) };
    AuthClient::new(channel.clone())
        .authenticate(login)
        .await
        .expect("the password is right")
        .into_inner()
        .token
}

/// What one thing of each kind is told that shows nothing: those that a login may stand for, and the others.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    lent: [String; 4],
    others: [String; 2],
}

impl Told {
    /// The same for all of a kind.
    fn all(lent: &str, others: &str) -> Told {
        Told { lent: std::array::from_fn(|_| lent.into()), others: std::array::from_fn(|_| others.into()) }
    }
}

fn text<T>(answer: Result<T, Status>) -> String {
    answer.err().map_or_else(String::new, |status| status.message().to_owned())
}

async fn keep_alive(channel: &Channel) -> Result<(), Status> {
    let asked = futures_util::stream::iter([LeaseKeepAliveRequest { id: LEASE }]);
    let answer =
        LeaseClient::new(channel.clone()).lease_keep_alive(asked).await?.into_inner().message().await?;
    assert!(answer.is_some_and(|answer| answer.ttl > 0), "the lease lives");
    Ok(())
}

async fn silent(channel: &Channel) -> Told {
    let (mut leases, mut keys) = (LeaseClient::new(channel.clone()), KvClient::new(channel.clone()));
    let mut members = ClusterClient::new(channel.clone());
    let put = PutRequest { key: "/a/k".into(), ..PutRequest::default() };
    let range = RangeRequest { key: "/a/k".into(), ..RangeRequest::default() };
    Told {
        lent: [
            text(leases.lease_grant(LeaseGrantRequest { ttl: 600, id: 0 }).await),
            text(keep_alive(channel).await),
            text(leases.lease_leases(LeaseLeasesRequest::default()).await),
            text(members.member_list(MemberListRequest::default()).await),
        ],
        others: [text(keys.put(put).await), text(keys.range(range).await)],
    }
}

#[tokio::test]
async fn a_login_stands_for_leases_and_members_while_it_is_alone_and_in_force() {
    for version in every_version() {
        let auth = Auth::On { extra_users: 0 };
        let cluster = Cluster::start(&version, Options { auth, ..Options::default() }).await;
        let (site, lending) = (Site::new(), ports::free());
        let lends =
            format!(" }}, {{ name = \"lending\", address = \"{lending}\", lend_login_identity = true");
        let config = site.listening(&cluster, &lends) + "admin.socket = \"admin.sock\"\n";
        let keyward = Keyward::start(site, &config).await;
        let lending = format!("http://{lending}");
        let grant = format!("{LEASE:x}");
        let direct = connection(&cluster.url(0)).await;
        let mut request = tonic::Request::new(LeaseGrantRequest { ttl: 600, id: LEASE });
        let token = log_in(&direct, "alice").await;
        request.metadata_mut().insert("token", token.parse().expect("a header"));
        LeaseClient::new(direct.clone()).lease_grant(request).await.expect("granted");

        // Before the servers that ask for it, nobody may have a lease.
        let nobody = silent(&direct).await;
        println!("{version}, lease {grant}, directly and nobody: {nobody:?}");
        let asks = guards_leases(&version);
        assert_eq!(nobody, Told::all(if asks { NOBODY } else { FINE }, NOBODY), "{version}");

        // Through Keyward nobody may anywhere.
        let nobody = Told::all(NOBODY, NOBODY);
        let plain = connection(&keyward.url()).await;
        log_in(&plain, "alice").await;
        assert_eq!(silent(&plain).await, nobody, "{version}: nobody asked for it");

        let alice = connection(&lending).await;
        assert_eq!(silent(&alice).await, nobody, "{version}: nobody has logged in");
        log_in(&alice, "alice").await;
        assert_eq!(silent(&alice).await, Told::all(FINE, NOBODY), "{version}");
        log_in(&alice, "alice").await;
        assert_eq!(silent(&alice).await, Told::all(FINE, NOBODY), "{version}: the same user again");
        let other = connection(&lending).await;
        assert_eq!(silent(&other).await, nobody, "{version}: another connection");

        log_in(&other, "alice").await;
        log_in(&other, "bob").await;
        assert_eq!(silent(&other).await, nobody, "{version}: two users");
        log_in(&other, "alice").await;
        assert_eq!(silent(&other).await, nobody, "{version}: for good");

        done(&keyward, &["revoke", "alice"]).await;
        assert_eq!(silent(&alice).await, Told::all(ENDED, NOBODY), "{version}: revoked");
        log_in(&alice, "alice").await;
        assert_eq!(silent(&alice).await, Told::all(FINE, NOBODY), "{version}: a new login");
        done(&keyward, &["block", "alice"]).await;
        assert_eq!(silent(&alice).await, Told::all(ENDED, NOBODY), "{version}: blocked");
    }
}
