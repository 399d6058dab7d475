//! A byte stream that can be cut from outside, as a pulled cable would: HTTP/2 above it ends, and all that it carries.
//!
//! hyper's client drives its connection in a task of its own, which lives for as long as a stream on it does; only the
//! bytes underneath are ours to end. Owns: the cut, and whether the other side ever sent a byte. Must not know: who cuts,
//! and why. Invariant: after the cut every read and write fails, also one that waits. The scissors go to any thread.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

#[derive(Default)]
struct Shared {
    cut: AtomicBool,
    reader: AtomicWaker,
    heard: AtomicBool,
    hearing: Notify,
}

/// The stream's side.
pub struct Cuttable<T, K> {
    io: T,
    shared: Arc<Shared>,
    #[expect(dead_code, reason = "dropped with the stream, after it")]
    keep: K,
}

/// The other side.
#[derive(Clone)]
pub struct Scissors(Arc<Shared>);

/// Wraps `io`. `keep` is dropped when it is: only then is a socket closed.
pub fn cuttable<T, K>(io: T, keep: K) -> (Cuttable<T, K>, Scissors) {
    let shared = Arc::new(Shared::default());
    (Cuttable { io, shared: Arc::clone(&shared), keep }, Scissors(shared))
}

impl Scissors {
    /// Cuts. Whoever waits for a byte is told.
    pub fn cut(&self) {
        self.0.cut.store(true, Ordering::SeqCst);
        self.0.reader.wake();
    }

    /// Waits for the first byte from the other side. Cancel-safe.
    pub async fn heard(&self) {
        loop {
            // It is told of what comes from here on, before it is awaited too.
            let hearing = self.0.hearing.notified();
            if self.0.heard.load(Ordering::SeqCst) {
                return;
            }
            hearing.await;
        }
    }
}

impl<T, K> Cuttable<T, K> {
    fn whole(&self) -> io::Result<()> {
        if self.shared.cut.load(Ordering::SeqCst) {
            Err(io::ErrorKind::ConnectionAborted.into())
        } else {
            Ok(())
        }
    }
}

impl<T: AsyncRead + Unpin, K: Unpin> AsyncRead for Cuttable<T, K> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // First the waker, then the look: a cut in between is seen or wakes.
        self.shared.reader.register(cx.waker());
        self.whole()?;
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, buffer);
        if buffer.filled().len() > before && !self.shared.heard.load(Ordering::Relaxed) {
            self.shared.heard.store(true, Ordering::SeqCst);
            self.shared.hearing.notify_waiters();
        }
        polled
    }
}

impl<T: AsyncWrite + Unpin, K: Unpin> AsyncWrite for Cuttable<T, K> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.whole()?;
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.whole()?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_cut_ends_a_read_that_waits_and_every_write_after_it() {
        let (near, mut far) = tokio::io::duplex(64);
        let (mut near, scissors) = cuttable(near, ());
        near.write_all(b"before").await.unwrap();
        let mut before = [0; 6];
        far.read_exact(&mut before).await.unwrap();
        let mut byte = [0];
        let waiting = near.read_exact(&mut byte);
        let (read, ()) = tokio::join!(waiting, async { scissors.cut() });
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        let written = near.write_all(b"after").await;
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        near.shutdown().await.unwrap();
        assert_eq!(far.read(&mut byte).await.unwrap(), 0, "what is underneath is closed in order");
    }
}
