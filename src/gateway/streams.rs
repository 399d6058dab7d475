//! Watch, LeaseKeepAlive and Observe: streams terminated on both sides, each in a task of its own on its
//! shard.
//!
//! Owns: connecting a client's stream with the resuming upstream stream. Must not know: how streams are
//! resumed. Invariants: the credential is kept alive exactly as long as the stream; no stream outlives its
//! client's proof.

use std::future::{Future, pending};
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use http::HeaderMap;
use tokio::time::{Instant, sleep_until};

use crate::downstream::client_replies::ReplySender;
use crate::downstream::request_memory::RequestMemoryCharge;
use crate::downstream::request_messages::RequestBody;
use crate::downstream::watch_starts::WatchStart;
use crate::gateway::active_streams::Registration;
use crate::gateway::call::Call;
use crate::gateway::caller::Caller;
use crate::gateway::pipeline_result::PipelineResult;
use crate::gateway::request_body::hold_while_waiting;
use crate::gateway::unary_request::UnaryRequest;
use crate::lease::keepalive::KeepAliveStream;
use crate::lease::observe::ObserveStream;
use crate::members::choose::MemberChooser;
use crate::members::cluster_outage::{self, StreamPatience, UpstreamLink};
use crate::refusal::Refusal;
use crate::upstream::send::copy_forwarded_fields;
use crate::watch::budget::WatchByteShare;
use crate::watch::hub::HubTiming;
use crate::watch::session_driver::WatchSession;
use crate::watch::upstream_stream::WatchRoute;

/// How long a client's progress request waits for the member before already known progress may answer the
/// request.
const PROGRESS_GRACE: Duration = Duration::from_millis(500);

/// Starts a client's Watch stream. `start` represents the creates possibly received with the header.
///
/// # Errors
/// The caller is not authorized: see `Gateway::enter`.
pub fn watch(
    call: &Call<'_>,
    caller: &Rc<Caller>,
    body: RequestBody,
    start: WatchStart,
) -> Result<PipelineResult, Refusal> {
    let (gateway, client) = (call.gateway, call.client);
    let registration = gateway.enter(client, caller)?;
    let (kept_headers, held) = kept(call, caller)?;
    let config = &call.snapshot().config;
    let (replies, said) = ReplySender::channel();
    let link = Rc::<UpstreamLink>::default();
    let session = WatchSession {
        route: WatchRoute {
            upstream: Rc::clone(&gateway.upstream),
            user: caller.upstream_user.clone(),
            headers: kept_headers,
            home: gateway.home(client),
            floor: Rc::clone(&client.floor),
            share: WatchByteShare::new(&gateway.watch_budget),
        },
        timing: HubTiming {
            idle_progress: config.watch.idle_progress.map(|least| between(least, &gateway.upstream.chooser)),
            progress_grace: PROGRESS_GRACE,
        },
        largest_request: config.limits.request_size,
        drain: client.drain.clone(),
        resumed: gateway.metrics.watch_resumes.clone(),
        starts: Rc::clone(&client.watch_starts),
        link: Rc::clone(&link),
    };
    let (in_use, ends) = ((caller.in_use(), held), ends(call, caller));
    let outage = outage(call, link);
    let run = session.run(body, replies.clone(), start).boxed_local();
    gateway.tasks.spawn("watch", within(ends, outage, registration, replies, run, in_use)).detach();
    Ok(PipelineResult::Stream(said))
}

/// A random duration between `least` and twice `least`.
fn between(least: Duration, chooser: &MemberChooser) -> Duration {
    let more = chooser.draw(u64::try_from(least.as_millis()).unwrap_or(u64::MAX));
    least.saturating_add(Duration::from_millis(more))
}

/// Starts a client's LeaseKeepAlive stream.
///
/// # Errors
/// The caller is not authorized: see `Gateway::enter`.
pub fn keep_alive(
    call: &Call<'_>,
    caller: &Rc<Caller>,
    body: RequestBody,
) -> Result<PipelineResult, Refusal> {
    let (gateway, client) = (call.gateway, call.client);
    let registration = gateway.enter(client, caller)?;
    let (kept_headers, held) = kept(call, caller)?;
    let (replies, said) = ReplySender::channel();
    let link = Rc::<UpstreamLink>::default();
    let keep_alive = KeepAliveStream {
        upstream: Rc::clone(&gateway.upstream),
        user: caller.upstream_user.clone(),
        headers: kept_headers,
        drain: client.drain.clone(),
        resumed: gateway.metrics.keepalive_resumes.clone(),
        link: Rc::clone(&link),
    };
    let (in_use, ends) = ((caller.in_use(), held), ends(call, caller));
    let outage = outage(call, link);
    let run = keep_alive.run(body, replies.clone()).boxed_local();
    gateway.tasks.spawn("keepalive", within(ends, outage, registration, replies, run, in_use)).detach();
    Ok(PipelineResult::Stream(said))
}

/// Starts a client's Observe stream.
///
/// # Errors
/// The budget for waiting requests is used up, or the caller is not authorized.
pub fn observe(call: &Call<'_>, request: &UnaryRequest) -> Result<PipelineResult, Refusal> {
    let (gateway, client, caller) = (call.gateway, call.client, &request.caller);
    let registration = gateway.enter(client, caller)?;
    let (request, waiting) = hold_while_waiting(call, &request.message)?;
    let (kept_headers, held) = kept(call, caller)?;
    let (replies, said) = ReplySender::channel();
    let link = Rc::<UpstreamLink>::default();
    let observe = ObserveStream {
        upstream: Rc::clone(&gateway.upstream),
        user: caller.upstream_user.clone(),
        headers: kept_headers,
        request,
        drain: client.drain.clone(),
        resumed: gateway.metrics.observe_resumes.clone(),
        link: Rc::clone(&link),
    };
    let (in_use, ends) = (caller.in_use(), ends(call, caller));
    let outage = outage(call, link);
    let run = observe.run(replies.clone()).boxed_local();
    gateway
        .tasks
        .spawn("observe", within(ends, outage, registration, replies, run, (in_use, held, waiting)))
        .detach();
    Ok(PipelineResult::Stream(said))
}

/// Copies the forwarded header fields for the stream's lifetime and charges the memory budget for the copy.
fn kept(call: &Call<'_>, caller: &Caller) -> Result<(HeaderMap, RequestMemoryCharge), Refusal> {
    let headers = copy_forwarded_fields(call.headers);
    let held = call.gateway.hold_request(call.client, call.gateway.requester(caller), &headers)?;
    Ok((headers, held))
}

/// When the stream must end, and the refusal for the client: at the client's deadline or the end of the
/// caller's proof, whichever is earlier.
fn ends(call: &Call<'_>, caller: &Caller) -> Option<(Instant, Refusal)> {
    let deadline = call.deadline.map(|at| (at, Refusal::DEADLINE_EXCEEDED));
    deadline.into_iter().chain(call.client.authorization_end(caller)).min_by_key(|(at, _)| *at)
}

/// Waits until an outage of the cluster ends the call's stream, which uses `link`.
fn outage(call: &Call<'_>, link: Rc<UpstreamLink>) -> impl Future<Output = Refusal> + use<> {
    let wants_leader = call.headers.get("hasleader").is_some_and(|value| value == "true");
    let patience = StreamPatience::new(call.snapshot().config.cluster.outage, wants_leader);
    let members = call.gateway.upstream.members.clone();
    async move { cluster_outage::wait_for_stream_end(&members, &link, patience).await }
}

/// Runs a stream until its end, its time limit, an outage or a revocation, and tells the client the reason.
/// `keep` is held until then. The stream is boxed, so that this future does not store the stream twice.
async fn within(
    ends: Option<(Instant, Refusal)>,
    outage: impl Future<Output = Refusal>,
    mut registration: Registration,
    replies: ReplySender,
    mut run: LocalBoxFuture<'static, ()>,
    keep: impl Sized,
) {
    let late = async {
        match ends {
            None => pending().await,
            Some((at, refusal)) => {
                sleep_until(at).await;
                refusal
            }
        }
    };
    let ended = tokio::select! {
        biased; // revocation first: a revoked client gets no further message
        refusal = registration.cancelled() => Some(refusal),
        () = &mut run => None,
        refusal = late => Some(refusal),
        refusal = outage => Some(refusal),
    };
    drop(run);
    if let Some(refusal) = ended {
        replies.end(refusal.status()).await;
    }
    drop(keep);
}
