//! The messages of OTLP logs and traces, as far as Keyward sends and reads them.
//!
//! Owns: names, field numbers and types of the messages, as in `opentelemetry/proto/logs/v1/logs.proto` and
//! `trace/v1/trace.proto`. Must not know: HTTP, the contents of a record or a span. A test on a real server
//! decodes the requests by OpenTelemetry's own Collector.
//!
//! Own messages, because the crate `opentelemetry-proto` brings the SDK, which nothing here would use.

use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;

/// A request: `ExportLogsServiceRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpLogsRequest {
    /// Records, by resource.
    #[prost(message, repeated, tag = "1")]
    pub resource_logs: Vec<OtlpResourceLogs>,
}

/// Records of one resource: `ResourceLogs`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpResourceLogs {
    /// The origin.
    #[prost(message, optional, tag = "1")]
    pub resource: Option<OtlpResource>,
    /// Records, by part of the program.
    #[prost(message, repeated, tag = "2")]
    pub scope_logs: Vec<OtlpScopeLogs>,
}

/// The origin of records: `Resource`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpResource {
    /// Further facts.
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<OtlpAttribute>,
}

/// Records of one part of a program: `ScopeLogs`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpScopeLogs {
    /// The part of the program.
    #[prost(message, optional, tag = "1")]
    pub scope: Option<OtlpScope>,
    /// The records.
    #[prost(message, repeated, tag = "2")]
    pub log_records: Vec<OtlpLogRecord>,
}

/// A part of a program: `InstrumentationScope`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpScope {
    /// The name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The version.
    #[prost(string, tag = "2")]
    pub version: String,
}

/// A record: `LogRecord`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpLogRecord {
    /// When the event happened, in nanoseconds of the Unix epoch.
    #[prost(fixed64, tag = "1")]
    pub time_unix_nano: u64,
    /// The severity, as a number.
    #[prost(int32, tag = "2")]
    pub severity_number: i32,
    /// The severity, as a word.
    #[prost(string, tag = "3")]
    pub severity_text: String,
    /// The text.
    #[prost(message, optional, tag = "5")]
    pub body: Option<OtlpValue>,
    /// Further facts.
    #[prost(message, repeated, tag = "6")]
    pub attributes: Vec<OtlpAttribute>,
    /// The trace of the record's call, in 16 bytes; empty for none.
    #[prost(bytes = "vec", tag = "9")]
    pub trace_id: Vec<u8>,
    /// When the record was made, in nanoseconds of the Unix epoch.
    #[prost(fixed64, tag = "11")]
    pub observed_time_unix_nano: u64,
    /// The kind of the event.
    #[prost(string, tag = "12")]
    pub event_name: String,
}

/// A named value: `KeyValue`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpAttribute {
    /// The name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The value.
    #[prost(message, optional, tag = "2")]
    pub value: Option<OtlpValue>,
}

/// A value: `AnyValue`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpValue {
    /// The value.
    #[prost(oneof = "OtlpValueKind", tags = "1, 2, 3")]
    pub value: Option<OtlpValueKind>,
}

/// The kinds of values in use.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum OtlpValueKind {
    /// A text.
    #[prost(string, tag = "1")]
    Text(String),
    /// True or false.
    #[prost(bool, tag = "2")]
    Flag(bool),
    /// A number.
    #[prost(int64, tag = "3")]
    Number(i64),
}

/// The answer: `ExportLogsServiceResponse` and `ExportTraceServiceResponse`, which are alike.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpAnswer {
    /// Items that the collector refuses for good.
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<OtlpPartialSuccess>,
}

/// Items that the collector refuses for good: `ExportLogsPartialSuccess`, `ExportTracePartialSuccess`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpPartialSuccess {
    /// The number of these items.
    #[prost(int64, tag = "1")]
    pub rejected: i64,
    /// The reason, as the collector tells it.
    #[prost(string, tag = "2")]
    pub error_message: String,
}

/// The body of an answer that tells a failure: `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpStatus {
    /// The reason, as the collector tells it.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// A request: `ExportTraceServiceRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpTraceRequest {
    /// Spans, by resource.
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<OtlpResourceSpans>,
}

/// Spans of one resource: `ResourceSpans`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpResourceSpans {
    /// The origin.
    #[prost(message, optional, tag = "1")]
    pub resource: Option<OtlpResource>,
    /// Spans, by part of the program.
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<OtlpScopeSpans>,
}

/// Spans of one part of a program: `ScopeSpans`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpScopeSpans {
    /// The part of the program.
    #[prost(message, optional, tag = "1")]
    pub scope: Option<OtlpScope>,
    /// The spans.
    #[prost(message, repeated, tag = "2")]
    pub spans: Vec<OtlpSpan>,
}

/// A span: `Span`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpSpan {
    /// The trace, in 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub trace_id: Vec<u8>,
    /// The span, in 8 bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub span_id: Vec<u8>,
    /// The span above, in 8 bytes; empty for none.
    #[prost(bytes = "vec", tag = "4")]
    pub parent_span_id: Vec<u8>,
    /// The name.
    #[prost(string, tag = "5")]
    pub name: String,
    /// `SpanKind`.
    #[prost(int32, tag = "6")]
    pub kind: i32,
    /// The begin, in nanoseconds of the Unix epoch.
    #[prost(fixed64, tag = "7")]
    pub start_time_unix_nano: u64,
    /// The end, in nanoseconds of the Unix epoch.
    #[prost(fixed64, tag = "8")]
    pub end_time_unix_nano: u64,
    /// Further facts.
    #[prost(message, repeated, tag = "9")]
    pub attributes: Vec<OtlpAttribute>,
    /// The outcome; `None` unless the span failed.
    #[prost(message, optional, tag = "15")]
    pub status: Option<OtlpSpanStatus>,
}

/// The outcome of a span: `Status`.
#[derive(Clone, PartialEq, Message)]
pub struct OtlpSpanStatus {
    /// The reason of a failure.
    #[prost(string, tag = "2")]
    pub message: String,
    /// `StatusCode`.
    #[prost(int32, tag = "3")]
    pub code: i32,
}

impl OtlpResource {
    /// This replica of Keyward.
    #[must_use]
    pub fn of(replica: &str) -> Self {
        let text = |text: &str| OtlpValueKind::Text(text.into());
        Self {
            attributes: vec![
                attribute("service.name", text("keyward")),
                attribute("service.version", text(env!("CARGO_PKG_VERSION"))),
                attribute("service.instance.id", text(replica)),
            ],
        }
    }
}

impl OtlpScope {
    /// The part of Keyward with this name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        Self { name: name.into(), version: env!("CARGO_PKG_VERSION").into() }
    }
}

/// A named value.
#[must_use]
pub fn attribute(key: &str, kind: OtlpValueKind) -> OtlpAttribute {
    OtlpAttribute { key: key.into(), value: Some(OtlpValue { value: Some(kind) }) }
}

/// Nanoseconds since the Unix epoch.
#[must_use]
pub fn unix_nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
