//! One header block: read by the connection's own table, and written anew.
//!
//! Owns: HPACK (RFC 7541) as far as a block must be read and said again. Must not know: frames.
//! Invariants (rules 33): the structure of a block is looked at before the crate that decodes sees a byte of it, since that
//! takes whole fields for granted; what is written is by itself: no index, no table, no Huffman code; the order of the fields,
//! and that one must never be indexed, is kept; a list that grows too large is left at once.

use httlib_hpack::Decoder;

use super::Doubt;

/// The size of the table on both sides: HTTP/2's default, which we never announce another than.
pub const TABLE: u32 = 4096;

const INDEXED: u8 = 0x80;
const INTO_TABLE: u8 = 0x40;
const TABLE_SIZE: u8 = 0x20;
const NEVER_INDEXED: u8 = 0x10;
/// What a field counts beside its name and its value.
const OVERHEAD: usize = 32;
const PSEUDO_AUTHORITY: &[u8] = b":authority";

/// A field of a header list.
pub(super) struct Field {
    pub(super) name: Vec<u8>,
    pub(super) value: Vec<u8>,
    pub(super) never_indexed: bool,
}

impl Field {
    pub(super) fn is_authority(&self) -> bool {
        self.name == PSEUDO_AUTHORITY
    }

    /// An authority that HTTP/2's library refuses: it takes what this type takes.
    pub(super) fn is_odd_authority(&self) -> bool {
        self.is_authority() && http::uri::Authority::try_from(&self.value[..]).is_err()
    }
}

/// What one side of a connection remembers of fields.
pub(super) struct Table(Decoder<'static>);

impl Table {
    pub(super) fn new() -> Self {
        Self(Decoder::with_dynamic_size(TABLE))
    }

    /// The fields of a whole block; `largest` bounds the list as RFC 9113 counts it (6.5.2).
    pub(super) fn read(&mut self, block: &[u8], largest: usize) -> Result<Vec<Field>, Doubt> {
        let (mut fields, mut size, mut rest) = (Vec::new(), 0, block);
        while !rest.is_empty() {
            let length = length(rest).ok_or(Doubt::Compression)?;
            let (one, after) = rest.split_at_checked(length).ok_or(Doubt::Compression)?;
            rest = after;
            // Another size is told before all fields (RFC 7541, 4.2).
            if is_table_size(one[0]) && !fields.is_empty() {
                return Err(Doubt::Compression);
            }
            let mut read = Vec::with_capacity(1);
            self.0.decode(&mut one.to_vec(), &mut read).map_err(|_| Doubt::Compression)?;
            for (name, value, flags) in read {
                size += name.len() + value.len() + OVERHEAD;
                if size > largest {
                    return Err(Doubt::Fields);
                }
                let never_indexed = flags & Decoder::NEVER_INDEXED != 0;
                fields.push(Field { name, value, never_indexed });
            }
        }
        Ok(fields)
    }
}

fn is_table_size(first: u8) -> bool {
    first & (INDEXED | INTO_TABLE | TABLE_SIZE) == TABLE_SIZE
}

/// How long the first representation of a block is, where it is whole (RFC 7541, 6).
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

/// How long a string is, with the length before it.
fn string(bytes: &[u8]) -> Option<usize> {
    let (length, before) = integer(bytes, 7)?;
    let whole = before + length;
    (whole <= bytes.len()).then_some(whole)
}

/// A number, and in how many bytes it stands: five at most.
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

/// The list as a block that stands by itself, with this authority.
pub(super) fn written(fields: &[Field], authority: &[u8]) -> Vec<u8> {
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

    /// RFC 7541, C.1: 10 and 1337 in five bits, 42 in eight.
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
        /// Whatever the lengths of names and values are.
        #[test]
        fn what_is_written_is_read_again(
            list in prop::collection::vec(
                (prop::collection::vec(any::<u8>(), 0..300), prop::collection::vec(any::<u8>(), 0..300), any::<bool>()),
                0..6,
            ),
        ) {
            let field = |(name, value, never_indexed): &(Vec<u8>, Vec<u8>, bool)| {
                Field { name: name.clone(), value: value.clone(), never_indexed: *never_indexed }
            };
            let fields: Vec<Field> = list.iter().map(field).collect();
            let read = Table::new().read(&written(&fields, b"unused"), usize::MAX).expect("a block");
            let read: Vec<_> = read.into_iter().map(|field| (field.name, field.value, field.never_indexed)).collect();
            prop_assert_eq!(read, list);
        }
    }
}
