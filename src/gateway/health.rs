//! gRPC's health service, answered by Keyward: whether calls can be served here.
//!
//! Owns: Check and Watch of the whole server. Must not know how readiness is found. Invariants: no member is asked, so
//! that a health check never costs etcd anything; the answer is that of `/readyz`.

use std::cell::Cell;
use std::rc::Rc;

use bytes::Bytes;
use prost::Message as _;

use crate::downstream::request_memory::{Held, REQUEST};
use crate::downstream::requests::RequestBody;
use crate::downstream::said::Speaker;
use crate::gateway::gathering::collect_of_anybody;
use crate::gateway::pipeline::Served;
use crate::gateway::{Client, Gateway};
use crate::pb::health::health_check_response::ServingStatus;
use crate::pb::health::{HealthCheckRequest, HealthCheckResponse};
use crate::refusal::Refusal;
use crate::rpc::frame;

/// The path of Check.
pub const CHECK: &str = "/grpc.health.v1.Health/Check";
/// The path of Watch.
pub const WATCH: &str = "/grpc.health.v1.Health/Watch";
/// Health watches that one connection may have open: a client needs one.
const WATCHES: usize = 16;
/// What an open one holds beside its request: its task and what waits to be read.
const OPEN: usize = 8 * 1024;

/// An open health watch of a connection, until dropped.
struct Open(Rc<Cell<usize>>);

impl Open {
    /// None where the connection has as many as it may.
    fn on(client: &Client) -> Option<Self> {
        let open = Rc::clone(&client.health_watches);
        (open.get() < WATCHES).then(|| {
            open.set(open.get() + 1);
            Self(open)
        })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Check: once.
///
/// # Errors
/// Another service than the whole server was asked for, or the request cannot be read.
pub async fn check(gateway: &Gateway, body: RequestBody) -> Result<Served, Refusal> {
    asked(body).await?;
    Ok(Served::Ours(answer(now(gateway))))
}

/// Watch: at once, and whenever it changes.
///
/// # Errors
/// As [`check`], or there is no room for one more.
pub async fn watch(gateway: &Rc<Gateway>, client: &Client, body: RequestBody) -> Result<Served, Refusal> {
    let mut held = asked(body).await?;
    let open = Open::on(client).ok_or(Refusal::TOO_MANY_REQUESTS)?;
    if !held.more(REQUEST + OPEN) {
        return Err(Refusal::TOO_MANY_REQUESTS);
    }
    let (speaker, said) = Speaker::channel();
    let watched = Rc::clone(gateway);
    let mut drain = client.drain.clone();
    let run = async move {
        let mut ready = watched.ready.clone();
        let mut told = None;
        let _until_then = (open, held);
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

/// Reads the request. Returns the account of who asked, of which nothing is held.
async fn asked(body: RequestBody) -> Result<Held, Refusal> {
    let (framed, held) = collect_of_anybody(body).await?;
    let message = frame::unary(&framed).map_err(|fault| fault.refusal(None))?;
    let asked = HealthCheckRequest::decode(message).map_err(|_| Refusal::not_canonical("not a message"))?;
    if asked.service.is_empty() { Ok(held.beside()) } else { Err(Refusal::UNKNOWN_HEALTH_SERVICE) }
}

fn now(gateway: &Gateway) -> ServingStatus {
    if *gateway.ready.borrow() { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn answer(status: ServingStatus) -> Bytes {
    frame::encode(&HealthCheckResponse { status: status.into() }.encode_to_vec())
}
