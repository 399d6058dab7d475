//! One end of an in-memory connection, and HTTP/2 frames on it, without an HTTP/2 library.
//!
//! Owns: the bytes received and the bytes to send, the layout of frames, and header blocks without Huffman coding
//! (RFC 7541). Must not know: gRPC, or which end is the client. Every frame costs a few dozen instructions, so that
//! the measured instructions are Keyward's.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

/// Bytes before a frame's payload.
const FRAME_HEAD: usize = 9;
/// The client's first bytes (RFC 9113, section 3.4).
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The largest window: neither end of a measurement has to send a WINDOW_UPDATE.
const LARGEST_WINDOW: u32 = 0x7fff_ffff;
/// HTTP/2's window at the beginning of a connection.
const FIRST_WINDOW: u32 = 65_535;
/// Bytes in flight on a pipe, and bytes received but not yet read: as a socket's buffer.
pub(crate) const PIPE: usize = 256 * 1024;

/// A received frame.
pub(crate) struct Http2Frame<'a> {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: &'a [u8],
}

impl Http2Frame<'_> {
    pub(crate) fn ends_stream(&self) -> bool {
        matches!(self.kind, DATA | HEADERS) && self.flags & END_STREAM != 0
    }
}

/// Received bytes. Frames are read in place.
struct ReceivedBytes {
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
}

impl ReceivedBytes {
    /// Skips the client's preface.
    fn skip_preface(&mut self) -> bool {
        let has_come = self.end - self.begin >= PREFACE.len();
        if has_come {
            assert_eq!(&self.buffer[self.begin..self.begin + PREFACE.len()], PREFACE);
            self.begin += PREFACE.len();
        }
        has_come
    }

    fn next(&mut self) -> Option<Http2Frame<'_>> {
        let received = &self.buffer[self.begin..self.end];
        let (head, rest) = received.split_at_checked(FRAME_HEAD)?;
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let payload = rest.get(..length)?;
        self.begin += FRAME_HEAD + length;
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & LARGEST_WINDOW;
        Some(Http2Frame { kind: head[3], flags: head[4], stream, payload })
    }

    /// Makes room behind the received bytes.
    fn make_room(&mut self) {
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        assert!(self.end < self.buffer.len(), "frames are smaller than the buffer");
    }
}

/// One end of a connection.
pub(crate) struct Http2Pipe {
    stream: DuplexStream,
    received: ReceivedBytes,
    /// Bytes to send.
    pub(crate) outgoing: Vec<u8>,
    /// Bytes at the front of `outgoing` that were sent already.
    sent: usize,
    awaits_preface: bool,
}

impl Http2Pipe {
    /// The client's end.
    pub(crate) fn of_client(stream: DuplexStream) -> Self {
        Self::new(stream, PREFACE, false)
    }

    /// The server's end.
    pub(crate) fn of_server(stream: DuplexStream) -> Self {
        Self::new(stream, &[], true)
    }

    fn new(stream: DuplexStream, first: &[u8], awaits_preface: bool) -> Self {
        let mut outgoing = first.to_vec();
        // SETTINGS_INITIAL_WINDOW_SIZE is setting 4.
        let [a, b, c, d] = LARGEST_WINDOW.to_be_bytes();
        append_frame(&mut outgoing, SETTINGS, 0, 0, &[0, 4, a, b, c, d]);
        append_frame(&mut outgoing, WINDOW_UPDATE, 0, 0, &(LARGEST_WINDOW - FIRST_WINDOW).to_be_bytes());
        let received = ReceivedBytes { buffer: vec![0; PIPE], begin: 0, end: 0 };
        Self { stream, received, outgoing, sent: 0, awaits_preface }
    }

    /// Sends the outgoing bytes, and receives until the pipe is empty. `on_frame` gets every frame of a stream, and
    /// the outgoing bytes for its answer.
    pub(crate) fn poll_frames(
        &mut self,
        cx: &mut Context<'_>,
        mut on_frame: impl FnMut(Http2Frame<'_>, &mut Vec<u8>),
    ) {
        loop {
            self.poll_send(cx);
            if !self.poll_receive(cx) {
                return;
            }
            if self.awaits_preface && self.received.skip_preface() {
                self.awaits_preface = false;
            }
            while let Some(frame) = self.received.next().filter(|_| !self.awaits_preface) {
                match frame.kind {
                    SETTINGS if frame.flags & ACK == 0 => {
                        append_frame(&mut self.outgoing, SETTINGS, ACK, 0, &[]);
                    }
                    PING if frame.flags & ACK == 0 => {
                        append_frame(&mut self.outgoing, PING, ACK, 0, frame.payload);
                    }
                    SETTINGS | PING | WINDOW_UPDATE => {}
                    RST_STREAM | GOAWAY => {
                        unreachable!("frame {} on stream {}: {:?}", frame.kind, frame.stream, frame.payload);
                    }
                    _ => on_frame(frame, &mut self.outgoing),
                }
            }
        }
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) {
        while self.sent < self.outgoing.len() {
            let unsent = &self.outgoing[self.sent..];
            let Poll::Ready(sent) = Pin::new(&mut self.stream).poll_write(cx, unsent) else { return };
            self.sent += sent.expect("the pipe is open");
        }
        self.sent = 0;
        self.outgoing.clear();
    }

    /// True if bytes were received.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> bool {
        self.received.make_room();
        let ReceivedBytes { buffer, end, .. } = &mut self.received;
        let mut room = ReadBuf::new(&mut buffer[*end..]);
        let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, &mut room) else { return false };
        read.expect("the pipe is open");
        let length = room.filled().len();
        assert!(length > 0, "the peer closed the connection");
        *end += length;
        true
    }
}

/// Frames encoded once, sent on many streams.
#[derive(Default)]
pub(crate) struct FrameTemplate {
    bytes: Vec<u8>,
    /// Where the frames begin.
    frames: Vec<usize>,
}

impl FrameTemplate {
    /// Adds a frame.
    pub(crate) fn with(mut self, kind: u8, flags: u8, payload: &[u8]) -> Self {
        self.frames.push(self.bytes.len());
        append_frame(&mut self.bytes, kind, flags, 0, payload);
        self
    }

    /// Appends the frames, on `stream`, to `outgoing`.
    pub(crate) fn append(&self, stream: u32, outgoing: &mut Vec<u8>) {
        let begin = outgoing.len();
        outgoing.extend_from_slice(&self.bytes);
        for frame in &self.frames {
            outgoing[begin + frame + 5..begin + frame + FRAME_HEAD].copy_from_slice(&stream.to_be_bytes());
        }
    }
}

/// Appends a frame to `outgoing`.
pub(crate) fn append_frame(outgoing: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("a frame is small").to_be_bytes();
    outgoing.extend_from_slice(&length[1..]);
    outgoing.extend_from_slice(&[kind, flags]);
    outgoing.extend_from_slice(&stream.to_be_bytes());
    outgoing.extend_from_slice(payload);
}

/// What a header block does with a field (RFC 7541, section 6.2).
#[derive(Clone, Copy)]
pub(crate) enum FieldIndexing {
    /// The receiver keeps the field in its table.
    Kept,
    /// The receiver keeps no copy.
    NotKept,
}

/// Appends a field, in full, to a header block.
pub(crate) fn append_field(block: &mut Vec<u8>, indexing: FieldIndexing, name: &str, value: &str) {
    block.push(match indexing {
        FieldIndexing::Kept => 0x40,
        FieldIndexing::NotKept => 0,
    });
    for text in [name, value] {
        append_length(block, text.len());
        block.extend_from_slice(text.as_bytes());
    }
}

/// Appends fields kept by the receiver. `fields` are all fields that the sender ever had kept, in order.
pub(crate) fn append_kept(block: &mut Vec<u8>, fields: usize) {
    // The table's newest field has the index 62.
    let indices = (0..fields).map(|field| u8::try_from(62 + fields - 1 - field).expect("few fields"));
    block.extend(indices.map(|index| 0x80 | index));
}

/// A length with a prefix of 7 bits (RFC 7541, section 5.1).
fn append_length(block: &mut Vec<u8>, length: usize) {
    let low = |length: usize| u8::try_from(length & 0x7f).expect("seven bits");
    if length < 127 {
        return block.push(low(length));
    }
    block.push(127);
    let mut rest = length - 127;
    while rest >= 128 {
        block.push(0x80 | low(rest));
        rest >>= 7;
    }
    block.push(low(rest));
}
