//! The retry budget of a shard: retries are a share of the traffic, so that upstream failures never multiply
//! the load.
//!
//! Owns: the accounts. Must not know: if a call deserves a retry. Invariants: retries are at most a fifth of
//! all calls, plus the savings of a quiet shard, plus a fixed rate per second; retries caused by a failing
//! credential draw on an account of the identity alone.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use keyward_upstream::credentials::IdentityKey;

/// How long a call without an earlier deadline is tried: etcd's own request limit (5 s and two elections of a
/// second each). etcd clients expect `etcdserver: request timed out` after this time.
pub const PATIENCE: Duration = Duration::from_secs(7);
/// The price of a retry. Each call earns 1, so retries are a fifth of the traffic.
const TRY: u64 = 5;
/// Additional retries per second, for a shard with little traffic.
const STEADY: u64 = 20;
/// The most retries saved up, so that all calls in flight at a lost member may move to another member at
/// once.
const SAVED: u64 = 1000;
/// Retries per second of an identity with a failing credential. These tries send no call, and logins are
/// limited elsewhere, so the rate only bounds the work of the shard.
const OWN_STEADY: u64 = 200;
/// The most identities with an own account. Further identities share an account: so many failures have a
/// common cause.
const IDENTITIES: usize = 1024;

/// The cause of a failed try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryCause {
    /// The member refused, lost or did not accept the call.
    Members,
    /// The call was not sent, because the identity could not be authenticated.
    Own(IdentityKey),
}

/// The accounts of a shard.
#[derive(Debug)]
pub struct RetryBudget {
    shared: Cell<RetryAccount>,
    own: RefCell<HashMap<Option<IdentityKey>, RetryAccount>>,
}

impl Default for RetryBudget {
    fn default() -> Self {
        Self::begun(Instant::now())
    }
}

impl RetryBudget {
    fn begun(now: Instant) -> Self {
        Self { shared: Cell::new(RetryAccount::half(now)), own: RefCell::default() }
    }

    /// Credits the account for a call's first try.
    pub fn called(&self) {
        let mut account = self.shared.get();
        account.balance = (account.balance + 1).min(SAVED * TRY);
        self.shared.set(account);
    }

    /// Takes the price of a retry; false if the account has not enough.
    #[must_use]
    pub fn take(&self, trouble: RetryCause, now: Instant) -> bool {
        let RetryCause::Own(identity) = trouble else {
            let mut account = self.shared.get();
            let taken = account.take(STEADY, now);
            self.shared.set(account);
            return taken;
        };
        let mut own = self.own.borrow_mut();
        if own.len() >= IDENTITIES && !own.contains_key(&Some(identity)) {
            own.retain(|_, account| !account.is_at_rest(now));
        }
        let key = (own.len() < IDENTITIES || own.contains_key(&Some(identity))).then_some(identity);
        own.entry(key).or_insert_with(|| RetryAccount::half(now)).take(OWN_STEADY, now)
    }
}

#[derive(Clone, Copy, Debug)]
struct RetryAccount {
    balance: u64,
    counted: Instant,
}

impl RetryAccount {
    fn half(now: Instant) -> Self {
        Self { balance: SAVED * TRY / 2, counted: now }
    }

    fn take(&mut self, steady: u64, now: Instant) -> bool {
        let earned = self.earned(steady, now);
        if earned > 0 {
            self.counted = now;
        }
        let balance = self.balance.saturating_add(earned).min(SAVED * TRY);
        let left = balance.checked_sub(TRY);
        self.balance = left.unwrap_or(balance);
        left.is_some()
    }

    fn earned(&self, steady: u64, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.counted);
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX).saturating_mul(steady * TRY) / 1000
    }

    /// True if an identity's account is as full as a new account.
    fn is_at_rest(&self, now: Instant) -> bool {
        self.balance.saturating_add(self.earned(OWN_STEADY, now)) >= SAVED * TRY / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(retries: &RetryBudget, now: Instant, tries: usize) -> usize {
        (0..tries).filter(|_| retries.take(RetryCause::Members, now)).count()
    }

    #[test]
    fn a_fifth_of_the_traffic_and_what_was_saved_is_sent_again() {
        let now = Instant::now();
        let retries = RetryBudget::begun(now);
        let saved = taken(&retries, now, 100_000);
        assert_eq!(saved as u64, SAVED / 2);
        assert_eq!(taken(&retries, now, 1), 0);
        (0..1000).for_each(|_| retries.called());
        assert_eq!(taken(&retries, now, 100_000), 200);
    }

    #[test]
    fn who_cannot_be_proved_draws_on_an_account_of_its_own() {
        let now = Instant::now();
        let retries = RetryBudget::begun(now);
        let own = |identity, tries| {
            let take = |_: &u64| retries.take(RetryCause::Own(IdentityKey::numbered(identity)), now);
            (0..tries).filter(take).count() as u64
        };
        assert_eq!(own(1, 100_000), SAVED / 2);
        assert_eq!(own(2, 100_000), SAVED / 2, "another's is untouched");
        assert_eq!(taken(&retries, now, 100_000) as u64, SAVED / 2, "and everybody's");
        let later = now + Duration::from_secs(1);
        let again = |_: &u64| retries.take(RetryCause::Own(IdentityKey::numbered(1)), later);
        assert_eq!((0..100_000).filter(again).count() as u64, OWN_STEADY);
    }

    #[test]
    fn accounts_of_identities_are_bounded_and_those_at_rest_are_forgotten() {
        let now = Instant::now();
        let retries = RetryBudget::begun(now);
        let take = |identity, now| retries.take(RetryCause::Own(IdentityKey::numbered(identity)), now);
        let shared = usize::try_from(SAVED / 2).unwrap();
        for identity in 0..5000 {
            assert_eq!(take(identity, now), identity < IDENTITIES + shared, "{identity}");
        }
        assert_eq!(retries.own.borrow().len(), IDENTITIES + 1);
        assert!(take(0, now), "who has an account keeps it");
        assert!(take(6000, now + Duration::from_secs(60)));
        assert_eq!(retries.own.borrow().len(), 1);
    }

    #[test]
    fn a_quiet_shard_may_try_some_a_second_and_saves_up_to_its_bound() {
        let mut now = Instant::now();
        let retries = RetryBudget::begun(now);
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
