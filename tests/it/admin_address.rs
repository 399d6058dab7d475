//! The admin address: a peer that does not read, or says nothing, keeps nobody from asking whether Keyward lives; and gRPC's health
//! service says what `/readyz` says.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use keyward::admin::drain::Stage;
use keyward::admin::{self, AdminState};
use keyward::members::membership::AuthSetting;
use keyward::pb::health::health_check_response::ServingStatus;
use keyward::pb::health::{HealthCheckRequest, HealthCheckResponse};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::Instant;

use crate::member::Member;
use crate::rig::{Keyward, REAL_LIMIT, one_member, paused, real, settled};
use crate::words::{RANGE, range, ranged};

const CHECK: &str = "/grpc.health.v1.Health/Check";
const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";
/// More than the places that there are.
const PEERS: usize = 100;
const SMALLEST: u32 = 4096;

fn state(keyward: &Keyward) -> Arc<AdminState> {
    Arc::clone(&keyward.admin().state)
}

/// A Keyward with an admin address. Nobody looks at its member again, and a slow machine is no reason to be unready.
async fn administered() -> (SocketAddr, (Rc<Member>, Keyward)) {
    let (member, keyward) = one_member();
    (served(&keyward).await, (member, keyward))
}

/// Its admin address.
async fn served(keyward: &Keyward) -> SocketAddr {
    keyward.publish(|membership| membership.confirmed = Instant::now() + REAL_LIMIT);
    let listener = admin::bind(([127, 0, 0, 1], 0).into()).await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let serve = keyward.serve_admin(listener);
    keyward.tasks.spawn("admin", serve).detach();
    address
}

/// A peer that takes next to nothing into its own buffers.
async fn narrow(address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(SMALLEST).expect("a small buffer");
    socket.connect(address).await.expect("connected")
}

async fn get(address: SocketAddr, path: &str) -> String {
    get_of(address, path, "localhost").await
}

/// Asks by the name of a host.
async fn get_of(address: SocketAddr, path: &str, host: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("UTF-8");
    answer
}

#[test]
fn peers_that_do_not_read_keep_no_probe_and_no_scrape_waiting() {
    real(async {
        let (address, _keyward) = administered().await;
        let many = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(2_000);
        let mut unread = Vec::new();
        for _ in 0..PEERS {
            let peer = narrow(address).await;
            // As much of it as Keyward reads before it must write.
            drop(peer.try_write(many.as_bytes()));
            unread.push(peer);
        }
        for path in ["/livez", "/readyz", "/metrics"] {
            let answer = get(address, path).await;
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{path}: {answer}");
        }
        // The oldest has made room.
        let mut first = unread.remove(0);
        let mut rest = Vec::new();
        drop(first.read_to_end(&mut rest).await);
    });
}

/// The page of a site whose name points here reads nothing of anybody.
#[test]
fn a_name_that_is_not_listed_reads_nothing_but_probes() {
    real(async {
        let (address, _keyward) = administered().await;
        for path in ["/metrics", "/replica", "/", "/nowhere"] {
            let answer = get_of(address, path, "evil.example").await;
            assert!(
                answer.starts_with("HTTP/1.1 403 ") && answer.contains("admin.hosts"),
                "{path}: {answer}"
            );
            let answer = get_of(address, path, &address.to_string()).await;
            assert!(!answer.starts_with("HTTP/1.1 403 "), "{path}: {answer}");
        }
        for path in ["/livez", "/readyz"] {
            let answer = get_of(address, path, "keyward.example").await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
        }
    });
}

#[test]
fn peers_that_say_nothing_keep_no_probe_waiting() {
    real(async {
        let (address, _keyward) = administered().await;
        let mut silent = Vec::new();
        for _ in 0..PEERS {
            silent.push(narrow(address).await);
        }
        let answer = get(address, "/livez").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(get(address, "/nowhere").await.starts_with("HTTP/1.1 404 "));
    });
}

/// A replica that takes sealed requests of others: whoever begins one and does not end it is nobody's hindrance.
#[test]
fn requests_to_replicas_without_an_end_keep_no_probe_waiting() {
    real(async {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("session.key"), "0123456789abcdef".repeat(4)).expect("written");
        let member = Member::new(1, &Tasks::default());
        let lines = "[session]\nkey_files = ['session.key']\n[admin]\nreplicas = ['10.0.0.8:2389']\n";
        let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), "", lines);
        let address = served(&keyward).await;
        let head = |length: usize| {
            format!("POST /fleet HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n")
        };
        let mut open = Vec::new();
        for _ in 0..PEERS {
            let mut peer = narrow(address).await;
            peer.write_all(head(10_000).as_bytes()).await.expect("taken");
            peer.write_all(b"kwf1 and no more").await.expect("taken");
            open.push(peer);
        }
        for path in ["/livez", "/readyz", "/metrics"] {
            let answer = get(address, path).await;
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{path}: {answer}");
        }
        // The latest one is told no more than whoever posts to nowhere, and so is one that is too long.
        let mut latest = open.pop().expect("a peer");
        let mut long = narrow(address).await;
        long.write_all(head(1 << 20).as_bytes()).await.expect("taken");
        drop(long.write_all(&vec![b'k'; 1 << 20]).await);
        for peer in [&mut latest, &mut long] {
            let mut status = [0; 13];
            peer.read_exact(&mut status).await.expect("an answer");
            assert_eq!(&status, b"HTTP/1.1 405 ");
        }
        let forged = get(address, "/metrics").await;
        let count = |line: &str| {
            line.strip_prefix("keyward_fleet_requests_total{result=\"forged\"} ")?.parse::<u32>().ok()
        };
        assert!(forged.lines().find_map(count).is_some_and(|count| count >= 2), "{forged}");
    });
}

#[test]
fn a_peer_that_does_not_read_is_cut() {
    real(async {
        let (address, _keyward) = administered().await;
        let mut peer = narrow(address).await;
        // Nothing is read, so that soon nothing more is taken: a write then waits until the other side is gone.
        while peer.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").await.is_ok() {}
    });
}

async fn health(client: &crate::client::Client) -> ServingStatus {
    let outcome = client.call(CHECK, HealthCheckRequest::default().encode_to_vec()).await;
    HealthCheckResponse::decode(outcome.message().clone()).expect("an answer").status()
}

#[test]
fn the_health_service_says_what_readyz_says() {
    paused(async {
        let (member, keyward) = one_member();
        let state = state(&keyward);
        let publish = Arc::clone(&state).publish_readiness(keyward.readiness());
        keyward.tasks.spawn("readiness", publish).detach();
        settled().await;
        let client = keyward.client().await;
        let mut watch =
            client.begin(HEALTH_WATCH, HealthCheckRequest::default().encode_to_vec()).await.expect("open");
        let mut told = async || {
            let message = watch.next().await.expect("the watch goes on");
            HealthCheckResponse::decode(message).expect("a status").status()
        };
        assert_eq!(state.status().replica.why, None);
        assert_eq!((told().await, health(&client).await), (ServingStatus::Serving, ServingStatus::Serving));
        // No member is ready.
        keyward.publish(|membership| membership.leader = None);
        assert_eq!(told().await, ServingStatus::NotServing);
        assert!(state.status().replica.why.is_some());
        keyward.publish(|membership| membership.leader = Some(member.address.id));
        assert_eq!(told().await, ServingStatus::Serving);
        // The first stage of a drain: `/readyz` says no, and calls are served.
        keyward.exit().enter(Stage::Waiting { until: Instant::now() + Duration::from_secs(60) });
        assert_eq!(told().await, ServingStatus::NotServing);
        assert_eq!(health(&client).await, ServingStatus::NotServing);
        assert_eq!(state.status().replica.why.as_deref(), Some("draining"));
        let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok));
        // Whoever waits for the end of the process does not wait for this.
        keyward.exit().enter(Stage::Ended);
        keyward.exit().receivers_dropped().await;
    });
}

/// As the protocol of health checks wants, and as at etcd.
#[test]
fn a_health_watch_of_an_unknown_service_says_so_and_stays_open() {
    paused(async {
        let (_member, keyward) = one_member();
        let client = keyward.client().await;
        let asked = HealthCheckRequest { service: "no.such.Service".to_owned() }.encode_to_vec();
        assert_eq!(client.call(CHECK, &asked).await.end.code(), Some(Code::NotFound));
        let mut watch = client.begin(HEALTH_WATCH, &asked).await.expect("open");
        let told = HealthCheckResponse::decode(watch.next().await.expect("a message")).expect("a status");
        assert_eq!(told.status(), ServingStatus::ServiceUnknown);
        let later = tokio::time::timeout(Duration::from_secs(10), watch.next()).await;
        assert!(later.is_err(), "{later:?}");
        keyward.drain(Duration::from_secs(1));
        assert_eq!(watch.next().await.expect_err("drained").code(), Some(Code::Unavailable));
    });
}

/// What nobody publishes is what a look finds.
#[test]
fn members_that_were_not_looked_at_for_long_are_told_within_a_moment() {
    paused(async {
        let tasks = Tasks::default();
        let member = Member::new(1, &tasks);
        let keyward = Keyward::before(&[&member]);
        let publish = state(&keyward).publish_readiness(keyward.readiness());
        keyward.tasks.spawn("readiness", publish).detach();
        settled().await;
        let client = keyward.client().await;
        assert_eq!(health(&client).await, ServingStatus::Serving);
        tokio::time::sleep(Duration::from_secs(21)).await;
        assert_eq!(health(&client).await, ServingStatus::NotServing);
    });
}
