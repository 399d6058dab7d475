//! Accepting clients and handing connections to shards.
//!
//! Owns: the listening sockets, the kernel's timers for connections, the choice of a shard. Must not know
//! HTTP or TLS, nor the choice of admitted connections (`connection_table`). Invariants
//! (`docs/decisions.md#d34`): one acceptor hands each socket to the shard with the fewest connections. A
//! socket without a place in the connection table is closed at once. An error of `accept` never ends the
//! listener, and has a line in the log every ten seconds at most. The last open files of the process's limit
//! are never given to clients. A socket that closes resets no client in the kernel's queue: such a client is
//! connected, and may have sent a request.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use crate::connection_table::{ClientAddress, ConnectionPlace, ConnectionTable};
use crate::listener_tls::CurrentListenerTls;
use keyward_base::io::listening_sockets::{ListeningSockets, plain_socket_path};
use keyward_base::published::Published;
use keyward_config::{Address, ClientPings, Config, Listener};
use keyward_telemetry::log_throttle::LogThrottle;
use keyward_telemetry::metrics::Metrics;

/// After this much silence the kernel probes the client's machine, and repeats until the machine counts as
/// dead: 50 s in all. For connections without HTTP/2, and for connections without pings.
const KEEPALIVE: Duration = Duration::from_secs(30);
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMES: u32 = 4;
/// Sockets queued for a busy shard. With a full queue the acceptor waits, and the kernel's backlog fills.
const HANDOVER: usize = 256;
/// Pause after an error such as "too many open files": an immediate retry would only spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
const BACKLOG: u32 = 1024;
/// Clients in the kernel's queue at most: the largest value of Linux's `net.core.somaxconn` of old, and far
/// more than its default. A unix socket has the kernel's own limit, a socket of the service manager any.
const LONGEST_QUEUE: usize = 64 * 1024;
/// How long the clients in the queue of a socket that closes wait for descriptors: others leave meanwhile, an
/// idle one of HTTP/1.1 after five seconds.
const LAST_CLIENTS: Duration = Duration::from_secs(6);

/// The listener's state at the time of a connection's arrival.
#[derive(Clone)]
pub struct OpenListener {
    /// The listener's configuration.
    pub config: Arc<Listener>,
    /// TLS settings, if TLS is on.
    pub tls: Option<CurrentListenerTls>,
    /// Carries the drain deadline once the listener's connections must leave.
    pub drain: watch::Receiver<Option<Instant>>,
}

/// An accepted connection, on its way to a shard.
pub struct AcceptedConnection {
    /// The listener of the connection.
    pub listener: Arc<OpenListener>,
    /// The socket.
    pub socket: ClientSocket,
    /// The client's address; `None` on a unix socket.
    pub remote: Option<SocketAddr>,
    /// Counts the connection on its shard until dropped.
    pub shard_count: ShardConnectionCount,
    /// The connection's place in the connection table.
    pub place: ConnectionPlace,
}

/// A connected socket not yet registered with a runtime.
pub enum ClientSocket {
    /// Over TCP.
    Tcp(std::net::TcpStream),
    /// Over a unix socket.
    Unix(std::os::unix::net::UnixStream),
}

/// A handle on a socket, held until the client's protocol is known.
pub struct UnknownProtocolSocket(std::net::TcpStream);

impl UnknownProtocolSocket {
    /// A handle on `socket`; `None` if no such time limit applies to the socket.
    #[must_use]
    pub fn of(socket: &ClientSocket) -> Option<Self> {
        match socket {
            ClientSocket::Tcp(stream) => stream.try_clone().ok().map(Self),
            ClientSocket::Unix(_) => None,
        }
    }

    /// Ends the kernel's limit on unacknowledged data: the kernel counts data held back by a closed window as
    /// unacknowledged, and so would end the connection of a client that pauses. HTTP/2's window closes before
    /// TCP's does.
    pub fn allow_pauses(self) {
        #[cfg(target_os = "linux")]
        if let Err(error) = SockRef::from(&self.0).set_tcp_user_timeout(None) {
            tracing::debug!(%error, "a client's socket keeps its time limit");
        }
    }
}

/// The client, as known from the socket.
#[derive(Clone, Copy)]
enum SocketPeer {
    Tcp(SocketAddr),
    UnixUser(u32),
}

impl SocketPeer {
    fn remote(self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(remote) => Some(remote),
            Self::UnixUser(_) => None,
        }
    }

    /// The address for counting the connection; `None` if a balancer's header will supply the address.
    fn address(self, listener: &Listener) -> Option<ClientAddress> {
        match self {
            Self::Tcp(remote) if listener.is_trusted_proxy(remote.ip()) => None,
            Self::Tcp(remote) => Some(ClientAddress::of(remote.ip())),
            Self::UnixUser(user) => Some(ClientAddress::UnixUser(user)),
        }
    }
}

/// A shard's queue of new connections.
#[derive(Clone)]
pub struct ShardIntake {
    sender: mpsc::Sender<AcceptedConnection>,
    connections: Arc<AtomicUsize>,
}

/// One connection counted on one shard.
pub struct ShardConnectionCount {
    shard: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
}

impl Drop for ShardConnectionCount {
    fn drop(&mut self) {
        self.shard.fetch_sub(1, Ordering::Relaxed);
        self.metrics.connections.dec();
    }
}

impl ShardIntake {
    /// A shard's intake, and the receiver for the shard.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<AcceptedConnection>) {
        let (sender, receiver) = mpsc::channel(HANDOVER);
        (Self { sender, connections: Arc::default() }, receiver)
    }
}

/// The name of the listening socket of clients at `address`.
#[must_use]
pub fn socket_name(address: &Address) -> String {
    match address {
        Address::Unix(path) => format!("listener unix:{}", plain_socket_path(path).display()),
        Address::Tcp(_) => format!("listener {address}"),
    }
}

/// A bound listener.
pub enum BoundListener {
    /// On TCP.
    Tcp(TcpListener),
    /// On a unix socket. The caller removes the socket's file.
    Unix(UnixListener),
}

impl BoundListener {
    /// The socket at `address` that was taken over from another process, or a socket bound now.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn open(address: &Address, sockets: &ListeningSockets) -> io::Result<Self> {
        match (sockets.take(&socket_name(address)), address) {
            (None, _) => Self::bind(address),
            (Some(socket), Address::Tcp(_)) => Ok(Self::Tcp(TcpListener::from_std(socket.into())?)),
            (Some(socket), Address::Unix(_)) => Ok(Self::Unix(UnixListener::from_std(socket.into())?)),
        }
    }

    /// Binds `address`. A stale unix socket is replaced; a unix socket in use, or any other file, is not.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn bind(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp(address) => {
                let socket = match address {
                    SocketAddr::V4(_) => tokio::net::TcpSocket::new_v4()?,
                    SocketAddr::V6(_) => tokio::net::TcpSocket::new_v6()?,
                };
                socket.set_reuseaddr(true)?;
                socket.bind(*address)?;
                Ok(Self::Tcp(socket.listen(BACKLOG)?))
            }
            Address::Unix(path) => {
                remove_stale(path)?;
                Ok(Self::Unix(UnixListener::bind(path)?))
            }
        }
    }

    /// The actual address: the assigned port if the configuration says 0.
    #[must_use]
    pub fn local(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    async fn accept(&self, pings: Option<ClientPings>) -> io::Result<(ClientSocket, SocketPeer)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, remote) = listener.accept().await?;
                of_tcp(stream, remote, pings)
            }
            Self::Unix(listener) => of_unix(listener.accept().await?.0),
        }
    }

    /// The same listener, whose kernel's queue is all there is: tokio may not have been told of the last
    /// clients in it.
    fn into_blocking(self) -> io::Result<BlockingListener> {
        Ok(match self {
            Self::Tcp(listener) => BlockingListener::Tcp(listener.into_std()?),
            Self::Unix(listener) => BlockingListener::Unix(listener.into_std()?),
        })
    }
}

/// A listener without tokio, whose `accept` still does not wait.
enum BlockingListener {
    Tcp(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener),
}

impl BlockingListener {
    fn accept(&self, pings: Option<ClientPings>) -> io::Result<(ClientSocket, SocketPeer)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, remote) = listener.accept()?;
                stream.set_nonblocking(true)?;
                of_tcp(TcpStream::from_std(stream)?, remote, pings)
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                of_unix(UnixStream::from_std(stream)?)
            }
        }
    }
}

fn of_tcp(
    stream: TcpStream,
    remote: SocketAddr,
    pings: Option<ClientPings>,
) -> io::Result<(ClientSocket, SocketPeer)> {
    stream.set_nodelay(true)?;
    set_timers(SockRef::from(&stream), pings)?;
    Ok((ClientSocket::Tcp(stream.into_std()?), SocketPeer::Tcp(remote)))
}

fn of_unix(stream: UnixStream) -> io::Result<(ClientSocket, SocketPeer)> {
    let user = stream.peer_cred()?.uid();
    Ok((ClientSocket::Unix(stream.into_std()?), SocketPeer::UnixUser(user)))
}

impl AsFd for BoundListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

/// Makes the kernel end a connection to a dead machine: after unacknowledged data for as long as a client may
/// be silent, except over HTTP/1, or after unanswered probes.
fn set_timers(socket: SockRef<'_>, pings: Option<ClientPings>) -> io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_AGAIN);
    socket.set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_TIMES))?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(pings.map(|pings| pings.limit()))?;
    Ok(())
}

/// Removes a stale socket file.
///
/// # Errors
/// The socket is in use, or the operating system's error.
pub fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        // If the connect succeeds, another process serves the socket and must keep its clients.
        Ok(found) if found.file_type().is_socket() => match std::os::unix::net::UnixStream::connect(path) {
            Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
            // Only a refused connection proves that no process serves the socket: a process of another user
            // may answer "permission denied".
            Err(error) => Err(error),
        },
        _ => Ok(()),
    }
}

/// The way in which an acceptor ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptorEnd {
    /// The socket closes, behind the clients in the kernel's queue.
    Closes,
    /// Another process accepts from the same queue.
    HandedOver,
}

/// Accepts the clients of one socket for the shards.
pub struct Acceptor {
    /// The listener of each connection that comes.
    pub listener: Arc<Published<OpenListener>>,
    /// The shards.
    pub intakes: Vec<ShardIntake>,
    /// Has a place for each connection, or closes it.
    pub table: Arc<ConnectionTable>,
    /// For the timers of connections.
    pub config: Arc<Published<Config>>,
    /// Counts connections.
    pub metrics: Arc<Metrics>,
}

impl Acceptor {
    /// Accepts until `end`, or until every shard is gone.
    pub async fn run(self, listening: BoundListener, mut end: oneshot::Receiver<AcceptorEnd>) {
        let (shortages, errors) = (LogThrottle::default(), LogThrottle::default());
        let pings = || self.config.load().limits.client_connections.pings;
        let end = loop {
            // The remaining files are for members and the admin address; clients wait in the kernel's queue.
            if self.table.lacks_descriptors() {
                if let Some(times) = shortages.count() {
                    tracing::warn!(
                        times,
                        "the limit on open files is near: clients are not accepted for a moment"
                    );
                }
                tokio::select! {
                    biased;
                    end = &mut end => break end,
                    () = sleep(ACCEPT_PAUSE) => continue,
                }
            }
            let accepted = tokio::select! {
                biased;
                end = &mut end => break end,
                accepted = listening.accept(pings()) => accepted,
            };
            match accepted {
                Ok((socket, from)) => {
                    if self.hand_on(socket, from).await == HandedOn::NoShards {
                        return;
                    }
                }
                Err(error) => {
                    if let Some(times) = errors.count() {
                        tracing::warn!(%error, times, "a connection could not be accepted");
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        };
        if end != Ok(AcceptorEnd::Closes) {
            return;
        }
        match listening.into_blocking() {
            Ok(waiting) => {
                if timeout(LAST_CLIENTS, self.take_waiting(&waiting)).await.is_err() {
                    tracing::warn!("not all clients that waited for a listener are served");
                }
            }
            Err(error) => tracing::warn!(%error, "clients that waited for a listener are not served"),
        }
    }

    /// Takes the clients in the kernel's queue, but no more than the longest queue has places: more would be
    /// clients that came meanwhile. Clients that find no descriptor wait for one. Not to be cancelled but at
    /// the end of their time.
    async fn take_waiting(&self, waiting: &BlockingListener) {
        let errors = LogThrottle::default();
        let mut taken = 0;
        while taken < LONGEST_QUEUE {
            let error = if self.table.lacks_descriptors() {
                io::Error::other("the limit on open files is near")
            } else {
                match waiting.accept(self.config.load().limits.client_connections.pings) {
                    Ok((socket, from)) => {
                        self.hand_on(socket, from).await;
                        taken += 1;
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                    Err(error) => error,
                }
            };
            if let Some(times) = errors.count() {
                tracing::warn!(%error, times, "a client that waited for a listener waits on");
            }
            sleep(ACCEPT_PAUSE).await;
        }
    }

    /// Hands a connection to a shard. Not to be cancelled: the connection would be reset.
    async fn hand_on(&self, socket: ClientSocket, from: SocketPeer) -> HandedOn {
        let listener = self.listener.load_full();
        let Ok(place) = self.table.admit(from.address(&listener.config)) else { return HandedOn::Done };
        // A shard with a full intake is stuck: prefer the other shards.
        let idlest = |takers: &dyn Fn(&ShardIntake) -> bool| {
            let alive = self.intakes.iter().filter(|intake| !intake.sender.is_closed() && takers(intake));
            alive.min_by_key(|intake| intake.connections.load(Ordering::Relaxed))
        };
        let Some(intake) = idlest(&|intake| intake.sender.capacity() > 0).or_else(|| idlest(&|_| true))
        else {
            return HandedOn::NoShards;
        };
        intake.connections.fetch_add(1, Ordering::Relaxed);
        self.metrics.connections.inc();
        let (shard, metrics) = (Arc::clone(&intake.connections), Arc::clone(&self.metrics));
        let slot = ShardConnectionCount { shard, metrics };
        let remote = from.remote();
        let accepted = AcceptedConnection { listener, socket, remote, shard_count: slot, place };
        if intake.sender.send(accepted).await.is_err() {
            tracing::error!("a shard is gone; its connections go to the others");
        }
        HandedOn::Done
    }
}

/// What became of an accepted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandedOn {
    /// A shard has it, or there was no place for it.
    Done,
    /// Every shard is gone.
    NoShards,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_left_over_socket_is_replaced_and_a_served_one_or_a_file_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("binds"));
        let address = Address::Unix(path.clone());
        let serving = BoundListener::bind(&address).expect("the left-over one is replaced");
        let robbed = BoundListener::bind(&address).map(|_| ()).map_err(|error| error.kind());
        assert_eq!(robbed, Err(io::ErrorKind::AddrInUse));
        drop(serving);
        std::fs::remove_file(&path).expect("it is there");
        std::fs::write(&path, "data").expect("writes");
        assert!(BoundListener::bind(&address).is_err());
        assert_eq!(std::fs::read(&path).expect("it is still there"), b"data");
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn the_kernel_gives_up_a_client_after_the_time_that_it_may_be_silent() {
        let listening = BoundListener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).expect("binds");
        let address = listening.local().expect("an address");
        let pings = ClientPings { interval: Duration::from_secs(7), timeout: Duration::from_secs(4) };
        for (pings, limit) in [(Some(pings), Some(Duration::from_secs(11))), (None, None)] {
            let _client = std::net::TcpStream::connect(address).expect("connected");
            let (socket, _) = listening.accept(pings).await.expect("accepted");
            let ClientSocket::Tcp(socket) = socket else { panic!("over TCP") };
            let socket = SockRef::from(&socket);
            let told = socket.tcp_user_timeout().expect("told");
            assert_eq!(told.filter(|told| !told.is_zero()), limit);
            assert!(socket.keepalive().expect("told"));
            let silence = socket.tcp_keepalive_time().expect("told")
                + socket.tcp_keepalive_interval().expect("told")
                    * socket.tcp_keepalive_retries().expect("told");
            assert_eq!(silence, Duration::from_secs(50));
        }
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn the_kernel_lets_a_client_pause_once_that_is_allowed() {
        let listening = BoundListener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).expect("binds");
        let address = listening.local().expect("an address");
        let pings = ClientPings { interval: Duration::from_secs(7), timeout: Duration::from_secs(4) };
        for is_allowed in [false, true] {
            let _client = std::net::TcpStream::connect(address).expect("connected");
            let (socket, _) = listening.accept(Some(pings)).await.expect("accepted");
            let unknown = UnknownProtocolSocket::of(&socket).expect("over TCP");
            if is_allowed {
                unknown.allow_pauses();
            }
            let ClientSocket::Tcp(socket) = socket else { panic!("over TCP") };
            let told = SockRef::from(&socket).tcp_user_timeout().expect("told");
            assert_eq!(told.is_none_or(|told| told.is_zero()), is_allowed);
        }
    }
}
