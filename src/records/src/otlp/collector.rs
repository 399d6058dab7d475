//! A client of one collector: requests with a protobuf body over HTTP/1.1, one after the other.
//!
//! Owns: the connection, the time limits, and the bound of an answer. Must not know: the contents of a body.
//! Invariants: a request has a time limit; at most [`LONGEST_ANSWER`] bytes of an answer are read; a request
//! has the headers, and goes on a connection by the TLS settings, that are in force when it is sent.
//!
//! <https://github.com/open-telemetry/opentelemetry-proto>

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use http::header::HeaderMap;
use http::uri::PathAndQuery;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use super::collector_access::{CollectorAccess, CurrentCollectorAccess};

/// Time limit for a request, with its answer.
const ANSWERING: Duration = Duration::from_secs(10);
/// Largest answer that is read, in bytes.
pub const LONGEST_ANSWER: usize = 64 * 1024;

/// A collector. Used by one thread, which drives the connection while a request is under way.
pub struct CollectorClient {
    current: CurrentCollectorAccess,
    /// The access by which `connection` was made.
    access: Arc<CollectorAccess>,
    path: PathAndQuery,
    runtime: Runtime,
    connection: Option<CollectorConnection>,
}

/// An answer of a collector, or of whoever stands in its place.
#[derive(Clone, Debug)]
pub struct CollectorAnswer {
    /// The status.
    pub status: StatusCode,
    /// The header fields.
    pub headers: HeaderMap,
    /// The body, whole.
    pub body: Bytes,
}

/// An HTTP/1.1 connection: its sending half, and the future that moves its bytes.
struct CollectorConnection {
    sender: SendRequest<Full<Bytes>>,
    driver: Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>,
}

impl CollectorClient {
    /// A client that posts to `path`, with the access in force at each request.
    ///
    /// # Errors
    /// The operating system gives no resources.
    pub fn new(current: CurrentCollectorAccess, path: PathAndQuery) -> io::Result<Self> {
        Ok(Self {
            access: current.load_full(),
            current,
            path,
            runtime: Builder::new_current_thread().enable_all().build()?,
            connection: None,
        })
    }

    /// Takes the access in force. A connection by an access before is not used again: the collector may
    /// have been believed, or shown a certificate, by files that are replaced.
    fn follow_access(&mut self) {
        let current = self.current.load_full();
        if !Arc::ptr_eq(&current, &self.access) {
            self.access = current;
            self.connection = None;
        }
    }

    /// Sends a request, and returns the answer. The collector, or a load balancer before
    /// the collector, may close a connection that was idle at any moment, also while a request is on its way:
    /// a failure on such a connection is followed by one attempt on a new connection, so the collector may
    /// get the request twice. Blocks the thread, for ten seconds at most.
    ///
    /// # Errors
    /// No whole answer of a bounded size came in time. The collector may have the request.
    pub fn exchange(&mut self, body: &Bytes) -> io::Result<CollectorAnswer> {
        self.follow_access();
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
        let (answer, connection) = answered.unwrap_or_else(|_| Err(late()))?;
        self.connection = connection;
        Ok(answer)
    }

    async fn connect(&self) -> io::Result<CollectorConnection> {
        let stream = self.access.connector.connect(&self.access.endpoint).await.map_err(io::Error::other)?;
        let (sender, driver) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        Ok(CollectorConnection { sender, driver: Box::pin(driver) })
    }

    /// Sends one request, and reads its answer whole. Returns the connection if further requests may use it.
    async fn ask(
        &self,
        connection: CollectorConnection,
        body: Bytes,
    ) -> io::Result<(CollectorAnswer, Option<CollectorConnection>)> {
        let CollectorConnection { mut sender, driver } = connection;
        let mut request =
            Request::post(self.path.as_str()).body(Full::new(body)).map_err(io::Error::other)?;
        *request.headers_mut() = self.access.headers.clone();
        let answer = async {
            let sent = sender.send_request(request).await;
            let (head, body) = sent.map_err(io::Error::other)?.into_parts();
            let body = Limited::new(body, LONGEST_ANSWER).collect().await.map_err(io::Error::other)?;
            let (status, headers, body) = (head.status, head.headers, body.to_bytes());
            Ok::<_, io::Error>(CollectorAnswer { status, headers, body })
        };
        // A connection may end with its answer: the answer is complete then, and the connection is not used
        // again. The driver is dropped with its end: a driver that found the connection closed while idle
        // still holds the request, and the sending half waits for an answer until the request is dropped.
        let (answered, driver) = match select(Box::pin(answer), driver).await {
            Either::Left((answered, driver)) => (answered, Some(driver)),
            Either::Right((_ended, answer)) => (answer.await, None),
        };
        Ok((answered?, driver.map(|driver| CollectorConnection { sender, driver })))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread::{self, JoinHandle};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

    use super::*;
    use keyward_config::collector_settings::CollectorSettings;
    use keyward_config::{Endpoint, Scheme};
    use keyward_dial::names::NameResolver;

    const REQUEST_END: &[u8] = b"\r\n\r\nspans";
    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\ntaken";

    /// Answers one request on a connection of its own.
    fn collector() -> (CollectorClient, JoinHandle<()>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(REQUEST_END) {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.extend(byte);
            }
            stream.write_all(ANSWER).unwrap();
        });
        let endpoint = Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port };
        let settings = CollectorSettings { endpoint, tls: None, headers: Vec::new() };
        let (path, names) = (PathAndQuery::from_static("/v1/traces"), NameResolver::of_machine(None));
        let access = CollectorAccess::new(&settings, &names).unwrap();
        (CollectorClient::new(access.in_force(), path).unwrap(), serving)
    }

    /// Gives the client a kept connection, on which a request was answered. Returns the collector's end.
    fn keep_connection(client: &mut CollectorClient) -> DuplexStream {
        let (ours, mut theirs) = tokio::io::duplex(64 * 1024);
        let kept = client.runtime.block_on(async {
            let (sender, driver) = handshake(TokioIo::new(ours)).await.unwrap();
            let connection = CollectorConnection { sender, driver: Box::pin(driver) };
            let serving = async {
                let mut request = Vec::new();
                while !request.ends_with(REQUEST_END) {
                    request.push(theirs.read_u8().await.unwrap());
                }
                theirs.write_all(ANSWER).await.unwrap();
            };
            let (asked, ()) = tokio::join!(client.ask(connection, Bytes::from_static(b"spans")), serving);
            asked.unwrap().1
        });
        assert!(kept.is_some());
        client.connection = kept;
        theirs
    }

    /// Nobody moves the bytes of an idle connection, so the client finds the end with the next request.
    #[test]
    fn a_connection_that_the_collector_closed_while_idle_is_replaced_at_once() {
        let (mut client, serving) = collector();
        drop(keep_connection(&mut client));
        let answer = client.exchange(&Bytes::from_static(b"spans")).unwrap();
        assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"taken"[..]));
        serving.join().unwrap();
    }

    #[test]
    fn a_request_on_a_kept_connection_that_closes_before_an_answer_is_sent_once_more() {
        let (mut client, serving) = collector();
        let mut theirs = keep_connection(&mut client);
        let exchange = thread::spawn(move || client.exchange(&Bytes::from_static(b"spans")));
        let runtime = Builder::new_current_thread().build().unwrap();
        // The request is on its way.
        assert_eq!(runtime.block_on(theirs.read_u8()).unwrap(), b'P');
        drop(theirs);
        assert_eq!(exchange.join().unwrap().unwrap().status, StatusCode::OK);
        serving.join().unwrap();
    }
}
