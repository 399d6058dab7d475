//! The calls that are made on both sides: every RPC of etcd, several cases of each.
//!
//! Owns: the order of the calls, which is a history: what one row changes, the next ones see. Must not know what the answers are.

mod auth;
mod keys;
mod leases;
mod members;

use keyward::pb::health::HealthCheckRequest;
use prost::Message;

use super::side::{EVERYBODY, Side, Who};
use crate::raw::Shape;

/// One kind of call, made once as each of `who`.
pub(crate) struct Row {
    pub(crate) path: &'static str,
    /// Tells the rows of an RPC apart.
    pub(crate) case: &'static str,
    pub(crate) shape: Shape,
    pub(crate) who: &'static [Who],
    /// The messages to send.
    pub(crate) request: fn(&Side, Who) -> Vec<Vec<u8>>,
}

impl Row {
    /// For these callers only.
    fn only(self, who: &'static [Who]) -> Row {
        Row { who, ..self }
    }
}

/// A call with one request that the client ends.
fn row(path: &'static str, case: &'static str, request: fn(&Side, Who) -> Vec<Vec<u8>>) -> Row {
    Row { path, case, shape: Shape::Once, who: EVERYBODY, request }
}

/// A call that the client keeps open until `at_least` messages came.
fn stream(
    path: &'static str,
    case: &'static str,
    at_least: usize,
    request: fn(&Side, Who) -> Vec<Vec<u8>>,
) -> Row {
    Row { shape: Shape::Stream { at_least }, ..row(path, case, request) }
}

/// A call with one request and answers until the client leaves.
fn server_stream(path: &'static str, case: &'static str, request: fn(&Side, Who) -> Vec<Vec<u8>>) -> Row {
    Row { shape: Shape::ServerStream { at_least: 1 }, ..row(path, case, request) }
}

fn one(message: &impl Message) -> Vec<Vec<u8>> {
    vec![message.encode_to_vec()]
}

/// All rows, in order.
pub(crate) fn all() -> Vec<Row> {
    let parts = [
        keys::before(),
        leases::granted(),
        keys::kv(),
        keys::watch(),
        leases::lease(),
        leases::lock(),
        leases::election(),
        members::maintenance(),
        members::cluster(),
        auth::users(),
        auth::logins(),
        health(),
        keys::compacted(),
        leases::revoked(),
        auth::off_and_on(),
    ];
    parts.into_iter().flatten().collect()
}

fn health() -> Vec<Row> {
    const CHECK: &str = "/grpc.health.v1.Health/Check";
    vec![
        row(CHECK, "the server", |_, _| one(&HealthCheckRequest::default())),
        row(CHECK, "unknown service", |_, _| one(&HealthCheckRequest { service: "nobody".into() })),
        server_stream("/grpc.health.v1.Health/Watch", "the server", |_, _| {
            one(&HealthCheckRequest::default())
        }),
    ]
}
