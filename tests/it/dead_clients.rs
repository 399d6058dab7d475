//! A client that is gone loses what it has open within `client_ping_interval` and `client_ping_timeout`; one that answers pings, or reads
//! however slowly, loses nothing. A connection on which no call was let in is told to go.

use std::cell::Cell;
use std::future::Future as _;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use keyward::telemetry::connection_metrics::EndReason;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use crate::client::Client;
use crate::member::Member;
use crate::revocations::watching;
use crate::rig::{Keyward, log_in, paused};
use crate::words::{RANGE, event, range, ranged, ranged_value, watched};

const LINES: &str =
    "[limits]\nconnection_age = \"0s\"\nunread_timeout = \"24h\"\n[watch]\nidle_progress = \"0s\"\n";
/// Both times, by default.
const GONE_AFTER: Duration = Duration::from_secs(45);
const HEALTH: &str = "/grpc.health.v1.Health/Watch";

/// How a client reads its socket.
#[derive(Clone, Copy)]
enum Reads {
    AtOnce,
    /// At most so many bytes in a tenth of a second.
    Slowly(usize),
    /// Nothing, as a process that was stopped.
    Nothing,
}

/// A socket whose reader can be slowed down.
struct Socket {
    stream: DuplexStream,
    reads: Rc<Cell<Reads>>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if let Some(pause) = &mut self.pause {
            std::task::ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        let bytes = match self.reads.get() {
            Reads::AtOnce => return Pin::new(&mut self.stream).poll_read(cx, buf),
            Reads::Slowly(bytes) => bytes,
            Reads::Nothing => return Poll::Pending,
        };
        let mut some = vec![0; bytes.min(buf.remaining())];
        let mut some = ReadBuf::new(&mut some);
        std::task::ready!(Pin::new(&mut self.stream).poll_read(cx, &mut some))?;
        buf.put_slice(some.filled());
        self.pause = Some(Box::pin(sleep(Duration::from_millis(100))));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

fn site() -> (Rc<Member>, Keyward) {
    let member = Rc::new(Member::new(1, &Tasks::default()));
    let keyward = Keyward::configured(&[&member], AuthSetting::Off, LINES);
    (member, keyward)
}

/// A client with room for everything, and what slows it down.
async fn client(keyward: &Keyward) -> (Client, Rc<Cell<Reads>>) {
    let reads = Rc::new(Cell::new(Reads::AtOnce));
    let socket = Socket { stream: keyward.connect(), reads: Rc::clone(&reads), pause: None };
    (Client::over(socket, &keyward.tasks).await, reads)
}

fn gone(keyward: &Keyward) -> u64 {
    keyward.metrics.connection_figures.ended(EndReason::NoAnswer).get()
}

async fn answered(client: &Client, member: &Member) {
    let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
    tokio::join!(client.call(RANGE, range("k")), script).0.message();
}

/// Waits until no stream is open, and says how long that took.
async fn streams_ended(keyward: &Keyward, since: Instant) -> Duration {
    while keyward.metrics.streams_open.get() > 0 {
        sleep(Duration::from_millis(100)).await;
    }
    since.elapsed()
}

#[test]
fn a_client_that_answers_no_ping_loses_its_watches_in_time_and_nobody_else_does() {
    paused(async {
        let (member, keyward) = site();
        let (hanging, reads) = client(&keyward).await;
        let (_stream, mut call) = watching(&hanging, &member).await;
        let idle = keyward.client().await;
        answered(&idle, &member).await;
        let before = Instant::now();
        reads.set(Reads::Nothing);
        let took = streams_ended(&keyward, before).await;
        assert!((GONE_AFTER..GONE_AFTER + Duration::from_secs(1)).contains(&took), "{took:?}");
        assert_eq!(gone(&keyward), 1);
        // The member is told so, too.
        let ended = async { while call.messages.next().await.is_ok() {} };
        ended.await;
        // Pings are answered by whoever lives, also where no stream is open, for as long as it likes.
        sleep(Duration::from_secs(3000)).await;
        assert!(!idle.is_closed());
        answered(&idle, &member).await;
        assert_eq!(gone(&keyward), 1);
    });
}

/// Its windows are full and its answers stand, but the connection is read: it answers.
#[test]
fn a_client_that_takes_nothing_of_its_answers_and_answers_pings_keeps_them() {
    paused(async {
        let (member, keyward) = site();
        let builder = h2::client::Builder::new();
        let client = Client::with(keyward.connect(), &keyward.tasks, &builder).await;
        let (mut stream, mut call) = watching(&client, &member).await;
        let unread = client.begin(RANGE, range("large")).await.expect("sent");
        let large = ranged_value(1_400_000);
        let script = async {
            member.called(RANGE).await.reply(&large).await;
            call.say(&event(1, 10, 1)).await.expect("taken");
            sleep(Duration::from_secs(1800)).await;
        };
        script.await;
        assert_eq!(gone(&keyward), 0);
        assert_eq!(unread.finish().await.message()[..], large[..]);
        assert_eq!(watched(&stream.next().await.expect("an event")).events.len(), 1);
    });
}

/// The answer to a PING is behind hundreds of kilobytes that are on their way, for minutes. (What the kernel holds must pass in time: 256 KiB here.)
#[test]
fn a_client_with_a_slow_line_gets_everything_however_long_that_takes() {
    paused(async {
        let (member, keyward) = site();
        let (slow, reads) = client(&keyward).await;
        answered(&slow, &member).await;
        reads.set(Reads::Slowly(1024));
        let began = Instant::now();
        let large = ranged_value(1_400_000);
        let script = async { member.called(RANGE).await.reply(&large).await };
        let (outcome, ()) = tokio::join!(slow.call(RANGE, range("large")), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok), "{:?}", outcome.end);
        assert_eq!(outcome.message()[..], large[..]);
        assert!(began.elapsed() > 3 * GONE_AFTER, "{:?}", began.elapsed());
        assert_eq!(gone(&keyward), 0);
    });
}

#[test]
fn a_client_that_stops_in_the_middle_of_an_answer_is_given_up_with_it() {
    paused(async {
        let (member, keyward) = site();
        let (hanging, reads) = client(&keyward).await;
        answered(&hanging, &member).await;
        let unread = hanging.begin(RANGE, range("large")).await.expect("sent");
        let call = member.called(RANGE).await;
        reads.set(Reads::Nothing);
        let before = Instant::now();
        call.reply(&ranged_value(1_400_000)).await;
        assert!(keyward.metrics.unread.bytes.get() > 0);
        while keyward.metrics.unread.bytes.get() > 0 {
            sleep(Duration::from_millis(100)).await;
        }
        let took = before.elapsed();
        assert!((GONE_AFTER..GONE_AFTER + Duration::from_secs(1)).contains(&took), "{took:?}");
        assert_eq!(gone(&keyward), 1);
        drop(unread);
    });
}

#[test]
fn where_pings_are_off_a_silent_client_stays() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let lines = LINES.replace("[limits]", "[limits]\nclient_ping_interval = \"0s\"");
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, &lines);
        let (hanging, reads) = client(&keyward).await;
        let (mut stream, mut call) = watching(&hanging, &member).await;
        reads.set(Reads::Nothing);
        sleep(Duration::from_secs(1800)).await;
        reads.set(Reads::Slowly(1 << 20));
        call.say(&event(1, 10, 1)).await.expect("taken");
        // A call makes it read again.
        answered(&hanging, &member).await;
        assert_eq!(watched(&stream.next().await.expect("an event")).events.len(), 1);
        assert_eq!(gone(&keyward), 0);
    });
}

/// Whoever called is let be; whoever did not is told to go, unless its health checks go on.
#[test]
fn a_connection_without_a_call_is_told_to_go_after_ten_minutes() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::configured(&[&member], AuthSetting::On, LINES);
        let began = Instant::now();
        let never_called = keyward.client().await;
        let refused = keyward.client().await;
        let checking = keyward.client().await;
        let mut health = checking.begin(HEALTH, b"").await.expect("sent");
        health.next().await.expect("a status");
        let calling = keyward.client().await;
        let calling = {
            let token = log_in(&calling, "alice").await;
            calling.header("token", &token)
        };
        answered(&calling, &member).await;
        sleep(Duration::from_secs(300)).await;
        // Nobody is known to have made it.
        let script = async {
            loop {
                member.called(RANGE).await.refuse(Code::InvalidArgument, "etcdserver: user name is empty");
            }
        };
        tokio::select! {
            outcome = refused.call(RANGE, range("k")) => {
                assert_eq!(outcome.end.code(), Some(Code::InvalidArgument), "{:?}", outcome.end);
            }
            () = script => {}
        }
        while !(never_called.is_closed() && refused.is_closed()) {
            sleep(Duration::from_millis(100)).await;
        }
        let took = began.elapsed().as_secs();
        assert_eq!(took, 600);
        assert_eq!(keyward.metrics.connection_figures.ended(EndReason::NoCall).get(), 2);
        sleep(Duration::from_secs(1800)).await;
        assert!(!calling.is_closed() && !checking.is_closed());
        answered(&calling, &member).await;
        health.cancel();
        while !checking.is_closed() {
            sleep(Duration::from_secs(1)).await;
        }
        assert!(!calling.is_closed());
    });
}
