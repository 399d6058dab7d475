//! The limits of a running stream or waiting call, replaced while it runs.
//!
//! Owns: the present limits, and moving what counts from the limits of before. Must not know: the reason for
//! a change, the stream's messages. Invariants (docs/decisions.md#d59): what the stream holds counts in each
//! scope of its present limits, once, also if there were no limits when the stream began; a replacement
//! refuses nothing that runs.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::caller_usage::CallerUsage;
use super::exceeded::Exceeded;

/// The limits of a stream, and what counts.
pub struct LiveUsage {
    now: RefCell<Option<Rc<CallerUsage>>>,
    /// True if the stream counts as a call under way.
    is_call: bool,
    /// The stream's counted watches.
    watches: Cell<u32>,
    changed: Cell<bool>,
}

impl LiveUsage {
    /// The limits at the beginning of the stream, which count the call already if `is_call` is true.
    pub(super) fn new(now: Option<Rc<CallerUsage>>, is_call: bool) -> Self {
        Self { now: RefCell::new(now), is_call, watches: Cell::new(0), changed: Cell::new(false) }
    }

    /// The present limits; `None` without any limit.
    #[must_use]
    pub fn now(&self) -> Option<Rc<CallerUsage>> {
        self.now.borrow().clone()
    }

    /// Replaces the limits. Returns true if they differ: see [`LiveUsage::take_change`].
    pub fn replace(&self, usage: Option<Rc<CallerUsage>>) -> bool {
        let before = self.now();
        let is_same = match (&before, &usage) {
            (None, None) => true,
            (Some(before), Some(now)) => before.is_same(now),
            (None, Some(_)) | (Some(_), None) => false,
        };
        if is_same {
            return false;
        }
        let calls = u32::from(self.is_call);
        if let Some(now) = &usage {
            now.adopt(before.as_deref(), calls, self.watches.get());
        }
        if let Some(before) = &before {
            before.release(usage.as_deref(), calls, self.watches.get());
        }
        self.now.replace(usage);
        self.changed.set(true);
        true
    }

    /// True once after each change of the limits.
    pub fn take_change(&self) -> bool {
        self.changed.take()
    }

    /// Counts a further watch.
    ///
    /// # Errors
    /// A limit is exceeded and enforced.
    pub(super) fn begin_watch(&self) -> Result<(), Exceeded> {
        if let Some(usage) = self.now.borrow().as_ref() {
            usage.begin_watch()?;
        }
        self.watches.set(self.watches.get() + 1);
        Ok(())
    }

    /// Counts `live` watches, whatever the limits say: they have begun.
    pub(super) fn set_watches(&self, live: u32) {
        let counted = self.watches.replace(live);
        let now = self.now.borrow();
        let Some(usage) = now.as_ref() else { return };
        if live > counted {
            usage.adopt(None, 0, live - counted);
        } else if live < counted {
            usage.release(None, 0, counted - live);
        }
    }

    /// Releases the watches beyond the first `live`.
    pub(super) fn keep_watches(&self, live: u32) {
        if live < self.watches.get() {
            self.set_watches(live);
        }
    }
}

impl Drop for LiveUsage {
    fn drop(&mut self) {
        if let Some(usage) = self.now.get_mut() {
            usage.release(None, u32::from(self.is_call), self.watches.get());
        }
    }
}
