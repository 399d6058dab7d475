//! What a hostile or broken client does to a server, and how often it manages to.
//!
//! Owns: the attacks, each as a loop over raw connections in threads of its own. Must not know whom it attacks. Invariant: an attack
//! ends within a second of its stop flag, and every connection and thread with it, save for threads that only read.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use keyward::pb::etcdserverpb::{
    Compare, RangeRequest, TxnRequest, WatchCreateRequest, WatchRequest, watch_request::RequestUnion,
};
use prost::Message as _;

use super::connection::{Block, Connection, Reading};

const RANGE: &str = "/etcdserverpb.KV/Range";
const WATCH: &str = "/etcdserverpb.Watch/Watch";
const TXN: &str = "/etcdserverpb.KV/Txn";
/// A call that anybody may make.
const LOGIN: &str = "/v3/auth/authenticate";
/// First bytes of frames of WebSocket.
const WEB_SOCKET_CONTINUATION: u8 = 0;
const WEB_SOCKET_TEXT: u8 = 1;
const WEB_SOCKET_PING: u8 = 0x89;
const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";
/// The authority that a Go client of exactly 3.5.0 sends, which HTTP/2 has no word for.
const ODD_AUTHORITY: &str = "#initially=[127.0.0.1:2379]";
/// The key of 1.4 MB that the test has written.
pub(crate) const LARGE_KEY: &str = "/a/large";
/// The prefix under which the test has written 40 values of 64 KiB.
pub(crate) const LIST: (&str, &str) = ("/a/list/", "/a/list0");
/// Frames are written when so many bytes wait.
const BATCH: usize = 32 * 1024;

/// One way to harm a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attack {
    /// Nothing: what others see without an attack.
    Calm,
    /// Gets of a large key whose answers are never read, on so many connections.
    UnreadGets { connections: usize, gets: usize },
    /// The same with lists.
    UnreadLists { connections: usize, lists: usize },
    /// Gets of a large key as JSON, over HTTP/2, whose answers are never read.
    UnreadJson { connections: usize, gets: usize },
    /// The same over HTTP/1.1: a get for each connection.
    UnreadHttp1 { gets: usize },
    /// Fragments of WebSocket without a byte, without a pause, by nobody.
    EmptyFragments,
    /// Pings of WebSocket without a pause, by nobody.
    WebSocketPings,
    /// Unfinished messages of WebSocket with 4 MiB each, by nobody.
    UnfinishedMessages { connections: usize },
    /// HEADERS, DATA, RST_STREAM of a Range, by a user who is logged in.
    ResetRanges,
    /// Txns that compare long keys which the user may not read: each is refused, and would have a long record.
    RefusedTxns,
    /// HEADERS and RST_STREAM without a token.
    ResetUnauthenticated,
    /// A new Watch stream with one create, then RST_STREAM.
    ResetWatches,
    /// A header block that refers thousands of times to one large field, beside an authority that is none.
    HeaderBomb,
    /// Large headers of calls whose body never comes.
    HeadersOnly { streams: usize },
    /// Streams of health watches that stay open.
    HealthWatches { streams: usize },
    /// PING frames without a pause.
    Pings,
    /// SETTINGS frames without a pause.
    Settings,
    /// Connections that never make a call.
    IdleConnections { connections: usize },
}

/// An attack that is under way.
pub(crate) struct Running {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    made: Arc<AtomicU64>,
}

impl Attack {
    /// A name for the table.
    pub(crate) fn name(self) -> String {
        match self {
            Attack::Calm => "none".into(),
            Attack::UnreadGets { connections, gets } => format!("{gets} unread gets x {connections}"),
            Attack::UnreadLists { connections, lists } => format!("{lists} unread lists x {connections}"),
            Attack::UnreadJson { connections, gets } => format!("{gets} unread JSON x {connections}"),
            Attack::UnreadHttp1 { gets } => format!("{gets} unread by HTTP/1.1"),
            Attack::EmptyFragments => "empty fragments x 4".into(),
            Attack::WebSocketPings => "WebSocket Pings x 2".into(),
            Attack::UnfinishedMessages { connections } => format!("{connections} unfinished messages"),
            Attack::ResetRanges => "reset Ranges x 2".into(),
            Attack::RefusedTxns => "refused Txns x 2".into(),
            Attack::ResetUnauthenticated => "reset without login x 2".into(),
            Attack::ResetWatches => "reset Watches x 2".into(),
            Attack::HeaderBomb => "header bomb x 2".into(),
            Attack::HeadersOnly { streams } => format!("{streams} header lists"),
            Attack::HealthWatches { streams } => format!("{streams} health watches"),
            Attack::Pings => "PINGs x 2".into(),
            Attack::Settings => "SETTINGS x 2".into(),
            Attack::IdleConnections { connections } => format!("{connections} idle connections"),
        }
    }

    /// Starts it against this address, as the user whose token is given.
    pub(crate) fn start(self, address: SocketAddr, token: &str) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let made = Arc::new(AtomicU64::new(0));
        let attackers = match self {
            Attack::Calm => 0,
            Attack::UnreadGets { connections, .. }
            | Attack::UnreadLists { connections, .. }
            | Attack::UnreadJson { connections, .. } => connections,
            Attack::EmptyFragments => 4,
            Attack::HeadersOnly { .. }
            | Attack::HealthWatches { .. }
            | Attack::IdleConnections { .. }
            | Attack::UnreadHttp1 { .. }
            | Attack::UnfinishedMessages { .. } => 1,
            _ => 2,
        };
        let threads = (0..attackers).map(|_| {
            let attacker = Attacker {
                attack: self,
                address,
                token: token.to_owned(),
                stop: Arc::clone(&stop),
                made: Arc::clone(&made),
            };
            thread::spawn(move || attacker.run())
        });
        Running { threads: threads.collect(), stop, made }
    }
}

impl Running {
    /// How many requests, frames or connections it has made.
    pub(crate) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Ends it. Its connections are closed when this returns.
    pub(crate) fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("an attacker does not panic");
        }
    }
}

struct Attacker {
    attack: Attack,
    address: SocketAddr,
    token: String,
    stop: Arc<AtomicBool>,
    made: Arc<AtomicU64>,
}

impl Attacker {
    /// Attacks on one connection after the other until told to stop: one that the server ends is opened again.
    fn run(&self) {
        while !self.is_stopped() {
            // An error is the server's defence, and no failure of the test.
            if self.attack_once().is_err() {
                self.pause();
            }
        }
    }

    #[expect(clippy::too_many_lines, reason = "a few lines for each attack, and no branch beside")]
    fn attack_once(&self) -> std::io::Result<()> {
        match self.attack {
            Attack::Calm => Ok(()),
            Attack::UnreadGets { gets, .. } => self.unread(gets, &range(LARGE_KEY, "")),
            Attack::UnreadLists { lists, .. } => self.unread(lists, &range(LIST.0, LIST.1)),
            Attack::UnreadJson { gets, .. } => {
                let block = Block::json("/v3/kv/range").with("authorization", &self.token);
                self.unread_with(gets, |connection| {
                    let stream = connection.headers(block.bytes(), false);
                    connection.data(stream, json_range(LARGE_KEY).as_bytes());
                })
            }
            Attack::UnreadHttp1 { gets } => {
                let (body, token) = (json_range(LARGE_KEY), &self.token);
                let length = body.len();
                let request = format!(
                    "POST /v3/kv/range HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n\
                     Content-Length: {length}\r\n\r\n{body}"
                );
                self.each_held(gets, || Connection::http1(self.address, &request, Reading::Nothing))
            }
            Attack::EmptyFragments => {
                let mut is_begun = false;
                self.flood_of(
                    Connection::web_socket(self.address, LOGIN, Reading::Everything)?,
                    |connection| {
                        if !std::mem::replace(&mut is_begun, true) {
                            connection.web_socket_frame(WEB_SOCKET_TEXT, b"{");
                        }
                        connection.empty_web_socket_frame(WEB_SOCKET_CONTINUATION);
                    },
                )
            }
            Attack::WebSocketPings => {
                let connection = Connection::web_socket(self.address, LOGIN, Reading::Everything)?;
                self.flood_of(connection, |connection| connection.empty_web_socket_frame(WEB_SOCKET_PING))
            }
            Attack::UnfinishedMessages { connections } => {
                let begun = [b"{\"name\":\"".as_slice(), &vec![b'x'; 4 * 1024 * 1024]].concat();
                self.each_held(connections, || {
                    let mut connection = Connection::web_socket(self.address, LOGIN, Reading::Nothing)?;
                    connection.web_socket_frame(WEB_SOCKET_TEXT, &begun);
                    connection.flush()?;
                    Ok(connection)
                })
            }
            Attack::ResetRanges => {
                let (block, message) = (self.block(RANGE), range("/a/small", ""));
                self.flood(|connection| {
                    let stream = connection.headers(block.bytes(), false);
                    connection.message(stream, &message, true);
                    connection.reset(stream);
                })
            }
            Attack::RefusedTxns => {
                let (block, message) = (self.block(TXN), refused_txn());
                self.flood(|connection| {
                    let stream = connection.headers(block.bytes(), false);
                    connection.message(stream, &message, true);
                })
            }
            Attack::ResetUnauthenticated => {
                let block = Block::grpc(RANGE, "127.0.0.1");
                self.flood(|connection| {
                    let stream = connection.headers(block.bytes(), false);
                    connection.reset(stream);
                })
            }
            Attack::ResetWatches => {
                let (block, message) = (self.block(WATCH), watch("/a/small"));
                self.flood(|connection| {
                    let stream = connection.headers(block.bytes(), false);
                    connection.message(stream, &message, false);
                    connection.reset(stream);
                })
            }
            Attack::HeaderBomb => {
                let block = Block::grpc(RANGE, ODD_AUTHORITY).remembering("x-filler", &"f".repeat(3_900));
                let bomb = block.repeating(15_000);
                self.flood(|connection| {
                    connection.headers(bomb.bytes(), true);
                })
            }
            Attack::HeadersOnly { streams } => {
                let block = self.block(RANGE).with("x-filler", &"f".repeat(60_000));
                self.hold(streams, |connection| {
                    connection.headers(block.bytes(), false);
                })
            }
            Attack::HealthWatches { streams } => {
                let block = Block::grpc(HEALTH_WATCH, "127.0.0.1");
                self.hold(streams, |connection| {
                    let stream = connection.headers(block.bytes(), false);
                    connection.message(stream, &[], true);
                })
            }
            Attack::Pings => self.flood(Connection::ping),
            Attack::Settings => self.flood(Connection::settings),
            Attack::IdleConnections { connections } => self.idle(connections),
        }
    }

    /// Opens a connection, makes so many requests, and reads nothing until told to stop.
    fn unread(&self, requests: usize, message: &[u8]) -> std::io::Result<()> {
        let block = self.block(RANGE);
        self.unread_with(requests, |connection| {
            let stream = connection.headers(block.bytes(), false);
            connection.message(stream, message, true);
        })
    }

    /// The same with requests that `ask` writes.
    fn unread_with(&self, requests: usize, ask: impl Fn(&mut Connection)) -> std::io::Result<()> {
        let mut connection = Connection::open(self.address, Reading::Nothing)?;
        for _ in 0..requests {
            ask(&mut connection);
        }
        self.made.fetch_add(requests as u64, Ordering::Relaxed);
        while !self.is_stopped() {
            connection.flush()?;
            self.pause();
        }
        Ok(())
    }

    /// Writes as fast as the server reads.
    fn flood(&self, write: impl FnMut(&mut Connection)) -> std::io::Result<()> {
        self.flood_of(Connection::open(self.address, Reading::Everything)?, write)
    }

    fn flood_of(
        &self,
        mut connection: Connection,
        mut write: impl FnMut(&mut Connection),
    ) -> std::io::Result<()> {
        while !self.is_stopped() && !connection.is_used_up() {
            while connection.waiting() < BATCH {
                write(&mut connection);
                self.made.fetch_add(1, Ordering::Relaxed);
            }
            connection.flush()?;
        }
        Ok(())
    }

    /// Begins so many streams and holds them, on as many connections as the server makes it take.
    fn hold(&self, streams: usize, mut write: impl FnMut(&mut Connection)) -> std::io::Result<()> {
        const PER_CONNECTION: usize = 200;
        let mut connections = Vec::new();
        let mut begun = 0;
        while begun < streams && !self.is_stopped() {
            let mut connection = Connection::open(self.address, Reading::Everything)?;
            for _ in 0..PER_CONNECTION.min(streams - begun) {
                write(&mut connection);
                connection.flush()?;
                begun += 1;
                self.made.fetch_add(1, Ordering::Relaxed);
            }
            connections.push(connection);
        }
        while !self.is_stopped() {
            for connection in &mut connections {
                connection.flush()?;
            }
            self.pause();
        }
        Ok(())
    }

    fn idle(&self, count: usize) -> std::io::Result<()> {
        self.each_held(count, || Connection::open(self.address, Reading::Nothing))
    }

    /// Opens so many connections and holds them.
    fn each_held(&self, count: usize, open: impl Fn() -> std::io::Result<Connection>) -> std::io::Result<()> {
        let mut connections = Vec::new();
        while !self.is_stopped() {
            if connections.len() < count {
                connections.push(open()?);
                self.made.fetch_add(1, Ordering::Relaxed);
            } else {
                for connection in &mut connections {
                    // One that the server has ended stays ended.
                    drop(connection.flush());
                }
                self.pause();
            }
        }
        Ok(())
    }

    fn block(&self, path: &str) -> Block {
        Block::grpc(path, "127.0.0.1").with("token", &self.token)
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    #[expect(clippy::disallowed_methods, reason = "the attacker runs on a thread of its own, not on a shard")]
    fn pause(&self) {
        thread::sleep(Duration::from_millis(20));
    }
}

fn json_range(key: &str) -> String {
    format!(r#"{{"key":"{}"}}"#, data_encoding::BASE64.encode(key.as_bytes()))
}

fn range(key: &str, range_end: &str) -> Vec<u8> {
    let (key, range_end) = (key.to_owned().into(), range_end.to_owned().into());
    RangeRequest { key, range_end, ..RangeRequest::default() }.encode_to_vec()
}

/// 17 compares of keys of 1 KiB outside of the user's rights, of bytes that are long in JSON.
fn refused_txn() -> Vec<u8> {
    let key = [&b"/x"[..], &[1; 1022]].concat();
    let compare = vec![Compare { key: key.into(), ..Default::default() }; 17];
    TxnRequest { compare, ..Default::default() }.encode_to_vec()
}

fn watch(key: &str) -> Vec<u8> {
    let create = WatchCreateRequest { key: key.to_owned().into(), ..WatchCreateRequest::default() };
    WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }.encode_to_vec()
}
