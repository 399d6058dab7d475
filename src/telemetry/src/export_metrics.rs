//! Metrics of the spans and log records for a collector.
//!
//! Owns: names and labels. Must not know: spans, records.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::single_label::{SingleLabel, one};

/// The kinds of items, as in the label `signal`.
const SIGNALS: [&str; 2] = ["spans", "log_records"];
/// The reasons of losses, as in the label `reason`.
const REASONS: [&str; 3] = ["queue_full", "refused", "unsent"];

/// Metrics of the items for a collector.
#[derive(Clone)]
pub struct ExportMetrics {
    sent: Family<SingleLabel, Counter>,
    lost: Family<[(&'static str, &'static str); 2], Counter>,
    /// Calls whose client asked for a trace, beyond the rate of such calls.
    pub parents_not_followed: Counter,
}

impl ExportMetrics {
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let metrics = Self {
            sent: Family::default(),
            lost: Family::default(),
            parents_not_followed: Counter::default(),
        };
        let help = "Items that the collector of [trace] took, by signal";
        registry.register("export_sent", help, Family::clone(&metrics.sent));
        let help = "Items for the collector of [trace] that were lost, by signal and reason";
        registry.register("export_lost", help, Family::clone(&metrics.lost));
        let help = "Calls that their client wanted traced, over trace.parents_per_second";
        registry.register("trace_parents_not_followed", help, metrics.parents_not_followed.clone());
        // From 0 on: the first loss is an increase.
        for signal in SIGNALS {
            drop(metrics.sent(signal));
            REASONS.into_iter().for_each(|reason| drop(metrics.lost(signal, reason)));
        }
        metrics
    }

    /// Items of this kind taken by the collector.
    #[must_use]
    pub fn sent(&self, signal: &'static str) -> Counter {
        self.sent.get_or_create(&one("signal", signal)).clone()
    }

    /// Items of this kind lost for this reason: `queue_full`, `refused` by the collector, or `unsent` because
    /// the collector could not be reached or did not take them.
    #[must_use]
    pub fn lost(&self, signal: &'static str, reason: &'static str) -> Counter {
        self.lost.get_or_create(&[("signal", signal), ("reason", reason)]).clone()
    }
}
