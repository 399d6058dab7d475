//! Our own "no": the only maker of a gRPC status, with etcd's exact codes and texts.
//!
//! Owns: the table of what Keyward itself may answer, and how a status is written to and read from headers.
//! Must not know: who ran into the refusal, or what is done about it.
//! Invariant: a client matches on the text, so a text that etcd has is etcd's, byte for byte (Go's
//! `rpctypes.Error` looks at nothing else). Texts of our own begin with `keyward:`.

use std::borrow::Cow;
use std::fmt;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode, utf8_percent_encode};

/// The header or trailer with the status code.
pub const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// The header or trailer with the percent-encoded text.
pub const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// What gRPC lets through unescaped is space to `~` without `%`; whatever is not ASCII is escaped anyway.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Something that Keyward does not do for a client, and what the client is told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    code: Code,
    message: Cow<'static, str>,
    fault: Fault,
    retry: Retry,
}

/// Whose doing a refusal is; it decides how loud the log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The client asked for what it may not have, or asked badly.
    Downstream,
    /// Keyward itself.
    Gateway,
    /// The cluster, or the way to it.
    Upstream,
}

/// Whether sending the same call again could apply it twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// It was certainly not applied.
    Safe,
    /// It may have been applied.
    Unsafe,
}

/// The table of refusals whose text never varies.
impl Refusal {
    /// The session token is unknown, revoked or not ours.
    pub const INVALID_AUTH_TOKEN: Self =
        safe(Code::Unauthenticated, "etcdserver: invalid auth token", Fault::Downstream);
    /// No credentials where they are needed.
    pub const USER_EMPTY: Self =
        safe(Code::InvalidArgument, "etcdserver: user name is empty", Fault::Downstream);
    /// Wrong password, or no such user: which of the two is never told.
    pub const AUTH_FAILED: Self = safe(
        Code::InvalidArgument,
        "etcdserver: authentication failed, invalid user ID or password",
        Fault::Downstream,
    );
    /// A login where authentication is off. A Go client that is told so never logs in again.
    pub const AUTH_NOT_ENABLED: Self =
        safe(Code::FailedPrecondition, "etcdserver: authentication is not enabled", Fault::Downstream);
    /// The auth store moved on between proof and use.
    pub const AUTH_OLD_REVISION: Self =
        safe(Code::InvalidArgument, "etcdserver: revision of auth store is old", Fault::Upstream);
    /// Policy says no.
    pub const PERMISSION_DENIED: Self =
        safe(Code::PermissionDenied, "etcdserver: permission denied", Fault::Downstream);
    /// The user that a credential names is gone.
    pub const USER_NOT_FOUND: Self =
        safe(Code::FailedPrecondition, "etcdserver: user name not found", Fault::Downstream);
    /// A limit of ours is reached.
    pub const TOO_MANY_REQUESTS: Self =
        safe(Code::ResourceExhausted, "etcdserver: too many requests", Fault::Downstream);
    /// No member knows a leader. Only before anything was sent.
    pub const NO_LEADER: Self = safe(Code::Unavailable, "etcdserver: no leader", Fault::Upstream);
    /// The leader changed under a read.
    pub const LEADER_CHANGED: Self = safe(Code::Unavailable, "etcdserver: leader changed", Fault::Upstream);
    /// A call that needs the leader found none in time. Only before anything was sent.
    pub const NOT_LEADER: Self = safe(Code::FailedPrecondition, "etcdserver: not leader", Fault::Upstream);
    /// A leader that no longer leads was asked about a lease; etcd says so with code Unknown, which ends a Go
    /// client's keepalives.
    pub const NOT_PRIMARY_LESSOR: Self = safe(Code::Unavailable, "not a primary lessor", Fault::Upstream);
    /// Surely nothing was sent. With exactly this text clientv3 sends even a write again.
    pub const NOTHING_SENT: Self =
        safe(Code::Unavailable, "there is no connection available", Fault::Upstream);
    /// The outcome is unknown: no answer in etcd's own time.
    pub const REQUEST_TIMED_OUT: Self =
        unclear(Code::Unavailable, "etcdserver: request timed out", Fault::Upstream);
    /// The outcome is unknown: the member went away after the request had gone out.
    pub const REQUEST_TIMED_OUT_CONNECTION_LOST: Self = unclear(
        Code::Unavailable,
        "etcdserver: request timed out, possibly due to connection lost",
        Fault::Upstream,
    );
    /// The client's own deadline passed. Never for a deadline that is not the client's: clientv3 would send a
    /// write again.
    pub const DEADLINE_EXCEEDED: Self =
        unclear(Code::DeadlineExceeded, "context deadline exceeded", Fault::Downstream);
    /// The client went away; nobody reads it but the access log.
    pub const CANCELED: Self = unclear(Code::Canceled, "context canceled", Fault::Downstream);
    /// A login as a user that can be proven by a certificate only. etcd leaves it unmapped in every version.
    pub const NO_PASSWORD_USER: Self = safe(
        Code::Unknown,
        "auth: authentication failed, password was given for no password user",
        Fault::Downstream,
    );
    /// A health check of anything but the server as a whole.
    pub const UNKNOWN_HEALTH_SERVICE: Self = safe(Code::NotFound, "unknown service", Fault::Downstream);
    /// A member's answer that must be rewritten and cannot be read. Not Unavailable: the call was applied.
    pub const UNREADABLE_ANSWER: Self =
        unclear(Code::Internal, "keyward: the member's answer could not be read", Fault::Upstream);
    /// One revision of a watch is larger than what is held back for one watch.
    pub const REVISION_TOO_LARGE: Self =
        unclear(Code::ResourceExhausted, "keyward: a revision is too large to deliver", Fault::Gateway);
    /// Members are being defragmented one after the other, here or by another replica.
    pub const DEFRAGMENTING: Self =
        safe(Code::FailedPrecondition, "keyward: another defragmentation is under way", Fault::Downstream);
    /// Keyward is being drained.
    pub const SHUTTING_DOWN: Self = unclear(Code::Unavailable, "etcdserver: server stopped", Fault::Gateway);
    /// Our own code panicked; the call may have been sent.
    pub const PANICKED: Self = unclear(Code::Unavailable, "keyward: internal error", Fault::Gateway);
    /// The compressed flag of a frame without a `grpc-encoding` that explains it.
    pub const COMPRESSED_WITHOUT_ENCODING: Self =
        safe(Code::Internal, "grpc: compressed flag set with identity or empty encoding", Fault::Downstream);
}

/// The refusals whose text carries what was found; grpc-go's words where it has them.
impl Refusal {
    /// A message of `got` bytes where `max` are taken.
    #[must_use]
    pub fn too_large(got: usize, max: usize) -> Self {
        let message = format!("grpc: received message larger than max ({got} vs. {max})");
        safe_owned(Code::ResourceExhausted, message)
    }

    /// A service without a row.
    #[must_use]
    pub fn unknown_service(service: &str) -> Self {
        safe_owned(Code::Unimplemented, format!("unknown service {service}"))
    }

    /// A method without a row, of a service that has some.
    #[must_use]
    pub fn unknown_method(service: &str, method: &str) -> Self {
        safe_owned(Code::Unimplemented, format!("unknown method {method} for service {service}"))
    }

    /// A path that is none of gRPC's.
    #[must_use]
    pub fn malformed_path(path: &str) -> Self {
        safe_owned(Code::Unimplemented, format!("malformed method name: {path:?}"))
    }

    /// A `grpc-encoding` without a decompressor.
    #[must_use]
    pub fn compressed(encoding: &str) -> Self {
        let message = format!("grpc: Decompressor is not installed for grpc-encoding {encoding:?}");
        safe_owned(Code::Unimplemented, message)
    }

    /// A compressed message whose inflated size exceeds `max`.
    #[must_use]
    pub fn too_large_inflated(max: usize) -> Self {
        let message = format!("grpc: received message after decompression larger than max {max}");
        safe_owned(Code::ResourceExhausted, message)
    }

    /// A compressed message that cannot be inflated.
    #[must_use]
    pub fn not_inflated(why: &str) -> Self {
        safe_owned(Code::Internal, format!("grpc: {why}"))
    }

    /// The first byte of a frame is neither 0 nor 1.
    #[must_use]
    pub fn unknown_frame_flag(flag: u8) -> Self {
        safe_owned(Code::Internal, format!("grpc: received unexpected payload format {flag}"))
    }

    /// A `grpc-timeout` that is no time.
    #[must_use]
    pub fn malformed_timeout(value: &HeaderValue) -> Self {
        let text = String::from_utf8_lossy(value.as_bytes());
        let (digits, unit) = text.split_at(text.char_indices().next_back().map_or(0, |(at, _)| at));
        let why = match text.len() {
            0..2 => format!("transport: timeout string is too short: {text:?}"),
            10.. => format!("transport: timeout string is too long: {text:?}"),
            _ if !["H", "M", "S", "m", "u", "n"].contains(&unit) => {
                format!("transport: timeout unit is not recognized: {text:?}")
            }
            _ => format!("strconv.ParseUint: parsing {digits:?}: invalid syntax"),
        };
        safe_owned(Code::Internal, format!("malformed grpc-timeout: {why}"))
    }

    /// A call about a member that the cluster does not have.
    #[must_use]
    pub fn unknown_member(name: &str) -> Self {
        safe_owned(Code::NotFound, format!("keyward: the cluster has no member {name:?}"))
    }

    /// A member that was not defragmented, and why; `done` are the names of those that were, if any.
    #[must_use]
    pub fn not_defragmented(code: Code, member: &str, why: &str, done: &str) -> Self {
        let but = if done.is_empty() { String::new() } else { format!("; done before it: {done}") };
        let message = format!("keyward: member {member} was not defragmented: {why}{but}");
        Self { code, message: Cow::Owned(message), fault: Fault::Upstream, retry: Retry::Unsafe }
    }

    /// A member's own status, to a request of ours that stood for the client's.
    #[must_use]
    pub fn told(status: &Status) -> Self {
        let message = status.message.clone();
        Self { code: status.code, message, fault: Fault::Upstream, retry: Retry::Unsafe }
    }

    /// A body that different readers could read differently.
    #[must_use]
    pub fn not_canonical(reason: &str) -> Self {
        safe_owned(Code::InvalidArgument, format!("keyward: request body is not canonical: {reason}"))
    }
}

impl Refusal {
    /// The gRPC code.
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }

    /// The text, not yet percent-encoded.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whose doing it is.
    #[must_use]
    pub fn fault(&self) -> Fault {
        self.fault
    }

    /// Whether the call may be sent again.
    #[must_use]
    pub fn retry(&self) -> Retry {
        self.retry
    }

    /// As a status.
    #[must_use]
    pub fn status(&self) -> Status {
        Status { code: self.code, message: self.message.clone() }
    }

    /// Headers of a whole answer without a body ("Trailers-Only").
    #[must_use]
    pub fn trailers_only(&self) -> HeaderMap {
        trailers_only(self.code, &self.message)
    }

    /// Trailers after headers, and perhaps messages, that have gone out.
    #[must_use]
    pub fn trailers(&self) -> HeaderMap {
        trailers(self.code, &self.message)
    }
}

const fn safe(code: Code, message: &'static str, fault: Fault) -> Refusal {
    Refusal { code, message: Cow::Borrowed(message), fault, retry: Retry::Safe }
}

const fn unclear(code: Code, message: &'static str, fault: Fault) -> Refusal {
    Refusal { code, message: Cow::Borrowed(message), fault, retry: Retry::Unsafe }
}

/// What a client did wrong, found before anything was sent.
fn safe_owned(code: Code, message: String) -> Refusal {
    Refusal { code, message: Cow::Owned(message), fault: Fault::Downstream, retry: Retry::Safe }
}

/// How a call ended: a member's answer, or a refusal of ours.
#[derive(Clone, PartialEq, Eq)]
pub struct Status {
    /// The gRPC code.
    pub code: Code,
    /// The text, percent-decoded.
    pub message: Cow<'static, str>,
}

impl Status {
    /// Success.
    pub const OK: Self = Self { code: Code::Ok, message: Cow::Borrowed("") };

    /// As etcd writes it into a watch's `cancel_reason`.
    #[must_use]
    pub fn cancel_reason(&self) -> String {
        format!("rpc error: code = {} desc = {}", self.code.name(), self.message)
    }

    /// Whether it is a success.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.code == Code::Ok
    }

    /// Reads a status from headers or trailers; `None` where there is none. Whatever a peer writes, this has an
    /// answer: a code that gRPC does not have is [`Code::Unknown`], bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let code = Code::from_header(headers.get(GRPC_STATUS)?);
        let message = headers.get(GRPC_MESSAGE).map_or_else(String::new, |value| {
            percent_decode(value.as_bytes()).decode_utf8_lossy().into_owned()
        });
        Some(Self { code, message: Cow::Owned(message) })
    }

    /// Headers of a whole answer without a body ("Trailers-Only").
    #[must_use]
    pub fn trailers_only(&self) -> HeaderMap {
        trailers_only(self.code, &self.message)
    }

    /// Trailers after headers, and perhaps messages, that have gone out.
    #[must_use]
    pub fn trailers(&self) -> HeaderMap {
        trailers(self.code, &self.message)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.code, self.message)
    }
}

/// For the control runtime, where tonic's clients speak to members.
impl From<&tonic::Status> for Status {
    fn from(status: &tonic::Status) -> Self {
        Self {
            code: Code::from_number(status.code() as u32),
            message: Cow::Owned(status.message().to_owned()),
        }
    }
}

fn trailers_only(code: Code, message: &str) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(3);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    write_status(&mut headers, code, message);
    headers
}

fn trailers(code: Code, message: &str) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(2);
    write_status(&mut headers, code, message);
    headers
}

fn write_status(headers: &mut HeaderMap, code: Code, message: &str) {
    headers.insert(GRPC_STATUS, code.header());
    if message.is_empty() {
        return;
    }
    let escaped = utf8_percent_encode(message, ESCAPED).to_string();
    // Escaped text is printable ASCII, which every header value may be.
    if let Ok(value) = HeaderValue::try_from(escaped) {
        headers.insert(GRPC_MESSAGE, value);
    }
}

/// A gRPC status code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are gRPC's and say it")]
#[repr(u8)]
pub enum Code {
    Ok = 0,
    Canceled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

impl Code {
    /// Every code, in the order of its number.
    pub const ALL: [Self; 17] = [
        Self::Ok,
        Self::Canceled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Aborted,
        Self::OutOfRange,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::DataLoss,
        Self::Unauthenticated,
    ];

    /// The code of a number; a number that gRPC does not have is `Unknown`.
    #[must_use]
    pub fn from_number(number: u32) -> Self {
        usize::try_from(number).ok().and_then(|at| Self::ALL.get(at)).copied().unwrap_or(Self::Unknown)
    }

    /// The name as Go and etcd's watch answers write it (`rpc error: code = Unauthenticated desc = …`); also a
    /// metric label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Canceled => "Canceled",
            Self::Unknown => "Unknown",
            Self::InvalidArgument => "InvalidArgument",
            Self::DeadlineExceeded => "DeadlineExceeded",
            Self::NotFound => "NotFound",
            Self::AlreadyExists => "AlreadyExists",
            Self::PermissionDenied => "PermissionDenied",
            Self::ResourceExhausted => "ResourceExhausted",
            Self::FailedPrecondition => "FailedPrecondition",
            Self::Aborted => "Aborted",
            Self::OutOfRange => "OutOfRange",
            Self::Unimplemented => "Unimplemented",
            Self::Internal => "Internal",
            Self::Unavailable => "Unavailable",
            Self::DataLoss => "DataLoss",
            Self::Unauthenticated => "Unauthenticated",
        }
    }

    /// The value of `grpc-status`.
    #[must_use]
    pub fn header(self) -> HeaderValue {
        const DIGITS: [&str; 17] =
            ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16"];
        HeaderValue::from_static(DIGITS[self as usize])
    }

    fn from_header(value: &HeaderValue) -> Self {
        let number = value.to_str().ok().and_then(|digits| digits.parse().ok());
        number.map_or(Self::Unknown, Self::from_number)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers(status: &str, message: &[u8]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_STATUS, status.parse().unwrap());
        headers.insert(GRPC_MESSAGE, HeaderValue::from_bytes(message).unwrap());
        headers
    }

    /// Code and text of every fixed row: clients match on them, so a slip is a broken client.
    #[test]
    fn the_table_is_what_clients_match_on() {
        use Retry::{Safe, Unsafe};
        let rows = [
            (Refusal::INVALID_AUTH_TOKEN, 16, "etcdserver: invalid auth token", Safe),
            (Refusal::USER_EMPTY, 3, "etcdserver: user name is empty", Safe),
            (Refusal::AUTH_FAILED, 3, "etcdserver: authentication failed, invalid user ID or password", Safe),
            (Refusal::AUTH_NOT_ENABLED, 9, "etcdserver: authentication is not enabled", Safe),
            (Refusal::AUTH_OLD_REVISION, 3, "etcdserver: revision of auth store is old", Safe),
            (Refusal::PERMISSION_DENIED, 7, "etcdserver: permission denied", Safe),
            (Refusal::TOO_MANY_REQUESTS, 8, "etcdserver: too many requests", Safe),
            (Refusal::NO_LEADER, 14, "etcdserver: no leader", Safe),
            (Refusal::LEADER_CHANGED, 14, "etcdserver: leader changed", Safe),
            (Refusal::NOT_LEADER, 9, "etcdserver: not leader", Safe),
            (Refusal::USER_NOT_FOUND, 9, "etcdserver: user name not found", Safe),
            (Refusal::NOT_PRIMARY_LESSOR, 14, "not a primary lessor", Safe),
            (Refusal::NOTHING_SENT, 14, "there is no connection available", Safe),
            (Refusal::REQUEST_TIMED_OUT, 14, "etcdserver: request timed out", Unsafe),
            (
                Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST,
                14,
                "etcdserver: request timed out, possibly due to connection lost",
                Unsafe,
            ),
            (Refusal::DEADLINE_EXCEEDED, 4, "context deadline exceeded", Unsafe),
            (Refusal::CANCELED, 1, "context canceled", Unsafe),
            (
                Refusal::NO_PASSWORD_USER,
                2,
                "auth: authentication failed, password was given for no password user",
                Safe,
            ),
            (Refusal::UNKNOWN_HEALTH_SERVICE, 5, "unknown service", Safe),
            (Refusal::SHUTTING_DOWN, 14, "etcdserver: server stopped", Unsafe),
            (Refusal::too_large(3, 2), 8, "grpc: received message larger than max (3 vs. 2)", Safe),
            (Refusal::unknown_service("a.B"), 12, "unknown service a.B", Safe),
            (Refusal::unknown_method("a.B", "C"), 12, "unknown method C for service a.B", Safe),
            (Refusal::malformed_path("/x"), 12, "malformed method name: \"/x\"", Safe),
            (
                Refusal::compressed("snappy"),
                12,
                "grpc: Decompressor is not installed for grpc-encoding \"snappy\"",
                Safe,
            ),
            (
                Refusal::COMPRESSED_WITHOUT_ENCODING,
                13,
                "grpc: compressed flag set with identity or empty encoding",
                Safe,
            ),
            (Refusal::unknown_frame_flag(7), 13, "grpc: received unexpected payload format 7", Safe),
        ];
        for (refusal, code, message, retry) in rows {
            assert_eq!((refusal.code() as u8, refusal.message(), refusal.retry()), (code, message, retry));
        }
    }

    #[test]
    fn a_malformed_timeout_is_told_as_grpc_go_tells_it() {
        for (value, why) in [
            ("", "transport: timeout string is too short: \"\""),
            ("S", "transport: timeout string is too short: \"S\""),
            ("123456789S", "transport: timeout string is too long: \"123456789S\""),
            ("5s", "transport: timeout unit is not recognized: \"5s\""),
            ("1.5S", "strconv.ParseUint: parsing \"1.5\": invalid syntax"),
        ] {
            let refusal = Refusal::malformed_timeout(&HeaderValue::from_static(value));
            assert_eq!(refusal.message(), format!("malformed grpc-timeout: {why}"));
            assert_eq!(refusal.code(), Code::Internal);
        }
        // Bytes that are no text at all.
        let odd = HeaderValue::from_bytes(b"\xff\xfe").unwrap();
        assert!(Refusal::malformed_timeout(&odd).message().contains("not recognized"));
    }

    #[test]
    fn success_is_written_without_a_text() {
        let trailers = Status::OK.trailers();
        assert_eq!((trailers.len(), &trailers[GRPC_STATUS]), (1, &HeaderValue::from_static("0")));
        assert!(Status::from_headers(&trailers).unwrap().is_ok());
        assert!(!Refusal::CANCELED.status().is_ok());
    }

    /// clientv3 sends a write again on these two codes, whatever the text, unless its own context ended.
    #[test]
    fn no_refusal_that_is_not_the_clients_doing_makes_it_send_a_write_again() {
        for refusal in [Refusal::SHUTTING_DOWN, Refusal::PANICKED, Refusal::REQUEST_TIMED_OUT] {
            assert!(!matches!(refusal.code(), Code::Canceled | Code::DeadlineExceeded), "{refusal}");
            assert_ne!(refusal.message(), Refusal::NOTHING_SENT.message());
        }
    }

    #[test]
    fn trailers_only_is_a_whole_grpc_answer() {
        let headers = Refusal::NO_LEADER.trailers_only();
        assert_eq!(headers[CONTENT_TYPE], "application/grpc");
        assert_eq!(headers[GRPC_STATUS], "14");
        assert_eq!(headers[GRPC_MESSAGE], "etcdserver: no leader");
        assert_eq!(headers.len(), 3);
        assert_eq!(Refusal::NO_LEADER.trailers().len(), 2);
    }

    #[test]
    fn text_is_escaped_as_grpc_escapes_it() {
        let status = Status { code: Code::Internal, message: "a %41\n\u{7f}ä \"~".into() };
        assert_eq!(status.trailers()[GRPC_MESSAGE], "a %2541%0A%7F%C3%A4 \"~");
    }

    #[test]
    fn reading_is_lenient() {
        let read = |status, message: &[u8]| Status::from_headers(&headers(status, message)).unwrap();
        assert_eq!(read("14", b"a%20b").message, "a b");
        assert_eq!(read("14", b"100% %zz %4").message, "100% %zz %4");
        assert_eq!(read("14", b"\xff%ff").message, "\u{fffd}\u{fffd}");
        for odd in ["17", "-1", "x", "", "99999999999999999999"] {
            assert_eq!(read(odd, b"m").code, Code::Unknown, "{odd}");
        }
        assert_eq!(Status::from_headers(&HeaderMap::new()), None);
    }

    #[test]
    fn codes_are_at_their_numbers() {
        for (number, code) in (0u32..).zip(Code::ALL) {
            assert_eq!(code as u32, number);
            assert_eq!(Code::from_number(number), code);
            assert_eq!(code.header(), number.to_string());
            let go = match code {
                Code::Ok => "OK".to_owned(),
                other => format!("{other:?}"),
            };
            assert_eq!(code.name(), go);
        }
    }

    #[test]
    fn a_status_of_tonic_keeps_code_and_text() {
        let status = Status::from(&tonic::Status::failed_precondition("etcdserver: not leader"));
        assert_eq!(status, Refusal::NOT_LEADER.status());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(number in 0u32..17, message in ".*") {
            let status = Status { code: Code::from_number(number), message: message.into() };
            prop_assert_eq!(Status::from_headers(&status.trailers()), Some(status.clone()));
            prop_assert_eq!(Status::from_headers(&status.trailers_only()), Some(status));
        }

        #[test]
        fn any_header_bytes_are_read(status: Vec<u8>, message: Vec<u8>) {
            let mut headers = HeaderMap::new();
            if let (Ok(status), Ok(message)) = (HeaderValue::from_bytes(&status), HeaderValue::from_bytes(&message)) {
                headers.insert(GRPC_STATUS, status);
                headers.insert(GRPC_MESSAGE, message);
                prop_assert!(Status::from_headers(&headers).is_some());
            }
        }
    }
}
