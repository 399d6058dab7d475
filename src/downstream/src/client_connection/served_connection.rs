//! The protocol spoken on a client connection: HTTP/2 or HTTP/1.
//!
//! Owns: HTTP/2's settings towards clients, the turns, and the last words to a client that floods.
//! Must not know: the services served, the reasons for a connection's end. Invariant: whatever protocol is
//! spoken, a poll of the connection is one turn, and its bytes come through a [`TurnReader`].

use std::future::Future;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use h2::server::Builder;
use http::{Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use super::{ClientConnectionEnd, ConnectionBounds};
use crate::client_body::{ClientBody, ReplyBody};
use crate::http1_server::Http1Server;
use crate::http2_server::{Http2Server, is_flood};
use crate::message_frames::MessageFrames;
use crate::read_turns::{ReadTurn, TurnReader};
use crate::served_streams::{PausableReader, ServedStreams};
use crate::socket_progress::SocketProgress;
use crate::turn_length::{ShardTurns, TurnLength};
use keyward_base::io::coalesce::{Coalesce, FinalMessage, coalesce_through};
use keyward_base::tasks::Tasks;

const STREAM_WINDOW: u32 = 256 * 1024;
/// Window for 256 streams with unread requests, such as a Watch waiting for its client: the bound on memory
/// held for one connection's unread data.
const CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;
/// The announced limit on streams, in limits: a client holds back a stream beyond the announced limit in
/// silence, and a stream beyond the limit is refused in words.
const ANNOUNCED: u32 = 2;
const SEND_BUFFER: usize = 128 * 1024;

/// GOAWAY (RFC 9113, section 6.8) with ENHANCE_YOUR_CALM and a text. The last stream id is the highest
/// possible, because any stream may have been processed.
const CALM: &[u8] = b"\0\0\x17\x07\0\0\0\0\0\x7f\xff\xff\xff\0\0\0\x0btoo_many_resets";
/// Time for the client to read the GOAWAY.
const FAREWELL: Duration = Duration::from_millis(250);

/// A connection in service, with its turns. `answer` is called for each request.
pub(super) struct ServedConnection<T, S, F, B>
where
    B: ReplyBody + 'static,
{
    protocol: ServedProtocol<T, S, F, B>,
    length: TurnLength,
    turn: Rc<ReadTurn>,
}

/// The bytes of any protocol: read in turns, and not while too many streams are in service.
type InTurns<T> = PausableReader<TurnReader<T>>;

enum ServedProtocol<T, S, F, B>
where
    B: ReplyBody + 'static,
{
    /// HTTP/1, and the protocol that takes over its connection.
    Http1(Box<Http1Server<InTurns<T>, B>>),
    Http2(Box<Http2Connection<T, S, F, B>>),
}

/// An HTTP/2 connection, with its last words.
struct Http2Connection<T, S, F, B> {
    server: Http2Server<Coalesce<InTurns<T>, MessageFrames>, S, F, B>,
    last_words: FinalMessage<InTurns<T>>,
}

impl<T, S, F, B> ServedConnection<T, S, F, B>
where
    T: AsyncRead + AsyncWrite + Unpin + 'static,
    S: Fn(Request<ClientBody>) -> F + 'static,
    F: Future<Output = Response<B>> + Unpin + 'static,
    B: ReplyBody + Unpin + 'static,
{
    /// Serves HTTP/1. `turns` counts the connection's turns.
    pub(super) fn http1(
        io: T,
        bounds: ConnectionBounds,
        progress: &Rc<SocketProgress>,
        streams: &Rc<ServedStreams>,
        turns: ShardTurns,
        answer: S,
    ) -> Self {
        let turn = ReadTurn::new();
        let io = PausableReader::new(TurnReader::unframed(io, &turn), streams);
        let server = Http1Server::new(io, bounds.header_size, progress, streams, &turn, answer);
        let protocol = ServedProtocol::Http1(Box::new(server));
        Self { protocol, length: TurnLength::new(turns), turn }
    }

    /// Serves HTTP/2. The connection's writes are sent by a task among `tasks`; `turns` counts its turns.
    pub(super) fn http2(
        io: T,
        bounds: ConnectionBounds,
        progress: &Rc<SocketProgress>,
        streams: &Rc<ServedStreams>,
        turns: ShardTurns,
        tasks: &Tasks,
        answer: S,
    ) -> Self {
        let turn = ReadTurn::new();
        let io = PausableReader::new(TurnReader::http2(io, &turn), streams);
        let (io, flusher) = coalesce_through(io, MessageFrames::default());
        tasks.spawn("downstream flusher", flusher).detach();
        let last_words = io.inner().last_words();
        let interval = bounds.pings.map(|pings| pings.interval);
        let server = Http2Server::new(&settings(bounds), io.into_inner(), interval, progress, answer);
        let protocol = ServedProtocol::Http2(Box::new(Http2Connection { server, last_words }));
        Self { protocol, length: TurnLength::new(turns), turn }
    }

    /// Serves the connection until its end. If `leaves`, no new requests are accepted, and the connection
    /// ends with its open requests. Cancel-safe.
    pub(super) fn poll_serve(&mut self, cx: &mut Context<'_>, leaves: bool) -> Poll<ClientConnectionEnd> {
        let length = self.length.begin();
        self.turn.begin(length);
        match &mut self.protocol {
            ServedProtocol::Http1(server) => {
                server.poll_serve(cx, leaves).map(|()| ClientConnectionEnd::Well)
            }
            ServedProtocol::Http2(connection) => {
                connection.server.poll_serve(cx, length, leaves).map(how_it_ended)
            }
        }
    }

    /// Tells a client that resets too many streams to be calm, and discards its further bytes.
    pub(super) async fn say_farewell(&self) {
        if let ServedProtocol::Http2(connection) = &self.protocol {
            self.turn.lift();
            drop(timeout(FAREWELL, connection.last_words.say(CALM)).await);
        }
    }
}

fn how_it_ended(ended: Result<(), h2::Error>) -> ClientConnectionEnd {
    let Err(error) = ended else { return ClientConnectionEnd::Well };
    tracing::debug!(%error, "client connection ended");
    if is_flood(&error) { ClientConnectionEnd::Flooded } else { ClientConnectionEnd::Well }
}

fn settings(bounds: ConnectionBounds) -> Builder {
    let mut builder = Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(bounds.streams.saturating_mul(ANNOUNCED))
        .max_pending_accept_reset_streams(usize::try_from(bounds.streams).unwrap_or(usize::MAX))
        .max_header_list_size(bounds.header_size)
        .max_send_buffer_size(SEND_BUFFER);
    builder
}
