//! Rate, errors and duration of calls, by one label.
//!
//! Owns: the two families of metrics, and their values for one value of the label. Must not know: the meaning
//! of the label. Invariant: counting a call takes atomic additions only, once its code was counted before.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};

use crate::latency_histogram::LatencyHistogram;
use crate::single_label::{SingleLabel, one};

/// gRPC has codes 0 to 16.
const CODES: usize = 17;

type CallCounters = Family<[(&'static str, String); 2], Counter>;
type Durations = Family<SingleLabel, LatencyHistogram, fn() -> LatencyHistogram>;

/// Counts of calls and their durations, by a label.
pub struct CallFamilies {
    label: &'static str,
    calls: CallCounters,
    durations: Durations,
}

/// The counts of calls and their durations for one value of the label.
#[derive(Debug)]
pub struct CallFigures {
    label: &'static str,
    value: Arc<str>,
    calls: CallCounters,
    codes: [OnceLock<Counter>; CODES],
    duration: LatencyHistogram,
}

impl CallFamilies {
    /// Registers the metrics `<label>_calls` and `<label>_call_duration`.
    pub(super) fn registered(registry: &mut Registry, label: &'static str) -> Self {
        let calls = CallCounters::default();
        let help = format!("Calls and streams of clients that ended, by {label} and gRPC code");
        registry.register(format!("{label}_calls"), help, Family::clone(&calls));
        let durations: Durations = Family::new_with_constructor(LatencyHistogram::of_calls);
        let help = format!(
            "Time of unary calls by {label}, without Lock and Campaign, which wait for other clients"
        );
        let name = format!("{label}_call_duration");
        registry.register_with_unit(name, help, Unit::Seconds, Family::clone(&durations));
        Self { label, calls, durations }
    }

    /// The metrics of one value of the label.
    pub(super) fn of(&self, value: &Arc<str>) -> CallFigures {
        CallFigures {
            label: self.label,
            value: Arc::clone(value),
            calls: Family::clone(&self.calls),
            codes: Default::default(),
            duration: self.durations.get_or_create_owned(&one(self.label, &**value)),
        }
    }
}

impl CallFigures {
    /// Counts a finished call. `code_name` returns the label of `code`, and is called for the first such call
    /// only. `took` is given for unary calls with a duration of their own.
    pub fn call_ended(&self, code: u8, code_name: impl FnOnce() -> &'static str, took: Option<Duration>) {
        if let Some(cell) = self.codes.get(usize::from(code)) {
            let labels = || [(self.label, self.value.as_ref().to_owned()), ("code", code_name().to_owned())];
            cell.get_or_init(|| self.calls.get_or_create_owned(&labels())).inc();
        }
        if let Some(took) = took {
            self.duration.observe(took);
        }
    }
}
