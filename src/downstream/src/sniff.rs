//! Protocol detection for a client: HTTP/2 or HTTP/1.
//!
//! Owns: the only inspection of a connection's first bytes (`docs/decisions.md#d34`). Must not know how the
//! result is used. Invariants: a protocol agreed in TLS decides. Otherwise the first byte that differs from
//! HTTP/2's preface decides, so that detection never waits for a byte the client need not send. At most
//! [`LOOK`] bytes are read, and handed on.

use std::io;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// ALPN name of HTTP/2 (RFC 9113, section 3.1).
pub(super) const H2: &[u8] = b"h2";
/// ALPN name of HTTP/1.
pub(super) const HTTP1: &[u8] = b"http/1.1";
/// First bytes of HTTP/2's preface; no HTTP/1 request begins with these bytes.
const BEGINNING: &[u8; LOOK] = b"PRI ";
const LOOK: usize = 4;

/// The protocol of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientProtocol {
    Http2,
    /// HTTP/1, or an unknown protocol.
    Http1,
    /// No protocol: the client disconnected first.
    Nothing,
}

/// Detects the protocol, from the ALPN protocol `agreed` if any, and returns the bytes read.
pub(super) async fn detect_protocol(
    stream: &mut (impl AsyncRead + Unpin),
    agreed: Option<&[u8]>,
) -> io::Result<(ClientProtocol, Bytes)> {
    if let Some(agreed) = agreed {
        let speaks = if agreed == H2 { ClientProtocol::Http2 } else { ClientProtocol::Http1 };
        return Ok((speaks, Bytes::new()));
    }
    let (mut taken, mut length) = ([0; LOOK], 0);
    while length < LOOK && taken[..length] == BEGINNING[..length] {
        let read = stream.read(&mut taken[length..]).await?;
        if read == 0 {
            break;
        }
        length += read;
    }
    let speaks = match length {
        0 => ClientProtocol::Nothing,
        _ if taken == *BEGINNING => ClientProtocol::Http2,
        _ => ClientProtocol::Http1,
    };
    Ok((speaks, Bytes::copy_from_slice(&taken[..length])))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[tokio::test]
    async fn the_first_byte_that_differs_decides_and_the_rest_stays_unread() {
        for (bytes, speaks, read) in [
            (&b"PRI * HTTP/2.0\r\n"[..], ClientProtocol::Http2, 4),
            (b"PUT / HTTP/1.1\r\n", ClientProtocol::Http1, 4),
            (b"GET / HTTP/1.0\r\n", ClientProtocol::Http1, 4),
            (b"\x16\x03\x01", ClientProtocol::Http1, 3),
            (b"PR", ClientProtocol::Http1, 2),
            (b"", ClientProtocol::Nothing, 0),
        ] {
            // In one piece, and byte by byte: byte by byte no more is read than needed.
            for capacity in [64, 1] {
                let (mut near, mut far) = tokio::io::duplex(capacity);
                let write = async {
                    drop(far.write_all(bytes).await);
                    drop(far);
                };
                let looked = async {
                    let looked = detect_protocol(&mut near, None).await.expect("readable");
                    drop(near);
                    looked
                };
                let (looked, ()) = tokio::join!(looked, write);
                assert_eq!(looked.0, speaks, "{bytes:?}");
                assert!(looked.1.len() <= read && bytes.starts_with(&looked.1), "{bytes:?}: {looked:?}");
            }
        }
    }

    #[tokio::test]
    async fn a_lone_byte_of_another_protocol_is_not_waited_for() {
        let (mut near, mut far) = tokio::io::duplex(64);
        far.write_all(b"G").await.expect("room");
        assert_eq!(
            detect_protocol(&mut near, None).await.expect("readable"),
            (ClientProtocol::Http1, Bytes::from_static(b"G"))
        );
        assert_eq!(
            detect_protocol(&mut near, Some(H2)).await.expect("nothing read").0,
            ClientProtocol::Http2
        );
        assert_eq!(
            detect_protocol(&mut near, Some(HTTP1)).await.expect("nothing read").0,
            ClientProtocol::Http1
        );
    }
}
