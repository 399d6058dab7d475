//! A range of keys as etcd reads `key` and `range_end`, and rights to such ranges.
//!
//! Owns: the meaning of an empty end, of "\0" and of an end before its start. Must not know who holds a right.

use bytes::Bytes;

use super::flavor::Flavor;

/// The keys of a watch or a delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Interval {
    One(Bytes),
    Until(Bytes, Bytes),
    From(Bytes),
}

impl Interval {
    /// As etcd reads the two fields. An `Until` may be inverted or empty: then no key is in it, and a watch of it is refused.
    pub(crate) fn new(key: &Bytes, range_end: &Bytes) -> Interval {
        match range_end.as_ref() {
            b"" => Interval::One(key.clone()),
            b"\0" => Interval::From(key.clone()),
            _ => Interval::Until(key.clone(), range_end.clone()),
        }
    }

    pub(crate) fn contains(&self, key: &[u8]) -> bool {
        match self {
            Interval::One(one) => one == key,
            Interval::Until(from, end) => from.as_ref() <= key && key < end.as_ref(),
            Interval::From(from) => from.as_ref() <= key,
        }
    }

    /// Whether a watch of it is refused as empty.
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Interval::Until(from, end) if from >= end)
    }

    fn start(&self) -> &[u8] {
        match self {
            Interval::One(key) | Interval::From(key) | Interval::Until(key, _) => key,
        }
    }
}

/// What a user may read. A range is permitted where one of these holds all of it (etcd also joins neighbours; these do not touch).
#[derive(Clone, Debug, Default)]
pub(crate) struct Rights(Vec<Interval>);

impl Rights {
    /// To everything, as root's.
    pub(crate) fn all() -> Rights {
        Rights(vec![Interval::From(Bytes::from_static(b"\0"))])
    }

    /// To these ranges and nothing else.
    pub(crate) fn to(ranges: impl IntoIterator<Item = Interval>) -> Rights {
        Rights(ranges.into_iter().collect())
    }

    /// Whether a watch of `asked` is permitted. What is inverted is judged by its start and its end, as etcd does.
    pub(crate) fn permit(&self, flavor: Flavor, asked: &Interval) -> bool {
        self.0.iter().any(|right| {
            right.contains(asked.start())
                && match (asked, right) {
                    (Interval::One(_), _) | (_, Interval::From(_)) => true,
                    (Interval::From(_), _) => !flavor.guards_open_end,
                    (Interval::Until(_, end), Interval::Until(_, limit)) => end <= limit,
                    // The right to one key is the range from it to its next.
                    (Interval::Until(_, end), Interval::One(key)) => end.as_ref() <= next(key).as_slice(),
                }
        })
    }
}

fn next(key: &[u8]) -> Vec<u8> {
    [key, b"\0"].concat()
}
