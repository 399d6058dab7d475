//! The steps of every call in order: call, caller, request, handler, reply.
//!
//! Owns: the order of the steps. Must not know: how a step is done. Invariants: each step takes the
//! previous step's result, so no step can be skipped; a non-canonical path, a non-canonical body needed
//! for a decision, or a bad credential sends no request upstream; the client's time limit is applied here
//! and, for a stream's life, by the stream's work, and nowhere else; a panic answers Unavailable, never a
//! stream reset.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::rc::Rc;

use futures_util::future::Either;
use futures_util::{FutureExt as _, TryFutureExt as _};
use http::uri::PathAndQuery;
use http::{Request, StatusCode};
use tokio::time::{Instant, timeout_at};

use crate::call::{AnswerRewrite, Call};
use crate::login::authenticate;
use crate::pipeline_result::PipelineResult;
use crate::reply::{self, DownstreamResponse};
use crate::rewritten_answer::rewritten;
use crate::unary_request::UnaryRequest;
use crate::{
    ClientConnection, Gateway, answer_limit, audited_request, blocking_calls, defragment, fatal_requests,
    forward, health, local_reads, pass_through, streams, usage_limits, vulnerable_members,
};
use keyward_downstream::client_body::ClientBody;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::call::is_grpc;
use keyward_etcd::rpc::method::Handler;
use keyward_telemetry::metrics::Metrics;

/// Serves a request of any kind. `rewrite` rewrites the message of a unary answer.
pub fn serve(
    gateway: Rc<Gateway>,
    client: Rc<ClientConnection>,
    request: Request<ClientBody>,
    rewrite: Option<AnswerRewrite>,
) -> impl Future<Output = DownstreamResponse> {
    let (head, body) = request.into_parts();
    let is_grpc = is_grpc(&head.method, &head.headers);
    // The rest of the request's head would enlarge every call's future.
    let (headers, path) = (head.headers, head.uri.into_parts().path_and_query);
    // A block, not an `async fn`: an `async fn` stores its arguments twice.
    async move {
        let mut call = Call::new(&gateway, &client, &headers, path.as_ref());
        call.rewrite = rewrite;
        if !is_grpc {
            return reply::not_grpc(StatusCode::UNSUPPORTED_MEDIA_TYPE, call.record);
        }
        if let Err(refusal) = call.admit() {
            audited_request::note_refusal(&call);
            return reply::refuse(&refusal, call.record);
        }
        let deadline = call.deadline;
        let handled = handled(&call, path.as_ref(), body);
        let handled = match rewrite {
            None => Either::Left(handled),
            Some(rewrite) => {
                let call = &call;
                let rewritten = handled.and_then(move |result| rewritten(call, result, rewrite));
                // Boxed: a call of gRPC does not pay for it.
                Either::Right(rewritten.boxed_local())
            }
        };
        let handled = handled.or_else(|refusal| usage_limits::in_time(&call, refusal));
        let outcome = guarded(&gateway.metrics, deadline, pin!(handled)).await;
        match outcome {
            Ok(answer) => answer.reply(call.record),
            Err(refusal) => {
                audited_request::note_refusal(&call);
                reply::refuse(&refusal, call.record)
            }
        }
    }
}

/// Runs the steps of a call up to its handler's result. The handlers of rare methods are boxed, so that the
/// other calls do not pay for larger futures.
async fn handled(
    call: &Call<'_>,
    path: Option<&PathAndQuery>,
    body: ClientBody,
) -> Result<PipelineResult, Refusal> {
    if call.method.handler == Handler::PassThrough {
        return Box::pin(pass_through::serve(call, path, body)).await;
    }
    let body = call.body(body)?;
    match call.method.handler {
        Handler::Login => return Box::pin(authenticate::serve(call, body)).await,
        Handler::HealthCheck => return Box::pin(health::check(call, body)).await,
        Handler::HealthWatch => return Box::pin(health::watch(call, body)).await,
        _ => {}
    }
    // Register the watch before any await: a write arriving next must find the registration.
    let start = (call.method.handler == Handler::Watch).then(|| call.client.watch_starts.begin());
    let caller = call.identify().await?;
    usage_limits::admit(call, &caller)?;
    let body = call.charge_to(&caller, body)?;
    match (call.method.handler, start) {
        (Handler::Watch, Some(start)) => {
            // Other methods take room for their audit record once their message is known.
            return match audited_request::begin(call, call.method.effect, None) {
                None => streams::watch(call, &caller, body, start),
                Some(room) => Box::pin(streams::watch_after(call, room, body, start)).await,
            };
        }
        (Handler::KeepAlive, _) => return streams::keep_alive(call, &caller, body),
        _ => {}
    }
    let request = UnaryRequest::collect(call, caller, body).await?;
    local_reads::refuse(call, request.message())?;
    fatal_requests::refuse(call, &request)?;
    if let Some(measured) = answer_limit::measure(call, &request) {
        measured.await?;
    }
    if let Some(probe) = vulnerable_members::probe(call, &request) {
        probe.await.map_err(Refusal::of_patch)?;
    }
    match call.method.handler {
        Handler::Observe => streams::observe(call, &request),
        Handler::Lock => Box::pin(blocking_calls::serve(call, request)).await,
        Handler::Defragment => match Box::pin(defragment::serve(call, &request)).await? {
            Some(result) => Ok(result),
            None => Box::pin(forward::serve(call, &request)).await,
        },
        _ => forward::serve(call, &request).await,
    }
}

/// Runs `steps` within the client's time limit, and turns a panic into a refusal. A client would read a
/// stream reset as Canceled and send a write again (docs/decisions.md#d38). `steps` is pinned by the
/// caller: passed by value, the future would be stored twice in every request's future.
fn guarded<T>(
    metrics: &Metrics,
    deadline: Option<Instant>,
    steps: Pin<&mut impl Future<Output = Result<T, Refusal>>>,
) -> impl Future<Output = Result<T, Refusal>> {
    let timed = match deadline {
        Some(deadline) => {
            let late = |ended: Result<_, _>| ended.unwrap_or(Err(Refusal::DEADLINE_EXCEEDED));
            Either::Left(timeout_at(deadline, steps).map(late))
        }
        None => Either::Right(steps),
    };
    AssertUnwindSafe(timed).catch_unwind().map(|ended| {
        ended.unwrap_or_else(|_panic| {
            metrics.panics.inc();
            Err(Refusal::PANICKED)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use keyward_etcd::refusal::Code;

    /// Bound on the future of a call, in bytes: each call allocates and copies the future. Lower the bound
    /// together with the future.
    const LARGEST_CALL: usize = 1832;

    #[test]
    fn the_future_of_a_call_stays_small() {
        fn size_of_future<A, B, C, D, F: Future>(_: impl Fn(A, B, C, D) -> F) -> usize {
            size_of::<F>()
        }
        let bytes = size_of_future(serve);
        assert!((256..=LARGEST_CALL).contains(&bytes), "{bytes} bytes");
    }

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
        let refusal = guarded(&metrics, None, pin!(panicking)).await.expect_err("refused");
        assert_eq!(refusal.code(), Code::Unavailable);
        assert_eq!(metrics.panics.get(), 1);
        assert_eq!(guarded(&metrics, None, pin!(async { Ok(7) })).await.ok(), Some(7));
        assert_eq!(metrics.panics.get(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_clients_time_limit_ends_every_step() {
        let metrics = Metrics::new(Vec::new());
        let deadline = Some(Instant::now() + Duration::from_secs(5));
        let never = pin!(std::future::pending::<Result<(), Refusal>>());
        let refusal = guarded(&metrics, deadline, never).await.expect_err("refused");
        assert_eq!(refusal.code(), Code::DeadlineExceeded);
        assert_eq!(guarded(&metrics, deadline, pin!(async { Ok(7) })).await.ok(), Some(7));
    }
}
