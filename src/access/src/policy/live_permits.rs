//! The permissions of a running stream, replaced while the stream runs.
//!
//! Owns: the current permissions and waking the stream at a change. Must not know: the stream's messages, the
//! reason for a change. Invariant: a replacement after a check wakes the task of that check.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Waker};

use super::permit_set::PermitSet;

/// The permissions of a stream.
#[derive(Debug)]
pub struct LivePermits {
    now: RefCell<Rc<PermitSet>>,
    changed: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl LivePermits {
    /// The permissions at the beginning of the stream.
    #[must_use]
    pub fn new(permits: Rc<PermitSet>) -> Self {
        Self { now: RefCell::new(permits), changed: Cell::new(false), waker: RefCell::default() }
    }

    /// The current permissions.
    #[must_use]
    pub fn now(&self) -> Rc<PermitSet> {
        Rc::clone(&self.now.borrow())
    }

    /// Replaces the permissions, and wakes the stream if they differ.
    pub fn replace(&self, permits: Rc<PermitSet>) {
        if self.now.borrow().is_same(&permits) {
            return;
        }
        self.now.replace(permits);
        self.changed.set(true);
        self.wake();
    }

    /// Wakes the stream, for another change than that of the permissions.
    pub fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// True once after each change. The task of `cx` is woken at the next change.
    pub fn take_change(&self, cx: &Context<'_>) -> bool {
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
        self.changed.take()
    }
}
