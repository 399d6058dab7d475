//! The pieces in which a stream of JSON comes, beside etcd's gateways (3.4 and 3.5, 3.6 and 3.7): chunks of HTTP/1.1, DATA frames of HTTP/2,
//! messages of WebSocket. Clients that parse each piece as one document work with either.
//!
//! Owns: the readers of pieces. etcd serves JSON over HTTP/2 on a TLS port only.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use data_encoding::BASE64;
use futures_util::future::join_all;
use futures_util::{SinkExt as _, StreamExt as _};
use http::Request;
use keyward::pb::etcdserverpb::PutRequest;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;
use tonic::transport::Endpoint;

use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::pki::Pki;
use crate::harness::{Cluster, Options, Tls, every_version, side_by_side};
use crate::raw::connector;

const PATH: &str = "/v3/watch";
/// Events of a burst.
const BURST: usize = 200;
const LIMIT: Duration = Duration::from_secs(20);

trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}
type BoxedIo = Box<dyn Io>;

/// Where a server listens, with its authority if it speaks TLS.
#[derive(Clone, Copy)]
struct Place<'a> {
    address: SocketAddr,
    tls: Option<&'a Pki>,
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Chunks,
    Frames,
    Messages,
}

/// A watch, read piece by piece.
enum Pieces {
    Chunks(BufReader<BoxedIo>),
    Frames(h2::RecvStream, Pin<Box<h2::client::Connection<BoxedIo>>>),
    Messages(Box<WebSocketStream<BoxedIo>>),
}

impl Place<'_> {
    async fn connect(self, protocol: &[u8]) -> BoxedIo {
        let tcp = TcpStream::connect(self.address).await.expect("a listener");
        tcp.set_nodelay(true).expect("TCP takes nodelay");
        let Some(pki) = self.tls else { return Box::new(tcp) };
        let connector = connector(pki, None, protocol);
        Box::new(connector.connect(ServerName::from(self.address.ip()), tcp).await.expect("TLS"))
    }

    /// Opens a watch with this document.
    async fn open(self, way: Way, document: &str) -> Pieces {
        match way {
            Way::Chunks => {
                let mut io = BufReader::new(self.connect(b"http/1.1").await);
                let length = document.len();
                let request =
                    format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{document}");
                io.write_all(request.as_bytes()).await.expect("open");
                let head = head(&mut io).await;
                assert!(head.contains("transfer-encoding: chunked"), "{head}");
                Pieces::Chunks(io)
            }
            Way::Frames => {
                let io = self.connect(b"h2").await;
                let (requests, connection) = h2::client::handshake(io).await.expect("HTTP/2");
                let request =
                    Request::post(format!("https://{}{PATH}", self.address)).body(()).expect("a request");
                let mut requests = requests.ready().await.expect("open");
                let (answer, mut body) = requests.send_request(request, false).expect("open");
                body.send_data(Bytes::from(document.to_owned()), true).expect("open");
                let mut connection = Box::pin(connection);
                let answer = tokio::select! {
                    answer = answer => answer.expect("an answer"),
                    end = &mut connection => panic!("the connection ends: {end:?}"),
                };
                Pieces::Frames(answer.into_body(), connection)
            }
            Way::Messages => {
                let mut io = self.connect(b"http/1.1").await;
                let key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n";
                let request = format!(
                    "GET {PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n"
                );
                io.write_all(request.as_bytes()).await.expect("open");
                // Byte by byte: what follows the head is WebSocket's.
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(io.read_u8().await.expect("a head"));
                }
                assert!(head.starts_with(b"HTTP/1.1 101"), "{}", head.escape_ascii());
                let mut socket = WebSocketStream::from_raw_socket(io, Role::Client, None).await;
                socket.send(Message::text(document)).await.expect("open");
                Pieces::Messages(Box::new(socket))
            }
        }
    }
}

/// The head of an answer, in lower case.
async fn head(io: &mut BufReader<BoxedIo>) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(io.read_line(&mut head).await.expect("open"), 0, "{head}");
    }
    head.to_ascii_lowercase()
}

impl Pieces {
    async fn next(&mut self) -> Vec<u8> {
        timeout(LIMIT, self.read()).await.expect("in time")
    }

    async fn read(&mut self) -> Vec<u8> {
        match self {
            Pieces::Chunks(io) => {
                let mut size = String::new();
                io.read_line(&mut size).await.expect("open");
                let size = usize::from_str_radix(size.trim(), 16).expect("a size");
                let mut chunk = vec![0; size + 2];
                io.read_exact(&mut chunk).await.expect("open");
                chunk.truncate(size);
                chunk
            }
            Pieces::Frames(body, connection) => {
                let data = tokio::select! {
                    data = body.data() => data.expect("open").expect("open"),
                    end = connection => panic!("the connection ends: {end:?}"),
                };
                body.flow_control().release_capacity(data.len()).expect("received");
                data.to_vec()
            }
            Pieces::Messages(socket) => loop {
                match socket.next().await.expect("open").expect("open") {
                    Message::Text(text) => return text.as_bytes().to_vec(),
                    Message::Ping(_) | Message::Pong(_) => {}
                    other => panic!("{other:?}"),
                }
            },
        }
    }
}

/// What a piece is, in words.
fn told(piece: &[u8]) -> String {
    let documents = serde_json::Deserializer::from_slice(piece).into_iter::<Value>();
    format!("{} document", documents.filter(Result::is_ok).count())
}

/// How a burst of events came, by the kinds of pieces.
async fn burst(place: Place<'_>, way: Way, prefix: &str, kv: &KvClient<tonic::transport::Channel>) -> String {
    let create = json!({"create_request": {"key": BASE64.encode(prefix.as_bytes()), "range_end": BASE64.encode(format!("{prefix}~").as_bytes())}});
    let mut pieces = place.open(way, &create.to_string()).await;
    let mut text = format!("created: {}", told(&pieces.next().await));
    let put = |value: Vec<u8>| {
        let (mut kv, key) = (kv.clone(), Bytes::from(format!("{prefix}k")));
        async move {
            let put = PutRequest { key, value: value.into(), ..PutRequest::default() };
            kv.put(put).await.expect("a put");
        }
    };
    let mut kinds: Vec<String> = Vec::new();
    let mut events = 0;
    let read = async {
        while events < BURST {
            let piece = pieces.next().await;
            // The line's end behind a document is at times in etcd's next piece, or a piece of its own.
            if !piece.trim_ascii().is_empty() {
                kinds.push(told(&piece));
            }
            for line in serde_json::Deserializer::from_slice(&piece).into_iter::<Value>() {
                let line = line.expect("a small document is in one piece");
                events += line["result"]["events"].as_array().map_or(0, Vec::len);
            }
        }
    };
    tokio::join!(read, join_all((0..BURST).map(|_| put(b"v".to_vec()))));
    kinds.sort_unstable();
    kinds.dedup();
    write!(text, "; a burst: {}", kinds.join(", ")).expect("a String takes all");
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_of_a_stream_is_a_piece_of_its_own_as_at_etcds_gateways() {
    let of_version = async |version: &Version| {
        let cluster = Cluster::start(version, Options { tls: Tls::Server, ..Options::default() }).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let endpoint = Endpoint::new(keyward.url()).expect("an address");
        let kv = KvClient::new(endpoint.connect().await.expect("a connection"));
        let directly = Place { address: cluster.address(0), tls: Some(cluster.pki()) };
        let through = Place { address: keyward.site().listen, tls: None };
        let mut faults = String::new();
        for way in [Way::Chunks, Way::Frames, Way::Messages] {
            let theirs = burst(directly, way, &format!("{way:?}/directly/"), &kv).await;
            let ours = burst(through, way, &format!("{way:?}/through/"), &kv).await;
            println!("etcd {version}: {way:?}: {theirs}");
            if theirs != ours {
                writeln!(faults, "etcd {version}: {way:?}: {theirs}, through Keyward {ours}")
                    .expect("a String takes all");
            }
        }
        faults
    };
    let faults = side_by_side(&every_version(), of_version).await.concat();
    assert!(faults.is_empty(), "{faults}");
}
