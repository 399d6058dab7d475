//! One HTTP/2 connection to one member, and what it carries now.
//!
//! Owns: the handshake, windows and pings by lane, the count of calls in flight, and its end when nobody used it for
//! long. Must not know: which call it is, credentials, other connections. Invariants (rules 37, 39, 41, 45): unread
//! answers and streams can use up neither the connection's window nor h2's budget for small frames; pings go only
//! while streams are open and not more often than etcd allows; "never sent" is told apart from "lost" by what hyper hands
//! back, never by guessing; a connection is closed only while no call is on it, and none comes after that. Its tasks stay
//! on the thread that opened it; calls come from any.

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
use crate::io::Stream;
use crate::io::coalesce::coalesce;
use crate::io::cut::{Scissors, cuttable};
use crate::rpc::method::Lane;
use crate::tasks::{LocalExecutor, Tasks};
use crate::upstream::carried::Carried;
use crate::upstream::standing::Busy;

/// etcd refuses pings closer than 5 s; we stay well clear.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// What a member takes where its SETTINGS do not say: Go's HTTP/2 default is 250, an old etcd's on TLS ports.
const UNTOLD_STREAMS: usize = 200;
/// hyper's own value until the first SETTINGS frame and where a member sets none.
const NO_LIMIT: usize = u32::MAX as usize;

const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;
/// Of every connection: no number of unread answers that it may carry uses it up, see [`room`].
const CONNECTION_WINDOW: u32 = 1024 * MIB;

/// The body of a request to a member.
pub enum Outgoing {
    /// One whole message, framed.
    Once(Option<Bytes>),
    /// The same. The receiver's other end is told when it has left for the member, or never will.
    Tracked(Option<Bytes>, oneshot::Sender<Infallible>),
    /// Framed messages as their sender makes them; the stream is half-closed when the sender is dropped.
    Frames(mpsc::Receiver<Bytes>),
    /// The client's own body, opaque.
    Piped(Incoming),
}

impl http_body::Body for Outgoing {
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

/// A request as hyper has it: it keeps its seat on the connection until it has left for the member, also where its call was given up
/// meanwhile. hyper queues requests without a limit of its own.
struct Envelope {
    body: Outgoing,
    _seat: Arc<Taken>,
}

impl http_body::Body for Envelope {
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

/// Why there is no answer.
pub enum SendError {
    /// Nothing reached the member: the request comes back and may go elsewhere, whatever it is.
    NeverSent(Box<Request<Outgoing>>),
    /// The member reset the stream with REFUSED_STREAM, or said goodbye and that it looks at no stream so new: it did nothing
    /// (RFC 9113, section 8.7). The request is gone.
    Refused,
    /// It was, or may have been, sent; the outcome is unknown.
    Lost(hyper::Error),
}

/// An open connection. Its tasks live on one shard.
pub struct Connection {
    origin: Origin,
    send: SendRequest<Envelope>,
    load: Arc<Load>,
    scissors: Scissors,
    /// No call is begun on it after this.
    fresh_until: Option<Instant>,
}

/// How a connection is to be kept.
#[derive(Clone, Copy, Debug)]
pub struct Keeping {
    /// Closed after so long without a call.
    pub idle: Duration,
    /// No call is begun on it after this.
    pub fresh_until: Option<Instant>,
}

/// How a connection came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The member's doing, or the network's.
    Lost,
    /// Ours: nobody used it.
    Unused,
    /// Ours: what it carried was not to wait for it any more. That says nothing of where it led.
    GivenUp,
}

/// What a member is called in `:scheme` and `:authority`.
#[derive(Clone, Debug)]
pub struct Origin {
    /// `http` or `https`.
    pub scheme: uri::Scheme,
    /// Host and port.
    pub authority: uri::Authority,
}

impl Origin {
    /// What the member at `endpoint` is called.
    ///
    /// # Errors
    /// Host and port are no valid authority.
    pub fn of(endpoint: &Endpoint) -> Result<Self, uri::InvalidUri> {
        let scheme = match endpoint.scheme {
            Scheme::Http => uri::Scheme::HTTP,
            Scheme::Https => uri::Scheme::HTTPS,
        };
        Ok(Self { scheme, authority: endpoint.authority().parse()? })
    }
}

/// Stands in the place of a number of calls: none may come any more. Those that were there still leave, so all above the
/// half of it mean the same.
const CLOSING: usize = usize::MAX;

struct Load {
    lane: Lane,
    /// How many, or [`CLOSING`].
    calls: AtomicUsize,
    /// The member's limit on streams, as far as it told.
    limit: AtomicUsize,
    opened_at: Instant,
    /// Since when there was no call, in milliseconds after `opened_at`.
    quiet_since: AtomicU64,
    /// To be closed as soon as there is no call.
    retired: AtomicBool,
    /// Streams that can go on elsewhere are to do so.
    left: AtomicBool,
    /// It ends by our doing, with all that it carries.
    given_up: AtomicBool,
    /// Wakes the task that closes it.
    look: Notify,
    /// Wakes who waits for its end, or to be told to leave.
    ended: Notify,
}

impl Load {
    fn new(lane: Lane) -> Self {
        Self {
            lane,
            calls: AtomicUsize::new(0),
            limit: AtomicUsize::new(UNTOLD_STREAMS),
            opened_at: Instant::now(),
            quiet_since: AtomicU64::new(0),
            retired: AtomicBool::new(false),
            left: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            look: Notify::new(),
            ended: Notify::new(),
        }
    }

    fn is_quiet(&self) -> bool {
        self.calls.load(Ordering::SeqCst) == 0
    }

    fn is_closing(&self) -> bool {
        self.calls.load(Ordering::SeqCst) > CLOSING / 2
    }

    /// any → closing, and its end is told.
    fn end(&self) {
        self.calls.store(CLOSING, Ordering::SeqCst);
        self.ended.notify_waiters();
    }

    /// Waits for the end. Cancel-safe.
    async fn ended(&self) {
        loop {
            // It is told of what comes from here on, before it is awaited too.
            let ended = self.ended.notified();
            if self.is_closing() {
                return;
            }
            ended.await;
        }
    }

    /// Waits until streams are to leave. Cancel-safe.
    async fn is_left(&self) {
        loop {
            let told = self.ended.notified();
            if self.left.load(Ordering::SeqCst) {
                return;
            }
            told.await;
        }
    }

    fn quiet_since(&self) -> Instant {
        self.opened_at + Duration::from_millis(self.quiet_since.load(Ordering::SeqCst))
    }

    /// no call → closing; false where there is one.
    fn close(&self) -> bool {
        self.calls.compare_exchange(0, CLOSING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// One more call, where there is room.
    fn enter(&self) -> bool {
        let room = room(self.limit.load(Ordering::Relaxed), self.lane);
        let enter = |calls| (calls < room).then_some(calls + 1);
        self.calls.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter).is_ok()
    }

    fn leave(&self) {
        // The time first: whoever sees no call sees since when.
        let quiet = u64::try_from(self.opened_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.quiet_since.fetch_max(quiet, Ordering::SeqCst);
        if self.calls.fetch_sub(1, Ordering::SeqCst) == 1 && self.retired.load(Ordering::SeqCst) {
            self.look.notify_one();
        }
    }

    /// Waits until the connection is closed for want of calls.
    async fn unused(&self, idle: Duration) {
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
                biased; // in any order, but always the same
                () = self.look.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }
}

/// Counts one call on its connection, and to its member from this shard, for as long as it lives: hold it until the
/// reply's body has ended.
pub struct InFlight {
    seat: Arc<Taken>,
    member: Rc<Cell<usize>>,
    busy: Option<Busy>,
    carried: Option<Carried>,
}

/// A seat on a connection, until dropped.
struct Taken(Arc<Load>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl InFlight {
    /// The same, counted as a call that ends by itself.
    #[must_use]
    pub fn of_busy(self, busy: Busy) -> Self {
        let mut counted = self;
        counted.busy = Some(busy);
        counted
    }

    /// The same, counted as a stream that its member carries.
    #[must_use]
    pub fn of_stream(self, carried: Carried) -> Self {
        let mut counted = self;
        counted.carried = Some(carried);
        counted
    }

    /// Whether its connection was given up, for which its end says nothing of the member.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.seat.0.given_up.load(Ordering::SeqCst)
    }

    /// Waits until what can go on elsewhere is to do so. Cancel-safe.
    pub async fn told_to_leave(&self) {
        self.seat.0.is_left().await;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.member.set(self.member.get().saturating_sub(1));
    }
}

impl Connection {
    /// Performs the HTTP/2 handshake on `stream` and starts the connection's tasks on `tasks`. `ended` runs when the
    /// connection has ended, in whatever way; `keep` is dropped when its socket is closed.
    ///
    /// # Errors
    /// The handshake failed; nothing was sent.
    pub async fn open(
        stream: Stream,
        origin: Origin,
        lane: Lane,
        tasks: &Tasks,
        keeping: Keeping,
        keep: impl Unpin + 'static,
        ended: impl FnOnce(Ended) + 'static,
    ) -> Result<Self, hyper::Error> {
        let (stream, scissors) = cuttable(stream, keep);
        let (io, flusher) = coalesce(stream);
        tasks.spawn("upstream flusher", flusher).detach();
        let (send, connection) = settings(lane).handshake(io).await?;
        let load = Arc::new(Load::new(lane));
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
                    biased; // what the member does comes before what we do
                    driven = driven => {
                        if let Err(error) = driven {
                            tracing::debug!(%error, "upstream connection ended");
                        }
                        if seen.given_up.load(Ordering::SeqCst) { Ended::GivenUp } else { Ended::Lost }
                    }
                    () = seen.unused(keeping.idle) => Ended::Unused,
                }
            };
            // Closed, whoever still holds it.
            seen.end();
            ended(how);
        };
        tasks.spawn("upstream connection", drive).detach();
        Ok(Self { origin, send, load, scissors, fresh_until: keeping.fresh_until })
    }

    /// Waits until the member has sent anything at all, or the connection has ended. Over TLS a member may refuse our
    /// certificate after the handshake seemed complete. Cancel-safe.
    pub async fn answered(&self) -> bool {
        tokio::select! {
            biased; // what was heard counts
            () = self.scissors.heard() => true,
            () = self.load.ended() => false,
        }
    }

    /// Closes it once there is no call on it; none is begun any more.
    pub fn retire(&self) {
        self.load.retired.store(true, Ordering::SeqCst);
        self.load.look.notify_one();
    }

    /// Since when there was no call on it; none where there is one.
    #[must_use]
    pub fn quiet_since(&self) -> Option<Instant> {
        self.load.is_quiet().then(|| self.load.quiet_since())
    }

    /// Closes it where there is no call on it.
    pub fn close_if_quiet(&self) -> bool {
        let closed = self.load.close();
        if closed {
            self.load.look.notify_one();
        }
        closed
    }

    /// Has every stream that can go on elsewhere do so; closes it once no call is on it.
    pub fn leave(&self) {
        self.load.left.store(true, Ordering::SeqCst);
        self.load.ended.notify_waiters();
        self.retire();
    }

    /// Ends the connection at once, and every call on it as lost; see [`Ended::GivenUp`].
    pub fn give_up(&self) {
        self.load.given_up.store(true, Ordering::SeqCst);
        self.scissors.cut();
    }

    /// The request target for `path` on this connection.
    #[must_use]
    pub fn uri(&self, path: PathAndQuery) -> Uri {
        let mut parts = uri::Parts::default();
        parts.scheme = Some(self.origin.scheme.clone());
        parts.authority = Some(self.origin.authority.clone());
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).expect("scheme, authority and path are all there")
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.send.is_closed() || self.load.is_closing()
    }

    /// A place for another call, counted in `member` too: there is none past 80 % of the member's limit, when the
    /// connection is not fresh any more, or closing.
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
        let (seat, member) = (Arc::new(Taken(Arc::clone(&self.load))), Rc::clone(member));
        Some(InFlight { seat, member, busy: None, carried: None })
    }

    /// Sends a request and waits for the reply's headers. Dropping the future, or the reply's body, resets the stream.
    ///
    /// # Errors
    /// [`SendError`]; only `NeverSent` proves that the member saw nothing.
    pub async fn send(
        &self,
        request: Request<Outgoing>,
        in_flight: InFlight,
    ) -> Result<(Response<Incoming>, InFlight), SendError> {
        let seat = Arc::clone(&in_flight.seat);
        let request = request.map(|body| Envelope { body, _seat: seat });
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
        // h2 tells a stream of the other's GOAWAY only where that names a lower one as the last.
        why.is_remote() && (reset || why.is_go_away())
    })
}

/// How many calls a connection takes at a time where its member takes `limit` streams: 80 % of them, and no more than whose unread answers
/// fit into the connection's window: else those of one client could keep the answers of all others from coming.
fn room(limit: usize, lane: Lane) -> usize {
    let fit = CONNECTION_WINDOW / stream_window(lane) - 1;
    (limit / 5 * 4 + limit % 5 * 4 / 5).min(fit as usize).max(1)
}

/// Bytes of one unread answer that a member may send.
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

    /// A member that takes in one request, and says goodbye: the stream `last` was the last that it looks at.
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
        let origin = Origin::of(&endpoint).expect("an origin");
        let keeping = Keeping { idle: Duration::from_secs(60), fresh_until: None };
        let opened = Connection::open(Box::new(ours), origin, Lane::Unary, &tasks, keeping, (), |_| ());
        let connection = opened.await.expect("open");
        let in_flight = connection.enter(&Rc::default()).expect("room");
        let mut request = Request::new(Outgoing::Once(Some(Bytes::from_static(b"\0\0\0\0\0"))));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = connection.uri(PathAndQuery::from_static("/etcdserverpb.KV/Put"));
        connection.send(request, in_flight).await.map(drop)
    }

    #[test]
    fn no_number_of_unread_answers_uses_up_a_connections_window() {
        for lane in [Lane::Unary, Lane::Bulk, Lane::Stream] {
            for limit in [1, 200, 250, 1000, NO_LIMIT] {
                let calls = u32::try_from(room(limit, lane)).expect("few");
                assert!(calls >= 1 && calls * stream_window(lane) < CONNECTION_WINDOW, "{lane:?} {limit}");
            }
        }
        assert_eq!((room(200, Lane::Unary), room(1, Lane::Unary), room(10_000, Lane::Bulk)), (160, 1, 511));
    }

    #[test]
    fn how_it_ended_tells_our_doing_from_the_members() {
        let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
        runtime.expect("a runtime").block_on(async {
            for (give_up, how) in [(true, Ended::GivenUp), (false, Ended::Lost)] {
                let (ours, theirs) = tokio::io::duplex(64 * 1024);
                let tasks = Tasks::default();
                let endpoint = Endpoint { scheme: Scheme::Http, host: "m".into(), port: 1 };
                let origin = Origin::of(&endpoint).expect("an origin");
                let keeping = Keeping { idle: Duration::from_secs(60), fresh_until: None };
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
