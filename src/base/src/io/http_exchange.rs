//! One GET or POST by HTTP/1.1 over a connection of its own.
//!
//! Owns: the exchange, and the bound on the answer. Must not know: addresses, the meaning of a page.
//! Invariants: the connection ends with the exchange; no more than the allowed bytes of an answer are held.

use bytes::Bytes;
use http::header::{CONNECTION, HOST};
use http::{Method, Request, response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

/// Reason for the lack of an answer.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// The authority is no value of a header.
    #[error("no request: {0}")]
    Request(#[from] http::Error),
    /// The connection broke, or the answer is not HTTP/1.1.
    #[error("no HTTP answer: {0}")]
    Exchange(#[from] hyper::Error),
    /// The answer is too large, or ended early.
    #[error("no whole answer: {0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
}

/// Asks `authority`, connected by `stream`, for `path`, and reads at most `longest` bytes of the answer.
///
/// Not cancel-safe: the connection ends. Waits without a time limit.
///
/// # Errors
/// [`ExchangeError`].
pub async fn get(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    authority: &str,
    path: &'static str,
    longest: usize,
) -> Result<(response::Parts, Bytes), ExchangeError> {
    exchange(stream, Method::GET, (authority, path), Bytes::new(), longest).await
}

/// Sends `body` to `path` at `authority`, connected by `stream`, and reads at most `longest` bytes of the
/// answer. The receiver may have acted on the body whatever the error is.
///
/// Not cancel-safe: the connection ends. Waits without a time limit.
///
/// # Errors
/// [`ExchangeError`].
pub async fn post(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    authority: &str,
    path: &'static str,
    body: Bytes,
    longest: usize,
) -> Result<(response::Parts, Bytes), ExchangeError> {
    exchange(stream, Method::POST, (authority, path), body, longest).await
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    method: Method,
    (authority, path): (&str, &'static str),
    body: Bytes,
    longest: usize,
) -> Result<(response::Parts, Bytes), ExchangeError> {
    let (mut sender, connection) = handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await?;
    let request = Request::builder().method(method).uri(path);
    let request = request.header(HOST, authority).header(CONNECTION, "close").body(Full::new(body))?;
    let exchange = async move {
        let (head, body) = sender.send_request(request).await?.into_parts();
        let body = Limited::new(body, longest).collect().await.map_err(ExchangeError::Body)?.to_bytes();
        Ok((head, body))
    };
    // The connection future moves the bytes, and ends with the exchange: the exchange owns the sending half.
    tokio::join!(exchange, connection).0
}
