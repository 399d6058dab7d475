//! The calls of a probe, and what etcd's answers and refusals mean.
//!
//! Owns: each request, and reading its answer. Must not know: in which order they are made, what was heard before.
//! Invariant: none of them writes.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tonic::metadata::{AsciiMetadataValue, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use super::{Refusal, Silence};
use crate::identity::{ClusterId, MemberId};
use crate::pb::etcdserverpb::cluster_client::ClusterClient;
use crate::pb::etcdserverpb::kv_client::KvClient;
use crate::pb::etcdserverpb::maintenance_client::MaintenanceClient;
use crate::pb::etcdserverpb::watch_client::WatchClient;
use crate::pb::etcdserverpb::watch_request::RequestUnion;
use crate::pb::etcdserverpb::{
    MemberListRequest, MemberListResponse, RangeRequest, RangeResponse, ResponseHeader, StatusRequest,
    StatusResponse, WatchCreateRequest, WatchRequest,
};
use crate::upstream::members::census::{Answer, Listed, Sight};
use crate::upstream::membership::Role;
use crate::upstream::version::Version;
use crate::upstream::vitals::Vitals;

/// Members of a list. Real clusters have at most some nine.
const LISTED: usize = 64;

pub(super) async fn status(
    channel: Channel,
    token: Option<AsciiMetadataValue>,
) -> Result<Response<StatusResponse>, Status> {
    MaintenanceClient::new(channel).status(with_token(StatusRequest {}, token)).await
}

pub(super) async fn member_list(
    channel: Channel,
    token: Option<AsciiMetadataValue>,
) -> Result<Response<MemberListResponse>, Status> {
    ClusterClient::new(channel)
        .member_list(with_token(MemberListRequest { linearizable: false }, token))
        .await
}

pub(super) async fn member_list_with_leader(
    channel: Channel,
    token: Option<AsciiMetadataValue>,
) -> Result<Response<MemberListResponse>, Status> {
    let mut request = with_token(MemberListRequest { linearizable: false }, token);
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    ClusterClient::new(channel).member_list(request).await
}

/// The cheapest read: a count of one key of the member's own store. Never with a token.
pub(super) async fn peek(channel: Channel) -> Result<Response<RangeResponse>, Status> {
    let request = Request::new(RangeRequest {
        key: b"\0".as_slice().into(),
        limit: 1,
        serializable: true,
        count_only: true,
        ..RangeRequest::default()
    });
    KvClient::new(channel).range(request).await
}

/// What every version tells to anybody: the answer that refuses a watch for want of a user has a header. Where it is allowed
/// instead, by a certificate or since auth is off, the watch ends with its stream. Never with a token. No empty transaction, though
/// that is answered too: at a member that is out of space it raises the alarm.
pub(super) async fn header_of_a_watch(channel: Channel) -> Option<ResponseHeader> {
    let create = WatchCreateRequest { key: b"\0".as_slice().into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    // The requests end with this function, also where it is given up: a stream whose requests do not end keeps its connection open.
    let (open, closed) = oneshot::channel::<()>();
    let end = stream::once(closed).filter_map(async |_| None);
    let requests = stream::iter([create]).chain(end);
    let mut answers = WatchClient::new(channel).watch(requests).await.ok()?.into_inner();
    let header = answers.message().await.ok()??.header;
    drop(open);
    header
}

pub(super) fn with_token<T>(message: T, token: Option<AsciiMetadataValue>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token);
    }
    request
}

/// What a call without a result means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    BadToken,
    NoUser,
    Denied,
    Learner,
    NoLeader,
    Gone,
    Late,
}

pub(super) async fn limited<T>(
    limit: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Heard> {
    match timeout(limit, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(heard(&status)),
        Err(_) => Err(Heard::Late),
    }
}

/// By etcd's texts (rpctypes/error.go, and auth/store.go where a version passes them on raw).
pub(super) fn heard(status: &Status) -> Heard {
    match status.message() {
        "etcdserver: user name is empty" | "auth: user name is empty" => Heard::NoUser,
        "etcdserver: invalid auth token"
        | "auth: invalid auth token"
        | "etcdserver: revision of auth store is old"
        | "auth: revision in header is old" => Heard::BadToken,
        "etcdserver: permission denied"
        | "auth: permission denied"
        | "etcdserver: user name not found"
        | "auth: user not found" => Heard::Denied,
        "etcdserver: rpc not supported for learner" => Heard::Learner,
        "etcdserver: no leader" => Heard::NoLeader,
        _ => Heard::Gone,
    }
}

/// Whether etcd said no to this name and password (and so has auth on).
pub(super) fn is_refused_login(status: &Status) -> bool {
    matches!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password")
            | (Code::Unknown, "auth: authentication failed, password was given for no password user")
    )
}

pub(super) fn told_by_status(status: &StatusResponse, took: Duration) -> Option<Answer> {
    let header = status.header.as_ref()?;
    Some(Answer {
        member: MemberId(header.member_id),
        cluster: Some(ClusterId(header.cluster_id)),
        version: Version::parse(&status.version).ok(),
        role: role(status.is_learner),
        leader: if status.leader == 0 { Sight::Nobody } else { Sight::Member(MemberId(status.leader)) },
        term: status.raft_term,
        vitals: Some(Arc::new(Vitals::read(status, took))),
    })
}

/// Whether a member is in the list that it gives itself. Without a header it cannot be told who gave it.
pub(super) fn is_in_its_list(list: &MemberListResponse) -> bool {
    list.header.as_ref().is_none_or(|header| list.members.iter().any(|member| member.id == header.member_id))
}

/// What a member list alone tells of who gave it: nothing that would let it take traffic.
pub(super) fn told_by_list(list: &MemberListResponse) -> Option<Answer> {
    let header = list.header.as_ref()?;
    Some(Answer {
        member: MemberId(header.member_id),
        cluster: Some(ClusterId(header.cluster_id)),
        version: None,
        role: Role::Voter,
        leader: Sight::Nobody,
        term: header.raft_term,
        vitals: None,
    })
}

/// A list that is longer than any real one is none.
pub(super) fn listed(list: &MemberListResponse) -> Result<Vec<Listed>, Refusal> {
    if list.members.len() > LISTED {
        return Err(Refusal::Silent(Silence::Gone));
    }
    let members = list.members.iter().map(|member| Listed {
        id: MemberId(member.id),
        name: member.name.as_str().into(),
        role: role(member.is_learner),
        client_urls: member.client_ur_ls.clone().into(),
        peer_urls: member.peer_ur_ls.clone().into(),
    });
    Ok(members.collect())
}

pub(super) fn role(is_learner: bool) -> Role {
    if is_learner { Role::Learner } else { Role::Voter }
}
