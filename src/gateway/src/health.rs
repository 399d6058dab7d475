//! gRPC's health service, answered by Keyward from its own readiness.
//!
//! Owns: Check and Watch of the whole server. Must not know: how readiness is determined. Invariants: health
//! checks send no request to etcd; the status equals the result of `/readyz`.

use std::cell::Cell;
use std::rc::Rc;

use bytes::Bytes;
use prost::Message as _;

use crate::call::Call;
use crate::pipeline_result::PipelineResult;
use crate::request_body::collect_of_anybody;
use crate::{ClientConnection, Gateway};
use keyward_downstream::client_replies::ReplySender;
use keyward_downstream::request_memory::{REQUEST, RequestMemoryCharge};
use keyward_downstream::request_messages::RequestBody;
use keyward_etcd::pb::health::health_check_response::ServingStatus;
use keyward_etcd::pb::health::{HealthCheckRequest, HealthCheckResponse};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::frame;

/// The most open health watches of a connection; a client needs a single health watch.
const WATCHES: usize = 16;
/// Memory charged for an open health watch beyond its request: its task and its queued messages.
const OPEN: usize = 8 * 1024;

/// An open health watch of a connection, until dropped.
struct OpenHealthWatch(Rc<Cell<usize>>);

impl OpenHealthWatch {
    /// `None` if the connection already has `WATCHES` open health watches.
    fn on(client: &ClientConnection) -> Option<Self> {
        let open = Rc::clone(&client.health_watches);
        (open.get() < WATCHES).then(|| {
            open.set(open.get() + 1);
            Self(open)
        })
    }
}

impl Drop for OpenHealthWatch {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Answers Check with the current status.
///
/// # Errors
/// The request names a service, or cannot be read.
pub async fn check(call: &Call<'_>, body: RequestBody) -> Result<PipelineResult, Refusal> {
    match asked(body).await?.0 {
        AskedService::WholeServer => Ok(PipelineResult::Ours(answer(now(call.gateway)))),
        AskedService::Unknown => Err(Refusal::UNKNOWN_HEALTH_SERVICE),
    }
}

/// Answers Watch with the current status and every change. The status of a service, of which Keyward has
/// none, is that it is unknown, and the stream stays open, as the protocol of health checks wants.
///
/// # Errors
/// The request cannot be read, or a limit on open health watches or memory is reached.
pub async fn watch(call: &Call<'_>, body: RequestBody) -> Result<PipelineResult, Refusal> {
    let (gateway, client) = (call.gateway, call.client);
    let (service, mut held) = asked(body).await?;
    let open = OpenHealthWatch::on(client).ok_or(Refusal::TOO_MANY_REQUESTS)?;
    if !held.charge(REQUEST + OPEN) {
        return Err(Refusal::TOO_MANY_REQUESTS);
    }
    let (replies, said) = ReplySender::channel();
    let watched = Rc::clone(gateway);
    let mut drain = client.drain.clone();
    let run = async move {
        let mut ready = watched.ready.clone();
        let mut told = None;
        let _until_then = (open, held);
        loop {
            let status = match service {
                AskedService::WholeServer => now(&watched),
                AskedService::Unknown => ServingStatus::ServiceUnknown,
            };
            if told != Some(status) {
                told = Some(status);
                if replies.say(answer(status)).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                () = replies.gone() => return,
                _ = drain.wait_for(Option::is_some) =>
                    return replies.end(Refusal::SHUTTING_DOWN),
                changed = ready.changed() => if changed.is_err() { return },
            }
        }
    };
    Ok(PipelineResult::Stream(said.with_work("health watch", Box::pin(run))))
}

/// The subject of a health check.
#[derive(Clone, Copy)]
enum AskedService {
    WholeServer,
    Unknown,
}

/// Reads the request. Also returns an empty guard of the request's memory account.
async fn asked(body: RequestBody) -> Result<(AskedService, RequestMemoryCharge), Refusal> {
    let (framed, held) = collect_of_anybody(body).await?;
    let message = frame::unary(&framed).map_err(|fault| fault.refusal(None))?;
    let asked = HealthCheckRequest::decode(message).map_err(|_| Refusal::not_canonical("not a message"))?;
    let service = if asked.service.is_empty() { AskedService::WholeServer } else { AskedService::Unknown };
    Ok((service, held.sibling()))
}

fn now(gateway: &Gateway) -> ServingStatus {
    if *gateway.ready.borrow() { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn answer(status: ServingStatus) -> Bytes {
    frame::encode(&HealthCheckResponse { status: status.into() }.encode_to_vec())
}
