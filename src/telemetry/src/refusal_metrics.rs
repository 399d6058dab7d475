//! Metrics of calls refused by Keyward, by reason.
//!
//! Owns: names and labels. Must not know: the reasons.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use std::sync::OnceLock;

use crate::single_label::{SingleLabel, one};

/// Counters of refused calls.
pub struct RefusalMetrics {
    refused: Family<SingleLabel, Counter>,
    counters: OnceLock<Vec<Counter>>,
}

impl RefusalMetrics {
    /// Registers the metric.
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let refused = Family::default();
        let help = "Calls and streams that Keyward refused, by reason";
        registry.register("calls_refused", help, Family::clone(&refused));
        Self { refused, counters: OnceLock::new() }
    }

    /// Names all reasons, once: their counters begin at 0.
    pub fn name_reasons(&self, names: impl IntoIterator<Item = &'static str>) {
        let counter = |name| self.refused.get_or_create_owned(&one("reason", name));
        self.counters.get_or_init(|| names.into_iter().map(counter).collect());
    }

    /// The counts of all reasons, in the order of [`name_reasons`](Self::name_reasons).
    pub fn counts(&self) -> Vec<u64> {
        self.counters.get().map(|counters| counters.iter().map(Counter::get).collect()).unwrap_or_default()
    }

    /// Counts a refused call by the index of its reason in [`name_reasons`](Self::name_reasons).
    pub fn count(&self, reason: usize) {
        if let Some(counter) = self.counters.get().and_then(|counters| counters.get(reason)) {
            counter.inc();
        }
    }
}
