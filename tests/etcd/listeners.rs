//! How clients may come: over TLS with or without a certificate, as a listener's default user, over a unix socket, and
//! while etcd itself asks nobody who they are.

use std::path::PathBuf;

use futures_util::future::join_all;
use prost::Message as _;
use tonic::transport::Channel;

use keyward::pb::etcdserverpb::auth_client::AuthClient;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, PutRequest, RangeRequest};
use keyward::pb::health::HealthCheckRequest;

use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, password, versions};
use crate::raw::{Call, Endpoint};
use crate::rounds::{Application, Did, FAMILIES};

/// Client libraries that know unix sockets.
const OVER_UNIX: [&str; 4] = ["clientv3 3.5.1", "clientv3 3.5.11", "clientv3 3.6.16", "python etcd3 0.12.0"];
const RANGE: &str = "/etcdserverpb.KV/Range";
const PUT: &str = "/etcdserverpb.KV/Put";
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";

fn with_auth() -> Options {
    Options { auth: Auth::On { extra_users: 0 }, ..Options::default() }
}

fn read(key: &'static str) -> Vec<u8> {
    RangeRequest { key: key.into(), ..RangeRequest::default() }.encode_to_vec()
}

fn write(key: &'static str) -> Vec<u8> {
    PutRequest { key: key.into(), value: "v".into(), ..PutRequest::default() }.encode_to_vec()
}

async fn session(endpoint: &Endpoint, user: &str, password: &str) -> String {
    let asked = AuthenticateRequest { name: user.into(), password: password.into() };
    let answer = endpoint.call(&Call::unary(AUTHENTICATE, &asked.encode_to_vec())).await;
    assert_eq!(answer.code(), Some(0), "{}", answer.message());
    AuthenticateResponse::decode(answer.messages().remove(0)).expect("an answer").token
}

#[tokio::test]
async fn a_tls_listener_asks_for_certificates_as_it_is_told() {
    for version in versions() {
        let cluster = Cluster::start(&version, with_auth()).await;
        let pki = cluster.pki();
        let server = pki.server();
        for (mode, without_certificate) in [("none", true), ("optional", true), ("required", false)] {
            let mut fields = format!(
                ", tls.cert = {:?}, tls.key = {:?}, tls.client_auth = \"{mode}\"",
                server.cert, server.key
            );
            if mode != "none" {
                fields += &format!(", tls.client_ca = {:?}", pki.ca);
            }
            let site = Site::new();
            let config = site.listening(&cluster, &fields);
            let listen = site.listen;
            let keyward = Keyward::start(site, &config).await;

            let ctl = cluster.ctl().as_user("alice").to(vec![format!("https://{listen}")]);
            let plain = ctl.with_tls(pki, None).run(&["put", "/a/k", mode]).await;
            assert_eq!(plain.code == Some(0), without_certificate, "{version} {mode}: {plain:?}");
            let shown = ctl.with_tls(pki, Some(pki.client("anybody")));
            assert_eq!(shown.ok(&["put", "/a/k", "v"]).await, "OK\n", "{version} {mode}");

            let certificate = pki.client("anybody");
            let endpoint = Endpoint::tls(listen, pki, Some(&certificate));
            let check =
                Call::unary("/grpc.health.v1.Health/Check", &HealthCheckRequest::default().encode_to_vec());
            let answer = endpoint.call(&check).await;
            assert_eq!((answer.code(), answer.messages()[0].to_vec()), (Some(0), vec![8, 1]), "SERVING");
            drop(keyward);
        }
    }
}

/// A certificate of another authority than the listener's ends the handshake; nothing is served.
#[tokio::test]
async fn a_certificate_of_a_foreign_authority_is_refused() {
    let version = versions().remove(0);
    let cluster = Cluster::start(&version, with_auth()).await;
    let elsewhere = tempfile::tempdir().expect("a folder");
    let foreign = crate::harness::pki::Pki::new(elsewhere.path());
    let (pki, server) = (cluster.pki(), cluster.pki().server());
    let fields = format!(
        ", tls.cert = {:?}, tls.key = {:?}, tls.client_auth = \"optional\", tls.client_ca = {:?}",
        server.cert, server.key, pki.ca
    );
    let site = Site::new();
    let config = site.listening(&cluster, &fields);
    let listen = site.listen;
    let keyward = Keyward::start(site, &config).await;
    let ctl = cluster.ctl().as_user("alice").to(vec![format!("https://{listen}")]);
    let refused = ctl.with_tls(pki, Some(foreign.client("alice"))).run(&["get", "/a/k"]).await;
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(keyward.metric("keyward_downstream_handshakes_failed_total", &[]).await >= 1.0);
}

#[tokio::test]
async fn a_default_user_serves_clients_that_show_nothing_and_no_others() {
    for version in versions() {
        let cluster = Cluster::start(&version, with_auth()).await;
        let site = Site::new();
        let secret = site.write("alice-password", &password("alice"));
        let config = site.listening(&cluster, ", default_user = \"alice\"")
            + &format!("[[user]]\nname = \"alice\"\npassword_file = {secret:?}\n");
        let listen = site.listen;
        let keyward = Keyward::start(site, &config).await;
        let endpoint = Endpoint::plain(listen);
        let nobody = endpoint.call(&Call::unary(PUT, &write("/a/default"))).await;
        assert_eq!(nobody.code(), Some(0), "{version}: {}", nobody.message());
        let beyond = endpoint.call(&Call::unary(PUT, &write("/b"))).await;
        assert_eq!(beyond.message(), "etcdserver: permission denied", "{version}");
        // A bad token is no reason to be somebody else.
        let bad = endpoint.call(&Call::unary(PUT, &write("/a/default")).with("token", "bad")).await;
        assert_eq!(bad.message(), "etcdserver: invalid auth token", "{version}");
        // A good one counts, not the default.
        let bob = session(&endpoint, "bob", &password("bob")).await;
        let refused = endpoint.call(&Call::unary(RANGE, &read("/a/default")).with("token", &bob)).await;
        assert_eq!(refused.message(), "etcdserver: permission denied", "{version}");
        drop(keyward);
    }
}

#[tokio::test]
async fn without_auth_a_login_gets_a_session_that_proves_nothing_later() {
    for version in versions() {
        let cluster = Cluster::start(&version, Options::default()).await;
        let site = Site::new();
        let root = site.write("root-password", "root-secret");
        let config = site.in_front_of(&cluster)
            + &format!("cluster.probe.user = \"root\"\ncluster.probe.password_file = {root:?}\n");
        let listen = site.listen;
        let keyward = Keyward::start(site, &config).await;
        let endpoint = Endpoint::plain(listen);
        // A made-up token would hang an old etcd, so none may be injected; any password gets a session.
        let liar = session(&endpoint, "root", "not-the-password").await;
        let put = Call::unary(PUT, &write("k"));
        let told = endpoint.call(&put.clone().with("token", &liar)).await;
        assert_eq!(told.code(), Some(0), "{version}: {}", told.message());
        let honest = session(&endpoint, "root", "root-secret").await;

        let direct = cluster.ctl();
        direct.ok(&["user", "add", "root:root-secret"]).await;
        direct.ok(&["user", "grant-role", "root", "root"]).await;
        direct.ok(&["auth", "enable"]).await;

        let refused = endpoint.call(&put.clone().with("token", &liar)).await;
        assert_eq!(refused.message(), "etcdserver: invalid auth token", "{version}: it proved nothing");
        let served = endpoint.call(&put.clone().with("token", &honest)).await;
        assert_eq!(served.code(), Some(0), "{version}: its password verifies: {}", served.message());
        let nobody = endpoint.call(&put).await;
        assert_eq!(nobody.message(), "etcdserver: user name is empty", "{version}");

        direct.with_password("root", "root-secret").ok(&["auth", "disable"]).await;
        let again = endpoint.call(&put.clone().with("token", &honest)).await;
        assert_eq!(again.code(), Some(0), "{version}: auth is off again: {}", again.message());
        drop(keyward);
    }
}

/// Connections over a unix socket.
fn over(path: PathBuf) -> Channel {
    let connect = tower::service_fn(move |_: http::Uri| {
        let path = path.clone();
        async move { tokio::net::UnixStream::connect(path).await.map(hyper_util::rt::TokioIo::new) }
    });
    tonic::transport::Endpoint::from_static("http://keyward").connect_with_connector_lazy(connect)
}

#[tokio::test]
async fn a_unix_socket_serves_also_where_an_older_one_was_left_behind() {
    let version = versions().remove(0);
    let cluster = Cluster::start(&version, Options::default()).await;
    let site = Site::new();
    let path = site.write("marker", "").with_file_name("keyward.sock");
    // Left behind by a process that was killed.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket can be made"));
    let tcp = format!("{{ name = \"main\", address = \"{}\" }}", site.listen);
    let both = format!("{tcp}, {{ name = \"local\", address = \"unix:{}\" }}", path.display());
    let config = site.in_front_of(&cluster).replace(&tcp, &both);
    let keyward = Keyward::start(site, &config).await;

    let mut kv = KvClient::new(over(path));
    let put = PutRequest { key: "k".into(), value: "v".into(), ..PutRequest::default() };
    kv.put(put).await.expect("the socket serves");
    assert_eq!(cluster.ctl().ok(&["get", "k", "--print-value-only"]).await, "v\n");
    drop(keyward);
}

/// Whoever can open the socket is its peer, `listener:local`; a login counts there as everywhere.
#[tokio::test]
async fn who_comes_over_a_unix_socket_is_whom_the_listener_or_a_rule_says() {
    for version in versions() {
        let cluster = Cluster::start(&version, with_auth()).await;
        for (field, rule) in
            [(", default_user = \"alice\"", ""), ("", "[[map]]\npeer = \"listener:local\"\nas = \"alice\"\n")]
        {
            let site = Site::new();
            let secret = site.write("alice-password", &password("alice"));
            let path = site.file("keyward.sock");
            let local = format!(" }}, {{ name = \"local\", address = \"unix:{}\"{field}", path.display());
            let user = format!("[[user]]\nname = \"alice\"\npassword_file = {secret:?}\n");
            let config = site.listening(&cluster, &local) + &user + rule;
            let listen = site.listen;
            let keyward = Keyward::start(site, &config).await;

            let put = |key: &str| PutRequest { key: key.to_owned().into(), ..PutRequest::default() };
            let mut local = KvClient::new(over(path.clone()));
            local.put(put("/a/local")).await.unwrap_or_else(|status| panic!("{version}: {status}"));
            let beyond = local.put(put("/b")).await.expect_err("alice may not");
            assert_eq!(beyond.message(), "etcdserver: permission denied", "{version}");
            let elsewhere = Endpoint::plain(listen).call(&Call::unary(PUT, &write("/a/local"))).await;
            assert_eq!(elsewhere.message(), "etcdserver: user name is empty", "{version}: not over TCP");

            let mut logins = AuthClient::new(over(path));
            let login = |password: String| AuthenticateRequest { name: "bob".into(), password };
            let bob = logins.authenticate(login(password("bob"))).await.expect("right").into_inner().token;
            let mut as_bob = tonic::Request::new(put("/a/local"));
            as_bob.metadata_mut().insert("token", bob.parse().expect("a header"));
            let refused = local.put(as_bob).await.expect_err("bob may not");
            assert_eq!(refused.message(), "etcdserver: permission denied", "{version}");
            // A socket has no address: wrong passwords are counted for all who come over such together.
            let wrong = (0..7).map(|n| {
                let (mut logins, login) = (logins.clone(), login(format!("wrong-{n}")));
                async move { logins.authenticate(login).await.expect_err("wrong").message().to_owned() }
            });
            let told = join_all(wrong).await;
            let limited = told.iter().filter(|told| *told == "etcdserver: too many requests").count();
            assert_eq!(limited, 2, "{version}: {told:?}");
            logins.authenticate(login(password("bob"))).await.expect("known to be right");
            drop(keyward);
        }
    }
}

/// What these send as their `:authority` is the socket's path, in one way of writing or another; it says so, where it is none.
#[tokio::test]
async fn each_client_family_does_its_things_over_a_unix_socket() {
    let odd_ones = ["clientv3 3.5.1", "python etcd3 0.12.0"];
    for version in versions() {
        let cluster = Cluster::start(&version, with_auth()).await;
        let site = Site::new();
        let secret = site.write("alice-password", &password("alice"));
        let path = site.file("keyward.sock");
        let local = format!(
            " }}, {{ name = \"local\", address = \"unix:{}\", default_user = \"alice\"",
            path.display()
        );
        let user = format!("[[user]]\nname = \"alice\"\npassword_file = {secret:?}\n");
        let config = site.listening(&cluster, &local) + &user;
        let keyward = Keyward::start(site, &config).await;
        let mut seen = Vec::new();
        let unix = FAMILIES.iter().filter(|family| OVER_UNIX.contains(&family.name));
        for family in unix {
            let before = keyward.metric("keyward_odd_authority_connections_total", &[]).await;
            let application = Application::start_over_unix(family, &path).await;
            let round = application.round(&cluster).await;
            assert!(round.len() == 6 && round.iter().all(Did::ok), "{version} {}: {round:?}", family.name);
            let odd = keyward.metric("keyward_odd_authority_connections_total", &[]).await - before;
            println!("{version} {} over a unix socket: {odd} odd connections", family.name);
            if odd_ones.contains(&family.name) {
                assert!(odd >= 1.0, "{}", family.name);
            }
            seen.push(family.name);
        }
        assert_eq!(seen, OVER_UNIX);
        assert_eq!(keyward.metric("keyward_odd_authority_refused_total", &[]).await, 0.0);
        drop(keyward);
    }
}
