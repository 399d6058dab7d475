//! A connection whose end is seen although nobody reads: a client may close its side right behind its
//! request.
//!
//! Owns: a byte read too early, the end, and whether bytes were read since they were last forgotten. Must not
//! know: the protocol on the connection. Invariant: every byte of the client is read once, in order.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection, with the sight of its end. Clones share the connection.
pub(super) struct WatchedEnd<T>(Rc<RefCell<Watched<T>>>);

struct Watched<T> {
    io: T,
    /// The first byte behind those that were read.
    begun: Option<u8>,
    has_ended: bool,
    has_read: bool,
}

/// The sight behind the bytes that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeenBehind {
    /// More bytes, which nobody has read.
    Bytes,
    /// The end: the client sends nothing more.
    End,
}

impl<T> WatchedEnd<T> {
    pub(super) fn new(io: T) -> Self {
        Self(Rc::new(RefCell::new(Watched { io, begun: None, has_ended: false, has_read: false })))
    }

    /// True if bytes were read since [`Self::forget_reads`].
    pub(super) fn has_read(&self) -> bool {
        self.0.borrow().has_read
    }

    /// Forgets that bytes were read.
    pub(super) fn forget_reads(&self) {
        self.0.borrow_mut().has_read = false;
    }
}

impl<T> Clone for WatchedEnd<T> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<T: AsyncRead + Unpin> WatchedEnd<T> {
    /// Ready once something is seen behind the bytes that were read: bytes are seen once, the end always.
    /// Cancel-safe.
    pub(super) fn poll_behind(&self, cx: &mut Context<'_>) -> Poll<SeenBehind> {
        let mut watched = self.0.borrow_mut();
        let watched = &mut *watched;
        if watched.begun.is_some() {
            return Poll::Pending;
        }
        if !watched.has_ended {
            let mut byte = [0];
            let mut buffer = ReadBuf::new(&mut byte);
            // An error of the connection is its end for the next reader.
            let read = ready!(Pin::new(&mut watched.io).poll_read(cx, &mut buffer));
            watched.begun = read.ok().and_then(|()| buffer.filled().first().copied());
            watched.has_ended = watched.begun.is_none();
        }
        Poll::Ready(if watched.has_ended { SeenBehind::End } else { SeenBehind::Bytes })
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WatchedEnd<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut watched = self.0.borrow_mut();
        if watched.has_ended || buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if let Some(byte) = watched.begun.take() {
            buffer.put_slice(&[byte]);
            watched.has_read = true;
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut watched.io).poll_read(cx, buffer);
        watched.has_read |= buffer.filled().len() > before;
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WatchedEnd<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0.borrow_mut().io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0.borrow_mut().io).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.borrow().io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.borrow_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.borrow_mut().io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures_util::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn what_is_seen_is_read_afterwards_in_order() {
        let (mut client, server) = duplex(64);
        let mut server = WatchedEnd::new(server);
        let seen = |server: &WatchedEnd<_>| poll_fn(|cx| server.poll_behind(cx)).now_or_never();
        assert_eq!(seen(&server), None);
        client.write_all(b"one").await.expect("room");
        assert_eq!(seen(&server), Some(SeenBehind::Bytes));
        assert_eq!(seen(&server), None);
        client.write_all(b" two").await.expect("room");
        let mut read = [0; 7];
        server.read_exact(&mut read).await.expect("bytes");
        assert_eq!(&read, b"one two");
        assert!(server.has_read());
        server.forget_reads();
        assert!(!server.has_read());
        assert_eq!(seen(&server), None);
        client.shutdown().await.expect("open");
        assert_eq!(seen(&server), Some(SeenBehind::End));
        assert_eq!(server.read(&mut read).await.expect("the end"), 0);
        server.write_all(b"answer").await.expect("the other direction is open");
        let mut answer = [0; 6];
        client.read_exact(&mut answer).await.expect("the answer");
        assert_eq!(&answer, b"answer");
    }
}
