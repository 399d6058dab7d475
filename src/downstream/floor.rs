//! How far what a client's connection was shown goes: nothing older may follow (rules 21).
//!
//! Owns: the highest revision and term, and of which cluster they are. Must not know: who showed what. Invariant: revisions of
//! two clusters are never compared.

use std::cell::Cell;

use crate::identity::{ClusterId, Revision};
use crate::rpc::header::Seen;

/// One connection's.
#[derive(Debug, Default)]
pub struct Floor {
    cluster: Cell<Option<ClusterId>>,
    revision: Cell<Revision>,
    term: Cell<u64>,
}

impl Floor {
    /// Nothing was shown yet, of this cluster where one is known.
    #[must_use]
    pub fn of(cluster: Option<ClusterId>) -> Self {
        Self { cluster: Cell::new(cluster), ..Self::default() }
    }

    /// Of which cluster it is.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        self.cluster.get()
    }

    /// The highest revision that was shown.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision.get()
    }

    /// The same with the highest term.
    #[must_use]
    pub fn seen(&self) -> Seen {
        Seen { revision: self.revision.get().0, term: self.term.get() }
    }

    /// This cluster is served from now on: what was shown of another binds nobody. Says whether it was another. One that is not
    /// told changes nothing.
    pub fn follow(&self, cluster: Option<ClusterId>) -> bool {
        let Some(cluster) = cluster else { return false };
        let another = self.cluster.replace(Some(cluster)) != Some(cluster);
        if another {
            self.forget();
        }
        another
    }

    /// An answer that tells this goes downstream.
    pub fn raise(&self, seen: Seen) {
        self.revision.set(self.revision.get().max(Revision(seen.revision)));
        self.term.set(self.term.get().max(seen.term));
    }

    /// What was shown is of a history that is gone.
    pub fn forget(&self) {
        self.revision.set(Revision(0));
        self.term.set(0);
    }

    /// The whole cluster has no more than `whole`, though `shown` had been shown before it was asked: what is above is of a history
    /// that is gone.
    pub fn forget_above(&self, shown: Revision, whole: i64) {
        if whole < shown.0 {
            self.revision.set(Revision(whole));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_shown_of_another_cluster_is_forgotten_and_nothing_else() {
        let floor = Floor::of(None);
        floor.raise(Seen { revision: 9, term: 3 });
        floor.raise(Seen { revision: 7, term: 4 });
        assert_eq!(floor.seen(), Seen { revision: 9, term: 4 });
        assert!(!floor.follow(None));
        assert!(floor.follow(Some(ClusterId(1))), "whose it was is not known");
        assert_eq!(floor.seen(), Seen::default());
        floor.raise(Seen { revision: 9, term: 3 });
        assert!(!floor.follow(Some(ClusterId(1))) && !floor.follow(None));
        assert_eq!(floor.revision(), Revision(9));
        assert!(floor.follow(Some(ClusterId(2))));
        assert_eq!((floor.seen(), floor.cluster()), (Seen::default(), Some(ClusterId(2))));
    }

    #[test]
    fn what_is_above_the_whole_cluster_is_of_a_history_that_is_gone() {
        let floor = Floor::of(None);
        floor.raise(Seen { revision: 9, term: 3 });
        floor.forget_above(Revision(9), 12);
        assert_eq!(floor.revision(), Revision(9));
        floor.forget_above(Revision(9), 4);
        assert_eq!(floor.seen(), Seen { revision: 4, term: 3 });
    }
}
