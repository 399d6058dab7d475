//! A gRPC client that sends exactly the bytes it is given and shows everything that came back.
//!
//! Owns: one HTTP/2 connection per call. Must not know etcd, Keyward, or what an answer means. Invariants: nothing is added to what a
//! caller gives but what HTTP/2 itself needs; every wait has a limit; a broken answer is a value, never a panic.

use std::{future::pending, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use bytes::{BufMut, Bytes, BytesMut};
use h2::{
    Reason, RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::{HeaderMap, Method, Request, Uri, header::CONTENT_TYPE, uri::PathAndQuery};
use percent_encoding::percent_decode;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use crate::harness::evidence;
use crate::harness::pki::{Pair, Pki};

/// Past every timeout of etcd itself (7 s for a write without a quorum).
const LIMIT: Duration = Duration::from_secs(20);
/// How long a stream that has said what was expected is watched for more.
const QUIET: Duration = Duration::from_millis(300);
/// What one side may send before the other reads: above the largest body of a test.
const WINDOW: u32 = 16 * 1024 * 1024;

/// Where to call, and how to get there.
#[derive(Clone)]
pub(crate) struct Endpoint {
    address: SocketAddr,
    tls: Option<TlsConnector>,
}

/// What to send.
#[derive(Clone, Debug, Default)]
pub(crate) struct Call {
    /// The bytes of `:path`.
    pub(crate) path: String,
    /// Fields beside `content-type` and `te`, in order; a name may come more than once.
    pub(crate) headers: Vec<(&'static str, String)>,
    /// Further fields whose values are no text.
    pub(crate) bytes: Vec<(&'static str, Vec<u8>)>,
    /// The DATA of the request, as `frame` or worse makes it. With `Shape::Stream` each but the first waits until as many messages
    /// came back as were sent before it, or until nothing more comes.
    pub(crate) body: Vec<Bytes>,
    pub(crate) shape: Shape,
}

/// When the request ends, and when to stop reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Shape {
    /// The request ends with its last DATA; reading stops with the answer's end.
    #[default]
    Once,
    /// The request stays open; reading stops when, after at least so many messages, nothing comes for a while.
    Stream { at_least: usize },
    /// The request ends with its last DATA (newer servers answer nothing before); reading stops as with `Stream`.
    ServerStream { at_least: usize },
}

/// Everything that came back.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// HTTP status and fields of the first HEADERS; `None` where there were none.
    pub(crate) head: Option<(u16, HeaderMap)>,
    /// Whether that HEADERS ended the stream.
    pub(crate) trailers_only: bool,
    pub(crate) data: Bytes,
    /// Empty in a Trailers-Only answer.
    pub(crate) trailers: HeaderMap,
    pub(crate) end: End,
}

/// How the answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With END_STREAM.
    Ended,
    /// With RST_STREAM of this code.
    Reset(u32),
    /// With the connection: GOAWAY's code, or what broke it.
    ConnectionLost(String),
    /// It did not: the stream was still open when reading stopped.
    Open,
    /// It did not, although more was expected.
    TimedOut,
}

/// One gRPC frame: uncompressed, with a true length.
pub(crate) fn frame(message: &[u8]) -> Bytes {
    framed(0, message)
}

/// One gRPC frame with a flag byte of choice.
pub(crate) fn framed(flag: u8, message: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(5 + message.len());
    out.put_u8(flag);
    out.put_u32(u32::try_from(message.len()).expect("a test's message is small"));
    out.put_slice(message);
    out.freeze()
}

impl Call {
    /// A unary call of one frame.
    pub(crate) fn unary(path: &str, message: &[u8]) -> Call {
        Call { path: path.into(), body: vec![frame(message)], ..Call::default() }
    }

    /// The same with one more field.
    pub(crate) fn with(mut self, name: &'static str, value: &str) -> Call {
        self.headers.push((name, value.into()));
        self
    }

    /// The same with a field whose value is no text.
    pub(crate) fn with_bytes(mut self, name: &'static str, value: &[u8]) -> Call {
        self.bytes.push((name, value.to_vec()));
        self
    }
}

impl Endpoint {
    pub(crate) fn plain(address: SocketAddr) -> Endpoint {
        Endpoint { address, tls: None }
    }

    /// TLS that trusts `pki` alone and shows `client` where there is one.
    pub(crate) fn tls(address: SocketAddr, pki: &Pki, client: Option<&Pair>) -> Endpoint {
        Endpoint { address, tls: Some(connector(pki, client, b"h2")) }
    }

    /// TLS as this configuration has it.
    pub(crate) fn with_tls(address: SocketAddr, config: Arc<ClientConfig>) -> Endpoint {
        Endpoint { address, tls: Some(TlsConnector::from(config)) }
    }

    /// Makes one call on a connection of its own.
    pub(crate) async fn call(&self, call: &Call) -> Answer {
        for (_, value) in call.headers.iter().filter(|(name, _)| ["token", "authorization"].contains(name)) {
            evidence::secret("a token shown", value.trim_start_matches("Bearer "));
        }
        if let [only] = &call.body[..] {
            evidence::request(&call.path, only.get(5..).unwrap_or_default());
        }
        match timeout(LIMIT * 3, self.connect_and_call(call)).await {
            Ok(answer) => answer,
            Err(_) => Answer { end: End::TimedOut, ..Answer::nothing() },
        }
    }

    async fn connect_and_call(&self, call: &Call) -> Answer {
        let lost =
            |what: std::io::Error| Answer { end: End::ConnectionLost(what.to_string()), ..Answer::nothing() };
        let tcp = match TcpStream::connect(self.address).await {
            Ok(tcp) => tcp,
            Err(refused) => return lost(refused),
        };
        tcp.set_nodelay(true).expect("TCP takes nodelay");
        match &self.tls {
            None => self.over(tcp, call).await,
            Some(tls) => match tls.connect(ServerName::from(self.address.ip()), tcp).await {
                Ok(stream) => self.over(stream, call).await,
                Err(refused) => lost(refused),
            },
        }
    }

    async fn over(&self, io: impl AsyncRead + AsyncWrite + Unpin, call: &Call) -> Answer {
        let mut builder = h2::client::Builder::new();
        builder
            .initial_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_header_list_size(WINDOW);
        let (requests, connection) = match builder.handshake(io).await {
            Ok(both) => both,
            Err(error) => return Answer { end: End::of(&error), ..Answer::nothing() },
        };
        // The streams learn of the connection's end by themselves; what was read before it is still theirs.
        let drive = async {
            drop(connection.await);
            pending::<()>().await;
        };
        let mut answer = Answer::nothing();
        tokio::select! {
            () = exchange(requests, self.request(call), call, &mut answer) => {}
            () = drive => {}
        }
        answer
    }

    fn request(&self, call: &Call) -> Request<()> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let path = PathAndQuery::try_from(call.path.as_str()).expect("a path that HTTP can carry");
        let uri = Uri::builder().scheme(scheme).authority(self.address.to_string()).path_and_query(path);
        let mut request =
            Request::builder().method(Method::POST).uri(uri.build().expect("all parts are there"));
        if !call.headers.iter().any(|(name, _)| *name == CONTENT_TYPE.as_str()) {
            request = request.header(CONTENT_TYPE, "application/grpc");
        }
        request = request.header("te", "trailers");
        for (name, value) in &call.headers {
            request = request.header(*name, value);
        }
        for (name, value) in &call.bytes {
            request = request.header(*name, value.as_slice());
        }
        request.body(()).expect("names and values that HTTP can carry")
    }
}

/// TLS that trusts `pki` alone, shows `client` where there is one, and offers this protocol.
pub(crate) fn connector(pki: &Pki, client: Option<&Pair>, protocol: &[u8]) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&pki.ca).expect("a certificate")).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder =
        builder.with_safe_default_protocol_versions().expect("ring has them").with_root_certificates(roots);
    let mut config = match client {
        None => builder.with_no_client_auth(),
        Some(pair) => {
            let cert = CertificateDer::from_pem_file(&pair.cert).expect("a certificate");
            let key = PrivateKeyDer::from_pem_file(&pair.key).expect("a key");
            builder.with_client_auth_cert(vec![cert], key).expect("they belong together")
        }
    };
    config.alpn_protocols = vec![protocol.to_vec()];
    TlsConnector::from(Arc::new(config))
}

/// Sends, and fills `answer` as far as it comes.
async fn exchange(requests: SendRequest<Bytes>, request: Request<()>, call: &Call, answer: &mut Answer) {
    let mut requests = match requests.ready().await {
        Ok(requests) => requests,
        Err(error) => return answer.end = End::of(&error),
    };
    let (response, upload) = match requests.send_request(request, false) {
        Ok(both) => both,
        Err(error) => return answer.end = End::of(&error),
    };
    let mut upload = Upload { stream: upload, body: &call.body, sent: 0 };
    let at_least = match call.shape {
        Shape::Once => {
            upload.all();
            usize::MAX
        }
        Shape::Stream { at_least } => {
            upload.next();
            at_least
        }
        Shape::ServerStream { at_least } => {
            upload.all();
            at_least
        }
    };
    answer.end = read(response, &mut upload, at_least, answer).await;
}

/// Reads until the end, or until it is quiet after `at_least` messages; sends the rest of the body in step.
async fn read(
    response: ResponseFuture,
    upload: &mut Upload<'_>,
    at_least: usize,
    answer: &mut Answer,
) -> End {
    let mut response = pin!(response);
    let mut body: Option<RecvStream> = None;
    loop {
        let messages = answer.messages().len();
        if messages >= upload.sent {
            upload.next();
        }
        let patience = if upload.is_done() && messages < at_least { LIMIT } else { QUIET };
        let step = async {
            match &mut body {
                None => response.as_mut().await.map(Step::Head),
                Some(body) => match body.data().await {
                    Some(data) => data.map(Step::Data),
                    None => {
                        body.trailers().await.map(|trailers| Step::Trailers(trailers.unwrap_or_default()))
                    }
                },
            }
        };
        match timeout(patience, step).await {
            Err(_) if !upload.is_done() => upload.next(),
            Err(_) => return if messages < at_least { End::TimedOut } else { End::Open },
            Ok(Err(error)) => return End::of(&error),
            Ok(Ok(Step::Head(head))) => {
                let (parts, stream) = head.into_parts();
                answer.trailers_only = stream.is_end_stream();
                answer.head = Some((parts.status.as_u16(), parts.headers));
                body = Some(stream);
            }
            Ok(Ok(Step::Data(data))) => answer.data = [answer.data.as_ref(), &data].concat().into(),
            Ok(Ok(Step::Trailers(trailers))) => {
                answer.trailers = trailers;
                return End::Ended;
            }
        }
    }
}

enum Step {
    Head(http::Response<RecvStream>),
    Data(Bytes),
    Trailers(HeaderMap),
}

/// The request's body on its way. A peer that does not want it any more says why in its answer, so a failure to send is not told.
struct Upload<'a> {
    stream: SendStream<Bytes>,
    body: &'a [Bytes],
    sent: usize,
}

impl Upload<'_> {
    fn next(&mut self) {
        if let Some(data) = self.body.get(self.sent) {
            drop(self.stream.send_data(data.clone(), false));
            self.sent += 1;
        }
    }

    fn all(&mut self) {
        while !self.is_done() {
            self.next();
        }
        drop(self.stream.send_data(Bytes::new(), true));
    }

    fn is_done(&self) -> bool {
        self.sent == self.body.len()
    }
}

impl Answer {
    fn nothing() -> Answer {
        Answer {
            head: None,
            trailers_only: false,
            data: Bytes::new(),
            trailers: HeaderMap::new(),
            end: End::TimedOut,
        }
    }

    /// Every field but those of HTTP itself: of the first HEADERS and of the trailers.
    pub(crate) fn metadata(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let head = self.head.iter().flat_map(|(_, fields)| fields);
        head.chain(&self.trailers).map(|(name, value)| (name.as_str(), value.as_bytes()))
    }

    /// The first value of a field, wherever it came.
    pub(crate) fn field(&self, name: &str) -> Option<&[u8]> {
        self.metadata().find_map(|(field, value)| (field == name).then_some(value))
    }

    /// `grpc-status`.
    pub(crate) fn code(&self) -> Option<u32> {
        std::str::from_utf8(self.field("grpc-status")?).ok()?.parse().ok()
    }

    /// `grpc-message`, decoded; empty where there is none.
    pub(crate) fn message(&self) -> String {
        percent_decode(self.field("grpc-message").unwrap_or_default()).decode_utf8_lossy().into_owned()
    }

    /// The whole messages among the data.
    pub(crate) fn messages(&self) -> Vec<Bytes> {
        let mut rest = self.data.clone();
        let mut messages = Vec::new();
        while let Some(head) = rest.first_chunk::<5>() {
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            if rest.len() < 5 + length {
                break;
            }
            messages.push(rest.split_to(5 + length).slice(5..));
        }
        messages
    }
}

impl End {
    fn of(error: &h2::Error) -> End {
        match error.reason() {
            Some(reason) if error.is_reset() => End::Reset(reason.into()),
            Some(Reason::NO_ERROR) => End::ConnectionLost("GOAWAY".into()),
            Some(reason) => End::ConnectionLost(format!("GOAWAY {}", u32::from(reason))),
            None => End::ConnectionLost(error.to_string()),
        }
    }
}
