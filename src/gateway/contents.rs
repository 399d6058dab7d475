//! What a reply still has to give: data that is held, a member's body, or a stream of our own.
//!
//! Owns: the order of it, and that it ends with exactly one set of trailers. Must not know: HTTP/2, who asked, how much of it may be held.
//! Invariant: an error or an early end of a member's body becomes trailers with Unavailable.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::sync::mpsc;

use crate::downstream::said::{Keep, Said};
use crate::gateway::live::Stay;
use crate::refusal::{Refusal, Status};
use crate::upstream::connection::InFlight;
use crate::upstream::credential::InUse;

/// What follows the held data.
pub(super) enum Rest {
    /// Nothing more: the header held the status.
    Nothing,
    /// Trailers.
    Trailers(HeaderMap),
    /// A member's body, passed on as it comes, for as long as its caller may go on.
    Piped(Incoming, Refusal, Stay),
    /// A stream of our own making. Its sender going away without a word is an early end.
    /// With what is kept of the message that HTTP/2 took last: it asks for the next when it has sent most of that.
    Ours(mpsc::Receiver<Said>, Refusal, Keep),
}

/// What a reply still has to give.
pub(super) struct Contents {
    held: VecDeque<Bytes>,
    rest: Rest,
    /// The upstream connection's count and the credential's use, until the reply has ended.
    #[expect(dead_code, reason = "held for what its drop does")]
    keep: Option<(InFlight, Option<InUse>)>,
}

/// One piece of a reply.
pub(super) enum Piece {
    /// Bytes of messages, framed.
    Data(Bytes),
    /// The trailers.
    End(HeaderMap),
    /// All was given before.
    Nothing,
}

impl Contents {
    pub(super) fn new(held: VecDeque<Bytes>, rest: Rest, keep: Option<(InFlight, Option<InUse>)>) -> Self {
        Self { held, rest, keep }
    }

    /// Nothing at all: the header says everything.
    pub(super) fn none() -> Self {
        Self::new(VecDeque::new(), Rest::Nothing, None)
    }

    /// These trailers and nothing else. What was held, and the member's body, are dropped.
    pub(super) fn only(trailers: HeaderMap) -> Self {
        Self::new(VecDeque::new(), Rest::Trailers(trailers), None)
    }

    /// Whether all was given.
    pub(super) fn is_over(&self) -> bool {
        self.held.is_empty() && matches!(self.rest, Rest::Nothing)
    }

    /// The next piece. Cancel-safe.
    pub(super) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Piece> {
        if let Rest::Piped(_, _, stay) = &mut self.rest
            && let Poll::Ready(refusal) = stay.poll_cut(cx)
        {
            self.held.clear();
            return self.end(refusal.trailers());
        }
        if let Some(held) = self.held.pop_front() {
            return Poll::Ready(Piece::Data(held));
        }
        match &mut self.rest {
            Rest::Nothing => Poll::Ready(Piece::Nothing),
            Rest::Trailers(trailers) => {
                let trailers = std::mem::take(trailers);
                self.end(trailers)
            }
            Rest::Piped(body, broken, _) => match ready!(Pin::new(body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => Poll::Ready(Piece::Data(data)),
                    Err(frame) => {
                        // Trailers that say nothing are no honest end either.
                        let told =
                            frame.into_trailers().ok().filter(|told| Status::from_headers(told).is_some());
                        let trailers = told.unwrap_or_else(|| broken.trailers());
                        self.end(trailers)
                    }
                },
                Some(Err(error)) => {
                    tracing::debug!(%error, "a member's stream broke");
                    let trailers = broken.trailers();
                    self.end(trailers)
                }
                None => {
                    let trailers = broken.trailers();
                    self.end(trailers)
                }
            },
            Rest::Ours(said, broken, taken) => {
                *taken = None;
                match ready!(said.poll_recv(cx)) {
                    Some(Said::Message(framed, keep)) => {
                        *taken = keep;
                        Poll::Ready(Piece::Data(framed))
                    }
                    Some(Said::End(status)) => self.end(status.trailers()),
                    None => {
                        let trailers = broken.trailers();
                        self.end(trailers)
                    }
                }
            }
        }
    }

    fn end(&mut self, trailers: HeaderMap) -> Poll<Piece> {
        self.rest = Rest::Nothing;
        Poll::Ready(Piece::End(trailers))
    }
}
