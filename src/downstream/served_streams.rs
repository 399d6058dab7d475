//! The streams of one connection that are being served, among them those that their client has reset.
//!
//! Owns: the count of streams whose task has not ended, when no more is read of the connection for it, and what is counted as a reset before
//! the answer. Must not know: what is served, HTTP/2's frames.
//! Invariants: a stream counts until its task has ended, although HTTP/2 counts it no more once it was reset; the limit is above the
//! number of streams that may be open, so the tasks beyond that number are of reset streams and end without anything being read: reading
//! never waits for a stream that waits for its client.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::downstream::connection_activity::ConnectionActivity;
use crate::downstream::reset_rate::ResetRate;
use crate::refusal::{Code, Status};

/// Tasks of reset streams that may wait for their end, as a part of the streams that may be open.
const RESET_PART: usize = 4;
/// At least so many.
const RESET_LEAST: usize = 64;

/// The streams of one connection that are being served.
pub(super) struct ServedStreams {
    count: Cell<usize>,
    limit: usize,
    /// Who reads the connection, while no more is read.
    reader: Cell<Option<Waker>>,
    resets: RefCell<ResetRate>,
    activity: Arc<ConnectionActivity>,
    /// Tells that more streams were reset than may be.
    flooded: Notify,
}

impl ServedStreams {
    /// Those of a connection that may have `streams` open. `activity` is told of each.
    pub(super) fn new(streams: u32, activity: Arc<ConnectionActivity>) -> Rc<Self> {
        let open = usize::try_from(streams).unwrap_or(usize::MAX);
        Rc::new(Self {
            count: Cell::default(),
            limit: open.saturating_add((open / RESET_PART).max(RESET_LEAST)),
            reader: Cell::default(),
            resets: RefCell::new(ResetRate::new(streams, Instant::now())),
            activity,
            flooded: Notify::new(),
        })
    }

    /// One more stream, whose request is answered by `answer`. It counts until what is returned, and the body in that, are dropped.
    pub(super) fn serve<A, B>(
        self: &Rc<Self>,
        answer: A,
    ) -> impl Future<Output = Result<Response<ServedBody<B>>, Infallible>> + use<A, B>
    where
        A: Future<Output = Response<B>>,
    {
        self.count.set(self.count.get() + 1);
        self.activity.begin_stream();
        let served = Served { of: Rc::clone(self), is_answered: false };
        async move {
            if served.expects_reset() {
                // HTTP/2 looks for a reset once the answer is waited for. Without that a request would be sent to a member for a client
                // whose reset has been read already.
                tokio::task::yield_now().await;
            }
            Ok(served.answered(answer.await))
        }
    }

    /// Waits until more streams were reset than may be. Cancel-safe.
    pub(super) async fn flooded(&self) {
        self.flooded.notified().await;
    }

    /// Whether the connection is not read now, since too many of its streams are being served.
    pub(super) fn is_read_paused(&self) -> bool {
        self.count.get() >= self.limit
    }

    fn poll_may_read(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.count.get() < self.limit {
            return Poll::Ready(());
        }
        self.reader.set(Some(cx.waker().clone()));
        Poll::Pending
    }

    fn leave(&self) {
        self.count.set(self.count.get() - 1);
        self.activity.end_stream();
        if self.count.get() < self.limit
            && let Some(reader) = self.reader.take()
        {
            reader.wake();
        }
    }

    fn count_reset(&self) {
        if !self.resets.borrow_mut().count(Instant::now()) {
            self.flooded.notify_one();
        }
    }
}

/// One stream, until dropped.
struct Served {
    of: Rc<ServedStreams>,
    is_answered: bool,
}

impl Served {
    fn expects_reset(&self) -> bool {
        self.of.resets.borrow_mut().expects_more(Instant::now())
    }

    fn answered<B>(mut self, response: Response<B>) -> Response<ServedBody<B>> {
        // Canceled is what a request is answered with that broke off before it was whole.
        self.is_answered =
            Status::from_headers(response.headers()).is_none_or(|status| status.code != Code::Canceled);
        response.map(|body| ServedBody { body, _served: self })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if !self.is_answered {
            self.of.count_reset();
        }
        self.of.leave();
    }
}

/// The body of an answer, which keeps its stream counted.
pub(super) struct ServedBody<B> {
    body: B,
    _served: Served,
}

impl<B: Body<Data = Bytes, Error = Infallible> + Unpin> Body for ServedBody<B> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The bytes of a connection, of which no more is read while too many of its streams are being served.
pub(super) struct Gated<T> {
    io: T,
    streams: Rc<ServedStreams>,
}

impl<T> Gated<T> {
    pub(super) fn new(io: T, streams: &Rc<ServedStreams>) -> Self {
        Self { io, streams: Rc::clone(streams) }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Gated<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.streams.poll_may_read(cx));
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Gated<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;
    use http_body_util::Empty;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_read_again_when_tasks_of_reset_streams_have_ended() {
        let (mut client, near) = tokio::io::duplex(1024);
        let streams = ServedStreams::new(8, Arc::default());
        let mut gated = Gated::new(near, &streams);
        let pending = || std::future::pending::<Response<Empty<Bytes>>>();
        let mut serving: Vec<_> = (0..8 + RESET_LEAST - 1).map(|_| streams.serve(pending())).collect();
        client.write_all(b"ab").await.expect("written");
        assert_eq!(gated.read_u8().await.ok(), Some(b'a'), "there is room for one more");
        serving.push(streams.serve(pending()));
        let mut reading = pin!(gated.read_u8());
        assert!(reading.as_mut().now_or_never().is_none(), "not until a task ends");
        drop(serving.pop());
        assert_eq!(reading.await.ok(), Some(b'b'));
        // Those that nobody answered were reset: more of them than may be.
        drop(serving);
        assert!(streams.flooded().now_or_never().is_some());
        let served = streams.serve(async { Response::new(Empty::<Bytes>::new()) }).await;
        assert_eq!(streams.count.get(), 1, "it counts until its body is dropped");
        drop(served);
        assert_eq!(streams.count.get(), 0);
    }
}
