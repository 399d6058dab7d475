//! The settings of the collector of spans and log records.
//!
//! Must not know: spans, records, the choice of the calls with a trace.

use http::uri::PathAndQuery;

use crate::collector_settings::CollectorSettings;

/// The collector of `[trace]`.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    /// The collector.
    pub collector: CollectorSettings,
    /// The path of requests with spans.
    pub traces_path: PathAndQuery,
    /// The path of requests with log records.
    pub logs_path: PathAndQuery,
    /// Memory of spans waiting for the collector, in bytes.
    pub queue: usize,
    /// The name of this replica.
    pub replica: String,
}
