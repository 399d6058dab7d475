//! The bytes of a client as read by HTTP: bytes already read to detect the protocol, then the socket's.
//!
//! Owns: the order of the bytes, their count, and the use of the header rewriting in `odd_authority`. Must
//! not know: the use of the bytes. Invariants: every byte is delivered exactly once. On an ordinary
//! connection reads go straight to the socket as soon as buffered bytes are used up. Writes pass unchanged.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::odd_authority::{AuthorityShim, ShimState};
use crate::socket_progress::SocketProgress;
use keyward_base::io::ByteStream;
use keyward_telemetry::metrics::Metrics;
use keyward_telemetry::single_label::one;

/// Read size while the shim inspects the bytes.
const READ: usize = 8 * 1024;

/// The bytes of one connection.
pub(super) struct Inbound {
    stream: ByteStream,
    ahead: InboundBuffer,
    progress: Rc<SocketProgress>,
}

/// Source of bytes before the socket.
enum InboundBuffer {
    Nothing,
    /// Bytes already read from the socket.
    Taken(Bytes),
    Shim(Box<CountedShim>),
}

/// A shim, and the metrics for counting its outcome.
struct CountedShim {
    shim: AuthorityShim,
    metrics: Arc<Metrics>,
}

impl Inbound {
    /// A reader of `taken`, already read from `stream`, then of `stream`. Records reads and writes in
    /// `progress`.
    pub(super) fn new(stream: ByteStream, taken: Bytes, progress: Rc<SocketProgress>) -> Self {
        let ahead = if taken.is_empty() { InboundBuffer::Nothing } else { InboundBuffer::Taken(taken) };
        Self { stream, ahead, progress }
    }

    /// Same as `new`, for a connection that may send an invalid authority.
    pub(super) fn looking_for_odd_authority(
        stream: ByteStream,
        taken: &[u8],
        progress: Rc<SocketProgress>,
        largest_list: usize,
        metrics: Arc<Metrics>,
    ) -> Self {
        let mut shim = AuthorityShim::new(largest_list);
        shim.push(taken);
        Self { stream, ahead: InboundBuffer::Shim(Box::new(CountedShim { shim, metrics })), progress }
    }

    fn poll_ahead(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.ahead {
            InboundBuffer::Nothing => {}
            InboundBuffer::Taken(taken) => {
                give(taken, buf);
                if taken.is_empty() {
                    self.ahead = InboundBuffer::Nothing;
                }
                return Poll::Ready(Ok(()));
            }
            InboundBuffer::Shim(watched) => {
                let read = ready!(watched.poll_made(&mut self.stream, cx, buf));
                if watched.shim.course() == ShimState::Ordinary && watched.shim.buffered_bytes() == 0 {
                    self.ahead = InboundBuffer::Nothing;
                }
                return Poll::Ready(read);
            }
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl CountedShim {
    fn poll_made(
        &mut self,
        stream: &mut ByteStream,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let before = self.shim.course();
            let made = self.shim.output();
            if !made.is_empty() {
                give(made, buf);
                self.count(before);
                return Poll::Ready(Ok(()));
            }
            if matches!(self.shim.course(), ShimState::Refused(_)) {
                return Poll::Ready(Ok(()));
            }
            let mut bytes = [0; READ];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            self.shim.push(read.filled());
        }
    }

    fn count(&self, before: ShimState) {
        let now = self.shim.course();
        if before == ShimState::Undecided && !matches!(now, ShimState::Undecided | ShimState::Ordinary) {
            self.metrics.odd_authority.connections.inc();
        }
        if let ShimState::Refused(doubt) = now
            && before != now
        {
            tracing::debug!(reason = doubt.name(), "a connection with an odd authority is in doubt");
            self.metrics.odd_authority.refused.get_or_create(&one("reason", doubt.name())).inc();
        }
    }
}

fn give(from: &mut impl Buf, buf: &mut ReadBuf<'_>) {
    let length = from.remaining().min(buf.remaining());
    buf.put_slice(&from.chunk()[..length]);
    from.advance(length);
}

impl AsyncRead for Inbound {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = self.poll_ahead(cx, buf);
        let read = buf.filled().len() - before;
        self.progress.note_received(read);
        polled
    }
}

impl AsyncWrite for Inbound {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        let sent = if let Poll::Ready(Ok(sent)) = &polled { *sent } else { 0 };
        self.progress.note_write(polled.is_ready(), sent);
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
