//! Write coalescing between TLS and HTTP/2: a single system call for all bytes written by many tasks in a
//! turn of the event loop.
//!
//! Owns: a connection's write buffer, and the flusher task emptying the buffer. HTTP/2 libraries write and
//! flush several times in a turn, so flushing is not left to the library: `poll_write` appends, `poll_flush`
//! is always ready, and the flusher sends after all currently runnable tasks have run. Must not know: HTTP/2,
//! TLS, the peer.
//!
//! Invariants: an accepted byte is sent or the next write fails, even if the byte's frame stays alone for
//! hours; at most `HIGH_WATER` bytes plus a single write are buffered; shutdown sends the whole buffer
//! first; after the connection is dropped, the flusher still sends the accepted bytes, then ends.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::io::write_buffer::HIGH_WATER;

pub use crate::io::write_buffer::WriteBuffer;

struct CoalesceState<T> {
    io: T,
    pending: WriteBuffer,
    /// The flusher's waker, while the buffer is empty.
    flusher: Option<Waker>,
    /// The flusher's waker, while the socket accepts no bytes. A socket stores a single waker for writing,
    /// and a shutdown also writes: of flusher and shutdown, the first to proceed wakes the other.
    blocked: Option<Waker>,
    writer: Option<Waker>,
    failed: Option<io::ErrorKind>,
    /// The connection was dropped: the flusher sends the remaining bytes and ends.
    dropped: bool,
}

/// The connection's side: reads pass through, writes are buffered.
pub struct Coalesce<T, O = AsTheyCome> {
    shared: Rc<RefCell<CoalesceState<T>>>,
    outgoing: O,
}

/// The change of accepted bytes on their way into the buffer. The number of bytes may change.
pub trait OutgoingBytes {
    /// Appends what the accepted bytes become.
    fn append(&mut self, bytes: &[u8], to: &mut WriteBuffer);
}

/// Bytes are sent as they come.
#[derive(Clone, Copy, Debug)]
pub struct AsTheyCome;

impl OutgoingBytes for AsTheyCome {
    fn append(&mut self, bytes: &[u8], to: &mut WriteBuffer) {
        to.append(bytes);
    }
}

/// Access to a connection's bytes besides the connection itself, for a final message.
pub struct FinalMessage<T> {
    shared: Rc<RefCell<CoalesceState<T>>>,
}

/// Wraps `io`. The returned future is the flusher: spawn the flusher on the same thread, and join the flusher
/// before the runtime ends, or the last bytes (a GOAWAY) are lost. The flusher ends after the [`Coalesce`]
/// was dropped or the socket failed.
pub fn coalesce<T: AsyncRead + AsyncWrite + Unpin>(
    io: T,
) -> (TokioIo<Coalesce<T>>, impl Future<Output = ()>) {
    coalesce_through(io, AsTheyCome)
}

/// As [`coalesce`], with the bytes that `outgoing` makes of those accepted.
pub fn coalesce_through<T: AsyncRead + AsyncWrite + Unpin, O: OutgoingBytes>(
    io: T,
    outgoing: O,
) -> (TokioIo<Coalesce<T, O>>, impl Future<Output = ()>) {
    let shared = Rc::new(RefCell::new(CoalesceState {
        io,
        pending: WriteBuffer::default(),
        flusher: None,
        blocked: None,
        writer: None,
        failed: None,
        dropped: false,
    }));
    let connection = Coalesce { shared: Rc::clone(&shared), outgoing };
    (TokioIo::new(connection), flush_loop(shared))
}

impl<T, O> Coalesce<T, O> {
    /// A handle for sending a final message when the connection is no longer used.
    #[must_use]
    pub fn last_words(&self) -> FinalMessage<T> {
        FinalMessage { shared: Rc::clone(&self.shared) }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> FinalMessage<T> {
    /// Sends `bytes` after all accepted bytes, then discards the peer's bytes until the peer closes: closing
    /// a socket with unread bytes resets the connection, and the peer would miss the last bytes. The caller
    /// limits the time and must not use the connection any more. Cancel-safe.
    pub async fn say(&self, bytes: &[u8]) {
        {
            let mut shared = self.shared.borrow_mut();
            if shared.failed.is_some() {
                return;
            }
            shared.pending.append(bytes);
            shared.wake_flusher();
        }
        let mut dropped = [0; 4096];
        loop {
            let read = poll_fn(|cx| {
                let mut read = ReadBuf::new(&mut dropped);
                ready!(Pin::new(&mut self.shared.borrow_mut().io).poll_read(cx, &mut read))?;
                Poll::Ready(io::Result::Ok(read.filled().len()))
            });
            if read.await.is_ok_and(|read| read > 0) {
                // Yield, because a peer sending without end must not block other tasks.
                tokio::task::yield_now().await;
                continue;
            }
            return;
        }
    }
}

async fn flush_loop<T: AsyncRead + AsyncWrite + Unpin>(shared: Rc<RefCell<CoalesceState<T>>>) {
    loop {
        let more = poll_fn(|cx| shared.borrow_mut().poll_wanted(cx)).await;
        if !more {
            return;
        }
        // Bytes written by other runnable tasks share this system call.
        let_others_run().await;
        poll_fn(|cx| shared.borrow_mut().poll_drain(cx)).await;
    }
}

/// Ends after the tasks that are runnable now. tokio's `yield_now` would wait for the runtime's next look at
/// the sockets too, and a busy runtime polls many tasks before that.
async fn let_others_run() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if has_yielded {
            return Poll::Ready(());
        }
        has_yielded = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl<T> CoalesceState<T> {
    fn wake_writer(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
    }

    fn wake_flusher(&mut self) {
        if let Some(flusher) = self.flusher.take() {
            flusher.wake();
        }
    }

    fn wake_blocked(&mut self) {
        if let Some(flusher) = self.blocked.take() {
            flusher.wake();
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> CoalesceState<T> {
    /// Ready(true): the buffer has bytes to send. Ready(false): no more bytes will come.
    fn poll_wanted(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        if self.failed.is_some() {
            return Poll::Ready(false);
        }
        if !self.pending.is_empty() {
            return Poll::Ready(true);
        }
        if self.dropped {
            return Poll::Ready(false);
        }
        self.flusher = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Sends until the buffer is empty. An error is kept for the next writer.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let done = match self.poll_send(cx) {
            Poll::Ready(Ok(())) => None,
            Poll::Ready(Err(error)) => Some(error.kind()),
            Poll::Pending => {
                self.blocked = Some(cx.waker().clone());
                return Poll::Pending;
            }
        };
        if done.is_some() {
            self.failed = done;
            self.pending.clear();
        }
        self.wake_writer();
        Poll::Ready(())
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.pending.is_empty() {
            let sent = ready!(Pin::new(&mut self.io).poll_write(cx, self.pending.unsent()))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.pending.advance(sent);
            if self.pending.len() < HIGH_WATER {
                self.wake_writer();
            }
        }
        // TLS buffers records internally: flush the records to the socket too.
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(kind) = self.failed {
            return Poll::Ready(Err(kind.into()));
        }
        if let Err(error) = ready!(self.poll_send(cx)) {
            self.failed = Some(error.kind());
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin, O: Unpin> AsyncRead for Coalesce<T, O> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.shared.borrow_mut().io).poll_read(cx, buf)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin, O: OutgoingBytes + Unpin> AsyncWrite for Coalesce<T, O> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Self { shared, outgoing } = self.get_mut();
        let mut shared = shared.borrow_mut();
        if let Some(kind) = shared.failed {
            return Poll::Ready(Err(kind.into()));
        }
        if shared.pending.len() >= HIGH_WATER {
            shared.writer = Some(cx.waker().clone());
            shared.wake_flusher();
            return Poll::Pending;
        }
        outgoing.append(bytes, &mut shared.pending);
        shared.wake_flusher();
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.shared.borrow().failed {
            Some(kind) => Poll::Ready(Err(kind.into())),
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.shared.borrow_mut();
        let ended = shared.poll_end(cx);
        match ended {
            Poll::Pending => shared.writer = Some(cx.waker().clone()),
            Poll::Ready(_) => shared.wake_blocked(),
        }
        ended
    }

    fn is_write_vectored(&self) -> bool {
        false
    }
}

impl<T, O> Drop for Coalesce<T, O> {
    fn drop(&mut self) {
        let mut shared = self.shared.borrow_mut();
        shared.dropped = true;
        shared.wake_flusher();
        shared.wake_blocked();
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Runs `test` beside the flusher of a coalesced pipe of `capacity` bytes.
    async fn with_pipe<F: Future<Output = ()>>(
        capacity: usize,
        test: impl FnOnce(Coalesce<tokio::io::DuplexStream>, tokio::io::DuplexStream) -> F,
    ) {
        let (near, far) = tokio::io::duplex(capacity);
        let (io, flusher) = coalesce(near);
        tokio::join!(flusher, test(io.into_inner(), far));
    }

    #[tokio::test]
    async fn a_lone_frame_is_sent_without_a_flush() {
        with_pipe(1024, |mut io, mut far| async move {
            assert_eq!(io.write(b"frame").await.ok(), Some(5));
            let mut seen = [0; 5];
            far.read_exact(&mut seen).await.expect("the frame arrives");
            assert_eq!(&seen, b"frame");
        })
        .await;
    }

    #[tokio::test]
    async fn writers_wait_at_the_high_water_mark_and_nothing_is_lost() {
        with_pipe(512, |mut io, mut far| async move {
            let total = 4 * HIGH_WATER;
            let write = async move {
                for chunk in vec![7u8; total].chunks(8 * 1024) {
                    io.write_all(chunk).await.expect("accepted");
                    assert!(io.shared.borrow().pending.len() <= HIGH_WATER + 8 * 1024);
                }
                drop(io);
            };
            let read = async move {
                let mut seen = Vec::new();
                far.read_to_end(&mut seen).await.expect("reads to the end");
                assert_eq!(seen.len(), total);
            };
            tokio::join!(write, read);
        })
        .await;
    }

    #[tokio::test]
    async fn shutdown_sends_what_was_accepted() {
        with_pipe(4, |mut io, mut far| async move {
            io.write_all(b"the last GOAWAY").await.expect("accepted");
            let mut seen = String::new();
            let (closed, read) = tokio::join!(io.shutdown(), far.read_to_string(&mut seen));
            assert!(closed.is_ok() && read.is_ok());
            assert_eq!(seen, "the last GOAWAY");
        })
        .await;
    }

    /// Flusher and shutdown have separate wakers, as separate tasks have; the socket stores a single waker.
    #[tokio::test(start_paused = true)]
    async fn a_shutdown_under_back_pressure_leaves_no_flusher_behind() {
        use std::time::Duration;

        use futures_util::stream::{FuturesUnordered, StreamExt as _};
        use futures_util::{FutureExt as _, future::LocalBoxFuture};

        let (near, mut far) = tokio::io::duplex(4);
        let (io, flusher) = coalesce(near);
        let mut io = io.into_inner();
        let ending = async move {
            io.write_all(b"more than the socket takes").await.expect("accepted");
            // The flusher meets the full socket first, then the shutdown does.
            tokio::time::sleep(Duration::from_millis(1)).await;
            io.shutdown().await.expect("sent");
        };
        let mut both: FuturesUnordered<LocalBoxFuture<'_, ()>> =
            [flusher.boxed_local(), ending.boxed_local()].into_iter().collect();
        let ended = async { while both.next().await.is_some() {} };
        let read = async {
            tokio::time::sleep(Duration::from_millis(2)).await;
            let mut seen = String::new();
            far.read_to_string(&mut seen).await.expect("reads to the end");
            assert_eq!(seen, "more than the socket takes");
        };
        let (ended, ()) = tokio::join!(tokio::time::timeout(Duration::from_secs(1), ended), read);
        assert!(ended.is_ok(), "neither waits for ever");
    }

    #[tokio::test]
    async fn a_dropped_connection_still_sends_what_was_accepted() {
        with_pipe(4, |mut io, mut far| async move {
            io.write_all(b"after drop").await.expect("accepted");
            drop(io);
            let mut seen = String::new();
            far.read_to_string(&mut seen).await.expect("reads to the end");
            assert_eq!(seen, "after drop");
        })
        .await;
    }

    #[tokio::test]
    async fn a_broken_socket_fails_the_next_write() {
        with_pipe(4, |mut io, far| async move {
            drop(far);
            assert!(io.write(b"lost").await.is_ok());
            while io.shared.borrow().failed.is_none() {
                tokio::task::yield_now().await;
            }
            assert!(io.write(b"more").await.is_err());
        })
        .await;
    }
}
