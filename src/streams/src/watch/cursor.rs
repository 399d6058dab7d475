//! A watch's position in the history: delivered, next and held-back revisions.
//!
//! Owns: `next` (the first revision not wholly delivered), `seen` (the highest revision proven complete by
//! upstream), and the events of a revision still without an end.
//! Must not know: streams, ids, clients, or the encoding of messages.
//! Invariants: `next` never falls, and moves only past a whole revision or a progress; only whole revisions
//! come out, each once, in order.

use super::planted_fault::PlantedFault;
use super::watch_messages::WatchEventBytes;

#[derive(Debug, Default)]
pub(super) struct WatchCursor {
    first: i64,
    next: i64,
    seen: i64,
    held: Vec<WatchEventBytes>,
    held_bytes: usize,
}

/// Whole revisions, ready to be delivered.
#[derive(Debug)]
pub(super) struct WholeRevisions {
    pub(super) events: Vec<WatchEventBytes>,
    /// The highest revision of the events.
    pub(super) last: i64,
}

/// The reason why a cursor cannot go on with upstream's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CursorFault {
    /// Revisions out of order: the upstream stream is not to be trusted.
    Disorder,
    /// A revision is larger than the limit of held bytes.
    TooLarge,
}

impl WatchCursor {
    /// A cursor of a watch from `start` on, as requested by the client.
    pub(super) fn from_start(start: i64) -> Self {
        Self { first: start, next: start, ..Self::default() }
    }

    /// A cursor of a watch that begins after `revision`, known to have been reached upstream.
    pub(super) fn after(revision: i64) -> Self {
        Self { seen: revision, ..Self::from_start(revision.saturating_add(1)) }
    }

    /// The first revision wanted by the client.
    pub(super) fn first(&self) -> i64 {
        self.first
    }

    /// The first revision not wholly delivered.
    pub(super) fn next(&self) -> i64 {
        self.next
    }

    /// The highest revision without missing events up to and including it.
    pub(super) fn floor(&self) -> i64 {
        self.next.saturating_sub(1)
    }

    /// The highest revision proven by upstream for the watch; 0 if none.
    pub(super) fn seen(&self) -> i64 {
        self.seen
    }

    /// True if a revision has begun to arrive and has not ended.
    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Bytes of the revision that has begun to arrive and has not ended.
    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// The start revision of a new upstream watch. Never 0, the value for "from now".
    ///
    /// With `reach_back` the watch starts at the last proven revision, and the events of that revision are
    /// dropped again: a member that sends no progress to a watch from a future revision (3.4.38, 3.5.22,
    /// 3.6.2 and later) would send none until the next write. See `docs/etcd-facts.md#v4`.
    pub(super) fn resume_at(&self, reach_back: bool) -> i64 {
        if PlantedFault::OneLate.is_on() {
            return self.next.max(1) + 1;
        }
        let start = if reach_back && self.seen > 0 && self.seen < self.next { self.seen } else { self.next };
        start.max(1)
    }

    /// Takes in the events of a response; `more` if the last event's revision may continue in the next
    /// response. Holds back `limit` bytes at most of an unfinished revision.
    pub(super) fn absorb(
        &mut self,
        events: Vec<WatchEventBytes>,
        more: bool,
        limit: usize,
    ) -> Result<Option<WholeRevisions>, CursorFault> {
        let mut ready: Vec<WatchEventBytes> = Vec::new();
        let mut previous = 0;
        for event in events {
            if event.revision < previous {
                return Err(CursorFault::Disorder);
            }
            previous = event.revision;
            if event.revision < self.next {
                continue;
            }
            match self.held.last() {
                Some(last) if event.revision < last.revision => return Err(CursorFault::Disorder),
                Some(last) if event.revision > last.revision => self.release(&mut ready),
                _ => {}
            }
            self.held_bytes += event.raw.len();
            self.held.push(event);
        }
        if !more {
            self.release(&mut ready);
        } else if self.held_bytes > limit {
            return Err(CursorFault::TooLarge);
        }
        Ok(ready.last().map(|event| event.revision).map(|last| {
            self.next = last.saturating_add(1);
            self.seen = last;
            WholeRevisions { events: ready, last }
        }))
    }

    /// Moves past whole revisions from `first` to `last`, delivered as received. Returns false, and changes
    /// nothing, if a revision has begun to arrive or `first` was delivered before.
    pub(super) fn pass(&mut self, first: i64, last: i64) -> bool {
        if self.holds() || first < self.next {
            return false;
        }
        self.next = last.saturating_add(1);
        self.seen = last;
        true
    }

    fn release(&mut self, ready: &mut Vec<WatchEventBytes>) {
        if ready.is_empty() {
            *ready = std::mem::take(&mut self.held);
        } else {
            ready.append(&mut self.held);
        }
        self.held_bytes = 0;
    }

    /// Upstream has sent every event up to and including `revision`. Returns true if the cursor did not have
    /// to go back.
    pub(super) fn progress(&mut self, revision: i64) -> bool {
        if self.holds() || revision < self.floor() {
            return false;
        }
        self.next = revision.saturating_add(1);
        self.seen = revision;
        true
    }

    /// The upstream watch is gone: the held-back events come again from the next upstream watch.
    pub(super) fn drop_unfinished_revision(&mut self) {
        if PlantedFault::DropHeld.is_on() {
            self.next = self.held.last().map_or(self.next, |event| event.revision + 1);
        }
        if PlantedFault::OneEarly.is_on() && self.seen == self.floor() {
            self.next -= 1;
        }
        self.held = Vec::new();
        self.held_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 16 << 10;

    fn events(revisions: &[i64]) -> Vec<WatchEventBytes> {
        revisions
            .iter()
            .map(|revision| WatchEventBytes { raw: Bytes::from_static(b"event"), revision: *revision })
            .collect()
    }

    fn taken(cursor: &mut WatchCursor, revisions: &[i64], more: bool) -> Vec<i64> {
        let ready = cursor.absorb(events(revisions), more, LIMIT).unwrap();
        ready.map_or_else(Vec::new, |ready| ready.events.iter().map(|event| event.revision).collect())
    }

    #[test]
    fn only_whole_revisions_come_out() {
        let mut cursor = WatchCursor::from_start(5);
        assert_eq!(taken(&mut cursor, &[5, 6, 6], true), [5]);
        assert_eq!((cursor.next(), cursor.holds()), (6, true));
        assert_eq!(taken(&mut cursor, &[6], true), [0; 0]);
        assert_eq!(taken(&mut cursor, &[6, 7], true), [6, 6, 6, 6]);
        assert_eq!(taken(&mut cursor, &[7], false), [7, 7]);
        assert_eq!((cursor.next(), cursor.seen(), cursor.holds()), (8, 7, false));
    }

    #[test]
    fn what_was_delivered_does_not_come_again() {
        let mut cursor = WatchCursor::from_start(5);
        assert_eq!(taken(&mut cursor, &[4, 5, 6], false), [5, 6]);
        assert_eq!(taken(&mut cursor, &[6, 6], false), [0; 0]);
        assert_eq!(taken(&mut cursor, &[6, 7], false), [7]);
    }

    #[test]
    fn what_was_held_comes_again_from_the_next_upstream_watch() {
        let mut cursor = WatchCursor::from_start(5);
        assert_eq!(taken(&mut cursor, &[5, 5], true), [0; 0]);
        cursor.drop_unfinished_revision();
        assert_eq!((cursor.resume_at(false), cursor.holds()), (5, false));
        assert_eq!(taken(&mut cursor, &[5, 5, 5], false), [5, 5, 5]);
    }

    #[test]
    fn disorder_is_a_fault() {
        assert_eq!(
            WatchCursor::from_start(1).absorb(events(&[6, 5]), false, LIMIT).unwrap_err(),
            CursorFault::Disorder
        );
        let mut cursor = WatchCursor::from_start(1);
        taken(&mut cursor, &[6], true);
        assert_eq!(cursor.absorb(events(&[5]), false, LIMIT).unwrap_err(), CursorFault::Disorder);
    }

    #[test]
    fn a_revision_without_an_end_is_a_fault() {
        let mut cursor = WatchCursor::from_start(1);
        let large = || vec![WatchEventBytes { raw: Bytes::from(vec![0; LIMIT / 2]), revision: 3 }];
        assert!(cursor.absorb(large(), true, LIMIT).unwrap().is_none());
        assert!(cursor.absorb(large(), true, LIMIT).unwrap().is_none());
        assert_eq!(cursor.absorb(large(), true, LIMIT).unwrap_err(), CursorFault::TooLarge);
    }

    #[test]
    fn progress_moves_forward_only_and_never_past_what_is_held() {
        let mut cursor = WatchCursor::from_start(5);
        assert!(!cursor.progress(3));
        assert!(cursor.progress(9) && cursor.progress(9));
        assert_eq!((cursor.next(), cursor.seen()), (10, 9));
        assert!(!cursor.progress(8));
        taken(&mut cursor, &[10], true);
        assert!(!cursor.progress(12));
        assert_eq!(cursor.next(), 10);
    }

    #[test]
    fn a_resume_reaches_back_only_to_what_was_proven_and_never_means_now() {
        let mut cursor = WatchCursor::from_start(5);
        assert_eq!((cursor.resume_at(true), cursor.resume_at(false)), (5, 5));
        taken(&mut cursor, &[7], false);
        assert_eq!((cursor.resume_at(true), cursor.resume_at(false)), (7, 8));
        assert_eq!(WatchCursor::from_start(-4).resume_at(false), 1);
        assert_eq!((WatchCursor::after(9).resume_at(true), WatchCursor::after(9).first()), (9, 10));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Absorb(Vec<i64>, bool),
        Progress(i64),
        Lose,
    }

    fn step() -> impl Strategy<Value = Step> {
        let near = || prop_oneof![20 => 1_i64..30, 1 => any::<i64>()];
        prop_oneof![
            4 => (prop::collection::vec(near(), 0..6), any::<bool>(), any::<bool>()).prop_map(
                |(mut revisions, sorted, more)| {
                    if sorted {
                        revisions.sort_unstable();
                    }
                    Step::Absorb(revisions, more)
                }
            ),
            2 => near().prop_map(Step::Progress),
            1 => Just(Step::Lose),
        ]
    }

    proptest! {
        /// For any upstream input, in any order: `next` never falls; delivered events are new, in order, and
        /// end at a revision's end; held-back events are bounded by the events received since the last loss.
        #[test]
        fn what_comes_out_is_new_and_in_order(
            start in prop_oneof![20 => 1_i64..10, 1 => any::<i64>()],
            steps in prop::collection::vec(step(), 0..40),
        ) {
            let mut cursor = WatchCursor::from_start(start);
            let mut came = 0;
            for step in steps {
                let next = cursor.next();
                match step {
                    Step::Absorb(revisions, more) => {
                        came += revisions.len();
                        match cursor.absorb(events(&revisions), more, LIMIT) {
                            Ok(Some(ready)) => {
                                let out: Vec<i64> = ready.events.iter().map(|event| event.revision).collect();
                                prop_assert!(
                                    out.is_sorted() && out.first().is_some_and(|first| *first >= next)
                                );
                                prop_assert_eq!(out.last(), Some(&ready.last));
                                // The newest revision may continue in the next response.
                                prop_assert!(
                                    !more || revisions.last().is_some_and(|newest| ready.last < *newest)
                                );
                                prop_assert_eq!(
                                    (cursor.floor(), cursor.seen()),
                                    (ready.last.min(i64::MAX - 1), ready.last)
                                );
                                prop_assert!(cursor.held.iter().all(|event| event.revision > ready.last));
                            }
                            Ok(None) => prop_assert_eq!(cursor.next(), next),
                            // The stream is given up, with its held-back events.
                            Err(_) => cursor.drop_unfinished_revision(),
                        }
                    }
                    Step::Progress(revision) => {
                        let (held, floor) = (cursor.holds(), cursor.floor());
                        let moved = cursor.progress(revision);
                        prop_assert_eq!(moved, !held && revision >= floor);
                        prop_assert_eq!(cursor.next(), if moved { revision.saturating_add(1) } else { next });
                    }
                    Step::Lose => {
                        cursor.drop_unfinished_revision();
                        came = 0;
                    }
                }
                prop_assert!(cursor.next() >= next, "{} after {next}", cursor.next());
                prop_assert!(cursor.held.len() <= came);
                prop_assert!(cursor.resume_at(true) >= 1 && cursor.resume_at(true) <= cursor.next().max(1));
            }
        }
    }
}
