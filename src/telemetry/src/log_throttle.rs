//! Rate limit for the log record of a frequent event.
//!
//! Owns: the minimum interval between records, and the count of events since the last record. Must not know:
//! the event.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::Instant;

/// The least time between two records.
const PAUSE: Duration = Duration::from_secs(10);

/// Counts events since the last log record.
#[derive(Debug, Default)]
pub struct LogThrottle {
    told_at: Cell<Option<Instant>>,
    untold: Cell<u64>,
}

impl LogThrottle {
    /// Counts an event. Returns the number of events since the last record if a record is due.
    #[must_use]
    pub fn count(&self) -> Option<u64> {
        self.untold.set(self.untold.get() + 1);
        let is_time = self.told_at.get().is_none_or(|told| told.elapsed() >= PAUSE);
        is_time.then(|| {
            self.told_at.set(Some(Instant::now()));
            self.untold.take()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_line_tells_of_all_that_happened_since_the_one_before() {
        let seldom = LogThrottle::default();
        assert_eq!([seldom.count(), seldom.count(), seldom.count()], [Some(1), None, None]);
        tokio::time::advance(PAUSE).await;
        assert_eq!([seldom.count(), seldom.count()], [Some(3), None]);
    }
}
