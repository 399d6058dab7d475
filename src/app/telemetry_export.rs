//! Starts the threads that send spans and log records to the collector of `[trace]`.
//!
//! Owns: the threads to start, and their end. Must not know: spans, records, requests.

use std::sync::Arc;

use crate::app::ServeError;
use keyward_config::Config;
use keyward_dial::names::NameResolver;
use keyward_gateway::call_trace::SpanQueue;
use keyward_records::otlp::collector_access::{CollectorAccess, CurrentCollectorAccess};
use keyward_records::otlp::exporter::{self, ExportedSignal};
use keyward_telemetry::call_span::{CallSpan, trace_request};
use keyward_telemetry::export_queue::{ExportGuard, ExportQueue};
use keyward_telemetry::log_export::{exported_log, logs_request};
use keyward_telemetry::metrics::Metrics;
use keyward_telemetry::otlp_messages::OtlpLogRecord;

/// Sends the last spans and log records when dropped, within two seconds each.
#[must_use = "the last items are sent when it is dropped at the end of the process"]
pub(super) struct ExportGuards {
    /// The access to the collector.
    pub(super) collector: CurrentCollectorAccess,
    _spans: ExportGuard<CallSpan>,
    _logs: Option<ExportGuard<OtlpLogRecord>>,
}

/// Starts the threads, if a collector is configured. Returns the queue of spans.
///
/// # Errors
/// The collector's TLS settings cannot be used, or a thread cannot be started.
pub(super) fn start(
    config: &Config,
    names: &NameResolver,
    metrics: &Metrics,
) -> Result<Option<(SpanQueue, ExportGuards)>, ServeError> {
    let Some(trace) = &config.trace else { return Ok(None) };
    let collector = CollectorAccess::new(&trace.collector, names)?.in_force();
    let (access, replica) = (|| Arc::clone(&collector), &*trace.replica);
    let queue = Arc::new(ExportQueue::new(trace.queue));
    let path = trace.traces_path.clone();
    let signal = ExportedSignal { name: "spans", path, encode: trace_request };
    let spans = exporter::start(signal, Arc::clone(&queue), access(), replica, metrics.export.clone())?;
    let logs = exported_log().filter(|_| config.log.is_exported);
    let logs = logs.map(|queue| {
        let path = trace.logs_path.clone();
        let signal = ExportedSignal { name: "log_records", path, encode: logs_request };
        exporter::start(signal, queue, access(), replica, metrics.export.clone())
    });
    Ok(Some((queue, ExportGuards { _spans: spans, _logs: logs.transpose()?, collector })))
}
