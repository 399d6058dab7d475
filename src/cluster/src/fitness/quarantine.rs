//! Flags shared by all snapshots of a member, which take the member out of every shard's choice at once.
//!
//! Owns: [`Suspicion`], raised after a lost connection; [`MaintenanceWindow`], the maintenance window, opened
//! before the member is made slow or removed, which also counts the calls in flight. Must not know: members,
//! how a member is chosen. Invariants: a suspicion ends only by a probe begun later; a maintenance window,
//! and a removal, end with the last guard.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// True after the data path lost a connection, until a later probe succeeds. One suspicion per member and
/// address, for as long as the member is found at the address.
#[derive(Debug, Default)]
pub struct Suspicion {
    raised: AtomicU32,
    cleared: AtomicU32,
    /// If the suspicion was inherited from a first address: the mark of the first suspicion at that time.
    carried: Option<SuspicionMark>,
}

/// The number of times a suspicion had been raised when a probe began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuspicionMark(u32);

impl Suspicion {
    /// Creates the suspicion of the same member at a second address. If the first is raised, the second is
    /// raised too, because the member has not answered at the second address yet. Afterwards the two
    /// suspicions are independent.
    #[must_use]
    pub fn carried(&self) -> Self {
        if !self.is_raised() {
            return Self::default();
        }
        Self { raised: AtomicU32::new(1), carried: Some(self.mark()), ..Self::default() }
    }

    /// Clears an inherited suspicion after a successful probe at the second address. `mark` is the mark of
    /// the first suspicion at the start of the probe. The suspicion stays raised if the probe began before
    /// the first was raised, or if the second was raised again.
    pub fn clear_carried(&self, mark: SuspicionMark) {
        if self.carried == Some(mark) && self.cleared.load(Ordering::Relaxed) == 0 {
            self.clear(SuspicionMark(1));
        }
    }

    /// Records a lost connection.
    pub fn raise(&self) {
        self.raised.fetch_add(1, Ordering::Relaxed);
    }

    /// True if a connection was lost since the start of the last successful probe.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed) != self.cleared.load(Ordering::Relaxed)
    }

    /// Returns the mark to keep for a probe beginning now.
    #[must_use]
    pub fn mark(&self) -> SuspicionMark {
        SuspicionMark(self.raised.load(Ordering::Relaxed))
    }

    /// Clears the suspicion after a successful probe; a loss after the start of the probe stays raised.
    pub fn clear(&self, mark: SuspicionMark) {
        self.cleared.store(mark.0, Ordering::Relaxed);
    }
}

/// The maintenance window of a member: open while the member is defragmented, or about to be, and while an
/// operator has paused the member. One per member,
/// for the member's whole life.
#[derive(Debug, Default)]
pub struct MaintenanceWindow {
    taken: AtomicU32,
    removals: AtomicU32,
    is_paused: AtomicBool,
    busy: AtomicUsize,
}

/// A removal in progress or done: no probe of the member begins while the guard lives.
#[derive(Debug)]
pub struct MemberRemovalGuard(Arc<MaintenanceWindow>);

/// Keeps the maintenance window open until dropped.
#[derive(Debug)]
pub struct MaintenanceGuard(Arc<MaintenanceWindow>);

/// Counts one call in flight to the member.
#[derive(Debug)]
pub struct BusyGuard(Arc<MaintenanceWindow>);

impl MaintenanceWindow {
    /// Takes the member out of every shard's choice until the guard is dropped. Call
    /// [`maintenance_changed`](crate::membership::MembersHandle::maintenance_changed) afterwards:
    /// streams leave the member only after this notification.
    #[must_use]
    pub fn open(self: &Arc<Self>) -> MaintenanceGuard {
        self.taken.fetch_add(1, Ordering::SeqCst);
        MaintenanceGuard(Arc::clone(self))
    }

    /// Opens the maintenance window for an operator, until [`MaintenanceWindow::resume`]. False if the window
    /// is opened for an operator already. Call `maintenance_changed` afterwards, as for
    /// [`MaintenanceWindow::open`].
    #[must_use]
    pub fn pause(&self) -> bool {
        let is_first = !self.is_paused.swap(true, Ordering::SeqCst);
        self.taken.fetch_add(u32::from(is_first), Ordering::SeqCst);
        is_first
    }

    /// Ends the operator's pause. False without a pause.
    pub fn resume(&self) -> bool {
        let was_paused = self.is_paused.swap(false, Ordering::SeqCst);
        self.taken.fetch_sub(u32::from(was_paused), Ordering::SeqCst);
        was_paused
    }

    /// True while an operator keeps the window open.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::SeqCst)
    }

    /// True while the maintenance window is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.taken.load(Ordering::SeqCst) > 0
    }

    /// Marks the member's removal as in progress. Until the guard is dropped no probe of the member begins,
    /// because a removed member panics on Status in the second before its end (etcd 3.4 to 3.7). Probes in
    /// flight count as [`busy`](Self::busy).
    #[must_use]
    pub fn begin_removal(self: &Arc<Self>) -> MemberRemovalGuard {
        self.removals.fetch_add(1, Ordering::SeqCst);
        MemberRemovalGuard(Arc::clone(self))
    }

    /// True if the member's removal is in progress or done.
    #[must_use]
    pub fn is_being_removed(&self) -> bool {
        self.removals.load(Ordering::SeqCst) > 0
    }

    /// Counts a short call in flight; maintenance waits for its end.
    #[must_use]
    pub fn count_call(self: &Arc<Self>) -> BusyGuard {
        self.busy.fetch_add(1, Ordering::SeqCst);
        BusyGuard(Arc::clone(self))
    }

    /// Short calls in flight, on all shards.
    #[must_use]
    pub fn busy(&self) -> usize {
        self.busy.load(Ordering::SeqCst)
    }
}

impl Drop for MaintenanceGuard {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for MemberRemovalGuard {
    fn drop(&mut self) {
        self.0.removals.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for BusyGuard {
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
        let window = Arc::new(MaintenanceWindow::default());
        let (first, second) = (window.open(), window.open());
        drop(first);
        assert!(window.is_open());
        drop(second);
        assert!(!window.is_open());
        let guard = window.open();
        assert!(window.pause() && !window.pause() && window.is_paused());
        drop(guard);
        assert!(window.is_open(), "the operator still wants it");
        assert!(window.resume() && !window.resume() && !window.is_open());
        let (first, second) = (window.begin_removal(), window.begin_removal());
        drop(first);
        assert!(window.is_being_removed() && !window.is_open());
        drop(second);
        assert!(!window.is_being_removed());
    }
}
