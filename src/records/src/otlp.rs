//! Spans and log records on their way to a collector, by OTLP over HTTP.
//!
//! Owns: the connection to a collector, the meaning of its answers, and the threads that send. Must not know:
//! the facts in a span or a record, calls.

pub mod collector;
pub mod collector_access;
pub mod exporter;
pub mod verdict;
