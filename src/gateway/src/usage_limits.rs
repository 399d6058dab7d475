//! Limits on the usage of a caller, applied to its calls, and shedding.
//!
//! Owns: the order of the checks, and the refusal of a call past a limit. Must not know: how usage is
//! counted. Invariants (docs/decisions.md#d59): a call past a limit is not sent; a refusal comes at once, or
//! after a tenth of a second on a connection with many refusals; a Range is never cut short without `more`; a
//! Txn that writes is refused before it is sent, or not at all.

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::{Either, ready};
use tokio::time::{Instant, sleep};

use crate::audited_request;
use crate::call::Call;
use crate::caller::Caller;
use crate::unread_answers::UnreadRoom;
use crate::whole_answer::hold_whole;
use keyward_access::usage::call_usage::{CallLength, CallUsage, WatchUsage};
use keyward_access::usage::caller_usage::{AnswerCap, CallerUsage, RangeCap};
use keyward_access::usage::exceeded::Exceeded;
use keyward_access::usage::limiter::CallUrgency;
use keyward_access::usage::shedding::CallEffect;
use keyward_config::usage_limits::OnExceed;
use keyward_downstream::request_memory::RequestMemoryCharge;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::frame::PREFIX;
use keyward_etcd::rpc::method::{Effect, Handler, Method, StreamingSides};
use keyward_etcd::rpc::range_cap::{self, CappedRange, Continuation};
use keyward_etcd::rpc::scan::WireFields;
use keyward_etcd::rpc::schema::MessageId;
use keyward_upstream::answer::MemberReply;

/// The treatment of an answer, by the limit of keys of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerCheck {
    /// The answer is passed on.
    None,
    /// The answer's keys are counted: keys left out, or too many keys, have a consequence.
    Keys,
}

/// Counts a call of an identified caller, as under way until the call's record ends.
///
/// # Errors
/// A limit is exceeded.
pub fn admit(call: &Call<'_>, caller: &Caller) -> Result<(), Refusal> {
    let snapshot = call.snapshot();
    let usage = caller.usage(call.gateway, &snapshot.identities, call.client);
    let lasts = call.method.is_lasting() || call.method.handler == Handler::Defragment;
    let (urgency, length) = kind_of(call.method);
    let Some(usage) = usage else {
        if lasts {
            call.record.set_usage(CallUsage::unlimited(length));
        }
        return Ok(());
    };
    match CallUsage::begin(usage, urgency, length) {
        Ok(mut counted) => {
            if lasts {
                counted.follow_limits();
            }
            call.record.set_usage(counted);
            Ok(())
        }
        Err(exceeded) => Err(refused(call, exceeded, Refusal::TOO_MANY_REQUESTS)),
    }
}

/// The refusal of a call: at once, or later for a call that a limit has refused, on a connection with many
/// refusals. The wait lets a client that repeats refused calls at once cost little.
pub fn in_time<T: 'static>(
    call: &Call<'_>,
    refusal: Refusal,
) -> impl Future<Output = Result<T, Refusal>> + use<T> {
    let limited = call.record.limit().is_some();
    let Some(delay) = limited.then(|| call.client.refusal_pace.delay(Instant::now())).flatten() else {
        return Either::Left(ready(Err(refusal)));
    };
    call.gateway.metrics.limits.delayed_refusals.inc();
    call.record.note_held(delay);
    call.record.note_held_refusal(refusal.reason());
    audited_request::note_refusal(call);
    Either::Right(sleep(delay).map(|()| Err(refusal)).boxed_local())
}

/// A stream of days does not count as a call under way: its watches or leases count. Nor does a LeaseRevoke,
/// which frees what its client holds.
fn kind_of(method: &Method) -> (CallUrgency, CallLength) {
    match (method.handler, method.body) {
        (Handler::KeepAlive, _) | (_, MessageId::LeaseRevokeRequest) => {
            (CallUrgency::Last, CallLength::Uncounted)
        }
        (Handler::Watch | Handler::Observe, _) => (CallUrgency::Ordinary, CallLength::Uncounted),
        _ => (CallUrgency::Ordinary, CallLength::Counted),
    }
}

/// Counts an Observe as a watch, until the returned value is dropped. `None` for a caller that no limit can
/// count.
///
/// # Errors
/// A limit of watches is exceeded.
pub fn count_observe(call: &Call<'_>) -> Result<Option<WatchUsage>, Refusal> {
    let Some(usage) = call.record.live_usage() else { return Ok(None) };
    let watch = WatchUsage::new(usage);
    watch.begin().map_err(|exceeded| refused(call, exceeded, Refusal::TOO_MANY_REQUESTS))?;
    Ok(Some(watch))
}

/// Charges a complete request, sheds its call under pressure, and limits the keys that its answer may have.
///
/// # Errors
/// The call is refused.
pub fn limit_request(
    call: &Call<'_>,
    effect: Effect,
    framed: &mut Bytes,
    held: &mut RequestMemoryCharge,
) -> Result<AnswerCheck, Refusal> {
    call.record.count_received(framed.len());
    let counted = call.record.call_usage();
    let usage = counted.and_then(CallUsage::caller);
    if let Some(usage) = &usage {
        usage.charge_request(framed.len());
    }
    if !call.gateway.usage.shedding.is_off() {
        shed(call, usage.as_deref(), effect)?;
    }
    let (Some(counted), Some(usage)) = (counted, usage) else { return Ok(AnswerCheck::None) };
    if call.method.body == MessageId::LeaseGrantRequest {
        let reserved = counted.reserve_lease();
        reserved.map_err(|exceeded| refused(call, exceeded, Refusal::TOO_MANY_REQUESTS))?;
    }
    let Some(cap) = usage.range_cap() else { return Ok(AnswerCheck::None) };
    let message = framed.get(PREFIX..).unwrap_or_default();
    match call.method.body {
        MessageId::TxnRequest if !range_cap::txn_is_within(message, cap.keys.get()) => {
            exceed(call, &usage, cap, Refusal::range_in_txn_without_limit(cap.keys.get()))?;
        }
        MessageId::RangeRequest if call.method.stream != StreamingSides::Server => {
            return limit_range(&usage, cap, framed, held);
        }
        // The answer to a RangeStream comes in parts, and tells `more` after the keys.
        MessageId::RangeRequest if !range_cap::is_within(message, cap.keys.get()) => {
            exceed(call, &usage, cap, Refusal::range_too_large(cap.keys.get()))?;
        }
        _ => {}
    }
    Ok(AnswerCheck::None)
}

/// Sets the limit of a Range.
fn limit_range(
    usage: &CallerUsage,
    cap: RangeCap,
    framed: &mut Bytes,
    held: &mut RequestMemoryCharge,
) -> Result<AnswerCheck, Refusal> {
    let message = framed.get(PREFIX..).unwrap_or_default();
    let CappedRange::Limited(limited, continuation) = range_cap::cap(message, cap.keys.get()) else {
        return Ok(AnswerCheck::None);
    };
    if usage.is_shadow() {
        // The Range goes up without a limit.
        return Ok(AnswerCheck::Keys);
    }
    if !held.charge(limited.len().saturating_sub(framed.len())) {
        return Err(Refusal::TOO_MANY_REQUESTS);
    }
    *framed = limited;
    let may_continue = cap.on_exceed == OnExceed::Page && continuation == Continuation::BehindLastKey;
    Ok(if may_continue { AnswerCheck::None } else { AnswerCheck::Keys })
}

/// Sheds a call under pressure on the cluster.
fn shed(call: &Call<'_>, usage: Option<&CallerUsage>, effect: Effect) -> Result<(), Refusal> {
    let Some(effect) = CallEffect::of(call.method, effect) else { return Ok(()) };
    let register = &call.gateway.usage;
    let priority = usage.map(CallerUsage::priority).unwrap_or_default();
    let Some(exceeded) = register.shedding.excess(priority, effect) else { return Ok(()) };
    if register.shedding.is_shadow() {
        register.counters().count_shadow(exceeded);
        return Ok(());
    }
    register.counters().count_refused(exceeded);
    Err(refused(call, exceeded, Refusal::TOO_MANY_REQUESTS))
}

/// Counts a call for an answer of too many bytes, and refuses the call if the limit is enforced.
///
/// # Errors
/// The limit is enforced.
pub fn exceed_answer_cap(call: &Call<'_>, cap: AnswerCap) -> Result<(), Refusal> {
    let exceeded = call.record.usage().map_or(Ok(()), |usage| usage.exceed_answer_cap(cap));
    exceeded.map_err(|exceeded| refused(call, exceeded, Refusal::answer_too_large(cap.bytes)))
}

/// Counts a Range of too many keys, and refuses its call if the limit is enforced.
fn exceed(call: &Call<'_>, usage: &CallerUsage, cap: RangeCap, refusal: Refusal) -> Result<(), Refusal> {
    usage.exceed_range_cap(cap).map_err(|exceeded| refused(call, exceeded, refusal))
}

/// The answer to a Range with a limit set by Keyward. `room` counts the answer's bytes.
///
/// # Errors
/// Keys were left out, and the client cannot ask for them; or the answer cannot be held whole.
pub async fn check_more(
    call: &Call<'_>,
    check: AnswerCheck,
    answer: &mut MemberReply,
    room: Option<UnreadRoom>,
) -> Result<Option<UnreadRoom>, Refusal> {
    let usage = call.record.usage().filter(|_| check == AnswerCheck::Keys);
    let Some((usage, cap)) = usage.and_then(|usage| usage.range_cap().map(|cap| (usage, cap))) else {
        return Ok(room);
    };
    if usage.is_shadow() {
        count_keys(&usage, cap, answer);
        return Ok(room);
    }
    let room = hold_whole(call, answer, room, 1).await?;
    if !answer.is_success() {
        return Ok(room);
    }
    let framed = answer.message().ok_or(Refusal::UNREADABLE_ANSWER)?;
    let more = range_cap::has_more(framed.get(PREFIX..).unwrap_or_default());
    if more.ok_or(Refusal::UNREADABLE_ANSWER)? {
        // The member has fetched and sent the keys, whoever reads them.
        usage.charge_reply(framed.len());
        exceed(call, &usage, cap, Refusal::range_too_large(cap.keys.get()))?;
    }
    Ok(room)
}

/// Counts an answer with too many keys. The answer is not held for that: keys behind its beginning are
/// estimated.
fn count_keys(usage: &CallerUsage, cap: RangeCap, answer: &MemberReply) {
    let begun = answer.message().or_else(|| answer.data.front().cloned()).unwrap_or_default();
    let whole = answer.announced().unwrap_or_default().saturating_sub(PREFIX);
    let keys = range_cap::estimated_keys(begun.get(PREFIX..).unwrap_or_default(), whole);
    if answer.is_success() && keys > usize::try_from(cap.keys.get()).unwrap_or(usize::MAX) {
        usage.count_shadow_range(cap);
    }
}

/// Notes the consequences of a success for the leases that count.
pub fn note_success(call: &Call<'_>, request: &[u8], answer: &MemberReply) {
    let number = |message: &[u8], number: u32| {
        let fields = WireFields::new(message).map_while(Result::ok).filter(|field| field.number == number);
        fields.last().and_then(|field| field.value.signed()).unwrap_or_default()
    };
    let Some(counted) = call.record.call_usage() else { return };
    if call.method.body == MessageId::LeaseGrantRequest {
        let framed = answer.message().unwrap_or_default();
        let message = framed.get(PREFIX..).unwrap_or_default();
        counted.note_grant(number(message, 2), number(message, 3));
    } else if call.method.body == MessageId::LeaseRevokeRequest
        && let Some(usage) = counted.caller()
    {
        usage.note_revocation(number(request, 1));
    }
}

/// Notes the limit that refuses a call.
fn refused(call: &Call<'_>, exceeded: Exceeded, refusal: Refusal) -> Refusal {
    call.record.note_limit(exceeded);
    tracing::debug!(method = call.method.path, limit = %exceeded, "a call is refused by a limit");
    refusal
}
