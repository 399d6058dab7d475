//! Token buckets of the crate `governor`, by the clock of the runtime.
//!
//! Owns: the clock, and the form of a bucket. Must not know: the meaning of a token. Invariant: taking tokens
//! is one atomic step, without a lock.

use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::{Clock, Reference as _};
use governor::middleware::NoOpMiddleware;
use governor::nanos::Nanos;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use tokio::time::Instant;

/// A bucket of tokens, full at the beginning.
#[derive(Debug)]
pub(super) struct Bucket(RateLimiter<NotKeyed, InMemoryState, RuntimeClock, NoOpMiddleware<Nanos>>);

/// The clock of the runtime, so that a test can move the time.
#[derive(Clone, Debug)]
struct RuntimeClock {
    start: Instant,
}

impl Clock for RuntimeClock {
    type Instant = Nanos;

    fn now(&self) -> Nanos {
        Nanos::from(self.start.elapsed())
    }
}

/// A bucket of `burst` tokens, filled at this rate.
pub(super) fn bucket(per_second: NonZeroU32, burst: NonZeroU32) -> Bucket {
    let period = Duration::from_secs(1) / per_second.get();
    let quota = Quota::with_period(period.max(Duration::from_nanos(1)));
    let quota = quota.unwrap_or(Quota::per_second(per_second)).allow_burst(burst);
    Bucket(RateLimiter::direct_with_clock(quota, RuntimeClock { start: Instant::now() }))
}

impl Bucket {
    /// Takes a token.
    ///
    /// # Errors
    /// The time until a token is there.
    pub(super) fn take(&self) -> Result<(), Duration> {
        self.0.check().map_err(|not_until| {
            let now = self.0.clock().now();
            not_until.earliest_possible().duration_since(now).into()
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::time::advance;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_bucket_gives_at_most_burst_and_rate_and_never_starves(
            rate in 1u32..2000,
            burst in 1u32..500,
            pauses in proptest::collection::vec(0u64..300, 1..400),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time().start_paused(true).build().expect("a runtime");
            runtime.block_on(async move {
                let number = |number| NonZeroU32::new(number).expect("above 0");
                let bucket = bucket(number(rate), number(burst));
                let (begun, mut given) = (Instant::now(), 0.0);
                for pause in pauses {
                    advance(Duration::from_millis(pause)).await;
                    match bucket.take() {
                        Ok(()) => given += 1.0,
                        Err(wait) => {
                            assert!(wait <= Duration::from_secs(1) / rate + Duration::from_micros(1));
                            advance(wait).await;
                            assert!(bucket.take().is_ok(), "a token is there after the wait");
                            given += 1.0;
                        }
                    }
                    let most = f64::from(burst) + f64::from(rate) * begun.elapsed().as_secs_f64();
                    assert!(given <= most * 1.001 + 1.0, "{given} of {most}");
                }
            });
        }
    }
}
