//! Metrics of sealed requests of other replicas at the admin address.
//!
//! Owns: names and labels. Must not know: when a request is refused.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::single_label::{SingleLabel, one};

/// Metrics of sealed requests.
#[derive(Clone)]
pub struct FleetMetrics {
    requests: Family<SingleLabel, Counter>,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetResult {
    /// Answered.
    Answered,
    /// Not sealed by a replica with one of the session keys: forged, changed, cut, too long, or sealed with a
    /// key that is not in force here.
    Forged,
    /// Of a version that asks something else.
    Unreadable,
    /// For another process, another cluster or another realm.
    Elsewhere,
    /// Too old, or from a time to come.
    Late,
    /// Sent a second time.
    Replayed,
    /// More than a replica takes at a time.
    Busy,
}

impl FleetResult {
    const ALL: [Self; 7] = [
        Self::Answered,
        Self::Forged,
        Self::Unreadable,
        Self::Elsewhere,
        Self::Late,
        Self::Replayed,
        Self::Busy,
    ];

    /// The name in metric labels and log records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Forged => "forged",
            Self::Unreadable => "unreadable",
            Self::Elsewhere => "elsewhere",
            Self::Late => "late",
            Self::Replayed => "replayed",
            Self::Busy => "busy",
        }
    }
}

impl FleetMetrics {
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let figures = Self { requests: Family::default() };
        let help = "Sealed requests at the admin address, as of other replicas, by result";
        registry.register("fleet_requests", help, figures.requests.clone());
        // From 0 on: the first forged request is an increase.
        drop(FleetResult::ALL.map(|result| figures.requests(result)));
        figures
    }

    /// Requests with this result.
    #[must_use]
    pub fn requests(&self, result: FleetResult) -> Counter {
        self.requests.get_or_create(&one("result", result.name())).clone()
    }
}
