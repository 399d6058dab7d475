//! The body that goes downstream: thin, and honest about its end.
//!
//! Owns: turning whatever happens upstream into frames that a gRPC client understands. Must not know which call it
//! answers. Invariants (rules 38): a client never sees a reset that it did not cause: an error or an early end becomes
//! trailers with Unavailable; exactly one set of trailers, last; the call's [`Record`] ends with the body.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::mpsc;

use crate::downstream::said::{Keep, Said};
use crate::gateway::access_log::Record;
use crate::gateway::live::Stay;
use crate::refusal::{Code, Refusal, Status};
use crate::upstream::answer::{Answer, Rest};
use crate::upstream::connection::InFlight;
use crate::upstream::credential::InUse;

enum Rests {
    /// Nothing more: the header held the status.
    Nothing,
    /// Trailers, after the held data.
    Trailers(HeaderMap),
    /// A member's body, passed on as it comes, for as long as its caller may go on.
    Piped(Incoming, Refusal, Stay),
    /// A stream of our own making. Its sender going away without a word is an early end.
    /// With what is kept of the message that HTTP/2 took last: it asks for the next when it has sent most of that.
    Ours(mpsc::Receiver<Said>, Refusal, Keep),
}

/// The body of every response.
pub struct Reply {
    held: VecDeque<Bytes>,
    rest: Rests,
    record: Option<Record>,
    /// The upstream connection's count and the credential's use, until the reply has ended.
    #[expect(dead_code, reason = "held for what its drop does")]
    keep: Option<(InFlight, Option<InUse>)>,
}

/// A response to a client.
pub type Downstream = Response<Reply>;

/// Our own "no", as Trailers-Only.
#[must_use]
pub fn refuse(refusal: &Refusal, mut record: Record) -> Downstream {
    record.ended(refusal.code());
    respond(
        refusal.trailers_only(),
        Reply { held: VecDeque::new(), rest: Rests::Nothing, record: Some(record), keep: None },
    )
}

/// What is not gRPC at all, as grpc-go answers it.
#[must_use]
pub fn not_grpc(status: StatusCode, mut record: Record) -> Downstream {
    record.ended(Code::Unknown);
    let reply = Reply { held: VecDeque::new(), rest: Rests::Nothing, record: Some(record), keep: None };
    let mut response = Response::new(reply);
    *response.status_mut() = status;
    response
}

/// One message of our own, with status OK.
#[must_use]
pub fn message(framed: Bytes, mut record: Record) -> Downstream {
    record.ended(Code::Ok);
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    respond(
        ours(),
        Reply { held: [framed].into(), rest: Rests::Trailers(trailers), record: Some(record), keep: None },
    )
}

/// A member's answer. `broken` is what the client is told if the rest of it does not come; `in_use` is held until
/// the reply has ended, `stay` for as long as more of it comes.
#[must_use]
pub fn deliver(
    answer: Answer,
    broken: Refusal,
    in_use: Option<InUse>,
    stay: Stay,
    mut record: Record,
) -> Downstream {
    let in_header = Status::from_headers(&answer.headers);
    let only_headers = in_header.is_some();
    if let Some(status) = answer.status().or(in_header) {
        record.ended(status.code);
    }
    let rest = match answer.rest {
        _ if only_headers => Rests::Nothing,
        Rest::Whole(trailers) => Rests::Trailers(trailers),
        Rest::More(body) => Rests::Piped(body, broken, stay),
    };
    respond(
        from_member(answer.headers),
        Reply { held: answer.data, rest, record: Some(record), keep: Some((answer.in_flight, in_use)) },
    )
}

/// A stream that we answer ourselves. `broken` is told if its maker goes away without a word.
#[must_use]
pub fn stream(said: mpsc::Receiver<Said>, broken: Refusal, record: Record) -> Downstream {
    let rest = Rests::Ours(said, broken, None);
    respond(ours(), Reply { held: VecDeque::new(), rest, record: Some(record), keep: None })
}

fn respond(headers: HeaderMap, reply: Reply) -> Downstream {
    let mut response = Response::new(reply);
    *response.headers_mut() = headers;
    response
}

fn ours() -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(1);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers
}

/// A member's header fields without those that speak of its own connection.
fn from_member(mut headers: HeaderMap) -> HeaderMap {
    headers.remove(http::header::TRAILER);
    headers.remove(http::header::DATE);
    headers.remove(http::header::CONTENT_LENGTH);
    headers
}

impl Reply {
    fn data(&mut self, bytes: Bytes) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(record) = &mut self.record {
            record.sent += bytes.len() as u64;
        }
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn end(&mut self, trailers: HeaderMap) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.rest = Rests::Nothing;
        if let Some(mut record) = self.record.take() {
            record.ended(Status::from_headers(&trailers).map_or(Code::Unknown, |status| status.code));
        }
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Rests::Piped(_, _, stay) = &mut self.rest
            && let Poll::Ready(refusal) = stay.poll_cut(cx)
        {
            self.held.clear();
            return self.end(refusal.trailers());
        }
        if let Some(held) = self.held.pop_front() {
            return self.data(held);
        }
        match &mut self.rest {
            Rests::Nothing => Poll::Ready(None),
            Rests::Trailers(trailers) => {
                let trailers = std::mem::take(trailers);
                self.end(trailers)
            }
            Rests::Piped(body, broken, _) => match std::task::ready!(Pin::new(body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.data(data),
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
            Rests::Ours(said, broken, taken) => {
                *taken = None;
                match std::task::ready!(said.poll_recv(cx)) {
                    Some(Said::Message(framed, keep)) => {
                        *taken = keep;
                        self.data(framed)
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

    fn is_end_stream(&self) -> bool {
        self.held.is_empty() && matches!(self.rest, Rests::Nothing)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
