//! A small gRPC client of the loads, and the messages of a gRPC stream for both sides.
//!
//! Owns: one HTTP/2 connection, the headers of a call, the verification of answers. Must not know: methods.
//! Invariant: an answer without HTTP status 200, or with another `grpc-status` than 0, is an error.

use std::net::SocketAddr;
use std::path::Path;

use bytes::{Bytes, BytesMut};
use h2::client::{self, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Version, header};
use keyward::io::coalesce::coalesce;
use keyward::rpc::frame::{self, FrameReader};
use keyward::tasks::Tasks;
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::{Failure, certificates};

/// More than any message of the comparison.
const LARGEST_MESSAGE: usize = 1024 * 1024;
/// `grpc-timeout` of unary calls.
const TIMEOUT: &str = "5S";
const WINDOW: u32 = 1024 * 1024;

/// One connection to a proxy, or to a member.
pub(crate) struct GrpcClient {
    send: SendRequest<Bytes>,
    address: SocketAddr,
    token: Option<HeaderValue>,
}

/// The messages of one direction of a stream.
pub(crate) struct MessageStream {
    body: RecvStream,
    frames: FrameReader,
}

/// An open stream in both directions.
pub(crate) struct BidiStream {
    pub(crate) requests: SendStream<Bytes>,
    pub(crate) responses: MessageStream,
}

impl GrpcClient {
    /// Connects. Every call carries `token`, if there is a token.
    pub(crate) async fn connect(
        address: SocketAddr,
        token: Option<&str>,
        tasks: &Tasks,
    ) -> Result<Self, Failure> {
        Self::over(TcpStream::connect(address).await?, token, tasks).await
    }

    /// The same over a connected `socket`.
    pub(crate) async fn over(socket: TcpStream, token: Option<&str>, tasks: &Tasks) -> Result<Self, Failure> {
        let address = socket.peer_addr()?;
        socket.set_nodelay(true)?;
        Self::begin(socket, address, token, tasks).await
    }

    /// Connects by TLS; the certificate of `address` must come from the CA in `authority`.
    pub(crate) async fn connect_by_tls(
        address: SocketAddr,
        token: Option<&str>,
        authority: &Path,
        tasks: &Tasks,
    ) -> Result<Self, Failure> {
        let connector = TlsConnector::from(certificates::client_config(authority)?);
        let socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        let socket = connector.connect(address.ip().into(), socket).await?;
        if socket.get_ref().1.alpn_protocol() != Some(certificates::H2) {
            return Err("TLS without the protocol h2".into());
        }
        Self::begin(socket, address, token, tasks).await
    }

    /// HTTP/2's handshake.
    async fn begin<T: AsyncRead + AsyncWrite + Unpin + 'static>(
        socket: T,
        address: SocketAddr,
        token: Option<&str>,
        tasks: &Tasks,
    ) -> Result<Self, Failure> {
        let (io, flusher) = coalesce(socket);
        tasks.spawn("flusher", flusher).detach();
        let mut settings = client::Builder::new();
        settings.initial_window_size(WINDOW).initial_connection_window_size(64 * WINDOW);
        let (send, connection) = settings.handshake(io.into_inner()).await?;
        tasks.spawn("connection", async { drop(connection.await) }).detach();
        Ok(Self { send, address, token: token.map(HeaderValue::from_str).transpose()? })
    }

    /// From now on every call carries `token`.
    pub(crate) fn set_token(&mut self, token: &str) -> Result<(), Failure> {
        self.token = Some(HeaderValue::from_str(token)?);
        Ok(())
    }

    fn request(&self, path: &str, timeout: Option<&'static str>) -> Result<Request<()>, Failure> {
        let mut request = Request::builder()
            .version(Version::HTTP_2)
            .method(Method::POST)
            .uri(format!("http://{}{path}", self.address))
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers")
            .header(header::USER_AGENT, "grpc-go/1.71.1");
        if let Some(timeout) = timeout {
            request = request.header("grpc-timeout", timeout);
        }
        if let Some(token) = &self.token {
            request = request.header("token", token.clone());
        }
        Ok(request.body(())?)
    }

    /// Makes a unary call; the answer as received.
    pub(crate) async fn call_raw(&self, path: &str, message: &impl Message) -> Result<Bytes, Failure> {
        self.call_within(TIMEOUT, path, message).await
    }

    /// Makes a unary call with a deadline of its own; the answer as received.
    pub(crate) async fn call_within(
        &self,
        timeout: &'static str,
        path: &str,
        message: &impl Message,
    ) -> Result<Bytes, Failure> {
        let request = self.request(path, Some(timeout))?;
        let (response, mut sent) = self.send.clone().ready().await?.send_request(request, false)?;
        sent.send_data(frame::encode(&message.encode_to_vec()), true)?;
        let (head, body) = response.await?.into_parts();
        verify(path, head.status, &head.headers)?;
        MessageStream::new(body).answer(path).await
    }

    /// Makes a unary call.
    pub(crate) async fn call<M: Message + Default>(
        &self,
        path: &str,
        message: &impl Message,
    ) -> Result<M, Failure> {
        Ok(M::decode(self.call_raw(path, message).await?)?)
    }

    /// Makes a unary call, and reads an answer of any size without keeping the answer. True for a success.
    pub(crate) async fn drain(&self, path: &str, message: &impl Message) -> bool {
        self.drained(path, message).await.is_ok()
    }

    async fn drained(&self, path: &str, message: &impl Message) -> Result<(), Failure> {
        let request = self.request(path, Some("60S"))?;
        let (response, mut sent) = self.send.clone().ready().await?.send_request(request, false)?;
        sent.send_data(frame::encode(&message.encode_to_vec()), true)?;
        let (head, mut body) = response.await?.into_parts();
        verify(path, head.status, &head.headers)?;
        while let Some(chunk) = body.data().await {
            body.flow_control().release_capacity(chunk?.len())?;
        }
        let trailers = body.trailers().await?.ok_or("an answer without trailers")?;
        verify(path, StatusCode::OK, &trailers)
    }

    /// Opens a stream with its first message: some servers send no header before.
    pub(crate) async fn open(&self, path: &str, first: Bytes) -> Result<BidiStream, Failure> {
        let request = self.request(path, None)?;
        let (response, mut requests) = self.send.clone().ready().await?.send_request(request, false)?;
        requests.send_data(first, false)?;
        let (head, body) = response.await?.into_parts();
        verify(path, head.status, &head.headers)?;
        Ok(BidiStream { requests, responses: MessageStream::new(body) })
    }
}

fn verify(path: &str, status: StatusCode, headers: &HeaderMap) -> Result<(), Failure> {
    let text =
        |name: &str| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    match text("grpc-status") {
        None if status == StatusCode::OK => Ok(()),
        Some(code) if code == "0" && status == StatusCode::OK => Ok(()),
        code => {
            Err(format!("{path}: HTTP {status}, grpc-status {code:?}, {:?}", text("grpc-message")).into())
        }
    }
}

impl MessageStream {
    pub(crate) fn new(body: RecvStream) -> Self {
        Self { body, frames: FrameReader::new(LARGEST_MESSAGE) }
    }

    /// The next message; `None` after the last message.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            if let Some(message) = self.frames.next() {
                return Ok(Some(message?));
            }
            let Some(chunk) = self.body.data().await else {
                self.frames.finish()?;
                return Ok(None);
            };
            let chunk = chunk?;
            self.body.flow_control().release_capacity(chunk.len())?;
            self.frames.push(chunk);
        }
    }

    /// The only message of a unary call's request.
    pub(crate) async fn only(&mut self) -> Result<Bytes, Failure> {
        let message = self.next().await?.ok_or("a request without a message")?;
        match self.next().await? {
            None => Ok(message),
            Some(_) => Err("two messages instead of one".into()),
        }
    }

    /// The only message of a unary call's answer, with its status.
    async fn answer(mut self, path: &str) -> Result<Bytes, Failure> {
        let message = self.next().await?;
        let more = self.next().await?;
        let trailers = self.body.trailers().await?.ok_or("an answer without trailers")?;
        verify(path, StatusCode::OK, &trailers)?;
        if !trailers.contains_key("grpc-status") || more.is_some() {
            return Err(format!("{path}: no grpc-status, or two messages").into());
        }
        Ok(message.ok_or_else(|| format!("{path}: an answer without a message"))?)
    }
}

/// Several messages, framed, in one piece.
pub(crate) fn framed_all<M: Message>(messages: impl IntoIterator<Item = M>) -> Bytes {
    let mut buffer = BytesMut::new();
    for message in messages {
        frame::encode_into(&mut buffer, &message.encode_to_vec());
    }
    buffer.freeze()
}
