//! What HTTP reads of a client: the socket's bytes, after those that were looked at before.
//!
//! Owns: the order of these bytes, how many have come, and where a connection is written anew (`odd_authority`). Must not know:
//! what is done with them. Invariants: a byte that was looked at is read, once; of a connection that turns out to be ordinary
//! nothing but the socket is left on the way; what is written passes.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::downstream::odd_authority::{Course, Shim};
use crate::downstream::socket_progress::SocketProgress;
use crate::io::Stream;
use crate::telemetry::metrics::{Metrics, one};

/// How much is read at once where it is looked at.
const READ: usize = 8 * 1024;

/// The bytes of one connection.
pub(super) struct Inbound {
    stream: Stream,
    ahead: Ahead,
    progress: Rc<SocketProgress>,
}

/// What stands before the socket.
enum Ahead {
    Nothing,
    /// These were looked at.
    Taken(Bytes),
    Shim(Box<Watched>),
}

/// A shim, and who counts what becomes of it.
struct Watched {
    shim: Shim,
    metrics: Arc<Metrics>,
}

impl Inbound {
    /// `taken` has been read of `stream`. `progress` is told what is read of both, and what is written.
    pub(super) fn new(stream: Stream, taken: Bytes, progress: Rc<SocketProgress>) -> Self {
        let ahead = if taken.is_empty() { Ahead::Nothing } else { Ahead::Taken(taken) };
        Self { stream, ahead, progress }
    }

    /// The same where a connection may have an odd authority.
    pub(super) fn looking_for_odd_authority(
        stream: Stream,
        taken: &[u8],
        progress: Rc<SocketProgress>,
        largest_list: usize,
        metrics: Arc<Metrics>,
    ) -> Self {
        let mut shim = Shim::new(largest_list);
        shim.push(taken);
        Self { stream, ahead: Ahead::Shim(Box::new(Watched { shim, metrics })), progress }
    }

    fn poll_ahead(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.ahead {
            Ahead::Nothing => {}
            Ahead::Taken(taken) => {
                give(taken, buf);
                if taken.is_empty() {
                    self.ahead = Ahead::Nothing;
                }
                return Poll::Ready(Ok(()));
            }
            Ahead::Shim(watched) => {
                let read = ready!(watched.poll_made(&mut self.stream, cx, buf));
                if watched.shim.course() == Course::Ordinary && watched.shim.held() == 0 {
                    self.ahead = Ahead::Nothing;
                }
                return Poll::Ready(read);
            }
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl Watched {
    fn poll_made(
        &mut self,
        stream: &mut Stream,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let before = self.shim.course();
            let made = self.shim.made();
            if !made.is_empty() {
                give(made, buf);
                self.count(before);
                return Poll::Ready(Ok(()));
            }
            if matches!(self.shim.course(), Course::Refused(_)) {
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

    fn count(&self, before: Course) {
        let now = self.shim.course();
        if before == Course::Undecided && !matches!(now, Course::Undecided | Course::Ordinary) {
            self.metrics.odd_authority.connections.inc();
        }
        if let Course::Refused(doubt) = now
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
        self.progress.note_write(polled.is_ready());
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
