//! An end given by the wall clock, as of a certificate, a token, or a rule: the only way to wait for one.
//!
//! Owns: the comparison with both clocks. Must not know: what ends. Invariant: the end has passed once either
//! clock says so, and whoever waits notices within a minute. The monotonic clock stands while the machine is
//! suspended; the wall clock may be stepped, in both directions.

use std::future::Future;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep_until};

/// The time between two looks at the wall clock.
const LOOK: Duration = Duration::from_secs(60);

/// An end given by the wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WallDeadline {
    end: SystemTime,
    /// The end by the monotonic clock; `None` beyond the range of timers.
    by: Option<Instant>,
}

impl WallDeadline {
    /// The deadline at `end`, where the clocks show `now` and `wall`.
    #[must_use]
    pub fn at(end: SystemTime, now: Instant, wall: SystemTime) -> Self {
        Self { end, by: now.checked_add(end.duration_since(wall).unwrap_or_default()) }
    }

    /// The deadline at `end`, by the clocks of this moment.
    #[must_use]
    pub fn from_now(end: SystemTime) -> Self {
        Self::at(end, Instant::now(), SystemTime::now())
    }

    /// The end.
    #[must_use]
    pub fn end(&self) -> SystemTime {
        self.end
    }

    /// True if the end has passed by either clock.
    #[must_use]
    pub fn has_passed(&self, now: Instant, wall: SystemTime) -> bool {
        self.end <= wall || self.by.is_some_and(|by| by <= now)
    }

    /// True if the end has passed by the clocks of this moment.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.has_passed(Instant::now(), SystemTime::now())
    }

    /// Waits for the end. Cancel-safe.
    pub fn passed(self) -> impl Future<Output = ()> {
        self.passed_by(SystemTime::now)
    }

    /// As [`Self::passed`], with the wall clock given.
    async fn passed_by(self, wall: impl Fn() -> SystemTime) {
        loop {
            let now = Instant::now();
            if self.has_passed(now, wall()) {
                return;
            }
            let look = now + LOOK;
            sleep_until(self.by.map_or(look, |by| by.min(look))).await;
        }
    }
}

/// Waits for an end that there may not be. Cancel-safe.
pub async fn passed_if_any(deadline: Option<WallDeadline>) {
    match deadline {
        Some(deadline) => deadline.passed().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::FutureExt as _;
    use tokio::time::advance;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    /// A suspended machine: the monotonic clock has stood for two days. A stepped clock looks the same.
    #[tokio::test(start_paused = true)]
    async fn an_end_by_the_wall_clock_is_noticed_within_a_minute_while_the_monotonic_one_stands() {
        let (wall, begun) = (Cell::new(SystemTime::UNIX_EPOCH + DAY), Instant::now());
        let deadline = WallDeadline::at(wall.get() + DAY, begun, wall.get());
        let mut waiting = Box::pin(deadline.passed_by(|| wall.get()));
        assert!((&mut waiting).now_or_never().is_none() && !deadline.has_passed(begun, wall.get()));
        wall.set(wall.get() + 2 * DAY);
        assert!(deadline.has_passed(begun, wall.get()), "for whoever asks, at once");
        waiting.await;
        assert_eq!(begun.elapsed(), LOOK);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wall_clock_that_is_set_back_prolongs_nothing() {
        let (wall, begun) = (Cell::new(SystemTime::UNIX_EPOCH + 9 * DAY), Instant::now());
        let deadline = WallDeadline::at(wall.get() + DAY, begun, wall.get());
        let mut waiting = Box::pin(deadline.passed_by(|| wall.get()));
        assert!((&mut waiting).now_or_never().is_none());
        wall.set(wall.get() - 3 * DAY);
        waiting.await;
        assert_eq!(begun.elapsed(), DAY);
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_beyond_the_range_of_timers_is_seen_on_the_wall_clock_and_one_of_the_past_at_once() {
        let (wall, begun) = (Cell::new(SystemTime::UNIX_EPOCH), Instant::now());
        let far = SystemTime::UNIX_EPOCH + Duration::from_secs(i64::MAX as u64 / 2);
        let waiting = WallDeadline::at(far, begun, wall.get()).passed_by(|| wall.get());
        let mut waiting = Box::pin(waiting);
        assert!((&mut waiting).now_or_never().is_none());
        advance(DAY).await;
        assert!((&mut waiting).now_or_never().is_none());
        wall.set(far);
        waiting.await;
        assert!(WallDeadline::from_now(SystemTime::UNIX_EPOCH).is_over());
    }
}
