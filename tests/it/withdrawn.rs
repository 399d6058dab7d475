//! A certificate that is good no more ends what it let in, and it alone (rules 16): by a list of what was revoked, by another
//! authority, by a listener that asks for more. And each connection shows its certificate anew.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use keyward::refusal::Code;
use rcgen::SerialNumber;
use rustls::HandshakeKind;
use tokio::io::AsyncReadExt as _;

use crate::authority::{self, Authority, Shown, connect};
use crate::certificates::{Door, SAME, TLS};
use crate::client::Client;
use crate::revocations::{all_kinds, watching};
use crate::rig::{paused, settled};
use crate::words::{PUT, RANGE, event, put, range, ranged, was_put, watched};

const STOPPED: (Code, &str) = (Code::Unavailable, "etcdserver: server stopped");

fn numbered(authority: &Authority, name: &str, number: u64) -> Shown {
    let mut params = authority::client(name);
    params.serial_number = Some(SerialNumber::from(number));
    authority.issue(&params)
}

impl Door {
    /// Publishes what the folder has now.
    fn look_again(&self) {
        self.keyward.publish_tls(self.folder.path(), TLS, "");
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.folder.path().join(name), text).expect("written");
    }
}

/// It hears of what comes.
async fn goes_on(stream: &mut crate::client::Stream, call: &mut crate::member::Call) {
    call.say(&event(1, 10, 1)).await.expect("taken");
    assert_eq!(watched(&stream.next().await.expect("an event")).events.len(), 1);
}

/// The connection ends, long before it is old.
async fn closes(client: &Client) {
    let closed = async {
        while !client.is_closed() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), closed).await.expect("it ends");
}

#[test]
fn what_a_revoked_certificate_let_in_ends_and_nothing_else() {
    paused(async {
        let door = Door::new("", SAME);
        let alice = door.client(Some(&numbered(&door.authority, "alice", 7))).await;
        let bob = door.client(Some(&numbered(&door.authority, "bob", 8))).await;
        let nobody = door.client(None).await;
        let token = crate::rig::log_in(&nobody, "app").await;
        let nobody = nobody.header("token", &token);
        let living = all_kinds(&alice, &door.member).await;
        let (mut others, mut others_call) = watching(&bob, &door.member).await;
        let (mut logged_in, mut logged_in_call) = watching(&nobody, &door.member).await;
        let under_way = alice.begin(RANGE, range("k")).await.expect("sent");
        let read = door.member.called(RANGE).await;

        door.write("ca.crl", &door.authority.revoke(&[666, 7]));
        door.look_again();
        for (path, stream, mut call) in living {
            let outcome = stream.finish().await;
            assert_eq!(outcome.end.told(), STOPPED, "{path}");
            assert!(outcome.messages.is_empty(), "{path} said something more");
            call.canceled().await;
        }
        // Told, or not taken any more, as far as GOAWAY has come.
        if let Ok(late) = alice.begin(RANGE, range("k")).await {
            assert_ne!(late.finish().await.end.code(), Some(Code::Ok));
        }
        let reply = async { read.reply(&ranged(3)).await };
        let (answered, ()) = tokio::join!(under_way.finish(), reply);
        answered.message();
        closes(&alice).await;
        goes_on(&mut others, &mut others_call).await;
        goes_on(&mut logged_in, &mut logged_in_call).await;
        assert!(!bob.is_closed() && !nobody.is_closed());
        assert!(door.member.was_called_again().is_none(), "nothing of it arrives");
    });
}

/// A client may take half a minute to send what it has begun: its certificate counts when that is whole.
#[test]
fn a_request_that_comes_whole_after_its_certificate_was_revoked_is_not_sent() {
    paused(async {
        let door = Door::new("", SAME);
        let alice = door.client(Some(&numbered(&door.authority, "alice", 7))).await;
        let bob = door.client(Some(&numbered(&door.authority, "bob", 8))).await;
        let framed = keyward::rpc::frame::encode(&put(9));
        let mut late = alice.open(PUT).await.expect("open");
        let mut others = bob.open(PUT).await.expect("open");
        for stream in [&mut late, &mut others] {
            stream.send.send_data(framed.slice(..7), false).expect("the stream takes it");
        }
        settled().await;
        door.write("ca.crl", &door.authority.revoke(&[7]));
        door.look_again();
        settled().await;
        for stream in [&mut late, &mut others] {
            stream.send.send_data(framed.slice(7..), true).expect("the stream takes it");
        }
        let script = async { door.member.called(PUT).await.reply(&was_put(3)).await };
        let (outcome, ()) = tokio::join!(others.finish(), script);
        outcome.message();
        assert_eq!(late.finish().await.end.told(), STOPPED);
        assert!(door.member.was_called_again().is_none(), "a write of hers is not sent");
    });
}

#[test]
fn a_call_that_never_ends_does_not_keep_the_connection() {
    paused(async {
        let door = Door::new("", SAME);
        let alice = door.client(Some(&numbered(&door.authority, "alice", 7))).await;
        let under_way = alice.begin(RANGE, range("k")).await.expect("sent");
        let _never_answered = door.member.called(RANGE).await;
        door.write("ca.crl", &door.authority.revoke(&[7]));
        door.look_again();
        closes(&alice).await;
        assert_ne!(under_way.finish().await.end.code(), Some(Code::Ok));
    });
}

#[test]
fn another_authority_ends_whom_it_does_not_vouch_for() {
    paused(async {
        let door = Door::new("", SAME);
        let other = Authority::new();
        let both = [&door.authority, &other].map(|authority| {
            let folder = tempfile::tempdir().expect("a folder");
            authority.write(folder.path(), "ca");
            fs::read_to_string(folder.path().join("ca.crt")).expect("written")
        });
        let alice = door.client(Some(&door.authority.client("alice"))).await;
        let (mut stream, mut call) = watching(&alice, &door.member).await;
        // Two steps, as authorities are changed: the new one beside the old, then alone.
        door.write("ca.crt", &both.concat());
        door.write("ca.crl", &format!("{}{}", door.authority.revoke(&[666]), other.revoke(&[666])));
        door.look_again();
        settled().await;
        goes_on(&mut stream, &mut call).await;
        door.write("ca.crt", &both[1]);
        door.write("ca.crl", &other.revoke(&[666]));
        door.look_again();
        assert_eq!(stream.finish().await.end.told(), STOPPED);
        closes(&alice).await;
    });
}

#[test]
fn where_a_certificate_becomes_required_who_showed_none_ends() {
    paused(async {
        let door = Door::new("", SAME);
        let (alice, nobody) =
            (door.client(Some(&door.authority.client("alice"))).await, door.client(None).await);
        let token = crate::rig::log_in(&nobody, "app").await;
        let (stream, _call) = watching(&nobody.again().header("token", &token), &door.member).await;
        let (mut others, mut others_call) = watching(&alice, &door.member).await;
        door.keyward.publish_tls(door.folder.path(), &TLS.replace("optional", "required"), "");
        assert_eq!(stream.finish().await.end.told(), STOPPED);
        closes(&nobody).await;
        goes_on(&mut others, &mut others_call).await;
    });
}

#[test]
fn what_was_revoked_during_a_handshake_counts() {
    paused(async {
        let door = Door::new("", SAME);
        let shown = numbered(&door.authority, "alice", 7);
        let io = door.keyward.connect();
        // The handshake is made by what there was when it began.
        settled().await;
        door.write("ca.crl", &door.authority.revoke(&[7]));
        door.look_again();
        let io = connect(io, door.authority.tls(Some(&shown))).await.expect("a handshake");
        closes(&Client::over(io, &door.keyward.tasks).await).await;
        let late = connect(door.keyward.connect(), door.authority.tls(Some(&shown))).await;
        let mut late = late.expect("the client's half of a handshake");
        late.read_u8().await.expect_err("an alert");
    });
}

#[test]
fn every_connection_shows_its_certificate_where_certificates_count() {
    paused(async {
        let kinds = async |door: &Door, version: &'static rustls::SupportedProtocolVersion| {
            let config = door.authority.tls_of(Some(&door.authority.client("alice")), version);
            let mut kinds = Vec::new();
            for _ in 0..3 {
                let mut io = connect(door.keyward.connect(), Arc::clone(&config)).await.expect("a handshake");
                kinds.push(io.get_ref().1.handshake_kind());
                // Tickets come behind the handshake, before the first frame.
                io.read_u8().await.expect("a frame");
            }
            kinds
        };
        let full = Some(HandshakeKind::Full);
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            let door = Door::new("", SAME);
            assert_eq!(kinds(&door, version).await, [full, full, full]);
            // What this client can do where none count.
            let none = TLS.replace("optional", "none");
            door.keyward.publish_tls(door.folder.path(), &none, "");
            let resumed = Some(HandshakeKind::Resumed);
            assert_eq!(kinds(&door, version).await, [full, resumed, resumed]);
        }
    });
}
