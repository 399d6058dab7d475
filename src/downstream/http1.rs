//! Clients that speak HTTP/1: answered, and told what is spoken here.
//!
//! Owns: HTTP/1's settings, the bounds of what is read, that one connection is one request, and what the log tells of it. Must not
//! know: HTTP/2. What answers is the caller's; until there is something to serve, that is `nothing_here`.
//! Invariants: whoever speaks has an answer, or its end, within the time of a handshake; of a body no more than `BODY` is read.

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
use crate::telemetry::metrics::{Metrics, one};

/// Of a method of the JSON gateway: the longest has some 40 bytes.
const LONGEST_PATH: usize = 64;
/// Of what a client says of itself, in the log.
const LONGEST_AGENT: usize = 128;
/// The longest of HTTP's own methods is CONNECT or OPTIONS.
const LONGEST_METHOD: usize = 7;
/// Of a request's head.
const HEAD: usize = 16 * 1024;
/// Of a request's body: read, so that whoever sends it all before it listens hears the answer.
const BODY: usize = 64 * 1024;

const TEXT: &str = "This is Keyward, in front of an etcd cluster. It speaks gRPC here, over HTTP/2; over HTTP/1 there is nothing.\n";

/// Counts and logs requests, so that an operator sees who still speaks HTTP/1 before etcd's own port is closed.
pub struct Http1Log {
    /// Where requests are counted.
    pub metrics: Arc<Metrics>,
    /// How many of them are logged; none where access records are off.
    pub limiter: Option<Rc<RecordLimiter>>,
    /// The listener's name.
    pub listener: Arc<str>,
    /// The address of the connection.
    pub remote: Option<SocketAddr>,
}

impl Http1Log {
    /// Notes one request; `source` is the client's address where a balancer has told it.
    pub(super) fn note<B>(&self, request: &Request<B>, source: Option<SocketAddr>) {
        let kind = PathKind::of(request.uri().path());
        self.metrics.http1_requests.get_or_create(&one("path", kind.label())).inc();
        if !self.limiter.as_ref().is_some_and(|limiter| limiter.may_log()) {
            return;
        }
        let agent = request.headers().get(USER_AGENT).map(|agent| String::from_utf8_lossy(agent.as_bytes()));
        let agent = agent.map(|agent| agent.chars().take(LONGEST_AGENT).collect::<String>());
        tracing::info!(
            target: telemetry::ACCESS,
            // One that is none of HTTP's own is of the client's making.
            method = if request.method().as_str().len() > LONGEST_METHOD { "other" } else { request.method().as_str() },
            path = kind.shown(request.uri().path()),
            user_agent = agent,
            listener = &*self.listener,
            remote = source.or(self.remote).map(tracing::field::display),
            "request over HTTP/1 answered with 404"
        );
    }
}

/// What etcd serves over HTTP/1 at such a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathKind {
    /// The JSON gateway, whose paths name methods and no keys.
    V3,
    /// etcd 2, whose paths name keys.
    V2,
    /// A page of its own.
    Page(&'static str),
    Other,
}

impl PathKind {
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

    /// In the metrics.
    fn label(self) -> &'static str {
        match self {
            Self::V3 => "/v3/",
            Self::V2 => "/v2/",
            Self::Page(page) => page,
            Self::Other => "other",
        }
    }

    /// In the log: no key is shown there.
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
            let kind = PathKind::of(path);
            assert_eq!((kind.label(), kind.shown(path)), (label, shown), "{path}");
        }
        let long = format!("/v3/{}", "a".repeat(LONGEST_PATH));
        assert_eq!(PathKind::V3.shown(&long), "/v3/");
    }
}
