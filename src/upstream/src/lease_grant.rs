//! The grant of a lease with a caller's own credential, for a call that etcd would grant a lease for itself.
//!
//! Owns: the request, and its repetition at other members. Must not know: the id of the lease, its use.
//! Invariant: the request names the id, so that a repeated grant never makes a second lease.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::own_requests::{ReadError, ask};
use crate::send::{UpstreamClient, UpstreamUser};
use keyward_cluster::choose::MemberTarget;
use keyward_etcd::identity::MemberId;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::outcome::is_trouble;

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
/// Members asked before the call fails.
const ROUNDS: usize = 3;
/// Time for the grant: etcd's own request timeout.
const PATIENCE: Duration = Duration::from_secs(7);

/// Grants the lease of `request`, a LeaseGrantRequest with an id.
///
/// # Errors
/// etcd's refusal, or no member answered: then the lease may be granted.
pub async fn grant_lease(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    request: &[u8],
) -> Result<(), Refusal> {
    timeout(PATIENCE, granted(upstream, user, request)).await.unwrap_or(Err(Refusal::REQUEST_TIMED_OUT))
}

async fn granted(upstream: &Rc<UpstreamClient>, user: &UpstreamUser, request: &[u8]) -> Result<(), Refusal> {
    let mut tried: Vec<MemberId> = Vec::new();
    let mut last = Refusal::NO_LEADER;
    while tried.len() < ROUNDS {
        let members = upstream.members.snapshot.load_full();
        let member = upstream.choose_for_call(&members, MemberTarget::Any, &tried, Instant::now());
        let Some(member) = member else { break };
        tried.push(member.id);
        match ask(upstream, user, &member, GRANT, request).await {
            Ok(_answer) => return Ok(()),
            Err(ReadError::Refused(status)) if !is_trouble(&status) => return Err(Refusal::told(&status)),
            Err(ReadError::Refused(status)) => last = Refusal::told(&status),
            Err(ReadError::Login(failure)) if failure.is_refusal() => {
                return Err(Refusal::INVALID_AUTH_TOKEN);
            }
            Err(ReadError::NoRoom) => return Err(Refusal::TOO_MANY_REQUESTS),
            Err(ReadError::Login(_) | ReadError::Lost | ReadError::TooLarge) => last = Refusal::NOTHING_SENT,
        }
    }
    Err(last)
}
