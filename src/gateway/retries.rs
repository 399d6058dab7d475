//! How many calls a shard may send again: a share of its traffic, so that trouble upstream never multiplies it.
//!
//! Owns: the accounts. Must not know: which calls are worth a second try. Invariants: of N calls at most a fifth, what a
//! quiet shard saves up, and some a second are sent again; what only its own credential kept from being sent draws on an
//! account of that identity alone.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use tokio::time::Instant;

use crate::upstream::credential::IdentityKey;

/// What one further try costs. Each call pays one in: so a fifth of the traffic.
const TRY: u64 = 5;
/// Tries a second beside those, for a shard with little traffic.
const STEADY: u64 = 20;
/// Tries that may be saved up: what a lost member had in flight goes elsewhere at once.
const SAVED: u64 = 1000;
/// Tries a second of one identity whose credential fails. Nothing of them is sent, and attempts to prove it are bounded
/// where they are made, so that this only bounds our own work.
const OWN_STEADY: u64 = 200;
/// Identities in trouble at once. Those past it share one account: so many have a cause in common.
const IDENTITIES: usize = 1024;

/// Whose trouble a call met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The member's: it refused, lost or did not take the call.
    Members,
    /// Its caller's: nothing was sent since this identity could not be proved.
    Own(IdentityKey),
}

/// The accounts of one shard.
#[derive(Debug)]
pub struct Retries {
    shared: Cell<Account>,
    own: RefCell<HashMap<Option<IdentityKey>, Account>>,
}

impl Default for Retries {
    fn default() -> Self {
        Self { shared: Cell::new(Account::half(Instant::now())), own: RefCell::default() }
    }
}

impl Retries {
    /// A call is made for the first time.
    pub fn called(&self) {
        let mut account = self.shared.get();
        account.balance = (account.balance + 1).min(SAVED * TRY);
        self.shared.set(account);
    }

    /// Takes the price of one further try; false where there is not so much left.
    #[must_use]
    pub fn take(&self, trouble: Trouble, now: Instant) -> bool {
        let Trouble::Own(identity) = trouble else {
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
        own.entry(key).or_insert_with(|| Account::half(now)).take(OWN_STEADY, now)
    }
}

#[derive(Clone, Copy, Debug)]
struct Account {
    balance: u64,
    counted: Instant,
}

impl Account {
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

    /// Whether an identity's account is as good as a new one.
    fn is_at_rest(&self, now: Instant) -> bool {
        self.balance.saturating_add(self.earned(OWN_STEADY, now)) >= SAVED * TRY / 2
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn taken(retries: &Retries, now: Instant, tries: usize) -> usize {
        (0..tries).filter(|_| retries.take(Trouble::Members, now)).count()
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
    fn who_cannot_be_proved_draws_on_an_account_of_its_own() {
        let retries = Retries::default();
        let now = Instant::now();
        let own = |identity, tries| {
            let take = |_: &u64| retries.take(Trouble::Own(IdentityKey::numbered(identity)), now);
            (0..tries).filter(take).count() as u64
        };
        assert_eq!(own(1, 100_000), SAVED / 2);
        assert_eq!(own(2, 100_000), SAVED / 2, "another's is untouched");
        assert_eq!(taken(&retries, now, 100_000) as u64, SAVED / 2, "and everybody's");
        let later = now + Duration::from_secs(1);
        let again = |_: &u64| retries.take(Trouble::Own(IdentityKey::numbered(1)), later);
        assert_eq!((0..100_000).filter(again).count() as u64, OWN_STEADY);
    }

    #[test]
    fn accounts_of_identities_are_bounded_and_those_at_rest_are_forgotten() {
        let retries = Retries::default();
        let now = Instant::now();
        let take = |identity, now| retries.take(Trouble::Own(IdentityKey::numbered(identity)), now);
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
