//! Calls of unknown methods, passed on as they are.
//!
//! Owns: the way of such a call. Must not know: messages. Invariant: the call is sent once, with its
//! frames as received.

use http::uri::PathAndQuery;

use crate::call::Call;
use crate::pipeline_result::PipelineResult;
use crate::unread_need::UnreadRoomNeed;
use crate::{audited_request, local_reads, permission, usage_limits};
use keyward_cluster::choose::MemberTarget;
use keyward_downstream::client_body::ClientBody;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::method::Lane;
use keyward_upstream::answer::MemberReply;
use keyward_upstream::send::{NoReply, upstream_headers};
use keyward_upstream::upstream_request::UpstreamRequestBody;

/// Passes the call on to `path`, without retries.
///
/// # Errors
/// No member answered, or the caller is not accepted.
pub async fn serve(
    call: &Call<'_>,
    path: Option<&PathAndQuery>,
    body: ClientBody,
) -> Result<PipelineResult, Refusal> {
    // Every other body is that of a method with a row.
    let ClientBody::Http2(body) = body else { return Err(Refusal::malformed_path(call.path)) };
    let (gateway, client) = (call.gateway, call.client);
    let mut caller = call.identify().await?;
    usage_limits::admit(call, &caller)?;
    if let Some(room) = audited_request::begin(call, call.method.effect, None) {
        caller = audited_request::identify_after(call, Some(room)).await?;
    }
    local_reads::refuse_method(call)?;
    let path = path.cloned().ok_or_else(|| Refusal::malformed_path(""))?;
    let member = gateway.upstream.choose(MemberTarget::Any, &[]).ok_or(Refusal::NOTHING_SENT)?;
    let permit = permission::of_unknown_method(call, &caller)?;
    let registration = gateway.enter(client, &caller, None, &call.record)?;
    call.record.count_attempt(member.id);
    let shown = gateway.upstream.credential_for(&caller.upstream_user, &member).await.map_err(|failure| {
        if failure.is_refusal() { Refusal::INVALID_AUTH_TOKEN } else { Refusal::NOTHING_SENT }
    })?;
    let mut head_upstream = upstream_headers(call.headers, &shown, permit);
    // The frames are passed through unchanged, so the member must know their compression.
    for name in ["grpc-encoding", "grpc-accept-encoding"] {
        if let Some(value) = call.headers.get(name) {
            head_upstream.fields.insert(name, value.clone());
        }
    }
    let sent = gateway
        .upstream
        .send(&member, Lane::Stream, path, head_upstream, UpstreamRequestBody::Piped(body))
        .await;
    match sent {
        Ok((response, _)) if !response.status().is_success() => {
            Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST)
        }
        Ok((response, in_flight)) => {
            let answer = MemberReply::opened(response, in_flight);
            let room = client.unread.wait_beyond(UnreadRoomNeed::of_stream(Lane::Stream)).await;
            let room = room.ok_or(Refusal::TOO_MANY_REQUESTS)?;
            Ok(PipelineResult::Member(answer, caller.in_use(), registration, Some(room)))
        }
        Err(NoReply::NeverSent(_) | NoReply::NotShown(_)) => Err(Refusal::NOTHING_SENT),
        Err(NoReply::NotAccepted(_)) => Err(Refusal::CERTIFICATE_NOT_ACCEPTED),
        Err(NoReply::NoRoom) => Err(Refusal::TOO_MANY_REQUESTS),
        Err(NoReply::Lost(_)) => Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST),
    }
}
