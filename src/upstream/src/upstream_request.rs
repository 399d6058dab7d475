//! The body of a request to a member, on its way into HTTP/2.
//!
//! Owns: handing whole messages to h2 at once, and streams piece by piece as the member's window allows. Must
//! not know: the meaning of the messages, the call.
//! Invariant: a request keeps its seat on the connection, and a tracked request its tracker, until h2 has
//! written or discarded the message: a call given up meanwhile frees neither before.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use h2::{Reason, SendStream};
use http_body::{Body as _, Frame};
use hyper::rt::Executor as _;
use tokio::sync::oneshot;

use crate::connection_load::SeatGuard;
use crate::outbox::OutboxMessages;
use keyward_base::io::http2_body::Http2Body;
use keyward_base::tasks::LocalExecutor;

/// The body of a request to a member.
pub enum UpstreamRequestBody {
    /// A whole message, framed.
    Once(Bytes),
    /// A whole message, framed. The sender is dropped, and its receiver told, once the message has left for
    /// the member, or never will.
    Tracked(Bytes, oneshot::Sender<Infallible>),
    /// Framed messages of an outbox. Dropping the outbox half-closes the stream.
    Frames(OutboxMessages),
    /// The client's own request body, passed on unread.
    Piped(Http2Body),
}

/// Bytes in h2's queue, with the guards held until h2 has written or discarded the bytes.
pub(super) struct QueuedBytes {
    bytes: Bytes,
    #[expect(dead_code, reason = "held for its drop")]
    guards: Option<(Arc<SeatGuard>, Option<oneshot::Sender<Infallible>>)>,
}

impl Buf for QueuedBytes {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }

    fn copy_to_bytes(&mut self, length: usize) -> Bytes {
        self.bytes.copy_to_bytes(length)
    }
}

/// The source of a streamed body.
enum StreamSource {
    Frames(OutboxMessages),
    Piped(Http2Body),
}

/// Sends the body on `stream`. Whole messages are queued at once; streams are sent by a task, as the member's
/// window allows, until their end or the end of the stream.
pub(super) fn send_body(body: UpstreamRequestBody, stream: SendStream<QueuedBytes>, seat: Arc<SeatGuard>) {
    let mut stream = stream;
    let (bytes, tracker) = match body {
        UpstreamRequestBody::Once(bytes) => (bytes, None),
        UpstreamRequestBody::Tracked(bytes, tracker) => (bytes, Some(tracker)),
        UpstreamRequestBody::Frames(frames) => {
            return LocalExecutor.execute(pump(StreamSource::Frames(frames), stream, seat));
        }
        UpstreamRequestBody::Piped(body) => {
            return LocalExecutor.execute(pump(StreamSource::Piped(body), stream, seat));
        }
    };
    if let Err(error) = stream.send_data(QueuedBytes { bytes, guards: Some((seat, tracker)) }, true) {
        // The response's future reports the stream's end.
        tracing::debug!(%error, "a request's message was not sent");
    }
}

async fn pump(mut source: StreamSource, mut stream: SendStream<QueuedBytes>, seat: Arc<SeatGuard>) {
    while poll_fn(|cx| poll_room(&mut stream, cx)).await {
        let next = poll_fn(|cx| {
            if stream.poll_reset(cx).is_ready() {
                return Poll::Ready(None);
            }
            source.poll_next(cx).map(Some)
        });
        let sent = match next.await {
            Some(Some(Ok(frame))) => match frame.into_data() {
                Ok(bytes) => {
                    let guards = Some((Arc::clone(&seat), None));
                    stream.send_data(QueuedBytes { bytes, guards }, false)
                }
                Err(frame) => {
                    return drop(stream.send_trailers(frame.into_trailers().unwrap_or_default()));
                }
            },
            Some(Some(Err(_))) => return stream.send_reset(Reason::CANCEL),
            Some(None) => {
                return drop(stream.send_data(QueuedBytes { bytes: Bytes::new(), guards: None }, true));
            }
            None => return,
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Waits until the member's window has room for a byte; false if the stream has ended.
fn poll_room(stream: &mut SendStream<QueuedBytes>, cx: &mut Context<'_>) -> Poll<bool> {
    stream.reserve_capacity(1);
    while stream.capacity() == 0 {
        match ready!(stream.poll_capacity(cx)) {
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return Poll::Ready(false),
        }
    }
    Poll::Ready(true)
}

impl StreamSource {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        match self {
            Self::Frames(frames) => frames.poll_next(cx).map(|next| next.map(|bytes| Ok(Frame::data(bytes)))),
            Self::Piped(body) => Pin::new(body).poll_frame(cx),
        }
    }
}
