//! Socket activation: listening sockets opened by the service manager before the process began, as described
//! in sd_listen_fds(3). The service manager keeps the sockets, so connections wait during a restart.
//!
//! Owns: the receipt of the sockets, and their names. Must not know: the protocols served at the sockets.
//! Invariants: a socket is used only for the configured listener, or admin address, at the socket's own
//! address; any other socket ends the start, since nobody would accept its connections; the files of unix
//! sockets belong to the service manager, and are not removed.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use listenfd::ListenFd;
use socket2::SockRef;

use super::ServeError;
use super::admin_interfaces::address_name;
use keyward_base::io::listening_sockets::NamedSocket;
use keyward_config::{Address, Config};
use keyward_downstream::acceptor::socket_name;

/// Number of sockets, set by the service manager.
const COUNT: &str = "LISTEN_FDS";
/// Process that the sockets are for. A child inherits the variables, and not the sockets.
const PROCESS: &str = "LISTEN_PID";

/// True if the service manager opened sockets for this service, in this process or in a process before.
pub(super) fn are_used() -> bool {
    std::env::var_os(COUNT).is_some()
}

/// Receives the sockets, and names each for its listener in `config`. To be called before the process opens
/// anything that stays open.
pub(super) fn receive(config: &Config) -> Result<Vec<NamedSocket>, ServeError> {
    let process = std::env::var(PROCESS).ok().and_then(|process| process.parse::<u32>().ok());
    if process != Some(std::process::id()) {
        return Ok(Vec::new());
    }
    let mut received = ListenFd::from_env();
    let mut named = Vec::new();
    for place in 0..received.len() {
        let (socket, address) = listening(&mut received, place).map_err(ServeError::Activation)?;
        let name = match &address {
            of_listener if config.listeners.iter().any(|listener| listener.address == *of_listener) => {
                socket_name(of_listener)
            }
            Address::Tcp(tcp) if *tcp == config.admin.address => address_name(*tcp),
            _ => {
                let reason = format!("no listener has the address of the received socket, {address}");
                return Err(ServeError::Activation(io::Error::other(reason)));
            }
        };
        tracing::info!(socket = name, "received from the service manager");
        named.push((name, socket));
    }
    Ok(named)
}

/// The listening socket at `place`, and its address.
fn listening(received: &mut ListenFd, place: usize) -> io::Result<(OwnedFd, Address)> {
    let missing = || io::Error::other(format!("socket {place} is taken"));
    let (socket, address): (OwnedFd, Address) = match received.take_tcp_listener(place) {
        Ok(listener) => {
            let listener = listener.ok_or_else(missing)?;
            let address = Address::Tcp(listener.local_addr()?);
            (listener.into(), address)
        }
        // No TCP socket. The library has left the socket at its place.
        Err(_) => {
            let listener: UnixListener = received.take_unix_listener(place)?.ok_or_else(missing)?;
            let address = listener.local_addr()?;
            let path =
                address.as_pathname().ok_or_else(|| io::Error::other("a unix socket without a path"))?;
            let address = Address::Unix(path.to_owned());
            (listener.into(), address)
        }
    };
    let options = SockRef::from(&socket);
    options.set_nonblocking(true)?;
    if !options.is_listener()? {
        return Err(io::Error::other(format!("the received socket at {address} does not listen")));
    }
    Ok((socket, address))
}
