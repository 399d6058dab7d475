//! Sealed sessions: `Authenticate` returns a sealed session as a token; the client presents the token with
//! every later request.
//!
//! Owns: the session token's format, sealing and opening, and the validity check of an open session. Must not
//! know: how a password is checked, where revocations are stored, etcd's own tokens.
//! Invariants: a session is stored nowhere, and every replica with the key opens the token. A token has no
//! dot (etcd would parse the text after a dot as a raft index and wait for the index). Tokens are padded to
//! hide the password's length. A client gets the same answer for every fault of a token. While the
//! revocations are unknown, no token is opened (`docs/decisions.md#d13`).
//!
//! Token = `kw1_` + base64url of: key id (8) · realm tag (8) · nonce (24) · XChaCha20-Poly1305 box.
//! Associated data: version, key id, realm, cluster id.

mod ended_streams;
mod opened_sessions;
mod payload;
mod presented_token;
mod revocations;
mod session_keys;

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use chacha20poly1305::XNonce;
use chacha20poly1305::aead::{Aead as _, Payload};
use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::sync::watch;
use zeroize::Zeroizing;

use keyward_base::secret::Secret;
use keyward_etcd::identity::{ClusterId, UserName};

pub use ended_streams::{EndedStreams, EndedStreamsOfShard};
pub use opened_sessions::{LastOpened, OpenedSessions};
pub use presented_token::PresentedToken;
pub use revocations::{
    InvalidSessionId, MOST_ENTRIES, RevocationChange, RevocationEntry, Revocations, RevocationsFull,
    UserRevocation,
};
pub use session_keys::{DerivedKey, KeyId, NoSessionKey, SessionKeys};

/// Prefix of every session token: Keyward's mark and the format version.
const MARK: &str = "kw1_";
const KEY_ID: usize = 8;
const REALM_TAG: usize = 8;
const NONCE: usize = 24;
/// Longest encoded token accepted for decoding, above the size of the largest sealed session (some 11 KiB).
const LONGEST_TOKEN: usize = 16 * 1024;
/// Number of previously followed clusters whose sessions still open.
const PREVIOUS_REALMS: usize = 8;
/// Number of sessions listed for an operator: the most recently used, some 200 bytes each.
const LISTED_SESSIONS: u64 = 4096;

/// A downstream login, in the form sealed into a token.
#[derive(Debug)]
pub struct Session {
    /// The peer of the login.
    pub peer: SessionPeer,
    /// The proof given at login.
    pub proof: SessionProof,
    /// Time of issue, in seconds of the Unix epoch.
    pub issued_at: u64,
    /// The user's generation at login; revoking a user raises the user's generation.
    pub generation: u64,
    /// Identifies the login in the log and for revocation.
    pub id: SessionId,
    /// The key that opened the token; `None` for a session not yet sealed.
    pub opened_by: Option<KeyId>,
}

/// The peer of a session, in a namespace of its own: `password:alice` is a different peer from `file:alice`.
#[derive(Debug)]
pub enum SessionPeer {
    /// Logged in by user name and password. The session carries the password, so that any replica can log in
    /// upstream and verify the password again.
    Password {
        /// The name as sent by the client.
        user: UserName,
        /// The password as sent by the client.
        password: Secret<String>,
    },
    /// Logged in, and no secret of the client is needed afterwards: Keyward uses its own credential for the
    /// user.
    Known {
        /// The source of the verified name.
        namespace: PeerNamespace,
        /// The name as sent by the client.
        user: UserName,
    },
}

/// The source of a login's verified name. The same name in two namespaces is two peers
/// (`docs/decisions.md#d09`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerNamespace {
    /// etcd: `password:alice`.
    Password,
    /// The users file: `file:alice`.
    File,
}

/// The proof given at login, and the state of the password source at the time: the source may change later
/// (`docs/decisions.md#d12`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionProof {
    /// No proof: auth was off upstream. The session is never mapped to an etcd user, and the password must
    /// verify once auth is on.
    None,
    /// etcd accepted the password.
    Etcd {
        /// etcd's auth revision at the time; 0 if unknown.
        auth_revision: u64,
    },
    /// The users file accepted the password.
    File {
        /// A digest of the user's line in the users file at the time: a changed line means a changed
        /// password.
        line: u64,
    },
}

/// A random id for one login. Reveals no part of the token; logged at login.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId([u8; 16]);

/// The scope of a seal: replicas of one realm in front of one cluster accept each other's sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealRealm {
    name: String,
    cluster: ClusterId,
}

/// Seals and opens sessions. Shared by all shards; keys, realm and revocations are replaced as a whole at run
/// time.
pub struct Sealer {
    sealing: ArcSwap<SealerState>,
    /// The number of replacements so far.
    changes: watch::Sender<u64>,
    ended_streams: Arc<EndedStreams>,
    seen: Cache<SessionId, Arc<Session>>,
}

/// A session sealed or opened by the process, as listed for an operator.
#[derive(Clone, Debug)]
pub struct ListedSession {
    /// The session's id.
    pub id: SessionId,
    /// The session's peer.
    pub peer: String,
    /// Time of issue, in seconds of the Unix epoch.
    pub issued_at: u64,
    /// True if the session is still valid.
    pub is_valid: bool,
}

/// Reason for refusing a user's login.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoginInadmissible {
    /// The user was blocked.
    #[error("the user is blocked")]
    Blocked,
    /// The revocations are unknown. A fault of Keyward, not of the client.
    #[error("the revocations are not known")]
    NotKnown,
}

#[derive(Clone)]
struct SealerState {
    keys: SessionKeys,
    realm: Option<SealRealm>,
    /// Realms of the clusters followed before, latest first: tokens sealed for these realms still open.
    previous_realms: Vec<SealRealm>,
    not_before: u64,
    /// `None` while the revocations are unknown.
    revocations: Option<Arc<Revocations>>,
    scope: RevocationScope,
}

/// The calls that the known revocations suffice for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RevocationScope {
    /// All calls.
    AllCalls,
    /// Calls that a member answers from its own store, while the cluster has no quorum: the revocations are
    /// not older than the store, and too old for anything else.
    LocalReads,
}

/// Reason for not opening a token. For logs and metrics: the client is never told the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenFailure {
    /// Not a Keyward token, or a token of an unknown version.
    #[error("not a session token of this kind")]
    NotOurs,
    /// Sealed by a key absent from, or removed from, the configuration.
    #[error("sealed by an unknown key")]
    UnknownKey,
    /// Sealed by a configured key for another realm or cluster.
    #[error("sealed for another realm")]
    ForeignRealm,
    /// Altered after it was sealed.
    #[error("altered after it was sealed")]
    Tampered,
    /// Issued before the configured `not_before`.
    #[error("issued before session.not_before")]
    TooOld,
    /// The session, or all sessions of its user, were revoked.
    #[error("revoked")]
    Revoked,
    /// The session's user is blocked.
    #[error("its user is blocked")]
    Blocked,
    /// The revocations are unknown. A fault of Keyward, not of the client.
    #[error("the revocations are not known")]
    NotKnown,
    /// The cluster is not known yet. A fault of Keyward, so the answer is Unavailable, not Unauthenticated.
    #[error("the cluster is not known yet")]
    NotPinned,
}

/// Reason for not sealing a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealFailure {
    /// The cluster is not known yet.
    #[error("the cluster is not known yet")]
    NotPinned,
    /// The user name or the password is too long for a token.
    #[error("user name and password are too long for a session")]
    TooLong,
    /// The system provided no random bytes.
    #[error("no random bytes from the system")]
    NoRandomness,
}

impl Session {
    /// A new login at `now`, with a new id.
    pub fn begin(
        peer: SessionPeer,
        proof: SessionProof,
        generation: u64,
        now: SystemTime,
    ) -> Result<Self, SealFailure> {
        let issued_at = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(Self { peer, proof, issued_at, generation, id: SessionId(random()?), opened_by: None })
    }
}

impl Session {
    /// A copy for uses that outlive the call: the peer without its password.
    fn without_password(&self) -> Self {
        let (namespace, user) = (self.peer.namespace(), self.peer.user().clone());
        Self { peer: SessionPeer::Known { namespace, user }, ..*self }
    }
}

impl OpenFailure {
    /// True if the failure comes from missing state of Keyward and not from the token: the client may retry.
    #[must_use]
    pub fn is_ours(self) -> bool {
        matches!(self, Self::NotPinned | Self::NotKnown)
    }
}

impl SessionPeer {
    /// The name as sent by the client.
    #[must_use]
    pub fn user(&self) -> &UserName {
        match self {
            Self::Password { user, .. } | Self::Known { user, .. } => user,
        }
    }

    /// The source of the verified name.
    #[must_use]
    pub fn namespace(&self) -> PeerNamespace {
        match self {
            Self::Password { .. } => PeerNamespace::Password,
            Self::Known { namespace, .. } => *namespace,
        }
    }

    /// The password that the session carries, if any.
    #[must_use]
    pub fn password(&self) -> Option<&Secret<String>> {
        match self {
            Self::Password { password, .. } => Some(password),
            Self::Known { .. } => None,
        }
    }
}

impl SealRealm {
    /// The realm `name`, or by default the cluster's own id, in front of `cluster`.
    #[must_use]
    pub fn new(name: Option<&str>, cluster: ClusterId) -> Self {
        Self { name: name.map_or_else(|| cluster.to_string(), str::to_owned), cluster }
    }

    /// An unambiguous encoding: the fixed-size part first, the name last.
    fn bytes(&self) -> Vec<u8> {
        [&self.cluster.0.to_be_bytes()[..], self.name.as_bytes()].concat()
    }
}

impl Sealer {
    /// A sealer without a cluster: no session is sealed or opened before [`Sealer::pin`]. No user is revoked.
    #[must_use]
    pub fn new(keys: SessionKeys) -> Self {
        let sealing = SealerState {
            keys,
            realm: None,
            previous_realms: Vec::new(),
            not_before: 0,
            revocations: Some(Arc::default()),
            scope: RevocationScope::AllCalls,
        };
        Self {
            sealing: ArcSwap::from_pointee(sealing),
            changes: watch::Sender::new(0),
            ended_streams: Arc::default(),
            // moka's default policy keeps frequently used entries and rejects the newest.
            seen: Cache::builder()
                .max_capacity(LISTED_SESSIONS)
                .eviction_policy(EvictionPolicy::lru())
                .build(),
        }
    }

    /// Seals and opens sessions for `realm` only. If `realm` is current already, sessions of the clusters
    /// followed before stay valid too.
    pub fn pin(&self, realm: &SealRealm) {
        if self.sealing.load().realm.as_ref() != Some(realm) {
            self.replace(|old| SealerState {
                realm: Some(realm.clone()),
                previous_realms: Vec::new(),
                ..SealerState::clone(old)
            });
        }
    }

    /// Seals sessions for `realm`, the followed cluster, from now on. Sessions sealed for earlier clusters
    /// still open: the caller must prove the user to the new cluster before acting on an older session.
    pub fn follow(&self, realm: &SealRealm) {
        self.replace(|old| {
            let before = old.realm.iter().chain(&old.previous_realms).filter(|left| *left != realm);
            let left = before.take(PREVIOUS_REALMS).cloned().collect();
            SealerState { realm: Some(realm.clone()), previous_realms: left, ..SealerState::clone(old) }
        });
    }

    /// Replaces the keys. A key present in both sets keeps its usage count.
    pub fn replace_keys(&self, keys: &SessionKeys) {
        self.replace(|old| SealerState { keys: keys.succeeding(&old.keys), ..SealerState::clone(old) });
    }

    /// Refuses sessions issued before this second of the Unix epoch: the emergency revocation of all
    /// sessions.
    pub fn refuse_before(&self, not_before: u64) {
        self.replace(|old| SealerState { not_before, ..SealerState::clone(old) });
    }

    /// Applies `revocations` from now on. With `None` (revocations unknown), no session is opened and no
    /// login is admitted.
    pub fn apply_revocations(&self, revocations: Option<&Arc<Revocations>>) {
        self.apply(revocations, RevocationScope::AllCalls);
    }

    /// Applies `revocations` from now on, which suffice for local reads only
    /// ([`Sealer::is_for_local_reads`]).
    pub fn apply_to_local_reads(&self, revocations: &Arc<Revocations>) {
        self.apply(Some(revocations), RevocationScope::LocalReads);
    }

    fn apply(&self, revocations: Option<&Arc<Revocations>>, scope: RevocationScope) {
        let now = self.sealing.load();
        if now.scope != scope || now.revocations.as_ref() != revocations {
            let revocations = revocations.cloned();
            self.replace(|old| SealerState {
                revocations: revocations.clone(),
                scope,
                ..SealerState::clone(old)
            });
        }
    }

    fn replace(&self, change: impl Fn(&Arc<SealerState>) -> SealerState) {
        self.sealing.rcu(change);
        self.changes.send_modify(|count| *count += 1);
    }

    /// True if the revocations are known.
    #[must_use]
    pub fn knows_revocations(&self) -> bool {
        self.sealing.load().revocations.is_some()
    }

    /// True if the known revocations suffice only for calls that a member answers from its own store. The
    /// opener of a session, or the admitter of a user, must send no other call of the session or the user.
    #[must_use]
    pub fn is_for_local_reads(&self) -> bool {
        self.sealing.load().scope == RevocationScope::LocalReads
    }

    /// True if the served cluster differs from the first pinned cluster.
    #[must_use]
    pub fn has_followed(&self) -> bool {
        !self.sealing.load().previous_realms.is_empty()
    }

    /// A receiver notified whenever a valid session may have become invalid, with the number of the change.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The streams ended by the changes.
    #[must_use]
    pub fn ended_streams(&self) -> &Arc<EndedStreams> {
        &self.ended_streams
    }

    /// Waits until every shard has ended its streams that are no longer valid. Cancel-safe.
    pub async fn wait_until_applied(&self) {
        let newest = *self.changes.borrow();
        self.ended_streams.wait_until_applied(newest).await;
    }

    /// True if an opened session is still valid. While the revocations are unknown, a valid session stays
    /// valid.
    #[must_use]
    pub fn is_valid(&self, session: &Session) -> bool {
        let sealing = self.sealing.load();
        session.issued_at >= sealing.not_before
            && session.opened_by.is_none_or(|key| sealing.keys.find(key).is_some())
            && !sealing.revocations.as_ref().is_some_and(|revoked| revoked.refuse(session))
    }

    /// The generation for a new login of `user`. Call before the password check, so that a revocation during
    /// the check also ends the new login; call again after the check, to notice a block.
    ///
    /// # Errors
    /// See [`LoginInadmissible`].
    pub fn admit_login(&self, user: &UserName) -> Result<u64, LoginInadmissible> {
        let sealing = self.sealing.load();
        let standing = sealing.revocations.as_ref().ok_or(LoginInadmissible::NotKnown)?.user_revocation(user);
        if standing.blocked { Err(LoginInadmissible::Blocked) } else { Ok(standing.generation) }
    }

    /// Sessions recently sealed or opened by the process, unordered.
    #[must_use]
    pub fn listed_sessions(&self) -> Vec<ListedSession> {
        let seen = |session: Arc<Session>| ListedSession {
            id: session.id,
            peer: session.peer.to_string(),
            issued_at: session.issued_at,
            is_valid: self.is_valid(&session),
        };
        self.seen.iter().map(|(_, session)| seen(session)).collect()
    }

    fn remember_session(&self, session: &Session) {
        self.seen.insert(session.id, Arc::new(session.without_password()));
    }

    /// Number of sessions opened by each key, sealing key first. An unused key may be removed.
    #[must_use]
    pub fn opened_by_key(&self) -> Vec<(KeyId, u64)> {
        self.sealing.load().keys.opened()
    }

    /// The key derived for `purpose` from the session key `id`, or from the one that seals; `None` for a key
    /// that opens no session either.
    #[must_use]
    pub fn derived_key(&self, id: Option<KeyId>, purpose: &[u8]) -> Option<DerivedKey> {
        self.sealing.load().keys.derived(id, purpose)
    }

    /// Seals `session` into a token safe for use as a header value.
    ///
    /// # Errors
    /// See [`SealFailure`].
    pub fn seal(&self, session: &Session) -> Result<Secret<String>, SealFailure> {
        let sealing = self.sealing.load();
        let realm = sealing.realm.as_ref().ok_or(SealFailure::NotPinned)?.bytes();
        let key = sealing.keys.sealing();
        let plain = payload::encode(session).ok_or(SealFailure::TooLong)?;
        let nonce: [u8; NONCE] = random()?;
        let aad = associated_data(key.id(), &realm);
        let boxed = key
            .cipher()
            .encrypt(&XNonce::from(nonce), Payload { msg: &plain, aad: &aad })
            .map_err(|_too_long| SealFailure::TooLong)?;
        let token = [&key.id().0[..], &key.realm_tag(&realm), &nonce, &boxed].concat();
        let mut text = String::with_capacity(MARK.len() + token.len().div_ceil(3) * 4);
        text.push_str(MARK);
        BASE64URL_NOPAD.encode_append(&token, &mut text);
        self.remember_session(session);
        Ok(Secret::new(text))
    }

    /// Opens a token presented by a client.
    ///
    /// # Errors
    /// See [`OpenFailure`]; the client may learn no more than that the failure [is
    /// ours](OpenFailure::is_ours).
    pub fn open(&self, token: &[u8]) -> Result<Session, OpenFailure> {
        self.sealing.load().open(token).map(|(session, _key)| session)
    }

    fn sealing(&self) -> Arc<SealerState> {
        self.sealing.load_full()
    }
}

impl SealerState {
    /// The session and the index of the key used to open the token.
    fn open(&self, token: &[u8]) -> Result<(Session, usize), OpenFailure> {
        let encoded = token.strip_prefix(MARK.as_bytes()).ok_or(OpenFailure::NotOurs)?;
        if encoded.len() > LONGEST_TOKEN {
            return Err(OpenFailure::NotOurs);
        }
        let bytes = BASE64URL_NOPAD.decode(encoded).map_err(|_not_base64| OpenFailure::NotOurs)?;
        let (id, rest) = bytes.split_first_chunk::<KEY_ID>().ok_or(OpenFailure::NotOurs)?;
        let (tag, rest) = rest.split_first_chunk::<REALM_TAG>().ok_or(OpenFailure::NotOurs)?;
        let (nonce, boxed) = rest.split_first_chunk::<NONCE>().ok_or(OpenFailure::NotOurs)?;
        let realm = self.realm.as_ref().ok_or(OpenFailure::NotPinned)?;
        let (index, key) = self.keys.find(KeyId(*id)).ok_or(OpenFailure::UnknownKey)?;
        let mut realms = std::iter::once(realm).chain(&self.previous_realms).map(SealRealm::bytes);
        let realm = realms.find(|realm| key.realm_tag(realm) == *tag).ok_or(OpenFailure::ForeignRealm)?;
        let aad = associated_data(key.id(), &realm);
        let plain = key
            .cipher()
            .decrypt(&XNonce::from(*nonce), Payload { msg: boxed, aad: &aad })
            .map_err(|_forged| OpenFailure::Tampered)?;
        let mut session = payload::decode(&Zeroizing::new(plain)).ok_or(OpenFailure::NotOurs)?;
        session.opened_by = Some(key.id());
        if session.issued_at < self.not_before {
            return Err(OpenFailure::TooOld);
        }
        let revocations = self.revocations.as_ref().ok_or(OpenFailure::NotKnown)?;
        if revocations.refuse(&session) {
            let is_blocked = revocations.user_revocation(session.peer.user()).blocked;
            return Err(if is_blocked { OpenFailure::Blocked } else { OpenFailure::Revoked });
        }
        key.count();
        Ok((session, index))
    }
}

fn associated_data(id: KeyId, realm: &[u8]) -> Vec<u8> {
    [MARK.as_bytes(), &id.0, realm].concat()
}

fn random<const N: usize>() -> Result<[u8; N], SealFailure> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|_none| SealFailure::NoRandomness)?;
    Ok(bytes)
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sealing = self.sealing.load();
        f.debug_struct("Sealer").field("keys", &sealing.keys).field("realm", &sealing.realm).finish()
    }
}

impl fmt::Display for SessionPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.namespace(), self.user())
    }
}

impl fmt::Display for PeerNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Password => "password",
            Self::File => "file",
        })
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        HEXLOWER.encode_display(&self.0).fmt(f)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: ClusterId = ClusterId(0xcafe);

    pub(super) fn keys(seeds: &[u8]) -> SessionKeys {
        let secrets: Vec<_> = seeds.iter().map(|&seed| Secret::new([seed; 32])).collect();
        SessionKeys::new(&secrets).unwrap()
    }

    pub(super) fn sealer(seeds: &[u8]) -> Sealer {
        let sealer = Sealer::new(keys(seeds));
        sealer.pin(&SealRealm::new(None, CLUSTER));
        sealer
    }

    pub(super) fn login(user: &str, password: &str) -> Session {
        let peer = SessionPeer::Password { user: user.into(), password: Secret::new(password.to_owned()) };
        let now = UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
        Session::begin(peer, SessionProof::Etcd { auth_revision: 7 }, 3, now).unwrap()
    }

    pub(super) fn known_to_file(user: &str) -> Session {
        let peer = SessionPeer::Known { namespace: PeerNamespace::File, user: user.into() };
        Session { peer, proof: SessionProof::File { line: 0x0102_0304_0506_0708 }, ..login("", "") }
    }

    /// One session of every kind.
    pub(super) fn kinds() -> Vec<Session> {
        vec![
            login("ålice", "pass\0word ü"),
            Session { proof: SessionProof::None, ..login("ålice", "") },
            Session { proof: SessionProof::Etcd { auth_revision: u64::MAX }, ..login("ålice", "") },
            known_to_file("ålice"),
        ]
    }

    fn failure(sealer: &Sealer, token: &[u8]) -> Option<OpenFailure> {
        sealer.open(token).err()
    }

    #[test]
    fn what_was_sealed_is_what_opens() {
        let mut names = Vec::new();
        for session in kinds() {
            let token = sealer(&[1]).seal(&session).unwrap();
            let opened = sealer(&[1]).open(token.expose().as_bytes()).unwrap();
            let password = |of: &Session| of.peer.password().map(|password| password.expose().clone());
            assert_eq!(password(&opened), password(&session));
            assert_eq!(opened.proof, session.proof);
            assert_eq!((opened.issued_at, opened.generation, opened.id), (1_700_000_000, 3, session.id));
            names.push(opened.peer.to_string());
        }
        assert_eq!(names, ["password:ålice", "password:ålice", "password:ålice", "file:ålice"]);
    }

    #[test]
    fn sessions_of_clusters_that_were_followed_from_still_open_and_no_others() {
        let realm = |cluster| SealRealm::new(None, ClusterId(cluster));
        let sealer = Sealer::new(keys(&[1]));
        sealer.pin(&realm(1));
        let token = sealer.seal(&login("alice", "p")).unwrap();
        let opens = |sealer: &Sealer| failure(sealer, token.expose().as_bytes());
        sealer.follow(&realm(2));
        assert_eq!(opens(&sealer), None);
        sealer.pin(&realm(2));
        assert_eq!(opens(&sealer), None, "it is pinned already");
        let new = sealer.seal(&login("alice", "p")).unwrap();
        let alone = Sealer::new(keys(&[1]));
        alone.pin(&realm(2));
        assert_eq!(failure(&alone, new.expose().as_bytes()), None, "it seals for the new one");
        assert_eq!(opens(&alone), Some(OpenFailure::ForeignRealm), "who did not go along knows none");
        for cluster in 3..3 + u64::try_from(PREVIOUS_REALMS).unwrap() - 1 {
            sealer.follow(&realm(cluster));
            assert_eq!(opens(&sealer), None);
        }
        sealer.follow(&realm(99));
        assert_eq!(opens(&sealer), Some(OpenFailure::ForeignRealm), "not for ever");
        sealer.pin(&realm(100));
        assert_eq!(failure(&sealer, new.expose().as_bytes()), Some(OpenFailure::ForeignRealm));
    }

    #[test]
    fn a_token_is_a_plain_header_value_without_a_dot() {
        for _ in 0..64 {
            let token = sealer(&[1]).seal(&login("alice", "p")).unwrap();
            let text = token.expose().strip_prefix("kw1_").unwrap();
            assert!(text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'), "{text}");
        }
    }

    #[test]
    fn two_seals_of_one_session_differ() {
        let (sealer, session) = (sealer(&[1]), login("alice", "p"));
        assert_ne!(sealer.seal(&session).unwrap().expose(), sealer.seal(&session).unwrap().expose());
    }

    #[test]
    fn the_length_tells_nothing_of_the_password() {
        let length = |password: &str| sealer(&[1]).seal(&login("alice", password)).unwrap().expose().len();
        let lengths: Vec<_> = ["", "p", "correct horse battery staple", &"x".repeat(64)].map(length).into();
        assert_eq!(lengths, [lengths[0]; 4]);
        let kinds = kinds().iter().map(|s| sealer(&[1]).seal(s).unwrap().expose().len()).collect::<Vec<_>>();
        assert_eq!(kinds, [lengths[0]; 4], "nor whether there is one");
        assert!(length(&"x".repeat(200)) > lengths[0], "padding cannot hide what does not fit");
    }

    #[test]
    fn a_change_of_any_byte_is_refused() {
        let sealer = sealer(&[1]);
        let token = sealer.seal(&login("alice", "secret")).unwrap().expose().clone().into_bytes();
        for at in 0..token.len() {
            for other in [b'A', b'B', b'-', b'.', b'=', 0, 0xff] {
                let mut forged = token.clone();
                forged[at] = other;
                if forged != token {
                    assert!(sealer.open(&forged).is_err(), "byte {at} became {other}");
                }
            }
        }
        assert!(sealer.open(&token).is_ok());
    }

    #[test]
    fn a_token_that_was_cut_or_grew_is_refused() {
        let sealer = sealer(&[1]);
        let token = sealer.seal(&login("alice", "secret")).unwrap().expose().clone().into_bytes();
        for end in 0..token.len() {
            assert!(sealer.open(&token[..end]).is_err(), "cut at {end}");
        }
        for more in ["A", "AA", "AAA", "AAAA", "="] {
            assert!(sealer.open(&[&token, more.as_bytes()].concat()).is_err(), "{more} appended");
        }
        assert_eq!(failure(&sealer, &[b"kw1_", &[b'A'; 80_000][..]].concat()), Some(OpenFailure::NotOurs));
    }

    #[test]
    fn what_is_not_ours_is_told_from_what_was_altered() {
        let sealer = sealer(&[1]);
        let mut token = sealer.seal(&login("alice", "p")).unwrap().expose().clone();
        for alien in ["", "kw1_", "kw2_AAAA", "qYtnzHyBvJrjGmrV.54", "Bearer kw1_"] {
            assert_eq!(failure(&sealer, alien.as_bytes()), Some(OpenFailure::NotOurs), "{alien}");
        }
        let last = if token.pop() == Some('A') { 'Q' } else { 'A' };
        token.push(last);
        assert_eq!(failure(&sealer, token.as_bytes()), Some(OpenFailure::Tampered));
    }

    #[test]
    fn another_key_or_realm_does_not_open() {
        let token = sealer(&[1]).seal(&login("alice", "p")).unwrap();
        let token = token.expose().as_bytes();
        assert_eq!(failure(&sealer(&[2]), token), Some(OpenFailure::UnknownKey));
        let foreign = sealer(&[1]);
        for realm in [SealRealm::new(None, ClusterId(7)), SealRealm::new(Some("other"), CLUSTER)] {
            foreign.pin(&realm);
            assert_eq!(failure(&foreign, token), Some(OpenFailure::ForeignRealm), "{realm:?}");
        }
        foreign.pin(&SealRealm::new(Some("cafe"), CLUSTER));
        assert!(foreign.open(token).is_ok(), "the default name is the cluster's id");
    }

    #[test]
    fn without_a_cluster_nothing_is_sealed_or_opened() {
        let blind = Sealer::new(keys(&[1]));
        assert_eq!(blind.seal(&login("alice", "p")).err(), Some(SealFailure::NotPinned));
        let token = sealer(&[1]).seal(&login("alice", "p")).unwrap();
        assert_eq!(failure(&blind, token.expose().as_bytes()), Some(OpenFailure::NotPinned));
    }

    #[test]
    fn keys_rotate_in_two_steps_on_replicas_one_after_the_other() {
        let (a, b) = (sealer(&[1]), sealer(&[1]));
        let opens_on_both = |by: &Sealer| {
            let token = by.seal(&login("alice", "p")).unwrap();
            [&a, &b].map(|on| on.open(token.expose().as_bytes()).is_ok())
        };
        let old = a.seal(&login("alice", "p")).unwrap();
        for (replica, order) in [(&a, [1, 2]), (&b, [1, 2]), (&a, [2, 1]), (&b, [2, 1])] {
            replica.replace_keys(&keys(&order));
            assert_eq!([opens_on_both(&a), opens_on_both(&b)], [[true; 2]; 2], "{order:?}");
            assert!(replica.open(old.expose().as_bytes()).is_ok(), "{order:?}");
        }
        a.replace_keys(&keys(&[2]));
        assert_eq!(failure(&a, old.expose().as_bytes()), Some(OpenFailure::UnknownKey));
        assert!(b.open(old.expose().as_bytes()).is_ok());
    }

    #[test]
    fn a_key_counts_what_it_opened_across_a_rotation() {
        let sealer = sealer(&[1]);
        let old = sealer.seal(&login("alice", "p")).unwrap();
        sealer.open(old.expose().as_bytes()).unwrap();
        let first = sealer.opened_by_key();
        sealer.replace_keys(&keys(&[2, 1]));
        sealer.open(old.expose().as_bytes()).unwrap();
        assert!(sealer.open(b"kw1_AAAA").is_err());
        let counts = sealer.opened_by_key();
        assert_eq!((first[0].1, counts[0].1, counts[1]), (1, 0, (first[0].0, 2)));
    }

    #[test]
    fn sessions_before_the_break_glass_are_refused() {
        let sealer = sealer(&[1]);
        let token = sealer.seal(&login("alice", "p")).unwrap();
        sealer.refuse_before(1_700_000_000);
        assert!(sealer.open(token.expose().as_bytes()).is_ok());
        sealer.refuse_before(1_700_000_001);
        assert_eq!(failure(&sealer, token.expose().as_bytes()), Some(OpenFailure::TooOld));
    }

    #[test]
    fn what_was_revoked_opens_no_more_and_stands_no_more() {
        let sealer = sealer(&[1]);
        let mut changes = sealer.changes();
        let token = sealer.seal(&login("alice", "p")).unwrap();
        let session = sealer.open(token.expose().as_bytes()).unwrap();
        let revoke = |change: &RevocationChange| {
            let none = Revocations::default();
            Arc::new(none.with(none.entry(change, UNIX_EPOCH + std::time::Duration::from_secs(9))).unwrap())
        };
        for (change, stands) in [
            (RevocationChange::Revoke("bob".into()), true),
            (RevocationChange::Revoke("alice".into()), false),
            (RevocationChange::Block("alice".into()), false),
            (RevocationChange::RevokeSession(session.id), false),
        ] {
            changes.mark_unchanged();
            let revoked = revoke(&change);
            sealer.apply_revocations(Some(&revoked));
            assert!(changes.has_changed().unwrap(), "{change}");
            assert_eq!(sealer.is_valid(&session), stands, "{change}");
            let failed = failure(&sealer, token.expose().as_bytes());
            let is_block = matches!(change, RevocationChange::Block(_));
            let why = if is_block { OpenFailure::Blocked } else { OpenFailure::Revoked };
            assert_eq!(failed, (!stands).then_some(why), "{change}");
            changes.mark_unchanged();
            sealer.apply_revocations(Some(&Arc::new(Revocations::clone(&revoked))));
            assert!(!changes.has_changed().unwrap(), "the same again changes nothing");
        }
        sealer.apply_revocations(Some(&revoke(&RevocationChange::Revoke("alice".into()))));
        let generation = sealer.admit_login(&"alice".into()).unwrap();
        let again = Session { generation, ..login("alice", "p") };
        let again = sealer.seal(&again).unwrap();
        assert!(sealer.open(again.expose().as_bytes()).is_ok(), "a login after it is good");
        sealer.apply_revocations(Some(&revoke(&RevocationChange::Block("alice".into()))));
        assert_eq!(sealer.admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));
    }

    #[test]
    fn nothing_is_opened_while_nobody_knows_who_was_revoked() {
        let sealer = sealer(&[1]);
        let token = sealer.seal(&login("alice", "p")).unwrap();
        let session = sealer.open(token.expose().as_bytes()).unwrap();
        sealer.apply_revocations(None);
        let failed = failure(&sealer, token.expose().as_bytes()).unwrap();
        assert_eq!((failed, failed.is_ours()), (OpenFailure::NotKnown, true));
        assert_eq!(sealer.admit_login(&"alice".into()), Err(LoginInadmissible::NotKnown));
        assert!(sealer.is_valid(&session), "what stood goes on");
    }

    #[test]
    fn a_session_stands_as_long_as_its_key() {
        let sealer = sealer(&[1]);
        let token = sealer.seal(&login("alice", "p")).unwrap();
        let session = sealer.open(token.expose().as_bytes()).unwrap();
        sealer.replace_keys(&keys(&[2, 1]));
        assert!(sealer.is_valid(&session));
        sealer.replace_keys(&keys(&[2]));
        assert!(!sealer.is_valid(&session));
    }

    #[test]
    fn an_operator_is_told_of_sessions_and_never_of_a_token() {
        let sealer = sealer(&[1]);
        let sealed = login("alice", "hunter2");
        let token = sealer.seal(&sealed).unwrap();
        let seen = sealer.listed_sessions();
        assert_eq!((seen.len(), seen[0].id, &*seen[0].peer), (1, sealed.id, "password:alice"));
        assert!(seen[0].is_valid);
        sealer.refuse_before(u64::MAX);
        assert!(!sealer.listed_sessions()[0].is_valid);
        let shown = format!("{seen:?}");
        assert!(!shown.contains("hunter2") && !shown.contains(token.expose().as_str()), "{shown}");
    }

    #[test]
    fn of_more_sessions_than_are_kept_the_newest_are_listed() {
        let sealer = sealer(&[1]);
        let sessions: Vec<Session> = (0..LISTED_SESSIONS + 1000).map(|_| login("alice", "p")).collect();
        for session in &sessions {
            sealer.remember_session(session);
            // Use of the oldest session does not protect the session from eviction.
            sealer.remember_session(&sessions[0]);
        }
        sealer.seen.run_pending_tasks();
        let seen: std::collections::HashSet<_> =
            sealer.listed_sessions().into_iter().map(|seen| seen.id).collect();
        let newest = sessions.iter().rev().take(1000).filter(|session| seen.contains(&session.id)).count();
        assert_eq!((newest, seen.len()), (1000, usize::try_from(LISTED_SESSIONS).unwrap()));
    }

    #[test]
    fn a_password_that_fits_in_no_token_is_not_sealed() {
        let longest = login("alice", &"x".repeat(4096));
        let token = sealer(&[1]).seal(&longest).unwrap();
        assert!(sealer(&[1]).open(token.expose().as_bytes()).is_ok());
        let longer = login("alice", &"x".repeat(4097));
        assert_eq!(sealer(&[1]).seal(&longer).err(), Some(SealFailure::TooLong));
    }

    #[test]
    fn a_token_of_an_earlier_build_still_opens() {
        let token =
            b"kw1_wPfbXAOC1ebVBqR3p2tMllftuGDRjMHpOh8Za4g3XMGMi2ws8T0Z7pxI2mIdNgAgSQJIo92Kfwo2nCGkZu3C\
            PKjarA1zzIClOH41dWPWDyljdPoQ5P4NOo_3eitI7eq47ZsWbmB3WhqzIrxtRZiMbAMqYudZyzVexcf4LN4BU6AeY2HRZBx4\
            cVMT4_bnurEcDNqlUNaJ06F6TAnE2XDlD5q8IATFc3HJxj4yBGh0Kd7uu2SCf-WRzw";
        let opened = sealer(&[1]).open(token).unwrap();
        assert_eq!(opened.peer.to_string(), "password:alice");
        assert_eq!(opened.peer.password().unwrap().expose(), "hunter2");
        assert_eq!(opened.proof, SessionProof::Etcd { auth_revision: 0 }, "it knew of none");
        assert_eq!((opened.issued_at, opened.generation), (1_700_000_000, 3));
        assert_eq!(opened.id.to_string(), "2188fb71f3e76d20bc325cea09efdc7c");
    }

    #[test]
    fn debug_shows_no_secret() {
        let session = login("alice", "hunter2");
        let token = sealer(&[65]).seal(&session).unwrap();
        let shown = format!("{session:?} {token:?} {:?} {:?}", sealer(&[65]), keys(&[65]));
        assert!(shown.contains("alice") && shown.contains(&session.id.to_string()), "{shown}");
        assert!(
            !shown.contains("hunter2") && !shown.contains("65, 65") && !shown.contains("kw1_"),
            "{shown}"
        );
    }
}
