//! The HTTP response of the listeners: of a gRPC call, or of the HTTP face.
//!
//! Owns: the response's body in all its forms. Must not know: routes, JSON. Invariant: a body that breaks off
//! ends with [`AnswerBroken`], never with a regular end.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};

use super::rpc_answer::AnswerBytes;
use super::stream_answer::JsonLines;
use keyward_downstream::client_body::{AnswerBroken, ReplyBody};
use keyward_gateway::reply::Reply;

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const NO_SNIFF: HeaderName = http::header::X_CONTENT_TYPE_OPTIONS;

/// The body of a response on a listener.
#[expect(clippy::large_enum_variant, reason = "a box for each reply of gRPC would cost every call")]
pub enum AnswerBody {
    /// The reply of a gRPC call.
    Grpc(Reply),
    /// The bytes of a page or of an error; empty once sent.
    Whole(Bytes),
    /// The JSON of a unary answer.
    Message(Box<AnswerBytes>),
    /// The JSON lines of a stream.
    Lines(Box<JsonLines>),
}

impl ReplyBody for AnswerBody {
    fn poll_work(&mut self, cx: &mut Context<'_>) {
        if let Self::Grpc(reply) = self {
            reply.poll_work(cx);
        }
    }

    fn joins_messages(&self) -> bool {
        matches!(self, Self::Grpc(reply) if reply.joins_messages())
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = AnswerBroken;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerBroken>>> {
        let data = match self.get_mut() {
            Self::Grpc(reply) => return Pin::new(reply).poll_frame(cx),
            Self::Whole(bytes) => (!bytes.is_empty()).then(|| Ok(std::mem::take(bytes))),
            Self::Message(message) => ready!(message.poll_data(cx)),
            Self::Lines(lines) => ready!(lines.poll_data(cx)),
        };
        Poll::Ready(data.map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Grpc(reply) => reply.is_end_stream(),
            Self::Whole(bytes) => bytes.is_empty(),
            Self::Message(message) => message.is_over(),
            Self::Lines(lines) => lines.is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Message(message) => SizeHint::with_exact(message.left() as u64),
            Self::Grpc(_) | Self::Lines(_) => SizeHint::default(),
        }
    }
}

/// A response of `status` with headers and a body.
pub(super) fn response(
    status: StatusCode,
    headers: impl IntoIterator<Item = (HeaderName, HeaderValue)>,
    body: AnswerBody,
) -> Response<AnswerBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().extend(headers);
    response
}

/// A response with JSON.
pub(super) fn json(status: StatusCode, json: impl Into<Bytes>) -> Response<AnswerBody> {
    response(status, [(CONTENT_TYPE, JSON)], AnswerBody::Whole(json.into()))
}

/// A response with a text, in the form of Go's `http.Error`.
pub(super) fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<AnswerBody> {
    let headers = [(CONTENT_TYPE, TEXT), (NO_SNIFF, HeaderValue::from_static("nosniff"))];
    response(status, headers, AnswerBody::Whole(text.into()))
}

/// The answer to a path that etcd does not have.
pub(super) fn not_found() -> Response<AnswerBody> {
    text(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// The answer to another HTTP method than GET, for a page.
pub(super) fn only_get() -> Response<AnswerBody> {
    let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n");
    refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
    refused
}

/// The response, as the last one of an HTTP/1 connection.
pub(super) fn closing(mut response: Response<AnswerBody>) -> Response<AnswerBody> {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// A response without a body.
pub(super) fn empty(status: StatusCode) -> Response<AnswerBody> {
    response(status, [], AnswerBody::Whole(Bytes::new()))
}

/// Announces the length of a body for a client of HTTP/2; HTTP/1 announces it anyway.
pub(super) fn announce_length(headers: &mut HeaderMap, bytes: u64) {
    headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes));
}
