//! The messages of OTLP logs, as far as Keyward sends and reads them, and the request for lines of the log.
//!
//! Owns: names, field numbers and types of the messages, as in `opentelemetry/proto/logs/v1/logs.proto`, and
//! the form of a log record. Must not know: HTTP, the contents of a record beside its time, number and event.
//! Invariant: the body of a log record is the whole line, byte for byte, so that the chain can be checked at
//! the collector. A test on a real server decodes the requests by the published types of OpenTelemetry.
//!
//! Own messages, because the crate `opentelemetry-proto` brings the SDK, which nothing here would use.

use std::time::UNIX_EPOCH;

use prost::Message;
use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::record::Timestamp;

/// `SEVERITY_NUMBER_INFO`.
const INFO: i32 = 9;

/// A request: `ExportLogsServiceRequest`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpLogsRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) resource_logs: Vec<OtlpResourceLogs>,
}

/// Records of one resource: `ResourceLogs`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpResourceLogs {
    #[prost(message, optional, tag = "1")]
    pub(super) resource: Option<OtlpResource>,
    #[prost(message, repeated, tag = "2")]
    pub(super) scope_logs: Vec<OtlpScopeLogs>,
}

/// The origin of records: `Resource`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpResource {
    #[prost(message, repeated, tag = "1")]
    pub(super) attributes: Vec<OtlpAttribute>,
}

/// Records of one part of a program: `ScopeLogs`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpScopeLogs {
    #[prost(message, optional, tag = "1")]
    pub(super) scope: Option<OtlpScope>,
    #[prost(message, repeated, tag = "2")]
    pub(super) log_records: Vec<OtlpLogRecord>,
}

/// A part of a program: `InstrumentationScope`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpScope {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) version: String,
}

/// A record: `LogRecord`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpLogRecord {
    #[prost(fixed64, tag = "1")]
    pub(super) time_unix_nano: u64,
    #[prost(int32, tag = "2")]
    pub(super) severity_number: i32,
    #[prost(string, tag = "3")]
    pub(super) severity_text: String,
    #[prost(message, optional, tag = "5")]
    pub(super) body: Option<OtlpValue>,
    #[prost(message, repeated, tag = "6")]
    pub(super) attributes: Vec<OtlpAttribute>,
    #[prost(fixed64, tag = "11")]
    pub(super) observed_time_unix_nano: u64,
    #[prost(string, tag = "12")]
    pub(super) event_name: String,
}

/// A named value: `KeyValue`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpAttribute {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(message, optional, tag = "2")]
    pub(super) value: Option<OtlpValue>,
}

/// A value: `AnyValue`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpValue {
    #[prost(oneof = "OtlpValueKind", tags = "1, 3")]
    pub(super) value: Option<OtlpValueKind>,
}

/// The kinds of values in use.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum OtlpValueKind {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(int64, tag = "3")]
    Number(i64),
}

/// The answer: `ExportLogsServiceResponse`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpLogsAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) partial_success: Option<OtlpPartialSuccess>,
}

/// Records that the collector refuses for good: `ExportLogsPartialSuccess`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OtlpPartialSuccess {
    #[prost(int64, tag = "1")]
    pub(super) rejected_log_records: i64,
    #[prost(string, tag = "2")]
    pub(super) error_message: String,
}

/// The fields of a line that a log record shows beside its body.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ShownFields {
    time: String,
    event: String,
    seq: i64,
}

/// The request for these lines, without their line breaks.
pub(super) fn logs_request<'l>(
    replica: &str,
    lines: impl Iterator<Item = &'l [u8]>,
    now: Timestamp,
) -> OtlpLogsRequest {
    let scope = OtlpScope { name: "keyward.audit".into(), version: env!("CARGO_PKG_VERSION").into() };
    let attributes = vec![
        attribute("service.name", OtlpValueKind::Text("keyward".into())),
        attribute("service.instance.id", OtlpValueKind::Text(replica.into())),
    ];
    let log_records = lines.map(|line| log_record(line, nanoseconds(now))).collect();
    let scope_logs = vec![OtlpScopeLogs { scope: Some(scope), log_records }];
    OtlpLogsRequest {
        resource_logs: vec![OtlpResourceLogs { resource: Some(OtlpResource { attributes }), scope_logs }],
    }
}

fn log_record(line: &[u8], observed: u64) -> OtlpLogRecord {
    let shown: ShownFields = serde_json::from_slice(line).unwrap_or_default();
    let time = OffsetDateTime::parse(&shown.time, &Rfc3339).ok();
    let time = time.and_then(|time| u64::try_from(time.unix_timestamp_nanos()).ok());
    OtlpLogRecord {
        time_unix_nano: time.unwrap_or(observed),
        severity_number: INFO,
        severity_text: "INFO".into(),
        body: Some(value(OtlpValueKind::Text(String::from_utf8_lossy(line).into_owned()))),
        attributes: vec![attribute("keyward.audit.seq", OtlpValueKind::Number(shown.seq))],
        observed_time_unix_nano: observed,
        event_name: format!("keyward.audit.{}", shown.event),
    }
}

fn attribute(key: &str, kind: OtlpValueKind) -> OtlpAttribute {
    OtlpAttribute { key: key.into(), value: Some(value(kind)) }
}

fn value(kind: OtlpValueKind) -> OtlpValue {
    OtlpValue { value: Some(kind) }
}

fn nanoseconds(time: Timestamp) -> u64 {
    let since = time.0.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
