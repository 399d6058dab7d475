//! gRPC's five-byte frames: one in a unary body, many in a stream.
//!
//! Owns: the framing. Must not know: a message's content.
//! Invariants: a compressed frame is recognised, and never inflated here (see `inflate`). A reader holds at
//! most one unfinished message of `max` bytes and the rest of the same chunk. A message within a single chunk
//! is not copied.
//!
//! <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::encoding::Encoding;
use crate::refusal::Refusal;

/// Bytes before each message: a flag and the length, big-endian.
pub const PREFIX: usize = 5;

/// The longest piece of bytes given to a client's connection at once: less than a frame of HTTP/2, and the
/// largest size for which jemalloc adds no page of its own.
pub const PIECE: usize = 14 * 1024;

/// A fault in a body's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameFault {
    /// The message is compressed, against the call's encoding.
    #[error("compressed frame")]
    Compressed,
    /// The flag is neither 0 nor 1.
    #[error("unknown frame flag {0}")]
    UnknownFlag(u8),
    /// The prefix announces more than the limit.
    #[error("frame of {got} bytes, at most {max} are taken")]
    TooLarge {
        /// The announced length.
        got: usize,
        /// The limit.
        max: usize,
    },
    /// The body ends within a frame, or before a required frame.
    #[error("body ends within a frame")]
    Incomplete,
    /// Bytes after the single frame of a unary body. etcd would answer the first frame and ignore the rest.
    #[error("bytes after the only frame")]
    Trailing,
}

impl FrameFault {
    /// Returns the refusal for the client. `encoding` is the client's `grpc-encoding`: grpc-go's answer to a
    /// compressed frame depends on the encoding.
    #[must_use]
    pub fn refusal(self, encoding: Option<&str>) -> Refusal {
        match self {
            Self::Compressed => match encoding {
                None | Some("" | "identity") => Refusal::COMPRESSED_WITHOUT_ENCODING,
                Some(encoding) => Refusal::compressed(encoding),
            },
            Self::UnknownFlag(flag) => Refusal::unknown_frame_flag(flag),
            Self::TooLarge { got, max } => Refusal::too_large(got, max),
            Self::Incomplete => Refusal::not_canonical("the body ends within a frame"),
            Self::Trailing => Refusal::not_canonical("bytes after the only frame"),
        }
    }
}

/// The content of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// The message.
    Plain(Bytes),
    /// The message, compressed with gzip.
    Gzip(Bytes),
}

/// Returns the message of a unary body: exactly one uncompressed frame and no further byte. Not copied.
///
/// # Errors
/// Every fault but `TooLarge`: a caller gathering the body checks [`announced`] before.
pub fn unary(body: &Bytes) -> Result<Bytes, FrameFault> {
    match unary_payload(body, Encoding::Identity)? {
        Payload::Plain(message) => Ok(message),
        Payload::Gzip(_) => Err(FrameFault::Compressed),
    }
}

/// Returns the payload of a unary body of exactly one frame. Not copied.
///
/// # Errors
/// As [`unary`], but a compressed frame is a fault only if `encoding` forbids compression.
pub fn unary_payload(body: &Bytes, encoding: Encoding) -> Result<Payload, FrameFault> {
    let (flag, length) = prefix(body, encoding)?.ok_or(FrameFault::Incomplete)?;
    match (body.len() - PREFIX).cmp(&length) {
        std::cmp::Ordering::Less => Err(FrameFault::Incomplete),
        std::cmp::Ordering::Equal => Ok(flag.payload(body.slice(PREFIX..))),
        std::cmp::Ordering::Greater => Err(FrameFault::Trailing),
    }
}

/// Returns the length announced by the first frame of `body`, once its prefix is complete. A caller gathering
/// the body can refuse by the length before holding the bytes.
#[must_use]
pub fn announced(body: &[u8]) -> Option<usize> {
    let length = body.get(1..PREFIX)?.try_into().ok().map(u32::from_be_bytes)?;
    usize::try_from(length).ok()
}

/// Returns the message in a frame.
///
/// # Panics
/// If `message` has 4 GiB or more, impossible for a gRPC message.
#[must_use]
pub fn encode(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(PREFIX + message.len());
    encode_into(&mut frame, message);
    frame.freeze()
}

/// Appends the message in a frame.
///
/// # Panics
/// If `message` has 4 GiB or more, impossible for a gRPC message.
pub fn encode_into(buffer: &mut BytesMut, message: &[u8]) {
    buffer.reserve(PREFIX + message.len());
    buffer.put_slice(&prefix_of(message.len()));
    buffer.put_slice(message);
}

/// Writes the prefix of an uncompressed frame over the first [`PREFIX`] bytes of `frame`; the message
/// follows.
///
/// # Panics
/// If the message has 4 GiB or more, or `frame` is shorter than a prefix.
pub fn write_prefix(frame: &mut [u8]) {
    let prefix = prefix_of(frame.len() - PREFIX);
    frame[..PREFIX].copy_from_slice(&prefix);
}

/// Cuts bytes into pieces of at most [`PIECE`] bytes. Each piece has memory of its own: the memory of a piece
/// is free once the piece was sent, while a slice would keep the whole.
#[must_use]
pub fn pieces(bytes: Bytes) -> VecDeque<Bytes> {
    if bytes.len() <= PIECE {
        return [bytes].into();
    }
    bytes.chunks(PIECE).map(Bytes::copy_from_slice).collect()
}

fn prefix_of(length: usize) -> [u8; PREFIX] {
    let length = u32::try_from(length).expect("a message is below 4 GiB: it came in a frame or is ours");
    let [a, b, c, d] = length.to_be_bytes();
    [0, a, b, c, d]
}

/// The way to the end of the current message, in a body that is passed on without a look at its messages.
#[derive(Debug, Default)]
pub struct MessageBorder {
    /// The beginning of a prefix.
    prefix: [u8; PREFIX],
    known: usize,
    /// Bytes of the message to come.
    left: usize,
}

impl MessageBorder {
    /// True between two messages.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.known == 0 && self.left == 0
    }

    /// Bytes missing of the current message; 0 while its prefix is incomplete.
    #[must_use]
    pub fn left(&self) -> usize {
        self.left
    }

    /// Passes `bytes` up to the next border, and returns the number of bytes passed.
    pub fn advance(&mut self, bytes: &[u8]) -> usize {
        let mut passed = 0;
        if self.left == 0 {
            passed = bytes.len().min(PREFIX - self.known);
            self.prefix[self.known..][..passed].copy_from_slice(&bytes[..passed]);
            self.known += passed;
            if self.known < PREFIX {
                return passed;
            }
            self.known = 0;
            self.left = announced(&self.prefix).unwrap_or_default();
        }
        let more = self.left.min(bytes.len() - passed);
        self.left -= more;
        passed + more
    }

    /// Passes all `bytes`.
    pub fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            bytes = &bytes[self.advance(bytes)..];
        }
    }
}

/// Splits the chunks of a streaming body into messages.
///
/// As an iterator, the reader yields complete messages: `None` means "not yet", and messages may follow after
/// the next [`push`](Self::push). After a fault the reader yields the same fault for ever.
#[derive(Debug)]
pub struct FrameReader {
    max: usize,
    encoding: Encoding,
    /// The unread rest of the newest chunk, while `pending` is empty.
    chunk: Bytes,
    /// The beginning of a frame spanning chunks, and later bytes. While not empty, `chunk` is empty.
    pending: BytesMut,
    fault: Option<FrameFault>,
}

impl FrameReader {
    /// Creates a reader of uncompressed messages of up to `max` bytes.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self::with_encoding(max, Encoding::Identity)
    }

    /// Creates a reader of payloads of up to `max` bytes, compressed or not as `encoding` allows: see
    /// [`next_payload`](Self::next_payload).
    #[must_use]
    pub fn with_encoding(max: usize, encoding: Encoding) -> Self {
        Self { max, encoding, chunk: Bytes::new(), pending: BytesMut::new(), fault: None }
    }

    /// Takes the next chunk. Read all messages before the next push, or messages pile up.
    pub fn push(&mut self, chunk: Bytes) {
        if self.fault.is_some() {
            return;
        }
        if self.pending.is_empty() && self.chunk.is_empty() {
            self.chunk = chunk;
            return;
        }
        let rest = std::mem::take(&mut self.chunk);
        if !rest.is_empty() {
            // The rest begins a frame, perhaps with its length known already.
            let frame = announced(&rest).map_or(0, |length| length.min(self.max));
            self.pending.reserve((PREFIX + frame).max(rest.len() + chunk.len()));
            self.pending.extend_from_slice(&rest);
        }
        self.pending.extend_from_slice(&chunk);
    }

    /// Returns the number of bytes held in unfinished or unread frames.
    #[must_use]
    pub fn held(&self) -> usize {
        self.chunk.len() + self.pending.len()
    }

    /// Checks for an end between frames, with no unfinished frame held.
    ///
    /// # Errors
    /// The earlier fault, or `Incomplete`.
    pub fn finish(&self) -> Result<(), FrameFault> {
        match self.fault {
            Some(fault) => Err(fault),
            None if self.chunk.is_empty() && self.pending.is_empty() => Ok(()),
            None => Err(FrameFault::Incomplete),
        }
    }

    /// Returns the payload of the next complete frame: the iterator's counterpart for calls with an encoding.
    pub fn next_payload(&mut self) -> Option<Result<Payload, FrameFault>> {
        if let Some(fault) = self.fault {
            return Some(Err(fault));
        }
        let taken = self.take();
        if let Err(fault) = taken {
            self.fail(fault);
        }
        taken.transpose()
    }

    fn fail(&mut self, fault: FrameFault) {
        self.fault = Some(fault);
        self.chunk = Bytes::new();
        self.pending = BytesMut::new();
    }

    fn take(&mut self) -> Result<Option<Payload>, FrameFault> {
        let buffered: &[u8] = if self.pending.is_empty() { &self.chunk } else { &self.pending };
        let Some((flag, length)) = prefix(buffered, self.encoding)? else { return Ok(None) };
        if length > self.max {
            return Err(FrameFault::TooLarge { got: length, max: self.max });
        }
        if buffered.len() - PREFIX < length {
            return Ok(None);
        }
        if self.pending.is_empty() {
            self.chunk.advance(PREFIX);
            return Ok(Some(flag.payload(self.chunk.split_to(length))));
        }
        self.pending.advance(PREFIX);
        if self.pending.len() == length {
            // Given away whole: an idle stream keeps no memory of a large message.
            return Ok(Some(flag.payload(std::mem::take(&mut self.pending).freeze())));
        }
        Ok(Some(flag.payload(self.pending.split_to(length).freeze())))
    }
}

impl Iterator for FrameReader {
    type Item = Result<Bytes, FrameFault>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.next_payload()?.and_then(|payload| match payload {
            Payload::Plain(message) => Ok(message),
            Payload::Gzip(_) => {
                self.fail(FrameFault::Compressed);
                Err(FrameFault::Compressed)
            }
        }))
    }
}

/// The first byte of a frame.
#[derive(Clone, Copy)]
enum Flag {
    Plain,
    Compressed,
}

impl Flag {
    fn payload(self, bytes: Bytes) -> Payload {
        match self {
            Self::Plain => Payload::Plain(bytes),
            Self::Compressed => Payload::Gzip(bytes),
        }
    }
}

/// Returns the flag and the announced length, `None` while the prefix is incomplete. A wrong flag is a fault
/// as soon as the flag is read.
fn prefix(body: &[u8], encoding: Encoding) -> Result<Option<(Flag, usize)>, FrameFault> {
    let flag = match body.first() {
        None | Some(0) => Flag::Plain,
        Some(1) if encoding == Encoding::Gzip => Flag::Compressed,
        Some(1) => return Err(FrameFault::Compressed),
        Some(&flag) => return Err(FrameFault::UnknownFlag(flag)),
    };
    Ok(announced(body).map(|length| (flag, length)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::refusal::Code;

    #[test]
    fn the_border_of_messages_is_found_in_any_cutting() {
        let lengths = [0, 3, 1, 0, 40];
        let body: Vec<u8> = lengths.iter().flat_map(|length| encode(&vec![7; *length])).collect();
        let mut borders = vec![0];
        borders.extend(lengths.iter().scan(0, |at, length| {
            *at += PREFIX + length;
            Some(*at)
        }));
        for cut in 0..=body.len() {
            let mut border = MessageBorder::default();
            border.pass(&body[..cut]);
            assert_eq!(border.is_reached(), borders.contains(&cut), "{cut}");
            let mut at = cut;
            // A byte at a time, up to the next border.
            while !border.is_reached() {
                at += border.advance(&body[at..=at]);
            }
            assert_eq!(Some(&at), borders.iter().find(|border| **border >= cut), "{cut}");
        }
    }

    #[test]
    fn pieces_are_the_bytes_in_order_and_share_no_memory() {
        for length in [0, 1, PIECE, PIECE + 1, 3 * PIECE] {
            let whole: Vec<u8> = (0..=255).cycle().take(length).collect();
            let cut = pieces(whole.clone().into());
            assert_eq!(cut.len(), length.div_ceil(PIECE).max(1));
            assert!(cut.len() == 1 || cut.iter().all(Bytes::is_unique));
            assert_eq!(cut.iter().flatten().copied().collect::<Vec<u8>>(), whole);
        }
    }

    #[test]
    fn a_unary_body_is_exactly_one_frame() {
        let read = |body: &'static [u8]| unary(&Bytes::from_static(body));
        assert_eq!(read(b"\0\0\0\0\x02hi").unwrap(), "hi");
        assert_eq!(read(b"\0\0\0\0\0").unwrap(), "");
        assert_eq!(read(b"\0\0\0\0\0\0\0\0\0\0"), Err(FrameFault::Trailing));
        assert_eq!(read(b"\0\0\0\0\x01hi"), Err(FrameFault::Trailing));
        assert_eq!(read(b"\0\0\0\0\x03hi"), Err(FrameFault::Incomplete));
        assert_eq!(read(b"\0\xff\xff\xff\xffhi"), Err(FrameFault::Incomplete));
        assert_eq!(read(b"\0\0\0"), Err(FrameFault::Incomplete));
        assert_eq!(read(b""), Err(FrameFault::Incomplete));
        assert_eq!(read(b"\x01\0\0\0\x02hi"), Err(FrameFault::Compressed));
        assert_eq!(read(b"\x02\0\0\0\x02hi"), Err(FrameFault::UnknownFlag(2)));
    }

    #[test]
    fn a_message_within_one_chunk_is_not_copied() {
        let chunk = Bytes::from_static(b"\0\0\0\0\x02hi\0\0\0\0\x01!");
        let mut reader = FrameReader::new(10);
        reader.push(chunk.clone());
        let messages: Vec<_> = reader.by_ref().map(Result::unwrap).collect();
        assert_eq!(messages, ["hi", "!"]);
        assert_eq!(messages[0].as_ptr(), chunk[5..].as_ptr());
        assert_eq!(messages[1].as_ptr(), chunk[12..].as_ptr());
        assert_eq!(reader.finish(), Ok(()));
        let whole = unary(&chunk.slice(..7)).unwrap();
        assert_eq!(whole.as_ptr(), chunk[5..].as_ptr());
    }

    #[test]
    fn too_large_is_told_from_the_prefix_alone_and_for_ever() {
        let mut reader = FrameReader::new(4);
        reader.push(Bytes::from_static(b"\0\0\0\0\x05"));
        let fault = FrameFault::TooLarge { got: 5, max: 4 };
        assert_eq!(reader.next(), Some(Err(fault)));
        reader.push(Bytes::from_static(b"\0\0\0\0\x01x"));
        assert_eq!(reader.next(), Some(Err(fault)));
        assert_eq!(reader.finish(), Err(fault));
        assert_eq!(fault.refusal(None).message(), "grpc: received message larger than max (5 vs. 4)");
    }

    #[test]
    fn a_compressed_frame_is_refused_as_grpc_go_refuses_it() {
        let told = |encoding| FrameFault::Compressed.refusal(encoding);
        assert_eq!(told(None).code(), Code::Internal);
        assert_eq!(told(Some("identity")).code(), Code::Internal);
        assert_eq!(told(Some("gzip")).code(), Code::Unimplemented);
        assert_eq!(FrameFault::Trailing.refusal(None).code(), Code::InvalidArgument);
        assert_eq!(FrameFault::Incomplete.refusal(None).code(), Code::InvalidArgument);
    }

    #[test]
    fn a_compressed_frame_is_taken_where_the_encoding_allows_it() {
        let body = Bytes::from_static(b"\x01\0\0\0\x02hi\0\0\0\0\x01!");
        let mut reader = FrameReader::with_encoding(10, Encoding::Gzip);
        reader.push(body.clone());
        assert_eq!(reader.next_payload(), Some(Ok(Payload::Gzip("hi".into()))));
        assert_eq!(reader.next_payload(), Some(Ok(Payload::Plain("!".into()))));
        assert_eq!((reader.next_payload(), reader.finish()), (None, Ok(())));
        // A reader asked for plain messages only keeps reporting the fault.
        let mut reader = FrameReader::with_encoding(10, Encoding::Gzip);
        reader.push(body.clone());
        assert_eq!(reader.next(), Some(Err(FrameFault::Compressed)));
        assert_eq!(reader.next(), Some(Err(FrameFault::Compressed)));
        let payload = |body: Bytes| unary_payload(&body, Encoding::Gzip);
        assert_eq!(payload(body.slice(..7)), Ok(Payload::Gzip("hi".into())));
        assert_eq!(payload(body.slice(..6)), Err(FrameFault::Incomplete));
        assert_eq!(payload(body.clone()), Err(FrameFault::Trailing));
        assert_eq!(payload(body.slice(7..)), Ok(Payload::Plain("!".into())));
        assert_eq!(unary(&body.slice(..7)), Err(FrameFault::Compressed));
    }

    proptest! {
        /// However a stream is cut into chunks, the same messages come out.
        #[test]
        fn messages_survive_any_cutting(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8),
            cuts in prop::collection::vec(1usize..30, 1..200),
        ) {
            let mut wire = BytesMut::new();
            for message in &messages {
                encode_into(&mut wire, message);
            }
            let mut wire = wire.freeze();
            let mut reader = FrameReader::new(40);
            let mut seen = Vec::new();
            let mut cuts = cuts.into_iter().cycle();
            while !wire.is_empty() {
                let cut = cuts.next().unwrap().min(wire.len());
                reader.push(wire.split_to(cut));
                for message in reader.by_ref() {
                    seen.push(message.unwrap().to_vec());
                }
                prop_assert_eq!(
                    reader.finish().is_ok(),
                    reader.chunk.is_empty() && reader.pending.is_empty()
                );
            }
            prop_assert_eq!(seen, messages);
            prop_assert_eq!(reader.finish(), Ok(()));
        }

        #[test]
        fn any_bytes_are_read(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..20),
        ) {
            let mut reader = FrameReader::new(64);
            for chunk in chunks {
                let chunk = Bytes::from(chunk);
                let _either = unary(&chunk);
                reader.push(chunk);
                while let Some(Ok(message)) = reader.next() {
                    prop_assert!(message.len() <= 64);
                }
                prop_assert!(reader.pending.len() <= 64 + PREFIX + 20);
            }
        }

        #[test]
        fn what_is_encoded_is_read(message: Vec<u8>) {
            prop_assert_eq!(unary(&encode(&message)).unwrap(), message);
        }
    }
}
