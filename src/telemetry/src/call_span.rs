//! The spans of a finished call: the call itself, its waits, and its attempts at members.
//!
//! Owns: the form of spans, by OpenTelemetry's semantic conventions for RPC. Must not know: the making of a
//! call, the sending of spans. Invariant: a span has no value, key, token or password.
//!
//! <https://github.com/open-telemetry/semantic-conventions>

use std::time::{Duration, SystemTime};

use prost::Message as _;

use crate::otlp_messages::{
    OtlpAttribute, OtlpResource, OtlpResourceSpans, OtlpScope, OtlpScopeSpans, OtlpSpan, OtlpSpanStatus,
    OtlpTraceRequest, OtlpValueKind, attribute, unix_nanos,
};

/// `SPAN_KIND_INTERNAL`.
const INTERNAL: i32 = 1;
/// `SPAN_KIND_SERVER`.
const SERVER: i32 = 2;
/// `SPAN_KIND_CLIENT`.
const CLIENT: i32 = 3;
/// `STATUS_CODE_ERROR`.
const ERROR: i32 = 2;

/// A finished call with a trace.
#[derive(Debug)]
pub struct CallSpan {
    /// The trace.
    pub trace: [u8; 16],
    /// The span of the client, if the client sent one.
    pub parent: Option<u64>,
    /// The id of the call's span.
    pub id: u64,
    /// `/package.Service/Method`.
    pub path: &'static str,
    /// When the call arrived.
    pub begun: SystemTime,
    /// The whole time; of a stream, the time to the first answer.
    pub took: Duration,
    /// The gRPC code; `None` for a stream that goes on.
    pub code: Option<u8>,
    /// The reason of a failure that is not the client's.
    pub error: Option<String>,
    /// Further facts.
    pub facts: Vec<(&'static str, SpanFact)>,
    /// The parts of the call.
    pub parts: Vec<SpanPart>,
}

/// A fact in a span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpanFact {
    /// A text.
    Text(String),
    /// A number.
    Number(i64),
    /// True or false.
    Flag(bool),
}

/// A part of a call.
#[derive(Debug)]
pub struct SpanPart {
    /// The id of the part's span.
    pub id: u64,
    /// The name; `None` for an attempt at a member, which has the name of the call.
    pub name: Option<&'static str>,
    /// From the call's arrival to the begin of the part.
    pub begun: Duration,
    /// From the call's arrival to the end of the part.
    pub ended: Duration,
    /// The gRPC code of a member's answer.
    pub code: Option<u8>,
    /// True for an attempt without an answer that the call could use.
    pub is_failed: bool,
    /// Further facts.
    pub facts: Vec<(&'static str, SpanFact)>,
}

impl CallSpan {
    /// The memory of the span, about.
    #[must_use]
    pub fn weight(&self) -> usize {
        let text = |facts: &[(&str, SpanFact)]| -> usize {
            let length = |fact: &SpanFact| if let SpanFact::Text(text) = fact { text.len() } else { 0 };
            facts.iter().map(|(_, fact)| size_of::<(&str, SpanFact)>() + length(fact)).sum()
        };
        let parts = self.parts.iter().map(|part| size_of::<SpanPart>() + text(&part.facts));
        let error = self.error.as_ref().map_or(0, String::len);
        size_of::<Self>() + error + text(&self.facts) + parts.sum::<usize>()
    }

    /// The span of the call, and the spans of its parts.
    fn spans(&self) -> impl Iterator<Item = OtlpSpan> {
        let rpc = |code: Option<u8>, facts: &[(&'static str, SpanFact)]| {
            let mut attributes = attributes(facts);
            attributes.extend(rpc_attributes(self.path));
            attributes.extend(
                code.map(|code| attribute("rpc.grpc.status_code", OtlpValueKind::Number(code.into()))),
            );
            attributes
        };
        let call = OtlpSpan {
            trace_id: self.trace.to_vec(),
            span_id: self.id.to_be_bytes().to_vec(),
            parent_span_id: self.parent.map(|id| id.to_be_bytes().to_vec()).unwrap_or_default(),
            name: name_of(self.path).to_owned(),
            kind: SERVER,
            start_time_unix_nano: unix_nanos(self.begun),
            end_time_unix_nano: unix_nanos(self.begun + self.took),
            attributes: rpc(self.code, &self.facts),
            status: self.error.clone().map(|message| OtlpSpanStatus { message, code: ERROR }),
        };
        let parts = self.parts.iter().map(move |part| OtlpSpan {
            trace_id: self.trace.to_vec(),
            span_id: part.id.to_be_bytes().to_vec(),
            parent_span_id: self.id.to_be_bytes().to_vec(),
            name: part.name.unwrap_or_else(|| name_of(self.path)).to_owned(),
            kind: if part.name.is_none() { CLIENT } else { INTERNAL },
            start_time_unix_nano: unix_nanos(self.begun + part.begun),
            end_time_unix_nano: unix_nanos(self.begun + part.ended),
            attributes: match part.name {
                None => rpc(part.code, &part.facts),
                Some(_) => attributes(&part.facts),
            },
            status: part.is_failed.then(|| OtlpSpanStatus { message: String::new(), code: ERROR }),
        });
        std::iter::once(call).chain(parts)
    }
}

/// `package.Service/Method`.
fn name_of(path: &'static str) -> &'static str {
    path.strip_prefix('/').unwrap_or(path)
}

fn rpc_attributes(path: &'static str) -> impl Iterator<Item = OtlpAttribute> {
    let (service, method) = name_of(path).split_once('/').unzip();
    let named = [("rpc.system", Some("grpc")), ("rpc.service", service), ("rpc.method", method)];
    let text = |text: &str| OtlpValueKind::Text(text.to_owned());
    named.into_iter().filter_map(move |(name, value)| Some(attribute(name, text(value?))))
}

fn attributes(facts: &[(&'static str, SpanFact)]) -> Vec<OtlpAttribute> {
    let value = |fact: &SpanFact| match fact {
        SpanFact::Text(text) => OtlpValueKind::Text(text.clone()),
        SpanFact::Number(number) => OtlpValueKind::Number(*number),
        SpanFact::Flag(flag) => OtlpValueKind::Flag(*flag),
    };
    facts.iter().map(|(name, fact)| attribute(name, value(fact))).collect()
}

/// The body of a request with these calls.
#[must_use]
pub fn trace_request(replica: &str, calls: &[CallSpan]) -> Vec<u8> {
    let spans = calls.iter().flat_map(CallSpan::spans).collect();
    let scope_spans = vec![OtlpScopeSpans { scope: Some(OtlpScope::of("keyward")), spans }];
    let resource = Some(OtlpResource::of(replica));
    OtlpTraceRequest { resource_spans: vec![OtlpResourceSpans { resource, scope_spans }] }.encode_to_vec()
}
