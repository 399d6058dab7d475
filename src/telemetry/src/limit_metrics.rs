//! Metrics of limits on usage, and of shedding.
//!
//! Owns: names and labels. Must not know: limits, callers.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::single_label::{SingleLabel, one};

/// A label set of a limit: its scope and its kind, both from closed sets.
type LimitLabels = [(&'static str, &'static str); 2];

/// Metrics of limits on usage, and of shedding.
#[derive(Clone)]
pub struct LimitMetrics {
    refused: Family<LimitLabels, Counter>,
    shadow_refused: Family<LimitLabels, Counter>,
    pressure: Family<SingleLabel, Gauge>,
    /// Buckets and counts kept for peers, roles and listeners.
    pub limiters: Gauge,
    /// Refusals answered late, to slow down a client that repeats refused calls at once.
    pub delayed_refusals: Counter,
}

impl LimitMetrics {
    /// Registers the metrics.
    #[must_use]
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let (refused, shadow_refused) = (Family::default(), Family::default());
        let help = "Calls, watches and leases refused by a limit, by scope and limit";
        registry.register("limit_refused", help, Family::clone(&refused));
        let help = "Calls, watches and leases that a limit would refuse if it were enforced";
        registry.register("limit_shadow_refused", help, Family::clone(&shadow_refused));
        let pressure = Family::default();
        let help = "Pressure on the cluster for which calls are shed, by cause: 0 is none";
        registry.register("shedding_pressure", help, Family::clone(&pressure));
        let limiters = Gauge::default();
        let help = "Peers, roles and listeners with counted usage";
        registry.register("limiters", help, limiters.clone());
        let delayed_refusals = Counter::default();
        let help = "Refusals by a limit answered late, to slow down a client that repeats them";
        registry.register("limit_delayed_refusals", help, delayed_refusals.clone());
        Self { refused, shadow_refused, pressure, limiters, delayed_refusals }
    }

    /// The counters of refusals by a limit: enforced, and counted only.
    #[must_use]
    pub fn counters(&self, scope: &'static str, limit: &'static str) -> (Counter, Counter) {
        let labels = [("scope", scope), ("limit", limit)];
        (self.refused.get_or_create_owned(&labels), self.shadow_refused.get_or_create_owned(&labels))
    }

    /// The gauge of the pressure by a cause.
    #[must_use]
    pub fn pressure(&self, cause: &'static str) -> Gauge {
        self.pressure.get_or_create_owned(&one("cause", cause))
    }
}
