//! The gRPC headers of a JSON request.
//!
//! Owns: the fields taken from the HTTP header, as by etcd's gateway: `Authorization`, `Grpc-Timeout`, and
//! `Grpc-Metadata-*` for the fields that a gRPC client may send. Must not know: the meaning of a credential.
//! Invariant: no other field reaches the call, so `grpcgateway-*` and other metadata assert nothing.

use http::header::{
    AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderName, HeaderValue, TRANSFER_ENCODING,
    USER_AGENT,
};
use http::{HeaderMap, StatusCode, Version};

use keyward_etcd::refusal::{Code, Status};
use keyward_etcd::rpc::call::Deadline;

/// The metadata by which a gRPC client shows a token.
const TOKEN: HeaderName = HeaderName::from_static("token");
const TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// Fields with one meaning in HTTP and in gRPC.
const COPIED: [HeaderName; 4] = [
    USER_AGENT,
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    HeaderName::from_static("x-keyward-member"),
];

/// Fields taken from `Grpc-Metadata-NAME`, before the HTTP header's own.
const METADATA: [(&str, HeaderName); 4] = [
    ("grpc-metadata-token", TOKEN),
    ("grpc-metadata-authorization", AUTHORIZATION),
    ("grpc-metadata-hasleader", HeaderName::from_static("hasleader")),
    ("grpc-metadata-x-keyward-member", HeaderName::from_static("x-keyward-member")),
];

/// The gRPC header for an HTTP header.
///
/// # Errors
/// The time limit is malformed: the status for the client.
pub(super) fn grpc_headers(http: &HeaderMap) -> Result<HeaderMap, Status> {
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    for name in COPIED.into_iter().chain([AUTHORIZATION]) {
        if let Some(value) = http.get(&name) {
            headers.insert(name, value.clone());
        }
    }
    for (metadata, name) in METADATA {
        if let Some(value) = http.get(metadata) {
            headers.insert(name, value.clone());
        }
    }
    if let Some(value) = http.get(&TIMEOUT) {
        headers.insert(TIMEOUT, value.clone());
        Deadline::of(&headers).map_err(|_| malformed_timeout(value))?;
    }
    Ok(headers)
}

/// etcd's answer to a malformed time limit.
fn malformed_timeout(value: &HeaderValue) -> Status {
    let text = String::from_utf8_lossy(value.as_bytes());
    Status { code: Code::InvalidArgument, message: format!("invalid grpc-timeout: {text}").into() }
}

/// The answer to an HTTP/1 request whose framing is ambiguous or not understood; such a connection ends.
pub(super) fn framing_fault(version: Version, http: &HeaderMap) -> Option<(StatusCode, &'static str)> {
    if version > Version::HTTP_11 {
        return None;
    }
    let hosts = http.get_all(HOST).iter().count();
    let coding = |value: &HeaderValue| !value.as_bytes().eq_ignore_ascii_case(b"chunked");
    if hosts > 1 || (hosts == 0 && version == Version::HTTP_11) {
        return Some((StatusCode::BAD_REQUEST, "400 Bad Request: one Host header is needed\n"));
    }
    if http.get_all(TRANSFER_ENCODING).iter().any(coding) {
        return Some((StatusCode::NOT_IMPLEMENTED, "Unsupported transfer encoding\n"));
    }
    if http.contains_key(TRANSFER_ENCODING) && http.contains_key(CONTENT_LENGTH) {
        return Some((StatusCode::BAD_REQUEST, "400 Bad Request: two lengths of the body\n"));
    }
    let is_unknown = |value: &HeaderValue| !value.as_bytes().eq_ignore_ascii_case(b"100-continue");
    http.get(EXPECT).is_some_and(is_unknown).then_some((StatusCode::EXPECTATION_FAILED, ""))
}

/// True for a body compressed as a whole, which etcd takes for malformed JSON.
pub(super) fn is_encoded(http: &HeaderMap) -> bool {
    http.get(http::header::CONTENT_ENCODING).is_some_and(|encoding| encoding.as_bytes() != b"identity")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let field = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        fields.iter().map(field).collect()
    }

    #[test]
    fn a_field_asserts_no_more_than_at_etcd() {
        let http = headers(&[
            ("authorization", "a"),
            ("token", "not by itself"),
            ("grpc-timeout", "5S"),
            ("user-agent", "curl"),
            ("hasleader", "true"),
            ("grpcgateway-authorization", "b"),
            ("grpcgateway-accept", "x"),
            ("grpc-metadata-client-api-version", "3.7"),
            ("client-api-version", "3.7"),
            ("x-forwarded-for", "10.0.0.1"),
            ("cookie", "token=c"),
        ]);
        let mut made = grpc_headers(&http).expect("a valid header");
        assert_eq!(made.remove("authorization").unwrap(), "a");
        assert_eq!(made.remove("grpc-timeout").unwrap(), "5S");
        assert_eq!(made.remove("user-agent").unwrap(), "curl");
        assert_eq!(made.remove("content-type").unwrap(), "application/grpc");
        assert!(made.is_empty(), "{made:?}");
    }

    #[test]
    fn metadata_goes_before_the_fields_of_http() {
        let http = headers(&[
            ("authorization", "a"),
            ("grpc-metadata-authorization", "b"),
            ("grpc-metadata-token", "c"),
            ("grpc-metadata-hasleader", "true"),
        ]);
        let made = grpc_headers(&http).expect("a valid header");
        assert_eq!(
            (&made["authorization"], &made["token"], &made["hasleader"]),
            (
                &HeaderValue::from_static("b"),
                &HeaderValue::from_static("c"),
                &HeaderValue::from_static("true"),
            )
        );
    }

    #[test]
    fn ambiguous_framing_is_a_fault_of_http1_alone() {
        for (fields, status) in [
            (&[("host", "x")][..], None),
            (&[("host", "x"), ("transfer-encoding", "Chunked"), ("expect", "100-Continue")], None),
            (&[], Some(400)),
            (&[("host", "x"), ("transfer-encoding", "gzip, chunked")], Some(501)),
            (&[("host", "x"), ("transfer-encoding", "chunked"), ("content-length", "2")], Some(400)),
            (&[("host", "x"), ("expect", "nonsense")], Some(417)),
        ] {
            let of = |version| framing_fault(version, &headers(fields)).map(|(status, _)| status.as_u16());
            assert_eq!((of(Version::HTTP_11), of(Version::HTTP_2)), (status, None), "{fields:?}");
        }
        let mut twice = headers(&[("host", "x")]);
        twice.append("host", HeaderValue::from_static("y"));
        assert!(framing_fault(Version::HTTP_10, &twice).is_some());
        assert!(framing_fault(Version::HTTP_10, &HeaderMap::new()).is_none());
    }

    #[test]
    fn a_malformed_time_limit_is_refused_in_the_words_of_the_gateway() {
        for value in ["x", "10x", "-1S", "123456789S"] {
            let refused = grpc_headers(&headers(&[("grpc-timeout", value)])).expect_err(value);
            assert_eq!(refused.message, format!("invalid grpc-timeout: {value}"));
            assert_eq!(refused.code, Code::InvalidArgument);
        }
    }
}
