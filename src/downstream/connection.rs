//! One client connection: who is behind it, TLS, HTTP, and its end.
//!
//! Owns: the handshake's limit, HTTP/2's settings towards clients, the graceful end. Beside it, `first` knows what is spoken and
//! `inbound` what is read; below, `ends` knows when the end comes.
//! Must not know what is served, nor who is let in. Invariants (rules 16, 37, 39, 40, 45): a peer that does not speak
//! within the limit is gone; a burst of cancelled streams does not end the connection; a connection that drains, or whose
//! welcome is over, sends GOAWAY, finishes what is open, and has a hard limit.

mod ends;
mod ping_timeout;

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http2::Builder;
use hyper::service::service_fn;
use hyper_util::rt::TokioTimer;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::config::ClientPings;
use crate::downstream::certificate::Unreadable;
use crate::downstream::connection_table::{ClientAddress, ConnectionPlace, Full};
use crate::downstream::first::{self, Speaks};
use crate::downstream::http1::{self, Http1Log};
use crate::downstream::inbound::Inbound;
use crate::downstream::proxied::{self, NotSaid, Source};
use crate::downstream::read_turns::{InTurns, ReadTurn};
use crate::downstream::served_streams::{Gated, ServedStreams};
use crate::downstream::socket_progress::SocketProgress;
use crate::downstream::tls::Current;
use crate::io::Stream;
use crate::io::coalesce::coalesce;
use crate::tasks::{LocalExecutor, Tasks};
use crate::telemetry::connections::{ConnectionFigures, EndReason};
use crate::telemetry::metrics::Metrics;

use ends::{Ends, Shown, Turn};
use ping_timeout::unanswered_ping;

pub use ends::LAST_CALLS;

/// HTTP/2's client preface: whoever has not sent as much is no HTTP/2 client yet.
const PREFACE: usize = 24;
const STREAM_WINDOW: u32 = 256 * 1024;
/// 256 streams whose requests are not read, as where a Watch waits for its client: what one connection can make us hold.
const CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;
const SEND_BUFFER: usize = 128 * 1024;
/// How long who was accepted may take to introduce itself once the process drains: some round trips.
const MOMENT: Duration = Duration::from_millis(500);

/// GOAWAY (RFC 9113, section 6.8) with ENHANCE_YOUR_CALM and a text. It names the highest possible stream as the last: any may have been
/// looked at.
const CALM: &[u8] = b"\0\0\x17\x07\0\0\0\0\0\x7f\xff\xff\xff\0\0\0\x0btoo_many_resets";
/// How long a client has to read that.
const FAREWELL: Duration = Duration::from_millis(250);
/// Longer than any connection lives.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// What a connection may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Open streams.
    pub streams: u32,
    /// Bytes of a header list.
    pub header_size: u32,
    /// Time for all that comes before the first request: a balancer's header, TLS, the HTTP/2 preface.
    pub handshake: Duration,
    /// Time without a call that is let in.
    pub first_call: Option<Duration>,
    /// How it is noticed that a client is gone.
    pub pings: Option<ClientPings>,
}

/// What a connection begins with.
pub struct Beginning {
    /// Its place among all connections.
    pub place: ConnectionPlace,
    /// Counts connections that are ended since they are of no use.
    pub figures: ConnectionFigures,
    /// A balancer's header, which says who the client is.
    pub proxied: bool,
    /// TLS.
    pub tls: Option<Current>,
    /// HTTP/2 with an `:authority` that is none is taken, and counted there.
    pub odd_authority: Option<Arc<Metrics>>,
    /// Counts and logs requests over HTTP/1.
    pub http1: Http1Log,
}

/// Who is at the other end, as far as the connection has told before its first request.
pub struct Introduced<'a> {
    /// The client's address, where a balancer has told it; else it is the socket's.
    pub source: Option<SocketAddr>,
    /// The certificate that the client has shown, which was verified.
    pub certificate: Option<&'a CertificateDer<'static>>,
    /// The host that it named in TLS.
    pub server_name: Option<String>,
}

/// A client that was let in.
pub struct Admitted<A> {
    /// Answers its requests.
    pub answer: A,
    /// When its welcome is over.
    pub until: Option<Instant>,
    /// When it is told to connect anew for what comes then. What is open goes on.
    pub old_at: Option<Instant>,
    /// When its certificate expires.
    pub expires: Option<SystemTime>,
    /// Called when its certificate is good no more, by what was revoked or by another authority.
    pub dismiss: Box<dyn FnOnce()>,
}

/// How a connection ended that was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With nothing open, or by its client.
    Well,
    /// What was open on it was cut.
    Cut,
    /// Its client reset more streams before their answers than any client needs to.
    Flooded,
    /// Its client answered no PING.
    Silent,
}

/// How a connection ended before it was served.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The client took longer than allowed.
    #[error("no handshake within the limit")]
    TimedOut,
    /// A balancer did not say who the client is.
    #[error("a trusted balancer's connection: {0}")]
    NotSaid(#[from] NotSaid),
    /// TLS failed.
    #[error("the TLS handshake failed: {0}")]
    Tls(#[from] io::Error),
    /// It was lost before it said what it speaks.
    #[error("it was lost before its first bytes: {0}")]
    Lost(io::Error),
    /// Its client has too many connections.
    #[error(transparent)]
    Full(#[from] Full),
    /// Its certificate, though verified, could not be read.
    #[error(transparent)]
    Certificate(#[from] Unreadable),
}

/// Serves one connection until it ends, or is drained: then it has until the instant that `drain` tells. `admit` is
/// told who is there.
///
/// # Errors
/// The handshake failed. Whatever goes wrong later is the client's to see, and nobody's error.
pub async fn serve<A, F, B>(
    stream: Stream,
    beginning: Beginning,
    bounds: Bounds,
    tasks: &Tasks,
    mut drain: watch::Receiver<Option<Instant>>,
    admit: impl FnOnce(Introduced) -> Result<Admitted<A>, Unreadable>,
) -> Result<Ended, HandshakeError>
where
    A: Fn(Request<Incoming>) -> F + 'static,
    F: Future<Output = Response<B>> + 'static,
    B: Body<Data = Bytes, Error = Infallible> + Unpin + 'static,
{
    let began = Instant::now();
    let Beginning { place, figures, proxied, tls, odd_authority, http1 } = beginning;
    let introducing = introduce(stream, proxied.then_some(&place), tls);
    let Some(introduced) = introduced(introducing, bounds.handshake, &mut drain, &place).await else {
        return Ok(Ended::Well);
    };
    let Introduction { stream, source, server_name, mut shown, speaks, taken } = introduced?;
    let progress = Rc::<SocketProgress>::default();
    let Some(inbound) = inbound_of(speaks, stream, taken, &progress, bounds, odd_authority) else {
        return Ok(Ended::Well);
    };
    if speaks == Speaks::Http1 {
        let until = began + bounds.handshake;
        return serve_http1(inbound, until, &http1, source, &mut drain, &place).await;
    }
    let certificate = shown.as_ref().and_then(Shown::leaf);
    let Admitted { answer, until, old_at, expires, dismiss } =
        admit(Introduced { source, certificate, server_name })?;
    if let Some(shown) = &mut shown {
        shown.expires(expires);
    }
    let streams = ServedStreams::new(bounds.streams, Arc::clone(place.activity()));
    let first_call = bounds.first_call.map(|time| (time, began));
    let mut ends = Ends::new(drain, dismiss, place, figures.clone());
    (ends.until, ends.old_at, ends.shown, ends.first_call) = (until, old_at, shown, first_call);
    let turn = ReadTurn::new();
    let (io, flusher) = coalesce(Gated::new(InTurns::new(inbound, &turn), &streams));
    tasks.spawn("downstream flusher", flusher).detach();
    let last_words = io.inner().last_words();
    let serving = Rc::clone(&streams);
    // Boxed: hyper keeps room for it as long as the answer's body lives, which for a watch is days.
    let service = service_fn(move |request| Box::pin(serving.serve(answer(request))));
    let mut connection = pin!(settings(bounds).serve_connection(io, service));
    let mut silence = pin!(silence(began + bounds.handshake, &progress));
    let mut unanswered = pin!(unanswered_ping(bounds.pings, &progress, &streams));
    let (mut leaving, mut told) = (false, false);
    loop {
        let served = poll_fn(|cx| {
            turn.begin();
            let polled = connection.as_mut().poll(cx);
            // Before the preface hyper would close without a GOAWAY.
            if polled.is_ready() || told || !leaving || progress.received() < PREFACE {
                return polled;
            }
            told = true;
            connection.as_mut().graceful_shutdown();
            connection.as_mut().poll(cx)
        });
        tokio::select! {
            ended = served => return Ok(how_it_ended(ended)),
            () = streams.flooded() => {
                turn.lift();
                drop(timeout(FAREWELL, last_words.say(CALM)).await);
                return Ok(Ended::Flooded);
            }
            () = silence.as_mut() => return if leaving { Ok(Ended::Well) } else { Err(HandshakeError::TimedOut) },
            () = unanswered.as_mut() => {
                figures.ended(EndReason::NoAnswer).inc();
                return Ok(Ended::Silent);
            }
            turn = ends.next() => match turn {
                Turn::Leave => {
                    leaving = true;
                    silence.set(self::silence((Instant::now() + MOMENT).min(began + bounds.handshake), &progress));
                }
                Turn::Cut => return Ok(Ended::Cut),
                Turn::Close => return Ok(Ended::Well),
            },
        }
    }
}

/// The bytes of a client that speaks; none of one that has gone.
fn inbound_of(
    speaks: Speaks,
    stream: Stream,
    taken: Bytes,
    progress: &Rc<SocketProgress>,
    bounds: Bounds,
    odd_authority: Option<Arc<Metrics>>,
) -> Option<Inbound> {
    let progress = Rc::clone(progress);
    match (speaks, odd_authority) {
        (Speaks::Nothing, _) => None,
        (Speaks::Http2, Some(metrics)) => {
            let largest = usize::try_from(bounds.header_size).unwrap_or(usize::MAX);
            Some(Inbound::looking_for_odd_authority(stream, &taken, progress, largest, metrics))
        }
        _ => Some(Inbound::new(stream, taken, progress)),
    }
}

/// Tells a client that speaks HTTP/1 that nothing is here for it, and notes its requests.
async fn serve_http1(
    inbound: Inbound,
    until: Instant,
    log: &Http1Log,
    source: Option<SocketAddr>,
    drain: &mut watch::Receiver<Option<Instant>>,
    place: &ConnectionPlace,
) -> Result<Ended, HandshakeError> {
    let answer = |request| {
        log.note(&request, source);
        http1::nothing_here(request)
    };
    tokio::select! {
        served = http1::serve(inbound, until, answer) => {
            served.map(|()| Ended::Well).map_err(|_| HandshakeError::TimedOut)
        }
        _ = drain.wait_for(Option::is_some) => Ok(Ended::Well),
        () = place.activity().room_wanted() => Ok(Ended::Well),
    }
}

/// Ends at `until` where the preface has not come by then: hyper waits for it without a limit.
async fn silence(until: Instant, progress: &SocketProgress) {
    tokio::time::sleep_until(until).await;
    if progress.received() >= PREFACE {
        std::future::pending::<()>().await;
    }
}

/// Who has introduced itself, or why it did not. None where the process drains before that: a client that was accepted and is
/// about to say who it is has a moment for it, to be told by HTTP that it is to go elsewhere; a reset tells it nothing. None at once where
/// its place is wanted for another connection.
async fn introduced<T>(
    introducing: impl Future<Output = Result<T, HandshakeError>>,
    limit: Duration,
    drain: &mut watch::Receiver<Option<Instant>>,
    place: &ConnectionPlace,
) -> Option<Result<T, HandshakeError>> {
    let mut introducing = pin!(timeout(limit, introducing));
    let introduced = tokio::select! {
        biased; // who has introduced itself is let in
        introduced = &mut introducing => introduced,
        () = place.activity().room_wanted() => return None,
        _ = drain.wait_for(Option::is_some) => timeout(MOMENT, introducing).await.ok()?,
    };
    Some(introduced.unwrap_or(Err(HandshakeError::TimedOut)))
}

/// A connection whose client has said who it is and what it speaks.
struct Introduction {
    stream: Stream,
    source: Option<SocketAddr>,
    /// The host that it named in TLS.
    server_name: Option<String>,
    shown: Option<Shown>,
    speaks: Speaks,
    /// What was read of `stream` to know that.
    taken: Bytes,
}

/// What comes before HTTP, in this order. Where a balancer says who the client is, the client's address is told to `proxied`.
async fn introduce(
    mut stream: Stream,
    proxied: Option<&ConnectionPlace>,
    tls: Option<Current>,
) -> Result<Introduction, HandshakeError> {
    let mut source = None;
    if let Some(place) = proxied
        && let Source::Client(address) = proxied::source(&mut stream).await?
    {
        place.set_address(ClientAddress::of(address.ip()))?;
        source = Some(address);
    }
    let (mut server_name, mut shown, mut agreed) = (None, None, None);
    if let Some(tls) = tls {
        (stream, server_name, shown, agreed) = handshake(stream, tls).await?;
    }
    let looked = first::look(&mut stream, agreed.as_deref()).await;
    let (speaks, taken) = looked.map_err(HandshakeError::Lost)?;
    Ok(Introduction { stream, source, server_name, shown, speaks, taken })
}

/// TLS.
type Handshake = (Stream, Option<String>, Option<Shown>, Option<Vec<u8>>);

/// The host that the client named, what it has shown, where it was asked, and what it will speak, where it has said.
async fn handshake(stream: Stream, tls: Current) -> io::Result<Handshake> {
    // Before it is read what the handshake is made by: what changes meanwhile counts.
    let changes = tls.changes();
    let now = tls.load_full();
    let accepting = tokio_rustls::TlsAcceptor::from(Arc::clone(&now.handshakes)).accept(stream);
    let stream = Box::new(accepting.await?);
    let session = stream.get_ref().1;
    let chain = session.peer_certificates().unwrap_or_default();
    let server_name = session.server_name().map(str::to_owned);
    let shown = now.asks().then(|| Shown::new(tls, changes, chain));
    let agreed = session.alpn_protocol().map(<[u8]>::to_vec);
    Ok((stream, server_name, shown, agreed))
}

fn how_it_ended(ended: hyper::Result<()>) -> Ended {
    let Err(error) = ended else { return Ended::Well };
    tracing::debug!(%error, "client connection ended");
    // HTTP/2 counts streams itself that are reset before they are looked at.
    let why = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<h2::Error>());
    let flooded =
        why.is_some_and(|why| !why.is_remote() && why.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM));
    if flooded { Ended::Flooded } else { Ended::Well }
}

fn settings(bounds: Bounds) -> Builder<LocalExecutor> {
    let mut builder = Builder::new(LocalExecutor);
    builder
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(bounds.streams)
        .max_pending_accept_reset_streams(usize::try_from(bounds.streams).unwrap_or(usize::MAX))
        .max_header_list_size(bounds.header_size)
        .max_send_buf_size(SEND_BUFFER);
    if let Some(pings) = bounds.pings {
        // Also where no stream is open: clients that are gone hold places. Only sends: `ping_timeout` decides who is gone.
        builder.keep_alive_interval(pings.interval).keep_alive_timeout(FOR_EVER);
    }
    builder
}
