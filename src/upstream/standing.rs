//! What keeps a member out of every shard's choice at once, beside what the last probe said.
//!
//! Owns: the flags that all snapshots of a member share: [`Suspicion`], raised by whoever lost it, and [`Rest`], taken by
//! whoever is about to make it slow. Must not know: members, how one is chosen. Invariants: a suspicion ends only by a
//! probe that began later; a rest ends with the last guard.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Whether the data path lost a member since the probe that last succeeded began. One per member, for its whole life.
#[derive(Debug, Default)]
pub struct Suspicion {
    raised: AtomicU32,
    cleared: AtomicU32,
}

/// How often a suspicion had been raised when a probe began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u32);

impl Suspicion {
    /// Says that a connection was lost.
    pub fn raise(&self) {
        self.raised.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a connection was lost since the last probe that succeeded began.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed) != self.cleared.load(Ordering::Relaxed)
    }

    /// To be taken when a probe begins.
    #[must_use]
    pub fn mark(&self) -> Mark {
        Mark(self.raised.load(Ordering::Relaxed))
    }

    /// To be called when that probe succeeded: clears what was raised before it began, and nothing later.
    pub fn clear(&self, mark: Mark) {
        self.cleared.store(mark.0, Ordering::Relaxed);
    }
}

/// Whether a member is spared for a while: it is being defragmented, or about to be. One per member, for its whole life.
#[derive(Debug, Default)]
pub struct Rest(AtomicU32);

/// Spares the member as long as it lives.
#[derive(Debug)]
pub struct Resting(Arc<Rest>);

impl Rest {
    /// Takes the member out of every shard's choice until the guard is dropped. Tell of the change
    /// ([`MembersHandle`](crate::upstream::membership::MembersHandle)): streams leave it only when they look.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Resting {
        self.0.fetch_add(1, Ordering::Relaxed);
        Resting(Arc::clone(self))
    }

    /// Whether it is spared now.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_ends_with_the_last_guard() {
        let rest = Arc::new(Rest::default());
        let (first, second) = (rest.take(), rest.take());
        drop(first);
        assert!(rest.is_taken());
        drop(second);
        assert!(!rest.is_taken());
    }
}
