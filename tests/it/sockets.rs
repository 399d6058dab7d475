//! Over loopback, in real time: accepting, TLS, and the limits that need a socket.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use keyward::config::{Address, Config};
use keyward::downstream::listener::{Intake, Listening, accept};
use keyward::published::Published;
use keyward::refusal::Code;
use keyward::tasks::{Owned, Tasks};
use keyward::upstream::membership::Auth;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, real};
use crate::words::{RANGE, range, ranged, ranged_value};

/// Keyward behind a real listener.
struct Listener {
    address: SocketAddr,
    accepting: Owned,
    serving: Owned,
    tasks: Tasks,
}

fn listen(keyward: &mut Keyward, connections: usize) -> Listener {
    let tasks = Tasks::default();
    let listening = Listening::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).expect("bound");
    let address = listening.local().expect("an address");
    let (intake, sockets) = Intake::new();
    let mut config = Config::clone(&keyward.config.load());
    config.limits.connections = connections;
    let config = Arc::new(Published::new(config));
    let accepting = accept(listening, keyward.opened(), vec![intake], config, Arc::clone(&keyward.metrics));
    let serving = keyward.serving.take().expect("not taken before");
    Listener {
        address,
        accepting: tasks.spawn("acceptor", accepting),
        serving: tasks.spawn("serving", serving.run(sockets)),
        tasks,
    }
}

impl Listener {
    async fn client(&self) -> Client {
        Client::over(self.connect().await, &self.tasks).await
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("connected")
    }
}

async fn is_closed(peer: &mut TcpStream) {
    let mut rest = Vec::new();
    // A reset is an end, too.
    drop(peer.read_to_end(&mut rest).await);
}

async fn answered(client: &Client, member: &Member, reply: &[u8]) {
    let script = async { member.called(RANGE).await.reply(reply).await };
    let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
    assert_eq!(outcome.message()[..], *reply);
}

#[test]
fn calls_cross_real_sockets_small_and_large() {
    real(async {
        let member = Member::new(1, &Tasks::default());
        let mut keyward = Keyward::before(&[&member]);
        let listener = listen(&mut keyward, 10);
        let client = listener.client().await;
        answered(&client, &member, &ranged(1)).await;
        answered(&client, &member, &ranged_value(8 << 20)).await;
        answered(&client, &member, &ranged(2)).await;
    });
}

#[test]
fn a_connection_over_the_limit_is_closed_and_one_that_ends_makes_room() {
    real(async {
        let member = Member::new(1, &Tasks::default());
        let mut keyward = Keyward::before(&[&member]);
        let listener = listen(&mut keyward, 1);
        let client = listener.client().await;
        answered(&client, &member, &ranged(1)).await;
        is_closed(&mut listener.connect().await).await;
        assert_eq!(keyward.metrics.connections_refused.get(), 1);
        answered(&client, &member, &ranged(2)).await;
        drop(client);
        while keyward.metrics.connections.get() > 0 {
            tokio::task::yield_now().await;
        }
        answered(&listener.client().await, &member, &ranged(3)).await;
    });
}

#[test]
fn a_silent_peer_and_half_a_preface_are_closed() {
    real(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[limits]\nhandshake_timeout = \"100ms\"\n";
        let mut keyward = Keyward::configured(&[&member], Auth::Off, lines);
        let listener = listen(&mut keyward, 10);
        let mut silent = listener.connect().await;
        let mut half = listener.connect().await;
        half.write_all(b"PRI * HTTP/2").await.expect("sent");
        is_closed(&mut silent).await;
        is_closed(&mut half).await;
        assert_eq!(keyward.metrics.handshakes_failed.get(), 2);
    });
}

#[test]
fn a_drain_refuses_new_connections_finishes_open_calls_and_ends() {
    real(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let mut keyward = Keyward::before(&[&member]);
        let listener = listen(&mut keyward, 10);
        let client = listener.client().await;
        let open = client.begin(RANGE, range("k")).await.expect("sent");
        let call = member.called(RANGE).await;
        // As the binary does: no more accepting, then the drain.
        drop(listener.accepting);
        while TcpStream::connect(listener.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        keyward.drain(Duration::from_secs(30));
        call.reply(&ranged(1)).await;
        assert_eq!(open.finish().await.end.code(), Some(Code::Ok));
        while !client.is_closed() || !listener.serving.is_finished() {
            tokio::task::yield_now().await;
        }
    });
}
