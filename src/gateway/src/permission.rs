//! The policy's decision on a request, and its consequence.
//!
//! Owns: the consequence of a denial by the caller's mode, the confinement to the caller's namespace, and
//! finding the keys of a lease. Must not know: how a decision is made. Invariants (docs/decisions.md#d30): a
//! denied request is not sent; a denial that is not enforced is counted, named in the shard's register and in
//! the audit log, and changes nothing; no log record names a key.

use std::rc::Rc;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use tokio::time::Instant;

use crate::audited_request;
use crate::call::Call;
use crate::caller::Caller;
use keyward_access::policy::caller_namespace::{CallerNamespace, OutsideNamespace};
use keyward_access::policy::permit::Permit;
use keyward_access::policy::permit_set::{Decision, Denial, PermitSet};
use keyward_access::policy::shadow_register::DeniedPart;
use keyward_config::{PolicyMode, UnknownMethods};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::method::{Handler, Method};
use keyward_etcd::rpc::touch::Action;
use keyward_streams::lease::lock_queue::LockQueueKey;
use keyward_upstream::permission_probe::PermissionProbe;

/// Largest message kept for another decision, in bytes.
const LARGEST_KEPT: usize = 4096;

/// A request of a stream or waiting call, decided again after a change of the policy.
pub struct DecidedRequest {
    /// The method.
    pub method: &'static Method,
    /// `None` for a large message.
    message: Option<Box<[u8]>>,
    /// The caller's name, as in audit records.
    pub peer: Rc<str>,
    /// Begin of the call.
    pub since: Instant,
}

impl DecidedRequest {
    /// Copies the request of `call`.
    #[must_use]
    pub fn new(call: &Call<'_>, message: &[u8]) -> Self {
        Self {
            method: call.method,
            message: (message.len() <= LARGEST_KEPT).then(|| message.into()),
            peer: call.record.peer().unwrap_or_default(),
            since: call.record.started,
        }
    }

    /// Method, name and lease of a Lock or Campaign; `None` for another method, or a large message.
    #[must_use]
    pub fn lock(&self) -> Option<(&'static str, Bytes, i64)> {
        let (name, lease) = LockQueueKey::name_and_lease(self.method, self.message.as_ref()?)?;
        Some((self.method.name, name, lease))
    }

    /// The message; `None` if the message was too large to be kept.
    #[must_use]
    pub fn message(&self) -> Option<&[u8]> {
        self.message.as_deref()
    }
}

/// The permissions of the caller of `call`.
#[must_use]
fn permits_of(call: &Call<'_>, caller: &Caller) -> Rc<PermitSet> {
    Rc::clone(caller.permits(&call.snapshot().identities, call.client))
}

/// Decides on the request of a unary call.
///
/// # Errors
/// The policy refuses the request, or the keys of a lease cannot be found.
pub async fn of_request(call: &Call<'_>, caller: &Caller, message: &[u8]) -> Result<Permit, Refusal> {
    match without_reading(call, caller, message) {
        Ok(decided) => decided,
        Err(reading) => reading.await,
    }
}

/// Confines a unary request to the caller's namespace. Returns the leases removed by the request: the keys
/// of these leases must lie in the namespace.
fn confine(call: &Call<'_>, caller: &Caller, message: &[u8]) -> Result<Vec<i64>, Refusal> {
    let permits = caller.permits(&call.snapshot().identities, call.client);
    let has_grants = permits.mode == PolicyMode::Enforce;
    let leases = permits.namespace.confine(call.method, message, has_grants);
    leases.map_err(|outside| outside_namespace(call, outside))
}

/// Confines the keys of `leases` to the caller's namespace, and decides on the request.
async fn of_confined(
    call: &Call<'_>,
    caller: &Caller,
    leases: Vec<i64>,
    message: Box<[u8]>,
) -> Result<Permit, Refusal> {
    let permits = permits_of(call, caller);
    for lease in leases {
        let upstream = Rc::clone(&call.gateway.upstream);
        let probe = PermissionProbe { upstream, user: caller.upstream_user.clone() };
        let keys = probe.keys_of_lease(lease).await?;
        if !permits.namespace.contains_keys(keys.iter().map(|key| &key[..])) {
            return Err(outside_namespace(call, OutsideNamespace(Action::Write)));
        }
    }
    match decide(call, caller, &message) {
        Ok(decided) => decided,
        Err(reading) => reading.await,
    }
}

/// Counts and returns the refusal of a request that leaves the caller's namespace.
fn outside_namespace(call: &Call<'_>, OutsideNamespace(action): OutsideNamespace) -> Refusal {
    let action = action.name();
    audited_request::note_refusal(call);
    call.gateway.metrics.policy.count_refused(action);
    tracing::debug!(method = call.method.path, action, "a request leaves its caller's namespace");
    Refusal::OUTSIDE_NAMESPACE
}

/// A decision, or the future that reads the keys of leases first.
type DecisionOrReading<'a> = Result<Result<Permit, Refusal>, LocalBoxFuture<'a, Result<Permit, Refusal>>>;

/// The decision on a unary request, or the future that reads the keys of its leases first.
///
/// A function of its own: what it borrows would be part of every call's future otherwise.
fn without_reading<'a>(call: &'a Call<'_>, caller: &'a Caller, message: &[u8]) -> DecisionOrReading<'a> {
    match confine(call, caller, message) {
        Ok(leases) if leases.is_empty() => decide(call, caller, message),
        Ok(leases) => Err(of_confined(call, caller, leases, message.into()).boxed_local()),
        Err(refusal) => Ok(Err(refusal)),
    }
}

fn decide<'a>(call: &'a Call<'_>, caller: &'a Caller, message: &[u8]) -> DecisionOrReading<'a> {
    let snapshot = call.snapshot();
    let permits = caller.permits(&snapshot.identities, call.client);
    match permits.decide(call.method, message) {
        Decision::Allowed(permit) => {
            audited_request::note_verdict(call, permits, Ok(permit.grant()));
            Ok(Ok(permit))
        }
        Decision::Denied(denial) => Ok(consequence(call, permits, denial, DeniedPart::Message(message))),
        Decision::NeedsLeaseKeys(permit, leases) => {
            Err(of_lease_keys(call, caller, Rc::clone(permits), permit, leases).boxed_local())
        }
    }
}

/// Decides on a stream as a whole, before its first request.
///
/// # Errors
/// The policy refuses every request of the caller.
pub fn of_stream(call: &Call<'_>, caller: &Caller) -> Result<Permit, Refusal> {
    let permits = permits_of(call, caller);
    if permits.namespace == CallerNamespace::Undecided {
        return Err(outside_namespace(call, OutsideNamespace(Action::Read)));
    }
    match permits.decide_stream(call.method) {
        Decision::Denied(denial) => consequence(call, &permits, denial, part_of_stream(call)),
        Decision::Allowed(permit) | Decision::NeedsLeaseKeys(permit, _) => {
            audited_request::note_verdict(call, &permits, Ok(permit.grant()));
            Ok(permit)
        }
    }
}

/// The part of a stream that is decided as a whole: an unknown method has no message to be decided on.
fn part_of_stream<'c>(call: &Call<'c>) -> DeniedPart<'c> {
    match call.method.handler {
        Handler::PassThrough => DeniedPart::UnknownMethod(call.path),
        _ => DeniedPart::Nothing,
    }
}

/// Decides on a method without a row in the method table, which no rule can name.
///
/// # Errors
/// The policy refuses unknown methods, or the caller has a namespace: the keys of an unknown message are
/// unknown too.
pub fn of_unknown_method(call: &Call<'_>, caller: &Caller) -> Result<Permit, Refusal> {
    let permits = permits_of(call, caller);
    if permits.namespace != CallerNamespace::Everything {
        let refused = outside_namespace(call, OutsideNamespace(Action::Write));
        return Err(unimplemented(call.path).unwrap_or(refused));
    }
    let Decision::Denied(denial) = permits.decide_unknown(call.method) else {
        return of_stream(call, caller);
    };
    let refused = consequence(call, &permits, denial, part_of_stream(call));
    refused.map_err(|refusal| match permits.unknown_methods {
        UnknownMethods::Allow => refusal,
        UnknownMethods::Refuse => unimplemented(call.path).unwrap_or(refusal),
    })
}

fn unimplemented(path: &str) -> Option<Refusal> {
    let (service, _) = path.strip_prefix('/')?.rsplit_once('/')?;
    Some(Refusal::unknown_service(service))
}

/// Counts a denial. Returns the permit of a denial that is not enforced.
///
/// # Errors
/// The denial is enforced.
fn consequence(
    call: &Call<'_>,
    permits: &Rc<PermitSet>,
    denial: Denial,
    part: DeniedPart<'_>,
) -> Result<Permit, Refusal> {
    audited_request::note_verdict(call, permits, Err(denial));
    if let DeniedPart::Message(message) = part {
        audited_request::note_refused_keys(call, message);
    }
    let (gateway, method) = (call.gateway, call.method);
    let (action, reason) = (denial.action.name(), denial.reason.word());
    permits
        .enforce_and_count(denial, &gateway.metrics.policy)
        .inspect(|_| {
            let peer = call.record.peer().unwrap_or_default();
            gateway.shadow.follow(gateway.callers.rules().policy_generation());
            gateway.shadow.note(permits, &peer, (method, denial), part, Instant::now());
            tracing::debug!(method = method.path, action, reason, "the policy would refuse a request");
        })
        .inspect_err(|_| {
            call.record.note_rule(permits.denying_rule(denial));
            tracing::debug!(method = method.path, action, reason, "the policy refused a request");
        })
}

/// Decides on the keys attached to leases, as read with the caller's own identity.
async fn of_lease_keys(
    call: &Call<'_>,
    caller: &Caller,
    permits: Rc<PermitSet>,
    permit: Permit,
    leases: Vec<(Action, i64)>,
) -> Result<Permit, Refusal> {
    let upstream = Rc::clone(&call.gateway.upstream);
    let probe = PermissionProbe { upstream, user: caller.upstream_user.clone() };
    for (action, lease) in leases {
        let keys = match probe.keys_of_lease(lease).await {
            Ok(keys) => keys,
            // A denial would only be counted.
            Err(_) if permits.mode != PolicyMode::Enforce => return Ok(permit),
            Err(refusal) => return Err(refusal),
        };
        if let Decision::Denied(denial) = permits.decide_keys(action, keys.iter().map(|key| &key[..])) {
            return consequence(call, &permits, denial, DeniedPart::KeysOfLease(action, &keys));
        }
    }
    audited_request::note_verdict(call, &permits, Ok(permit.grant()));
    Ok(permit)
}
