//! What calls wait for on this side before a member hears of them: how many do, how often and how long it took.
//!
//! Owns: the count. Must not know: what is waited for. All of it is atomic, for all shards together.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

/// One kind of waiting.
#[derive(Debug, Default)]
pub struct Delays {
    waiting: AtomicU32,
    ended: AtomicU64,
    micros: AtomicU64,
}

/// Counts one that waits for as long as it lives.
#[derive(Debug)]
pub struct Delayed<'a> {
    delays: &'a Delays,
    began: Instant,
}

impl Delays {
    /// One more waits.
    #[must_use]
    pub fn begin(&self) -> Delayed<'_> {
        self.waiting.fetch_add(1, Relaxed);
        Delayed { delays: self, began: Instant::now() }
    }

    /// How many wait now.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Relaxed)
    }

    /// How many have waited, whatever came of it.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.ended.load(Relaxed)
    }

    /// For how long, all together.
    #[must_use]
    pub fn took(&self) -> Duration {
        Duration::from_micros(self.micros.load(Relaxed))
    }
}

impl Drop for Delayed<'_> {
    fn drop(&mut self) {
        self.delays.waiting.fetch_sub(1, Relaxed);
        self.delays.ended.fetch_add(1, Relaxed);
        let took = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.delays.micros.fetch_add(took, Relaxed);
    }
}
