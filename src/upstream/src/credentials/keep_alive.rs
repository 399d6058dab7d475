//! Keeps simple tokens alive by touches. etcd has no renewal: using a token on a member extends the token's
//! life on the member, so idle tokens in use are touched.
//!
//! Owns: the choice of due tokens, and the rate of touches per member. Must not know: the users of an
//! identity, how to make a login, how a TTL is learned (`lifetimes`).
//! Invariants: a token in use is touched on its own member at most a third of its TTL after its last use,
//! plus or minus a round, unless the member's [`TouchAllowance`] is used up; a hanging member delays no
//! touches of another member; the keep-alive makes no logins.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::time::Instant;

use super::auth_calls::{self, TouchVerdict};
use super::lifetimes::{DeadToken, TouchPlan};
use super::{CredentialContext, Credentials, PasswordIdentity, Token, lock};
use keyward_base::tasks::{TaskHandle, Tasks};
use keyward_cluster::membership::ControlChannels;
use keyward_etcd::identity::MemberId;

/// Limits of the time between two rounds. A round runs every quarter of the shortest touch interval.
const ROUNDS: (Duration, Duration) = (Duration::from_millis(125), Duration::from_secs(5));
/// Time limit of a touch; a slower touch counts as unknown.
const LONGEST_TOUCH: Duration = Duration::from_secs(2);
/// Maximum of in-flight touches per member.
const CONCURRENT_TOUCHES: usize = 16;
/// Minimum average time between touches sent to a member, over all identities: 200 touches a second. The rate
/// exceeds the need of the largest set of kept identities (`CredentialSettings::proved`) at etcd's default
/// TTL, and is negligible load for a member.
const TOUCH_COST: Duration = Duration::from_millis(5);

/// The loop that touches tokens.
pub(super) struct TokenKeepAlive {
    credentials: Arc<Credentials>,
    channels: ControlChannels,
    tasks: Tasks,
    running_touches: HashMap<MemberId, TaskHandle>,
    allowances: HashMap<MemberId, TouchAllowance>,
}

/// Allowance of touches for a member. Unused allowance accumulates for at most the longest round.
#[derive(Debug)]
struct TouchAllowance {
    saved: Duration,
    at: Instant,
}

/// A token of an identity in use, and the time since the token's last use.
struct IdleToken {
    identity: Arc<PasswordIdentity>,
    token: Token,
    unused: Duration,
}

impl TokenKeepAlive {
    pub(super) fn new(credentials: Arc<Credentials>, channels: ControlChannels, tasks: Tasks) -> Self {
        Self { credentials, channels, tasks, running_touches: HashMap::new(), allowances: HashMap::new() }
    }

    /// Runs until dropped. Dropping also aborts the touches.
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

    /// Returns the tokens of identities in use, by member. Identities not in use lose their tokens.
    fn idle_tokens(&self) -> BTreeMap<MemberId, Vec<IdleToken>> {
        let mut idle: BTreeMap<MemberId, Vec<IdleToken>> = BTreeMap::new();
        for identity in self.credentials.known() {
            let tokens = identity.tokens();
            if !identity.is_in_use() && !tokens.is_empty() {
                identity.forget_tokens();
                continue;
            }
            for (&member, token) in tokens.iter() {
                let (identity, token, unused) = (Arc::clone(&identity), token.clone(), token.unused_for());
                idle.entry(member).or_default().push(IdleToken { identity, token, unused });
            }
        }
        idle
    }

    /// Touches as many tokens of `due`, in order, as the member's allowance permits.
    fn touch_all(&mut self, member: MemberId, mut due: Vec<IdleToken>, interval: Duration, now: Instant) {
        let Some(channel) = self.channels.load().get(&member).cloned() else { return };
        if due.is_empty() || self.running_touches.get(&member).is_some_and(|touches| !touches.is_finished()) {
            return;
        }
        let allowance = self.allowances.entry(member).or_insert_with(|| TouchAllowance::full(now));
        let postponed = due.split_off(allowance.take(due.len(), now)).len();
        let counters = &self.credentials.shared.counters;
        counters.touches_postponed.fetch_add(u64::try_from(postponed).unwrap_or(u64::MAX), Ordering::Relaxed);
        let credentials = Arc::clone(&self.credentials);
        let limit = interval.min(LONGEST_TOUCH);
        let touches = async move {
            futures_util::stream::iter(due)
                .for_each_concurrent(CONCURRENT_TOUCHES, |IdleToken { identity, token, .. }| {
                    let (credentials, channel) = (&credentials, channel.clone());
                    async move {
                        let unused = token.unused_for();
                        let touched = tokio::time::timeout(limit, auth_calls::touch(channel, &token));
                        let touched = touched.await.unwrap_or(TouchVerdict::Unknown);
                        credentials.record_touch(&identity, member, &token, unused, touched);
                    }
                })
                .await;
        };
        self.running_touches.insert(member, self.tasks.spawn("token touches", touches));
    }
}

/// Returns the tokens to touch now, longest unused first. Drops tokens not confirmed alive for a whole TTL.
fn due_tokens(plan: TouchPlan, member: MemberId, mut idle: Vec<IdleToken>) -> Vec<IdleToken> {
    idle.sort_by_key(|idle| std::cmp::Reverse(idle.unused));
    // A single token tests for a longer TTL. An adopted token was issued elsewhere, so its death would say
    // nothing about the TTL.
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

impl TouchAllowance {
    fn full(now: Instant) -> Self {
        Self { saved: ROUNDS.1, at: now }
    }

    /// Takes up to `wanted` touches from the allowance, and returns the number granted.
    fn take(&mut self, wanted: usize, now: Instant) -> usize {
        self.saved = (self.saved + now.saturating_duration_since(self.at)).min(ROUNDS.1);
        self.at = now;
        let most = usize::try_from(self.saved.as_micros() / TOUCH_COST.as_micros()).unwrap_or(usize::MAX);
        let taken = wanted.min(most);
        self.saved -= TOUCH_COST * u32::try_from(taken).unwrap_or(0);
        taken
    }
}

impl CredentialContext {
    fn round(&self) -> Duration {
        (lock(&self.lifetimes).shortest() / 3 / 4).clamp(ROUNDS.0, ROUNDS.1)
    }

    /// The TTL of a token on the member after its last use, as far as known.
    pub(super) fn token_ttl(&self, member: MemberId) -> Duration {
        lock(&self.lifetimes).ttl(member)
    }

    /// Records that a token was alive after `unused` without use.
    pub(super) fn token_survived(&self, member: MemberId, unused: Duration) {
        let mut lifetimes = lock(&self.lifetimes);
        if lifetimes.survived(member, unused, Instant::now()) {
            let ttl_ms = lifetimes.ttl(member).as_millis();
            tracing::info!(%member, ttl_ms, "tokens live longer than was learned, touching less often");
        }
    }

    /// Records that `token` was found dead after `unused` without use.
    pub(super) fn token_died(&self, member: MemberId, token: &Token, unused: Duration) {
        // Issued by another member: the token's death says nothing about the TTL on `member`.
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
                "tokens die sooner than cluster.token_ttl says, touching more often: \
                 set it to etcd's --auth-token-ttl"
            );
        }
    }
}

impl Credentials {
    /// Records that tokens may have been lost for a reason unrelated to age. With a member: the member's
    /// process or our connection was replaced. With `None`: auth was turned on or off, for all members.
    pub fn tokens_may_be_lost(&self, member: Option<MemberId>) {
        let (mut lifetimes, now) = (lock(&self.shared.lifetimes), Instant::now());
        match member {
            Some(member) => lifetimes.disturbed(member, now),
            None => lifetimes.all_disturbed(now),
        }
    }

    fn record_touch(
        &self,
        identity: &PasswordIdentity,
        member: MemberId,
        token: &Token,
        unused: Duration,
        touched: TouchVerdict,
    ) {
        let counters = &self.shared.counters;
        let counter = match touched {
            TouchVerdict::Alive => {
                token.mark_touched();
                self.shared.token_survived(member, unused);
                &counters.touches_alive
            }
            TouchVerdict::Dead => {
                if identity.drop_token(member, token) {
                    self.shared.token_died(member, token, unused);
                }
                &counters.touches_dead
            }
            TouchVerdict::Unknown => &counters.touches_unknown,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns a time between four fifths of `interval` and `interval`, depending on the token, so that tokens
/// obtained together are not touched together.
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

    /// The limit holds for any number of due tokens and any frequency of rounds.
    #[test]
    fn a_member_is_sent_no_more_touches_than_its_allowance() {
        let mut now = Instant::now();
        let mut allowance = TouchAllowance::full(now);
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
