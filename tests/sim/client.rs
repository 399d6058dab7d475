//! A gRPC client as the world plays it: nothing is read unless the world says so.
//!
//! Owns: connections to Keyward, and Watch streams on them as messages and their end. Must not know what is asked.

use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::task::noop_waker_ref;
use h2::client::{self, ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderValue, Method, Request};
use keyward::refusal::{Code, Status};
use keyward::rpc::frame::{FrameReader, encode};
use keyward::tasks::{TaskHandle, Tasks};
use tokio::io::DuplexStream;

const WATCH: &str = "http://keyward.test/etcdserverpb.Watch/Watch";
const LARGEST: usize = 256 << 20;

/// A connection to Keyward.
pub(crate) struct Connection {
    send: SendRequest<Bytes>,
    _drive: TaskHandle,
}

/// How a stream ended, as its client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Status(Code, String),
    NoStatus,
    Broken(String),
}

/// One Watch stream.
pub(crate) struct Stream {
    send: SendStream<Bytes>,
    response: Option<ResponseFuture>,
    body: Option<RecvStream>,
    reader: FrameReader,
    end: Option<End>,
    half_closed: bool,
    /// Bytes that were taken.
    received: usize,
}

impl Connection {
    /// Over `pipe`; a stream takes `window` bytes that it did not read.
    pub(crate) async fn over(pipe: DuplexStream, window: u32, tasks: &Tasks) -> Self {
        let mut builder = client::Builder::new();
        builder.initial_window_size(window).initial_connection_window_size(1 << 24);
        let (send, connection) = builder.handshake(pipe).await.expect("an HTTP/2 connection");
        let drive = tasks.spawn("simulated client", async move { drop(connection.await) });
        Self { send, _drive: drive }
    }

    /// Opens a Watch stream.
    pub(crate) fn watch(&mut self, leader: bool) -> Result<Stream, End> {
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = WATCH.parse().expect("a path");
        *request.version_mut() = http::Version::HTTP_2;
        let headers = request.headers_mut();
        headers.insert("content-type", HeaderValue::from_static("application/grpc"));
        headers.insert("te", HeaderValue::from_static("trailers"));
        if leader {
            headers.insert("hasleader", HeaderValue::from_static("true"));
        }
        let opened = self.send.send_request(request, false);
        let (response, send) = opened.map_err(|error| End::Broken(error.to_string()))?;
        Ok(Stream {
            send,
            response: Some(response),
            body: None,
            reader: FrameReader::new(LARGEST),
            end: None,
            half_closed: false,
            received: 0,
        })
    }
}

impl Stream {
    /// Says a message, unless nothing more can be said.
    pub(crate) fn say(&mut self, message: &[u8]) {
        if !self.half_closed {
            drop(self.send.send_data(encode(message), false));
        }
    }

    pub(crate) fn half_close(&mut self) {
        if !self.half_closed {
            drop(self.send.send_data(Bytes::new(), true));
            self.half_closed = true;
        }
    }

    pub(crate) fn is_half_closed(&self) -> bool {
        self.half_closed
    }

    /// The next message that is here, if any.
    pub(crate) fn next(&mut self) -> Option<Bytes> {
        self.answered();
        loop {
            if let Some(message) = self.reader.next() {
                return match message {
                    Ok(message) => Some(message),
                    Err(fault) => {
                        self.end.get_or_insert(End::Broken(fault.to_string()));
                        None
                    }
                };
            }
            if !self.receive() {
                return None;
            }
        }
    }

    /// Its end, once everything before it was taken.
    pub(crate) fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// How many bytes were taken so far.
    pub(crate) fn received(&self) -> usize {
        self.received
    }

    fn answered(&mut self) {
        let Some(response) = &mut self.response else { return };
        let Some(response) = response.now_or_never() else { return };
        self.response = None;
        match response {
            Err(error) => self.end = Some(End::Broken(error.to_string())),
            Ok(response) => {
                let (head, body) = response.into_parts();
                if body.is_end_stream() {
                    self.end = Some(End::of(Status::from_headers(&head.headers)));
                } else {
                    self.body = Some(body);
                }
            }
        }
    }

    fn receive(&mut self) -> bool {
        let Some(body) = &mut self.body else { return false };
        let mut cx = Context::from_waker(noop_waker_ref());
        match body.poll_data(&mut cx) {
            Poll::Pending => false,
            Poll::Ready(Some(Ok(data))) => {
                // The window may be gone with its connection.
                drop(body.flow_control().release_capacity(data.len()));
                self.received += data.len();
                self.reader.push(data);
                true
            }
            Poll::Ready(Some(Err(error))) => {
                self.end = Some(End::Broken(error.to_string()));
                self.body = None;
                false
            }
            Poll::Ready(None) => {
                let Poll::Ready(trailers) = body.poll_trailers(&mut cx) else { return false };
                self.end = Some(match trailers {
                    Ok(trailers) => End::of(trailers.as_ref().and_then(Status::from_headers)),
                    Err(error) => End::Broken(error.to_string()),
                });
                self.body = None;
                false
            }
        }
    }
}

impl End {
    fn of(status: Option<Status>) -> Self {
        status.map_or(Self::NoStatus, |status| Self::Status(status.code, status.message.to_string()))
    }
}
