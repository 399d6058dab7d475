//! Lock and Campaign: unary calls with unlimited waiting time.
//!
//! Owns: keeping a waiting call alive past expired tokens and lost members, relaying only true successes,
//! removing the queued key of a failed call. Must not know: how the call is sent, the call's position in the
//! lock queue.
//! Invariants (docs/decisions.md#d28): a call without a lease is sent once, and in a namespace has one;
//! on drain the call is refused at once, so the client has time to turn to another replica.

use crate::active_streams::Registration;
use crate::call::Call;
use crate::exchange::Exchange;
use crate::pipeline_result::PipelineResult;
use crate::unary_request::UnaryRequest;
use crate::{audited_request, forward, namespace_leases, namespaces};
use keyward_etcd::refusal::{Code, Refusal, Status};
use keyward_etcd::rpc::frame::PREFIX;
use keyward_streams::lease::lock_queue::LockQueueKey;
use keyward_streams::lease::lock_wait::{LockWait, LockWaitContext};
use keyward_upstream::answer::MemberReply;

/// etcd's answer to a Lock whose key is gone at its turn.
const EXPIRED: &str = "mutex: session is expired";
/// Untrue successes tolerated per call. A success is untrue if the key was removed while the call waited.
const UNTRUE: usize = 5;

/// Serves a Lock or Campaign: waits at etcd, also past expired tokens and lost members.
///
/// # Errors
/// Keyward's own refusal, if no member's answer can be relayed.
pub async fn serve(call: &Call<'_>, request: UnaryRequest) -> Result<PipelineResult, Refusal> {
    let mut request = request;
    if let Some(with_lease) = namespace_leases::lend_lease(call, &request.caller, request.message()).await? {
        request.replace(with_lease)?;
    }
    let exchange = request.exchange(call)?;
    let in_use = request.caller.in_use();
    let mut registration =
        call.gateway.enter(call.client, &request.caller, Some(request.decided(call)), &call.record)?;
    let lock_wait = lock_wait(call, &request).await;
    let waiting = run(&exchange, lock_wait, &mut registration);
    let waiting = audited_request::wait_on_record(call, &request.caller, waiting);
    let end = call.client.authorization_end(&request.caller);
    let mut answer = match end.map(|(end, refusal)| (Box::pin(end.passed()), refusal)) {
        None => waiting.await?,
        Some((passed, refusal)) => tokio::select! {
            biased; // an answer that is there comes first
            answer = waiting => answer?,
            () = passed => return Err(refusal),
        },
    };
    let room = namespaces::show(call, &request.caller, request.lease, &mut answer, None).await?;
    forward::finish(call, &request, &mut answer)?;
    let room = match room {
        None => forward::room_beyond_limit(call, &request, &answer).await?,
        room => room,
    };
    Ok(PipelineResult::Member(answer, in_use, registration, room))
}

/// The lock wait of the call; `None` if the request names no lease.
async fn lock_wait(call: &Call<'_>, request: &UnaryRequest) -> Option<LockWait> {
    let gateway = call.gateway;
    let context = LockWaitContext {
        lock_waits: gateway.lock_waits.clone(),
        upstream: gateway.upstream.clone(),
        user: request.caller.upstream_user.clone(),
        tasks: gateway.tasks.clone(),
        removed: gateway.metrics.lock_keys_removed.clone(),
    };
    let key = LockQueueKey::of(call.method, request.message())?;
    Some(LockWait::new(context, key).await)
}

/// Makes the call. The queued key of a lock wait without success is removed, also on drop.
async fn run(
    exchange: &Exchange<'_>,
    lock_wait: Option<LockWait>,
    registration: &mut Registration,
) -> Result<Box<MemberReply>, Refusal> {
    let mut drain = exchange.call.client.drain.clone();
    let ended = tokio::select! {
        biased; // a revocation first, then a drain: clients refused now find another replica
        refusal = registration.cancelled() => Err(refusal),
        _ = drain.wait_for(Option::is_some) => Err(Refusal::SHUTTING_DOWN),
        ended = answered(exchange, lock_wait.as_ref()) => ended,
    };
    let status = ended.as_ref().ok().and_then(|answer| answer.status());
    match (lock_wait, status) {
        (None, _) => {}
        (Some(lock_wait), Some(status)) if status.is_ok() => lock_wait.keep(),
        // The answer exceeds the held-back bytes, so the status is open; a success begins the same way.
        (Some(lock_wait), None) if ended.is_ok() => lock_wait.keep(),
        (Some(lock_wait), status) => lock_wait.give_up(status.is_some()).await,
    }
    ended
}

async fn answered(
    exchange: &Exchange<'_>,
    lock_wait: Option<&LockWait>,
) -> Result<Box<MemberReply>, Refusal> {
    for _ in 0..UNTRUE {
        let answer = exchange.run(lock_wait).await?;
        let (Some(lock_wait), Some(status)) = (lock_wait, answer.status()) else { return Ok(answer) };
        if status.is_ok() {
            if !lock_wait.is_doubtful() {
                return Ok(answer);
            }
            let message = answer.message().map(|framed| framed.slice(PREFIX.min(framed.len())..));
            let Some(message) = message else { return Ok(answer) };
            match lock_wait.holds(exchange.call.method, &message).await {
                Some(true) => return Ok(answer),
                Some(false) => {}
                None => return Err(Refusal::REQUEST_TIMED_OUT),
            }
        } else if !(lock_wait.was_lost() && is_expired(status)) {
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
