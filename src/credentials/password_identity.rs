//! An etcd user with one password: the tokens of the pair, and the logins that obtain the tokens.
//!
//! Owns: the tokens per member, the waiters of each login, how long a refused password stays refused. Must
//! not know: how to make a login, the schedule of touches.
//! Invariants: tokens are read without a lock; a token is published before the token's login counts as
//! finished, so that no caller starts another login in between; a refused password has no token on any
//! member.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use futures_util::future::Shared as Joined;
use http::HeaderValue;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::password_proof::CONFIRMED;
use super::{CredentialContext, LoginFailure, PasswordFingerprint, lock};
use crate::identity::{MemberId, UserName};
use crate::secret::Secret;

/// Backoff after the first refusal, and the longest backoff. A refused password may become right: an operator
/// of etcd can set the password.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
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
    logins: Mutex<IdentityLogins>,
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
    landed: Option<oneshot::Sender<LoginOutcome>>,
}

type LoginOutcome = Result<Token, LoginFailure>;
/// A single-flight login. Waiters are woken in the order of their arrival.
type LoginFlight = Joined<oneshot::Receiver<LoginOutcome>>;

#[derive(Default)]
struct IdentityLogins {
    under_way: HashMap<MemberId, LoginFlight>,
    refused: Option<RefusedPassword>,
}

struct RefusedPassword {
    why: LoginFailure,
    until: Instant,
    wait: Duration,
}

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
            logins: Mutex::default(),
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
        if let Some(token) = self.current(member) {
            return Ok(token);
        }
        let flight = {
            let mut logins = lock(&self.logins);
            if let Some(token) = self.current(member) {
                return Ok(token);
            }
            self.join_or_request_login(&mut logins, member)?
        };
        self.await_login(flight).await
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
        let flight = {
            let mut logins = lock(&self.logins);
            let tokens = self.tokens.load();
            if let Some(token) = tokens.values().find(|token| token.unused_for() < CONFIRMED) {
                return Ok(token.clone());
            }
            match logins.under_way.values().next() {
                Some(flight) => flight.clone(),
                None => self.join_or_request_login(&mut logins, member)?,
            }
        };
        self.await_login(flight).await
    }

    /// Joins the in-flight login on the member, or requests a login.
    fn join_or_request_login(
        self: &Arc<Self>,
        logins: &mut IdentityLogins,
        member: MemberId,
    ) -> Result<LoginFlight, LoginFailure> {
        if let Some(refused) = &logins.refused
            && Instant::now() < refused.until
        {
            return Err(refused.why.clone());
        }
        if let Some(flight) = logins.under_way.get(&member) {
            return Ok(flight.clone());
        }
        let seat = self.shared.requests.try_reserve().map_err(|error| match error {
            TrySendError::Full(()) => LoginFailure::Busy,
            TrySendError::Closed(()) => LoginFailure::NoAnswer,
        })?;
        let (landed, flight) = oneshot::channel();
        let flight = flight.shared();
        logins.under_way.insert(member, flight.clone());
        seat.send(LoginRequest { identity: Arc::clone(self), member, landed: Some(landed) });
        Ok(flight)
    }

    /// Waits for a login to end. Also ends when the control runtime stops, because no task would finish the
    /// login. Both arms are cancel-safe; a finished login takes precedence.
    async fn await_login(&self, flight: LoginFlight) -> LoginOutcome {
        tokio::select! {
            biased;
            landed = flight => landed.unwrap_or(Err(LoginFailure::NoAnswer)),
            () = self.shared.requests.closed() => Err(LoginFailure::NoAnswer),
        }
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
        let logins = lock(&self.logins);
        logins.refused.as_ref().filter(|refused| Instant::now() < refused.until).map(|r| r.why.clone())
    }

    /// True if the identity's tokens must be kept alive.
    pub(super) fn is_in_use(&self) -> bool {
        self.holds.load(Ordering::Relaxed) > 0 || self.last_used.elapsed() < self.shared.settings.idle
    }

    pub(super) fn note_use(&self) {
        self.last_used.set_now();
    }

    pub(super) fn tokens(&self) -> Arc<HashMap<MemberId, Token>> {
        self.tokens.load_full()
    }

    /// Forgets tokens and refusals; in-flight logins continue.
    pub(super) fn forget(&self) {
        let mut logins = lock(&self.logins);
        logins.refused = None;
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

    /// Records the outcome of a login: in flight → finished.
    fn finish_login(&self, member: MemberId, outcome: Result<HeaderValue, LoginFailure>) -> LoginOutcome {
        let mut logins = lock(&self.logins);
        let outcome = outcome.map(|header| self.issue(header));
        match &outcome {
            Ok(token) => {
                self.tokens.rcu(|known| {
                    let mut more = HashMap::clone(known);
                    more.insert(member, token.clone());
                    more
                });
                logins.refused = None;
            }
            Err(why) if why.is_refusal() => {
                // etcd drops all tokens of a user on every member when the user's password changes.
                self.tokens.store(Arc::default());
                lock(&self.shared.lifetimes).users_changed();
                logins.refuse(why);
            }
            // etcd dropped every token when auth was turned off.
            Err(LoginFailure::AuthDisabled) => {
                self.tokens.store(Arc::default());
                lock(&self.shared.lifetimes).all_disturbed(Instant::now());
            }
            Err(_) => {}
        }
        logins.under_way.remove(&member);
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

impl IdentityLogins {
    /// Records a refusal. A refusal by a login on another member does not lengthen a backoff already in
    /// force.
    fn refuse(&mut self, why: &LoginFailure) {
        let now = Instant::now();
        let wait = match &self.refused {
            Some(refused) if now < refused.until => return,
            // A refusal for lack of a password costs etcd no bcrypt. Keep the backoff short: the presence of
            // a password may decide which password source is asked.
            Some(_) if matches!(why, LoginFailure::NoPassword) => FIRST_WAIT,
            Some(refused) => (refused.wait * 2).min(LONGEST_WAIT),
            None => FIRST_WAIT,
        };
        self.refused = Some(RefusedPassword { why: why.clone(), until: now + wait, wait });
    }
}

impl LoginRequest {
    pub(super) fn identity(&self) -> &Arc<PasswordIdentity> {
        &self.identity
    }

    pub(super) fn member(&self) -> MemberId {
        self.member
    }

    /// Delivers the outcome to all waiters.
    pub(super) fn land(mut self, outcome: Result<HeaderValue, LoginFailure>) {
        self.answer(outcome);
    }

    fn answer(&mut self, outcome: Result<HeaderValue, LoginFailure>) {
        if let Some(landed) = self.landed.take()
            && landed.send(self.identity.finish_login(self.member, outcome)).is_err()
        {
            tracing::trace!("nobody waits for a login any more");
        }
    }
}

impl Drop for LoginRequest {
    fn drop(&mut self) {
        self.answer(Err(LoginFailure::NoAnswer));
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

    /// Records that a call with the token got an answer not rejecting the token, so etcd has extended the
    /// token's life. Call only for RPCs whose token every etcd version checks: before 3.4.42, 3.5.28 and
    /// 3.6.9, `LeaseKeepAlive`, `LeaseLeases`, `LeaseTimeToLive` without keys, `MemberList`, `Status` and
    /// `MoveLeader` extend no token. If called for a request without an answer, a dead token would count as
    /// alive and would not be touched.
    pub fn mark_used(&self) {
        self.0.alive_at.set_now();
        self.0.identity_used.set_now();
    }

    /// Like [`Token::mark_used`], for a touch: does not mark the identity as used.
    pub(super) fn mark_touched(&self) {
        self.0.alive_at.set_now();
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
        stamp.set_now();
        stamp
    }

    fn copy(&self) -> Self {
        Self { epoch: self.epoch, millis: AtomicU64::new(self.millis.load(Ordering::Relaxed)) }
    }

    fn set_now(&self) {
        let now = self.millis_now();
        if now >= self.millis.load(Ordering::Relaxed) + COARSE {
            self.millis.store(now, Ordering::Relaxed);
        }
    }

    fn elapsed(&self) -> Duration {
        Duration::from_millis(self.millis_now().saturating_sub(self.millis.load(Ordering::Relaxed)))
    }

    fn millis_now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
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
