//! The keys attached to a lease, known to etcd only.
//!
//! Owns: reading the keys. Must not know: the use of the keys.

use std::rc::Rc;

use bytes::Bytes;
use prost::Message as _;

use crate::members::choose::MemberTarget;
use crate::pb::etcdserverpb::{LeaseTimeToLiveRequest, LeaseTimeToLiveResponse};
use crate::upstream::own_requests::{ReadError, ask};
use crate::upstream::send::{UpstreamClient, UpstreamUser};

const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";

/// Reads the keys attached to `lease`, with the identity `user`. A lease that does not exist has no keys.
/// Cancel-safe.
///
/// # Errors
/// [`ReadError`]: newer versions of etcd refuse the keys to a user without permission to read all of them.
pub async fn read(
    upstream: &Rc<UpstreamClient>,
    user: &UpstreamUser,
    lease: i64,
) -> Result<Vec<Bytes>, ReadError> {
    let member = upstream.choose(MemberTarget::LeaderFirst, &[]).ok_or(ReadError::Lost)?;
    let request = LeaseTimeToLiveRequest { id: lease, keys: true };
    let answer = ask(upstream, user, &member, TIME_TO_LIVE, &request.encode_to_vec()).await?;
    let answer = LeaseTimeToLiveResponse::decode(answer).map_err(|_| ReadError::Lost)?;
    Ok(answer.keys)
}
