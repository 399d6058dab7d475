//! A thread with a `current_thread` runtime: all tasks and state of a connection live on its shard.
//!
//! Owns: starting the thread and its runtime, detecting a stuck or ended thread. Must not know: the tasks of
//! a shard. Invariant: shards share no mutable state except atomics and published snapshots.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, LocalOptions};

/// Interval of a live shard's heartbeat.
const HEARTBEAT: Duration = Duration::from_millis(250);

/// Polls of tasks between two looks at the sockets. A poll of a client connection's task runs several calls:
/// with tokio's default of 61, a socket that became ready would wait for hundreds of other clients' calls.
const POLLS_PER_LOOK: u32 = 8;

/// A running shard.
#[derive(Debug)]
pub struct Shard {
    thread: JoinHandle<()>,
    beats: Arc<AtomicU64>,
}

impl Shard {
    /// Starts a thread called `name`. The thread runs the future made by `start`, and ends with the future.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn start<F>(name: String, start: impl FnOnce() -> F + Send + 'static) -> std::io::Result<Self>
    where
        F: Future<Output = ()> + 'static,
    {
        let beats = Arc::new(AtomicU64::new(0));
        let heart = Arc::clone(&beats);
        let runtime = move || {
            let mut builder = Builder::new_current_thread();
            builder.event_interval(POLLS_PER_LOOK).enable_all().build_local(LocalOptions::default())
        };
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

    /// A counter growing every `HEARTBEAT` while the shard is live.
    #[must_use]
    pub fn beats(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.beats)
    }

    /// Waits for the thread's end. Blocks the caller. False if the shard panicked.
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
