//! Lock and Campaign: one answer each, which may take for ever.
//!
//! Owns: that such a call outlives tokens and members, that a success which it passes on is true, and that a failed one
//! leaves no key in line. Must not know: how it is sent, where its ticket stands. Invariants (rules 28): without a lease
//! of the client's it is sent once; it is told of a drain at once, so that its client asks elsewhere in time.

use std::future::Future;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::downstream::request_memory::Held;
use crate::gateway::access_log::Record;
use crate::gateway::exchange::Exchange;
use crate::gateway::live::Stay;
use crate::gateway::{Client, Gateway};
use crate::lease::claim::{Claim, Ground};
use crate::lease::ticket::Ticket;
use crate::refusal::{Code, Refusal, Status};
use crate::rpc::frame::PREFIX;
use crate::rpc::method::{Lane, Method, Stream};
use crate::upstream::answer::Answer;
use crate::upstream::send::As;

/// What etcd says of a Lock whose key is gone when its turn comes.
const EXPIRED: &str = "mutex: session is expired";
/// How often a success may prove untrue: each time somebody removed the key while the call waited.
const UNTRUE: usize = 5;

/// Whether calls of `method` block.
#[must_use]
pub fn blocks(method: &Method) -> bool {
    method.lane == Lane::Stream && method.stream == Stream::Unary
}

/// The request of a call that blocks, in as little memory as it needs, and its part of the budget for those.
///
/// # Errors
/// The budget is used up.
pub fn kept(gateway: &Gateway, client: &Client, framed: &Bytes) -> Result<(Bytes, Held), Refusal> {
    let held = gateway.hold_waiting(client, framed.len()).ok_or(Refusal::TOO_MANY_REQUESTS)?;
    // A part of what came in one read would keep all of that.
    Ok((Bytes::copy_from_slice(framed), held))
}

/// The claim of a call with this message; none where it names no lease of its own.
pub async fn claim(gateway: &Gateway, method: &Method, message: &Bytes, whom: &As) -> Option<Claim> {
    let ground = Ground {
        claims: gateway.claims.clone(),
        door: gateway.door.clone(),
        whom: whom.clone(),
        tasks: gateway.tasks.clone(),
        removed: gateway.metrics.lock_keys_removed.clone(),
    };
    let ticket = Ticket::of(method, message)?;
    Some(Claim::new(ground, ticket).await)
}

/// Makes the call. What is left of a claim that it does not keep is removed, also when it is dropped.
///
/// # Errors
/// Our own refusal, where no member's answer can be passed on.
pub async fn run(
    exchange: Exchange<'_>,
    claim: Option<Claim>,
    mut drain: watch::Receiver<Option<Instant>>,
    stay: &mut Stay,
    record: &mut Record,
) -> Result<Answer, Refusal> {
    let ended = tokio::select! {
        biased; // what let it in first, then a drain: whoever is told now finds another replica
        refusal = stay.cut() => Err(refusal),
        _ = drain.wait_for(Option::is_some) => Err(Refusal::SHUTTING_DOWN),
        ended = in_time(exchange.deadline, answered(&exchange, claim.as_ref(), record)) => ended,
    };
    let status = ended.as_ref().ok().and_then(Answer::status);
    match (claim, status) {
        (None, _) => {}
        (Some(claim), Some(status)) if status.is_ok() => claim.keep(),
        // Larger than what is held back: it begins like a success.
        (Some(claim), None) if ended.is_ok() => claim.keep(),
        (Some(claim), status) => claim.give_up(status.is_some()).await,
    }
    ended
}

async fn in_time(
    deadline: Option<Instant>,
    answered: impl Future<Output = Result<Answer, Refusal>>,
) -> Result<Answer, Refusal> {
    match deadline {
        None => answered.await,
        Some(deadline) => timeout_at(deadline, answered).await.unwrap_or(Err(Refusal::DEADLINE_EXCEEDED)),
    }
}

async fn answered(
    exchange: &Exchange<'_>,
    claim: Option<&Claim>,
    record: &mut Record,
) -> Result<Answer, Refusal> {
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

/// After a member was lost that is no truth about the lease: that member may have removed the key when it lost us.
fn is_expired(status: &Status) -> bool {
    status.code == Code::Unknown && status.message == EXPIRED
}
