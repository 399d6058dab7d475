//! Reading protobuf field by field, and writing a few fields, without a schema and without copying.
//!
//! Owns: the wire format. Must not know: the message's type.
//! Invariants: a byte string has a single reading. Tags have at most 32 bits, varints at most 64 bits and ten
//! bytes, groups are absent, lengths lie within the body; every deviation is a fault, since decoders differ
//! on deviations (gogo/protobuf reads field 2^32+1 as field 1, and drops the bits of a varint past the 64th).
//! A varint may be longer than needed: every decoder reads the same value. No input panics.
//!
//! <https://protobuf.dev/programming-guides/encoding/>

use std::ops::Range;

use bytes::{BufMut, BytesMut};

/// The largest field number.
pub const MAX_NUMBER: u32 = (1 << 29) - 1;

const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const LENGTH: u8 = 2;
const FIXED32: u8 = 5;

/// Bytes without a single reading as protobuf, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ScanFault(pub &'static str);

/// A field in a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireField<'a> {
    /// The field's number, from 1 to [`MAX_NUMBER`].
    pub number: u32,
    /// The field's value, by wire type.
    pub value: WireValue<'a>,
    /// The byte range of tag and value in the body.
    pub range: Range<usize>,
}

/// A field's value by wire type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireValue<'a> {
    /// Wire type 0: integers, enums, bools.
    Varint(u64),
    /// Wire type 1.
    Fixed64(u64),
    /// Wire type 2: bytes, text, messages, packed scalars.
    Bytes(&'a [u8]),
    /// Wire type 5.
    Fixed32(u32),
}

impl<'a> WireValue<'a> {
    /// Returns the bytes of a length-delimited value.
    #[must_use]
    pub fn bytes(self) -> Option<&'a [u8]> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Returns a varint as the signed number meant by `int64` and `int32` fields.
    #[must_use]
    pub fn signed(self) -> Option<i64> {
        match self {
            Self::Varint(value) => Some(value.cast_signed()),
            _ => None,
        }
    }
}

/// The fields of a body, in order. Ends after the first fault.
#[derive(Clone, Debug)]
pub struct WireFields<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> WireFields<'a> {
    /// Reads `body`, a message without frame or length.
    #[must_use]
    pub fn new(body: &'a [u8]) -> Self {
        Self { body, at: 0 }
    }

    #[inline]
    fn field(&mut self) -> Result<WireField<'a>, ScanFault> {
        let start = self.at;
        let tag = u32::try_from(self.varint()?).map_err(|_| ScanFault("a tag of more than 32 bits"))?;
        let number = tag >> 3;
        if number == 0 {
            return Err(ScanFault("field number 0"));
        }
        let value = match tag.to_le_bytes()[0] & 7 {
            VARINT => WireValue::Varint(self.varint()?),
            FIXED64 => WireValue::Fixed64(u64::from_le_bytes(self.array()?)),
            LENGTH => {
                let length = usize::try_from(self.varint()?).map_err(|_| TRUNCATED)?;
                WireValue::Bytes(self.bytes(length)?)
            }
            FIXED32 => WireValue::Fixed32(u32::from_le_bytes(self.array()?)),
            _ => return Err(ScanFault("a group or an unknown wire type")),
        };
        Ok(WireField { number, value, range: start..self.at })
    }

    #[inline]
    fn varint(&mut self) -> Result<u64, ScanFault> {
        let (value, length) = varint(&self.body[self.at..])?;
        self.at += length;
        Ok(value)
    }

    #[inline]
    fn bytes(&mut self, length: usize) -> Result<&'a [u8], ScanFault> {
        let bytes = self.body[self.at..].get(..length).ok_or(TRUNCATED)?;
        self.at += length;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ScanFault> {
        self.bytes(N)?.try_into().map_err(|_| TRUNCATED)
    }
}

impl<'a> Iterator for WireFields<'a> {
    type Item = Result<WireField<'a>, ScanFault>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.body.len() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.at = self.body.len();
        }
        Some(field)
    }
}

const TRUNCATED: ScanFault = ScanFault("the body ends within a field");

/// Reads the varint at the beginning of `bytes`. Returns the value and its length in bytes.
///
/// # Errors
/// The varint is cut off, or has more than 64 bits or ten bytes.
#[inline]
pub fn varint(bytes: &[u8]) -> Result<(u64, usize), ScanFault> {
    // Nearly all tags, lengths and flags.
    match bytes.first() {
        Some(&byte) if byte < 0x80 => Ok((u64::from(byte), 1)),
        _ => long_varint(bytes),
    }
}

fn long_varint(bytes: &[u8]) -> Result<(u64, usize), ScanFault> {
    let mut value = 0;
    for (at, &byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            return if at == 9 && byte > 1 { Err(LONG) } else { Ok((value, at + 1)) };
        }
    }
    Err(if bytes.len() < 10 { TRUNCATED } else { LONG })
}

const LONG: ScanFault = ScanFault("a varint of more than 64 bits");

/// Appends a varint field. As in proto3, 0 is not written.
pub fn append_varint_field(out: &mut BytesMut, number: u32, value: u64) {
    if value != 0 {
        append_present_varint(out, number, value);
    }
}

/// Appends a varint field, also if 0: a member of a oneof is present with its default value too.
pub fn append_present_varint(out: &mut BytesMut, number: u32, value: u64) {
    append_tag(out, number, VARINT);
    append_varint(out, value);
}

/// Appends a length-delimited field, also if empty: an empty message differs from an absent message.
pub fn append_bytes_field(out: &mut BytesMut, number: u32, value: &[u8]) {
    append_length(out, number, value.len());
    out.put_slice(value);
}

/// Returns the number of bytes written by [`append_present_varint`].
#[must_use]
pub fn length_of_varint_field(number: u32, value: u64) -> usize {
    varint_length(u64::from(number) << 3) + varint_length(value)
}

/// Returns the number of bytes written by [`append_length`].
#[must_use]
pub fn length_of_prefix(number: u32, length: usize) -> usize {
    varint_length(u64::from(number) << 3) + varint_length(length as u64)
}

fn varint_length(value: u64) -> usize {
    (u64::BITS - (value | 1).leading_zeros()).div_ceil(7) as usize
}

/// Appends the tag and length of a field. The caller appends the `length` bytes next, perhaps in pieces.
pub fn append_length(out: &mut BytesMut, number: u32, length: usize) {
    append_tag(out, number, LENGTH);
    append_varint(out, length as u64);
}

fn append_tag(out: &mut BytesMut, number: u32, wire_type: u8) {
    debug_assert!((1..=MAX_NUMBER).contains(&number), "field number {number}");
    append_varint(out, u64::from(number) << 3 | u64::from(wire_type));
}

/// Appends a varint without a tag: an element of a packed field.
pub fn append_varint(out: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.put_u8(value.to_le_bytes()[0]);
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::{RangeRequest, RequestOp, TxnRequest, request_op::Request};

    fn all(body: &[u8]) -> Result<Vec<(u32, WireValue<'_>)>, ScanFault> {
        WireFields::new(body).map(|field| field.map(|field| (field.number, field.value))).collect()
    }

    #[test]
    fn every_wire_type_is_read() {
        let body = b"\x08\x96\x01\x12\x02hi\x19\x01\0\0\0\0\0\0\0\x25\x02\0\0\0";
        let read = all(body).unwrap();
        let expected = [
            (1, WireValue::Varint(150)),
            (2, WireValue::Bytes(b"hi")),
            (3, WireValue::Fixed64(1)),
            (4, WireValue::Fixed32(2)),
        ];
        assert_eq!(read, expected);
        let ranges: Vec<_> = WireFields::new(body).map(|field| field.unwrap().range).collect();
        assert_eq!(ranges, [0..3, 3..7, 7..16, 16..21]);
    }

    #[test]
    fn what_decoders_read_differently_is_a_fault() {
        let faults: [(&[u8], &str); 11] = [
            (b"\x00\x01", "field number 0"),
            (b"\x0f", "a group or an unknown wire type"),
            (b"\x0b\x0c", "a group or an unknown wire type"),
            (b"\x0c", "a group or an unknown wire type"),
            (b"\x0e", "a group or an unknown wire type"),
            // Field 2^32 + 1 by 64-bit arithmetic, field 1 for gogo/protobuf.
            (b"\x88\x80\x80\x80\x80\x01\x01", "a tag of more than 32 bits"),
            (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", "a varint of more than 64 bits"),
            (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a varint of more than 64 bits"),
            (b"\x0a\x02h", "the body ends within a field"),
            (b"\x09\0\0\0\0\0\0\0", "the body ends within a field"),
            (b"\x08", "the body ends within a field"),
        ];
        for (body, reason) in faults {
            assert_eq!(all(body), Err(ScanFault(reason)), "{body:?}");
        }
        assert_eq!(all(b"\xf8\xff\xff\xff\x0f\x01").unwrap(), [(MAX_NUMBER, WireValue::Varint(1))]);
        assert_eq!(
            all(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01").map_err(|fault| fault.0),
            Err(TRUNCATED.0)
        );
    }

    /// A tag, a value and a length longer than needed, up to ten bytes.
    #[test]
    fn a_long_varint_has_the_value_of_the_short_one() {
        assert_eq!(all(b"\x88\x00\x01"), Ok(vec![(1, WireValue::Varint(1))]));
        assert_eq!(all(b"\x08\x81\x00"), Ok(vec![(1, WireValue::Varint(1))]));
        assert_eq!(all(b"\x0a\x82\x80\x00hi"), Ok(vec![(1, WireValue::Bytes(b"hi"))]));
        let ten = |last| [&b"\x08\x81"[..], &[0x80; 8], &[last]].concat();
        assert_eq!(all(&ten(0)), Ok(vec![(1, WireValue::Varint(1))]));
        assert_eq!(all(&ten(1)), Ok(vec![(1, WireValue::Varint(1 | 1 << 63))]));
        assert_eq!(all(&ten(2)), Err(LONG));
        assert_eq!(all(&[ten(0x80), vec![0]].concat()), Err(LONG));
    }

    #[test]
    fn nothing_comes_after_a_fault() {
        let mut fields = WireFields::new(b"\x0f\x08\x01");
        assert!(fields.next().unwrap().is_err());
        assert_eq!(fields.next(), None);
    }

    #[test]
    fn negative_numbers_come_back() {
        let body = RangeRequest { limit: -1, ..Default::default() }.encode_to_vec();
        let field = WireFields::new(&body).next().unwrap().unwrap();
        assert_eq!((field.number, field.value.signed()), (3, Some(-1)));
    }

    proptest! {
        #[test]
        fn what_prost_writes_is_read(key: Vec<u8>, limit: i64, serializable: bool, min in any::<i64>()) {
            let request = RangeRequest {
                key: key.clone().into(),
                limit,
                serializable,
                min_mod_revision: min,
                ..Default::default()
            };
            let txn = TxnRequest {
                success: vec![RequestOp { request: Some(Request::RequestRange(request.clone())) }],
                ..Default::default()
            };
            let body = txn.encode_to_vec();
            let op = WireFields::new(&body).next().unwrap().unwrap();
            let range = WireFields::new(op.value.bytes().unwrap()).next().unwrap().unwrap();
            let read = all(range.value.bytes().unwrap()).unwrap();
            let number = |wanted| read.iter().find(|(number, _)| *number == wanted).map(|(_, value)| *value);
            prop_assert_eq!(number(1).and_then(WireValue::bytes).unwrap_or_default(), key);
            prop_assert_eq!(number(3).and_then(WireValue::signed).unwrap_or_default(), limit);
            prop_assert_eq!(number(7), serializable.then_some(WireValue::Varint(1)));
            prop_assert_eq!(number(10).and_then(WireValue::signed).unwrap_or_default(), min);
        }

        #[test]
        fn what_is_appended_is_what_prost_writes(key: Vec<u8>, limit: i64) {
            let mut body = BytesMut::new();
            if !key.is_empty() {
                append_bytes_field(&mut body, 1, &key);
            }
            append_varint_field(&mut body, 3, limit.cast_unsigned());
            let request = RangeRequest { key: Bytes::from(key), limit, ..Default::default() };
            prop_assert_eq!(&body[..], request.encode_to_vec());
        }

        /// Fields lie back to back, cover the body, and are each readable alone.
        #[test]
        fn any_bytes_are_read(body: Vec<u8>) {
            let mut end = 0;
            for field in WireFields::new(&body) {
                let Ok(field) = field else { return Ok(()) };
                prop_assert_eq!(field.range.start, end);
                end = field.range.end;
                prop_assert!((1..=MAX_NUMBER).contains(&field.number));
                let alone = all(&body[field.range.clone()]).unwrap();
                prop_assert_eq!(alone, vec![(field.number, field.value)]);
            }
            prop_assert_eq!(end, body.len());
        }

        /// A varint has one value, however many bytes it is written in.
        #[test]
        fn a_varint_is_read_as_it_is_written(value: u64, more in 0usize..10, junk: Vec<u8>) {
            let mut written = BytesMut::new();
            append_varint(&mut written, value);
            prop_assert_eq!(varint(&written), Ok((value, written.len())));
            prop_assert_eq!(varint_length(value), written.len());
            let longer = (written.len() + more).min(10);
            if longer > written.len() {
                *written.last_mut().unwrap() |= 0x80;
                written.resize(longer - 1, 0x80);
                written.put_u8(0);
                prop_assert_eq!(varint(&written), Ok((value, longer)));
            }
            // prost is the second reader available here.
            let ours = varint(&junk);
            let theirs = prost::decode_length_delimiter(&junk[..]);
            if let Ok(theirs) = theirs {
                prop_assert_eq!(ours.map(|(value, _)| value), Ok(theirs as u64));
            } else {
                prop_assert!(ours.is_err());
            }
        }
    }
}
