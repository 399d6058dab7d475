//! How long simple tokens live on each member: `cluster.token_ttl`, corrected by what members do.
//!
//! etcd does not put `--auth-token-ttl` on the wire, and the configured value may be wrong in both directions. A token may also
//! be lost for another reason than its age: its member restarted, its user's password was set, auth was turned off and on.
//!
//! Owns: the lifetime assumed of each member's tokens, and when it changes. Must not know: tokens, how a token is touched.
//! Pure: the caller passes the time.
//! Invariants: the assumed lifetime is between [`SWEEP`] and the configured one; one lost token never shortens it, nor do losses
//! with a disturbance of the member between them; a shortened lifetime is tested again and again, and a token that outlives it
//! lengthens it, so that every wrong conclusion ends.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::identity::MemberId;

/// etcd counts a token's life in whole seconds, and removes dead tokens once a second.
pub(super) const SWEEP: Duration = Duration::from_secs(1);
/// Shorter intervals between touches of one token would load members for lifetimes that nobody configures.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(500);
/// How long a shortened lifetime is left alone before it is tested; after each shortening and each failed test twice as long.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// The assumed lifetimes, by member: `--auth-token-ttl` is a flag of each member's own.
#[derive(Debug)]
pub(super) struct Lifetimes {
    configured: Duration,
    members: HashMap<MemberId, Assumed>,
}

/// What is assumed of one member's tokens.
#[derive(Clone, Copy, Debug)]
struct Assumed {
    ttl: Duration,
    /// A token certainly lived this long without use since the last disturbance.
    survived: Duration,
    /// Tokens that were last seen alive before then may have been lost with the member's process.
    disturbed_at: Option<Instant>,
    /// A token that was found dead younger than `ttl`. The next one that is found dead so confirms it.
    early_death: Option<EarlyDeath>,
    /// From then on a token is left without use for longer than `ttl`, to see whether it outlives it.
    test_at: Instant,
    patience: Duration,
}

#[derive(Clone, Copy, Debug)]
struct EarlyDeath {
    unused: Duration,
    /// Tokens that were issued later have this serial or a higher one. Others may have died of the same cause.
    next_serial: u64,
}

/// A token that a member did not know any more.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeadToken {
    /// How long it had not been used.
    pub(super) unused: Duration,
    /// Its serial.
    pub(super) serial: u64,
    /// The serial that the next token to be issued will have.
    pub(super) next_serial: u64,
}

/// When the tokens of one member are touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// How long a token lives after its last use, as far as is known.
    pub(super) ttl: Duration,
    /// After how long without use a token is touched.
    pub(super) interval: Duration,
    /// After how long without use the one token is touched that tests whether tokens outlive `ttl`; none while no test is due.
    pub(super) test_age: Option<Duration>,
}

impl Lifetimes {
    pub(super) fn new(configured: Duration) -> Self {
        Self { configured, members: HashMap::new() }
    }

    /// How long a token lives on this member after its last use, as far as is known.
    pub(super) fn ttl(&self, member: MemberId) -> Duration {
        self.members.get(&member).map_or(self.configured, |assumed| assumed.ttl)
    }

    /// When this member's tokens are touched.
    pub(super) fn plan(&self, member: MemberId, now: Instant) -> Plan {
        let ttl = self.ttl(member);
        let assumed = self.members.get(&member);
        // So far above that a survivor has certainly outlived `ttl`, and well below the age at which a token of the configured
        // lifetime dies.
        let age = (ttl + ttl / 2 + SWEEP).min(self.configured * 5 / 6);
        let is_tested = assumed.is_some_and(|assumed| assumed.test_at <= now && age > ttl + SWEEP);
        let test_age = is_tested.then_some(age);
        Plan { ttl, interval: (ttl / 3).max(SHORTEST_INTERVAL), test_age }
    }

    /// The shortest of all assumed lifetimes.
    pub(super) fn shortest(&self) -> Duration {
        self.members.values().map(|assumed| assumed.ttl).fold(self.configured, Duration::min)
    }

    /// A token was alive after it had not been used for `unused`. Whether that lengthened the assumed lifetime.
    pub(super) fn survived(&mut self, member: MemberId, unused: Duration, now: Instant) -> bool {
        let configured = self.configured;
        let assumed = self.assumed(member, now);
        let certain = unused.saturating_sub(SWEEP);
        assumed.survived = assumed.survived.max(certain);
        // shortened → no longer suspected: this token was older.
        assumed.early_death = assumed.early_death.filter(|death| death.unused > certain);
        if certain <= assumed.ttl {
            return false;
        }
        // shortened → longer, at last as configured. A third of twice the old lifetime is less than this token lived.
        let doubled = assumed.ttl * 2;
        assumed.ttl = if doubled < configured * 4 / 5 { doubled } else { configured };
        assumed.test_at = now;
        true
    }

    /// A token was found dead. Whether that shortened the assumed lifetime.
    pub(super) fn died(&mut self, member: MemberId, dead: DeadToken, now: Instant) -> bool {
        let assumed = self.assumed(member, now);
        if dead.unused >= assumed.ttl {
            // It was due, or it was the test's: tested → left alone for longer.
            assumed.wait_longer(now);
            return false;
        }
        let is_disturbed =
            assumed.disturbed_at.is_some_and(|at| now.saturating_duration_since(at) < dead.unused);
        if dead.unused < SWEEP || dead.unused <= assumed.survived || is_disturbed {
            return false;
        }
        match assumed.early_death {
            // Issued before the first was found dead: lost with it.
            Some(first) if dead.serial < first.next_serial => false,
            // suspected → shortened. The longer of the two: the other may have been lost otherwise.
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

    /// This member's tokens may have been lost, and it may have other flags now: its process or its connection is another one, or
    /// auth was turned on or off.
    pub(super) fn disturbed(&mut self, member: MemberId, now: Instant) {
        self.assumed(member, now).disturbed(now);
    }

    /// etcd refused a password: the user's tokens may have died with the one before.
    pub(super) fn users_changed(&mut self) {
        self.members.values_mut().for_each(|assumed| assumed.early_death = None);
    }

    /// The same as [`Lifetimes::disturbed`] of all members.
    pub(super) fn all_disturbed(&mut self, now: Instant) {
        self.members.values_mut().for_each(|assumed| assumed.disturbed(now));
    }

    fn assumed(&mut self, member: MemberId, now: Instant) -> &mut Assumed {
        let ttl = self.configured;
        self.members.entry(member).or_insert(Assumed {
            ttl,
            survived: Duration::ZERO,
            disturbed_at: None,
            early_death: None,
            test_at: now,
            patience: PATIENCE.0,
        })
    }
}

impl Assumed {
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

    /// What happens to tokens, each issued after the one before was found dead.
    #[derive(Clone, Copy)]
    enum Event {
        Alive(f64),
        Dead(f64),
        /// Of a token that was issued before the last death.
        DeadWithIt(f64),
        /// The member restarted since the token was last seen alive.
        DeadAfterRestart(f64),
        Disturbed,
        PasswordRefused,
    }
    use Event::{Alive, Dead, DeadAfterRestart, DeadWithIt, Disturbed, PasswordRefused};

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn ttl_after(events: &[Event]) -> f64 {
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

    /// The ratchet: a false lesson ends by tokens that live longer, each test touching one token late.
    #[test]
    fn a_lifetime_that_was_shortened_wrongly_grows_back() {
        let mut lifetimes = Lifetimes::new(seconds(300.0));
        let mut now = Instant::now();
        for serial in 0..2 {
            let dead = DeadToken { unused: SWEEP, serial, next_serial: serial + 1 };
            lifetimes.died(A, dead, now);
        }
        assert_eq!(lifetimes.plan(A, now), Plan { ttl: SWEEP, interval: SHORTEST_INTERVAL, test_age: None });
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

    /// Where the configured lifetime is too long, tests cost one login each, ever more rarely.
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
            Plan { ttl: seconds(300.0), interval: seconds(100.0), test_age: None }
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
