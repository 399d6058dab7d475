//! What proves an etcd user to a member: a password turned into one token per identity and member, a certificate of the
//! user's own, or a token that we sign.
//!
//! Owns: who is known by which password, the tokens they have, when a login may happen, when a token is kept alive; what
//! proves a user without its password (`acting`). Must not know: sessions, who the client is, which member a call goes
//! to, how a member is reached.
//! Invariants: two passwords of one user never share a token; a password that etcd refused admits nobody and harms no
//! other; at most one login per identity and member is under way, and it goes on when those who wait for it leave; a
//! token is dropped by naming it, so that ten callers who found the same one dead cause one login.

mod acting;
mod breaker;
mod certificate;
mod control;
mod identity;
mod keep_alive;
mod lifetimes;
mod mint;
mod moves;
mod recall;
mod revision;
mod roles;
#[cfg(test)]
mod scripted;
mod signed;
#[cfg(test)]
mod tests;
mod wire;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;

use crate::identity::{MemberId, UserName};
use crate::rpc::outcome::Proof;
use crate::secret::Secret;
use crate::upstream::membership::ControlChannels;

pub use acting::{Acting, ActingIdentity, UsersError};
pub use certificate::{CertificateIdentity, Leaf, Showing};
pub use control::CredentialControl;
pub use identity::{InUse, PasswordIdentity, Token};
pub use mint::MintError;
pub use moves::Moves;
pub use revision::Pages;
pub use roles::{RootHolders, Wanted};
pub use signed::SignedIdentity;

use identity::LoginRequest;
use lifetimes::Lifetimes;
use mint::Held;

/// Requests that the control runtime has not taken up yet. It takes them up at once and queues per member, so this
/// fills only when that runtime is stuck; callers are then told [`LoginFailure::Busy`].
const REQUESTS: usize = 1024;

/// Questions for the auth revision that were not taken up yet: one answer serves all, so that more say nothing more.
const QUESTIONS: usize = 1;

/// As whom a call goes upstream.
#[derive(Clone, Debug)]
pub enum As {
    /// Without any credential: etcd answers as it answers anybody.
    Nobody,
    /// As an etcd user, with what proves it.
    User(Identity),
}

/// One etcd user, and what proves it.
#[derive(Clone, Debug)]
pub enum Identity {
    /// A password, for a token per member.
    Password(Arc<PasswordIdentity>),
    /// A certificate, on connections of its own.
    Certificate(Arc<CertificateIdentity>),
    /// Tokens that we sign.
    Signed(Arc<SignedIdentity>),
    /// What the configuration in force has for it: another one after a reload, also under a stream.
    Acting(Arc<ActingIdentity>),
}

/// Tells identities apart, for as long as they live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IdentityKey(usize);

impl IdentityKey {
    /// The key of a number, for tests.
    #[cfg(test)]
    pub(crate) fn numbered(number: usize) -> Self {
        Self(number)
    }
}

/// What one call shows one member.
#[derive(Clone, Debug)]
pub enum Shown {
    /// Nothing: it is nobody's, or auth is off.
    Nothing,
    /// A token.
    Token(Token),
    /// A connection with this one's certificate.
    Certificate(Arc<CertificateIdentity>),
}

impl Identity {
    /// The etcd user.
    #[must_use]
    pub fn user(&self) -> &UserName {
        match self {
            Self::Password(identity) => identity.user(),
            Self::Certificate(identity) => identity.user(),
            Self::Signed(identity) => identity.user(),
            Self::Acting(identity) => identity.user(),
        }
    }

    /// What tells it from others: two passwords of one user are two identities.
    #[must_use]
    pub fn key(&self) -> IdentityKey {
        IdentityKey(match self {
            Self::Password(identity) => Arc::as_ptr(identity).addr(),
            Self::Certificate(identity) => Arc::as_ptr(identity).addr(),
            Self::Signed(identity) => Arc::as_ptr(identity).addr(),
            Self::Acting(identity) => Arc::as_ptr(identity).addr(),
        })
    }

    /// What proves the user now, which is never an [`Identity::Acting`].
    #[must_use]
    pub fn now(&self) -> Cow<'_, Self> {
        match self {
            Self::Acting(identity) => Cow::Owned(identity.now()),
            _ => Cow::Borrowed(self),
        }
    }

    /// Keeps what proves it alive until dropped, where that dies of not being used.
    #[must_use]
    pub fn hold(&self) -> Option<InUse> {
        match &*self.now() {
            Self::Password(identity) => Some(identity.hold()),
            _ => None,
        }
    }

    /// What to show `member`, where auth may be on.
    ///
    /// # Errors
    /// There is no token; see [`LoginFailure`].
    pub async fn shown(&self, member: MemberId) -> Result<Shown, LoginFailure> {
        match self.now().into_owned() {
            Self::Password(identity) => identity.token(member).await.map(Shown::Token),
            Self::Certificate(identity) => Ok(Shown::Certificate(identity)),
            Self::Signed(identity) => identity.token().await.map(Shown::Token),
            // What is in force is one of the others.
            Self::Acting(_) => Err(LoginFailure::NoAnswer),
        }
    }

    /// Lets `member`, which has no leader and so can make no login, be shown a token that another member issued.
    pub fn adopt_token(&self, member: MemberId) {
        if let Self::Password(identity) = &*self.now() {
            identity.adopt_token(member);
        }
    }

    /// `member` refused what it was `shown`. Whether the next try shows something else: a certificate has nothing to
    /// renew.
    pub fn renew(&self, member: MemberId, shown: &Shown) -> bool {
        match (&*self.now(), shown) {
            (Self::Password(identity), Shown::Token(token)) => identity.invalidate(member, token),
            (Self::Signed(identity), Shown::Token(token)) => identity.invalidate(token),
            (Self::Certificate(identity), Shown::Certificate(shown)) => return !Arc::ptr_eq(identity, shown),
            (_, Shown::Nothing) => return false,
            // It proves itself otherwise now.
            (_, Shown::Token(_) | Shown::Certificate(_)) => {}
        }
        true
    }

    /// Whether every change of users and roles ends what it shows, so that each asks for another.
    #[must_use]
    pub fn follows_revisions(&self) -> bool {
        matches!(&*self.now(), Self::Signed(_))
    }
}

impl Shown {
    /// The token, where it is one.
    #[must_use]
    pub fn token(&self) -> Option<&Token> {
        match self {
            Self::Token(token) => Some(token),
            Self::Nothing | Self::Certificate(_) => None,
        }
    }

    /// As answers are judged.
    #[must_use]
    pub fn proof(&self) -> Proof {
        if self.token().is_some() { Proof::Token } else { Proof::NoToken }
    }
}

/// Limits and times of password credentials.
#[derive(Clone, Debug)]
pub struct CredentialSettings {
    /// etcd's `--auth-token-ttl`: it is not on the wire. Where it is shorter than told here, that is learned.
    pub token_ttl: Duration,
    /// How long after its last call an identity's tokens are kept alive.
    pub idle: Duration,
    /// Logins under way per member: each costs it some 50 ms of bcrypt.
    pub logins_per_member: usize,
    /// Logins waiting per member, past which callers are told [`LoginFailure::Busy`].
    pub logins_waiting: usize,
    /// How long one login may take. etcd's own limit is 7 s.
    pub login_timeout: Duration,
    /// Identities whose password etcd accepted.
    pub proved: u64,
    /// Identities whose password etcd refused or was not asked about yet.
    pub unproved: u64,
}

/// Why there is no token.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LoginFailure {
    /// etcd refused the name and password. For a while the same pair is refused here, without asking etcd again.
    #[error("etcd refused the user name and password")]
    WrongPassword,
    /// The user exists but has no password: it proves itself by a certificate only.
    #[error("the user has no password")]
    NoPassword,
    /// Auth is off, so there are no tokens.
    #[error("auth is off")]
    AuthDisabled,
    /// The member's own answer, untouched: nothing is known of the password.
    #[error("the member could not say: {}", .0.message())]
    Unavailable(Status),
    /// No member to ask, or no answer in time.
    #[error("no member answered")]
    NoAnswer,
    /// Too many logins are waiting for this member.
    #[error("too many logins are waiting")]
    Busy,
}

/// What happened, for the metrics.
#[derive(Debug, Default)]
pub struct CredentialCounters {
    /// Logins that gave a token.
    pub logins_accepted: AtomicU64,
    /// Logins that etcd refused for their name or password.
    pub logins_refused: AtomicU64,
    /// Logins that ended otherwise.
    pub logins_failed: AtomicU64,
    /// Touches that found their token alive.
    pub touches_alive: AtomicU64,
    /// Touches that found their token dead.
    pub touches_dead: AtomicU64,
    /// Touches that told nothing: the member did not answer.
    pub touches_unknown: AtomicU64,
    /// Touches that were due and not made then: their member had been sent as many as it is to be sent.
    pub touches_postponed: AtomicU64,
    /// Tokens that a call found dead.
    pub invalidations: AtomicU64,
}

/// The identities of this process. One for all shards.
pub struct Credentials {
    /// What keeps identities in memory. `known` finds those too that only a live stream still holds, so that one
    /// user and password is never two identities.
    proved: Cache<Fingerprint, Arc<PasswordIdentity>>,
    unproved: Cache<Fingerprint, Arc<PasswordIdentity>>,
    known: Mutex<Known>,
    fingerprint_key: Secret<[u8; 32]>,
    acting: Arc<ArcSwap<Acting>>,
    held: Held,
    questions: mpsc::Sender<Arc<signed::Signer>>,
    shared: Arc<Shared>,
}

/// What every identity needs of the whole.
struct Shared {
    settings: CredentialSettings,
    requests: mpsc::Sender<LoginRequest>,
    channels: ControlChannels,
    counters: CredentialCounters,
    lifetimes: Mutex<Lifetimes>,
    /// Of tokens: one never has another's.
    serials: AtomicU64,
    epoch: Instant,
}

/// User name and password under a key of this process: the password cannot be guessed from it elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// One of `many`, always the same one: by it logins are spread.
    #[must_use]
    pub fn one_of(self, many: usize) -> usize {
        let first = self.0.first_chunk().map_or(0, |first| u32::from_be_bytes(*first));
        usize::try_from(first).unwrap_or(0) % many.max(1)
    }
}

#[derive(Default)]
struct Known {
    identities: HashMap<Fingerprint, Weak<PasswordIdentity>>,
    prune_at: usize,
}

/// The system gave no random bytes.
#[derive(Debug, thiserror::Error)]
#[error("no random bytes from the system")]
pub struct NoRandomness;

impl Default for CredentialSettings {
    fn default() -> Self {
        Self {
            token_ttl: Duration::from_secs(300),
            idle: Duration::from_secs(600),
            logins_per_member: 2,
            logins_waiting: 256,
            login_timeout: Duration::from_secs(10),
            proved: 10_000,
            unproved: 1_000,
        }
    }
}

impl LoginFailure {
    /// Whether etcd said no to this user and password, whatever the member.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::WrongPassword | Self::NoPassword)
    }
}

impl Credentials {
    /// Credentials, and the future that the control runtime has to run for them.
    ///
    /// # Errors
    /// [`NoRandomness`]: passwords are remembered under a random key only.
    pub fn new(
        settings: CredentialSettings,
        channels: ControlChannels,
    ) -> Result<(Arc<Self>, CredentialControl), NoRandomness> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|_none| NoRandomness)?;
        let (requests, queue) = mpsc::channel(REQUESTS);
        let (questions, asked) = mpsc::channel(QUESTIONS);
        let cache = |limit| {
            Cache::builder()
                .max_capacity(limit)
                .eviction_policy(EvictionPolicy::lru())
                .time_to_idle(settings.idle)
                .build()
        };
        let credentials = Arc::new(Self {
            proved: cache(settings.proved),
            unproved: cache(settings.unproved),
            known: Mutex::default(),
            fingerprint_key: Secret::new(key),
            acting: Arc::new(ArcSwap::from_pointee(Acting::nobody())),
            held: Held::default(),
            questions,
            shared: Arc::new(Shared {
                lifetimes: Mutex::new(Lifetimes::new(settings.token_ttl)),
                settings,
                requests,
                channels: channels.clone(),
                counters: CredentialCounters::default(),
                serials: AtomicU64::new(0),
                epoch: Instant::now(),
            }),
        });
        let control = CredentialControl::new(Arc::clone(&credentials), queue, asked, channels);
        Ok((credentials, control))
    }

    /// The identity of this user with this password, proved or not. No call goes upstream. Callers on the hot path
    /// keep it: it costs a hash and a look-up.
    #[must_use]
    pub fn identity(&self, user: &UserName, password: &Secret<String>) -> Arc<PasswordIdentity> {
        let fingerprint = self.fingerprint(user, password);
        if let Some(identity) = self.remembered(fingerprint) {
            return identity;
        }
        let identity = {
            let mut known = lock(&self.known);
            known.find(fingerprint).unwrap_or_else(|| {
                let identity = PasswordIdentity::new(fingerprint, user, password, Arc::clone(&self.shared));
                known.add(fingerprint, &identity);
                identity
            })
        };
        self.keep(&identity);
        identity
    }

    /// The same, if it is in memory.
    fn find(&self, user: &UserName, password: &Secret<String>) -> Option<Arc<PasswordIdentity>> {
        let fingerprint = self.fingerprint(user, password);
        self.remembered(fingerprint).or_else(|| lock(&self.known).find(fingerprint))
    }

    /// Whether etcd accepted this user with this password, as far as that can be told without asking.
    #[must_use]
    pub fn knows(&self, fingerprint: Fingerprint) -> bool {
        self.remembered(fingerprint).is_some_and(|identity| identity.is_proved())
    }

    fn remembered(&self, fingerprint: Fingerprint) -> Option<Arc<PasswordIdentity>> {
        self.proved.get(&fingerprint).or_else(|| self.unproved.get(&fingerprint))
    }

    /// Whether this is the user's password, for the Authenticate RPC. Proved already, by a token that one of `members`
    /// knows ([`Credentials::recall`]): no login. Else one login on the first of `members` that can say, shared by all who
    /// ask at the same time; its token is that member's credential.
    ///
    /// Cancel-safe: a login that was begun goes on.
    ///
    /// # Errors
    /// See [`LoginFailure`]; of several members that could not say, the last one's.
    pub async fn verify(
        &self,
        user: &UserName,
        password: &Secret<String>,
        members: &[MemberId],
    ) -> Result<Arc<PasswordIdentity>, LoginFailure> {
        let identity = self.identity(user, password);
        if self.confirm(&identity, members).await {
            identity.note_use();
            return Ok(identity);
        }
        let mut failure = LoginFailure::NoAnswer;
        for &member in members {
            match identity.prove(member).await {
                Ok(_token) => return Ok(identity),
                Err(
                    unknown @ (LoginFailure::Unavailable(_) | LoginFailure::NoAnswer | LoginFailure::Busy),
                ) => {
                    failure = unknown;
                }
                Err(answer) => return Err(answer),
            }
        }
        Err(failure)
    }

    /// Forgets what etcd ever said of this user's passwords. To be called when the user's password was changed, or
    /// the user was added or deleted, through us: etcd has dropped the user's tokens.
    pub fn forget_user(&self, user: &UserName) {
        for identity in self.known().iter().filter(|identity| identity.user() == user) {
            identity.forget();
        }
    }

    /// Forgets what the cluster ever said, of anybody: another is followed from now on. Passwords stay known, and must be
    /// accepted there before they prove anything; nothing is minted before the new members were looked at.
    pub fn forget_cluster(&self) {
        for identity in self.known() {
            identity.forget();
            self.keep(&identity);
        }
        self.tokens_may_be_lost(None);
        self.forget_members();
    }

    /// What happened so far.
    #[must_use]
    pub fn counters(&self) -> &CredentialCounters {
        &self.shared.counters
    }

    /// Every identity that is in memory.
    fn known(&self) -> Vec<Arc<PasswordIdentity>> {
        lock(&self.known).identities.values().filter_map(Weak::upgrade).collect()
    }

    /// Puts an identity where it belongs: refused and new ones must not push out those that etcd accepted.
    fn keep(&self, identity: &Arc<PasswordIdentity>) {
        let fingerprint = identity.fingerprint();
        let (to, from) = if identity.is_proved() {
            (&self.proved, &self.unproved)
        } else {
            (&self.unproved, &self.proved)
        };
        to.insert(fingerprint, Arc::clone(identity));
        from.invalidate(&fingerprint);
    }

    /// What stands for this user and password in memory.
    #[must_use]
    pub fn fingerprint(&self, user: &UserName, password: &Secret<String>) -> Fingerprint {
        let name = user.as_str().as_bytes();
        let mut hash = Sha256::new_with_prefix(self.fingerprint_key.expose());
        hash.update(name.len().to_be_bytes());
        hash.update(name);
        hash.update(password.expose());
        Fingerprint(hash.finalize().into())
    }
}

impl Known {
    fn find(&self, fingerprint: Fingerprint) -> Option<Arc<PasswordIdentity>> {
        self.identities.get(&fingerprint).and_then(Weak::upgrade)
    }

    /// Entries of identities that are gone are removed whenever their number may have doubled.
    fn add(&mut self, fingerprint: Fingerprint, identity: &Arc<PasswordIdentity>) {
        if self.identities.len() >= self.prune_at {
            self.identities.retain(|_, identity| identity.strong_count() > 0);
            self.prune_at = (self.identities.len() * 2).max(64);
        }
        self.identities.insert(fingerprint, Arc::downgrade(identity));
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("identities", &self.known()).finish_non_exhaustive()
    }
}

/// Nothing under these locks can panic half-way, so that a poisoned one is still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
