//! One watch's position in the history: what was delivered, what is next, what is held back.
//!
//! Owns: `next` (the first revision not wholly delivered), `seen` (the highest revision that upstream proved complete)
//! and the events of a revision whose end has not arrived.
//! Must not know: streams, ids, clients, or what a message looks like.
//! Invariants: `next` never falls, and moves only past a whole revision or a progress; only whole revisions come out,
//! each once, in order.

use super::fault::Planted;
use super::wire::Event;

/// How many bytes of one unfinished revision are held back; a larger one cannot be delivered whole. etcd's own limits
/// keep a transaction far below, but a deletion with prev_kv may reach any size. Small in tests.
const HELD_LIMIT: usize = if cfg!(test) { 16 << 10 } else { 256 << 20 };

#[derive(Debug, Default)]
pub(super) struct Cursor {
    first: i64,
    next: i64,
    seen: i64,
    held: Vec<Event>,
    held_bytes: usize,
}

/// Whole revisions, ready to be delivered.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) events: Vec<Event>,
    /// The highest revision among them.
    pub(super) last: i64,
}

/// Why a cursor cannot go on with what upstream sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Revisions out of order: this upstream stream is not to be believed.
    Disorder,
    /// One revision is larger than [`HELD_LIMIT`].
    TooLarge,
}

impl Cursor {
    /// A watch from `start` on, as its client asked.
    pub(super) fn from_start(start: i64) -> Self {
        Self { first: start, next: start, ..Self::default() }
    }

    /// A watch from after `revision`, at which upstream is known to have been.
    pub(super) fn after(revision: i64) -> Self {
        Self { seen: revision, ..Self::from_start(revision.saturating_add(1)) }
    }

    /// The first revision that the client wants.
    pub(super) fn first(&self) -> i64 {
        self.first
    }

    /// The first revision that was not wholly delivered.
    pub(super) fn next(&self) -> i64 {
        self.next
    }

    /// The highest revision below which nothing is missing.
    pub(super) fn floor(&self) -> i64 {
        self.next.saturating_sub(1)
    }

    /// The highest revision that upstream proved to have reached for this watch; 0 when none.
    pub(super) fn seen(&self) -> i64 {
        self.seen
    }

    /// Whether a revision has begun to arrive and has not ended.
    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Bytes of a revision that has begun to arrive and has not ended.
    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Where a new upstream watch must begin. Never 0, which would mean "now".
    ///
    /// With `reach_back` it begins at the last revision that was proven, whose events are dropped again: a server that
    /// refuses progress to a watch from the future (V4 in the fact sheet) would answer none until the next write.
    pub(super) fn resume_at(&self, reach_back: bool) -> i64 {
        if Planted::OneLate.is_on() {
            return self.next.max(1) + 1;
        }
        let start = if reach_back && self.seen > 0 && self.seen < self.next { self.seen } else { self.next };
        start.max(1)
    }

    /// Takes in the events of one response; `more` when the revision of the last one may go on in the next response.
    pub(super) fn absorb(&mut self, events: Vec<Event>, more: bool) -> Result<Option<Ready>, Fault> {
        let mut ready: Vec<Event> = Vec::new();
        let mut previous = 0;
        for event in events {
            if event.revision < previous {
                return Err(Fault::Disorder);
            }
            previous = event.revision;
            if event.revision < self.next {
                continue;
            }
            match self.held.last() {
                Some(last) if event.revision < last.revision => return Err(Fault::Disorder),
                Some(last) if event.revision > last.revision => self.release(&mut ready),
                _ => {}
            }
            self.held_bytes += event.raw.len();
            self.held.push(event);
        }
        if !more {
            self.release(&mut ready);
        } else if self.held_bytes > HELD_LIMIT {
            return Err(Fault::TooLarge);
        }
        Ok(ready.last().map(|event| event.revision).map(|last| {
            self.next = last.saturating_add(1);
            self.seen = last;
            Ready { events: ready, last }
        }))
    }

    fn release(&mut self, ready: &mut Vec<Event>) {
        if ready.is_empty() {
            *ready = std::mem::take(&mut self.held);
        } else {
            ready.append(&mut self.held);
        }
        self.held_bytes = 0;
    }

    /// Upstream has told everything up to and with `revision`. Whether that is news, or at least no step back.
    pub(super) fn progress(&mut self, revision: i64) -> bool {
        if self.holds() || revision < self.floor() {
            return false;
        }
        self.next = revision.saturating_add(1);
        self.seen = revision;
        true
    }

    /// The upstream watch is gone: what it began to tell comes again from the next one.
    pub(super) fn drop_held(&mut self) {
        if Planted::DropHeld.is_on() {
            self.next = self.held.last().map_or(self.next, |event| event.revision + 1);
        }
        if Planted::OneEarly.is_on() && self.seen == self.floor() {
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

    fn events(revisions: &[i64]) -> Vec<Event> {
        revisions
            .iter()
            .map(|revision| Event { raw: Bytes::from_static(b"event"), revision: *revision })
            .collect()
    }

    fn taken(cursor: &mut Cursor, revisions: &[i64], more: bool) -> Vec<i64> {
        let ready = cursor.absorb(events(revisions), more).unwrap();
        ready.map_or_else(Vec::new, |ready| ready.events.iter().map(|event| event.revision).collect())
    }

    #[test]
    fn only_whole_revisions_come_out() {
        let mut cursor = Cursor::from_start(5);
        assert_eq!(taken(&mut cursor, &[5, 6, 6], true), [5]);
        assert_eq!((cursor.next(), cursor.holds()), (6, true));
        assert_eq!(taken(&mut cursor, &[6], true), [0; 0]);
        assert_eq!(taken(&mut cursor, &[6, 7], true), [6, 6, 6, 6]);
        assert_eq!(taken(&mut cursor, &[7], false), [7, 7]);
        assert_eq!((cursor.next(), cursor.seen(), cursor.holds()), (8, 7, false));
    }

    #[test]
    fn what_was_delivered_does_not_come_again() {
        let mut cursor = Cursor::from_start(5);
        assert_eq!(taken(&mut cursor, &[4, 5, 6], false), [5, 6]);
        assert_eq!(taken(&mut cursor, &[6, 6], false), [0; 0]);
        assert_eq!(taken(&mut cursor, &[6, 7], false), [7]);
    }

    #[test]
    fn what_was_held_comes_again_from_the_next_upstream_watch() {
        let mut cursor = Cursor::from_start(5);
        assert_eq!(taken(&mut cursor, &[5, 5], true), [0; 0]);
        cursor.drop_held();
        assert_eq!((cursor.resume_at(false), cursor.holds()), (5, false));
        assert_eq!(taken(&mut cursor, &[5, 5, 5], false), [5, 5, 5]);
    }

    #[test]
    fn disorder_is_a_fault() {
        assert_eq!(Cursor::from_start(1).absorb(events(&[6, 5]), false).unwrap_err(), Fault::Disorder);
        let mut cursor = Cursor::from_start(1);
        taken(&mut cursor, &[6], true);
        assert_eq!(cursor.absorb(events(&[5]), false).unwrap_err(), Fault::Disorder);
    }

    #[test]
    fn a_revision_without_an_end_is_a_fault() {
        let mut cursor = Cursor::from_start(1);
        let large = || vec![Event { raw: Bytes::from(vec![0; HELD_LIMIT / 2]), revision: 3 }];
        assert!(cursor.absorb(large(), true).unwrap().is_none());
        assert!(cursor.absorb(large(), true).unwrap().is_none());
        assert_eq!(cursor.absorb(large(), true).unwrap_err(), Fault::TooLarge);
    }

    #[test]
    fn progress_moves_forward_only_and_never_past_what_is_held() {
        let mut cursor = Cursor::from_start(5);
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
        let mut cursor = Cursor::from_start(5);
        assert_eq!((cursor.resume_at(true), cursor.resume_at(false)), (5, 5));
        taken(&mut cursor, &[7], false);
        assert_eq!((cursor.resume_at(true), cursor.resume_at(false)), (7, 8));
        assert_eq!(Cursor::from_start(-4).resume_at(false), 1);
        assert_eq!((Cursor::after(9).resume_at(true), Cursor::after(9).first()), (9, 10));
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
        /// Whatever upstream says, in whatever order: `next` never falls, what comes out is new, in order, and ends
        /// where a revision ends; what is held is bounded by what came since the last loss.
        #[test]
        fn what_comes_out_is_new_and_in_order(
            start in prop_oneof![20 => 1_i64..10, 1 => any::<i64>()],
            steps in prop::collection::vec(step(), 0..40),
        ) {
            let mut cursor = Cursor::from_start(start);
            let mut came = 0;
            for step in steps {
                let next = cursor.next();
                match step {
                    Step::Absorb(revisions, more) => {
                        came += revisions.len();
                        match cursor.absorb(events(&revisions), more) {
                            Ok(Some(ready)) => {
                                let out: Vec<i64> = ready.events.iter().map(|event| event.revision).collect();
                                prop_assert!(out.is_sorted() && out.first().is_some_and(|first| *first >= next));
                                prop_assert_eq!(out.last(), Some(&ready.last));
                                // The newest may go on in the next response.
                                prop_assert!(!more || revisions.last().is_some_and(|newest| ready.last < *newest));
                                prop_assert_eq!((cursor.floor(), cursor.seen()), (ready.last.min(i64::MAX - 1), ready.last));
                                prop_assert!(cursor.held.iter().all(|event| event.revision > ready.last));
                            }
                            Ok(None) => prop_assert_eq!(cursor.next(), next),
                            // Its stream is given up, and with it what it began to tell.
                            Err(_) => cursor.drop_held(),
                        }
                    }
                    Step::Progress(revision) => {
                        let (held, floor) = (cursor.holds(), cursor.floor());
                        let moved = cursor.progress(revision);
                        prop_assert_eq!(moved, !held && revision >= floor);
                        prop_assert_eq!(cursor.next(), if moved { revision.saturating_add(1) } else { next });
                    }
                    Step::Lose => {
                        cursor.drop_held();
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
