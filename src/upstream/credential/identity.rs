//! One user with one password: its tokens, and the logins that get them.
//!
//! Owns: the tokens per member, who waits for which login, how long a refused password stays refused. Must not know:
//! how a login is made, or when a token is touched.
//! Invariants: tokens are read without a lock; a token is published before its login counts as landed, so that nobody
//! begins another in between; a refused password has no token on any member.

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

use super::recall::CONFIRMED;
use super::{Fingerprint, LoginFailure, Shared, lock};
use crate::identity::{MemberId, UserName};
use crate::secret::Secret;

/// After the first refusal, and at most. The password may become right: etcd's operator can set it.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Uses closer together than this are written down as one, so that shards do not fight for the cache line.
const COARSE: u64 = 50;

/// One user with one password.
pub struct PasswordIdentity {
    user: UserName,
    password: Secret<String>,
    fingerprint: Fingerprint,
    shared: Arc<Shared>,
    tokens: ArcSwap<HashMap<MemberId, Token>>,
    logins: Mutex<Logins>,
    holds: AtomicUsize,
    last_used: Arc<Stamp>,
}

/// A token of one identity on one member.
#[derive(Clone)]
pub struct Token(Arc<Issued>);

struct Issued {
    header: HeaderValue,
    serial: u64,
    alive_at: Stamp,
    identity_used: Arc<Stamp>,
    /// Issued by another member than the one that it is shown to: its end tells nothing of how long tokens live there.
    is_adopted: bool,
}

/// While one exists, the identity's tokens are kept alive: for live streams and blocked calls.
#[derive(Debug)]
#[must_use = "the tokens are kept alive only as long as this is held"]
pub struct InUse(Arc<PasswordIdentity>);

/// A login that the control runtime is asked to make. Dropped without an answer, it tells those who wait.
pub(super) struct LoginRequest {
    identity: Arc<PasswordIdentity>,
    member: MemberId,
    landed: Option<oneshot::Sender<Outcome>>,
}

type Outcome = Result<Token, LoginFailure>;
/// Who waits is woken in the order in which it began to wait.
type Flight = Joined<oneshot::Receiver<Outcome>>;

#[derive(Default)]
struct Logins {
    under_way: HashMap<MemberId, Flight>,
    refused: Option<Refused>,
}

struct Refused {
    why: LoginFailure,
    until: Instant,
    wait: Duration,
}

/// A moment in milliseconds since the start, written by many threads.
struct Stamp {
    epoch: Instant,
    millis: AtomicU64,
}

impl PasswordIdentity {
    pub(super) fn new(
        fingerprint: Fingerprint,
        user: &UserName,
        password: &Secret<String>,
        shared: Arc<Shared>,
    ) -> Arc<Self> {
        let last_used = Arc::new(Stamp::now(shared.epoch));
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

    /// The token for this member, if there is one. No lock, no waiting.
    #[must_use]
    pub fn current(&self, member: MemberId) -> Option<Token> {
        self.tokens.load().get(&member).cloned()
    }

    /// The token for this member, by a login if there is none. All who ask share one login.
    ///
    /// Cancel-safe: a login that was begun goes on.
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
            self.board(&mut logins, member)?
        };
        self.landed(flight).await
    }

    /// `member` refused `token`: drops it, if it is still the current one.
    pub fn invalidate(&self, member: MemberId, token: &Token) {
        if self.drop_token(member, token) {
            self.shared.counters.invalidations.fetch_add(1, Ordering::Relaxed);
            self.shared.token_died(member, token, token.unused_for());
        }
    }

    /// Gives `member` the token that another member issued last, where it has none of its own. A login is a raft entry: every
    /// member that has applied it knows the token, and a member without a leader can make no login of its own.
    pub(super) fn adopt_token(&self, member: MemberId) {
        let tokens = self.tokens.load();
        if tokens.contains_key(&member) {
            return;
        }
        let live = tokens.iter().filter(|(issuer, token)| self.is_live(**issuer, token));
        let Some((_, newest)) = live.max_by_key(|(_, token)| token.serial()) else { return };
        let adopted = Token(Arc::new(Issued {
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

    /// Keeps the tokens of this identity alive until dropped.
    pub fn hold(self: &Arc<Self>) -> InUse {
        self.holds.fetch_add(1, Ordering::Relaxed);
        InUse(Arc::clone(self))
    }

    /// As [`PasswordIdentity::token`], but a login under way on any member will do, and a token that no member was seen
    /// to know just now does not: it proves nothing of today.
    pub(super) async fn prove(self: &Arc<Self>, member: MemberId) -> Result<Token, LoginFailure> {
        let flight = {
            let mut logins = lock(&self.logins);
            let tokens = self.tokens.load();
            if let Some(token) = tokens.values().find(|token| token.unused_for() < CONFIRMED) {
                return Ok(token.clone());
            }
            match logins.under_way.values().next() {
                Some(flight) => flight.clone(),
                None => self.board(&mut logins, member)?,
            }
        };
        self.landed(flight).await
    }

    /// Joins the login under way on this member, or asks for one.
    fn board(self: &Arc<Self>, logins: &mut Logins, member: MemberId) -> Result<Flight, LoginFailure> {
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

    /// Waits for a login to end, or for the control side to: its logins are then nobody's. Both arms are cancel-safe;
    /// what has landed counts.
    async fn landed(&self, flight: Flight) -> Outcome {
        tokio::select! {
            biased;
            landed = flight => landed.unwrap_or(Err(LoginFailure::NoAnswer)),
            () = self.shared.requests.closed() => Err(LoginFailure::NoAnswer),
        }
    }

    /// Whether etcd accepted the password, and has not been silent about it for longer than a token lives.
    pub(super) fn is_proved(&self) -> bool {
        self.tokens.load().iter().any(|(&member, token)| self.is_live(member, token))
    }

    fn is_live(&self, member: MemberId, token: &Token) -> bool {
        token.unused_for() < self.shared.token_ttl(member)
    }

    /// Why a login would be refused here, now.
    pub(super) fn refused(&self) -> Option<LoginFailure> {
        let logins = lock(&self.logins);
        logins.refused.as_ref().filter(|refused| Instant::now() < refused.until).map(|r| r.why.clone())
    }

    /// Whether its tokens are to be kept alive.
    pub(super) fn is_in_use(&self) -> bool {
        self.holds.load(Ordering::Relaxed) > 0 || self.last_used.elapsed() < self.shared.settings.idle
    }

    pub(super) fn note_use(&self) {
        self.last_used.set_now();
    }

    pub(super) fn tokens(&self) -> Arc<HashMap<MemberId, Token>> {
        self.tokens.load_full()
    }

    /// Forgets tokens and refusals; logins under way go on.
    pub(super) fn forget(&self) {
        let mut logins = lock(&self.logins);
        logins.refused = None;
        self.tokens.store(Arc::default());
    }

    /// Whether `token` was the current one; it no longer is.
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

    pub(super) fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Takes down how a login ended: under way → landed.
    fn land(&self, member: MemberId, outcome: Result<HeaderValue, LoginFailure>) -> Outcome {
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
                // etcd drops the tokens of a user whose password changed, on every member.
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
        Token(Arc::new(Issued {
            header,
            serial: self.shared.serials.fetch_add(1, Ordering::Relaxed),
            alive_at: Stamp::now(self.shared.epoch),
            identity_used: Arc::clone(&self.last_used),
            is_adopted: false,
        }))
    }
}

impl Logins {
    /// Refusals that land while one is in force (of logins on other members) make nothing worse.
    fn refuse(&mut self, why: &LoginFailure) {
        let now = Instant::now();
        let wait = match &self.refused {
            Some(refused) if now < refused.until => return,
            // It cost etcd no bcrypt, and whether a user has a password may decide who is asked about it.
            Some(_) if matches!(why, LoginFailure::NoPassword) => FIRST_WAIT,
            Some(refused) => (refused.wait * 2).min(LONGEST_WAIT),
            None => FIRST_WAIT,
        };
        self.refused = Some(Refused { why: why.clone(), until: now + wait, wait });
    }
}

impl LoginRequest {
    pub(super) fn identity(&self) -> &Arc<PasswordIdentity> {
        &self.identity
    }

    pub(super) fn member(&self) -> MemberId {
        self.member
    }

    /// Tells everybody who waits.
    pub(super) fn land(mut self, outcome: Result<HeaderValue, LoginFailure>) {
        self.answer(outcome);
    }

    fn answer(&mut self, outcome: Result<HeaderValue, LoginFailure>) {
        if let Some(landed) = self.landed.take()
            && landed.send(self.identity.land(self.member, outcome)).is_err()
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
    /// One that we signed: nothing extends its life.
    pub(super) fn signed(header: HeaderValue, shared: &Shared) -> Self {
        Self(Arc::new(Issued {
            header,
            serial: shared.serials.fetch_add(1, Ordering::Relaxed),
            alive_at: Stamp::now(shared.epoch),
            identity_used: Arc::new(Stamp::now(shared.epoch)),
            is_adopted: false,
        }))
    }

    /// The value of the `token` header. HPACK may index it.
    #[must_use]
    pub fn header(&self) -> &HeaderValue {
        &self.0.header
    }

    /// A call with this token got an answer other than that the token is bad: etcd has extended its life. Only of calls
    /// whose token every etcd looks at: before 3.4.42, 3.5.28 and 3.6.9 `LeaseKeepAlive`, `LeaseLeases`,
    /// `LeaseTimeToLive` without keys, `MemberList`, `Status` and `MoveLeader` extend nothing. Told of a call that was
    /// merely sent, a token that is dead passes for alive, and is not touched.
    pub fn mark_used(&self) {
        self.0.alive_at.set_now();
        self.0.identity_used.set_now();
    }

    /// As [`Token::mark_used`], for a touch: that nobody uses the identity stays true.
    pub(super) fn mark_touched(&self) {
        self.0.alive_at.set_now();
    }

    /// How long etcd has not been seen to extend its life.
    pub(super) fn unused_for(&self) -> Duration {
        self.0.alive_at.elapsed()
    }

    /// Whether another member issued it than the one that it is shown to.
    pub(super) fn is_adopted(&self) -> bool {
        self.0.is_adopted
    }

    /// Tells tokens apart, in the order of their logins.
    pub(super) fn serial(&self) -> u64 {
        self.0.serial
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.note_use();
        self.0.holds.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Stamp {
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
