//! Watch, LeaseKeepAlive and Observe: streams terminated on both sides, each polled with its reply on its
//! shard.
//!
//! Owns: connecting a client's stream with the resuming upstream stream. Must not know: how streams are
//! resumed. Invariants: the credential is kept alive exactly as long as the stream; no stream outlives its
//! client's proof.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{LocalBoxFuture, select};
use http::HeaderMap;
use tokio::time::sleep_until;

use crate::active_streams::{Registration, StreamWork};
use crate::audited_request::{self, RecordRoomWait};
use crate::call::Call;
use crate::caller::Caller;
use crate::pipeline_result::PipelineResult;
use crate::request_body::hold_while_waiting;
use crate::unary_request::UnaryRequest;
use crate::{local_reads, permission, usage_limits};
use keyward_access::policy::shadow_register::StreamDenials;
use keyward_base::tasks::wake_gate::WakeGate;
use keyward_cluster::choose::MemberChooser;
use keyward_cluster::cluster_outage::{self, StreamPatience, UpstreamLink};
use keyward_downstream::client_replies::ReplySender;
use keyward_downstream::request_memory::RequestMemoryCharge;
use keyward_downstream::request_messages::RequestBody;
use keyward_downstream::stream_budget::StreamByteShare;
use keyward_downstream::watch_starts::WatchStart;
use keyward_etcd::refusal::Refusal;
use keyward_streams::lease::keepalive::KeepAliveStream;
use keyward_streams::lease::observe::ObserveStream;
use keyward_streams::lease::renewal_namespace::RenewalNamespace;
use keyward_streams::lease::renewal_permission::RenewalAccess;
use keyward_streams::lease::renewed_leases::RenewedLeases;
use keyward_streams::watch::access::WatchAccess;
use keyward_streams::watch::feed_joins::FeedJoins;
use keyward_streams::watch::hub::HubTiming;
use keyward_streams::watch::limited_watches::LimitedWatches;
use keyward_streams::watch::request_gate::WatchRequestGate;
use keyward_streams::watch::session_driver::WatchSession;
use keyward_streams::watch::shared_session::SharedWatchSession;
use keyward_streams::watch::upstream_stream::{RULES, WatchRoute};
use keyward_upstream::reopening_stream::StreamRoute;
use keyward_upstream::send::copy_forwarded_fields;

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
    local_reads::refuse_method(call)?;
    let permit = permission::of_stream(call, caller)?;
    let registration = gateway.enter(client, caller, None, &call.record)?;
    let (kept_headers, held) = kept(call, caller)?;
    let config = &call.snapshot().config;
    let (replies, said) = ReplySender::channel();
    let link = Rc::<UpstreamLink>::default();
    let timing = HubTiming {
        idle_progress: config.watch.idle_progress.map(|least| between(least, &gateway.upstream.chooser)),
        progress_grace: PROGRESS_GRACE,
    };
    let open_watches = audited_request::open_watch_observer(call, caller);
    let limited = call.record.live_usage().filter(|usage| usage.now().is_some());
    let session = WatchSession {
        route: WatchRoute {
            stream: Rc::new(StreamRoute {
                upstream: Rc::clone(&gateway.upstream),
                user: caller.upstream_user.clone(),
                headers: kept_headers,
                method: call.method,
                rules: &RULES,
                request: None,
                permit,
            }),
            home: gateway.home(client),
            floor: Rc::clone(&client.floor),
            share: StreamByteShare::new(&gateway.watch_budget, call.copies()),
        },
        largest_request: config.limits.request_size,
        resumed: gateway.metrics.watch_resumes.clone(),
        starts: Rc::clone(&client.watch_starts),
        link: Rc::clone(&link),
        joins: config.watch.share_from.map(|least| FeedJoins::new(&gateway.watch_feeds, least.get())),
        namespace: caller.namespace().cloned(),
        gate: Box::new(WatchRequestGate {
            access: registration
                .permits()
                .map(|permits| WatchAccess::new(permits, denials(call), open_watches)),
            usage: limited.map(|usage| Box::new(LimitedWatches::new(usage))),
            limits: call.record.live_usage(),
            observer: audited_request::watch_observer(call, caller, registration.permits()),
            refused: Box::new(call.record.refused_watches()),
            recorder: audited_request::refused_watch_recorder(call, caller),
        }),
    };
    let shared = SharedWatchSession::new(session, timing, body, replies);
    registration.set_work(StreamWork::Watch(shared.handle()));
    let limits = limits(call, caller, link, registration).boxed_local();
    let work = shared.serve(start, limits, (caller.in_use(), held)).boxed_local();
    Ok(PipelineResult::Stream(said.with_work("watch", work)))
}

/// Starts a client's Watch stream once its audit record has `room`.
///
/// # Errors
/// The record has no room, or the caller is not authorized.
pub async fn watch_after(
    call: &Call<'_>,
    room: RecordRoomWait<'_>,
    body: RequestBody,
    start: WatchStart,
) -> Result<PipelineResult, Refusal> {
    let caller = audited_request::identify_after(call, Some(room)).await?;
    watch(call, &caller, body, start)
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
    local_reads::refuse_method(call)?;
    let permit = permission::of_stream(call, caller)?;
    let registration = gateway.enter(client, caller, None, &call.record)?;
    let (kept_headers, held) = kept(call, caller)?;
    let (replies, said) = ReplySender::channel();
    let link = Rc::<UpstreamLink>::default();
    let renewed = Rc::<RenewedLeases>::default();
    registration.set_work(StreamWork::KeepAlive(Rc::clone(&renewed)));
    let observer = audited_request::renewal_observer(call, caller);
    let keep_alive = KeepAliveStream {
        upstream: Rc::clone(&gateway.upstream),
        user: caller.upstream_user.clone(),
        headers: kept_headers,
        permit,
        access: registration.permits().map(|permits| RenewalAccess {
            permits,
            denials: denials(call),
            observer,
            enforced_rule: RefCell::default(),
        }),
        namespace: caller.namespace().map(|namespace| RenewalNamespace {
            namespace: Arc::clone(namespace),
            permits: registration.permits(),
            metrics: gateway.metrics.policy.clone(),
        }),
        resumed: gateway.metrics.keepalive_resumes.clone(),
        usage: call.record.live_usage(),
        link: Rc::clone(&link),
        renewed,
    };
    let (in_use, limited) = ((caller.in_use(), held), limits(call, caller, link, registration));
    let run = keep_alive.run(body, replies.clone()).boxed_local();
    let work = within(limited, replies, run, in_use).boxed_local();
    Ok(PipelineResult::Stream(said.with_work("keepalive", work)))
}

/// Starts a client's Observe stream.
///
/// # Errors
/// The budget for waiting requests is used up, or the caller is not authorized.
pub fn observe(call: &Call<'_>, request: &UnaryRequest) -> Result<PipelineResult, Refusal> {
    let (gateway, client, caller) = (call.gateway, call.client, &request.caller);
    let watch = usage_limits::count_observe(call)?;
    let registration = gateway.enter(client, caller, Some(request.decided(call)), &call.record)?;
    audited_request::note_begin(call, caller);
    let permit = request.permit;
    let (request, waiting) = hold_while_waiting(call, request.message())?;
    let (kept_headers, held) = kept(call, caller)?;
    let (replies, said) = ReplySender::channel();
    let link = Rc::<UpstreamLink>::default();
    let observe = ObserveStream {
        upstream: Rc::clone(&gateway.upstream),
        user: caller.upstream_user.clone(),
        headers: kept_headers,
        request,
        permit,
        namespace: caller.namespace().cloned(),
        resumed: gateway.metrics.observe_resumes.clone(),
        link: Rc::clone(&link),
        share: StreamByteShare::new(&gateway.watch_budget, call.copies()),
    };
    let (in_use, limited) = (caller.in_use(), limits(call, caller, link, registration));
    let run = observe.run(replies.clone()).boxed_local();
    let work = within(limited, replies, run, (in_use, held, waiting, watch)).boxed_local();
    Ok(PipelineResult::Stream(said.with_work("observe", work)))
}

/// Counts the denials of the caller on a stream.
fn denials(call: &Call<'_>) -> StreamDenials {
    StreamDenials {
        metrics: call.gateway.metrics.policy.clone(),
        register: Rc::clone(&call.gateway.shadow),
        peer: call.record.peer().unwrap_or_default(),
    }
}

/// Copies the forwarded header fields for the stream's lifetime and charges the memory budget for the copy.
fn kept(call: &Call<'_>, caller: &Caller) -> Result<(HeaderMap, RequestMemoryCharge), Refusal> {
    // The clone has memory for its fields only; the original has room for more.
    let headers = copy_forwarded_fields(call.headers).clone();
    let held = call.gateway.hold_request(call.client, call.gateway.requester(caller), &headers)?;
    Ok((headers, held))
}

/// Waits until a reason outside the stream ends the stream: a revocation, the client's deadline, the end of
/// the caller's proof, an outage of the cluster (with `link`), or the drain of the process.
fn limits(
    call: &Call<'_>,
    caller: &Caller,
    link: Rc<UpstreamLink>,
    mut registration: Registration,
) -> impl Future<Output = Refusal> + use<> {
    let deadline = call.deadline.map(|at| (at, Refusal::DEADLINE_EXCEEDED));
    let proof_end = call.client.authorization_end(caller);
    let deadline = deadline.map(|(at, refusal)| sleep_until(at).map(|()| refusal));
    let proof_end = proof_end.map(|(end, refusal)| Box::pin(end.passed()).map(|()| refusal));
    // Few streams have a time limit.
    let mut late = match (deadline, proof_end) {
        (None, None) => None,
        (Some(deadline), None) => Some(deadline.boxed_local()),
        (None, Some(proof_end)) => Some(proof_end.boxed_local()),
        (Some(deadline), Some(proof_end)) => {
            let first = select(Box::pin(deadline), proof_end);
            Some(first.map(|either| either.factor_first().0).boxed_local())
        }
    };
    let patience = StreamPatience::new(call.snapshot().config.cluster.outage, call.wants_leader());
    let upstream = Rc::clone(&call.gateway.upstream);
    let mut drain = call.client.drain.clone();
    // The variables are used where they are captured: moved, they would be stored twice.
    async move {
        let late = poll_fn(|cx| match &mut late {
            None => Poll::Pending,
            Some(late) => late.poll_unpin(cx),
        });
        tokio::select! {
            biased; // revocation first: a revoked client gets no further message
            refusal = registration.cancelled() => refusal,
            refusal = late => refusal,
            refusal = cluster_outage::wait_for_stream_end(&upstream.members, &link, patience) => refusal,
            _ = drain.wait_for(Option::is_some) => Refusal::SHUTTING_DOWN,
        }
    }
}

/// Runs a stream until its end or until `limited` is over, and tells the client the reason. `keep` is held
/// until then.
fn within(
    limited: impl Future<Output = Refusal>,
    replies: ReplySender,
    mut run: LocalBoxFuture<'static, ()>,
    keep: impl Sized,
) -> impl Future<Output = ()> {
    let mut limited = Box::pin(limited);
    let mut gate = WakeGate::default();
    // No async block: it would store its variables twice.
    poll_fn(move |cx| {
        let _keep = &keep;
        // Limits first: a revoked client gets no further message.
        if let Poll::Ready(refusal) = gate.poll(cx, |cx| limited.as_mut().poll(cx)) {
            replies.end(refusal);
            return Poll::Ready(());
        }
        run.poll_unpin(cx)
    })
}
