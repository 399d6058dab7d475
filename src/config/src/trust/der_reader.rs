//! Reads DER as strictly as Go does.
//!
//! Owns: tags, lengths, and the canonical forms of integers and truth values. Must not know: certificates.
//! Invariants: every slice is within the input; nesting is limited. `x509-parser` accepts lengths that are
//! longer than necessary, and Go does not (`cryptobyte.String.readASN1`), so certificates pass [`is_der`]
//! first.

pub(super) const BOOLEAN: u8 = 0x01;
pub(super) const INTEGER: u8 = 0x02;
pub(super) const BIT_STRING: u8 = 0x03;
pub(super) const OCTET_STRING: u8 = 0x04;
const NULL: u8 = 0x05;
pub(super) const OID: u8 = 0x06;
pub(super) const SEQUENCE: u8 = 0x30;
pub(super) const SET: u8 = 0x31;
const CONSTRUCTED: u8 = 0x20;

/// Maximum nesting of a certificate. A name within an extension has seven levels.
const MAX_DEPTH: u8 = 16;

/// Unread DER.
#[derive(Clone, Copy, Debug)]
pub(super) struct DerReader<'a>(&'a [u8]);

/// An element of DER.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Element<'a> {
    pub(super) tag: u8,
    pub(super) contents: &'a [u8],
}

impl<'a> DerReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The elements within a single element of the given tag. `None` for anything else.
    pub(super) fn within(bytes: &'a [u8], tag: u8) -> Option<Self> {
        let mut outer = Self(bytes);
        let contents = outer.read(tag)?;
        outer.is_at_end().then_some(Self(contents))
    }

    pub(super) fn is_at_end(self) -> bool {
        self.0.is_empty()
    }

    /// Reads an element of any tag. `None` at the end, and if the element is not DER.
    pub(super) fn read_any(&mut self) -> Option<Element<'a>> {
        let (&[tag, first], rest) = self.0.split_first_chunk::<2>()?;
        if tag & 0x1f == 0x1f {
            return None; // a tag of several bytes
        }
        let (length, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            0x81..=0x84 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                let length = bytes.iter().fold(0_u32, |all, &byte| all << 8 | u32::from(byte));
                if length < 0x80 || bytes.first() == Some(&0) {
                    return None; // longer than necessary
                }
                (usize::try_from(length).ok()?, rest)
            }
            _ => return None,
        };
        let (contents, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some(Element { tag, contents })
    }

    /// Reads an element of the given tag, and returns its contents.
    pub(super) fn read(&mut self, tag: u8) -> Option<&'a [u8]> {
        let mut next = *self;
        let element = next.read_any().filter(|element| element.tag == tag)?;
        *self = next;
        Some(element.contents)
    }

    /// Reads an element of the given tag with its header.
    pub(super) fn read_whole(&mut self, tag: u8) -> Option<&'a [u8]> {
        let before = self.0;
        self.read(tag)?;
        before.get(..before.len() - self.0.len())
    }

    /// Reads an optional element: `Some(None)` if the next element has another tag, `None` if it is not DER.
    pub(super) fn read_if(&mut self, tag: u8) -> Option<Option<&'a [u8]>> {
        if self.is_next(tag) { self.read(tag).map(Some) } else { Some(None) }
    }

    /// True if the next element has the given tag, readable or not.
    pub(super) fn is_next(self, tag: u8) -> bool {
        self.0.first() == Some(&tag)
    }
}

/// True if `bytes` are DER throughout, as far as an element's contents are DER by its tag.
pub(super) fn is_der(bytes: &[u8]) -> bool {
    is_der_to(bytes, MAX_DEPTH)
}

fn is_der_to(bytes: &[u8], depth: u8) -> bool {
    let Some(depth) = depth.checked_sub(1) else { return false };
    let mut reader = DerReader(bytes);
    while !reader.is_at_end() {
        let Some(Element { tag, contents }) = reader.read_any() else { return false };
        let is_good = match tag {
            BOOLEAN => matches!(contents, [0 | 0xff]),
            INTEGER => is_integer(contents),
            BIT_STRING => is_bit_string(contents),
            NULL => contents.is_empty(),
            OID => is_oid(contents),
            // A string in pieces, and a sequence without the mark of its pieces, are BER alone.
            0x21..=0x2f | 0x32..=0x3f | 0x10 | 0x11 => false,
            tag if tag & CONSTRUCTED != 0 => is_der_to(contents, depth),
            _ => true,
        };
        if !is_good {
            return false;
        }
    }
    true
}

fn is_integer(contents: &[u8]) -> bool {
    match contents {
        [] => false,
        [0, next, ..] => next & 0x80 != 0,
        [0xff, next, ..] => next & 0x80 == 0,
        _ => true,
    }
}

fn is_bit_string(contents: &[u8]) -> bool {
    match contents {
        [0] => true,
        [unused @ 0..=7, .., last] => last & ((1 << unused) - 1) == 0,
        _ => false,
    }
}

/// True for an object identifier with parts below 2^31, the largest that Go reads in most places.
pub(super) fn is_oid(contents: &[u8]) -> bool {
    let is_small = |part: &[u8]| part.len() < 5 || part.len() == 5 && part[0] & 0x7f < 0x08;
    is_any_oid(contents) && contents.split_inclusive(|byte| byte & 0x80 == 0).all(is_small)
}

/// True for an object identifier with parts of any size, none of them longer than necessary.
pub(super) fn is_any_oid(contents: &[u8]) -> bool {
    let mut parts = contents.split_inclusive(|byte| byte & 0x80 == 0);
    contents.last().is_some_and(|last| last & 0x80 == 0) && parts.all(|part| part[0] != 0x80)
}

/// A number in an integer's contents, if it fits and is not negative.
pub(super) fn small_number(contents: &[u8]) -> Option<u64> {
    if !is_integer(contents) || contents.first()? & 0x80 != 0 {
        return None;
    }
    let digits = contents.strip_prefix(&[0]).unwrap_or(contents);
    (digits.len() <= 8).then(|| digits.iter().fold(0, |all, &byte| all << 8 | u64::from(byte)))
}

/// The bits of a bit string's contents, if they are well-formed.
pub(super) fn bits(contents: &[u8]) -> Option<&[u8]> {
    is_bit_string(contents).then(|| contents.get(1..)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_shortest_form_of_a_length_is_read() {
        let read = |bytes: &[u8]| DerReader::new(bytes).read_any().map(|element| element.contents.len());
        assert_eq!(read(&[4, 0]), Some(0));
        assert_eq!(read(&[4, 2, 1, 2]), Some(2));
        let long: Vec<u8> = [4, 0x81, 0x80].into_iter().chain([0; 128]).collect();
        assert_eq!(read(&long), Some(128));
        for bad in [
            &[4, 3, 1, 2][..],
            &[4],
            &[],
            &[4, 0x81, 2, 1, 2],
            &[4, 0x82, 0, 0x80],
            &[4, 0x80, 0, 0],
            &[0x1f, 0x20, 0],
            &[4, 0x85, 0, 0, 0, 0, 1, 0],
        ] {
            assert_eq!(read(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn forms_that_go_refuses_are_no_der() {
        for good in [
            &[1, 1, 0xff][..],
            &[2, 2, 0, 0x80],
            &[2, 1, 0],
            &[3, 2, 7, 0x80],
            &[3, 1, 0],
            &[0x30, 2, 5, 0],
            &[6, 3, 0x55, 0x81, 0x01],
        ] {
            assert!(is_der(good), "{good:?}");
        }
        for bad in [
            &[1, 1, 1][..],
            &[2, 2, 0, 1],
            &[2, 2, 0xff, 0x80],
            &[2, 0],
            &[3, 2, 7, 0x81],
            &[3, 0],
            &[3, 2, 8, 0],
            &[0x30, 2, 5, 1],
            &[6, 2, 0x55, 0x80],
            &[6, 3, 0x55, 0x80, 1],
            &[6, 6, 0x69, 0x88, 0x80, 0x80, 0x80, 0],
            &[0x24, 2, 4, 0],
            &[0x10, 0],
        ] {
            assert!(!is_der(bad), "{bad:?}");
        }
        let mut deep = vec![5, 0];
        for _ in 0..20 {
            deep = [&[0x30, u8::try_from(deep.len()).unwrap()][..], &deep].concat();
        }
        assert!(!is_der(&deep));
    }

    #[test]
    fn numbers_are_read_within_their_size() {
        assert_eq!(small_number(&[0]), Some(0));
        assert_eq!(small_number(&[0, 0xff]), Some(255));
        assert_eq!(small_number(&[0, 0xff, 0, 0, 0, 0, 0, 0, 0]), Some(0xff << 56));
        for bad in [&[0x80][..], &[], &[0, 1], &[1; 9]] {
            assert_eq!(small_number(bad), None, "{bad:?}");
        }
    }
}
