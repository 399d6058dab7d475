//! The meaning of a member's status, and the few statuses translated for clients.
//!
//! Owns: a table of etcd's codes and texts. Must not know: how a call is sent again.
//! Invariants: a write gets [`StatusVerdict::Heal`] or [`StatusVerdict::Elsewhere`] only if etcd's source or
//! a run proves that the write was not applied; a status outside the table proves nothing. Every translation
//! is a row or the single rule in [`translate`]; all remaining statuses pass untouched.
//!
//! Texts are compared whole and percent-decoded. Sources: etcd's `api/v3rpc/rpctypes/error.go`,
//! `server/auth/store.go` and `server/lease/lessor.go`.

use super::method::{Class, Effect, Method};
use super::schema::MessageId;
use crate::refusal::{Code, Refusal, Status};

/// The next step after a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StatusVerdict {
    /// The credential was refused and the call was not applied: send again once with a fresh credential. A
    /// Lock or Campaign only if [`may_reissue`](super::body_shape::may_reissue) agrees; a stream only before
    /// its first message.
    Heal,
    /// The call was not applied, or a read failed because of the member: another member may do better.
    Elsewhere,
    /// The call may have been applied: the client gets the status.
    Unclear,
    /// The cluster's answer: the client gets the status.
    Final,
}

/// The credential shown with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallProof {
    /// A token in the metadata.
    Token,
    /// No token: no credential at all, or the connection's certificate.
    NoToken,
}

/// A call, as needed to judge its answer.
#[derive(Clone, Copy, Debug)]
pub struct JudgedCall {
    /// The method's row.
    pub method: &'static Method,
    /// The call's effect, by [`body_shape::effect`](super::body_shape::effect).
    pub effect: Effect,
    /// The credential shown.
    pub proof: CallProof,
}

/// The state of authentication on the cluster, as revealed by an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RevealedAuth {
    /// Authentication is on.
    On,
    /// Authentication is off.
    Off,
}

/// A known status of etcd.
struct StatusRow {
    codes: &'static [Code],
    text: &'static str,
    /// The only class of calls with the status; `None` for all classes.
    only: Option<Class>,
    proves: StatusMeaning,
    /// The form known to clients, if different.
    becomes: Option<Refusal>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StatusMeaning {
    /// Not applied: the credential is not, or no longer, valid.
    CredentialRefused,
    /// Not applied: the member saw no credential.
    CredentialMissing,
    /// Not applied: the member could not, another member may.
    ThisMember,
    /// Not applied, except for calls that a follower passes on to the leader by a request of its own
    /// (MemberPromote; raft proposals are another matter): the leader may have applied the call.
    ThisMemberUnlessPassedOn,
    /// Not applied, and no member will apply the call.
    Refused,
    /// No proof of the outcome.
    Nothing,
}

use StatusMeaning::{CredentialMissing, CredentialRefused, Refused, ThisMember, ThisMemberUnlessPassedOn};

const OUTDATED: [&str; 2] = ["etcdserver: revision of auth store is old", "auth: revision in header is old"];

/// The statuses with a known meaning: etcd's auth errors, its remaining errors, and the proofs of "not
/// applied".
static ROWS: &[StatusRow] = &[
    row(&[Code::Unauthenticated], "etcdserver: invalid auth token", CredentialRefused),
    row(&[Code::InvalidArgument], "etcdserver: revision of auth store is old", CredentialRefused),
    row(&[Code::InvalidArgument], "etcdserver: user name is empty", CredentialMissing),
    // Raw texts: 3.4 and 3.5 leave the errors of Defragment, Snapshot, Hash and HashKV unmapped, 3.4 also the
    // errors of Alarm.
    raw("auth: invalid auth token", CredentialRefused, Refusal::INVALID_AUTH_TOKEN),
    raw("auth: user name is empty", CredentialMissing, Refusal::USER_EMPTY),
    raw("auth: permission denied", Refused, Refusal::PERMISSION_DENIED),
    raw("auth: user not found", Refused, Refusal::USER_NOT_FOUND),
    // In 3.5.0, 3.5.1 and before 3.4.19.
    raw("auth: revision in header is old", CredentialRefused, Refusal::AUTH_OLD_REVISION),
    // The Lock and Election services lose the error code received by their inner client.
    of_locks(raw("etcdserver: invalid auth token", CredentialRefused, Refusal::INVALID_AUTH_TOKEN)),
    of_locks(row(&[Code::Unknown], "etcdserver: revision of auth store is old", CredentialRefused)),
    of_locks(row(&[Code::Unknown], "etcdserver: user name is empty", CredentialMissing)),
    of_locks(row(&[Code::Unknown], "etcdserver: permission denied", Refused)),
    // Unavailable in 3.4 and 3.5, FailedPrecondition in 3.6.
    row(LEARNER, "etcdserver: rpc not supported for learner", ThisMember),
    row(LEARNER, "etcdserver: not capable", ThisMember),
    // Unknown on the wire, ResourceExhausted in the tables of clients.
    row(&[Code::Unknown, Code::ResourceExhausted], "etcdserver: too many requests", ThisMember),
    // Only from a read index.
    row(&[Code::Unavailable], "etcdserver: leader changed", ThisMember),
    row(&[Code::Unavailable], "etcdserver: no leader", ThisMemberUnlessPassedOn),
    row(&[Code::FailedPrecondition], "etcdserver: not leader", ThisMember),
    // Checked before any proposal; code Unknown before 3.4.20 and 3.5.3.
    row(
        &[Code::Unavailable, Code::Unknown],
        "etcdserver: request timed out, waiting for the applied index took too long",
        ThisMember,
    ),
    // From the asked member's own view of its peers, before a member is added or removed.
    row(&[Code::Unavailable], "etcdserver: unhealthy cluster", ThisMember),
    row(&[Code::Unknown], "raft proposal dropped", ThisMember),
    raw("not a primary lessor", ThisMember, Refusal::NOT_PRIMARY_LESSOR),
    row(&[Code::Unknown], "etcdserver: re-configuration failed due to not enough started members", Refused),
    // From Authenticate, unmapped in every version.
    row(&[Code::Unknown], "auth: authentication failed, password was given for no password user", Refused),
    row(&[Code::Unknown], "auth: token signing attempted with verify-only key", Refused),
    // A refusal, yet the write may have been applied: the quota is checked after the write.
    row(&[Code::ResourceExhausted], "etcdserver: mvcc: database space exceeded", StatusMeaning::Nothing),
];

const LEARNER: &[Code] = &[Code::Unavailable, Code::FailedPrecondition];

const fn row(codes: &'static [Code], text: &'static str, proves: StatusMeaning) -> StatusRow {
    StatusRow { codes, text, only: None, proves, becomes: None }
}

const fn raw(text: &'static str, proves: StatusMeaning, becomes: Refusal) -> StatusRow {
    StatusRow { codes: &[Code::Unknown], text, only: None, proves, becomes: Some(becomes) }
}

const fn of_locks(mut row: StatusRow) -> StatusRow {
    row.only = Some(Class::Lock);
    row
}

fn find(method: &Method, status: &Status) -> Option<&'static StatusRow> {
    ROWS.iter().find(|row| {
        row.codes.contains(&status.code)
            && row.text == status.message
            && row.only.is_none_or(|class| class == method.class)
    })
}

/// Returns the next step after `status`.
#[must_use]
pub fn verdict(asked: &JudgedCall, status: &Status) -> StatusVerdict {
    match find(asked.method, status).map(|row| row.proves) {
        Some(CredentialRefused) => StatusVerdict::Heal,
        Some(CredentialMissing) if asked.proof == CallProof::Token && !names_a_new_user(asked.method) => {
            StatusVerdict::Heal
        }
        Some(CredentialMissing | Refused) => StatusVerdict::Final,
        Some(ThisMember) => StatusVerdict::Elsewhere,
        Some(ThisMemberUnlessPassedOn) if answers_before_passing_on(asked) => StatusVerdict::Elsewhere,
        Some(ThisMemberUnlessPassedOn | StatusMeaning::Nothing) => StatusVerdict::Unclear,
        None => by_code(asked.effect, status),
    }
}

/// Judges by the code alone, for a status outside the table.
fn by_code(effect: Effect, status: &Status) -> StatusVerdict {
    match (status.code, effect) {
        (Code::Unavailable, Effect::ReadOnly) => StatusVerdict::Elsewhere,
        (_, Effect::ReadOnly) => StatusVerdict::Final,
        (
            Code::Unavailable
            | Code::Canceled
            | Code::DeadlineExceeded
            | Code::Unknown
            | Code::Internal
            | Code::Aborted,
            _,
        ) => StatusVerdict::Unclear,
        _ => StatusVerdict::Final,
    }
}

/// True if the only cause of `status` is a change of a user or role during the call: the next attempt may
/// pass with the same credential, and during a series of changes only a later attempt.
#[must_use]
pub fn is_outdated(asked: &JudgedCall, status: &Status) -> bool {
    find(asked.method, status).is_some_and(|row| OUTDATED.contains(&row.text))
}

/// UserAdd answers "user name is empty" also to a request without a user name.
fn names_a_new_user(method: &Method) -> bool {
    method.body == MessageId::AuthUserAddRequest
}

/// True if `no leader` proves the call not applied. From a member that may have forwarded the call
/// (MemberPromote), or without known facts about the service, `no leader` is no proof.
fn answers_before_passing_on(asked: &JudgedCall) -> bool {
    const SERVICES: [&str; 3] = ["etcdserverpb.KV", "etcdserverpb.Lease", "etcdserverpb.Auth"];
    asked.effect == Effect::ReadOnly || SERVICES.contains(&asked.method.service)
}

/// Returns the client's status in place of `status`; `None` to pass `status` on.
///
/// `client_caused`: the client's own deadline or cancel ended the call. Otherwise a write must not end with
/// DeadlineExceeded or Canceled: clientv3 would send the write again.
#[must_use]
pub fn translate(asked: &JudgedCall, status: &Status, client_caused: bool) -> Option<Status> {
    if let Some(row) = find(asked.method, status) {
        return row.becomes.as_ref().map(Refusal::status);
    }
    let gave_up = match status.code {
        Code::DeadlineExceeded | Code::Canceled => true,
        // etcd 3.4's form of DeadlineExceeded.
        Code::Unknown => status.message == Refusal::DEADLINE_EXCEEDED.message(),
        _ => false,
    };
    let translated = gave_up && !client_caused && asked.effect != Effect::ReadOnly;
    translated.then(|| Refusal::REQUEST_TIMED_OUT.status())
}

/// True if a status with an open outcome is about the member or the cluster, not about the request: an
/// idempotent call may then be sent again. The Lock and Election services send nearly every error with code
/// Unknown, so the text decides.
#[must_use]
pub fn is_trouble(status: &Status) -> bool {
    match status.code {
        Code::Unavailable | Code::Canceled | Code::DeadlineExceeded | Code::Internal | Code::Aborted => true,
        Code::Unknown => TROUBLE.contains(&&*status.message),
        _ => false,
    }
}

/// True if the member timed out waiting for a quorum or for its own store.
#[must_use]
pub fn is_timeout(status: &Status) -> bool {
    status.message.starts_with(Refusal::REQUEST_TIMED_OUT.message())
        || status.message == Refusal::DEADLINE_EXCEEDED.message()
}

/// Errors of the etcd client inside the Lock and Election services (server/etcdserver/errors,
/// client/v3/concurrency/key.go).
const TROUBLE: [&str; 11] = [
    "etcdserver: request timed out",
    "etcdserver: request timed out, possibly due to previous leader failure",
    "etcdserver: request timed out, possibly due to connection lost",
    "etcdserver: leader changed",
    "etcdserver: no leader",
    "etcdserver: server stopped",
    "etcdserver: stopped",
    "etcdserver: mvcc: required revision has been compacted",
    "lost watcher waiting for delete",
    "context canceled",
    "context deadline exceeded",
];

/// True if a Lock or Campaign was refused by the watch made for the call inside the member. A member has a
/// single watch stream for all Lock and Campaign calls, and checks the token of the stream's first user
/// (etcd-io/etcd#14850): the refusal may be meant for another caller.
#[must_use]
pub fn is_of_shared_watch(status: &Status) -> bool {
    // The text is the cancel_reason of a watch.
    status.code == Code::Unknown && status.message.starts_with("rpc error: code = ")
}

/// Returns the state of authentication revealed by `status`, if any. (A refused token reveals no state: old
/// members refuse a stale token even with authentication off.)
#[must_use]
pub fn auth_state(asked: &JudgedCall, status: &Status) -> Option<RevealedAuth> {
    if asked.method.body == MessageId::AuthenticateRequest && *status == Refusal::AUTH_NOT_ENABLED.status() {
        return Some(RevealedAuth::Off);
    }
    let missing = find(asked.method, status).is_some_and(|row| row.proves == CredentialMissing);
    (missing && asked.proof == CallProof::NoToken && !names_a_new_user(asked.method))
        .then_some(RevealedAuth::On)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::method::{METHODS, lookup};

    fn asked(path: &str, proof: CallProof) -> JudgedCall {
        let method = lookup(path).unwrap();
        JudgedCall { method, effect: method.effect, proof }
    }

    fn put() -> JudgedCall {
        asked("/etcdserverpb.KV/Put", CallProof::Token)
    }

    fn range() -> JudgedCall {
        asked("/etcdserverpb.KV/Range", CallProof::Token)
    }

    fn lock() -> JudgedCall {
        asked("/v3lockpb.Lock/Lock", CallProof::Token)
    }

    fn promote() -> JudgedCall {
        asked("/etcdserverpb.Cluster/MemberPromote", CallProof::Token)
    }

    fn login() -> JudgedCall {
        asked("/etcdserverpb.Auth/Authenticate", CallProof::NoToken)
    }

    fn keep_alive() -> JudgedCall {
        asked("/etcdserverpb.Lease/LeaseKeepAlive", CallProof::Token)
    }

    fn defragment() -> JudgedCall {
        asked("/etcdserverpb.Maintenance/Defragment", CallProof::Token)
    }

    fn status(code: Code, message: &'static str) -> Status {
        Status { code, message: message.into() }
    }

    type Fact = (JudgedCall, Code, &'static str, StatusVerdict);

    /// The auth error table, written again from the facts and not from the table above.
    fn facts_about_credentials() -> Vec<Fact> {
        use Code::{InvalidArgument, PermissionDenied, Unauthenticated, Unknown};
        use StatusVerdict::{Final, Heal, Unclear};
        vec![
            (put(), Unauthenticated, "etcdserver: invalid auth token", Heal),
            (put(), InvalidArgument, "etcdserver: revision of auth store is old", Heal),
            (put(), Unknown, "auth: revision in header is old", Heal),
            (put(), InvalidArgument, "etcdserver: user name is empty", Heal),
            (defragment(), Unknown, "auth: invalid auth token", Heal),
            (defragment(), Unknown, "auth: user name is empty", Heal),
            (defragment(), Unknown, "auth: permission denied", Final),
            (defragment(), Unknown, "auth: user not found", Final),
            (lock(), Unknown, "etcdserver: invalid auth token", Heal),
            (lock(), Unknown, "etcdserver: revision of auth store is old", Heal),
            (lock(), Unknown, "etcdserver: user name is empty", Heal),
            (lock(), Unknown, "etcdserver: permission denied", Final),
            (put(), Unknown, "etcdserver: invalid auth token", Unclear),
            (put(), PermissionDenied, "etcdserver: permission denied", Final),
            (login(), Unknown, "auth: authentication failed, password was given for no password user", Final),
            (login(), Unknown, "auth: token signing attempted with verify-only key", Final),
        ]
    }

    /// Statuses of a member unable to execute the call.
    fn facts_about_members() -> Vec<Fact> {
        use Code::{FailedPrecondition, ResourceExhausted, Unavailable, Unknown};
        use StatusVerdict::{Elsewhere, Final, Unclear};
        let applied = "etcdserver: request timed out, waiting for the applied index took too long";
        let unstarted = "etcdserver: re-configuration failed due to not enough started members";
        vec![
            (put(), Unavailable, "etcdserver: rpc not supported for learner", Elsewhere),
            (put(), FailedPrecondition, "etcdserver: rpc not supported for learner", Elsewhere),
            (put(), Unavailable, "etcdserver: not capable", Elsewhere),
            (put(), FailedPrecondition, "etcdserver: not capable", Elsewhere),
            (put(), Unknown, "etcdserver: too many requests", Elsewhere),
            (put(), ResourceExhausted, "etcdserver: too many requests", Elsewhere),
            (put(), Unavailable, "etcdserver: leader changed", Elsewhere),
            (put(), Unavailable, "etcdserver: no leader", Elsewhere),
            (promote(), Unavailable, "etcdserver: no leader", Unclear),
            (lock(), Unavailable, "etcdserver: no leader", Unclear),
            (promote(), FailedPrecondition, "etcdserver: not leader", Elsewhere),
            (promote(), Unavailable, "etcdserver: unhealthy cluster", Elsewhere),
            (promote(), Unavailable, applied, Elsewhere),
            (promote(), Unknown, applied, Elsewhere),
            (put(), Unknown, "raft proposal dropped", Elsewhere),
            (keep_alive(), Unknown, "not a primary lessor", Elsewhere),
            (promote(), Unknown, unstarted, Final),
        ]
    }

    /// Statuses leaving the outcome of a write open, and plain answers.
    fn facts_about_outcomes() -> Vec<Fact> {
        use Code::{
            Canceled, DataLoss, DeadlineExceeded, Internal, InvalidArgument, NotFound, OutOfRange,
            ResourceExhausted, Unavailable, Unknown,
        };
        use StatusVerdict::{Final, Unclear};
        let failure = "etcdserver: request timed out, possibly due to previous leader failure";
        vec![
            (put(), Unavailable, "etcdserver: request timed out", Unclear),
            (put(), Unavailable, failure, Unclear),
            (put(), Unavailable, "etcdserver: request timed out, possibly due to connection lost", Unclear),
            (put(), Unavailable, "etcdserver: server stopped", Unclear),
            (put(), Unavailable, "error reading from server: EOF", Unclear),
            (put(), DeadlineExceeded, "context deadline exceeded", Unclear),
            (put(), Unknown, "context deadline exceeded", Unclear),
            (put(), Unknown, "etcdserver: request cancelled", Unclear),
            (put(), Canceled, "etcdserver: request canceled", Unclear),
            (put(), Internal, "x", Unclear),
            (put(), ResourceExhausted, "etcdserver: mvcc: database space exceeded", Unclear),
            (put(), InvalidArgument, "etcdserver: request is too large", Final),
            (put(), ResourceExhausted, "grpc: received message larger than max (3 vs. 2)", Final),
            (put(), DataLoss, "etcdserver: corrupt cluster", Final),
            (put(), NotFound, "etcdserver: requested lease not found", Final),
            (put(), OutOfRange, "etcdserver: mvcc: required revision has been compacted", Final),
            (put(), InvalidArgument, "etcdserver: key is not provided", Final),
        ]
    }

    #[test]
    fn what_each_status_proves_of_a_write() {
        let facts = [facts_about_credentials(), facts_about_members(), facts_about_outcomes()].concat();
        for (asked, code, text, expected) in &facts {
            let found = verdict(asked, &status(*code, text));
            assert_eq!(found, *expected, "{} {code:?} {text}", asked.method.name);
        }
        for row in ROWS {
            for code in row.codes {
                let told = facts.iter().any(|(_, of, text, _)| row.text == *text && code == of);
                assert!(told, "no fact about {code:?} {}", row.text);
            }
        }
    }

    #[test]
    fn a_read_may_be_tried_elsewhere_where_a_write_may_not() {
        for text in ["etcdserver: request timed out", "etcdserver: server stopped", "etcdserver: no leader"] {
            assert_eq!(
                verdict(&range(), &status(Code::Unavailable, text)),
                StatusVerdict::Elsewhere,
                "{text}"
            );
        }
        assert_eq!(verdict(&range(), &Refusal::DEADLINE_EXCEEDED.status()), StatusVerdict::Final);
        assert_eq!(verdict(&range(), &status(Code::Unknown, "x")), StatusVerdict::Final);
        let reading_txn =
            JudgedCall { effect: Effect::ReadOnly, ..asked("/etcdserverpb.KV/Txn", CallProof::Token) };
        assert_eq!(verdict(&reading_txn, &Refusal::REQUEST_TIMED_OUT.status()), StatusVerdict::Elsewhere);
    }

    /// Without a token the status is final, and reveals that authentication is on.
    #[test]
    fn an_empty_user_heals_only_where_a_token_was_sent() {
        let empty = Refusal::USER_EMPTY.status();
        let bare = JudgedCall { proof: CallProof::NoToken, ..put() };
        assert_eq!(verdict(&put(), &empty), StatusVerdict::Heal);
        assert_eq!(verdict(&bare, &empty), StatusVerdict::Final);
        assert_eq!(auth_state(&bare, &empty), Some(RevealedAuth::On));
        assert_eq!(auth_state(&put(), &empty), None);
        // A UserAdd without a user name gets the same text; a login does not help.
        for proof in [CallProof::Token, CallProof::NoToken] {
            let user_add = asked("/etcdserverpb.Auth/UserAdd", proof);
            assert_eq!(verdict(&user_add, &empty), StatusVerdict::Final);
            assert_eq!(auth_state(&user_add, &empty), None);
        }
    }

    #[test]
    fn a_login_tells_that_authentication_is_off() {
        assert_eq!(auth_state(&login(), &Refusal::AUTH_NOT_ENABLED.status()), Some(RevealedAuth::Off));
        assert_eq!(auth_state(&login(), &Refusal::AUTH_FAILED.status()), None);
        assert_eq!(auth_state(&put(), &Refusal::INVALID_AUTH_TOKEN.status()), None);
    }

    #[test]
    fn raw_texts_become_what_clients_know() {
        let facts = [
            (defragment(), "auth: invalid auth token", Refusal::INVALID_AUTH_TOKEN),
            (defragment(), "auth: user name is empty", Refusal::USER_EMPTY),
            (defragment(), "auth: permission denied", Refusal::PERMISSION_DENIED),
            (defragment(), "auth: user not found", Refusal::USER_NOT_FOUND),
            (put(), "auth: revision in header is old", Refusal::AUTH_OLD_REVISION),
            (lock(), "etcdserver: invalid auth token", Refusal::INVALID_AUTH_TOKEN),
        ];
        for (asked, text, becomes) in facts {
            assert_eq!(
                translate(&asked, &status(Code::Unknown, text), false),
                Some(becomes.status()),
                "{text}"
            );
        }
        let found = translate(&keep_alive(), &status(Code::Unknown, "not a primary lessor"), false).unwrap();
        assert_eq!((found.code, &*found.message), (Code::Unavailable, "not a primary lessor"));
    }

    #[test]
    fn a_write_never_ends_as_if_the_client_had_ended_it() {
        let endings = [
            status(Code::DeadlineExceeded, "context deadline exceeded"),
            status(Code::Unknown, "context deadline exceeded"),
            status(Code::Canceled, "etcdserver: request canceled"),
        ];
        for ending in &endings {
            assert_eq!(
                translate(&put(), ending, false),
                Some(Refusal::REQUEST_TIMED_OUT.status()),
                "{ending:?}"
            );
            assert_eq!(translate(&put(), ending, true), None, "{ending:?}");
            assert_eq!(translate(&range(), ending, false), None, "{ending:?}");
        }
    }

    /// Statuses outside the table pass untouched (`docs/decisions.md#d07`).
    #[test]
    fn other_statuses_cross_as_they_are() {
        for (asked, code, text) in [
            (lock(), Code::Unknown, "etcdserver: permission denied"),
            (lock(), Code::Unknown, "etcdserver: user name is empty"),
            (put(), Code::Unknown, "etcdserver: invalid auth token"),
            (put(), Code::Unknown, "etcdserver: request cancelled"),
            (put(), Code::Unknown, "etcdserver: too many requests"),
            (put(), Code::Unavailable, "etcdserver: request timed out"),
            (put(), Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
            (put(), Code::FailedPrecondition, "etcdserver: rpc not supported for learner"),
            (put(), Code::Unauthenticated, "etcdserver: invalid auth token"),
        ] {
            assert_eq!(translate(&asked, &status(code, text), false), None, "{text}");
        }
    }

    #[test]
    fn trouble_is_the_members_and_not_the_requests() {
        for (code, text) in [
            (Code::Unavailable, "etcdserver: request timed out"),
            (Code::Canceled, "x"),
            (Code::Unknown, "lost watcher waiting for delete"),
            (Code::Unknown, "etcdserver: leader changed"),
        ] {
            assert!(is_trouble(&status(code, text)), "{text}");
        }
        for (code, text) in [
            (Code::Ok, ""),
            (Code::Unknown, "etcdserver: permission denied"),
            (Code::Unknown, "etcdserver: requested lease not found"),
            (Code::Unknown, "mutex: session is expired"),
            (Code::PermissionDenied, "etcdserver: permission denied"),
            (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
        ] {
            assert!(!is_trouble(&status(code, text)), "{text}");
        }
    }

    /// A success is final for every method.
    #[test]
    fn ok_is_final_for_every_method() {
        for method in METHODS {
            let asked = JudgedCall { method, effect: method.effect, proof: CallProof::Token };
            assert_eq!(verdict(&asked, &status(Code::Ok, "")), StatusVerdict::Final);
            assert_eq!(translate(&asked, &status(Code::Ok, ""), false), None);
        }
    }
}
