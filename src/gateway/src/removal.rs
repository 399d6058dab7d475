//! MemberRemove: calls are moved off the member before the removal, because etcd stops a member on hearing of
//! its removal.
//!
//! Owns: the order of the steps. Must not know: how calls are moved off a member, how a call is tried.
//! Invariants: a member is taken out of service, and its probes are stopped, only for callers permitted to
//! remove a member; the member stays without calls and probes until the member list confirms the removal; the
//! removal waits at most a second for calls and probes in flight, and is then made in any case.

use std::time::Duration;

use tokio::time::timeout;

use crate::defragment::{self, DrainedMember};
use crate::exchange::Exchange;
use keyward_cluster::fitness::quarantine::MemberRemovalGuard;
use keyward_cluster::membership::MembersHandle;
use keyward_etcd::identity::MemberId;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::body_shape;
use keyward_upstream::answer::MemberReply;

/// How long to wait for calls in flight at the member: etcd answers nearly all calls faster, and operators'
/// tools give up after five seconds.
const CALLS: Duration = Duration::from_secs(1);
/// How long the member list may take to confirm the removal. Afterwards the member is probed again like any
/// listed member.
const GONE: Duration = Duration::from_secs(15);

/// The interval between looks at the member list, besides every change.
const LOOK: Duration = Duration::from_millis(200);

/// Takes the member out of service, and makes the call.
///
/// # Errors
/// As [`Exchange::run`].
pub async fn run(exchange: Exchange<'_>, message: &[u8]) -> Result<Box<MemberReply>, Refusal> {
    let gateway = exchange.call.gateway;
    let id = body_shape::member_id(message);
    let leaving = prepare(&exchange, id).await;
    let answer = exchange.run(None).await?;
    if let Some(leaving) = leaving
        && answer.is_success()
    {
        let members = gateway.upstream.members.clone();
        let keep = async move {
            drop(timeout(GONE, gone(&members, id)).await);
            drop(leaving);
        };
        gateway.tasks.spawn("a member that was removed", keep).detach();
    }
    Ok(answer)
}

/// Guard keeping calls and probes off a member about to be removed.
struct RemovalGuard {
    _probes: MemberRemovalGuard,
    /// `None` if the member takes no calls anyway.
    _calls: Option<DrainedMember>,
}

async fn prepare(exchange: &Exchange<'_>, id: MemberId) -> Option<RemovalGuard> {
    let upstream = &exchange.call.gateway.upstream;
    let member = upstream.members.snapshot.load().get(id).cloned()?;
    // Only permitted callers may take the member out of service. Otherwise the call goes to etcd unprepared,
    // and etcd decides.
    defragment::permitted(upstream, &exchange.user).await.ok()?;
    let probes = member.maintenance.begin_removal();
    let calls = member.is_ready().then(|| DrainedMember::new(upstream, &member));
    let waits = calls.as_ref().is_none_or(DrainedMember::is_free);
    if waits && timeout(CALLS, defragment::idle(&member)).await.is_err() {
        let name = &*member.name;
        tracing::info!(member = %id, name, "calls go on at a member that is about to be removed");
    }
    Some(RemovalGuard { _probes: probes, _calls: calls })
}

async fn gone(members: &MembersHandle, id: MemberId) {
    while members.snapshot.load().get(id).is_some_and(|member| member.is_listed()) {
        members.pause_or_change(LOOK).await;
    }
}
