//! The audit state of a call, and the audit record at the call's end.
//!
//! Owns: the facts collected for the audit log, the room of the record, and the choice of the events. Must
//! not know: the steps of a call, the records of a call that lasts. Invariants: the state exists for audited
//! calls only; the record is written once, at the end of the call, also of a call dropped half-way; no value,
//! token or password is a fact.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::time::Duration;

use http::HeaderMap;
use http::header::USER_AGENT;

use crate::connection_origin::ConnectionOrigin;
use keyward_access::policy::caller_namespace::hides;
use keyward_access::policy::interval_set::GrantId;
use keyward_access::policy::permit_set::{Denial, PermitSet};
use keyward_access::usage::exceeded::Exceeded;
use keyward_config::PolicyMode;
use keyward_config::audit_settings::AuditEvent;
use keyward_etcd::identity::{MemberId, UserName};
use keyward_etcd::refusal::Code;
use keyward_etcd::rpc::key_range::{KeyRange, RangeEnd};
use keyward_etcd::rpc::method::{Class, Effect, Handler, Lane, Method};
use keyward_etcd::rpc::touch::{self, Touch, TouchTarget};
use keyward_records::audit::log::AuditLog;
use keyward_records::audit::queue::{AuditPlace, RoomShare};
use keyward_records::audit::record::{
    AuditedEnd, AuditedRange, AuditedRanges, CallAuditRecord, Timestamp, cut_name, lease_text,
};
use keyward_telemetry::limiter::PeerRecordLimiter;

/// Bytes of a record beside its ranges.
const FIELDS: usize = 700;

/// The room of the record of a call.
enum RecordRoom {
    /// None was reserved.
    Unreserved,
    /// Reserved until the call's end.
    Reserved(AuditPlace),
    /// Found at the begin of a call that may last for days, and not held.
    NotHeld,
}

/// The facts collected for the record of a call.
pub struct CallAudit {
    pub(super) event: AuditEvent,
    room: RecordRoom,
    pub(super) ranges: AuditedRanges,
    pub(super) lease: Option<i64>,
    pub(super) received: usize,
    user_agent: Option<Box<str>>,
    /// True once a record names the policy's denial, of a call that lasts: its end leaves no second one.
    pub(super) is_denial_recorded: Option<Rc<Cell<bool>>>,
    /// The path of a method without a row.
    path: Option<Box<str>>,
    /// The store's revision after the call.
    pub revision: Option<i64>,
    /// The policy's verdict, if the policy is not off for the caller.
    pub verdict: Option<PolicyVerdict>,
}

/// The policy's verdict on a request.
pub struct PolicyVerdict {
    /// The permissions that decided.
    pub permits: Rc<PermitSet>,
    /// The grant that allowed the request, or the denial. An allowed request without a key or action of its
    /// own has no grant.
    pub decided: Result<Option<GrantId>, Denial>,
}

/// The fields of a verdict in a record.
pub(super) struct VerdictTexts {
    pub(super) generation: String,
    pub(super) verdict: &'static str,
    pub(super) rule: Option<String>,
}

impl PolicyVerdict {
    /// True if the policy denies the request, and lets it pass.
    pub(super) fn is_passed_denial(&self) -> bool {
        self.decided.is_err_and(|denial| self.permits.enforce(denial).is_ok())
    }

    /// False if the policy is off for the caller.
    pub(super) fn is_of_policy(&self) -> bool {
        self.permits.mode != PolicyMode::Off
    }

    pub(super) fn texts(&self) -> VerdictTexts {
        let permits = &self.permits;
        let (verdict, rule) = match self.decided {
            Ok(grant) => ("allowed", grant.map(|grant| permits.allowing_rule(grant))),
            Err(denial) => {
                let verdict = if permits.enforce(denial).is_err() { "refused" } else { "would_refuse" };
                (verdict, Some(permits.denying_rule(denial)))
            }
        };
        VerdictTexts { generation: permits.generation.to_string(), verdict, rule }
    }
}

/// The event of a call; `None` for calls without a record at their end. A keepalive changes nothing but a
/// time, and a health check reveals nothing of the store.
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
    /// The facts of a request message; `None` if unknown.
    pub(super) fn of_request(
        event: AuditEvent,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        message: Option<&[u8]>,
    ) -> Self {
        let agent = headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok());
        let mut audit = Self {
            event,
            room: RecordRoom::Unreserved,
            ranges: AuditedRanges::default(),
            lease: None,
            received: 0,
            user_agent: agent.map(|agent| cut_name(agent).into()),
            is_denial_recorded: None,
            path: (method.handler == Handler::PassThrough).then(|| cut_name(path).into()),
            revision: None,
            verdict: None,
        };
        audit.note_message(method, message);
        audit
    }

    /// Notes the ranges and the lease of the request message; `None` if unknown.
    pub(super) fn note_message(&mut self, method: &Method, message: Option<&[u8]>) {
        self.note_message_if(method, message, |_touch| true);
    }

    /// As [`CallAudit::note_message`], for a caller in a namespace.
    pub(super) fn note_message_in_namespace(&mut self, method: &Method, message: Option<&[u8]>) {
        self.note_message_if(method, message, |touch| !hides(method, touch));
    }

    fn note_message_if(
        &mut self,
        method: &Method,
        message: Option<&[u8]>,
        is_shown: impl Fn(&Touch<'_>) -> bool,
    ) {
        let touched = message.map(|message| touched_if(method, message, is_shown));
        (self.ranges, self.lease) = touched.unwrap_or_default();
        self.received = self.received.max(message.map_or(0, <[u8]>::len));
    }

    /// Notes the lease named by the client.
    pub(super) fn note_lease(&mut self, lease: i64) {
        self.lease = Some(lease);
    }

    /// True if the call has a record for its refusal only.
    pub(super) fn is_refusal_only(&self) -> bool {
        self.event == AuditEvent::Refusal
    }

    /// True if a record names the denial of the call already.
    fn is_denial_recorded(&self) -> bool {
        self.is_denial_recorded.as_ref().is_some_and(|recorded| recorded.get())
    }

    /// The bytes of the record, about.
    pub(super) fn weight(&self) -> usize {
        FIELDS + self.ranges.weight()
    }

    /// Notes the room reserved for the record. A call of a stream, or a waiting call, may last for days, and
    /// gives the room back: the number of such calls is limited elsewhere.
    pub(super) fn keep_place(&mut self, place: AuditPlace, method: &Method) {
        self.room = match method.lane {
            Lane::Stream => RecordRoom::NotHeld,
            Lane::Unary | Lane::Bulk => RecordRoom::Reserved(place),
        };
    }
}

/// The ranges and the lease of a request message, for records.
pub(super) fn touched(method: &Method, message: &[u8]) -> (AuditedRanges, Option<i64>) {
    touched_if(method, message, |_touch| true)
}

/// The ranges of a watch, given as its WatchCreateRequest.
pub(super) fn touched_by_watch(create: &[u8]) -> AuditedRanges {
    let mut ranges = AuditedRanges::default();
    let visited = touch::visit_watch_create(create, &mut |touch| {
        if let TouchTarget::Keys(range) = touch.target {
            ranges.add(|| audited_range(touch.action.name(), range));
        }
        ControlFlow::Continue(())
    });
    // A watch that cannot be read was refused when it was created.
    if visited.is_err() {
        tracing::debug!("the ranges of an open watch cannot be read");
    }
    ranges
}

fn audited_range(action: &'static str, range: KeyRange<'_>) -> AuditedRange {
    let end = match range.end {
        RangeEnd::StartKey => AuditedEnd::Key,
        RangeEnd::Before(end) => AuditedEnd::Before(end),
        RangeEnd::Unbounded => AuditedEnd::Unbounded,
    };
    AuditedRange::new(action, range.start, end)
}

fn touched_if(
    method: &Method,
    message: &[u8],
    is_shown: impl Fn(&Touch<'_>) -> bool,
) -> (AuditedRanges, Option<i64>) {
    let (mut ranges, mut named) = (AuditedRanges::default(), None);
    let mut add = |touch: Touch<'_>| {
        match touch.target {
            _ if !is_shown(&touch) => {}
            TouchTarget::Keys(range) => ranges.add(|| audited_range(touch.action.name(), range)),
            TouchTarget::KeysOfLease(lease) => {
                named = Some(lease);
                if method.class == Class::Lease {
                    ranges.add(|| AuditedRange::of_lease(touch.action.name(), lease));
                }
            }
            // etcd asks for permission on the other keys of a Put's lease, and changes none of them.
            TouchTarget::KeysSharingLease(lease) => named = Some(lease),
            TouchTarget::Cluster => ranges.add_action(touch.action.name()),
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
    pub(super) limit: Option<Exceeded>,
    /// The maker of the error at the call's end.
    pub(super) refused_by: Option<&'static str>,
    /// True for a refusal held back for longer than the client waited.
    pub(super) is_held_refusal: bool,
}

/// True if a call with this end has certainly changed nothing: it was never sent, or etcd refused it.
pub(super) fn is_without_effect(code: Code, attempts: u32) -> bool {
    let is_refused = matches!(
        code,
        Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Unauthenticated
    );
    code != Code::Ok && (is_refused || attempts == 0)
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
        let is_about_client = is_about_client || self.is_held_refusal;
        self.method.class != Class::Health && (is_denied || (is_about_client && self.attempts == 0))
    }
}

/// Writes the record of a call at its end, if the call is audited. A call that the policy denies and lets
/// pass has the record of a refused call, if it has no other. Records of calls without effect pass the
/// limiter, so that nobody fills a disk, or rotates records away, by calls that change nothing; callers
/// without a proved identity share one bucket, since they choose their names.
pub(super) fn write(
    log: &AuditLog,
    limiter: &PeerRecordLimiter,
    audit: Option<Box<CallAudit>>,
    facts: &CallFacts<'_>,
) {
    let is_refusal = facts.is_refusal();
    let is_passed_denial = |audit: &CallAudit| {
        audit.verdict.as_ref().is_some_and(PolicyVerdict::is_passed_denial) && !audit.is_denial_recorded()
    };
    let event = match &audit {
        Some(audit) if audit.event != AuditEvent::Refusal => audit.event,
        Some(audit) if audit.is_denial_recorded() && facts.code == Code::PermissionDenied => return,
        Some(audit) if log.has(AuditEvent::Refusal) && is_passed_denial(audit) => AuditEvent::Refusal,
        _ if is_refusal && log.has(AuditEvent::Refusal) => AuditEvent::Refusal,
        _ => return,
    };
    let is_limited = event == AuditEvent::Refusal || is_without_effect(facts.code, facts.attempts);
    let proved = facts.peer.filter(|_| facts.is_proved);
    if is_limited && !limiter.may_log(proved) {
        return log.note_left_out(proved);
    }
    let mut audit = audit;
    if let Some(audit) = audit.as_mut().filter(|_| is_limited) {
        audit.ranges.shorten();
    }
    let room = audit.as_mut().map(|audit| std::mem::replace(&mut audit.room, RecordRoom::Unreserved));
    let place = match room {
        Some(RecordRoom::Reserved(place)) => Some(place),
        Some(RecordRoom::NotHeld) if !is_limited => log.room_in_debt(),
        Some(RecordRoom::NotHeld | RecordRoom::Unreserved) | None => None,
    };
    let lease = audit.as_ref().and_then(|audit| audit.lease).map(lease_text);
    let member = facts.member.map(|member| member.to_string());
    let verdict = audit.as_ref().and_then(|audit| audit.verdict.as_ref()).map(PolicyVerdict::texts);
    let limit = facts.limit.map(|limit| limit.to_string());
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
        actions: &[],
        lease: lease.as_deref(),
        revision: audit.as_ref().and_then(|audit| audit.revision),
        member: member.as_deref(),
        attempts: facts.attempts,
        micros: u64::try_from(facts.took.as_micros()).unwrap_or(u64::MAX),
        received: audit.as_ref().map_or(0, |audit| audit.received as u64),
        sent: facts.sent,
        policy_generation: verdict.as_ref().map(|verdict| &*verdict.generation),
        verdict: verdict.as_ref().map(|verdict| verdict.verdict),
        rule: verdict.as_ref().and_then(|verdict| verdict.rule.as_deref()),
        limit: limit.as_deref(),
        refused_by: facts.refused_by,
        user_agent: audit.as_ref().and_then(|audit| audit.user_agent.as_deref()),
    };
    let no_ranges = AuditedRanges::default();
    let record = record.with_ranges(audit.as_ref().map_or(&no_ranges, |audit| &audit.ranges));
    if is_limited {
        log.record_without_effect(place, proved, &record);
    } else {
        log.record(place, RoomShare::Common, &record);
    }
}

fn name(event: AuditEvent) -> &'static str {
    match event {
        AuditEvent::Change => "change",
        AuditEvent::Read => "read",
        AuditEvent::Watch => "watch_end",
        AuditEvent::Lease => "begin",
        AuditEvent::Login => "login",
        AuditEvent::Refusal => "refusal",
        AuditEvent::Admin => "admin",
    }
}
