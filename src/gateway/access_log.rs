//! One record per call: counted and, where configured, logged when the call ends, however it ends.
//!
//! Owns: what is told about a call. Must not know how it was answered. Invariants: a record is written exactly once,
//! by its drop; it never holds a key, a value, a token or a password. A call that nobody finished (the client went
//! away) is told as Canceled. Records of callers that have proved no identity are limited by rate, so that nobody can fill a
//! disk by being refused; all of them are counted.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use prometheus_client::metrics::gauge::Gauge;

use crate::identity::{MemberId, UserName};
use crate::refusal::Code;
use crate::telemetry::limiter::RecordLimiter;
use crate::telemetry::{self, metrics::Metrics};

/// What is known of a connection in each of its records.
#[derive(Debug)]
pub struct Origin {
    /// The listener's name.
    pub listener: Arc<str>,
    /// The client's address; none on a unix socket.
    pub remote: Option<SocketAddr>,
}

/// Which calls of a shard leave a record in the log.
#[derive(Clone, Debug)]
pub enum AccessLog {
    /// None does.
    Off,
    /// Every call of a caller that is known; of the others as many as this allows.
    On(Rc<RecordLimiter>),
}

/// A call's record. Dropping it writes it.
pub struct Record {
    metrics: Arc<Metrics>,
    log: AccessLog,
    unary: bool,
    row: usize,
    method: &'static str,
    origin: Rc<Origin>,
    started: Instant,
    code: Option<Code>,
    /// Who called, or who the caller said it is, once known.
    pub peer: Option<Rc<str>>,
    /// The caller has proved that it is an etcd user.
    pub is_proved: bool,
    /// As whom, once known.
    pub user: Option<UserName>,
    /// Which member answered last.
    pub member: Option<MemberId>,
    /// How often it was sent.
    pub attempts: u32,
    /// Bytes of messages to the client, framed.
    pub sent: u64,
}

impl Record {
    /// Begins a record. `row` and `method` name the method; unknown methods share one row.
    #[must_use]
    pub fn begin(
        metrics: Arc<Metrics>,
        log: AccessLog,
        (row, method): (usize, &'static str),
        unary: bool,
        origin: Rc<Origin>,
    ) -> Self {
        open(&metrics, unary).inc();
        Self {
            metrics,
            log,
            unary,
            row,
            method,
            origin,
            started: Instant::now(),
            code: None,
            peer: None,
            is_proved: false,
            user: None,
            member: None,
            attempts: 0,
            sent: 0,
        }
    }

    /// The call ended with `code`. The first call counts.
    pub fn ended(&mut self, code: Code) {
        self.code.get_or_insert(code);
    }
}

/// How many are under way of its kind.
fn open(metrics: &Metrics, unary: bool) -> &Gauge {
    if unary { &metrics.calls_open } else { &metrics.streams_open }
}

impl Drop for Record {
    fn drop(&mut self) {
        let took = self.started.elapsed();
        let code = self.code.unwrap_or(Code::Canceled);
        open(&self.metrics, self.unary).dec();
        self.metrics.call_ended(self.row, code as u8, self.unary.then_some(took));
        match &self.log {
            AccessLog::Off => return,
            // A caller that is nobody, and was refused, or answered by Keyward itself: it costs etcd nothing to ask again.
            AccessLog::On(limiter)
                if !self.is_proved && (code != Code::Ok || self.attempts == 0) && !limiter.may_log() =>
            {
                return;
            }
            AccessLog::On(_) => {}
        }
        tracing::info!(
            target: telemetry::ACCESS,
            method = self.method,
            code = ?code,
            micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
            peer = self.peer.as_deref(),
            user = self.user.as_ref().map(UserName::as_str),
            member = self.member.map(tracing::field::display),
            attempts = self.attempts,
            sent = self.sent,
            listener = &*self.origin.listener,
            remote = self.origin.remote.map(tracing::field::display),
            "call"
        );
    }
}
