//! The yardstick: a reverse proxy of hyper and Keyward's coalescing I/O, with rustls for the rows with TLS.
//!
//! Owns: the accepted connections and a single upstream connection. Must not know: gRPC, etcd, identities,
//! retries, limits. Invariant: a request crosses with its own headers and trailers, body frame by body frame.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use http::uri::{Authority, Parts, Scheme};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper::{client, server};
use keyward::io::coalesce::coalesce;
use keyward::tasks::{LocalExecutor, Tasks};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::Failure;

/// Flow-control windows: no load of the comparison fills either.
const STREAM_WINDOW: u32 = 1024 * 1024;
const CONNECTION_WINDOW: u32 = 256 * STREAM_WINDOW;
/// Open streams of one connection, as Keyward allows by default.
const STREAMS: u32 = 4096;
/// Streams of the upstream connection that were reset and may still receive frames.
const RESET_STREAMS: usize = 4096;

struct Upstream {
    send: SendRequest<Incoming>,
    authority: Authority,
}

/// Serves clients, by TLS if there is a configuration, until the upstream connection ends.
pub(crate) async fn serve(
    listen: SocketAddr,
    upstream: SocketAddr,
    tls: Option<Arc<ServerConfig>>,
) -> Result<(), Failure> {
    let tasks = Tasks::default();
    let acceptor = tls.map(TlsAcceptor::from);
    let upstream = Rc::new(connect(upstream, &tasks).await?);
    let listener = TcpListener::bind(listen).await?;
    while !upstream.send.is_closed() {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        let upstream = Rc::clone(&upstream);
        match &acceptor {
            None => serve_connection(socket, upstream, &tasks),
            Some(acceptor) => {
                let (handshake, of_connection) = (acceptor.accept(socket), tasks.clone());
                // A failed handshake is the client's to notice.
                let serve = async move {
                    if let Ok(socket) = handshake.await {
                        serve_connection(socket, upstream, &of_connection);
                    }
                };
                tasks.spawn("handshake", serve).detach();
            }
        }
    }
    Err("the upstream connection ended".into())
}

async fn connect(address: SocketAddr, tasks: &Tasks) -> Result<Upstream, Failure> {
    let socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    let (io, flusher) = coalesce(socket);
    tasks.spawn("upstream flusher", flusher).detach();
    let (send, connection) = client::conn::http2::Builder::new(LocalExecutor)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        // A client that leaves resets all of its streams. h2 remembers 50 reset streams by default, resets the
        // others again at a late answer, and ends the connection (ENHANCE_YOUR_CALM) after 1,024 such answers.
        .max_concurrent_reset_streams(RESET_STREAMS)
        .handshake(io)
        .await?;
    let drive = async { drop(connection.await) };
    tasks.spawn("upstream connection", drive).detach();
    Ok(Upstream { send, authority: address.to_string().parse()? })
}

fn serve_connection<T: AsyncRead + AsyncWrite + Unpin + 'static>(
    socket: T,
    upstream: Rc<Upstream>,
    tasks: &Tasks,
) {
    let (io, flusher) = coalesce(socket);
    tasks.spawn("downstream flusher", flusher).detach();
    let service = service_fn(move |request| {
        let upstream = Rc::clone(&upstream);
        async move { upstream.forward(request).await }
    });
    let connection = server::conn::http2::Builder::new(LocalExecutor)
        .auto_date_header(false)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(STREAMS)
        .serve_connection(io, service);
    tasks.spawn("downstream connection", async { drop(connection.await) }).detach();
}

impl Upstream {
    async fn forward(&self, mut request: Request<Incoming>) -> Result<Response<Incoming>, hyper::Error> {
        let mut target = Parts::default();
        target.scheme = Some(Scheme::HTTP);
        target.authority = Some(self.authority.clone());
        target.path_and_query = request.uri().path_and_query().cloned();
        if let Ok(target) = Uri::from_parts(target) {
            *request.uri_mut() = target;
        }
        self.send.clone().send_request(request).await
    }
}
