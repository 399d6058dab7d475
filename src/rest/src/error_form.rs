//! Errors in the form of etcd's JSON gateway.
//!
//! Owns: the HTTP status of a gRPC code, and the JSON of an error, alone and within a stream. Must not
//! know: the cause of an error.
//! Invariant: an error has every field that a client of any release line reads: `error` and `message`
//! have the same text. etcd 3.6 dropped `error`, which broke clients (docs/etcd-facts.md#json).

use http::StatusCode;
use serde_json::json;

use keyward_config::JsonGateway;
use keyward_etcd::refusal::{Code, Status};

/// The HTTP status for a gRPC code.
pub(super) fn http_status(code: Code, form: JsonGateway) -> StatusCode {
    let number = match code {
        Code::Ok => 200,
        Code::Canceled if form == JsonGateway::Etcd36 => 499,
        Code::Canceled => 408,
        Code::FailedPrecondition if form == JsonGateway::Etcd34 => 412,
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => 400,
        Code::DeadlineExceeded => 504,
        Code::NotFound => 404,
        Code::AlreadyExists | Code::Aborted => 409,
        Code::PermissionDenied => 403,
        Code::Unauthenticated => 401,
        Code::ResourceExhausted => 429,
        Code::Unimplemented => 501,
        Code::Unavailable => 503,
        Code::Unknown | Code::Internal | Code::DataLoss => 500,
    };
    StatusCode::from_u16(number).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// The JSON of an error that is the whole answer.
pub(super) fn error_json(status: &Status, form: JsonGateway) -> String {
    let (text, code) = (json!(status.message), status.code as u8);
    match form {
        JsonGateway::Etcd34 => format!(r#"{{"error":{text},"message":{text},"code":{code}}}"#),
        JsonGateway::Etcd35 | JsonGateway::Etcd36 => {
            format!(r#"{{"error":{text},"code":{code},"message":{text}}}"#)
        }
    }
}

/// The JSON of an error that ends a stream.
pub(super) fn stream_error_json(status: &Status, form: JsonGateway) -> String {
    let (text, code, http) = (json!(status.message), status.code as u8, http_status(status.code, form));
    let (http, reason) = (http.as_u16(), json!(http.canonical_reason().unwrap_or_default()));
    match form {
        JsonGateway::Etcd34 | JsonGateway::Etcd35 => format!(
            r#"{{"error":{{"grpc_code":{code},"http_code":{http},"message":{text},"http_status":{reason}}}}}"#
        ),
        JsonGateway::Etcd36 => format!(
            "{{\"error\":{{\"code\":{code},\"message\":{text},\"grpc_code\":{code},\"http_code\":{http},\
             \"http_status\":{reason}}}}}\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_fields_of_its_release_line_in_order() {
        let status = Status { code: Code::NotFound, message: "etcdserver: \"x\" not found".into() };
        let text = r#""etcdserver: \"x\" not found""#;
        assert_eq!(
            error_json(&status, JsonGateway::Etcd34),
            format!(r#"{{"error":{text},"message":{text},"code":5}}"#)
        );
        for form in [JsonGateway::Etcd35, JsonGateway::Etcd36] {
            assert_eq!(error_json(&status, form), format!(r#"{{"error":{text},"code":5,"message":{text}}}"#));
        }
        let line = stream_error_json(&status, JsonGateway::Etcd35);
        let expected = format!(
            r#"{{"error":{{"grpc_code":5,"http_code":404,"message":{text},"http_status":"Not Found"}}}}"#
        );
        assert_eq!(line, expected);
        let line = stream_error_json(&status, JsonGateway::Etcd36);
        assert!(
            line.starts_with(&format!(r#"{{"error":{{"code":5,"message":{text},"#)) && line.ends_with("}\n")
        );
    }

    #[test]
    fn a_failed_precondition_is_412_in_the_oldest_line_only() {
        let of = |form| http_status(Code::FailedPrecondition, form).as_u16();
        assert_eq!(
            [of(JsonGateway::Etcd34), of(JsonGateway::Etcd35), of(JsonGateway::Etcd36)],
            [412, 400, 400]
        );
    }
}
