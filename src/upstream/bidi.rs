//! A bidirectional stream to a member: messages in both directions, and an honest end.
//!
//! Owns: framing, and opening, sending and receiving at the same time: a member sends its response header
//! only with its first message, after reading Keyward's first message. Must not know: the meaning of the
//! messages.
//! Invariants: messages go out in the order given. [`Bidi::next`] is cancel-safe. No message follows an end.
//! Dropping the stream resets the HTTP/2 stream.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use http::uri::PathAndQuery;
use http::{HeaderMap, Response};
use http_body::Body;
use hyper::body::Incoming;
use tokio::sync::mpsc;

use crate::members::membership::Member;
use crate::refusal::Status;
use crate::rpc::frame::{FrameReader, encode};
use crate::rpc::method::Lane;
use crate::upstream::member_connection::{InFlight, UpstreamRequestBody};
use crate::upstream::send::{NoReply, UpstreamClient, UpstreamHead};

/// Messages on the way into HTTP/2's own buffers: enough to batch, few enough to notice a slow member.
const OUTBOX: usize = 64;
/// Largest message. A watch response may hold a revision of any size accepted by etcd, so only gRPC's length
/// field is a bound.
const LARGEST: usize = 0x7fff_ffff;

type BidiOpening = LocalBoxFuture<'static, Result<(Response<Incoming>, InFlight), NoReply>>;

enum BidiState {
    Opening(BidiOpening),
    Open(Incoming, HeaderMap, InFlight),
    Ended,
}

/// An event of a stream.
pub enum BidiEvent {
    /// A message.
    Message(Bytes),
    /// The member ended the stream with a status.
    Ended(Status),
    /// The stream broke: the member is unreachable.
    Broken(Arc<str>),
    /// Keyward gave the stream up: the member enters maintenance, left its address, or no longer serves. No
    /// evidence against the member.
    Left,
    /// The stream was never opened. An unreachable member was already reported.
    Unopened(Arc<str>),
    /// The stream was never opened: a limit of Keyward's is reached, and another member would not help.
    NoRoom,
}

/// No room for more bytes of an unfinished message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnfinishedMessageTooLarge;

/// A stream to a member.
pub struct Bidi {
    outbox: VecDeque<Bytes>,
    requests: mpsc::Sender<Bytes>,
    state: BidiState,
    reader: FrameReader,
}

impl Bidi {
    /// Begins to open a stream; [`Bidi::next`] drives the opening.
    #[must_use]
    pub fn open(
        upstream: &Rc<UpstreamClient>,
        member: &Arc<Member>,
        path: PathAndQuery,
        headers: UpstreamHead,
    ) -> Self {
        let (requests, frames) = mpsc::channel(OUTBOX);
        Self::opening(upstream, member, path, headers, requests, UpstreamRequestBody::Frames(frames))
    }

    /// Begins to open a stream with a single request, half-closed after the request: no further message may
    /// be sent.
    #[must_use]
    pub fn ask(
        upstream: &Rc<UpstreamClient>,
        member: &Arc<Member>,
        path: PathAndQuery,
        headers: UpstreamHead,
        framed: Bytes,
    ) -> Self {
        let (requests, _) = mpsc::channel(1);
        Self::opening(upstream, member, path, headers, requests, UpstreamRequestBody::Once(Some(framed)))
    }

    fn opening(
        upstream: &Rc<UpstreamClient>,
        member: &Arc<Member>,
        path: PathAndQuery,
        headers: UpstreamHead,
        requests: mpsc::Sender<Bytes>,
        body: UpstreamRequestBody,
    ) -> Self {
        let (upstream, member) = (Rc::clone(upstream), Arc::clone(member));
        let opening = async move { upstream.send(&member, Lane::Stream, path, headers, body).await };
        Self {
            outbox: VecDeque::new(),
            requests,
            state: BidiState::Opening(opening.boxed_local()),
            reader: FrameReader::new(LARGEST),
        }
    }

    /// Queues a message, sent while [`Bidi::next`] is polled.
    pub fn send(&mut self, message: &[u8]) {
        self.outbox.push_back(encode(message));
    }

    /// Returns the next message, or the end. Cancel-safe.
    pub async fn next(&mut self) -> BidiEvent {
        loop {
            if let Ok(next) = self.next_within(|_| true).await {
                return next;
            }
        }
    }

    /// As [`Bidi::next`], but fails if `room` refuses to hold the given number of bytes of unfinished
    /// messages. Cancel-safe.
    ///
    /// # Errors
    /// [`UnfinishedMessageTooLarge`]; the stream can go on.
    pub async fn next_within(
        &mut self,
        mut room: impl FnMut(usize) -> bool,
    ) -> Result<BidiEvent, UnfinishedMessageTooLarge> {
        loop {
            let read = self.reader.next();
            if !room(self.reader.held()) && read.is_none() {
                return Err(UnfinishedMessageTooLarge);
            }
            if let Some(read) = read {
                return Ok(match read {
                    Ok(message) => BidiEvent::Message(message),
                    Err(fault) => self.broken(fault.to_string().into()),
                });
            }
            self.pass_on();
            let more = async {
                // The stream's end reports a closed channel.
                if self.outbox.is_empty() || self.requests.reserve().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                biased; // sending first: a chatty member must not starve outgoing messages
                () = more => {}
                came = receive(&mut self.state) => match came {
                    BidiInput::Opened(state) => self.state = state,
                    BidiInput::Data(data) => self.reader.push(data),
                    BidiInput::End(status) => {
                        self.state = BidiState::Ended;
                        return Ok(BidiEvent::Ended(status));
                    }
                    BidiInput::Broken(reason) => return Ok(self.broken(reason)),
                    BidiInput::Left => {
                        self.state = BidiState::Ended;
                        return Ok(BidiEvent::Left);
                    }
                    BidiInput::Unopened(reason) => {
                        self.state = BidiState::Ended;
                        return Ok(BidiEvent::Unopened(reason));
                    }
                    BidiInput::NoRoom => {
                        self.state = BidiState::Ended;
                        return Ok(BidiEvent::NoRoom);
                    }
                },
            }
        }
    }

    fn broken(&mut self, reason: Arc<str>) -> BidiEvent {
        self.state = BidiState::Ended;
        BidiEvent::Broken(reason)
    }

    fn pass_on(&mut self) {
        while let Some(message) = self.outbox.pop_front() {
            if let Err(mpsc::error::TrySendError::Full(message)) = self.requests.try_send(message) {
                self.outbox.push_front(message);
                return;
            }
        }
    }
}

enum BidiInput {
    Opened(BidiState),
    Data(Bytes),
    End(Status),
    Broken(Arc<str>),
    Left,
    Unopened(Arc<str>),
    NoRoom,
}

async fn receive(state: &mut BidiState) -> BidiInput {
    match state {
        BidiState::Opening(opening) => match opening.await {
            Ok((response, in_flight)) => {
                let (head, body) = response.into_parts();
                if !head.status.is_success() {
                    return BidiInput::Broken(format!("HTTP status {}", head.status.as_u16()).into());
                }
                BidiInput::Opened(BidiState::Open(body, head.headers, in_flight))
            }
            Err(NoReply::Lost(reason)) => BidiInput::Broken(reason),
            Err(NoReply::NeverSent(reason) | NoReply::NotShown(reason)) => BidiInput::Unopened(reason),
            Err(NoReply::NoRoom) => BidiInput::NoRoom,
        },
        BidiState::Open(body, headers, in_flight) => {
            let next = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx));
            let frame = tokio::select! {
                biased; // a received frame must not be discarded
                frame = next => frame,
                () = in_flight.leave_ordered() => return BidiInput::Left,
            };
            match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => BidiInput::Data(data),
                    Err(frame) => end(frame.trailers_ref().and_then(Status::from_headers)),
                },
                Some(Err(_)) if in_flight.is_given_up() => BidiInput::Left,
                Some(Err(error)) => BidiInput::Broken(error.to_string().into()),
                None => end(Status::from_headers(headers)),
            }
        }
        BidiState::Ended => std::future::pending().await,
    }
}

fn end(status: Option<Status>) -> BidiInput {
    match status {
        Some(status) => BidiInput::End(status),
        None => BidiInput::Broken("the member ended the stream without a status".into()),
    }
}
