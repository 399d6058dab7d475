//! The body of a request or a response, as read from HTTP/2.
//!
//! Owns: returning flow-control credit for bytes taken by the reader. Must not know: the content of the body.
//! Invariant: bytes not taken keep the peer's window closed.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{Reason, RecvStream};
use http_body::{Body, Frame};

/// The body of a client's request, or of a member's response. Dropping a member's body resets the stream,
/// unless the stream has ended.
pub struct Http2Body {
    stream: RecvStream,
    is_data_over: bool,
}

impl Http2Body {
    /// A body read from `stream`.
    #[must_use]
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, is_data_over: false }
    }
}

impl Body for Http2Body {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        let body = &mut *self;
        if !body.is_data_over {
            match ready!(body.stream.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    if let Err(error) = body.stream.flow_control().release_capacity(bytes.len()) {
                        return Poll::Ready(Some(Err(error)));
                    }
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Some(Err(error)) => return Poll::Ready(ended(error)),
                None => body.is_data_over = true,
            }
        }
        Poll::Ready(match ready!(body.stream.poll_trailers(cx)) {
            Ok(trailers) => trailers.map(|trailers| Ok(Frame::trailers(trailers))),
            Err(error) => ended(error),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}

/// A reset with NO_ERROR ends a body in order: the peer needs no more of the exchange (RFC 9113, section
/// 8.1).
fn ended(error: h2::Error) -> Option<Result<Frame<Bytes>, h2::Error>> {
    (error.reason() != Some(Reason::NO_ERROR)).then_some(Err(error))
}
