//! Taking a member out of service, defragmenting the member, and returning the member to service.
//!
//! Owns: the order of these steps. Must not know: the next member. Invariants: no call is sent to the member
//! from the moment of taking it out of service until the member has caught up with the cluster; if no other
//! voter is ready, the member stays in service; the guard restores service when dropped, even after a
//! failure.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};

use super::DefragmentFailure;
use keyward_cluster::fitness::quarantine::MaintenanceGuard;
use keyward_cluster::membership::{Member, MembersHandle, MembershipHint, Readiness};
use keyward_upstream::own_requests::{self, ReadError};
use keyward_upstream::send::{UpstreamClient, UpstreamUser};

const DEFRAGMENT: &str = "/etcdserverpb.Maintenance/Defragment";
/// How long to wait for calls in flight: etcd's own limit for a request. A snapshot may take longer; only
/// this snapshot is slowed down then.
const CALLS: Duration = Duration::from_secs(7);
/// How often to check for calls in flight. The member must be idle in two checks in a row: a shard may have
/// chosen the member just before the member was taken out of service, and send the call just afterwards.
const LOOK: Duration = Duration::from_millis(10);
/// How long a member may take to serve again.
const BACK: Duration = Duration::from_secs(60);
/// The key of the linearizable read testing the member, as used by etcd's own health check.
const KEY: &[u8] = b"health";

/// Guard keeping the member out of every shard's choice.
pub struct DrainedMember {
    members: MembersHandle,
    resting: Option<MaintenanceGuard>,
}

impl DrainedMember {
    /// Takes the member out of service, unless no other voter is ready.
    #[must_use]
    pub fn new(upstream: &UpstreamClient, member: &Arc<Member>) -> Self {
        let resting = member.maintenance.open();
        let members = upstream.members.clone();
        members.maintenance_changed();
        let others = members.snapshot.load().ready_voters().next().is_some();
        let freed = Self { members, resting: Some(resting) };
        // A slow member is better than no member.
        if others { freed } else { Self { members: freed.members.clone(), resting: None } }
    }

    /// True if the member is out of service.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.resting.is_some()
    }
}

impl Drop for DrainedMember {
    fn drop(&mut self) {
        if self.resting.take().is_some() {
            self.members.maintenance_changed();
        }
    }
}

/// Takes the member out of service, defragments the member, and restores service once the member answers
/// reads. Returns the member's unframed answer.
pub(super) async fn defragment(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    member: &Arc<Member>,
    may_begin: impl Fn() -> bool,
) -> Result<Bytes, DefragmentFailure> {
    let freed = DrainedMember::new(upstream, member);
    if freed.is_free() && timeout(CALLS, idle(member)).await.is_err() {
        let name = &*member.name;
        tracing::info!(member = %member.id, name, "calls go on at a member that is about to be defragmented");
    }
    if !may_begin() {
        return Err(DefragmentFailure::NoTime);
    }
    let began = Instant::now();
    // No time limit: only the member knows the duration, and the connection's pings detect a lost member.
    let answer = own_requests::ask_patiently(upstream, user, member, DEFRAGMENT, &[]).await;
    tracing::debug!(member = %member.id, took = ?began.elapsed(), ok = answer.is_ok(), "defragment");
    let refused = matches!(answer, Err(ReadError::Refused(_)));
    // A refused request has not stalled the member.
    if !refused && timeout(BACK, back(upstream, user, member)).await.is_err() {
        let answered = answer.map(drop).map_err(DefragmentFailure::from);
        return Err(answered
            .err()
            .unwrap_or(DefragmentFailure::NotReady(super::member_label(&member.name, member.id))));
    }
    Ok(answer?)
}

/// Waits until no call is in flight at the member.
pub async fn idle(member: &Member) {
    let mut quiet = 0;
    while quiet < 2 {
        quiet = if member.maintenance.busy() == 0 { quiet + 1 } else { 0 };
        sleep(LOOK).await;
    }
}

/// Waits until a probe begun after this call has succeeded and a linearizable read at the member has
/// returned.
async fn back(upstream: &Rc<UpstreamClient>, user: &UpstreamUser, member: &Arc<Member>) {
    member.suspect();
    loop {
        upstream.members.hints.send(MembershipHint::Unreachable(member.id));
        let known = upstream.members.snapshot.load().get(member.id).cloned();
        let serves =
            |known: &Arc<Member>| known.readiness == Readiness::Ready && !known.suspicion.is_raised();
        if let Some(known) = known.filter(serves) {
            match own_requests::linearizable_revision(upstream, user, &known, KEY).await {
                // A permission error also proves a completed consensus round, as in `etcdctl endpoint
                // health`.
                Ok(_) | Err(ReadError::Refused(_)) => return,
                Err(_) => {}
            }
        }
        upstream.members.pause_or_change(Duration::from_millis(200)).await;
    }
}
