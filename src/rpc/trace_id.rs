//! The trace id of a call, from the header `traceparent` (W3C Trace Context).
//!
//! Owns: the form of the header. Must not know: spans. Invariant: the id is made of 32 lower-case hexadecimal
//! digits, whatever the client sent, so that a client cannot write other text into a record.

use std::fmt;

use http::HeaderMap;

/// The header with the trace id.
const TRACEPARENT: &str = "traceparent";
/// Digits of a trace id.
const DIGITS: usize = 32;

/// A trace id sent by a client.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TraceId([u8; DIGITS]);

impl TraceId {
    /// The trace id in the headers of a request; `None` without one, or if the header is malformed.
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
        (is_well && is_valid).then(|| id.try_into().ok().map(Self)).flatten()
    }

    /// The 32 digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
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
        TraceId::in_headers(&headers).map(|id| id.as_str().to_owned())
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
}
