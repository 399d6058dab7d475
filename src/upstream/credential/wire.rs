//! The two calls that credentials make: log in, and touch a token.
//!
//! Owns: their requests, and what etcd's answers to them mean (code and text, as etcd's rpctypes/error.go and
//! auth/store.go have them). Must not know: when they are made.
//! Invariant: a login never carries a token: 3.4.23 fails, or hangs, on a stale one.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::HeaderValue;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::{LoginFailure, Token};
use crate::identity::{MemberId, UserName};
use crate::pb::etcdserverpb::auth_client::AuthClient;
use crate::pb::etcdserverpb::kv_client::KvClient;
use crate::pb::etcdserverpb::{AuthenticateRequest, RangeRequest};
use crate::secret::Secret;

/// The control runtime's channel to each member; whoever knows the members publishes them.
#[derive(Clone, Default)]
pub struct ControlChannels(Arc<ArcSwap<HashMap<MemberId, Channel>>>);

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

impl ControlChannels {
    /// Replaces the channels of all members.
    pub fn publish(&self, channels: HashMap<MemberId, Channel>) {
        self.0.store(Arc::new(channels));
    }

    pub(super) fn of(&self, member: MemberId) -> Option<Channel> {
        self.0.load().get(&member).cloned()
    }
}

/// Logs in. 50 ms of bcrypt on that member, and a raft entry.
pub(super) async fn authenticate(
    channel: Channel,
    user: &UserName,
    password: &Secret<String>,
) -> Result<HeaderValue, LoginFailure> {
    let request =
        AuthenticateRequest { name: user.as_str().to_owned(), password: password.expose().clone() };
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
        (Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password") => LoginFailure::WrongPassword,
        (Code::Unknown, "auth: authentication failed, password was given for no password user") => {
            LoginFailure::NoPassword
        }
        (Code::FailedPrecondition, "etcdserver: authentication is not enabled") => LoginFailure::AuthDisabled,
        _ => LoginFailure::Unavailable(status),
    }
}

fn touched(status: &Status) -> Touched {
    match (status.code(), status.message()) {
        (Code::PermissionDenied, "etcdserver: permission denied") => Touched::Alive,
        (Code::Unauthenticated, "etcdserver: invalid auth token")
        | (Code::InvalidArgument, "etcdserver: user name is empty")
        // Where etcd's tokens are JWTs: every change of users or roles ends them.
        | (Code::InvalidArgument, "etcdserver: revision of auth store is old")
        | (Code::Unknown, "auth: revision in header is old") => Touched::Dead,
        _ => Touched::Unknown,
    }
}

impl fmt::Debug for ControlChannels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.load().keys()).finish()
    }
}
