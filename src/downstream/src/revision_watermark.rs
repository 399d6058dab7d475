//! Revision watermark of a client connection: no later answer may be older (`docs/decisions.md#d21`).
//!
//! Owns: the highest revision and term shown, and their cluster. Must not know: the member behind an answer.
//! Invariant: revisions of two clusters are never compared.

use std::cell::Cell;

use keyward_etcd::identity::{ClusterId, Revision};
use keyward_etcd::rpc::header::AnswerProgress;

/// The watermark of one connection.
#[derive(Debug, Default)]
pub struct RevisionWatermark {
    cluster: Cell<Option<ClusterId>>,
    revision: Cell<Revision>,
    term: Cell<u64>,
}

impl RevisionWatermark {
    /// A watermark with no answer shown yet, for `cluster` if known.
    #[must_use]
    pub fn of(cluster: Option<ClusterId>) -> Self {
        Self { cluster: Cell::new(cluster), ..Self::default() }
    }

    /// The cluster of the watermark.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        self.cluster.get()
    }

    /// The highest revision shown.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision.get()
    }

    /// The highest revision and term shown.
    #[must_use]
    pub fn header_watermark(&self) -> AnswerProgress {
        AnswerProgress { revision: self.revision.get().0, term: self.term.get() }
    }

    /// Switches to `cluster`. If the cluster differs from the previous cluster, or none was known, resets the
    /// watermark and returns true. `None` changes nothing.
    pub fn follow(&self, cluster: Option<ClusterId>) -> bool {
        let Some(cluster) = cluster else { return false };
        let another = self.cluster.replace(Some(cluster)) != Some(cluster);
        if another {
            self.reset();
        }
        another
    }

    /// Raises the watermark for an answer sent downstream with the header `seen`.
    pub fn raise(&self, seen: AnswerProgress) {
        self.revision.set(self.revision.get().max(Revision(seen.revision)));
        self.term.set(self.term.get().max(seen.term));
    }

    /// Resets the watermark: the revisions shown belong to a lost history.
    pub fn reset(&self) {
        self.revision.set(Revision(0));
        self.term.set(0);
    }

    /// Lowers the watermark to `whole`, the highest revision of the whole cluster, asked for after `shown`
    /// had been shown. Revisions above `whole` belong to a lost history.
    pub fn lower_to(&self, shown: Revision, whole: i64) {
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
        let floor = RevisionWatermark::of(None);
        floor.raise(AnswerProgress { revision: 9, term: 3 });
        floor.raise(AnswerProgress { revision: 7, term: 4 });
        assert_eq!(floor.header_watermark(), AnswerProgress { revision: 9, term: 4 });
        assert!(!floor.follow(None));
        assert!(floor.follow(Some(ClusterId(1))), "whose it was is not known");
        assert_eq!(floor.header_watermark(), AnswerProgress::default());
        floor.raise(AnswerProgress { revision: 9, term: 3 });
        assert!(!floor.follow(Some(ClusterId(1))) && !floor.follow(None));
        assert_eq!(floor.revision(), Revision(9));
        assert!(floor.follow(Some(ClusterId(2))));
        assert_eq!(
            (floor.header_watermark(), floor.cluster()),
            (AnswerProgress::default(), Some(ClusterId(2)))
        );
    }

    #[test]
    fn what_is_above_the_whole_cluster_is_of_a_history_that_is_gone() {
        let floor = RevisionWatermark::of(None);
        floor.raise(AnswerProgress { revision: 9, term: 3 });
        floor.lower_to(Revision(9), 12);
        assert_eq!(floor.revision(), Revision(9));
        floor.lower_to(Revision(9), 4);
        assert_eq!(floor.header_watermark(), AnswerProgress { revision: 4, term: 3 });
    }
}
