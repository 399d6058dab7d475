//! Waiting, after a successful MoveLeader, until the new leader is known here, so that the client's next call
//! is answered by the new leader.
//!
//! Owns: how long the answer of a MoveLeader is delayed. Must not know: how the leader is found. Invariant:
//! the delay is at most a second, and only a MoveLeader causes a delay.

use std::time::Duration;

use prost::Message as _;
use tokio::time::timeout;

use crate::Gateway;
use crate::exchange::Exchange;
use keyward_cluster::membership::MembershipHint;
use keyward_etcd::identity::MemberId;
use keyward_etcd::pb::etcdserverpb::MoveLeaderRequest;
use keyward_etcd::refusal::Refusal;
use keyward_upstream::answer::MemberReply;

/// The longest delay: the time of two probes of a healthy member.
const SEEN: Duration = Duration::from_secs(1);

/// Makes the call, and waits until the target of a success is known as the leader. `message` is the request.
///
/// # Errors
/// As [`Exchange::run`].
pub async fn run(exchange: Exchange<'_>, message: &[u8]) -> Result<Box<MemberReply>, Refusal> {
    let answer = exchange.run(None).await?;
    if answer.is_success() {
        wait_for_leader(exchange.call.gateway, message).await;
    }
    Ok(answer)
}

async fn wait_for_leader(gateway: &Gateway, message: &[u8]) {
    let Ok(MoveLeaderRequest { target_id }) = MoveLeaderRequest::decode(message) else { return };
    let (members, target) = (&gateway.upstream.members, MemberId(target_id));
    if members.snapshot.load().get(target).is_none() {
        return;
    }
    let leads = async {
        while members.snapshot.load().leader != Some(target) {
            members.hints.send(MembershipHint::NotLeader(target));
            members.pause_or_change(SEEN / 10).await;
        }
    };
    if timeout(SEEN, leads).await.is_err() {
        tracing::debug!(%target, "leadership was moved, and is not seen there yet");
    }
}
