//! The calls that credentials make: log in, touch a token, ask for the auth revision.
//!
//! Owns: their requests, and what etcd's answers to them mean (code and text). Must not know: when they are made.
//! Invariant: a login never carries a token: 3.4.23 fails, or hangs, on a stale one.

use http::HeaderValue;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::{LoginFailure, Token};
use crate::identity::UserName;
use crate::pb::etcdserverpb::auth_client::AuthClient;
use crate::pb::etcdserverpb::kv_client::KvClient;
use crate::pb::etcdserverpb::{
    AuthStatusRequest, AuthUserGetRequest, AuthUserListRequest, AuthenticateRequest, RangeRequest,
};
use crate::refusal::Refusal;
use crate::secret::Secret;

/// What a touch found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touched {
    /// etcd knows the token, and has extended its life by asking.
    Alive,
    /// etcd does not know the token.
    Dead,
    /// The member did not get as far as to look.
    Unknown,
}

/// What a member said of auth.
#[derive(Debug)]
pub(super) enum AuthSaid {
    /// The revision of users and roles.
    Revision(u64),
    /// Auth is off.
    Disabled,
    /// There is no such call before 3.5, or it is not for us.
    Unknown,
    /// It could not say.
    Nothing(Option<Status>),
}

/// What a member said of a user's roles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Roles {
    /// Their names.
    Told(Vec<String>),
    /// There is no such user.
    NoUser,
    /// It is not for whoever asked, or there was no answer.
    Untold,
}

/// Asks for a user's roles, which root and the user itself may see.
pub(super) async fn roles(channel: Channel, token: &Token, user: &UserName) -> Roles {
    let Ok(header) = AsciiMetadataValue::try_from(token.header().as_bytes()) else { return Roles::Untold };
    let mut request = Request::new(AuthUserGetRequest { name: user.as_str().to_owned() });
    request.metadata_mut().insert("token", header);
    match AuthClient::new(channel).user_get(request).await {
        Ok(answer) => Roles::Told(answer.into_inner().roles),
        Err(status) if status.message() == "etcdserver: user name not found" => Roles::NoUser,
        Err(_) => Roles::Untold,
    }
}

/// Asks for all users, which root may see.
pub(super) async fn users(channel: Channel, token: &Token) -> Option<Vec<UserName>> {
    let mut request = Request::new(AuthUserListRequest::default());
    request.metadata_mut().insert("token", AsciiMetadataValue::try_from(token.header().as_bytes()).ok()?);
    let answer = AuthClient::new(channel).user_list(request).await.ok()?;
    Some(answer.into_inner().users.iter().map(|name| UserName::from(name.as_str())).collect())
}

/// Asks for the auth revision. A raft entry.
pub(super) async fn auth_status(channel: Channel, token: &HeaderValue) -> AuthSaid {
    let Ok(header) = AsciiMetadataValue::try_from(token.as_bytes()) else { return AuthSaid::Unknown };
    let mut request = Request::new(AuthStatusRequest::default());
    request.metadata_mut().insert("token", header);
    match AuthClient::new(channel).auth_status(request).await.map(tonic::Response::into_inner) {
        Ok(said) if !said.enabled => AuthSaid::Disabled,
        Ok(said) => AuthSaid::Revision(said.auth_revision),
        Err(status) if matches!(status.code(), Code::Unimplemented | Code::PermissionDenied) => {
            AuthSaid::Unknown
        }
        Err(status) => AuthSaid::Nothing(Some(status)),
    }
}

/// Logs in. 50 ms of bcrypt on that member, and a raft entry.
pub(super) async fn authenticate(
    channel: Channel,
    user: &UserName,
    password: &Secret<String>,
) -> Result<HeaderValue, LoginFailure> {
    let request = AuthenticateRequest { name: user.as_str().to_owned(), password: password.expose().clone() };
    let token = AuthClient::new(channel).authenticate(request).await.map_err(failure)?.into_inner().token;
    // An empty token would be refused on every call; etcd gives none.
    HeaderValue::try_from(token).ok().filter(|token| !token.is_empty()).ok_or(LoginFailure::NoAnswer)
}

/// Uses `token` on the member, as cheaply as etcd can: a count of one key of its own store. It needs no rights, as
/// a read that etcd denies extends the token too.
pub(super) async fn touch(channel: Channel, token: &Token) -> Touched {
    let Ok(header) = AsciiMetadataValue::try_from(token.header().as_bytes()) else { return Touched::Dead };
    let mut request = Request::new(RangeRequest {
        key: b"\0".as_slice().into(),
        limit: 1,
        serializable: true,
        count_only: true,
        ..RangeRequest::default()
    });
    request.metadata_mut().insert("token", header);
    match KvClient::new(channel).range(request).await {
        Ok(_) => Touched::Alive,
        Err(status) => touched(&status),
    }
}

fn failure(status: Status) -> LoginFailure {
    match (status.code(), status.message()) {
        _ if says(&status, &Refusal::AUTH_FAILED) => LoginFailure::WrongPassword,
        _ if says(&status, &Refusal::AUTH_NOT_ENABLED) => LoginFailure::AuthDisabled,
        // etcd maps this one to no error of its API, in any version.
        (Code::Unknown, "auth: authentication failed, password was given for no password user") => {
            LoginFailure::NoPassword
        }
        _ => LoginFailure::Unavailable(status),
    }
}

fn touched(status: &Status) -> Touched {
    match (status.code(), status.message()) {
        _ if says(status, &Refusal::PERMISSION_DENIED) => Touched::Alive,
        _ if says(status, &Refusal::INVALID_AUTH_TOKEN) => Touched::Dead,
        _ if says(status, &Refusal::USER_EMPTY) => Touched::Dead,
        // Where etcd's tokens are JWTs: every change of users or roles ends them all. 3.5.0 and 3.5.1 tell it raw.
        _ if says(status, &Refusal::AUTH_OLD_REVISION) => Touched::Dead,
        (Code::Unknown, "auth: revision in header is old") => Touched::Dead,
        _ => Touched::Unknown,
    }
}

fn says(status: &Status, refusal: &Refusal) -> bool {
    status.code() as u8 == refusal.code() as u8 && status.message() == refusal.message()
}
