//! The response body sent downstream.
//!
//! Owns: turning a member's answer, our own messages and upstream failures into frames for a gRPC client.
//! Must not know: the call being answered. Invariants (docs/decisions.md#d38): a client never sees a stream
//! reset caused upstream or by Keyward: an error or an early end becomes trailers with Unavailable; a body
//! ends with exactly one set of trailers; the call's [`AccessRecord`] ends with the body.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};

use crate::access_log::AccessRecord;
use crate::active_streams::Registration;
use crate::reply_contents::{BrokenEnd, ReplyContents, ReplyPiece, ReplyRest};
use crate::unread_answers::{RegisteredAnswer, UnreadRoom};
use keyward_downstream::client_body::{AnswerBroken, ReplyBody};
use keyward_downstream::client_replies::ReplyReceiver;
use keyward_etcd::refusal::{AnswerEnd, Code, GRPC_STATUS, Refusal, Status};
use keyward_upstream::answer::{self, MemberReply};
use keyward_upstream::credentials::TokenUseGuard;

/// The body of every response.
pub struct Reply {
    holding: ReplySource,
    record: Option<AccessRecord>,
}

/// The owner of the rest of a reply.
enum ReplySource {
    /// The reply alone.
    Own(ReplyContents),
    /// The reply and the register of unread answers, which may drop an unread answer.
    Counted(RegisteredAnswer),
}

/// A response to a client.
pub type DownstreamResponse = Response<Reply>;

/// The refusal of a call before any reply, as Trailers-Only. A refusal after the header is made in
/// `reply_contents`.
#[must_use]
pub fn refuse(refusal: &Refusal, mut record: AccessRecord) -> DownstreamResponse {
    record.refused(refusal);
    respond(refusal.trailers_only(), Reply::own(ReplyContents::none(), record))
}

/// The answer to a request not speaking gRPC, as in grpc-go.
#[must_use]
pub fn not_grpc(status: StatusCode, mut record: AccessRecord) -> DownstreamResponse {
    record.ended(Code::Unknown);
    let mut response = Response::new(Reply::own(ReplyContents::none(), record));
    *response.status_mut() = status;
    response
}

/// A single message produced by Keyward, with status OK.
#[must_use]
pub fn message(framed: Bytes, mut record: AccessRecord) -> DownstreamResponse {
    record.ended(Code::Ok);
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    respond(
        ours(),
        Reply::own(ReplyContents::new([framed].into(), ReplyRest::Trailers(trailers), None), record),
    )
}

/// A member's answer. The client is told `broken` if the rest of the answer does not arrive. `in_use` is held
/// until the reply has ended, `registration` while more of the answer arrives, `room` while bytes are unread.
#[must_use]
pub fn deliver(
    answer: MemberReply,
    broken: Refusal,
    in_use: Option<TokenUseGuard>,
    registration: Registration,
    room: Option<UnreadRoom>,
    mut record: AccessRecord,
) -> DownstreamResponse {
    let only_headers = answer.headers.contains_key(GRPC_STATUS);
    match answer.status() {
        Some(status) => record.ended_with(status.clone()),
        None => {
            if let Some(status) = Status::from_headers(&answer.headers) {
                record.ended_with(status);
            }
        }
    }
    let rest = match answer.rest {
        _ if only_headers => ReplyRest::Nothing,
        answer::ReplyRemainder::Whole(trailers) => ReplyRest::Trailers(trailers),
        answer::ReplyRemainder::More(body) => {
            ReplyRest::Piped(body, BrokenEnd { refusal: broken, on_loss: answer.on_loss }, registration)
        }
    };
    let contents = ReplyContents::new(answer.data, rest, Some((answer.in_flight, in_use)));
    let holding = match room {
        None => ReplySource::Own(contents),
        Some(room) => ReplySource::Counted(room.hold(contents)),
    };
    respond(from_member(answer.headers), Reply { holding, record: Some(record) })
}

/// A stream produced by Keyward. The client is told `broken` if the stream's work ends without a status.
#[must_use]
pub fn stream(said: ReplyReceiver, broken: Refusal, record: AccessRecord) -> DownstreamResponse {
    respond(
        ours(),
        Reply::own(ReplyContents::new([].into(), ReplyRest::Ours(said, broken, None), None), record),
    )
}

fn respond(headers: HeaderMap, reply: Reply) -> DownstreamResponse {
    let mut response = Response::new(reply);
    *response.headers_mut() = headers;
    response
}

fn ours() -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(1);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers
}

/// A member's header fields, without the fields describing the member's own connection.
fn from_member(mut headers: HeaderMap) -> HeaderMap {
    headers.remove(http::header::TRAILER);
    headers.remove(http::header::DATE);
    headers.remove(http::header::CONTENT_LENGTH);
    headers
}

impl Reply {
    /// Lets the work of a stream by Keyward run in a task of its own: for a reader that polls the body only
    /// while the client reads.
    pub fn run_apart(&mut self) {
        if let Some(stream) = self.stream() {
            stream.run_apart();
        }
    }

    /// True if the reply is counted in the buffer of unread answers for as long as the reply lives.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        matches!(self.holding, ReplySource::Counted(_))
    }

    /// The replies of a stream by Keyward. An answer registered as unread is a member's.
    fn stream(&mut self) -> Option<&mut ReplyReceiver> {
        match &mut self.holding {
            ReplySource::Own(contents) => contents.stream(),
            ReplySource::Counted(_) => None,
        }
    }

    fn own(contents: ReplyContents, record: AccessRecord) -> Self {
        Self { holding: ReplySource::Own(contents), record: Some(record) }
    }
}

impl ReplyBody for Reply {
    fn poll_work(&mut self, cx: &mut Context<'_>) {
        if let Some(stream) = self.stream() {
            stream.poll_work(cx);
        }
    }

    fn joins_messages(&self) -> bool {
        matches!(&self.holding, ReplySource::Own(contents) if contents.is_stream())
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = AnswerBroken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerBroken>>> {
        let piece = match &mut self.holding {
            ReplySource::Own(contents) => contents.poll_piece(cx),
            ReplySource::Counted(standing) => standing.poll_piece(cx),
        };
        Poll::Ready(match ready!(piece) {
            ReplyPiece::Data(bytes) => {
                if let Some(record) = &mut self.record {
                    record.count_sent(bytes.len());
                }
                Some(Ok(Frame::data(bytes)))
            }
            ReplyPiece::End(trailers, refused) => {
                if let Some(mut record) = self.record.take().filter(|record| !record.has_ended()) {
                    match Status::from_headers(&trailers) {
                        Some(status) => record.ended_by(AnswerEnd { status, refused }),
                        None => record.ended(Code::Unknown),
                    }
                }
                Some(Ok(Frame::trailers(trailers)))
            }
            ReplyPiece::Nothing => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        match &self.holding {
            ReplySource::Own(contents) => contents.is_over(),
            ReplySource::Counted(standing) => standing.is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
