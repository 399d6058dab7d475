//! One record per call: counted, and logged if chosen, when the call ends, however it ends.
//!
//! Owns: the facts reported about a call, to metrics, access log and audit log. Must not know: the contents
//! of the answer. Invariants: a record is written at most once, on drop, and never holds a value, a token or
//! a password; it holds keys with `log.keys` only. A call abandoned by its client is reported as Canceled,
//! with the reason of its refusal where the refusal was only held back. Records of calls without effect are
//! limited by rate, so that they cannot fill a disk; all calls are counted.

mod call_end;
mod refused_watches;

use std::borrow::Cow;
use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;

use crate::call_audit::{self, CallAudit, CallFacts};
use crate::call_trace::{CallTrace, CallTracer, CallWait, FinishedCall};
use crate::client_figures::ClientError;
use crate::connection_origin::ConnectionOrigin;
use crate::hot_prefixes::HotPrefixes;
use crate::slow_calls::{SlowCall, SlowCalls, SlowParts};
use keyward_access::usage::call_usage::CallUsage;
use keyward_access::usage::caller_usage::CallerUsage;
use keyward_access::usage::exceeded::Exceeded;
use keyward_access::usage::live_usage::LiveUsage;
use keyward_cluster::membership::Member;
use keyward_downstream::session::SessionId;
use keyward_etcd::identity::{MemberId, UserName};
use keyward_etcd::refusal::{Code, RefusalReason};
use keyward_etcd::rpc::method::{Handler, Lane, Method, StreamingSides};
use keyward_etcd::rpc::trace_id::{TRACEPARENT, TRACESTATE, TraceId, TraceParent};
use keyward_records::audit::log::AuditLog;
use keyward_records::audit::record::{AuditedRanges, cut_name};
use keyward_telemetry::access_settings::{AccessLogSettings, CallOutcome, RecordedCalls, SampleCounter};
use keyward_telemetry::call_span::SpanFact;
use keyward_telemetry::limiter::{PeerRecordLimiter, RecordLimiter};
use keyward_telemetry::metrics::Metrics;
use keyward_telemetry::user_metrics::UserFigures;

/// The access log of a shard.
#[derive(Debug)]
pub struct AccessLog {
    /// The calls with a record, as configured now.
    pub settings: Cell<AccessLogSettings>,
    /// Limits the records of callers without a proved identity, of calls that failed or never went upstream.
    pub limiter: Rc<RecordLimiter>,
    /// Limits the records of calls without effect of each peer.
    pub refused: PeerRecordLimiter,
    /// Chooses the sampled calls.
    pub samples: SampleCounter,
}

/// The facts that few calls have.
#[derive(Default)]
struct RareFacts {
    /// The text of the status of a failed call.
    reason: Option<Cow<'static, str>>,
    /// The rule of the policy that refused the call.
    rule: Option<String>,
    /// How long the refusal of the call was held back.
    held: Duration,
    /// The reason of a refusal that is decided, and held back from the client.
    held_refusal: Option<RefusalReason>,
    trace: Option<TraceId>,
    /// The trace, if the call has one.
    spans: Option<Box<CallTrace>>,
    ranges: Option<Rc<RefCell<AuditedRanges>>>,
}

/// The destinations of the records of a shard's calls.
pub struct RecordSinks {
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The metrics by etcd user, as remembered by the shard.
    pub users: UserFigures,
    /// The access log.
    pub log: AccessLog,
    /// The slowest calls of the last minutes.
    pub slow_calls: SlowCalls,
    /// The key prefixes with the most calls.
    pub hot_prefixes: HotPrefixes,
    /// Chooses the calls with a trace, if traces are on.
    pub tracer: Option<CallTracer>,
    /// The audit log, if on.
    pub audit: Option<Arc<AuditLog>>,
    /// Limits the audit records of calls without effect.
    pub audit_limiter: Rc<PeerRecordLimiter>,
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
    /// The reason of Keyward's refusal.
    refused: Option<RefusalReason>,
    peer: Cell<Option<Rc<str>>>,
    user: Cell<Option<UserName>>,
    session: Cell<Option<SessionId>>,
    is_proved: Cell<bool>,
    /// True while the call has a trace.
    is_traced: Cell<bool>,
    /// True if the caller was identified by revocations that suffice for local reads only. Kept here, where
    /// the flag takes no room of its own.
    pub is_for_local_reads: Cell<bool>,
    rare: Cell<Option<Box<RareFacts>>>,
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
            refused: None,
            peer: Cell::default(),
            user: Cell::default(),
            session: Cell::default(),
            is_proved: Cell::default(),
            is_traced: Cell::default(),
            is_for_local_reads: Cell::default(),
            rare: Cell::default(),
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

    /// The limiter of audit records of calls without effect.
    #[must_use]
    pub fn audit_limiter(&self) -> &Rc<PeerRecordLimiter> {
        &self.sinks.audit_limiter
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
        self.peer.set(Some(peer));
    }

    /// Notes the etcd user of the call, and if the caller has proved to be an etcd user.
    pub fn note_user(&self, user: Option<UserName>, is_proved: bool) {
        self.user.set(user);
        self.is_proved.set(is_proved);
    }

    /// Notes the session of the caller's token.
    pub fn note_session(&self, session: SessionId) {
        self.session.set(Some(session));
    }

    /// Notes the trace of the client, and begins a trace of the call if the call is to have one.
    pub fn begin_trace(&self, parent: Option<TraceParent>) {
        let begin = |tracer: &CallTracer| tracer.begin(parent, self.started);
        if let Some(spans) = self.sinks.tracer.as_ref().and_then(begin) {
            self.is_traced.set(true);
            self.note_rare(|rare| (rare.trace, rare.spans) = (Some(spans.id), Some(spans)));
        } else if let Some(parent) = parent {
            self.note_rare(|rare| rare.trace = Some(parent.id));
        }
    }

    /// Notes the begin of a wait, if the call has a trace.
    pub fn begin_wait(&self, wait: CallWait) {
        self.note_in_trace(|spans| spans.begin_wait(wait));
    }

    /// Notes the end of a wait, if the call has a trace.
    pub fn end_wait(&self, wait: CallWait) {
        self.note_in_trace(|spans| spans.end_wait(wait));
    }

    /// Notes the begin of an attempt at `member` and puts the attempt into the member's header, if the call
    /// has a trace.
    pub fn begin_attempt(&self, member: &Member, now: Instant, fields: &mut HeaderMap) {
        self.note_in_trace(|spans| {
            if !spans.is_of_client() {
                // The state of a trace that goes no further.
                fields.remove(TRACESTATE);
            }
            fields.insert(TRACEPARENT, spans.begin_attempt(member, now).header());
        });
    }

    /// Notes the end of an attempt at a member, if the call has a trace.
    pub fn end_attempt(&self, member: MemberId, code: impl FnOnce() -> Option<Code>) {
        self.note_in_trace(|spans| spans.end_attempt(member, code()));
    }

    fn note_in_trace(&self, note: impl FnOnce(&mut CallTrace)) {
        if self.is_traced.get() {
            self.note_rare(|rare| {
                rare.spans.as_deref_mut().map(note);
            });
        }
    }

    /// The ranges of the call, for the access record; `None` if access records have no keys. The ranges of a
    /// stream's requests are added as the requests arrive.
    #[must_use]
    pub fn logged_ranges(&self) -> Option<Rc<RefCell<AuditedRanges>>> {
        let settings = self.sinks.log.settings.get();
        if !settings.has_keys || settings.calls == RecordedCalls::Off {
            return None;
        }
        let mut ranges = None;
        self.note_rare(|rare| ranges = Some(Rc::clone(rare.ranges.get_or_insert_default())));
        ranges
    }

    fn note_rare(&self, note: impl FnOnce(&mut RareFacts)) {
        let mut rare = self.rare.take().unwrap_or_default();
        note(&mut rare);
        self.rare.set(Some(rare));
    }

    /// The caller, if noted.
    #[must_use]
    pub fn peer(&self) -> Option<Rc<str>> {
        let peer = self.peer.take();
        self.peer.set(peer.clone());
        peer
    }

    /// True once the caller is noted.
    #[must_use]
    pub fn has_peer(&self) -> bool {
        self.peer().is_some()
    }

    /// Counts an attempt at `member`. Returns the number of attempts so far.
    pub fn count_attempt(&self, member: MemberId) -> u32 {
        self.member.set(Some(member));
        self.attempts.set(self.attempts.get() + 1);
        self.attempts.get()
    }

    /// Notes that a member has answered at `now` an attempt begun at `sent`; `message` is the request.
    pub fn note_answered(&self, message: &[u8], sent: Instant, now: Instant) {
        self.sinks.hot_prefixes.note(self.method, message, now);
        if SlowCalls::wants(self.method, now.saturating_duration_since(self.started)) {
            let parts = SlowParts::new(self.method, message, self.started, sent, now);
            self.sinks.slow_calls.note_answered((self.origin.figures.id, self.started), parts);
        }
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
    pub fn usage(&self) -> Option<Rc<CallerUsage>> {
        self.usage.get().and_then(CallUsage::caller)
    }

    /// The limits that may change while the call runs; `None` for a call that ends soon.
    #[must_use]
    pub fn live_usage(&self) -> Option<Rc<LiveUsage>> {
        self.usage.get().and_then(CallUsage::live).cloned()
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

    /// Notes the rule of the policy that refused the call.
    pub fn note_rule(&self, rule: String) {
        self.note_rare(|rare| rare.rule = Some(rule));
    }

    /// Notes that the refusal of the call is held back, for a client that repeats refused calls at once.
    pub fn note_held(&self, held: Duration) {
        self.note_rare(|rare| rare.held = held);
    }

    /// Notes that the call is refused for this reason, and that the client is told later. A client that gives
    /// up before is refused all the same.
    pub fn note_held_refusal(&self, reason: RefusalReason) {
        self.note_rare(|rare| rare.held_refusal = Some(reason));
    }

    /// The time of a call that took `took`, without the time for which Keyward held its refusal back: such a
    /// call is not slow. A refused login is held until a time that tells nothing of the password.
    fn busy_time(&mut self, took: Duration) -> Duration {
        if matches!(self.refused, Some(RefusalReason::Password | RefusalReason::Blocked)) {
            return Duration::ZERO;
        }
        self.rare.get_mut().as_ref().map_or(took, |rare| took.saturating_sub(rare.held))
    }

    /// Counts bytes of framed messages sent to the client.
    pub fn count_sent(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        if self.is_traced.get() && !is_unary(self.method) {
            // The first answer of a stream, such as the Created of a watch.
            self.finish_trace(None, self.started.elapsed());
        }
        self.origin.listener_figures.sent.inc_by(bytes as u64);
        if let Some(usage) = self.usage() {
            usage.charge_reply(bytes);
        }
    }

    /// Counts the bytes of the framed message of a unary request.
    pub fn count_received(&self, bytes: usize) {
        self.origin.listener_figures.received.inc_by(bytes as u64);
    }
}

/// The gauge of open calls, or of open streams.
fn open<'m>(metrics: &'m Metrics, method: &Method) -> &'m Gauge {
    if is_unary(method) { &metrics.calls_open } else { &metrics.streams_open }
}

/// The ranges of a call for its access record: the first few of a call without effect.
fn shown(mut ranges: AuditedRanges, code: Code, attempts: u32) -> String {
    if call_audit::is_without_effect(code, attempts) {
        ranges.shorten();
    }
    ranges.to_string()
}

fn is_unary(method: &Method) -> bool {
    method.stream == StreamingSides::Unary
}

impl AccessRecord {
    /// The choice of the access log about the call.
    fn chosen_by(&self, code: Code, took: Duration) -> Option<&'static str> {
        let waits = self.method.lane == Lane::Stream;
        // A client ends its stream by leaving.
        let is_error = code != Code::Ok && !(waits && self.is_given_up(code));
        let timed = is_unary(self.method) && !waits;
        let outcome = CallOutcome { is_error, took: timed.then_some(took) };
        let log = &self.sinks.log;
        let chosen_by = log.settings.get().choose(outcome, &log.samples)?;
        let attempts = self.attempts.get();
        let may_log = match self.is_proved.get() {
            // A call of an unproved caller that never went upstream: repeating the call costs etcd nothing.
            false if code != Code::Ok || attempts == 0 => log.limiter.may_log(),
            true if call_audit::is_without_effect(code, attempts) => {
                log.refused.may_log(self.peer().as_deref())
            }
            _ => true,
        };
        may_log.then_some(chosen_by)
    }

    /// Finishes the trace, if the call has one. `code` is `None` for a stream that goes on.
    fn finish_trace(&mut self, code: Option<Code>, took: Duration) {
        self.is_traced.set(false);
        let Some(tracer) = &self.sinks.tracer else { return };
        let Some(rare) = self.rare.get_mut() else { return };
        let Some(mut spans) = rare.spans.take() else { return };
        if code.is_some() && is_unary(self.method) {
            let row = usize::from(self.method.index);
            self.sinks.metrics.note_exemplar(row, took, spans.id.as_str(), spans.ended(took));
        }
        let text = |text: &str| SpanFact::Text(text.to_owned());
        let mut facts = vec![
            ("keyward.listener", text(&self.origin.listener)),
            ("keyward.attempts", SpanFact::Number(self.attempts.get().into())),
        ];
        facts.extend(self.limit.get().map(|limit| ("keyward.limit", SpanFact::Text(limit.to_string()))));
        facts.extend(code.is_none().then_some(("keyward.stream.goes_on", SpanFact::Flag(true))));
        if tracer.settings.get().has_identities {
            let remote = self.origin.remote;
            let peer = remote.map(|remote| ("network.peer.address", text(&remote.ip().to_string())));
            let port = remote.map(|remote| ("network.peer.port", SpanFact::Number(remote.port().into())));
            let agent = self.origin.user_agent().map(|agent| ("user_agent.original", text(agent)));
            let user = self.user.get_mut().as_ref().map(|user| ("enduser.id", text(user.as_str())));
            facts.extend([peer, port, agent, user].into_iter().flatten());
        }
        let reason = rare.reason.as_deref().map(|reason| cut_name(reason).to_owned());
        let facts = FinishedCall { path: self.method.path, code, reason, facts };
        tracer.finish(spans.finish(self.started, took, facts));
    }

    /// Writes the access record, if the call has one.
    fn log(&mut self, code: Code, took: Duration) {
        let Some(chosen_by) = self.chosen_by(code, took) else { return };
        let rare = self.rare.take().unwrap_or_default();
        let refused_by = self.refused_by();
        tracing::info!(
            target: keyward_telemetry::ACCESS,
            method = self.method.path,
            code = code.name(),
            micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
            peer = self.peer.get_mut().as_deref(),
            user = self.user.get_mut().as_ref().map(UserName::as_str),
            session = self.session.get().map(tracing::field::display),
            member = self.member.get().map(tracing::field::display),
            attempts = self.attempts.get(),
            sent = self.sent,
            reason = rare.reason.as_deref().map(cut_name),
            refused_by,
            rule = rare.rule.as_deref().map(cut_name),
            limit = self.limit.get().map(tracing::field::display),
            keys = rare.ranges.map(|ranges| shown(ranges.take(), code, self.attempts.get())),
            listener = &*self.origin.listener,
            remote = self.origin.remote_text.as_ref().map(tracing::field::display),
            user_agent = self.origin.user_agent(),
            trace = rare.trace.as_ref().map(TraceId::as_str),
            chosen_by,
            "call"
        );
    }
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let took = self.started.elapsed();
        let code = self.end_if_open();
        let is_given_up = self.is_given_up(code);
        let busy = self.busy_time(took);
        let sinks = &*self.sinks;
        open(&sinks.metrics, self.method).dec();
        let refused_by = self.refused_by();
        let (rare, limit) = (self.rare.get_mut(), self.limit.get());
        self.origin.figures.end_call(code == Code::Ok || is_given_up, || {
            let rule = rare.as_ref().and_then(|rare| rare.rule.as_deref());
            let rule = rule.map(|rule| cut_name(rule).into()).or(limit.map(|limit| limit.to_string().into()));
            ClientError { code, at: self.started + took, refused_by, rule }
        });
        let row = usize::from(self.method.index);
        let is_unary = is_unary(self.method);
        sinks.metrics.call_ended(row, code as u8, || code.name(), is_unary.then_some(took));
        if !is_unary {
            sinks.metrics.stream_ended(row, took);
        }
        // Lock and Campaign wait for other clients: their duration is no measure of the listener's speed.
        let is_measured = is_unary && self.method.handler != Handler::Lock;
        let measured = is_measured.then_some(took);
        self.origin.listener_figures.calls.call_ended(code as u8, || code.name(), measured);
        let proved = self.user.get_mut().as_ref().filter(|_| self.is_proved.get());
        sinks.users.call_ended(&sinks.metrics.users, proved.map(UserName::as_str), |figures| {
            figures.call_ended(code as u8, || code.name(), measured);
        });
        if SlowCalls::wants(self.method, busy) {
            sinks.slow_calls.note(SlowCall {
                method: self.method,
                client: self.origin.figures.id,
                user: self.user.get_mut().clone(),
                member: self.member.get(),
                attempts: self.attempts.get(),
                code,
                took,
                parts: sinks.slow_calls.take_answered((self.origin.figures.id, self.started)),
                ended: self.started + took,
            });
        }
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
                refused_by,
                is_held_refusal: code == Code::Canceled && !is_given_up,
            };
            call_audit::write(audit, &sinks.audit_limiter, self.audit.take(), &facts);
        }
        if self.is_traced.get() {
            self.finish_trace(Some(code), took);
        }
        self.log(code, took);
    }
}
