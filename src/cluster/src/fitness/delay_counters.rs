//! Counts of calls waiting inside Keyward before being sent to a member: how many wait, have waited, and for
//! how long.
//!
//! Owns: the counts. Must not know: the cause of a wait. All counts are atomic and shared by all shards.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

/// The counts for a kind of wait.
#[derive(Debug, Default)]
pub struct DelayCounters {
    waiting: AtomicU32,
    ended: AtomicU64,
    micros: AtomicU64,
}

/// Counts a wait until dropped.
#[derive(Debug)]
pub struct CountedDelay<'a> {
    delays: &'a DelayCounters,
    began: Instant,
}

impl DelayCounters {
    /// Begins a wait.
    #[must_use]
    pub fn begin(&self) -> CountedDelay<'_> {
        self.waiting.fetch_add(1, Relaxed);
        CountedDelay { delays: self, began: Instant::now() }
    }

    /// Returns the number of calls waiting now.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Relaxed)
    }

    /// Returns the number of ended waits, whatever their outcome.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.ended.load(Relaxed)
    }

    /// Returns the total time of all ended waits.
    #[must_use]
    pub fn took(&self) -> Duration {
        Duration::from_micros(self.micros.load(Relaxed))
    }
}

impl Drop for CountedDelay<'_> {
    fn drop(&mut self) {
        self.delays.waiting.fetch_sub(1, Relaxed);
        self.delays.ended.fetch_add(1, Relaxed);
        let took = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.delays.micros.fetch_add(took, Relaxed);
    }
}
