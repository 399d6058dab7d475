//! Leases of callers in a namespace: every lease that they are granted has an id of the namespace, and no
//! other lease exists for them.
//!
//! Owns: drawing the ids of granted leases, the lease of a Lock or Campaign that names none, and the answer
//! about a foreign lease. Must not know: the bits of an id, where leases stand in other requests. Invariants
//! (docs/decisions.md#d56): a lease that exists is never granted to a second client; etcd itself answers
//! about a foreign lease, as about a lease that is gone, and the client reads the id that it named.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;

use crate::call::Call;
use crate::caller::Caller;
use crate::exchange::Exchange;
use keyward_etcd::pb::etcdserverpb::{LeaseGrantRequest, LeaseTimeToLiveResponse};
use keyward_etcd::refusal::{Refusal, Status};
use keyward_etcd::rpc::frame::{PREFIX, encode};
use keyward_etcd::rpc::method::Method;
use keyward_etcd::rpc::namespace::Namespace;
use keyward_etcd::rpc::namespace::lease_ids::{LeaseScope, RequestLease, named_lease, with_lease};
use keyward_etcd::rpc::schema::MessageId;
use keyward_upstream::answer::MemberReply;
use keyward_upstream::lease_grant::grant_lease;

/// Ids drawn for a lease before the client is told that they all exist: with a million live leases of a
/// namespace, five draws all fail once in 10^12 grants.
const DRAWS: usize = 5;
/// The TTL in seconds of the lease that etcd grants for a Lock or Campaign without one.
/// <https://github.com/etcd-io/etcd/blob/main/client/v3/concurrency/session.go>
const SESSION_TTL: i64 = 60;
/// etcd's answer to a LeaseGrant with the id of a lease.
const EXISTS: &str = "etcdserver: lease already exists";

/// The treatment of a spliced request, in which the client has named `foreign`.
pub(super) fn of_spliced(call: &Call<'_>, foreign: Option<i64>) -> RequestLease {
    let Some(lease) = foreign else { return RequestLease::AsSent };
    call.gateway.metrics.policy.foreign_leases.inc();
    tracing::debug!(method = call.method.path, "a request names a lease outside of its caller's namespace");
    RequestLease::Foreign(lease)
}

/// Draws the id of a LeaseGrant. A client's own id must be one of the namespace.
///
/// # Errors
/// The id is not of the namespace, or no random bytes are to be had.
pub(super) fn splice_grant(
    call: &Call<'_>,
    namespace: &Namespace,
    scope: LeaseScope,
    framed: &Bytes,
) -> Result<(Bytes, RequestLease), Refusal> {
    let message = framed.get(PREFIX..).unwrap_or_default();
    match named_lease(message) {
        Some(0) => Ok((with_drawn_lease(namespace, message)?, RequestLease::Drawn)),
        Some(id) if namespace.has_lease(id) => Ok((framed.clone(), RequestLease::AsSent)),
        Some(id) => match (of_spliced(call, Some(id)), scope) {
            (lease, LeaseScope::Any) => Ok((framed.clone(), lease)),
            (_, LeaseScope::Own) => Err(Refusal::LEASE_ID_OUTSIDE_NAMESPACE),
        },
        None => Err(Refusal::not_canonical("a LeaseGrantRequest that cannot be read")),
    }
}

fn with_drawn_lease(namespace: &Namespace, message: &[u8]) -> Result<Bytes, Refusal> {
    let id = namespace.draw_lease().map_err(|error| {
        tracing::error!(%error, "no random bytes for the id of a lease");
        Refusal::NOTHING_SENT
    })?;
    with_lease(message, id).map_err(|_fault| Refusal::not_canonical("a lease that cannot be replaced"))
}

/// Sends `message`, a LeaseGrant with a drawn id, again with another id if the drawn one is that of a lease.
///
/// # Errors
/// A refusal of Keyward's own, if no member's answer can be passed on.
pub async fn grant(
    mut exchange: Exchange<'_>,
    namespace: Option<&Arc<Namespace>>,
    message: &[u8],
) -> Result<Box<MemberReply>, Refusal> {
    for _ in 1..DRAWS {
        let answer = exchange.run(None).await?;
        let exists = answer.status().is_some_and(is_existing_lease);
        let Some(namespace) = namespace.filter(|_| exists) else { return Ok(answer) };
        exchange.body = with_drawn_lease(namespace, message)?;
    }
    exchange.run(None).await
}

fn is_existing_lease(status: &Status) -> bool {
    status.message == EXISTS
}

/// Grants the lease of a Lock or Campaign that names none, as etcd would with an id of its own. Returns the
/// framed request with the lease; `None` for any other request.
///
/// # Errors
/// The lease cannot be granted.
pub async fn lend_lease(call: &Call<'_>, caller: &Caller, message: &[u8]) -> Result<Option<Bytes>, Refusal> {
    let Some(namespace) = caller.namespace().filter(|_| named_lease(message) == Some(0)) else {
        return Ok(None);
    };
    let asked = LeaseGrantRequest { ttl: SESSION_TTL, id: 0 }.encode_to_vec();
    for _ in 0..DRAWS {
        let framed = with_drawn_lease(namespace, &asked)?;
        let grant = framed.get(PREFIX..).unwrap_or_default();
        match grant_lease(&call.gateway.upstream, &caller.upstream_user, grant).await {
            Ok(()) => {
                let lease = named_lease(grant).unwrap_or_default();
                call.record.note_audited(|audit| audit.note_lease(lease));
                let lent = with_lease(message, lease);
                return lent.map(Some).map_err(|_fault| Refusal::not_canonical("a lock that cannot be read"));
            }
            Err(refusal) if refusal.status().message == EXISTS => {}
            Err(refusal) => return Err(refusal),
        }
    }
    Err(Refusal::NOTHING_SENT)
}

/// The framed answer of `method` about `lease`, with the id that the client has named.
pub(super) fn show(method: &Method, lease: RequestLease, framed: Bytes) -> Bytes {
    let (MessageId::LeaseTimeToLiveRequest, RequestLease::Foreign(id)) = (method.body, lease) else {
        return framed;
    };
    match LeaseTimeToLiveResponse::decode(framed.slice(PREFIX.min(framed.len())..)) {
        Ok(answer) => encode(&LeaseTimeToLiveResponse { id, ..answer }.encode_to_vec()),
        Err(_unreadable) => framed,
    }
}
