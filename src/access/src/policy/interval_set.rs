//! Sets of keys as sorted, disjoint intervals.
//!
//! Owns: building a set from overlapping intervals, and asking whether a range of keys lies in a set or meets
//! the set. Must not know: actions, roles. Invariants: intervals are sorted and disjoint; an answer takes
//! time logarithmic in their number and allocates nothing.

use std::cmp::Ordering;

use keyward_etcd::rpc::key_range::KeyRange;

/// Names the grant behind an interval, for records and explanations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantId {
    /// Index of the role.
    pub role: u16,
    /// Index of the grant among the role's allowing or denying grants.
    pub grant: u16,
}

/// An interval of keys, with the grant that gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyInterval {
    /// The first key.
    pub(super) start: Box<[u8]>,
    /// The key behind the last one; `None` for no end.
    pub(super) end: Option<Box<[u8]>>,
    /// The grant.
    pub(super) grant: GrantId,
}

/// A set of keys.
#[derive(Clone, Debug, Default)]
pub(super) struct IntervalSet {
    intervals: Vec<KeyInterval>,
    /// The longest beginning that all starts share.
    shared_prefix: Box<[u8]>,
    /// For each interval, the eight bytes of its start behind the shared prefix. A search reads these, which
    /// lie side by side, and few of the starts.
    start_digits: Box<[u64]>,
    /// For each interval, the index of the last interval that follows without a gap.
    run_ends: Vec<u32>,
}

impl IntervalSet {
    /// The union of intervals. Of overlapping intervals, the first by its start keeps the shared keys.
    #[must_use]
    pub(super) fn new(mut given: Vec<KeyInterval>) -> Self {
        given.retain(|interval| interval.end.as_ref().is_none_or(|end| *end > interval.start));
        given.sort_by(|one, other| {
            // Of intervals with the same start, the longest comes first.
            let by_length = compare_ends(other.end.as_deref(), one.end.as_deref());
            one.start.cmp(&other.start).then(by_length).then(one.grant.cmp(&other.grant))
        });
        let mut intervals: Vec<KeyInterval> = Vec::new();
        for mut interval in given {
            if let Some(last) = intervals.last() {
                let Some(covered) = &last.end else { break };
                if interval.end.as_ref().is_some_and(|end| end <= covered) {
                    continue;
                }
                if interval.start < *covered {
                    interval.start = covered.clone();
                }
            }
            intervals.push(interval);
        }
        let mut run_ends = vec![0; intervals.len()];
        let mut run_end = 0;
        for at in (0..intervals.len()).rev() {
            let touches_next =
                intervals.get(at + 1).is_some_and(|next| intervals[at].end.as_ref() == Some(&next.start));
            if !touches_next {
                run_end = u32::try_from(at).unwrap_or(u32::MAX);
            }
            run_ends[at] = run_end;
        }
        let shared_prefix = shared_prefix(&intervals);
        let digits = |interval: &KeyInterval| leading_digits(&interval.start[shared_prefix.len()..]);
        let start_digits = intervals.iter().map(digits).collect();
        Self { intervals, shared_prefix, start_digits, run_ends }
    }

    /// The bytes of the set, about.
    #[must_use]
    pub(super) fn bytes(&self) -> usize {
        let beside = size_of::<KeyInterval>() + size_of::<u64>() + size_of::<u32>();
        let keys = |interval: &KeyInterval| {
            interval.start.len() + interval.end.as_ref().map_or(0, |end| end.len()) + beside
        };
        self.intervals.iter().map(keys).sum()
    }

    /// True without any key.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.intervals.is_empty()
    }

    /// Returns the end of the keys of the set that begin with `key` and have no gap, and the grant of `key`;
    /// `None` if the set does not have the key. The end `None` stands for no end.
    #[must_use]
    pub(super) fn run_from(&self, key: &[u8]) -> Option<(Option<&[u8]>, GrantId)> {
        self.run_before(self.first_start_after(key), key)
    }

    /// Returns the grant of the first key that the set shares with `range`, if any.
    #[must_use]
    pub(super) fn first_shared(&self, range: &KeyRange<'_>) -> Option<GrantId> {
        let next = self.first_start_after(range.start);
        if let Some((_, grant)) = self.run_before(next, range.start) {
            return Some(grant);
        }
        // The set does not have the first key: the next interval decides.
        let next = self.intervals.get(next)?;
        let shared = range.compare_end(Some(&next.start)) == Ordering::Greater;
        shared.then_some(next.grant)
    }

    /// The run from `key` on, if the interval before `next` has the key.
    fn run_before(&self, next: usize, key: &[u8]) -> Option<(Option<&[u8]>, GrantId)> {
        let at = next.checked_sub(1)?;
        let interval = self.intervals.get(at)?;
        if interval.end.as_ref().is_some_and(|end| &**end <= key) {
            return None;
        }
        let last = &self.intervals[usize::try_from(self.run_ends[at]).ok()?];
        Some((last.end.as_deref(), interval.grant))
    }

    /// The index of the first interval that starts behind `key`.
    fn first_start_after(&self, key: &[u8]) -> usize {
        let Some(rest) = key.strip_prefix(&*self.shared_prefix) else {
            return if key < &*self.shared_prefix { 0 } else { self.intervals.len() };
        };
        let digits = leading_digits(rest);
        let smaller = self.start_digits.partition_point(|start| *start < digits);
        let alike = self.start_digits[smaller..].partition_point(|start| *start == digits);
        let alike = &self.intervals[smaller..smaller + alike];
        smaller + alike.partition_point(|interval| &*interval.start <= key)
    }
}

/// The longest beginning that the starts of sorted intervals share.
fn shared_prefix(intervals: &[KeyInterval]) -> Box<[u8]> {
    let (Some(first), Some(last)) = (intervals.first(), intervals.last()) else { return Box::default() };
    let shared = first.start.iter().zip(&last.start).take_while(|(one, other)| one == other).count();
    first.start[..shared].into()
}

/// The first eight bytes as a number, with zeros for missing bytes: not smaller for a greater key.
fn leading_digits(key: &[u8]) -> u64 {
    let mut digits = [0; 8];
    let known = key.len().min(digits.len());
    digits[..known].copy_from_slice(&key[..known]);
    u64::from_be_bytes(digits)
}

/// Compares two exclusive ends; `None` stands for no end.
#[must_use]
pub(super) fn compare_ends(one: Option<&[u8]>, other: Option<&[u8]>) -> Ordering {
    match (one, other) {
        (None, None) => Ordering::Equal,
        (None, Some(_)) => Ordering::Greater,
        (Some(_), None) => Ordering::Less,
        (Some(one), Some(other)) => one.cmp(other),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn interval(start: &[u8], end: Option<&[u8]>, grant: u16) -> KeyInterval {
        KeyInterval { start: start.into(), end: end.map(Into::into), grant: GrantId { role: 0, grant } }
    }

    fn shown(set: &IntervalSet) -> Vec<(Vec<u8>, Option<Vec<u8>>, u16)> {
        let shown = |interval: &KeyInterval| {
            (interval.start.to_vec(), interval.end.as_deref().map(<[u8]>::to_vec), interval.grant.grant)
        };
        set.intervals.iter().map(shown).collect()
    }

    #[test]
    fn overlapping_intervals_become_disjoint_ones() {
        let set = IntervalSet::new(vec![
            interval(b"c", Some(b"f"), 2),
            interval(b"a", Some(b"d"), 1),
            interval(b"b", Some(b"c"), 3),
            interval(b"x", Some(b"x"), 4),
        ]);
        assert_eq!(
            shown(&set),
            [(b"a".to_vec(), Some(b"d".to_vec()), 1), (b"d".to_vec(), Some(b"f".to_vec()), 2)]
        );
        let (end, grant) = set.run_from(b"a").unwrap();
        assert_eq!((end, grant.grant), (Some(&b"f"[..]), 1), "adjacent intervals are one run");
        assert_eq!(set.run_from(b"f"), None);
        let all = IntervalSet::new(vec![interval(b"b", Some(b"c"), 1), interval(b"a", None, 2)]);
        assert_eq!(shown(&all), [(b"a".to_vec(), None, 2)]);
    }

    /// Keys that share more than the bytes which a search compares first, and others.
    const KEYS: [&[u8]; 12] = [
        b"",
        b"\0",
        b"a",
        b"a\0",
        b"aaaaaaaa",
        b"aaaaaaaa\0",
        b"aaaaaaaab",
        b"ab",
        b"b",
        b"b\xff",
        b"c",
        b"\xff\xff",
    ];

    proptest! {
        /// Compared with the intervals themselves, on every key and range of a small world. The intervals lie
        /// below a prefix, the keys in question also beside it.
        #[test]
        fn a_set_has_exactly_the_keys_of_its_intervals(
            given in prop::collection::vec((0..12usize, prop::option::of(0..12usize)), 0..6),
            prefix in prop::sample::select(vec![&b""[..], b"a", b"a\0", b"/registry/services/", b"\xff"]),
            start in 0..24usize, end in prop::option::of(0..24usize),
        ) {
            let below = KEYS.map(|key| [prefix, key].concat());
            let world: Vec<&[u8]> = below.iter().map(Vec::as_slice).chain(KEYS).collect();
            let given: Vec<_> = given.iter().zip(0..)
                .map(|((start, end), grant)| interval(&below[*start], end.map(|end| &*below[end]), grant))
                .collect();
            let set = IntervalSet::new(given.clone());
            let has = |key: &[u8]| given.iter().any(|interval| {
                &*interval.start <= key && interval.end.as_ref().is_none_or(|end| key < &**end)
            });
            for key in &world {
                prop_assert_eq!(set.run_from(key).is_some(), has(key));
            }
            let range = KeyRange::of(world[start], end.map_or(b"", |end| world[end]));
            // Intervals begin and end at the keys of the small world, so its keys stand for all.
            let within: Vec<_> = world.iter().filter(|key| range.contains(key)).collect();
            prop_assert_eq!(set.first_shared(&range).is_some(), within.iter().any(|key| has(key)));
            if let Some((end, _)) = set.run_from(range.start) {
                prop_assert_eq!(
                    range.compare_end(end) != Ordering::Greater,
                    within.iter().all(|key| has(key))
                        && (end.is_none() || range.end != keyward_etcd::rpc::key_range::RangeEnd::Unbounded)
                );
            }
        }
    }
}
