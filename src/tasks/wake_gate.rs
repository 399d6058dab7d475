//! A gate before the rare waits of a task.
//!
//! A task waiting for many things polls all of them at each wakeup, although nearly every wakeup is for the
//! same one. Waits behind a gate are polled only after a wakeup of their own.
//!
//! Owns: the waker of the waits behind the gate. Must not know the waits. Invariant: no wakeup is lost: a
//! wakeup before or during a poll leads to another poll.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// The gate. All its waits belong to a single task.
#[derive(Debug)]
pub struct WakeGate {
    wakeup: Arc<GateWakeup>,
    waker: Waker,
}

#[derive(Debug)]
struct GateWakeup {
    is_open: AtomicBool,
    task: AtomicWaker,
}

impl Wake for GateWakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_open.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl Default for WakeGate {
    /// An open gate: the waits were never polled.
    fn default() -> Self {
        let wakeup = Arc::new(GateWakeup { is_open: AtomicBool::new(true), task: AtomicWaker::new() });
        let waker = Waker::from(Arc::clone(&wakeup));
        Self { wakeup, waker }
    }
}

impl WakeGate {
    /// Opens the gate: there is another wait behind the gate, or a wait has changed.
    pub fn open(&self) {
        self.wakeup.is_open.store(true, Ordering::Release);
    }

    /// Calls `poll`, which polls the waits behind the gate, if the gate is open. A pending `poll` closes the
    /// gate until a wait's wakeup.
    pub fn poll<T>(&self, cx: &Context<'_>, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        // Registered first, so that a wakeup from another thread reaches the task or is seen below.
        self.wakeup.task.register(cx.waker());
        if !self.wakeup.is_open.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        let polled = poll(&mut Context::from_waker(&self.waker));
        if polled.is_ready() {
            // The other waits may have been woken too, and were not polled.
            self.open();
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_wait_is_polled_after_its_own_wakeup_only() {
        let wakes = Arc::new(Wakes::default());
        let task = Waker::from(Arc::clone(&wakes));
        let cx = Context::from_waker(&task);
        let gate = WakeGate::default();
        let mut own = None;
        let mut polls = 0;
        let mut pending = |gate: &WakeGate| {
            let polled = gate.poll(&cx, |cx| -> Poll<()> {
                polls += 1;
                own = Some(cx.waker().clone());
                Poll::Pending
            });
            assert!(polled.is_pending());
            (polls, own.clone())
        };
        let (first, waker) = pending(&gate);
        assert_eq!((first, pending(&gate).0), (1, 1));
        waker.expect("polled").wake();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "the task hears of it");
        assert_eq!((pending(&gate).0, pending(&gate).0), (2, 2));
        gate.open();
        assert_eq!(pending(&gate).0, 3);
    }

    #[test]
    fn nothing_is_lost_beside_a_wait_that_is_over() {
        let task = Waker::from(Arc::new(Wakes::default()));
        let cx = Context::from_waker(&task);
        let gate = WakeGate::default();
        assert_eq!(gate.poll(&cx, |_| Poll::Ready(1)), Poll::Ready(1));
        assert_eq!(gate.poll(&cx, |_| Poll::Ready(2)), Poll::Ready(2), "the other waits have their turn");
        let woken_meanwhile = gate.poll(&cx, |cx| -> Poll<()> {
            cx.waker().wake_by_ref();
            Poll::Pending
        });
        assert!(woken_meanwhile.is_pending());
        assert_eq!(gate.poll(&cx, |_| Poll::Ready(3)), Poll::Ready(3));
    }
}
