//! The TTL of simple tokens on each member: `cluster.token_ttl`, corrected by observation.
//!
//! etcd does not send `--auth-token-ttl` to clients, and the configured value may be too long or too short. A
//! token may also be lost for a reason unrelated to age: the member restarted, the user's password was
//! changed, or auth was turned off and on.
//!
//! Owns: the assumed TTL of each member's tokens, and changes to the assumed TTL. Must not know: tokens, how
//! to touch a token. Pure: the caller passes the time.
//! Invariants: the assumed TTL is between [`SWEEP`] and the configured TTL; a single lost token never
//! shortens the assumed TTL, nor do losses with a disturbance of the member in between; a shortened TTL is
//! tested repeatedly, and a token outliving the assumed TTL lengthens it, so that every wrong conclusion is
//! corrected.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use keyward_etcd::identity::MemberId;

/// etcd counts a token's life in whole seconds, and removes dead tokens once a second.
pub(super) const SWEEP: Duration = Duration::from_secs(1);
/// Shortest interval between touches of one token. Shorter intervals would load members for the sake of TTLs
/// that are never configured.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(500);
/// First and longest waiting time before a shortened TTL is tested. Each shortening and each failed test
/// doubles the waiting time.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// The assumed TTLs by member, because `--auth-token-ttl` is a flag of each member.
#[derive(Debug)]
pub(super) struct Lifetimes {
    configured: Duration,
    members: HashMap<MemberId, AssumedTtl>,
}

/// The assumptions about one member's tokens.
#[derive(Clone, Copy, Debug)]
struct AssumedTtl {
    ttl: Duration,
    /// A token certainly lived so long without use since the last disturbance.
    survived: Duration,
    /// Time of the last disturbance. Tokens last seen alive before the disturbance may have been lost with
    /// the member's process.
    disturbed_at: Option<Instant>,
    /// A token found dead at an age below `ttl`. A second early death confirms a shorter TTL.
    early_death: Option<EarlyDeath>,
    /// From this time on, one token is left without use for longer than `ttl`, to test for a longer TTL.
    test_at: Instant,
    patience: Duration,
}

#[derive(Clone, Copy, Debug)]
struct EarlyDeath {
    unused: Duration,
    /// Tokens issued after the early death have this serial number or a higher number. Older tokens may have
    /// died of the same cause.
    next_serial: u64,
}

/// A token no longer known to a member.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeadToken {
    /// Time since the token's last use.
    pub(super) unused: Duration,
    /// The token's serial number.
    pub(super) serial: u64,
    /// The serial number of the next token to be issued.
    pub(super) next_serial: u64,
}

/// The schedule for touching one member's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TouchPlan {
    /// The TTL of a token after its last use, as far as known.
    pub(super) ttl: Duration,
    /// Time without use after which a token is touched.
    pub(super) interval: Duration,
    /// Time without use after which the test token is touched, to test for a TTL longer than `ttl`. None
    /// while no test is due.
    pub(super) test_age: Option<Duration>,
}

impl Lifetimes {
    pub(super) fn new(configured: Duration) -> Self {
        Self { configured, members: HashMap::new() }
    }

    /// The TTL of a token on the member after its last use, as far as known.
    pub(super) fn ttl(&self, member: MemberId) -> Duration {
        self.members.get(&member).map_or(self.configured, |assumed| assumed.ttl)
    }

    /// Returns the schedule for touching the member's tokens.
    pub(super) fn plan(&self, member: MemberId, now: Instant) -> TouchPlan {
        let ttl = self.ttl(member);
        let assumed = self.members.get(&member);
        // Far enough above `ttl` for a survivor to prove a longer TTL, and well below the age of death under
        // the configured TTL.
        let age = (ttl + ttl / 2 + SWEEP).min(self.configured * 5 / 6);
        let is_tested = assumed.is_some_and(|assumed| assumed.test_at <= now && age > ttl + SWEEP);
        let test_age = is_tested.then_some(age);
        TouchPlan { ttl, interval: (ttl / 3).max(SHORTEST_INTERVAL), test_age }
    }

    /// The shortest of all assumed TTLs.
    pub(super) fn shortest(&self) -> Duration {
        self.members.values().map(|assumed| assumed.ttl).fold(self.configured, Duration::min)
    }

    /// Records that a token was alive after `unused` without use. Returns true if the assumed TTL was
    /// lengthened.
    pub(super) fn survived(&mut self, member: MemberId, unused: Duration, now: Instant) -> bool {
        let configured = self.configured;
        let assumed = self.assumed(member, now);
        let certain = unused.saturating_sub(SWEEP);
        assumed.survived = assumed.survived.max(certain);
        // suspected → no longer suspected: the surviving token was older.
        assumed.early_death = assumed.early_death.filter(|death| death.unused > certain);
        if certain <= assumed.ttl {
            return false;
        }
        // shortened → longer, finally as configured. A third of the doubled TTL is less than the survivor's
        // age.
        let doubled = assumed.ttl * 2;
        assumed.ttl = if doubled < configured * 4 / 5 { doubled } else { configured };
        assumed.test_at = now;
        true
    }

    /// Records that a token was found dead. Returns true if the assumed TTL was shortened.
    pub(super) fn died(&mut self, member: MemberId, dead: DeadToken, now: Instant) -> bool {
        let assumed = self.assumed(member, now);
        if dead.unused >= assumed.ttl {
            // The token's TTL had passed, or the token was the test's: tested → left alone for longer.
            assumed.wait_longer(now);
            return false;
        }
        let is_disturbed =
            assumed.disturbed_at.is_some_and(|at| now.saturating_duration_since(at) < dead.unused);
        if dead.unused < SWEEP || dead.unused <= assumed.survived || is_disturbed {
            return false;
        }
        match assumed.early_death {
            // Issued before the first death: lost with the first token.
            Some(first) if dead.serial < first.next_serial => false,
            // suspected → shortened. Take the longer age: the younger token may have died of a different
            // cause.
            Some(first) => {
                assumed.ttl = first.unused.max(dead.unused);
                assumed.early_death = None;
                assumed.wait_longer(now);
                true
            }
            // as assumed → suspected.
            None => {
                let DeadToken { unused, next_serial, .. } = dead;
                assumed.early_death = Some(EarlyDeath { unused, next_serial });
                false
            }
        }
    }

    /// Records that the member's tokens may have been lost and the member's flags may have changed: the
    /// process or the connection was replaced, or auth was turned on or off.
    pub(super) fn disturbed(&mut self, member: MemberId, now: Instant) {
        self.assumed(member, now).disturbed(now);
    }

    /// Records that etcd refused a password: the user's tokens may have died with the previous password.
    pub(super) fn users_changed(&mut self) {
        self.members.values_mut().for_each(|assumed| assumed.early_death = None);
    }

    /// Like [`Lifetimes::disturbed`], for all members.
    pub(super) fn all_disturbed(&mut self, now: Instant) {
        self.members.values_mut().for_each(|assumed| assumed.disturbed(now));
    }

    fn assumed(&mut self, member: MemberId, now: Instant) -> &mut AssumedTtl {
        let ttl = self.configured;
        self.members.entry(member).or_insert(AssumedTtl {
            ttl,
            survived: Duration::ZERO,
            disturbed_at: None,
            early_death: None,
            test_at: now,
            patience: PATIENCE.0,
        })
    }
}

impl AssumedTtl {
    fn disturbed(&mut self, now: Instant) {
        (self.early_death, self.survived, self.disturbed_at) = (None, Duration::ZERO, Some(now));
    }

    fn wait_longer(&mut self, now: Instant) {
        self.test_at = now + self.patience;
        self.patience = (self.patience * 2).min(PATIENCE.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(0xa);
    const B: MemberId = MemberId(0xb);

    /// An event in the life of tokens; each token is issued after the previous token was found dead.
    #[derive(Clone, Copy)]
    enum TokenEvent {
        Alive(f64),
        Dead(f64),
        /// Death of a token issued before the last death.
        DeadWithIt(f64),
        /// Death of a token after a restart of the member; the restart happened after the token was last seen
        /// alive.
        DeadAfterRestart(f64),
        Disturbed,
        PasswordRefused,
    }
    use TokenEvent::{Alive, Dead, DeadAfterRestart, DeadWithIt, Disturbed, PasswordRefused};

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn ttl_after(events: &[TokenEvent]) -> f64 {
        let mut lifetimes = Lifetimes::new(seconds(300.0));
        let mut now = Instant::now();
        let mut serial = 0;
        for &event in events {
            if let Alive(unused) | Dead(unused) = event {
                now += seconds(unused);
            }
            match event {
                Alive(unused) => {
                    lifetimes.survived(A, seconds(unused), now);
                }
                Dead(unused) => {
                    let dead = DeadToken { unused: seconds(unused), serial, next_serial: serial + 1 };
                    lifetimes.died(A, dead, now);
                    serial += 1;
                }
                DeadWithIt(unused) => {
                    let dead = DeadToken { unused: seconds(unused), serial: serial - 1, next_serial: serial };
                    lifetimes.died(A, dead, now);
                }
                DeadAfterRestart(unused) => {
                    now += seconds(unused / 2.0);
                    lifetimes.disturbed(A, now);
                    now += seconds(unused / 2.0);
                    let dead = DeadToken { unused: seconds(unused), serial, next_serial: serial + 1 };
                    lifetimes.died(A, dead, now);
                    serial += 1;
                }
                Disturbed => lifetimes.disturbed(A, now),
                PasswordRefused => lifetimes.users_changed(),
            }
        }
        assert_eq!(lifetimes.ttl(B), seconds(300.0), "each member has a flag of its own");
        lifetimes.ttl(A).as_secs_f64()
    }

    #[test]
    fn two_tokens_in_a_row_that_die_early_shorten_the_lifetime_and_nothing_else_does() {
        for (events, expected, why) in [
            (&[][..], 300.0, "nothing happened"),
            (&[Dead(90.0)], 300.0, "one may be lost otherwise"),
            (&[Dead(90.0), Dead(80.0)], 90.0, "the longer of the two"),
            (&[Dead(90.0), DeadWithIt(80.0), DeadWithIt(3.0)], 300.0, "many are lost at once"),
            (&[Dead(90.0), Disturbed, Dead(80.0)], 300.0, "two restarts"),
            (&[Dead(2.0), Disturbed, Dead(2.0), Disturbed, Dead(2.0)], 300.0, "three restarts"),
            (
                &[DeadAfterRestart(2.0), Dead(2.0), Disturbed, DeadAfterRestart(2.0), Dead(2.0)],
                300.0,
                "either is seen first",
            ),
            (&[DeadAfterRestart(2.0), Dead(90.0), Dead(90.0)], 90.0, "a restart, and then a short lifetime"),
            (&[Dead(90.0), PasswordRefused, Dead(80.0)], 300.0, "a password was changed"),
            (&[Dead(90.0), Alive(95.0), Dead(80.0)], 300.0, "a third lived longer"),
            (&[Dead(90.0), Alive(50.0), Dead(80.0)], 90.0, "a third was younger"),
            (&[Alive(100.0), Dead(90.0), Dead(90.0)], 300.0, "others lived longer"),
            (&[Alive(100.0), Disturbed, Dead(90.0), Dead(90.0)], 90.0, "its flags may have changed"),
            (&[Alive(3.0), Dead(2.5), Dead(2.5)], 2.5, "etcd sweeps once a second"),
            (&[Dead(0.9), Dead(0.9)], 300.0, "no lifetime is so short"),
            (&[Dead(400.0), Dead(400.0)], 300.0, "older than is assumed"),
            (&[Dead(90.0), Dead(90.0), Dead(30.0), Dead(28.0)], 30.0, "step by step"),
        ] {
            assert_eq!(ttl_after(events), expected, "{why}");
        }
    }

    /// Prevents a ratchet: a wrongly shortened TTL is corrected by tokens that live longer; each test touches
    /// one token late.
    #[test]
    fn a_lifetime_that_was_shortened_wrongly_grows_back() {
        let mut lifetimes = Lifetimes::new(seconds(300.0));
        let mut now = Instant::now();
        for serial in 0..2 {
            let dead = DeadToken { unused: SWEEP, serial, next_serial: serial + 1 };
            lifetimes.died(A, dead, now);
        }
        assert_eq!(
            lifetimes.plan(A, now),
            TouchPlan { ttl: SWEEP, interval: SHORTEST_INTERVAL, test_age: None }
        );
        let begun = now;
        now += PATIENCE.0;
        let mut tests = 0_u32;
        while let Some(age) = lifetimes.plan(A, now).test_age {
            now += age;
            tests += 1;
            assert!(lifetimes.survived(A, age + SWEEP / 10, now), "after {tests} tests");
            assert!(tests < 20);
        }
        assert_eq!((lifetimes.ttl(A), tests), (seconds(300.0), 8));
        assert!(now - begun < seconds(900.0), "{:?}", now - begun);
        assert_eq!(lifetimes.plan(A, now).interval, seconds(100.0));
    }

    /// If the configured TTL is too long, each test costs one login, with growing time between tests.
    #[test]
    fn a_lifetime_that_is_truly_short_is_tested_ever_more_rarely() {
        let mut lifetimes = Lifetimes::new(seconds(300.0));
        let mut now = Instant::now();
        for serial in 0..2 {
            lifetimes.died(A, DeadToken { unused: seconds(5.0), serial, next_serial: serial + 1 }, now);
        }
        let end = now + seconds(24.0 * 3600.0);
        let mut tests = 0;
        while now < end {
            if let Some(age) = lifetimes.plan(A, now).test_age {
                tests += 1;
                lifetimes.died(
                    A,
                    DeadToken { unused: age, serial: 1000 + tests, next_serial: 1001 + tests },
                    now,
                );
                assert_eq!(lifetimes.ttl(A), seconds(5.0));
            }
            now += seconds(1.0);
        }
        assert!((20..=32).contains(&tests), "{tests} tests a day");
    }

    #[test]
    fn the_interval_is_a_third_of_the_lifetime_within_bounds() {
        let mut lifetimes = Lifetimes::new(seconds(300.0));
        let now = Instant::now();
        assert_eq!(
            lifetimes.plan(A, now),
            TouchPlan { ttl: seconds(300.0), interval: seconds(100.0), test_age: None }
        );
        for serial in 0..2 {
            lifetimes.died(A, DeadToken { unused: seconds(6.0), serial, next_serial: serial + 1 }, now);
        }
        assert_eq!(lifetimes.plan(A, now).interval, seconds(2.0));
        assert_eq!(lifetimes.shortest(), seconds(6.0));
        lifetimes.all_disturbed(now);
        assert_eq!(lifetimes.ttl(A), seconds(6.0), "a restart does not change the flag");
    }
}
