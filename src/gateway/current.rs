//! A read that a member answers from its own store: never less than the client has seen (rules 21).
//!
//! Owns: that an answer below what the client's connection was shown is not passed on. Must not know: how a member is chosen,
//! how a call is sent. Invariants: header revision and term of what is passed on are not below what was shown when the call
//! came, unless the cluster itself is: then its history is another, and what was shown counts no more; the way that is always
//! right is a linearizable read at that member first.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use crate::gateway::Client;
use crate::gateway::access_log::Record;
use crate::gateway::exchange::{Exchange, PATIENCE};
use crate::refusal::{Code, Refusal};
use crate::rpc::header::Seen;
use crate::rpc::outcome::is_trouble;
use crate::rpc::shape;
use crate::upstream::answer::Answer;
use crate::upstream::choose::Wanted;
use crate::upstream::membership::Member;
use crate::upstream::read::{ReadError, linearizable_revision};
use crate::upstream::send::{As, Door};

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
    let shown = client.floor.seen();
    for _ in 0..ROUNDS {
        let answer = exchange.run(None, record).await?;
        if !is_behind(&answer, shown) {
            return Ok(answer);
        }
        let door = &exchange.gateway.door;
        let members = door.members.snapshot.load_full();
        let Some(member) = record.member.and_then(|id| members.get(id)) else { continue };
        exchange.gateway.metrics.tries.behind.inc();
        if member.is_leaderless_voter() {
            // Without a leader it cannot catch up, and the answer would be older than what the client was shown.
            if members.ready_voters().next().is_none() {
                return Err(Refusal::NO_LEADER);
            }
            continue;
        }
        tracing::debug!(member = %member.id, "a member is behind what its client was shown");
        let key = shape::first_key(exchange.method, message);
        if !catches_up(door, &exchange.whom, member, key.as_deref()).await {
            continue;
        }
        exchange.wanted = Wanted::This(member.id);
        let answer = exchange.run(None, record).await?;
        if is_behind(&answer, shown) && answer.seen.is_some() {
            client.floor.forget();
        }
        return Ok(answer);
    }
    Err(Refusal::REQUEST_TIMED_OUT)
}

/// Makes a call that a member answers by what it has applied, where the answer does not tell how far that is: a grant of a lease
/// moves no revision. The member has applied whatever was acknowledged before the call.
///
/// # Errors
/// Our own refusal, where no member's answer can be passed on.
pub async fn caught_up(mut exchange: Exchange<'_>, record: &mut Record) -> Result<Answer, Refusal> {
    let patience = Instant::now() + PATIENCE;
    let (until, late) = match exchange.deadline {
        Some(deadline) if deadline <= patience => (deadline, Refusal::DEADLINE_EXCEEDED),
        _ => (patience, Refusal::REQUEST_TIMED_OUT),
    };
    let wanted = exchange.wanted;
    let answered = async {
        let mut tried = Vec::new();
        for _ in 0..ROUNDS {
            let door = &exchange.gateway.door;
            let members = door.members.snapshot.load_full();
            let Some(member) = door.choose_for_call(&members, wanted, &tried) else { break };
            tried.push(member.id);
            if !catches_up(door, &exchange.whom, &member, None).await {
                continue;
            }
            exchange.wanted = Wanted::Home(Some(member.id));
            let answer = exchange.run(None, record).await?;
            // Elsewhere it was answered by one that may be behind.
            if record.member == Some(member.id) {
                return Ok(answer);
            }
        }
        Err(if tried.is_empty() { Refusal::NO_LEADER } else { Refusal::REQUEST_TIMED_OUT })
    };
    timeout_at(until, answered).await.unwrap_or(Err(late))
}

/// Has the member apply what the cluster had agreed on by now; false where it cannot be told.
async fn catches_up(door: &Rc<Door>, whom: &As, member: &Arc<Member>, key: Option<&[u8]>) -> bool {
    // Without a key it is refused before it is waited for.
    let key = key.filter(|key| !key.is_empty()).unwrap_or(b"\0");
    match linearizable_revision(door, whom, member, key).await {
        Ok(_) => true,
        // Whether the caller may is looked at after the member has caught up.
        Err(ReadError::Refused(status)) => !is_trouble(&status),
        Err(ReadError::Login(_) | ReadError::Lost | ReadError::NoRoom) => false,
    }
}

fn is_behind(answer: &Answer, shown: Seen) -> bool {
    match (answer.seen, answer.status()) {
        (Some(seen), _) => seen.revision < shown.revision || (seen.term > 0 && seen.term < shown.term),
        (None, Some(status)) => status.code == Code::OutOfRange && status.message == FUTURE,
        (None, None) => false,
    }
}
