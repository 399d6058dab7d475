//! Random choices that a printed seed repeats.
//!
//! Owns: the generator. Must not know what is chosen. Invariant: the same seed gives the same choices on every machine.

/// splitmix64: small, and the same everywhere.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// A generator of its own for one part, so that parts do not depend on each other's pace.
    pub(crate) fn fork(&mut self) -> Rng {
        Rng(self.next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One of `0..limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % (limit as u64)).expect("below a usize")
    }

    /// True in so many of a hundred cases.
    pub(crate) fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    pub(crate) fn one_of<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    /// Several different ones, in random order.
    pub(crate) fn some_of<T: Clone>(&mut self, of: &[T], count: usize) -> Vec<T> {
        let mut rest = of.to_vec();
        (0..count.min(of.len())).map(|_| rest.swap_remove(self.below(rest.len()))).collect()
    }
}
