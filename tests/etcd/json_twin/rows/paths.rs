//! What lies around the routes: prefixes, methods, header fields, unknown paths, and the other paths of the client port.

use serde_json::json;

use super::{Body, RestRow, base64, row, stream};
use crate::json_twin::caller_side::Who;

const RANGE: &str = "/v3/kv/range";

/// Older prefixes.
pub(super) fn prefixes() -> Vec<RestRow> {
    vec![
        range("/v3beta/kv/range", "a key"),
        range("/v3alpha/kv/range", "a key"),
        row("/v3beta/lease/keepalive", "an unknown one", |_, _| vec![json!({ "ID": 4 })]).only(&[Who::Alice]),
        stream("/v3beta/watch", "from now", 1, |_, _| {
            vec![json!({ "create_request": { "key": base64("/a/k") } })]
        })
        .only(&[Who::Alice]),
    ]
}

pub(super) fn methods() -> Vec<RestRow> {
    let with = |method| RestRow { method, ..range(RANGE, method) };
    let mut rows: Vec<_> = ["PUT", "DELETE", "PATCH", "TRACE", "FOO"].map(with).into();
    rows.extend(["GET", "HEAD", "OPTIONS"].map(|method| without_body(method, RANGE, method)));
    rows
}

pub(super) fn unknown() -> Vec<RestRow> {
    vec![
        range("/v3/nope", "unknown"),
        range("/v3/kv/range/", "unknown"),
        range("/v3/kv/range:verb", "unknown"),
        range("/v3/", "unknown"),
        range("/v3beta", "unknown"),
        range("/V3/kv/range", "unknown"),
        range("/v3//kv/range", "unknown"),
        range("/v3/kv/../kv/range", "unknown"),
        range("/v3/kv/r%61nge", "an escape"),
        range("/v3/kv%2Frange", "an escape"),
        range("/v3/kv/range?limit=x", "a query"),
        get("/v3"),
        get("/v3/nope"),
        get("/"),
        get("/favicon.ico"),
        get("/nope"),
        get("/members"),
        get("/v2/keys/x"),
        get("/v2/members"),
        get("/version/"),
        get("/health/"),
        get("/debug/requests"),
        get("/debug/pprof/"),
        get("/config/local/log"),
        without_body("PUT", "/v2/keys/x", "PUT"),
        without_body("OPTIONS", "/nope", "OPTIONS"),
    ]
}

/// Health and version.
pub(super) fn probes() -> Vec<RestRow> {
    let mut rows: Vec<_> = [
        "/version",
        "/health",
        "/health?serializable=true",
        "/health?exclude=NOSPACE",
        "/livez",
        "/livez/serializable_read",
        "/livez/nope",
        "/readyz",
        "/readyz/linearizable_read",
        "/readyz/serializable_read",
        "/readyz/data_corruption",
    ]
    .map(get)
    .into();
    for path in ["/version", "/health", "/livez", "/readyz"] {
        rows.extend(["POST", "HEAD", "OPTIONS"].map(|method| without_body(method, path, method)));
    }
    rows
}

/// Header fields that change the answer, or seem to.
pub(super) fn headers() -> Vec<RestRow> {
    vec![
        range(RANGE, "of a form").with(&[("content-type", "application/x-www-form-urlencoded")]),
        range(RANGE, "of gRPC").with(&[("content-type", "application/grpc")]),
        range(RANGE, "for HTML").with(&[("accept", "text/html")]),
        range(RANGE, "said to be compressed").with(&[("content-encoding", "gzip")]),
        range(RANGE, "to be compressed").with(&[("accept-encoding", "gzip")]),
        range(RANGE, "from an origin").with(&[("origin", "http://a.example")]),
        range(RANGE, "with trailers").with(&[("te", "trailers")]),
        range("/v3/auth/role/get", "with trailers").with(&[("te", "trailers")]),
        range(RANGE, "to override POST").with(&[("x-http-method-override", "GET")]),
        range(RANGE, "with time").with(&[("grpc-timeout", "10S")]),
        range(RANGE, "without time").with(&[("grpc-timeout", "1n")]),
        range(RANGE, "with a bad time").with(&[("grpc-timeout", "x")]),
        range(RANGE, "with a leader").with(&[("grpc-metadata-hasleader", "true")]),
        range(RANGE, "with metadata").with(&[("grpc-metadata-foo", "x")]),
        range(RANGE, "with bad binary metadata").with(&[("grpc-metadata-foo-bin", "***")]),
        range(RANGE, "token, spelt as in gRPC").with(&[("token", "x")]).only(&[Who::None]),
        range(RANGE, "a forwarded header").with(&[("grpcgateway-authorization", "x")]).only(&[Who::None]),
        range(RANGE, "basic").with(&[("authorization", "Basic YTpi")]).only(&[Who::None]),
        range(RANGE, "an empty token").with(&[("authorization", "")]).only(&[Who::None]),
        range(RANGE, "a small bearer").with(&[("authorization", "bearer x")]).only(&[Who::None]),
        range(RANGE, "a token as metadata")
            .with(&[("grpc-metadata-token", "nobody-issued-this")])
            .only(&[Who::None]),
    ]
}

/// A read of `/a/k` by alice.
fn range(path: &'static str, case: &'static str) -> RestRow {
    row(path, case, |_, _| vec![json!({ "key": base64("/a/k") })]).only(&[Who::Alice])
}

fn get(path: &'static str) -> RestRow {
    without_body("GET", path, "")
}

/// Asked without a token.
fn without_body(method: &'static str, path: &'static str, case: &'static str) -> RestRow {
    let body = Body::Bytes(Vec::new);
    RestRow { method, body, who: &[Who::None], ..row(path, case, |_, _| Vec::new()) }
}
