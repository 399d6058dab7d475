//! The body that goes downstream: thin, and honest about its end.
//!
//! Owns: turning whatever happens upstream into frames that a gRPC client understands. Must not know which call it
//! answers. Invariants (rules 38): a client never sees a reset that it did not cause: an error or an early end becomes
//! trailers with Unavailable; exactly one set of trailers, last; the call's [`Record`] ends with the body.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc;

use crate::downstream::said::Said;
use crate::gateway::access_log::Record;
use crate::gateway::contents::{Contents, Piece, Rest};
use crate::gateway::live::Stay;
use crate::gateway::unread::{Room, Standing};
use crate::refusal::{Code, Refusal, Status};
use crate::upstream::answer::{self, Answer};
use crate::upstream::credential::InUse;

/// The body of every response.
pub struct Reply {
    holding: Holding,
    record: Option<Record>,
}

/// Who may take what a reply still has to give.
enum Holding {
    /// The reply alone.
    Own(Contents),
    /// Also the register of unread answers, which gives up those that nobody reads.
    Counted(Standing),
}

/// A response to a client.
pub type Downstream = Response<Reply>;

/// Our own "no", as Trailers-Only.
#[must_use]
pub fn refuse(refusal: &Refusal, mut record: Record) -> Downstream {
    record.ended(refusal.code());
    respond(refusal.trailers_only(), Reply::own(Contents::none(), record))
}

/// What is not gRPC at all, as grpc-go answers it.
#[must_use]
pub fn not_grpc(status: StatusCode, mut record: Record) -> Downstream {
    record.ended(Code::Unknown);
    let mut response = Response::new(Reply::own(Contents::none(), record));
    *response.status_mut() = status;
    response
}

/// One message of our own, with status OK.
#[must_use]
pub fn message(framed: Bytes, mut record: Record) -> Downstream {
    record.ended(Code::Ok);
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    respond(ours(), Reply::own(Contents::new([framed].into(), Rest::Trailers(trailers), None), record))
}

/// A member's answer. `broken` is what the client is told if the rest of it does not come; `in_use` is held until
/// the reply has ended, `stay` for as long as more of it comes, `room` while bytes of it are unread.
#[must_use]
pub fn deliver(
    answer: Answer,
    broken: Refusal,
    in_use: Option<InUse>,
    stay: Stay,
    room: Option<Room>,
    mut record: Record,
) -> Downstream {
    let in_header = Status::from_headers(&answer.headers);
    let only_headers = in_header.is_some();
    if let Some(status) = answer.status().or(in_header) {
        record.ended(status.code);
    }
    let rest = match answer.rest {
        _ if only_headers => Rest::Nothing,
        answer::Rest::Whole(trailers) => Rest::Trailers(trailers),
        answer::Rest::More(body) => Rest::Piped(body, broken, stay),
    };
    let contents = Contents::new(answer.data, rest, Some((answer.in_flight, in_use)));
    let holding = match room {
        None => Holding::Own(contents),
        Some(room) => Holding::Counted(room.hold(contents)),
    };
    respond(from_member(answer.headers), Reply { holding, record: Some(record) })
}

/// A stream that we answer ourselves. `broken` is told if its maker goes away without a word.
#[must_use]
pub fn stream(said: mpsc::Receiver<Said>, broken: Refusal, record: Record) -> Downstream {
    respond(ours(), Reply::own(Contents::new([].into(), Rest::Ours(said, broken, None), None), record))
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
    fn own(contents: Contents, record: Record) -> Self {
        Self { holding: Holding::Own(contents), record: Some(record) }
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = match &mut self.holding {
            Holding::Own(contents) => contents.poll_piece(cx),
            Holding::Counted(standing) => standing.poll_piece(cx),
        };
        Poll::Ready(match ready!(piece) {
            Piece::Data(bytes) => {
                if let Some(record) = &mut self.record {
                    record.sent += bytes.len() as u64;
                }
                Some(Ok(Frame::data(bytes)))
            }
            Piece::End(trailers) => {
                if let Some(mut record) = self.record.take() {
                    record.ended(Status::from_headers(&trailers).map_or(Code::Unknown, |status| status.code));
                }
                Some(Ok(Frame::trailers(trailers)))
            }
            Piece::Nothing => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        match &self.holding {
            Holding::Own(contents) => contents.is_over(),
            Holding::Counted(standing) => standing.is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
