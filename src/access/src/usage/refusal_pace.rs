//! The delay of refusals to a client that repeats refused calls at once.
//!
//! Owns: the rule. Must not know: who waits. Invariant: no refusal waits longer than `DELAY`.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::Instant;

/// Refusals of a connection answered at once, per second.
const AT_ONCE: u32 = 20;

/// The delay of further refusals.
const DELAY: Duration = Duration::from_millis(100);

/// The refusals of one connection, or one stream.
#[derive(Debug, Default)]
pub struct RefusalPace {
    /// The beginning of the present second, and its refusals.
    second: Cell<Option<(Instant, u32)>>,
}

impl RefusalPace {
    /// The delay of a refusal at `now`; `None` for none.
    pub fn delay(&self, now: Instant) -> Option<Duration> {
        let (begun, count) = match self.second.get() {
            Some((begun, count)) if now.saturating_duration_since(begun) < Duration::from_secs(1) => {
                (begun, count.saturating_add(1))
            }
            _ => (now, 1),
        };
        self.second.set(Some((begun, count)));
        (count > AT_ONCE).then_some(DELAY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_refusals_of_a_second_are_told_at_once() {
        let (pace, now) = (RefusalPace::default(), Instant::now());
        let at_once = (0..100).filter(|_| pace.delay(now).is_none()).count();
        assert_eq!(at_once, 20);
        assert_eq!(pace.delay(now + Duration::from_millis(999)), Some(DELAY));
        assert_eq!(pace.delay(now + Duration::from_secs(1)), None);
    }
}
