//! Clients speaking HTTP/1: answered with an explanation of the supported protocol.
//!
//! Owns: HTTP/1's settings, the limits on bytes read, the rule of one request per connection, and the log
//! record of a request. Must not know: HTTP/2. The caller supplies the answer; at present always
//! `not_found`.
//! Invariants: every client gets an answer or a disconnect within the handshake's time limit. At most `BODY`
//! bytes of a body are read.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE, EXPECT, HeaderValue, USER_AGENT};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};

use crate::telemetry;
use crate::telemetry::limiter::RecordLimiter;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::single_label::one;

/// Longest path logged in full. The longest method path of the JSON gateway has some 40 bytes.
const LONGEST_PATH: usize = 64;
/// Longest part of a client's user agent in the log.
const LONGEST_AGENT: usize = 128;
/// Length of the longest standard HTTP methods, CONNECT and OPTIONS.
const LONGEST_METHOD: usize = 7;
/// Limit on a request's head.
const HEAD: usize = 16 * 1024;
/// Limit on the bytes read of a request's body. The body is read so that a client sending everything before
/// reading receives the answer.
const BODY: usize = 64 * 1024;

const TEXT: &str = "This is Keyward, in front of an etcd cluster. It speaks gRPC here, over HTTP/2; \
    over HTTP/1 there is nothing.\n";

/// Counts and logs requests, so that an operator sees the remaining HTTP/1 clients before closing etcd's own
/// port.
pub struct Http1Log {
    /// The metrics for counting requests.
    pub metrics: Arc<Metrics>,
    /// Limits the rate of logged requests; `None` if access records are off.
    pub limiter: Option<Rc<RecordLimiter>>,
    /// The listener's name.
    pub listener: Arc<str>,
    /// The remote address of the connection.
    pub remote: Option<SocketAddr>,
}

impl Http1Log {
    /// Counts and logs one request; `source` is the client's address from a balancer's header.
    pub(super) fn note<B>(&self, request: &Request<B>, source: Option<SocketAddr>) {
        let kind = Http1PathKind::of(request.uri().path());
        self.metrics.http1_requests.get_or_create(&one("path", kind.label())).inc();
        if !self.limiter.as_ref().is_some_and(|limiter| limiter.may_log()) {
            return;
        }
        let agent = request.headers().get(USER_AGENT).map(|agent| String::from_utf8_lossy(agent.as_bytes()));
        let agent = agent.map(|agent| agent.chars().take(LONGEST_AGENT).collect::<String>());
        tracing::info!(
            target: telemetry::ACCESS,
            // A longer method is not standard HTTP; the client could put any text here.
            method = if request.method().as_str().len() > LONGEST_METHOD {
                "other"
            } else {
                request.method().as_str()
            },
            path = kind.shown(request.uri().path()),
            user_agent = agent,
            listener = &*self.listener,
            remote = source.or(self.remote).map(tracing::field::display),
            "request over HTTP/1 answered with 404"
        );
    }
}

/// The kind of etcd HTTP/1 resource at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Http1PathKind {
    /// The JSON gateway: paths name methods, never keys.
    V3,
    /// The etcd v2 API: paths name keys.
    V2,
    /// A page at a fixed path.
    Page(&'static str),
    Other,
}

impl Http1PathKind {
    fn of(path: &str) -> Self {
        const PAGES: [&str; 5] = ["/health", "/livez", "/metrics", "/readyz", "/version"];
        let is_below = |prefix: &str| path.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'));
        if ["/v3", "/v3beta", "/v3alpha"].into_iter().any(is_below) {
            return Self::V3;
        }
        if is_below("/v2") {
            return Self::V2;
        }
        PAGES.into_iter().find(|page| *page == path).map_or(Self::Other, Self::Page)
    }

    /// Label in the metrics.
    fn label(self) -> &'static str {
        match self {
            Self::V3 => "/v3/",
            Self::V2 => "/v2/",
            Self::Page(page) => page,
            Self::Other => "other",
        }
    }

    /// Path in the log, without any key.
    fn shown(self, path: &str) -> &str {
        let is_method = |path: &str| {
            path.len() <= LONGEST_PATH
                && path.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'/')
        };
        match self {
            Self::V3 if is_method(path) => path,
            _ => self.label(),
        }
    }
}

/// Serves one request. The connection is cut at `until`; a cut is an error.
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

/// The answer to every request.
pub(super) async fn not_found(request: Request<Incoming>) -> Response<Full<Bytes>> {
    // With `Expect`, the client waits for the answer before sending a body.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_counted_by_kind_and_shown_without_a_key() {
        for (path, label, shown) in [
            ("/v3/kv/range", "/v3/", "/v3/kv/range"),
            ("/v3beta/auth/authenticate", "/v3/", "/v3beta/auth/authenticate"),
            ("/v3/kv/range%0aforged", "/v3/", "/v3/"),
            ("/v2/keys/secret/name", "/v2/", "/v2/"),
            ("/v2", "other", "other"),
            ("/v33/x", "other", "other"),
            ("/health", "/health", "/health"),
            ("/health/x", "other", "other"),
            ("/", "other", "other"),
        ] {
            let kind = Http1PathKind::of(path);
            assert_eq!((kind.label(), kind.shown(path)), (label, shown), "{path}");
        }
        let long = format!("/v3/{}", "a".repeat(LONGEST_PATH));
        assert_eq!(Http1PathKind::V3.shown(&long), "/v3/");
    }
}
