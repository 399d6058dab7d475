//! Reading a member's reply to a unary call far enough to decide on it.
//!
//! Owns: telling a refusal from a result in both forms that etcd sends (rules 4: Trailers-Only on plaintext ports,
//! HEADERS then trailers on TLS ports), and holding a small result back until it is whole. A client cannot use a
//! unary reply before its trailers anyway, so holding back costs it nothing, and a read whose member dies half way
//! can still be asked elsewhere. Must not know: what is retried, who asked.
//! Invariant: nothing of a reply goes downstream before its status is known or its size commits us.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response};
use http_body::Body;
use hyper::body::Incoming;

use crate::refusal::Status;
use crate::rpc::frame::PREFIX;
use crate::rpc::header::{self, Seen};
use crate::upstream::connection::InFlight;

/// Up to this many bytes a reply is held back until whole; larger ones are passed on as they come.
pub const HELD: usize = 64 * 1024;

/// A header of an answer is no longer than this.
const HEADER: usize = 64;

/// How far a reply was read.
pub enum Rest {
    /// To its end; these are the trailers (empty where the header held the status).
    Whole(HeaderMap),
    /// It is larger than what is held back: the rest is still to come.
    More(Incoming),
}

/// A reply, read as far as needed to decide.
pub struct Answer {
    /// The response's header fields.
    pub headers: HeaderMap,
    /// What came of the body so far, framed.
    pub data: VecDeque<Bytes>,
    /// What is left.
    pub rest: Rest,
    /// How far the member was, where this was read.
    pub seen: Option<Seen>,
    /// Keeps the connection's count until the reply was delivered.
    pub in_flight: InFlight,
}

impl Answer {
    /// Reads until the status is known or more than `hold` bytes of the reply came: [`HELD`] for unary calls, 0 for
    /// streams, whose first message commits us.
    ///
    /// # Errors
    /// The stream broke before that: the outcome of the call is unknown.
    pub async fn read(
        response: Response<Incoming>,
        in_flight: InFlight,
        hold: usize,
    ) -> Result<Self, Arc<str>> {
        let (head, mut body) = response.into_parts();
        let mut answer = Self {
            headers: head.headers,
            data: VecDeque::new(),
            rest: Rest::Whole(HeaderMap::new()),
            seen: None,
            in_flight,
        };
        if !head.status.is_success() {
            return Err(format!("the member answered with HTTP status {}", head.status.as_u16()).into());
        }
        let mut held = 0;
        loop {
            let frame = match poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Err(error.to_string().into()),
                None if Status::from_headers(&answer.headers).is_some() => return Ok(answer),
                None => return Err("the member ended the stream without a status".into()),
            };
            match frame.into_data() {
                Ok(data) => {
                    held += data.len();
                    answer.data.push_back(data);
                    if held > hold {
                        answer.rest = Rest::More(body);
                        return Ok(answer);
                    }
                }
                Err(frame) => {
                    answer.rest = Rest::Whole(frame.into_trailers().unwrap_or_default());
                    return match answer.status() {
                        Some(_) => Ok(answer),
                        None => Err("the member's trailers have no status".into()),
                    };
                }
            }
        }
    }

    /// Reads how far the member was. The header comes first, also of an answer that is still coming.
    pub fn read_seen(&mut self) {
        let begun = match (self.data.front(), self.data.len()) {
            (Some(begun), 2..) if begun.len() > PREFIX + HEADER => self.data.front().cloned(),
            _ => self.message().or_else(|| self.data.front().cloned()),
        };
        self.seen = begun.as_ref().and_then(|framed| framed.get(PREFIX..)).and_then(header::seen);
    }

    /// Puts `status` in the place of the member's own.
    pub fn replace_status(&mut self, status: &Status) {
        match &mut self.rest {
            Rest::Whole(trailers) if Status::from_headers(trailers).is_some() => {
                trailers.extend(status.trailers());
            }
            _ => self.headers.extend(status.trailers()),
        }
    }

    /// The whole message of a successful unary answer, framed. None where it is larger than what is held back.
    #[must_use]
    pub fn message(&self) -> Option<Bytes> {
        match (&self.rest, self.data.len()) {
            (Rest::More(_), _) | (_, 0) => None,
            (Rest::Whole(_), 1) => self.data.front().cloned(),
            (Rest::Whole(_), _) => {
                let mut joined = BytesMut::new();
                self.data.iter().for_each(|part| joined.extend_from_slice(part));
                Some(joined.freeze())
            }
        }
    }

    /// A stream that is passed on from its header on: nothing of it can be asked again.
    #[must_use]
    pub fn opened(response: Response<Incoming>, in_flight: InFlight) -> Self {
        let (head, body) = response.into_parts();
        Self { headers: head.headers, data: VecDeque::new(), rest: Rest::More(body), seen: None, in_flight }
    }

    /// The call's status, unless the reply is still going on.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match &self.rest {
            Rest::Whole(trailers) => {
                Status::from_headers(trailers).or_else(|| Status::from_headers(&self.headers))
            }
            Rest::More(_) => None,
        }
    }
}
