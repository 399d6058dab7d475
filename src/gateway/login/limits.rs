//! How often a password may be tried.
//!
//! Owns: counting wrong passwords by user and address together, by user and by address, and how long the next one has
//! to wait. Must not know: passwords, what checks them, clocks (time is an argument).
//! Invariants: it is asked only about passwords of which nothing is known, so that it keeps nobody out whose password
//! was right before; a try counts as a wrong one until it is known not to be; memory is bounded whatever is tried. What
//! is refused tells nothing of who has logged in: a user who once logged in from an address is not kept out there for
//! what others do, but a try that is let through for this reason alone ([`Try::is_unannounced`]) is answered as if it
//! had been refused here unless it succeeds, and is counted apart.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use crate::config::FailedLogins;
use crate::identity::UserName;

/// Entries in memory: some 64 bytes each. Those unused for longest go first.
const ENTRIES: usize = 65_536;
const FIRST_WAIT: Duration = Duration::from_secs(1);

/// What is counted. One wrong password is forgotten after each `forgets`.
#[derive(Clone, Copy, Debug)]
struct Rule {
    /// Wrong ones at once; past them each waits twice as long as the one before. 0: not counted.
    free: u32,
    longest_wait: Duration,
    forgets: Duration,
}

/// Who tried how often.
pub struct Attempts {
    pair: Rule,
    user: Rule,
    address: Rule,
    counts: Counts,
    hasher: RandomState,
}

/// A try that was let through. To be given to [`Attempts::settle`].
#[derive(Clone, Copy, Debug)]
#[must_use = "it counts as a wrong password until it is settled"]
pub struct Try {
    at: Instant,
    /// What counts it, and the last try there before it.
    counted: [Option<(u64, Instant)>; 3],
    /// The key under which it is kept that this user has logged in from this address.
    known_here: u64,
    is_unannounced: bool,
}

/// Whom an address stands for: who has one of IPv6 has all that begin with the same 64 bits. A unix socket has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Network(Option<u128>);

/// How a try ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The password was right.
    Right,
    /// It was wrong.
    Wrong,
    /// Nobody could say.
    Untold,
}

/// Too many wrong passwords.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many wrong passwords")]
pub struct Limited;

#[derive(Clone, Copy)]
struct Count {
    wrong: u32,
    /// When the next one is forgotten, counted from here.
    since: Instant,
    last: Instant,
}

/// Two halves: the recent one fills, then becomes the old one, whose unused remains are dropped at the next turn.
struct Counts {
    half: usize,
    recent: HashMap<u64, Count>,
    old: HashMap<u64, Count>,
}

impl Attempts {
    /// Nobody has tried yet.
    #[must_use]
    pub fn new(limits: FailedLogins) -> Self {
        let rule = |free, longest: Duration, forgets| Rule {
            free,
            longest_wait: longest.min(limits.longest_wait),
            forgets: Duration::from_secs(forgets),
        };
        Self {
            pair: rule(limits.per_user_and_address, limits.longest_wait, 60),
            // These two keep out whoever did nothing wrong, too: never for long.
            user: rule(limits.per_user, Duration::from_secs(10), 10),
            address: rule(limits.per_address, Duration::from_secs(1), 1),
            counts: Counts { half: ENTRIES / 2, recent: HashMap::new(), old: HashMap::new() },
            hasher: RandomState::new(),
        }
    }

    /// Whether a password of which nothing is known may be checked now.
    ///
    /// # Errors
    /// [`Limited`].
    pub fn begin(&mut self, user: &UserName, from: Option<IpAddr>, now: Instant) -> Result<Try, Limited> {
        let network = Network::of(from);
        let pair = self.hasher.hash_one((0, user, network));
        let known_here = self.hasher.hash_one((3, user, network));
        let user = self.hasher.hash_one((1, user));
        let address = network.0.map(|network| self.hasher.hash_one((2, network)));
        let mut is_open =
            |key, rule: &Rule| self.counts.find(key, now).is_none_or(|count| count.open(rule, now));
        if !is_open(pair, &self.pair) {
            return Err(Limited);
        }
        let is_unannounced =
            !is_open(user, &self.user) || address.is_some_and(|key| !is_open(key, &self.address));
        let counted = if is_unannounced {
            let known = self.counts.find(known_here, now).is_some_and(|count| count.open(&self.pair, now));
            if !known {
                return Err(Limited);
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
        Ok(Try { at: now, counted, known_here, is_unannounced })
    }

    /// Takes down how a try ended. One that was not wrong leaves nothing that another try could notice.
    pub fn settle(&mut self, tried: Try, how: Settled, now: Instant) {
        for (key, before) in tried.counted.into_iter().flatten() {
            let count = self.counts.at(key, now);
            match how {
                Settled::Wrong => count.last = now,
                Settled::Right | Settled::Untold => count.take_back(tried.at, before),
            }
        }
        if how == Settled::Right {
            self.counts.at(tried.known_here, now);
        }
    }
}

impl Try {
    /// Whether the limits would have refused it, had its user not logged in from its address before. Nobody may be told
    /// so: unless its password is right, it is answered as one that was refused.
    #[must_use]
    pub fn is_unannounced(&self) -> bool {
        self.is_unannounced
    }
}

impl Network {
    pub(super) fn of(address: Option<IpAddr>) -> Self {
        Self(address.map(|address| match address.to_canonical() {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits() >> 64 << 64,
        }))
    }
}

impl Count {
    fn open(&self, rule: &Rule, now: Instant) -> bool {
        let wrong = self.after(rule, now).wrong;
        if rule.free == 0 || wrong < rule.free {
            return true;
        }
        let doubled = FIRST_WAIT.saturating_mul(1 << (wrong - rule.free).min(16));
        now >= self.last + doubled.min(rule.longest_wait)
    }

    /// What is left of it by now.
    fn after(self, rule: &Rule, now: Instant) -> Self {
        let turns = now.saturating_duration_since(self.since).as_millis() / rule.forgets.as_millis().max(1);
        let turns = u32::try_from(turns).unwrap_or(u32::MAX).min(self.wrong);
        Self { wrong: self.wrong - turns, since: self.since + rule.forgets.saturating_mul(turns), ..self }
    }

    fn add(&mut self, rule: &Rule, now: Instant) {
        *self = self.after(rule, now);
        if self.wrong == 0 {
            self.since = now;
        }
        self.wrong = self.wrong.saturating_add(1);
        self.last = now;
    }

    /// Takes back a try that began `at`, where the one before it was at `before`.
    fn take_back(&mut self, at: Instant, before: Instant) {
        self.wrong = self.wrong.saturating_sub(1);
        if self.last == at {
            self.last = before;
        }
    }
}

impl Counts {
    fn find(&mut self, key: u64, now: Instant) -> Option<Count> {
        let known = self.recent.contains_key(&key) || self.old.contains_key(&key);
        known.then(|| *self.at(key, now))
    }

    fn at(&mut self, key: u64, now: Instant) -> &mut Count {
        if self.recent.len() >= self.half && !self.recent.contains_key(&key) {
            self.old = std::mem::take(&mut self.recent);
        }
        let kept = self.old.remove(&key);
        self.recent.entry(key).or_insert_with(|| kept.unwrap_or(Count { wrong: 0, since: now, last: now }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn attempts() -> Attempts {
        Attempts::new(FailedLogins {
            per_user_and_address: 5,
            per_user: 20,
            per_address: 50,
            longest_wait: Duration::from_secs(60),
        })
    }

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    fn try_as(attempts: &mut Attempts, user: &str, from: Option<IpAddr>, how: Settled, now: Instant) -> bool {
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
            while try_as(&mut attempts, "alice", address(1), Settled::Wrong, now) {
                allowed.push(second);
            }
        }
        // After a minute one is forgotten, so that the last wait is as long as the one before, not twice as long.
        assert_eq!(allowed, [0, 0, 0, 0, 0, 1, 3, 7, 15, 31, 60, 92, 124, 180]);
        let later = start + 3600 * SECOND;
        let free = (0..10).filter(|_| try_as(&mut attempts, "alice", address(1), Settled::Wrong, later));
        assert_eq!(free.count(), 5, "forgotten");
    }

    #[test]
    fn tries_under_way_count_and_what_nobody_could_tell_does_not() {
        let (mut attempts, now) = (attempts(), Instant::now());
        let user = UserName::from("alice");
        let under_way: Vec<_> = (0..9).filter_map(|_| attempts.begin(&user, address(1), now).ok()).collect();
        assert_eq!(under_way.len(), 5);
        for tried in under_way {
            attempts.settle(tried, Settled::Untold, now);
        }
        for _ in 0..100 {
            assert!(try_as(&mut attempts, "alice", address(1), Settled::Untold, now));
            assert!(try_as(&mut attempts, "bob", address(1), Settled::Right, now));
        }
    }

    #[test]
    fn one_address_has_so_many_under_way_and_those_that_were_right_are_taken_back() {
        let (mut attempts, now) = (attempts(), Instant::now());
        for how in [Settled::Right, Settled::Untold, Settled::Wrong] {
            let names = (0..100).map(|n| UserName::from(format!("{how:?}{n}").as_str()));
            let under_way: Vec<_> =
                names.filter_map(|name| attempts.begin(&name, address(1), now).ok()).collect();
            assert_eq!(under_way.len(), 50, "{how:?}");
            assert!(attempts.begin(&"other".into(), address(2), now).is_ok(), "another address");
            under_way.into_iter().for_each(|tried| attempts.settle(tried, how, now));
        }
        assert!(attempts.begin(&"other".into(), address(1), now).is_err(), "fifty were wrong");
    }

    /// What somebody who only guesses is told, while others log in as `user`, or nobody does.
    fn guesses_beside_logins(user: &str, logs_in: bool) -> Vec<bool> {
        let (mut attempts, start) = (attempts(), Instant::now());
        let mut told = Vec::new();
        for second in 0..300_u32 {
            let now = start + second * SECOND;
            if logs_in {
                let _tried = try_as(&mut attempts, user, address(1), Settled::Right, now);
            }
            for n in 0..second % 7 {
                let begun = attempts.begin(&user.into(), address(1), now + n * SECOND / 10);
                told.push(begun.is_ok_and(|tried| {
                    let announced = !tried.is_unannounced();
                    attempts.settle(tried, Settled::Wrong, now + n * SECOND / 10);
                    announced
                }));
            }
            if second % 60 > 30 {
                for n in 0..60 {
                    let _tried = try_as(&mut attempts, &format!("u{n}"), address(1), Settled::Wrong, now);
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
        assert!(try_as(&mut attempts, "alice", address(200), Settled::Right, start));
        let guesses = |attempts: &mut Attempts, now| {
            (0..100).filter(|from| try_as(attempts, "alice", address(*from), Settled::Wrong, now)).count()
        };
        assert_eq!(guesses(&mut attempts, start), 20);
        assert_eq!(guesses(&mut attempts, start + SECOND), 1);
        assert!(!try_as(&mut attempts, "alice", address(150), Settled::Right, start), "not known there");
        assert!(try_as(&mut attempts, "alice", address(200), Settled::Right, start));
        assert!(try_as(&mut attempts, "bob", address(1), Settled::Right, start));
    }

    #[test]
    fn one_address_guesses_many_users_no_faster() {
        let (mut attempts, start) = (attempts(), Instant::now());
        assert!(try_as(&mut attempts, "known", address(1), Settled::Right, start));
        let guesses = |attempts: &mut Attempts, from: Option<IpAddr>| {
            let wrong = |n: &u32| try_as(attempts, &format!("u{n}"), from, Settled::Wrong, start);
            (0..100).filter(wrong).count()
        };
        assert_eq!(guesses(&mut attempts, address(1)), 50);
        assert_eq!(guesses(&mut attempts, address(2)), 50);
        assert!(!try_as(&mut attempts, "new", address(1), Settled::Right, start));
        assert!(try_as(&mut attempts, "known", address(1), Settled::Right, start));
        assert!(
            try_as(&mut attempts, "new", address(1), Settled::Right, start + 2 * SECOND),
            "never for long"
        );
        let six = |last: &str| Some(format!("2001:db8::{last}").parse().unwrap());
        assert_eq!(guesses(&mut attempts, six("1")), 50);
        assert!(!try_as(&mut attempts, "new", six("ffff"), Settled::Right, start), "the same network");
        let mapped = Some("::ffff:10.0.0.2".parse().unwrap());
        assert!(!try_as(&mut attempts, "new", mapped, Settled::Right, start), "the same address");
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
        let (mut attempts, now) = (Attempts::new(limits), Instant::now());
        assert!((0..1000).all(|_| try_as(&mut attempts, "alice", address(1), Settled::Wrong, now)));
    }

    #[test]
    fn a_flood_of_users_and_addresses_takes_no_more_memory_than_there_is() {
        const FLOOD: u32 = 100_000;
        let (mut attempts, now) = (attempts(), Instant::now());
        while try_as(&mut attempts, "alice", address(1), Settled::Wrong, now) {}
        let (mut most, mut room) = (0, 0);
        for n in 0..FLOOD {
            let from = IpAddr::from(u32::to_be_bytes(0x2000_0000 + n));
            assert!(try_as(&mut attempts, &format!("u{n}"), Some(from), Settled::Wrong, now));
            let Counts { recent, old, .. } = &attempts.counts;
            most = most.max(recent.len() + old.len());
            room = room.max(recent.capacity() + old.capacity());
            if n % 1000 == 0 {
                assert!(!try_as(&mut attempts, "alice", address(1), Settled::Wrong, now), "after {n} others");
            }
        }
        assert!(most > ENTRIES / 2 && most <= ENTRIES, "{most} entries");
        assert!(room <= 2 * ENTRIES, "room for {room} entries");
    }

    #[test]
    fn memory_is_bounded_and_who_goes_on_guessing_is_not_forgotten() {
        let (mut attempts, now) = (attempts(), Instant::now());
        attempts.counts.half = 64;
        while try_as(&mut attempts, "alice", address(1), Settled::Wrong, now) {}
        for n in 0..1000 {
            let from = IpAddr::from(u32::to_be_bytes(n));
            assert!(try_as(&mut attempts, &format!("u{n}"), Some(from), Settled::Wrong, now));
            assert!(attempts.counts.recent.len() + attempts.counts.old.len() <= 128);
            assert!(!try_as(&mut attempts, "alice", address(1), Settled::Wrong, now), "after {n} others");
        }
    }
}
