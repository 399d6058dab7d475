//! A bidirectional stream to a member: messages in both directions, and an honest end.
//!
//! Owns: framing, and opening, sending and receiving at the same time: a member sends its response header
//! only with its first message, after reading Keyward's first message. Must not know: the meaning of the
//! messages.
//! Invariants: messages go out in the order given. [`Bidi::next`] is cancel-safe. No message follows an end.
//! Dropping the stream resets the HTTP/2 stream.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use http::Response;
use http::uri::PathAndQuery;
use http_body::Body as _;

use crate::credentials::CertificateIdentity;
use crate::member_connection::{InFlight, LeaveOrder};
use crate::outbox::Outbox;
use crate::send::{NoReply, UpstreamClient, UpstreamHead};
use crate::upstream_request::UpstreamRequestBody;
use keyward_base::io::http2_body::Http2Body;
use keyward_cluster::membership::Member;
use keyward_etcd::refusal::Status;
use keyward_etcd::rpc::frame::{FrameReader, encode};
use keyward_etcd::rpc::method::Lane;

/// Largest message. A watch response may hold a revision of any size accepted by etcd, so only gRPC's length
/// field is a bound.
const LARGEST: usize = 0x7fff_ffff;

type BidiOpening = LocalBoxFuture<'static, Result<(Response<Http2Body>, InFlight), NoReply>>;

enum BidiState {
    Opening(BidiOpening),
    Open(BidiAnswer),
    Ended,
}

/// The member's half of an open stream.
struct BidiAnswer {
    body: Http2Body,
    /// The status in the response header, if any: the stream's end if no trailers follow.
    header_status: Option<Box<Status>>,
    leave_order: LeaveOrder,
    in_flight: InFlight,
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
    /// The stream was never opened: the member does not accept this certificate of the user.
    NotAccepted(Arc<CertificateIdentity>),
    /// The stream was never opened: a limit of Keyward's is reached, and another member would not help.
    NoRoom,
}

/// No room for more bytes of an unfinished message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnfinishedMessageTooLarge;

/// A stream to a member.
pub struct Bidi {
    /// `None` after the only request of [`Bidi::ask`].
    outbox: Option<Outbox>,
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
        let (outbox, messages) = Outbox::new();
        Self::opening(upstream, member, path, headers, Some(outbox), UpstreamRequestBody::Frames(messages))
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
        Self::opening(upstream, member, path, headers, None, UpstreamRequestBody::Once(framed))
    }

    fn opening(
        upstream: &Rc<UpstreamClient>,
        member: &Arc<Member>,
        path: PathAndQuery,
        headers: UpstreamHead,
        outbox: Option<Outbox>,
        body: UpstreamRequestBody,
    ) -> Self {
        let (upstream, member) = (Rc::clone(upstream), Arc::clone(member));
        let opening = async move { upstream.send(&member, Lane::Stream, path, headers, body).await };
        Self { outbox, state: BidiState::Opening(opening.boxed_local()), reader: FrameReader::new(LARGEST) }
    }

    /// Queues a message.
    pub fn send(&mut self, message: &[u8]) {
        if let Some(outbox) = &self.outbox {
            outbox.send(encode(message));
        }
    }

    /// Returns the next message, or the end. Cancel-safe.
    pub async fn next(&mut self) -> BidiEvent {
        loop {
            if let Ok(next) = poll_fn(|cx| self.poll_next_within(cx, |_| true)).await {
                return next;
            }
        }
    }

    /// As [`Bidi::next`], but fails if `room` refuses to hold the given number of bytes of unfinished
    /// messages. Cancel-safe.
    ///
    /// # Errors
    /// [`UnfinishedMessageTooLarge`]; the stream can go on.
    pub fn poll_next_within(
        &mut self,
        cx: &mut Context<'_>,
        mut room: impl FnMut(usize) -> bool,
    ) -> Poll<Result<BidiEvent, UnfinishedMessageTooLarge>> {
        loop {
            let read = self.reader.next();
            if !room(self.reader.held()) && read.is_none() {
                return Poll::Ready(Err(UnfinishedMessageTooLarge));
            }
            if let Some(read) = read {
                return Poll::Ready(Ok(match read {
                    Ok(message) => BidiEvent::Message(message),
                    Err(fault) => self.ended(BidiEvent::Broken(fault.to_string().into())),
                }));
            }
            match ready!(self.state.poll_receive(cx)) {
                BidiInput::Opened(answer) => self.state = BidiState::Open(answer),
                BidiInput::Data(data) => self.reader.push(data),
                BidiInput::End(end) => return Poll::Ready(Ok(self.ended(end))),
            }
        }
    }

    fn ended(&mut self, end: BidiEvent) -> BidiEvent {
        self.state = BidiState::Ended;
        end
    }
}

enum BidiInput {
    Opened(BidiAnswer),
    Data(Bytes),
    End(BidiEvent),
}

impl BidiState {
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<BidiInput> {
        match self {
            Self::Opening(opening) => Poll::Ready(opened(ready!(opening.as_mut().poll(cx)))),
            Self::Open(answer) => answer.poll_receive(cx),
            Self::Ended => Poll::Pending,
        }
    }
}

fn opened(opened: Result<(Response<Http2Body>, InFlight), NoReply>) -> BidiInput {
    BidiInput::End(match opened {
        Ok((response, in_flight)) => {
            let (head, body) = response.into_parts();
            if head.status.is_success() {
                let header_status = Status::from_headers(&head.headers).map(Box::new);
                let leave_order = in_flight.leave_order();
                return BidiInput::Opened(BidiAnswer { body, header_status, leave_order, in_flight });
            }
            BidiEvent::Broken(format!("HTTP status {}", head.status.as_u16()).into())
        }
        Err(NoReply::Lost(lost)) => BidiEvent::Broken(lost.reason),
        Err(NoReply::NeverSent(reason) | NoReply::NotShown(reason)) => BidiEvent::Unopened(reason),
        Err(NoReply::NotAccepted(shown)) => BidiEvent::NotAccepted(shown),
        Err(NoReply::NoRoom) => BidiEvent::NoRoom,
    })
}

impl BidiAnswer {
    /// A received frame comes first, and is never discarded.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<BidiInput> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
            return self.leave_order.poll(cx).map(|()| BidiInput::End(BidiEvent::Left));
        };
        Poll::Ready(match frame {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => BidiInput::Data(data),
                Err(frame) => end(frame.trailers_ref().and_then(Status::from_headers)),
            },
            Some(Err(_)) if self.in_flight.is_given_up() => BidiInput::End(BidiEvent::Left),
            Some(Err(error)) => BidiInput::End(BidiEvent::Broken(error.to_string().into())),
            None => end(self.header_status.take().map(|status| *status)),
        })
    }
}

fn end(status: Option<Status>) -> BidiInput {
    BidiInput::End(match status {
        Some(status) => BidiEvent::Ended(status),
        None => BidiEvent::Broken("the member ended the stream without a status".into()),
    })
}
