//! Frames: one reading however the bytes arrive, and a refusal for whatever is no frame.

use bytes::{BufMut, Bytes, BytesMut};
use keyward::rpc::frame::{FrameFault, FrameReader, PREFIX, announced, encode, encode_into, unary};

use crate::choices::{Choices, for_any_bytes};

/// For fuzzers.
pub(crate) const TARGETS: [fn(&[u8]); 4] = [
    one_reading_however_it_is_cut,
    unary_is_a_stream_of_one,
    any_body_is_a_stream_of_one,
    a_fault_is_told_whatever_the_client_calls_its_encoding,
];

/// The largest message that the readers here take.
const MAX: usize = 48;

/// What a reader made of a stream: its messages, and how it ended.
type Reading = (Vec<Bytes>, Result<(), FrameFault>);

fn read<'a>(chunks: impl Iterator<Item = &'a [u8]>, max: usize) -> Reading {
    let mut reader = FrameReader::new(max);
    let mut messages = Vec::new();
    for chunk in chunks {
        reader.push(Bytes::copy_from_slice(chunk));
        while let Some(message) = reader.next() {
            match message {
                Ok(message) => {
                    assert!(message.len() <= max);
                    messages.push(message);
                }
                Err(fault) => {
                    assert_eq!(reader.next(), Some(Err(fault)), "for ever");
                    break;
                }
            }
        }
    }
    (messages, reader.finish())
}

/// Frames, good and bad, and loose bytes.
fn stream(choices: &mut Choices<'_>) -> Bytes {
    let mut wire = BytesMut::new();
    while !choices.is_empty() && wire.len() < 400 {
        match choices.below(12) {
            0 => {
                wire.put_u8(choices.byte());
                wire.put_u32(u32::try_from(choices.number() >> 32).expect("32 bits"));
            }
            1 => wire.put_slice(choices.bytes(9)),
            2 => {
                wire.put_u8(0);
                wire.put_u32(u32::try_from(MAX + choices.below(2)).expect("small"));
                wire.put_bytes(7, MAX);
            }
            3 => encode_into(&mut wire, b""),
            _ => encode_into(&mut wire, choices.bytes(MAX)),
        }
    }
    wire.freeze()
}

/// The first byte says how many of the rest cut the stream that the others make.
fn one_reading_however_it_is_cut(input: &[u8]) {
    let mut choices = Choices::new(input);
    let cuts = choices.bytes(40);
    let wire = stream(&mut choices);
    let whole = read(std::iter::once(&wire[..]), MAX);
    let mut rest = &wire[..];
    let mut sizes = cuts.iter().map(|size| usize::from(*size) % 60).chain(std::iter::repeat(1));
    let pieces = std::iter::from_fn(|| {
        let size = sizes.next().expect("endless").min(rest.len());
        let (piece, left) = rest.split_at(size);
        rest = left;
        (!piece.is_empty() || !left.is_empty()).then_some(piece)
    });
    assert_eq!(read(pieces, MAX), whole);
}

/// A unary body is what a stream of exactly one frame is.
fn unary_is_a_stream_of_one(input: &[u8]) {
    let body = stream(&mut Choices::new(input));
    let (messages, end) = read(std::iter::once(&body[..]), usize::MAX);
    let expected = match (end, &messages[..]) {
        (Ok(()), [only]) => Ok(only.clone()),
        (Err(fault), []) => Err(fault),
        (Ok(()), []) => Err(FrameFault::Incomplete),
        _ => Err(FrameFault::Trailing),
    };
    assert_eq!(unary(&body), expected);
    if let Ok(message) = expected {
        assert_eq!((announced(&body), body.len()), (Some(message.len()), PREFIX + message.len()));
        assert_eq!(encode(&message), body);
    }
}

/// The refusal's text is the member's and the client's words; it must bear any.
fn a_fault_is_told_whatever_the_client_calls_its_encoding(input: &[u8]) {
    let mut choices = Choices::new(input);
    let size = usize::try_from(choices.number()).expect("64 bits");
    let fault = [
        FrameFault::Compressed,
        FrameFault::UnknownFlag(choices.byte()),
        FrameFault::TooLarge { got: size, max: size / 2 },
        FrameFault::Incomplete,
        FrameFault::Trailing,
    ][choices.below(5)];
    let encoding = String::from_utf8_lossy(choices.rest()).into_owned();
    for encoding in [None, Some(&*encoding)] {
        let refusal = fault.refusal(encoding);
        assert!(!refusal.status().is_ok() && refusal.trailers_only().len() == 3, "{refusal:?}");
    }
}

fn any_body_is_a_stream_of_one(input: &[u8]) {
    let reading = read(std::iter::once(input), usize::MAX);
    let whole = unary(&Bytes::copy_from_slice(input));
    assert_eq!(whole.is_ok(), reading.1.is_ok() && reading.0.len() == 1);
}

#[test]
fn however_a_stream_is_cut_its_reading_is_one() {
    for_any_bytes(600, one_reading_however_it_is_cut);
}

#[test]
fn a_unary_body_is_a_stream_of_one_frame() {
    for_any_bytes(200, unary_is_a_stream_of_one);
}

#[test]
fn a_body_of_any_bytes_is_a_stream_of_one_frame_or_refused() {
    for_any_bytes(40, any_body_is_a_stream_of_one);
}

#[test]
fn every_fault_has_a_refusal() {
    for_any_bytes(60, a_fault_is_told_whatever_the_client_calls_its_encoding);
}
