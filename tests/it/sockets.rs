//! Over loopback, in real time: accepting, TLS, and the limits that need a socket.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use keyward::config::{Address, Config};
use keyward::downstream::acceptor::{Acceptor, AcceptorEnd, BoundListener, ShardIntake};
use keyward::downstream::connection_table::ConnectionTable;
use keyward::members::membership::AuthSetting;
use keyward::published::Published;
use keyward::refusal::Code;
use keyward::tasks::{TaskHandle, Tasks};
use keyward::telemetry::connection_metrics::ConnectionLimit;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, real};
use crate::words::{RANGE, range, ranged, ranged_value};

/// Keyward behind a real listener.
struct Listener {
    address: SocketAddr,
    end: oneshot::Sender<AcceptorEnd>,
    _accepting: TaskHandle,
    serving: TaskHandle,
    tasks: Tasks,
}

fn listen(keyward: &mut Keyward, connections: usize) -> Listener {
    let tasks = Tasks::default();
    let listening = BoundListener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).expect("bound");
    let address = listening.local().expect("an address");
    let (intake, sockets) = ShardIntake::new();
    let mut config = Config::clone(&keyward.config.load());
    config.limits.connections = connections;
    config.limits.client_connections.per_address = connections;
    let config = Arc::new(Published::new(config));
    let table = ConnectionTable::new(Arc::clone(&config), keyward.metrics.connection_figures.clone());
    let metrics = Arc::clone(&keyward.metrics);
    let acceptor = Acceptor { listener: keyward.opened(), intakes: vec![intake], table, config, metrics };
    let (end, ended) = oneshot::channel();
    let serving = keyward.serving.take().expect("not taken before");
    Listener {
        address,
        end,
        _accepting: tasks.spawn("acceptor", acceptor.run(listening, ended)),
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
fn a_connection_over_the_limit_is_closed_while_all_others_are_in_use_and_one_that_ends_makes_room() {
    real(async {
        let member = Member::new(1, &Tasks::default());
        let mut keyward = Keyward::before(&[&member]);
        let listener = listen(&mut keyward, 1);
        let client = listener.client().await;
        answered(&client, &member, &ranged(1)).await;
        let open = client.begin(RANGE, range("k")).await.expect("sent");
        let call = member.called(RANGE).await;
        is_closed(&mut listener.connect().await).await;
        assert_eq!(refused(&keyward), 1);
        call.reply(&ranged(2)).await;
        open.finish().await.message();
        drop(client);
        while keyward.metrics.connections.get() > 0 {
            tokio::task::yield_now().await;
        }
        answered(&listener.client().await, &member, &ranged(3)).await;
    });
}

/// The connections that made room, and then those that were refused, at the limit of an address: all are of one.
fn made_room(keyward: &Keyward) -> u64 {
    keyward.metrics.connection_figures.made_room(ConnectionLimit::Address).get()
}

fn refused(keyward: &Keyward) -> u64 {
    keyward.metrics.connection_figures.refused(ConnectionLimit::Address).get()
}

/// Silence before, in and after the preface, and a client that is idle: each makes room in its turn, and is told so if it can be told.
#[test]
fn at_the_limit_the_oldest_that_never_called_makes_room_and_then_the_one_that_is_idle() {
    real(async {
        let member = Member::new(1, &Tasks::default());
        let mut keyward = Keyward::before(&[&member]);
        let listener = listen(&mut keyward, 4);
        let idle = listener.client().await;
        answered(&idle, &member, &ranged(1)).await;
        let mut silent = listener.connect().await;
        let mut half = listener.connect().await;
        half.write_all(b"PRI * HTTP/2").await.expect("sent");
        let never_called = listener.client().await;
        // Each is known before the next comes.
        while keyward.metrics.connections.get() < 4 {
            tokio::task::yield_now().await;
        }
        let mut newcomers = Vec::new();
        for (made, gone) in [(1, "silent"), (2, "half a preface"), (3, "never called"), (4, "idle")] {
            let newcomer = listener.client().await;
            answered(&newcomer, &member, &ranged(2)).await;
            let open = newcomer.begin(RANGE, range("k")).await.expect("sent");
            newcomers.push((member.called(RANGE).await, open, newcomer));
            match gone {
                "silent" => is_closed(&mut silent).await,
                "half a preface" => is_closed(&mut half).await,
                "never called" => {
                    while !never_called.is_closed() {
                        tokio::task::yield_now().await
                    }
                }
                _ => {
                    while !idle.is_closed() {
                        tokio::task::yield_now().await
                    }
                }
            }
            assert_eq!(made_room(&keyward), made, "{gone}");
        }
        is_closed(&mut listener.connect().await).await;
        assert_eq!((made_room(&keyward), refused(&keyward)), (4, 1), "all are in use");
        for (call, open, _client) in newcomers {
            call.reply(&ranged(3)).await;
            open.finish().await.message();
        }
    });
}

#[test]
fn a_silent_peer_and_half_a_preface_are_closed() {
    real(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[limits]\nhandshake_timeout = \"100ms\"\n";
        let mut keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
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
        listener.end.send(AcceptorEnd::Closes).expect("it accepts");
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
