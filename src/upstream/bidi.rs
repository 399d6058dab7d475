//! One bidirectional stream to a member: messages in both directions, and its honest end.
//!
//! Owns: that opening, sending and receiving go on together (a member answers the header of a stream only with its
//! first message, which needs our first message), and framing. Must not know what the messages mean.
//! Invariants: messages go out in the order they were given; [`Bidi::next`] is cancel-safe; after an end nothing more
//! comes; dropping it resets the stream.

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

use crate::refusal::Status;
use crate::rpc::frame::{FrameReader, encode};
use crate::rpc::method::Lane;
use crate::upstream::connection::{InFlight, Outgoing};
use crate::upstream::membership::Member;
use crate::upstream::send::{Door, Head, NoAnswer};

/// Messages on their way into HTTP/2's own buffers: enough to batch, few enough to notice a slow member.
const OUTBOX: usize = 64;
/// A watch response may hold one revision of any size that etcd took: bounded by what a gRPC length can say.
const LARGEST: usize = 0x7fff_ffff;

type Opening = LocalBoxFuture<'static, Result<(Response<Incoming>, InFlight), NoAnswer>>;

enum State {
    Opening(Opening),
    Open(Incoming, HeaderMap, InFlight),
    Ended,
}

/// What comes from a stream.
pub enum Next {
    /// A message.
    Message(Bytes),
    /// The member ended it with this status.
    Ended(Status),
    /// It broke: the member is out of reach.
    Broken(Arc<str>),
    /// It is given up: the member is to have rest, is found elsewhere, or was left already. It says nothing of the member.
    Left,
    /// It never came to be. Whether the member is out of reach was told already.
    Unopened(Arc<str>),
    /// It never came to be: a limit of ours is reached, and no other member helps.
    NoRoom,
}

/// There is no room for more of an unfinished message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMuch;

/// A stream to a member.
pub struct Bidi {
    outbox: VecDeque<Bytes>,
    requests: mpsc::Sender<Bytes>,
    state: State,
    reader: FrameReader,
}

impl Bidi {
    /// Begins to open a stream; driven by [`Bidi::next`].
    #[must_use]
    pub fn open(door: &Rc<Door>, member: &Arc<Member>, path: PathAndQuery, headers: Head) -> Self {
        let (requests, frames) = mpsc::channel(OUTBOX);
        Self::opening(door, member, path, headers, requests, Outgoing::Frames(frames))
    }

    /// The same with one request, which ends what we have to say: nothing may be sent on it.
    #[must_use]
    pub fn ask(
        door: &Rc<Door>,
        member: &Arc<Member>,
        path: PathAndQuery,
        headers: Head,
        framed: Bytes,
    ) -> Self {
        let (requests, _) = mpsc::channel(1);
        Self::opening(door, member, path, headers, requests, Outgoing::Once(Some(framed)))
    }

    fn opening(
        door: &Rc<Door>,
        member: &Arc<Member>,
        path: PathAndQuery,
        headers: Head,
        requests: mpsc::Sender<Bytes>,
        body: Outgoing,
    ) -> Self {
        let (door, member) = (Rc::clone(door), Arc::clone(member));
        let opening = async move { door.send(&member, Lane::Stream, path, headers, body).await };
        Self {
            outbox: VecDeque::new(),
            requests,
            state: State::Opening(opening.boxed_local()),
            reader: FrameReader::new(LARGEST),
        }
    }

    /// Puts a message in line. It goes out while [`Bidi::next`] is polled.
    pub fn send(&mut self, message: &[u8]) {
        self.outbox.push_back(encode(message));
    }

    /// Messages that did not go out yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.outbox.len()
    }

    /// The next message, or the end. Cancel-safe.
    pub async fn next(&mut self) -> Next {
        loop {
            if let Ok(next) = self.next_within(|_| true).await {
                return next;
            }
        }
    }

    /// The same, unless `room` says that so many bytes of unfinished messages are too many. Cancel-safe.
    ///
    /// # Errors
    /// [`TooMuch`]; the stream can go on.
    pub async fn next_within(&mut self, mut room: impl FnMut(usize) -> bool) -> Result<Next, TooMuch> {
        loop {
            let read = self.reader.next();
            if !room(self.reader.held()) && read.is_none() {
                return Err(TooMuch);
            }
            if let Some(read) = read {
                return Ok(match read {
                    Ok(message) => Next::Message(message),
                    Err(fault) => self.broken(fault.to_string().into()),
                });
            }
            self.pass_on();
            let more = async {
                // A closed channel is told by the stream's end.
                if self.outbox.is_empty() || self.requests.reserve().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                biased; // room first, so that a chatty member cannot starve what we have to say
                () = more => {}
                came = receive(&mut self.state) => match came {
                    Came::Opened(state) => self.state = state,
                    Came::Data(data) => self.reader.push(data),
                    Came::End(status) => {
                        self.state = State::Ended;
                        return Ok(Next::Ended(status));
                    }
                    Came::Broken(reason) => return Ok(self.broken(reason)),
                    Came::Left => {
                        self.state = State::Ended;
                        return Ok(Next::Left);
                    }
                    Came::Unopened(reason) => {
                        self.state = State::Ended;
                        return Ok(Next::Unopened(reason));
                    }
                    Came::NoRoom => {
                        self.state = State::Ended;
                        return Ok(Next::NoRoom);
                    }
                },
            }
        }
    }

    fn broken(&mut self, reason: Arc<str>) -> Next {
        self.state = State::Ended;
        Next::Broken(reason)
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

enum Came {
    Opened(State),
    Data(Bytes),
    End(Status),
    Broken(Arc<str>),
    Left,
    Unopened(Arc<str>),
    NoRoom,
}

async fn receive(state: &mut State) -> Came {
    match state {
        State::Opening(opening) => match opening.await {
            Ok((response, in_flight)) => {
                let (head, body) = response.into_parts();
                if !head.status.is_success() {
                    return Came::Broken(format!("HTTP status {}", head.status.as_u16()).into());
                }
                Came::Opened(State::Open(body, head.headers, in_flight))
            }
            Err(NoAnswer::Lost(reason)) => Came::Broken(reason),
            Err(NoAnswer::NeverSent(reason) | NoAnswer::NotShown(reason)) => Came::Unopened(reason),
            Err(NoAnswer::NoRoom) => Came::NoRoom,
        },
        State::Open(body, headers, in_flight) => {
            let next = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx));
            let frame = tokio::select! {
                biased; // what has come is not thrown away
                frame = next => frame,
                () = in_flight.told_to_leave() => return Came::Left,
            };
            match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => Came::Data(data),
                    Err(frame) => end(frame.trailers_ref().and_then(Status::from_headers)),
                },
                Some(Err(_)) if in_flight.is_given_up() => Came::Left,
                Some(Err(error)) => Came::Broken(error.to_string().into()),
                None => end(Status::from_headers(headers)),
            }
        }
        State::Ended => std::future::pending().await,
    }
}

fn end(status: Option<Status>) -> Came {
    match status {
        Some(status) => Came::End(status),
        None => Came::Broken("the member ended the stream without a status".into()),
    }
}
