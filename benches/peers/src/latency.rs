//! Latencies as whole microseconds, and their percentiles.

use std::time::Duration;

/// Whole microseconds.
pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The value at `share` of the sorted `values`.
pub(crate) fn percentile(values: &mut [u64], share: usize) -> u64 {
    values.sort_unstable();
    let last = values.len().saturating_sub(1);
    values.get(last * share / 100).copied().unwrap_or_default()
}
