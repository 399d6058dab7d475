//! A member's side of HTTP/2: connections that can be cut at a byte, calls as they come, answers by hand.
//!
//! Owns: accepting, reading requests, writing answers as far as the peer's windows let them. Must not know what an
//! answer means.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::task::noop_waker_ref;
use h2::server::{self, SendResponse};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Response};
use keyward::refusal::Code;
use keyward::rpc::frame::{FrameReader, encode};
use keyward::tasks::Tasks;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::sync::{Notify, mpsc};

use crate::cluster::{Call, Connected, Shared, status};

const LARGEST: usize = 256 << 20;

/// A pipe that breaks after so many more bytes were written to it, if it is told so.
struct Pipe {
    inner: DuplexStream,
    budget: Rc<Cell<Option<usize>>>,
}

impl AsyncRead for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, to)
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Some(left) = self.budget.get() else { return Pin::new(&mut self.inner).poll_write(cx, bytes) };
        if left == 0 {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let written =
            std::task::ready!(Pin::new(&mut self.inner).poll_write(cx, &bytes[..bytes.len().min(left)]))?;
        self.budget.set(Some(left - written));
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// A request's header, and the one message of a unary call.
pub(crate) struct Request {
    pub(crate) path: String,
    headers: HeaderMap,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

/// The way back to the caller.
pub(crate) struct Responder {
    respond: SendResponse<Bytes>,
    send: Option<SendStream<Bytes>>,
    /// In which form refusals are sent: as plaintext ports do, or as TLS ports do.
    trailers: bool,
}

impl Responder {
    fn begin(&mut self) -> Option<&mut SendStream<Bytes>> {
        if self.send.is_none() {
            let mut response = Response::new(());
            response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
            self.send = self.respond.send_response(response, false).ok();
        }
        self.send.as_mut()
    }

    /// Writes as much of the framed message as the peer takes now, and leaves the rest in it. Whether any went.
    pub(crate) fn say(&mut self, framed: &mut Bytes) -> bool {
        let Some(send) = self.begin() else {
            framed.clear();
            return true;
        };
        send.reserve_capacity(framed.len());
        let granted = send.capacity().min(framed.len());
        if granted == 0 {
            return false;
        }
        drop(send.send_data(framed.split_to(granted), false));
        true
    }

    pub(crate) fn was_reset(&mut self) -> bool {
        let mut cx = Context::from_waker(noop_waker_ref());
        match &mut self.send {
            Some(send) => send.poll_reset(&mut cx).is_ready(),
            None => self.respond.poll_reset(&mut cx).is_ready(),
        }
    }

    /// One message and OK.
    pub(crate) fn reply(mut self, message: &[u8]) {
        if let Some(send) = self.begin() {
            drop(send.send_data(encode(message), false));
            drop(send.send_trailers(status(Code::Ok, "").trailers()));
        }
    }

    /// A status alone, in the header.
    pub(crate) fn refuse(&mut self, code: Code, text: &'static str) {
        let mut response = Response::new(());
        *response.headers_mut() = status(code, text).trailers_only();
        drop(self.respond.send_response(response, true));
    }

    /// A status alone, in the form of the member's port.
    pub(crate) fn refuse_somehow(&mut self, code: Code, text: &'static str) {
        if self.trailers { self.end(code, text) } else { self.refuse(code, text) }
    }

    /// Trailers.
    pub(crate) fn end(&mut self, code: Code, text: &'static str) {
        if let Some(send) = self.begin() {
            drop(send.send_trailers(status(code, text).trailers()));
        }
    }

    pub(crate) fn end_without_status(&mut self) {
        if let Some(send) = self.begin() {
            drop(send.send_data(Bytes::new(), true));
        }
    }

    pub(crate) fn reset(&mut self, reason: Reason) {
        match &mut self.send {
            Some(send) => send.send_reset(reason),
            None => self.respond.send_reset(reason),
        }
    }
}

/// Takes every connection that a member is dialled for.
pub(crate) async fn accept(
    cluster: Shared,
    node: usize,
    mut dialled: mpsc::Receiver<DuplexStream>,
    tasks: Tasks,
) {
    while let Some(pipe) = dialled.recv().await {
        let number = cluster.borrow_mut().number();
        let budget = Rc::new(Cell::new(None));
        let go_away = Rc::new(Notify::new());
        let pipe = Pipe { inner: pipe, budget: Rc::clone(&budget) };
        let serve = connection(Rc::clone(&cluster), node, number, pipe, Rc::clone(&go_away), tasks.clone());
        let connected = Connected { node, task: None, go_away, budget };
        cluster.borrow_mut().connections.insert(number, connected);
        let task = tasks.spawn("simulated member", serve);
        if let Some(connected) = cluster.borrow_mut().connections.get_mut(&number) {
            connected.task = Some(task);
        }
    }
}

async fn connection(
    cluster: Shared,
    node: usize,
    number: u64,
    pipe: Pipe,
    go_away: Rc<Notify>,
    tasks: Tasks,
) {
    let mut settings = server::Builder::new();
    settings.initial_window_size(1 << 20).initial_connection_window_size(1 << 24);
    if let Ok(mut connection) = settings.handshake::<_, Bytes>(pipe).await {
        loop {
            tokio::select! {
                biased;
                () = go_away.notified() => connection.graceful_shutdown(),
                accepted = connection.accept() => match accepted {
                    Some(Ok((request, respond))) => {
                        let take = take(Rc::clone(&cluster), node, number, request, respond);
                        tasks.spawn("simulated call", take).detach();
                    }
                    _ => break,
                },
            }
        }
    }
    let task = cluster.borrow_mut().connections.get_mut(&number).and_then(|connected| connected.task.take());
    cluster.borrow_mut().connection_ended(number);
    // This task itself: it ends by itself.
    if let Some(task) = task {
        task.detach();
    }
}

async fn take(
    cluster: Shared,
    node: usize,
    connection: u64,
    request: http::Request<RecvStream>,
    respond: SendResponse<Bytes>,
) {
    let (head, mut body) = request.into_parts();
    let request = Request { path: head.uri.path().to_owned(), headers: head.headers };
    let trailers = node % 2 == 1;
    let respond = Responder { respond, send: None, trailers };
    if request.path.ends_with("/Watch") {
        let opened = cluster.borrow_mut().opened(node, connection, &request, respond);
        let Some(number) = opened else { return };
        let mut reader = FrameReader::new(LARGEST);
        while let Some(data) = body.data().await {
            let Ok(data) = data else {
                return cluster.borrow_mut().gone(number);
            };
            drop(body.flow_control().release_capacity(data.len()));
            reader.push(data);
            for message in reader.by_ref() {
                let Ok(message) = message else { return };
                cluster.borrow_mut().requested(number, message);
            }
        }
        return;
    }
    let mut reader = FrameReader::new(LARGEST);
    while let Some(data) = body.data().await {
        let Ok(data) = data else { return };
        drop(body.flow_control().release_capacity(data.len()));
        reader.push(data);
    }
    let Some(Ok(message)) = reader.next() else { return };
    cluster.borrow_mut().calls.push(Call { node, connection, request, message, respond });
}

/// A fresh cell for a cluster.
pub(crate) fn shared(cluster: crate::cluster::Cluster) -> Shared {
    Rc::new(RefCell::new(cluster))
}
