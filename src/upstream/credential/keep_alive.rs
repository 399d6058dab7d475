//! Simple tokens are touched, not renewed: use on a member extends them there, so what is in use but idle is used.
//!
//! Owns: which tokens are due, and how long a token lives (told, and learned downwards, as it is not on the wire).
//! Must not know: who uses an identity, how a login is made.
//! Invariants: a token in use is touched on its own member at most a third of its life after its last use, give or take
//! a round; a member that hangs delays no other member's touches; logins are never made here.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt as _;

use super::wire::{self, Touched};
use super::{Credentials, PasswordIdentity, Token, lock};
use crate::identity::MemberId;
use crate::tasks::{Owned, Tasks};
use crate::upstream::membership::ControlChannels;

/// etcd counts a token's life in whole seconds, and sweeps the dead once a second.
const SWEEP: Duration = Duration::from_secs(1);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(500);
/// How often it is looked which tokens are due: a quarter of the shortest interval, within these.
const ROUNDS: (Duration, Duration) = (Duration::from_millis(125), Duration::from_secs(5));
/// A touch that takes longer has told nothing.
const LONGEST_TOUCH: Duration = Duration::from_secs(2);
/// Touches under way per member.
const AT_A_TIME: usize = 16;

/// How long tokens live, by member: a flag of each member's own.
#[derive(Debug)]
pub(super) struct Lifetimes {
    told: Duration,
    learned: Mutex<HashMap<MemberId, Learned>>,
}

#[derive(Clone, Copy, Debug)]
struct Learned {
    ttl: Duration,
    /// For so long a token certainly lived without use.
    survived: Duration,
}

/// The loop that touches tokens.
pub(super) struct KeepAlive {
    credentials: Arc<Credentials>,
    channels: ControlChannels,
    tasks: Tasks,
    under_way: HashMap<MemberId, Owned>,
}

type Due = (Arc<PasswordIdentity>, Token);

impl Lifetimes {
    pub(super) fn new(told: Duration) -> Self {
        Self { told, learned: Mutex::default() }
    }

    /// How long a token lives on this member after its last use, as far as we know.
    pub(super) fn ttl(&self, member: MemberId) -> Duration {
        lock(&self.learned).get(&member).map_or(self.told, |learned| learned.ttl)
    }

    /// After what time without use a token is touched.
    fn interval(&self, member: MemberId) -> Duration {
        (self.ttl(member) / 3).max(SHORTEST_INTERVAL)
    }

    fn round(&self) -> Duration {
        let shortest = lock(&self.learned).values().map(|learned| learned.ttl).fold(self.told, Duration::min);
        (shortest / 3 / 4).clamp(ROUNDS.0, ROUNDS.1)
    }

    /// A token was alive after `unused` without use.
    fn lived(&self, member: MemberId, unused: Duration) {
        let survived = unused.saturating_sub(SWEEP);
        let mut all = lock(&self.learned);
        let learned = all.entry(member).or_insert(Learned { ttl: self.told, survived });
        learned.survived = learned.survived.max(survived);
    }

    /// A token was dead after `unused` without use. Of old age, unless tokens have lived longer (then its member was
    /// restarted, or its user changed) or none could be so short.
    pub(super) fn died(&self, member: MemberId, unused: Duration) {
        let mut all = lock(&self.learned);
        let learned = all.entry(member).or_insert(Learned { ttl: self.told, survived: Duration::ZERO });
        if unused >= SWEEP && unused > learned.survived && unused < learned.ttl {
            learned.ttl = unused;
            tracing::info!(%member, unused_ms = unused.as_millis(), "tokens die sooner than known, touching more often");
        }
    }
}

impl KeepAlive {
    pub(super) fn new(credentials: Arc<Credentials>, channels: ControlChannels, tasks: Tasks) -> Self {
        Self { credentials, channels, tasks, under_way: HashMap::new() }
    }

    /// Runs until dropped, and its touches with it.
    pub(super) async fn run(mut self) {
        loop {
            tokio::time::sleep(self.credentials.shared.lifetimes.round()).await;
            for (member, due) in self.due() {
                self.touch_all(member, due);
            }
        }
    }

    /// The tokens to touch now. Identities that nobody uses lose theirs; so does one that was silent for a whole life.
    fn due(&self) -> BTreeMap<MemberId, Vec<Due>> {
        let lifetimes = &self.credentials.shared.lifetimes;
        let mut due: BTreeMap<MemberId, Vec<Due>> = BTreeMap::new();
        for identity in self.credentials.known() {
            let tokens = identity.tokens();
            if !identity.is_in_use() && !tokens.is_empty() {
                identity.forget();
                continue;
            }
            for (&member, token) in tokens.iter() {
                let unused = token.unused_for();
                if unused >= lifetimes.ttl(member) {
                    identity.drop_token(member, token);
                } else if unused >= jittered(lifetimes.interval(member), token) {
                    due.entry(member).or_default().push((Arc::clone(&identity), token.clone()));
                }
            }
        }
        due
    }

    fn touch_all(&mut self, member: MemberId, due: Vec<Due>) {
        let Some(channel) = self.channels.load().get(&member).cloned() else { return };
        if self.under_way.get(&member).is_some_and(|touches| !touches.is_finished()) {
            return;
        }
        let credentials = Arc::clone(&self.credentials);
        let limit = credentials.shared.lifetimes.interval(member).min(LONGEST_TOUCH);
        let touches = async move {
            futures_util::stream::iter(due)
                .for_each_concurrent(AT_A_TIME, |(identity, token)| {
                    let (credentials, channel) = (&credentials, channel.clone());
                    async move {
                        let unused = token.unused_for();
                        let touched = tokio::time::timeout(limit, wire::touch(channel, &token));
                        let touched = touched.await.unwrap_or(Touched::Unknown);
                        credentials.take_in(&identity, member, &token, unused, touched);
                    }
                })
                .await;
        };
        self.under_way.insert(member, self.tasks.spawn("token touches", touches));
    }
}

impl Credentials {
    fn take_in(
        &self,
        identity: &PasswordIdentity,
        member: MemberId,
        token: &Token,
        unused: Duration,
        touched: Touched,
    ) {
        let counters = &self.shared.counters;
        let counter = match touched {
            Touched::Alive => {
                token.mark_touched();
                self.shared.lifetimes.lived(member, unused);
                &counters.touches_alive
            }
            Touched::Dead => {
                if identity.drop_token(member, token) && !token.is_adopted() {
                    self.shared.lifetimes.died(member, unused);
                }
                &counters.touches_dead
            }
            Touched::Unknown => &counters.touches_unknown,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Between four fifths and the whole of `interval`, by token, so that those obtained together are not touched together.
fn jittered(interval: Duration, token: &Token) -> Duration {
    let fifth = interval / 5;
    // The golden ratio spreads successive serials evenly.
    let spread = token.serial().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
    let share = u32::try_from(spread).unwrap_or_default();
    interval - fifth * share / 256
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(0xa);

    fn after(events: &[(bool, f64)]) -> f64 {
        let lifetimes = Lifetimes::new(Duration::from_secs(300));
        for &(alive, unused) in events {
            let unused = Duration::from_secs_f64(unused);
            if alive { lifetimes.lived(A, unused) } else { lifetimes.died(A, unused) }
        }
        assert_eq!(
            lifetimes.ttl(MemberId(0xb)),
            Duration::from_secs(300),
            "each member has a flag of its own"
        );
        lifetimes.ttl(A).as_secs_f64()
    }

    #[test]
    fn a_death_teaches_only_what_no_survival_contradicts() {
        assert_eq!(after(&[]), 300.0);
        assert_eq!(after(&[(false, 90.0)]), 90.0);
        assert_eq!(after(&[(false, 90.0), (false, 30.0), (false, 60.0)]), 30.0);
        assert_eq!(after(&[(true, 100.0), (false, 90.0)]), 300.0, "the member was restarted");
        assert_eq!(after(&[(true, 3.0), (false, 2.5)]), 2.5, "etcd sweeps once a second");
        assert_eq!(after(&[(false, 0.9)]), 300.0, "no token's life is so short");
        assert_eq!(after(&[(false, 400.0)]), 300.0);
    }

    #[test]
    fn the_interval_follows_what_was_learned() {
        let lifetimes = Lifetimes::new(Duration::from_secs(300));
        assert_eq!((lifetimes.interval(A), lifetimes.round()), (Duration::from_secs(100), ROUNDS.1));
        lifetimes.died(A, Duration::from_secs(6));
        assert_eq!((lifetimes.interval(A), lifetimes.round()), (Duration::from_secs(2), SHORTEST_INTERVAL));
        lifetimes.died(A, SWEEP);
        assert_eq!((lifetimes.interval(A), lifetimes.round()), (SHORTEST_INTERVAL, ROUNDS.0));
    }
}
