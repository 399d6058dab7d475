//! The usage of one peer, of the peers of one role, or of one listener, shared by all threads.
//!
//! Owns: buckets, counts and leases, and their comparison with the limits. Must not know: the consequence of
//! an exceeded limit. Invariants: changed limits apply at once to every holder; counts outlive a change of
//! limits, and so does each bucket whose own limit is unchanged.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::time::Instant;

use super::bucket::{Bucket, bucket};
use super::byte_bucket::ByteBucket;
use super::exceeded::{LimitKind, LimitScope};
use super::lease_ledger::LeaseLedger;
use keyward_config::usage_limits::UsageLimits;

/// Calls that are refused after all others: they have a bucket of their own behind the bucket of all calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallUrgency {
    /// Refused at the limit.
    Ordinary,
    /// Keepalives, and LeaseRevoke, which frees what the client holds.
    Last,
}

/// The usage of a scope.
#[derive(Debug)]
pub(super) struct Limiter {
    pub(super) scope: LimitScope,
    rates: ArcSwap<Rates>,
    calls_in_flight: AtomicU32,
    watches: AtomicU32,
    leases: Mutex<LeaseLedger>,
    started: Instant,
    /// Milliseconds since `started` of the last release by a caller.
    released: AtomicU64,
}

/// The limits, and the buckets made of the limits.
#[derive(Debug)]
struct Rates {
    limits: UsageLimits,
    calls: Option<Arc<CallBuckets>>,
    requests: Option<Arc<ByteBucket>>,
    replies: Option<Arc<ByteBucket>>,
}

#[derive(Debug)]
struct CallBuckets {
    all: Bucket,
    last: Bucket,
}

impl Rates {
    /// Buckets by `limits`; buckets of `before` with the same limit are kept.
    fn new(limits: &UsageLimits, before: Option<&Self>) -> Self {
        let kept = |same: fn(&UsageLimits, &UsageLimits) -> bool| {
            before.filter(|before| same(&before.limits, limits))
        };
        let calls = kept(|was, is| was.calls == is.calls).map(|before| before.calls.clone());
        let requests =
            kept(|was, is| was.request_kib == is.request_kib).map(|before| before.requests.clone());
        let replies = kept(|was, is| was.reply_kib == is.reply_kib).map(|before| before.replies.clone());
        let call_buckets = || {
            let rate = limits.calls?;
            let made = || bucket(rate.per_second, rate.burst);
            Some(Arc::new(CallBuckets { all: made(), last: made() }))
        };
        let bytes = |kib: Option<NonZeroU32>| Some(Arc::new(ByteBucket::new(kib?)));
        Self {
            limits: limits.clone(),
            calls: calls.unwrap_or_else(call_buckets),
            requests: requests.unwrap_or_else(|| bytes(limits.request_kib)),
            replies: replies.unwrap_or_else(|| bytes(limits.reply_kib)),
        }
    }
}

impl Limiter {
    /// A scope without usage so far.
    pub(super) fn new(scope: LimitScope, limits: &UsageLimits) -> Self {
        Self {
            scope,
            rates: ArcSwap::from_pointee(Rates::new(limits, None)),
            calls_in_flight: AtomicU32::new(0),
            watches: AtomicU32::new(0),
            leases: Mutex::default(),
            started: Instant::now(),
            released: AtomicU64::new(0),
        }
    }

    /// Replaces the limits, if they differ.
    pub(super) fn set_limits(&self, limits: &UsageLimits) {
        let before = self.rates.load();
        if before.limits != *limits {
            self.rates.store(Arc::new(Rates::new(limits, Some(&before))));
        }
    }

    /// Counts a call under way. The call counts until [`Limiter::release`], even past the limit.
    pub(super) fn begin_call(&self) -> Result<(), LimitKind> {
        count(&self.calls_in_flight, 1, self.rates.load().limits.calls_in_flight, LimitKind::CallsInFlight)
    }

    /// Counts calls and watches that have begun, even past the limit.
    pub(super) fn adopt(&self, calls: u32, watches: u32) {
        self.calls_in_flight.fetch_add(calls, Ordering::Relaxed);
        self.watches.fetch_add(watches, Ordering::Relaxed);
    }

    /// Some calls and watches have ended.
    pub(super) fn release(&self, calls: u32, watches: u32) {
        self.calls_in_flight.fetch_sub(calls, Ordering::Relaxed);
        self.watches.fetch_sub(watches, Ordering::Relaxed);
    }

    /// Takes the token of a call, unless bytes are owed.
    pub(super) fn take_call(&self, urgency: CallUrgency) -> Result<(), LimitKind> {
        let rates = self.rates.load();
        if urgency == CallUrgency::Ordinary {
            if rates.requests.as_ref().is_some_and(|bytes| bytes.debt().is_some()) {
                return Err(LimitKind::RequestBytes);
            }
            if rates.replies.as_ref().is_some_and(|bytes| bytes.debt().is_some()) {
                return Err(LimitKind::ReplyBytes);
            }
        }
        let Some(calls) = &rates.calls else { return Ok(()) };
        let taken = match (calls.all.take(), urgency) {
            (Err(_), CallUrgency::Last) => calls.last.take(),
            (taken, _) => taken,
        };
        taken.map_err(|_| LimitKind::Calls)
    }

    /// Takes the token of a request that can wait, such as a watch create.
    ///
    /// # Errors
    /// The time to wait.
    pub(super) fn take_waiting_call(&self) -> Result<(), Duration> {
        let rates = self.rates.load();
        rates.calls.as_ref().map_or(Ok(()), |calls| calls.all.take())
    }

    pub(super) fn charge_request(&self, bytes: usize) {
        if let Some(requests) = &self.rates.load().requests {
            requests.charge(bytes);
        }
    }

    pub(super) fn charge_reply(&self, bytes: usize) {
        if let Some(replies) = &self.rates.load().replies {
            replies.charge(bytes);
        }
    }

    /// The time until a part of the owed bytes of replies is made up for; `None` if nothing is owed.
    pub(super) fn reply_debt(&self) -> Option<Duration> {
        self.rates.load().replies.as_ref()?.debt()
    }

    /// The same for requests.
    pub(super) fn request_debt(&self) -> Option<Duration> {
        self.rates.load().requests.as_ref()?.debt()
    }

    /// Counts a watch, even past the limit.
    pub(super) fn begin_watch(&self) -> Result<(), LimitKind> {
        count(&self.watches, 1, self.rates.load().limits.watches, LimitKind::Watches)
    }

    /// Counts a grant under way, even past the limit, until [`LeaseLedger::end_reservation`].
    pub(super) fn reserve_lease(&self, now: Instant) -> Result<(), LimitKind> {
        let limit = self.lease_limit();
        let has_room = self.leases().reserve(limit.unwrap_or(usize::MAX), now);
        if has_room { Ok(()) } else { Err(LimitKind::Leases) }
    }

    /// The most leases; `None` where leases are not counted.
    pub(super) fn lease_limit(&self) -> Option<usize> {
        self.rates.load().limits.leases.and_then(|limit| usize::try_from(limit).ok())
    }

    /// The leases. The lock is held for one step of one lease.
    pub(super) fn leases(&self) -> MutexGuard<'_, LeaseLedger> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The configured limits on counts and rates, each with its present use; `None` for a rate, whose use is
    /// known to its bucket alone.
    pub(super) fn limits_in_use(&self) -> Vec<(LimitKind, Option<u64>, u64)> {
        let rates = self.rates.load();
        let limits = &rates.limits;
        let count = |count: &AtomicU32| Some(u64::from(count.load(Ordering::Relaxed)));
        let kib = |kib: Option<NonZeroU32>| kib.map(|kib| u64::from(kib.get()) * 1024);
        let all = [
            (LimitKind::Calls, None, limits.calls.map(|rate| rate.per_second.get().into())),
            (LimitKind::CallsInFlight, count(&self.calls_in_flight), limits.calls_in_flight.map(u64::from)),
            (LimitKind::Watches, count(&self.watches), limits.watches.map(u64::from)),
            (
                LimitKind::Leases,
                Some(self.leases().count(Instant::now()) as u64),
                limits.leases.map(u64::from),
            ),
            (LimitKind::RequestBytes, None, kib(limits.request_kib)),
            (LimitKind::ReplyBytes, None, kib(limits.reply_kib)),
            (LimitKind::KeysPerRange, None, limits.keys_per_range.map(|keys| keys.get().into())),
            (LimitKind::BytesPerAnswer, None, kib(limits.answer_kib)),
        ];
        all.into_iter().filter_map(|(kind, used, allowed)| Some((kind, used, allowed?))).collect()
    }

    /// Notes that a caller does not hold the limiter any more.
    pub(super) fn note_release(&self, now: Instant) {
        let since = now.saturating_duration_since(self.started).as_millis();
        self.released.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// True if no caller has held the limiter since `idle`, and no lease counts.
    pub(super) fn is_idle(&self, now: Instant, idle: Duration) -> bool {
        let released = self.started + Duration::from_millis(self.released.load(Ordering::Relaxed));
        now.saturating_duration_since(released) >= idle && !self.leases().has_any(now)
    }
}

/// Adds to a count; an error past the limit.
fn count(count: &AtomicU32, more: u32, limit: Option<u32>, kind: LimitKind) -> Result<(), LimitKind> {
    let before = count.fetch_add(more, Ordering::Relaxed);
    if limit.is_some_and(|limit| before >= limit) { Err(kind) } else { Ok(()) }
}
