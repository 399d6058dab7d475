//! Decompression of gRPC messages compressed by clients with gzip.
//!
//! Owns: the limit on the inflated size, and the pace. Must not know: a message's content or sender.
//! Invariants: at most one byte past the limit is ever inflated, whatever size the gzip trailer claims. The
//! caller regains control after each step, so a single message cannot occupy its thread.
//!
//! <https://github.com/grpc/grpc/blob/master/doc/compression.md>

use std::io::{self, Read as _};

use bytes::buf::Reader;
use bytes::{Buf as _, Bytes, BytesMut};
use flate2::bufread::{GzDecoder, MultiGzDecoder};

use super::frame::{PREFIX, write_prefix};
use crate::refusal::Refusal;

/// Bytes inflated per step. A smaller message is inflated in a single step, so its decoder (some 45 KiB of
/// state) never waits for further tasks.
const STEP: usize = 64 * 1024;

/// Why a compressed message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InflateFault {
    /// The inflated message is larger than allowed.
    #[error("more than {max} bytes after decompression")]
    TooLarge {
        /// The largest size allowed.
        max: usize,
    },
    /// The message's gzip header is cut off or missing.
    #[error("no gzip header: {0}")]
    Header(&'static str),
    /// The compressed data or its trailer is cut off or corrupt, the checksum is wrong, or the bytes after
    /// the first gzip member are no further member.
    #[error("no gzip data: {0}")]
    Data(&'static str),
}

impl InflateFault {
    /// Returns the refusal for the client, in grpc-go's words as of etcd 3.5.35 and newer.
    #[must_use]
    pub fn refusal(self) -> Refusal {
        match self {
            Self::TooLarge { max } => Refusal::too_large_inflated(max),
            Self::Header(why) => Refusal::not_inflated(&format!("failed to decompress the message: {why}")),
            Self::Data(why) => Refusal::not_inflated(&format!("failed to read decompressed data: {why}")),
        }
    }
}

/// The outcome of a step.
#[derive(Debug, PartialEq, Eq)]
pub enum InflateStep {
    /// More may follow; the number of bytes added.
    Added(usize),
    /// The message is complete: an uncompressed frame, prefix and message.
    Complete(Bytes),
}

/// A compressed message being turned into an uncompressed frame.
pub struct Inflater {
    decoder: MultiGzDecoder<Reader<Bytes>>,
    /// The whole compressed payload, also given to the decoder.
    compressed: Bytes,
    /// Room for the prefix, then the part inflated so far.
    frame: BytesMut,
    max: usize,
}

impl Inflater {
    /// Begins with `compressed`, the payload of a frame with the compressed flag. The inflated message may
    /// have up to `max` bytes.
    #[must_use]
    pub fn new(compressed: Bytes, max: usize) -> Self {
        let frame = BytesMut::zeroed(PREFIX);
        Self { decoder: MultiGzDecoder::new(compressed.clone().reader()), compressed, frame, max }
    }

    /// Inflates up to `STEP` bytes more.
    ///
    /// # Errors
    /// The message is too large, or is not gzip. The inflater is of no use afterwards.
    pub fn step(&mut self) -> Result<InflateStep, InflateFault> {
        if self.compressed.is_empty() {
            return Err(InflateFault::Header("EOF"));
        }
        let before = self.frame.len();
        // One byte past the limit proves the message too large.
        let limit = PREFIX.saturating_add(self.max).saturating_add(1);
        let mut room = STEP.min(limit - before);
        while room > 0 {
            let filled = self.frame.len();
            self.frame.resize(filled + room.min(STEP / 8), 0);
            let read = self.decoder.read(&mut self.frame[filled..]);
            let count = *read.as_ref().unwrap_or(&0);
            self.frame.truncate(filled + count);
            match read {
                Ok(0) => return Ok(InflateStep::Complete(self.complete())),
                Ok(count) => room -= count,
                Err(error) => return Err(self.fault(&error)),
            }
        }
        if self.frame.len() == limit {
            return Err(InflateFault::TooLarge { max: self.max });
        }
        Ok(InflateStep::Added(self.frame.len() - before))
    }

    fn complete(&mut self) -> Bytes {
        let mut frame = std::mem::take(&mut self.frame);
        write_prefix(&mut frame);
        // A small message does not keep the capacity reserved by a step.
        if frame.capacity() > 2 * frame.len() { Bytes::copy_from_slice(&frame) } else { frame.freeze() }
    }

    /// Maps a decoder error to grpc-go's two texts: for an unreadable first header, and for every later
    /// fault. The decoder exposes no header while reading the header of any gzip member, so the first header
    /// is parsed again.
    fn fault(&self, error: &io::Error) -> InflateFault {
        let ended = error.kind() == io::ErrorKind::UnexpectedEof;
        let has_first_header = || GzDecoder::new(&*self.compressed).header().is_some();
        let why = match (self.decoder.header(), ended) {
            (_, true) => "unexpected EOF",
            (None, false) => "gzip: invalid header",
            (Some(_), false) => "gzip: corrupt data",
        };
        if self.decoder.header().is_some() || has_first_header() {
            InflateFault::Data(why)
        } else {
            InflateFault::Header(why)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;
    use crate::refusal::Code;
    use crate::rpc::frame::encode;

    fn gzip(message: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(message).unwrap();
        encoder.finish().unwrap()
    }

    /// Returns the frame or the fault, and the peak of bytes held.
    fn inflated(compressed: &[u8], max: usize) -> (Result<Bytes, InflateFault>, usize) {
        let mut inflater = Inflater::new(Bytes::copy_from_slice(compressed), max);
        let mut most = 0;
        loop {
            let step = inflater.step();
            most = most.max(inflater.frame.len());
            match step {
                Ok(InflateStep::Added(count)) => assert!((1..=STEP).contains(&count)),
                Ok(InflateStep::Complete(frame)) => return (Ok(frame), most),
                Err(fault) => return (Err(fault), most),
            }
        }
    }

    #[test]
    fn a_message_is_inflated_to_a_frame() {
        for message in [&b""[..], b"hi", &[7; STEP], &[7; STEP + 1], &[7; 5 * STEP]] {
            assert_eq!(inflated(&gzip(message), 5 * STEP).0, Ok(encode(message)));
        }
    }

    /// A gzip file may consist of several members, joined by Go's reader.
    #[test]
    fn members_are_joined() {
        let two = [gzip(b"one"), gzip(b"two")].concat();
        assert_eq!(inflated(&two, 6).0, Ok(encode(b"onetwo")));
        assert_eq!(inflated(&two, 5).0, Err(InflateFault::TooLarge { max: 5 }));
    }

    #[test]
    fn a_bomb_is_not_inflated_past_the_limit() {
        let mut bomb = gzip(&vec![0; 64 << 20]);
        for max in [0, 1, STEP - 1, STEP, STEP + 1, 1 << 20] {
            let (fault, most) = inflated(&bomb, max);
            assert_eq!(fault, Err(InflateFault::TooLarge { max }));
            assert!(most <= PREFIX + max + 1, "{most} bytes were held for a limit of {max}");
        }
        // The size claimed by the trailer is not believed.
        let end = bomb.len() - 4;
        bomb[end..].copy_from_slice(&4_u32.to_le_bytes());
        assert_eq!(inflated(&bomb, 100).0, Err(InflateFault::TooLarge { max: 100 }));
    }

    #[test]
    fn the_limit_is_exact() {
        assert_eq!(inflated(&gzip(b"four"), 4).0, Ok(encode(b"four")));
        assert_eq!(inflated(&gzip(b"five!"), 4).0, Err(InflateFault::TooLarge { max: 4 }));
    }

    #[test]
    fn faults_are_told_in_the_words_of_grpc_go() {
        let whole = gzip(b"hello");
        let cut = |by: usize| whole[..whole.len() - by].to_vec();
        let behind = |message: &[u8], rest: &[u8]| [&gzip(message)[..], rest].concat();
        let mut wrong_sum = whole.clone();
        let sum = whole.len() - 8;
        wrong_sum[sum] ^= 1;
        let cases = [
            (b"".to_vec(), "grpc: failed to decompress the message: EOF"),
            (b"hello".to_vec(), "grpc: failed to decompress the message: unexpected EOF"),
            (
                b"hello, this is no gzip".to_vec(),
                "grpc: failed to decompress the message: gzip: invalid header",
            ),
            (cut(9), "grpc: failed to read decompressed data: unexpected EOF"),
            (cut(3), "grpc: failed to read decompressed data: unexpected EOF"),
            (wrong_sum, "grpc: failed to read decompressed data: gzip: corrupt data"),
            // Any bytes after the first member count as data.
            (behind(b"hello", &[0; 20]), "grpc: failed to read decompressed data: gzip: invalid header"),
            (behind(b"", &[0; 20]), "grpc: failed to read decompressed data: gzip: invalid header"),
            (behind(b"hello", &whole[..5]), "grpc: failed to read decompressed data: unexpected EOF"),
        ];
        for (compressed, told) in cases {
            let refusal = inflated(&compressed, 100).0.expect_err("a fault").refusal();
            assert_eq!((refusal.code(), refusal.message()), (Code::Internal, told));
        }
        let large = InflateFault::TooLarge { max: 4 }.refusal();
        let told = "grpc: received message after decompression larger than max 4";
        assert_eq!((large.code(), large.message()), (Code::ResourceExhausted, told));
    }

    proptest! {
        #[test]
        fn what_is_compressed_is_inflated(message: Vec<u8>) {
            prop_assert_eq!(inflated(&gzip(&message), message.len()).0, Ok(encode(&message)));
        }

        #[test]
        fn any_bytes_are_inflated_or_refused(bytes: Vec<u8>, at: usize, byte: u8) {
            let (_either, most) = inflated(&bytes, 40);
            prop_assert!(most <= PREFIX + 41);
            let mut changed = gzip(&bytes);
            let at = at % changed.len();
            changed[at] = byte;
            let (either, most) = inflated(&changed, 40);
            prop_assert!(most <= PREFIX + 41);
            prop_assert!(either.is_err() || either.is_ok_and(|frame| frame.len() <= PREFIX + 40));
        }
    }
}
