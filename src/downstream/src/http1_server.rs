//! HTTP/1 towards a client: requests one after the other on one connection, and the takeover of the
//! connection by another protocol.
//!
//! Owns: HTTP/1's settings and limits. Must not know: the services served, the reasons for a connection's
//! end. Invariants: hyper refuses a request whose length is ambiguous (RFC 9112, section 6.3). A connection
//! whose response breaks off is closed without the response's end, so that the client sees the break. A
//! request's head arrives within [`HEAD_TIME`]. A connection that leaves is not closed under a request: the
//! next answer says `Connection: close`, and without a request the connection ends once it was idle for
//! [`IDLE_TIME`]. A client that closes its side behind its request gets its answer, if that comes within
//! [`ANSWER_TIME`]; a request that lasts for as long as its client ends with it.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1::{Builder, Connection};
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Sleep, sleep};

use crate::client_body::{AnswerBroken, ClientBody, Http1Body, Http1Bond};
use crate::read_turns::ReadTurn;
use crate::served_streams::ServedStreams;
use crate::socket_progress::SocketProgress;
use crate::watched_end::{SeenBehind, WatchedEnd};

/// Time for the head of a request to arrive, from its first byte: the time of etcd's servers for a head. A
/// connection may be idle before for as long as at etcd, which never closes one.
const HEAD_TIME: Duration = Duration::from_secs(300);
/// Time without a request after which a leaving connection is closed. A request sent in the moment of the end
/// would be lost, and a client must not repeat a POST by itself.
const IDLE_TIME: Duration = Duration::from_secs(5);
/// Time for the answer to a client that sends nothing more, and may be gone: that of a call.
const ANSWER_TIME: Duration = Duration::from_secs(7);
/// The least buffer that hyper accepts for the bytes of a connection.
const LEAST_BUFFER: usize = 8 * 1024;

/// The HTTP/1 side of one client connection, with response bodies `B`.
pub(super) struct Http1Server<T, B>
where
    B: Body<Data = Bytes, Error = AnswerBroken> + 'static,
{
    state: Http1State<T, B>,
    bond: Rc<Http1Bond>,
    streams: Rc<ServedStreams>,
    leave: Rc<Cell<Leave>>,
    /// Runs while the connection leaves, without a request.
    idle_time: Option<Pin<Box<Sleep>>>,
    /// The requests begun when heads were looked for last.
    requests: u64,
    /// Runs while a head has arrived in part.
    head_time: Option<Pin<Box<Sleep>>>,
    io: WatchedEnd<T>,
    /// Runs once the client sends nothing more.
    answer_time: Option<Pin<Box<Sleep>>>,
}

/// The way of a connection to its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leave {
    /// Requests are served one after another.
    Stays,
    /// The next answer is the last one.
    WithAnswer,
    /// hyper closes the connection.
    Now,
}

enum Http1State<T, B>
where
    B: Body<Data = Bytes, Error = AnswerBroken> + 'static,
{
    Serving(Box<Connection<TokioIo<WatchedEnd<T>>, AnswerService<B>>>),
    /// Another protocol has taken over; the connection counts as one stream.
    Upgraded(LocalBoxFuture<'static, ()>),
    Closing(WatchedEnd<T>),
    Closed,
}

/// The answer to each request of a connection.
type Http1Answer<B> = Box<dyn Fn(Request<ClientBody>) -> LocalBoxFuture<'static, Response<B>>>;

/// Calls the answer to a request for hyper.
struct AnswerService<B> {
    answer: Rc<Http1Answer<B>>,
    bond: Rc<Http1Bond>,
    leave: Rc<Cell<Leave>>,
    turn: Rc<ReadTurn>,
    progress: Rc<SocketProgress>,
}

impl<B: 'static> Service<Request<Incoming>> for AnswerService<B> {
    type Response = Response<B>;
    type Error = Infallible;
    type Future = LocalBoxFuture<'static, Result<Response<B>, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.progress.note_request();
        self.bond.reset();
        let request = request.map(|body| ClientBody::Http1(Http1Body::new(body, &self.bond)));
        let (answer, turn, leave) = (Rc::clone(&self.answer), Rc::clone(&self.turn), Rc::clone(&self.leave));
        let bond = Rc::clone(&self.bond);
        async move {
            poll_fn(|cx| turn.poll_request(cx)).await;
            let mut response = answer(request).await;
            let is_whole = bond.pass_unread_over().await;
            let leaves = leave.get() != Leave::Stays && response.status() != StatusCode::SWITCHING_PROTOCOLS;
            if leaves || !is_whole {
                // hyper closes the connection behind this answer.
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok(response)
        }
        .boxed_local()
    }
}

impl<T, B> Http1Server<T, B>
where
    T: AsyncRead + AsyncWrite + Unpin + 'static,
    B: Body<Data = Bytes, Error = AnswerBroken> + 'static,
{
    /// Serves `io`. A request's head has at most `head_size` bytes; the first one is noted in `progress`. A
    /// turn begins few requests, also if many have been read.
    pub(super) fn new<F: Future<Output = Response<B>> + 'static>(
        io: T,
        head_size: u32,
        progress: &Rc<SocketProgress>,
        streams: &Rc<ServedStreams>,
        turn: &Rc<ReadTurn>,
        answer: impl Fn(Request<ClientBody>) -> F + 'static,
    ) -> Self {
        let answer: Http1Answer<B> = Box::new(move |request| answer(request).boxed_local());
        let bond = Rc::<Http1Bond>::default();
        let leave = Rc::new(Cell::new(Leave::Stays));
        let service = AnswerService {
            answer: Rc::new(answer),
            bond: Rc::clone(&bond),
            leave: Rc::clone(&leave),
            turn: Rc::clone(turn),
            progress: Rc::clone(progress),
        };
        let buffer = usize::try_from(head_size).unwrap_or(usize::MAX).max(LEAST_BUFFER);
        let io = WatchedEnd::new(io);
        let connection = Builder::new()
            // hyper's limit holds for idle connections, too.
            .header_read_timeout(None)
            .max_buf_size(buffer)
            // As Go writes names: scripts search for `Content-Type:`.
            .title_case_headers(true)
            .half_close(true)
            .serve_connection(TokioIo::new(io.clone()), service);
        Self {
            state: Http1State::Serving(Box::new(connection)),
            bond,
            streams: Rc::clone(streams),
            leave,
            idle_time: None,
            requests: 0,
            head_time: None,
            io,
            answer_time: None,
        }
    }

    /// Serves the connection until its end. If `leaves`, the connection ends with the open or the next
    /// request. Cancel-safe.
    pub(super) fn poll_serve(&mut self, cx: &mut Context<'_>, leaves: bool) -> Poll<()> {
        if leaves && self.leave.get() == Leave::Stays {
            self.leave.set(Leave::WithAnswer);
        }
        loop {
            match &mut self.state {
                Http1State::Serving(connection) => match connection.poll_without_shutdown(cx) {
                    Poll::Pending => {
                        if self.poll_client_gone(cx).is_pending() && self.poll_late_head(cx).is_pending() {
                            ready!(self.poll_idle(cx));
                        }
                    }
                    Poll::Ready(Ok(())) => self.take_over(),
                    Poll::Ready(Err(error)) => {
                        tracing::debug!(%error, "an HTTP/1 connection ended");
                        self.take_over();
                    }
                },
                Http1State::Upgraded(handler) => {
                    ready!(handler.as_mut().poll(cx));
                    self.state = Http1State::Closed;
                }
                Http1State::Closing(io) => {
                    // A client that is gone needs no farewell.
                    drop(ready!(Pin::new(io).poll_shutdown(cx)));
                    self.state = Http1State::Closed;
                }
                Http1State::Closed => return Poll::Ready(()),
            }
        }
    }

    /// Ready once the connection is closed because the rest of a head is late.
    fn poll_late_head(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // The bytes read up to now are of requests that were begun; more may be, where heads are sent ahead.
        if std::mem::replace(&mut self.requests, self.streams.begun()) != self.streams.begun()
            || self.streams.is_serving()
        {
            self.io.forget_reads();
        }
        if !self.io.has_read() {
            self.head_time = None;
            return Poll::Pending;
        }
        let head_time = self.head_time.get_or_insert_with(|| Box::pin(sleep(HEAD_TIME)));
        ready!(head_time.as_mut().poll(cx));
        tracing::debug!("the head of a request over HTTP/1 is late");
        self.take_over();
        Poll::Ready(())
    }

    /// Ready once a leaving connection was idle for its time, and is closed by hyper. Nothing of a request
    /// has arrived: the look behind the last one comes before.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Http1State::Serving(connection) = &mut self.state else { return Poll::Pending };
        if self.leave.get() != Leave::WithAnswer {
            return Poll::Pending;
        }
        if self.streams.is_serving() {
            self.idle_time = None;
            return Poll::Pending;
        }
        let idle_time = self.idle_time.get_or_insert_with(|| Box::pin(sleep(IDLE_TIME)));
        ready!(idle_time.as_mut().poll(cx));
        self.leave.set(Leave::Now);
        Pin::new(&mut **connection).graceful_shutdown();
        Poll::Ready(())
    }

    /// Looks behind the request that is being answered. Ready once the connection must be looked at again:
    /// after the client's end, which closes a connection between two requests, and after the time for the
    /// answer, with which the connection is closed.
    fn poll_client_gone(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.answer_time.is_none() {
            // hyper reads the request, as fast as the request's reader, and sees an end within it.
            ready!(self.bond.poll_read(cx));
            // hyper may have waited for these bytes, or reads them after this request.
            if ready!(self.io.poll_behind(cx)) == SeenBehind::Bytes {
                return Poll::Ready(());
            }
            let time = if self.bond.ends_with_client() { Duration::ZERO } else { ANSWER_TIME };
            self.answer_time = Some(Box::pin(sleep(time)));
            // hyper closes an idle connection when it reads the end.
            return Poll::Ready(());
        }
        if let Some(time) = &mut self.answer_time {
            ready!(time.as_mut().poll(cx));
            tracing::debug!("an HTTP/1 client is gone");
            self.state = Http1State::Closed;
        }
        Poll::Ready(())
    }

    /// Gives the connection to the handler that took it over; without a handler the connection closes.
    fn take_over(&mut self) {
        let Http1State::Serving(connection) = std::mem::replace(&mut self.state, Http1State::Closed) else {
            return;
        };
        let parts = connection.into_parts();
        let io = parts.io.into_inner();
        self.state = match self.bond.take_handler() {
            Some(handler) => {
                let occupied = self.streams.occupy();
                Http1State::Upgraded(
                    handler(Box::new(io), parts.read_buf).map(move |()| drop(occupied)).boxed_local(),
                )
            }
            None => Http1State::Closing(io),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use http_body_util::{BodyExt as _, Empty};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadBuf, duplex};

    use super::*;

    /// A pipe that counts its reads.
    struct CountedReads(DuplexStream, Rc<Cell<usize>>);

    impl AsyncRead for CountedReads {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.1.set(self.1.get() + 1);
            Pin::new(&mut self.0).poll_read(cx, buffer)
        }
    }

    impl AsyncWrite for CountedReads {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.0).poll_write(cx, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(cx)
        }
    }

    /// The number of reads until a request of `size` bytes was answered and its client had closed its side.
    async fn reads_of(size: usize) -> usize {
        let (client, server) = duplex(64 * 1024);
        let reads = Rc::default();
        let io = CountedReads(server, Rc::clone(&reads));
        let streams = ServedStreams::new(1, Arc::default());
        let mut server =
            Http1Server::new(io, 16 * 1024, &Rc::default(), &streams, &ReadTurn::new(), async |request| {
                let body: Request<ClientBody> = request;
                let read = body.into_body().collect().await.expect("a whole body").to_bytes();
                let length = read.len().to_string();
                let none = Empty::new().map_err(|never: Infallible| match never {});
                Response::builder().header("length", length).body(none).expect("a response")
            });
        let (mut from, mut to) = tokio::io::split(client);
        let send = async {
            let head = format!("POST / HTTP/1.1\r\nHost: k\r\nContent-Length: {size}\r\n\r\n");
            to.write_all(head.as_bytes()).await.expect("open");
            to.write_all(&vec![b'x'; size]).await.expect("open");
            to.shutdown().await.expect("open");
        };
        let mut answer = String::new();
        let serve = poll_fn(|cx| server.poll_serve(cx, false));
        let ((), read, ()) = futures_util::join!(send, from.read_to_string(&mut answer), serve);
        read.expect("text");
        assert!(answer.contains(&format!("Length: {size}\r\n")), "{answer}");
        reads.get()
    }

    /// The connection looks behind a request, never into it: a large one is read in large parts.
    #[tokio::test]
    async fn a_request_of_many_bytes_takes_few_reads() {
        let (small, large) = (reads_of(1).await, reads_of(1024 * 1024).await);
        assert!(large - small <= 1024 * 1024 / 4096, "{small} reads, and {large}");
    }
}
