//! One HTTP/1.1 request that is sent exactly as it is given, and everything that came back.
//!
//! Owns: one connection per request. Must not know etcd, Keyward, or the meaning of an answer. Invariants: every wait has a limit; a
//! broken answer is a value, never a panic.

use std::{future::pending, net::SocketAddr, pin::pin, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper::{
    body::Incoming,
    client::conn::http1::{SendRequest, handshake},
};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::document;
use crate::{
    harness::{
        evidence,
        pki::{Pair, Pki},
    },
    raw::{End, connector},
};

/// Past every timeout of etcd itself (7 s for a write without a quorum).
const LIMIT: Duration = Duration::from_secs(20);
/// How long a stream is watched for more after its expected documents came.
const QUIET: Duration = Duration::from_millis(300);

/// Where to connect, and how.
#[derive(Clone)]
pub(crate) struct Target {
    address: SocketAddr,
    tls: Option<TlsConnector>,
}

/// What to send.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) method: &'static str,
    pub(crate) path: String,
    /// Fields beside `host` and those of the body.
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    pub(crate) reading: Reading,
}

/// When reading stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// With the end of the answer.
    ToItsEnd,
    /// With the end of the answer, or when nothing comes for a while after at least so many documents.
    Documents { at_least: usize },
}

/// Everything that came back.
#[derive(Clone, Debug)]
pub(crate) struct HttpAnswer {
    /// The status; `None` where no head came.
    pub(crate) status: Option<u16>,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: HeaderMap,
    pub(crate) end: End,
}

impl Target {
    pub(crate) fn plain(address: SocketAddr) -> Target {
        Target { address, tls: None }
    }

    /// TLS that trusts `pki` alone and shows `client` where there is one.
    pub(crate) fn tls(address: SocketAddr, pki: &Pki, client: Option<&Pair>) -> Target {
        Target { address, tls: Some(connector(pki, client, b"http/1.1")) }
    }

    /// Makes one request on a connection of its own.
    pub(crate) async fn ask(&self, ask: &Ask) -> HttpAnswer {
        for (_, value) in ask.headers.iter().filter(|(name, _)| *name == "authorization") {
            evidence::secret("a token shown", value.trim_start_matches("Bearer "));
        }
        match timeout(LIMIT * 3, self.connect_and_ask(ask)).await {
            Ok(answer) => answer,
            Err(_) => HttpAnswer::ended(End::TimedOut),
        }
    }

    async fn connect_and_ask(&self, ask: &Ask) -> HttpAnswer {
        let lost = |error: std::io::Error| HttpAnswer::ended(End::ConnectionLost(error.to_string()));
        let tcp = match TcpStream::connect(self.address).await {
            Ok(tcp) => tcp,
            Err(refused) => return lost(refused),
        };
        tcp.set_nodelay(true).expect("TCP takes nodelay");
        match &self.tls {
            None => self.over(tcp, ask).await,
            Some(tls) => match tls.connect(ServerName::from(self.address.ip()), tcp).await {
                Ok(stream) => self.over(stream, ask).await,
                Err(refused) => lost(refused),
            },
        }
    }

    async fn over(&self, io: impl AsyncRead + AsyncWrite + Unpin + Send, ask: &Ask) -> HttpAnswer {
        let (mut requests, connection) = match handshake(TokioIo::new(io)).await {
            Ok(both) => both,
            Err(error) => return HttpAnswer::ended(End::ConnectionLost(error.to_string())),
        };
        // The request learns of the connection's end by itself; what was read before it still counts.
        let drive = async {
            drop(connection.await);
            pending::<()>().await;
        };
        let mut answer = HttpAnswer::ended(End::TimedOut);
        tokio::select! {
            () = exchange(&mut requests, self.request(ask), ask.reading, &mut answer) => {}
            () = drive => {}
        }
        answer
    }

    fn request(&self, ask: &Ask) -> Request<Full<Bytes>> {
        let mut request = Request::builder().method(ask.method).uri(&ask.path);
        request = request.header("host", self.address.to_string());
        for (name, value) in &ask.headers {
            request = request.header(*name, value);
        }
        request.body(Full::from(ask.body.clone())).expect("a path, names and values that HTTP can carry")
    }
}

impl HttpAnswer {
    fn ended(end: End) -> HttpAnswer {
        let (headers, trailers) = (HeaderMap::new(), HeaderMap::new());
        HttpAnswer { status: None, headers, body: Vec::new(), trailers, end }
    }

    /// The documents of the body; none where it is no JSON.
    pub(crate) fn documents(&self) -> Vec<&str> {
        document::split(&self.body).unwrap_or_default()
    }
}

/// Sends, and fills `answer` as far as it comes.
async fn exchange(
    requests: &mut SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
    reading: Reading,
    answer: &mut HttpAnswer,
) {
    let mut response = pin!(requests.send_request(request));
    let patience = if reading == (Reading::Documents { at_least: 0 }) { QUIET } else { LIMIT };
    let response = match timeout(patience, &mut response).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => return answer.end = End::ConnectionLost(error.to_string()),
        Err(_) if patience == QUIET => return answer.end = End::Open,
        Err(_) => return answer.end = End::TimedOut,
    };
    let (head, body) = response.into_parts();
    answer.status = Some(head.status.as_u16());
    answer.headers = head.headers;
    answer.end = read(body, reading, answer).await;
}

/// Reads until the end, or until it is quiet after the expected documents.
async fn read(mut body: Incoming, reading: Reading, answer: &mut HttpAnswer) -> End {
    loop {
        let enough = match reading {
            Reading::ToItsEnd => false,
            Reading::Documents { at_least } => answer.documents().len() >= at_least,
        };
        match timeout(if enough { QUIET } else { LIMIT }, body.frame()).await {
            Err(_) if enough => return End::Open,
            Err(_) => return End::TimedOut,
            Ok(None) => return End::Ended,
            Ok(Some(Err(error))) => return End::ConnectionLost(error.to_string()),
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => answer.body.extend(data),
                Err(frame) => answer.trailers.extend(frame.into_trailers().unwrap_or_default()),
            },
        }
    }
}
