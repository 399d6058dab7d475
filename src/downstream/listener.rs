//! Accepting clients and handing them to shards.
//!
//! Owns: the listening sockets, the kernel's timers for them, the choice of a shard. Must not know HTTP or TLS, nor who has a place
//! (`connection_table`). Invariants (rules 34): one acceptor hands each socket to the shard that has the fewest; a socket without a place is
//! closed at once; an error of `accept` never ends the listener.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::config::{Address, ClientPings, Config, Listener};
use crate::downstream::connection_table::{ClientAddress, ConnectionPlace, ConnectionTable};
use crate::downstream::tls::Current;
use crate::published::Published;
use crate::telemetry::metrics::Metrics;

/// After this much silence the kernel asks whether the client's machine is there, and again until it is taken for gone: 50 s in all. That is for
/// connections without HTTP/2, and for those that are sent no pings.
const KEEPALIVE: Duration = Duration::from_secs(30);
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMES: u32 = 4;
/// Sockets that wait for a busy shard to take them. The acceptor then waits too, and the kernel's backlog fills.
pub const HANDOVER: usize = 256;
/// After an error such as "too many open files": trying again at once would only spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
const BACKLOG: u32 = 1024;

/// What a connection takes from the listener that it comes by: what that was when it came.
#[derive(Clone)]
pub struct Opened {
    /// As it is configured.
    pub config: Arc<Listener>,
    /// TLS, where it is on.
    pub tls: Option<Current>,
    /// Tells when its connections are to leave, and until when.
    pub drain: watch::Receiver<Option<Instant>>,
}

/// An accepted connection, on its way to a shard.
pub struct Accepted {
    /// What it came by.
    pub listener: Arc<Opened>,
    /// The socket.
    pub socket: Socket,
    /// The client's address; none on a unix socket.
    pub remote: Option<SocketAddr>,
    /// Counts the connection on its shard until dropped.
    pub slot: Slot,
    /// Its place among all connections.
    pub place: ConnectionPlace,
}

/// A connected socket that no runtime owns yet.
pub enum Socket {
    /// Over TCP.
    Tcp(std::net::TcpStream),
    /// Over a unix socket.
    Unix(std::os::unix::net::UnixStream),
}

/// Who connected, as far as the socket tells.
#[derive(Clone, Copy)]
enum Origin {
    Tcp(SocketAddr),
    UnixUser(u32),
}

impl Origin {
    fn remote(self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(remote) => Some(remote),
            Self::UnixUser(_) => None,
        }
    }

    /// For whom the connection counts; none where a balancer will say it.
    fn address(self, listener: &Listener) -> Option<ClientAddress> {
        match self {
            Self::Tcp(remote) if listener.believes(remote.ip()) => None,
            Self::Tcp(remote) => Some(ClientAddress::of(remote.ip())),
            Self::UnixUser(user) => Some(ClientAddress::UnixUser(user)),
        }
    }
}

/// Where shards take their connections from.
#[derive(Clone)]
pub struct Intake {
    sender: mpsc::Sender<Accepted>,
    connections: Arc<AtomicUsize>,
}

/// One connection on one shard.
pub struct Slot {
    shard: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shard.fetch_sub(1, Ordering::Relaxed);
        self.metrics.connections.dec();
    }
}

impl Intake {
    /// A shard's intake and the end that the shard reads.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<Accepted>) {
        let (sender, receiver) = mpsc::channel(HANDOVER);
        (Self { sender, connections: Arc::default() }, receiver)
    }
}

/// A bound listener.
pub enum Listening {
    /// On TCP.
    Tcp(TcpListener),
    /// On a unix socket, whose file is removed with it.
    Unix(UnixListener),
}

impl Listening {
    /// Binds `address`. A unix socket that was left behind is replaced; one that is served, or any other file, is not.
    ///
    /// # Errors
    /// The system's.
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

    /// Where it really listens: the port that was chosen where the configuration says 0.
    #[must_use]
    pub fn local(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    async fn accept(&self, pings: Option<ClientPings>) -> io::Result<(Socket, Origin)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, remote) = listener.accept().await?;
                stream.set_nodelay(true)?;
                set_timers(SockRef::from(&stream), pings)?;
                Ok((Socket::Tcp(stream.into_std()?), Origin::Tcp(remote)))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let user = stream.peer_cred()?.uid();
                Ok((Socket::Unix(stream.into_std()?), Origin::UnixUser(user)))
            }
        }
    }
}

/// Has the kernel end a connection whose peer's machine is gone: where it acknowledges nothing that was sent for as long as a client may be
/// silent, and where it answers no probe.
fn set_timers(socket: SockRef<'_>, pings: Option<ClientPings>) -> io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_AGAIN);
    socket.set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_TIMES))?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(pings.map(|pings| pings.limit()))?;
    Ok(())
}

/// Removes a socket that was left behind.
///
/// # Errors
/// It is served, or the system's.
pub fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        // Whoever answers there is alive, and not to be robbed of its clients.
        Ok(found) if found.file_type().is_socket() => match std::os::unix::net::UnixStream::connect(path) {
            Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
            Err(_) => std::fs::remove_file(path),
        },
        _ => Ok(()),
    }
}

/// Accepts on one socket for ever, or until every shard is gone, each connection for what `listener` is then and if `table` has a place for
/// it.
pub async fn accept(
    listening: Listening,
    listener: Arc<Published<Opened>>,
    intakes: Vec<Intake>,
    table: Arc<ConnectionTable>,
    config: Arc<Published<Config>>,
    metrics: Arc<Metrics>,
) {
    loop {
        let pings = config.load().limits.client_connections.pings;
        let (socket, from) = match listening.accept(pings).await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let listener = listener.load_full();
        let Ok(place) = table.admit(from.address(&listener.config)) else { continue };
        // A shard that takes nothing off its intake is stuck: the others go on.
        let idlest = |takers: &dyn Fn(&Intake) -> bool| {
            let alive = intakes.iter().filter(|intake| !intake.sender.is_closed() && takers(intake));
            alive.min_by_key(|intake| intake.connections.load(Ordering::Relaxed))
        };
        let Some(intake) = idlest(&|intake| intake.sender.capacity() > 0).or_else(|| idlest(&|_| true))
        else {
            return;
        };
        intake.connections.fetch_add(1, Ordering::Relaxed);
        metrics.connections.inc();
        let slot = Slot { shard: Arc::clone(&intake.connections), metrics: Arc::clone(&metrics) };
        let remote = from.remote();
        let accepted = Accepted { listener, socket, remote, slot, place };
        if intake.sender.send(accepted).await.is_err() {
            tracing::error!("a shard is gone; its connections go to the others");
        }
    }
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
        let serving = Listening::bind(&address).expect("the left-over one is replaced");
        let robbed = Listening::bind(&address).map(|_| ()).map_err(|error| error.kind());
        assert_eq!(robbed, Err(io::ErrorKind::AddrInUse));
        drop(serving);
        std::fs::remove_file(&path).expect("it is there");
        std::fs::write(&path, "data").expect("writes");
        assert!(Listening::bind(&address).is_err());
        assert_eq!(std::fs::read(&path).expect("it is still there"), b"data");
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn the_kernel_gives_up_a_client_after_the_time_that_it_may_be_silent() {
        let listening = Listening::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).expect("binds");
        let address = listening.local().expect("an address");
        let pings = ClientPings { interval: Duration::from_secs(7), timeout: Duration::from_secs(4) };
        for (pings, limit) in [(Some(pings), Some(Duration::from_secs(11))), (None, None)] {
            let _client = std::net::TcpStream::connect(address).expect("connected");
            let (socket, _) = listening.accept(pings).await.expect("accepted");
            let Socket::Tcp(socket) = socket else { panic!("over TCP") };
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
}
