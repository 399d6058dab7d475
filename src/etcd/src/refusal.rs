//! The statuses with constant texts, in etcd's exact codes and texts: Keyward's refusals, translations of a
//! member's status, and patterns for comparison with a member's status. The only maker of an error status. A
//! refusal leaves through `gateway::reply` and `gateway::reply_contents`; `gateway::access_log` counts calls.
//!
//! Owns: the table of Keyward's own statuses, and the conversion of a status to and from headers. Must not
//! know: the refused caller, or the handling of a refusal. Invariant: clients match on the text, so a text
//! known to etcd is etcd's, byte for byte (Go's `rpctypes.Error` compares only the text). Keyward's own texts
//! begin with `keyward:`.

mod answer_refusals;
mod refusal_reason;
mod unread_refusals;
mod unsent_refusals;

use std::borrow::Cow;
use std::fmt;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode, utf8_percent_encode};

pub use self::refusal_reason::{AnswerEnd, RefusalCause, RefusalReason};

/// The header or trailer with the status code.
pub const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// The header or trailer with the percent-encoded text.
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// gRPC leaves space to `~` except `%` unescaped; non-ASCII characters are always escaped.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// A refused call (`told` wraps a member's own status), with the status for the client.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    code: Code,
    message: Cow<'static, str>,
    reason: RefusalReason,
}

/// Refusals are equal if the client is told the same.
impl PartialEq for Refusal {
    fn eq(&self, other: &Self) -> bool {
        (self.code, &self.message) == (other.code, &other.message)
    }
}

impl Eq for Refusal {}

/// Refusals with a constant text.
impl Refusal {
    /// The session token is unknown, revoked or not issued by Keyward.
    pub const INVALID_AUTH_TOKEN: Self =
        refusal(RefusalReason::Token, Code::Unauthenticated, "etcdserver: invalid auth token");
    /// A required credential is missing.
    pub const USER_EMPTY: Self =
        refusal(RefusalReason::NoIdentity, Code::InvalidArgument, "etcdserver: user name is empty");
    /// Wrong password, or unknown user: the status does not tell the two apart.
    pub const AUTH_FAILED: Self = refusal(
        RefusalReason::Password,
        Code::InvalidArgument,
        "etcdserver: authentication failed, invalid user ID or password",
    );
    /// A login while authentication is off. A Go client with this answer never logs in again.
    pub const AUTH_NOT_ENABLED: Self = refusal(
        RefusalReason::AuthOff,
        Code::FailedPrecondition,
        "etcdserver: authentication is not enabled",
    );
    /// The auth store's revision changed between proof and use.
    pub const AUTH_OLD_REVISION: Self = refusal(
        RefusalReason::AuthRevision,
        Code::InvalidArgument,
        "etcdserver: revision of auth store is old",
    );
    /// Denied by policy.
    pub const PERMISSION_DENIED: Self =
        refusal(RefusalReason::Policy, Code::PermissionDenied, "etcdserver: permission denied");
    /// The etcd user of the caller is blocked.
    pub const BLOCKED: Self =
        refusal(RefusalReason::Blocked, Code::PermissionDenied, "etcdserver: permission denied");
    /// The keys are outside of the caller's namespace, or the caller has another one since.
    pub const OUTSIDE_NAMESPACE: Self =
        refusal(RefusalReason::Namespace, Code::PermissionDenied, "etcdserver: permission denied");
    /// A rule refuses the peer, or none makes an etcd user of the peer.
    pub const NO_ETCD_USER: Self =
        refusal(RefusalReason::Mapping, Code::PermissionDenied, "etcdserver: permission denied");
    /// The user named by a credential no longer exists. Only as a translation of a member's status.
    pub const USER_NOT_FOUND: Self =
        refusal(RefusalReason::Member, Code::FailedPrecondition, "etcdserver: user name not found");
    /// A limit of Keyward is reached.
    pub const TOO_MANY_REQUESTS: Self =
        refusal(RefusalReason::Limit, Code::ResourceExhausted, "etcdserver: too many requests");
    /// No member knows a leader. Only before any byte of the call was sent.
    pub const NO_LEADER: Self = refusal(RefusalReason::NoMember, Code::Unavailable, "etcdserver: no leader");
    /// A former leader received a lease call; etcd answers with code Unknown, which ends a Go client's
    /// keepalives. Only as a translation of a member's status.
    pub const NOT_PRIMARY_LESSOR: Self =
        refusal(RefusalReason::Member, Code::Unavailable, "not a primary lessor");
    /// The outcome is unknown: no answer within etcd's own request timeout.
    pub const REQUEST_TIMED_OUT: Self =
        refusal(RefusalReason::TimedOut, Code::Unavailable, "etcdserver: request timed out");
    /// The outcome is unknown: the member's connection was lost after the request was sent.
    pub const REQUEST_TIMED_OUT_CONNECTION_LOST: Self = refusal(
        RefusalReason::TimedOut,
        Code::Unavailable,
        "etcdserver: request timed out, possibly due to connection lost",
    );
    /// The client's own deadline passed. Never used for a different deadline: clientv3 would send a write
    /// again.
    pub const DEADLINE_EXCEEDED: Self =
        refusal(RefusalReason::Deadline, Code::DeadlineExceeded, "context deadline exceeded");
    /// The client has gone; only the access log shows this status.
    pub const CANCELED: Self = refusal(RefusalReason::Canceled, Code::Canceled, "context canceled");
    /// A password login as a user without a password, provable by a certificate only. etcd leaves this error
    /// unmapped in every version.
    pub const NO_PASSWORD_USER: Self = refusal(
        RefusalReason::Password,
        Code::Unknown,
        "auth: authentication failed, password was given for no password user",
    );
    /// A health check of a service other than the server as a whole.
    pub const UNKNOWN_HEALTH_SERVICE: Self =
        refusal(RefusalReason::Unknown, Code::NotFound, "unknown service");
    /// A member's answer must be rewritten and cannot be decoded. Not Unavailable: the call was applied.
    pub const UNREADABLE_ANSWER: Self =
        refusal(RefusalReason::Internal, Code::Internal, "keyward: the member's answer could not be read");
    /// A body whose chunks cannot be told apart.
    pub const MALFORMED_CHUNKS: Self = malformed("keyward: the body's chunks are malformed");
    /// A request without the key that etcd needs.
    pub const EMPTY_KEY: Self = malformed("etcdserver: key is not provided");
    /// A sort target unknown to etcd, in the words of etcd 3.6.
    pub const SORT_OPTION: Self = malformed("etcdserver: invalid sort option");
    /// A Txn that changes a key twice.
    pub const DUPLICATE_KEY: Self = malformed("etcdserver: duplicate key given in txn request");
    /// A MemberUpdate with URLs that etcd cannot read; the words are those of a MemberAdd.
    pub const MEMBER_URLS: Self = malformed("etcdserver: given member URLs are invalid");
    /// A RoleGrantPermission without a permission, in the words of etcd 3.5.
    pub const NO_PERMISSION_GIVEN: Self = malformed("etcdserver: permission not given");
    /// A single revision of a watch exceeds the buffer of a watch.
    pub const REVISION_TOO_LARGE: Self = refusal(
        RefusalReason::TooLarge,
        Code::ResourceExhausted,
        "keyward: a revision is too large to deliver",
    );
    /// A defragmentation of the members is running, here or at a different replica.
    pub const DEFRAGMENTING: Self = refusal(
        RefusalReason::Defragmentation,
        Code::FailedPrecondition,
        "keyward: another defragmentation is under way",
    );
    /// A read that may have ended a member. Not Unavailable: clientv3 would send the read again by itself.
    pub const SUSPECT_READ: Self = refusal(
        RefusalReason::Suspect,
        Code::ResourceExhausted,
        "keyward: a member was lost during this read, now refused for a minute; ask for less",
    );
    /// A Txn that members before etcd 3.7 apply differently (etcd-io/etcd#18667).
    pub const SPLITTING_TXN: Self = refusal(
        RefusalReason::Malformed,
        Code::FailedPrecondition,
        "keyward: a txn that writes and reads at a revision can split members before etcd 3.7",
    );
    /// Keyward is draining.
    pub const SHUTTING_DOWN: Self =
        refusal(RefusalReason::Draining, Code::Unavailable, "etcdserver: server stopped");
    /// The client's connection was told to end by `keyward kick`.
    pub const KICKED: Self = refusal(RefusalReason::Kicked, Code::Unavailable, "etcdserver: server stopped");
    /// The certificate of the client's connection has ended, or is no longer trusted.
    pub const CERTIFICATE_ENDED: Self =
        refusal(RefusalReason::Certificate, Code::Unavailable, "etcdserver: server stopped");
    /// A panic in Keyward; the call may have been sent.
    pub const PANICKED: Self = refusal(RefusalReason::Internal, Code::Unavailable, "keyward: internal error");
    /// A call with an audit record, while the audit log cannot be written. Nothing was sent.
    pub const AUDIT_UNWRITABLE: Self =
        refusal(RefusalReason::Audit, Code::Unavailable, "keyward: the audit log cannot be written");
    /// A LeaseGrant with an id of the client's choice, of a caller in a namespace.
    pub const LEASE_ID_OUTSIDE_NAMESPACE: Self =
        malformed("keyward: a lease id outside of the namespace; leave it out, and an id is drawn");
    /// A frame with the compressed flag, in a request without a compressing `grpc-encoding`.
    pub const COMPRESSED_WITHOUT_ENCODING: Self = refusal(
        RefusalReason::Malformed,
        Code::Internal,
        "grpc: compressed flag set with identity or empty encoding",
    );
}

/// Refusals with details in the text, in grpc-go's words if available.
impl Refusal {
    fn with_text(reason: RefusalReason, code: Code, message: String) -> Self {
        Self { code, message: Cow::Owned(message), reason }
    }

    /// A message of `got` bytes, above the limit of `max` bytes.
    #[must_use]
    pub fn too_large(got: usize, max: usize) -> Self {
        let message = format!("grpc: received message larger than max ({got} vs. {max})");
        Self::with_text(RefusalReason::TooLarge, Code::ResourceExhausted, message)
    }

    /// The service in a malformed path. A well-formed path is passed on.
    #[must_use]
    pub fn unknown_service(service: &str) -> Self {
        Self::with_text(RefusalReason::Unknown, Code::Unimplemented, format!("unknown service {service}"))
    }

    /// The method in a malformed path with a known service. A well-formed path is passed on.
    #[must_use]
    pub fn unknown_method(service: &str, method: &str) -> Self {
        Self::with_text(
            RefusalReason::Unknown,
            Code::Unimplemented,
            format!("unknown method {method} for service {service}"),
        )
    }

    /// A path not matching gRPC's form.
    #[must_use]
    pub fn malformed_path(path: &str) -> Self {
        Self::with_text(
            RefusalReason::Malformed,
            Code::Unimplemented,
            format!("malformed method name: {path:?}"),
        )
    }

    /// A `grpc-encoding` without a decompressor.
    #[must_use]
    pub fn compressed(encoding: &str) -> Self {
        let message = format!("grpc: Decompressor is not installed for grpc-encoding {encoding:?}");
        Self::with_text(RefusalReason::Malformed, Code::Unimplemented, message)
    }

    /// A compressed message with an inflated size above `max`.
    #[must_use]
    pub fn too_large_inflated(max: usize) -> Self {
        let message = format!("grpc: received message after decompression larger than max {max}");
        Self::with_text(RefusalReason::TooLarge, Code::ResourceExhausted, message)
    }

    /// A compressed message with a failed decompression.
    #[must_use]
    pub fn not_inflated(why: &str) -> Self {
        Self::with_text(RefusalReason::Malformed, Code::Internal, format!("grpc: {why}"))
    }

    /// The first byte of a frame is neither 0 nor 1.
    #[must_use]
    pub fn unknown_frame_flag(flag: u8) -> Self {
        Self::with_text(
            RefusalReason::Malformed,
            Code::Internal,
            format!("grpc: received unexpected payload format {flag}"),
        )
    }

    /// An invalid `grpc-timeout`.
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
        Self::with_text(RefusalReason::Malformed, Code::Internal, format!("malformed grpc-timeout: {why}"))
    }

    /// A request that ends or splits members of etcd, for which etcd has no words.
    #[must_use]
    pub fn fatal(what: &str) -> Self {
        let message = format!("keyward: refused, because members of etcd would end, or differ: {what}");
        Self::with_text(RefusalReason::Malformed, Code::InvalidArgument, message)
    }

    /// A call addressed to a member unknown to the cluster.
    #[must_use]
    pub fn unknown_member(name: &str) -> Self {
        Self::with_text(
            RefusalReason::Unknown,
            Code::NotFound,
            format!("keyward: the cluster has no member {name:?}"),
        )
    }

    /// A failed defragmentation of a member, with the reason; `done` names the members defragmented before,
    /// if any.
    #[must_use]
    pub fn not_defragmented(code: Code, member: &str, why: &str, done: &str) -> Self {
        let but = if done.is_empty() { String::new() } else { format!("; done before it: {done}") };
        let message = format!("keyward: member {member} was not defragmented: {why}{but}");
        Self::with_text(RefusalReason::Defragmentation, code, message)
    }

    /// A member's own status, in answer to Keyward's request on behalf of the client.
    #[must_use]
    pub fn told(status: &Status) -> Self {
        Self { code: status.code, message: status.message.clone(), reason: RefusalReason::Member }
    }

    /// A member's refusal of a watch, in etcd's `cancel_reason`. A reason without a code, such as a duplicate
    /// watch id, has the code Unknown, as a Go error without a code.
    #[must_use]
    pub fn of_cancel_reason(reason: &[u8]) -> Self {
        let reason = String::from_utf8_lossy(reason);
        let parts = reason.strip_prefix("rpc error: code = ").and_then(|rest| rest.split_once(" desc = "));
        let (code, message) = parts.unwrap_or((Code::Unknown.name(), &reason));
        let code = Code::ALL.into_iter().find(|known| known.name() == code).unwrap_or(Code::Unknown);
        Self::with_text(RefusalReason::Member, code, message.to_owned())
    }

    /// A JSON document that is not the request of its route. `fault` holds no value of the document.
    #[must_use]
    pub fn malformed_json(fault: &impl fmt::Display) -> Self {
        Self::with_text(RefusalReason::Malformed, Code::InvalidArgument, format!("keyward: {fault}"))
    }

    /// A request body open to different readings by different decoders.
    #[must_use]
    pub fn not_canonical(reason: &str) -> Self {
        Self::with_text(
            RefusalReason::Malformed,
            Code::InvalidArgument,
            format!("keyward: request body is not canonical: {reason}"),
        )
    }
}

impl Refusal {
    /// The gRPC code.
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }

    /// The reason, as counted in the metrics.
    #[must_use]
    pub fn reason(&self) -> RefusalReason {
        self.reason
    }

    /// The refusal of a member who was asked for its verdict, because another member would serve the call
    /// without one.
    #[must_use]
    pub fn of_patch(self) -> Self {
        let is_verdict = self.reason == RefusalReason::Member && self.code == Code::PermissionDenied;
        Self { reason: if is_verdict { RefusalReason::Patch } else { self.reason }, ..self }
    }

    /// The same status for the client, for another reason: one text of etcd stands for several causes.
    #[must_use]
    pub fn because(self, reason: RefusalReason) -> Self {
        Self { reason, ..self }
    }

    /// The text, not yet percent-encoded.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The refusal as a status.
    #[must_use]
    pub fn status(&self) -> Status {
        Status { code: self.code, message: self.message.clone() }
    }

    /// Headers of a complete answer without a body ("Trailers-Only").
    #[must_use]
    pub fn trailers_only(&self) -> HeaderMap {
        trailers_only(self.code, &self.message)
    }

    /// Trailers after sent headers, and possibly messages.
    #[must_use]
    pub fn trailers(&self) -> HeaderMap {
        trailers(self.code, &self.message)
    }
}

const fn malformed(message: &'static str) -> Refusal {
    refusal(RefusalReason::Malformed, Code::InvalidArgument, message)
}

const fn refusal(reason: RefusalReason, code: Code, message: &'static str) -> Refusal {
    Refusal { code, message: Cow::Borrowed(message), reason }
}

/// The outcome of a call: a member's answer, or a refusal. The origin is not recorded.
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

    /// Formats the status like etcd's `cancel_reason` of a watch.
    #[must_use]
    pub fn cancel_reason(&self) -> String {
        format!("rpc error: code = {} desc = {}", self.code.name(), self.message)
    }

    /// True if the status is a success.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.code == Code::Ok
    }

    /// Reads a status from headers or trailers; `None` without a status. Never fails: an unknown code becomes
    /// [`Code::Unknown`], invalid UTF-8 is replaced.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let code = Code::from_header(headers.get(GRPC_STATUS)?);
        let message = headers.get(GRPC_MESSAGE).map_or_else(String::new, |value| {
            percent_decode(value.as_bytes()).decode_utf8_lossy().into_owned()
        });
        Some(Self { code, message: Cow::Owned(message) })
    }

    /// Headers of a complete answer without a body ("Trailers-Only").
    #[must_use]
    pub fn trailers_only(&self) -> HeaderMap {
        trailers_only(self.code, &self.message)
    }

    /// Trailers after sent headers, and possibly messages.
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

/// For calls of tonic clients to members, on the control runtime.
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
    // Escaped text is printable ASCII, a valid header value.
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
    /// Every code, in numeric order.
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

    /// The code of a number; `Unknown` for a number outside of gRPC's table.
    fn from_number(number: u32) -> Self {
        usize::try_from(number).ok().and_then(|at| Self::ALL.get(at)).copied().unwrap_or(Self::Unknown)
    }

    /// The name in Go and in etcd's watch answers (`rpc error: code = Unauthenticated desc = …`); also in
    /// audit records, and a label of metrics.
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

    /// Clients match on code and text: an error in the table breaks clients.
    #[test]
    fn the_table_is_what_clients_match_on() {
        let rows = [
            (Refusal::INVALID_AUTH_TOKEN, 16, "etcdserver: invalid auth token"),
            (Refusal::USER_EMPTY, 3, "etcdserver: user name is empty"),
            (Refusal::AUTH_FAILED, 3, "etcdserver: authentication failed, invalid user ID or password"),
            (Refusal::AUTH_NOT_ENABLED, 9, "etcdserver: authentication is not enabled"),
            (Refusal::AUTH_OLD_REVISION, 3, "etcdserver: revision of auth store is old"),
            (Refusal::PERMISSION_DENIED, 7, "etcdserver: permission denied"),
            (Refusal::TOO_MANY_REQUESTS, 8, "etcdserver: too many requests"),
            (Refusal::NO_LEADER, 14, "etcdserver: no leader"),
            (Refusal::USER_NOT_FOUND, 9, "etcdserver: user name not found"),
            (Refusal::NOT_PRIMARY_LESSOR, 14, "not a primary lessor"),
            (Refusal::NOTHING_SENT, 14, "there is no connection available"),
            (Refusal::REQUEST_TIMED_OUT, 14, "etcdserver: request timed out"),
            (
                Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST,
                14,
                "etcdserver: request timed out, possibly due to connection lost",
            ),
            (Refusal::DEADLINE_EXCEEDED, 4, "context deadline exceeded"),
            (Refusal::CANCELED, 1, "context canceled"),
            (
                Refusal::NO_PASSWORD_USER,
                2,
                "auth: authentication failed, password was given for no password user",
            ),
            (Refusal::EMPTY_KEY, 3, "etcdserver: key is not provided"),
            (Refusal::UNKNOWN_HEALTH_SERVICE, 5, "unknown service"),
            (Refusal::SHUTTING_DOWN, 14, "etcdserver: server stopped"),
            (Refusal::too_large(3, 2), 8, "grpc: received message larger than max (3 vs. 2)"),
            (Refusal::unknown_service("a.B"), 12, "unknown service a.B"),
            (Refusal::unknown_method("a.B", "C"), 12, "unknown method C for service a.B"),
            (Refusal::malformed_path("/x"), 12, "malformed method name: \"/x\""),
            (
                Refusal::compressed("snappy"),
                12,
                "grpc: Decompressor is not installed for grpc-encoding \"snappy\"",
            ),
            (
                Refusal::COMPRESSED_WITHOUT_ENCODING,
                13,
                "grpc: compressed flag set with identity or empty encoding",
            ),
            (Refusal::unknown_frame_flag(7), 13, "grpc: received unexpected payload format 7"),
        ];
        for (refusal, code, message) in rows {
            assert_eq!((refusal.code() as u8, refusal.message()), (code, message));
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
        // Bytes without a valid text encoding.
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

    /// clientv3 sends a write again upon these two codes, whatever the text, unless the client's own context
    /// ended.
    #[test]
    fn no_refusal_that_is_not_the_clients_doing_makes_it_send_a_write_again() {
        for refusal in [Refusal::SHUTTING_DOWN, Refusal::PANICKED, Refusal::REQUEST_TIMED_OUT] {
            assert!(!matches!(refusal.code(), Code::Canceled | Code::DeadlineExceeded), "{refusal}");
            assert_ne!(refusal.message(), Refusal::NOTHING_SENT.message());
        }
    }

    #[test]
    fn a_cancel_reason_of_a_member_is_read_with_its_code() {
        let denied = Refusal::PERMISSION_DENIED.status();
        let read = Refusal::of_cancel_reason(denied.cancel_reason().as_bytes());
        assert_eq!((read.status(), read.reason()), (denied, RefusalReason::Member));
        for odd in ["mvcc: duplicate watch ID", "rpc error: code = Nothing desc = x", "\u{fffd}", ""] {
            assert_eq!(Refusal::of_cancel_reason(odd.as_bytes()).code(), Code::Unknown, "{odd}");
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
    fn reasons_are_at_their_names() {
        assert_eq!(RefusalReason::Member as usize + 1, RefusalReason::NAMES.len());
        for reason in [RefusalReason::NoMember, RefusalReason::TimedOut, RefusalReason::Malformed] {
            let words = format!("{reason:?}").replace("edO", "ed_O").replace("NoM", "No_M").to_lowercase();
            assert_eq!(RefusalReason::NAMES[reason as usize], words);
        }
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
        let status = Status::from(&tonic::Status::unavailable("etcdserver: no leader"));
        assert_eq!(status, Refusal::NO_LEADER.status());
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
            if let (Ok(status), Ok(message)) =
                (HeaderValue::from_bytes(&status), HeaderValue::from_bytes(&message))
            {
                headers.insert(GRPC_STATUS, status);
                headers.insert(GRPC_MESSAGE, message);
                prop_assert!(Status::from_headers(&headers).is_some());
            }
        }
    }
}
