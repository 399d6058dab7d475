//! An etcd user with one password: the tokens of the pair, and the logins that obtain the tokens.
//!
//! Owns: the tokens per member, and the choice between a token, the memory of a refusal and a login. Must not
//! know: how to make a login, how long a refused password stays refused, the schedule of touches.
//! Invariants: tokens are read without a lock; a token is published before the token's login counts as
//! finished, so that no caller starts another login in between; a refused password has no token on any
//! member.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::HeaderValue;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;

use super::password_memory::{CONFIRMED, PasswordRefusal, RefusedBy};
use super::single_flight::{Joinable, SingleFlight, WorkReport};
use super::{CredentialContext, LoginFailure, LoginWork, PasswordFingerprint, lock};
use keyward_base::secret::Secret;
use keyward_etcd::identity::{MemberId, UserName};

/// Uses less than this many milliseconds apart are recorded as a single use, so that shards do not contend
/// for the cache line.
const COARSE: u64 = 50;

/// An etcd user with one password.
pub struct PasswordIdentity {
    user: UserName,
    password: Secret<String>,
    fingerprint: PasswordFingerprint,
    shared: Arc<CredentialContext>,
    tokens: ArcSwap<HashMap<MemberId, Token>>,
    /// The logins under way, one per member.
    logins: SingleFlight<MemberId, LoginOutcome>,
    holds: AtomicUsize,
    last_used: Arc<CoarseTimestamp>,
}

/// A token of one identity on one member.
#[derive(Clone)]
pub struct Token(Arc<IssuedToken>);

struct IssuedToken {
    header: HeaderValue,
    serial: u64,
    alive_at: CoarseTimestamp,
    identity_used: Arc<CoarseTimestamp>,
    /// True if the token was issued by a different member than the member using the token. The death of an
    /// adopted token says nothing about the TTL on the using member.
    is_adopted: bool,
}

/// Guard that keeps the identity's tokens alive while held; for live streams and blocked calls.
#[derive(Debug)]
#[must_use = "the tokens are kept alive only as long as this is held"]
pub struct TokenUseGuard(Arc<PasswordIdentity>);

/// A request to the control runtime to make a login. Dropping the request without an answer wakes the waiters
/// with an error.
pub(super) struct LoginRequest {
    identity: Arc<PasswordIdentity>,
    member: MemberId,
    report: WorkReport<MemberId, LoginOutcome>,
}

type LoginOutcome = Result<Token, LoginFailure>;

/// Time in milliseconds since `epoch`, written by many threads.
struct CoarseTimestamp {
    epoch: Instant,
    millis: AtomicU64,
}

impl PasswordIdentity {
    pub(super) fn new(
        fingerprint: PasswordFingerprint,
        user: &UserName,
        password: &Secret<String>,
        shared: Arc<CredentialContext>,
    ) -> Arc<Self> {
        let last_used = Arc::new(CoarseTimestamp::now(shared.epoch));
        Arc::new(Self {
            user: user.clone(),
            password: password.clone(),
            fingerprint,
            shared,
            tokens: ArcSwap::default(),
            logins: SingleFlight::default(),
            holds: AtomicUsize::new(0),
            last_used,
        })
    }

    /// The etcd user.
    #[must_use]
    pub fn user(&self) -> &UserName {
        &self.user
    }

    /// The current token for the member, if present. Takes no lock and does not wait.
    #[must_use]
    pub fn current(&self, member: MemberId) -> Option<Token> {
        self.tokens.load().get(&member).cloned()
    }

    /// Returns the token for the member; logs in if no token is present. Concurrent callers share one login
    /// (single flight).
    ///
    /// Cancel-safe: a started login continues.
    ///
    /// # Errors
    /// See [`LoginFailure`].
    pub async fn token(self: &Arc<Self>, member: MemberId) -> Result<Token, LoginFailure> {
        self.known_or_login(member, || self.current(member), Joinable::SameKey).await
    }

    /// Returns a token for a member without a leader, where a login is impossible: the member's own, or one
    /// issued by another member. `None` if no token is left.
    #[must_use]
    pub fn token_without_leader(&self, member: MemberId) -> Option<Token> {
        self.adopt_token(member);
        self.current(member)
    }

    /// Records that `member` refused `token`. Drops `token` if still current.
    pub fn invalidate(&self, member: MemberId, token: &Token) {
        if self.drop_token(member, token) {
            self.shared.counters.invalidations.fetch_add(1, Ordering::Relaxed);
            self.shared.token_died(member, token, token.unused_for());
        }
    }

    /// Gives `member` the newest token of the identity, if `member` has no token. A login is a raft entry, so
    /// every member that has applied the entry knows the token; a member without a leader cannot make a
    /// login.
    pub(super) fn adopt_token(&self, member: MemberId) {
        let tokens = self.tokens.load();
        if tokens.contains_key(&member) {
            return;
        }
        let live = tokens.iter().filter(|(issuer, token)| self.is_live(**issuer, token));
        let Some((_, newest)) = live.max_by_key(|(_, token)| token.serial()) else { return };
        let adopted = Token(Arc::new(IssuedToken {
            header: newest.header().clone(),
            serial: self.shared.serials.fetch_add(1, Ordering::Relaxed),
            alive_at: newest.0.alive_at.copy(),
            identity_used: Arc::clone(&self.last_used),
            is_adopted: true,
        }));
        self.tokens.rcu(|known| {
            let mut more = HashMap::clone(known);
            more.entry(member).or_insert_with(|| adopted.clone());
            more
        });
    }

    /// Returns a guard that keeps the identity's tokens alive until dropped.
    pub fn hold(self: &Arc<Self>) -> TokenUseGuard {
        self.holds.fetch_add(1, Ordering::Relaxed);
        TokenUseGuard(Arc::clone(self))
    }

    /// Like [`PasswordIdentity::token`], with two differences: an in-flight login on any member suffices, and
    /// a token suffices only if a member has confirmed the token within [`CONFIRMED`].
    pub(super) async fn prove(self: &Arc<Self>, member: MemberId) -> Result<Token, LoginFailure> {
        let confirmed = || self.tokens.load().values().find(|token| token.unused_for() < CONFIRMED).cloned();
        self.known_or_login(member, confirmed, Joinable::AnyKey).await
    }

    /// Returns the token found by `known`, or the result of a login joined or requested. Also ends when the
    /// control runtime stops.
    async fn known_or_login(
        self: &Arc<Self>,
        member: MemberId,
        known: impl Fn() -> Option<Token>,
        joinable: Joinable,
    ) -> LoginOutcome {
        let known = || known().map(Ok).or_else(|| self.refused().map(Err));
        if let Some(outcome) = known() {
            return outcome;
        }
        let queue = &self.shared.queue;
        let admit = || {
            // A login may have ended since the first look.
            known().map_or(Ok(()), Err)?;
            let place = queue.try_reserve().map_err(|error| match error {
                TrySendError::Full(()) => Err(LoginFailure::Busy),
                TrySendError::Closed(()) => Err(LoginFailure::NoAnswer),
            })?;
            let identity = Arc::clone(self);
            Ok(move |report| place.send(LoginWork::OnMember(LoginRequest { identity, member, report })))
        };
        let running = match self.logins.join_or_begin(member, joinable, admit) {
            Ok(running) => running,
            Err(outcome) => return outcome,
        };
        running.result_unless(queue.closed()).await.unwrap_or(Err(LoginFailure::NoAnswer))
    }

    /// True if etcd accepted the password, and confirmed a token of the identity within the token's TTL.
    pub(super) fn is_proved(&self) -> bool {
        self.tokens.load().iter().any(|(&member, token)| self.is_live(member, token))
    }

    fn is_live(&self, member: MemberId, token: &Token) -> bool {
        token.unused_for() < self.shared.token_ttl(member)
    }

    /// Returns the refusal in force, if a login would be refused without asking etcd.
    pub(super) fn refused(&self) -> Option<LoginFailure> {
        let memory = &self.shared.password_memory;
        memory.refusal((self.fingerprint, RefusedBy::Etcd), None, Instant::now()).map(LoginFailure::from)
    }

    /// True if the identity's tokens must be kept alive.
    pub(super) fn is_in_use(&self) -> bool {
        self.holds.load(Ordering::Relaxed) > 0 || self.last_used.elapsed() < self.shared.settings.idle
    }

    pub(super) fn note_use(&self) {
        self.last_used.set(Instant::now());
    }

    pub(super) fn tokens(&self) -> Arc<HashMap<MemberId, Token>> {
        self.tokens.load_full()
    }

    /// Forgets the tokens; in-flight logins continue.
    pub(super) fn forget_tokens(&self) {
        self.tokens.store(Arc::default());
    }

    /// Drops `token` if current. Returns true if `token` was the current token.
    pub(super) fn drop_token(&self, member: MemberId, token: &Token) -> bool {
        let is_this = |known: &HashMap<MemberId, Token>| {
            known.get(&member).is_some_and(|known| known.0.serial == token.0.serial)
        };
        let before = self.tokens.rcu(|known| {
            let mut rest = HashMap::clone(known);
            if is_this(known) {
                rest.remove(&member);
            }
            rest
        });
        is_this(&before)
    }

    pub(super) fn password(&self) -> &Secret<String> {
        &self.password
    }

    pub(super) fn fingerprint(&self) -> PasswordFingerprint {
        self.fingerprint
    }

    /// Publishes the outcome of a login.
    fn publish(&self, member: MemberId, outcome: Result<HeaderValue, LoginFailure>) -> LoginOutcome {
        let memory = &self.shared.password_memory;
        let key = (self.fingerprint, RefusedBy::Etcd);
        let outcome = outcome.map(|header| self.issue(header));
        match &outcome {
            Ok(token) => {
                self.tokens.rcu(|known| {
                    let mut more = HashMap::clone(known);
                    more.insert(member, token.clone());
                    more
                });
                memory.forget_refusal(key);
            }
            // etcd dropped every token when auth was turned off.
            Err(LoginFailure::AuthDisabled) => {
                self.tokens.store(Arc::default());
                lock(&self.shared.lifetimes).all_disturbed(Instant::now());
            }
            Err(failure) => {
                if let Some(why) = PasswordRefusal::of(failure) {
                    // etcd drops all tokens of a user on every member when the user's password changes.
                    self.tokens.store(Arc::default());
                    lock(&self.shared.lifetimes).users_changed();
                    memory.note_refusal(key, &self.user, None, why, Instant::now());
                }
            }
        }
        outcome
    }

    fn issue(&self, header: HeaderValue) -> Token {
        self.note_use();
        Token(Arc::new(IssuedToken {
            header,
            serial: self.shared.serials.fetch_add(1, Ordering::Relaxed),
            alive_at: CoarseTimestamp::now(self.shared.epoch),
            identity_used: Arc::clone(&self.last_used),
            is_adopted: false,
        }))
    }
}

impl LoginRequest {
    pub(super) fn identity(&self) -> &Arc<PasswordIdentity> {
        &self.identity
    }

    pub(super) fn member(&self) -> MemberId {
        self.member
    }

    /// Delivers the outcome to all waiters: in flight → finished.
    pub(super) fn finish(self, outcome: Result<HeaderValue, LoginFailure>) {
        let outcome = self.identity.publish(self.member, outcome);
        self.report.report(outcome);
    }
}

impl Token {
    /// A token signed by Keyward. Use does not extend the token's life.
    pub(super) fn signed(header: HeaderValue, shared: &CredentialContext) -> Self {
        Self(Arc::new(IssuedToken {
            header,
            serial: shared.serials.fetch_add(1, Ordering::Relaxed),
            alive_at: CoarseTimestamp::now(shared.epoch),
            identity_used: Arc::new(CoarseTimestamp::now(shared.epoch)),
            is_adopted: false,
        }))
    }

    /// The value of the `token` header. HPACK may index the value.
    #[must_use]
    pub fn header(&self) -> &HeaderValue {
        &self.0.header
    }

    /// Records that a call with the token got an answer not rejecting the token at `now`, so etcd has
    /// extended the token's life. Call only for RPCs whose token every etcd version checks: before 3.4.42,
    /// 3.5.28 and 3.6.9, `LeaseKeepAlive`, `LeaseLeases`, `LeaseTimeToLive` without keys, `MemberList`,
    /// `Status` and `MoveLeader` extend no token. If called for a request without an answer, a dead token
    /// would count as alive and would not be touched.
    pub fn mark_used(&self, now: Instant) {
        self.0.alive_at.set(now);
        self.0.identity_used.set(now);
    }

    /// Like [`Token::mark_used`], for a touch: does not mark the identity as used.
    pub(super) fn mark_touched(&self) {
        self.0.alive_at.set(Instant::now());
    }

    /// Time since etcd was last seen to extend the token's life.
    pub(super) fn unused_for(&self) -> Duration {
        self.0.alive_at.elapsed()
    }

    /// True if the token was issued by a different member than the member using the token.
    pub(super) fn is_adopted(&self) -> bool {
        self.0.is_adopted
    }

    /// Serial number of the token. Serial numbers ascend in the order of logins.
    pub(super) fn serial(&self) -> u64 {
        self.0.serial
    }
}

impl Drop for TokenUseGuard {
    fn drop(&mut self) {
        self.0.note_use();
        self.0.holds.fetch_sub(1, Ordering::Relaxed);
    }
}

impl CoarseTimestamp {
    fn now(epoch: Instant) -> Self {
        let stamp = Self { epoch, millis: AtomicU64::new(0) };
        stamp.set(Instant::now());
        stamp
    }

    fn copy(&self) -> Self {
        Self { epoch: self.epoch, millis: AtomicU64::new(self.millis.load(Ordering::Relaxed)) }
    }

    fn set(&self, now: Instant) {
        let now = self.millis_until(now);
        if now >= self.millis.load(Ordering::Relaxed) + COARSE {
            self.millis.store(now, Ordering::Relaxed);
        }
    }

    fn elapsed(&self) -> Duration {
        Duration::from_millis(
            self.millis_until(Instant::now()).saturating_sub(self.millis.load(Ordering::Relaxed)),
        )
    }

    fn millis_until(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.epoch).as_millis()).unwrap_or(u64::MAX)
    }
}

impl fmt::Debug for PasswordIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PasswordIdentity")
            .field("user", &self.user)
            .field("tokens", &self.tokens.load())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(#{})", self.0.serial)
    }
}
