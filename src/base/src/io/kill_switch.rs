//! A kill switch for a byte stream: cutting the stream acts like a pulled cable and ends the HTTP/2
//! connection above with all its streams.
//!
//! A connection's task lives as long as any stream of the connection; the cut ends it at once, from any
//! thread. Owns: the cut, and the count of bytes from the peer. Must not know: when and why a stream is cut.
//! Invariant: after the cut every read and write fails, including a read already waiting.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

#[derive(Default)]
struct KillSwitchState {
    cut: AtomicBool,
    reader: AtomicWaker,
    received: AtomicU64,
    hearing: Notify,
    /// The first failure of a read.
    failure: OnceLock<io::Error>,
}

impl KillSwitchState {
    /// Keeps the first failure of a read, for whoever judges it: the reader gets its kind and its text.
    fn keep_failure(&self, error: io::Error) -> io::Error {
        let told = io::Error::new(error.kind(), error.to_string());
        drop(self.failure.set(error));
        told
    }
}

/// The byte stream's side.
pub struct CuttableStream<T, K> {
    io: T,
    shared: Arc<KillSwitchState>,
    #[expect(dead_code, reason = "dropped with the stream, after it")]
    keep: K,
}

/// The kill switch.
#[derive(Clone)]
pub struct KillSwitch(Arc<KillSwitchState>);

/// Wraps `io`. `keep` is dropped together with `io`, when the socket is really closed.
pub fn cuttable<T, K>(io: T, keep: K) -> (CuttableStream<T, K>, KillSwitch) {
    let shared = Arc::new(KillSwitchState::default());
    (CuttableStream { io, shared: Arc::clone(&shared), keep }, KillSwitch(shared))
}

impl KillSwitch {
    /// Cuts the stream and wakes a waiting reader.
    pub fn cut(&self) {
        self.0.cut.store(true, Ordering::SeqCst);
        self.0.reader.wake();
    }

    /// Waits for the first byte from the peer. Cancel-safe.
    pub async fn first_byte(&self) {
        loop {
            // Created before the check, so that a byte arriving in between is not missed.
            let hearing = self.0.hearing.notified();
            if self.received() > 0 {
                return;
            }
            hearing.await;
        }
    }

    /// The first failure of a read, as the stream told it.
    #[must_use]
    pub fn read_failure(&self) -> Option<&io::Error> {
        self.0.failure.get()
    }

    /// Number of bytes received from the peer.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.0.received.load(Ordering::SeqCst)
    }
}

impl<T, K> CuttableStream<T, K> {
    fn check_not_cut(&self) -> io::Result<()> {
        if self.shared.cut.load(Ordering::SeqCst) {
            Err(io::ErrorKind::ConnectionAborted.into())
        } else {
            Ok(())
        }
    }
}

impl<T: AsyncRead + Unpin, K: Unpin> AsyncRead for CuttableStream<T, K> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Register the waker before the check, so that a cut in between is seen or wakes the reader.
        self.shared.reader.register(cx.waker());
        self.check_not_cut()?;
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.io).poll_read(cx, buffer);
        let read = buffer.filled().len() - before;
        // A stream has one reader, so no other thread adds.
        let received = self.shared.received.load(Ordering::Relaxed);
        self.shared.received.store(received + read as u64, Ordering::SeqCst);
        if received == 0 && read > 0 {
            self.shared.hearing.notify_waiters();
        }
        polled.map_err(|error| self.shared.keep_failure(error))
    }
}

impl<T: AsyncWrite + Unpin, K: Unpin> AsyncWrite for CuttableStream<T, K> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check_not_cut()?;
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_not_cut()?;
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
