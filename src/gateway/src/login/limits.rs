//! The defence against guessed passwords (docs/decisions.md#d15): which tries are checked, how many checks
//! run, and the time at which a refusal is answered.
//!
//! Owns: counting wrong passwords per user and address, per user, and per address, and the wait before the
//! next try ([`LoginLimiter`]); the seats of running checks (`CheckSeats`); the schedule of refusals
//! (`RefusalSchedule`). Must not know: passwords, password sources, clocks (time is an argument).
//! Invariants:
//! - the limits apply only to passwords with no known result, so a password known to be right is never kept
//!   out; a try counts as wrong until settled otherwise; memory is bounded whatever is tried;
//! - no network takes more than half of the seats, so a guesser in a single network keeps out no other
//!   network;
//! - a refusal reveals no earlier login: failures from elsewhere do not lock a user out of an address with an
//!   earlier login, but a try let through for this reason alone ([`LoginAttempt::is_unannounced`]) is
//!   answered as if refused here unless it succeeds, and is counted apart;
//! - the time of a refusal depends on the client's network, on the number of logins tried and on the usual
//!   cost of a check, never on the cost of the refused check. Otherwise the time would reveal users: etcd
//!   refuses an unknown user without a bcrypt, and comparing with a line of the users file costs another
//!   amount than comparing with a password at etcd. Each refusal has a slot several times as long as a check,
//!   so even many logins at once on a busy machine are checked before the answer is due. A login with the
//!   right password waits for no slot.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::retries::PATIENCE;
use keyward_config::FailedLogins;
use keyward_etcd::identity::UserName;
use keyward_upstream::credentials::lock;

/// Entries in memory, of some 64 bytes each. The least recently used are evicted first.
const ENTRIES: usize = 65_536;
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Concurrent checks of passwords with no known result. Each check waits for its turn at a member or at the
/// users file; callers past this number are refused with "too many requests".
const SEATS: usize = 1024;
const SEATS_OF_ONE_NETWORK: usize = SEATS / 2;
/// Shortest slot: several bcrypts of etcd's default cost on a busy machine, and half of `etcdctl`'s time
/// limit of a login.
const LEAST_SLOT: Duration = Duration::from_secs(1);
/// Longest slot. Slots have few possible lengths, so a length reveals no single check.
const LONGEST_SLOT: Duration = Duration::from_secs(4);
/// Shortest slot in units of the cost of a check.
const CHECKS_IN_A_SLOT: u32 = 4;
/// Refusals of different networks that may share a slot: a member makes two checks at a time.
const NETWORKS_IN_A_SLOT: u32 = 4;
/// After so many refusals in a row no two refusals share a slot, since members that only refuse are asked
/// more slowly (see the breaker in `credentials::control`, with a later start).
const REFUSALS_IN_A_ROW: u32 = 16;
/// Number of networks at which networks without a future slot are forgotten.
const PRUNED_AT: usize = 64;

/// The limits of a kind of count. After each `forgets` a wrong password is forgotten.
#[derive(Clone, Copy, Debug)]
struct FailureRule {
    /// Wrong passwords allowed at once; each further try waits twice as long as the try before. 0 disables
    /// the count.
    free: u32,
    longest_wait: Duration,
    forgets: Duration,
}

/// Counts of wrong passwords, with their limits.
pub struct LoginLimiter {
    pair: FailureRule,
    user: FailureRule,
    address: FailureRule,
    counts: FailureCounts,
    hasher: RandomState,
}

/// A try let through by the limits. To be given to [`LoginLimiter::settle`].
#[derive(Clone, Copy, Debug)]
#[must_use = "it counts as a wrong password until it is settled"]
pub struct LoginAttempt {
    at: Instant,
    /// Keys of the counts with this try, each with the time of the previous try.
    counted: [Option<(u64, Instant)>; 3],
    /// Key of the record that the user has logged in from this address.
    known_here: u64,
    is_unannounced: bool,
}

/// The network of a client address. IPv6 addresses with the same first 64 bits are in the same network.
/// Clients of a unix socket have no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ClientNetwork(Option<u128>);

/// The result of a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// The password was right.
    Right,
    /// The password was wrong.
    Wrong,
    /// No source gave an answer.
    Untold,
}

/// Too many wrong passwords.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many wrong passwords")]
pub struct TooManyFailures;

#[derive(Clone, Copy)]
struct FailureCount {
    wrong: u32,
    /// Start of the current `forgets` period; a wrong password is forgotten at its end.
    since: Instant,
    last: Instant,
}

/// A two-generation map. When full, `recent` becomes `old`, and the entries left in the former `old` are
/// evicted. A lookup moves an entry to `recent`.
struct FailureCounts {
    half: usize,
    recent: HashMap<u64, FailureCount>,
    old: HashMap<u64, FailureCount>,
}

impl LoginLimiter {
    /// Starts without any counts.
    #[must_use]
    pub fn new(limits: FailedLogins) -> Self {
        let rule = |free, longest: Duration, forgets| FailureRule {
            free,
            longest_wait: longest.min(limits.longest_wait),
            forgets: Duration::from_secs(forgets),
        };
        Self {
            pair: rule(limits.per_user_and_address, limits.longest_wait, 60),
            // The limits per user and per address also delay innocent clients, so the waits are short.
            user: rule(limits.per_user, Duration::from_secs(10), 10),
            address: rule(limits.per_address, Duration::from_secs(1), 1),
            counts: FailureCounts { half: ENTRIES / 2, recent: HashMap::new(), old: HashMap::new() },
            hasher: RandomState::new(),
        }
    }

    /// Counts a try, if a password with no known result may be checked now.
    ///
    /// # Errors
    /// [`TooManyFailures`].
    pub fn begin(
        &mut self,
        user: &UserName,
        from: Option<IpAddr>,
        now: Instant,
    ) -> Result<LoginAttempt, TooManyFailures> {
        let network = ClientNetwork::of(from);
        let pair = self.hasher.hash_one((0, user, network));
        let known_here = self.hasher.hash_one((3, user, network));
        let user = self.hasher.hash_one((1, user));
        let address = network.0.map(|network| self.hasher.hash_one((2, network)));
        let mut is_open =
            |key, rule: &FailureRule| self.counts.find(key, now).is_none_or(|count| count.open(rule, now));
        if !is_open(pair, &self.pair) {
            return Err(TooManyFailures);
        }
        let is_unannounced =
            !is_open(user, &self.user) || address.is_some_and(|key| !is_open(key, &self.address));
        let counted = if is_unannounced {
            let known = self.counts.find(known_here, now).is_some_and(|count| count.open(&self.pair, now));
            if !known {
                return Err(TooManyFailures);
            }
            [Some((known_here, self.pair)), None, None]
        } else {
            [Some((pair, self.pair)), Some((user, self.user)), address.map(|key| (key, self.address))]
        };
        let counted = counted.map(|count| {
            let (key, rule) = count?;
            let count = self.counts.at(key, now);
            let before = count.last;
            count.add(&rule, now);
            Some((key, before))
        });
        Ok(LoginAttempt { at: now, counted, known_here, is_unannounced })
    }

    /// Records the result of a try. A try that was not wrong leaves no trace visible to another try.
    pub fn settle(&mut self, tried: LoginAttempt, how: AttemptOutcome, now: Instant) {
        for (key, before) in tried.counted.into_iter().flatten() {
            let count = self.counts.at(key, now);
            match how {
                AttemptOutcome::Wrong => count.last = now,
                AttemptOutcome::Right | AttemptOutcome::Untold => count.take_back(tried.at, before),
            }
        }
        if how == AttemptOutcome::Right {
            self.counts.at(tried.known_here, now);
        }
    }
}

impl LoginAttempt {
    /// True if the try passed only because its user had logged in from the same address before. The client
    /// must not learn this: unless the password is right, the answer is a refusal by the limits.
    #[must_use]
    pub fn is_unannounced(&self) -> bool {
        self.is_unannounced
    }
}

impl ClientNetwork {
    pub(super) fn of(address: Option<IpAddr>) -> Self {
        Self(address.map(|address| match address.to_canonical() {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits() >> 64 << 64,
        }))
    }
}

impl FailureCount {
    fn open(&self, rule: &FailureRule, now: Instant) -> bool {
        let wrong = self.after(rule, now).wrong;
        if rule.free == 0 || wrong < rule.free {
            return true;
        }
        let doubled = FIRST_WAIT.saturating_mul(1 << (wrong - rule.free).min(16));
        now >= self.last + doubled.min(rule.longest_wait)
    }

    /// The count as of `now`, less the wrong passwords forgotten meanwhile.
    fn after(self, rule: &FailureRule, now: Instant) -> Self {
        let turns = now.saturating_duration_since(self.since).as_millis() / rule.forgets.as_millis().max(1);
        let turns = u32::try_from(turns).unwrap_or(u32::MAX).min(self.wrong);
        Self { wrong: self.wrong - turns, since: self.since + rule.forgets.saturating_mul(turns), ..self }
    }

    fn add(&mut self, rule: &FailureRule, now: Instant) {
        *self = self.after(rule, now);
        if self.wrong == 0 {
            self.since = now;
        }
        self.wrong = self.wrong.saturating_add(1);
        self.last = now;
    }

    /// Takes back a try begun at `at`, where the previous try began at `before`.
    fn take_back(&mut self, at: Instant, before: Instant) {
        self.wrong = self.wrong.saturating_sub(1);
        if self.last == at {
            self.last = before;
        }
    }
}

impl FailureCounts {
    fn find(&mut self, key: u64, now: Instant) -> Option<FailureCount> {
        let known = self.recent.contains_key(&key) || self.old.contains_key(&key);
        known.then(|| *self.at(key, now))
    }

    fn at(&mut self, key: u64, now: Instant) -> &mut FailureCount {
        if self.recent.len() >= self.half && !self.recent.contains_key(&key) {
            self.old = std::mem::take(&mut self.recent);
        }
        let kept = self.old.remove(&key);
        self.recent
            .entry(key)
            .or_insert_with(|| kept.unwrap_or(FailureCount { wrong: 0, since: now, last: now }))
    }
}

/// The seats of running checks of passwords with no known result. Clones share the state.
#[derive(Clone, Default)]
pub(super) struct CheckSeats(Arc<Mutex<TakenSeats>>);

#[derive(Default)]
struct TakenSeats {
    all: usize,
    by_network: HashMap<ClientNetwork, usize>,
}

/// A seat of a running check, given back on drop.
#[must_use = "the check has a seat as long as this is held"]
pub(super) struct CheckSeat {
    seats: CheckSeats,
    network: ClientNetwork,
}

impl CheckSeats {
    /// Takes a seat for a client in `network`; `None` if too many checks are under way.
    pub(super) fn take(&self, network: ClientNetwork) -> Option<CheckSeat> {
        let mut taken = lock(&self.0);
        let of_network = taken.by_network.get(&network).copied().unwrap_or(0);
        if taken.all >= SEATS || of_network >= SEATS_OF_ONE_NETWORK {
            return None;
        }
        taken.all += 1;
        taken.by_network.insert(network, of_network + 1);
        Some(CheckSeat { seats: self.clone(), network })
    }
}

impl Drop for CheckSeat {
    fn drop(&mut self) {
        let mut taken = lock(&self.seats.0);
        taken.all = taken.all.saturating_sub(1);
        match taken.by_network.get_mut(&self.network) {
            Some(of_network) if *of_network > 1 => *of_network -= 1,
            _ => drop(taken.by_network.remove(&self.network)),
        }
    }
}

/// The schedule of refusals.
#[derive(Debug)]
pub(super) struct RefusalSchedule {
    /// Average cost of a check that ran alone and was not cut short.
    check_cost: Duration,
    /// The end of the last slot of each network.
    networks: HashMap<ClientNetwork, Instant>,
    prune_at: usize,
    /// Start of the next slot, whatever the network.
    next_slot: Instant,
    refusals_in_a_row: u32,
}

/// The slot of a login, used only if the login is refused.
#[derive(Debug)]
#[must_use = "a slot that is not used is given back"]
pub(super) struct RefusalSlot {
    network: ClientNetwork,
    end: Instant,
    length: Duration,
    /// Delay added to the slots of the networks after this slot.
    step: Duration,
}

impl RefusalSchedule {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            check_cost: Duration::ZERO,
            networks: HashMap::new(),
            prune_at: PRUNED_AT,
            next_slot: now,
            refusals_in_a_row: 0,
        }
    }

    /// Learns the duration of a check that ran alone and accepted its password.
    pub(super) fn learn_accepted(&mut self, took: Duration) {
        self.check_cost = if self.check_cost.is_zero() { took } else { self.check_cost * 7 / 8 + took / 8 };
    }

    /// Learns the duration of a check that ran alone and refused its password. The check may have been cut
    /// short, so the learned cost never falls.
    pub(super) fn learn_refused(&mut self, took: Duration) {
        if took > self.check_cost {
            self.learn_accepted(took);
        }
    }

    /// Reserves the slot of a login of `network` that begins `now`.
    pub(super) fn reserve(&mut self, network: ClientNetwork, now: Instant) -> RefusalSlot {
        let length = self.slot_length();
        let step =
            if self.refusals_in_a_row < REFUSALS_IN_A_ROW { length / NETWORKS_IN_A_SLOT } else { length };
        // Callers give up after `PATIENCE`, so no slot ends later.
        let latest = now + PATIENCE;
        let begin = self.next_slot.max(now);
        self.next_slot = (begin + step).min(latest);
        if self.networks.len() >= self.prune_at {
            self.networks.retain(|_, end| *end > now);
            self.prune_at = (self.networks.len() * 2).max(PRUNED_AT);
        }
        let last = self.networks.entry(network).or_insert(now);
        *last = (begin.max(*last) + length).min(latest);
        RefusalSlot { network, end: *last, length, step }
    }

    /// Frees the slot of an accepted or unanswered login, for the next login.
    pub(super) fn release(&mut self, slot: &RefusalSlot, is_accepted: bool) {
        if is_accepted {
            self.refusals_in_a_row = 0;
        }
        if let Some(end) = self.networks.get_mut(&slot.network) {
            *end = end.checked_sub(slot.length).unwrap_or(*end);
        }
        self.next_slot = self.next_slot.checked_sub(slot.step).unwrap_or(self.next_slot);
    }

    /// The time to answer a refusal known `now`: the end of its slot, or of a later slot if the check took
    /// longer.
    pub(super) fn answer_at(&mut self, slot: &RefusalSlot, now: Instant) -> Instant {
        self.refusals_in_a_row = self.refusals_in_a_row.saturating_add(1);
        let late = now.saturating_duration_since(slot.end);
        let slots = u32::try_from(late.as_micros().div_ceil(slot.length.as_micros().max(1)));
        slot.end + slot.length.saturating_mul(slots.unwrap_or(u32::MAX))
    }

    fn slot_length(&self) -> Duration {
        let wanted = self.check_cost.saturating_mul(CHECKS_IN_A_SLOT);
        let mut length = LEAST_SLOT;
        while length < wanted && length < LONGEST_SLOT {
            length *= 2;
        }
        length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const CHECK: Duration = Duration::from_millis(200);

    fn attempts() -> LoginLimiter {
        LoginLimiter::new(FailedLogins {
            per_user_and_address: 5,
            per_user: 20,
            per_address: 50,
            longest_wait: Duration::from_secs(60),
        })
    }

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    fn try_as(
        attempts: &mut LoginLimiter,
        user: &str,
        from: Option<IpAddr>,
        how: AttemptOutcome,
        now: Instant,
    ) -> bool {
        let begun = attempts.begin(&user.into(), from, now);
        let allowed = begun.is_ok();
        if let Ok(tried) = begun {
            attempts.settle(tried, how, now);
        }
        allowed
    }

    #[test]
    fn wrong_passwords_wait_ever_longer_and_are_forgotten() {
        let (mut attempts, start) = (attempts(), Instant::now());
        let mut allowed = Vec::new();
        for second in 0..200_u32 {
            let now = start + second * SECOND;
            while try_as(&mut attempts, "alice", address(1), AttemptOutcome::Wrong, now) {
                allowed.push(second);
            }
        }
        // A wrong password is forgotten each minute, so the last wait equals the wait before instead of
        // doubling.
        assert_eq!(allowed, [0, 0, 0, 0, 0, 1, 3, 7, 15, 31, 60, 92, 124, 180]);
        let later = start + 3600 * SECOND;
        let free =
            (0..10).filter(|_| try_as(&mut attempts, "alice", address(1), AttemptOutcome::Wrong, later));
        assert_eq!(free.count(), 5, "forgotten");
    }

    #[test]
    fn tries_under_way_count_and_what_nobody_could_tell_does_not() {
        let (mut attempts, now) = (attempts(), Instant::now());
        let user = UserName::from("alice");
        let under_way: Vec<_> = (0..9).filter_map(|_| attempts.begin(&user, address(1), now).ok()).collect();
        assert_eq!(under_way.len(), 5);
        for tried in under_way {
            attempts.settle(tried, AttemptOutcome::Untold, now);
        }
        for _ in 0..100 {
            assert!(try_as(&mut attempts, "alice", address(1), AttemptOutcome::Untold, now));
            assert!(try_as(&mut attempts, "bob", address(1), AttemptOutcome::Right, now));
        }
    }

    #[test]
    fn one_address_has_so_many_under_way_and_those_that_were_right_are_taken_back() {
        let (mut attempts, now) = (attempts(), Instant::now());
        for how in [AttemptOutcome::Right, AttemptOutcome::Untold, AttemptOutcome::Wrong] {
            let names = (0..100).map(|n| UserName::from(format!("{how:?}{n}").as_str()));
            let under_way: Vec<_> =
                names.filter_map(|name| attempts.begin(&name, address(1), now).ok()).collect();
            assert_eq!(under_way.len(), 50, "{how:?}");
            assert!(attempts.begin(&"other".into(), address(2), now).is_ok(), "another address");
            under_way.into_iter().for_each(|tried| attempts.settle(tried, how, now));
        }
        assert!(attempts.begin(&"other".into(), address(1), now).is_err(), "fifty were wrong");
    }

    /// The answers to a guesser, with or without logins of `user` from the same address.
    fn guesses_beside_logins(user: &str, logs_in: bool) -> Vec<bool> {
        let (mut attempts, start) = (attempts(), Instant::now());
        let mut told = Vec::new();
        for second in 0..300_u32 {
            let now = start + second * SECOND;
            if logs_in {
                let _tried = try_as(&mut attempts, user, address(1), AttemptOutcome::Right, now);
            }
            for n in 0..second % 7 {
                let begun = attempts.begin(&user.into(), address(1), now + n * SECOND / 10);
                told.push(begun.is_ok_and(|tried| {
                    let announced = !tried.is_unannounced();
                    attempts.settle(tried, AttemptOutcome::Wrong, now + n * SECOND / 10);
                    announced
                }));
            }
            if second % 60 > 30 {
                for n in 0..60 {
                    let _tried =
                        try_as(&mut attempts, &format!("u{n}"), address(1), AttemptOutcome::Wrong, now);
                }
            }
        }
        told
    }

    #[test]
    fn who_guesses_is_refused_alike_whether_the_user_logs_in_from_there_or_not() {
        let nobody = guesses_beside_logins("alice", false);
        assert!(nobody.contains(&true) && nobody.contains(&false));
        assert_eq!(guesses_beside_logins("alice", true), nobody);
    }

    #[test]
    fn many_addresses_guess_one_user_together_no_faster_and_keep_her_out_nowhere_that_she_is_known() {
        let (mut attempts, start) = (attempts(), Instant::now());
        assert!(try_as(&mut attempts, "alice", address(200), AttemptOutcome::Right, start));
        let guesses = |attempts: &mut LoginLimiter, now| {
            (0..100)
                .filter(|from| try_as(attempts, "alice", address(*from), AttemptOutcome::Wrong, now))
                .count()
        };
        assert_eq!(guesses(&mut attempts, start), 20);
        assert_eq!(guesses(&mut attempts, start + SECOND), 1);
        assert!(
            !try_as(&mut attempts, "alice", address(150), AttemptOutcome::Right, start),
            "not known there"
        );
        assert!(try_as(&mut attempts, "alice", address(200), AttemptOutcome::Right, start));
        assert!(try_as(&mut attempts, "bob", address(1), AttemptOutcome::Right, start));
    }

    #[test]
    fn one_address_guesses_many_users_no_faster() {
        let (mut attempts, start) = (attempts(), Instant::now());
        assert!(try_as(&mut attempts, "known", address(1), AttemptOutcome::Right, start));
        let guesses = |attempts: &mut LoginLimiter, from: Option<IpAddr>| {
            let wrong = |n: &u32| try_as(attempts, &format!("u{n}"), from, AttemptOutcome::Wrong, start);
            (0..100).filter(wrong).count()
        };
        assert_eq!(guesses(&mut attempts, address(1)), 50);
        assert_eq!(guesses(&mut attempts, address(2)), 50);
        assert!(!try_as(&mut attempts, "new", address(1), AttemptOutcome::Right, start));
        assert!(try_as(&mut attempts, "known", address(1), AttemptOutcome::Right, start));
        assert!(
            try_as(&mut attempts, "new", address(1), AttemptOutcome::Right, start + 2 * SECOND),
            "never for long"
        );
        let six = |last: &str| Some(format!("2001:db8::{last}").parse().unwrap());
        assert_eq!(guesses(&mut attempts, six("1")), 50);
        assert!(!try_as(&mut attempts, "new", six("ffff"), AttemptOutcome::Right, start), "the same network");
        let mapped = Some("::ffff:10.0.0.2".parse().unwrap());
        assert!(!try_as(&mut attempts, "new", mapped, AttemptOutcome::Right, start), "the same address");
        assert_eq!(guesses(&mut attempts, None), 100, "a unix socket has no address");
    }

    #[test]
    fn zero_counts_nothing() {
        let limits = FailedLogins {
            per_user_and_address: 0,
            per_user: 0,
            per_address: 0,
            longest_wait: Duration::from_secs(60),
        };
        let (mut attempts, now) = (LoginLimiter::new(limits), Instant::now());
        assert!((0..1000).all(|_| try_as(&mut attempts, "alice", address(1), AttemptOutcome::Wrong, now)));
    }

    #[test]
    fn a_flood_of_users_and_addresses_takes_no_more_memory_than_there_is() {
        const FLOOD: u32 = 100_000;
        let (mut attempts, now) = (attempts(), Instant::now());
        while try_as(&mut attempts, "alice", address(1), AttemptOutcome::Wrong, now) {}
        let (mut most, mut room) = (0, 0);
        for n in 0..FLOOD {
            let from = IpAddr::from(u32::to_be_bytes(0x2000_0000 + n));
            assert!(try_as(&mut attempts, &format!("u{n}"), Some(from), AttemptOutcome::Wrong, now));
            let FailureCounts { recent, old, .. } = &attempts.counts;
            most = most.max(recent.len() + old.len());
            room = room.max(recent.capacity() + old.capacity());
            if n % 1000 == 0 {
                assert!(
                    !try_as(&mut attempts, "alice", address(1), AttemptOutcome::Wrong, now),
                    "after {n} others"
                );
            }
        }
        assert!(most > ENTRIES / 2 && most <= ENTRIES, "{most} entries");
        assert!(room <= 2 * ENTRIES, "room for {room} entries");
    }

    #[test]
    fn memory_is_bounded_and_who_goes_on_guessing_is_not_forgotten() {
        let (mut attempts, now) = (attempts(), Instant::now());
        attempts.counts.half = 64;
        while try_as(&mut attempts, "alice", address(1), AttemptOutcome::Wrong, now) {}
        for n in 0..1000 {
            let from = IpAddr::from(u32::to_be_bytes(n));
            assert!(try_as(&mut attempts, &format!("u{n}"), Some(from), AttemptOutcome::Wrong, now));
            assert!(attempts.counts.recent.len() + attempts.counts.old.len() <= 128);
            assert!(
                !try_as(&mut attempts, "alice", address(1), AttemptOutcome::Wrong, now),
                "after {n} others"
            );
        }
    }

    fn network(last: u8) -> ClientNetwork {
        ClientNetwork::of(Some(IpAddr::from([10, 0, 0, last])))
    }

    /// The times of the answers to simultaneous logins of `networks`, checked two at a time, each in `cost`.
    fn answered(schedule: &mut RefusalSchedule, networks: &[u8], cost: Duration) -> Vec<Duration> {
        let start = Instant::now();
        let slots: Vec<_> = networks.iter().map(|last| schedule.reserve(network(*last), start)).collect();
        let ends = (0..).map(|n| start + cost * (n / 2 + 1));
        slots.iter().zip(ends).map(|(slot, end)| schedule.answer_at(slot, end) - start).collect()
    }

    fn schedule() -> RefusalSchedule {
        RefusalSchedule::new(Instant::now())
    }

    #[test]
    fn refusals_of_one_network_are_answered_one_a_slot_whatever_their_checks_cost() {
        for cost in [Duration::ZERO, CHECK / 20, CHECK, SECOND] {
            let times = answered(&mut schedule(), &[1; 7], cost);
            assert_eq!(times, [1, 2, 3, 4, 5, 6, 7].map(|second| second * SECOND), "{cost:?}");
        }
        let many = answered(&mut schedule(), &[1; 100], CHECK / 2);
        assert!(many[7..].iter().all(|time| *time == PATIENCE), "nobody waits any more");
    }

    #[test]
    fn refusals_of_many_networks_share_slots_while_members_keep_up() {
        let networks: Vec<u8> = (0..16).collect();
        let cheap = answered(&mut schedule(), &networks, Duration::ZERO);
        assert_eq!(cheap, answered(&mut schedule(), &networks, CHECK));
        assert_eq!([cheap[0], cheap[1], cheap[4]], [SECOND, SECOND * 5 / 4, 2 * SECOND]);
        let mut schedule = schedule();
        drop(answered(&mut schedule, &networks, CHECK));
        // By now members pause after each refusal.
        schedule.next_slot = Instant::now();
        let slow = answered(&mut schedule, &[100, 101, 102, 103], 5 * CHECK);
        assert_eq!(slow, [1, 2, 3, 4].map(|second| second * SECOND));
    }

    #[test]
    fn a_check_that_takes_longer_than_its_slot_is_answered_at_the_end_of_another() {
        let (mut schedule, start) = (schedule(), Instant::now());
        let slot = schedule.reserve(network(1), start);
        assert_eq!(schedule.answer_at(&slot, start + SECOND), start + SECOND);
        assert_eq!(schedule.answer_at(&slot, start + SECOND + CHECK), start + 2 * SECOND);
    }

    #[test]
    fn slots_grow_with_what_checks_cost_and_in_few_steps() {
        let mut schedule = schedule();
        let mut lengths = Vec::new();
        for milli in 0..2000 {
            schedule.check_cost = Duration::ZERO;
            schedule.learn_accepted(Duration::from_millis(milli));
            lengths.push(schedule.slot_length().as_secs());
            assert!(
                schedule.slot_length() >= schedule.check_cost * CHECKS_IN_A_SLOT
                    || schedule.slot_length() == LONGEST_SLOT
            );
        }
        lengths.dedup();
        assert_eq!(lengths, [1, 2, 4]);
        schedule.check_cost = CHECK;
        schedule.learn_refused(CHECK / 20);
        assert_eq!(schedule.check_cost, CHECK, "it may have been cut short");
        (0..64).for_each(|_| schedule.learn_refused(2 * CHECK));
        assert!(schedule.check_cost > CHECK * 19 / 10);
    }

    #[test]
    fn a_login_that_is_accepted_puts_no_refusal_off() {
        let (mut schedule, start) = (schedule(), Instant::now());
        for _ in 0..100 {
            let slot = schedule.reserve(network(1), start);
            schedule.release(&slot, true);
        }
        let slot = schedule.reserve(network(1), start);
        assert_eq!(schedule.answer_at(&slot, start), start + SECOND);
    }

    #[test]
    fn networks_whose_slots_are_over_are_forgotten() {
        let (mut schedule, start) = (schedule(), Instant::now());
        for n in 0..10_000 {
            let address = IpAddr::from(u32::to_be_bytes(n));
            let _slot = schedule.reserve(ClientNetwork::of(Some(address)), start + n * SECOND);
        }
        assert!(schedule.networks.len() <= PRUNED_AT, "{}", schedule.networks.len());
    }
}
