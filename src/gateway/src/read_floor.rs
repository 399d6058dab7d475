//! Reads answered from a member's own store, never older than the client has seen (docs/decisions.md#d21).
//!
//! Owns: withholding an answer below the highest revision shown on the client's connection. Must not know:
//! how a member is chosen, how a call is sent.
//! Invariants: revision and term in a relayed header are not below the values shown before the call, unless
//! the whole cluster is below: then the cluster has another history, and the values shown before are
//! forgotten. The fallback, always correct, is a linearizable read at the same member first.

use std::rc::Rc;
use std::sync::Arc;

use tokio::time::{Instant, timeout};

use crate::exchange::Exchange;
use crate::retries::PATIENCE;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::membership::Member;
use keyward_etcd::refusal::{Code, Refusal};
use keyward_etcd::rpc::body_shape;
use keyward_etcd::rpc::header::AnswerProgress;
use keyward_etcd::rpc::outcome::is_trouble;
use keyward_upstream::answer::MemberReply;
use keyward_upstream::own_requests::{ReadError, linearizable_revision};
use keyward_upstream::send::{UpstreamClient, UpstreamUser};

/// Members that may fail to catch up before the call fails.
const ROUNDS: usize = 3;
/// etcd's answer to a read at a revision not yet reached by the member (rpctypes/error.go).
const FUTURE: &str = "etcdserver: mvcc: required revision is a future revision";

/// Makes the call.
///
/// # Errors
/// Keyward's own refusal, if no member's answer can be relayed.
pub async fn run(mut exchange: Exchange<'_>, message: &[u8]) -> Result<Box<MemberReply>, Refusal> {
    let call = exchange.call;
    let client = call.client;
    let shown = client.floor.header_watermark();
    for _ in 0..ROUNDS {
        let answer = exchange.run(None).await?;
        if !is_behind(&answer, shown) {
            return Ok(answer);
        }
        let upstream = &call.gateway.upstream;
        let members = upstream.members.snapshot.load_full();
        let Some(member) = call.record.member.get().and_then(|id| members.get(id)) else { continue };
        call.gateway.metrics.tries.behind.inc();
        if member.is_leaderless_voter() {
            // Without a leader the member cannot catch up, and the answer would be older than earlier
            // answers.
            if members.ready_voters().next().is_none() {
                return Err(Refusal::NO_LEADER);
            }
            continue;
        }
        tracing::debug!(member = %member.id, "a member is behind what its client was shown");
        let key = body_shape::first_key(call.method, message);
        if !catches_up(upstream, &exchange.user, member, key.as_deref()).await {
            continue;
        }
        exchange.wanted = MemberTarget::This(member.id);
        let answer = exchange.run(None).await?;
        if is_behind(&answer, shown) && answer.progress.is_some() {
            client.floor.reset();
        }
        return Ok(answer);
    }
    Err(Refusal::REQUEST_TIMED_OUT)
}

/// Makes a call answered from a member's applied state, where the answer does not show how far the state
/// reaches: a lease grant moves no revision. The member first applies every write acknowledged before the
/// call.
///
/// # Errors
/// Keyward's own refusal, if no member's answer can be relayed.
pub async fn run_after_catch_up(mut exchange: Exchange<'_>) -> Result<Box<MemberReply>, Refusal> {
    let call = exchange.call;
    let wanted = exchange.wanted;
    let answered = async {
        let mut tried = Vec::new();
        for _ in 0..ROUNDS {
            let upstream = &call.gateway.upstream;
            let members = upstream.members.snapshot.load_full();
            let Some(member) = upstream.choose_for_call(&members, wanted, &tried, Instant::now()) else {
                break;
            };
            tried.push(member.id);
            if !catches_up(upstream, &exchange.user, &member, None).await {
                continue;
            }
            exchange.wanted = MemberTarget::Home(Some(member.id));
            let answer = exchange.run(None).await?;
            // Any other member may be behind.
            if call.record.member.get() == Some(member.id) {
                return Ok(answer);
            }
        }
        Err(if tried.is_empty() { Refusal::NO_LEADER } else { Refusal::REQUEST_TIMED_OUT })
    };
    timeout(PATIENCE, answered).await.unwrap_or(Err(Refusal::REQUEST_TIMED_OUT))
}

/// Makes the member apply all writes committed so far; false if unconfirmed.
async fn catches_up(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    member: &Arc<Member>,
    key: Option<&[u8]>,
) -> bool {
    // etcd refuses a read without a key before waiting for the applied index.
    let key = key.filter(|key| !key.is_empty()).unwrap_or(b"\0");
    match linearizable_revision(upstream, user, member, key).await {
        Ok(_) => true,
        // etcd checks the caller's permission after the member has caught up.
        Err(ReadError::Refused(status)) => !is_trouble(&status),
        Err(ReadError::Login(_) | ReadError::Lost | ReadError::TooLarge | ReadError::NoRoom) => false,
    }
}

fn is_behind(answer: &MemberReply, shown: AnswerProgress) -> bool {
    match (answer.progress, answer.status()) {
        (Some(seen), _) => seen.revision < shown.revision || (seen.term > 0 && seen.term < shown.term),
        (None, Some(status)) => status.code == Code::OutOfRange && status.message == FUTURE,
        (None, None) => false,
    }
}
