//! Ranges of keys, as etcd reads `key` and `range_end` of a request.
//!
//! Owns: the meaning of the two fields. Must not know: the requests with such fields. Invariant: an inverted
//! range still contains its first key, so that no pair of fields reads as an empty range.

use std::cmp::Ordering;
use std::fmt;

/// A range of keys, in the byte order of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRange<'a> {
    /// The first key.
    pub start: &'a [u8],
    /// The end of the range.
    pub end: RangeEnd<'a>,
}

/// The end of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeEnd<'a> {
    /// The range is its first key alone.
    StartKey,
    /// The range ends before this key, which is above the first key.
    Before(&'a [u8]),
    /// The range has all keys from the first key on.
    Unbounded,
}

impl<'a> KeyRange<'a> {
    /// All keys.
    pub const ALL: KeyRange<'static> = KeyRange { start: b"", end: RangeEnd::Unbounded };

    /// Reads the fields `key` and `range_end` of a request: an empty end means the key alone, and the end
    /// `\0` means all keys from `key` on. An end not above the key means the key alone: etcd finds no key in
    /// such a range.
    #[must_use]
    pub fn of(key: &'a [u8], range_end: &'a [u8]) -> Self {
        let end = match range_end {
            b"" => RangeEnd::StartKey,
            b"\0" => RangeEnd::Unbounded,
            end if end > key => RangeEnd::Before(end),
            _ => RangeEnd::StartKey,
        };
        Self { start: key, end }
    }

    /// The single key `key`.
    #[must_use]
    pub fn key(key: &'a [u8]) -> Self {
        Self { start: key, end: RangeEnd::StartKey }
    }

    /// True if the range contains `key`.
    #[must_use]
    pub fn contains(&self, key: &[u8]) -> bool {
        match self.end {
            RangeEnd::StartKey => key == self.start,
            RangeEnd::Before(end) => self.start <= key && key < end,
            RangeEnd::Unbounded => self.start <= key,
        }
    }

    /// Compares the end of the range with an exclusive end; `None` stands for no end.
    #[must_use]
    pub fn compare_end(&self, end: Option<&[u8]>) -> Ordering {
        match (self.end, end) {
            (RangeEnd::Unbounded, None) => Ordering::Equal,
            (RangeEnd::Unbounded, Some(_)) => Ordering::Greater,
            (_, None) => Ordering::Less,
            (RangeEnd::Before(own), Some(end)) => own.cmp(end),
            (RangeEnd::StartKey, Some(end)) => compare_after(self.start, end),
        }
    }
}

impl<'a> KeyRange<'a> {
    /// The fields `key` and `range_end` of a request for this range.
    #[must_use]
    pub fn fields(&self) -> (&'a [u8], &'a [u8]) {
        let end = match self.end {
            RangeEnd::StartKey => b"",
            RangeEnd::Before(end) => end,
            RangeEnd::Unbounded => b"\0",
        };
        (self.start, end)
    }
}

/// True if every key of `wanted` lies in one of the ranges `by`.
#[must_use]
pub fn is_covered(wanted: KeyRange<'_>, by: &[KeyRange<'_>]) -> bool {
    // The keys of `wanted` before this one are covered.
    let mut from = wanted.start.to_vec();
    loop {
        if wanted.compare_end(Some(&from)).is_le() {
            return true;
        }
        let here = by.iter().filter(|range| range.contains(&from));
        let Some(furthest) = here.max_by(|one, other| one.compare_ends(other)) else { return false };
        from = match furthest.end {
            RangeEnd::Unbounded => return true,
            RangeEnd::Before(end) => end.to_vec(),
            // The key directly behind.
            RangeEnd::StartKey => [furthest.start, b"\0"].concat(),
        };
    }
}

impl KeyRange<'_> {
    fn compare_ends(&self, other: &KeyRange<'_>) -> Ordering {
        match other.end {
            RangeEnd::Unbounded => self.compare_end(None),
            RangeEnd::Before(end) => self.compare_end(Some(end)),
            RangeEnd::StartKey => self.compare_end(Some(&[other.start, b"\0"].concat())),
        }
    }
}

impl fmt::Display for KeyRange<'_> {
    /// For operators: keys are quoted and escaped.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = |key: &[u8]| format!("\"{}\"", key.escape_ascii());
        match self.end {
            RangeEnd::StartKey => write!(f, "key {}", key(self.start)),
            RangeEnd::Before(end) => write!(f, "keys from {} to {}", key(self.start), key(end)),
            RangeEnd::Unbounded => write!(f, "keys from {} on", key(self.start)),
        }
    }
}

/// Compares the key directly after `key`, which is `key` with a zero byte, with `end`.
fn compare_after(key: &[u8], end: &[u8]) -> Ordering {
    match end.strip_prefix(key) {
        Some([]) => Ordering::Greater,
        Some(rest) => [0].as_slice().cmp(rest),
        None => key.cmp(end),
    }
}

/// Returns the exclusive end of the keys with the given prefix; `None` if no key is above all of them.
#[must_use]
pub fn end_of_prefix(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte != u8::MAX)?;
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Some(end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_fields_are_read_as_etcd_reads_them() {
        assert_eq!(KeyRange::of(b"a", b"").end, RangeEnd::StartKey);
        assert_eq!(KeyRange::of(b"a", b"b").end, RangeEnd::Before(b"b"));
        assert_eq!(KeyRange::of(b"a", b"\0").end, RangeEnd::Unbounded);
        assert_eq!(KeyRange::of(b"\0", b"\0").end, RangeEnd::Unbounded);
        assert_eq!(KeyRange::of(b"b", b"a").end, RangeEnd::StartKey, "inverted");
        assert_eq!(KeyRange::of(b"b", b"b").end, RangeEnd::StartKey);
        assert!(KeyRange::of(b"", b"\0\0").contains(b"\0"));
    }

    #[test]
    fn a_prefix_ends_before_the_next_one() {
        assert_eq!(end_of_prefix(b"a/").as_deref(), Some(&b"a0"[..]));
        assert_eq!(end_of_prefix(b"a\xff\xff").as_deref(), Some(&b"b"[..]));
        assert_eq!(end_of_prefix(b"\xff\xff"), None);
        assert_eq!(end_of_prefix(b""), None);
    }

    proptest! {
        #[test]
        fn the_end_of_a_single_key_is_before_every_longer_key(
            key in prop::collection::vec(0u8..3, 0..4), end in prop::collection::vec(0u8..3, 0..4),
        ) {
            let after = [&key[..], &[0]].concat();
            prop_assert_eq!(KeyRange::key(&key).compare_end(Some(&end)), after[..].cmp(&end[..]));
        }

        #[test]
        fn keys_with_the_prefix_are_the_keys_below_the_end(
            prefix in prop::collection::vec(prop::sample::select(&[0, 1, 254, 255][..]), 0..3),
            key in prop::collection::vec(prop::sample::select(&[0, 1, 254, 255][..]), 0..5),
        ) {
            let end = end_of_prefix(&prefix);
            let within = key >= prefix && end.is_none_or(|end| key < end);
            prop_assert_eq!(within, key.starts_with(&prefix));
        }
    }

    #[test]
    fn a_range_is_covered_by_the_union_of_ranges() {
        let to = |key, end| KeyRange::of(key, end);
        let parts = [to(b"a", b"c"), to(b"b", b"d"), to(b"d", b""), to(b"d\0", b"f"), to(b"x", b"\0")];
        for (key, end, expected) in [
            (&b"a"[..], &b"f"[..], true),
            (b"a", b"f\0", false),
            (b"", b"b", false),
            (b"d", b"", true),
            (b"f", b"", false),
            (b"y", b"\0", true),
            (b"e", b"\0", false),
            (b"a", b"d\0", true),
        ] {
            assert_eq!(is_covered(to(key, end), &parts), expected, "{key:?} {end:?}");
        }
        assert!(!is_covered(to(b"a", b""), &[]));
        assert!(is_covered(to(b"a", b""), &[KeyRange::ALL]) && is_covered(KeyRange::ALL, &[KeyRange::ALL]));
    }

    proptest! {
        /// Beside keys of one and two letters.
        #[test]
        fn a_range_is_covered_if_each_of_its_keys_is(
            ranges in prop::collection::vec(("[a-d]{1,2}", "[a-d]{0,2}"), 0..5), key in "[a-d]{1,2}", end in "[a-d]{0,2}"
        ) {
            let ranges: Vec<_> =
                ranges.iter().map(|(key, end)| KeyRange::of(key.as_bytes(), end.as_bytes())).collect();
            let wanted = KeyRange::of(key.as_bytes(), end.as_bytes());
            // Every border, and the key directly behind each.
            let borders: Vec<Vec<u8>> = ranges
                .iter()
                .chain([&wanted])
                .flat_map(|range| [range.start, range.fields().1])
                .flat_map(|key| [key.to_vec(), [key, b"\0"].concat()])
                .collect();
            let inside = borders.iter().filter(|key| wanted.contains(key));
            let expected = inside.clone().all(|key| ranges.iter().any(|range| range.contains(key)));
            prop_assert_eq!(is_covered(wanted, &ranges), expected);
        }
    }
}
