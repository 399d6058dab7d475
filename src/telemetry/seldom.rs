//! A log line for what may happen often.
//!
//! Owns: how often it is written, and how much happened meanwhile. Must not know: what happened.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::Instant;

/// The least time between two lines.
const PAUSE: Duration = Duration::from_secs(10);

/// How often something happened since the log told of it.
#[derive(Debug, Default)]
pub struct Seldom {
    told_at: Cell<Option<Instant>>,
    untold: Cell<u64>,
}

impl Seldom {
    /// Counts once more. Returns how often it happened since the last line, where it is time for the next.
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
        let seldom = Seldom::default();
        assert_eq!([seldom.count(), seldom.count(), seldom.count()], [Some(1), None, None]);
        tokio::time::advance(PAUSE).await;
        assert_eq!([seldom.count(), seldom.count()], [Some(3), None]);
    }
}
