//! Metrics of what requests hold in memory.
//!
//! Owns: their names and labels. Must not know: what a request counts, when one is refused.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::telemetry::metrics::{One, one};

/// Metrics of what requests hold in memory.
#[derive(Clone)]
pub struct RequestMemoryFigures {
    /// Bytes that requests hold.
    pub bytes: Gauge,
    refused: Family<One, Counter>,
}

impl RequestMemoryFigures {
    pub(crate) fn registered(registry: &mut Registry) -> Self {
        let figures = Self { bytes: Gauge::default(), refused: Family::default() };
        let help = "Bytes of header lists, messages and streams that requests hold";
        registry.register("request_memory_bytes", help, figures.bytes.clone());
        let help = "Requests refused since there was no memory for them, by share";
        registry.register("request_memory_refused", help, figures.refused.clone());
        figures
    }

    /// Requests refused since this share had no room.
    #[must_use]
    pub fn refused(&self, share: &'static str) -> Counter {
        self.refused.get_or_create(&one("share", share)).clone()
    }

    /// Where `before` bytes were held there are `now`.
    pub fn held(&self, before: usize, now: usize) {
        let signed = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.bytes.inc_by(signed(now) - signed(before));
    }
}
