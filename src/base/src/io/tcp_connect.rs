//! Connecting by TCP to an address.
//!
//! Owns: the only connect of the program. Must not know: names, TLS. Invariant: nothing here takes a name,
//! which the connect of a library would look up in a way of its own; names are looked up by `dial::names`.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpSocket, TcpStream};

/// Connects to the address. Cancel-safe.
///
/// # Errors
/// The operating system's error.
pub async fn connect_tcp(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.connect(address).await
}
