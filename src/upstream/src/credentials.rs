//! Credentials that prove an etcd user to a member: a password turned into one token per identity and member,
//! a client certificate of the user, or a JWT signed by Keyward.
//!
//! Owns: the mapping from a user and password to an identity, the tokens of each identity, the admission of
//! logins, keeping tokens alive, and credentials that prove a user without the user's own password
//! (`acting`). Must not know: sessions, the identity of the client, the choice of a member for a call, how to
//! connect to a member.
//! Invariants: two passwords of the same user never share a token; a password that etcd refused admits no
//! caller and does not affect callers with the right password; at most one login per identity and member is
//! in flight, and the login continues when its waiters leave; a caller drops a token by naming the token, so
//! ten callers with the same dead token cause a single login.

mod acting_identities;
mod auth_calls;
mod auth_revision;
mod certificate_identity;
mod control;
mod keep_alive;
mod leaf;
mod lifetimes;
mod mint;
mod password_identity;
mod password_memory;
mod root_holders;
#[cfg(test)]
mod scripted_member;
mod signed_identity;
mod signing_revision;
mod single_flight;
mod store_hash;
#[cfg(test)]
mod tests;
mod token_signer;

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

use keyward_base::secret::Secret;
use keyward_cluster::membership::ControlChannels;
use keyward_etcd::identity::{MemberId, UserName};
use keyward_etcd::rpc::outcome::CallProof;

pub use acting_identities::{ActingIdentities, ActingIdentity, UsersError};
pub use auth_revision::AuthRevisionTracker;
pub use certificate_identity::{CertificateConnectionKey, CertificateIdentity};
pub use control::{CredentialControl, QueuePlace};
pub use leaf::Leaf;
pub use mint::MintError;
pub use password_identity::{PasswordIdentity, Token, TokenUseGuard};
pub use password_memory::{LoginProof, PasswordMemory, PasswordRefusal, RefusalKey, RefusedBy};
pub use root_holders::{RootHolderQuery, RootHolders};
pub use signed_identity::SignedIdentity;
pub use signing_revision::MetricsPages;
pub use single_flight::{Joinable, RunningWork, SingleFlight, WorkReport};

use control::LoginWork;
use lifetimes::Lifetimes;
use mint::CheckedAuthorities;

/// Password checks and logins queued for the control runtime. The control runtime takes work at once and
/// queues logins per member, so the channel fills only when the control runtime is stuck; callers then get
/// [`LoginFailure::Busy`]. There is room for all concurrent checks of passwords without a known result
/// (`gateway::login::limits`), and beyond for known passwords, sessions and logins at members.
const QUEUED: usize = 6144;

/// Queued requests for the auth revision. One answer serves all waiters, so more queued requests add no
/// information.
const REVISION_REQUESTS: usize = 1;

/// The etcd user that a call acts as upstream.
#[derive(Clone, Debug)]
pub enum UpstreamUser {
    /// No credential: etcd answers as for any unauthenticated caller.
    Nobody,
    /// An etcd user, with the identity proving the user.
    User(UpstreamIdentity),
}

/// An etcd user, with the means of proving the user to members.
#[derive(Clone, Debug)]
pub enum UpstreamIdentity {
    /// A password, exchanged for a token per member.
    Password(Arc<PasswordIdentity>),
    /// A client certificate, on dedicated connections.
    Certificate(Arc<CertificateIdentity>),
    /// Tokens signed by Keyward.
    Signed(Arc<SignedIdentity>),
    /// The identity that the current configuration gives the user. A reload may replace the identity, also
    /// under a live stream.
    Acting(Arc<ActingIdentity>),
}

/// Key that tells living identities apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IdentityKey(usize);

impl IdentityKey {
    /// A key with a given number, for tests.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn numbered(number: usize) -> Self {
        Self(number)
    }
}

/// The credential that one call presents to one member.
#[derive(Clone, Debug)]
pub enum CallCredential {
    /// No credential: the call has no user, or auth is off.
    Nothing,
    /// A token in the call's metadata.
    Token(Token),
    /// A connection with the client certificate of the identity.
    Certificate(Arc<CertificateIdentity>),
}

impl UpstreamIdentity {
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

    /// The key that tells the identity from all living identities: two passwords of one user are two
    /// identities.
    #[must_use]
    pub fn key(&self) -> IdentityKey {
        IdentityKey(match self {
            Self::Password(identity) => Arc::as_ptr(identity).addr(),
            Self::Certificate(identity) => Arc::as_ptr(identity).addr(),
            Self::Signed(identity) => Arc::as_ptr(identity).addr(),
            Self::Acting(identity) => Arc::as_ptr(identity).addr(),
        })
    }

    /// The identity that proves the user now; never an [`UpstreamIdentity::Acting`].
    #[must_use]
    pub fn current_identity(&self) -> Cow<'_, Self> {
        match self {
            Self::Acting(identity) => Cow::Owned(identity.now()),
            _ => Cow::Borrowed(self),
        }
    }

    /// Returns a guard that keeps the identity's tokens alive until dropped. None if the credential does not
    /// expire from disuse.
    #[must_use]
    pub fn keep_alive(&self) -> Option<TokenUseGuard> {
        match &*self.current_identity() {
            Self::Password(identity) => Some(identity.hold()),
            _ => None,
        }
    }

    /// Returns the credential to present to `member`, where auth may be on.
    ///
    /// # Errors
    /// No token could be obtained; see [`LoginFailure`].
    pub async fn credential_for(&self, member: MemberId) -> Result<CallCredential, LoginFailure> {
        match self.current_identity().into_owned() {
            Self::Password(identity) => identity.token(member).await.map(CallCredential::Token),
            Self::Certificate(identity) => Ok(CallCredential::Certificate(identity)),
            Self::Signed(identity) => identity.token().await.map(CallCredential::Token),
            // `now` never returns an acting identity.
            Self::Acting(_) => Err(LoginFailure::NoAnswer),
        }
    }

    /// Lets `member` be shown a token issued by another member. For a member without a leader, which cannot
    /// make a login.
    pub fn adopt_token(&self, member: MemberId) {
        if let Self::Password(identity) = &*self.current_identity() {
            identity.adopt_token(member);
        }
    }

    /// Records that `member` refused the credential `shown`. Returns true if the next attempt presents a
    /// different credential; a refused certificate has no renewal.
    pub fn renew(&self, member: MemberId, shown: &CallCredential) -> bool {
        match (&*self.current_identity(), shown) {
            (Self::Password(identity), CallCredential::Token(token)) => identity.invalidate(member, token),
            (Self::Signed(identity), CallCredential::Token(token)) => identity.invalidate(token),
            (Self::Certificate(identity), CallCredential::Certificate(shown)) => {
                return !Arc::ptr_eq(identity, shown);
            }
            (_, CallCredential::Nothing) => return false,
            // The identity has changed since the call: the next attempt presents a different credential.
            (_, CallCredential::Token(_) | CallCredential::Certificate(_)) => {}
        }
        true
    }

    /// True if every change of users or roles invalidates the identity's tokens, so that each change causes a
    /// new token.
    #[must_use]
    pub fn is_bound_to_revision(&self) -> bool {
        matches!(&*self.current_identity(), Self::Signed(_))
    }
}

impl CallCredential {
    /// The token, if the credential is a token.
    #[must_use]
    pub fn token(&self) -> Option<&Token> {
        match self {
            Self::Token(token) => Some(token),
            Self::Nothing | Self::Certificate(_) => None,
        }
    }

    /// The kind of proof, for judging a member's answer.
    #[must_use]
    pub fn proof(&self) -> CallProof {
        if self.token().is_some() { CallProof::Token } else { CallProof::NoToken }
    }
}

/// Limits and times of password credentials.
#[derive(Clone, Debug)]
pub struct CredentialSettings {
    /// etcd's `--auth-token-ttl`, which etcd does not send to clients. A shorter TTL of a member is learned
    /// from tokens that die early.
    pub token_ttl: Duration,
    /// How long after an identity's last call the identity's tokens are kept alive.
    pub idle: Duration,
    /// Maximum of in-flight logins per member. Each login costs a member some 50 ms of bcrypt.
    pub logins_per_member: usize,
    /// Maximum of logins waiting per member; beyond the maximum callers get [`LoginFailure::Busy`].
    pub logins_waiting: usize,
    /// Time limit of one login. etcd's own limit is 7 s.
    pub login_timeout: Duration,
    /// Maximum of remembered identities whose password etcd accepted.
    pub proved: u64,
    /// Maximum of remembered identities whose password etcd refused or has not checked yet.
    pub unproved: u64,
}

/// Reasons for not having a token.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LoginFailure {
    /// etcd refused the name and password. For a while Keyward refuses the same pair without asking etcd
    /// again.
    #[error("etcd refused the user name and password")]
    WrongPassword,
    /// The user exists but has no password: only a certificate proves the user.
    #[error("the user has no password")]
    NoPassword,
    /// Auth is off, so etcd issues no tokens.
    #[error("auth is off")]
    AuthDisabled,
    /// The member's own answer, unchanged. The answer says nothing about the password.
    #[error("the member could not say: {}", .0.message())]
    Unavailable(Status),
    /// No member to ask, or no answer in time.
    #[error("no member answered")]
    NoAnswer,
    /// Too many logins are waiting for the member.
    #[error("too many logins are waiting")]
    Busy,
}

/// Counters of logins and touches, for the metrics.
#[derive(Debug, Default)]
pub struct CredentialCounters {
    /// Logins that returned a token.
    pub logins_accepted: AtomicU64,
    /// Logins refused by etcd because of the name or password.
    pub logins_refused: AtomicU64,
    /// Logins that failed for any different reason.
    pub logins_failed: AtomicU64,
    /// Touches with a live token.
    pub touches_alive: AtomicU64,
    /// Touches with a dead token.
    pub touches_dead: AtomicU64,
    /// Touches without a verdict: the member did not answer.
    pub touches_unknown: AtomicU64,
    /// Touches due but postponed, because the member's touch allowance was used up.
    pub touches_postponed: AtomicU64,
    /// Tokens found dead by a call.
    pub invalidations: AtomicU64,
}

/// All identities of the process, shared by all shards.
pub struct Credentials {
    /// The caches `proved` and `unproved` keep identities in memory. `known` also finds identities held only
    /// by a live stream, so a user and password never become two identities.
    proved: Cache<PasswordFingerprint, Arc<PasswordIdentity>>,
    unproved: Cache<PasswordFingerprint, Arc<PasswordIdentity>>,
    known: Mutex<KnownIdentities>,
    fingerprint_key: Secret<[u8; 32]>,
    acting: Arc<ArcSwap<ActingIdentities>>,
    checked_authorities: CheckedAuthorities,
    revision_requests: mpsc::Sender<signing_revision::SigningRevision>,
    shared: Arc<CredentialContext>,
}

/// State shared by all identities.
struct CredentialContext {
    settings: CredentialSettings,
    queue: mpsc::Sender<LoginWork>,
    password_memory: PasswordMemory,
    channels: ControlChannels,
    counters: CredentialCounters,
    lifetimes: Mutex<Lifetimes>,
    /// Serial number of the next token. No two tokens share a serial number.
    serials: AtomicU64,
    epoch: Instant,
}

/// Hash of a user name and password under a random key of the process. Outside the process, the hash cannot
/// be used to guess the password.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PasswordFingerprint([u8; 32]);

impl PasswordFingerprint {
    /// Maps the fingerprint to one of `many` buckets, always the same bucket; spreads logins.
    #[must_use]
    pub fn bucket_of(self, many: usize) -> usize {
        let first = self.0.first_chunk().map_or(0, |first| u32::from_be_bytes(*first));
        usize::try_from(first).unwrap_or(0) % many.max(1)
    }
}

#[derive(Default)]
struct KnownIdentities {
    identities: HashMap<PasswordFingerprint, Weak<PasswordIdentity>>,
    prune_at: usize,
}

/// The operating system returned no random bytes.
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
    /// True if etcd refused the user and password, independent of the member asked.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        PasswordRefusal::of(self).is_some()
    }
}

impl Credentials {
    /// Returns the credentials, and the future that the control runtime must run for the credentials.
    ///
    /// # Errors
    /// [`NoRandomness`]: passwords are remembered only under a random key.
    pub fn new(
        settings: CredentialSettings,
        channels: ControlChannels,
    ) -> Result<(Arc<Self>, CredentialControl), NoRandomness> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|_none| NoRandomness)?;
        let (queue, work) = mpsc::channel(QUEUED);
        let (revision_requests, asked) = mpsc::channel(REVISION_REQUESTS);
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
            acting: Arc::new(ArcSwap::from_pointee(ActingIdentities::nobody())),
            checked_authorities: CheckedAuthorities::default(),
            revision_requests,
            shared: Arc::new(CredentialContext {
                lifetimes: Mutex::new(Lifetimes::new(settings.token_ttl)),
                settings,
                queue,
                password_memory: PasswordMemory::new(),
                channels: channels.clone(),
                counters: CredentialCounters::default(),
                serials: AtomicU64::new(0),
                epoch: Instant::now(),
            }),
        });
        let control = CredentialControl::new(Arc::clone(&credentials), work, asked, channels);
        Ok((credentials, control))
    }

    /// Returns the identity of the user and password, proved or not. Makes no call upstream. Costs a hash and
    /// a look-up, so callers on the hot path keep the identity.
    #[must_use]
    pub fn identity(&self, user: &UserName, password: &Secret<String>) -> Arc<PasswordIdentity> {
        let fingerprint = self.fingerprint(user, password);
        if let Some(identity) = self.find_cached(fingerprint) {
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
        self.cache_identity(&identity);
        identity
    }

    /// Returns the identity of the user and password if the identity is in memory.
    fn find(&self, user: &UserName, password: &Secret<String>) -> Option<Arc<PasswordIdentity>> {
        let fingerprint = self.fingerprint(user, password);
        self.find_cached(fingerprint).or_else(|| lock(&self.known).find(fingerprint))
    }

    /// True if etcd accepted the user and password, as far as memory can tell without asking etcd.
    #[must_use]
    pub fn is_proved(&self, fingerprint: PasswordFingerprint) -> bool {
        self.find_cached(fingerprint).is_some_and(|identity| identity.is_proved())
    }

    fn find_cached(&self, fingerprint: PasswordFingerprint) -> Option<Arc<PasswordIdentity>> {
        self.proved.get(&fingerprint).or_else(|| self.unproved.get(&fingerprint))
    }

    /// Verifies the user's password, for the Authenticate RPC. No login is made if a member of `members`
    /// still knows a token of the pair ([`Credentials::recall`]). Otherwise one login runs on the first of
    /// `members` able to answer, shared by all concurrent callers (single flight); the resulting token
    /// becomes the credential for the answering member.
    ///
    /// Cancel-safe: a started login continues.
    ///
    /// # Errors
    /// See [`LoginFailure`]; if several members could not answer, the failure of the last member.
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

    /// Forgets every verdict of etcd on the user's passwords. Must be called when a user's password was
    /// changed, or a user was added or deleted, through Keyward: etcd has then dropped the user's tokens.
    pub fn forget_user(&self, user: &UserName) {
        for identity in self.known().iter().filter(|identity| identity.user() == user) {
            identity.forget_tokens();
        }
        self.shared.password_memory.forget_refusals_of(user);
    }

    /// Forgets every verdict of the previous cluster on any user, because Keyward now follows another
    /// cluster. Passwords stay in memory, but prove a user only after the new cluster has accepted them. No
    /// certificate is minted before the mint authority was checked against the new members.
    pub fn forget_cluster(&self) {
        for identity in self.known() {
            identity.forget_tokens();
            self.cache_identity(&identity);
        }
        self.shared.password_memory.forget_upstream_refusals();
        self.tokens_may_be_lost(None);
        self.forget_members();
    }

    /// The passwords lately accepted or refused.
    #[must_use]
    pub fn password_memory(&self) -> &PasswordMemory {
        &self.shared.password_memory
    }

    /// The counters of logins and touches.
    #[must_use]
    pub fn counters(&self) -> &CredentialCounters {
        &self.shared.counters
    }

    /// All identities in memory.
    fn known(&self) -> Vec<Arc<PasswordIdentity>> {
        lock(&self.known).identities.values().filter_map(Weak::upgrade).collect()
    }

    /// Moves an identity into the matching cache. Refused and new identities have a separate cache, so that
    /// they cannot evict identities accepted by etcd.
    fn cache_identity(&self, identity: &Arc<PasswordIdentity>) {
        let fingerprint = identity.fingerprint();
        let (to, from) = if identity.is_proved() {
            (&self.proved, &self.unproved)
        } else {
            (&self.unproved, &self.proved)
        };
        to.insert(fingerprint, Arc::clone(identity));
        from.invalidate(&fingerprint);
    }

    /// Returns the fingerprint of a user and password.
    #[must_use]
    pub fn fingerprint(&self, user: &UserName, password: &Secret<String>) -> PasswordFingerprint {
        let name = user.as_str().as_bytes();
        let mut hash = Sha256::new_with_prefix(self.fingerprint_key.expose());
        hash.update(name.len().to_be_bytes());
        hash.update(name);
        hash.update(password.expose());
        PasswordFingerprint(hash.finalize().into())
    }
}

impl KnownIdentities {
    fn find(&self, fingerprint: PasswordFingerprint) -> Option<Arc<PasswordIdentity>> {
        self.identities.get(&fingerprint).and_then(Weak::upgrade)
    }

    /// Adds an identity. Entries of dropped identities are removed each time the number of entries may have
    /// doubled.
    fn add(&mut self, fingerprint: PasswordFingerprint, identity: &Arc<PasswordIdentity>) {
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

/// Locks a mutex, ignoring poison. No code under these locks panics half-way, so a poisoned value is still
/// consistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
