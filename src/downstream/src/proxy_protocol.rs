//! Clients behind a balancer: the PROXY protocol, versions 1 (text) and 2 (binary).
//!
//! Owns: the protocol's header, and the client address taken from the header. Must not know: the list of
//! trusted balancers, the use of the address. The format is HAProxy's `doc/proxy-protocol.txt`, sections 2.1
//! and 2.2; the text is parsed by `ppp`.
//! Invariants (`docs/decisions.md#d15`): exactly the header is read, and no byte after the header. A binary
//! header is at most [`LONGEST`] bytes long after its fixed part, a text at most [`LONGEST_TEXT`]. Any input
//! yields the address written in the header or a refusal, never another address.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ppp::v1;
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// First bytes of every binary header. Neither HTTP/2 nor TLS begins with these bytes.
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// Fixed part of a header: the signature, version and command, family and transport, and the length of the
/// rest.
const HEAD: usize = 16;
/// Longest rest of a header: the addresses, and the balancer's additions about TLS and itself, which are
/// skipped.
pub const LONGEST: usize = 4096;
/// First bytes of every text. HTTP has no such method.
const TEXT: &[u8; 6] = b"PROXY ";
/// Longest text, with its line end: two IPv6 addresses without abbreviation.
pub const LONGEST_TEXT: usize = 107;

const VERSION: u8 = 0x2;
const LOCAL: u8 = 0x0;
const PROXY: u8 = 0x1;
const TCP_OVER_IPV4: u8 = 0x11;
const TCP_OVER_IPV6: u8 = 0x21;

/// The peer of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxiedSource {
    /// A client at this address.
    Client(SocketAddr),
    /// The balancer itself, such as for a health check (LOCAL).
    Balancer,
}

/// Reason for not accepting a connection required to begin with a PROXY header.
#[derive(Debug, thiserror::Error)]
pub enum ProxyHeaderError {
    /// The connection does not begin with the header.
    #[error("it does not begin with a PROXY protocol header of version 1 or 2")]
    NoHeader,
    /// The text is not as the protocol has it.
    #[error("its PROXY protocol header of version 1 is malformed")]
    Text,
    /// The command is neither LOCAL nor PROXY.
    #[error("its PROXY protocol header has an unknown command")]
    Command,
    /// The client did not connect over TCP, or the balancer does not know the client's address.
    #[error("its PROXY protocol header names no TCP address")]
    Family,
    /// The header is longer than allowed, or too short for the announced addresses.
    #[error("its PROXY protocol header has a length of {0} bytes")]
    Length(usize),
    /// The connection ended within the header.
    #[error("it ended in its PROXY protocol header: {0}")]
    Lost(#[from] io::Error),
}

/// Number of header bytes after the fixed part.
fn rest_of(head: &[u8; HEAD]) -> Result<usize, ProxyHeaderError> {
    let (signature, fields) = head.split_at(SIGNATURE.len());
    let &[version_and_command, _, high, low] = fields else { return Err(ProxyHeaderError::NoHeader) };
    if signature != SIGNATURE || version_and_command >> 4 != VERSION {
        return Err(ProxyHeaderError::NoHeader);
    }
    let length = usize::from(u16::from_be_bytes([high, low]));
    if length > LONGEST { Err(ProxyHeaderError::Length(length)) } else { Ok(length) }
}

/// The content of a complete header. Bytes after the addresses are skipped.
fn parse_header(head: &[u8; HEAD], rest: &[u8]) -> Result<ProxiedSource, ProxyHeaderError> {
    if rest_of(head)? != rest.len() {
        return Err(ProxyHeaderError::Length(rest.len()));
    }
    match head[12] & 0xf {
        // The rest of a LOCAL header is ignored.
        LOCAL => return Ok(ProxiedSource::Balancer),
        PROXY => {}
        _ => return Err(ProxyHeaderError::Command),
    }
    let short = ProxyHeaderError::Length(rest.len());
    let (address, port) = match head[13] {
        // Source, destination, and their ports in the same order.
        TCP_OVER_IPV4 => {
            let addresses: &[u8; 12] = rest.first_chunk().ok_or(short)?;
            let &[a, b, c, d, _, _, _, _, high, low, _, _] = addresses;
            (IpAddr::from(Ipv4Addr::new(a, b, c, d)), [high, low])
        }
        TCP_OVER_IPV6 => {
            let addresses: &[u8; 36] = rest.first_chunk().ok_or(short)?;
            let source: [u8; 16] = std::array::from_fn(|at| addresses[at]);
            // An IPv4-mapped IPv6 address becomes an IPv4 address.
            (IpAddr::from(Ipv6Addr::from(source)).to_canonical(), [addresses[32], addresses[33]])
        }
        _ => return Err(ProxyHeaderError::Family),
    };
    Ok(ProxiedSource::Client(SocketAddr::new(address, u16::from_be_bytes(port))))
}

/// Reads the rest of a text that begins with `begin`, byte by byte: the text tells its end by a line end
/// only, and the bytes behind belong to the client.
async fn read_text(
    stream: &mut (impl AsyncRead + Unpin),
    begin: &[u8],
) -> Result<ProxiedSource, ProxyHeaderError> {
    let mut text = Vec::with_capacity(LONGEST_TEXT);
    text.extend_from_slice(begin);
    while text.last() != Some(&b'\n') {
        if text.len() == LONGEST_TEXT {
            return Err(ProxyHeaderError::Text);
        }
        text.push(stream.read_u8().await?);
    }
    parse_text(&text)
}

/// The content of a complete text, with its line end.
fn parse_text(text: &[u8]) -> Result<ProxiedSource, ProxyHeaderError> {
    let line = text.strip_suffix(b"\r\n").ok_or(ProxyHeaderError::Text)?;
    // The library takes a line end within the line for a space, and a sign for a part of a number.
    if !line.iter().all(|byte| matches!(byte, b' '..=b'~') && *byte != b'+') {
        return Err(ProxyHeaderError::Text);
    }
    let header = v1::Header::try_from(text).map_err(|_| ProxyHeaderError::Text)?;
    let (address, port) = match header.addresses {
        v1::Addresses::Tcp4(found) => (IpAddr::V4(found.source_address), found.source_port),
        v1::Addresses::Tcp6(found) => (IpAddr::V6(found.source_address).to_canonical(), found.source_port),
        v1::Addresses::Unknown => return Err(ProxyHeaderError::Family),
    };
    Ok(ProxiedSource::Client(SocketAddr::new(address, port)))
}

/// Reads the header at the start of `stream`.
///
/// Not cancel-safe: bytes already read are lost. Waits without a time limit.
///
/// # Errors
/// [`ProxyHeaderError`].
pub async fn read_header(stream: &mut (impl AsyncRead + Unpin)) -> Result<ProxiedSource, ProxyHeaderError> {
    let mut head = [0; HEAD];
    // No header, of neither version, is shorter than the signature.
    let (signature, fields) = head.split_at_mut(SIGNATURE.len());
    stream.read_exact(signature).await?;
    if signature.starts_with(TEXT) {
        return read_text(stream, signature).await;
    }
    stream.read_exact(fields).await?;
    let mut rest = vec![0; rest_of(&head)?];
    stream.read_exact(&mut rest).await?;
    parse_header(&head, &rest)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use proptest::prelude::*;

    use super::*;

    const V4: &[u8] = &[192, 0, 2, 7, 10, 0, 0, 1, 0xc0, 0x01, 0x09, 0x4b];
    const TLV: &[u8] = &[0x04, 0, 3, 1, 2, 3, 0x20, 0xff];

    /// A header with the given version and command, family and transport, and rest.
    fn header(version_and_command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
        [&SIGNATURE[..], &[version_and_command, family], &length, rest].concat()
    }

    fn v6(source: &str) -> Vec<u8> {
        let source: Ipv6Addr = source.parse().unwrap();
        [&source.octets()[..], &[0; 16], &[0x30, 0x39], &[0, 1]].concat()
    }

    /// The result, and the number of bytes read.
    fn read(bytes: &[u8]) -> (Result<ProxiedSource, String>, usize) {
        let mut left = bytes;
        let said = read_header(&mut left).now_or_never().expect("nothing to wait for");
        (said.map_err(|why| why.to_string()), bytes.len() - left.len())
    }

    fn client(address: &str) -> Result<ProxiedSource, String> {
        Ok(ProxiedSource::Client(address.parse().unwrap()))
    }

    #[test]
    fn a_header_names_the_client_and_what_follows_is_left() {
        let mapped = v6("::ffff:192.0.2.7");
        for (header, expected) in [
            (header(0x21, 0x11, V4), client("192.0.2.7:49153")),
            (header(0x21, 0x11, &[V4, TLV].concat()), client("192.0.2.7:49153")),
            (header(0x21, 0x11, &[V4, &[0xff; LONGEST - 12]].concat()), client("192.0.2.7:49153")),
            (header(0x21, 0x21, &v6("2001:db8::1")), client("[2001:db8::1]:12345")),
            (header(0x21, 0x21, &[&v6("2001:db8::1"), TLV].concat()), client("[2001:db8::1]:12345")),
            (header(0x21, 0x21, &mapped), client("192.0.2.7:12345")),
            (header(0x20, 0x00, b""), Ok(ProxiedSource::Balancer)),
            (header(0x20, 0x11, V4), Ok(ProxiedSource::Balancer)),
            (header(0x20, 0xff, TLV), Ok(ProxiedSource::Balancer)),
        ] {
            let all = [&header[..], b"PRI * HTTP/2.0\r\n"].concat();
            assert_eq!(read(&all), (expected, header.len()), "{header:x?}");
        }
    }

    #[test]
    fn a_text_names_the_client_and_what_follows_is_left() {
        let longest = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
        for (text, expected) in [
            ("PROXY TCP4 192.0.2.7 10.0.0.1 49153 2379\r\n".to_owned(), "192.0.2.7:49153"),
            ("PROXY TCP6 2001:db8::1 ::1 12345 2379\r\n".to_owned(), "[2001:db8::1]:12345"),
            ("PROXY TCP6 ::ffff:192.0.2.7 ::1 12345 2379\r\n".to_owned(), "192.0.2.7:12345"),
            (format!("PROXY TCP6 {longest} {longest} 65535 65535\r\n"), &format!("[{longest}]:65535")),
        ] {
            let all = [text.as_bytes(), b"PRI * HTTP/2.0\r\n"].concat();
            assert_eq!(read(&all), (client(expected), text.len()), "{text}");
        }
    }

    #[test]
    fn what_is_no_such_header_is_refused() {
        let wrong = |at: usize| {
            let mut header = header(0x21, 0x11, V4);
            header[at] ^= 1;
            header
        };
        let announced = |length: u16| {
            let mut header = header(0x21, 0x11, V4);
            header[14..16].copy_from_slice(&length.to_be_bytes());
            header.resize(1 << 17, 0);
            header
        };
        let bad: &[(&str, Vec<u8>)] = &[
            ("does not begin", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()),
            ("no TCP address", b"PROXY UNKNOWN\r\nPRI".to_vec()),
            ("no TCP address", b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\nPRI".to_vec()),
            ("is malformed", b"PROXY TCP4 192.0.2.7 10.0.0.1 49153 2379\nPRI".to_vec()),
            ("is malformed", b"PROXY TCP4 192.0.2.7 10.0.0.1 49153\r2379\r\n".to_vec()),
            ("is malformed", b"PROXY TCP4 192.0.2.7 10.0.0.1 +1 2379\r\n".to_vec()),
            ("is malformed", b"PROXY TCP4 192.0.2.7 10.0.0.1 65536 2379\r\n".to_vec()),
            ("is malformed", b"PROXY TCP4 2001:db8::1 10.0.0.1 1 2379\r\n".to_vec()),
            ("is malformed", b"PROXY UDP4 192.0.2.7 10.0.0.1 1 2379\r\n".to_vec()),
            ("is malformed", b"PROXY TCP4 192.0.2.7 10.0.0.1 1 2 3\r\n".to_vec()),
            ("is malformed", [b"PROXY TCP4", &[b' '; 200][..]].concat()),
            ("is malformed", b"PROXY \r\nTCP4 192.0.2.7 10.0.0.1 1 2\r\n".to_vec()),
            ("does not begin", b"PROXYTCP4 192.0.2.7 10.0.0.1 1 2\r\n".to_vec()),
            ("ended in", b"PROXY TCP4 192.0.2.7 10.0.0.1 1 2".to_vec()),
            ("does not begin", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a client hello".to_vec()),
            ("does not begin", wrong(0)),
            ("does not begin", wrong(11)),
            ("does not begin", header(0x11, 0x11, V4)),
            ("does not begin", header(0x31, 0x11, V4)),
            ("unknown command", header(0x22, 0x11, V4)),
            ("unknown command", header(0x2f, 0x11, V4)),
            ("no TCP address", header(0x21, 0x00, b"")),
            ("no TCP address", header(0x21, 0x01, V4)),
            ("no TCP address", header(0x21, 0x12, V4)),
            ("no TCP address", header(0x21, 0x22, &v6("::1"))),
            ("no TCP address", header(0x21, 0x31, &[b'/'; 216])),
            ("no TCP address", header(0x21, 0x41, V4)),
            ("length of 11 bytes", header(0x21, 0x11, &V4[..11])),
            ("length of 0 bytes", header(0x21, 0x11, b"")),
            ("length of 35 bytes", header(0x21, 0x21, &v6("::1")[..35])),
            ("length of 12 bytes", header(0x21, 0x21, V4)),
            ("length of 4097 bytes", announced(4097)),
            ("length of 65535 bytes", announced(65535)),
            ("ended in", b"".to_vec()),
            ("ended in", SIGNATURE.to_vec()),
            ("ended in", header(0x21, 0x11, V4)[..27].to_vec()),
            ("ended in", header(0x20, 0x00, TLV)[..17].to_vec()),
        ];
        for (why, bytes) in bad {
            let (said, read) = read(bytes);
            let told = said.expect_err("refused");
            assert!(told.contains(why), "{bytes:x?}: {told}");
            assert!(read <= HEAD + LONGEST);
        }
    }

    proptest! {
        #[test]
        fn any_client_that_is_written_is_read(
            address: IpAddr,
            port: u16,
            tlvs in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let (family, addresses) = match address {
                IpAddr::V4(address) => (0x11, [&address.octets()[..], &[9; 4]].concat()),
                IpAddr::V6(address) => (0x21, [&address.octets()[..], &[9; 16]].concat()),
            };
            let rest = [&addresses[..], &port.to_be_bytes(), &[9, 9], &tlvs].concat();
            let bytes = header(0x21, family, &rest);
            let expected = ProxiedSource::Client(SocketAddr::new(address.to_canonical(), port));
            prop_assert_eq!(read(&bytes), (Ok(expected), bytes.len()));
        }

        #[test]
        fn any_bytes_end_in_an_answer(
            begins: bool,
            command in 0x1e_u8..0x24,
            family: u8,
            length in prop_oneof![0_u16..64, any::<u16>()],
            mut rest in prop_oneof![
                15 => prop::collection::vec(any::<u8>(), 0..80),
                1 => prop::collection::vec(any::<u8>(), 0..5000),
            ],
        ) {
            if begins {
                let head = [&SIGNATURE[..], &[command, family], &length.to_be_bytes()].concat();
                rest.splice(0..0, head);
            }
            let (said, read) = read(&rest);
            prop_assert!(read <= HEAD + LONGEST);
            match said {
                Ok(ProxiedSource::Balancer) => prop_assert!(begins && command == 0x20),
                Ok(ProxiedSource::Client(_)) => prop_assert!(
                    begins && command == 0x21 && [0x11, 0x21].contains(&family)
                ),
                Err(_) => {}
            }
            prop_assert!(said.is_err() || read == HEAD + usize::from(length));
        }
    }
}
