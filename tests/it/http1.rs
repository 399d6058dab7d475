//! A client that speaks HTTP/1 on a listener is served like one that speaks HTTP/2; a client that speaks nothing
//! known is gone in time.

use std::sync::Arc;
use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::tasks::Tasks;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{Instant, sleep};

use crate::authority::{Authority, connect};
use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, one_member, paused, settled};
use crate::words::{RANGE, range, ranged};

/// Sends the bytes, and reads everything to the end of the connection.
pub(crate) async fn told(mut io: impl AsyncRead + AsyncWrite + Unpin, said: &[u8]) -> String {
    io.write_all(said).await.expect("room");
    let mut heard = Vec::new();
    // TLS ends without a good-bye here and there.
    drop(io.read_to_end(&mut heard).await);
    String::from_utf8(heard).expect("text")
}

fn assert_not_found(answer: &str, version: &str, body: bool) {
    let (head, rest) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {answer:?}"));
    assert!(head.starts_with(&format!("{version} 404 Not Found\r\n")), "{answer}");
    assert_eq!(rest.contains("404 page not found"), body, "{answer}");
}

#[test]
fn requests_are_answered_at_once_whatever_their_form() {
    paused(async {
        let (member, keyward) = one_member();
        for (request, version, body) in [
            ("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "HTTP/1.1", true),
            ("GET /x HTTP/1.0\r\n\r\n", "HTTP/1.0", true),
            ("HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "HTTP/1.1", false),
            ("HEAD / HTTP/1.0\r\n\r\n", "HTTP/1.0", false),
            (
                "POST /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
                "HTTP/1.1",
                true,
            ),
            ("POST /x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}", "HTTP/1.0", true),
            (
                "PUT / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n\
                 2\r\n{}\r\n0\r\n\r\n",
                "HTTP/1.1",
                true,
            ),
        ] {
            let began = Instant::now();
            assert_not_found(&told(keyward.connect(), request.as_bytes()).await, version, body);
            assert_eq!(began.elapsed(), Duration::ZERO, "{request}");
        }
        assert_eq!(keyward.metrics.handshakes_failed.get(), 0);
        settled().await;
        assert!(member.was_called_again().is_none());
    });
}

#[test]
fn a_connection_serves_one_request_after_the_other_in_order() {
    paused(async {
        let (_member, keyward) = one_member();
        let requests = "GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n\
                        GET /b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let answer = told(keyward.connect(), requests.as_bytes()).await;
        let statuses: Vec<_> =
            answer.match_indices("HTTP/1.1 ").map(|(at, _)| &answer[at + 9..at + 12]).collect();
        assert_eq!(statuses, ["404", "200", "404"], "{answer}");
    });
}

/// A refusal that needs no body is decided before the body has come.
#[test]
fn a_connection_goes_on_behind_a_refusal_made_before_the_body_came_or_says_that_it_ends() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let mut io = keyward.connect();
        let range = |length: usize| {
            let fields = format!("Host: x\r\nAuthorization: unknown\r\nContent-Length: {length}");
            format!("POST /v3/kv/range HTTP/1.1\r\n{fields}\r\n\r\n")
        };
        let chunks = range(0).replace("Content-Length: 0", "Transfer-Encoding: chunked");
        for (head, body) in [(range(2), "{}"), (chunks, "2\r\n{}\r\n0\r\n\r\n"), (range(2), "{}")] {
            io.write_all(head.as_bytes()).await.expect("written");
            settled().await;
            io.write_all(body.as_bytes()).await.expect("written");
            let mut bytes = [0; 4096];
            let count = io.read(&mut bytes).await.expect("an answer");
            let answer = String::from_utf8_lossy(&bytes[..count]);
            assert!(answer.starts_with("HTTP/1.1 401") && !answer.contains("Connection:"), "{answer}");
        }
        let next = "GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let answer = told(io, next.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");

        for sent in [0, 1000] {
            let mut io = keyward.connect();
            io.write_all(range(1 << 20).as_bytes()).await.expect("written");
            let answer = told(io, &vec![b' '; sent]).await;
            assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
            assert!(
                answer.contains("Connection: close") && answer.matches("HTTP/1.1").count() == 1,
                "{answer}"
            );
        }
    });
}

/// Two lengths, or a length beside chunks, are the means of smuggling a request past a proxy.
#[test]
fn a_request_of_ambiguous_length_ends_the_connection() {
    paused(async {
        let (member, keyward) = one_member();
        for fields in [
            "Content-Length: 2\r\nContent-Length: 3",
            "Content-Length: 2, 3",
            "Content-Length: -1",
            "Content-Length: +2",
            "Transfer-Encoding: gzip, chunked, identity\r\nContent-Length: 2",
            "Content-Length: 2\r\nTransfer-Encoding: chunked",
        ] {
            let request = format!(
                "POST /v3/kv/range HTTP/1.1\r\nHost: x\r\n{fields}\r\n\r\n{{}}GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
            );
            let answer = told(keyward.connect(), request.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 400"), "{fields}: {answer}");
            assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{fields}: {answer}");
        }
        for hosts in ["", "Host: x\r\nHost: y\r\n"] {
            let request = format!("GET /version HTTP/1.1\r\n{hosts}\r\n");
            let answer = told(keyward.connect(), request.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 400"), "{request}: {answer}");
        }
        let head = "POST /v3/kv/range HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
        let answer = told(keyward.connect(), format!("{head}xyz\r\n{{}}\r\n").as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
        settled().await;
        assert!(member.was_called_again().is_none());
    });
}

#[test]
fn a_head_is_bounded_in_size_and_time() {
    paused(async {
        let lines = "[limits]\nconnection_age = \"0s\"\n";
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        let (began, failed) = (Instant::now(), keyward.metrics.handshakes_failed.get());
        assert_eq!(told(keyward.connect(), b"GET / HTTP/1.1\r\nHost:").await, "");
        assert_eq!(
            (began.elapsed(), keyward.metrics.handshakes_failed.get()),
            (Duration::from_secs(10), failed + 1)
        );
        let long = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", "x".repeat(100 * 1024));
        let answer = told(keyward.connect(), long.as_bytes()).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
        // The next head of a connection has more time, from its first byte; before it a connection may be idle.
        let mut io = keyward.connect();
        io.write_all(RANGE_OF_K).await.expect("room");
        member.called(RANGE).await.reply(&ranged(7)).await;
        sleep(Duration::from_secs(3000)).await;
        let began = Instant::now();
        let answer = told(io, b"GET /ver").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let waited = began.elapsed();
        assert!((Duration::from_secs(60)..=Duration::from_secs(400)).contains(&waited), "{waited:?}");
    });
}

/// etcd takes both: Go's limit is in bytes, and it joins a folded field.
#[test]
fn more_than_a_hundred_fields_and_a_folded_one_are_refused() {
    paused(async {
        let (_member, keyward) = one_member();
        let many = |count: usize| (0..count).map(|number| format!("x-{number}: y\r\n")).collect::<String>();
        for (fields, status) in [(many(90), 200), (many(150), 431), ("x-folded: a\r\n b\r\n".to_owned(), 400)]
        {
            let request = format!("GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{fields}\r\n");
            let answer = told(keyward.connect(), request.as_bytes()).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        }
    });
}

/// And so nothing is agreed that is safe from a reader of today with a machine of tomorrow (`docs/differences.md`, "TLS").
#[test]
fn over_tls_keys_are_agreed_by_elliptic_curves_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    Authority::new().write(folder.path(), "ca");
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let tls = "tls = { cert = \"server.crt\", key = \"server.key\" }\n";
        let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), tls, "");
        let settings = keyward.opened().load().tls.clone().expect("TLS").load();
        let provider = settings.handshakes.crypto_provider();
        let groups: Vec<_> = provider.kx_groups.iter().map(|group| format!("{:?}", group.name())).collect();
        assert_eq!(groups, ["X25519", "secp256r1", "secp384r1"]);
        let suites = provider.cipher_suites.iter().map(|suite| format!("{:?}", suite.suite()));
        let old: Vec<_> =
            suites.filter(|name| !name.starts_with("TLS13_") && !name.starts_with("TLS_ECDHE_")).collect();
        assert_eq!(old, Vec::<String>::new());
    });
}

#[test]
fn garbage_is_closed_in_time() {
    paused(async {
        let (_member, keyward) = one_member();
        for garbage in
            [&[0x16, 3, 1, 2, 0, 1, 0, 1, 252, 3][..], &[0; 30], &[0xff; 5000], b"PRI GET", b"\r\n\r\n\0"]
        {
            let (began, mut io, mut heard) = (Instant::now(), keyward.connect(), Vec::new());
            io.write_all(garbage).await.expect("room");
            drop(io.read_to_end(&mut heard).await);
            assert!(began.elapsed() <= Duration::from_secs(10) && heard.len() < 1000, "{garbage:x?}");
        }
    });
}

#[test]
fn a_drain_ends_idle_connections_and_lets_an_open_request_finish() {
    paused(async {
        let (member, keyward) = one_member();
        let mut idle = keyward.connect();
        idle.write_all(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("room");
        let mut busy = keyward.connect();
        let body = "POST /v3/kv/range HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{\"key\":\"aw==\"}";
        busy.write_all(body.as_bytes()).await.expect("room");
        let call = member.called(RANGE).await;
        keyward.drain(Duration::from_secs(30));
        let mut heard = Vec::new();
        idle.read_to_end(&mut heard).await.expect("it ends");
        assert!(heard.starts_with(b"HTTP/1.1 200 OK"));
        call.reply(&ranged(7)).await;
        let answer = told(busy, b"").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"revision\":\"7\""), "{answer}");
        assert!(answer.contains("Connection: close\r\n"), "{answer}");
    });
}

#[test]
fn over_tls_the_agreed_protocol_decides_and_without_one_the_first_bytes() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let (authority, folder) = (Authority::new(), tempfile::tempdir().expect("a folder"));
        authority.write(folder.path(), "ca");
        let tls = "tls = { cert = \"server.crt\", key = \"server.key\" }\n";
        let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), tls, "");
        let over = async |words: &[&[u8]]| {
            let mut config = (*authority.tls(None)).clone();
            config.alpn_protocols = words.iter().map(|word| word.to_vec()).collect();
            connect(keyward.connect(), Arc::new(config)).await.expect("a handshake")
        };
        let get = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        for words in [&[][..], &[&b"http/1.1"[..]]] {
            assert_not_found(&told(over(words).await, get).await, "HTTP/1.1", true);
        }
        for words in [&[][..], &[&b"h2"[..]], &[b"http/1.1", b"h2"]] {
            let io = over(words).await;
            let agreed = io.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
            assert_eq!(agreed, (!words.is_empty()).then(|| b"h2".to_vec()), "ours is the choice");
            let client = Client::over(io, &keyward.tasks).await;
            let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
            tokio::join!(client.call(RANGE, range("k")), script).0.message();
        }
    });
}

const RANGE_OF_K: &[u8] =
    b"POST /v3/kv/range HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{\"key\":\"aw==\"}";

/// As `nc -N` and some health checkers do.
#[test]
fn a_client_that_closes_its_side_behind_its_request_gets_its_answer() {
    paused(async {
        let (member, keyward) = one_member();
        let heard = async |request: &[u8]| {
            let mut io = keyward.connect();
            io.write_all(request).await.expect("room");
            io.shutdown().await.expect("open");
            told(io, b"").await
        };
        let version = heard(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n").await;
        assert!(version.starts_with("HTTP/1.1 200 OK"), "{version}");
        let slow = async {
            let call = member.called(RANGE).await;
            sleep(Duration::from_secs(6)).await;
            call.reply(&ranged(7)).await;
        };
        let (answer, ()) = tokio::join!(heard(RANGE_OF_K), slow);
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"revision\":\"7\""), "{answer}");
    });
}

/// It may be gone.
#[test]
fn a_client_that_closed_its_side_is_not_waited_for_long() {
    paused(async {
        let (member, keyward) = one_member();
        let mut io = keyward.connect();
        io.write_all(RANGE_OF_K).await.expect("room");
        io.shutdown().await.expect("open");
        let began = Instant::now();
        let mut call = member.called(RANGE).await;
        call.canceled().await;
        assert!((6..=8).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        // A lock is not waited for on behalf of nobody.
        let lock = b"POST /v3/lock/lock HTTP/1.1\r\nHost: x\r\nContent-Length: 29\r\n\r\n{\"name\":\"aw==\",\"lease\":\"7\"}  ";
        let mut io = keyward.connect();
        io.write_all(lock).await.expect("room");
        let mut call = member.called("/v3lockpb.Lock/Lock").await;
        let began = Instant::now();
        io.shutdown().await.expect("open");
        call.canceled().await;
        assert_eq!(began.elapsed().as_secs(), 0);
    });
}
