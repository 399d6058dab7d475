//! JSON requests and answers over WebSocket, as by the proxy in front of etcd's JSON gateway.
//!
//! Owns: the handshake (RFC 6455), the client's messages as the call's body, a message for each line of the
//! answer, the time of a message. Must not know: the call, the form of a frame.
//! Invariants: no message is held on either way: its bytes are passed on as they arrive, at most a piece
//! waits for the call, and the call's body charges what it keeps. The client of a call with a single document
//! is not read beyond that document, but for control frames. A client that does not read stops its answer.
//! The call ends with the connection, and the connection with the answer.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use data_encoding::BASE64;
use futures_util::FutureExt as _;
use http::header::{
    AUTHORIZATION, CONNECTION, COOKIE, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY,
    SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use http_body::{Body, Frame};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use tokio::io::{AsyncReadExt as _, AsyncWrite as _, AsyncWriteExt as _};
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::RestFace;
use super::http_answer::{self, AnswerBody};
use super::routes::PathKind;
use super::websocket_frames::{
    Fragment, MessagesRead, WebSocketPart, WebSocketReader, put_close, put_pong, put_text_head,
};
use keyward_downstream::client_body::{ClientBody, ClientBodyError, UpgradedStream};
use keyward_etcd::rpc::method::StreamingSides;

/// Appended to the client's key before hashing (RFC 6455, section 1.3).
const MAGIC: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// The only version of WebSocket.
const VERSION: HeaderValue = HeaderValue::from_static("13");
/// Bytes of a client's key (RFC 6455, section 4.1).
const KEY: usize = 16;
/// Time for the client to answer a Close.
const FAREWELL: Duration = Duration::from_secs(1);
/// Time for a message to arrive whole, without the time in which its call does not read: that of a request.
const MESSAGE_TIME: Duration = Duration::from_secs(30);
/// The status of a Close to a client whose message takes too long (RFC 6455, section 7.4.1).
const POLICY: u16 = 1008;
/// Bytes of the client read at once.
const READ_AHEAD: usize = 4 * 1024;

/// True if the client asks for WebSocket.
pub(super) fn is_upgrade(request: &Request<ClientBody>) -> bool {
    has_word(request.headers(), &CONNECTION, "upgrade") && has_word(request.headers(), &UPGRADE, "websocket")
}

fn has_word(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    let mut values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.any(|value| value.split(',').any(|given| given.trim().eq_ignore_ascii_case(word)))
}

/// Answers the handshake. The connection then serves the request's path by WebSocket.
pub(super) fn accept(face: RestFace, request: Request<ClientBody>) -> Response<AnswerBody> {
    let (head, body) = request.into_parts();
    let ClientBody::Http1(body) = body else { return http_answer::empty(StatusCode::BAD_REQUEST) };
    let key = head.headers.get(SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes);
    let is_key = key.is_some_and(|key| BASE64.decode(key).is_ok_and(|key| key.len() == KEY));
    let Some(key) = key.filter(|_| is_key && head.headers.get(SEC_WEBSOCKET_VERSION) == Some(&VERSION))
    else {
        return refused(StatusCode::BAD_REQUEST, "Bad Request\n");
    };
    if head.method != Method::GET || head.version != Version::HTTP_11 {
        return refused(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n");
    }
    let accept = BASE64.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, &[key, MAGIC].concat()).as_ref());
    let Ok(accept) = HeaderValue::try_from(accept) else {
        return http_answer::empty(StatusCode::BAD_REQUEST);
    };
    let mut response = http_answer::empty(StatusCode::SWITCHING_PROTOCOLS);
    let headers = response.headers_mut();
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
    let protocol = head.headers.get(SEC_WEBSOCKET_PROTOCOL).and_then(|value| value.to_str().ok());
    if protocol.is_some_and(|protocol| protocol.starts_with("Bearer")) {
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static("Bearer"));
    }
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = head.uri;
    *request.headers_mut() = call_headers(head.headers);
    body.bond().take_over_with(Box::new(move |io, ahead| serve(face, request, io, ahead).boxed_local()));
    response
}

fn refused(status: StatusCode, text: &'static str) -> Response<AnswerBody> {
    let mut refused = http_answer::text(status, text);
    refused.headers_mut().insert(SEC_WEBSOCKET_VERSION, VERSION);
    refused
}

/// The header of the request made for the connection. A browser cannot set `Authorization` on a
/// WebSocket: the subprotocol `Bearer, TOKEN` or the cookie `token` stand for it.
fn call_headers(mut headers: HeaderMap) -> HeaderMap {
    headers.remove(UPGRADE);
    headers.remove(CONNECTION);
    let protocol = headers.remove(SEC_WEBSOCKET_PROTOCOL);
    let protocol = protocol.as_ref().and_then(|value| value.to_str().ok());
    let token = protocol.and_then(|protocol| protocol.split_once("Bearer,")).map(|(_, token)| token.trim());
    let cookie = headers.remove(COOKIE);
    let cookies = cookie.as_ref().and_then(|value| value.to_str().ok()).unwrap_or_default();
    let cookie = cookies.split(';').find_map(|cookie| cookie.trim().strip_prefix("token="));
    if let Some(token) = cookie.or(token)
        && let Ok(value) = HeaderValue::try_from(format!("Bearer {token}"))
    {
        headers.insert(AUTHORIZATION, value);
    }
    headers
}

/// The bytes on their way from the connection to the call: at most one piece.
#[derive(Default)]
struct Inbox {
    piece: Option<Bytes>,
    /// The only document of a unary call has come whole.
    is_whole: bool,
    call: Option<Waker>,
    /// The reader of the connection, while it waits for the call.
    reader: Option<Waker>,
}

impl Inbox {
    fn wake_call(&mut self) {
        if let Some(call) = self.call.take() {
            call.wake();
        }
    }

    /// Takes a piece for the call. There must be no other.
    fn put(&mut self, piece: Bytes) {
        self.piece = Some(piece);
        self.wake_call();
    }

    /// Ready once the call has taken the last piece.
    fn poll_empty(&mut self, cx: &Context<'_>) -> Poll<()> {
        if self.piece.is_none() {
            return Poll::Ready(());
        }
        self.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// The body of the call's request: the messages of the connection.
struct InboxBody(Rc<RefCell<Inbox>>);

impl Body for InboxBody {
    type Data = Bytes;
    type Error = ClientBodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ClientBodyError>>> {
        let mut inbox = self.0.borrow_mut();
        if let Some(piece) = inbox.piece.take() {
            if let Some(reader) = inbox.reader.take() {
                reader.wake();
            }
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        if inbox.is_whole {
            return Poll::Ready(None);
        }
        inbox.call = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// The end of the client's side of a connection.
enum ClientEnd {
    /// The client closes, and is answered with the same payload.
    Closed(Bytes),
    /// The client is at fault, and is told a status.
    Fault(u16),
    /// The client is gone.
    Gone,
}

/// An upgraded connection.
struct ClientSocket {
    io: Box<dyn UpgradedStream>,
    reader: WebSocketReader,
    /// Bytes of the client that were not looked at.
    input: BytesMut,
    /// Bytes for the client: heads of frames, and control frames.
    output: BytesMut,
    inbox: Rc<RefCell<Inbox>>,
    /// The call takes one document, and no other message is read.
    takes_one: bool,
    /// The time by which the current message must end, without the time in which the call did not read.
    message_until: Option<Pin<Box<Sleep>>>,
    waits_for_call: Option<Instant>,
    /// A message to the client has begun.
    is_sending: bool,
}

impl ClientSocket {
    /// Reads the client's messages until the client's side ends. Cancel-safe.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<ClientEnd> {
        loop {
            if ready!(self.poll_output(cx)).is_err() {
                return Poll::Ready(ClientEnd::Gone);
            }
            if self.inbox.borrow_mut().poll_empty(cx).is_pending() {
                self.waits_for_call.get_or_insert_with(Instant::now);
                return Poll::Pending;
            }
            if let (Some(since), Some(until)) = (self.waits_for_call.take(), &mut self.message_until) {
                let later = until.deadline() + since.elapsed();
                until.as_mut().reset(later);
            }
            let messages = match self.takes_one && self.inbox.borrow().is_whole {
                true => MessagesRead::None,
                false => MessagesRead::All,
            };
            match self.reader.next(&mut self.input, messages) {
                Err(fault) => return Poll::Ready(ClientEnd::Fault(fault.close_code())),
                Ok(Some(WebSocketPart::Data(data))) => self.inbox.borrow_mut().put(data),
                Ok(Some(WebSocketPart::MessageEnd)) => self.end_message(),
                Ok(Some(WebSocketPart::Ping(payload))) => put_pong(&mut self.output, &payload),
                Ok(Some(WebSocketPart::Pong)) => {}
                Ok(Some(WebSocketPart::Close(payload))) => return Poll::Ready(ClientEnd::Closed(payload)),
                // The client is not read until the call has ended.
                Ok(None) if self.reader.is_held_back() => return Poll::Pending,
                Ok(None) => match self.poll_input(cx) {
                    Poll::Ready(Some(())) => {}
                    Poll::Ready(None) => return Poll::Ready(ClientEnd::Gone),
                    Poll::Pending => {
                        ready!(self.poll_message_late(cx));
                        return Poll::Ready(ClientEnd::Fault(POLICY));
                    }
                },
            }
        }
    }

    /// Documents are divided as by etcd's gateway.
    fn end_message(&mut self) {
        self.message_until = None;
        let mut inbox = self.inbox.borrow_mut();
        if self.takes_one {
            inbox.is_whole = true;
            inbox.wake_call();
        } else {
            inbox.put(Bytes::from_static(b"\n"));
        }
    }

    /// Ready once the current message takes too long.
    fn poll_message_late(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.reader.is_in_message() {
            return Poll::Pending;
        }
        let until = self.message_until.get_or_insert_with(|| Box::pin(sleep(MESSAGE_TIME)));
        until.as_mut().poll(cx)
    }

    /// Reads more bytes of the client; `None` at their end.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Poll<Option<()>> {
        self.input.reserve(READ_AHEAD);
        let mut input = (&mut self.input).limit(READ_AHEAD);
        let read = ready!(pin!(self.io.read_buf(&mut input)).poll(cx));
        Poll::Ready(read.is_ok_and(|read| read > 0).then_some(()))
    }

    /// Writes all bytes for the client.
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.output.is_empty() {
            return Poll::Ready(Ok(()));
        }
        while !self.output.is_empty() {
            let written = ready!(Pin::new(&mut self.io).poll_write(cx, &self.output))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.output.advance(written);
        }
        Pin::new(&mut self.io).poll_flush(cx)
    }

    /// Sends a part of a message. The part stays with the caller until the connection has taken it.
    async fn send(&mut self, part: &[u8], is_last: bool) -> io::Result<()> {
        let fragment = Fragment { is_first: !self.is_sending, is_last };
        self.is_sending = !is_last;
        put_text_head(&mut self.output, part.len(), fragment);
        poll_fn(|cx| self.poll_output(cx)).await?;
        self.io.write_all(part).await?;
        self.io.flush().await
    }

    /// Closes the connection in order (RFC 6455, section 7). A client that is gone needs no farewell.
    async fn close(mut self, payload: &[u8]) {
        put_close(&mut self.output, payload);
        let farewell = async {
            if poll_fn(|cx| self.poll_output(cx)).await.is_err() {
                return;
            }
            let mut rest = [0; READ_AHEAD];
            while self.io.read(&mut rest).await.is_ok_and(|read| read > 0) {}
        };
        drop(timeout(FAREWELL, farewell).await);
    }

    async fn end(self, end: ClientEnd) {
        match end {
            ClientEnd::Closed(payload) => {
                let mut socket = self;
                put_close(&mut socket.output, &payload);
                drop(timeout(FAREWELL, poll_fn(|cx| socket.poll_output(cx))).await);
            }
            ClientEnd::Fault(code) => self.close(&code.to_be_bytes()).await,
            ClientEnd::Gone => {}
        }
    }
}

/// Serves an upgraded connection until the answer or the connection ends.
async fn serve(face: RestFace, request: Request<()>, io: Box<dyn UpgradedStream>, ahead: Bytes) {
    let takes_one = match PathKind::of(request.uri().path()) {
        PathKind::Route(method) => method.stream != StreamingSides::Bidi,
        _ => true,
    };
    let inbox = Rc::<RefCell<Inbox>>::default();
    let mut socket = ClientSocket {
        io,
        reader: WebSocketReader::default(),
        input: BytesMut::from(ahead),
        output: BytesMut::new(),
        inbox: Rc::clone(&inbox),
        takes_one,
        message_until: None,
        waits_for_call: None,
        is_sending: false,
    };
    let request = request.map(|()| ClientBody::Made(Box::pin(InboxBody(inbox))));
    let mut answer = pin!(face.serve(request));
    let response = tokio::select! {
        response = &mut answer => response,
        end = poll_fn(|cx| socket.poll_receive(cx)) => return socket.end(end).await,
    };
    let mut body = response.into_body();
    loop {
        // Cancel-safe on both sides: a body's frame is taken whole, and bytes of the client stay in the
        // socket.
        let frame = tokio::select! {
            frame = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)) => frame,
            end = poll_fn(|cx| socket.poll_receive(cx)) => return socket.end(end).await,
        };
        let sent = match frame {
            Some(Ok(frame)) => {
                let data = frame.into_data().unwrap_or_default();
                send_lines(&mut socket, &data, body.is_end_stream()).await
            }
            Some(Err(_broken)) => return,
            None if socket.is_sending => socket.send(b"", true).await,
            None => break,
        };
        if sent.is_err() {
            return;
        }
    }
    socket.close(b"").await;
}

/// Sends a piece of the answer: a message for each line. The rest of a line follows, or is the last message.
async fn send_lines(socket: &mut ClientSocket, piece: &[u8], is_last: bool) -> io::Result<()> {
    let mut lines = piece.split_inclusive(|byte| *byte == b'\n').peekable();
    while let Some(line) = lines.next() {
        let (line, ends) = match line.strip_suffix(b"\n") {
            Some(line) => (line, true),
            None => (line, is_last && lines.peek().is_none()),
        };
        socket.send(line, ends).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_by_subprotocol_or_cookie() {
        let of = |name: HeaderName, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            call_headers(headers).get(AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(of(SEC_WEBSOCKET_PROTOCOL, "Bearer, abc").as_deref(), Some("Bearer abc"));
        assert_eq!(of(SEC_WEBSOCKET_PROTOCOL, "Bearer,abc").as_deref(), Some("Bearer abc"));
        assert_eq!(of(SEC_WEBSOCKET_PROTOCOL, "a, b"), None);
        assert_eq!(of(COOKIE, "x=1; token=abc").as_deref(), Some("Bearer abc"));
        assert_eq!(of(COOKIE, "xtoken=abc"), None);
    }
}
