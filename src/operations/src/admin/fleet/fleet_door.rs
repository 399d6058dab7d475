//! The sealed requests of other replicas, at the admin address.
//!
//! Owns: which of them are executed, and the form of the answers. Must not know: connections. Invariants: a
//! request that is not executed gets the answer of an unknown request, whatever is wrong with it; nothing of
//! a request is believed before its seal; a command that has begun ends, and is recorded, also when its
//! asker has left.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::fleet_seal::{RequestId, open_request, seal_answer};
use super::request_freshness::StaleRequest;
use super::{Fleet, FleetOrder, FleetReply, FleetRequest, FleetWelcome, MOST_ANSWER_BYTES, PATH};
use crate::admin::operator_actions::CommandOrigin;
use crate::admin::socket_protocol::AdminAnswer;
use keyward_base::tasks::Tasks;
use keyward_telemetry::fleet_metrics::FleetResult;
use keyward_telemetry::log_throttle::LogThrottle;
use keyward_telemetry::printable::escaped;

/// Bytes of a request: a command with names.
const LONGEST_REQUEST: usize = 16 * 1024;
/// Time limit for receiving a request.
const PATIENCE: Duration = Duration::from_secs(2);
/// Characters of a name claimed by another replica.
const LONGEST_NAME: usize = 128;

/// Answers the sealed requests of other replicas.
#[derive(Clone)]
pub struct FleetDoor {
    fleet: Arc<Fleet>,
    refused: Rc<LogThrottle>,
    tasks: Tasks,
}

impl FleetDoor {
    /// The door to the commands of a fleet's process.
    #[must_use]
    pub fn new(fleet: Arc<Fleet>, tasks: Tasks) -> Self {
        Self { fleet, refused: Rc::default(), tasks }
    }

    /// True if the request may be one of another replica, and this replica answers any.
    pub(in crate::admin) fn may_answer<B>(&self, request: &Request<B>) -> bool {
        request.method() == Method::POST && request.uri().path() == PATH && self.fleet.lack().is_none()
    }

    /// The answer to a request; `None` for a request that is answered as an unknown one.
    /// `remote` is the other end of its connection.
    pub(in crate::admin) async fn answer(
        &self,
        request: Request<Incoming>,
        remote: Option<SocketAddr>,
    ) -> Option<Response<Full<Bytes>>> {
        let body = Limited::new(request.into_body(), LONGEST_REQUEST).collect();
        let message = timeout(PATIENCE, body).await.ok().and_then(Result::ok);
        let message = message.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        match self.take(&message, remote).await {
            Ok(sealed) => {
                self.fleet.count(FleetResult::Answered);
                let mut response = Response::new(Full::new(sealed.into()));
                let kind = HeaderValue::from_static("application/octet-stream");
                response.headers_mut().insert(CONTENT_TYPE, kind);
                *response.status_mut() = StatusCode::OK;
                Some(response)
            }
            Err(refused) => {
                self.fleet.count(refused);
                if let Some(requests) = self.refused.count() {
                    let (reason, remote) = (refused.name(), remote.map(tracing::field::display));
                    tracing::warn!(
                        reason,
                        remote,
                        requests,
                        "sealed requests of other replicas were refused"
                    );
                }
                None
            }
        }
    }

    /// Executes the request of this message, and seals the answer.
    async fn take(&self, message: &[u8], remote: Option<SocketAddr>) -> Result<Vec<u8>, FleetResult> {
        let fleet = &*self.fleet;
        let (text, id) = open_request(&fleet.sealer, message).ok_or(FleetResult::Forged)?;
        let request: FleetRequest = serde_json::from_slice(&text).map_err(|_| FleetResult::Unreadable)?;
        let scope = match &request {
            FleetRequest::Hello(scope) => scope,
            FleetRequest::Command(order) => &order.scope,
        };
        if !scope.may_be(&fleet.scope()) {
            return Err(FleetResult::Elsewhere);
        }
        let reply = match request {
            FleetRequest::Hello(_) => FleetReply::Welcome(fleet.welcome()),
            FleetRequest::Command(order) => self.obey(*order, id, remote).await?,
        };
        let text = serde_json::to_vec(&reply).map_err(|_| FleetResult::Unreadable)?;
        seal_answer(&fleet.sealer, id, &text).map_err(|_| FleetResult::Forged)
    }

    /// Executes a command, once.
    async fn obey(
        &self,
        order: FleetOrder,
        id: RequestId,
        remote: Option<SocketAddr>,
    ) -> Result<FleetReply, FleetResult> {
        let fleet = &*self.fleet;
        let made = FleetWelcome::told_time(&order.process, order.millis).ok_or(FleetResult::Unreadable)?;
        fleet.freshness().take(id, made).map_err(|stale| match stale {
            StaleRequest::Elsewhere => FleetResult::Elsewhere,
            StaleRequest::Late => FleetResult::Late,
            StaleRequest::Replayed => FleetResult::Replayed,
            StaleRequest::Full => FleetResult::Busy,
        })?;
        let (tell, told) = oneshot::channel();
        let fleet = Arc::clone(&self.fleet);
        // A task of its own: a connection that ends must not stop a command before its audit record.
        let work = async move {
            let Ok(_place) = fleet.places.try_acquire() else {
                drop(tell.send(FleetReply::Busy {}));
                return;
            };
            let by = claimed(order.by, remote);
            let answer = fleet.commands.execute(order.command.into(), &by).await;
            let answer = fitting(answer, order.most_bytes.min(MOST_ANSWER_BYTES));
            drop(tell.send(FleetReply::Answer(Box::new(answer))));
        };
        self.tasks.spawn("command of another replica", work).detach();
        told.await.map_err(|_ended| FleetResult::Busy)
    }
}

/// The operator as named by another replica, whose name has the address of its connection behind it: the one
/// thing of these that a holder of the session key cannot choose. Names are bounded, and escaped for log and
/// audit log.
fn claimed(by: CommandOrigin, remote: Option<SocketAddr>) -> CommandOrigin {
    let name = |name: String| escaped(&name.chars().take(LONGEST_NAME).collect::<String>());
    let mut replica = by.replica.map_or_else(|| "(unnamed)".to_owned(), name);
    if let Some(remote) = remote {
        replica += &format!(" at {}", remote.ip().to_canonical());
    }
    CommandOrigin { uid: by.uid, sudo_user: by.sudo_user.map(name), replica: Some(replica) }
}

/// The answer in at most so many bytes: a view leaves rows out from the end, where its order has the less
/// important ones.
pub(super) fn fitting(answer: AdminAnswer, most_bytes: usize) -> AdminAnswer {
    let AdminAnswer::View(mut view) = answer else { return answer };
    let mut bytes = 0;
    let fits = view.rows.iter().take_while(|row| {
        bytes += serde_json::to_vec(row).map_or(0, |row| row.len() + 1);
        bytes <= most_bytes
    });
    let fits = fits.count();
    view.left_out += view.rows.len() - fits;
    view.rows.truncate(fits);
    AdminAnswer::View(view)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::admin::view::{View, ViewTopic};

    #[test]
    fn a_view_that_is_too_long_says_how_many_rows_are_left_out() {
        let view = |rows: usize| View {
            schema_version: 1,
            topic: ViewTopic::Clients,
            taken_at: String::new(),
            uptime_seconds: 1.0,
            rows: (0..rows).map(|client| json!({"client": client}).as_object().cloned().unwrap()).collect(),
            left_out: 3,
            is_of_replicas: false,
        };
        let fit = |rows, most| match fitting(AdminAnswer::View(view(rows)), most) {
            AdminAnswer::View(view) => (view.rows.len(), view.left_out),
            other => panic!("{other:?}"),
        };
        assert_eq!(fit(5, 5 * 13), (5, 3));
        assert_eq!(fit(5, 5 * 13 - 1), (4, 4));
        assert_eq!(fit(5, 0), (0, 8));
    }

    #[test]
    fn another_replicas_operator_is_named_with_its_replica_and_within_bounds() {
        let by = CommandOrigin { uid: Some(0), sudo_user: Some("bob\n".repeat(100)), replica: None };
        assert_eq!(claimed(by.clone(), None).replica.as_deref(), Some("(unnamed)"));
        let by = CommandOrigin { replica: Some("kw-1".into()), ..by };
        let by = claimed(by, Some("[::ffff:10.0.0.7]:4711".parse().expect("an address")));
        assert_eq!(by.replica.as_deref(), Some("kw-1 at 10.0.0.7"));
        let name = by.sudo_user.expect("a name");
        assert!(name.starts_with("bob\\n") && name.len() < 2 * LONGEST_NAME, "{name}");
    }
}
