//! The audit records made while a call lasts: the begin of a watch, of a keepalive stream and of a call that
//! waits, and the denials and refusals on them.
//!
//! Owns: the choice of the event, and how often a stream leaves a record. Must not know: the record at the
//! end of a call. Invariants: a stream leaves one record for its begin, and one for each policy that denies
//! it; a record of a denial passes the limiter of calls without effect, so that no stream fills a disk; a
//! stream never waits for room.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use crate::call_audit::{CallAudit, PolicyVerdict, touched, touched_by_watch};
use crate::connection_origin::ConnectionOrigin;
use keyward_access::policy::permit_set::PermitSet;
use keyward_config::audit_settings::AuditEvent;
use keyward_etcd::identity::UserName;
use keyward_etcd::refusal::{Code, RefusalReason};
use keyward_etcd::rpc::method::Method;
use keyward_etcd::rpc::touch::Action;
use keyward_records::audit::log::AuditLog;
use keyward_records::audit::queue::RoomShare;
use keyward_records::audit::record::{
    AuditedEnd, AuditedRange, AuditedRanges, CallAuditRecord, Timestamp, lease_text,
};
use keyward_streams::lease::renewal_permission::RenewalDecision;
use keyward_streams::watch::request_gate::{RefusedWatch, RefusedWatchRequest};
use keyward_telemetry::limiter::PeerRecordLimiter;

/// The name of the event.
const BEGIN: &str = "begin";
/// The name of the event.
const WATCH_CREATE: &str = "watch_create";
/// The name of the event.
const REFUSAL: &str = "refusal";

/// The facts of a call that are repeated in each of its records.
pub(super) struct LastingCallFacts {
    pub(super) method: &'static Method,
    pub(super) origin: Rc<ConnectionOrigin>,
    pub(super) peer: Rc<str>,
    pub(super) user: Option<UserName>,
    pub(super) limiter: Rc<PeerRecordLimiter>,
    pub(super) user_agent: Option<Box<str>>,
}

/// The facts of one record.
struct RecordedPart<'a> {
    event: &'static str,
    ranges: &'a AuditedRanges,
    lease: Option<i64>,
    verdict: Option<&'a PolicyVerdict>,
    received: usize,
    refused: Option<&'a RefusedWatch<'a>>,
}

/// The records of a keepalive stream.
pub(super) struct RenewalRecords {
    pub(super) facts: LastingCallFacts,
    pub(super) log: Arc<AuditLog>,
    has_begun: Cell<bool>,
    /// The permissions that denied a renewal last.
    denied_by: RefCell<Option<Rc<PermitSet>>>,
    /// True once a record names a denial that is enforced.
    pub(super) is_denial_recorded: Rc<Cell<bool>>,
}

impl LastingCallFacts {
    /// Records the watch created by `message`, a WatchRequest, or refused by `verdict`. Other requests leave
    /// no record.
    pub(super) fn write_watch(&self, log: &AuditLog, message: &[u8], verdict: Option<&PolicyVerdict>) {
        let is_denied = verdict.is_some_and(|verdict| verdict.decided.is_err());
        let event = match (log.has(AuditEvent::Watch), is_denied && log.has(AuditEvent::Refusal)) {
            (true, _) => WATCH_CREATE,
            (false, true) => REFUSAL,
            (false, false) => return,
        };
        let (mut ranges, _) = touched(self.method, message);
        let is_refused = is_denied && verdict.is_some_and(|verdict| !verdict.is_passed_denial());
        let is_limited = event == REFUSAL || is_refused;
        if is_limited {
            ranges.shorten();
        }
        let part = RecordedPart {
            event,
            ranges: &ranges,
            lease: None,
            verdict,
            received: message.len(),
            refused: None,
        };
        if !ranges.is_empty() {
            self.write(log, &part, is_limited);
        }
    }

    /// Records a watch refused by a member or by a limit. A record of its own follows the one of the create,
    /// which was made before anything was sent.
    pub(super) fn write_refused_watch(&self, log: &AuditLog, watch: &RefusedWatch<'_>) {
        let event = if log.has(AuditEvent::Refusal) { REFUSAL } else { WATCH_CREATE };
        let (mut ranges, received) = match watch.asked {
            RefusedWatchRequest::Message(message) => (touched(self.method, message).0, message.len()),
            RefusedWatchRequest::Create(create) => (touched_by_watch(create), create.len()),
        };
        ranges.shorten();
        let refused = Some(watch);
        let part = RecordedPart { event, ranges: &ranges, lease: None, verdict: None, received, refused };
        self.write(log, &part, true);
    }

    /// Records that a changed policy denies an open watch, given as its WatchCreateRequest.
    pub(super) fn write_open_watch(&self, log: &AuditLog, create: &[u8], verdict: &PolicyVerdict) {
        let event = if log.has(AuditEvent::Refusal) { REFUSAL } else { WATCH_CREATE };
        let mut ranges = touched_by_watch(create);
        ranges.shorten();
        let verdict = Some(verdict);
        let part = RecordedPart {
            event,
            ranges: &ranges,
            lease: None,
            verdict,
            received: create.len(),
            refused: None,
        };
        self.write(log, &part, true);
    }

    /// Records that a changed policy denies a stream or a waiting call, given as its request.
    pub(super) fn write_open_call(&self, log: &AuditLog, message: &[u8], verdict: &PolicyVerdict) {
        let (mut ranges, lease) = touched(self.method, message);
        ranges.shorten();
        let verdict = Some(verdict);
        let part = RecordedPart {
            event: REFUSAL,
            ranges: &ranges,
            lease,
            verdict,
            received: message.len(),
            refused: None,
        };
        self.write(log, &part, true);
    }

    /// Records the begin of a stream or of a call that waits. A call without a record at its end has one for
    /// its denial only.
    pub(super) fn write_begin(&self, log: &AuditLog, audit: &mut CallAudit) {
        let is_refusal_only = audit.is_refusal_only();
        let verdict = audit.verdict.as_ref();
        if is_refusal_only {
            if !verdict.is_some_and(PolicyVerdict::is_passed_denial) {
                return;
            }
            audit.ranges.shorten();
            audit.is_denial_recorded = Some(Rc::new(Cell::new(true)));
        }
        let event = if is_refusal_only { REFUSAL } else { BEGIN };
        let CallAudit { ranges, lease, received, .. } = &*audit;
        let part = RecordedPart { event, ranges, lease: *lease, verdict, received: *received, refused: None };
        self.write(log, &part, is_refusal_only);
    }

    fn write(&self, log: &AuditLog, part: &RecordedPart<'_>, is_limited: bool) {
        let peer = Some(&*self.peer).filter(|peer| !peer.is_empty());
        if is_limited && !self.limiter.may_log(peer) {
            return log.note_left_out(peer);
        }
        let lease = part.lease.map(lease_text);
        let verdict = part.verdict.map(PolicyVerdict::texts);
        let is_denied = verdict.as_ref().is_some_and(|verdict| verdict.verdict == "refused");
        let policy = is_denied.then_some((Code::PermissionDenied, "policy"));
        let refused = part.refused.map(|watch| (watch.refusal.code(), watch.refusal.reason().name()));
        let refused = policy.or(refused);
        // A member was asked.
        let is_of_member = part.refused.is_some_and(|watch| watch.refusal.reason() == RefusalReason::Member);
        let record = CallAuditRecord {
            time: Timestamp::now(),
            event: part.event,
            method: self.method.path,
            code: refused.map_or(Code::Ok, |(code, _)| code).name(),
            refused: refused.is_some() && !is_of_member,
            peer,
            user: self.user.as_ref().map(UserName::as_str),
            remote: self.origin.remote_text.as_deref(),
            listener: &self.origin.listener,
            ranges: &[],
            ranges_omitted: 0,
            actions: &[],
            lease: lease.as_deref(),
            revision: None,
            member: None,
            attempts: u32::from(is_of_member),
            micros: 0,
            received: part.received as u64,
            sent: 0,
            policy_generation: verdict.as_ref().map(|verdict| &*verdict.generation),
            verdict: verdict.as_ref().map(|verdict| verdict.verdict),
            rule: verdict.as_ref().and_then(|verdict| verdict.rule.as_deref()),
            limit: part.refused.and_then(|watch| watch.limit),
            refused_by: refused.map(|(_, by)| by),
            user_agent: self.user_agent.as_deref(),
        };
        let record = record.with_ranges(part.ranges);
        if is_limited {
            log.record_without_effect(None, peer, &record);
        } else {
            log.record(None, RoomShare::Common, &record);
        }
    }
}

impl RenewalRecords {
    /// No renewal so far.
    pub(super) fn new(facts: LastingCallFacts, log: Arc<AuditLog>) -> Self {
        Self {
            facts,
            log,
            has_begun: Cell::default(),
            denied_by: RefCell::default(),
            is_denial_recorded: Rc::default(),
        }
    }

    /// Takes the policy's decision on a renewal. The first renewal leaves a record, and so does the first one
    /// that is denied by each policy: with the keys of the lease, if the policy judged them, since the keys
    /// may be older than the log.
    pub(super) fn take(&self, decision: &RenewalDecision<'_>) {
        let RenewalDecision { lease, keys, permits, decided } = *decision;
        let is_begin = !self.has_begun.replace(true);
        let is_denied = decided.is_err();
        let is_new_denial = is_denied && {
            let before = self.denied_by.replace(Some(Rc::clone(permits)));
            !before.is_some_and(|before| before.is_same(permits))
        };
        if !is_begin && !is_new_denial {
            return;
        }
        let verdict = PolicyVerdict { permits: Rc::clone(permits), decided };
        let is_refused = is_denied && !verdict.is_passed_denial();
        let (has_leases, has_refusals) = (self.log.has(AuditEvent::Lease), self.log.has(AuditEvent::Refusal));
        let event = match is_denied && has_refusals {
            true if is_refused || !is_begin || !has_leases => REFUSAL,
            _ if has_leases => BEGIN,
            _ => return,
        };
        if is_refused {
            self.is_denial_recorded.set(true);
        }
        let mut ranges = AuditedRanges::default();
        ranges.add_action(Action::Lease.name());
        ranges.add(|| AuditedRange::of_lease(Action::Write.name(), lease));
        for key in keys {
            ranges.add(|| AuditedRange::new(Action::Write.name(), key, AuditedEnd::Key));
        }
        if event == REFUSAL {
            ranges.shorten();
        }
        let verdict = Some(&verdict).filter(|verdict| verdict.is_of_policy());
        let part =
            RecordedPart { event, ranges: &ranges, lease: Some(lease), verdict, received: 0, refused: None };
        self.facts.write(&self.log, &part, event == REFUSAL);
    }
}
