//! A gate before the rare waits of a task.
//!
//! A task waiting for many things polls all of them at each wakeup, although nearly every wakeup is for the
//! same one. Waits behind a gate are polled only after a wakeup of their own.
//!
//! Owns: the waker of the waits behind the gate. Must not know the waits. Invariant: no wakeup is lost: a
//! wakeup before or during a poll leads to another poll.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// The gate. All its waits belong to a single task.
#[derive(Debug)]
pub struct WakeGate {
    wakeup: Arc<GateWakeup>,
    waker: Waker,
    /// A copy of the task's waker in `wakeup`: comparing it takes no lock.
    task: Waker,
}

#[derive(Debug)]
struct GateWakeup {
    is_open: AtomicBool,
    /// The gate's owner is about to poll the waits anyway.
    is_quiet: AtomicBool,
    /// Kept after a wakeup, so that the next one finds it.
    task: Mutex<Waker>,
}

impl GateWakeup {
    fn task(&self) -> MutexGuard<'_, Waker> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for GateWakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_open.store(true, Ordering::SeqCst);
        if !self.is_quiet.load(Ordering::SeqCst) {
            self.task().wake_by_ref();
        }
    }
}

impl Default for WakeGate {
    /// An open gate: the waits were never polled.
    fn default() -> Self {
        let task = Waker::noop();
        let wakeup = Arc::new(GateWakeup {
            is_open: AtomicBool::new(true),
            is_quiet: AtomicBool::new(false),
            task: Mutex::new(task.clone()),
        });
        let waker = Waker::from(Arc::clone(&wakeup));
        Self { wakeup, waker, task: task.clone() }
    }
}

impl WakeGate {
    /// Opens the gate: there is another wait behind the gate, or a wait has changed.
    pub fn open(&self) {
        self.wakeup.is_open.store(true, Ordering::SeqCst);
    }

    /// True if the next [`WakeGate::poll`] polls the waits.
    fn is_open(&self) -> bool {
        self.wakeup.is_open.load(Ordering::SeqCst)
    }

    /// Calls `work`, the task's own work, which wakes waits behind the gate. Such a wakeup opens the gate and
    /// does not wake the task. True if `work` has opened the gate, which the caller then polls; false for a
    /// gate that was open before, since it has woken the task.
    #[must_use]
    pub fn quietly(&self, work: impl FnOnce()) -> bool {
        let was_open = self.is_open();
        self.wakeup.is_quiet.store(true, Ordering::SeqCst);
        work();
        self.wakeup.is_quiet.store(false, Ordering::SeqCst);
        !was_open && self.is_open()
    }

    /// Calls `poll`, which polls the waits behind the gate, if the gate is open. A pending `poll` closes the
    /// gate until a wait's wakeup.
    pub fn poll<T>(&mut self, cx: &Context<'_>, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        // Registered first, so that a wakeup from another thread reaches the task or is seen below.
        if !self.task.will_wake(cx.waker()) {
            self.task.clone_from(cx.waker());
            self.wakeup.task().clone_from(cx.waker());
        }
        // Nearly always closed: a load costs less than a swap.
        if !self.is_open() {
            return Poll::Pending;
        }
        self.wakeup.is_open.store(false, Ordering::SeqCst);
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

    /// Polls a wait behind the gate that is not over. Returns the wait's waker if the wait was polled.
    fn polled_wait(gate: &mut WakeGate, cx: &Context<'_>) -> Option<Waker> {
        let mut waker = None;
        let polled = gate.poll(cx, |cx| -> Poll<()> {
            waker = Some(cx.waker().clone());
            Poll::Pending
        });
        assert!(polled.is_pending());
        waker
    }

    #[test]
    fn a_wait_is_polled_after_its_own_wakeup_only() {
        let wakes = Arc::new(Wakes::default());
        let task = Waker::from(Arc::clone(&wakes));
        let cx = Context::from_waker(&task);
        let mut gate = WakeGate::default();
        let waker = polled_wait(&mut gate, &cx).expect("polled");
        assert!(polled_wait(&mut gate, &cx).is_none());
        waker.wake();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "the task hears of it");
        assert!(polled_wait(&mut gate, &cx).is_some());
        assert!(polled_wait(&mut gate, &cx).is_none());
        gate.open();
        assert!(polled_wait(&mut gate, &cx).is_some());
    }

    #[test]
    fn a_wakeup_by_the_tasks_own_work_opens_the_gate_and_wakes_nobody() {
        let wakes = Arc::new(Wakes::default());
        let task = Waker::from(Arc::clone(&wakes));
        let cx = Context::from_waker(&task);
        let mut gate = WakeGate::default();
        let waker = polled_wait(&mut gate, &cx).expect("polled");
        assert!(!gate.quietly(|| ()));
        assert!(gate.quietly(|| waker.wake_by_ref()));
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
        polled_wait(&mut gate, &cx).expect("polled").wake();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "after the work, a wakeup reaches the task");
        assert!(!gate.quietly(|| waker.wake_by_ref()), "the gate was open before");
    }

    #[test]
    fn nothing_is_lost_beside_a_wait_that_is_over() {
        let task = Waker::from(Arc::new(Wakes::default()));
        let cx = Context::from_waker(&task);
        let mut gate = WakeGate::default();
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
