//! Metrics of the memory held by requests.
//!
//! Owns: names and labels. Must not know: how memory is charged, when a request is refused.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::single_label::{SingleLabel, one};

/// Metrics of the memory held by requests.
#[derive(Clone)]
pub struct RequestMemoryMetrics {
    /// Bytes held by requests.
    pub bytes: Gauge,
    refused: Family<SingleLabel, Counter>,
}

impl RequestMemoryMetrics {
    /// Registers the metrics.
    pub fn registered(registry: &mut Registry) -> Self {
        let figures = Self { bytes: Gauge::default(), refused: Family::default() };
        let help = "Bytes of header lists, messages and streams that requests hold";
        registry.register("request_memory_bytes", help, figures.bytes.clone());
        let help = "Requests refused since there was no memory for them, by share";
        registry.register("request_memory_refused", help, figures.refused.clone());
        figures
    }

    /// Requests refused because this account was full.
    #[must_use]
    pub fn refused(&self, share: &'static str) -> Counter {
        self.refused.get_or_create(&one("share", share)).clone()
    }
}
