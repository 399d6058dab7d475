//! Lock and Campaign: unary calls with unlimited waiting time.
//!
//! Owns: keeping a waiting call alive past expired tokens and lost members, relaying only true successes,
//! removing the queued key of a failed call. Must not know: how the call is sent, the call's position in the
//! lock queue.
//! Invariants (docs/decisions.md#d28): a call without a lease of the client's is sent once; on drain the call
//! is refused at once, so the client has time to turn to another replica.

use std::future::Future;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::downstream::request_memory::RequestMemoryCharge;
use crate::gateway::access_log::AccessRecord;
use crate::gateway::active_streams::Registration;
use crate::gateway::exchange::Exchange;
use crate::gateway::{ClientConnection, Gateway};
use crate::lease::lock_queue::LockQueueKey;
use crate::lease::lock_wait::{LockWait, LockWaitContext};
use crate::refusal::{Code, Refusal, Status};
use crate::rpc::frame::PREFIX;
use crate::rpc::method::{Lane, Method, StreamingSides};
use crate::upstream::answer::MemberReply;
use crate::upstream::send::UpstreamUser;

/// etcd's answer to a Lock whose key is gone at its turn.
const EXPIRED: &str = "mutex: session is expired";
/// Untrue successes tolerated per call. A success is untrue if the key was removed while the call waited.
const UNTRUE: usize = 5;

/// True if calls of `method` block.
#[must_use]
pub fn blocks(method: &Method) -> bool {
    method.lane == Lane::Stream && method.stream == StreamingSides::Unary
}

/// A compact copy of a blocking call's request, charged to the budget of waiting requests.
///
/// # Errors
/// The budget is exhausted.
pub fn hold_request(
    gateway: &Gateway,
    client: &ClientConnection,
    framed: &Bytes,
) -> Result<(Bytes, RequestMemoryCharge), Refusal> {
    let held = gateway.hold_waiting(client, framed.len()).ok_or(Refusal::TOO_MANY_REQUESTS)?;
    // A slice of the read buffer would keep the whole buffer in memory.
    Ok((Bytes::copy_from_slice(framed), held))
}

/// The lock wait of the call with this message; `None` if the message names no lease.
pub async fn claim(
    gateway: &Gateway,
    method: &Method,
    message: &Bytes,
    whom: &UpstreamUser,
) -> Option<LockWait> {
    let ground = LockWaitContext {
        claims: gateway.claims.clone(),
        door: gateway.door.clone(),
        whom: whom.clone(),
        tasks: gateway.tasks.clone(),
        removed: gateway.metrics.lock_keys_removed.clone(),
    };
    let ticket = LockQueueKey::of(method, message)?;
    Some(LockWait::new(ground, ticket).await)
}

/// Makes the call. The queued key of a claim without success is removed, also on drop.
///
/// # Errors
/// Keyward's own refusal, if no member's answer can be relayed.
pub async fn run(
    exchange: Exchange<'_>,
    claim: Option<LockWait>,
    mut drain: watch::Receiver<Option<Instant>>,
    stay: &mut Registration,
    record: &mut AccessRecord,
) -> Result<MemberReply, Refusal> {
    let ended = tokio::select! {
        biased; // a revocation first, then a drain: clients refused now find another replica
        refusal = stay.cancelled() => Err(refusal),
        _ = drain.wait_for(Option::is_some) => Err(Refusal::SHUTTING_DOWN),
        ended = in_time(exchange.deadline, answered(&exchange, claim.as_ref(), record)) => ended,
    };
    let status = ended.as_ref().ok().and_then(MemberReply::status);
    match (claim, status) {
        (None, _) => {}
        (Some(claim), Some(status)) if status.is_ok() => claim.keep(),
        // The answer exceeds the held-back bytes, so the status is open; a success begins the same way.
        (Some(claim), None) if ended.is_ok() => claim.keep(),
        (Some(claim), status) => claim.give_up(status.is_some()).await,
    }
    ended
}

async fn in_time(
    deadline: Option<Instant>,
    answered: impl Future<Output = Result<MemberReply, Refusal>>,
) -> Result<MemberReply, Refusal> {
    match deadline {
        None => answered.await,
        Some(deadline) => timeout_at(deadline, answered).await.unwrap_or(Err(Refusal::DEADLINE_EXCEEDED)),
    }
}

async fn answered(
    exchange: &Exchange<'_>,
    claim: Option<&LockWait>,
    record: &mut AccessRecord,
) -> Result<MemberReply, Refusal> {
    for _ in 0..UNTRUE {
        let answer = exchange.run(claim, record).await?;
        let (Some(claim), Some(status)) = (claim, answer.status()) else { return Ok(answer) };
        if status.is_ok() {
            if !claim.is_doubtful() {
                return Ok(answer);
            }
            let message = answer.message().map(|framed| framed.slice(PREFIX.min(framed.len())..));
            let Some(message) = message else { return Ok(answer) };
            match claim.holds(exchange.method, &message).await {
                Some(true) => return Ok(answer),
                Some(false) => {}
                None => return Err(Refusal::REQUEST_TIMED_OUT),
            }
        } else if !(claim.was_lost() && is_expired(&status)) {
            return Ok(answer);
        }
        tracing::debug!("a lock's key was gone when its turn came: it queues again");
    }
    Err(Refusal::REQUEST_TIMED_OUT)
}

/// After the loss of a member this answer proves nothing about the lease: the lost member may have removed
/// the key when the connection broke.
fn is_expired(status: &Status) -> bool {
    status.code == Code::Unknown && status.message == EXPIRED
}
