//! What a client speaks: HTTP/2, or HTTP/1.
//!
//! Owns: the look at a connection's first bytes, the only one (rules 34). Must not know what is done with what was found. Invariants:
//! TLS's word counts where it has one; else the first byte that differs from HTTP/2's preface decides, so that nobody waits for
//! a byte that the client need not send; at most [`LOOK`] bytes are taken, and handed on.

use std::io;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// HTTP/2 in TLS's words (RFC 9113, 3.1).
pub(super) const H2: &[u8] = b"h2";
/// HTTP/1 in TLS's words.
pub(super) const HTTP1: &[u8] = b"http/1.1";
/// What HTTP/2's preface begins with, and no request of HTTP/1 does.
const BEGINNING: &[u8; LOOK] = b"PRI ";
const LOOK: usize = 4;

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speaks {
    Http2,
    /// Or nothing that we know.
    Http1,
    /// Nothing: it has gone.
    Nothing,
}

/// What the client speaks, by its word in TLS where there was one, and what had to be read to know.
pub(super) async fn look(
    stream: &mut (impl AsyncRead + Unpin),
    agreed: Option<&[u8]>,
) -> io::Result<(Speaks, Bytes)> {
    if let Some(agreed) = agreed {
        let speaks = if agreed == H2 { Speaks::Http2 } else { Speaks::Http1 };
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
        0 => Speaks::Nothing,
        _ if taken == *BEGINNING => Speaks::Http2,
        _ => Speaks::Http1,
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
            (&b"PRI * HTTP/2.0\r\n"[..], Speaks::Http2, 4),
            (b"PUT / HTTP/1.1\r\n", Speaks::Http1, 4),
            (b"GET / HTTP/1.0\r\n", Speaks::Http1, 4),
            (b"\x16\x03\x01", Speaks::Http1, 3),
            (b"PR", Speaks::Http1, 2),
            (b"", Speaks::Nothing, 0),
        ] {
            // In one piece, and byte by byte: then as few are read as must be.
            for capacity in [64, 1] {
                let (mut near, mut far) = tokio::io::duplex(capacity);
                let write = async {
                    drop(far.write_all(bytes).await);
                    drop(far);
                };
                let looked = async {
                    let looked = look(&mut near, None).await.expect("readable");
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
        assert_eq!(look(&mut near, None).await.expect("readable"), (Speaks::Http1, Bytes::from_static(b"G")));
        assert_eq!(look(&mut near, Some(H2)).await.expect("nothing read").0, Speaks::Http2);
        assert_eq!(look(&mut near, Some(HTTP1)).await.expect("nothing read").0, Speaks::Http1);
    }
}
