//! Calls of callers in a namespace: requests get the prefix of the caller's keys, answers lose the prefix.
//!
//! Owns: the splice of a unary call's request and answer; an answer is held whole, since the length of a
//! message stands before its keys. Must not know: where keys stand in a message, which caller has which
//! namespace, the ids of leases. Invariant (docs/decisions.md#d56): an answer that cannot be spliced whole is
//! not shown.

use bytes::Bytes;

use crate::call::Call;
use crate::caller::Caller;
use crate::namespace_leases;
use crate::unread_answers::UnreadRoom;
use crate::whole_answer::hold_whole;
use keyward_downstream::request_memory::RequestMemoryCharge;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::frame::{PREFIX, pieces};
use keyward_etcd::rpc::method::StreamingSides;
use keyward_etcd::rpc::namespace::lease_ids::RequestLease;
use keyward_etcd::rpc::namespace::{Namespace, NamespaceFault};
use keyward_etcd::rpc::schema::MessageId;
use keyward_upstream::answer::MemberReply;

/// Splices a framed request, and tells the lease that it names. `held` is charged for the prefixes. The
/// request of a caller without a namespace stays as it is.
///
/// # Errors
/// The request cannot be spliced.
pub fn splice_request(
    call: &Call<'_>,
    caller: &Caller,
    framed: Bytes,
    held: &mut RequestMemoryCharge,
) -> Result<(Bytes, RequestLease), Refusal> {
    let permits = caller.permits(&call.snapshot().identities, call.client);
    let Some(namespace) = permits.namespace.namespace() else { return Ok((framed, RequestLease::AsSent)) };
    if call.method.stream == StreamingSides::Server && call.method.body == MessageId::RangeRequest {
        // RangeStream: clientv3's namespaces refuse the call too.
        return Err(Refusal::unknown_method(call.method.service, call.method.name));
    }
    let max = call.snapshot().config.limits.request_size;
    let message = framed.get(PREFIX..).unwrap_or_default();
    let (spliced, lease) = if call.method.body == MessageId::LeaseGrantRequest {
        namespace_leases::splice_grant(call, namespace, permits.lease_scope, &framed)?
    } else {
        let spliced = namespace.splice_request(call.method.body, message, max, permits.lease_scope);
        match spliced.map_err(|fault| refusal(fault, max))? {
            None => return Ok((framed, RequestLease::AsSent)),
            Some(spliced) => (spliced.framed, namespace_leases::of_spliced(call, spliced.foreign_lease)),
        }
    };
    if !held.charge(spliced.len().saturating_sub(framed.len())) {
        return Err(Refusal::TOO_MANY_REQUESTS);
    }
    Ok((spliced, lease))
}

fn refusal(fault: NamespaceFault, max: usize) -> Refusal {
    match fault {
        NamespaceFault::EmptyKey => Refusal::EMPTY_KEY,
        NamespaceFault::TooLarge(got) => Refusal::too_large(got, max),
        NamespaceFault::Unreadable | NamespaceFault::UnknownOperation | NamespaceFault::Outside => {
            Refusal::not_canonical(&fault.to_string())
        }
    }
}

/// The bytes held for an answer, in answers: itself, and its spliced copy.
pub const COPIES: usize = 2;

/// True if the caller's namespace must be taken out of the answer.
#[must_use]
pub fn hides(call: &Call<'_>, caller: &Caller) -> bool {
    caller.namespace().is_some() && Namespace::has_keyed_answers(call.method)
}

/// Takes the caller's namespace out of the answer to a request with `lease`. An answer without keys, a
/// refusal, and the answer to a caller without a namespace stay as they are. `room` counts the answer's
/// bytes.
///
/// # Errors
/// The answer is too large to be held whole, breaks off, or shows a key outside of the namespace.
pub async fn show(
    call: &Call<'_>,
    caller: &Caller,
    lease: RequestLease,
    answer: &mut MemberReply,
    room: Option<UnreadRoom>,
) -> Result<Option<UnreadRoom>, Refusal> {
    let Some(namespace) = caller.namespace().filter(|_| hides(call, caller)) else { return Ok(room) };
    if !answer.is_success() {
        return Ok(room);
    }
    let room = hold_whole(call, answer, room, COPIES).await?;
    if !answer.is_success() {
        return Ok(room);
    }
    let framed = answer.message().ok_or(Refusal::UNREADABLE_ANSWER)?;
    // Two copies are counted, not three.
    answer.data.clear();
    let message = framed.get(PREFIX..).ok_or(Refusal::UNREADABLE_ANSWER)?;
    let spliced = namespace.splice_answer(call.method, message);
    let spliced = spliced.map_err(|fault| {
        tracing::warn!(method = call.method.path, %fault, "a member's answer cannot be shown in a namespace");
        Refusal::UNREADABLE_ANSWER
    })?;
    let shown = match spliced {
        None => framed,
        Some(spliced) => {
            drop(framed);
            spliced
        }
    };
    answer.data = pieces(namespace_leases::show(call.method, lease, shown));
    Ok(room)
}
