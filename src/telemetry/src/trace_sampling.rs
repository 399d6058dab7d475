//! The settings of traces: the calls with a trace, and the facts in it.
//!
//! Owns: the choice of the calls. Must not know: spans, clocks, random numbers. Invariant: a client's wish
//! for a trace is bounded by a rate, so that no client decides how many calls have a trace.

/// The settings of traces.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceSampling {
    /// The share of the calls without a client's decision that have a trace, from 0 to 1.
    pub share: f64,
    /// True if the client's decision in `traceparent` is followed.
    pub follows_parent: bool,
    /// Calls a second, for each thread that serves clients, that have a trace because their client wants one.
    pub parents_per_second: u32,
    /// True if spans name the client's address, its user agent and the etcd user.
    pub has_identities: bool,
}

/// The decision about a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceDecision {
    /// The call has no trace.
    Untraced,
    /// The call has a trace.
    Traced,
    /// The call has a trace if the rate of such calls has room.
    TracedWithinRate,
}

impl Default for TraceSampling {
    fn default() -> Self {
        Self { share: 0.0, follows_parent: true, parents_per_second: 100, has_identities: false }
    }
}

impl TraceSampling {
    /// Decides about a call. `wish` is the decision of its client, if any; `draw` returns a random number.
    #[must_use]
    pub fn decide(&self, wish: Option<bool>, draw: impl FnOnce() -> u32) -> TraceDecision {
        match wish.filter(|_| self.follows_parent) {
            Some(true) => TraceDecision::TracedWithinRate,
            Some(false) => TraceDecision::Untraced,
            None if self.share > 0.0 && f64::from(draw()) < self.share * 2f64.powi(32) => {
                TraceDecision::Traced
            }
            None => TraceDecision::Untraced,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TraceDecision::{Traced, TracedWithinRate, Untraced};
    use super::*;

    #[test]
    fn a_client_decides_only_where_it_is_followed_and_the_share_decides_otherwise() {
        let sampling = |share, follows_parent| TraceSampling { share, follows_parent, ..Default::default() };
        for (sampling, wish, drawn, decision) in [
            (sampling(0.0, true), None, 0, Untraced),
            (sampling(1.0, true), None, u32::MAX, Traced),
            (sampling(0.5, true), None, u32::MAX / 2, Traced),
            (sampling(0.5, true), None, u32::MAX / 2 + 2, Untraced),
            (sampling(0.0, true), Some(true), 0, TracedWithinRate),
            (sampling(1.0, true), Some(false), 0, Untraced),
            (sampling(0.0, false), Some(true), 0, Untraced),
            (sampling(1.0, false), Some(false), 0, Traced),
        ] {
            assert_eq!(sampling.decide(wish, || drawn), decision, "{sampling:?} {wish:?} {drawn}");
        }
    }
}
