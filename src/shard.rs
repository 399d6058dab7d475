//! One thread, one `current_thread` runtime: everything of a connection lives on its shard.
//!
//! Owns: starting the thread and its runtime, noticing when it is stuck or gone. Must not know what runs on it.
//! Invariant: nothing on a shard is shared and mutable with another, but atomics and published snapshots.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, LocalOptions};

/// How often a live shard says so.
pub const HEARTBEAT: Duration = Duration::from_millis(250);

/// A running shard.
#[derive(Debug)]
pub struct Shard {
    thread: JoinHandle<()>,
    beats: Arc<AtomicU64>,
}

impl Shard {
    /// Starts a thread called `name` that runs the future which `start` makes there, and ends with it.
    ///
    /// # Errors
    /// The thread or its runtime could not be made.
    pub fn start<F>(name: String, start: impl FnOnce() -> F + Send + 'static) -> std::io::Result<Self>
    where
        F: Future<Output = ()> + 'static,
    {
        let beats = Arc::new(AtomicU64::new(0));
        let heart = Arc::clone(&beats);
        let runtime = move || Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
        let thread = std::thread::Builder::new().name(name).spawn(move || match runtime() {
            Ok(runtime) => runtime.block_on(async move {
                tokio::select! {
                    () = start() => {}
                    () = beat(&heart) => {}
                }
            }),
            Err(error) => tracing::error!(%error, "a shard could not start"),
        })?;
        Ok(Self { thread, beats })
    }

    /// A number that grows every [`HEARTBEAT`] while the shard turns.
    #[must_use]
    pub fn beats(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.beats)
    }

    /// Whether its thread has ended, by itself or by a panic.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the thread's end. Blocks the caller. False when the shard panicked.
    #[must_use]
    pub fn join(self) -> bool {
        self.thread.join().is_ok()
    }
}

async fn beat(heart: &AtomicU64) {
    let mut turns = tokio::time::interval(HEARTBEAT);
    loop {
        turns.tick().await;
        heart.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_runs_local_tasks_and_ends_with_its_future() {
        let (seen, told) = std::sync::mpsc::channel();
        let shard = Shard::start("test".into(), move || async move {
            let tasks = crate::tasks::Tasks::default();
            tasks.spawn("local", async move { seen.send(5).expect("the test listens") }).detach();
            tasks.joined().await;
        })
        .expect("starts");
        assert_eq!(told.recv(), Ok(5));
        assert!(shard.join());
    }

    #[test]
    fn a_panicking_shard_is_told_apart() {
        let shard = Shard::start("test".into(), || async { panic!("on purpose") }).expect("starts");
        assert!(!shard.join());
    }
}
