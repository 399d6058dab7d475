//! The calls made by credentials: log in, touch a token, ask for the auth revision.
//!
//! Owns: the requests, and the meaning of etcd's answers (code and text). Must not know: the schedule of
//! calls. Invariant: a login never carries a token, because etcd 3.4.23 fails or hangs on a stale token.

use http::HeaderValue;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::{LoginFailure, Token};
use keyward_base::secret::Secret;
use keyward_etcd::identity::UserName;
use keyward_etcd::pb::etcdserverpb::auth_client::AuthClient;
use keyward_etcd::pb::etcdserverpb::kv_client::KvClient;
use keyward_etcd::pb::etcdserverpb::{
    AuthStatusRequest, AuthUserGetRequest, AuthUserListRequest, AuthenticateRequest, RangeRequest,
};
use keyward_etcd::refusal::Refusal;

/// The verdict of a touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TouchVerdict {
    /// etcd knows the token; the touch extended the token's life.
    Alive,
    /// etcd does not know the token.
    Dead,
    /// The member did not get as far as checking the token.
    Unknown,
}

/// A member's answer to AuthStatus.
#[derive(Debug)]
pub(super) enum AuthStatusAnswer {
    /// The auth revision.
    Revision(u64),
    /// Auth is off.
    Disabled,
    /// The member has no AuthStatus RPC (before 3.5), or denied the call.
    Unknown,
    /// The member could not answer.
    Nothing(Option<Status>),
}

/// A member's answer about a user's roles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RolesAnswer {
    /// The names of the roles.
    Roles(Vec<String>),
    /// The user does not exist.
    NoUser,
    /// The caller was denied, or no answer arrived.
    Unknown,
}

/// Asks for a user's roles. Only root and the user may see the roles.
pub(super) async fn roles(channel: Channel, token: &Token, user: &UserName) -> RolesAnswer {
    let Ok(header) = AsciiMetadataValue::try_from(token.header().as_bytes()) else {
        return RolesAnswer::Unknown;
    };
    let mut request = Request::new(AuthUserGetRequest { name: user.as_str().to_owned() });
    request.metadata_mut().insert("token", header);
    match AuthClient::new(channel).user_get(request).await {
        Ok(answer) => RolesAnswer::Roles(answer.into_inner().roles),
        Err(status) if status.message() == "etcdserver: user name not found" => RolesAnswer::NoUser,
        Err(_) => RolesAnswer::Unknown,
    }
}

/// Asks for all users. Only root may see all users.
pub(super) async fn users(channel: Channel, token: &Token) -> Option<Vec<UserName>> {
    let mut request = Request::new(AuthUserListRequest::default());
    request.metadata_mut().insert("token", AsciiMetadataValue::try_from(token.header().as_bytes()).ok()?);
    let answer = AuthClient::new(channel).user_list(request).await.ok()?;
    Some(answer.into_inner().users.iter().map(|name| UserName::from(name.as_str())).collect())
}

/// Asks for the auth revision. Costs a raft entry.
pub(super) async fn auth_status(channel: Channel, token: &HeaderValue) -> AuthStatusAnswer {
    let Ok(header) = AsciiMetadataValue::try_from(token.as_bytes()) else { return AuthStatusAnswer::Unknown };
    let mut request = Request::new(AuthStatusRequest::default());
    request.metadata_mut().insert("token", header);
    match AuthClient::new(channel).auth_status(request).await.map(tonic::Response::into_inner) {
        Ok(answer) if !answer.enabled => AuthStatusAnswer::Disabled,
        Ok(answer) => AuthStatusAnswer::Revision(answer.auth_revision),
        Err(status) if matches!(status.code(), Code::Unimplemented | Code::PermissionDenied) => {
            AuthStatusAnswer::Unknown
        }
        Err(status) => AuthStatusAnswer::Nothing(Some(status)),
    }
}

/// Logs in. Costs the member 50 ms of bcrypt, and a raft entry.
pub(super) async fn authenticate(
    channel: Channel,
    user: &UserName,
    password: &Secret<String>,
) -> Result<HeaderValue, LoginFailure> {
    let request = AuthenticateRequest { name: user.as_str().to_owned(), password: password.expose().clone() };
    let token =
        AuthClient::new(channel).authenticate(request).await.map_err(login_failure)?.into_inner().token;
    // An empty token would be refused on every call; etcd issues no empty tokens.
    HeaderValue::try_from(token).ok().filter(|token| !token.is_empty()).ok_or(LoginFailure::NoAnswer)
}

/// Uses `token` on the member at the lowest cost etcd offers: a serializable count of one key. Needs no
/// permission, because a read denied by etcd also extends the token.
pub(super) async fn touch(channel: Channel, token: &Token) -> TouchVerdict {
    let Ok(header) = AsciiMetadataValue::try_from(token.header().as_bytes()) else {
        return TouchVerdict::Dead;
    };
    let mut request = Request::new(RangeRequest {
        key: b"\0".as_slice().into(),
        limit: 1,
        serializable: true,
        count_only: true,
        ..RangeRequest::default()
    });
    request.metadata_mut().insert("token", header);
    match KvClient::new(channel).range(request).await {
        Ok(_) => TouchVerdict::Alive,
        Err(status) => touch_verdict(&status),
    }
}

fn login_failure(status: Status) -> LoginFailure {
    match (status.code(), status.message()) {
        _ if matches_refusal(&status, &Refusal::AUTH_FAILED) => LoginFailure::WrongPassword,
        _ if matches_refusal(&status, &Refusal::AUTH_NOT_ENABLED) => LoginFailure::AuthDisabled,
        // etcd maps this error to no error of its API, in any version.
        (Code::Unknown, "auth: authentication failed, password was given for no password user") => {
            LoginFailure::NoPassword
        }
        _ => LoginFailure::Unavailable(status),
    }
}

fn touch_verdict(status: &Status) -> TouchVerdict {
    match (status.code(), status.message()) {
        _ if matches_refusal(status, &Refusal::PERMISSION_DENIED) => TouchVerdict::Alive,
        _ if matches_refusal(status, &Refusal::INVALID_AUTH_TOKEN) => TouchVerdict::Dead,
        _ if matches_refusal(status, &Refusal::USER_EMPTY) => TouchVerdict::Dead,
        // With JWT tokens at etcd, every change of users or roles invalidates all tokens. etcd 3.5.0 and
        // 3.5.1 send the raw error text.
        _ if matches_refusal(status, &Refusal::AUTH_OLD_REVISION) => TouchVerdict::Dead,
        (Code::Unknown, "auth: revision in header is old") => TouchVerdict::Dead,
        _ => TouchVerdict::Unknown,
    }
}

fn matches_refusal(status: &Status, refusal: &Refusal) -> bool {
    status.code() as u8 == refusal.code() as u8 && status.message() == refusal.message()
}
