//! The steps of a call towards its audit record.
//!
//! Owns: room for the record before anything is sent, and the facts of requests, denials and refusals, also
//! of calls that last. Must not know: the form of a record. Invariant: a call with a record goes upstream
//! only with room for the record, unless `audit.on_full` is `drop`.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use http::header::USER_AGENT;
use tokio::time::timeout;

use crate::call::Call;
use crate::call_audit::{CallAudit, PolicyVerdict, event_of, touched};
use crate::caller::Caller;
use crate::lasting_call_records::{LastingCallFacts, RenewalRecords};
use crate::{ClientConnection, Gateway};
use keyward_access::policy::interval_set::GrantId;
use keyward_access::policy::live_permits::LivePermits;
use keyward_access::policy::permit_set::{Decision, Denial, PermitSet};
use keyward_config::PolicyMode;
use keyward_config::audit_settings::AuditEvent;
use keyward_etcd::refusal::{Code, Refusal};
use keyward_etcd::rpc::method::{Effect, Handler, Method};
use keyward_etcd::rpc::namespace::lease_ids::RequestLease;
use keyward_records::audit::log::{AuditLog, Reservation};
use keyward_records::audit::record::cut_name;
use keyward_streams::lease::renewal_permission::RenewalObserver;
use keyward_streams::watch::access::DeniedWatchObserver;
use keyward_streams::watch::request_gate::{RefusedWatchRecorder, WatchRequestObserver};
use keyward_upstream::answer::MemberReply;

/// After this time a waiting Lock or Campaign leaves a record of its begin. Most take what is free, and their
/// end is the one record.
const WAITS: Duration = Duration::from_secs(1);

/// The wait of a call for room for its record.
pub type RecordRoomWait<'c> = LocalBoxFuture<'c, Result<(), Refusal>>;

/// Takes room for the call's record, if the call has one. `message` is `None` if the request is not to be
/// read. The future waits for room; `None` if the call needs no wait.
pub fn begin<'c>(call: &'c Call<'_>, effect: Effect, message: Option<&[u8]>) -> Option<RecordRoomWait<'c>> {
    let log = call.record.audit_log()?;
    let event = event_of(call.method, effect).filter(|event| log.has(*event))?;
    let mut audit = Box::new(facts(call, event, message));
    match log.reserve(audit.weight()) {
        Reservation::Place(place) => {
            audit.keep_place(place, call.method);
            call.record.audit(audit);
            None
        }
        Reservation::Without => {
            call.record.audit(audit);
            None
        }
        Reservation::Full => Some(wait(call, Arc::clone(log), audit).boxed_local()),
    }
}

/// Waits for `room`, if any, and identifies the caller of the call that waited.
///
/// # Errors
/// The record has no room, or the caller is no longer accepted.
pub async fn identify_after(
    call: &Call<'_>,
    room: Option<RecordRoomWait<'_>>,
) -> Result<Rc<Caller>, Refusal> {
    if let Some(room) = room {
        room.await?;
    }
    call.identify_again().await
}

async fn wait(call: &Call<'_>, log: Arc<AuditLog>, mut audit: Box<CallAudit>) -> Result<(), Refusal> {
    let place = log.wait_for_room(audit.weight()).await.map_err(|_full| Refusal::AUDIT_UNWRITABLE)?;
    audit.keep_place(place, call.method);
    call.record.audit(audit);
    Ok(())
}

fn facts(call: &Call<'_>, event: AuditEvent, message: Option<&[u8]>) -> CallAudit {
    CallAudit::of_request(event, call.method, call.path, call.headers, message)
}

/// Notes the facts of a call refused by Keyward, if refusals have records.
pub fn note_refusal(call: &Call<'_>) {
    if is_new_refusal(call) {
        call.record.audit(Box::new(facts(call, AuditEvent::Refusal, None)));
    }
}

/// Notes the facts of a request denied by a member, if refusals have records.
pub fn note_denial(call: &Call<'_>, message: &[u8], answer: &MemberReply) {
    let is_denied = answer.status().is_some_and(|status| status.code == Code::PermissionDenied);
    if is_denied && is_new_refusal(call) {
        call.record.audit(Box::new(facts(call, AuditEvent::Refusal, Some(message))));
    }
}

fn is_new_refusal(call: &Call<'_>) -> bool {
    let has_refusals = || call.record.audit_log().is_some_and(|log| log.has(AuditEvent::Refusal));
    has_refusals() && !call.record.is_audited()
}

/// Notes the request message with real keys, of a caller with a namespace: `None` if the request has none.
pub fn note_real_keys(call: &Call<'_>, caller: &Caller, message: Option<&[u8]>) {
    if caller.namespace().is_some() {
        call.record.note_audited(|audit| audit.note_message_in_namespace(call.method, message));
    }
}

/// Notes the foreign lease that the client has named: the request has another id on its way to a member.
pub fn note_named_lease(call: &Call<'_>, lease: RequestLease) {
    if let RequestLease::Foreign(id) = lease {
        call.record.note_audited(|audit| audit.note_lease(id));
    }
}

/// Notes the keys of a request message for the access record, if access records have keys.
pub fn note_logged_keys(call: &Call<'_>, message: Option<&[u8]>) {
    if let Some(message) = message
        && let Some(logged) = call.record.logged_ranges()
    {
        logged.replace(touched(call.method, message).0);
    }
}

/// Notes the keys of a request denied by the policy, if the call has a record for its denial only.
pub fn note_refused_keys(call: &Call<'_>, message: &[u8]) {
    call.record.note_audited(|audit| {
        if audit.is_refusal_only() {
            audit.note_message(call.method, Some(message));
        }
    });
}

/// Notes the policy's verdict on the call. A call that is denied has a record if refusals have records, also
/// where the policy lets the call pass; the messages of a watch or keepalive stream have their own.
pub fn note_verdict(call: &Call<'_>, permits: &Rc<PermitSet>, decided: Result<Option<GrantId>, Denial>) {
    if permits.mode == PolicyMode::Off {
        return;
    }
    let is_refused = decided.is_err_and(|denial| permits.enforce(denial).is_err());
    let has_messages = matches!(call.method.handler, Handler::Watch | Handler::KeepAlive);
    if (is_refused || decided.is_err() && !has_messages) && is_new_refusal(call) {
        call.record.audit(Box::new(facts(call, AuditEvent::Refusal, None)));
    }
    call.record.note_audited(|audit| {
        audit.verdict = Some(PolicyVerdict { permits: Rc::clone(permits), decided });
    });
}

/// Records each watch created by a client on its stream, and each watch refused by the policy, as
/// configured: in the audit log, and in the stream's access record. The observer sees requests with real
/// keys.
pub fn watch_observer(
    call: &Call<'_>,
    caller: &Caller,
    permits: Option<Rc<LivePermits>>,
) -> Option<WatchRequestObserver> {
    let audited = audited_watches(call, caller, permits);
    let Some(logged) = call.record.logged_ranges() else { return audited };
    let method = call.method;
    Some(Box::new(move |message| {
        logged.borrow_mut().append(touched(method, message).0);
        if let Some(audited) = &audited {
            audited(message);
        }
    }))
}

fn audited_watches(
    call: &Call<'_>,
    caller: &Caller,
    permits: Option<Rc<LivePermits>>,
) -> Option<WatchRequestObserver> {
    let log = log_of_stream(call, AuditEvent::Watch)?;
    let facts = lasting_facts(call, caller);
    Some(Box::new(move |message| {
        let verdict = permits.as_ref().map(|permits| {
            let permits = permits.now();
            let decided = match permits.decide(facts.method, message) {
                Decision::Allowed(permit) | Decision::NeedsLeaseKeys(permit, _) => Ok(permit.grant()),
                Decision::Denied(denial) => Err(denial),
            };
            PolicyVerdict { permits, decided }
        });
        facts.write_watch(&log, message, verdict.as_ref().filter(|verdict| verdict.is_of_policy()));
    }))
}

/// Records each open watch that changed permissions deny, as configured.
pub fn open_watch_observer(call: &Call<'_>, caller: &Caller) -> Option<DeniedWatchObserver> {
    let log = log_of_stream(call, AuditEvent::Watch)?;
    let facts = lasting_facts(call, caller);
    Some(Box::new(move |create, permits, denial| {
        let verdict = PolicyVerdict { permits: Rc::clone(permits), decided: Err(denial) };
        facts.write_open_watch(&log, create, &verdict);
    }))
}

/// Records each watch that a member refuses, or a limit, as configured.
pub fn refused_watch_recorder(call: &Call<'_>, caller: &Caller) -> Option<RefusedWatchRecorder> {
    let log = log_of_stream(call, AuditEvent::Watch)?;
    let facts = lasting_facts(call, caller);
    Some(Box::new(move |watch| facts.write_refused_watch(&log, watch)))
}

/// Records the first renewal of a keepalive stream, and the first one denied by each policy, as configured.
pub fn renewal_observer(call: &Call<'_>, caller: &Caller) -> Option<RenewalObserver> {
    let log = log_of_stream(call, AuditEvent::Lease)?;
    let records = RenewalRecords::new(lasting_facts(call, caller), log);
    if is_new_refusal(call) {
        let mut audit = Box::new(facts(call, AuditEvent::Refusal, None));
        audit.is_denial_recorded = Some(Rc::clone(&records.is_denial_recorded));
        call.record.audit(audit);
    }
    Some(Box::new(move |decision| records.take(&decision)))
}

/// Records the begin of a stream, or of a call that waits, if the call is audited.
pub fn note_begin(call: &Call<'_>, caller: &Caller) {
    let Some(log) = call.record.audit_log() else { return };
    call.record.note_audited(|audit| lasting_facts(call, caller).write_begin(log, audit));
}

/// Waits for the answer to a Lock or Campaign, and records the begin of a long wait.
pub async fn wait_on_record<T>(call: &Call<'_>, caller: &Caller, waiting: impl Future<Output = T>) -> T {
    let mut waiting = pin!(waiting);
    if call.record.audit_log().is_none() {
        return waiting.await;
    }
    if let Ok(answer) = timeout(WAITS, &mut waiting).await {
        return answer;
    }
    note_begin(call, caller);
    waiting.await
}

/// Records that changed permissions deny a stream or a waiting call, and let it go on.
pub fn note_open_denial(
    gateway: &Gateway,
    client: &ClientConnection,
    caller: &Caller,
    (method, peer, message): (&'static Method, &Rc<str>, &[u8]),
    (permits, denial): (&Rc<PermitSet>, Denial),
) {
    let log = gateway.records.audit.as_ref().filter(|log| log.has(AuditEvent::Refusal));
    let Some(log) = log else { return };
    let facts = LastingCallFacts {
        method,
        origin: Rc::clone(&client.origin),
        peer: Rc::clone(peer),
        user: caller.user.clone(),
        limiter: Rc::clone(&gateway.records.audit_limiter),
        user_agent: client.origin.user_agent().map(Into::into),
    };
    let verdict = PolicyVerdict { permits: Rc::clone(permits), decided: Err(denial) };
    facts.write_open_call(log, message, &verdict);
}

/// The audit log, if it has records of a stream's requests, or of refusals.
fn log_of_stream(call: &Call<'_>, event: AuditEvent) -> Option<Arc<AuditLog>> {
    let has_records = |log: &&Arc<AuditLog>| log.has(event) || log.has(AuditEvent::Refusal);
    call.record.audit_log().filter(has_records).map(Arc::clone)
}

fn lasting_facts(call: &Call<'_>, caller: &Caller) -> LastingCallFacts {
    let agent = call.headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok());
    LastingCallFacts {
        method: call.method,
        origin: Rc::clone(&call.client.origin),
        peer: call.record.peer().unwrap_or_default(),
        user: caller.user.clone(),
        limiter: Rc::clone(call.record.audit_limiter()),
        user_agent: agent.map(|agent| cut_name(agent).into()),
    }
}
