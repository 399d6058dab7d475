//! gRPC's health service, answered by Keyward: whether calls can be served here.
//!
//! Owns: Check and Watch of the whole server. Must not know how readiness is found. Invariants: no member is asked, so
//! that a health check never costs etcd anything; the answer is that of `/readyz`.

use std::rc::Rc;

use bytes::Bytes;
use prost::Message as _;

use crate::downstream::requests::RequestBody;
use crate::downstream::said::Speaker;
use crate::gateway::pipeline::{Served, collect_of_anybody};
use crate::gateway::{Client, Gateway};
use crate::pb::health::health_check_response::ServingStatus;
use crate::pb::health::{HealthCheckRequest, HealthCheckResponse};
use crate::refusal::Refusal;
use crate::rpc::frame;

/// Check: once.
///
/// # Errors
/// Another service than the whole server was asked for, or the request cannot be read.
pub async fn check(gateway: &Gateway, client: &Client, body: RequestBody) -> Result<Served, Refusal> {
    asked(client, body).await?;
    Ok(Served::Ours(answer(now(gateway))))
}

/// Watch: at once, and whenever it changes.
///
/// # Errors
/// As [`check`].
pub async fn watch(gateway: &Rc<Gateway>, client: &Client, body: RequestBody) -> Result<Served, Refusal> {
    asked(client, body).await?;
    let (speaker, said) = Speaker::channel();
    let watched = Rc::clone(gateway);
    let mut drain = client.drain.clone();
    let run = async move {
        let mut ready = watched.ready.clone();
        let mut told = None;
        loop {
            let status = now(&watched);
            if told != Some(status) {
                told = Some(status);
                if speaker.say(answer(status)).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                () = speaker.gone() => return,
                _ = drain.wait_for(Option::is_some) => return speaker.end(Refusal::SHUTTING_DOWN.status()).await,
                changed = ready.changed() => if changed.is_err() { return },
            }
        }
    };
    gateway.tasks.spawn("health watch", run).detach();
    Ok(Served::Stream(said))
}

async fn asked(client: &Client, body: RequestBody) -> Result<(), Refusal> {
    let (framed, _held) = collect_of_anybody(client, body).await?;
    let message = frame::unary(&framed).map_err(|fault| fault.refusal(None))?;
    let asked = HealthCheckRequest::decode(message).map_err(|_| Refusal::not_canonical("not a message"))?;
    if asked.service.is_empty() { Ok(()) } else { Err(Refusal::UNKNOWN_HEALTH_SERVICE) }
}

fn now(gateway: &Gateway) -> ServingStatus {
    if *gateway.ready.borrow() { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn answer(status: ServingStatus) -> Bytes {
    frame::encode(&HealthCheckResponse { status: status.into() }.encode_to_vec())
}
