//! The PROXY protocol's header: exactly the header is read, and the address is the one that is written there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use futures_util::FutureExt as _;
use keyward::downstream::proxy_protocol::{LONGEST, ProxiedSource, read_header};

use crate::choices::Choices;

pub(crate) const TARGETS: [fn(&[u8]); 2] = [any_bytes, headers];

const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// The address and the length of the header, as HAProxy's document has it, written anew.
fn expected(bytes: &[u8]) -> Option<(ProxiedSource, usize)> {
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
