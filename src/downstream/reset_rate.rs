//! How many of its streams a client may reset before they are answered.
//!
//! Owns: the allowance. Must not know: streams, connections, clocks (time is an argument).
//! Invariant: a client that cancels all the streams that it may have open, twice in a row, is within the allowance.

use std::time::Duration;

use tokio::time::Instant;

/// So many times the streams that may be open at once may be reset in one burst.
const BURST: u32 = 2;
/// What of a burst is used up is restored within this time.
const RESTORED: Duration = Duration::from_secs(16);
/// Past this part of a burst, resets are to be expected.
const EXPECTED: u32 = 64;

/// The resets of one client connection.
#[derive(Debug)]
pub(super) struct ResetRate {
    burst: f64,
    used: f64,
    at: Instant,
}

impl ResetRate {
    /// That of a connection which may have so many streams open.
    pub(super) fn new(streams: u32, now: Instant) -> Self {
        Self { burst: f64::from(streams.saturating_mul(BURST)), used: 0.0, at: now }
    }

    /// Counts a reset. False where it is beyond the allowance.
    pub(super) fn count(&mut self, now: Instant) -> bool {
        self.restore(now);
        self.used += 1.0;
        self.used <= self.burst
    }

    /// Whether so many streams were reset lately that the next may be, too.
    pub(super) fn expects_more(&mut self, now: Instant) -> bool {
        // Most connections reset nothing: the clock is not read for those.
        self.used > 0.0 && {
            self.restore(now);
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
        assert!(!rate.expects_more(now));
        assert!((0..2 * 4096).all(|_| rate.count(now)));
        assert!(rate.expects_more(now));
        assert!(!rate.count(now), "a third burst at once");
        // As many as are restored meanwhile go on passing.
        let mut rate = ResetRate::new(4096, now);
        assert!((0..100_000).all(|nth| rate.count(now + Duration::from_millis(2 * nth))));
        // And ten times as many do not.
        let mut rate = ResetRate::new(4096, now);
        assert!(!(0..100_000).all(|nth| rate.count(now + Duration::from_micros(200 * nth))));
        let later = now + Duration::from_secs(100);
        assert!(!rate.expects_more(later) && rate.count(later), "forgotten after a while");
    }
}
