//! Metrics by listener: rate, errors, duration and bytes of the clients' calls.
//!
//! Owns: names and labels. Must not know: connections, calls. Invariant: the label `listener` comes from the
//! configuration; a connection resolves the counters of its listener once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};

use crate::telemetry::latency_histogram::LatencyHistogram;
use crate::telemetry::single_label::{SingleLabel, one};

/// gRPC has codes 0 to 16.
const CODES: usize = 17;

type CallCounters = Family<[(&'static str, String); 2], Counter>;
type Durations = Family<SingleLabel, LatencyHistogram, fn() -> LatencyHistogram>;

/// Metrics by listener.
pub struct ListenerMetrics {
    calls: CallCounters,
    durations: Durations,
    received: Family<SingleLabel, Counter>,
    sent: Family<SingleLabel, Counter>,
    listeners: Mutex<BTreeMap<Arc<str>, Arc<ListenerFigures>>>,
}

/// The metrics of one listener.
#[derive(Debug)]
pub struct ListenerFigures {
    name: Arc<str>,
    calls: CallCounters,
    codes: [OnceLock<Counter>; CODES],
    duration: LatencyHistogram,
    /// Bytes of framed messages of unary requests.
    pub received: Counter,
    /// Bytes of framed messages sent to clients.
    pub sent: Counter,
}

impl ListenerMetrics {
    /// Registers the metrics.
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let durations: Durations = Family::new_with_constructor(LatencyHistogram::of_calls);
        let metrics = Self {
            calls: Family::default(),
            durations,
            received: Family::default(),
            sent: Family::default(),
            listeners: Mutex::default(),
        };
        let help = "Calls and streams of clients that ended, by listener and gRPC code";
        registry.register("listener_calls", help, Family::clone(&metrics.calls));
        let help = "Time of unary calls by listener, without Lock and Campaign, which wait for other clients";
        let name = "listener_call_duration";
        registry.register_with_unit(name, help, Unit::Seconds, Family::clone(&metrics.durations));
        let help = "Bytes of unary requests, by listener";
        let name = "listener_received";
        registry.register_with_unit(name, help, Unit::Bytes, Family::clone(&metrics.received));
        let help = "Bytes of answers and events sent to clients, by listener";
        registry.register_with_unit("listener_sent", help, Unit::Bytes, Family::clone(&metrics.sent));
        metrics
    }

    /// The metrics of the listener of this name.
    #[must_use]
    pub fn of(&self, name: &Arc<str>) -> Arc<ListenerFigures> {
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let figures = listeners.entry(Arc::clone(name)).or_insert_with(|| {
            let label = one("listener", &**name);
            Arc::new(ListenerFigures {
                name: Arc::clone(name),
                calls: self.calls.clone(),
                codes: Default::default(),
                duration: self.durations.get_or_create_owned(&label),
                received: self.received.get_or_create_owned(&label),
                sent: self.sent.get_or_create_owned(&label),
            })
        });
        Arc::clone(figures)
    }
}

impl ListenerFigures {
    /// Counts a finished call. `code_name` returns the label of `code`, and is called for the first such call
    /// only. `took` is given for unary calls with a duration of their own.
    pub fn call_ended(&self, code: u8, code_name: impl FnOnce() -> &'static str, took: Option<Duration>) {
        if let Some(cell) = self.codes.get(usize::from(code)) {
            let labels = || [("listener", self.name.as_ref().to_owned()), ("code", code_name().to_owned())];
            cell.get_or_init(|| self.calls.get_or_create_owned(&labels())).inc();
        }
        if let Some(took) = took {
            self.duration.observe(took);
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn each_listener_has_its_own_figures_and_one_set_of_them() {
        let mut registry = Registry::default();
        let metrics = ListenerMetrics::registered(&mut registry);
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        metrics.of(&a).call_ended(0, || "OK", Some(Duration::from_millis(2)));
        metrics.of(&a).call_ended(0, || unreachable!("the counter exists"), None);
        metrics.of(&b).call_ended(14, || "Unavailable", None);
        metrics.of(&b).sent.inc_by(7);
        let mut text = String::new();
        encode(&mut text, &registry).expect("text");
        for line in [
            "listener_calls_total{listener=\"a\",code=\"OK\"} 2",
            "listener_calls_total{listener=\"b\",code=\"Unavailable\"} 1",
            "listener_call_duration_seconds_count{listener=\"a\"} 1",
            "listener_call_duration_seconds_count{listener=\"b\"} 0",
            "listener_sent_bytes_total{listener=\"a\"} 0",
            "listener_sent_bytes_total{listener=\"b\"} 7",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
}
