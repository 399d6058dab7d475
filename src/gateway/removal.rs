//! MemberRemove: the member is freed of its calls before it goes, since it ends the moment that it hears of it.
//!
//! Owns: that order. Must not know: how a member is freed, how a call is tried. Invariants: nobody has a member freed, or its probes
//! stopped, who could not have it removed; the member stays free of calls and probes until the list says that it is gone; a removal
//! waits a second for calls and probes that go on, no longer, and is made whether or not they have ended.

use std::time::Duration;

use tokio::time::timeout;

use crate::gateway::access_log::Record;
use crate::gateway::defragment::{self, Freed};
use crate::gateway::exchange::Exchange;
use crate::identity::MemberId;
use crate::refusal::Refusal;
use crate::rpc::shape;
use crate::upstream::answer::Answer;
use crate::upstream::membership::MembersHandle;
use crate::upstream::standing::Removal;

/// The method's path.
pub const PATH: &str = "/etcdserverpb.Cluster/MemberRemove";
/// For calls under way at the member: etcd answers nearly all within it, and operators' tools wait for five seconds in all.
const CALLS: Duration = Duration::from_secs(1);
/// How long the list may take to say that the member is gone. Past it, whether it answers decides, as for any other.
const GONE: Duration = Duration::from_secs(15);

/// How often it is looked, beside every change.
const LOOK: Duration = Duration::from_millis(200);

/// Makes the call whose request this is; where it removes a member, has that freed before.
///
/// # Errors
/// As [`Exchange::run`].
pub async fn or_run(exchange: Exchange<'_>, message: &[u8], record: &mut Record) -> Result<Answer, Refusal> {
    if exchange.method.path == PATH {
        // Apart: no other call is to be as large.
        return Box::pin(removed(exchange, message, record)).await;
    }
    exchange.run(None, record).await
}

async fn removed(exchange: Exchange<'_>, message: &[u8], record: &mut Record) -> Result<Answer, Refusal> {
    let gateway = exchange.gateway;
    let id = shape::member_id(message);
    let leaving = prepare(&exchange, id).await;
    let answer = exchange.run(None, record).await?;
    if let Some(leaving) = leaving
        && answer.status().is_none_or(|status| status.is_ok())
    {
        let members = gateway.door.members.clone();
        let keep = async move {
            drop(timeout(GONE, gone(&members, id)).await);
            drop(leaving);
        };
        gateway.tasks.spawn("a member that was removed", keep).detach();
    }
    Ok(answer)
}

/// What keeps calls and probes from a member that is about to be removed, until this is dropped.
struct Leaving {
    _probes: Removal,
    /// None where the member takes no calls anyway.
    _calls: Option<Freed>,
}

async fn prepare(exchange: &Exchange<'_>, id: MemberId) -> Option<Leaving> {
    let door = &exchange.gateway.door;
    let member = door.members.snapshot.load().get(id).cloned()?;
    // Whether it may be removed, and what is told if not, etcd says.
    defragment::permitted(door, &exchange.whom).await.ok()?;
    let probes = member.rest.begin_removal();
    let calls = member.is_ready().then(|| Freed::new(door, &member));
    let waits = calls.as_ref().is_none_or(Freed::is_free);
    if waits && timeout(CALLS, defragment::idle(&member)).await.is_err() {
        tracing::info!(member = %id, "calls go on at a member that is about to be removed");
    }
    Some(Leaving { _probes: probes, _calls: calls })
}

async fn gone(members: &MembersHandle, id: MemberId) {
    while members.snapshot.load().get(id).is_some_and(|member| member.is_listed()) {
        members.pause_or_change(LOOK).await;
    }
}
