//! Many streams cancelled at once end nothing but themselves (rules 39), towards clients and towards members.

use std::cell::Cell;
use std::rc::Rc;

use bytes::BytesMut;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::Notify;

use crate::client::{Client, Stream};
use crate::member::Member;
use crate::rig::{Keyward, one_member, paused, settled};
use crate::words::{RANGE, range, ranged};

/// Cancels `count` calls at once while one goes on.
async fn burst(count: usize) {
    let (member, keyward) = one_member();
    let client = keyward.client().await;
    let survivor = client.begin(RANGE, range("survivor")).await.expect("sent");
    let mut streams = Vec::new();
    for _ in 0..count {
        streams.push(client.begin(RANGE, range("k")).await.expect("sent"));
    }
    let mut calls = Vec::new();
    for _ in 0..=count {
        calls.push(member.call().await);
    }
    let dialled = member.dials();
    streams.into_iter().for_each(|stream| stream.cancel());
    let at = calls.iter().position(|call| call.path() == RANGE).expect("calls came");
    let survived = calls.remove(at);
    for call in &mut calls {
        call.canceled().await;
    }
    settled().await;
    assert!(!client.is_closed(), "the client's connection lives");
    let script = async { survived.reply(&ranged(1)).await };
    let (outcome, ()) = tokio::join!(survivor.finish(), script);
    assert_eq!(outcome.end.code(), Some(Code::Ok));
    let script = async { member.called(RANGE).await.reply(&ranged(2)).await };
    let (outcome, ()) = tokio::join!(client.call(RANGE, range("after")), script);
    assert_eq!(outcome.end.code(), Some(Code::Ok));
    assert_eq!(member.dials(), dialled, "the connections to the member live");
    assert_eq!(keyward.metrics.calls_with(Code::Canceled as u8), count as u64);
}

#[test]
fn sixty_cancelled_streams_end_only_themselves() {
    paused(burst(60));
}

#[test]
fn a_thousand_cancelled_streams_end_only_themselves() {
    paused(burst(1000));
}

/// What a client says is held back while the gate is closed, and then comes all at once.
#[derive(Default)]
struct Gate {
    closed: Cell<bool>,
    moved: Notify,
}

impl Gate {
    fn set(&self, closed: bool) {
        self.closed.set(closed);
        self.moved.notify_one();
    }

    /// A connection to Keyward through the gate.
    fn connect(self: &Rc<Self>, keyward: &Keyward) -> DuplexStream {
        let (ours, far) = tokio::io::duplex(4 << 20);
        let (mut from_client, mut to_client) = tokio::io::split(far);
        let (mut from_keyward, mut to_keyward) = tokio::io::split(keyward.connect());
        let down = async move { drop(tokio::io::copy(&mut from_keyward, &mut to_client).await) };
        keyward.tasks.spawn("down", down).detach();
        let gate = Rc::clone(self);
        let up = async move {
            let mut held = BytesMut::new();
            loop {
                tokio::select! {
                    read = from_client.read_buf(&mut held) => if read.unwrap_or_default() == 0 { return },
                    () = gate.moved.notified() => {}
                }
                if !gate.closed.get() && to_keyward.write_all_buf(&mut held).await.is_err() {
                    return;
                }
            }
        };
        keyward.tasks.spawn("up", up).detach();
        ours
    }
}

/// Streams and their resets arrive together: hyper's default of 20 such streams would end the connection.
#[test]
fn streams_that_arrive_with_their_cancellation_end_only_themselves() {
    paused(async {
        for count in [60, 1000] {
            let (member, keyward) = one_member();
            let gate = Rc::new(Gate::default());
            let client = Client::over(gate.connect(&keyward), &keyward.tasks).await;
            let survivor = client.begin(RANGE, range("survivor")).await.expect("sent");
            let survived = member.called(RANGE).await;
            gate.set(true);
            let mut streams = Vec::new();
            for _ in 0..count {
                streams.push(client.open(RANGE).await.expect("open"));
            }
            settled().await;
            streams.into_iter().for_each(Stream::cancel);
            settled().await;
            gate.set(false);
            settled().await;
            assert!(!client.is_closed(), "{count} streams");
            survived.reply(&ranged(1)).await;
            let outcome = survivor.finish().await;
            assert_eq!(outcome.end.code(), Some(Code::Ok));
            let script = async { member.called(RANGE).await.reply(&ranged(2)).await };
            let (outcome, ()) = tokio::join!(client.call(RANGE, range("after")), script);
            assert_eq!(outcome.end.code(), Some(Code::Ok));
        }
    });
}

/// A burst of calls is spread over as many connections as the member's limit on streams asks for (rules 22, 41).
#[test]
fn a_burst_of_calls_does_not_pile_up_on_one_connection() {
    paused(async {
        let mut settings = h2::server::Builder::new();
        settings.max_concurrent_streams(100).initial_connection_window_size(64 << 20);
        let member = Member::with(1, &Tasks::default(), settings);
        let keyward = Keyward::before(&[&member]);
        let client = keyward.client().await;
        let mut streams = Vec::new();
        for _ in 0..300 {
            streams.push(client.begin(RANGE, range("k")).await.expect("sent"));
        }
        let mut calls = Vec::new();
        for _ in 0..300 {
            calls.push(member.call().await);
        }
        assert!(member.dials() >= 3, "{} connections", member.dials());
        assert!(member.dials() <= 6, "{} connections", member.dials());
        assert!(calls.iter().all(|call| call.path() == RANGE));
    });
}
