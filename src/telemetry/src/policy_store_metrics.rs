//! Metrics of the policy stored in etcd.
//!
//! Owns: names and labels. Must not know: generations, etcd.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::single_label::{SingleLabel, one};

/// Metrics of the stored policy.
#[derive(Clone)]
pub struct PolicyStoreMetrics {
    faults: Family<SingleLabel, Counter>,
    /// Seconds since the rules in force were last confirmed as etcd's current state.
    pub age: Gauge<f64, AtomicU64>,
    /// The number of the stored generation in force.
    pub generation: Gauge,
    /// Temporary grants in force.
    pub temporary_grants: Gauge,
}

impl PolicyStoreMetrics {
    /// Registers the metrics.
    #[must_use]
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let (faults, age) = (Family::default(), Gauge::default());
        let help = "Faults found in the stored policy, each counted once, by kind";
        registry.register("policy_store_faults", help, Family::clone(&faults));
        let help = "Since when the rules in force were not confirmed as the policy stored in etcd";
        registry.register_with_unit("policy_age", help, Unit::Seconds, Gauge::clone(&age));
        let (generation, temporary_grants) = (Gauge::default(), Gauge::default());
        let help = "Number of the stored policy generation in force; 0 without one";
        registry.register("policy_generation", help, Gauge::clone(&generation));
        let help = "Temporary grants in force";
        registry.register("policy_temporary_grants", help, Gauge::clone(&temporary_grants));
        Self { faults, age, generation, temporary_grants }
    }

    /// Counts a fault of the stored policy.
    pub fn count_fault(&self, fault: &'static str) {
        self.faults.get_or_create(&one("fault", fault)).inc();
    }
}
