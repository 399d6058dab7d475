//! The settings of the access log: the calls with a record, and the further fields of a record.
//!
//! Owns: the choice of the calls. Must not know: the fields of a record, the writing of records.
//! Invariants: a failed call has a record unless the access log is off; the choice needs nothing but the
//! outcome and the duration of the call, so that a call without a record costs no more than a comparison.

use std::cell::Cell;
use std::time::Duration;

/// The calls with an access record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecordedCalls {
    /// No calls.
    Off,
    /// Failed calls.
    Errors,
    /// Failed calls, slow calls, and a sample of the other calls.
    #[default]
    Slow,
    /// All calls.
    All,
}

/// The settings of the access log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessLogSettings {
    /// The calls with a record.
    pub calls: RecordedCalls,
    /// The longest duration of a call that is not slow.
    pub slow: Duration,
    /// One of this number of the other calls has a record; 0: none.
    pub sample: usize,
    /// True if records have the keys touched by their calls.
    pub has_keys: bool,
}

impl Default for AccessLogSettings {
    /// Calls are slow beyond etcd's own limit for its warnings about slow unary requests.
    fn default() -> Self {
        Self {
            calls: RecordedCalls::default(),
            slow: Duration::from_millis(300),
            sample: 1000,
            has_keys: false,
        }
    }
}

/// The outcome of a call, as far as the choice depends on it.
#[derive(Clone, Copy, Debug)]
pub struct CallOutcome {
    /// True if the call failed.
    pub is_error: bool,
    /// The duration; `None` for a stream, and for a call that waits in etcd: their clients decide how long
    /// they last.
    pub took: Option<Duration>,
}

/// The number of calls until the next sampled call, of one thread.
#[derive(Debug, Default)]
pub struct SampleCounter(Cell<usize>);

impl SampleCounter {
    /// True for one of `sample` calls.
    fn is_next(&self, sample: usize) -> bool {
        if sample == 0 {
            return false;
        }
        let calls = self.0.get() + 1;
        self.0.set(if calls >= sample { 0 } else { calls });
        calls >= sample
    }
}

impl AccessLogSettings {
    /// The reason for the record of a call: `error`, `slow`, `sample` or `all`; `None` without a record.
    #[must_use]
    pub fn choose(&self, call: CallOutcome, samples: &SampleCounter) -> Option<&'static str> {
        match self.calls {
            RecordedCalls::Off => None,
            RecordedCalls::All => Some("all"),
            _ if call.is_error => Some("error"),
            RecordedCalls::Errors => None,
            RecordedCalls::Slow if call.took.is_some_and(|took| took > self.slow) => Some("slow"),
            RecordedCalls::Slow => samples.is_next(self.sample).then_some("sample"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: CallOutcome = CallOutcome { is_error: false, took: Some(Duration::from_millis(300)) };
    const SLOW: CallOutcome = CallOutcome { is_error: false, took: Some(Duration::from_millis(301)) };
    const STREAM: CallOutcome = CallOutcome { is_error: false, took: None };
    const FAILED: CallOutcome = CallOutcome { is_error: true, took: Some(Duration::ZERO) };

    fn chosen(calls: RecordedCalls) -> [Option<&'static str>; 4] {
        let settings = AccessLogSettings { calls, ..AccessLogSettings::default() };
        let samples = SampleCounter::default();
        [FAST, SLOW, STREAM, FAILED].map(|call| settings.choose(call, &samples))
    }

    #[test]
    fn each_choice_has_the_calls_of_the_choice_before() {
        assert_eq!(chosen(RecordedCalls::Off), [None; 4]);
        assert_eq!(chosen(RecordedCalls::Errors), [None, None, None, Some("error")]);
        assert_eq!(chosen(RecordedCalls::Slow), [None, Some("slow"), None, Some("error")]);
        assert_eq!(chosen(RecordedCalls::All), [Some("all"); 4]);
    }

    #[test]
    fn one_of_so_many_other_calls_is_a_sample() {
        let settings = AccessLogSettings { sample: 3, ..AccessLogSettings::default() };
        let samples = SampleCounter::default();
        let chosen: Vec<_> = (0..7).map(|_| settings.choose(FAST, &samples).is_some()).collect();
        assert_eq!(chosen, [false, false, true, false, false, true, false]);
        // Failed and slow calls are no samples.
        assert_eq!(settings.choose(SLOW, &samples), Some("slow"));
        assert_eq!(settings.choose(FAST, &samples), None);
        assert_eq!(settings.choose(FAST, &samples), Some("sample"));
        let none = AccessLogSettings { sample: 0, ..settings };
        assert_eq!((0..9).find_map(|_| none.choose(FAST, &samples)), None);
    }
}
