//! Metrics of policy decisions.
//!
//! Owns: names and labels. Must not know: rules, callers.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::telemetry::single_label::{SingleLabel, one};

/// Metrics of policy decisions.
#[derive(Clone)]
pub struct PolicyMetrics {
    refused: Family<SingleLabel, Counter>,
    shadow_denied: Family<SingleLabel, Counter>,
    store_faults: Family<SingleLabel, Counter>,
    /// Seconds since the rules in force were last confirmed as etcd's current state.
    pub age: Gauge<f64, AtomicU64>,
    /// The number of the stored generation in force.
    pub generation: Gauge,
    /// Temporary grants in force.
    pub temporary_grants: Gauge,
    /// Watches ended because their caller lost the permission.
    pub watches_ended: Counter,
}

impl PolicyMetrics {
    /// Registers the metrics.
    #[must_use]
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let (refused, shadow_denied) = (Family::default(), Family::default());
        let help = "Requests refused by the policy, by action";
        registry.register("policy_refused", help, Family::clone(&refused));
        let help = "Requests that the policy would refuse if it were enforced, by action";
        registry.register("policy_shadow_denied", help, Family::clone(&shadow_denied));
        let watches_ended = Counter::default();
        let help = "Watches ended because a changed policy denies their keys";
        registry.register("policy_watches_ended", help, watches_ended.clone());
        let (store_faults, age) = (Family::default(), Gauge::default());
        let help = "Faults found in the stored policy, each counted once, by kind";
        registry.register("policy_store_faults", help, Family::clone(&store_faults));
        let help = "Since when the rules in force were not confirmed as the policy stored in etcd";
        registry.register_with_unit("policy_age", help, Unit::Seconds, Gauge::clone(&age));
        let (generation, temporary_grants) = (Gauge::default(), Gauge::default());
        let help = "Number of the stored policy generation in force; 0 without one";
        registry.register("policy_generation", help, Gauge::clone(&generation));
        registry.register(
            "policy_temporary_grants",
            "Temporary grants in force",
            Gauge::clone(&temporary_grants),
        );
        Self { refused, shadow_denied, store_faults, age, generation, temporary_grants, watches_ended }
    }

    /// Counts a fault of the stored policy.
    pub fn count_store_fault(&self, fault: &'static str) {
        self.store_faults.get_or_create(&one("fault", fault)).inc();
    }

    /// Counts a refused request.
    pub fn count_refused(&self, action: &'static str) {
        self.refused.get_or_create(&one("action", action)).inc();
    }

    /// Counts a request that was denied, and not refused.
    pub fn count_shadow_denied(&self, action: &'static str) {
        self.shadow_denied.get_or_create(&one("action", action)).inc();
    }
}
