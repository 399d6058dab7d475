//! HTTP/2 towards a client: the handshake, the streams, the replies, and the sending of PINGs.
//!
//! Owns: the order of a stream's end, and a reply's pace by the client's window. Must not know: the services
//! served, the reasons for a connection's end.
//! Invariants: h2's connection is polled only after a wakeup of its own, also by a stream that has sent; a
//! stream reset by the client ends at once. A reply's next piece is taken only when h2
//! has room for the piece, so a reply unread by the client stays with its owner.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use h2::server::{Builder, Connection, Handshake, SendResponse};
use h2::{Ping, PingPong, Reason, SendStream};
use http::{Request, Response};
use http_body::Frame;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::client_body::{AnswerBroken, ClientBody, ReplyBody};
use crate::message_frames::{has_several_messages, messages_of_one_frame};
use crate::socket_progress::{PREFACE, SocketProgress};
use crate::stream_turns::StreamTurns;
use keyward_base::io::http2_body::Http2Body;
use keyward_base::tasks::wake_gate::WakeGate;

/// The HTTP/2 side of one client connection. `answer` is called for each request.
pub(super) struct Http2Server<T, S, F, B> {
    /// The first field, because the streams tell h2 of their end.
    streams: StreamTurns<ServerStream<F, B>>,
    state: ServerState<T>,
    /// Before h2's connection, which most wakeups of a stream do not concern.
    gate: WakeGate,
    answer: S,
    progress: Rc<SocketProgress>,
    pings: Option<PingSender>,
    is_leaving: bool,
}

enum ServerState<T> {
    Handshake(Handshake<T, Bytes>),
    Serving(Connection<T, Bytes>),
}

impl<T, S, F, B> Http2Server<T, S, F, B>
where
    T: AsyncRead + AsyncWrite + Unpin,
    S: Fn(Request<ClientBody>) -> F,
    F: Future<Output = Response<B>> + Unpin + 'static,
    B: ReplyBody + Unpin + 'static,
{
    /// Serves `io` with the settings of `builder`. With `ping_interval`, a PING is sent after each interval
    /// without a sign of life in `progress`.
    pub(super) fn new(
        builder: &Builder,
        io: T,
        ping_interval: Option<Duration>,
        progress: &Rc<SocketProgress>,
        answer: S,
    ) -> Self {
        let pings = ping_interval.map(|interval| PingSender::new(interval, Rc::clone(progress)));
        let state = ServerState::Handshake(builder.handshake(io));
        Self {
            streams: StreamTurns::new(),
            state,
            gate: WakeGate::default(),
            answer,
            progress: Rc::clone(progress),
            pings,
            is_leaving: false,
        }
    }

    /// Serves the connection until its end; a call is a turn, and polls `length` streams at most. If
    /// `leaves`, sends GOAWAY once the client's preface has arrived: no new streams are accepted, and the
    /// connection ends with its last stream. Cancel-safe.
    pub(super) fn poll_serve(
        &mut self,
        cx: &mut Context<'_>,
        length: usize,
        leaves: bool,
    ) -> Poll<Result<(), h2::Error>> {
        self.streams.begin(length);
        let polled = self.poll_streams(cx);
        // Before the preface no GOAWAY can be sent.
        if polled.is_ready() || !leaves || self.is_leaving || self.progress.received() < PREFACE {
            return polled;
        }
        self.leave();
        self.poll_streams(cx)
    }

    /// Sends GOAWAY. During the handshake, the GOAWAY follows the handshake.
    fn leave(&mut self) {
        self.is_leaving = true;
        if let ServerState::Serving(connection) = &mut self.state {
            connection.graceful_shutdown();
            self.gate.open();
        }
    }

    fn poll_streams(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        if let ServerState::Handshake(handshake) = &mut self.state {
            let mut connection = ready!(Pin::new(handshake).poll(cx))?;
            if let Some(pings) = &mut self.pings {
                pings.channel = connection.ping_pong();
            }
            if self.is_leaving {
                connection.graceful_shutdown();
            }
            self.state = ServerState::Serving(connection);
        }
        let ServerState::Serving(connection) = &mut self.state else { return Poll::Pending };
        if let Some(pings) = &mut self.pings {
            pings.poll(cx);
        }
        loop {
            // Also sends what the streams have answered.
            while let Poll::Ready(accepted) = self.gate.poll(cx, |cx| connection.poll_accept(cx)) {
                let Some(accepted) = accepted else { return Poll::Ready(Ok(())) };
                let (request, respond) = accepted?;
                let answer = (self.answer)(request.map(|body| ClientBody::Http2(Http2Body::new(body))));
                self.streams.push(ServerStream::Answering { answer, respond });
            }
            if !self.gate.quietly(|| self.streams.poll_woken(cx)) {
                return Poll::Pending;
            }
        }
    }
}

/// One stream: answers the request, then sends the reply. The answer's future is freed before the reply is
/// sent: a watch's reply lives for days.
enum ServerStream<F, B> {
    Answering { answer: F, respond: SendResponse<Bytes> },
    Replying(Box<ReplyPump<B>>),
}

impl<F, B> Future for ServerStream<F, B>
where
    F: Future<Output = Response<B>> + Unpin,
    B: ReplyBody + Unpin,
{
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match &mut *self {
                Self::Answering { answer, respond } => match answer.poll_unpin(cx) {
                    Poll::Ready(response) => match ReplyPump::begin(response, respond) {
                        Some(reply) => *self = Self::Replying(reply),
                        None => return Poll::Ready(()),
                    },
                    Poll::Pending => return respond.poll_reset(cx).map(|_| ()),
                },
                Self::Replying(reply) => return reply.poll(cx),
            }
        }
    }
}

/// A reply on its way to the client.
struct ReplyPump<B> {
    stream: SendStream<Bytes>,
    body: B,
    /// Messages that came with those sent last, and did not fit into their frame.
    rest: Bytes,
    /// h2 has room for a piece. Each question to h2 takes a lock, and a stream mostly waits with room.
    has_room: bool,
}

impl<B: ReplyBody + Unpin> ReplyPump<B> {
    /// Sends the header of the reply. `None` if the reply has ended with the header, or the stream has ended.
    fn begin(response: Response<B>, respond: &mut SendResponse<Bytes>) -> Option<Box<Self>> {
        let (head, body) = response.into_parts();
        let is_over = body.is_end_stream();
        // An error here is a stream that has ended meanwhile.
        let stream = respond.send_response(Response::from_parts(head, ()), is_over).ok()?;
        (!is_over).then(|| Box::new(Self { stream, body, rest: Bytes::new(), has_room: false }))
    }

    /// Ready when the reply was sent to its end, or the stream has ended.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // h2 announces room to the stream's waker even where the room is granted at once: with the task's own
        // waker there, each piece would wake its own task for nothing.
        if self.stream.poll_reset(&mut Context::from_waker(Waker::noop())).is_ready() {
            return Poll::Ready(());
        }
        self.body.poll_work(cx);
        if self.poll_pieces(cx).is_ready() {
            return Poll::Ready(());
        }
        // h2 keeps the waker until the client's reset or new room for the reply.
        self.stream.poll_reset(cx).map(|_| ())
    }

    fn poll_pieces(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if !self.has_room && !ready!(self.poll_room(cx)) {
                return Poll::Ready(());
            }
            let frame = match std::mem::take(&mut self.rest) {
                rest if rest.is_empty() => ready!(Pin::new(&mut self.body).poll_frame(cx)),
                rest => Some(Ok(Frame::data(rest))),
            };
            self.has_room = false;
            if self.send(frame).is_none() || (self.rest.is_empty() && self.body.is_end_stream()) {
                return Poll::Ready(());
            }
        }
    }

    /// Waits until h2 has room for a piece; false if the stream has ended.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        self.stream.reserve_capacity(1);
        while self.stream.capacity() == 0 {
            if !matches!(ready!(self.stream.poll_capacity(cx)), Some(Ok(_))) {
                return Poll::Ready(false);
            }
        }
        self.has_room = true;
        Poll::Ready(true)
    }

    /// Sends a piece of the body; `None` if it was the last one. An error of h2 is a stream that has ended
    /// meanwhile.
    fn send(&mut self, frame: Option<Result<Frame<Bytes>, AnswerBroken>>) -> Option<()> {
        match frame {
            None => drop(self.stream.send_data(Bytes::new(), true)),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(mut data) => {
                    if self.body.joins_messages() && has_several_messages(&data) {
                        // Whole messages, which leave in frames of their own (`message_frames`).
                        self.stream.reserve_capacity(data.len());
                        let room = self.stream.capacity();
                        let first = messages_of_one_frame(&mut data, room);
                        self.rest = std::mem::replace(&mut data, first);
                    }
                    let is_over = self.rest.is_empty() && self.body.is_end_stream();
                    return self.stream.send_data(data, is_over).ok();
                }
                Err(frame) => {
                    self.stream.reserve_capacity(0);
                    drop(self.stream.send_trailers(frame.into_trailers().unwrap_or_default()));
                }
            },
            Some(Err(AnswerBroken)) => self.stream.send_reset(Reason::INTERNAL_ERROR),
        }
        None
    }
}

/// Sends PINGs to a silent client. The answers are not judged here: any received byte is a sign of life.
struct PingSender {
    interval: Duration,
    progress: Rc<SocketProgress>,
    timer: Pin<Box<Sleep>>,
    channel: Option<PingPong>,
    is_outstanding: bool,
}

impl PingSender {
    fn new(interval: Duration, progress: Rc<SocketProgress>) -> Self {
        let timer = Box::pin(sleep_until(progress.sign_of_life() + interval));
        Self { interval, progress, timer, channel: None, is_outstanding: false }
    }

    fn poll(&mut self, cx: &mut Context<'_>) {
        let Some(channel) = &mut self.channel else { return };
        if self.is_outstanding && channel.poll_pong(cx).is_ready() {
            self.is_outstanding = false;
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            let silent_until = self.progress.sign_of_life() + self.interval;
            if silent_until > now {
                self.timer.as_mut().reset(silent_until);
                continue;
            }
            self.is_outstanding |= channel.send_ping(Ping::opaque()).is_ok();
            self.timer.as_mut().reset(now + self.interval);
        }
    }
}

/// The reason of a connection's end for which Keyward's HTTP/2 is the cause: the client reset more streams
/// than h2 allows before the service sees them.
pub(super) fn is_flood(error: &h2::Error) -> bool {
    !error.is_remote() && error.reason() == Some(Reason::ENHANCE_YOUR_CALM)
}
