//! The calls of a probe, and the meaning of etcd's answers and refusals.
//!
//! Owns: each request, and reading its answer. Must not know: the order of the calls, earlier answers.
//! Invariant: no call writes.

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

use super::{ProbeFailure, ProbeRefusal};
use crate::discovery::census::{LeaderView, ListedMember, MemberProbeAnswer};
use crate::fitness::store_status::StoreStatus;
use crate::membership::Role;
use crate::version::Version;
use keyward_etcd::identity::{ClusterId, MemberId};
use keyward_etcd::pb::etcdserverpb::cluster_client::ClusterClient;
use keyward_etcd::pb::etcdserverpb::kv_client::KvClient;
use keyward_etcd::pb::etcdserverpb::maintenance_client::MaintenanceClient;
use keyward_etcd::pb::etcdserverpb::watch_client::WatchClient;
use keyward_etcd::pb::etcdserverpb::watch_request::RequestUnion;
use keyward_etcd::pb::etcdserverpb::{
    MemberListRequest, MemberListResponse, RangeRequest, RangeResponse, ResponseHeader, StatusRequest,
    StatusResponse, WatchCreateRequest, WatchRequest,
};

/// Maximum length of a member list. Real clusters have at most some nine members.
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

/// The cheapest read: counts one key in the member's own store. Must be called without a token.
pub(super) async fn count_one_key(channel: Channel) -> Result<Response<RangeResponse>, Status> {
    let request = Request::new(RangeRequest {
        key: b"\0".as_slice().into(),
        limit: 1,
        serializable: true,
        count_only: true,
        ..RangeRequest::default()
    });
    KvClient::new(channel).range(request).await
}

/// Reads the response header of a refused watch: in every version, the answer refusing a watch without a user
/// has a header. If the watch is allowed, by a certificate or because auth is off, the watch ends with the
/// stream. Must be called without a token. An empty Txn would also return a header, but raises the alarm at a
/// member without free space.
pub(super) async fn header_of_a_watch(channel: Channel) -> Option<ResponseHeader> {
    let create = WatchCreateRequest { key: b"\0".as_slice().into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    // The request stream ends with this function, even if the function is cancelled: an unfinished request
    // stream would keep its connection open.
    let (open, closed) = oneshot::channel::<()>();
    let end = stream::once(closed).filter_map(async |_| None);
    let requests = stream::iter([create]).chain(end);
    let mut answers = WatchClient::new(channel).watch(requests).await.ok()?.into_inner();
    let header = answers.message().await.ok()??.header;
    drop(open);
    header
}

pub(in crate::discovery) fn with_token<T>(message: T, token: Option<AsciiMetadataValue>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token);
    }
    request
}

/// The meaning of a call without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::discovery) enum ProbeCallError {
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
) -> Result<T, ProbeCallError> {
    match timeout(limit, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(heard(&status)),
        Err(_) => Err(ProbeCallError::Late),
    }
}

/// Maps etcd's error texts (rpctypes/error.go, and auth/store.go in versions returning raw errors).
pub(in crate::discovery) fn heard(status: &Status) -> ProbeCallError {
    match status.message() {
        "etcdserver: user name is empty" | "auth: user name is empty" => ProbeCallError::NoUser,
        "etcdserver: invalid auth token"
        | "auth: invalid auth token"
        | "etcdserver: revision of auth store is old"
        | "auth: revision in header is old" => ProbeCallError::BadToken,
        "etcdserver: permission denied"
        | "auth: permission denied"
        | "etcdserver: user name not found"
        | "auth: user not found" => ProbeCallError::Denied,
        "etcdserver: rpc not supported for learner" => ProbeCallError::Learner,
        "etcdserver: no leader" => ProbeCallError::NoLeader,
        _ => ProbeCallError::Gone,
    }
}

/// True if etcd refused this name and password, which also proves that auth is on.
pub(in crate::discovery) fn is_refused_login(status: &Status) -> bool {
    matches!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password")
            | (Code::Unknown, "auth: authentication failed, password was given for no password user")
    )
}

pub(super) fn told_by_status(status: &StatusResponse, took: Duration) -> Option<MemberProbeAnswer> {
    let header = status.header.as_ref()?;
    Some(MemberProbeAnswer {
        member: MemberId(header.member_id),
        cluster: Some(ClusterId(header.cluster_id)),
        version: Version::parse(&status.version).ok(),
        role: role(status.is_learner),
        leader: if status.leader == 0 {
            LeaderView::Nobody
        } else {
            LeaderView::Member(MemberId(status.leader))
        },
        term: status.raft_term,
        store_status: Some(Arc::new(StoreStatus::read(status, took))),
    })
}

/// True if a member is in its own member list. A list without a header does not identify its sender, and is
/// accepted.
pub(super) fn is_in_its_list(list: &MemberListResponse) -> bool {
    list.header.as_ref().is_none_or(|header| list.members.iter().any(|member| member.id == header.member_id))
}

/// The answer derived from a member list alone; never enough for the member to become ready.
pub(super) fn told_by_list(list: &MemberListResponse) -> Option<MemberProbeAnswer> {
    let header = list.header.as_ref()?;
    Some(MemberProbeAnswer {
        member: MemberId(header.member_id),
        cluster: Some(ClusterId(header.cluster_id)),
        version: None,
        role: Role::Voter,
        leader: LeaderView::Nobody,
        term: header.raft_term,
        store_status: None,
    })
}

/// Converts a member list. A list longer than any real list is refused.
pub(super) fn listed(list: &MemberListResponse) -> Result<Vec<ListedMember>, ProbeRefusal> {
    if list.members.len() > LISTED {
        return Err(ProbeRefusal::Silent(ProbeFailure::Gone));
    }
    let members = list.members.iter().map(|member| ListedMember {
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
