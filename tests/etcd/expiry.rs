//! Tokens that expire under what is idle, also on servers that check them for every keepalive (3.5.28 and newer): streams and leases
//! live on, and one forbidden lease does not end the others.

use keyward::pb::etcdserverpb::{
    AuthenticateRequest, AuthenticateResponse, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest,
    LeaseKeepAliveResponse, PutRequest,
};
use prost::Message;

use crate::harness::binary::Version;
use crate::harness::client::Client;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, binary, every_version, password, side_by_side};
use crate::raw::{Answer, Call, End, Endpoint, Shape, frame};
use crate::steady::{Load, TTL, options};
use crate::way_out::guards_leases;

/// The newest client: it had the most time to learn to live with this.
const CLIENT: &str = "3.6.16";
/// A lease renewed every 4 s by the client: twice the life of a token.
const LEASE: &str = "12";
/// One call in 10 s: nothing else keeps a token alive.
const RATE: &str = "0.1";

#[tokio::test]
async fn idle_leases_and_watches_outlive_their_token() {
    let length = if binary::full() { "60s" } else { "21s" };
    side_by_side(&every_version(), async |version: &Version| outlive_their_token(version, length).await)
        .await;
}

async fn outlive_their_token(version: &Version, length: &str) {
    let cluster = Cluster::start(version, options((250, 2500))).await;
    let args = ["--length", length, "--rate", RATE, "--ttl", LEASE, "--watchers", "3", "--leases", "3"];
    let direct = cluster.address(0).to_string();
    let prefixed = [&args[..], &["--prefix", "/a/direct/"]].concat();
    let load = Load::start(&cluster, 0, &args).await;
    let ended = load.ended().await;
    ended.streams_held();
    assert_eq!(ended.record.errors(), Vec::<String>::new());
    ended.logged_in_once(&cluster).await;
    // Beside it, printed: what the client does by itself. At etcd 3.4 it shows the expired token at its next login, which refuses that
    // token, and the client tries again without end (see `way_out`).
    if version.at_least("3.5") {
        let bad = Client::start(CLIENT, "load", "alice", &[direct], &prefixed).record().await;
        println!("{version}, token TTL {TTL} s, directly: {}", bad.the("wire"));
    }
    println!("{version}, token TTL {TTL} s, through Keyward: {}", ended.record.the("wire"));
}

const OK: (Option<u32>, &str) = (Some(0), "");
const DENIED: (Option<u32>, &str) = (Some(7), "etcdserver: permission denied");

/// A user at an endpoint.
struct User<'a> {
    endpoint: &'a Endpoint,
    token: String,
}

impl User<'_> {
    async fn log_in<'a>(endpoint: &'a Endpoint, name: &str) -> User<'a> {
        let request = AuthenticateRequest { name: name.into(), password: password(name) };
        let answer =
            endpoint.call(&Call::unary("/etcdserverpb.Auth/Authenticate", &request.encode_to_vec())).await;
        let reply: AuthenticateResponse = only(&answer);
        User { endpoint, token: reply.token }
    }

    /// Grants a lease that holds `key`.
    async fn lease(&self, key: &str) -> i64 {
        let granted: LeaseGrantResponse =
            only(&self.unary("/etcdserverpb.Lease/LeaseGrant", &LeaseGrantRequest { ttl: 60, id: 0 }).await);
        let put = PutRequest { key: key.to_owned().into(), lease: granted.id, ..PutRequest::default() };
        let put = self.unary("/etcdserverpb.KV/Put", &put).await;
        assert_eq!((put.code(), put.message().as_str()), OK);
        granted.id
    }

    async fn unary(&self, path: &str, request: &impl Message) -> Answer {
        self.endpoint.call(&Call::unary(path, &request.encode_to_vec()).with("token", &self.token)).await
    }

    /// Asks for renewals on one stream, those of one entry at once; returns how it ended and which leases were renewed.
    async fn keep_alive(&self, leases: &[&[i64]], at_least: usize) -> (Answer, Vec<i64>) {
        let ask = |id: &i64| frame(&LeaseKeepAliveRequest { id: *id }.encode_to_vec());
        let body = leases
            .iter()
            .map(|at_once| at_once.iter().map(ask).collect::<Vec<_>>().concat().into())
            .collect();
        let path = "/etcdserverpb.Lease/LeaseKeepAlive".to_owned();
        let call = Call {
            path,
            headers: vec![("token", self.token.clone())],
            body,
            shape: Shape::Stream { at_least },
            ..Call::default()
        };
        let answer = self.endpoint.call(&call).await;
        let renewed = |message: bytes::Bytes| {
            let renewed = LeaseKeepAliveResponse::decode(message).expect("etcd's message");
            assert!(renewed.ttl > 0, "lease {:x} is gone", renewed.id);
            renewed.id
        };
        let renewed = answer.messages().into_iter().map(renewed).collect();
        (answer, renewed)
    }
}

fn only<T: Message + Default>(answer: &Answer) -> T {
    assert_eq!((answer.code(), answer.message().as_str()), OK);
    T::decode(answer.messages().remove(0)).expect("etcd's message")
}

#[tokio::test]
async fn a_lease_that_may_not_be_renewed_does_not_end_the_others() {
    side_by_side(&every_version(), a_forbidden_lease_ends_no_other).await;
}

async fn a_forbidden_lease_ends_no_other(version: &Version) {
    let is_guarded = guards_leases(version);
    let auth = Auth::On { extra_users: 0 };
    let cluster = Cluster::start(version, Options { auth, ..Options::default() }).await;
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &config).await;
    let (direct, through) = (Endpoint::plain(cluster.address(0)), Endpoint::plain(keyward.site().listen));
    for (through_keyward, endpoint) in [(false, &direct), (true, &through)] {
        let root = User::log_in(endpoint, "root").await;
        let alice = User::log_in(endpoint, "alice").await;
        let forbidden = root.lease("/of-root").await;
        let (one, two) = (alice.lease("/a/one").await, alice.lease("/a/two").await);

        let (answer, renewed) = alice.keep_alive(&[&[forbidden]], 1).await;
        if through_keyward || is_guarded {
            let told = (answer.code(), answer.message());
            assert_eq!((told.0, told.1.as_str()), DENIED, "{version}: alone it is told as etcd tells it");
            assert_eq!(renewed, [0; 0], "{version}");
        } else {
            // etcd before its fix asks nobody whose lease it is.
            assert_eq!((answer.end, renewed), (End::Open, vec![forbidden]), "{version}");
        }

        let asked: [&[i64]; 4] = [&[one], &[forbidden, two], &[forbidden], &[one]];
        let (answer, renewed) = alice.keep_alive(&asked, 3).await;
        println!(
            "{version}, through Keyward: {through_keyward}: {} of 3 renewed, then {:?} {:?}",
            renewed.len(),
            answer.end,
            answer.message()
        );
        if through_keyward {
            assert_eq!(renewed, [one, two, one], "{version}");
            assert_eq!(answer.end, End::Open, "{version}: {:?}", answer.message());
        } else if is_guarded {
            assert_eq!((answer.code(), answer.message().as_str()), DENIED, "{version}");
        }
    }
}
