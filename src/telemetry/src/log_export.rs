//! The log as OTLP log records, for the collector of `[trace]`.
//!
//! Owns: the form of a log record, and the process's queue of such records. Must not know: the contents of
//! the log, the sending of records. Invariants: a record has the time, level, target, message and fields of
//! the log's line, each value as text, number or boolean of its own, so that no value can pose as another
//! field; a logging thread never waits for the collector.

use std::fmt::{Debug, Write as _};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use data_encoding::HEXLOWER;
use prost::Message as _;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_log::NormalizeEvent as _;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::export_queue::ExportQueue;
use crate::module_names::ShownTarget;
use crate::otlp_messages::{
    OtlpLogRecord, OtlpLogsRequest, OtlpResource, OtlpResourceLogs, OtlpScope, OtlpScopeLogs, OtlpValue,
    OtlpValueKind, attribute, unix_nanos,
};

/// The queue of log records for the collector.
pub type LogRecordQueue = Arc<ExportQueue<OtlpLogRecord>>;

/// The queue of the process. A process has a single log, so a single queue suffices.
static EXPORTED: OnceLock<LogRecordQueue> = OnceLock::new();

/// The memory of a record beside its texts, about.
const RECORD: usize = 256;

/// Makes a log record of each event.
pub(super) struct LogExportLayer(LogRecordQueue);

impl LogExportLayer {
    /// The layer of the process's log, with a queue for `capacity` bytes.
    pub(super) fn install(capacity: usize) -> Self {
        Self(Arc::clone(EXPORTED.get_or_init(|| Arc::new(ExportQueue::new(capacity)))))
    }
}

/// The queue of the process's log; `None` if the log is not exported.
#[must_use]
pub fn exported_log() -> Option<LogRecordQueue> {
    EXPORTED.get().cloned()
}

impl<S: Subscriber> Layer<S> for LogExportLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let (record, weight) = record_of(event, SystemTime::now());
        self.0.push(record, weight);
    }
}

/// The body of a request with these records.
#[must_use]
pub fn logs_request(replica: &str, records: &[OtlpLogRecord]) -> Vec<u8> {
    let log_records = records.to_vec();
    let scope_logs = vec![OtlpScopeLogs { scope: Some(OtlpScope::of("keyward.log")), log_records }];
    let resource = Some(OtlpResource::of(replica));
    OtlpLogsRequest { resource_logs: vec![OtlpResourceLogs { resource, scope_logs }] }.encode_to_vec()
}

/// The record of an event, and its weight.
fn record_of(event: &Event<'_>, now: SystemTime) -> (OtlpLogRecord, usize) {
    let mut fields = FieldCollector { record: OtlpLogRecord::default(), weight: RECORD };
    event.record(&mut fields);
    // Records of libraries using the crate `log` have their target in a field.
    let normalized = event.normalized_metadata();
    let metadata = normalized.as_ref().unwrap_or_else(|| event.metadata());
    let FieldCollector { mut record, weight } = fields;
    let target = OtlpValueKind::Text(ShownTarget::of(metadata.target()).to_string());
    record.attributes.push(attribute("target", target));
    (record.time_unix_nano, record.observed_time_unix_nano) = (unix_nanos(now), unix_nanos(now));
    record.severity_text = metadata.level().as_str().to_owned();
    record.severity_number = severity(*metadata.level());
    (record, weight)
}

/// `SeverityNumber`.
fn severity(level: Level) -> i32 {
    match level {
        Level::TRACE => 1,
        Level::DEBUG => 5,
        Level::INFO => 9,
        Level::WARN => 13,
        Level::ERROR => 17,
    }
}

/// Collects the fields of an event.
struct FieldCollector {
    record: OtlpLogRecord,
    weight: usize,
}

impl FieldCollector {
    fn add(&mut self, field: &Field, value: OtlpValueKind) {
        let name = field.name().strip_prefix("r#").unwrap_or(field.name());
        if let OtlpValueKind::Text(text) = &value {
            self.weight += text.len();
            if name == "trace" {
                self.record.trace_id = HEXLOWER.decode(text.as_bytes()).unwrap_or_default();
            }
        }
        self.weight += name.len() + size_of::<OtlpValue>();
        match name {
            "message" => self.record.body = Some(OtlpValue { value: Some(value) }),
            // The crate `log`'s own fields, which stand in the metadata too.
            _ if name.starts_with("log.") => {}
            _ => self.record.attributes.push(attribute(name, value)),
        }
    }
}

impl Visit for FieldCollector {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, OtlpValueKind::Text(value.to_owned()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, OtlpValueKind::Number(i64::try_from(value).unwrap_or(i64::MAX)));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, OtlpValueKind::Number(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, OtlpValueKind::Flag(value));
    }

    /// Handles all other values, including values written with `Display`.
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let mut text = String::new();
        // Writing to a `String` fails only if the value's own formatting does.
        if write!(text, "{value:?}").is_err() {
            text.push_str("(unwritable)");
        }
        self.add(field, OtlpValueKind::Text(text));
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::log_listener::with_log_listener;

    fn logged(log: impl FnOnce()) -> Vec<OtlpLogRecord> {
        let queue = LogRecordQueue::new(ExportQueue::new(1 << 20));
        let layer = LogExportLayer(Arc::clone(&queue));
        with_log_listener(tracing_subscriber::registry().with(layer), log);
        queue.take().expect("records").items
    }

    fn attributes(record: &OtlpLogRecord) -> Vec<(&str, OtlpValueKind)> {
        let value = |value: &Option<OtlpValue>| value.clone().and_then(|value| value.value).expect("a value");
        record.attributes.iter().map(|named| (named.key.as_str(), value(&named.value))).collect()
    }

    #[test]
    fn a_record_has_the_fields_of_its_line_and_the_trace_of_its_call() {
        let trace = "0af7651916cd43dd8448eb211c80319c";
        let records = logged(|| {
            tracing::info!(target: "keyward::access", micros = 7_u64, is_ok = true, trace, "call");
            tracing::warn!(error = %"a\nb user=root", "failed");
        });
        let [call, failed] = &records[..] else { panic!("{records:?}") };
        assert_eq!(call.trace_id, HEXLOWER.decode(trace.as_bytes()).unwrap());
        assert_eq!((call.severity_number, call.severity_text.as_str()), (9, "INFO"));
        let text = |text: &str| OtlpValueKind::Text(text.to_owned());
        let expected = [
            ("micros", OtlpValueKind::Number(7)),
            ("is_ok", OtlpValueKind::Flag(true)),
            ("trace", text(trace)),
            ("target", text("keyward::access")),
        ];
        assert_eq!(attributes(call), expected);
        assert_eq!(failed.body.clone().unwrap().value, Some(text("failed")));
        assert_eq!(attributes(failed)[0], ("error", text("a\nb user=root")), "one value, whatever its text");
        assert!(failed.trace_id.is_empty() && failed.time_unix_nano > 0);
    }

    #[test]
    fn records_without_room_are_counted() {
        let queue = LogRecordQueue::new(ExportQueue::new(2 * RECORD));
        let layer = LogExportLayer(Arc::clone(&queue));
        let log = || (0..5).for_each(|_| tracing::info!("a message"));
        with_log_listener(tracing_subscriber::registry().with(layer), log);
        let lost = prometheus_client::metrics::counter::Counter::default();
        queue.count_losses_in(lost.clone());
        assert_eq!((queue.take().unwrap().items.len(), lost.get()), (1, 4));
    }
}
