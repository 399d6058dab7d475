//! The counts of one call, and of the watches of one stream.
//!
//! Owns: releasing what counts when a guard is dropped. Must not know: how a scope counts, how a call is
//! refused. Invariants: what is counted is released once; a refused call counts nowhere as under way.

use std::cell::Cell;
use std::rc::Rc;

use tokio::time::Instant;

use super::caller_usage::CallerUsage;
use super::exceeded::Exceeded;
use super::limiter::CallUrgency;
use super::live_usage::LiveUsage;

/// The calls that count as under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallLength {
    /// The call counts until its end.
    Counted,
    /// A stream of days, whose watches or renewals count instead.
    Uncounted,
}

/// A counted call.
pub struct CallUsage(UsageOfCall);

/// The limits of a call.
enum UsageOfCall {
    /// The limits of the call's begin, for a call that ends soon. The flag is true for a LeaseGrant that
    /// counts as a lease.
    Fixed(Rc<CallerUsage>, CallLength, Cell<bool>),
    /// The limits in force, for a stream or a waiting call.
    Live(Rc<LiveUsage>),
}

impl CallUsage {
    /// Counts a call of an admitted caller: by rate, and as under way until the returned value is dropped.
    ///
    /// # Errors
    /// A limit is exceeded and enforced.
    pub fn begin(
        usage: &Rc<CallerUsage>,
        urgency: CallUrgency,
        length: CallLength,
    ) -> Result<Self, Exceeded> {
        // Dropped, and so released, if a later limit refuses the call.
        let call = Self(UsageOfCall::Fixed(Rc::clone(usage), length, Cell::new(false)));
        if length == CallLength::Counted {
            let begun = usage.first_excess(true, |limiter| limiter.begin_call());
            usage.consequence(begun)?;
        }
        let taken = usage.first_excess(false, |limiter| limiter.take_call(urgency));
        usage.consequence(taken)?;
        Ok(call)
    }

    /// A stream or waiting call that no limit counts so far.
    #[must_use]
    pub fn unlimited(length: CallLength) -> Self {
        let live = LiveUsage::new(None, length == CallLength::Counted);
        Self(UsageOfCall::Live(Rc::new(live)))
    }

    /// From now on counts by the limits in force at each moment.
    pub fn follow_limits(&mut self) {
        if let UsageOfCall::Fixed(usage, length, _) = &self.0 {
            let live = LiveUsage::new(Some(Rc::clone(usage)), *length == CallLength::Counted);
            self.0 = UsageOfCall::Live(Rc::new(live));
        }
    }

    /// The caller's limits; `None` without any limit.
    #[must_use]
    pub fn caller(&self) -> Option<Rc<CallerUsage>> {
        match &self.0 {
            UsageOfCall::Fixed(usage, ..) => Some(Rc::clone(usage)),
            UsageOfCall::Live(live) => live.now(),
        }
    }

    /// The limits that may change while the call runs; `None` for a call that ends soon.
    #[must_use]
    pub fn live(&self) -> Option<&Rc<LiveUsage>> {
        match &self.0 {
            UsageOfCall::Fixed(..) => None,
            UsageOfCall::Live(live) => Some(live),
        }
    }

    /// Counts the call as a LeaseGrant, until its end.
    ///
    /// # Errors
    /// A limit is exceeded and enforced.
    pub fn reserve_lease(&self) -> Result<(), Exceeded> {
        let UsageOfCall::Fixed(usage, _, has_lease) = &self.0 else { return Ok(()) };
        let now = Instant::now();
        has_lease.set(true);
        let reserved = usage.first_excess(true, |limiter| limiter.reserve_lease(now));
        usage.consequence(reserved)
    }

    /// The LeaseGrant has succeeded: the lease counts for its time to live, in seconds.
    pub fn note_grant(&self, lease: i64, ttl: i64) {
        let now = Instant::now();
        for limiter in self.caller().iter().flat_map(|usage| usage.counted_leases()) {
            limiter.leases().grant(lease, ttl, limiter.lease_limit().unwrap_or_default(), now);
        }
    }
}

impl Drop for CallUsage {
    fn drop(&mut self) {
        // The limits of a stream release what counts by themselves.
        let UsageOfCall::Fixed(usage, length, has_lease) = &self.0 else { return };
        if has_lease.get() {
            usage.scopes.iter().for_each(|limiter| limiter.leases().end_reservation());
        }
        if *length == CallLength::Counted {
            usage.release(None, 1, 0);
        }
    }
}

/// The watches of one stream, counted for its caller.
pub struct WatchUsage(Rc<LiveUsage>);

impl WatchUsage {
    /// A stream without watches.
    #[must_use]
    pub fn new(usage: Rc<LiveUsage>) -> Self {
        Self(usage)
    }

    /// The caller's limits; `None` without any limit.
    #[must_use]
    pub fn caller(&self) -> Option<Rc<CallerUsage>> {
        self.0.now()
    }

    /// Counts a further watch.
    ///
    /// # Errors
    /// A limit is exceeded and enforced.
    pub fn begin(&self) -> Result<(), Exceeded> {
        self.0.begin_watch()
    }

    /// Counts the `live` watches that have begun before the stream had limits.
    pub fn adopt(&self, live: usize) {
        self.0.set_watches(u32::try_from(live).unwrap_or(u32::MAX));
    }

    /// Releases the watches beyond the first `live`.
    pub fn keep(&self, live: usize) {
        self.0.keep_watches(u32::try_from(live).unwrap_or(u32::MAX));
    }
}

impl Drop for WatchUsage {
    fn drop(&mut self) {
        self.keep(0);
    }
}
