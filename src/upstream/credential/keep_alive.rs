//! Simple tokens are touched, not renewed: use on a member extends them there, so that those in use but idle are used.
//!
//! Owns: which tokens are due, and how many touches a member is sent. Must not know: who uses an identity, how a login is made,
//! how a token's lifetime is learned (`lifetimes`).
//! Invariants: a token in use is touched on its own member at most a third of its life after its last use, give or take
//! a round, unless the member's [`Allowance`] is used up; a member that hangs delays no other member's touches; logins are never
//! made here.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::time::Instant;

use super::lifetimes::{DeadToken, Plan};
use super::wire::{self, Touched};
use super::{Credentials, PasswordIdentity, Shared, Token, lock};
use crate::identity::MemberId;
use crate::tasks::{Owned, Tasks};
use crate::upstream::membership::ControlChannels;

/// How often it is looked which tokens are due: a quarter of the shortest interval, within these.
const ROUNDS: (Duration, Duration) = (Duration::from_millis(125), Duration::from_secs(5));
/// A touch that takes longer has told nothing.
const LONGEST_TOUCH: Duration = Duration::from_secs(2);
/// Touches under way per member.
const AT_A_TIME: usize = 16;
/// One member is sent one touch per this time, for all identities together: 200 a second. That is more than the most identities
/// that are kept (`CredentialSettings::proved`) need at etcd's default lifetime, and next to nothing for a member.
const TOUCH_COST: Duration = Duration::from_millis(5);

/// The loop that touches tokens.
pub(super) struct KeepAlive {
    credentials: Arc<Credentials>,
    channels: ControlChannels,
    tasks: Tasks,
    under_way: HashMap<MemberId, Owned>,
    allowances: HashMap<MemberId, Allowance>,
}

/// How many touches a member may be sent now: unused time adds up for the longest round.
#[derive(Debug)]
struct Allowance {
    saved: Duration,
    at: Instant,
}

/// A token of an identity in use, and how long it was not used.
struct Idle {
    identity: Arc<PasswordIdentity>,
    token: Token,
    unused: Duration,
}

impl KeepAlive {
    pub(super) fn new(credentials: Arc<Credentials>, channels: ControlChannels, tasks: Tasks) -> Self {
        Self { credentials, channels, tasks, under_way: HashMap::new(), allowances: HashMap::new() }
    }

    /// Runs until dropped, and its touches with it.
    pub(super) async fn run(mut self) {
        loop {
            tokio::time::sleep(self.credentials.shared.round()).await;
            let now = Instant::now();
            for (member, idle) in self.idle_tokens() {
                let plan = lock(&self.credentials.shared.lifetimes).plan(member, now);
                let due = due_tokens(plan, member, idle);
                self.touch_all(member, due, plan.interval, now);
            }
        }
    }

    /// The tokens of identities in use, by member. Identities that nobody uses lose theirs.
    fn idle_tokens(&self) -> BTreeMap<MemberId, Vec<Idle>> {
        let mut idle: BTreeMap<MemberId, Vec<Idle>> = BTreeMap::new();
        for identity in self.credentials.known() {
            let tokens = identity.tokens();
            if !identity.is_in_use() && !tokens.is_empty() {
                identity.forget();
                continue;
            }
            for (&member, token) in tokens.iter() {
                let (identity, token, unused) = (Arc::clone(&identity), token.clone(), token.unused_for());
                idle.entry(member).or_default().push(Idle { identity, token, unused });
            }
        }
        idle
    }

    /// Touches as many of `due` as the member's allowance lets, the first ones first.
    fn touch_all(&mut self, member: MemberId, mut due: Vec<Idle>, interval: Duration, now: Instant) {
        let Some(channel) = self.channels.load().get(&member).cloned() else { return };
        if due.is_empty() || self.under_way.get(&member).is_some_and(|touches| !touches.is_finished()) {
            return;
        }
        let allowance = self.allowances.entry(member).or_insert_with(|| Allowance::full(now));
        let postponed = due.split_off(allowance.take(due.len(), now)).len();
        let counters = &self.credentials.shared.counters;
        counters.touches_postponed.fetch_add(u64::try_from(postponed).unwrap_or(u64::MAX), Ordering::Relaxed);
        let credentials = Arc::clone(&self.credentials);
        let limit = interval.min(LONGEST_TOUCH);
        let touches = async move {
            futures_util::stream::iter(due)
                .for_each_concurrent(AT_A_TIME, |Idle { identity, token, .. }| {
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

/// The tokens to touch now, those that were not used for longest first. A token that was silent for a whole life is dropped.
fn due_tokens(plan: Plan, member: MemberId, mut idle: Vec<Idle>) -> Vec<Idle> {
    idle.sort_by_key(|idle| std::cmp::Reverse(idle.unused));
    // One token tests whether tokens live longer. An adopted one was issued elsewhere, and its end would tell nothing.
    let test =
        plan.test_age.and_then(|age| Some((idle.iter().position(|idle| !idle.token.is_adopted())?, age)));
    let mut due = Vec::new();
    for (index, idle) in idle.into_iter().enumerate() {
        let test_age = test.filter(|(tested, _)| *tested == index).map(|(_, age)| age);
        let (touched_at, dropped_at) = match test_age {
            Some(age) => (age, age + plan.interval),
            None => (jittered(plan.interval, &idle.token), plan.ttl),
        };
        if idle.unused >= dropped_at {
            idle.identity.drop_token(member, &idle.token);
        } else if idle.unused >= touched_at {
            due.push(idle);
        }
    }
    due
}

impl Allowance {
    fn full(now: Instant) -> Self {
        Self { saved: ROUNDS.1, at: now }
    }

    /// How many of `wanted` touches may be made now.
    fn take(&mut self, wanted: usize, now: Instant) -> usize {
        self.saved = (self.saved + now.saturating_duration_since(self.at)).min(ROUNDS.1);
        self.at = now;
        let most = usize::try_from(self.saved.as_micros() / TOUCH_COST.as_micros()).unwrap_or(usize::MAX);
        let taken = wanted.min(most);
        self.saved -= TOUCH_COST * u32::try_from(taken).unwrap_or(0);
        taken
    }
}

impl Shared {
    fn round(&self) -> Duration {
        (lock(&self.lifetimes).shortest() / 3 / 4).clamp(ROUNDS.0, ROUNDS.1)
    }

    /// How long a token lives on this member after its last use, as far as is known.
    pub(super) fn token_ttl(&self, member: MemberId) -> Duration {
        lock(&self.lifetimes).ttl(member)
    }

    /// `token` was alive after it had not been used for `unused`.
    pub(super) fn token_survived(&self, member: MemberId, unused: Duration) {
        let mut lifetimes = lock(&self.lifetimes);
        if lifetimes.survived(member, unused, Instant::now()) {
            let ttl_ms = lifetimes.ttl(member).as_millis();
            tracing::info!(%member, ttl_ms, "tokens live longer than was learned, touching less often");
        }
    }

    /// `token` was found dead after it had not been used for `unused`.
    pub(super) fn token_died(&self, member: MemberId, token: &Token, unused: Duration) {
        // Issued by another member: its end tells nothing of how long tokens live here.
        if token.is_adopted() {
            return;
        }
        let next_serial = self.serials.load(Ordering::Relaxed);
        let dead = DeadToken { unused, serial: token.serial(), next_serial };
        let mut lifetimes = lock(&self.lifetimes);
        if lifetimes.died(member, dead, Instant::now()) {
            let ttl_ms = lifetimes.ttl(member).as_millis();
            tracing::warn!(
                %member, ttl_ms,
                "tokens die sooner than cluster.token_ttl says, touching more often: set it to etcd's --auth-token-ttl"
            );
        }
    }
}

impl Credentials {
    /// Tokens may have been lost otherwise than by their age: of this member, since its process or our connection to it is
    /// another; of all, where none is named, since auth was turned on or off.
    pub fn tokens_may_be_lost(&self, member: Option<MemberId>) {
        let (mut lifetimes, now) = (lock(&self.shared.lifetimes), Instant::now());
        match member {
            Some(member) => lifetimes.disturbed(member, now),
            None => lifetimes.all_disturbed(now),
        }
    }

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
                self.shared.token_survived(member, unused);
                &counters.touches_alive
            }
            Touched::Dead => {
                if identity.drop_token(member, token) {
                    self.shared.token_died(member, token, unused);
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

    /// However many tokens are due, and however often it is looked.
    #[test]
    fn a_member_is_sent_no_more_touches_than_its_allowance() {
        let mut now = Instant::now();
        let mut allowance = Allowance::full(now);
        assert_eq!(allowance.take(10, now), 10);
        let first = allowance.take(usize::MAX, now);
        assert_eq!(first, 990, "what a long round may have saved");
        assert_eq!(allowance.take(1, now), 0);
        let mut sent = 0;
        for _ in 0..80 {
            now += ROUNDS.0;
            sent += allowance.take(100_000, now);
        }
        assert_eq!(sent, 2000, "200 a second for 10 seconds");
        now += Duration::from_secs(3600);
        assert_eq!(allowance.take(usize::MAX, now), 1000, "no more is saved");
    }
}
