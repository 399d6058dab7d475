//! How many calls a shard may send again: a share of its traffic, so that trouble upstream never multiplies it.
//!
//! Owns: the account. Must not know: which calls are worth a second try. Invariant: of N calls at most a fifth, what a
//! quiet shard saves up, and some a second are sent again.

use std::cell::Cell;

use tokio::time::Instant;

/// What one further try costs. Each call pays one in: so a fifth of the traffic.
const TRY: u64 = 5;
/// Tries a second beside those, for a shard with little traffic.
const STEADY: u64 = 20;
/// Tries that may be saved up: what a lost member had in flight goes elsewhere at once.
const SAVED: u64 = 1000;

/// The account of one shard.
#[derive(Debug)]
pub struct Retries {
    balance: Cell<u64>,
    counted: Cell<Instant>,
}

impl Default for Retries {
    fn default() -> Self {
        Self { balance: Cell::new(SAVED * TRY / 2), counted: Cell::new(Instant::now()) }
    }
}

impl Retries {
    /// A call is made for the first time.
    pub fn called(&self) {
        self.balance.set((self.balance.get() + 1).min(SAVED * TRY));
    }

    /// Takes the price of one further try; false where there is not so much left.
    #[must_use]
    pub fn take(&self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.counted.get());
        let steady = u64::try_from(since.as_millis()).unwrap_or(u64::MAX).saturating_mul(STEADY * TRY) / 1000;
        if steady > 0 {
            self.counted.set(now);
        }
        let balance = self.balance.get().saturating_add(steady).min(SAVED * TRY);
        let left = balance.checked_sub(TRY);
        self.balance.set(left.unwrap_or(balance));
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn taken(retries: &Retries, now: Instant, tries: usize) -> usize {
        (0..tries).filter(|_| retries.take(now)).count()
    }

    #[test]
    fn a_fifth_of_the_traffic_and_what_was_saved_is_sent_again() {
        let retries = Retries::default();
        let now = Instant::now();
        let saved = taken(&retries, now, 100_000);
        assert_eq!(saved as u64, SAVED / 2);
        assert_eq!(taken(&retries, now, 1), 0);
        (0..1000).for_each(|_| retries.called());
        assert_eq!(taken(&retries, now, 100_000), 200);
    }

    #[test]
    fn a_quiet_shard_may_try_some_a_second_and_saves_up_to_its_bound() {
        let retries = Retries::default();
        let mut now = Instant::now();
        taken(&retries, now, 100_000);
        now += Duration::from_secs(1);
        assert_eq!(taken(&retries, now, 100_000) as u64, STEADY);
        let mut slowly = 0;
        for _ in 0..1000 {
            now += Duration::from_millis(1);
            slowly += taken(&retries, now, 1);
        }
        assert!((15..=20).contains(&slowly), "looking often costs nothing: {slowly}");
        now += Duration::from_secs(86_400);
        (0..1_000_000).for_each(|_| retries.called());
        assert_eq!(taken(&retries, now, 100_000) as u64, SAVED);
    }
}
