//! Leadership that a client has moved: what it asks next is answered by who leads now.
//!
//! Owns: how long the answer of a MoveLeader waits until that is known here. Must not know: how it is found out. Invariant: it
//! waits a moment at most, and only for what the client itself has brought about.

use std::time::Duration;

use prost::Message as _;
use tokio::time::timeout;

use crate::gateway::Gateway;
use crate::identity::MemberId;
use crate::pb::etcdserverpb::MoveLeaderRequest;
use crate::upstream::membership::Hint;

/// The method's path.
pub const PATH: &str = "/etcdserverpb.Maintenance/MoveLeader";
/// Two probes of a member that is well.
const SEEN: Duration = Duration::from_secs(1);

/// Waits until the member that a MoveLeader named is known to lead. `message` is the request.
pub async fn seen(gateway: &Gateway, message: &[u8]) {
    let Ok(MoveLeaderRequest { target_id }) = MoveLeaderRequest::decode(message) else { return };
    let (members, target) = (&gateway.door.members, MemberId(target_id));
    if members.snapshot.load().get(target).is_none() {
        return;
    }
    let leads = async {
        while members.snapshot.load().leader != Some(target) {
            members.hints.send(Hint::NotLeader(target));
            members.pause_or_change(SEEN / 10).await;
        }
    };
    if timeout(SEEN, leads).await.is_err() {
        tracing::debug!(%target, "leadership was moved, and is not seen there yet");
    }
}
