//! JSON requests and answers over WebSocket, as by the proxy in front of etcd's JSON gateway.
//!
//! Owns: the handshake (RFC 6455), a JSON document for each message of the client, a message for each
//! line of the answer. Must not know: the call. Invariants: a client that does not read stops its answer;
//! documents that the call has not read yet are bounded; the call ends with the connection, and the
//! connection with the answer.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use data_encoding::BASE64;
use futures_util::{FutureExt as _, SinkExt as _, StreamExt as _};
use http::header::{
    AUTHORIZATION, CONNECTION, COOKIE, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY,
    SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use http_body::{Body, Frame};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};

use super::RestFace;
use super::call_request::largest_document;
use super::http_answer::{self, AnswerBody};
use super::routes::PathKind;
use crate::downstream::client_body::{ClientBody, ClientBodyError, UpgradedStream};
use crate::rpc::method::StreamingSides;

/// Appended to the client's key before hashing (RFC 6455, section 1.3).
const MAGIC: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// The only version of WebSocket.
const VERSION: HeaderValue = HeaderValue::from_static("13");
/// Bytes of a client's key (RFC 6455, section 4.1).
const KEY: usize = 16;
/// Time for the client to answer a Close.
const FAREWELL: Duration = Duration::from_secs(1);
/// Documents that the call has not read yet, beyond which the client is not read.
const WAITING: usize = 16;

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

/// The documents on their way from the connection to the call.
#[derive(Default)]
struct Inbox {
    documents: VecDeque<Bytes>,
    call: Option<Waker>,
}

/// The body of the call's request: the documents of the connection.
struct InboxBody {
    inbox: Rc<RefCell<Inbox>>,
    /// The documents of the call: one for a unary call, any number for a stream.
    left: usize,
}

impl Body for InboxBody {
    type Data = Bytes;
    type Error = ClientBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ClientBodyError>>> {
        let this = &mut *self;
        if this.left == 0 {
            return Poll::Ready(None);
        }
        let mut inbox = this.inbox.borrow_mut();
        match inbox.documents.pop_front() {
            Some(document) => {
                this.left -= 1;
                Poll::Ready(Some(Ok(Frame::data(document))))
            }
            None => {
                inbox.call = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

type ClientSocket = WebSocketStream<Box<dyn UpgradedStream>>;

/// Serves an upgraded connection until the answer or the connection ends.
async fn serve(face: RestFace, request: Request<()>, io: Box<dyn UpgradedStream>, ahead: Bytes) {
    let largest = largest_document(face.gateway.config.load().limits.request_size);
    let config = WebSocketConfig::default().max_message_size(Some(largest)).max_frame_size(Some(largest));
    let mut socket =
        WebSocketStream::from_partially_read(io, ahead.to_vec(), Role::Server, Some(config)).await;
    let inbox = Rc::<RefCell<Inbox>>::default();
    let left = match PathKind::of(request.uri().path()) {
        PathKind::Route(method) if method.stream == StreamingSides::Bidi => usize::MAX,
        _ => 1,
    };
    let body = InboxBody { inbox: Rc::clone(&inbox), left };
    let request = request.map(|()| ClientBody::Made(Box::pin(body)));
    let mut answer = pin!(face.serve(request));
    let response = loop {
        tokio::select! {
            response = &mut answer => break response,
            message = socket.next(), if has_room(&inbox) => {
                if !take(&inbox, message) { return close(&mut socket).await }
            }
        }
    };
    let mut body = response.into_body();
    let mut line = BytesMut::new();
    loop {
        // Cancel-safe on both sides: a body's frame is taken whole, and a message stays with the socket.
        let frame = tokio::select! {
            frame = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)) => frame,
            message = socket.next(), if has_room(&inbox) => {
                if take(&inbox, message) { continue } else { return close(&mut socket).await }
            }
        };
        match frame {
            Some(Ok(frame)) => line.extend_from_slice(&frame.into_data().unwrap_or_default()),
            Some(Err(_broken)) => return,
            None => break,
        }
        while let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            let whole = line.split_to(end + 1);
            if send(&mut socket, &whole[..end]).await.is_err() {
                return;
            }
        }
    }
    if !line.is_empty() && send(&mut socket, &line).await.is_err() {
        return;
    }
    close(&mut socket).await;
}

/// Closes the connection in order (RFC 6455, section 7): also answers the client's Close. A client that
/// is gone needs no farewell.
async fn close(socket: &mut ClientSocket) {
    let farewell = async {
        drop(socket.close(None).await);
        while let Some(Ok(_)) = socket.next().await {}
    };
    drop(timeout(FAREWELL, farewell).await);
}

fn has_room(inbox: &RefCell<Inbox>) -> bool {
    inbox.borrow().documents.len() < WAITING
}

/// Puts a document into the inbox. False if the connection ends.
fn take(inbox: &RefCell<Inbox>, message: Option<Result<Message, Error>>) -> bool {
    let document = match message {
        Some(Ok(Message::Text(text))) => Bytes::copy_from_slice(text.as_bytes()),
        Some(Ok(Message::Binary(bytes))) => bytes,
        // The library answers pings by itself.
        Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => return true,
        Some(Ok(Message::Close(_)) | Err(_)) | None => return false,
    };
    let mut inbox = inbox.borrow_mut();
    inbox.documents.push_back(document);
    if let Some(call) = inbox.call.take() {
        call.wake();
    }
    true
}

async fn send(socket: &mut ClientSocket, line: &[u8]) -> Result<(), Error> {
    socket.send(Message::text(String::from_utf8_lossy(line).into_owned())).await
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
