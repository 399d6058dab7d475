//! Clients behind a balancer that says who they are (PROXY protocol, version 2): an unchanged client works, limits and the log know it
//! by its own address, and nobody else can take one.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::{AuthenticateRequest, RangeRequest};
use keyward::tasks::Tasks;
use prost::Message;

use crate::harness::keyward::{Keyward, Site};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, newest, ports, wait};
use crate::raw::{Call, End, Endpoint};
use crate::rewatch::local;

const FAILED: &str = "etcdserver: authentication failed, invalid user ID or password";
const TOO_MANY: &str = "etcdserver: too many requests";
const SOON: Duration = Duration::from_secs(30);

/// What HAProxy writes before a TCP connection over IPv4, with something of its own behind the addresses.
fn header(client: [u8; 4], port: u16) -> Vec<u8> {
    let addresses = [&client[..], &[127, 0, 0, 1], &port.to_be_bytes(), &2379_u16.to_be_bytes()].concat();
    let own = [0x05, 0, 3, b'i', b'd', b'7'];
    let length = u16::try_from(addresses.len() + own.len()).expect("short").to_be_bytes();
    [b"\r\n\r\n\0\r\nQUIT\n\x21\x11", &length[..], &addresses, &own].concat()
}

/// A balancer that all its life speaks for this client.
async fn balancer(tasks: &Tasks, client: [u8; 4], port: u16, to: SocketAddr) -> Relay {
    let relay = Relay::start(tasks).await;
    relay.introduce(header(client, port));
    relay.open(to);
    relay
}

#[test]
fn clients_behind_a_balancer_are_known_by_their_own_address() {
    local(known_by_their_own_address());
}

async fn known_by_their_own_address() {
    let tasks = Tasks::default();
    let cluster =
        Cluster::start(&newest("3.5"), Options { auth: Auth::On { extra_users: 0 }, ..Options::default() })
            .await;
    let (site, closed, pair) = (Site::new(), ports::free(), cluster.pki().server());
    let fields = format!(
        ", tls.cert = {:?}, tls.key = {:?}, proxy_protocol_from = [\"127.0.0.1/32\"] }}, \
         {{ name = \"closed\", address = \"{closed}\", proxy_protocol_from = [\"192.0.2.0/24\"]",
        pair.cert, pair.key
    );
    let config = site.listening(&cluster, &fields);
    let front = site.listen;
    let keyward = Keyward::start(site, &config).await;
    let one = balancer(&tasks, [192, 0, 2, 7], 49153, front).await;
    let two = balancer(&tasks, [192, 0, 2, 8], 1, front).await;

    let ctl = cluster.ctl().as_user("alice").with_tls(cluster.pki(), None);
    // A balancer that speaks version 1, as nginx does.
    let text = Relay::start(&tasks).await;
    text.introduce(b"PROXY TCP6 2001:db8::7 ::1 49154 2379\r\n".to_vec());
    text.open(front);
    let by_text = ctl.to(vec![format!("https://{}", text.address)]);
    assert_eq!(by_text.ok(&["put", "/a/k", "u"]).await, "OK\n");
    let told = async || keyward.log().contains("remote=[2001:db8::7]:49154").then_some(());
    wait::until(SOON, "the client's address by version 1 is in the log", told).await;
    let through = ctl.to(vec![format!("https://{}", one.address)]);
    assert_eq!(through.ok(&["put", "/a/k", "v"]).await, "OK\n");
    assert_eq!(through.ok(&["get", "/a/k", "--print-value-only"]).await, "v\n");
    let told = async || keyward.log().contains("remote=192.0.2.7:49153").then_some(());
    wait::until(SOON, "the client's address is in the log", told).await;

    let log_in = async |balancer: &Relay, password: &str| {
        let login = AuthenticateRequest { name: "bob".into(), password: password.into() };
        let call = Call::unary("/etcdserverpb.Auth/Authenticate", &login.encode_to_vec());
        Endpoint::tls(balancer.address, cluster.pki(), None).call(&call).await.message()
    };
    // All at once: what is limited is let through again a second later. Each its own, since who presents the same at the same
    // time shares one check, and what became of it.
    let guesses = |whose: &str, many: usize| (0..many).map(|n| format!("{whose}-{n}")).collect::<Vec<_>>();
    let (ones, twos) = (guesses("one", 8), guesses("two", 5));
    let (ones, twos) = tokio::join!(
        join_all(ones.iter().map(|guess| log_in(&one, guess))),
        join_all(twos.iter().map(|guess| log_in(&two, guess))),
    );
    let count = |told: &[String], text: &str| told.iter().filter(|told| *told == text).count();
    assert_eq!((count(&ones, FAILED), count(&ones, TOO_MANY)), (5, 3), "{ones:?}");
    assert_eq!(count(&twos, FAILED), 5, "the client beside it: {twos:?}");

    // Who does not say it where it must be said, and who says it where nobody believes it.
    let range = RangeRequest { key: "/a/k".into(), ..RangeRequest::default() };
    let call = Call::unary("/etcdserverpb.KV/Range", &range.encode_to_vec());
    let without = Endpoint::tls(front, cluster.pki(), None).call(&call).await;
    assert!(matches!(without.end, End::ConnectionLost(_)), "{without:?}");
    let foreign = balancer(&tasks, [192, 0, 2, 7], 49153, closed).await;
    let unbelieved = Endpoint::plain(foreign.address).call(&call).await;
    assert!(matches!(unbelieved.end, End::ConnectionLost(_)), "{unbelieved:?}");
    let direct = Endpoint::plain(closed).call(&call).await;
    assert_eq!(direct.message(), "etcdserver: user name is empty", "others are served there");
    assert!(keyward.log().lines().all(|line| !line.contains("listener=closed remote=192.0.2.7")));
}
