//! The body of a client's request: received over HTTP/2 or HTTP/1, or made by Keyward from another body.
//!
//! Owns: the forms of a request's body, and the reasons for the early end of a request's or a response's
//! body. Must not know: the content of a body, how a made body is made. Invariant: bytes not taken by the
//! reader stay with the client, by HTTP/2's flow control or in HTTP/1's socket, until the request has its
//! answer; then a bounded unread body of HTTP/1 is passed over, so that the connection can serve the next
//! request.

use std::cell::{Cell, RefCell};
use std::error::Error as _;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use http_body::{Body, Frame};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use keyward_base::io::http2_body::Http2Body;
use keyward_etcd::refusal::Refusal;

/// Bytes of a request over HTTP/1 passed over behind its answer: a call is hardly ever longer.
const UNREAD_BYTES: usize = 64 * 1024;
/// Time for these bytes: a client that was not interrupted sends them at once.
const UNREAD_TIME: Duration = Duration::from_secs(1);

/// The body of a client's request.
pub enum ClientBody {
    /// Received over HTTP/2.
    Http2(Http2Body),
    /// Received over HTTP/1.
    Http1(Http1Body),
    /// Made by Keyward from another body.
    Made(MadeBody),
}

/// A body received over HTTP/1, with the bond of its request to the connection. Once the body was read to
/// its end, or dropped, the connection may look behind it.
pub struct Http1Body {
    /// `None` once the body was dropped.
    incoming: Option<Box<Incoming>>,
    bond: Rc<Http1Bond>,
}

/// A body made by Keyward from another body.
pub type MadeBody = Pin<Box<dyn Body<Data = Bytes, Error = ClientBodyError>>>;

/// The reason for a body's early end.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientBodyError {
    /// The client disconnected, or reset the stream.
    #[error("the client is gone")]
    ClientGone,
    /// The body has a fault, for which the call is refused.
    #[error("the body has a fault")]
    Refused(Refusal),
}

/// The body of a response breaks off. The client must see the break: HTTP/2 resets the stream, HTTP/1
/// closes the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the response breaks off")]
pub struct AnswerBroken;

/// The body of a response.
pub trait ReplyBody: Body<Data = Bytes, Error = AnswerBroken> {
    /// Lets work of the body's own go on. To be called once in each turn of the task, before `poll_frame`,
    /// even if the client leaves no room for a frame. The task of `cx` is woken for further work.
    fn poll_work(&mut self, cx: &mut Context<'_>);

    /// True if a piece of the body may be several messages, each whole.
    fn joins_messages(&self) -> bool;
}

impl ClientBodyError {
    /// The refusal of the call. A client that is gone does not read the refusal.
    #[must_use]
    pub fn refusal(self) -> Refusal {
        match self {
            Self::ClientGone => Refusal::CANCELED,
            Self::Refused(refusal) => refusal,
        }
    }
}

/// The bytes of an upgraded connection.
pub trait UpgradedStream: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> UpgradedStream for T {}

/// Takes over an HTTP/1 connection after the response 101: receives the connection, and the bytes already
/// read behind the request.
pub type UpgradeHandler = Box<dyn FnOnce(Box<dyn UpgradedStream>, Bytes) -> LocalBoxFuture<'static, ()>>;

/// The bond between a connection of HTTP/1 and its current request: the place for the handler that takes over
/// the connection, put there before the answer 101, and the needs of the request.
#[derive(Default)]
pub struct Http1Bond {
    handler: RefCell<Option<UpgradeHandler>>,
    ends_with_client: Cell<bool>,
    is_read: Cell<bool>,
    /// True until somebody reads the request's body, or the request has its answer: a body dropped before is
    /// left in `unread`.
    keeps_unread: Cell<bool>,
    unread: Cell<Option<Box<Incoming>>>,
    /// The connection, while it waits for the end of the request's body.
    waiting: Cell<Option<Waker>>,
}

impl Http1Bond {
    /// Sets the handler.
    pub fn take_over_with(&self, handler: UpgradeHandler) {
        self.handler.replace(Some(handler));
    }

    /// The request is of no use without its client: a stream, or a call that waits for others.
    pub fn end_with_client(&self) {
        self.ends_with_client.set(true);
    }

    /// Takes the handler, if one was set.
    pub(super) fn take_handler(&self) -> Option<UpgradeHandler> {
        self.handler.take()
    }

    /// Begins the next request.
    pub(super) fn reset(&self) {
        self.ends_with_client.set(false);
        self.is_read.set(false);
        self.keeps_unread.set(true);
        self.unread.set(None);
    }

    /// Passes over a body that nobody has begun to read, now that the request has its answer. False if the
    /// body is longer than [`UNREAD_BYTES`], or does not come within [`UNREAD_TIME`]: the connection must end
    /// then. Cancel-safe.
    pub(super) async fn pass_unread_over(&self) -> bool {
        self.keeps_unread.set(false);
        let Some(mut rest) = self.unread.take() else { return true };
        let passing = async {
            let mut bytes = 0;
            while bytes <= UNREAD_BYTES {
                match poll_fn(|cx| Pin::new(&mut rest).poll_frame(cx)).await {
                    Some(Ok(frame)) => bytes += frame.data_ref().map_or(0, Bytes::len),
                    // A body with a fault has no end.
                    end => return end.is_none(),
                }
            }
            false
        };
        let is_over = timeout(UNREAD_TIME, passing).await.unwrap_or(false);
        self.note_read();
        is_over
    }

    pub(super) fn ends_with_client(&self) -> bool {
        self.ends_with_client.get()
    }

    /// Ready once nobody reads more of the request: the next bytes of the client stand behind the request.
    pub(super) fn poll_read(&self, cx: &Context<'_>) -> Poll<()> {
        if self.is_read.get() {
            return Poll::Ready(());
        }
        self.waiting.set(Some(cx.waker().clone()));
        Poll::Pending
    }

    fn note_read(&self) {
        self.is_read.set(true);
        if let Some(connection) = self.waiting.take() {
            connection.wake();
        }
    }
}

impl Http1Body {
    pub(super) fn new(incoming: Incoming, bond: &Rc<Http1Bond>) -> Self {
        if incoming.is_end_stream() {
            bond.note_read();
        }
        Self { incoming: Some(Box::new(incoming)), bond: Rc::clone(bond) }
    }

    /// The bond of the body's request to its connection.
    #[must_use]
    pub fn bond(&self) -> &Rc<Http1Bond> {
        &self.bond
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ClientBodyError>>> {
        let Some(incoming) = &mut self.incoming else { return Poll::Ready(None) };
        self.bond.keeps_unread.set(false);
        let polled = Pin::new(&mut *incoming).poll_frame(cx).map_err(|error| error_of(&error));
        let is_over = !matches!(polled, Poll::Pending | Poll::Ready(Some(Ok(_))));
        if is_over || incoming.is_end_stream() {
            self.bond.note_read();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(|incoming| incoming.is_end_stream())
    }
}

impl Drop for Http1Body {
    fn drop(&mut self) {
        match self.incoming.take().filter(|_| self.bond.keeps_unread.get() && !self.bond.is_read.get()) {
            Some(rest) => self.bond.unread.set(Some(rest)),
            None => self.bond.note_read(),
        }
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = ClientBodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ClientBodyError>>> {
        match self.get_mut() {
            Self::Http2(body) => Pin::new(body).poll_frame(cx).map_err(|_| ClientBodyError::ClientGone),
            Self::Http1(body) => body.poll_frame(cx),
            Self::Made(body) => body.as_mut().poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http2(body) => body.is_end_stream(),
            Self::Http1(body) => body.is_end_stream(),
            Self::Made(body) => body.is_end_stream(),
        }
    }
}

/// The reason for the early end of an HTTP/1 body: chunks that are none, or a client that is gone.
fn error_of(error: &hyper::Error) -> ClientBodyError {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => {
            ClientBodyError::Refused(Refusal::MALFORMED_CHUNKS)
        }
        _ => ClientBodyError::ClientGone,
    }
}
