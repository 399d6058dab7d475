//! An HTTP/2 connection to a member, with its calls in flight.
//!
//! Owns: the handshake, the pings, handing requests to h2, and the order of a connection's end. Must not
//! know: the meaning of a call, credentials, further connections.
//! Invariants (`docs/decisions.md#d37`, `docs/decisions.md#d39`, `docs/decisions.md#d41`,
//! `docs/decisions.md#d45`): unread answers and streams can use up neither the connection's window nor h2's
//! budget for small frames. Pings are sent only while streams are open, and not more often than etcd allows.
//! "Never sent" is told apart from "lost" by a connection's own word before the request is handed over, never
//! by a guess. Unless given up, a connection is closed only while no call is in flight, and no call begins
//! after the close. A connection's tasks stay on the opening thread; calls come from any thread.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{Ping, PingPong, Reason};
use http::uri::{self, PathAndQuery, Uri};
use http::{Request, Response};
use tokio::sync::futures::OwnedNotified;
use tokio::time::{Instant, timeout};

use crate::connection_load::{
    CONNECTION_WINDOW, ConnectionLoad, KIB, SeatGuard, UNTOLD_STREAMS, stream_window,
};
use crate::upstream_request::{QueuedBytes, UpstreamRequestBody, send_body};
use keyward_base::io::ByteStream;
use keyward_base::io::coalesce::coalesce;
use keyward_base::io::http2_body::Http2Body;
use keyward_base::io::kill_switch::{KillSwitch, cuttable};
use keyward_base::tasks::Tasks;
use keyward_base::tasks::wake_gate::WakeGate;
use keyward_base::wall_deadline::WallDeadline;
use keyward_cluster::fitness::quarantine::BusyGuard;
use keyward_cluster::fitness::stream_counts::CountedStream;
use keyward_config::{Endpoint, Scheme};
use keyward_dial::member_tls::certificate_alert;
use keyward_etcd::rpc::method::Lane;

/// etcd refuses pings less than 5 s apart; 10 s keeps a wide margin.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of the checks for a member's silence: a ping is sent at most this much later than `PING_INTERVAL`
/// after the last byte.
const PING_CHECK: Duration = Duration::from_secs(2);
/// Least value told by h2 for SETTINGS without a stream limit.
const NO_LIMIT: usize = u32::MAX as usize;
/// Assumed stream limit before the member's first SETTINGS frame.
const FIRST_STREAMS: usize = 100;

/// Why a request got no answer.
pub enum SendError {
    /// No byte reached the member: the request comes back and may go to another member, whatever its method.
    NeverSent(Box<(Request<()>, UpstreamRequestBody)>),
    /// The member reset the stream with REFUSED_STREAM, or sent a GOAWAY with a lower last stream id: the
    /// member did not process the request (RFC 9113, section 8.7). The request is gone.
    Refused,
    /// The request was, or may have been, sent; the outcome is unknown.
    Lost(h2::Error),
}

/// An open connection. Its tasks run on a single shard.
pub struct Connection {
    origin: MemberOrigin,
    send: SendRequest<QueuedBytes>,
    load: Arc<ConnectionLoad>,
    scissors: KillSwitch,
    /// The end after which no call begins on the connection.
    fresh_until: Option<WallDeadline>,
}

/// Limits on a connection's lifetime.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLifetime {
    /// Time without a call after which the connection is closed.
    pub idle: Duration,
    /// The end after which no call begins on the connection.
    pub fresh_until: Option<WallDeadline>,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// Ended by the member or the network.
    Lost,
    /// Closed by Keyward: idle or retired, without a call.
    Unused,
    /// Cut by Keyward to fail its calls and streams at once. No evidence against the member or its address.
    GivenUp,
}

/// The `:scheme` and `:authority` of requests to a member.
#[derive(Clone, Debug)]
pub struct MemberOrigin {
    /// `http` or `https`.
    pub scheme: uri::Scheme,
    /// Host and port.
    pub authority: uri::Authority,
}

impl MemberOrigin {
    /// Returns the origin of the member at `endpoint`.
    ///
    /// # Errors
    /// Host and port form no valid authority.
    pub fn of(endpoint: &Endpoint) -> Result<Self, uri::InvalidUri> {
        let scheme = match endpoint.scheme {
            Scheme::Http => uri::Scheme::HTTP,
            Scheme::Https => uri::Scheme::HTTPS,
        };
        Ok(Self { scheme, authority: endpoint.authority().parse()? })
    }
}

/// Counts a call on its connection, and among the shard's calls to the member, until dropped. Hold the guard
/// until the reply's body has ended.
pub struct InFlight {
    seat: Arc<SeatGuard>,
    member: Rc<Cell<usize>>,
    busy: Option<BusyGuard>,
    carried: Option<CountedStream>,
}

impl InFlight {
    /// Adds the member's count of calls that end by themselves to the guard.
    #[must_use]
    pub fn with_busy_count(self, busy: BusyGuard) -> Self {
        let mut counted = self;
        counted.busy = Some(busy);
        counted
    }

    /// Adds the member's count of streams to the guard.
    #[must_use]
    pub fn with_stream_count(self, carried: CountedStream) -> Self {
        let mut counted = self;
        counted.carried = Some(carried);
        counted
    }

    /// True if Keyward gave the connection up. Its end is then no evidence against the member.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.seat.0.given_up.load(Ordering::SeqCst)
    }

    /// The order for streams able to resume on another member to leave.
    #[must_use]
    pub fn leave_order(&self) -> LeaveOrder {
        let load = Arc::clone(&self.seat.0);
        let told = Box::pin(Arc::clone(&load.ended).notified_owned());
        LeaveOrder { load, told, task: None }
    }
}

/// A wait for the order to leave a connection, kept as long as the stream: a wait made anew at each wakeup
/// would be registered anew.
pub struct LeaveOrder {
    load: Arc<ConnectionLoad>,
    told: Pin<Box<OwnedNotified>>,
    /// The task that waits in `told`.
    task: Option<Waker>,
}

impl LeaveOrder {
    /// Ready once the order was given. Cancel-safe.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // `told` receives wakeups from its creation on, so no order is missed before the first check.
        while !self.load.leave_ordered.load(Ordering::SeqCst) {
            // `told` takes a lock shared by all streams of the connection: polled again only for another
            // task, or after a wakeup without the order, by the connection's end.
            let is_waiting = self.task.as_ref().is_some_and(|task| task.will_wake(cx.waker()));
            if is_waiting && !self.load.is_closing() {
                return Poll::Pending;
            }
            self.task = Some(cx.waker().clone());
            ready!(self.told.as_mut().poll(cx));
            self.told.set(Arc::clone(&self.load.ended).notified_owned());
            self.task = None;
        }
        Poll::Ready(())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.member.set(self.member.get().saturating_sub(1));
    }
}

impl Connection {
    /// Performs the HTTP/2 handshake on `stream` and starts the connection's tasks on `tasks`. `ended` runs
    /// when the connection has ended, for any reason; `keep` is dropped when the socket is closed.
    ///
    /// # Errors
    /// The handshake failed; no request was sent.
    pub async fn open(
        stream: ByteStream,
        origin: MemberOrigin,
        lane: Lane,
        tasks: &Tasks,
        keeping: ConnectionLifetime,
        keep: impl Unpin + 'static,
        ended: impl FnOnce(ConnectionEnd) + 'static,
    ) -> Result<Self, h2::Error> {
        let (stream, scissors) = cuttable(stream, keep);
        let (io, flusher) = coalesce(stream);
        tasks.spawn("upstream flusher", flusher).detach();
        let (send, mut connection) = settings(lane).handshake(io.into_inner()).await?;
        let load = Arc::new(ConnectionLoad::new(lane));
        let (seen, heard, mut probe) = (Arc::clone(&load), scissors.clone(), send.clone());
        let drive = async move {
            let mut pings = connection.ping_pong();
            let how = {
                // The member's GOAWAY ends the connection for further calls; calls in flight go on.
                let driven = poll_fn(|cx| {
                    let polled = Pin::new(&mut connection).poll(cx);
                    seen.limit.store(stream_limit(probe.current_max_send_streams()), Ordering::Relaxed);
                    if polled.is_pending()
                        && let Poll::Ready(Err(error)) = probe.poll_ready(cx)
                    {
                        return Poll::Ready(Err(error));
                    }
                    polled
                });
                let mut rare = pin!(async {
                    tokio::select! {
                        biased; // either order is correct; a fixed order makes runs repeatable
                        () = seen.close_when_unused(keeping.idle) => ConnectionEnd::Unused,
                        () = ping_lost(&mut pings, &seen, &heard) => {
                            tracing::debug!("the member answers no ping");
                            heard.cut();
                            ConnectionEnd::Lost
                        }
                    }
                });
                // Nearly all wakeups are for the protocol; the rest is behind a gate.
                let mut gate = WakeGate::default();
                tokio::select! {
                    biased; // the member's end of the connection is reported before an idle close
                    driven = driven => {
                        if let Err(error) = driven {
                            tracing::debug!(%error, "upstream connection ended");
                        }
                        let given_up = seen.given_up.load(Ordering::SeqCst);
                        if given_up { ConnectionEnd::GivenUp } else { ConnectionEnd::Lost }
                    }
                    how = poll_fn(|cx| gate.poll(cx, |cx| rare.as_mut().poll(cx))) => how,
                }
            };
            // Remaining holders of the connection must see it closed.
            seen.end();
            ended(how);
            drop(probe);
            // Ends after the last stream, with a GOAWAY; or earlier, if the member falls silent.
            tokio::select! {
                biased; // the member's end of the connection comes first
                closed = &mut connection => if let Err(error) = closed {
                    tracing::trace!(%error, "upstream connection closed");
                },
                () = ping_lost(&mut pings, &seen, &heard) => {
                    heard.cut();
                    drop(connection.await);
                }
            }
        };
        tasks.spawn("upstream connection", drive).detach();
        Ok(Self { origin, send, load, scissors, fresh_until: keeping.fresh_until })
    }

    /// Waits until the member has sent its first byte (true) or the connection has ended (false). Over TLS a
    /// member may refuse Keyward's certificate after the handshake seemed complete. Cancel-safe.
    pub async fn answered(&self) -> bool {
        tokio::select! {
            biased; // a received byte counts even if the connection has ended since
            () = self.scissors.first_byte() => true,
            () = self.load.ended() => false,
        }
    }

    /// The alert by which the member refused the certificate shown, if the connection ended so.
    #[must_use]
    pub fn certificate_alert(&self) -> Option<Arc<str>> {
        self.scissors.read_failure().and_then(certificate_alert)
    }

    /// Admits no further call, and closes the connection after its last call.
    pub fn retire(&self) {
        self.load.retired.store(true, Ordering::SeqCst);
        self.load.close_wakeup.notify_one();
    }

    /// Returns the end of the latest call, or the opening if no call has ended yet; `None` while a call is in
    /// flight.
    #[must_use]
    pub fn quiet_since(&self) -> Option<Instant> {
        self.load.is_quiet().then(|| self.load.quiet_since())
    }

    /// Closes the connection if no call is in flight. Returns true if closed.
    pub fn close_if_quiet(&self) -> bool {
        let closed = self.load.close();
        if closed {
            self.load.close_wakeup.notify_one();
        }
        closed
    }

    /// Tells every stream able to resume on another member to leave, and closes the connection after its last
    /// call.
    pub fn leave(&self) {
        self.load.leave_ordered.store(true, Ordering::SeqCst);
        self.load.ended.notify_waiters();
        self.retire();
    }

    /// Cuts the connection at once and loses its calls; see [`ConnectionEnd::GivenUp`].
    pub fn give_up(&self) {
        self.load.given_up.store(true, Ordering::SeqCst);
        self.scissors.cut();
    }

    /// Returns the request target for `path` on the connection.
    #[must_use]
    pub fn uri(&self, path: PathAndQuery) -> Uri {
        let mut parts = uri::Parts::default();
        parts.scheme = Some(self.origin.scheme.clone());
        parts.authority = Some(self.origin.authority.clone());
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).expect("scheme, authority and path are all there")
    }

    /// True if the connection has ended or is closing.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.load.is_closing()
    }

    /// Takes a seat for a call, counted in `member` too. Returns `None` past 80 % of the member's stream
    /// limit, after `fresh_until`, and on a retired or closing connection.
    #[must_use]
    pub fn enter(&self, member: &Rc<Cell<usize>>) -> Option<InFlight> {
        let stale = self.fresh_until.is_some_and(|until| until.is_over());
        if stale {
            self.retire();
        }
        if stale || self.load.retired.load(Ordering::SeqCst) || !self.load.enter() {
            return None;
        }
        member.set(member.get() + 1);
        let (seat, member) = (Arc::new(SeatGuard(Arc::clone(&self.load))), Rc::clone(member));
        Some(InFlight { seat, member, busy: None, carried: None })
    }

    /// Sends a request at once; the future waits for the reply's headers. Dropping the future, or the reply's
    /// body, resets the stream.
    ///
    /// # Errors
    /// [`SendError`]; only `NeverSent` proves that the member saw no part of the request.
    pub fn send(
        &self,
        head: Request<()>,
        body: UpstreamRequestBody,
        in_flight: InFlight,
    ) -> Result<impl Future<Output = Result<(Response<Http2Body>, InFlight), SendError>> + use<>, SendError>
    {
        let sent = self.hand_over(head, body, &in_flight)?;
        Ok(async move {
            match sent.await {
                Ok(response) => Ok((response.map(Http2Body::new), in_flight)),
                Err(error) if is_refused(&error) => Err(SendError::Refused),
                Err(error) => Err(SendError::Lost(error)),
            }
        })
    }

    /// Gives the request to h2, which sends the request at once.
    fn hand_over(
        &self,
        head: Request<()>,
        body: UpstreamRequestBody,
        in_flight: &InFlight,
    ) -> Result<ResponseFuture, SendError> {
        let mut send = self.send.clone();
        // A new clone waits for no earlier request, so this poll is never pending.
        if let Poll::Ready(Err(_)) = send.poll_ready(&mut Context::from_waker(Waker::noop())) {
            return Err(SendError::NeverSent(Box::new((head, body))));
        }
        let (response, stream) = send.send_request(head, false).map_err(|error| {
            tracing::debug!(%error, "the connection ended as a request was handed over");
            SendError::Refused
        })?;
        send_body(body, stream, Arc::clone(&in_flight.seat));
        Ok(response)
    }
}

fn is_refused(error: &h2::Error) -> bool {
    let reset = error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM);
    // h2 fails a stream with the member's GOAWAY only if the GOAWAY names a lower last stream id.
    error.is_remote() && (reset || error.is_go_away())
}

/// The member's limit on concurrent streams, of which a member may tell none.
fn stream_limit(told: usize) -> usize {
    if told >= NO_LIMIT { UNTOLD_STREAMS } else { told }
}

/// Sends pings while calls are in flight and the member is silent; returns once a ping gets no answer.
async fn ping_lost(pings: &mut Option<PingPong>, load: &ConnectionLoad, heard: &KillSwitch) {
    let Some(pings) = pings else { return std::future::pending().await };
    let (mut received, mut silent) = (heard.received(), Duration::ZERO);
    loop {
        tokio::time::sleep(PING_CHECK).await;
        let now = heard.received();
        let is_silent = now == received && !load.is_quiet();
        silent = if is_silent { silent + PING_CHECK } else { Duration::ZERO };
        received = now;
        if silent >= PING_INTERVAL {
            silent = Duration::ZERO;
            match timeout(PING_TIMEOUT, pings.ping(Ping::opaque())).await {
                Ok(Ok(_)) => {}
                // The connection's own future reports its end.
                Ok(Err(_)) => std::future::pending().await,
                Err(_) => return,
            }
        }
    }
}

fn settings(lane: Lane) -> Builder {
    let mut builder = Builder::new();
    builder
        .enable_push(false)
        .initial_window_size(stream_window(lane))
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_max_send_streams(FIRST_STREAMS)
        .max_header_list_size(64 * KIB)
        .max_concurrent_reset_streams(4096);
    builder
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::runtime::{Builder, LocalOptions};
    use tokio::sync::oneshot;

    use super::*;
    use keyward_config::{Endpoint, Scheme};

    const PREFACE: usize = 24;
    const HEADERS: u8 = 1;

    /// A scripted member: reads a request, then sends GOAWAY with `last` as the last stream id.
    async fn says_goodbye(mut socket: DuplexStream, last: u32) -> DuplexStream {
        let mut preface = [0; PREFACE];
        socket.read_exact(&mut preface).await.expect("a client");
        socket.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.expect("settings are sent");
        loop {
            let mut head = [0; 9];
            socket.read_exact(&mut head).await.expect("a frame");
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut rest = vec![0; usize::try_from(length).expect("small")];
            socket.read_exact(&mut rest).await.expect("a frame");
            if head[3] == HEADERS {
                break;
            }
        }
        let mut goodbye = vec![0, 0, 8, 7, 0, 0, 0, 0, 0];
        goodbye.extend(last.to_be_bytes());
        goodbye.extend([0; 4]);
        socket.write_all(&goodbye).await.expect("sent");
        socket
    }

    /// The result of a call, with `last` named in the member's GOAWAY. With `stays`, the member keeps the
    /// connection open and says nothing more.
    async fn told(last: u32, stays: bool) -> Result<(), SendError> {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let tasks = Tasks::default();
        let member = async move {
            let mut socket = says_goodbye(theirs, last).await;
            while stays && socket.read(&mut [0; 1024]).await.is_ok_and(|read| read > 0) {}
        };
        tasks.spawn("member", member).detach();
        let endpoint = Endpoint { scheme: Scheme::Http, host: "m".into(), port: 1 };
        let origin = MemberOrigin::of(&endpoint).expect("an origin");
        let keeping = ConnectionLifetime { idle: Duration::from_secs(60), fresh_until: None };
        let opened = Connection::open(Box::new(ours), origin, Lane::Unary, &tasks, keeping, (), |_| ());
        let connection = opened.await.expect("open");
        let in_flight = connection.enter(&Rc::default()).expect("room");
        let body = UpstreamRequestBody::Once(Bytes::from_static(b"\0\0\0\0\0"));
        let mut request = Request::new(());
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = connection.uri(PathAndQuery::from_static("/etcdserverpb.KV/Put"));
        connection.send(request, body, in_flight)?.await.map(drop)
    }

    #[test]
    fn how_it_ended_tells_our_doing_from_the_members() {
        let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
        runtime.expect("a runtime").block_on(async {
            for (give_up, how) in [(true, ConnectionEnd::GivenUp), (false, ConnectionEnd::Lost)] {
                let (ours, theirs) = tokio::io::duplex(64 * 1024);
                let tasks = Tasks::default();
                let endpoint = Endpoint { scheme: Scheme::Http, host: "m".into(), port: 1 };
                let origin = MemberOrigin::of(&endpoint).expect("an origin");
                let keeping = ConnectionLifetime { idle: Duration::from_secs(60), fresh_until: None };
                let (tell, told) = oneshot::channel();
                let ended = move |how| tell.send(how).expect("somebody asks");
                let opened =
                    Connection::open(Box::new(ours), origin, Lane::Stream, &tasks, keeping, (), ended);
                let connection = opened.await.expect("open");
                let in_flight = connection.enter(&Rc::default()).expect("room");
                if give_up {
                    connection.give_up();
                } else {
                    drop(theirs);
                }
                assert_eq!(told.await, Ok(how));
                assert_eq!(in_flight.is_given_up(), give_up);
            }
        });
    }

    #[test]
    fn a_goodbye_proves_that_streams_past_the_last_one_were_not_looked_at() {
        let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
        runtime.expect("a runtime").block_on(async {
            assert!(matches!(told(0, false).await, Err(SendError::Refused)), "it looked at none");
            assert!(matches!(told(1, false).await, Err(SendError::Lost(_))), "it may have done it");
        });
    }

    #[test]
    fn a_member_that_is_silent_after_its_goodbye_loses_its_last_calls() {
        let mut runtime = Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build_local(LocalOptions::default());
        runtime.expect("a runtime").block_on(async {
            let began = Instant::now();
            assert!(matches!(told(1, true).await, Err(SendError::Lost(_))));
            let least = PING_INTERVAL + PING_TIMEOUT;
            assert!((least..=least + 2 * PING_CHECK).contains(&began.elapsed()), "{:?}", began.elapsed());
        });
    }
}
