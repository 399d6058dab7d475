//! The trace of a call, from the header `traceparent` (W3C Trace Context).
//!
//! Owns: the form of the header. Must not know: spans, sampling. Invariant: the id is made of 32 lower-case
//! hexadecimal digits, whatever the client sent, so that a client cannot write other text into a record.
//!
//! <https://www.w3.org/TR/trace-context/>

use std::fmt;

use data_encoding::HEXLOWER;
use http::{HeaderMap, HeaderValue};

/// The header with the trace id.
pub const TRACEPARENT: &str = "traceparent";
/// The header with further facts about the trace, of the systems that it has passed.
pub const TRACESTATE: &str = "tracestate";
/// Digits of a trace id.
const DIGITS: usize = 32;
/// The flag of a client that wants a trace.
const SAMPLED: u8 = 1;

/// The id of a trace.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TraceId([u8; DIGITS]);

/// The trace of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The id of the trace.
    pub id: TraceId,
    /// The client's span.
    pub span: u64,
    /// True if the client wants a trace of the call.
    pub is_sampled: bool,
}

impl TraceParent {
    /// The trace in the headers of a request; `None` without one, or if the header is malformed.
    #[must_use]
    pub fn in_headers(headers: &HeaderMap) -> Option<Self> {
        let value = headers.get(TRACEPARENT)?.as_bytes();
        // Later versions of the header keep the form of the first 55 bytes.
        let (version, rest) = value.split_at_checked(2)?;
        let (id, rest) = rest.strip_prefix(b"-")?.split_at_checked(DIGITS)?;
        let (parent, rest) = rest.strip_prefix(b"-")?.split_at_checked(16)?;
        let (flags, later) = rest.strip_prefix(b"-")?.split_at_checked(2)?;
        let is_hex = |digits: &[u8]| digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        let is_later = later.is_empty() || (version != b"00" && later.starts_with(b"-"));
        let is_well = [version, id, parent, flags].into_iter().all(is_hex) && version != b"ff" && is_later;
        let is_valid = id.iter().any(|digit| *digit != b'0') && parent.iter().any(|digit| *digit != b'0');
        if !is_well || !is_valid {
            return None;
        }
        let number = |digits| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
        let is_sampled = number(flags)? & u64::from(SAMPLED) != 0;
        Some(Self { id: TraceId(id.try_into().ok()?), span: number(parent)?, is_sampled })
    }

    /// The value of the header.
    #[must_use]
    pub fn header(&self) -> HeaderValue {
        let flags = if self.is_sampled { SAMPLED } else { 0 };
        let text = format!("00-{}-{:016x}-{flags:02x}", self.id.as_str(), self.span);
        HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static(""))
    }
}

impl TraceId {
    /// The 32 digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }

    /// The id in bytes.
    #[must_use]
    pub fn bytes(&self) -> [u8; DIGITS / 2] {
        let mut bytes = [0; DIGITS / 2];
        // The digits are hexadecimal.
        _ = HEXLOWER.decode_mut(&self.0, &mut bytes);
        bytes
    }
}

impl From<[u8; DIGITS / 2]> for TraceId {
    fn from(bytes: [u8; DIGITS / 2]) -> Self {
        let mut digits = [0; DIGITS];
        HEXLOWER.encode_mut(&bytes, &mut digits);
        Self(digits)
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn id(value: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_str(value).unwrap());
        TraceParent::in_headers(&headers).map(|parent| parent.id.as_str().to_owned())
    }

    #[test]
    fn the_id_is_that_of_a_well_formed_header() {
        let good = "0af7651916cd43dd8448eb211c80319c";
        for value in [
            format!("00-{good}-b7ad6b7169203331-01"),
            format!("cc-{good}-b7ad6b7169203331-01-what-the-future-will-be-like"),
        ] {
            assert_eq!(id(&value).as_deref(), Some(good), "{value}");
        }
        for value in [
            String::new(),
            good.to_owned(),
            format!("00-{good}-b7ad6b7169203331"),
            format!("00-{good}-b7ad6b7169203331-01-more"),
            format!("ff-{good}-b7ad6b7169203331-01"),
            format!("00-{}-b7ad6b7169203331-01", good.to_uppercase()),
            format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)),
            format!("00-{good}-0000000000000000-01"),
            format!("00-{}-b7ad6b7169203331-01", "root\" code=\"OK\" x=\"aaaaaaaaaaaaa"),
        ] {
            assert_eq!(id(&value), None, "{value}");
        }
    }

    #[test]
    fn a_header_is_written_as_it_was_read() {
        for (flags, is_sampled) in [("01", true), ("00", false)] {
            let text = format!("00-0af7651916cd43dd8448eb211c80319c-00ad6b7169203331-{flags}");
            let mut headers = HeaderMap::new();
            headers.insert(TRACEPARENT, HeaderValue::from_str(&text).unwrap());
            let parent = TraceParent::in_headers(&headers).unwrap();
            assert_eq!((parent.span, parent.is_sampled), (0x00ad_6b71_6920_3331, is_sampled));
            assert_eq!(parent.header(), text);
            assert_eq!(TraceId::from(parent.id.bytes()), parent.id);
        }
        let mut headers = HeaderMap::new();
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-ff";
        headers.insert(TRACEPARENT, HeaderValue::from_static(text));
        assert!(TraceParent::in_headers(&headers).is_some_and(|parent| parent.is_sampled), "later flags");
    }
}
