//! A rate of bytes by the debt model: a message of any size passes, and is charged afterwards.
//!
//! Owns: the debt. Must not know: the charged messages. Invariants: bytes passed in a time are at most the
//! burst, the rate times the time, and the messages that passed while nothing was owed; a debt is over after
//! its bytes divided by the rate, so no stream stands still for good.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::bucket::{Bucket, bucket};

/// The bytes of one cell of the bucket. A cell of one byte would round a rate above a GB per second to whole
/// nanoseconds a byte.
const CELL: u64 = 1024;

/// A rate of bytes.
#[derive(Debug)]
pub(super) struct ByteBucket {
    cells: Bucket,
    /// Cells paid at once: a debt is paid in parts.
    part: NonZeroU32,
    /// Bytes charged and not paid.
    owed: AtomicU64,
}

impl ByteBucket {
    /// A full bucket: a second's worth of bytes.
    pub(super) fn new(kib_per_second: NonZeroU32) -> Self {
        let part = NonZeroU32::new(kib_per_second.get() / 16).unwrap_or(NonZeroU32::MIN);
        Self { cells: bucket(kib_per_second, kib_per_second), part, owed: AtomicU64::new(0) }
    }

    /// Charges a message.
    pub(super) fn charge(&self, bytes: usize) {
        self.owed.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The time until the next part of the debt can be paid; `None` without a debt of a whole cell. Every
    /// part that can be paid now is paid.
    pub(super) fn debt(&self) -> Option<Duration> {
        loop {
            let owed = self.owed.load(Ordering::Relaxed);
            let cells = u32::try_from(owed / CELL).unwrap_or(u32::MAX).min(self.part.get());
            let cells = NonZeroU32::new(cells)?;
            // The cells are taken before the debt is lowered: two threads may take cells for one part, so the
            // second thread's debt is lowered only by bytes still owed.
            if let Err(wait) = self.cells.take(cells) {
                return Some(wait);
            }
            let paid = u64::from(cells.get()) * CELL;
            let lower = |owed: u64| Some(owed.saturating_sub(paid));
            let lowered = self.owed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, lower);
            debug_assert!(lowered.is_ok(), "a debt can always be lowered");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::time::{Instant, advance};

    use super::*;

    fn kib(number: u32) -> NonZeroU32 {
        NonZeroU32::new(number).expect("above 0")
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_message_passes_and_is_made_up_for() {
        let bucket = ByteBucket::new(kib(100));
        assert_eq!(bucket.debt(), None);
        bucket.charge(1000 * 1024);
        let begun = Instant::now();
        while let Some(wait) = bucket.debt() {
            assert!(!wait.is_zero());
            advance(wait).await;
        }
        // A second's worth was there at the beginning.
        let took = begun.elapsed().as_secs_f64();
        assert!((8.9..9.2).contains(&took), "{took}");
        bucket.charge(1000);
        assert_eq!(bucket.debt(), None, "less than a cell");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Messages are sent whenever nothing is owed, of random sizes, with random pauses.
        #[test]
        fn no_more_than_burst_rate_and_one_message_passes_and_nothing_starves(
            rate in 1u32..5000,
            steps in proptest::collection::vec((0u64..2000, 1usize..3_000_000), 1..60),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time().start_paused(true).build().expect("a runtime");
            runtime.block_on(async move {
                let bucket = ByteBucket::new(kib(rate));
                let (begun, mut passed, mut largest) = (Instant::now(), 0.0, 0usize);
                for (pause, bytes) in steps {
                    advance(Duration::from_millis(pause)).await;
                    if bucket.debt().is_some() {
                        continue;
                    }
                    bucket.charge(bytes);
                    passed += bytes as f64;
                    largest = largest.max(bytes);
                    let rate = f64::from(rate) * 1024.0;
                    let most = rate + rate * begun.elapsed().as_secs_f64() + largest as f64 + 2048.0;
                    assert!(passed <= most * 1.001, "{passed} of {most}");
                }
                let owed = bucket.owed.load(Ordering::Relaxed) as f64 / (f64::from(rate) * 1024.0);
                let begun = Instant::now();
                while let Some(wait) = bucket.debt() {
                    advance(wait).await;
                }
                assert!(begun.elapsed().as_secs_f64() <= owed * 1.01 + 2.0, "the debt of {owed} s is over");
            });
        }
    }
}
