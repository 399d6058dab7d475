//! The request for lines of the audit log, as OTLP logs.
//!
//! Owns: the form of a log record. Must not know: HTTP, the contents of a record beside its time, number and
//! event. Invariant: the body of a log record is the whole line, byte for byte, so that the chain can be
//! checked at the collector. A test on a real server decodes the requests by the published types of
//! OpenTelemetry.

use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::record::Timestamp;
use keyward_telemetry::otlp_messages::{
    OtlpLogRecord, OtlpLogsRequest, OtlpResource, OtlpResourceLogs, OtlpScope, OtlpScopeLogs, OtlpValue,
    OtlpValueKind, attribute, unix_nanos,
};

/// `SEVERITY_NUMBER_INFO`.
const INFO: i32 = 9;

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
    let log_records = lines.map(|line| log_record(line, unix_nanos(now.0))).collect();
    let scope_logs = vec![OtlpScopeLogs { scope: Some(OtlpScope::of("keyward.audit")), log_records }];
    OtlpLogsRequest {
        resource_logs: vec![OtlpResourceLogs { resource: Some(OtlpResource::of(replica)), scope_logs }],
    }
}

fn log_record(line: &[u8], observed: u64) -> OtlpLogRecord {
    let shown: ShownFields = serde_json::from_slice(line).unwrap_or_default();
    let time = OffsetDateTime::parse(&shown.time, &Rfc3339).ok();
    let time = time.and_then(|time| u64::try_from(time.unix_timestamp_nanos()).ok());
    let body = OtlpValueKind::Text(String::from_utf8_lossy(line).into_owned());
    OtlpLogRecord {
        time_unix_nano: time.unwrap_or(observed),
        severity_number: INFO,
        severity_text: "INFO".into(),
        body: Some(OtlpValue { value: Some(body) }),
        attributes: vec![attribute("keyward.audit.seq", OtlpValueKind::Number(shown.seq))],
        trace_id: Vec::new(),
        observed_time_unix_nano: observed,
        event_name: format!("keyward.audit.{}", shown.event),
    }
}
