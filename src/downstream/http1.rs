//! Clients that speak HTTP/1: answered, and told what is spoken here.
//!
//! Owns: HTTP/1's settings, the bounds of what is read, and that one connection is one request. Must not know: HTTP/2. What
//! answers is the caller's; until there is something to serve, that is [`nothing_here`].
//! Invariants: whoever speaks has an answer, or its end, within the time of a handshake; of a body no more than [`BODY`] is read.

use std::convert::Infallible;
use std::future::Future;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE, EXPECT, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};

/// Of a request's head.
const HEAD: usize = 16 * 1024;
/// Of a request's body: read, so that whoever sends it all before it listens hears the answer.
const BODY: usize = 64 * 1024;

const TEXT: &str = "This is Keyward, in front of an etcd cluster. It speaks gRPC here, over HTTP/2; over HTTP/1 there is nothing.\n";

/// Serves one request; what is left of the connection at `until` is cut, which is an error.
pub(super) async fn serve<F: Future<Output = Response<Full<Bytes>>>>(
    io: impl AsyncRead + AsyncWrite + Unpin + 'static,
    until: Instant,
    answer: impl Fn(Request<Incoming>) -> F,
) -> Result<(), Elapsed> {
    let service = service_fn(async |request| Ok::<_, Infallible>(answer(request).await));
    let connection = Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .auto_date_header(false)
        .max_buf_size(HEAD)
        .serve_connection(TokioIo::new(io), service);
    if let Err(error) = timeout_at(until, connection).await? {
        tracing::debug!(%error, "an HTTP/1 connection ended");
    }
    Ok(())
}

/// The answer to everything.
pub(super) async fn nothing_here(request: Request<Incoming>) -> Response<Full<Bytes>> {
    // Who asks before it sends a body is told before it sends one.
    if !request.headers().contains_key(EXPECT) {
        read_to_bound(request.into_body()).await;
    }
    let mut response = Response::new(Full::from(TEXT));
    *response.status_mut() = StatusCode::NOT_FOUND;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

async fn read_to_bound(mut body: Incoming) {
    let mut read = 0;
    while read < BODY {
        match body.frame().await {
            Some(Ok(frame)) => read += frame.data_ref().map_or(0, Bytes::len),
            Some(Err(_)) | None => return,
        }
    }
}
