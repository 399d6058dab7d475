//! The limits of one caller: its own, those of its roles, and that of its listener.
//!
//! Owns: counting in every scope, and the consequence of an exceeded limit by the mode. Must not know: the
//! guards of what counts (`call_usage`, `live_usage`), how a call is refused. Invariant: under "shadow"
//! nothing is refused.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use super::exceeded::{Exceeded, LimitKind, LimitScope, RefusalCounters};
use super::limiter::Limiter;
use keyward_config::PolicyMode;
use keyward_config::usage_limits::{OnExceed, Priority};

/// Calls of a caller whose answers are measured at a time, on each thread that serves clients.
pub(super) const MEASURED_AT_ONCE: usize = 4;

/// The limits of a caller.
pub struct CallerUsage {
    pub(super) mode: PolicyMode,
    /// The caller's own scope first.
    pub(super) scopes: Box<[Arc<Limiter>]>,
    pub(super) counters: Arc<RefusalCounters>,
    pub(super) range_cap: Option<RangeCap>,
    pub(super) answer_cap: Option<AnswerCap>,
    /// Places of calls whose answers are measured.
    pub(super) measured: Semaphore,
    pub(super) priority: Priority,
}

/// The most keys of a Range, by the strictest scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeCap {
    /// The most keys.
    pub keys: NonZeroU32,
    /// The consequence for a Range of more keys.
    pub on_exceed: OnExceed,
    /// The scope of the limit.
    pub scope: LimitScope,
}

/// The most bytes of an answer with keys, by the strictest scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerCap {
    /// The most bytes.
    pub bytes: u64,
    /// The scope of the limit.
    pub scope: LimitScope,
}

impl CallerUsage {
    /// Counts a watch, until its release. A refused watch is not counted.
    ///
    /// # Errors
    /// A limit is exceeded and enforced.
    pub(super) fn begin_watch(&self) -> Result<(), Exceeded> {
        let begun = self.first_excess(true, Limiter::begin_watch);
        self.consequence(begun).inspect_err(|_| self.release(None, 0, 1))
    }

    /// True if both have the same scopes with the same consequences.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.scopes.len() == other.scopes.len()
            && self.scopes.iter().zip(&other.scopes).all(|(one, other)| Arc::ptr_eq(one, other))
            && (self.mode, self.priority, self.range_cap, self.answer_cap)
                == (other.mode, other.priority, other.range_cap, other.answer_cap)
    }

    /// Counts calls and watches that have begun, past any limit, in the scopes that `before` does not have.
    pub(super) fn adopt(&self, before: Option<&Self>, calls: u32, watches: u32) {
        self.beside(before).for_each(|limiter| limiter.adopt(calls, watches));
    }

    /// Releases calls and watches in the scopes that `after` does not have.
    pub(super) fn release(&self, after: Option<&Self>, calls: u32, watches: u32) {
        self.beside(after).for_each(|limiter| limiter.release(calls, watches));
    }

    /// The scopes that are not those of `other`.
    fn beside<'a>(&'a self, other: Option<&'a Self>) -> impl Iterator<Item = &'a Arc<Limiter>> {
        let is_shared = move |limiter: &Arc<Limiter>| {
            other.is_some_and(|other| other.scopes.iter().any(|theirs| Arc::ptr_eq(theirs, limiter)))
        };
        self.scopes.iter().filter(move |limiter| !is_shared(limiter))
    }

    /// A lease was renewed, or is gone with a time to live of 0. A lease that was not known counts from now
    /// on: it was granted elsewhere, or before leases counted.
    pub fn note_renewal(&self, lease: i64, ttl: i64) {
        let now = Instant::now();
        for limiter in self.counted_leases() {
            limiter.leases().renew(lease, ttl, limiter.lease_limit().unwrap_or_default(), now);
        }
    }

    /// A lease was revoked.
    pub fn note_revocation(&self, lease: i64) {
        self.counted_leases().for_each(|limiter| limiter.leases().forget(lease));
    }

    /// Charges bytes of requests.
    pub fn charge_request(&self, bytes: usize) {
        self.scopes.iter().for_each(|limiter| limiter.charge_request(bytes));
    }

    /// Charges bytes of replies.
    pub fn charge_reply(&self, bytes: usize) {
        self.scopes.iter().for_each(|limiter| limiter.charge_reply(bytes));
    }

    /// The time until replies of a stream may go on; `None` for now.
    #[must_use]
    pub fn reply_pause(&self) -> Option<Duration> {
        self.pause(Limiter::reply_debt)
    }

    /// The time until the next request of a stream may be taken; `None` for now. A request that may be taken
    /// now has taken its token.
    #[must_use]
    pub fn request_pause(&self) -> Option<Duration> {
        self.pause(Limiter::request_debt).or_else(|| self.pause(|limiter| limiter.take_waiting_call().err()))
    }

    /// The most keys of a Range.
    #[must_use]
    pub fn range_cap(&self) -> Option<RangeCap> {
        self.range_cap
    }

    /// Counts a Range of too many keys.
    ///
    /// # Errors
    /// The limit is enforced.
    pub fn exceed_range_cap(&self, cap: RangeCap) -> Result<(), Exceeded> {
        self.consequence(Err(Exceeded { scope: cap.scope, limit: LimitKind::KeysPerRange }))
    }

    /// The most bytes of an answer with keys.
    #[must_use]
    pub fn answer_cap(&self) -> Option<AnswerCap> {
        self.answer_cap
    }

    /// Waits until the answer of another call may be measured, in the order of the calls. Cancel-safe.
    pub async fn turn_to_measure(&self) -> Option<SemaphorePermit<'_>> {
        self.measured.acquire().await.ok()
    }

    /// Counts a request for an answer of too many bytes.
    ///
    /// # Errors
    /// The limit is enforced.
    pub fn exceed_answer_cap(&self, cap: AnswerCap) -> Result<(), Exceeded> {
        self.consequence(Err(Exceeded { scope: cap.scope, limit: LimitKind::BytesPerAnswer }))
    }

    /// Counts a Range of too many keys that is not refused.
    pub fn count_shadow_range(&self, cap: RangeCap) {
        self.counters.count_shadow(Exceeded { scope: cap.scope, limit: LimitKind::KeysPerRange });
    }

    /// True if exceeded limits are only counted.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.mode != PolicyMode::Enforce
    }

    /// The order in which the caller's calls are shed.
    #[must_use]
    pub fn priority(&self) -> Priority {
        self.priority
    }

    fn pause(&self, wait: impl Fn(&Limiter) -> Option<Duration>) -> Option<Duration> {
        if self.is_shadow() {
            return None;
        }
        self.scopes.iter().find_map(|limiter| wait(limiter))
    }

    pub(super) fn counted_leases(&self) -> impl Iterator<Item = &Limiter> {
        self.scopes.iter().map(|limiter| &**limiter).filter(|limiter| limiter.lease_limit().is_some())
    }

    /// Takes a step in the scopes up to the first exceeded limit, or in all scopes if `counts` is true:
    /// counts are released in all scopes, too.
    pub(super) fn first_excess(
        &self,
        counts: bool,
        step: impl Fn(&Limiter) -> Result<(), LimitKind>,
    ) -> Result<(), Exceeded> {
        let mut first = Ok(());
        for limiter in &self.scopes {
            let stepped = step(limiter).map_err(|limit| Exceeded { scope: limiter.scope, limit });
            if stepped.is_err() && !counts {
                return stepped;
            }
            first = first.and(stepped);
        }
        first
    }

    pub(super) fn consequence(&self, step: Result<(), Exceeded>) -> Result<(), Exceeded> {
        let Err(exceeded) = step else { return Ok(()) };
        if self.is_shadow() {
            self.counters.count_shadow(exceeded);
            return Ok(());
        }
        self.counters.count_refused(exceeded);
        step
    }
}

impl Drop for CallerUsage {
    fn drop(&mut self) {
        let now = Instant::now();
        self.scopes.iter().for_each(|limiter| limiter.note_release(now));
    }
}
