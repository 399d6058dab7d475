//! Calls answered by a member with a single message or a stream of messages: the exchange, room for a
//! large answer, and the consequences of a success.
//!
//! Owns: the order of these steps, and repeating a read whose answer found no room. Must not know: how a
//! member is chosen and asked. Invariant: an answer is never older than an answer already shown to the
//! client.

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;

use crate::active_streams::Registration;
use crate::call::{Call, REWRITTEN_COPIES};
use crate::exchange::Exchange;
use crate::pipeline_result::PipelineResult;
use crate::unary_request::UnaryRequest;
use crate::unread_answers::UnreadRoom;
use crate::unread_need::UnreadRoomNeed;
use crate::usage_limits::AnswerCheck;
use crate::{
    audited_request, auth_changes, defragment, leadership, member_answers, namespace_leases, namespaces,
    read_floor, removal, usage_limits,
};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::method::{Effect, Handler, Lane, StreamingSides};
use keyward_etcd::rpc::namespace::lease_ids::RequestLease;
use keyward_upstream::answer::MemberReply;

/// Sends the request to a member, and prepares the member's answer for the client.
///
/// # Errors
/// A refusal of Keyward's own, if no member's answer can be passed on.
pub async fn serve(call: &Call<'_>, request: &UnaryRequest) -> Result<PipelineResult, Refusal> {
    let exchange = request.exchange(call)?;
    let (in_use, registration) = match request.lane {
        Lane::Unary => (None, Registration::UNBOUND),
        _ => (
            request.caller.in_use(),
            call.gateway.enter(call.client, &request.caller, Some(request.decided(call)), &call.record)?,
        ),
    };
    let mut answer = asked(&exchange, request).await?;
    let copies = copies_held(call, request);
    let Some(need) = need_of(call, request, &answer, copies)? else {
        if copies > 0 {
            // A small answer.
            Box::pin(edited(call, request, &mut answer, None)).await?;
        }
        finish(call, request, &mut answer)?;
        return Ok(PipelineResult::Member(answer, in_use, registration, None));
    };
    // Boxed, so that the calls with small answers do not pay for a larger future.
    let (answer, room) = Box::pin(with_room(exchange, request, answer, need, copies)).await?;
    Ok(PipelineResult::Member(answer, in_use, registration, room))
}

/// A member's answer.
async fn asked(exchange: &Exchange<'_>, request: &UnaryRequest) -> Result<Box<MemberReply>, Refusal> {
    match steps_of_handler(exchange, request) {
        None => exchange.run(None).await,
        Some(answered) => answered.await,
    }
}

/// The bytes held for an answer that Keyward reads whole before the client gets its beginning, in answers; 0
/// for an answer passed on as it arrives.
fn copies_held(call: &Call<'_>, request: &UnaryRequest) -> usize {
    let checked = usize::from(request.answer_check == AnswerCheck::Keys);
    let spliced = if namespaces::hides(call, &request.caller) { namespaces::COPIES } else { 0 };
    let is_unary = call.method.stream == StreamingSides::Unary;
    let rewritten = if call.rewrite.is_some() && is_unary { REWRITTEN_COPIES } else { 0 };
    checked.max(spliced).max(rewritten)
}

/// The room for an answer; `None` for a small answer.
///
/// # Errors
/// The answer is too large to be held whole.
fn need_of(
    call: &Call<'_>,
    request: &UnaryRequest,
    answer: &MemberReply,
    copies: usize,
) -> Result<Option<UnreadRoomNeed>, Refusal> {
    if copies == 0 || !answer.is_success() {
        return Ok(UnreadRoomNeed::of(answer, call.method, request.lane));
    }
    let need = UnreadRoomNeed::of_copies(answer, copies)?;
    if need.is_some_and(|need| !call.client.unread.has_limit_above(need)) {
        return Err(Refusal::ANSWER_TOO_LARGE);
    }
    Ok(need)
}

/// Looks for keys beyond the caller's limit, and takes the caller's namespace out of an answer. Returns the
/// answer's room.
async fn edited(
    call: &Call<'_>,
    request: &UnaryRequest,
    answer: &mut MemberReply,
    room: Option<UnreadRoom>,
) -> Result<Option<UnreadRoom>, Refusal> {
    let room = usage_limits::check_more(call, request.answer_check, answer, room).await?;
    namespaces::show(call, &request.caller, request.lease, answer, room).await
}

/// The call, if its handler takes more steps than sending.
fn steps_of_handler<'e>(
    exchange: &Exchange<'e>,
    request: &'e UnaryRequest,
) -> Option<LocalBoxFuture<'e, Result<Box<MemberReply>, Refusal>>> {
    let message = request.message();
    Some(match exchange.call.method.handler {
        Handler::Defragment => defragment::pass_on(exchange.clone()).boxed_local(),
        Handler::LeaseLeases => read_floor::run_after_catch_up(exchange.clone()).boxed_local(),
        Handler::MoveLeader => leadership::run(exchange.clone(), message).boxed_local(),
        Handler::MemberRemove => removal::run(exchange.clone(), message).boxed_local(),
        Handler::LeaseTimeToLive => read_floor::run(exchange.clone(), message).boxed_local(),
        _ if request.lease == RequestLease::Drawn => {
            namespace_leases::grant(exchange.clone(), request.caller.namespace(), message).boxed_local()
        }
        _ if request.is_local => read_floor::run(exchange.clone(), message).boxed_local(),
        _ => return None,
    })
}

/// Takes room for a large answer, for `copies` of an answer held whole, and notes the consequences of a
/// success. `None` if a repeated read's answer is small.
async fn with_room(
    exchange: Exchange<'_>,
    request: &UnaryRequest,
    answer: Box<MemberReply>,
    need: UnreadRoomNeed,
    copies: usize,
) -> Result<(Box<MemberReply>, Option<UnreadRoom>), Refusal> {
    let (call, mut answer) = (exchange.call, answer);
    let mut room = call.client.unread.take(need);
    if room.is_none() && request.effect == Effect::ReadOnly {
        drop(answer);
        (answer, room) = repeated(exchange, request, need, copies).await?;
    }
    if copies > 0 {
        room = edited(call, request, &mut answer, room).await?;
    }
    finish(call, request, &mut answer)?;
    let room = match (room, UnreadRoomNeed::of(&answer, call.method, request.lane)) {
        // The rewritten form is to come.
        (Some(room), _) if call.rewrite.is_some() => Some(room),
        (Some(room), Some(need)) => Some(room.resized(need)),
        (_, None) => None,
        (None, Some(_)) => room_beyond_limit(call, request, &answer).await?,
    };
    Ok((answer, room))
}

/// Repeats a read whose answer was dropped because the buffer of unread answers was full. The wait for room
/// may be long, so the caller is identified again. `None` instead of room if the new answer is small.
async fn repeated(
    mut exchange: Exchange<'_>,
    request: &UnaryRequest,
    mut need: UnreadRoomNeed,
    copies: usize,
) -> Result<(Box<MemberReply>, Option<UnreadRoom>), Refusal> {
    let call = exchange.call;
    loop {
        call.gateway.metrics.unread.asked_again.inc();
        let room = call.client.unread.wait(need).await?;
        exchange.user = call.identify_again().await?.upstream_user.clone();
        let answer = asked(&exchange, request).await?;
        let Some(now) = need_of(call, request, &answer, copies)? else {
            return Ok((answer, None));
        };
        if let Some(room) = room.fit(now) {
            return Ok((answer, Some(room)));
        }
        need = now;
    }
}

/// Notes the consequences of a success for later calls, and replaces members' client URLs in the answer.
///
/// # Errors
/// The answer lists members and cannot be read whole.
pub fn finish(call: &Call<'_>, request: &UnaryRequest, answer: &mut MemberReply) -> Result<(), Refusal> {
    if !answer.is_success() {
        audited_request::note_denial(call, request.message(), answer);
        return Ok(());
    }
    usage_limits::note_success(call, request.message(), answer);
    if let Some(seen) = answer.progress {
        call.record.note_audited(|audit| audit.revision = Some(seen.revision));
    }
    match call.method.handler {
        Handler::MemberAnswer | Handler::MemberRemove => return member_answers::finish(call, answer),
        Handler::AuthChange => auth_changes::note(call, request.message()),
        _ => {}
    }
    if let Some(seen) = answer.progress {
        call.client.floor.raise(seen);
    }
    Ok(())
}

/// Waits for buffer room for the answer to a call not safe to repeat, in the shard's buffer and beyond the
/// connection's own limit. `None` for a small answer.
///
/// # Errors
/// The buffer stayed full.
pub async fn room_beyond_limit(
    call: &Call<'_>,
    request: &UnaryRequest,
    answer: &MemberReply,
) -> Result<Option<UnreadRoom>, Refusal> {
    let Some(need) = UnreadRoomNeed::of(answer, call.method, request.lane) else { return Ok(None) };
    let room = call.client.unread.wait_beyond(need).await;
    room.ok_or(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST).map(Some)
}
