//! Records as syslog messages (RFC 5424), one datagram each.
//!
//! Owns: the form of a message, and the socket. Must not know: the contents of a record. The facility is 13
//! (log audit), the severity 6 (informational).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use super::record::Timestamp;
use crate::config::audit_settings::SyslogAddress;

/// Facility 13 times 8, and severity 6.
const PRIORITY: u8 = 13 * 8 + 6;
/// Time limit for a datagram to a socket of this machine: a full socket fails after this time.
const PATIENCE: Duration = Duration::from_secs(1);

/// The message of a line.
fn message(line: &[u8], replica: &str, process: u32, now: Timestamp) -> Vec<u8> {
    let mut message = format!("<{PRIORITY}>1 {now} {replica} keyward {process} audit - ").into_bytes();
    message.extend_from_slice(line);
    message
}

/// A syslog server.
pub(super) struct SyslogServer {
    address: SyslogAddress,
    replica: String,
    socket: Option<SyslogSocket>,
}

enum SyslogSocket {
    Unix(UnixDatagram),
    Udp(UdpSocket),
}

impl SyslogServer {
    pub(super) fn new(address: SyslogAddress, replica: String) -> Self {
        Self { address, replica, socket: None }
    }

    /// Sends one line.
    ///
    /// # Errors
    /// The operating system's error: the server is gone, or reads too slowly.
    pub(super) fn send(&mut self, line: &[u8]) -> io::Result<()> {
        let socket = match &self.socket {
            Some(socket) => socket,
            None => self.socket.insert(connect(&self.address)?),
        };
        let message = message(line, &self.replica, std::process::id(), Timestamp::now());
        let sent = match socket {
            SyslogSocket::Unix(socket) => socket.send(&message),
            SyslogSocket::Udp(socket) => socket.send(&message),
        };
        // A restarted server has a new socket.
        sent.map(drop).inspect_err(|_| self.socket = None)
    }
}

fn connect(address: &SyslogAddress) -> io::Result<SyslogSocket> {
    match address {
        SyslogAddress::Unix(path) => {
            let socket = UnixDatagram::unbound()?;
            socket.set_write_timeout(Some(PATIENCE))?;
            socket.connect(path)?;
            Ok(SyslogSocket::Unix(socket))
        }
        SyslogAddress::Udp(address) => {
            let any = match address.ip() {
                IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect(address)?;
            Ok(SyslogSocket::Udp(socket))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn a_message_has_the_fields_of_rfc_5424() {
        let text = message(b"{\"v\":1}", "keyward-1", 42, Timestamp(UNIX_EPOCH));
        let expected = "<110>1 1970-01-01T00:00:00.000000Z keyward-1 keyward 42 audit - {\"v\":1}";
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }

    #[test]
    fn a_line_reaches_both_kinds_of_servers_also_after_their_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut buffer = [0; 200];
        let mut unix = SyslogServer::new(SyslogAddress::Unix(path.clone()), "a".into());
        assert!(unix.send(b"{}").is_err());
        for _ in 0..2 {
            let server = UnixDatagram::bind(&path).unwrap();
            // The first attempt after a restart may fail on the old socket.
            unix.send(b"{}").or_else(|_| unix.send(b"{}")).unwrap();
            let length = server.recv(&mut buffer).unwrap();
            assert!(buffer[..length].ends_with(b" audit - {}"));
            std::fs::remove_file(&path).unwrap();
        }
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = SyslogAddress::Udp(server.local_addr().unwrap());
        SyslogServer::new(address, "a".into()).send(b"{}").unwrap();
        let length = server.recv(&mut buffer).unwrap();
        assert!(buffer[..length].starts_with(b"<110>1 "));
    }
}
