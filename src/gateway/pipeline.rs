//! Peer, call, target, member, reply: the steps of every call, in this order, on this screen.
//!
//! Owns: the order. Must not know: how a step is done. Invariants: a step takes what the one before it made, so none
//! can be skipped; a path that is not canonical, a body that a decision was made on and that is not canonical, or a
//! credential that is bad, sends nothing upstream; a panic answers Unavailable, never a reset.

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

use crate::config::{Identify, Serves};
use crate::downstream::request_memory::{Held, Requester};
use crate::downstream::requests::RequestBody;
use crate::downstream::said::Said;
use crate::gateway::access_log::Record;
use crate::gateway::caller::Caller;
use crate::gateway::exchange::{Exchange, PATIENCE};
use crate::gateway::gathering::collect;
use crate::gateway::live::Stay;
use crate::gateway::reply::{self, Downstream};
use crate::gateway::unread::{Need, Room};
use crate::gateway::{
    Client, Gateway, addressed, blocked, current, defragment, health, leadership, login, member_answers,
    removal, streams, write_order,
};
use crate::identity::UserName;
use crate::lease::observe;
use crate::refusal::Refusal;
use crate::rpc::call::{self, Deadline};
use crate::rpc::method::{Class, Effect, Lane, METHODS, Method, PathKind, Stream, path_kind};
use crate::rpc::schema::MessageId;
use crate::rpc::{canonical, frame, quorum, shape};
use crate::telemetry::metrics::Metrics;
use crate::upstream::answer::Answer;
use crate::upstream::choose::Wanted;
use crate::upstream::connection::Outgoing;
use crate::upstream::membership::{Auth, Hint};
use crate::upstream::send::{NoAnswer, upstream_headers};
use crate::watch::source;

/// The row of the metrics that unknown methods share.
const UNKNOWN: (usize, &str) = (METHODS.len(), "unknown");

/// Serves one request, whatever it is.
pub async fn serve(gateway: Rc<Gateway>, client: Rc<Client>, request: Request<Incoming>) -> Downstream {
    let (head, body) = request.into_parts();
    let named_path = head.uri.path_and_query().map_or("", PathAndQuery::as_str);
    let kind = path_kind(named_path);
    let named = match &kind {
        PathKind::Known(method) => (usize::from(method.index), method.path),
        _ => UNKNOWN,
    };
    let unary = !matches!(&kind, PathKind::Known(method) if method.stream != Stream::Unary);
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
                PathKind::Malformed => {
                    gateway.metrics.not_canonical.inc();
                    Err(kind.refusal(named_path).unwrap_or(Refusal::PANICKED))
                }
                PathKind::WellFormed { .. } => unknown(&gateway, &client, &head, body, &mut record).await,
                PathKind::Known(method) => {
                    known(&gateway, &client, method, &head.headers, body, &mut held, &mut record).await
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

/// On whose account a request is whose client has not been identified yet. That is done at once, but for few, and those have shown something
/// genuine.
fn requester(kind: &PathKind) -> Requester {
    match kind {
        PathKind::Known(method) if is_anybodys(method) => Requester::Anybody,
        _ => Requester::Known,
    }
}

/// Whether calls of `method` are answered whoever makes them.
fn is_anybodys(method: &Method) -> bool {
    matches!(method.path, login::PATH | health::CHECK | health::WATCH)
}

/// What `steps` end with. A panic of theirs is a refusal: a client would take a reset for Canceled, and send a write
/// again (rules 38). `steps` is pinned by the caller: passed by value, the future of every request would hold it twice.
async fn guarded<T>(
    metrics: &Metrics,
    steps: Pin<&mut impl Future<Output = Result<T, Refusal>>>,
) -> Result<T, Refusal> {
    AssertUnwindSafe(steps).catch_unwind().await.unwrap_or_else(|_panic| {
        metrics.panics.inc();
        Err(Refusal::PANICKED)
    })
}

fn record(gateway: &Gateway, client: &Client, row: (usize, &'static str), unary: bool) -> Record {
    let metrics = Arc::clone(&gateway.metrics);
    Record::begin(metrics, gateway.access_log.clone(), row, unary, Rc::clone(&client.origin))
}

/// What a step of the pipeline ended with.
pub enum Served {
    /// A member's answer.
    Member(Box<Answer>, Option<crate::upstream::credential::InUse>, Stay, Option<Room>),
    /// A message of our own, framed.
    Ours(Bytes),
    /// A stream of our own.
    Stream(tokio::sync::mpsc::Receiver<Said>),
}

impl Served {
    fn reply(self, record: Record) -> Downstream {
        match self {
            Self::Member(answer, in_use, stay, room) => {
                let broken = Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST;
                reply::deliver(*answer, broken, in_use, stay, room, record)
            }
            Self::Ours(message) => reply::message(message, record),
            Self::Stream(said) => reply::stream(said, Refusal::SHUTTING_DOWN, record),
        }
    }
}

async fn known(
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    method: &'static Method,
    headers: &HeaderMap,
    body: Incoming,
    held: &mut Held,
    record: &mut Record,
) -> Result<Served, Refusal> {
    let mut body = RequestBody::of(headers, body, held.beside())?;
    let deadline = Deadline::of(headers)?.map(|left| Instant::now() + left);
    match method.path {
        health::CHECK => return health::check(gateway, body).await,
        health::WATCH => return health::watch(gateway, client, body).await,
        login::PATH => {
            // What it would give counts for nothing here: nobody's password is looked at.
            if !gateway.callers.takes(client, Identify::Token) {
                return Err(Refusal::AUTH_NOT_ENABLED);
            }
            return login::authenticate(gateway, client, method, body, deadline, record).await;
        }
        _ => {}
    }
    // Before anything is waited for: a write that arrives next must find it.
    let start = (method.path == source::PATH).then(|| client.watch_starts.begin());
    let caller = identified(gateway, client, method, headers, deadline, record).await?;
    if gateway.requester(&caller) == Requester::Anybody {
        *held = gateway.hold_request(client, Requester::Anybody, headers)?;
        body.held = held.beside();
    }
    if let Some(start) = start {
        return Ok(Served::Stream(streams::watch(gateway, client, &caller, headers, deadline, body, start)?));
    }
    match method.path {
        "/etcdserverpb.Lease/LeaseKeepAlive" => {
            Ok(Served::Stream(streams::keep_alive(gateway, client, &caller, headers, deadline, body)?))
        }
        _ => through(gateway, client, method, &caller, headers, body, deadline, record).await,
    }
}

/// Who is calling, as of now.
async fn identified(
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    method: &'static Method,
    headers: &HeaderMap,
    deadline: Option<Instant>,
    record: &mut Record,
) -> Result<Rc<Caller>, Refusal> {
    let served = gateway.door.members.snapshot.load().cluster;
    let caller = gateway.callers.identify(gateway, client, Some(method), headers, record);
    let caller = match deadline {
        Some(deadline) => timeout_at(deadline, caller).await.unwrap_or(Err(Refusal::DEADLINE_EXCEEDED))?,
        None => caller.await?,
    };
    client.follow(served);
    // What was proved to one cluster is not proved to another.
    if gateway.door.has_followed(served) {
        return Err(Refusal::NOTHING_SENT);
    }
    // A connection whose welcome is over has calls under way, and lets none begin.
    match client.ends(&caller) {
        _ if client.is_dismissed() => Err(Refusal::SHUTTING_DOWN),
        Some((at, refusal)) if at <= Instant::now() => Err(refusal),
        _ => {
            client.note_call(gateway, &caller);
            Ok(caller)
        }
    }
}

/// A call whose request is one message.
#[expect(clippy::too_many_arguments, reason = "the steps before it, each of them")]
async fn through(
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    method: &'static Method,
    caller: &Rc<Caller>,
    headers: &HeaderMap,
    body: RequestBody,
    deadline: Option<Instant>,
    record: &mut Record,
) -> Result<Served, Refusal> {
    let (framed, message, _held, came) = request_message(gateway, client, method, body, deadline).await?;
    let again;
    let caller = match came {
        Came::AtOnce => caller,
        Came::Later => {
            again = Box::pin(identified(gateway, client, method, headers, deadline, record)).await?;
            &again
        }
    };
    if method.path == observe::PATH {
        return Ok(Served::Stream(streams::observe(gateway, client, caller, headers, deadline, &message)?));
    }
    let effect = shape::effect(method, &message);
    let behind;
    let caller = if write_order::wait(gateway, client, method, effect, deadline).await {
        behind = Box::pin(identified(gateway, client, method, headers, deadline, record)).await?;
        &behind
    } else {
        caller
    };
    let local = shape::is_local(method, &message);
    let wanted =
        if local { current(gateway, client) } else { wanted(gateway, client, method, headers, effect)? };
    if method.path == defragment::PATH && defragment::is_ours(gateway, wanted) {
        let work = defragment::serve(gateway, client, caller, wanted, deadline);
        return Box::pin(work).await.map(Served::Ours);
    }
    let _passed_on = defragment::passed_on(gateway, method, &caller.whom).await;
    let lane = shape::lane(method, &message);
    let exchange = Exchange {
        gateway,
        method,
        path: method.path_and_query(),
        wanted,
        lane,
        effect,
        quorum: quorum::need(method, &message),
        may_reissue: shape::may_reissue(method, &message),
        whom: caller.whom.clone(),
        headers,
        body: framed,
        deadline,
    };
    let (in_use, mut stay) = match lane {
        Lane::Unary => (None, Stay::UNBOUND),
        _ => (caller.in_use(), gateway.enter(client, caller)?),
    };
    let mut room = None;
    let mut answer = if blocked::blocks(method) {
        let claim = blocked::claim(gateway, method, &message, &caller.whom).await;
        // Apart: no other call is to be as large as one that waits.
        let waiting = Box::pin(blocked::run(exchange, claim, client.drain.clone(), &mut stay, record));
        match client.ends(caller) {
            None => waiting.await?,
            Some((at, refusal)) => timeout_at(at, waiting).await.unwrap_or(Err(refusal))?,
        }
    } else {
        let (answer, taken) = with_room(exchange, gateway, client, local, &message, record).await?;
        room = taken;
        answer
    };
    // Without a status it is larger than what is held back, and begins like a success.
    if answer.status().is_none_or(|status| status.is_ok()) {
        finish(gateway, client, method, &mut answer)?;
        note(gateway, client, method, &message, record).await;
    }
    if room.is_none() {
        room = room_beyond_limit(client, method, lane, &answer, deadline).await?;
    }
    Ok(Served::Member(Box::new(answer), in_use, stay, room))
}

/// A request's message, framed and bare, after the checks that every decision on a message needs; what holds its place in the byte budget; and
/// when the message was whole.
async fn request_message(
    gateway: &Gateway,
    client: &Client,
    method: &Method,
    body: RequestBody,
    deadline: Option<Instant>,
) -> Result<(Bytes, Bytes, Held, Came), Refusal> {
    let (mut framed, mut held, came) = arrived(gateway, body, deadline).await?;
    if blocked::blocks(method) {
        (framed, held) = blocked::kept(gateway, client, &framed)?;
    }
    let message = frame::unary(&framed).map_err(|fault| refused(gateway, fault.refusal(None)))?;
    canonical::check(method.body, &message).map_err(|fault| refused(gateway, fault.into()))?;
    Ok((framed, message, held, came))
}

/// Room for an answer to a call that may not be made again: in the shard's buffer of unread answers, beyond the share of the client's own
/// connection.
async fn room_beyond_limit(
    client: &Client,
    method: &Method,
    lane: Lane,
    answer: &Answer,
    deadline: Option<Instant>,
) -> Result<Option<Room>, Refusal> {
    let Some(need) = Need::of(answer, method, lane) else { return Ok(None) };
    let until = deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
    let waited = timeout_at(until, client.unread.wait_beyond(need)).await;
    waited.unwrap_or(Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST)).map(Some)
}

/// A member's answer, and room for what its client does not take at once. Without room where it is small, or where there is none and the
/// call may not be made again.
async fn with_room(
    exchange: Exchange<'_>,
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    local: bool,
    message: &Bytes,
    record: &mut Record,
) -> Result<(Answer, Option<Room>), Refusal> {
    let answer = answered(exchange.clone(), client, local, message, record).await?;
    let Some(need) = Need::of(&answer, exchange.method, exchange.lane) else { return Ok((answer, None)) };
    let room = client.unread.take(need);
    if room.is_some() || exchange.effect != Effect::ReadOnly {
        return Ok((answer, room));
    }
    drop(answer);
    // Apart: no other call is to be as large as one that waits.
    Box::pin(asked_again(exchange, gateway, client, local, message, need, record)).await
}

/// The answer to a read that is made again: there was no room for its answer, since its client has not read others. Its caller is identified
/// again, since the wait may be long.
async fn asked_again(
    exchange: Exchange<'_>,
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    local: bool,
    message: &Bytes,
    mut need: Need,
    record: &mut Record,
) -> Result<(Answer, Option<Room>), Refusal> {
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
        let exchange = Exchange { whom: caller.whom.clone(), ..exchange.clone() };
        let answer = answered(exchange, client, local, message, record).await?;
        let Some(now) = Need::of(&answer, method, lane) else { return Ok((answer, None)) };
        if let Some(room) = room.fit(now) {
            return Ok((answer, Some(room)));
        }
        need = now;
    }
}

/// A member's answer, which tells nothing from before what the client was shown.
async fn answered(
    exchange: Exchange<'_>,
    client: &Client,
    local: bool,
    message: &Bytes,
    record: &mut Record,
) -> Result<Answer, Refusal> {
    match exchange.method.body {
        MessageId::LeaseLeasesRequest => current::caught_up(exchange, record).await,
        MessageId::LeaseTimeToLiveRequest => current::run(exchange, client, message, record).await,
        _ if local => current::run(exchange, client, message, record).await,
        _ => removal::or_run(exchange, message, record).await,
    }
}

/// What follows for later calls from one that succeeded.
async fn note(gateway: &Gateway, client: &Client, method: &Method, message: &Bytes, record: &Record) {
    if let (Class::Auth, Some(member)) = (method.class, record.member)
        && shape::effect(method, message) != Effect::ReadOnly
    {
        client.stay_at(member);
    }
    note_auth_change(gateway, method, message);
    if method.path == leadership::PATH {
        leadership::seen(gateway, message).await;
    }
}

/// When a request's message was whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    /// When its header was read: what was decided by that one holds.
    AtOnce,
    /// Later, up to half a minute: whoever was let in may have been revoked since, and is looked at again.
    Later,
}

/// A request's body, and when it was whole.
async fn arrived(
    gateway: &Gateway,
    body: RequestBody,
    deadline: Option<Instant>,
) -> Result<(Bytes, Held, Came), Refusal> {
    let mut came = Came::AtOnce;
    let collecting = waited_for(collect(gateway, body), &mut came);
    let collected = match deadline {
        Some(deadline) => timeout_at(deadline, collecting).await,
        None => Ok(collecting.await),
    };
    let (framed, held) = collected.unwrap_or(Err(Refusal::DEADLINE_EXCEEDED))?;
    Ok((framed, held, came))
}

/// The same future, which notes whether it was waited for.
async fn waited_for<T>(future: impl Future<Output = T>, came: &mut Came) -> T {
    let mut future = pin!(future);
    poll_fn(|cx| {
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            *came = Came::Later;
        }
        polled
    })
    .await
}

/// Which member a call wants: what the client says of it, its row, what it does, and what the configuration prefers.
fn wanted(
    gateway: &Gateway,
    client: &Client,
    method: &'static Method,
    headers: &HeaderMap,
    effect: Effect,
) -> Result<Wanted, Refusal> {
    let config = gateway.config.load();
    let settings = &config.cluster;
    let addressed = addressed::addressed(client, method, headers, &gateway.door.members.snapshot.load())?;
    Ok(match (addressed.map_or_else(|| Wanted::by(method), Wanted::This), effect) {
        (Wanted::Any, _) if client.is_at_home() => Wanted::Home(gateway.home(client)),
        (Wanted::Any, Effect::ReadOnly) if settings.reads == Serves::Leader => Wanted::LeaderFirst,
        (Wanted::Any, Effect::ReadOnly) if !settings.near.is_empty() => Wanted::Near,
        (Wanted::Any, Effect::Mutates | Effect::Idempotent) if settings.writes == Serves::Leader => {
            Wanted::LeaderFirst
        }
        (wanted, _) => wanted,
    })
}

/// A member that is no further back than what the client was shown.
fn current(gateway: &Gateway, client: &Client) -> Wanted {
    Wanted::Current { home: gateway.home(client), floor: client.floor.revision() }
}

/// What is read from, or changed in, a successful answer on its way down.
fn finish(
    gateway: &Gateway,
    client: &Client,
    method: &'static Method,
    answer: &mut Answer,
) -> Result<(), Refusal> {
    if let Some(fields) = member_answers::member_fields(method.path) {
        if method.body != MessageId::MemberListRequest {
            gateway.door.members.hints.send(Hint::ListChanged);
        }
        let whole = answer.message();
        // One that is too large to be read whole would name the members' own addresses.
        let message = whole.as_ref().and_then(|framed| framed.get(frame::PREFIX..));
        let config = gateway.config.load();
        let told = config.advertise.to_clients_of(&client.listener.name);
        let (message, told) = message.zip(told).ok_or(Refusal::UNREADABLE_ANSWER)?;
        let rewritten = member_answers::rewrite(message, fields, &told.members, &told.client_urls);
        answer.data = [rewritten.map_err(|_| Refusal::UNREADABLE_ANSWER)?].into();
    } else if let Some(seen) = answer.seen {
        client.floor.raise(seen);
    }
    Ok(())
}

/// What a change of users or of auth itself means here: what was proved before is proved no more (rules 12, 48).
fn note_auth_change(gateway: &Gateway, method: &Method, message: &Bytes) {
    let named = match method.body {
        MessageId::AuthEnableRequest => return gateway.door.auth_is(Auth::On),
        MessageId::AuthDisableRequest => return gateway.door.auth_is(Auth::Off),
        MessageId::AuthUserChangePasswordRequest
        | MessageId::AuthUserDeleteRequest
        | MessageId::AuthUserAddRequest => shape::user_name(message),
        _ => None,
    };
    if let Some(name) = named {
        gateway.logins.forget_user(&UserName::from(name));
    }
}

/// A method that we do not know: its bytes cross as they are, once.
async fn unknown(
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    head: &http::request::Parts,
    body: Incoming,
    record: &mut Record,
) -> Result<Served, Refusal> {
    let caller = gateway.callers.identify(gateway, client, None, &head.headers, record).await?;
    let path = head.uri.path_and_query().cloned().ok_or_else(|| Refusal::malformed_path(""))?;
    let member = gateway.door.choose(Wanted::Any, &[]).ok_or(Refusal::NOTHING_SENT)?;
    let stay = gateway.enter(client, &caller)?;
    record.member = Some(member.id);
    record.attempts = 1;
    let shown = gateway.door.shown(&caller.whom, &member).await.map_err(|failure| {
        if failure.is_refusal() { Refusal::INVALID_AUTH_TOKEN } else { Refusal::NOTHING_SENT }
    })?;
    let mut head_upstream = upstream_headers(&head.headers, &shown);
    // The frames cross as they are, so the member must know how they are compressed.
    for name in ["grpc-encoding", "grpc-accept-encoding"] {
        if let Some(value) = head.headers.get(name) {
            head_upstream.fields.insert(name, value.clone());
        }
    }
    let sent = gateway.door.send(&member, Lane::Stream, path, head_upstream, Outgoing::Piped(body)).await;
    match sent {
        Ok((response, _)) if !response.status().is_success() => {
            Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST)
        }
        Ok((response, in_flight)) => {
            let answer = Box::new(Answer::opened(response, in_flight));
            let room = client.unread.wait_beyond(Need::of_stream(Lane::Stream));
            let room = timeout(PATIENCE, room).await.unwrap_or(Err(Refusal::TOO_MANY_REQUESTS))?;
            Ok(Served::Member(answer, caller.in_use(), stay, Some(room)))
        }
        Err(NoAnswer::NeverSent(_) | NoAnswer::NotShown(_)) => Err(Refusal::NOTHING_SENT),
        Err(NoAnswer::NoRoom) => Err(Refusal::TOO_MANY_REQUESTS),
        Err(NoAnswer::Lost(_)) => Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST),
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
