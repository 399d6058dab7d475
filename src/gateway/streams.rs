//! Watch, LeaseKeepAlive and Observe: streams terminated on both sides, each in a task of its own on its
//! shard.
//!
//! Owns: connecting a client's stream with the resuming upstream stream. Must not know: how streams are
//! resumed. Invariants: the credential is kept alive exactly as long as the stream; no stream outlives its
//! client's proof.

use std::future::{Future, pending};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use http::HeaderMap;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::downstream::client_replies::{ClientReply, ReplySender};
use crate::downstream::request_memory::RequestMemoryCharge;
use crate::downstream::request_messages::RequestBody;
use crate::downstream::watch_starts::WatchStart;
use crate::gateway::active_streams::Registration;
use crate::gateway::caller::Caller;
use crate::gateway::{ClientConnection, Gateway, blocking_calls};
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
/// The caller is not authorized: see [`Gateway::enter`].
pub fn watch(
    gateway: &Rc<Gateway>,
    client: &Rc<ClientConnection>,
    caller: &Rc<Caller>,
    headers: &HeaderMap,
    deadline: Option<Instant>,
    body: RequestBody,
    start: WatchStart,
) -> Result<mpsc::Receiver<ClientReply>, Refusal> {
    let stay = gateway.enter(client, caller)?;
    let (kept_headers, held) = kept(gateway, client, caller, headers)?;
    let config = gateway.config.load_full();
    let (speaker, said) = ReplySender::channel();
    let link = Rc::<UpstreamLink>::default();
    let session = WatchSession {
        route: WatchRoute {
            door: Rc::clone(&gateway.door),
            user: caller.upstream_user.clone(),
            headers: kept_headers,
            home: gateway.home(client),
            floor: Rc::clone(&client.floor),
            share: WatchByteShare::new(&gateway.watch_budget),
        },
        timing: HubTiming {
            idle_progress: config.watch.idle_progress.map(|least| between(least, &gateway.door.chooser)),
            progress_grace: PROGRESS_GRACE,
        },
        largest_request: config.limits.request_size,
        drain: client.drain.clone(),
        resumed: gateway.metrics.watch_resumes.clone(),
        starts: Rc::clone(&client.watch_starts),
        link: Rc::clone(&link),
    };
    let (in_use, ends) = ((caller.in_use(), held), ends(client, caller, deadline));
    let outage = outage(gateway, headers, link);
    let run = session.run(body, speaker.clone(), start).boxed_local();
    gateway.tasks.spawn("watch", within(ends, outage, stay, speaker, run, in_use)).detach();
    Ok(said)
}

/// A random duration between `least` and twice `least`.
fn between(least: Duration, chooser: &MemberChooser) -> Duration {
    let more = chooser.draw(u64::try_from(least.as_millis()).unwrap_or(u64::MAX));
    least.saturating_add(Duration::from_millis(more))
}

/// Starts a client's LeaseKeepAlive stream.
///
/// # Errors
/// The caller is not authorized: see [`Gateway::enter`].
pub fn keep_alive(
    gateway: &Rc<Gateway>,
    client: &Rc<ClientConnection>,
    caller: &Rc<Caller>,
    headers: &HeaderMap,
    deadline: Option<Instant>,
    body: RequestBody,
) -> Result<mpsc::Receiver<ClientReply>, Refusal> {
    let stay = gateway.enter(client, caller)?;
    let (kept_headers, held) = kept(gateway, client, caller, headers)?;
    let (speaker, said) = ReplySender::channel();
    let link = Rc::<UpstreamLink>::default();
    let keep_alive = KeepAliveStream {
        door: Rc::clone(&gateway.door),
        whom: caller.upstream_user.clone(),
        headers: kept_headers,
        drain: client.drain.clone(),
        resumed: gateway.metrics.keepalive_resumes.clone(),
        link: Rc::clone(&link),
    };
    let (in_use, ends) = ((caller.in_use(), held), ends(client, caller, deadline));
    let outage = outage(gateway, headers, link);
    let run = keep_alive.run(body, speaker.clone()).boxed_local();
    gateway.tasks.spawn("keepalive", within(ends, outage, stay, speaker, run, in_use)).detach();
    Ok(said)
}

/// Starts a client's Observe stream. `message` is the request.
///
/// # Errors
/// The budget for waiting requests is used up, or the caller is not authorized.
pub fn observe(
    gateway: &Rc<Gateway>,
    client: &Rc<ClientConnection>,
    caller: &Rc<Caller>,
    headers: &HeaderMap,
    deadline: Option<Instant>,
    message: &Bytes,
) -> Result<mpsc::Receiver<ClientReply>, Refusal> {
    let stay = gateway.enter(client, caller)?;
    let (request, waiting) = blocking_calls::hold_request(gateway, client, message)?;
    let (kept_headers, held) = kept(gateway, client, caller, headers)?;
    let (speaker, said) = ReplySender::channel();
    let link = Rc::<UpstreamLink>::default();
    let observe = ObserveStream {
        door: Rc::clone(&gateway.door),
        whom: caller.upstream_user.clone(),
        headers: kept_headers,
        request,
        drain: client.drain.clone(),
        resumed: gateway.metrics.observe_resumes.clone(),
        link: Rc::clone(&link),
    };
    let (in_use, ends) = (caller.in_use(), ends(client, caller, deadline));
    let outage = outage(gateway, headers, link);
    let run = observe.run(speaker.clone()).boxed_local();
    gateway
        .tasks
        .spawn("observe", within(ends, outage, stay, speaker, run, (in_use, held, waiting)))
        .detach();
    Ok(said)
}

/// Copies the forwarded header fields for the stream's lifetime and charges the memory budget for the copy.
fn kept(
    gateway: &Gateway,
    client: &ClientConnection,
    caller: &Caller,
    headers: &HeaderMap,
) -> Result<(HeaderMap, RequestMemoryCharge), Refusal> {
    let headers = copy_forwarded_fields(headers);
    let held = gateway.hold_request(client, gateway.requester(caller), &headers)?;
    Ok((headers, held))
}

/// When the stream must end, and the refusal for the client: at the client's deadline or the end of the
/// caller's proof, whichever is earlier.
fn ends(client: &ClientConnection, caller: &Caller, deadline: Option<Instant>) -> Option<(Instant, Refusal)> {
    let deadline = deadline.map(|at| (at, Refusal::DEADLINE_EXCEEDED));
    deadline.into_iter().chain(client.authorization_end(caller)).min_by_key(|(at, _)| *at)
}

/// Waits until an outage of the cluster ends the stream using `link`, whose client sent `headers`.
fn outage(
    gateway: &Gateway,
    headers: &HeaderMap,
    link: Rc<UpstreamLink>,
) -> impl Future<Output = Refusal> + use<> {
    let wants_leader = headers.get("hasleader").is_some_and(|value| value == "true");
    let patience = StreamPatience::new(gateway.config.load().cluster.outage, wants_leader);
    let members = gateway.door.members.clone();
    async move { cluster_outage::wait_for_stream_end(&members, &link, patience).await }
}

/// Runs a stream until its end, its time limit, an outage or a revocation, and tells the client the reason.
/// `keep` is held until then. The stream is boxed, so that this future does not store the stream twice.
async fn within(
    ends: Option<(Instant, Refusal)>,
    outage: impl Future<Output = Refusal>,
    mut stay: Registration,
    speaker: ReplySender,
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
        refusal = stay.cancelled() => Some(refusal),
        () = &mut run => None,
        refusal = late => Some(refusal),
        refusal = outage => Some(refusal),
    };
    drop(run);
    if let Some(refusal) = ended {
        speaker.end(refusal.status()).await;
    }
    drop(keep);
}
