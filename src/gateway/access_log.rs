//! One record per call: counted, and logged if configured, when the call ends, however it ends.
//!
//! Owns: the facts reported about a call, to metrics, access log and audit log. Must not know: the contents
//! of the answer. Invariants: a record is written exactly once, on drop, and never holds a value, a token or
//! a password; only the audit log has keys. A call abandoned by its client is reported as Canceled. Records
//! of refused callers without a proved identity are limited by rate, so refusals cannot fill a disk; all
//! records are counted.

use prometheus_client::metrics::gauge::Gauge;
use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use tokio::time::Instant;

use crate::audit::log::AuditLog;
use crate::gateway::call_audit::{self, CallAudit, CallFacts};
use crate::gateway::connection_origin::ConnectionOrigin;

use crate::identity::{MemberId, UserName};
use crate::refusal::Code;
use crate::rpc::method::{Method, StreamingSides};
use crate::telemetry::limiter::RecordLimiter;
use crate::telemetry::{self, metrics::Metrics};
use crate::usage::caller_usage::{CallUsage, CallerUsage};
use crate::usage::exceeded::Exceeded;

/// The calls of a shard that leave a record in the log.
#[derive(Clone, Debug)]
pub enum AccessLog {
    /// No calls.
    Off,
    /// All calls, except that records of callers without a proved identity pass the limiter, if the call
    /// failed or never went upstream.
    On(Rc<RecordLimiter>),
}

/// The destinations of the records of a shard's calls.
pub struct RecordSinks {
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The access log.
    pub log: AccessLog,
    /// The audit log, if on.
    pub audit: Option<Arc<AuditLog>>,
    /// Limits the audit records of callers without a proved identity.
    pub audit_limiter: RecordLimiter,
}

/// The record of a call, written on drop. The steps of the call share the record, so each step notes its part
/// through a shared reference.
pub struct AccessRecord {
    sinks: Rc<RecordSinks>,
    method: &'static Method,
    origin: Rc<ConnectionOrigin>,
    /// When the call arrived.
    pub started: Instant,
    code: Option<Code>,
    peer: RefCell<Option<Rc<str>>>,
    user: RefCell<Option<UserName>>,
    is_proved: Cell<bool>,
    /// The facts for the audit log, if the call is audited.
    audit: Cell<Option<Box<CallAudit>>>,
    /// The member that answered last.
    pub member: Cell<Option<MemberId>>,
    /// The number of times the call was sent upstream.
    pub attempts: Cell<u32>,
    /// Bytes of framed messages sent to the client.
    sent: u64,
    /// Counts the call for its caller's limits.
    usage: OnceCell<CallUsage>,
    limit: Cell<Option<Exceeded>>,
}

impl AccessRecord {
    /// Begins the record of a call of `method`.
    #[must_use]
    pub fn begin(sinks: Rc<RecordSinks>, method: &'static Method, origin: Rc<ConnectionOrigin>) -> Self {
        open(&sinks.metrics, method).inc();
        Self {
            sinks,
            method,
            origin,
            started: Instant::now(),
            code: None,
            peer: RefCell::default(),
            user: RefCell::default(),
            is_proved: Cell::default(),
            audit: Cell::default(),
            member: Cell::default(),
            attempts: Cell::default(),
            sent: 0,
            usage: OnceCell::new(),
            limit: Cell::default(),
        }
    }

    /// The audit log, if on.
    #[must_use]
    pub fn audit_log(&self) -> Option<&Arc<AuditLog>> {
        self.sinks.audit.as_ref()
    }

    /// True if the call has facts for the audit log.
    #[must_use]
    pub fn is_audited(&self) -> bool {
        let audit = self.audit.take();
        let is_audited = audit.is_some();
        self.audit.set(audit);
        is_audited
    }

    /// Puts the facts for the audit log into the record.
    pub fn audit(&self, audit: Box<CallAudit>) {
        self.audit.set(Some(audit));
    }

    /// Changes the facts for the audit log, if the call is audited.
    pub fn note_audited(&self, note: impl FnOnce(&mut CallAudit)) {
        if let Some(mut audit) = self.audit.take() {
            note(&mut audit);
            self.audit.set(Some(audit));
        }
    }

    /// Notes the caller, as proved or as claimed.
    pub fn note_peer(&self, peer: Rc<str>) {
        self.peer.replace(Some(peer));
    }

    /// Notes the etcd user of the call, and if the caller has proved to be an etcd user.
    pub fn note_user(&self, user: Option<UserName>, is_proved: bool) {
        self.user.replace(user);
        self.is_proved.set(is_proved);
    }

    /// The caller, if noted.
    #[must_use]
    pub fn peer(&self) -> Option<Rc<str>> {
        self.peer.borrow().clone()
    }

    /// True once the caller is noted.
    #[must_use]
    pub fn has_peer(&self) -> bool {
        self.peer.borrow().is_some()
    }

    /// Counts an attempt at `member`. Returns the number of attempts so far.
    pub fn count_attempt(&self, member: MemberId) -> u32 {
        self.member.set(Some(member));
        self.attempts.set(self.attempts.get() + 1);
        self.attempts.get()
    }

    /// Counts the call for its caller's limits, until the record ends.
    pub fn set_usage(&self, usage: CallUsage) {
        self.usage.get_or_init(|| usage);
    }

    /// The count of the call; `None` without any limit.
    #[must_use]
    pub fn call_usage(&self) -> Option<&CallUsage> {
        self.usage.get()
    }

    /// The limits of the caller; `None` without any limit.
    #[must_use]
    pub fn usage(&self) -> Option<&Rc<CallerUsage>> {
        self.usage.get().map(CallUsage::caller)
    }

    /// Notes the limit that refused the call.
    pub fn note_limit(&self, limit: Exceeded) {
        self.limit.set(Some(limit));
    }

    /// The limit that refused the call.
    #[must_use]
    pub fn limit(&self) -> Option<Exceeded> {
        self.limit.get()
    }

    /// Counts bytes of framed messages sent to the client.
    pub fn count_sent(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        if let Some(usage) = self.usage() {
            usage.charge_reply(bytes);
        }
    }

    /// True once the status code of the call is noted.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.code.is_some()
    }

    /// Notes the status code of the call. Later codes are ignored.
    pub fn ended(&mut self, code: Code) {
        self.code.get_or_insert(code);
    }
}

/// The gauge of open calls, or of open streams.
fn open<'m>(metrics: &'m Metrics, method: &Method) -> &'m Gauge {
    if is_unary(method) { &metrics.calls_open } else { &metrics.streams_open }
}

fn is_unary(method: &Method) -> bool {
    method.stream == StreamingSides::Unary
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let took = self.started.elapsed();
        let code = self.code.unwrap_or(Code::Canceled);
        let sinks = &*self.sinks;
        open(&sinks.metrics, self.method).dec();
        let row = usize::from(self.method.index);
        sinks.metrics.call_ended(row, code as u8, || code.name(), is_unary(self.method).then_some(took));
        if let Some(audit) = &sinks.audit {
            let facts = CallFacts {
                method: self.method,
                origin: &self.origin,
                code,
                took,
                peer: self.peer.get_mut().as_deref(),
                user: self.user.get_mut().as_ref(),
                is_proved: self.is_proved.get(),
                member: self.member.get(),
                attempts: self.attempts.get(),
                sent: self.sent,
                limit: self.limit.get(),
            };
            call_audit::write(audit, &sinks.audit_limiter, self.audit.take(), &facts);
        }
        match &sinks.log {
            AccessLog::Off => return,
            // A call of an unproved caller that failed, or that never went upstream: repeating the call costs
            // etcd nothing.
            AccessLog::On(limiter)
                if !self.is_proved.get()
                    && (code != Code::Ok || self.attempts.get() == 0)
                    && !limiter.may_log() =>
            {
                return;
            }
            AccessLog::On(_) => {}
        }
        tracing::info!(
            target: telemetry::ACCESS,
            method = self.method.path,
            code = ?code,
            micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
            peer = self.peer.borrow().as_deref(),
            user = self.user.borrow().as_ref().map(UserName::as_str),
            member = self.member.get().map(tracing::field::display),
            attempts = self.attempts.get(),
            sent = self.sent,
            limit = self.limit.get().map(tracing::field::display),
            listener = &*self.origin.listener,
            remote = self.origin.remote_text.as_ref().map(tracing::field::display),
            "call"
        );
    }
}
