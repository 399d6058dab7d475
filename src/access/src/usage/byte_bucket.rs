//! A rate of bytes by the debt model: a message of any size passes, and is charged afterwards.
//!
//! Owns: the debt. Must not know: the charged messages. Invariants: bytes passed in a time are at most the
//! burst, the rate times the time, and the messages that passed while nothing was owed; a debt is over after
//! its bytes divided by the rate, so no stream stands still for good.
//!
//! The crate `governor` has no debts: a bucket refuses what it does not hold. So the one step that differs is
//! written here, the charge past the bucket's limit, in the same algorithm (GCRA).

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The time for whose bytes a message may pass at once.
const BURST: Duration = Duration::from_secs(1);

/// A rate of bytes.
#[derive(Debug)]
pub(super) struct ByteBucket {
    bytes_per_second: u64,
    start: Instant,
    /// Nanoseconds from `start` to the time at which all charged bytes are made up for.
    even_at: AtomicU64,
}

impl ByteBucket {
    /// A bucket without a debt.
    pub(super) fn new(kib_per_second: NonZeroU32) -> Self {
        let bytes_per_second = u64::from(kib_per_second.get()) * 1024;
        Self { bytes_per_second, start: Instant::now(), even_at: AtomicU64::new(0) }
    }

    /// Charges a message.
    pub(super) fn charge(&self, bytes: usize) {
        let cost = bytes as u128 * Duration::from_secs(1).as_nanos() / u128::from(self.bytes_per_second);
        let (cost, now) = (u64::try_from(cost).unwrap_or(u64::MAX), self.now());
        let charge = |even_at: u64| Some(even_at.max(now).saturating_add(cost));
        let charged = self.even_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charge);
        debug_assert!(charged.is_ok(), "a bucket can always be charged");
    }

    /// The time until the debt is over; `None` without a debt.
    pub(super) fn debt(&self) -> Option<Duration> {
        let even_at = Duration::from_nanos(self.even_at.load(Ordering::Relaxed));
        let debt = even_at.saturating_sub(Duration::from_nanos(self.now()) + BURST);
        (!debt.is_zero()).then_some(debt)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
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
        // A second's worth was there at the beginning.
        assert_eq!(bucket.debt(), Some(Duration::from_secs(9)));
        advance(Duration::from_secs(8)).await;
        assert_eq!(bucket.debt(), Some(Duration::from_secs(1)));
        advance(Duration::from_secs(1)).await;
        assert_eq!(bucket.debt(), None);
        bucket.charge(1);
        assert!(bucket.debt().is_some());
        advance(Duration::from_secs(100)).await;
        bucket.charge(100 * 1024);
        assert_eq!(bucket.debt(), None, "no more than a second's worth is saved up");
        bucket.charge(usize::MAX);
        assert!(bucket.debt().is_some());
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
                    let most = rate + rate * begun.elapsed().as_secs_f64() + largest as f64 + 1.0;
                    assert!(passed <= most * 1.001, "{passed} of {most}");
                }
                let longest = Duration::from_secs_f64(largest as f64 / (f64::from(rate) * 1024.0));
                let debt = bucket.debt().unwrap_or_default();
                assert!(debt <= longest, "{debt:?} for the largest message of {longest:?}");
                advance(debt).await;
                assert_eq!(bucket.debt(), None);
            });
        }
    }
}
