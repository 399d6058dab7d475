//! Who speaks HTTP/1 on a listener is answered; who speaks nothing that we know is gone in time.

use std::sync::Arc;
use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::tasks::Tasks;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::Instant;

use crate::authority::{Authority, connect};
use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, one_member, paused, settled};
use crate::words::{RANGE, range, ranged};

/// Says that, and hears everything to the end.
async fn told(mut io: impl AsyncRead + AsyncWrite + Unpin, said: &[u8]) -> String {
    io.write_all(said).await.expect("room");
    let mut heard = Vec::new();
    // TLS ends without a good-bye here and there.
    drop(io.read_to_end(&mut heard).await);
    String::from_utf8(heard).expect("text")
}

fn assert_nothing_here(answer: &str, version: &str, body: bool) {
    let (head, rest) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {answer:?}"));
    assert!(head.starts_with(&format!("{version} 404 Not Found\r\n")), "{answer}");
    assert!(head.to_ascii_lowercase().contains("connection: close"), "{answer}");
    assert_eq!(rest.contains("gRPC"), body, "{answer}");
}

#[test]
fn requests_are_answered_and_the_connection_ends() {
    paused(async {
        let (member, keyward) = one_member();
        for (request, version, body) in [
            ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1", true),
            ("GET /health HTTP/1.0\r\n\r\n", "HTTP/1.0", true),
            ("HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1", false),
            ("HEAD / HTTP/1.0\r\n\r\n", "HTTP/1.0", false),
            ("POST /v3/kv/range HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", "HTTP/1.1", true),
            ("POST /v3/kv/put HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}", "HTTP/1.0", true),
            (
                "PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
                "HTTP/1.1",
                true,
            ),
            // Nobody waits for a body that is asked for before it is sent.
            (
                "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
                "HTTP/1.1",
                true,
            ),
        ] {
            let began = Instant::now();
            assert_nothing_here(&told(keyward.connect(), request.as_bytes()).await, version, body);
            assert_eq!(began.elapsed(), Duration::ZERO, "{request}");
        }
        assert_eq!(keyward.metrics.handshakes_failed.get(), 0);
        settled().await;
        assert!(member.was_called_again().is_none());
    });
}

/// What follows a request on its connection is no second one.
#[test]
fn one_connection_is_one_request() {
    paused(async {
        let (_member, keyward) = one_member();
        let twice = "GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(2);
        let answer = told(keyward.connect(), twice.as_bytes()).await;
        assert_eq!(answer.matches("404 Not Found").count(), 1, "{answer}");
    });
}

#[test]
fn of_a_body_a_bounded_part_is_read_and_not_for_ever() {
    paused(async {
        let (_member, keyward) = one_member();
        // More than is read, of much more that was promised.
        let large =
            ["POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n", &"x".repeat(200 * 1024)];
        let began = Instant::now();
        assert_nothing_here(&told(keyward.connect(), large.concat().as_bytes()).await, "HTTP/1.1", true);
        assert_eq!(began.elapsed(), Duration::ZERO);
        // One that does not come, a head that does not end, and one that is too long.
        for (said, waits) in [
            ("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n".to_owned(), true),
            ("GET / HTTP/1.1\r\nHost:".to_owned(), true),
            (format!("GET / HTTP/1.1\r\nHost: {}", "x".repeat(100 * 1024)), false),
        ] {
            let (began, failed) = (Instant::now(), keyward.metrics.handshakes_failed.get());
            drop(told(keyward.connect(), said.as_bytes()).await);
            let (most, more) = if waits { (Duration::from_secs(10), 1) } else { (Duration::ZERO, 0) };
            assert_eq!(began.elapsed(), most, "{} bytes", said.len());
            assert_eq!(keyward.metrics.handshakes_failed.get() - failed, more);
        }
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
fn over_tls_its_word_decides_and_without_one_the_first_bytes() {
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
        let get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
        for words in [&[][..], &[&b"http/1.1"[..]]] {
            assert_nothing_here(&told(over(words).await, get).await, "HTTP/1.1", true);
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
