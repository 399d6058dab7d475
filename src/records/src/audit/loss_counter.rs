//! Audit records that were lost: for the record that tells of the loss, for the log and for doctor.
//!
//! Owns: the counts of one sink, and when a loss is logged. Must not know: why records were lost. Invariants:
//! a loss is in one record, even if the first attempt to write that record fails; the log tells of losses of
//! one series once a minute at most.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// The log tells of a loss again after this time without one.
const PAUSE: Duration = Duration::from_secs(60);
/// A loss after this time without one begins another series for doctor.
const SERIES: Duration = Duration::from_secs(24 * 3600);

/// Losses of a sink.
#[derive(Debug)]
pub(super) struct LossCounter {
    /// The sink, as in the metrics; `all` for records that no sink has.
    sink: &'static str,
    state: Mutex<LossState>,
}

#[derive(Debug, Default)]
struct LossState {
    unreported: UnreportedLosses,
    series: Option<LossSeries>,
}

/// Losses without a record that tells of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UnreportedLosses {
    pub(super) records: u64,
    /// When the first of them was given up.
    pub(super) since: Option<SystemTime>,
}

/// The last losses, with less than a day between two, for doctor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossSeries {
    /// The number of records.
    pub records: u64,
    /// The time of the first loss.
    pub since: SystemTime,
    /// The time of the last loss.
    pub last: SystemTime,
}

impl LossCounter {
    pub(super) fn new(sink: &'static str) -> Self {
        Self { sink, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, LossState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts lost records.
    pub(super) fn add(&self, records: u64, now: SystemTime) {
        if records > 0 && self.count(records, now) {
            let records = self.series().map_or(records, |series| series.records);
            tracing::error!(sink = self.sink, records, "audit records are lost");
        }
    }

    /// Returns true if the log is to tell of the loss.
    fn count(&self, records: u64, now: SystemTime) -> bool {
        let mut state = self.lock();
        state.unreported.records += records;
        state.unreported.since.get_or_insert(now);
        let within = |time: Duration| {
            move |series: &LossSeries| now.duration_since(series.last).unwrap_or_default() < time
        };
        let is_told = state.series.as_ref().is_some_and(within(PAUSE));
        let before = state.series.filter(within(SERIES));
        let (count, since) = before.map_or((0, now), |series| (series.records, series.since));
        state.series = Some(LossSeries { records: count + records, since, last: now });
        !is_told
    }

    /// Takes the losses without a record of them.
    pub(super) fn take_unreported(&self) -> UnreportedLosses {
        std::mem::take(&mut self.lock().unreported)
    }

    /// The losses without a record of them, which stay so.
    pub(super) fn unreported(&self) -> UnreportedLosses {
        self.lock().unreported
    }

    /// Gives losses back: the record of them was not written.
    pub(super) fn return_unreported(&self, losses: UnreportedLosses) {
        let mut state = self.lock();
        state.unreported.records += losses.records;
        state.unreported.since = losses.since.or(state.unreported.since);
    }

    /// The last losses.
    pub(super) fn series(&self) -> Option<LossSeries> {
        self.lock().series
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_could_not_be_recorded_keeps_its_begin() {
        let (losses, at) = (LossCounter::new("all"), SystemTime::UNIX_EPOCH);
        let second = Duration::from_secs(1);
        assert!(losses.count(3, at), "the first one is told");
        assert!(!losses.count(4, at + second));
        let taken = losses.take_unreported();
        assert_eq!(taken, UnreportedLosses { records: 7, since: Some(at) });
        assert_eq!(losses.take_unreported(), UnreportedLosses::default());
        assert!(!losses.count(1, at + 2 * second));
        losses.return_unreported(taken);
        assert_eq!(losses.take_unreported(), UnreportedLosses { records: 8, since: Some(at) });
        losses.return_unreported(UnreportedLosses::default());
        assert!(losses.count(1, at + 2 * second + PAUSE), "told again after a pause");
        assert_eq!(losses.take_unreported().since, Some(at + 2 * second + PAUSE));
    }

    #[test]
    fn a_series_ends_after_a_day_without_a_loss() {
        let (losses, at) = (LossCounter::new("otlp"), SystemTime::UNIX_EPOCH);
        let hour = Duration::from_secs(3600);
        assert_eq!(losses.series(), None);
        losses.count(3, at);
        losses.count(4, at + 23 * hour);
        let series = LossSeries { records: 7, since: at, last: at + 23 * hour };
        assert_eq!(losses.series(), Some(series));
        losses.count(1, at + 47 * hour);
        let (since, last) = (at + 47 * hour, at + 47 * hour);
        assert_eq!(losses.series(), Some(LossSeries { records: 1, since, last }));
    }
}
