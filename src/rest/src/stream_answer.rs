//! The answer of a stream as lines of JSON.
//!
//! Owns: a line for each message, and the line of an error that ends the stream. Must not know: the
//! stream's meaning. Invariants: the reply is read only as fast as the client reads; a stream that ended
//! with an error ends with that error's line, a stream that broke off has no regular end.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::Body as _;

use super::error_form::stream_error_json;
use super::json_reply::append_json_of_message;
use super::json_style::{JsonPlace, JsonStyle};
use super::message_fields::MessageFields;
use keyward_config::JsonGateway;
use keyward_downstream::client_body::AnswerBroken;
use keyward_etcd::refusal::Status;
use keyward_etcd::rpc::frame::FrameReader;
use keyward_gateway::reply::{DownstreamResponse, Reply};

/// Limit on a message; Keyward and members bound the messages that they send.
const LARGEST: usize = u32::MAX as usize;

/// The lines of a stream.
pub struct JsonLines {
    reply: Reply,
    frames: FrameReader,
    answer: &'static MessageFields,
    form: JsonGateway,
    /// The first line, read before the response's header was sent.
    first: Option<Bytes>,
    is_over: bool,
}

/// The beginning of a stream.
pub(super) enum StreamStart {
    /// The stream has a first line.
    Lines(Box<JsonLines>),
    /// The stream ended without any message.
    Ended(Status),
    /// The stream broke off.
    Broken,
}

/// An item of the stream.
enum StreamItem {
    Line(Bytes),
    End(Status),
}

impl JsonLines {
    /// Waits for the first message or the end of the stream: the HTTP status depends on which comes first.
    pub(super) async fn begin(
        response: DownstreamResponse,
        answer: &'static MessageFields,
        form: JsonGateway,
    ) -> StreamStart {
        let (head, mut reply) = response.into_parts();
        reply.run_apart();
        if let Some(status) = Status::from_headers(&head.headers) {
            return StreamStart::Ended(status);
        }
        let frames = FrameReader::new(LARGEST);
        let mut lines = Box::new(Self { reply, frames, answer, form, first: None, is_over: false });
        match poll_fn(|cx| lines.poll_item(cx)).await {
            Ok(StreamItem::Line(line)) => {
                lines.first = Some(line);
                StreamStart::Lines(lines)
            }
            Ok(StreamItem::End(status)) => StreamStart::Ended(status),
            Err(AnswerBroken) => StreamStart::Broken,
        }
    }

    /// True after the last line.
    pub(super) fn is_over(&self) -> bool {
        self.is_over && self.first.is_none()
    }

    /// The next line; `None` after the last.
    pub(super) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, AnswerBroken>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if self.is_over {
            return Poll::Ready(None);
        }
        Poll::Ready(match ready!(self.poll_item(cx)) {
            Ok(StreamItem::Line(line)) => Some(Ok(line)),
            Ok(StreamItem::End(status)) if status.is_ok() => None,
            Ok(StreamItem::End(status)) => Some(Ok(stream_error_json(&status, self.form).into())),
            Err(AnswerBroken) => Some(Err(AnswerBroken)),
        })
    }

    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<Result<StreamItem, AnswerBroken>> {
        loop {
            if let Some(message) = self.frames.next() {
                let line = message.ok().and_then(|message| self.line(&message)).ok_or(AnswerBroken);
                self.is_over |= line.is_err();
                return Poll::Ready(line.map(StreamItem::Line));
            }
            let frame = ready!(Pin::new(&mut self.reply).poll_frame(cx)).and_then(Result::ok);
            let trailers = match frame.map(http_body::Frame::into_data) {
                Some(Ok(data)) => {
                    self.frames.push(data);
                    continue;
                }
                Some(Err(frame)) => frame.into_trailers().unwrap_or_default(),
                None => HeaderMap::new(),
            };
            self.is_over = true;
            return Poll::Ready(Status::from_headers(&trailers).map(StreamItem::End).ok_or(AnswerBroken));
        }
    }

    fn line(&self, message: &[u8]) -> Option<Bytes> {
        let mut line = BytesMut::from(&b"{\"result\":"[..]);
        let style = json_style(self.form);
        append_json_of_message(style, JsonPlace::StreamResult, self.answer, message, &mut line).ok()?;
        line.extend_from_slice(b"}\n");
        Some(line.freeze())
    }
}

/// The style of JSON of a release line.
pub(super) fn json_style(form: JsonGateway) -> JsonStyle {
    match form {
        JsonGateway::Etcd34 | JsonGateway::Etcd35 => JsonStyle::GatewayV1,
        JsonGateway::Etcd36 => JsonStyle::GatewayV2,
    }
}
