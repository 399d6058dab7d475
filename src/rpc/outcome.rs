//! What a member's status proves, and the few statuses that clients get in another form.
//!
//! Owns: one table of etcd's codes and texts. Must not know: how a call is sent again.
//! Invariants: [`Verdict::Heal`] and [`Verdict::Elsewhere`] are said of a write only where etcd's source or a run
//! proves that it was not applied; whatever the table does not name is not proven. Every translation is a row or
//! the one rule in [`translate`]; all other statuses cross untouched.
//!
//! Texts are compared percent-decoded and whole. They are those of etcd's `api/v3rpc/rpctypes/error.go`,
//! `server/auth/store.go` and `server/lease/lessor.go`.

use super::method::{Class, Effect, Method};
use super::schema::MessageId;
use crate::refusal::{Code, Refusal, Status};

/// What a status says about the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The credential was refused and nothing was applied: once more with a fresh one. A Lock or Campaign only
    /// where [`may_reissue`](super::shape::may_reissue) agrees; a stream only before its first message.
    Heal,
    /// Nothing was applied, or a read failed for the member's sake: another member may do better.
    Elsewhere,
    /// It may have been applied: the client gets the status.
    Unclear,
    /// The cluster's answer: the client gets the status.
    Final,
}

/// What we proved the call with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Proof {
    /// A token in the metadata.
    Token,
    /// No token: none at all, or the connection's certificate.
    NoToken,
}

/// A call as its answer is judged.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Its row.
    pub method: &'static Method,
    /// Its effect, by [`shape::effect`](super::shape::effect).
    pub effect: Effect,
    /// What it was proven with.
    pub proof: Proof,
}

/// What an answer tells about authentication on the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AuthState {
    /// It is on.
    On,
    /// It is off.
    Off,
}

/// One status of etcd.
struct Row {
    codes: &'static [Code],
    text: &'static str,
    /// The only class of calls that it holds for.
    only: Option<Class>,
    proves: Proves,
    /// The form that clients know, where this one is not it.
    becomes: Option<Refusal>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proves {
    /// Nothing applied: the credential is not, or no longer, good.
    CredentialRefused,
    /// Nothing applied: the member saw no credential.
    CredentialMissing,
    /// Nothing applied: this member could not, another may.
    ThisMember,
    /// The same, but for calls that a follower passes on, where the leader may have applied it.
    ThisMemberUnlessPassedOn,
    /// Nothing applied, and no member will.
    Refused,
    /// Nothing.
    Nothing,
}

use Proves::{CredentialMissing, CredentialRefused, Refused, ThisMember, ThisMemberUnlessPassedOn};

const OUTDATED: [&str; 2] = ["etcdserver: revision of auth store is old", "auth: revision in header is old"];

/// Sources: the auth error table, the table of other errors, and the list of what proves "not applied".
static ROWS: &[Row] = &[
    row(&[Code::Unauthenticated], "etcdserver: invalid auth token", CredentialRefused),
    row(&[Code::InvalidArgument], "etcdserver: revision of auth store is old", CredentialRefused),
    row(&[Code::InvalidArgument], "etcdserver: user name is empty", CredentialMissing),
    // Raw texts: 3.4 and 3.5 leave those of Defragment, Snapshot, Hash and HashKV unmapped, 3.4 Alarm's too.
    raw("auth: invalid auth token", CredentialRefused, Refusal::INVALID_AUTH_TOKEN),
    raw("auth: user name is empty", CredentialMissing, Refusal::USER_EMPTY),
    raw("auth: permission denied", Refused, Refusal::PERMISSION_DENIED),
    raw("auth: user not found", Refused, Refusal::USER_NOT_FOUND),
    // 3.5.0, 3.5.1 and before 3.4.19.
    raw("auth: revision in header is old", CredentialRefused, Refusal::AUTH_OLD_REVISION),
    // The Lock and Election services lose the code of what their inner client was told.
    of_locks(raw("etcdserver: invalid auth token", CredentialRefused, Refusal::INVALID_AUTH_TOKEN)),
    of_locks(row(&[Code::Unknown], "etcdserver: revision of auth store is old", CredentialRefused)),
    of_locks(row(&[Code::Unknown], "etcdserver: user name is empty", CredentialMissing)),
    of_locks(row(&[Code::Unknown], "etcdserver: permission denied", Refused)),
    // 3.4 and 3.5 say Unavailable, 3.6 FailedPrecondition.
    row(LEARNER, "etcdserver: rpc not supported for learner", ThisMember),
    row(LEARNER, "etcdserver: not capable", ThisMember),
    // Unknown on the wire, ResourceExhausted in the tables of clients.
    row(&[Code::Unknown, Code::ResourceExhausted], "etcdserver: too many requests", ThisMember),
    // Of a read index only.
    row(&[Code::Unavailable], "etcdserver: leader changed", ThisMember),
    row(&[Code::Unavailable], "etcdserver: no leader", ThisMemberUnlessPassedOn),
    row(&[Code::FailedPrecondition], "etcdserver: not leader", ThisMember),
    // Checked before anything is proposed; Unknown before 3.4.20 and 3.5.3.
    row(
        &[Code::Unavailable, Code::Unknown],
        "etcdserver: request timed out, waiting for the applied index took too long",
        ThisMember,
    ),
    // By the asked member's own view of its peers, before a member is added or removed.
    row(&[Code::Unavailable], "etcdserver: unhealthy cluster", ThisMember),
    row(&[Code::Unknown], "raft proposal dropped", ThisMember),
    raw("not a primary lessor", ThisMember, Refusal::NOT_PRIMARY_LESSOR),
    row(&[Code::Unknown], "etcdserver: re-configuration failed due to not enough started members", Refused),
    // Authenticate's, unmapped in every version.
    row(&[Code::Unknown], "auth: authentication failed, password was given for no password user", Refused),
    row(&[Code::Unknown], "auth: token signing attempted with verify-only key", Refused),
    // Says no, and may have applied it: the quota is looked at after the write.
    row(&[Code::ResourceExhausted], "etcdserver: mvcc: database space exceeded", Proves::Nothing),
];

const LEARNER: &[Code] = &[Code::Unavailable, Code::FailedPrecondition];

const fn row(codes: &'static [Code], text: &'static str, proves: Proves) -> Row {
    Row { codes, text, only: None, proves, becomes: None }
}

const fn raw(text: &'static str, proves: Proves, becomes: Refusal) -> Row {
    Row { codes: &[Code::Unknown], text, only: None, proves, becomes: Some(becomes) }
}

const fn of_locks(mut row: Row) -> Row {
    row.only = Some(Class::Lock);
    row
}

fn find(method: &Method, status: &Status) -> Option<&'static Row> {
    ROWS.iter().find(|row| {
        row.codes.contains(&status.code)
            && row.text == status.message
            && row.only.is_none_or(|class| class == method.class)
    })
}

/// What `status` says about the next step.
#[must_use]
pub fn verdict(asked: &Asked, status: &Status) -> Verdict {
    match find(asked.method, status).map(|row| row.proves) {
        Some(CredentialRefused) => Verdict::Heal,
        Some(CredentialMissing) if asked.proof == Proof::Token && !names_a_new_user(asked.method) => {
            Verdict::Heal
        }
        Some(CredentialMissing | Refused) => Verdict::Final,
        Some(ThisMember) => Verdict::Elsewhere,
        Some(ThisMemberUnlessPassedOn) if answers_before_passing_on(asked) => Verdict::Elsewhere,
        Some(ThisMemberUnlessPassedOn | Proves::Nothing) => Verdict::Unclear,
        None => by_code(asked.effect, status),
    }
}

/// What the code alone says, where the text says nothing.
fn by_code(effect: Effect, status: &Status) -> Verdict {
    match (status.code, effect) {
        (Code::Unavailable, Effect::ReadOnly) => Verdict::Elsewhere,
        (_, Effect::ReadOnly) => Verdict::Final,
        (
            Code::Unavailable
            | Code::Canceled
            | Code::DeadlineExceeded
            | Code::Unknown
            | Code::Internal
            | Code::Aborted,
            _,
        ) => Verdict::Unclear,
        _ => Verdict::Final,
    }
}

/// Whether `status` says no more than that a user or role changed while the call was under way: the next one may pass
/// with the same credential, and where changes come in a row, only the one after that.
#[must_use]
pub fn is_outdated(asked: &Asked, status: &Status) -> bool {
    find(asked.method, status).is_some_and(|row| OUTDATED.contains(&row.text))
}

/// UserAdd says "user name is empty" also of a request that names nobody.
fn names_a_new_user(method: &Method) -> bool {
    method.body == MessageId::AuthUserAddRequest
}

/// `no leader` proves nothing where it may come from a member that had passed the call on (MemberPromote), or
/// that we have no facts about.
fn answers_before_passing_on(asked: &Asked) -> bool {
    const SERVICES: [&str; 3] = ["etcdserverpb.KV", "etcdserverpb.Lease", "etcdserverpb.Auth"];
    asked.effect == Effect::ReadOnly || SERVICES.contains(&asked.method.service)
}

/// The status that the client gets in place of `status`; `None` where it gets that one.
///
/// `client_caused`: the client's own deadline or cancel ended the call. Where it did not, a write must not end with
/// DeadlineExceeded or Canceled: clientv3 sends it again on those.
#[must_use]
pub fn translate(asked: &Asked, status: &Status, client_caused: bool) -> Option<Status> {
    if let Some(row) = find(asked.method, status) {
        return row.becomes.as_ref().map(Refusal::status);
    }
    let gave_up = match status.code {
        Code::DeadlineExceeded | Code::Canceled => true,
        // 3.4's form of the first.
        Code::Unknown => status.message == Refusal::DEADLINE_EXCEEDED.message(),
        _ => false,
    };
    let translated = gave_up && !client_caused && asked.effect != Effect::ReadOnly;
    translated.then(|| Refusal::REQUEST_TIMED_OUT.status())
}

/// Whether a status that leaves a call's outcome open speaks of the member or the cluster, not of the request: what is
/// the same twice as once may then be asked again. The Lock and Election services tell nearly everything with code
/// Unknown, so there the text decides.
#[must_use]
pub fn is_trouble(status: &Status) -> bool {
    match status.code {
        Code::Unavailable | Code::Canceled | Code::DeadlineExceeded | Code::Internal | Code::Aborted => true,
        Code::Unknown => TROUBLE.contains(&&*status.message),
        _ => false,
    }
}

/// Whether the member gave up waiting: for a quorum, for its own store.
#[must_use]
pub fn is_timeout(status: &Status) -> bool {
    status.message.starts_with(Refusal::REQUEST_TIMED_OUT.message())
        || status.message == Refusal::DEADLINE_EXCEEDED.message()
}

/// What etcd's own client tells those services (server/etcdserver/errors, client/v3/concurrency/key.go).
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

/// Whether a Lock or Campaign was refused by the watch that its member makes for it. A member has one stream for all of
/// those, and looks at the token of whoever opened it (etcd-io/etcd#14850): the refusal may be meant for another.
#[must_use]
pub fn is_of_shared_watch(status: &Status) -> bool {
    // A watch's cancel_reason, as its text.
    status.code == Code::Unknown && status.message.starts_with("rpc error: code = ")
}

/// What `status` tells about authentication on the cluster, if anything. (A refused token tells nothing: old
/// members refuse a stale one with authentication off, too.)
#[must_use]
pub fn auth_state(asked: &Asked, status: &Status) -> Option<AuthState> {
    if asked.method.body == MessageId::AuthenticateRequest && *status == Refusal::AUTH_NOT_ENABLED.status() {
        return Some(AuthState::Off);
    }
    let missing = find(asked.method, status).is_some_and(|row| row.proves == CredentialMissing);
    (missing && asked.proof == Proof::NoToken && !names_a_new_user(asked.method)).then_some(AuthState::On)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::method::{METHODS, lookup};

    fn asked(path: &str, proof: Proof) -> Asked {
        let method = lookup(path).unwrap();
        Asked { method, effect: method.effect, proof }
    }

    fn put() -> Asked {
        asked("/etcdserverpb.KV/Put", Proof::Token)
    }

    fn range() -> Asked {
        asked("/etcdserverpb.KV/Range", Proof::Token)
    }

    fn lock() -> Asked {
        asked("/v3lockpb.Lock/Lock", Proof::Token)
    }

    fn promote() -> Asked {
        asked("/etcdserverpb.Cluster/MemberPromote", Proof::Token)
    }

    fn login() -> Asked {
        asked("/etcdserverpb.Auth/Authenticate", Proof::NoToken)
    }

    fn keep_alive() -> Asked {
        asked("/etcdserverpb.Lease/LeaseKeepAlive", Proof::Token)
    }

    fn defragment() -> Asked {
        asked("/etcdserverpb.Maintenance/Defragment", Proof::Token)
    }

    fn status(code: Code, message: &'static str) -> Status {
        Status { code, message: message.into() }
    }

    type Fact = (Asked, Code, &'static str, Verdict);

    /// The auth error table, written out again from the facts and not from the table above.
    fn facts_about_credentials() -> Vec<Fact> {
        use Code::{InvalidArgument, PermissionDenied, Unauthenticated, Unknown};
        use Verdict::{Final, Heal, Unclear};
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

    /// What a member says that cannot do it.
    fn facts_about_members() -> Vec<Fact> {
        use Code::{FailedPrecondition, ResourceExhausted, Unavailable, Unknown};
        use Verdict::{Elsewhere, Final, Unclear};
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

    /// What leaves the outcome of a write open, and what is simply an answer.
    fn facts_about_outcomes() -> Vec<Fact> {
        use Code::{
            Canceled, DataLoss, DeadlineExceeded, Internal, InvalidArgument, NotFound, OutOfRange,
            ResourceExhausted, Unavailable, Unknown,
        };
        use Verdict::{Final, Unclear};
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
            assert_eq!(verdict(&range(), &status(Code::Unavailable, text)), Verdict::Elsewhere, "{text}");
        }
        assert_eq!(verdict(&range(), &Refusal::DEADLINE_EXCEEDED.status()), Verdict::Final);
        assert_eq!(verdict(&range(), &status(Code::Unknown, "x")), Verdict::Final);
        let reading_txn = Asked { effect: Effect::ReadOnly, ..asked("/etcdserverpb.KV/Txn", Proof::Token) };
        assert_eq!(verdict(&reading_txn, &Refusal::REQUEST_TIMED_OUT.status()), Verdict::Elsewhere);
    }

    /// Without a token it is the truth, and says that authentication is on.
    #[test]
    fn an_empty_user_heals_only_where_a_token_was_sent() {
        let empty = Refusal::USER_EMPTY.status();
        let bare = Asked { proof: Proof::NoToken, ..put() };
        assert_eq!(verdict(&put(), &empty), Verdict::Heal);
        assert_eq!(verdict(&bare, &empty), Verdict::Final);
        assert_eq!(auth_state(&bare, &empty), Some(AuthState::On));
        assert_eq!(auth_state(&put(), &empty), None);
        // A UserAdd that names nobody gets the same words; no login helps.
        for proof in [Proof::Token, Proof::NoToken] {
            let user_add = asked("/etcdserverpb.Auth/UserAdd", proof);
            assert_eq!(verdict(&user_add, &empty), Verdict::Final);
            assert_eq!(auth_state(&user_add, &empty), None);
        }
    }

    #[test]
    fn a_login_tells_that_authentication_is_off() {
        assert_eq!(auth_state(&login(), &Refusal::AUTH_NOT_ENABLED.status()), Some(AuthState::Off));
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

    /// Rules 7: everything else untouched.
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

    /// No method's success is anything but final.
    #[test]
    fn ok_is_final_for_every_method() {
        for method in METHODS {
            let asked = Asked { method, effect: method.effect, proof: Proof::Token };
            assert_eq!(verdict(&asked, &status(Code::Ok, "")), Verdict::Final);
            assert_eq!(translate(&asked, &status(Code::Ok, ""), false), None);
        }
    }
}
