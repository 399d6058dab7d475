//! The meaning of a collector's answer, for spans, log records and audit records alike.
//!
//! Owns: which answers mean that the collector has the items, which are final, and when to ask again. Must
//! not know: connections, the items. Invariants: items count as taken only by an answer that is OTLP's; items
//! are given up only by an answer that the protocol calls final; every other answer may come from a proxy, a
//! login page or another server, and an operator repairs that.
//!
//! <https://github.com/open-telemetry/opentelemetry-proto>

use std::time::{Duration, SystemTime};

use http::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use http::{HeaderValue, StatusCode};
use prost::Message as _;
use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc2822;

use super::collector::CollectorAnswer;
use keyward_telemetry::otlp_messages::{OtlpAnswer, OtlpStatus};

/// Characters of a collector's message in the log.
const LONGEST_MESSAGE: usize = 200;
/// A longer `Retry-After` counts as this: a repaired collector is not left alone for a day.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// The consequence of an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum OtlpVerdict {
    /// The collector has the items, except for this number, which it refuses for good.
    Taken {
        /// The number of refused items.
        refused: u64,
        /// The collector's words.
        message: String,
    },
    /// The collector refuses all items for good.
    Refused {
        /// The collector's words.
        message: String,
    },
    /// The request is too large: its items may be sent in smaller requests. A single one may be sent again.
    TooLarge,
    /// The items may be sent again, after this time at the earliest.
    Again(Duration),
}

/// Judges the answer to a request with `items` items.
#[must_use]
pub fn verdict(answer: &CollectorAnswer, items: u64, now: SystemTime) -> OtlpVerdict {
    if answer.status.is_success() {
        let Some((refused, message)) = partial_success(answer) else {
            return OtlpVerdict::Again(Duration::ZERO);
        };
        let refused = u64::try_from(refused).unwrap_or(0).min(items);
        return OtlpVerdict::Taken { refused, message: printable(&message) };
    }
    let is_large = answer.status == StatusCode::PAYLOAD_TOO_LARGE;
    match final_status(answer) {
        _ if is_large && items > 1 => OtlpVerdict::TooLarge,
        Some(message) if is_large || answer.status == StatusCode::BAD_REQUEST => {
            OtlpVerdict::Refused { message: printable(&message) }
        }
        _ => OtlpVerdict::Again(retry_after(&answer.headers, now)),
    }
}

/// The number of refused items and the message of an answer that says that the others are taken. A body in
/// protobuf, in JSON (some servers answer so whatever they are asked in), or none at all. `None` for anything
/// else, as a page of a proxy.
fn partial_success(answer: &CollectorAnswer) -> Option<(i64, String)> {
    if answer.body.is_empty() {
        return Some((0, String::new()));
    }
    match media_type(&answer.headers).as_deref() {
        Some("application/x-protobuf" | "application/protobuf") | None => {
            let partial = OtlpAnswer::decode(&answer.body[..]).ok()?.partial_success.unwrap_or_default();
            Some((partial.rejected, partial.error_message))
        }
        Some("application/json") => {
            let answer: JsonAnswer = serde_json::from_slice(&answer.body).ok()?;
            let partial = answer.partial_success.unwrap_or_default();
            Some((partial.rejected.number(), partial.error_message))
        }
        Some(_) => None,
    }
}

/// The message of a `google.rpc.Status` in protobuf: the protocol's form of a failure, which no proxy has.
fn final_status(answer: &CollectorAnswer) -> Option<String> {
    let is_protobuf = media_type(&answer.headers).as_deref() == Some("application/x-protobuf");
    let status = is_protobuf.then(|| OtlpStatus::decode(&answer.body[..]).ok()).flatten()?;
    Some(status.message)
}

fn media_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(CONTENT_TYPE)?.to_str().unwrap_or("unreadable");
    Some(value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase())
}

/// The time of `Retry-After`, in seconds or as a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Duration {
    let value = headers.get(RETRY_AFTER).map(HeaderValue::to_str);
    let Some(Ok(value)) = value else { return Duration::ZERO };
    let date = || OffsetDateTime::parse(value.trim(), &Rfc2822).ok().map(SystemTime::from);
    let wait = match value.trim().parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => date().and_then(|date| date.duration_since(now).ok()).unwrap_or_default(),
    };
    wait.min(LONGEST_WAIT)
}

fn printable(message: &str) -> String {
    message.chars().take(LONGEST_MESSAGE).collect::<String>().escape_debug().to_string()
}

/// The answer in JSON, in the names of proto3. A document with other fields is none.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct JsonAnswer {
    partial_success: Option<JsonPartialSuccess>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct JsonPartialSuccess {
    #[serde(alias = "rejectedLogRecords", alias = "rejectedSpans")]
    rejected: JsonCount,
    error_message: String,
}

/// A number of 64 bits: proto3 writes it as text, and many as a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum JsonCount {
    Number(i64),
    Text(String),
}

impl Default for JsonCount {
    fn default() -> Self {
        Self::Number(0)
    }
}

impl JsonCount {
    fn number(&self) -> i64 {
        match self {
            Self::Number(number) => *number,
            Self::Text(text) => text.parse().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use keyward_telemetry::otlp_messages::OtlpPartialSuccess;

    const PROTOBUF: &str = "application/x-protobuf";
    const AGAIN: OtlpVerdict = OtlpVerdict::Again(Duration::ZERO);

    fn of(status: u16, headers: &[(&'static str, &str)], body: &[u8], items: u64) -> OtlpVerdict {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        let (status, body) = (StatusCode::from_u16(status).unwrap(), body.to_vec().into());
        // 1994-11-06T08:49:27Z.
        let now = UNIX_EPOCH + Duration::from_secs(784_111_767);
        verdict(&CollectorAnswer { status, headers: map, body }, items, now)
    }

    fn taken(refused: u64, message: &str) -> OtlpVerdict {
        OtlpVerdict::Taken { refused, message: message.into() }
    }

    fn refused(message: &str) -> OtlpVerdict {
        OtlpVerdict::Refused { message: message.into() }
    }

    #[test]
    fn items_are_taken_by_an_answer_of_the_protocol_alone() {
        let partial = |rejected| {
            let partial_success = Some(OtlpPartialSuccess { rejected, error_message: "too old\n".into() });
            OtlpAnswer { partial_success }.encode_to_vec()
        };
        let protobuf = [("content-type", PROTOBUF)];
        assert_eq!(of(200, &protobuf, b"", 3), taken(0, ""));
        assert_eq!(of(204, &[], b"", 3), taken(0, ""), "as Loki");
        assert_eq!(of(202, &protobuf, &partial(2), 3), taken(2, "too old\\n"));
        assert_eq!(of(200, &[], &partial(99), 3), taken(3, "too old\\n"));
        assert_eq!(of(200, &protobuf, &partial(-1), 3), taken(0, "too old\\n"));
        let json = [("content-type", "Application/JSON; charset=utf-8")];
        assert_eq!(of(200, &json, b"{}", 3), taken(0, ""));
        let rejected = br#"{"partialSuccess":{"rejectedLogRecords":"2","errorMessage":"old"}}"#;
        assert_eq!(of(200, &json, rejected, 3), taken(2, "old"));
        assert_eq!(of(200, &json, br#"{"partialSuccess":{"rejectedSpans":1}}"#, 3), taken(1, ""));
        for (headers, body) in [
            (&[("content-type", "text/html")][..], &b"<html>login</html>"[..]),
            (&[], b"<html>login</html>"),
            (&[], b"ok"),
            (&protobuf, b"<html>login</html>"),
            (&json, br#"{"error":"log in"}"#),
            (&[("content-type", "text/plain")], b"ok"),
        ] {
            assert_eq!(of(200, headers, body, 3), AGAIN, "{body:?}");
        }
    }

    #[test]
    fn items_are_given_up_by_a_final_answer_of_the_protocol_alone() {
        let status = OtlpStatus { message: "bad".into() }.encode_to_vec();
        let protobuf = [("content-type", PROTOBUF)];
        assert_eq!(of(400, &protobuf, &status, 3), refused("bad"));
        assert_eq!(of(400, &protobuf, b"", 3), refused(""));
        // A TLS port asked in plaintext, and a proxy that knows no such path.
        assert_eq!(of(400, &[], b"Client sent an HTTP request to an HTTPS server.\n", 3), AGAIN);
        assert_eq!(of(400, &[("content-type", "text/html")], b"<html>", 3), AGAIN);
        for code in [301, 302, 401, 403, 404, 405, 415, 500, 501] {
            assert_eq!(of(code, &protobuf, &status, 3), AGAIN, "{code}");
        }
        assert_eq!(of(413, &[("content-type", "text/html")], b"<html>nginx", 3), OtlpVerdict::TooLarge);
        assert_eq!(of(413, &[("content-type", "text/html")], b"<html>nginx", 1), AGAIN);
        assert_eq!(of(413, &protobuf, &status, 1), refused("bad"));
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_and_has_a_bound() {
        let after = |value| of(503, &[("retry-after", value)], b"", 3);
        assert_eq!(after("30"), OtlpVerdict::Again(Duration::from_secs(30)));
        assert_eq!(after("Sun, 06 Nov 1994 08:49:37 GMT"), OtlpVerdict::Again(Duration::from_secs(10)));
        assert_eq!(after("Sun, 06 Nov 1994 08:49:07 GMT"), AGAIN, "in the past");
        assert_eq!(after("99999999"), OtlpVerdict::Again(LONGEST_WAIT));
        assert_eq!(after("soon"), AGAIN);
        assert_eq!(of(429, &[("retry-after", "7")], b"", 3), OtlpVerdict::Again(Duration::from_secs(7)));
    }
}
