//! Decoding and re-encoding of one header block.
//!
//! Owns: HPACK (RFC 7541) as far as needed to decode and re-encode a block. Must not know: frames.
//! Invariants (`docs/decisions.md#d33`): the structure of a block is checked before the decoder crate sees a
//! byte, because the decoder assumes complete fields. The output is self-contained: no index, no table, no
//! Huffman code. The order of the fields and the never-indexed flag are kept. Decoding stops as soon as the
//! list exceeds the limit.

use httlib_hpack::Decoder;

use super::AuthorityRefusal;

/// Table size on both sides: HTTP/2's default; Keyward never announces another size.
pub const TABLE: u32 = 4096;

const INDEXED: u8 = 0x80;
const INTO_TABLE: u8 = 0x40;
const TABLE_SIZE: u8 = 0x20;
const NEVER_INDEXED: u8 = 0x10;
/// Size of a field beside its name and value.
const OVERHEAD: usize = 32;
const PSEUDO_AUTHORITY: &[u8] = b":authority";

/// A field of a header list.
pub(super) struct HpackField {
    pub(super) name: Vec<u8>,
    pub(super) value: Vec<u8>,
    pub(super) never_indexed: bool,
}

impl HpackField {
    pub(super) fn is_authority(&self) -> bool {
        self.name == PSEUDO_AUTHORITY
    }

    /// True for an authority refused by h2: h2 parses with the same type.
    pub(super) fn is_odd_authority(&self) -> bool {
        self.is_authority() && http::uri::Authority::try_from(&self.value[..]).is_err()
    }
}

/// The HPACK table of one direction of a connection.
pub(super) struct HpackTable(Decoder<'static>);

impl HpackTable {
    pub(super) fn new() -> Self {
        Self(Decoder::with_dynamic_size(TABLE))
    }

    /// The fields of a complete block; `largest` bounds the list, counted as in RFC 9113, section 6.5.2.
    pub(super) fn read(&mut self, block: &[u8], largest: usize) -> Result<Vec<HpackField>, AuthorityRefusal> {
        let (mut fields, mut size, mut rest) = (Vec::new(), 0, block);
        while !rest.is_empty() {
            let length = length(rest).ok_or(AuthorityRefusal::Compression)?;
            let (one, after) = rest.split_at_checked(length).ok_or(AuthorityRefusal::Compression)?;
            rest = after;
            // A table size update must precede all fields (RFC 7541, section 4.2).
            if is_table_size(one[0]) && !fields.is_empty() {
                return Err(AuthorityRefusal::Compression);
            }
            let mut read = Vec::with_capacity(1);
            self.0.decode(&mut one.to_vec(), &mut read).map_err(|_| AuthorityRefusal::Compression)?;
            for (name, value, flags) in read {
                size += name.len() + value.len() + OVERHEAD;
                if size > largest {
                    return Err(AuthorityRefusal::Fields);
                }
                let never_indexed = flags & Decoder::NEVER_INDEXED != 0;
                fields.push(HpackField { name, value, never_indexed });
            }
        }
        Ok(fields)
    }
}

fn is_table_size(first: u8) -> bool {
    first & (INDEXED | INTO_TABLE | TABLE_SIZE) == TABLE_SIZE
}

/// Length of the first representation in a block, if complete (RFC 7541, section 6).
fn length(block: &[u8]) -> Option<usize> {
    let first = *block.first()?;
    if first & INDEXED != 0 {
        return integer(block, 7).map(|(_, length)| length);
    }
    if is_table_size(first) {
        return integer(block, 5).map(|(_, length)| length);
    }
    let (index, mut length) = integer(block, if first & INTO_TABLE != 0 { 6 } else { 4 })?;
    if index == 0 {
        length += string(block.get(length..)?)?;
    }
    Some(length + string(block.get(length..)?)?)
}

/// Length of a string, including its length prefix.
fn string(bytes: &[u8]) -> Option<usize> {
    let (length, before) = integer(bytes, 7)?;
    let whole = before + length;
    (whole <= bytes.len()).then_some(whole)
}

/// An integer and its encoded length: at most five bytes.
fn integer(bytes: &[u8], prefix: u32) -> Option<(usize, usize)> {
    let (first, rest) = bytes.split_first()?;
    let most = (1_usize << prefix) - 1;
    let mut value = usize::from(*first) & most;
    if value < most {
        return Some((value, 1));
    }
    for (place, byte) in rest.iter().take(4).enumerate() {
        value += usize::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            return Some((value, place + 2));
        }
    }
    None
}

/// The list as a self-contained block, with the given authority.
pub(super) fn encode_block(fields: &[HpackField], authority: &[u8]) -> Vec<u8> {
    let mut block = Vec::new();
    for field in fields {
        block.push(if field.never_indexed { NEVER_INDEXED } else { 0 });
        write(&field.name, &mut block);
        write(if field.is_authority() { authority } else { &field.value }, &mut block);
    }
    block
}

fn write(text: &[u8], block: &mut Vec<u8>) {
    const MOST: usize = 0x7f;
    let low = |number: usize| u8::try_from(number & 0x7f).unwrap_or(0);
    if text.len() < MOST {
        block.push(low(text.len()));
    } else {
        block.push(low(MOST));
        let mut left = text.len() - MOST;
        while left > 0x7f {
            block.push(low(left) | 0x80);
            left >>= 7;
        }
        block.push(low(left));
    }
    block.extend_from_slice(text);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// RFC 7541, appendix C.1: 10 and 1337 with a five-bit prefix.
    #[test]
    fn numbers_are_read_as_the_rfc_has_them() {
        assert_eq!(integer(&[0b1110_1010], 5), Some((10, 1)));
        assert_eq!(integer(&[0x1f, 0x9a, 0x0a], 5), Some((1337, 3)));
        assert_eq!(integer(&[0x1f, 0x9a], 5), None);
        assert_eq!(integer(&[0x7f, 0xff, 0xff, 0xff, 0x7f], 7), Some(((1 << 28) + 126, 5)));
        assert_eq!(integer(&[0x7f, 0xff, 0xff, 0xff, 0xff, 0], 7), None);
        assert_eq!(integer(&[], 7), None);
    }

    proptest! {
        /// For names and values of any length.
        #[test]
        fn what_is_written_is_read_again(
            list in prop::collection::vec(
                (
                    prop::collection::vec(any::<u8>(), 0..300),
                    prop::collection::vec(any::<u8>(), 0..300),
                    any::<bool>(),
                ),
                0..6,
            ),
        ) {
            let field = |(name, value, never_indexed): &(Vec<u8>, Vec<u8>, bool)| {
                HpackField { name: name.clone(), value: value.clone(), never_indexed: *never_indexed }
            };
            let fields: Vec<HpackField> = list.iter().map(field).collect();
            let read = HpackTable::new().read(&encode_block(&fields, b"unused"), usize::MAX).expect("a block");
            let read: Vec<_> =
                read.into_iter().map(|field| (field.name, field.value, field.never_indexed)).collect();
            prop_assert_eq!(read, list);
        }
    }
}
