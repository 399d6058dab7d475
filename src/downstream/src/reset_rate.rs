//! Rate limit on streams reset by a client before their answers.
//!
//! Owns: the allowance. Must not know: streams, connections, clocks (time is an argument).
//! Invariant: a client cancelling all its permitted streams, twice in a row, stays within the allowance.

use std::time::Duration;

use tokio::time::Instant;

/// Size of the allowed burst, as a multiple of the permitted open streams.
const BURST: u32 = 2;
/// Time in which a used-up burst is fully restored.
const RESTORED: Duration = Duration::from_secs(16);
/// Divisor: after 1/64 of a burst, more resets are expected.
const EXPECTED: u32 = 64;

/// The resets of one client connection.
#[derive(Debug)]
pub(super) struct ResetRate {
    burst: f64,
    used: f64,
    at: Instant,
}

impl ResetRate {
    /// The allowance for a connection with up to `streams` open streams.
    pub(super) fn new(streams: u32, now: Instant) -> Self {
        Self { burst: f64::from(streams.saturating_mul(BURST)), used: 0.0, at: now }
    }

    /// Counts a reset. False if the reset exceeds the allowance.
    pub(super) fn count(&mut self, now: Instant) -> bool {
        self.restore(now);
        self.used += 1.0;
        self.used <= self.burst
    }

    /// True if enough streams were reset recently to expect more resets.
    pub(super) fn expects_more(&mut self, now: impl FnOnce() -> Instant) -> bool {
        // Most connections never reset a stream: avoid reading the clock for most connections.
        self.used > 0.0 && {
            self.restore(now());
            self.used * f64::from(EXPECTED) > self.burst
        }
    }

    fn restore(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at);
        self.used = (self.used - self.burst * elapsed.div_duration_f64(RESTORED)).max(0.0);
        self.at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_bursts_of_all_streams_pass_and_a_flood_does_not() {
        let now = Instant::now();
        let mut rate = ResetRate::new(4096, now);
        assert!(!rate.expects_more(|| now));
        assert!((0..2 * 4096).all(|_| rate.count(now)));
        assert!(rate.expects_more(|| now));
        assert!(!rate.count(now), "a third burst at once");
        // Resets at the rate of restoration always pass.
        let mut rate = ResetRate::new(4096, now);
        assert!((0..100_000).all(|nth| rate.count(now + Duration::from_millis(2 * nth))));
        // Resets at ten times the rate do not.
        let mut rate = ResetRate::new(4096, now);
        assert!(!(0..100_000).all(|nth| rate.count(now + Duration::from_micros(200 * nth))));
        let later = now + Duration::from_secs(100);
        assert!(!rate.expects_more(|| later) && rate.count(later), "forgotten after a while");
    }
}
