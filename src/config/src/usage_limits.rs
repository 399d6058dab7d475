//! Resolved limits on the usage of the cluster: by a peer, by the peers of a role, by a listener.
//!
//! Owns: the limits, and how the limits of a peer's roles combine. Must not know: the present usage.

use std::num::NonZeroU32;

/// Limits on the usage of the cluster. `None` is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageLimits {
    /// Calls per second.
    pub calls: Option<CallRate>,
    /// Calls not answered to their end.
    pub calls_in_flight: Option<u32>,
    /// Watches, over all streams; an Observe counts as a watch.
    pub watches: Option<u32>,
    /// Live leases, as far as this replica knows the leases.
    pub leases: Option<u32>,
    /// KiB per second of requests.
    pub request_kib: Option<NonZeroU32>,
    /// KiB per second of replies, events included.
    pub reply_kib: Option<NonZeroU32>,
    /// Keys that a Range may return.
    pub keys_per_range: Option<NonZeroU32>,
    /// KiB of one answer with keys.
    pub answer_kib: Option<NonZeroU32>,
    /// The consequence for a Range of more keys; `None` where the limits say nothing.
    pub on_exceed: Option<OnExceed>,
    /// The order in which calls are shed; `None` where the limits say nothing.
    pub priority: Option<Priority>,
}

/// A rate of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallRate {
    /// Calls per second, in the long run.
    pub per_second: NonZeroU32,
    /// Calls at once, after a pause.
    pub burst: NonZeroU32,
}

/// The consequence for a Range without a limit, or with a higher limit, that matches too many keys. Later
/// variants are stricter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OnExceed {
    /// The first keys are returned, and `more` is set, where a client can continue behind the last key.
    Page,
    /// The Range is refused.
    Refuse,
}

/// The order in which calls are shed: lower priorities first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Shed first.
    Low,
    /// Shed while shedding calls of low priority does not suffice.
    #[default]
    Normal,
    /// Never shed.
    High,
}

impl Priority {
    /// The priority's name in the configuration and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        }
    }
}

impl UsageLimits {
    /// True without any limit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Both limits: of two limits on one thing, the lower holds.
    #[must_use]
    pub fn strictest(&self, other: &Self) -> Self {
        Self {
            calls: match (self.calls, other.calls) {
                (Some(one), Some(two)) if (two.per_second, two.burst) < (one.per_second, one.burst) => {
                    Some(two)
                }
                (one, two) => one.or(two),
            },
            calls_in_flight: lower(self.calls_in_flight, other.calls_in_flight),
            watches: lower(self.watches, other.watches),
            leases: lower(self.leases, other.leases),
            request_kib: lower(self.request_kib, other.request_kib),
            reply_kib: lower(self.reply_kib, other.reply_kib),
            keys_per_range: lower(self.keys_per_range, other.keys_per_range),
            answer_kib: lower(self.answer_kib, other.answer_kib),
            on_exceed: self.on_exceed.max(other.on_exceed),
            priority: lower(self.priority, other.priority),
        }
    }

    /// These limits, and `default` where these limits say nothing.
    #[must_use]
    pub fn or(self, default: &Self) -> Self {
        Self {
            calls: self.calls.or(default.calls),
            calls_in_flight: self.calls_in_flight.or(default.calls_in_flight),
            watches: self.watches.or(default.watches),
            leases: self.leases.or(default.leases),
            request_kib: self.request_kib.or(default.request_kib),
            reply_kib: self.reply_kib.or(default.reply_kib),
            keys_per_range: self.keys_per_range.or(default.keys_per_range),
            answer_kib: self.answer_kib.or(default.answer_kib),
            on_exceed: self.on_exceed.or(default.on_exceed),
            priority: self.priority.or(default.priority),
        }
    }
}

/// The lower of two values, or the only one.
fn lower<T: Ord>(one: Option<T>, two: Option<T>) -> Option<T> {
    match (one, two) {
        (Some(one), Some(two)) => Some(one.min(two)),
        (one, two) => one.or(two),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(per_second: u32, burst: u32) -> Option<CallRate> {
        Some(CallRate {
            per_second: NonZeroU32::new(per_second).unwrap(),
            burst: NonZeroU32::new(burst).unwrap(),
        })
    }

    #[test]
    fn of_several_roles_the_lower_limit_holds_and_a_role_replaces_the_default() {
        let one = UsageLimits { calls: rate(10, 90), watches: Some(7), ..UsageLimits::default() };
        let two = UsageLimits {
            calls: rate(20, 20),
            watches: Some(3),
            on_exceed: Some(OnExceed::Refuse),
            priority: Some(Priority::Low),
            ..UsageLimits::default()
        };
        let both = one.strictest(&two);
        assert_eq!(both, two.strictest(&one));
        assert_eq!((both.calls, both.watches, both.leases), (rate(10, 90), Some(3), None));
        assert_eq!((both.on_exceed, both.priority), (Some(OnExceed::Refuse), Some(Priority::Low)));
        let default = UsageLimits { watches: Some(1), leases: Some(1), ..UsageLimits::default() };
        let raised = one.or(&default);
        assert_eq!((raised.watches, raised.leases), (Some(7), Some(1)));
        assert!(UsageLimits::default().is_empty() && !raised.is_empty());
    }
}
