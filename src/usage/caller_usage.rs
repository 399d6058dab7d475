//! The limits of one caller: its own, those of its roles, and that of its listener.
//!
//! Owns: counting a call in every scope, and the consequence of an exceeded limit by the mode. Must not know:
//! how a call is refused. Invariants: what is counted is released when its guard is dropped; a refused call
//! counts nowhere as under way; under "shadow" nothing is refused.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use super::exceeded::{Exceeded, LimitKind, LimitScope, RefusalCounters};
use super::limiter::{CallUrgency, Limiter};
use crate::config::PolicyMode;
use crate::config::usage_limits::{OnExceed, Priority};

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
    /// Counts a call of an admitted caller: by rate, and as under way until the returned value is dropped.
    ///
    /// # Errors
    /// A limit is exceeded and enforced.
    pub fn begin_call(
        self: &Rc<Self>,
        urgency: CallUrgency,
        length: CallLength,
    ) -> Result<CallUsage, Exceeded> {
        // Dropped, and so released, if a later limit refuses the call.
        let call = CallUsage { usage: Rc::clone(self), length, has_lease: Cell::new(false) };
        if length == CallLength::Counted {
            let begun = self.first_excess(true, |limiter| limiter.begin_call());
            self.consequence(begun)?;
        }
        let taken = self.first_excess(false, |limiter| limiter.take_call(urgency));
        self.consequence(taken)?;
        Ok(call)
    }

    /// Counts a watch, until [`CallerUsage::end_watches`]. A refused watch is not counted.
    ///
    /// # Errors
    /// A limit is exceeded and enforced.
    pub fn begin_watch(&self) -> Result<(), Exceeded> {
        let begun = self.first_excess(true, Limiter::begin_watch);
        self.consequence(begun).inspect_err(|_| self.end_watches(1))
    }

    /// Some watches have ended.
    pub fn end_watches(&self, ended: u32) {
        self.scopes.iter().for_each(|limiter| limiter.end_watches(ended));
    }

    /// A lease was renewed, or is gone with a time to live of 0.
    pub fn note_renewal(&self, lease: i64, ttl: i64) {
        let now = Instant::now();
        self.counted_leases().for_each(|limiter| limiter.leases().renew(lease, ttl, now));
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

    fn counted_leases(&self) -> impl Iterator<Item = &Limiter> {
        self.scopes.iter().map(|limiter| &**limiter).filter(|limiter| limiter.lease_limit().is_some())
    }

    /// Takes a step in the scopes up to the first exceeded limit, or in all scopes if `counts` is true:
    /// counts are released in all scopes, too.
    fn first_excess(
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

    fn consequence(&self, step: Result<(), Exceeded>) -> Result<(), Exceeded> {
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

/// Whether a call counts as under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallLength {
    /// The call counts until its end.
    Counted,
    /// A stream of days, whose watches or renewals count instead.
    Uncounted,
}

/// A counted call.
pub struct CallUsage {
    usage: Rc<CallerUsage>,
    length: CallLength,
    /// The call is a LeaseGrant, counted as one.
    has_lease: Cell<bool>,
}

impl CallUsage {
    /// The caller's limits.
    #[must_use]
    pub fn caller(&self) -> &Rc<CallerUsage> {
        &self.usage
    }

    /// Counts the call as a LeaseGrant, until its end.
    ///
    /// # Errors
    /// A limit is exceeded and enforced.
    pub fn reserve_lease(&self) -> Result<(), Exceeded> {
        let now = Instant::now();
        self.has_lease.set(true);
        let reserved = self.usage.first_excess(true, |limiter| limiter.reserve_lease(now));
        self.usage.consequence(reserved)
    }

    /// The LeaseGrant has succeeded: the lease counts for its time to live, in seconds.
    pub fn note_grant(&self, lease: i64, ttl: i64) {
        let now = Instant::now();
        for limiter in self.usage.counted_leases() {
            limiter.leases().grant(lease, ttl, limiter.lease_limit().unwrap_or_default(), now);
        }
    }
}

impl Drop for CallUsage {
    fn drop(&mut self) {
        if self.has_lease.get() {
            self.usage.scopes.iter().for_each(|limiter| limiter.leases().end_reservation());
        }
        if self.length == CallLength::Counted {
            self.usage.scopes.iter().for_each(|limiter| limiter.end_call());
        }
    }
}

/// The watches of one stream, counted for its caller.
pub struct WatchUsage {
    usage: Rc<CallerUsage>,
    counted: Cell<u32>,
}

impl WatchUsage {
    /// A stream without watches.
    #[must_use]
    pub fn new(usage: Rc<CallerUsage>) -> Self {
        Self { usage, counted: Cell::new(0) }
    }

    /// The caller's limits.
    #[must_use]
    pub fn caller(&self) -> &CallerUsage {
        &self.usage
    }

    /// Counts a further watch.
    ///
    /// # Errors
    /// A limit is exceeded and enforced.
    pub fn begin(&self) -> Result<(), Exceeded> {
        self.usage.begin_watch()?;
        self.counted.set(self.counted.get() + 1);
        Ok(())
    }

    /// Releases the watches beyond the first `live`.
    pub fn keep(&self, live: usize) {
        let live = u32::try_from(live).unwrap_or(u32::MAX);
        let ended = self.counted.get().saturating_sub(live);
        if ended > 0 {
            self.usage.end_watches(ended);
            self.counted.set(live);
        }
    }
}

impl Drop for WatchUsage {
    fn drop(&mut self) {
        self.keep(0);
    }
}
