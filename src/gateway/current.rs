//! A read that a member answers from its own store: never less than the client has seen (rules 21).
//!
//! Owns: that an answer below what the client's connection was shown is not passed on. Must not know: how a member is chosen,
//! how a call is sent. Invariants: header revision and term of what is passed on are not below what was shown when the call
//! came, unless the cluster itself is: then its history is another, and what was shown counts no more; the way that is always
//! right is a linearizable read at that member first.

use bytes::Bytes;
use tokio::time::timeout_at;

use crate::gateway::Client;
use crate::gateway::access_log::Record;
use crate::gateway::exchange::Exchange;
use crate::refusal::{Code, Refusal};
use crate::rpc::header::Seen;
use crate::rpc::outcome::is_trouble;
use crate::rpc::shape;
use crate::upstream::answer::Answer;
use crate::upstream::choose::Wanted;
use crate::upstream::read::{ReadError, linearizable_revision};

/// How many members may fail to catch up.
const ROUNDS: usize = 3;
/// What etcd says where a read names a revision that the member has not reached (rpctypes/error.go).
const FUTURE: &str = "etcdserver: mvcc: required revision is a future revision";

/// Makes the call.
///
/// # Errors
/// Our own refusal, where no member's answer can be passed on.
pub async fn run(
    exchange: Exchange<'_>,
    client: &Client,
    message: &Bytes,
    record: &mut Record,
) -> Result<Answer, Refusal> {
    let deadline = exchange.deadline;
    let answered = answered(exchange, client, message, record);
    match deadline {
        None => answered.await,
        Some(deadline) => timeout_at(deadline, answered).await.unwrap_or(Err(Refusal::DEADLINE_EXCEEDED)),
    }
}

async fn answered(
    mut exchange: Exchange<'_>,
    client: &Client,
    message: &Bytes,
    record: &mut Record,
) -> Result<Answer, Refusal> {
    let shown = client.seen();
    for _ in 0..ROUNDS {
        let answer = exchange.run(None, record).await?;
        if !is_behind(&answer, shown) {
            return Ok(answer);
        }
        let door = &exchange.gateway.door;
        let members = door.members.snapshot.load_full();
        let Some(member) = record.member.and_then(|id| members.get(id)) else { continue };
        exchange.gateway.metrics.tries.behind.inc();
        tracing::debug!(member = %member.id, "a member is behind what its client was shown");
        let key = shape::first_key(exchange.method, message).unwrap_or_default();
        match linearizable_revision(door, &exchange.whom, member, &key).await {
            Ok(_) => {}
            // Whether it may is looked at after the member has caught up.
            Err(ReadError::Refused(status)) if !is_trouble(&status) => {}
            Err(ReadError::Refused(_) | ReadError::Login(_) | ReadError::Lost | ReadError::NoRoom) => {
                continue;
            }
        }
        exchange.wanted = Wanted::This(member.id);
        let answer = exchange.run(None, record).await?;
        if is_behind(&answer, shown) && answer.seen.is_some() {
            client.forget_seen();
        }
        return Ok(answer);
    }
    Err(Refusal::REQUEST_TIMED_OUT)
}

fn is_behind(answer: &Answer, shown: Seen) -> bool {
    match (answer.seen, answer.status()) {
        (Some(seen), _) => seen.revision < shown.revision || (seen.term > 0 && seen.term < shown.term),
        (None, Some(status)) => status.code == Code::OutOfRange && status.message == FUTURE,
        (None, None) => false,
    }
}
