//! One record per call: counted, and logged if configured, when the call ends, however it ends.
//!
//! Owns: the facts reported about a call. Must not know: how the call was answered.
//! Invariants: a record is written exactly once, on drop, and never holds a key, a value, a token or a
//! password. A call abandoned by its client is reported as Canceled. Records of refused callers without a
//! proved identity are limited by rate, so refusals cannot fill a disk; all records are counted.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use prometheus_client::metrics::gauge::Gauge;

use crate::identity::{MemberId, UserName};
use crate::refusal::Code;
use crate::telemetry::limiter::RecordLimiter;
use crate::telemetry::{self, metrics::Metrics};

/// The facts of a connection repeated in each record.
#[derive(Debug)]
pub struct ConnectionOrigin {
    /// The listener's name.
    pub listener: Arc<str>,
    /// The client's address; `None` on a unix socket.
    pub remote: Option<SocketAddr>,
}

/// The calls of a shard that leave a record in the log.
#[derive(Clone, Debug)]
pub enum AccessLog {
    /// No calls.
    Off,
    /// All calls, except that records of callers without a proved identity pass the limiter, if the call
    /// failed or never went upstream.
    On(Rc<RecordLimiter>),
}

/// The record of a call, written on drop.
pub struct AccessRecord {
    metrics: Arc<Metrics>,
    log: AccessLog,
    unary: bool,
    row: usize,
    method: &'static str,
    origin: Rc<ConnectionOrigin>,
    started: Instant,
    code: Option<Code>,
    /// The caller, as proved or as claimed, once known.
    pub peer: Option<Rc<str>>,
    /// True if the caller has proved to be an etcd user.
    pub is_proved: bool,
    /// The upstream user, once known.
    pub user: Option<UserName>,
    /// The member that answered last.
    pub member: Option<MemberId>,
    /// The number of times the call was sent upstream.
    pub attempts: u32,
    /// Bytes of framed messages sent to the client.
    pub sent: u64,
}

impl AccessRecord {
    /// Begins a record. `row` and `method` name the method; all unknown methods share a row.
    #[must_use]
    pub fn begin(
        metrics: Arc<Metrics>,
        log: AccessLog,
        (row, method): (usize, &'static str),
        unary: bool,
        origin: Rc<ConnectionOrigin>,
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

    /// Notes the status code of the call. Later codes are ignored.
    pub fn ended(&mut self, code: Code) {
        self.code.get_or_insert(code);
    }
}

/// The gauge of open calls, or of open streams.
fn open(metrics: &Metrics, unary: bool) -> &Gauge {
    if unary { &metrics.calls_open } else { &metrics.streams_open }
}

impl Drop for AccessRecord {
    fn drop(&mut self) {
        let took = self.started.elapsed();
        let code = self.code.unwrap_or(Code::Canceled);
        open(&self.metrics, self.unary).dec();
        self.metrics.call_ended(self.row, code as u8, self.unary.then_some(took));
        match &self.log {
            AccessLog::Off => return,
            // A call of an unproved caller, refused or answered by Keyward itself: repeating the call costs
            // etcd nothing.
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
