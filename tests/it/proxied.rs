//! Clients behind a balancer that says who they are (PROXY protocol, version 2): their own address counts, and only a trusted
//! balancer says so.

use std::net::SocketAddr;
use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::AuthenticateRequest;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::time::Instant;

use crate::authority::{Authority, connect};
use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, paused, settled, token_of};

const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
const TRUSTED: &str = "proxy_protocol_from = [\"10.0.0.10/32\", \"fd00::/8\"]\n";
/// Whoever comes from there is app; all others are nobody.
/// Callers without a user are passed on, and recognised by their missing token.
const RULES: &str = "[policy]\nrequire_identity = \"as-etcd\"\n[[user]]\nname = \"app\"\npassword_file = \"app\"\n\
     [[map]]\nnetwork = \"192.0.2.0/24\"\nas = \"app\"\n";
const BALANCER: &str = "10.0.0.10:40000";
const APPS: &str = "192.0.2.7:49153";
const ELSEWHERE: &str = "198.51.100.1:49153";

struct Site {
    member: Member,
    keyward: Keyward,
}

impl Site {
    fn new(listener: &str, lines: &str) -> Self {
        let member = Member::new(1, &Tasks::default());
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("app"), "right").expect("written");
        let listener = format!("{TRUSTED}{listener}");
        let keyward =
            Keyward::at(&[&member], AuthSetting::On, folder.path(), &listener, &format!("{RULES}{lines}"));
        Self { member, keyward }
    }

    /// A connection from this address that begins with that.
    async fn connect(&self, from: &str, header: &[u8]) -> DuplexStream {
        let mut io = self.keyward.connect_to(0, Some(address(from)));
        io.write_all(header).await.expect("room");
        io
    }

    async fn client(&self, from: &str, header: &[u8]) -> Client {
        Client::over(self.connect(from, header).await, &self.keyward.tasks).await
    }

    /// The token with which a call that shows nothing reaches the member: that of the user of the client's network.
    async fn token_of(&self, client: &Client) -> Option<String> {
        token_of(&self.member, client).await
    }

    /// The connection is ended, and nothing of it was served.
    async fn shuts(&self, mut io: DuplexStream) {
        let mut rest = Vec::new();
        io.read_to_end(&mut rest).await.expect("an end");
        settled().await;
        assert!(self.member.was_called_again().is_none());
    }
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn header(version_and_command: u8, source: &str) -> Vec<u8> {
    let (family, source, port) = match address(source) {
        SocketAddr::V4(source) => {
            (0x11, [&source.ip().octets()[..], &[127, 0, 0, 1]].concat(), source.port())
        }
        SocketAddr::V6(source) => (0x21, [&source.ip().octets()[..], &[0; 16]].concat(), source.port()),
    };
    // What a balancer adds of itself follows the addresses.
    let rest = [&source[..], &port.to_be_bytes(), &[9, 75], &[0x04, 0, 1, 0]].concat();
    let length = u16::try_from(rest.len()).expect("short").to_be_bytes();
    [b"\r\n\r\n\0\r\nQUIT\n", &[version_and_command, family][..], &length, &rest].concat()
}

fn proxied(source: &str) -> Vec<u8> {
    header(0x21, source)
}

#[test]
fn the_address_that_a_trusted_balancer_names_is_the_clients() {
    paused(async {
        let site = Site::new("", "");
        for (from, header, whose) in [
            (BALANCER, proxied(APPS), Some("app.1")),
            (BALANCER, proxied("[::ffff:192.0.2.7]:1"), Some("app.1")),
            (BALANCER, proxied(ELSEWHERE), None),
            (BALANCER, proxied("[2001:db8::1]:1"), None),
            ("[fd00::1]:1", proxied(APPS), Some("app.1")),
            ("[::ffff:10.0.0.10]:1", proxied(APPS), Some("app.1")),
            // It looks by itself whether we are there, whatever it writes behind that.
            (BALANCER, header(0x20, APPS), None),
            (APPS, Vec::new(), Some("app.1")),
            (ELSEWHERE, Vec::new(), None),
        ] {
            let client = site.client(from, &header).await;
            assert_eq!(site.token_of(&client).await.as_deref(), whose, "{from} {header:x?}");
        }
        assert_eq!(site.keyward.metrics.handshakes_failed.get(), 0);
    });
}

#[test]
fn a_header_of_anybody_else_is_refused_and_a_balancer_without_one_too() {
    paused(async {
        let site = Site::new("", "");
        for from in [ELSEWHERE, APPS, "10.0.0.11:1"] {
            site.shuts(site.connect(from, &proxied(APPS)).await).await;
        }
        let refused = site.keyward.metrics.handshakes_failed.get();
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        let version_1 = b"PROXY TCP4 192.0.2.7 10.0.0.1 49153\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        for bad in [&preface[..], version_1, &proxied(APPS)[..20], &header(0x22, APPS)] {
            let mut io = site.connect(BALANCER, bad).await;
            io.shutdown().await.expect("half closed");
            site.shuts(io).await;
        }
        assert_eq!(site.keyward.metrics.handshakes_failed.get(), refused + 4);
    });
}

#[test]
fn a_balancer_that_says_nothing_has_the_time_of_a_handshake() {
    paused(async {
        let site = Site::new("", "[limits]\nhandshake_timeout = \"5s\"\n");
        for said in [&proxied(APPS)[..15], &proxied(APPS)[..20]] {
            let begun = Instant::now();
            site.shuts(site.connect(BALANCER, said).await).await;
            assert_eq!(begun.elapsed().as_secs(), 5);
        }
        // The header's time is not given once more for what follows it.
        let begun = Instant::now();
        let mut io = site.connect(BALANCER, b"").await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        io.write_all(&proxied(APPS)).await.expect("room");
        site.shuts(io).await;
        assert_eq!(begun.elapsed().as_secs(), 5);
        assert_eq!(site.keyward.metrics.handshakes_failed.get(), 3);
    });
}

#[test]
fn the_header_comes_before_tls() {
    paused(async {
        let authority = Authority::new();
        let member = Member::new(1, &Tasks::default());
        let folder = tempfile::tempdir().expect("a folder");
        authority.write(folder.path(), "ca");
        std::fs::write(folder.path().join("app"), "right").expect("written");
        let tls = format!("tls = {{ cert = \"server.crt\", key = \"server.key\" }}\n{TRUSTED}");
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), &tls, RULES);
        let site = Site { member, keyward };
        for (from, header, whose) in [(BALANCER, proxied(APPS), Some("app.1")), (ELSEWHERE, Vec::new(), None)]
        {
            let io = connect(site.connect(from, &header).await, authority.tls(None)).await;
            let client = Client::over(io.expect("a handshake"), &site.keyward.tasks).await;
            assert_eq!(site.token_of(&client).await.as_deref(), whose);
        }
        let refused = connect(site.connect(ELSEWHERE, &proxied(APPS)).await, authority.tls(None)).await;
        assert!(refused.is_err(), "from elsewhere it is no part of TLS");
        settled().await;
        assert_eq!(site.keyward.metrics.handshakes_failed.get(), 1);
    });
}

#[test]
fn clients_behind_one_balancer_are_limited_each_by_itself() {
    paused(async {
        let site = Site::new("", "");
        let guess = async |source: &str, user: &str, password: &str| {
            let client = site.client(BALANCER, &proxied(source)).await;
            let login = AuthenticateRequest { name: user.into(), password: password.into() };
            client.call(AUTHENTICATE, login.encode_to_vec()).await.end
        };
        for n in 0..5 {
            let end = guess(APPS, "alice", &format!("wrong{n}")).await;
            assert_eq!(end.code(), Some(Code::InvalidArgument), "{end:?}");
        }
        let end = guess(APPS, "alice", "right").await;
        assert_eq!(end.told(), (Code::ResourceExhausted, "etcdserver: too many requests"));
        assert_eq!(guess(ELSEWHERE, "alice", "right").await.code(), Some(Code::Ok), "another client");
        assert_eq!(guess(APPS, "bob", "right").await.code(), Some(Code::Ok), "another user");
    });
}

#[test]
fn a_drain_waits_for_no_header() {
    paused(async {
        let mut site = Site::new("", "");
        let io = site.connect(BALANCER, &proxied(APPS)[..20]).await;
        settled().await;
        let begun = Instant::now();
        site.keyward.drain(Duration::from_secs(30));
        site.keyward.ended().await;
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        drop(io);
    });
}
