//! Header fields of a gRPC request.
//!
//! Owns: reading `content-type` and `grpc-timeout`. Must not know: the caller. Invariant: an unreadable field
//! is refused as in grpc-go, never guessed.

use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method};

use crate::refusal::Refusal;

/// True for a gRPC request: POST, and `application/grpc` with or without a suffix.
#[must_use]
pub fn is_grpc(verb: &Method, headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let rest = content_type.and_then(|value| value.strip_prefix("application/grpc"));
    *verb == Method::POST
        && rest.is_some_and(|rest| matches!(rest.as_bytes().first(), None | Some(b'+' | b';')))
}

/// The time limit set by a client on its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline;

impl Deadline {
    /// Reads `grpc-timeout`: at most eight digits and a unit. `None` if the client sets no limit.
    ///
    /// # Errors
    /// The header is present but not in gRPC's form.
    pub fn of(headers: &HeaderMap) -> Result<Option<Duration>, Refusal> {
        let Some(value) = headers.get("grpc-timeout") else { return Ok(None) };
        let parsed = value.to_str().ok().and_then(parse_timeout);
        parsed.map(Some).ok_or_else(|| Refusal::malformed_timeout(value))
    }
}

fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        assert_eq!(parse_timeout("5S"), Some(Duration::from_secs(5)));
        assert_eq!(parse_timeout("99999999n"), Some(Duration::from_nanos(99_999_999)));
        assert_eq!(parse_timeout("2H"), Some(Duration::from_secs(7200)));
        for bad in ["", "S", "5", "5s", "-1S", "123456789S", "1.5S", "é"] {
            assert_eq!(parse_timeout(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_grpc_posts_are_calls() {
        let with =
            |value: &'static str| HeaderMap::from_iter([(CONTENT_TYPE, value.parse().expect("valid"))]);
        assert!(is_grpc(&Method::POST, &with("application/grpc")));
        assert!(is_grpc(&Method::POST, &with("application/grpc+proto")));
        assert!(!is_grpc(&Method::POST, &with("application/grpc-web")));
        assert!(!is_grpc(&Method::POST, &with("application/json")));
        assert!(!is_grpc(&Method::GET, &with("application/grpc")));
        assert!(!is_grpc(&Method::POST, &HeaderMap::new()));
    }
}
