//! One watch's position in the history: what was delivered, what is next, what is held back.
//!
//! Owns: `next` (the first revision not wholly delivered), `seen` (the highest revision that upstream proved complete)
//! and the events of a revision whose end has not arrived.
//! Must not know: streams, ids, clients, or what a message looks like.
//! Invariants: `next` never falls, and moves only past a whole revision or a progress; only whole revisions come out,
//! each once, in order.

use super::wire::Event;

/// How many bytes of one unfinished revision are held back. A revision beyond it cannot be delivered whole.
pub(super) const HELD_LIMIT: usize = 256 << 20;

#[derive(Debug, Default)]
pub(super) struct Cursor {
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
        Self { next: start, ..Self::default() }
    }

    /// A watch from after `revision`, at which upstream is known to have been.
    pub(super) fn after(revision: i64) -> Self {
        Self { next: revision.saturating_add(1), seen: revision, ..Self::default() }
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

    /// Where a new upstream watch must begin. Never 0, which would mean "now".
    ///
    /// With `reach_back` it begins at the last revision that was proven, whose events are dropped again: a server that
    /// refuses progress to a watch from the future (V4 in the fact sheet) would answer none until the next write.
    pub(super) fn resume_at(&self, reach_back: bool) -> i64 {
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
        self.held = Vec::new();
        self.held_bytes = 0;
    }
}
