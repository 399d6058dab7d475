//! Watch, LeaseKeepAlive and Observe: streams that we end on both sides, each in a task of its own on its shard.
//!
//! Owns: joining a client's stream to the machinery that keeps it alive. Must not know how that works. Invariants: the
//! credential is in use for exactly as long as the stream lives; no stream outlives what let its client in.

use std::future::{Future, pending};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use http::HeaderMap;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::downstream::request_memory::Held;
use crate::downstream::requests::RequestBody;
use crate::downstream::said::{Said, Speaker};
use crate::downstream::watch_starts::WatchStart;
use crate::gateway::caller::Caller;
use crate::gateway::live::Stay;
use crate::gateway::{Client, Gateway, blocked};
use crate::lease::keepalive::KeepAlive;
use crate::lease::observe::Observe;
use crate::refusal::Refusal;
use crate::upstream::choose::Chooser;
use crate::upstream::outage::{self, StreamPatience, UpstreamLink};
use crate::upstream::send::forwarded;
use crate::watch::budget::Share;
use crate::watch::hub::Timing;
use crate::watch::session::Session;
use crate::watch::source::Route;

/// How long a client's progress request waits for upstream before what is known already may answer it.
const PROGRESS_GRACE: Duration = Duration::from_millis(500);

/// A client's Watch stream. `start` stands for the creates that may have arrived with its header.
///
/// # Errors
/// Its caller may not begin it: see [`Gateway::enter`].
pub fn watch(
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    caller: &Rc<Caller>,
    headers: &HeaderMap,
    deadline: Option<Instant>,
    body: RequestBody,
    start: WatchStart,
) -> Result<mpsc::Receiver<Said>, Refusal> {
    let stay = gateway.enter(client, caller)?;
    let (kept_headers, held) = kept(gateway, client, caller, headers)?;
    let config = gateway.config.load_full();
    let (speaker, said) = Speaker::channel();
    let link = Rc::<UpstreamLink>::default();
    let session = Session {
        route: Route {
            door: Rc::clone(&gateway.door),
            whom: caller.whom.clone(),
            headers: kept_headers,
            home: gateway.home(client),
            floor: Rc::clone(&client.floor),
            share: Share::new(&gateway.watch_budget),
        },
        timing: Timing {
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

/// A time between this and twice this.
fn between(least: Duration, chooser: &Chooser) -> Duration {
    let more = chooser.draw(u64::try_from(least.as_millis()).unwrap_or(u64::MAX));
    least.saturating_add(Duration::from_millis(more))
}

/// A client's LeaseKeepAlive stream.
///
/// # Errors
/// Its caller may not begin it: see [`Gateway::enter`].
pub fn keep_alive(
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    caller: &Rc<Caller>,
    headers: &HeaderMap,
    deadline: Option<Instant>,
    body: RequestBody,
) -> Result<mpsc::Receiver<Said>, Refusal> {
    let stay = gateway.enter(client, caller)?;
    let (kept_headers, held) = kept(gateway, client, caller, headers)?;
    let (speaker, said) = Speaker::channel();
    let link = Rc::<UpstreamLink>::default();
    let keep_alive = KeepAlive {
        door: Rc::clone(&gateway.door),
        whom: caller.whom.clone(),
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

/// A client's Observe stream. `message` is its one request.
///
/// # Errors
/// The budget for requests that wait is used up, or its caller may not begin it.
pub fn observe(
    gateway: &Rc<Gateway>,
    client: &Rc<Client>,
    caller: &Rc<Caller>,
    headers: &HeaderMap,
    deadline: Option<Instant>,
    message: &Bytes,
) -> Result<mpsc::Receiver<Said>, Refusal> {
    let stay = gateway.enter(client, caller)?;
    let (request, waiting) = blocked::kept(gateway, client, message)?;
    let (kept_headers, held) = kept(gateway, client, caller, headers)?;
    let (speaker, said) = Speaker::channel();
    let link = Rc::<UpstreamLink>::default();
    let observe = Observe {
        door: Rc::clone(&gateway.door),
        whom: caller.whom.clone(),
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

/// What a stream keeps of its client's header for as long as it lives, which is held.
fn kept(
    gateway: &Gateway,
    client: &Client,
    caller: &Caller,
    headers: &HeaderMap,
) -> Result<(HeaderMap, Held), Refusal> {
    let headers = forwarded(headers);
    let held = gateway.hold_request(client, gateway.requester(caller), &headers)?;
    Ok((headers, held))
}

/// When a stream ends that nobody ends, and what its client is told: the client's own deadline, or the end of what let it
/// in.
fn ends(client: &Client, caller: &Caller, deadline: Option<Instant>) -> Option<(Instant, Refusal)> {
    let deadline = deadline.map(|at| (at, Refusal::DEADLINE_EXCEEDED));
    deadline.into_iter().chain(client.ends(caller)).min_by_key(|(at, _)| *at)
}

/// Waits until an outage of the cluster ends the stream that has this link, and whose client sent `headers`.
fn outage(
    gateway: &Gateway,
    headers: &HeaderMap,
    link: Rc<UpstreamLink>,
) -> impl Future<Output = Refusal> + use<> {
    let wants_leader = headers.get("hasleader").is_some_and(|value| value == "true");
    let patience = StreamPatience::new(gateway.config.load().cluster.outage, wants_leader);
    let members = gateway.door.members.clone();
    async move { outage::ended(&members, &link, patience).await }
}

/// Runs a stream to its end, or to the instant at which it ends by itself, or until it may not go on; the client is told.
/// `keep` is held until then. The stream is boxed: nothing here keeps room for it twice.
async fn within(
    ends: Option<(Instant, Refusal)>,
    outage: impl Future<Output = Refusal>,
    mut stay: Stay,
    speaker: Speaker,
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
        biased; // what let it in first: nothing more is said to a peer that was revoked
        refusal = stay.cut() => Some(refusal),
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
