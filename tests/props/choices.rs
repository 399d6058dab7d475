//! Bytes as decisions, in order; where they end, every decision is the smallest one.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Numbers at which readers and arithmetic go wrong.
const EDGES: [u64; 12] = [
    0,
    1,
    2,
    127,
    128,
    1 << 31,
    (1 << 32) + 1,
    u64::MAX >> 1,
    (u64::MAX >> 1) - 1,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

pub(crate) struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Below `n`, which is at least 1 and at most 256.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// True once in `n`, never where the bytes have ended.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    pub(crate) fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..100 => u64::from(small),
            edge @ 100..200 => EDGES[usize::from(edge) % EDGES.len()],
            _ => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    /// At most `most` of the bytes themselves.
    pub(crate) fn bytes(&mut self, most: usize) -> &'a [u8] {
        let length = self.below(most + 1).min(self.0.len());
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        taken
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

/// Calls `target` with many byte strings of up to `most` bytes; of one that fails, the smallest is printed.
pub(crate) fn for_any_bytes(most: usize, target: impl Fn(&[u8])) {
    let config = Config { failure_persistence: None, max_shrink_iters: 200_000, ..Config::default() };
    let bytes = prop::collection::vec(any::<u8>(), 0..most).prop_map(Case);
    let tried = TestRunner::new(config).run(&bytes, |Case(bytes)| {
        target(&bytes);
        Ok(())
    });
    if let Err(failure) = tried {
        panic!("{failure}");
    }
}

/// Shown on one line, ready to be given to the target again.
#[derive(Clone)]
struct Case(Vec<u8>);

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "b\"{}\"", self.0.escape_ascii())
    }
}
