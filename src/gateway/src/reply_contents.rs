//! The remaining contents of a reply: held data, a member's body, or a stream made by Keyward.
//!
//! Owns: the order of the contents, and the single set of trailers at the end. Must not know: HTTP/2, the
//! caller, the limit on held data.
//! Invariant: an error or an early end of a member's body becomes trailers with Unavailable.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::Body as _;

use crate::active_streams::Registration;
use keyward_base::io::http2_body::Http2Body;
use keyward_downstream::client_replies::{ClientReply, ReplyReceiver, TakenGuard};
use keyward_etcd::refusal::{Refusal, RefusalCause, Status};
use keyward_etcd::rpc::frame::MessageBorder;
use keyward_upstream::answer::OnLoss;
use keyward_upstream::credentials::TokenUseGuard;
use keyward_upstream::member_connection::InFlight;

/// The contents after the held data.
pub(super) enum ReplyRest {
    /// No more contents: the header carried the status.
    Nothing,
    /// Trailers.
    Trailers(HeaderMap),
    /// A member's body, relayed for as long as the caller may go on.
    Piped(Http2Body, BrokenEnd, Registration),
    /// A stream made by Keyward; a sender dropped without an end counts as an early end, answered with the
    /// refusal. The last field is the accounting of the message taken last by HTTP/2; HTTP/2 asks for the
    /// next message after sending most of the previous message.
    Ours(ReplyReceiver, Refusal, TakenGuard),
}

/// The replacement for the end of a member's body that breaks off.
pub(super) struct BrokenEnd {
    pub(super) refusal: Refusal,
    /// For a body that breaks off with the connection; `refusal` without.
    pub(super) on_loss: Option<OnLoss>,
}

/// The remaining contents of a reply.
pub(super) struct ReplyContents {
    held: VecDeque<Bytes>,
    rest: ReplyRest,
    /// The end of the message passed on in part; not followed in a stream made by Keyward.
    border: MessageBorder,
    /// The upstream connection's in-flight count and the credential in use, held until the reply has ended.
    #[expect(dead_code, reason = "held for what its drop does")]
    keep: Option<(InFlight, Option<TokenUseGuard>)>,
}

/// A piece of a reply.
pub(super) enum ReplyPiece {
    /// Bytes of messages, framed.
    Data(Bytes),
    /// The trailers, and the cause if Keyward refuses.
    End(HeaderMap, Option<RefusalCause>),
    /// No more pieces.
    Nothing,
}

impl ReplyContents {
    pub(super) fn new(
        held: VecDeque<Bytes>,
        rest: ReplyRest,
        keep: Option<(InFlight, Option<TokenUseGuard>)>,
    ) -> Self {
        Self { held, rest, border: MessageBorder::default(), keep }
    }

    /// No contents: the header carried the status.
    pub(super) fn none() -> Self {
        Self::new(VecDeque::new(), ReplyRest::Nothing, None)
    }

    /// The rest of a message, and these trailers.
    pub(super) fn ended(rest: Option<Bytes>, trailers: HeaderMap) -> Self {
        Self::new(rest.into_iter().collect(), ReplyRest::Trailers(trailers), None)
    }

    /// Takes the rest of the message that was passed on in part, empty between two messages, in memory of its
    /// own. `None` if the rest is longer than `most` bytes, or has not arrived.
    pub(super) fn rest_of_message(&mut self, most: usize) -> Option<Bytes> {
        let mut rest = BytesMut::new();
        while !self.border.is_reached() {
            let piece = match self.held.pop_front() {
                Some(held) => held,
                None => self.arrived()?,
            };
            let taken = self.border.advance(&piece);
            if rest.len() + taken + self.border.left() > most {
                return None;
            }
            rest.extend_from_slice(&piece[..taken]);
        }
        Some(rest.freeze())
    }

    /// Bytes of a member's body that have arrived.
    fn arrived(&mut self) -> Option<Bytes> {
        let ReplyRest::Piped(body, ..) = &mut self.rest else { return None };
        match Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(Ok(frame))) => frame.into_data().ok(),
            _ => None,
        }
    }

    /// True if all contents were given.
    pub(super) fn is_over(&self) -> bool {
        self.held.is_empty() && matches!(self.rest, ReplyRest::Nothing)
    }

    /// True for a stream made by Keyward.
    pub(super) fn is_stream(&self) -> bool {
        matches!(self.rest, ReplyRest::Ours(..))
    }

    /// The replies of a stream made by Keyward.
    pub(super) fn stream(&mut self) -> Option<&mut ReplyReceiver> {
        match &mut self.rest {
            ReplyRest::Ours(said, ..) => Some(said),
            _ => None,
        }
    }

    /// The next piece. Cancel-safe.
    pub(super) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<ReplyPiece> {
        if let ReplyRest::Piped(_, _, registration) = &mut self.rest
            && let Poll::Ready(refusal) = registration.poll_cut(cx)
        {
            self.held.clear();
            return self.end_refused(&refusal);
        }
        if let Some(held) = self.held.pop_front() {
            self.border.pass(&held);
            return Poll::Ready(ReplyPiece::Data(held));
        }
        match &mut self.rest {
            ReplyRest::Nothing => Poll::Ready(ReplyPiece::Nothing),
            ReplyRest::Trailers(trailers) => {
                let trailers = std::mem::take(trailers);
                self.end(trailers)
            }
            ReplyRest::Piped(body, broken, _) => match ready!(Pin::new(body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        self.border.pass(&data);
                        Poll::Ready(ReplyPiece::Data(data))
                    }
                    Err(frame) => {
                        // Trailers without a status are no honest end either.
                        let told =
                            frame.into_trailers().ok().filter(|told| Status::from_headers(told).is_some());
                        match told {
                            Some(trailers) => self.end(trailers),
                            None => {
                                let refusal = broken.refusal.clone();
                                self.end_refused(&refusal)
                            }
                        }
                    }
                },
                Some(Err(error)) => {
                    tracing::debug!(%error, "a member's stream broke");
                    let on_loss = broken.on_loss.take().filter(|_| !error.is_reset());
                    let refusal = on_loss.map_or_else(|| broken.refusal.clone(), |on_loss| on_loss());
                    self.end_refused(&refusal)
                }
                None => {
                    let refusal = broken.refusal.clone();
                    self.end_refused(&refusal)
                }
            },
            ReplyRest::Ours(said, broken, taken) => {
                *taken = None;
                match ready!(said.poll_next(cx)) {
                    Some(ClientReply::Messages(framed, keep)) => {
                        *taken = keep;
                        Poll::Ready(ReplyPiece::Data(framed))
                    }
                    Some(ClientReply::End(end)) => self.end_with(end.status.trailers(), end.refused),
                    None => {
                        let refusal = broken.clone();
                        self.end_refused(&refusal)
                    }
                }
            }
        }
    }

    fn end(&mut self, trailers: HeaderMap) -> Poll<ReplyPiece> {
        self.end_with(trailers, None)
    }

    fn end_refused(&mut self, refusal: &Refusal) -> Poll<ReplyPiece> {
        let cause = RefusalCause { reason: refusal.reason(), rule: None };
        self.end_with(refusal.trailers(), Some(cause))
    }

    fn end_with(&mut self, trailers: HeaderMap, refused: Option<RefusalCause>) -> Poll<ReplyPiece> {
        self.rest = ReplyRest::Nothing;
        Poll::Ready(ReplyPiece::End(trailers, refused))
    }
}
