//! Metrics by listener: rate, errors, duration and bytes of the clients' calls.
//!
//! Owns: names and labels. Must not know: connections, calls. Invariant: the label `listener` comes from the
//! configuration; a connection resolves the counters of its listener once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};

use crate::call_figures::{CallFamilies, CallFigures};
use crate::single_label::{SingleLabel, one};

/// Metrics by listener.
pub struct ListenerMetrics {
    calls: CallFamilies,
    received: Family<SingleLabel, Counter>,
    sent: Family<SingleLabel, Counter>,
    listeners: Mutex<BTreeMap<Arc<str>, Arc<ListenerFigures>>>,
}

/// The metrics of one listener.
#[derive(Debug)]
pub struct ListenerFigures {
    /// Calls by code, and their durations.
    pub calls: CallFigures,
    /// Bytes of framed messages of unary requests.
    pub received: Counter,
    /// Bytes of framed messages sent to clients.
    pub sent: Counter,
}

impl ListenerMetrics {
    /// Registers the metrics.
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let metrics = Self {
            calls: CallFamilies::registered(registry, "listener"),
            received: Family::default(),
            sent: Family::default(),
            listeners: Mutex::default(),
        };
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
                calls: self.calls.of(name),
                received: self.received.get_or_create_owned(&label),
                sent: self.sent.get_or_create_owned(&label),
            })
        });
        Arc::clone(figures)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn each_listener_has_its_own_figures_and_one_set_of_them() {
        let mut registry = Registry::default();
        let metrics = ListenerMetrics::registered(&mut registry);
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        metrics.of(&a).calls.call_ended(0, || "OK", Some(Duration::from_millis(2)));
        metrics.of(&a).calls.call_ended(0, || unreachable!("the counter exists"), None);
        metrics.of(&b).calls.call_ended(14, || "Unavailable", None);
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
