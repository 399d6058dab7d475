//! An HTTP/2 connection to a member, with its calls in flight.
//!
//! Owns: the handshake, flow-control windows and pings by lane, the count of calls in flight, and the close
//! after an idle period. Must not know: the meaning of a call, credentials, further connections.
//! Invariants (`docs/decisions.md#d37`, `docs/decisions.md#d39`, `docs/decisions.md#d41`,
//! `docs/decisions.md#d45`): unread answers and streams can use up neither the connection's window nor h2's
//! budget for small frames. Pings are sent only while streams are open, and not more often than etcd allows.
//! "Never sent" is told apart from "lost" by hyper handing the request back, never by a guess. Unless given
//! up, a connection is closed only while no call is in flight, and no call begins after the close. A
//! connection's tasks stay on the opening thread; calls come from any thread.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::uri::{self, PathAndQuery, Uri};
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::TokioTimer;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use crate::config::{Endpoint, Scheme};
use crate::io::ByteStream;
use crate::io::coalesce::coalesce;
use crate::io::kill_switch::{KillSwitch, cuttable};
use crate::members::fitness::quarantine::BusyGuard;
use crate::members::fitness::stream_counts::CountedStream;
use crate::rpc::method::Lane;
use crate::tasks::{LocalExecutor, Tasks};

/// etcd refuses pings less than 5 s apart; 10 s keeps a wide margin.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Assumed stream limit of a member whose SETTINGS name none. The TLS ports of old etcd versions have Go's
/// HTTP/2 default of 250.
const UNTOLD_STREAMS: usize = 200;
/// hyper's value for the member's stream limit before the first SETTINGS frame, and for SETTINGS without a
/// limit.
const NO_LIMIT: usize = u32::MAX as usize;

const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;
/// Flow-control window of every connection: larger than all unread answers of a full connection together, see
/// [`room`].
const CONNECTION_WINDOW: u32 = 1024 * MIB;

/// The body of a request to a member.
pub enum UpstreamRequestBody {
    /// A whole message, framed.
    Once(Option<Bytes>),
    /// A whole message, framed. Dropping the body drops the sender: its receiver learns that the message has
    /// left for the member, or never will.
    Tracked(Option<Bytes>, oneshot::Sender<Infallible>),
    /// Framed messages from a channel. Dropping the channel's sender half-closes the stream.
    Frames(mpsc::Receiver<Bytes>),
    /// The client's own request body, passed on unread.
    Piped(Incoming),
}

impl http_body::Body for UpstreamRequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut *self {
            Self::Once(message) | Self::Tracked(message, _) => {
                Poll::Ready(message.take().map(|bytes| Ok(Frame::data(bytes))))
            }
            Self::Frames(frames) => frames.poll_recv(cx).map(|next| next.map(|bytes| Ok(Frame::data(bytes)))),
            Self::Piped(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Once(message) | Self::Tracked(message, _) => message.is_none(),
            Self::Frames(_) => false,
            Self::Piped(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Once(Some(message)) | Self::Tracked(Some(message), _) => {
                SizeHint::with_exact(message.len() as u64)
            }
            Self::Once(None) | Self::Tracked(None, _) => SizeHint::with_exact(0),
            Self::Frames(_) => SizeHint::default(),
            Self::Piped(body) => body.size_hint(),
        }
    }
}

/// A request as handed to hyper. The request keeps its seat on the connection until sent to the member, even
/// if the call was given up meanwhile: hyper queues requests without a limit of its own.
struct SeatedRequestBody {
    body: UpstreamRequestBody,
    _seat: Arc<SeatGuard>,
}

impl http_body::Body for SeatedRequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Why a request got no answer.
pub enum SendError {
    /// No byte reached the member: the request comes back and may go to another member, whatever its method.
    NeverSent(Box<Request<UpstreamRequestBody>>),
    /// The member reset the stream with REFUSED_STREAM, or sent a GOAWAY with a lower last stream id: the
    /// member did not process the request (RFC 9113, section 8.7). The request is gone.
    Refused,
    /// The request was, or may have been, sent; the outcome is unknown.
    Lost(hyper::Error),
}

/// An open connection. Its tasks run on a single shard.
pub struct Connection {
    origin: MemberOrigin,
    send: SendRequest<SeatedRequestBody>,
    load: Arc<ConnectionLoad>,
    scissors: KillSwitch,
    /// Instant after which no call begins on the connection.
    fresh_until: Option<Instant>,
}

/// Limits on a connection's lifetime.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLifetime {
    /// Time without a call after which the connection is closed.
    pub idle: Duration,
    /// Instant after which no call begins on the connection.
    pub fresh_until: Option<Instant>,
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

/// Value of `Load::calls` from the close on: no call may begin. Calls still in flight decrement the value at
/// their end, so every value above half of the maximum means "closing".
const CLOSING: usize = usize::MAX;

struct ConnectionLoad {
    lane: Lane,
    /// Number of calls in flight, or [`CLOSING`].
    calls: AtomicUsize,
    /// The member's limit on concurrent streams, as last announced.
    limit: AtomicUsize,
    opened_at: Instant,
    /// End of the latest call, in milliseconds after `opened_at`; 0 before the first call's end.
    quiet_since: AtomicU64,
    /// Close the connection after its last call.
    retired: AtomicBool,
    /// Streams able to resume on another member must leave.
    leave_ordered: AtomicBool,
    /// Keyward cut the connection together with its calls.
    given_up: AtomicBool,
    /// Wakes the task responsible for the close.
    close_wakeup: Notify,
    /// Wakes waiters for the connection's end, and for the order to leave.
    ended: Notify,
}

impl ConnectionLoad {
    fn new(lane: Lane) -> Self {
        Self {
            lane,
            calls: AtomicUsize::new(0),
            limit: AtomicUsize::new(UNTOLD_STREAMS),
            opened_at: Instant::now(),
            quiet_since: AtomicU64::new(0),
            retired: AtomicBool::new(false),
            leave_ordered: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            close_wakeup: Notify::new(),
            ended: Notify::new(),
        }
    }

    fn is_quiet(&self) -> bool {
        self.calls.load(Ordering::SeqCst) == 0
    }

    fn is_closing(&self) -> bool {
        self.calls.load(Ordering::SeqCst) > CLOSING / 2
    }

    /// any → closing; wakes all waiters.
    fn end(&self) {
        self.calls.store(CLOSING, Ordering::SeqCst);
        self.ended.notify_waiters();
    }

    /// Waits for the connection's end. Cancel-safe.
    async fn ended(&self) {
        loop {
            // `Notified` receives wakeups from its creation on, so no end is missed between the check and the
            // await.
            let ended = self.ended.notified();
            if self.is_closing() {
                return;
            }
            ended.await;
        }
    }

    /// Waits until streams must leave. Cancel-safe.
    async fn is_left(&self) {
        loop {
            let told = self.ended.notified();
            if self.leave_ordered.load(Ordering::SeqCst) {
                return;
            }
            told.await;
        }
    }

    fn quiet_since(&self) -> Instant {
        self.opened_at + Duration::from_millis(self.quiet_since.load(Ordering::SeqCst))
    }

    /// no call → closing; returns false while a call is in flight.
    fn close(&self) -> bool {
        self.calls.compare_exchange(0, CLOSING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Adds a call if the connection has room.
    fn enter(&self) -> bool {
        let room = call_limit(self.limit.load(Ordering::Relaxed), self.lane);
        let enter = |calls| (calls < room).then_some(calls + 1);
        self.calls.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter).is_ok()
    }

    fn leave(&self) {
        // Store the time before the count: a reader seeing no call must see the new time.
        let quiet = u64::try_from(self.opened_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.quiet_since.fetch_max(quiet, Ordering::SeqCst);
        if self.calls.fetch_sub(1, Ordering::SeqCst) == 1 && self.retired.load(Ordering::SeqCst) {
            self.close_wakeup.notify_one();
        }
    }

    /// Closes the connection once no call is in flight: after `idle`, or at once if retired. Returns when
    /// closed.
    async fn close_when_unused(&self, idle: Duration) {
        loop {
            let quiet = self.is_quiet();
            let since = self.quiet_since();
            if quiet && (self.retired.load(Ordering::SeqCst) || since.elapsed() >= idle) && self.close() {
                return;
            }
            if self.is_closing() {
                return;
            }
            let wait = if quiet { idle.saturating_sub(since.elapsed()) } else { idle };
            tokio::select! {
                biased; // either order is correct; a fixed order makes runs repeatable
                () = self.close_wakeup.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
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

/// A seat on a connection, released on drop.
struct SeatGuard(Arc<ConnectionLoad>);

impl Drop for SeatGuard {
    fn drop(&mut self) {
        self.0.leave();
    }
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

    /// Waits until streams able to resume on another member must leave. Cancel-safe.
    pub async fn leave_ordered(&self) {
        self.seat.0.is_left().await;
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
    ) -> Result<Self, hyper::Error> {
        let (stream, scissors) = cuttable(stream, keep);
        let (io, flusher) = coalesce(stream);
        tasks.spawn("upstream flusher", flusher).detach();
        let (send, connection) = settings(lane).handshake(io).await?;
        let load = Arc::new(ConnectionLoad::new(lane));
        let seen = Arc::clone(&load);
        let drive = async move {
            let how = {
                let mut connection = pin!(connection);
                let driven = std::future::poll_fn(|cx| {
                    let polled = connection.as_mut().poll(cx);
                    let limit = match connection.current_max_send_streams() {
                        NO_LIMIT.. => UNTOLD_STREAMS,
                        told => told,
                    };
                    seen.limit.store(limit, Ordering::Relaxed);
                    polled
                });
                tokio::select! {
                    biased; // the member's end of the connection is reported before an idle close
                    driven = driven => {
                        if let Err(error) = driven {
                            tracing::debug!(%error, "upstream connection ended");
                        }
                        let given_up = seen.given_up.load(Ordering::SeqCst);
                        if given_up { ConnectionEnd::GivenUp } else { ConnectionEnd::Lost }
                    }
                    () = seen.close_when_unused(keeping.idle) => ConnectionEnd::Unused,
                }
            };
            // Remaining holders of the connection must see it closed.
            seen.end();
            ended(how);
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
        self.send.is_closed() || self.load.is_closing()
    }

    /// Takes a seat for a call, counted in `member` too. Returns `None` past 80 % of the member's stream
    /// limit, after `fresh_until`, and on a retired or closing connection.
    #[must_use]
    pub fn enter(&self, member: &Rc<Cell<usize>>) -> Option<InFlight> {
        let stale = self.fresh_until.is_some_and(|until| Instant::now() >= until);
        if stale {
            self.retire();
        }
        if stale || self.send.is_closed() || self.load.retired.load(Ordering::SeqCst) || !self.load.enter() {
            return None;
        }
        member.set(member.get() + 1);
        let (seat, member) = (Arc::new(SeatGuard(Arc::clone(&self.load))), Rc::clone(member));
        Some(InFlight { seat, member, busy: None, carried: None })
    }

    /// Sends a request and waits for the reply's headers. Dropping the future, or the reply's body, resets
    /// the stream.
    ///
    /// # Errors
    /// [`SendError`]; only `NeverSent` proves that the member saw no part of the request.
    pub async fn send(
        &self,
        request: Request<UpstreamRequestBody>,
        in_flight: InFlight,
    ) -> Result<(Response<Incoming>, InFlight), SendError> {
        let seat = Arc::clone(&in_flight.seat);
        let request = request.map(|body| SeatedRequestBody { body, _seat: seat });
        match self.send.clone().try_send_request(request).await {
            Ok(response) => Ok((response, in_flight)),
            Err(mut error) => match error.take_message() {
                Some(request) => {
                    let request = request.map(|envelope| envelope.body);
                    Err(SendError::NeverSent(Box::new(request)))
                }
                None => {
                    let error = error.into_error();
                    Err(if is_refused(&error) { SendError::Refused } else { SendError::Lost(error) })
                }
            },
        }
    }
}

fn is_refused(error: &hyper::Error) -> bool {
    let why = std::error::Error::source(error).and_then(|source| source.downcast_ref::<h2::Error>());
    why.is_some_and(|why| {
        let reset = why.is_reset() && why.reason() == Some(h2::Reason::REFUSED_STREAM);
        // h2 fails a stream with the member's GOAWAY only if the GOAWAY names a lower last stream id.
        why.is_remote() && (reset || why.is_go_away())
    })
}

/// Concurrent calls allowed on a connection to a member with a limit of `limit` streams: 80 % of the limit,
/// and no more than fit into the connection's window with unread answers. With more, the unread answers of a
/// single client could block the answers to all clients.
fn call_limit(limit: usize, lane: Lane) -> usize {
    let fit = CONNECTION_WINDOW / stream_window(lane) - 1;
    (limit / 5 * 4 + limit % 5 * 4 / 5).min(fit as usize).max(1)
}

/// Returns the flow-control window of a stream: the bytes of an unread answer a member may send.
#[must_use]
pub fn stream_window(lane: Lane) -> u32 {
    match lane {
        Lane::Stream => 64 * KIB,
        Lane::Unary | Lane::Bulk => 2 * MIB,
    }
}

fn settings(lane: Lane) -> Builder<LocalExecutor> {
    let mut builder = Builder::new(LocalExecutor);
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(stream_window(lane))
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(64 * 1024)
        .max_concurrent_reset_streams(4096)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(false);
    builder
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::runtime::{Builder, LocalOptions};

    use super::*;
    use crate::config::{Endpoint, Scheme};

    const PREFACE: usize = 24;
    const HEADERS: u8 = 1;

    /// A scripted member: reads a request, then sends GOAWAY with `last` as the last stream id.
    async fn says_goodbye(mut socket: DuplexStream, last: u32) {
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
    }

    async fn told(last: u32) -> Result<(), SendError> {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let tasks = Tasks::default();
        tasks.spawn("member", says_goodbye(theirs, last)).detach();
        let endpoint = Endpoint { scheme: Scheme::Http, host: "m".into(), port: 1 };
        let origin = MemberOrigin::of(&endpoint).expect("an origin");
        let keeping = ConnectionLifetime { idle: Duration::from_secs(60), fresh_until: None };
        let opened = Connection::open(Box::new(ours), origin, Lane::Unary, &tasks, keeping, (), |_| ());
        let connection = opened.await.expect("open");
        let in_flight = connection.enter(&Rc::default()).expect("room");
        let mut request = Request::new(UpstreamRequestBody::Once(Some(Bytes::from_static(b"\0\0\0\0\0"))));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = connection.uri(PathAndQuery::from_static("/etcdserverpb.KV/Put"));
        connection.send(request, in_flight).await.map(drop)
    }

    #[test]
    fn no_number_of_unread_answers_uses_up_a_connections_window() {
        for lane in [Lane::Unary, Lane::Bulk, Lane::Stream] {
            for limit in [1, 200, 250, 1000, NO_LIMIT] {
                let calls = u32::try_from(call_limit(limit, lane)).expect("few");
                assert!(calls >= 1 && calls * stream_window(lane) < CONNECTION_WINDOW, "{lane:?} {limit}");
            }
        }
        assert_eq!(
            (call_limit(200, Lane::Unary), call_limit(1, Lane::Unary), call_limit(10_000, Lane::Bulk)),
            (160, 1, 511)
        );
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
            assert!(matches!(told(0).await, Err(SendError::Refused)), "it looked at none");
            assert!(matches!(told(1).await, Err(SendError::Lost(_))), "it may have done it");
        });
    }
}
