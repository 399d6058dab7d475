//! A client of one collector: requests with a protobuf body over HTTP/1.1, one after the other.
//!
//! Owns: the connection, the time limits, and the bound of an answer. Must not know: the contents of a body.
//! Invariants: a request has a time limit; at most [`LONGEST_ANSWER`] bytes of an answer are read; the
//! headers of the configuration stand in no log and no error.
//!
//! <https://github.com/open-telemetry/opentelemetry-proto>

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http::header::{CONTENT_TYPE, HOST, HeaderMap, USER_AGENT};
use http::uri::PathAndQuery;
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use crate::config::Endpoint;
use crate::config::collector_settings::CollectorSettings;
use crate::dial::connect::Connector;
use crate::dial::member_tls;

/// Time limit for resolving, connecting and the handshake.
const CONNECTING: Duration = Duration::from_secs(5);
/// Time limit for a request, with its answer.
const ANSWERING: Duration = Duration::from_secs(10);
/// Largest answer that is read, in bytes.
pub const LONGEST_ANSWER: usize = 64 * 1024;

/// A collector. Used by one thread, which drives the connection while a request is under way.
pub struct CollectorClient {
    endpoint: Endpoint,
    path: PathAndQuery,
    headers: HeaderMap,
    connector: Connector,
    runtime: Runtime,
    connection: Option<CollectorConnection>,
}

/// An HTTP/1.1 connection: its sending half, and the future that moves its bytes.
struct CollectorConnection {
    sender: SendRequest<Full<Bytes>>,
    driver: Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>,
}

impl CollectorClient {
    /// A client that posts to `path`.
    ///
    /// # Errors
    /// The TLS settings cannot be used, or the operating system gives no resources.
    pub fn new(settings: &CollectorSettings, path: PathAndQuery) -> io::Result<Self> {
        let tls = settings.tls.as_ref().map(member_tls::client_config).transpose();
        let connector = Connector::tcp(tls.map_err(io::Error::other)?, CONNECTING).http1();
        let mut headers = HeaderMap::new();
        for (name, value) in &settings.headers {
            let mut value = HeaderValue::from_str(value.expose()).map_err(io::Error::other)?;
            value.set_sensitive(true);
            headers.append(name, value);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        headers.insert(HOST, settings.endpoint.authority().parse().map_err(io::Error::other)?);
        let agent = concat!("keyward/", env!("CARGO_PKG_VERSION"));
        headers.insert(USER_AGENT, HeaderValue::from_static(agent));
        Ok(Self {
            endpoint: settings.endpoint.clone(),
            path,
            headers,
            connector,
            runtime: Builder::new_current_thread().enable_all().build()?,
            connection: None,
        })
    }

    /// Sends a request, and returns status and body of the answer. A connection that was idle may be dead
    /// without a sign, so a failure there is followed by one attempt on a new connection. Blocks the thread,
    /// for ten seconds at most.
    ///
    /// # Errors
    /// No whole answer of a bounded size came in time. The collector may have the request.
    pub fn exchange(&mut self, body: &Bytes) -> io::Result<(StatusCode, Bytes)> {
        let idle = self.connection.take().filter(|connection| !connection.sender.is_closed());
        let attempt = async {
            let answered = match idle {
                Some(idle) => self.ask(idle, body.clone()).await.ok(),
                None => None,
            };
            match answered {
                Some(answered) => Ok(answered),
                None => self.ask(self.connect().await?, body.clone()).await,
            }
        };
        let answered = self.runtime.block_on(async { timeout(ANSWERING, attempt).await });
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the collector does not answer");
        let (status, answer, connection) = answered.unwrap_or_else(|_| Err(late()))?;
        self.connection = connection;
        Ok((status, answer))
    }

    async fn connect(&self) -> io::Result<CollectorConnection> {
        let stream = self.connector.connect(&self.endpoint).await.map_err(io::Error::other)?;
        let (sender, driver) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        Ok(CollectorConnection { sender, driver: Box::pin(driver) })
    }

    /// Sends one request, and reads its answer whole. Returns the connection if further requests may use it.
    async fn ask(
        &self,
        mut connection: CollectorConnection,
        body: Bytes,
    ) -> io::Result<(StatusCode, Bytes, Option<CollectorConnection>)> {
        let mut request =
            Request::post(self.path.as_str()).body(Full::new(body)).map_err(io::Error::other)?;
        *request.headers_mut() = self.headers.clone();
        let answer = async {
            let sent = connection.sender.send_request(request).await;
            let (head, body) = sent.map_err(io::Error::other)?.into_parts();
            let body = Limited::new(body, LONGEST_ANSWER).collect().await.map_err(io::Error::other)?;
            Ok::<_, io::Error>((head.status, body.to_bytes()))
        };
        // A connection may end with its answer: the answer is complete then, and the connection is not used
        // again.
        let (answered, is_open) = match select(Box::pin(answer), connection.driver.as_mut()).await {
            Either::Left((answered, _)) => (answered, true),
            Either::Right((_, answer)) => (answer.await, false),
        };
        let (status, body) = answered?;
        Ok((status, body, is_open.then_some(connection)))
    }
}
