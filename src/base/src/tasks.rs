//! The only place for spawning tasks: each task has a name and an owner, and is joined at drain.
//!
//! Owns: spawning on the current thread's [`LocalSet`](tokio::task::LocalSet) or runtime, counting running
//! tasks. Must not know: the work of a task. Invariant: a panicking task is logged by name, and ends neither
//! the process nor sibling tasks.

pub mod poll_timer;
pub mod wake_gate;

use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use tokio::task::{AbortHandle, JoinSet};

/// A handle aborting the task when dropped: the spawner owns the task.
#[derive(Debug)]
#[must_use = "dropping it aborts the task; keep it, or `detach` it to its owner's `Tasks`"]
pub struct TaskHandle(Option<AbortHandle>);

impl TaskHandle {
    /// Leaves the task to its [`Tasks`]: the task runs until completion or until the owner is drained.
    pub fn detach(mut self) {
        self.0 = None;
    }

    /// Aborts the task at its next await.
    pub fn end(&self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }

    /// True if the task has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.0.as_ref().is_none_or(AbortHandle::is_finished)
    }
}

impl Drop for TaskHandle {
    fn drop(&mut self) {
        self.end();
    }
}

/// The tasks of an owner on a single thread. Clones share the same set.
#[derive(Clone, Default)]
pub struct Tasks {
    running: Rc<RefCell<JoinSet<()>>>,
}

impl Tasks {
    /// Starts `future` on the current thread's local set. `name` appears in the log upon a panic.
    pub fn spawn(&self, name: &'static str, future: impl Future<Output = ()> + 'static) -> TaskHandle {
        // Boxed: tokio's code for a task is compiled once, not once for every future (0.5 MB of the program).
        let guarded = Guarded::new(name, future.boxed_local());
        let mut running = self.running.borrow_mut();
        while running.try_join_next().is_some() {}
        TaskHandle(Some(running.spawn_local(guarded)))
    }

    /// Number of running tasks; ended tasks are reaped first.
    #[must_use]
    pub fn len(&self) -> usize {
        let mut running = self.running.borrow_mut();
        while running.try_join_next().is_some() {}
        running.len()
    }

    /// True if no task is running.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until every task has ended. Cancel-safe: tasks go on if the wait is dropped.
    pub async fn joined(&self) {
        // poll_fn borrows only while polling, so tasks may spawn siblings in between.
        std::future::poll_fn(|cx| {
            let mut running = self.running.borrow_mut();
            loop {
                match running.poll_join_next(cx) {
                    Poll::Ready(Some(_)) => {}
                    Poll::Ready(None) => return Poll::Ready(()),
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await;
    }

    /// Aborts every task at its next await.
    pub fn abort_all(&self) {
        self.running.borrow_mut().abort_all();
    }
}

/// A future whose panic ends the future alone.
pub struct Guarded {
    name: &'static str,
    future: LocalBoxFuture<'static, ()>,
}

impl Guarded {
    /// Guards `future`. `name` appears in the log upon a panic.
    #[must_use]
    pub fn new(name: &'static str, future: LocalBoxFuture<'static, ()>) -> Self {
        Self { name, future }
    }
}

impl Future for Guarded {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        poll_guarded(self.name, || self.future.as_mut().poll(cx))
    }
}

/// Polls a future by `poll`. A panic is logged with `name` and ends the future, which the caller then drops
/// with all that the panic has left behind.
pub fn poll_guarded(name: &'static str, poll: impl FnOnce() -> Poll<()>) -> Poll<()> {
    catch_unwind(AssertUnwindSafe(poll)).unwrap_or_else(|_| {
        tracing::error!(task = name, "task panicked");
        Poll::Ready(())
    })
}

/// Runs the futures of hyper's connections on the current thread.
///
/// hyper owns the futures: each ends with its connection, a task of [`Tasks`]. The futures are not counted,
/// since every call has a future.
#[derive(Clone, Copy, Debug)]
pub struct LocalExecutor;

impl<F> hyper::rt::Executor<F> for LocalExecutor
where
    F: Future + 'static,
    F::Output: 'static,
{
    #[expect(clippy::disallowed_methods, reason = "hyper owns these; see above")]
    fn execute(&self, future: F) {
        drop(tokio::task::spawn_local(future));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_panicking_task_leaves_its_siblings_alone() {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let tasks = Tasks::default();
                let (done, seen) = tokio::sync::oneshot::channel();
                tasks.spawn("panics", async { panic!("on purpose") }).detach();
                tasks.spawn("works", async move { done.send(7).expect("the test listens") }).detach();
                assert_eq!(seen.await, Ok(7));
                tasks.joined().await;
                assert!(tasks.is_empty());
            })
            .await;
    }

    #[tokio::test(flavor = "current_thread")]
    async fn an_owned_task_ends_with_its_handle() {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let tasks = Tasks::default();
                let owned = tasks.spawn("waits", std::future::pending());
                assert_eq!(tasks.len(), 1);
                drop(owned);
                tasks.joined().await;
                assert!(tasks.is_empty());
            })
            .await;
    }
}
