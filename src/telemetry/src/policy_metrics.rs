//! Metrics of policy decisions.
//!
//! Owns: names and labels. Must not know: rules, callers.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::single_label::{SingleLabel, one};

/// Metrics of policy decisions.
#[derive(Clone)]
pub struct PolicyMetrics {
    refused: Family<SingleLabel, Counter>,
    shadow_denied: Family<SingleLabel, Counter>,
    /// Watches ended because their caller lost the permission.
    pub watches_ended: Counter,
    /// Requests that name a lease outside of their caller's namespace.
    pub foreign_leases: Counter,
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
        let foreign_leases = Counter::default();
        let help = "Requests that name a lease outside of their caller's namespace";
        registry.register("policy_foreign_leases", help, foreign_leases.clone());
        Self { refused, shadow_denied, watches_ended, foreign_leases }
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
