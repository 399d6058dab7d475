//! One client connection: introduction of the client, TLS, HTTP, and the end of the connection.
//!
//! Owns: the handshake's time limit, HTTP/2's settings towards clients, the graceful end. Nearby, `sniff`
//! detects the protocol and `inbound` supplies the bytes; below, `served_connection` speaks the protocol and
//! `shutdown` decides when the connection ends.
//! Must not know the services served, nor which clients are admitted. Invariants: a client without a
//! completed handshake is disconnected at the time limit. A burst of cancelled streams does not end the
//! connection (`docs/decisions.md#d39`). A draining or expired connection sends GOAWAY, finishes its open
//! streams, and has a hard time limit (`docs/decisions.md#d40`).

mod ping_timeout;
mod served_connection;
mod shutdown;

use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{Request, Response};
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::acceptor::UnknownProtocolSocket;
use crate::client_body::{ClientBody, ReplyBody};
use crate::client_certificate::UnreadableCertificate;
use crate::connection_table::{ClientAddress, ConnectionPlace, ConnectionsFull};
use crate::inbound::Inbound;
use crate::listener_tls::CurrentListenerTls;
use crate::proxy_protocol::{self, ProxiedSource, ProxyHeaderError};
use crate::served_streams::ServedStreams;
use crate::sniff::{self, ClientProtocol};
use crate::socket_progress::{PREFACE, SocketProgress};
use crate::turn_length::ShardTurns;
use keyward_base::io::ByteStream;
use keyward_base::tasks::Tasks;
use keyward_base::tasks::wake_gate::WakeGate;
use keyward_config::ClientPings;
use keyward_config::trust::{RefusedChain, with_refusal};
use keyward_telemetry::connection_metrics::{ConnectionMetrics, EndReason};
use keyward_telemetry::metrics::Metrics;

use crate::client_trust::VerificationTurns;
use keyward_base::wall_deadline::WallDeadline;
use ping_timeout::unanswered_ping;
use served_connection::ServedConnection;
use shutdown::{ConnectionShutdown, PeerCertificateChain, ShutdownStep};

pub use shutdown::LAST_CALLS;

/// Time for an accepted client to finish its introduction once the process drains: some round trips.
const MOMENT: Duration = Duration::from_millis(500);

/// The limits of one connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionBounds {
    /// Limit on open streams.
    pub streams: u32,
    /// Limit on the bytes of a header list.
    pub header_size: u32,
    /// Time limit for the steps before the first request: the balancer's header, TLS, the HTTP/2 preface.
    pub handshake: Duration,
    /// Time limit until the first admitted call.
    pub first_call: Option<Duration>,
    /// PING interval and timeout for detecting a dead client.
    pub pings: Option<ClientPings>,
}

/// The inputs for serving a connection.
pub struct ConnectionInputs {
    /// The connection's place in the connection table.
    pub place: ConnectionPlace,
    /// Counts connections closed for being unused or silent.
    pub figures: ConnectionMetrics,
    /// Counts the turns of the shard's connections.
    pub turns: ShardTurns,
    /// The socket, for a client over TCP.
    pub socket: Option<UnknownProtocolSocket>,
    /// True if a balancer's header with the client's address precedes all other bytes.
    pub proxied: bool,
    /// TLS settings, if TLS is on.
    pub tls: Option<CurrentListenerTls>,
    /// If set, HTTP/2 with an invalid `:authority` is accepted and counted in these metrics.
    pub odd_authority: Option<Arc<Metrics>>,
}

/// The client, as far as known before its first request.
pub struct IntroducedClient<'a> {
    /// The client's address from a balancer's header; `None` if the socket's address is the client's.
    pub source: Option<SocketAddr>,
    /// The client's certificate, already verified.
    pub certificate: Option<&'a CertificateDer<'static>>,
    /// The host name sent in TLS (SNI).
    pub server_name: Option<String>,
    /// The progress of the client's socket.
    pub progress: Rc<SocketProgress>,
}

/// An admitted client.
pub struct AdmittedClient<A> {
    /// The handler of the client's requests.
    pub answer: A,
    /// End of the client's admission: GOAWAY is sent then, and open streams are cut after [`LAST_CALLS`].
    pub until: Option<WallDeadline>,
    /// Time of a GOAWAY for age, unless the connection's activity spares it. Open streams continue.
    pub old_at: Option<Instant>,
    /// Expiry of the client's certificate.
    pub expires: Option<SystemTime>,
    /// Called when the client's certificate becomes invalid, by a revocation or a change of authorities.
    pub dismiss: Box<dyn FnOnce()>,
}

/// The end of a served connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientConnectionEnd {
    /// Ended without open streams, or by the client.
    Well,
    /// Ended with open streams cut.
    Cut,
    /// The client reset too many streams before their answers.
    Flooded,
    /// The client did not answer a PING.
    Silent,
}

/// Reason for a connection's end before it was served.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The time limit of the handshake passed.
    #[error("no handshake within the limit")]
    TimedOut,
    /// A balancer's header did not name the client.
    #[error("a trusted balancer's connection: {0}")]
    NotSaid(#[from] ProxyHeaderError),
    /// TLS failed.
    #[error("the TLS handshake failed: {0}")]
    Tls(io::Error),
    /// The client's certificates were refused.
    #[error("the TLS handshake failed: {0}")]
    Refused(RefusedChain),
    /// The connection was lost before its protocol was known.
    #[error("it was lost before its first bytes: {0}")]
    Lost(io::Error),
    /// The client has too many connections.
    #[error(transparent)]
    Full(#[from] ConnectionsFull),
    /// The client's certificate was verified but could not be parsed.
    #[error(transparent)]
    Certificate(#[from] UnreadableCertificate),
}

impl HandshakeError {
    /// True if the client only closed the connection, as load balancers do to learn of a listening process.
    #[must_use]
    pub fn is_disconnect(&self) -> bool {
        match self {
            Self::Tls(error) | Self::Lost(error) => matches!(
                error.kind(),
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
            ),
            Self::TimedOut | Self::NotSaid(_) | Self::Refused(_) | Self::Full(_) | Self::Certificate(_) => {
                false
            }
        }
    }
}

/// Serves one connection until its end, or until the instant given by `drain` once the process drains.
/// `admit` receives the introduced client.
///
/// # Errors
/// The handshake failed. Later failures reach the client only and are not errors here.
pub async fn serve<A, F, B>(
    stream: ByteStream,
    beginning: ConnectionInputs,
    bounds: ConnectionBounds,
    tasks: Tasks,
    mut drain: watch::Receiver<Option<Instant>>,
    admit: impl FnOnce(IntroducedClient) -> Result<AdmittedClient<A>, UnreadableCertificate>,
) -> Result<ClientConnectionEnd, HandshakeError>
where
    A: Fn(Request<ClientBody>) -> F + 'static,
    F: Future<Output = Response<B>> + Unpin + 'static,
    B: ReplyBody + Unpin + 'static,
{
    let began = Instant::now();
    let ConnectionInputs { place, figures, turns, socket, proxied, tls, odd_authority } = beginning;
    let tls = tls.map(|tls| (tls, turns.verifications.clone()));
    let introducing = introduce(stream, proxied.then_some(&place), tls);
    let Some(introduced) = introduced(introducing, bounds.handshake, &mut drain, &place).await else {
        return Ok(ClientConnectionEnd::Well);
    };
    let IntroducedConnection { stream, source, server_name, mut shown, speaks, taken } = introduced?;
    let progress = Rc::<SocketProgress>::default();
    let Some(inbound) = inbound_of(speaks, stream, taken, &progress, bounds, odd_authority) else {
        return Ok(ClientConnectionEnd::Well);
    };
    let certificate = shown.as_ref().and_then(PeerCertificateChain::leaf);
    let AdmittedClient { answer, until, old_at, expires, dismiss } =
        admit(IntroducedClient { source, certificate, server_name, progress: Rc::clone(&progress) })?;
    shown.iter_mut().for_each(|shown| shown.expires(expires));
    let streams = ServedStreams::new(bounds.streams, Arc::clone(place.activity()));
    let first_call = bounds.first_call.map(|time| (time, began));
    let mut ends = ConnectionShutdown::new(drain, dismiss, place, figures.clone());
    (ends.until, ends.old_at, ends.shown, ends.first_call) = (until, old_at, shown, first_call);
    let serving = Rc::clone(&streams);
    let answer = move |request| serving.serve(answer(request));
    if let Some(socket) = socket.filter(|_| speaks == ClientProtocol::Http1) {
        socket.allow_pauses();
    }
    // HTTP/1 has no pings.
    let bounds =
        ConnectionBounds { pings: bounds.pings.filter(|_| speaks == ClientProtocol::Http2), ..bounds };
    let mut connection = match speaks {
        ClientProtocol::Http1 => ServedConnection::http1(inbound, bounds, &progress, &streams, turns, answer),
        _ => ServedConnection::http2(inbound, bounds, &progress, &streams, turns, &tasks, answer),
    };
    let preface_until = began + bounds.handshake;
    let mut silence = pin!(silence(preface_until, &progress, speaks));
    let mut unanswered = pin!(unanswered_ping(bounds.pings, &progress, &streams));
    let mut leaving = false;
    // Nearly all wakeups are for the protocol; the rest is behind a gate.
    let mut gate = WakeGate::default();
    loop {
        let event = {
            let rare = next_rare_event(
                &streams,
                silence.as_mut(),
                unanswered.as_mut(),
                &mut ends,
                leaving,
                &figures,
            );
            let mut rare = pin!(rare);
            let served = poll_fn(|cx| connection.poll_serve(cx, leaving));
            tokio::select! {
                ended = served => return Ok(ended),
                event = poll_fn(|cx| gate.poll(cx, |cx| rare.as_mut().poll(cx))) => event,
            }
        };
        match event {
            RareEvent::Flooded => {
                connection.say_farewell().await;
                return Ok(ClientConnectionEnd::Flooded);
            }
            RareEvent::End(end) => return end,
            RareEvent::Leave => {
                leaving = true;
                let until = (Instant::now() + MOMENT).min(preface_until);
                silence.set(self::silence(until, &progress, speaks));
            }
        }
    }
}

/// An event of a connection beside its protocol.
enum RareEvent {
    /// The client has reset more streams than allowed.
    Flooded,
    /// Accept no new streams; the connection ends with its last stream.
    Leave,
    /// The connection ends now.
    End(Result<ClientConnectionEnd, HandshakeError>),
}

/// Waits for an event beside the protocol. `leaving` is true once no new streams are accepted. Cancel-safe.
async fn next_rare_event(
    streams: &ServedStreams,
    silence: Pin<&mut impl Future<Output = ()>>,
    unanswered: Pin<&mut impl Future<Output = ()>>,
    ends: &mut ConnectionShutdown,
    leaving: bool,
    figures: &ConnectionMetrics,
) -> RareEvent {
    RareEvent::End(tokio::select! {
        () = streams.flooded() => return RareEvent::Flooded,
        () = silence => if leaving { Ok(ClientConnectionEnd::Well) } else { Err(HandshakeError::TimedOut) },
        () = unanswered => {
            figures.ended(EndReason::NoAnswer).inc();
            Ok(ClientConnectionEnd::Silent)
        }
        step = ends.next() => match step {
            ShutdownStep::Leave => return RareEvent::Leave,
            ShutdownStep::Cut => Ok(ClientConnectionEnd::Cut),
            ShutdownStep::Close => Ok(ClientConnectionEnd::Well),
        },
    })
}

/// The byte stream of a connected client; `None` if the client has disconnected.
fn inbound_of(
    speaks: ClientProtocol,
    stream: ByteStream,
    taken: Bytes,
    progress: &Rc<SocketProgress>,
    bounds: ConnectionBounds,
    odd_authority: Option<Arc<Metrics>>,
) -> Option<Inbound> {
    let progress = Rc::clone(progress);
    match (speaks, odd_authority) {
        (ClientProtocol::Nothing, _) => None,
        (ClientProtocol::Http2, Some(metrics)) => {
            let largest = usize::try_from(bounds.header_size).unwrap_or(usize::MAX);
            Some(Inbound::looking_for_odd_authority(stream, &taken, progress, largest, metrics))
        }
        _ => Some(Inbound::new(stream, taken, progress)),
    }
}

/// Ends at `until` if HTTP/2's preface, or the head of an HTTP/1 request, has not arrived by then: h2
/// waits for the preface without a limit.
async fn silence(until: Instant, progress: &SocketProgress, speaks: ClientProtocol) {
    tokio::time::sleep_until(until).await;
    let has_spoken = match speaks {
        ClientProtocol::Http1 => progress.has_request(),
        ClientProtocol::Http2 | ClientProtocol::Nothing => progress.received() >= PREFACE,
    };
    if has_spoken {
        std::future::pending::<()>().await;
    }
}

/// The introduced client, or the handshake's failure. `None` if the process drains first: a client still in
/// its handshake gets [`MOMENT`] to finish, so that an HTTP answer can send it elsewhere; a reset would give
/// no reason. `None` at once if the connection is evicted.
async fn introduced<T>(
    introducing: impl Future<Output = Result<T, HandshakeError>>,
    limit: Duration,
    drain: &mut watch::Receiver<Option<Instant>>,
    place: &ConnectionPlace,
) -> Option<Result<T, HandshakeError>> {
    let mut introducing = pin!(timeout(limit, introducing));
    let introduced = tokio::select! {
        biased; // a client with a finished handshake is admitted
        introduced = &mut introducing => introduced,
        () = place.activity().room_wanted() => return None,
        _ = drain.wait_for(Option::is_some) => timeout(MOMENT, introducing).await.ok()?,
    };
    Some(introduced.unwrap_or(Err(HandshakeError::TimedOut)))
}

/// A connection with a known client and protocol.
struct IntroducedConnection {
    stream: ByteStream,
    source: Option<SocketAddr>,
    /// The host name sent in TLS (SNI).
    server_name: Option<String>,
    shown: Option<PeerCertificateChain>,
    speaks: ClientProtocol,
    /// Bytes read from `stream` to detect the protocol.
    taken: Bytes,
}

/// The steps before HTTP, in order. `proxied` is set behind a balancer; the client's address is then recorded
/// in the connection's place.
async fn introduce(
    mut stream: ByteStream,
    proxied: Option<&ConnectionPlace>,
    tls: Option<(CurrentListenerTls, VerificationTurns)>,
) -> Result<IntroducedConnection, HandshakeError> {
    let mut source = None;
    if let Some(place) = proxied
        && let ProxiedSource::Client(address) = proxy_protocol::read_header(&mut stream).await?
    {
        place.set_address(ClientAddress::of(address.ip()))?;
        source = Some(address);
    }
    let (mut server_name, mut shown, mut agreed) = (None, None, None);
    if let Some((tls, turns)) = tls {
        (stream, server_name, shown, agreed) = handshake(stream, tls, turns).await?;
    }
    let looked = sniff::detect_protocol(&mut stream, agreed.as_deref()).await;
    let (speaks, taken) = looked.map_err(HandshakeError::Lost)?;
    Ok(IntroducedConnection { stream, source, server_name, shown, speaks, taken })
}

/// The results of a TLS handshake.
type TlsHandshakeParts = (ByteStream, Option<String>, Option<PeerCertificateChain>, Option<Vec<u8>>);

/// Performs the TLS handshake: the stream, the server name, the client's certificates (if requested), and the
/// ALPN protocol (if any).
async fn handshake(
    stream: ByteStream,
    tls: CurrentListenerTls,
    turns: VerificationTurns,
) -> Result<TlsHandshakeParts, HandshakeError> {
    // Subscribe before loading the TLS settings, so that a change during the handshake is noticed.
    let changes = tls.changes();
    let now = tls.load_full();
    let accepting = tokio_rustls::TlsAcceptor::from(Arc::clone(&now.handshakes)).accept(stream);
    let stream = Box::new(with_refusal(accepting).await.map_err(|(error, refused)| match refused {
        Some(refused) => HandshakeError::Refused(refused),
        None => HandshakeError::Tls(error),
    })?);
    let session = stream.get_ref().1;
    let chain = session.peer_certificates().unwrap_or_default();
    let server_name = session.server_name().map(str::to_owned);
    let judged_by = Arc::clone(now.trust());
    let shown = || PeerCertificateChain::new(tls, changes, chain, judged_by, turns);
    let shown = now.requests_certificates().then(shown);
    let agreed = session.alpn_protocol().map(<[u8]>::to_vec);
    Ok((stream, server_name, shown, agreed))
}
