//! The steps of every call in order: peer, call, target, member, reply.
//!
//! Owns: the order of the steps. Must not know: how a step is done. Invariants: each step takes the previous
//! step's result, so no step can be skipped; a non-canonical path, a non-canonical body needed for a
//! decision, or a bad credential sends no request upstream; a panic answers Unavailable, never a stream
//! reset.

use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use http::uri::PathAndQuery;
use http::{HeaderMap, Request, StatusCode};
use hyper::body::Incoming;
use tokio::time::{Instant, timeout, timeout_at};

use crate::config::{Identify, MemberPreference};
use crate::downstream::request_memory::{RequestMemoryCharge, Requester};
use crate::downstream::request_messages::RequestBody;
use crate::gateway::access_log::AccessRecord;
use crate::gateway::active_streams::Registration;
use crate::gateway::caller::Caller;
use crate::gateway::exchange::{Exchange, PATIENCE};
use crate::gateway::pipeline_result::PipelineResult;
use crate::gateway::reply::{self, DownstreamResponse};
use crate::gateway::request_body::collect;
use crate::gateway::unread_answers::{UnreadRoom, UnreadRoomNeed};
use crate::gateway::{
    ClientConnection, Gateway, addressed_member, blocking_calls, defragment, health, leadership, login,
    member_answers, read_floor, removal, streams, write_order,
};
use crate::identity::UserName;
use crate::lease::observe;
use crate::members::choose::MemberTarget;
use crate::members::membership::{AuthSetting, MembershipHint};
use crate::refusal::Refusal;
use crate::rpc::call::{self, Deadline};
use crate::rpc::method::{Class, Effect, Lane, METHODS, Method, RpcPathKind, StreamingSides, path_kind};
use crate::rpc::schema::MessageId;
use crate::rpc::{body_shape, canonical, frame, quorum};
use crate::telemetry::metrics::Metrics;
use crate::upstream::answer::MemberReply;
use crate::upstream::member_connection::UpstreamRequestBody;
use crate::upstream::send::{NoReply, upstream_headers};
use crate::watch::upstream_stream;

/// The metrics row shared by all unknown methods.
const UNKNOWN: (usize, &str) = (METHODS.len(), "unknown");

/// Serves a request of any kind.
pub async fn serve(
    gateway: Rc<Gateway>,
    client: Rc<ClientConnection>,
    request: Request<Incoming>,
) -> DownstreamResponse {
    let (head, body) = request.into_parts();
    let named_path = head.uri.path_and_query().map_or("", PathAndQuery::as_str);
    let kind = path_kind(named_path);
    let named = match &kind {
        RpcPathKind::Known(method) => (usize::from(method.index), method.path),
        _ => UNKNOWN,
    };
    let unary = !matches!(&kind, RpcPathKind::Known(method) if method.stream != StreamingSides::Unary);
    let mut record = record(&gateway, &client, named, unary);
    if !call::is_grpc(&head.method, &head.headers) {
        return reply::not_grpc(StatusCode::UNSUPPORTED_MEDIA_TYPE, record);
    }
    if client.is_dismissed() {
        return reply::refuse(&Refusal::SHUTTING_DOWN, record);
    }
    let held = gateway.hold_request(&client, requester(&kind), &head.headers);
    let mut held = match held {
        Ok(held) => held,
        Err(refusal) => return reply::refuse(&refusal, record),
    };
    let outcome = {
        let steps = async {
            match kind {
                RpcPathKind::Malformed => {
                    gateway.metrics.not_canonical.inc();
                    Err(kind.refusal(named_path).unwrap_or(Refusal::PANICKED))
                }
                RpcPathKind::WellFormed { .. } => {
                    serve_unknown(&gateway, &client, &head, body, &mut record).await
                }
                RpcPathKind::Known(method) => {
                    serve_known(&gateway, &client, method, &head.headers, body, &mut held, &mut record).await
                }
            }
        };
        guarded(&gateway.metrics, pin!(steps)).await
    };
    match outcome {
        Ok(answer) => answer.reply(record),
        Err(refusal) => reply::refuse(&refusal, record),
    }
}

/// The memory account charged before the caller is identified. Most methods charge the account of identified
/// callers: identification is immediate for nearly all calls, and the slower calls carry a genuine
/// credential.
fn requester(kind: &RpcPathKind) -> Requester {
    match kind {
        RpcPathKind::Known(method) if is_anybodys(method) => Requester::Anybody,
        _ => Requester::Known,
    }
}

/// True if calls of `method` are answered without identifying the caller.
fn is_anybodys(method: &Method) -> bool {
    matches!(method.path, login::PATH | health::CHECK | health::WATCH)
}

/// Runs `steps` and turns a panic into a refusal. A client would read a stream reset as Canceled and send a
/// write again (docs/decisions.md#d38). `steps` is pinned by the caller: passed by value, the future would be
/// stored twice in every request's future.
async fn guarded<T>(
    metrics: &Metrics,
    steps: Pin<&mut impl Future<Output = Result<T, Refusal>>>,
) -> Result<T, Refusal> {
    AssertUnwindSafe(steps).catch_unwind().await.unwrap_or_else(|_panic| {
        metrics.panics.inc();
        Err(Refusal::PANICKED)
    })
}

fn record(
    gateway: &Gateway,
    client: &ClientConnection,
    row: (usize, &'static str),
    unary: bool,
) -> AccessRecord {
    let metrics = Arc::clone(&gateway.metrics);
    AccessRecord::begin(metrics, gateway.access_log.clone(), row, unary, Rc::clone(&client.origin))
}

async fn serve_known(
    gateway: &Rc<Gateway>,
    client: &Rc<ClientConnection>,
    method: &'static Method,
    headers: &HeaderMap,
    body: Incoming,
    held: &mut RequestMemoryCharge,
    record: &mut AccessRecord,
) -> Result<PipelineResult, Refusal> {
    let mut body = RequestBody::of(headers, body, held.sibling())?;
    let deadline = Deadline::of(headers)?.map(|left| Instant::now() + left);
    match method.path {
        health::CHECK => return health::check(gateway, body).await,
        health::WATCH => return health::watch(gateway, client, body).await,
        login::PATH => {
            // This listener does not accept session tokens, so a login would be useless: no password is
            // checked.
            if !gateway.callers.may_identify_by(client, Identify::Token) {
                return Err(Refusal::AUTH_NOT_ENABLED);
            }
            let answer = login::authenticate(gateway, client, method, body, deadline, record).await?;
            return Ok(PipelineResult::Ours(answer));
        }
        _ => {}
    }
    // Register the watch before any await: a write arriving next must find the registration.
    let start = (method.path == upstream_stream::PATH).then(|| client.watch_starts.begin());
    let caller = identified(gateway, client, method, headers, deadline, record).await?;
    if gateway.requester(&caller) == Requester::Anybody {
        *held = gateway.hold_request(client, Requester::Anybody, headers)?;
        body.held = held.sibling();
    }
    if let Some(start) = start {
        return Ok(PipelineResult::Stream(streams::watch(
            gateway, client, &caller, headers, deadline, body, start,
        )?));
    }
    match method.path {
        "/etcdserverpb.Lease/LeaseKeepAlive" => Ok(PipelineResult::Stream(streams::keep_alive(
            gateway, client, &caller, headers, deadline, body,
        )?)),
        _ => serve_unary(gateway, client, method, &caller, headers, body, deadline, record).await,
    }
}

/// Authenticates the caller under the current configuration.
async fn identified(
    gateway: &Rc<Gateway>,
    client: &Rc<ClientConnection>,
    method: &'static Method,
    headers: &HeaderMap,
    deadline: Option<Instant>,
    record: &mut AccessRecord,
) -> Result<Rc<Caller>, Refusal> {
    let served = gateway.door.members.snapshot.load().cluster;
    let caller = gateway.callers.identify(gateway, client, Some(method), headers, record);
    let caller = match deadline {
        Some(deadline) => timeout_at(deadline, caller).await.unwrap_or(Err(Refusal::DEADLINE_EXCEEDED))?,
        None => caller.await?,
    };
    client.follow(served);
    // The caller was authenticated against the previous cluster.
    if gateway.door.has_followed(served) {
        return Err(Refusal::NOTHING_SENT);
    }
    // After its end, a connection finishes calls in flight and starts no new call.
    match client.authorization_end(&caller) {
        _ if client.is_dismissed() => Err(Refusal::SHUTTING_DOWN),
        Some((at, refusal)) if at <= Instant::now() => Err(refusal),
        _ => {
            client.note_call(gateway, &caller);
            Ok(caller)
        }
    }
}

/// Serves a call with a single request message.
#[expect(clippy::too_many_arguments, reason = "the steps before it, each of them")]
async fn serve_unary(
    gateway: &Rc<Gateway>,
    client: &Rc<ClientConnection>,
    method: &'static Method,
    caller: &Rc<Caller>,
    headers: &HeaderMap,
    body: RequestBody,
    deadline: Option<Instant>,
    record: &mut AccessRecord,
) -> Result<PipelineResult, Refusal> {
    let (framed, message, _held, came) = request_message(gateway, client, method, body, deadline).await?;
    let after_body;
    let caller = match came {
        BodyArrival::WithHeaders => caller,
        BodyArrival::AfterHeaders => {
            after_body = Box::pin(identified(gateway, client, method, headers, deadline, record)).await?;
            &after_body
        }
    };
    if method.path == observe::PATH {
        let observed = streams::observe(gateway, client, caller, headers, deadline, &message)?;
        return Ok(PipelineResult::Stream(observed));
    }
    let effect = body_shape::effect(method, &message);
    let caller_after_wait;
    let caller = if write_order::wait(gateway, client, method, effect, deadline).await {
        caller_after_wait = Box::pin(identified(gateway, client, method, headers, deadline, record)).await?;
        &caller_after_wait
    } else {
        caller
    };
    let local = body_shape::is_local(method, &message);
    let wanted = member_target(gateway, client, method, headers, effect, local)?;
    if method.path == defragment::PATH && defragment::is_ours(gateway, wanted) {
        let work = defragment::serve(gateway, client, caller, wanted, deadline);
        return Box::pin(work).await.map(PipelineResult::Ours);
    }
    let _passed_on = defragment::guard_passed_on_call(gateway, method, &caller.upstream_user).await;
    let lane = body_shape::lane(method, &message);
    let exchange = Exchange {
        gateway,
        method,
        path: method.path_and_query(),
        wanted,
        lane,
        effect,
        quorum: quorum::need(method, &message),
        may_reissue: body_shape::may_reissue(method, &message),
        user: caller.upstream_user.clone(),
        headers,
        body: framed,
        deadline,
    };
    let (in_use, mut stay) = match lane {
        Lane::Unary => (None, Registration::UNBOUND),
        _ => (caller.in_use(), gateway.enter(client, caller)?),
    };
    let mut room = None;
    let mut answer = if blocking_calls::blocks(method) {
        let claim = blocking_calls::claim(gateway, method, &message, &caller.upstream_user).await;
        // Boxed, so that other calls do not pay for the larger future of a waiting call.
        let waiting = Box::pin(blocking_calls::run(exchange, claim, client.drain.clone(), &mut stay, record));
        match client.authorization_end(caller) {
            None => waiting.await?,
            Some((at, refusal)) => timeout_at(at, waiting).await.unwrap_or(Err(refusal))?,
        }
    } else {
        let (answer, taken) = with_room(exchange, gateway, client, local, &message, record).await?;
        room = taken;
        answer
    };
    // An answer without a status is larger than the held-back part, and begins like a success.
    if answer.status().is_none_or(|status| status.is_ok()) {
        finish(gateway, client, method, &mut answer)?;
        note(gateway, client, method, &message, record).await;
    }
    if room.is_none() {
        room = room_beyond_limit(client, method, lane, &answer, deadline).await?;
    }
    Ok(PipelineResult::Member(Box::new(answer), in_use, stay, room))
}

/// Collects and checks a request's message: the framed bytes, the bare message, the memory guard for both,
/// and when the message was complete.
async fn request_message(
    gateway: &Gateway,
    client: &ClientConnection,
    method: &Method,
    body: RequestBody,
    deadline: Option<Instant>,
) -> Result<(Bytes, Bytes, RequestMemoryCharge, BodyArrival), Refusal> {
    let (mut framed, mut held, came) = collect_body(gateway, body, deadline).await?;
    if blocking_calls::blocks(method) {
        (framed, held) = blocking_calls::hold_request(gateway, client, &framed)?;
    }
    let message = frame::unary(&framed).map_err(|fault| refused(gateway, fault.refusal(None)))?;
    canonical::check(method.body, &message).map_err(|fault| refused(gateway, fault.into()))?;
    Ok((framed, message, held, came))
}

/// Waits for buffer room for the answer to a call not safe to repeat, in the shard's buffer and beyond the
/// connection's own limit.
async fn room_beyond_limit(
    client: &ClientConnection,
    method: &Method,
    lane: Lane,
    answer: &MemberReply,
    deadline: Option<Instant>,
) -> Result<Option<UnreadRoom>, Refusal> {
    let Some(need) = UnreadRoomNeed::of(answer, method, lane) else { return Ok(None) };
    let until = deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
    let waited = timeout_at(until, client.unread.wait_beyond(need)).await;
    waited.unwrap_or(Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST)).map(Some)
}

/// Makes the call and takes buffer room for a large answer; a read finding no room is repeated. `None`
/// instead of room if the answer is small, or if the buffer is full and the call is not safe to repeat.
async fn with_room(
    exchange: Exchange<'_>,
    gateway: &Rc<Gateway>,
    client: &Rc<ClientConnection>,
    local: bool,
    message: &Bytes,
    record: &mut AccessRecord,
) -> Result<(MemberReply, Option<UnreadRoom>), Refusal> {
    let answer = answered(exchange.clone(), client, local, message, record).await?;
    let Some(need) = UnreadRoomNeed::of(&answer, exchange.method, exchange.lane) else {
        return Ok((answer, None));
    };
    let room = client.unread.take(need);
    if room.is_some() || exchange.effect != Effect::ReadOnly {
        return Ok((answer, room));
    }
    drop(answer);
    // Boxed, so that other calls do not pay for the larger future of a waiting call.
    Box::pin(asked_again(exchange, gateway, client, local, message, need, record)).await
}

/// Repeats a read whose answer was dropped because the buffer of unread answers was full. The wait for room
/// may be long, so the caller is identified again.
async fn asked_again(
    exchange: Exchange<'_>,
    gateway: &Rc<Gateway>,
    client: &Rc<ClientConnection>,
    local: bool,
    message: &Bytes,
    mut need: UnreadRoomNeed,
    record: &mut AccessRecord,
) -> Result<(MemberReply, Option<UnreadRoom>), Refusal> {
    let Exchange { method, headers, deadline, lane, .. } = exchange;
    loop {
        gateway.metrics.unread.asked_again.inc();
        let waiting = client.unread.wait(need);
        let room = match deadline {
            Some(deadline) => {
                timeout_at(deadline, waiting).await.unwrap_or(Err(Refusal::DEADLINE_EXCEEDED))?
            }
            None => waiting.await?,
        };
        let caller = Box::pin(identified(gateway, client, method, headers, deadline, record)).await?;
        let exchange = Exchange { user: caller.upstream_user.clone(), ..exchange.clone() };
        let answer = answered(exchange, client, local, message, record).await?;
        let Some(now) = UnreadRoomNeed::of(&answer, method, lane) else { return Ok((answer, None)) };
        if let Some(room) = room.fit(now) {
            return Ok((answer, Some(room)));
        }
        need = now;
    }
}

/// Makes the call; the answer is never older than an answer already shown to the client.
async fn answered(
    exchange: Exchange<'_>,
    client: &ClientConnection,
    local: bool,
    message: &Bytes,
    record: &mut AccessRecord,
) -> Result<MemberReply, Refusal> {
    match exchange.method.body {
        MessageId::LeaseLeasesRequest => read_floor::run_after_catch_up(exchange, record).await,
        MessageId::LeaseTimeToLiveRequest => read_floor::run(exchange, client, message, record).await,
        _ if local => read_floor::run(exchange, client, message, record).await,
        _ => removal::or_run(exchange, message, record).await,
    }
}

/// Notes the consequences of a successful call for later calls.
async fn note(
    gateway: &Gateway,
    client: &ClientConnection,
    method: &Method,
    message: &Bytes,
    record: &AccessRecord,
) {
    if let (Class::Auth, Some(member)) = (method.class, record.member)
        && body_shape::effect(method, message) != Effect::ReadOnly
    {
        client.pin_home(member);
    }
    note_auth_change(gateway, method, message);
    if method.path == leadership::PATH {
        leadership::wait_for_leader(gateway, message).await;
    }
}

/// When a request's message was complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyArrival {
    /// Together with the header: the caller's identification still holds.
    WithHeaders,
    /// After a wait of up to 30 seconds: the caller may have been revoked meanwhile and is identified again.
    AfterHeaders,
}

/// Collects a request's body, noting if the body had to be awaited.
async fn collect_body(
    gateway: &Gateway,
    body: RequestBody,
    deadline: Option<Instant>,
) -> Result<(Bytes, RequestMemoryCharge, BodyArrival), Refusal> {
    let mut came = BodyArrival::WithHeaders;
    let collecting = waited_for(collect(gateway, body), &mut came);
    let collected = match deadline {
        Some(deadline) => timeout_at(deadline, collecting).await,
        None => Ok(collecting.await),
    };
    let (framed, held) = collected.unwrap_or(Err(Refusal::DEADLINE_EXCEEDED))?;
    Ok((framed, held, came))
}

/// Awaits `future` and notes if the future was ever pending.
async fn waited_for<T>(future: impl Future<Output = T>, came: &mut BodyArrival) -> T {
    let mut future = pin!(future);
    poll_fn(|cx| {
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            *came = BodyArrival::AfterHeaders;
        }
        polled
    })
    .await
}

/// The kind of member for a call: chosen by the member named by the client, the method's row, the call's
/// effect, and the configured preferences.
fn member_target(
    gateway: &Gateway,
    client: &ClientConnection,
    method: &'static Method,
    headers: &HeaderMap,
    effect: Effect,
    is_local: bool,
) -> Result<MemberTarget, Refusal> {
    if is_local {
        // A member answers from its own store: any at or above the client's revision floor.
        return Ok(MemberTarget::Current { home: gateway.home(client), floor: client.floor.revision() });
    }
    let config = gateway.config.load();
    let settings = &config.cluster;
    let addressed =
        addressed_member::addressed(client, method, headers, &gateway.door.members.snapshot.load())?;
    Ok(match (addressed.map_or_else(|| MemberTarget::by(method), MemberTarget::This), effect) {
        (MemberTarget::Any, _) if client.is_pinned_home() => MemberTarget::Home(gateway.home(client)),
        (MemberTarget::Any, Effect::ReadOnly) if settings.reads == MemberPreference::Leader => {
            MemberTarget::LeaderFirst
        }
        (MemberTarget::Any, Effect::ReadOnly) if !settings.near.is_empty() => MemberTarget::Near,
        (MemberTarget::Any, Effect::Mutates | Effect::Idempotent)
            if settings.writes == MemberPreference::Leader =>
        {
            MemberTarget::LeaderFirst
        }
        (wanted, _) => wanted,
    })
}

/// Rewrites member addresses in a successful answer, or raises the client's revision floor.
fn finish(
    gateway: &Gateway,
    client: &ClientConnection,
    method: &'static Method,
    answer: &mut MemberReply,
) -> Result<(), Refusal> {
    if let Some(fields) = member_answers::member_fields(method.path) {
        if method.body != MessageId::MemberListRequest {
            gateway.door.members.hints.send(MembershipHint::ListChanged);
        }
        let whole = answer.message();
        // An answer too large to be read whole cannot be rewritten and would reveal the members' own
        // addresses.
        let message = whole.as_ref().and_then(|framed| framed.get(frame::PREFIX..));
        let config = gateway.config.load();
        let told = config.advertise.to_clients_of(&client.listener.name);
        let (message, told) = message.zip(told).ok_or(Refusal::UNREADABLE_ANSWER)?;
        let rewritten = member_answers::rewrite(message, fields, &told.members, &told.client_urls);
        answer.data = [rewritten.map_err(|_| Refusal::UNREADABLE_ANSWER)?].into();
    } else if let Some(seen) = answer.progress {
        client.floor.raise(seen);
    }
    Ok(())
}

/// Notes a successful change of users or of auth: verified passwords of a changed user are forgotten
/// (docs/decisions.md#d12), and the auth state follows AuthEnable and AuthDisable (docs/decisions.md#d48).
fn note_auth_change(gateway: &Gateway, method: &Method, message: &Bytes) {
    let named = match method.body {
        MessageId::AuthEnableRequest => return gateway.door.report_auth(AuthSetting::On),
        MessageId::AuthDisableRequest => return gateway.door.report_auth(AuthSetting::Off),
        MessageId::AuthUserChangePasswordRequest
        | MessageId::AuthUserDeleteRequest
        | MessageId::AuthUserAddRequest => body_shape::user_name(message),
        _ => None,
    };
    if let Some(name) = named {
        gateway.logins.forget_user(&UserName::from(name));
    }
}

/// Passes a call of an unknown method through unchanged, without retries.
async fn serve_unknown(
    gateway: &Rc<Gateway>,
    client: &Rc<ClientConnection>,
    head: &http::request::Parts,
    body: Incoming,
    record: &mut AccessRecord,
) -> Result<PipelineResult, Refusal> {
    let caller = gateway.callers.identify(gateway, client, None, &head.headers, record).await?;
    let path = head.uri.path_and_query().cloned().ok_or_else(|| Refusal::malformed_path(""))?;
    let member = gateway.door.choose(MemberTarget::Any, &[]).ok_or(Refusal::NOTHING_SENT)?;
    let stay = gateway.enter(client, &caller)?;
    record.member = Some(member.id);
    record.attempts = 1;
    let shown = gateway.door.credential_for(&caller.upstream_user, &member).await.map_err(|failure| {
        if failure.is_refusal() { Refusal::INVALID_AUTH_TOKEN } else { Refusal::NOTHING_SENT }
    })?;
    let mut head_upstream = upstream_headers(&head.headers, &shown);
    // The frames are passed through unchanged, so the member must know their compression.
    for name in ["grpc-encoding", "grpc-accept-encoding"] {
        if let Some(value) = head.headers.get(name) {
            head_upstream.fields.insert(name, value.clone());
        }
    }
    let sent =
        gateway.door.send(&member, Lane::Stream, path, head_upstream, UpstreamRequestBody::Piped(body)).await;
    match sent {
        Ok((response, _)) if !response.status().is_success() => {
            Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST)
        }
        Ok((response, in_flight)) => {
            let answer = Box::new(MemberReply::opened(response, in_flight));
            let room = client.unread.wait_beyond(UnreadRoomNeed::of_stream(Lane::Stream));
            let room = timeout(PATIENCE, room).await.unwrap_or(Err(Refusal::TOO_MANY_REQUESTS))?;
            Ok(PipelineResult::Member(answer, caller.in_use(), stay, Some(room)))
        }
        Err(NoReply::NeverSent(_) | NoReply::NotShown(_)) => Err(Refusal::NOTHING_SENT),
        Err(NoReply::NoRoom) => Err(Refusal::TOO_MANY_REQUESTS),
        Err(NoReply::Lost(_)) => Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST),
    }
}

fn refused(gateway: &Gateway, refusal: Refusal) -> Refusal {
    gateway.metrics.not_canonical.inc();
    refusal
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refusal::Code;

    #[tokio::test]
    async fn a_panic_is_answered_and_counted() {
        let metrics = Metrics::new(Vec::new());
        let panicking = async {
            tokio::task::yield_now().await;
            if metrics.panics.get() == 0 {
                panic!("on purpose");
            }
            Ok(())
        };
        let refusal = guarded(&metrics, pin!(panicking)).await.expect_err("refused");
        assert_eq!(refusal.code(), Code::Unavailable);
        assert_eq!(metrics.panics.get(), 1);
        assert_eq!(guarded(&metrics, pin!(async { Ok(7) })).await.ok(), Some(7));
        assert_eq!(metrics.panics.get(), 1);
    }
}
