//! A histogram of durations. Observing takes two atomic additions and no lock.
//!
//! Owns: the bucket bounds, counting, and the exposition as a Prometheus histogram. Must not know: the
//! measured calls. Invariants: an exemplar costs nothing without a trace; bounds rise without a gap of more
//! than a factor of ten; a scrape beside an observation may see its count before its time.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Bucket bounds of calls in seconds: from a cached reply on loopback to etcd's time-out of 7 s and beyond.
const CALLS: &[f64] = &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// Bucket bounds of streams in seconds: from a stream refused at once to one that lives for a week.
const STREAMS: &[f64] = &[0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0, 604_800.0];

/// A histogram of durations; clones share the counts.
#[derive(Clone, Debug)]
pub struct LatencyHistogram(Arc<LatencyCounts>);

#[derive(Debug)]
struct LatencyCounts {
    bounds: &'static [f64],
    /// One count for each bound, and one for longer durations.
    counts: Box<[AtomicU64]>,
    nanos: AtomicU64,
    /// The last call with a trace in each bucket; empty without such calls.
    exemplars: Mutex<Vec<Option<DurationExemplar>>>,
}

/// A call with a trace, as the example of a bucket.
#[derive(Clone, Debug)]
pub struct DurationExemplar {
    /// 32 hexadecimal digits.
    trace: Box<str>,
    took: Duration,
    ended: SystemTime,
}

/// The form of OpenMetrics, with the separator before.
impl fmt::Display for DurationExemplar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = self.ended.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (trace, took) = (&self.trace, self.took.as_secs_f64());
        write!(f, " # {{trace_id=\"{trace}\"}} {took} {:.3}", ended.as_secs_f64())
    }
}

impl LatencyHistogram {
    /// An empty histogram of unary calls.
    #[must_use]
    pub fn of_calls() -> Self {
        Self::new(CALLS)
    }

    /// An empty histogram of streams.
    #[must_use]
    pub fn of_streams() -> Self {
        Self::new(STREAMS)
    }

    fn new(bounds: &'static [f64]) -> Self {
        let counts = std::iter::repeat_with(AtomicU64::default).take(bounds.len() + 1).collect();
        Self(Arc::new(LatencyCounts {
            bounds,
            counts,
            nanos: AtomicU64::default(),
            exemplars: Mutex::default(),
        }))
    }

    /// Counts a duration.
    pub fn observe(&self, took: Duration) {
        let LatencyCounts { counts, nanos, .. } = &*self.0;
        if let Some(count) = counts.get(self.bucket(took)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The place of the bucket of a duration.
    fn bucket(&self, took: Duration) -> usize {
        let (bounds, seconds) = (self.0.bounds, took.as_secs_f64());
        bounds.iter().position(|bound| seconds <= *bound).unwrap_or(bounds.len())
    }

    /// Notes a call with a trace as the example of its bucket. Takes a lock, for calls with a trace only.
    pub fn note_exemplar(&self, took: Duration, trace: &str, ended: SystemTime) {
        let mut exemplars = self.0.exemplars.lock().unwrap_or_else(PoisonError::into_inner);
        exemplars.resize(self.0.counts.len(), None);
        if let Some(place) = exemplars.get_mut(self.bucket(took)) {
            *place = Some(DurationExemplar { trace: trace.into(), took, ended });
        }
    }

    /// The examples of the buckets, each with the upper bound of its bucket.
    #[must_use]
    pub fn exemplars(&self) -> Vec<(f64, DurationExemplar)> {
        let exemplars = self.0.exemplars.lock().unwrap_or_else(PoisonError::into_inner);
        let bounds = self.0.bounds.iter().copied().chain([f64::INFINITY]);
        bounds.zip(&*exemplars).filter_map(|(bound, exemplar)| Some((bound, exemplar.clone()?))).collect()
    }
}

impl EncodeMetric for LatencyHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let LatencyCounts { bounds, counts, nanos, .. } = &*self.0;
        let sum = Duration::from_nanos(nanos.load(Ordering::Relaxed)).as_secs_f64();
        // The library adds up the counts.
        let bounds = bounds.iter().copied().chain([f64::INFINITY]);
        let counts = counts.iter().map(|count| count.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

impl TypedMetric for LatencyHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn a_duration_counts_in_the_first_bucket_with_room_and_all_later_ones() {
        let histogram = LatencyHistogram::of_calls();
        for millis in [0, 1, 300, 60_000] {
            histogram.observe(Duration::from_millis(millis));
        }
        let mut registry = Registry::default();
        registry.register("d", "Time", histogram);
        let mut text = String::new();
        encode(&mut text, &registry).expect("text");
        let buckets = [
            ("0.0005", 1),
            ("0.001", 2),
            ("0.0025", 2),
            ("0.005", 2),
            ("0.01", 2),
            ("0.025", 2),
            ("0.05", 2),
            ("0.1", 2),
            ("0.25", 2),
            ("0.5", 3),
            ("1.0", 3),
            ("2.5", 3),
            ("5.0", 3),
            ("10.0", 3),
            ("+Inf", 4),
        ];
        let buckets: String =
            buckets.iter().map(|(bound, count)| format!("d_bucket{{le=\"{bound}\"}} {count}\n")).collect();
        let expected =
            format!("# HELP d Time.\n# TYPE d histogram\nd_sum 60.301\nd_count 4\n{buckets}# EOF\n");
        assert_eq!(text, expected);
    }

    #[test]
    fn bounds_rise_without_a_large_gap() {
        for bounds in [CALLS, STREAMS] {
            for pair in bounds.windows(2) {
                assert!(pair[0] < pair[1] && pair[1] <= 10.0 * pair[0], "{pair:?}");
            }
        }
    }
}
