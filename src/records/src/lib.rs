//! Records of calls: audit records and spans, and the collector that takes both.

pub mod audit;
pub mod otlp;
