//! A raw connection for an attacker, of HTTP/2, HTTP/1.1 or WebSocket: frames are written as they are given.
//!
//! Owns: the socket and the encoding of frames. Must not know which attack it serves, nor who is attacked. Invariants: writes are
//! blocking and bounded by a time limit, so that an attacker whose victim stops reading ends with its attack; the encoder uses no
//! library, so that it can also write frames that no library writes.

use std::io::{ErrorKind, Read as _, Result, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

/// A blocked write is given up after this time; the attack then looks at its stop flag.
const WRITE_LIMIT: Duration = Duration::from_millis(200);
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Frame types of RFC 9113, section 6.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;

/// Frame flags.
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// The largest frame payload that a receiver must take before it says otherwise.
const MAX_FRAME: usize = 16_384;

/// Error code CANCEL.
const CANCEL: u32 = 8;

/// Whether the attacker reads answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// A thread reads and discards everything.
    Everything,
    /// Nothing is ever read: answers fill the flow-control windows and then the socket.
    Nothing,
}

/// One attacking connection.
pub(crate) struct Connection {
    socket: TcpStream,
    next_stream: u32,
    out: Vec<u8>,
}

impl Connection {
    /// Connects and sends the HTTP/2 preface with empty SETTINGS: default windows of 65,535 bytes.
    pub(crate) fn open(address: SocketAddr, reading: Reading) -> Result<Connection> {
        let mut connection = Self::connect(address, reading)?;
        connection.out.extend_from_slice(PREFACE);
        connection.frame(SETTINGS, 0, 0, &[]);
        connection.flush()?;
        Ok(connection)
    }

    fn connect(address: SocketAddr, reading: Reading) -> Result<Connection> {
        let socket = TcpStream::connect_timeout(&address, Duration::from_secs(2))?;
        socket.set_nodelay(true)?;
        socket.set_write_timeout(Some(WRITE_LIMIT))?;
        if reading == Reading::Everything {
            let mut reader = socket.try_clone()?;
            thread::spawn(move || {
                let mut discarded = vec![0; 64 * 1024];
                while reader.read(&mut discarded).is_ok_and(|count| count > 0) {}
            });
        }
        Ok(Connection { socket, next_stream: 1, out: Vec::new() })
    }

    /// Connects and opens a WebSocket on a path: what is written then are its frames.
    pub(crate) fn web_socket(address: SocketAddr, path: &str, reading: Reading) -> Result<Connection> {
        Self::http1(
            address,
            &format!(
                "GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
                 Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            ),
            reading,
        )
    }

    /// Connects and sends a request of HTTP/1.1.
    pub(crate) fn http1(address: SocketAddr, request: &str, reading: Reading) -> Result<Connection> {
        let mut connection = Self::connect(address, reading)?;
        connection.out.extend_from_slice(request.as_bytes());
        connection.flush()?;
        Ok(connection)
    }

    /// A frame of a WebSocket, with a mask of zeros.
    pub(crate) fn web_socket_frame(&mut self, first: u8, payload: &[u8]) {
        self.out.extend_from_slice(&[first, 0xff]);
        self.out.extend_from_slice(&(payload.len() as u64).to_be_bytes());
        self.out.extend_from_slice(&[0; 4]);
        self.out.extend_from_slice(payload);
    }

    /// A frame of a WebSocket without a byte: the shortest there is.
    pub(crate) fn empty_web_socket_frame(&mut self, first: u8) {
        self.out.extend_from_slice(&[first, 0x80, 0, 0, 0, 0]);
    }

    /// The body of a request, as it is.
    pub(crate) fn data(&mut self, stream: u32, body: &[u8]) {
        self.frame(DATA, END_STREAM, stream, body);
    }

    /// A new stream's HEADERS, cut into CONTINUATION frames where the block is larger than a frame. Returns the stream.
    pub(crate) fn headers(&mut self, block: &[u8], end_stream: bool) -> u32 {
        let stream = self.next_stream;
        self.next_stream += 2;
        let mut chunks = block.chunks(MAX_FRAME).peekable();
        let mut kind = HEADERS;
        while let Some(chunk) = chunks.next() {
            let mut flags = if chunks.peek().is_none() { END_HEADERS } else { 0 };
            if kind == HEADERS && end_stream {
                flags |= END_STREAM;
            }
            self.frame(kind, flags, stream, chunk);
            kind = CONTINUATION;
        }
        stream
    }

    /// One gRPC message on a stream.
    pub(crate) fn message(&mut self, stream: u32, message: &[u8], end_stream: bool) {
        let mut body = vec![0];
        body.extend_from_slice(&u32::try_from(message.len()).expect("a small message").to_be_bytes());
        body.extend_from_slice(message);
        self.frame(DATA, if end_stream { END_STREAM } else { 0 }, stream, &body);
    }

    /// RST_STREAM with the code CANCEL.
    pub(crate) fn reset(&mut self, stream: u32) {
        self.frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes());
    }

    /// A PING.
    pub(crate) fn ping(&mut self) {
        self.frame(PING, 0, 0, &[7; 8]);
    }

    /// A SETTINGS frame that changes nothing: SETTINGS_MAX_FRAME_SIZE with its default.
    pub(crate) fn settings(&mut self) {
        self.frame(SETTINGS, 0, 0, &[0, 5, 0, 0, 0x40, 0]);
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).expect("a frame is small").to_be_bytes();
        self.out.extend_from_slice(&length[1..]);
        self.out.extend_from_slice(&[kind, flags]);
        self.out.extend_from_slice(&stream.to_be_bytes());
        self.out.extend_from_slice(payload);
    }

    /// How many bytes wait to be written.
    pub(crate) fn waiting(&self) -> usize {
        self.out.len()
    }

    /// Writes what waits, as far as the other side takes it within the limit; the rest stays.
    pub(crate) fn flush(&mut self) -> Result<()> {
        while !self.out.is_empty() {
            match self.socket.write(&self.out) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => drop(self.out.drain(..count)),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether the stream ids of this connection are used up, or nearly.
    pub(crate) fn is_used_up(&self) -> bool {
        self.next_stream > (1 << 31) - 3
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Ends the reading thread too. An error means that the connection is gone already.
        drop(self.socket.shutdown(Shutdown::Both));
    }
}

/// A header block in HPACK's plainest form: literals that no table remembers, without Huffman coding.
#[derive(Clone, Default)]
pub(crate) struct Block(Vec<u8>);

impl Block {
    /// The fields of every JSON request.
    pub(crate) fn json(path: &str) -> Block {
        let fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "127.0.0.1"),
            ("content-type", "application/json"),
        ];
        fields.iter().fold(Block::default(), |block, (name, value)| block.with(name, value))
    }

    /// The fields of every gRPC request.
    pub(crate) fn grpc(path: &str, authority: &str) -> Block {
        let fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ];
        fields.iter().fold(Block::default(), |block, (name, value)| block.with(name, value))
    }

    /// One more literal field.
    pub(crate) fn with(mut self, name: &str, value: &str) -> Block {
        self.0.push(0);
        self.text(name);
        self.text(value);
        self
    }

    /// One more literal field, which both sides add to their table.
    pub(crate) fn remembering(mut self, name: &str, value: &str) -> Block {
        self.0.push(0x40);
        self.text(name);
        self.text(value);
        self
    }

    /// So many references to the field that was added to the table last: a byte each.
    pub(crate) fn repeating(mut self, count: usize) -> Block {
        self.0.resize(self.0.len() + count, 0x80 | 62);
        self
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn text(&mut self, text: &str) {
        self.integer(text.len());
        self.0.extend_from_slice(text.as_bytes());
    }

    /// An integer with a prefix of seven bits (RFC 7541, section 5.1).
    fn integer(&mut self, value: usize) {
        if value < 127 {
            self.0.push(u8::try_from(value).expect("it is below 127"));
            return;
        }
        self.0.push(127);
        let mut rest = value - 127;
        while rest >= 128 {
            self.0.push(u8::try_from(rest % 128).expect("it is below 128") | 128);
            rest /= 128;
        }
        self.0.push(u8::try_from(rest).expect("it is below 128"));
    }
}
