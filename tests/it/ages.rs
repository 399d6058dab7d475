//! A connection that has become old is told to go, so that one replica does not keep everybody (rules 16); what is open on it
//! goes on.

use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::tasks::Tasks;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep};

use crate::client::Client;
use crate::http1::told;
use crate::member::Member;
use crate::revocations::watching;
use crate::rig::{Keyward, paused};
use crate::words::{RANGE, event, range, ranged, watched};

const AGE: Duration = Duration::from_secs(600);
const LINES: &str =
    "[limits]\nconnection_age = \"10m\"\nfirst_call_timeout = \"0s\"\n[watch]\nidle_progress = \"0s\"\n";

/// A client as all but a few are: gRPC's libraries send a user agent.
async fn client_of(keyward: &Keyward) -> Client {
    keyward.client().await.header("user-agent", "grpc-go/1.72.1")
}

/// Waits until it takes no new streams, and says how long that took.
async fn told_to_go(client: &Client, began: Instant) -> Duration {
    loop {
        sleep(Duration::from_secs(1)).await;
        // Where it is taken, it is left again at once.
        match client.open(RANGE).await {
            Ok(stream) => stream.cancel(),
            Err(_) => return began.elapsed(),
        }
    }
}

#[test]
fn an_old_connection_takes_no_more_calls_and_ends_with_its_last_stream() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, LINES);
        let began = Instant::now();
        let client = client_of(&keyward).await;
        let (mut stream, mut call) = watching(&client, &member).await;
        let took = told_to_go(&client, began).await;
        assert!(took >= AGE * 9 / 10 && took <= AGE * 11 / 10 + Duration::from_secs(2), "{took:?}");
        // Long after: nothing cuts what its client still wants.
        for revision in 10..13 {
            sleep(AGE).await;
            call.say(&event(1, revision, 1)).await.expect("taken");
            assert_eq!(watched(&stream.next().await.expect("an event")).events.len(), 1);
        }
        assert!(!client.is_closed());
        stream.cancel();
        while !client.is_closed() {
            sleep(Duration::from_millis(10)).await;
        }
        // What comes next comes on another connection.
        let again = keyward.client().await;
        let (answer, ()) = tokio::join!(again.call(RANGE, range("k")), async {
            member.called(RANGE).await.reply(&ranged(1)).await;
        });
        answer.message();
    });
}

#[test]
fn connections_that_came_together_do_not_go_together() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, LINES);
        let began = Instant::now();
        let mut clients = Vec::new();
        for _ in 0..8 {
            clients.push(keyward.client().await);
        }
        let mut went = Vec::new();
        while went.len() < clients.len() {
            sleep(Duration::from_secs(1)).await;
            let gone = clients.iter().filter(|client| client.is_closed()).count();
            went.resize(gone, began.elapsed());
        }
        let spread = went[went.len() - 1] - went[0];
        assert!(
            spread >= Duration::from_secs(10),
            "an idle one ends at once, each at its own time: {went:?}"
        );
    });
}

#[test]
fn age_is_off_where_the_configuration_says_so_and_where_a_login_lends_itself() {
    for (listener, lines) in [
        ("", "[limits]\nconnection_age = \"0s\"\nfirst_call_timeout = \"0s\"\n"),
        ("lend_login_identity = true\n", LINES),
    ] {
        paused(async move {
            let member = Member::new(1, &Tasks::default());
            let folder = tempfile::tempdir().expect("a folder");
            let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), listener, lines);
            let client = keyward.client().await;
            sleep(3 * AGE).await;
            assert!(!client.is_closed(), "{listener}{lines}");
        });
    }
}

/// Erlang's gun drops every stream at a GOAWAY, and sends no user agent.
#[test]
fn who_cannot_take_a_goaway_keeps_an_old_connection_until_a_drain() {
    const NAMED: &str = "connection_age_spares = [\"gun/*\"]\n";
    for (listener, agent, is_spared) in [
        ("", None, true),
        ("", Some("grpc-go/1.72.1"), false),
        (NAMED, None, false),
        (NAMED, Some("grpc-go/1.72.1"), false),
        (NAMED, Some("gun/1.3"), true),
    ] {
        paused(async move {
            let member = Member::new(1, &Tasks::default());
            let folder = tempfile::tempdir().expect("a folder");
            let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), listener, LINES);
            let client = keyward.client().await;
            let client = match agent {
                Some(agent) => client.header("user-agent", agent),
                None => client,
            };
            let (stream, _call) = watching(&client, &member).await;
            sleep(3 * AGE).await;
            let is_open = client.open(RANGE).await.is_ok();
            assert_eq!(is_open, is_spared, "{listener}{agent:?}");
            keyward.drain(Duration::from_secs(60));
            sleep(Duration::from_secs(1)).await;
            assert!(client.open(RANGE).await.is_err(), "{listener}{agent:?}: a drain spares nobody");
            drop(stream);
        });
    }
}

const VERSION: &[u8] = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n";
/// Time without a request before an old connection of HTTP/1.1 is closed.
const IDLE: Duration = Duration::from_secs(5);

/// etcd's client port keeps an idle connection of HTTP/1.1 for ever.
#[test]
fn an_old_connection_of_http1_ends_when_it_has_been_idle() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, LINES);
        let began = Instant::now();
        let answer = told(keyward.connect(), VERSION).await;
        assert!(
            answer.starts_with("HTTP/1.1 200") && !answer.to_ascii_lowercase().contains("connection: close"),
            "{answer}"
        );
        let times = AGE * 9 / 10 + IDLE..=AGE * 11 / 10 + IDLE + Duration::from_secs(2);
        assert!(times.contains(&began.elapsed()), "{:?}", began.elapsed());
    });
}

/// A request that met the end of its connection would be lost: a client must not repeat a POST by itself.
#[test]
fn an_old_connection_of_http1_in_use_says_so_in_an_answer_and_ends_behind_it() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, LINES);
        let (began, mut io) = (Instant::now(), keyward.connect());
        let pause = IDLE - Duration::from_secs(1);
        let last = loop {
            io.write_all(VERSION).await.expect("open");
            let mut answer = Vec::new();
            while !answer.ends_with(b"}") {
                assert_ne!(io.read_buf(&mut answer).await.expect("open"), 0, "a request without an answer");
            }
            let answer = String::from_utf8(answer).expect("text");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            if answer.contains("Connection: close\r\n") {
                break io.read_to_end(&mut Vec::new()).await.expect("the end");
            }
            sleep(pause).await;
        };
        let times = AGE * 9 / 10..=AGE * 11 / 10 + 2 * pause;
        assert!(last == 0 && times.contains(&began.elapsed()), "{last} bytes, {:?}", began.elapsed());
    });
}
