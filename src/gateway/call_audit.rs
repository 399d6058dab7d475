//! The audit state of a call, and the audit record at the call's end.
//!
//! Owns: the facts collected for the audit log, the room of the record, and the choice of the events. Must
//! not know: the steps of a call. Invariants: the state exists for audited calls only; the record is written
//! once, at the end of the call, also of a call dropped half-way; no value, token or password is a fact.

use std::ops::ControlFlow;
use std::rc::Rc;
use std::time::Duration;

use http::HeaderMap;
use http::header::USER_AGENT;

use crate::audit::log::AuditLog;
use crate::audit::queue::AuditPlace;
use crate::audit::record::{
    AuditedEnd, AuditedRange, AuditedRanges, CallAuditRecord, Timestamp, cut_name, lease_text,
};
use crate::config::audit_settings::AuditEvent;
use crate::gateway::access_log::ConnectionOrigin;
use crate::identity::{MemberId, UserName};
use crate::refusal::Code;
use crate::rpc::key_range::RangeEnd;
use crate::rpc::method::{Class, Effect, Handler, Lane, Method};
use crate::rpc::touch::{self, Touch, TouchTarget};
use crate::telemetry::limiter::RecordLimiter;

/// Bytes of a record beside its ranges.
const FIELDS: usize = 700;

/// The room of the record of a call.
enum RecordRoom {
    /// None was reserved.
    Unreserved,
    /// Reserved until the call's end.
    Reserved(AuditPlace),
    /// Found at the begin of a call that may last for days, and not held.
    BeyondLimit,
}

/// The facts collected for the record of a call.
pub struct CallAudit {
    event: AuditEvent,
    room: RecordRoom,
    ranges: AuditedRanges,
    lease: Option<i64>,
    received: usize,
    user_agent: Option<Box<str>>,
    /// The path of a method without a row.
    path: Option<Box<str>>,
    /// The store's revision after the call.
    pub revision: Option<i64>,
    /// The generation of the policy that decided.
    pub policy_generation: Option<u64>,
    /// The rule of the policy that decided.
    pub rule: Option<Rc<str>>,
}

/// The event of a call; `None` for calls without records. A keepalive changes nothing but a time, and a
/// health check reveals nothing of the store.
pub(super) fn event_of(method: &Method, effect: Effect) -> Option<AuditEvent> {
    match method.handler {
        Handler::Login => Some(AuditEvent::Login),
        Handler::Watch | Handler::Observe => Some(AuditEvent::Watch),
        Handler::KeepAlive | Handler::HealthCheck | Handler::HealthWatch => None,
        _ if effect == Effect::ReadOnly => Some(AuditEvent::Read),
        _ => Some(AuditEvent::Change),
    }
}

impl CallAudit {
    /// The facts of a request message, which is empty if unknown.
    pub(super) fn of_request(
        event: AuditEvent,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        message: &[u8],
    ) -> Self {
        let agent = headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok());
        let mut audit = Self {
            event,
            room: RecordRoom::Unreserved,
            ranges: AuditedRanges::default(),
            lease: None,
            received: message.len(),
            user_agent: agent.map(|agent| cut_name(agent).into()),
            path: (method.handler == Handler::PassThrough).then(|| cut_name(path).into()),
            revision: None,
            policy_generation: None,
            rule: None,
        };
        if !message.is_empty() {
            (audit.ranges, audit.lease) = touched(method, message);
        }
        audit
    }

    /// The bytes of the record, about.
    pub(super) fn weight(&self) -> usize {
        FIELDS + self.ranges.weight()
    }

    /// Notes the room reserved for the record. A call of a stream, or a waiting call, may last for days, and
    /// gives the room back: the number of such calls is limited elsewhere.
    pub(super) fn keep_place(&mut self, place: AuditPlace, method: &Method) {
        self.room = match method.lane {
            Lane::Stream => RecordRoom::BeyondLimit,
            Lane::Unary | Lane::Bulk => RecordRoom::Reserved(place),
        };
    }
}

/// The ranges and the lease of a request message.
fn touched(method: &Method, message: &[u8]) -> (AuditedRanges, Option<i64>) {
    let (mut ranges, mut named) = (AuditedRanges::default(), None);
    let mut add = |touch: Touch<'_>| {
        match touch.target {
            TouchTarget::Keys(range) => {
                let end = match range.end {
                    RangeEnd::StartKey => AuditedEnd::Key,
                    RangeEnd::Before(end) => AuditedEnd::Before(end),
                    RangeEnd::Unbounded => AuditedEnd::Unbounded,
                };
                ranges.add(|| AuditedRange::new(touch.action.name(), range.start, end));
            }
            TouchTarget::KeysOfLease(lease) => {
                named = Some(lease);
                // etcd asks for permission on the other keys of a Put's lease, and changes none of them.
                if method.class == Class::Lease {
                    ranges.add(|| AuditedRange::of_lease(touch.action.name(), lease));
                }
            }
            TouchTarget::Cluster => {}
        }
        ControlFlow::Continue(())
    };
    // A body that cannot be read is refused before; the audit log never decides about a call.
    if touch::visit(method, message, &mut add).is_err() {
        tracing::debug!(method = method.path, "the ranges of an audited request cannot be read");
    }
    (ranges, named)
}

/// The facts of a call that its access record knows.
pub(super) struct CallFacts<'a> {
    pub(super) method: &'static Method,
    pub(super) origin: &'a ConnectionOrigin,
    pub(super) code: Code,
    pub(super) took: Duration,
    pub(super) peer: Option<&'a str>,
    pub(super) user: Option<&'a UserName>,
    pub(super) is_proved: bool,
    pub(super) member: Option<MemberId>,
    pub(super) attempts: u32,
    pub(super) sent: u64,
}

impl CallFacts<'_> {
    /// True if the call was refused by Keyward for what the client is or sent, or was denied by a member.
    fn is_refusal(&self) -> bool {
        let is_about_client = matches!(
            self.code,
            Code::InvalidArgument
                | Code::ResourceExhausted
                | Code::FailedPrecondition
                | Code::Unimplemented
                | Code::OutOfRange
        );
        let is_denied = matches!(self.code, Code::PermissionDenied | Code::Unauthenticated);
        self.method.class != Class::Health && (is_denied || (is_about_client && self.attempts == 0))
    }
}

/// Writes the record of a call at its end, if the call is audited. Records of failed calls without a proved
/// identity pass the limiter, so that strangers cannot fill a disk.
pub(super) fn write(
    log: &AuditLog,
    limiter: &RecordLimiter,
    audit: Option<Box<CallAudit>>,
    facts: &CallFacts<'_>,
) {
    let is_refusal = facts.is_refusal();
    let event = match &audit {
        Some(audit) if audit.event != AuditEvent::Refusal => audit.event,
        _ if is_refusal && log.has(AuditEvent::Refusal) => AuditEvent::Refusal,
        _ => return,
    };
    let is_strangers = !facts.is_proved && facts.code != Code::Ok && facts.attempts == 0;
    if is_strangers && !limiter.may_log() {
        return;
    }
    let mut audit = audit;
    let room = audit.as_mut().map(|audit| std::mem::replace(&mut audit.room, RecordRoom::Unreserved));
    let place = match room {
        Some(RecordRoom::Reserved(place)) => Some(place),
        Some(RecordRoom::BeyondLimit) => log.room_beyond_limit(),
        Some(RecordRoom::Unreserved) | None => None,
    };
    let lease = audit.as_ref().and_then(|audit| audit.lease).map(lease_text);
    let member = facts.member.map(|member| member.to_string());
    let record = CallAuditRecord {
        time: Timestamp::now(),
        event: name(event),
        method: audit.as_ref().and_then(|audit| audit.path.as_deref()).unwrap_or(facts.method.path),
        code: facts.code.name(),
        refused: event != AuditEvent::Login && facts.attempts == 0 && facts.code != Code::Ok,
        peer: facts.peer,
        user: facts.user.map(UserName::as_str),
        remote: facts.origin.remote_text.as_deref(),
        listener: &facts.origin.listener,
        ranges: &[],
        ranges_omitted: 0,
        lease: lease.as_deref(),
        revision: audit.as_ref().and_then(|audit| audit.revision),
        member: member.as_deref(),
        attempts: facts.attempts,
        micros: u64::try_from(facts.took.as_micros()).unwrap_or(u64::MAX),
        received: audit.as_ref().map_or(0, |audit| audit.received as u64),
        sent: facts.sent,
        policy_generation: audit.as_ref().and_then(|audit| audit.policy_generation),
        rule: audit.as_ref().and_then(|audit| audit.rule.as_deref()),
        user_agent: audit.as_ref().and_then(|audit| audit.user_agent.as_deref()),
    };
    match &audit {
        Some(audit) => log.record(place, &record.with_ranges(&audit.ranges)),
        None => log.record(place, &record),
    }
}

/// Records the watch created by `message`, a WatchRequest. Other requests leave no record.
pub(super) fn write_watch_create(
    log: &AuditLog,
    message: &[u8],
    method: &'static Method,
    origin: &ConnectionOrigin,
    peer: &str,
    user: Option<&UserName>,
    stream: &CallAudit,
) {
    let (ranges, _) = touched(method, message);
    if ranges.is_empty() {
        return;
    }
    let record = CallAuditRecord {
        time: Timestamp::now(),
        event: "watch_create",
        method: method.path,
        code: Code::Ok.name(),
        refused: false,
        peer: Some(peer),
        user: user.map(UserName::as_str),
        remote: origin.remote_text.as_deref(),
        listener: &origin.listener,
        ranges: &[],
        ranges_omitted: 0,
        lease: None,
        revision: None,
        member: None,
        attempts: 0,
        micros: 0,
        received: message.len() as u64,
        sent: 0,
        policy_generation: stream.policy_generation,
        rule: stream.rule.as_deref(),
        user_agent: stream.user_agent.as_deref(),
    };
    log.record(None, &record.with_ranges(&ranges));
}

fn name(event: AuditEvent) -> &'static str {
    match event {
        AuditEvent::Change => "change",
        AuditEvent::Read => "read",
        AuditEvent::Watch => "watch_end",
        AuditEvent::Login => "login",
        AuditEvent::Refusal => "refusal",
        AuditEvent::Admin => "admin",
    }
}
