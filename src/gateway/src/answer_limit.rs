//! The limit on the bytes of one answer: the answer is measured before the call is sent.
//!
//! Owns: which calls are measured, and the refusal. Must not know: how sizes are measured. Invariants
//! (docs/decisions.md#d74): a call for which etcd would gather more is not sent; a call is measured only
//! where it could be more by what is known without a question; measuring reads no more than the limit and a
//! page; what is held meanwhile is in the budget of requests; a limit in shadow refuses nothing.

use std::rc::Rc;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;

use crate::call::Call;
use crate::unary_request::UnaryRequest;
use crate::usage_limits;
use keyward_access::usage::caller_usage::{AnswerCap, CallerUsage};
use keyward_cluster::membership::Membership;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::answer_parts::{AnswerPart, AnswerParts};
use keyward_etcd::rpc::method::Lane;
use keyward_upstream::answer_size;
use keyward_upstream::permission_probe::PermissionProbe;

/// The factor by which the store may have grown since the members' last Status, some half a second before.
const GROWTH: u64 = 2;

/// Measures what etcd gathers for a call before the call is sent, if its caller has a limit that this may
/// exceed. `None` for nearly every call. Boxed, so that the other calls do not pay for a larger future.
pub fn measure<'a>(
    call: &'a Call<'_>,
    request: &'a UnaryRequest,
) -> Option<LocalBoxFuture<'a, Result<(), Refusal>>> {
    let cap = call.record.usage()?.answer_cap()?;
    // RangeStream sends its pairs while it reads them.
    if call.method.lane == Lane::Bulk {
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
    if parts.sum(known) <= cap.bytes {
        return None;
    }
    Some(measured(call, request, cap, parts).boxed_local())
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
    let Some(usage) = call.record.usage() else { return Ok(()) };
    match is_larger(call, request, &usage, &parts, cap.bytes).await {
        Ok(true) => usage_limits::exceed_answer_cap(call, cap)?,
        Ok(false) => {}
        // A limit in shadow refuses nothing, also for want of an answer.
        Err(_) if usage.is_shadow() => {}
        Err(refusal) => return Err(refusal),
    }
    // The questions took time, and the caller may be revoked meanwhile.
    call.identify_again().await.map(drop)
}

/// True if etcd would gather more than `most` bytes. Reads no more than that.
///
/// # Errors
/// No member answered, or there is no room for a page.
async fn is_larger(
    call: &Call<'_>,
    request: &UnaryRequest,
    usage: &CallerUsage,
    parts: &AnswerParts,
    most: u64,
) -> Result<bool, Refusal> {
    // Calls of a caller wait for each other, so that many at once do not fill the room for pages.
    let _turn = usage.turn_to_measure().await;
    let largest_value = call.snapshot().config.limits.request_size;
    let _held = call.hold_beside(answer_size::held(largest_value)).ok_or(Refusal::TOO_MANY_REQUESTS)?;
    let upstream = Rc::clone(&call.gateway.upstream);
    let probe = PermissionProbe { upstream, user: request.caller.upstream_user.clone() };
    // Own writes are known without a question.
    let mut sum = parts.sum(|_| 0);
    for (part, used) in parts.each() {
        if sum > most {
            break;
        }
        // A part refused by etcd is etcd's to answer, and may be in the branch of a Txn that is not taken.
        let size = answer_size::measure(&probe, part, most - sum, largest_value).await?.unwrap_or_default();
        sum = sum.saturating_add(size.saturating_mul(used.times));
    }
    Ok(sum > most)
}
