//! A gRPC client that sees what a real one's transport sees: headers, messages, trailers, resets.

use std::rc::Rc;

use bytes::Bytes;
use h2::client::{self, ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use http::{HeaderMap, HeaderValue, Method, Request};
use keyward::refusal::Code;
use keyward::rpc::frame::encode;
use keyward::tasks::{TaskHandle, Tasks};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::wire::{End, Form, Messages, end_of, of_headers, say, say_framed};

/// One connection to Keyward.
pub(crate) struct Client {
    send: SendRequest<Bytes>,
    connection: Rc<TaskHandle>,
    /// Sent with every call.
    pub(crate) headers: HeaderMap,
}

/// What a unary call brought.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) headers: HeaderMap,
    pub(crate) messages: Vec<Bytes>,
    pub(crate) end: End,
}

/// A call that goes on.
pub(crate) struct Stream {
    pub(crate) send: SendStream<Bytes>,
    response: Option<ResponseFuture>,
    messages: Option<Messages>,
    end: Option<End>,
    pub(crate) headers: HeaderMap,
}

impl Client {
    pub(crate) async fn over(io: impl AsyncRead + AsyncWrite + Unpin + 'static, tasks: &Tasks) -> Self {
        let mut builder = client::Builder::new();
        builder
            .initial_window_size(4 << 20)
            .initial_connection_window_size(64 << 20)
            .initial_max_send_streams(4096)
            .max_concurrent_reset_streams(8192);
        Self::with(io, tasks, &builder).await
    }

    pub(crate) async fn with(
        io: impl AsyncRead + AsyncWrite + Unpin + 'static,
        tasks: &Tasks,
        builder: &client::Builder,
    ) -> Self {
        let (send, connection) = builder.handshake(io).await.expect("an HTTP/2 connection");
        let drive = async move { drop(connection.await) };
        Self {
            send,
            connection: Rc::new(tasks.spawn("client connection of the test", drive)),
            headers: HeaderMap::new(),
        }
    }

    /// With `name: value` on every call from now on.
    pub(crate) fn header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.insert(name, HeaderValue::try_from(value).expect("a header"));
        self
    }

    /// Another handle of the same connection.
    pub(crate) fn again(&self) -> Self {
        let (send, connection) = (self.send.clone(), Rc::clone(&self.connection));
        Self { send, connection, headers: self.headers.clone() }
    }

    /// The sending half of the connection, for requests that are not gRPC. It ends with the last handle.
    pub(crate) fn sender(&self) -> SendRequest<Bytes> {
        self.send.clone()
    }

    /// Whether the connection has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.connection.is_finished()
    }

    /// Begins a call.
    pub(crate) async fn open(&self, path: &str) -> Result<Stream, End> {
        let mut send = self.send.clone().ready().await.map_err(|error| end_of(&error))?;
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = format!("http://keyward.test{path}").parse().expect("a path");
        *request.version_mut() = http::Version::HTTP_2;
        let headers = request.headers_mut();
        headers.insert("content-type", HeaderValue::from_static("application/grpc"));
        headers.insert("te", HeaderValue::from_static("trailers"));
        headers.extend(self.headers.clone());
        let (response, send) = send.send_request(request, false).map_err(|error| end_of(&error))?;
        Ok(Stream { send, response: Some(response), messages: None, end: None, headers: HeaderMap::new() })
    }

    /// A unary call, to its end.
    pub(crate) async fn call(&self, path: &str, message: impl AsRef<[u8]>) -> Outcome {
        match self.begin(path, message).await {
            Ok(stream) => stream.finish().await,
            Err(end) => Outcome { headers: HeaderMap::new(), messages: Vec::new(), end },
        }
    }

    /// A unary call whose reply is for later.
    pub(crate) async fn begin(&self, path: &str, message: impl AsRef<[u8]>) -> Result<Stream, End> {
        let mut stream = self.open(path).await?;
        // Where it is refused before it was read whole, the reply says why.
        drop(say_framed(&mut stream.send, encode(message.as_ref()), true).await);
        Ok(stream)
    }
}

impl Stream {
    pub(crate) async fn say(&mut self, message: &[u8]) {
        say(&mut self.send, message).await.expect("the stream takes it");
    }

    pub(crate) fn half_close(&mut self) {
        drop(self.send.send_data(Bytes::new(), true));
    }

    /// Waits for the header of the reply.
    pub(crate) async fn answered(&mut self) {
        let Some(response) = self.response.take() else { return };
        match response.await {
            Err(error) => self.end = Some(end_of(&error)),
            Ok(response) => {
                let (head, body) = response.into_parts();
                self.headers = head.headers;
                if body.is_end_stream() {
                    self.end = Some(of_headers(&self.headers, Form::Header));
                } else {
                    self.messages = Some(Messages::new(body));
                }
            }
        }
    }

    /// The next message; `Err` is the end.
    pub(crate) async fn next(&mut self) -> Result<Bytes, End> {
        self.answered().await;
        match (&self.end, &mut self.messages) {
            (Some(end), _) => Err(end.clone()),
            (None, Some(messages)) => messages.next().await,
            (None, None) => Err(End::Gone),
        }
    }

    /// The body of the reply as it comes, to be read by hand.
    pub(crate) async fn body(&mut self) -> h2::RecvStream {
        let response = self.response.take().expect("not answered before").await.expect("an answer");
        response.into_body()
    }

    pub(crate) async fn finish(mut self) -> Outcome {
        let mut messages = Vec::new();
        loop {
            match self.next().await {
                Ok(message) => messages.push(message),
                Err(end) => return Outcome { headers: self.headers, messages, end },
            }
        }
    }

    pub(crate) fn cancel(mut self) {
        self.send.send_reset(Reason::CANCEL);
    }
}

impl Outcome {
    /// The message of a call that succeeded.
    pub(crate) fn message(&self) -> &Bytes {
        assert_eq!(self.end.code(), Some(Code::Ok), "{:?}", self.end);
        let [message] = &self.messages[..] else { panic!("{} messages", self.messages.len()) };
        message
    }
}
