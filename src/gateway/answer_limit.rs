//! The limit on the bytes of one answer: the answer is measured before the call is sent.
//!
//! Owns: which calls are measured, and the refusal. Must not know: how sizes are measured.
//! Invariants (docs/decisions.md#d74): a call whose answer is larger is not sent; a call is measured only
//! where its answer could be larger by what is known without a question; what is held meanwhile is in the
//! budget of requests.

use std::rc::Rc;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;

use crate::gateway::call::Call;
use crate::gateway::unary_request::UnaryRequest;
use crate::gateway::usage_limits;
use crate::members::membership::Membership;
use crate::refusal::Refusal;
use crate::rpc::answer_parts::{AnswerPart, AnswerParts};
use crate::rpc::method::Method;
use crate::rpc::schema::MessageId;
use crate::upstream::answer_size;
use crate::upstream::permission_probe::PermissionProbe;
use crate::usage::caller_usage::AnswerCap;

/// The factor by which the store may have grown since the members' last Status, some half a second before.
const GROWTH: u64 = 2;

/// Measures the answer of a call before the call is sent, if its caller has a limit that the answer may
/// exceed. `None` for nearly every call. Boxed, so that the other calls do not pay for a larger future.
pub fn measure<'a>(
    call: &'a Call<'_>,
    request: &'a UnaryRequest,
) -> Option<LocalBoxFuture<'a, Result<(), Refusal>>> {
    let cap = call.record.usage()?.answer_cap()?;
    if !returns_keys(call.method) {
        return None;
    }
    let parts = AnswerParts::of(call.method.body, request.message())?;
    let snapshot = call.snapshot();
    let store = bytes_in_use(&snapshot.members).saturating_mul(GROWTH);
    // A value came in a request.
    let largest_value = snapshot.config.limits.request_size as u64;
    let known = |part: &AnswerPart| {
        let by_keys = part.most_keys.map_or(u64::MAX, |keys| keys.saturating_mul(largest_value));
        by_keys.min(store)
    };
    if parts.largest(&known) <= cap.bytes {
        return None;
    }
    Some(measured(call, request, cap, parts).boxed_local())
}

/// The methods of keys: the answers of others, as LeaseTimeToLive, have no values.
fn returns_keys(method: &Method) -> bool {
    matches!(
        method.body,
        MessageId::RangeRequest
            | MessageId::DeleteRangeRequest
            | MessageId::PutRequest
            | MessageId::TxnRequest
    )
}

/// Upper bound on the bytes of all keys and values, as of the members' last Status: the database has each at
/// least once. All bytes if no member has told.
fn bytes_in_use(members: &Membership) -> u64 {
    let told = members.members.iter().filter_map(|member| member.store_status.as_ref());
    told.map(|status| status.db_in_use).filter(|bytes| *bytes > 0).max().unwrap_or(u64::MAX)
}

async fn measured(
    call: &Call<'_>,
    request: &UnaryRequest,
    cap: AnswerCap,
    parts: AnswerParts,
) -> Result<(), Refusal> {
    // Pages are read one after the other.
    let largest_value = call.snapshot().config.limits.request_size;
    let _held = request.hold_beside(answer_size::held(largest_value)).ok_or(Refusal::TOO_MANY_REQUESTS)?;
    let upstream = Rc::clone(&call.gateway.upstream);
    let probe = PermissionProbe { upstream, user: request.caller.upstream_user.clone() };
    let mut sizes = parts.distinct();
    let distinct: Vec<AnswerPart> = sizes.keys().cloned().collect();
    for part in distinct {
        // What etcd refuses, etcd answers. It may be in the branch of a Txn that is not taken.
        let Some(size) = answer_size::measure(&probe, &part, cap.bytes, largest_value).await? else {
            continue;
        };
        sizes.insert(part, size);
        if parts.largest(&|part| sizes.get(part).copied().unwrap_or_default()) > cap.bytes {
            usage_limits::exceed_answer_cap(call, cap)?;
            break;
        }
    }
    // The questions took time, and the caller may be revoked meanwhile.
    call.identify_again().await.map(drop)
}
