//! An HTTP/2 client that writes each frame itself, for what no client library writes.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

use crate::rig::Keyward;
use crate::words::{RANGE, range};

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const CONTINUATION: u8 = 9;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
pub(crate) const PROTOCOL_ERROR: [u8; 4] = [0, 0, 0, 1];

/// A client that writes frames itself, since no library would write these.
pub(crate) struct RawClient(DuplexStream);

/// The fields of a Range.
fn fields(authority: &str) -> [(&str, &str); 6] {
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", RANGE),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
}

/// A header block, each field as a literal.
pub(crate) fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let string = |text: &str| [&[u8::try_from(text.len()).expect("short")], text.as_bytes()].concat();
    let field = |(name, value): &(&str, &str)| [vec![0], string(name), string(value)].concat();
    fields.iter().flat_map(field).collect()
}

impl RawClient {
    pub(crate) async fn connect(keyward: &Keyward) -> Self {
        let mut raw = Self(keyward.connect());
        raw.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("room");
        raw.frame(SETTINGS, 0, 0, &[]).await;
        raw
    }

    pub(crate) async fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
        let head = [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat();
        self.0.write_all(&head).await.expect("room");
    }

    /// A Range of one key.
    pub(crate) async fn asks(&mut self, stream: u32, authority: &str) {
        self.asks_with(stream, authority, &[]).await;
    }

    /// The same with further fields.
    pub(crate) async fn asks_with(&mut self, stream: u32, authority: &str, further: &[(&str, &str)]) {
        let head = [block(&fields(authority)), block(further)].concat();
        self.frame(HEADERS, END_HEADERS, stream, &head).await;
        self.says_range(stream).await;
    }

    /// The same with its head in so many frames, beside the first.
    pub(crate) async fn asks_in_frames(&mut self, stream: u32, further: usize) {
        self.frame(HEADERS, 0, stream, &block(&fields("etcd"))).await;
        for number in 1..=further {
            let flags = if number == further { END_HEADERS } else { 0 };
            self.frame(CONTINUATION, flags, stream, &block(&[("x-more", "x")])).await;
        }
        self.says_range(stream).await;
    }

    async fn says_range(&mut self, stream: u32) {
        let message = range("k");
        let length = u32::try_from(message.len()).expect("short").to_be_bytes();
        self.frame(DATA, END_STREAM, stream, &[&[0], &length[..], &message].concat()).await;
    }

    /// The next frame of this kind; `None` at the end.
    pub(crate) async fn next(&mut self, kind: u8) -> Option<Vec<u8>> {
        loop {
            let mut head = [0; 9];
            self.0.read_exact(&mut head).await.ok()?;
            let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
            self.0.read_exact(&mut payload).await.ok()?;
            if head[3] == kind {
                return Some(payload);
            }
        }
    }
}
