//! One HTTP/2 connection to one member, and what it carries now.
//!
//! Owns: the handshake, windows and pings by lane, the count of calls in flight. Must not know: which call it is,
//! credentials, other connections. Invariants (rules 37, 39, 41, 45): an unread stream on the stream lane can neither
//! use up the connection's window nor h2's budget for small frames; pings go only while streams are open and not more
//! often than etcd allows; "never sent" is told apart from "lost" by what hyper hands back, never by guessing.

use std::cell::Cell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::uri::{self, PathAndQuery, Uri};
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::TokioTimer;
use tokio::sync::mpsc;

use crate::config::{Endpoint, Scheme};
use crate::io::Stream;
use crate::io::coalesce::coalesce;
use crate::io::cut::{Scissors, cuttable};
use crate::rpc::method::Lane;
use crate::tasks::{LocalExecutor, Tasks};

/// etcd refuses pings closer than 5 s; we stay well clear.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// What a member takes where its SETTINGS do not say: Go's HTTP/2 default is 250, an old etcd's on TLS ports.
const UNTOLD_STREAMS: usize = 200;
/// hyper's own value until the first SETTINGS frame and where a member sets none.
const NO_LIMIT: usize = u32::MAX as usize;

const MIB: u32 = 1024 * 1024;

/// The body of a request to a member.
pub enum Outgoing {
    /// One whole message, framed.
    Once(Option<Bytes>),
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
            Self::Once(message) => Poll::Ready(message.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Frames(frames) => frames.poll_recv(cx).map(|next| next.map(|bytes| Ok(Frame::data(bytes)))),
            Self::Piped(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Once(message) => message.is_none(),
            Self::Frames(_) => false,
            Self::Piped(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Once(Some(message)) => SizeHint::with_exact(message.len() as u64),
            Self::Once(None) => SizeHint::with_exact(0),
            Self::Frames(_) => SizeHint::default(),
            Self::Piped(body) => body.size_hint(),
        }
    }
}

/// Why there is no answer.
pub enum SendError {
    /// Nothing reached the member: the request comes back and may go elsewhere, whatever it is.
    NeverSent(Box<Request<Outgoing>>),
    /// The member reset the stream with REFUSED_STREAM: it did nothing (RFC 9113, section 8.7). The request is gone.
    Refused,
    /// It was, or may have been, sent; the outcome is unknown.
    Lost(hyper::Error),
}

/// An open connection. Lives on one shard.
pub struct Connection {
    origin: Origin,
    send: SendRequest<Outgoing>,
    load: Rc<Load>,
    scissors: Scissors,
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

#[derive(Default)]
struct Load {
    in_flight: Cell<usize>,
    /// The member's limit on streams, as far as it told.
    limit: Cell<usize>,
}

/// Counts one call on its connection for as long as it lives: hold it until the reply's body has ended.
pub struct InFlight(Rc<Load>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get().saturating_sub(1));
    }
}

impl Connection {
    /// Performs the HTTP/2 handshake on `stream` and starts the connection's tasks on `tasks`. `lost` runs when the
    /// connection ends, in whatever way.
    ///
    /// # Errors
    /// The handshake failed; nothing was sent.
    pub async fn open(
        stream: Stream,
        origin: Origin,
        lane: Lane,
        tasks: &Tasks,
        lost: impl FnOnce() + 'static,
    ) -> Result<Self, hyper::Error> {
        let (stream, scissors) = cuttable(stream);
        let (io, flusher) = coalesce(stream);
        tasks.spawn("upstream flusher", flusher).detach();
        let (send, connection) = settings(lane).handshake(io).await?;
        let load = Rc::new(Load { in_flight: Cell::new(0), limit: Cell::new(UNTOLD_STREAMS) });
        let seen = Rc::clone(&load);
        let drive = async move {
            let mut connection = pin!(connection);
            let ended = std::future::poll_fn(|cx| {
                let polled = connection.as_mut().poll(cx);
                seen.limit.set(match connection.current_max_send_streams() {
                    NO_LIMIT.. => UNTOLD_STREAMS,
                    told => told,
                });
                polled
            })
            .await;
            if let Err(error) = ended {
                tracing::debug!(%error, "upstream connection ended");
            }
            lost();
        };
        tasks.spawn("upstream connection", drive).detach();
        Ok(Self { origin, send, load, scissors })
    }

    /// Ends the connection at once, and every call on it as lost.
    pub fn give_up(&self) {
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

    /// Whether another call fits: below 80 % of the member's limit, and not closing.
    #[must_use]
    pub fn has_room(&self) -> bool {
        !self.send.is_closed() && self.load.in_flight.get() < (self.load.limit.get() * 4 / 5).max(1)
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.send.is_closed()
    }

    /// Calls whose replies have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.load.in_flight.get()
    }

    /// Sends a request and waits for the reply's headers. Dropping the future, or the reply's body, resets the stream.
    ///
    /// # Errors
    /// [`SendError`]; only `NeverSent` proves that the member saw nothing.
    pub async fn send(
        &self,
        request: Request<Outgoing>,
    ) -> Result<(Response<Incoming>, InFlight), SendError> {
        self.load.in_flight.set(self.load.in_flight.get() + 1);
        let in_flight = InFlight(Rc::clone(&self.load));
        match self.send.clone().try_send_request(request).await {
            Ok(response) => Ok((response, in_flight)),
            Err(mut error) => match error.take_message() {
                Some(request) => Err(SendError::NeverSent(Box::new(request))),
                None => {
                    let error = error.into_error();
                    Err(if is_refused_stream(&error) { SendError::Refused } else { SendError::Lost(error) })
                }
            },
        }
    }
}

fn is_refused_stream(error: &hyper::Error) -> bool {
    let reset = std::error::Error::source(error).and_then(|source| source.downcast_ref::<h2::Error>());
    reset.is_some_and(|reset| {
        reset.is_remote() && reset.is_reset() && reset.reason() == Some(h2::Reason::REFUSED_STREAM)
    })
}

fn settings(lane: Lane) -> Builder<LocalExecutor> {
    let mut builder = Builder::new(LocalExecutor);
    let (stream_window, connection_window) = match lane {
        Lane::Stream => (64 * 1024, 1024 * MIB),
        Lane::Unary | Lane::Bulk => (2 * MIB, 64 * MIB),
    };
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(stream_window)
        .initial_connection_window_size(connection_window)
        .max_header_list_size(64 * 1024)
        .max_concurrent_reset_streams(4096)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(false);
    builder
}
