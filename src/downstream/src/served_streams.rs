//! The streams of one connection in service, including streams already reset by the client.
//!
//! Owns: the count of streams with a running task, the pause of reading at the limit, and the count of resets
//! before the answer. Must not know: the services served, HTTP/2's frames.
//! Invariants: a stream counts until its task has ended, although HTTP/2 stops counting a stream once it is
//! reset. The limit is above the permitted number of open streams, so the tasks beyond that number belong to
//! reset streams and end without further reading: a pause in reading never waits for a stream waiting for its
//! client.

use std::cell::{Cell, RefCell};
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

use crate::client_body::ReplyBody;
use crate::connection_activity::ConnectionActivity;
use crate::reset_rate::ResetRate;
use keyward_etcd::refusal::{Code, Status};

/// Divisor: tasks of reset streams may number up to a quarter of the permitted open streams before reading
/// pauses.
const RESET_PART: usize = 4;
/// Lower bound for the same number.
const RESET_LEAST: usize = 64;

/// The streams of one connection in service.
pub(super) struct ServedStreams {
    count: Cell<usize>,
    /// All streams since the connection began.
    begun: Cell<u64>,
    limit: usize,
    /// The task reading the connection, while reading is paused.
    reader: Cell<Option<Waker>>,
    resets: RefCell<ResetRate>,
    activity: Arc<ConnectionActivity>,
    /// Notified when the client has reset more streams than allowed.
    flooded: Notify,
}

impl ServedStreams {
    /// A counter for a connection with up to `streams` open streams. `activity` is informed of each stream.
    pub(super) fn new(streams: u32, activity: Arc<ConnectionActivity>) -> Rc<Self> {
        let open = usize::try_from(streams).unwrap_or(usize::MAX);
        Rc::new(Self {
            count: Cell::default(),
            begun: Cell::default(),
            limit: open.saturating_add((open / RESET_PART).max(RESET_LEAST)),
            reader: Cell::default(),
            resets: RefCell::new(ResetRate::new(streams, Instant::now())),
            activity,
            flooded: Notify::new(),
        })
    }

    /// Counts a new stream, with its request answered by `answer`. The stream counts until the returned
    /// future and the response body are dropped. `answer` should be small, as a box: a task's future is
    /// copied some ten times while the task is spawned.
    pub(super) fn serve<A, B>(self: &Rc<Self>, answer: A) -> ServedAnswer<A>
    where
        A: Future<Output = Response<B>> + Unpin,
    {
        self.count.set(self.count.get() + 1);
        self.begun.set(self.begun.get() + 1);
        self.activity.begin_stream();
        let served = ServedStream { of: Rc::clone(self), is_answered: false };
        let yields = served.expects_reset();
        ServedAnswer { answer, served: Some(served), yields }
    }

    /// Counts a connection taken over by another protocol as one stream, until the returned guard is dropped.
    pub(super) fn occupy(self: &Rc<Self>) -> ServedStream {
        self.count.set(self.count.get() + 1);
        self.activity.begin_takeover();
        ServedStream { of: Rc::clone(self), is_answered: true }
    }

    /// Waits until the client has reset more streams than allowed. Cancel-safe.
    pub(super) async fn flooded(&self) {
        self.flooded.notified().await;
    }

    /// True while a stream is in service.
    pub(super) fn is_serving(&self) -> bool {
        self.count.get() > 0
    }

    /// The number of streams since the connection began.
    pub(super) fn begun(&self) -> u64 {
        self.begun.get()
    }

    /// True while reading is paused because too many streams are in service.
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

/// The answer to one counted stream.
pub(super) struct ServedAnswer<A> {
    answer: A,
    served: Option<ServedStream>,
    /// True while the first poll is put off.
    yields: bool,
}

impl<A, B> Future for ServedAnswer<A>
where
    A: Future<Output = Response<B>> + Unpin,
{
    type Output = Response<ServedBody<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if std::mem::take(&mut self.yields) {
            // h2 checks for a reset only once the answer is awaited. Without the yield, a request would be
            // sent to a member for a client whose reset has been read already.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let response = ready!(Pin::new(&mut self.answer).poll(cx));
        match self.served.take() {
            Some(served) => Poll::Ready(served.answered(response)),
            None => Poll::Pending,
        }
    }
}

/// One stream, counted until dropped.
pub(super) struct ServedStream {
    of: Rc<ServedStreams>,
    is_answered: bool,
}

impl ServedStream {
    fn expects_reset(&self) -> bool {
        self.of.resets.borrow_mut().expects_more(Instant::now)
    }

    fn answered<B>(mut self, response: Response<B>) -> Response<ServedBody<B>> {
        // A request broken off before its end is answered with Canceled.
        self.is_answered =
            Status::from_headers(response.headers()).is_none_or(|status| status.code != Code::Canceled);
        response.map(|body| ServedBody { body, _served: self })
    }
}

impl Drop for ServedStream {
    fn drop(&mut self) {
        if !self.is_answered {
            self.of.count_reset();
        }
        self.of.leave();
    }
}

/// A response body; its stream counts until the body is dropped.
pub(super) struct ServedBody<B> {
    body: B,
    _served: ServedStream,
}

impl<B: ReplyBody + Unpin> ReplyBody for ServedBody<B> {
    fn poll_work(&mut self, cx: &mut Context<'_>) {
        self.body.poll_work(cx);
    }

    fn joins_messages(&self) -> bool {
        self.body.joins_messages()
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for ServedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The connection's bytes; reading pauses while too many streams are in service.
pub(super) struct PausableReader<T> {
    io: T,
    streams: Rc<ServedStreams>,
}

impl<T> PausableReader<T> {
    pub(super) fn new(io: T, streams: &Rc<ServedStreams>) -> Self {
        Self { io, streams: Rc::clone(streams) }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for PausableReader<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.streams.poll_may_read(cx));
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for PausableReader<T> {
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
        let mut gated = PausableReader::new(near, &streams);
        let pending = || std::future::pending::<Response<Empty<Bytes>>>();
        let mut serving: Vec<_> = (0..8 + RESET_LEAST - 1).map(|_| streams.serve(pending())).collect();
        client.write_all(b"ab").await.expect("written");
        assert_eq!(gated.read_u8().await.ok(), Some(b'a'), "there is room for one more");
        serving.push(streams.serve(pending()));
        let mut reading = pin!(gated.read_u8());
        assert!(reading.as_mut().now_or_never().is_none(), "not until a task ends");
        drop(serving.pop());
        assert_eq!(reading.await.ok(), Some(b'b'));
        // Unanswered streams count as reset: more than allowed.
        drop(serving);
        assert!(streams.flooded().now_or_never().is_some());
        let served = streams.serve(std::future::ready(Response::new(Empty::<Bytes>::new()))).await;
        assert_eq!(streams.count.get(), 1, "it counts until its body is dropped");
        drop(served);
        assert_eq!(streams.count.get(), 0);
    }
}
