//! What keeps a member out of every shard's choice at once, beside what the last probe said.
//!
//! Owns: the flags that all snapshots of a member share: [`Suspicion`], raised by whoever lost it, and [`Rest`], taken by
//! whoever is about to make it slow or to remove it, who sees there what is still under way. Must not know: members, how one is
//! chosen. Invariants: a suspicion ends only by a probe that began later; a rest, and a removal, end with the last guard.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Whether the data path lost a member since the probe that last succeeded began. One per member and address, for as long as it
/// is found there.
#[derive(Debug, Default)]
pub struct Suspicion {
    raised: AtomicU32,
    cleared: AtomicU32,
    /// How often the one had been raised of which this one began, at another address.
    carried: Option<Mark>,
}

/// How often a suspicion had been raised when a probe began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u32);

impl Suspicion {
    /// Of the same member at another address. Where it was lost at the first, nobody knows yet whether it answers at the second:
    /// this one is raised too. From then on they are two.
    #[must_use]
    pub fn carried(&self) -> Self {
        if !self.is_raised() {
            return Self::default();
        }
        Self { raised: AtomicU32::new(1), carried: Some(self.mark()), ..Self::default() }
    }

    /// To be called when a probe succeeded at the second address that began with this mark of the first one: clears what was
    /// carried here, if that had been raised before it began, and nothing later.
    pub fn clear_carried(&self, mark: Mark) {
        if self.carried == Some(mark) && self.cleared.load(Ordering::Relaxed) == 0 {
            self.clear(Mark(1));
        }
    }

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
pub struct Rest {
    taken: AtomicU32,
    removals: AtomicU32,
    busy: AtomicUsize,
}

/// A removal of the member is under way or was made: no probe of the member begins while this lives.
#[derive(Debug)]
pub struct Removal(Arc<Rest>);

/// Spares the member as long as it lives.
#[derive(Debug)]
pub struct Resting(Arc<Rest>);

/// Counts one call that the member has to answer.
#[derive(Debug)]
pub struct Busy(Arc<Rest>);

impl Rest {
    /// Takes the member out of every shard's choice until the guard is dropped. Tell of the change
    /// ([`rest_changed`](crate::upstream::membership::MembersHandle::rest_changed)): streams leave it only when they look.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Resting {
        self.taken.fetch_add(1, Ordering::SeqCst);
        Resting(Arc::clone(self))
    }

    /// Whether it is spared now.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.taken.load(Ordering::SeqCst) > 0
    }

    /// The member's removal is about to be asked for: no probe of the member begins until the guard is dropped, since a member that was
    /// removed panics when it is asked for its Status in the second before it ends (etcd 3.4 to 3.7). Probes under way are
    /// [`busy`](Self::busy).
    #[must_use]
    pub fn begin_removal(self: &Arc<Self>) -> Removal {
        self.removals.fetch_add(1, Ordering::SeqCst);
        Removal(Arc::clone(self))
    }

    /// Whether the member's removal is under way or was made.
    #[must_use]
    pub fn is_being_removed(&self) -> bool {
        self.removals.load(Ordering::SeqCst) > 0
    }

    /// A call begins that ends by itself: whoever makes the member slow waits for it first.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::SeqCst);
        Busy(Arc::clone(self))
    }

    /// Such calls under way, on all shards.
    #[must_use]
    pub fn busy(&self) -> usize {
        self.busy.load(Ordering::SeqCst)
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        self.0.removals.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried_is_cleared_by_a_probe_that_began_after_it_was_raised_and_nothing_later_is() {
        let first = Suspicion::default();
        let began_before = first.mark();
        assert!(!first.carried().is_raised());
        first.raise();
        let (began_after, second) = (first.mark(), first.carried());
        assert!(second.is_raised());
        second.clear_carried(began_before);
        assert!(second.is_raised());
        second.clear_carried(began_after);
        assert!(!second.is_raised());
        second.raise();
        second.clear_carried(began_after);
        assert!(second.is_raised(), "it is another one");
        let third = first.carried();
        third.raise();
        third.clear_carried(began_after);
        assert!(third.is_raised(), "one of two");
        third.clear(third.mark());
        assert!(!third.is_raised());
    }

    #[test]
    fn a_rest_ends_with_the_last_guard() {
        let rest = Arc::new(Rest::default());
        let (first, second) = (rest.take(), rest.take());
        drop(first);
        assert!(rest.is_taken());
        drop(second);
        assert!(!rest.is_taken());
        let (first, second) = (rest.begin_removal(), rest.begin_removal());
        drop(first);
        assert!(rest.is_being_removed() && !rest.is_taken());
        drop(second);
        assert!(!rest.is_being_removed());
    }
}
