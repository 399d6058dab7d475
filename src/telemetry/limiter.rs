//! Rate limit for log records caused by callers without a proved identity.
//!
//! Owns: the rate. Must not know: a record's contents. Invariant: every suppressed record is counted, and the
//! count appears in the log (`report_left_out`).

use std::cell::Cell;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::time::{Instant, interval};

/// Records allowed in a burst, per limiter.
const BURST: u32 = 100;
/// The time to earn a record: 20 records a second.
const REFILL: Duration = Duration::from_millis(50);
/// The interval between reports of suppressed records.
const REPORT: Duration = Duration::from_secs(10);

/// A token bucket for log records, for a single thread.
#[derive(Debug)]
pub struct RecordLimiter {
    records: Cell<u32>,
    refilled: Cell<Instant>,
    left_out: Counter,
}

impl RecordLimiter {
    /// A full bucket, counting suppressed records in `left_out`.
    #[must_use]
    pub fn new(left_out: Counter) -> Self {
        Self { records: Cell::new(BURST), refilled: Cell::new(Instant::now()), left_out }
    }

    /// True if a record may be written now; a suppressed record is counted.
    #[must_use]
    pub fn may_log(&self) -> bool {
        self.may_log_at(Instant::now())
    }

    fn may_log_at(&self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.refilled.get());
        let more = u32::try_from(elapsed.as_millis() / REFILL.as_millis()).unwrap_or(u32::MAX);
        let records = self.records.get().saturating_add(more);
        if records >= BURST {
            self.refilled.set(now);
        } else {
            self.refilled.set(self.refilled.get() + REFILL * more);
        }
        let left = records.min(BURST).checked_sub(1);
        self.records.set(left.unwrap_or_default());
        if left.is_none() {
            self.left_out.inc();
        }
        left.is_some()
    }
}

/// Logs the number of records suppressed since the last report, at most every ten seconds. Never ends.
pub async fn report_left_out(left_out: Counter) {
    let mut turns = interval(REPORT);
    let mut told = 0;
    loop {
        turns.tick().await;
        let total = left_out.get();
        if total != told {
            let records = total - std::mem::replace(&mut told, total);
            tracing::warn!(
                records,
                "log records of callers that proved no identity were left out: there were too many"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_twenty_a_second_and_the_rest_is_counted() {
        let left_out = Counter::default();
        let limiter = RecordLimiter::new(left_out.clone());
        let began = Instant::now();
        let at = |millis: u64| began + Duration::from_millis(millis);
        let passed = |millis, tries: u32| (0..tries).filter(|_| limiter.may_log_at(at(millis))).count();
        assert_eq!(passed(0, 150), 100);
        assert_eq!(left_out.get(), 50);
        // Elapsed time too short for a record is not lost.
        assert_eq!((passed(30, 9), passed(60, 9), passed(100, 9)), (0, 1, 1));
        assert_eq!(passed(1_100, 50), 20);
        // Unused time does not accumulate beyond the burst.
        assert_eq!(passed(1_000_000, 150), 100);
        assert_eq!(passed(1_000_040, 1), 0);
    }
}
