//! The answer of a unary call as an HTTP response.
//!
//! Owns: telling an answer from a refusal, and passing on the answer's bytes. Must not know: JSON: the
//! gateway has rewritten the message ([`rewritten_answer`](keyward_gateway::rewritten_answer)). Invariant:
//! a refusal after the first byte breaks the response off. A large answer ends only when the connection asks
//! for more behind its last byte: until then the answer's bytes are counted as unread.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http_body::Body as _;

use keyward_downstream::client_body::AnswerBroken;
use keyward_etcd::refusal::{Code, Status};
use keyward_etcd::rpc::frame::{PREFIX, announced};
use keyward_gateway::reply::{DownstreamResponse, Reply};

/// The rest of a unary answer's message.
pub struct AnswerBytes {
    reply: Reply,
    /// Bytes received and not passed on yet.
    ahead: Bytes,
    /// Bytes of the message not passed on yet, the ones in `ahead` among them.
    left: usize,
    /// The connection has taken all bytes.
    is_over: bool,
}

impl AnswerBytes {
    /// Reads an answer up to its message's beginning. Cancel-safe only as a whole.
    ///
    /// # Errors
    /// The call was refused: the status.
    pub(super) async fn begin(response: DownstreamResponse) -> Result<Self, Status> {
        let (head, mut reply) = response.into_parts();
        if let Some(status) = Status::from_headers(&head.headers) {
            return Err(status);
        }
        let mut ahead = Bytes::new();
        while ahead.len() < PREFIX {
            let frame = poll_fn(|cx| Pin::new(&mut reply).poll_frame(cx)).await;
            let Some(Ok(frame)) = frame else { return Err(without_answer()) };
            ahead = match frame.into_data() {
                Ok(data) if ahead.is_empty() => data,
                Ok(data) => [ahead, data].concat().into(),
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    let status = Status::from_headers(&trailers).filter(|status| !status.is_ok());
                    return Err(status.unwrap_or_else(without_answer));
                }
            };
        }
        let left = announced(&ahead).unwrap_or_default();
        ahead.advance(PREFIX);
        Ok(Self { is_over: left == 0 || !reply.is_counted(), reply, ahead, left })
    }

    /// Bytes of the message not passed on yet.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// True if the connection needs to ask for no more.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0 && self.is_over
    }

    /// The next bytes of the message; `None` after its end.
    pub(super) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, AnswerBroken>>> {
        if self.left == 0 {
            self.is_over = true;
            return Poll::Ready(None);
        }
        if self.ahead.is_empty() {
            let frame = ready!(Pin::new(&mut self.reply).poll_frame(cx));
            let data = frame.and_then(Result::ok).and_then(|frame| frame.into_data().ok());
            let Some(data) = data else { return Poll::Ready(Some(Err(AnswerBroken))) };
            self.ahead = data;
        }
        let data = std::mem::take(&mut self.ahead);
        self.left = self.left.saturating_sub(data.len());
        Poll::Ready(Some(Ok(data)))
    }
}

/// The status of a reply that ended without a message and without a status.
pub(super) fn without_answer() -> Status {
    Status { code: Code::Unavailable, message: "keyward: the answer broke off".into() }
}
