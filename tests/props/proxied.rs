//! The PROXY protocol's header: exactly the header is read, and the address is the one that is written there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use futures_util::FutureExt as _;
use keyward::downstream::proxy_protocol::{LONGEST, LONGEST_TEXT, ProxiedSource, read_header};

use crate::choices::Choices;

pub(crate) const TARGETS: [fn(&[u8]); 3] = [any_bytes, headers, texts];

const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// The address and the length of the header, as HAProxy's document has it, written anew.
fn expected(bytes: &[u8]) -> Option<(ProxiedSource, usize)> {
    if bytes.starts_with(b"PROXY ") {
        return expected_of_text(bytes);
    }
    let rest = bytes.strip_prefix(SIGNATURE)?;
    let (head, rest) = rest.split_at_checked(4)?;
    let length = usize::from(head[2]) << 8 | usize::from(head[3]);
    let body = rest.get(..length).filter(|_| length <= LONGEST)?;
    let port = |at: usize| u16::from_be_bytes([body[at], body[at + 1]]);
    let told = match (head[0], head[1]) {
        (0x20, _) => ProxiedSource::Balancer,
        (0x21, 0x11) if length >= 12 => {
            let address = Ipv4Addr::new(body[0], body[1], body[2], body[3]);
            ProxiedSource::Client(SocketAddr::new(address.into(), port(8)))
        }
        (0x21, 0x21) if length >= 36 => {
            let address = Ipv6Addr::from(<[u8; 16]>::try_from(&body[..16]).expect("16 bytes"));
            let address = address.to_ipv4_mapped().map_or(IpAddr::from(address), IpAddr::from);
            ProxiedSource::Client(SocketAddr::new(address, port(32)))
        }
        _ => return None,
    };
    Some((told, SIGNATURE.len() + 4 + length))
}

fn expected_of_text(bytes: &[u8]) -> Option<(ProxiedSource, usize)> {
    // The first 12 bytes are read at once.
    let end = bytes.iter().skip(11).position(|byte| *byte == b'\n')? + 12;
    let line = bytes.get(..end).filter(|_| end <= LONGEST_TEXT)?.strip_suffix(b"\r\n")?;
    let parts: Vec<&str> = std::str::from_utf8(line).ok()?.split(' ').collect();
    let [_, family, source, destination, from, to] = parts[..] else { return None };
    let port = |text: &str| {
        let port = text.parse::<u16>().ok()?;
        (port.to_string() == text).then_some(port)
    };
    let (port, _) = (port(from)?, port(to)?);
    let address: IpAddr = match family {
        "TCP4" => (source.parse::<Ipv4Addr>().ok()?, destination.parse::<Ipv4Addr>().ok()?).0.into(),
        "TCP6" => {
            let address = (source.parse::<Ipv6Addr>().ok()?, destination.parse::<Ipv6Addr>().ok()?).0;
            address.to_ipv4_mapped().map_or(IpAddr::from(address), IpAddr::from)
        }
        _ => return None,
    };
    Some((ProxiedSource::Client(SocketAddr::new(address, port)), end))
}

/// Texts that are nearly right.
fn texts(input: &[u8]) {
    let mut choices = Choices::new(input);
    let addresses = ["192.0.2.7", "::ffff:1.2.3.4", "2001:db8::1", "1.2.3", "01.2.3.4", "", "::"];
    let ports = ["1", "0", "65535", "65536", "01", "+1", "", "x", "443"];
    let families = ["TCP4", "TCP6", "TCP4", "TCP6", "UNKNOWN", "UDP4", "tcp4"];
    let ends = ["\r\n", "\r\n", "\r\n", "\n", " \r\n", "\r\r\n", ""];
    let separator = [" ", " ", " ", " ", "  ", "\r"][choices.below(6)];
    let fields = [
        families[choices.below(families.len())],
        addresses[choices.below(addresses.len())],
        addresses[choices.below(addresses.len())],
        ports[choices.below(ports.len())],
        ports[choices.below(ports.len())],
    ];
    let end = ends[choices.below(ends.len())];
    let mut bytes = format!("PROXY {}{end}", fields.join(separator)).into_bytes();
    bytes.extend_from_slice(choices.rest());
    any_bytes(&bytes);
}

fn any_bytes(input: &[u8]) {
    let mut rest = input;
    let read = read_header(&mut rest).now_or_never().expect("memory does not wait");
    assert_eq!(read.ok().map(|read| (read, input.len() - rest.len())), expected(input), "{input:02x?}");
}

fn headers(input: &[u8]) {
    let mut choices = Choices::new(input);
    let mut bytes = SIGNATURE.to_vec();
    bytes.push([0x20, 0x21, 0x21, 0x21, 0x22, 0x11][choices.below(6)]);
    bytes.push([0x11, 0x21, 0x12, 0x31, 0x00][choices.below(5)]);
    let length = match choices.below(4) {
        0 => choices.below(256),
        1 => 12,
        2 => 36 + choices.below(30),
        _ => LONGEST - 1 + choices.below(3),
    };
    bytes.extend(u16::try_from(length).expect("small").to_be_bytes());
    bytes.extend(choices.rest().iter().chain(std::iter::repeat(&7)).take(length + 3));
    if input.len().is_multiple_of(7) {
        bytes.truncate(bytes.len() - 4);
    }
    any_bytes(&bytes);
}
