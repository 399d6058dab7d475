//! A member's reply, read far enough to decide on a retry.
//!
//! Owns: telling a refusal from a result in both of etcd's forms (Trailers-Only on plaintext ports, HEADERS
//! then trailers on TLS ports; `docs/decisions.md#d04`), and holding a small result back until complete. A
//! client cannot use a unary reply before its trailers, so holding back costs no time, and a read can still
//! be retried elsewhere if its member dies half-way. Must not know: retry rules, the caller.
//! Invariant: no part of a reply goes downstream before its status is known, or the reply is larger than the
//! hold limit, by its announced length or by the bytes that have arrived.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response};
use http_body::Body as _;

use crate::member_connection::InFlight;
use keyward_base::io::http2_body::Http2Body;
use keyward_etcd::refusal::{Refusal, Status};
use keyward_etcd::rpc::frame::{self, PREFIX};
use keyward_etcd::rpc::header::{self, AnswerProgress};

/// Hold limit in bytes: a reply up to this size is held back until complete, a larger reply is passed on as
/// it arrives, from its beginning.
pub const HELD: usize = 64 * 1024;

/// Upper bound on the bytes of an answer's ResponseHeader.
const HEADER: usize = 64;

/// A reply that broke off: the outcome of the call is unknown.
#[derive(Clone, Debug)]
pub struct LostReply {
    /// The reason, for the log.
    pub reason: Arc<str>,
    /// True if the reply was lost with the connection, as when the member ends. False if the member broke off
    /// the stream alone.
    pub with_connection: bool,
}

impl LostReply {
    fn of_stream(reason: impl Into<Arc<str>>) -> Self {
        Self { reason: reason.into(), with_connection: false }
    }
}

impl From<h2::Error> for LostReply {
    fn from(error: h2::Error) -> Self {
        Self { reason: error.to_string().into(), with_connection: !error.is_reset() }
    }
}

/// Called if the rest of a reply is lost with the connection. Returns the refusal for the client.
pub type OnLoss = Box<dyn FnOnce() -> Refusal>;

/// How far a reply was read.
pub enum ReplyRemainder {
    /// To its end, with the trailers (empty if the header held the status).
    Whole(HeaderMap),
    /// To the hold limit; the body continues.
    More(Http2Body),
}

/// A reply, read as far as needed for a decision.
pub struct MemberReply {
    /// The response's header fields.
    pub headers: HeaderMap,
    /// Body bytes received so far, framed.
    pub data: VecDeque<Bytes>,
    /// The trailers, or the unread body.
    pub rest: ReplyRemainder,
    /// The member's revision and raft term, after [`MemberReply::read_progress`].
    pub progress: Option<AnswerProgress>,
    /// Counts the call on its connection until the reply was delivered.
    pub in_flight: InFlight,
    /// For the reply to a read that may end a member.
    pub on_loss: Option<OnLoss>,
    /// The call's status, read once; `None` while the reply continues.
    status: Option<Status>,
}

impl MemberReply {
    /// Reads until the status is known, or the reply is known to be larger than `hold` bytes: [`HELD`] for
    /// unary calls, 0 for streams, committed by their first message.
    ///
    /// # Errors
    /// The stream broke earlier: the outcome of the call is unknown.
    pub fn read(
        response: Response<Http2Body>,
        in_flight: InFlight,
        hold: usize,
    ) -> impl Future<Output = Result<Box<Self>, LostReply>> {
        let (head, mut body) = response.into_parts();
        // Boxed: an answer passes through many hands.
        let mut answer = Box::new(Self {
            headers: head.headers,
            data: VecDeque::new(),
            rest: ReplyRemainder::Whole(HeaderMap::new()),
            progress: None,
            in_flight,
            on_loss: None,
            status: None,
        });
        let http_status = head.status;
        async move {
            if !http_status.is_success() {
                let reason = format!("the member answered with HTTP status {}", http_status.as_u16());
                return Err(LostReply::of_stream(reason));
            }
            let mut held = 0;
            loop {
                let frame = match poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                    Some(Ok(frame)) => frame,
                    Some(Err(error)) => return Err(error.into()),
                    None => {
                        answer.status = Status::from_headers(&answer.headers);
                        return match answer.status {
                            Some(_) => Ok(answer),
                            None => Err(LostReply::of_stream("the member ended the stream without a status")),
                        };
                    }
                };
                match frame.into_data() {
                    Ok(data) => {
                        held += data.len();
                        answer.data.push_back(data);
                        if held > hold || answer.announces_more_than(hold) {
                            answer.rest = ReplyRemainder::More(body);
                            return Ok(answer);
                        }
                    }
                    Err(frame) => {
                        let trailers = frame.into_trailers().unwrap_or_default();
                        let status = Status::from_headers(&trailers);
                        answer.status = status.or_else(|| Status::from_headers(&answer.headers));
                        answer.rest = ReplyRemainder::Whole(trailers);
                        return match answer.status {
                            Some(_) => Ok(answer),
                            None => Err(LostReply::of_stream("the member's trailers have no status")),
                        };
                    }
                }
            }
        }
    }

    /// Reads the rest of a unary reply larger than the hold limit.
    ///
    /// # Errors
    /// The stream broke, or has more than the announced bytes: the outcome of the call is unknown.
    pub async fn read_rest(&mut self) -> Result<(), LostReply> {
        let ReplyRemainder::More(mut body) =
            std::mem::replace(&mut self.rest, ReplyRemainder::Whole(HeaderMap::new()))
        else {
            return Ok(());
        };
        let mut left = self.announced().unwrap_or_default();
        left = left.saturating_sub(self.data.iter().map(Bytes::len).sum());
        loop {
            let frame = match poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Err(error.into()),
                None => return Err(LostReply::of_stream("the member ended the stream without a status")),
            };
            match frame.into_data() {
                Ok(data) if data.len() > left => {
                    return Err(LostReply::of_stream("more bytes than announced"));
                }
                Ok(data) => {
                    left -= data.len();
                    self.data.push_back(data);
                }
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    self.status = Status::from_headers(&trailers);
                    self.rest = ReplyRemainder::Whole(trailers);
                    let fault = LostReply::of_stream("the trailers have no status");
                    return self.status.as_ref().map(|_| ()).ok_or(fault);
                }
            }
        }
    }

    /// The length in bytes of a unary answer with its frame, as announced by its first bytes.
    #[must_use]
    pub fn announced(&self) -> Option<usize> {
        let message = self.data.front().and_then(|begun| frame::announced(begun));
        message.map(|message| message + PREFIX)
    }

    /// True if the reply's ResponseHeader has arrived, and its length is above `hold`. Such a reply is never
    /// complete within the limit: its bytes are passed on while they are in the processor's cache.
    fn announces_more_than(&self, hold: usize) -> bool {
        let has_header = self.data.front().is_some_and(|begun| begun.len() > PREFIX + HEADER);
        has_header && self.announced().is_some_and(|length| length > hold)
    }

    /// Reads the member's revision and raft term. The ResponseHeader comes first, so an incomplete answer is
    /// enough.
    pub fn read_progress(&mut self) {
        let begun = match (self.data.front(), self.data.len()) {
            (Some(begun), 2..) if begun.len() > PREFIX + HEADER => self.data.front().cloned(),
            _ => self.message().or_else(|| self.data.front().cloned()),
        };
        self.progress = begun.as_ref().and_then(|framed| framed.get(PREFIX..)).and_then(header::progress);
    }

    /// Replaces the member's status with `status`.
    pub fn replace_status(&mut self, status: &Status) {
        self.status = Some(status.clone());
        match &mut self.rest {
            ReplyRemainder::Whole(trailers) if Status::from_headers(trailers).is_some() => {
                trailers.extend(status.trailers());
            }
            _ => self.headers.extend(status.trailers()),
        }
    }

    /// Returns the whole message of a successful unary answer, framed. `None` if larger than the hold limit.
    #[must_use]
    pub fn message(&self) -> Option<Bytes> {
        match (&self.rest, self.data.len()) {
            (ReplyRemainder::More(_), _) | (_, 0) => None,
            (ReplyRemainder::Whole(_), 1) => self.data.front().cloned(),
            (ReplyRemainder::Whole(_), _) => {
                let mut joined = BytesMut::new();
                self.data.iter().for_each(|part| joined.extend_from_slice(part));
                Some(joined.freeze())
            }
        }
    }

    /// Wraps a stream passed on from its header on: no part of the reply can be requested again.
    #[must_use]
    pub fn opened(response: Response<Http2Body>, in_flight: InFlight) -> Box<Self> {
        let (head, body) = response.into_parts();
        Box::new(Self {
            headers: head.headers,
            data: VecDeque::new(),
            rest: ReplyRemainder::More(body),
            progress: None,
            in_flight,
            on_loss: None,
            status: None,
        })
    }

    /// True for a success. An answer without a status is larger than the held-back part, and begins like a
    /// success.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.status.as_ref().is_none_or(Status::is_ok)
    }

    /// The call's status; `None` while the reply continues.
    #[must_use]
    pub fn status(&self) -> Option<&Status> {
        self.status.as_ref()
    }
}
