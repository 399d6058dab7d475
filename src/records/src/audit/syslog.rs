//! Records as syslog messages (RFC 5424), one datagram each.
//!
//! Owns: the form of a message, and the socket. Must not know: the contents of a record. The facility is 13
//! (log audit), the severity 6 (informational).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::record::Timestamp;
use super::sink_progress::SinkProgress;
use keyward_config::audit_settings::SyslogAddress;

/// Facility 13 times 8, and severity 6.
const PRIORITY: u8 = 13 * 8 + 6;
/// Time limit for a datagram to a socket of this machine: a full socket fails after this time.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long lines sent by UDP wait for a refusal before they count as sent: more than a round trip.
const UDP_REFUSAL: Duration = Duration::from_millis(300);

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

    /// Sends the lines from the first unsent one on, and counts them in `progress`: lines to a socket of this
    /// machine once its server has them in its buffer; lines by UDP once no machine has refused them for a
    /// moment. A line that no datagram holds is counted as refused.
    ///
    /// # Errors
    /// The operating system's error: the server is gone, or reads too slowly.
    pub(super) fn send(&mut self, lines: &[u8], progress: &mut SinkProgress) -> io::Result<()> {
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => connect(&self.address)?,
        };
        let mut handed = SinkProgress::default();
        for line in lines.split_inclusive(|byte| *byte == b'\n').skip(progress.sent_lines()) {
            let line = line.strip_suffix(b"\n").unwrap_or(line);
            let message = message(line, &self.replica, std::process::id(), Timestamp::now());
            let sent = match &socket {
                SyslogSocket::Unix(socket) => socket.send(&message),
                SyslogSocket::Udp(socket) => socket.send(&message),
            };
            match sent {
                Err(error) if error.raw_os_error() == Some(Errno::MSGSIZE.raw_os_error()) => {
                    handed.refused += 1
                }
                // A restarted server has a new socket.
                Err(error) => return Err(error),
                Ok(_) => {}
            }
            handed.sent += 1;
            if matches!(socket, SyslogSocket::Unix(_)) {
                progress.add(&mut handed);
            }
        }
        if let SyslogSocket::Udp(socket) = &socket {
            wait_for_refusal(socket)?;
            progress.add(&mut handed);
        }
        self.socket = Some(socket);
        Ok(())
    }
}

/// Waits for a moment: a machine without a server answers each datagram with a message of ICMP, which the
/// next operation on the socket shows.
fn wait_for_refusal(socket: &UdpSocket) -> io::Result<()> {
    let until = Instant::now() + UDP_REFUSAL;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.recv(&mut [0]) {
            // A server has nothing to say.
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
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

    fn send(server: &mut SyslogServer, lines: &[u8]) -> (io::Result<()>, u64, u64) {
        let mut progress = SinkProgress::default();
        let result = server.send(lines, &mut progress);
        (result, progress.sent, progress.refused)
    }

    #[test]
    fn a_line_reaches_both_kinds_of_servers_also_after_their_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut buffer = [0; 200];
        let mut unix = SyslogServer::new(SyslogAddress::Unix(path.clone()), "a".into());
        assert!(send(&mut unix, b"{}\n").0.is_err());
        for _ in 0..2 {
            let server = UnixDatagram::bind(&path).unwrap();
            // The first attempt after a restart may fail on the old socket.
            let first = send(&mut unix, b"{}\n");
            assert!(matches!(first, (Ok(()), 1, 0)) || matches!(send(&mut unix, b"{}\n"), (Ok(()), 1, 0)));
            let length = server.recv(&mut buffer).unwrap();
            assert!(buffer[..length].ends_with(b" audit - {}"));
            std::fs::remove_file(&path).unwrap();
        }
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = SyslogAddress::Udp(server.local_addr().unwrap());
        let mut udp = SyslogServer::new(address, "a".into());
        let long = [&vec![b'x'; 70_000][..], b"\n{}\n"].concat();
        assert!(matches!(send(&mut udp, &long), (Ok(()), 2, 1)), "no datagram holds the first line");
        let length = server.recv(&mut buffer).unwrap();
        assert!(buffer[..length].starts_with(b"<110>1 "));
    }

    /// The first datagram to a port without a server leaves like any other.
    #[test]
    fn nothing_sent_to_a_closed_udp_port_counts_as_sent() {
        let held = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = SyslogAddress::Udp(held.local_addr().unwrap());
        let mut udp = SyslogServer::new(address, "a".into());
        // Connected elsewhere, the socket keeps its port and takes no datagram of others.
        held.connect("127.0.0.1:9").unwrap();
        for lines in [&b"{}\n"[..], b"{}\n{}\n{}\n"] {
            let (result, sent, refused) = send(&mut udp, lines);
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
            assert_eq!((sent, refused), (0, 0));
        }
    }
}
