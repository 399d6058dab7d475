//! The metric of the conditions that the log tells.
//!
//! Owns: its name, help text and labels. Must not know: the conditions, the log. Invariant: a condition that
//! does not hold has no series, so an alert on a series ends with the condition.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::conditions::StandingCondition;

/// The conditions that hold.
#[derive(Debug)]
pub struct ConditionMetrics(Family<[(&'static str, &'static str); 3], Gauge>);

impl ConditionMetrics {
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let family = Family::default();
        let help = "1 while the condition holds that the log tells, by its level and the check that has it";
        registry.register("logged_condition", help, Family::clone(&family));
        Self(family)
    }

    /// Shows these conditions and no others.
    pub fn put(&self, standing: &[StandingCondition]) {
        self.0.clear();
        for condition in standing {
            let level = if condition.is_error { "error" } else { "warn" };
            let (name, check) = (condition.row.name, condition.row.telling.check());
            self.0.get_or_create(&[("condition", name), ("level", level), ("check", check)]).set(1);
        }
    }
}
