//! Sealed sessions: what a client gets from `Authenticate` and shows us ever after.
//!
//! Owns: the session token's format, sealing and opening, and whether a session still stands. Must not know: how a
//! password is checked, who keeps revocations, etcd's own tokens.
//! Invariants: a session is stored nowhere, every replica with the key opens it; a token has no dot (etcd would take
//! what follows for a raft index and wait for it) and its length tells nothing of the password's; whatever is wrong
//! with a token, the client is told the same; while it is not known who was revoked, nothing is opened (rules 13).
//!
//! Token = `kw1_` + base64url of: key id (8) · realm tag (8) · nonce (24) · XChaCha20-Poly1305 box. Associated data:
//! version, key id, realm, cluster id.

mod keys;
mod opened;
mod payload;
mod presented;
mod revoked;

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chacha20poly1305::XNonce;
use chacha20poly1305::aead::{Aead as _, Payload};
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::sync::watch;
use zeroize::Zeroizing;

use crate::identity::{ClusterId, UserName};
use crate::secret::Secret;

pub use keys::{KeyId, NoSessionKey, SessionKeys};
pub use opened::OpenedSessions;
pub use presented::Presented;
pub use revoked::{Change, Entry, Full, MOST_ENTRIES, NoSessionId, Revocations, Standing};

/// What every session token starts with: our mark and the version of the format.
const MARK: &str = "kw1_";
const KEY_ID: usize = 8;
const REALM_TAG: usize = 8;
const NONCE: usize = 24;
/// Twice what a seal may become: header lists are at most 64 KiB, a sealed session far less.
const LONGEST_TOKEN: usize = 16 * 1024;
/// Clusters that were left whose sessions still open.
const LEFT: usize = 8;
/// Sessions that an operator is told of: those seen last, some 200 bytes each.
const SEEN: u64 = 4096;

/// A downstream login, as it is sealed into a token.
#[derive(Debug)]
pub struct Session {
    /// Who logged in.
    pub peer: SessionPeer,
    /// What the login proved at the time.
    pub proof: Proof,
    /// When it was issued, in seconds of the Unix epoch.
    pub issued_at: u64,
    /// The user's generation at the time; revoking a user raises it.
    pub generation: u64,
    /// Names this one login, for the log and for revoking it.
    pub id: SessionId,
    /// The key that opened it; none before it was sealed.
    pub opened_by: Option<KeyId>,
}

/// Who a session speaks for, in its own namespace: `password:alice` is nobody else's `alice`.
#[derive(Debug)]
pub enum SessionPeer {
    /// Logged in by user name and password; the password is carried so that any replica can log in upstream, and prove
    /// it once more.
    Password {
        /// The name as the client gave it.
        user: UserName,
        /// The password as the client gave it.
        password: Secret<String>,
    },
    /// Logged in, and nothing of the client's is needed any more: we act with credentials of our own.
    Known {
        /// Who vouched for the name.
        namespace: Namespace,
        /// The name as the client gave it.
        user: UserName,
    },
}

/// Who vouched for the name of a login. The same name in two of them is two peers (rules 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Namespace {
    /// etcd: `password:alice`.
    Password,
    /// The users file: `file:alice`.
    File,
}

/// What a login proved, and as of when: what it was measured against may change (rules 12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// Nothing: auth was off upstream. Never mapped to an etcd user; its password must verify once auth is on.
    None,
    /// etcd accepted the password.
    Etcd {
        /// etcd's auth revision at the time; 0 where it was not known.
        auth_revision: u64,
    },
    /// The users file accepted the password.
    File {
        /// A digest of the user's line at the time: another line is another password.
        line: u64,
    },
}

/// A random name for one login. Tells nothing of the token; logged at login.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId([u8; 16]);

/// For whom sessions are sealed: replicas of one realm in front of one cluster accept each other's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Realm {
    name: String,
    cluster: ClusterId,
}

/// Seals and opens sessions. Shared by all shards; keys, realm and revocations are replaced whole, at run time.
pub struct Sealer {
    sealing: ArcSwap<Sealing>,
    /// Moves after each replacement.
    changes: watch::Sender<()>,
    seen: Cache<SessionId, Arc<Session>>,
}

/// A session that was sealed or opened here, as an operator is told of it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its name.
    pub id: SessionId,
    /// Whose it is.
    pub peer: String,
    /// When it was issued, in seconds of the Unix epoch.
    pub issued_at: u64,
    /// Whether it still stands.
    pub stands: bool,
}

/// Why a user may not log in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Inadmissible {
    /// The user was blocked.
    #[error("the user is blocked")]
    Blocked,
    /// It is not known who was revoked or blocked. Our state, not the client's fault.
    #[error("it is not known who was revoked")]
    NotKnown,
}

#[derive(Clone)]
struct Sealing {
    keys: SessionKeys,
    realm: Option<Realm>,
    /// Those of clusters that were left for this one, the last first: what was sealed for them still opens.
    left: Vec<Realm>,
    not_before: u64,
    /// None while it is not known who was revoked.
    revocations: Option<Arc<Revocations>>,
}

/// Why a token was not opened. For logs and metrics: a client is never told which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenFailure {
    /// Not a token of ours at all, or of a version that we do not know.
    #[error("not a session token of this kind")]
    NotOurs,
    /// Sealed by a key that is not among ours, or not any more.
    #[error("sealed by an unknown key")]
    UnknownKey,
    /// Sealed by our key for another realm or cluster.
    #[error("sealed for another realm")]
    ForeignRealm,
    /// Altered after it was sealed.
    #[error("altered after it was sealed")]
    Tampered,
    /// Issued before the configured `not_before`.
    #[error("issued before session.not_before")]
    TooOld,
    /// The session, or all that its user had, was revoked.
    #[error("revoked")]
    Revoked,
    /// It is not known who was revoked. Our state as well.
    #[error("it is not known who was revoked")]
    NotKnown,
    /// The cluster is not known yet. Our state, not the client's fault: it is unavailable, not unauthenticated.
    #[error("the cluster is not known yet")]
    NotPinned,
}

/// Why a session was not sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealFailure {
    /// The cluster is not known yet.
    #[error("the cluster is not known yet")]
    NotPinned,
    /// User name and password together do not fit into a token.
    #[error("user name and password are too long for a session")]
    TooLong,
    /// The system gave no random bytes.
    #[error("no random bytes from the system")]
    NoRandomness,
}

impl Session {
    /// A new login, now, with an id of its own.
    ///
    /// # Errors
    /// [`SealFailure::NoRandomness`].
    pub fn begin(
        peer: SessionPeer,
        proof: Proof,
        generation: u64,
        now: SystemTime,
    ) -> Result<Self, SealFailure> {
        let issued_at = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(Self { peer, proof, issued_at, generation, id: SessionId(random()?), opened_by: None })
    }
}

impl Session {
    /// For what outlives the call: who it is, and nothing that proves it.
    fn without_password(&self) -> Self {
        let (namespace, user) = (self.peer.namespace(), self.peer.user().clone());
        Self { peer: SessionPeer::Known { namespace, user }, ..*self }
    }
}

impl OpenFailure {
    /// Whether it says nothing of the token, but that we cannot tell yet: the client may try again.
    #[must_use]
    pub fn is_ours(self) -> bool {
        matches!(self, Self::NotPinned | Self::NotKnown)
    }
}

impl SessionPeer {
    /// The name as the client gave it.
    #[must_use]
    pub fn user(&self) -> &UserName {
        match self {
            Self::Password { user, .. } | Self::Known { user, .. } => user,
        }
    }

    /// Who vouched for it.
    #[must_use]
    pub fn namespace(&self) -> Namespace {
        match self {
            Self::Password { .. } => Namespace::Password,
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

impl Realm {
    /// The realm `name`, or by default the cluster's own id, in front of `cluster`.
    #[must_use]
    pub fn new(name: Option<&str>, cluster: ClusterId) -> Self {
        Self { name: name.map_or_else(|| cluster.to_string(), str::to_owned), cluster }
    }

    /// Unambiguous bytes: the fixed part first, the name last.
    fn bytes(&self) -> Vec<u8> {
        [&self.cluster.0.to_be_bytes()[..], self.name.as_bytes()].concat()
    }
}

impl Sealer {
    /// A sealer that knows no cluster yet: it seals and opens nothing before [`Sealer::pin`]. Nobody is revoked.
    #[must_use]
    pub fn new(keys: SessionKeys) -> Self {
        let sealing =
            Sealing { keys, realm: None, left: Vec::new(), not_before: 0, revocations: Some(Arc::default()) };
        Self {
            sealing: ArcSwap::from_pointee(sealing),
            changes: watch::Sender::new(()),
            // moka's default would keep what is used often, and turn the newest away.
            seen: Cache::builder().max_capacity(SEEN).eviction_policy(EvictionPolicy::lru()).build(),
        }
    }

    /// From now on seals and opens for `realm` only; where it does so already, for those too that it was followed from.
    pub fn pin(&self, realm: &Realm) {
        if self.sealing.load().realm.as_ref() != Some(realm) {
            self.replace(|old| Sealing {
                realm: Some(realm.clone()),
                left: Vec::new(),
                ..Sealing::clone(old)
            });
        }
    }

    /// From now on seals for `realm`, whose cluster is followed. What was sealed for the ones before still opens: whom it speaks
    /// for is to be proved to the new cluster by whoever goes on with it.
    pub fn follow(&self, realm: &Realm) {
        self.replace(|old| {
            let before = old.realm.iter().chain(&old.left).filter(|left| *left != realm);
            let left = before.take(LEFT).cloned().collect();
            Sealing { realm: Some(realm.clone()), left, ..Sealing::clone(old) }
        });
    }

    /// Replaces the keys. Counts of keys that stay go on.
    pub fn replace_keys(&self, keys: &SessionKeys) {
        self.replace(|old| Sealing { keys: keys.succeeding(&old.keys), ..Sealing::clone(old) });
    }

    /// Refuses sessions issued before this second of the Unix epoch: the break-glass.
    pub fn refuse_before(&self, not_before: u64) {
        self.replace(|old| Sealing { not_before, ..Sealing::clone(old) });
    }

    /// From now on refuses what these say; where none are known, opens and admits nothing.
    pub fn obey(&self, revocations: Option<&Arc<Revocations>>) {
        if self.sealing.load().revocations.as_ref() != revocations {
            self.replace(|old| Sealing { revocations: revocations.cloned(), ..Sealing::clone(old) });
        }
    }

    fn replace(&self, change: impl Fn(&Arc<Sealing>) -> Sealing) {
        self.sealing.rcu(change);
        self.changes.send_replace(());
    }

    /// Whether it is known who was revoked.
    #[must_use]
    pub fn knows(&self) -> bool {
        self.sealing.load().revocations.is_some()
    }

    /// Whether another cluster is served than at the start.
    #[must_use]
    pub fn has_followed(&self) -> bool {
        !self.sealing.load().left.is_empty()
    }

    /// Moves whenever a session that stood may stand no more.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Whether an opened session still stands. Where it cannot be told, what stood goes on.
    #[must_use]
    pub fn stands(&self, session: &Session) -> bool {
        let sealing = self.sealing.load();
        session.issued_at >= sealing.not_before
            && session.opened_by.is_none_or(|key| sealing.keys.find(key).is_some())
            && !sealing.revocations.as_ref().is_some_and(|revoked| revoked.refuse(session))
    }

    /// The generation that a login of this user begins with. To be asked before the password is looked at, so that
    /// what is revoked meanwhile ends this login too, and again after it, for a block.
    ///
    /// # Errors
    /// See [`Inadmissible`].
    pub fn admit(&self, user: &UserName) -> Result<u64, Inadmissible> {
        let sealing = self.sealing.load();
        let standing = sealing.revocations.as_ref().ok_or(Inadmissible::NotKnown)?.standing(user);
        if standing.blocked { Err(Inadmissible::Blocked) } else { Ok(standing.generation) }
    }

    /// Sessions that were sealed or opened here lately, in no order.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        let seen = |session: Arc<Session>| Seen {
            id: session.id,
            peer: session.peer.to_string(),
            issued_at: session.issued_at,
            stands: self.stands(&session),
        };
        self.seen.iter().map(|(_, session)| seen(session)).collect()
    }

    fn note(&self, session: &Session) {
        self.seen.insert(session.id, Arc::new(session.without_password()));
    }

    /// How often each key was used to open a session, sealing key first. A key at rest may be taken away.
    #[must_use]
    pub fn opened_by_key(&self) -> Vec<(KeyId, u64)> {
        self.sealing.load().keys.opened()
    }

    /// Seals `session` into a token that is safe as a header value.
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
        URL_SAFE_NO_PAD.encode_string(&token, &mut text);
        self.note(session);
        Ok(Secret::new(text))
    }

    /// Opens what a client presented.
    ///
    /// # Errors
    /// See [`OpenFailure`]; only what [is ours](OpenFailure::is_ours) may be told apart by the client.
    pub fn open(&self, token: &[u8]) -> Result<Session, OpenFailure> {
        self.sealing.load().open(token).map(|(session, _key)| session)
    }

    fn sealing(&self) -> Arc<Sealing> {
        self.sealing.load_full()
    }
}

impl Sealing {
    /// The session, and which of the keys opened it.
    fn open(&self, token: &[u8]) -> Result<(Session, usize), OpenFailure> {
        let encoded = token.strip_prefix(MARK.as_bytes()).ok_or(OpenFailure::NotOurs)?;
        if encoded.len() > LONGEST_TOKEN {
            return Err(OpenFailure::NotOurs);
        }
        let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_not_base64| OpenFailure::NotOurs)?;
        let (id, rest) = bytes.split_first_chunk::<KEY_ID>().ok_or(OpenFailure::NotOurs)?;
        let (tag, rest) = rest.split_first_chunk::<REALM_TAG>().ok_or(OpenFailure::NotOurs)?;
        let (nonce, boxed) = rest.split_first_chunk::<NONCE>().ok_or(OpenFailure::NotOurs)?;
        let realm = self.realm.as_ref().ok_or(OpenFailure::NotPinned)?;
        let (index, key) = self.keys.find(KeyId(*id)).ok_or(OpenFailure::UnknownKey)?;
        let mut realms = std::iter::once(realm).chain(&self.left).map(Realm::bytes);
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
        if self.revocations.as_ref().ok_or(OpenFailure::NotKnown)?.refuse(&session) {
            return Err(OpenFailure::Revoked);
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

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Password => "password",
            Self::File => "file",
        })
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
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
        sealer.pin(&Realm::new(None, CLUSTER));
        sealer
    }

    pub(super) fn login(user: &str, password: &str) -> Session {
        let peer = SessionPeer::Password { user: user.into(), password: Secret::new(password.to_owned()) };
        let now = UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
        Session::begin(peer, Proof::Etcd { auth_revision: 7 }, 3, now).unwrap()
    }

    pub(super) fn known_to_file(user: &str) -> Session {
        let peer = SessionPeer::Known { namespace: Namespace::File, user: user.into() };
        Session { peer, proof: Proof::File { line: 0x0102_0304_0506_0708 }, ..login("", "") }
    }

    /// A session of every kind.
    pub(super) fn kinds() -> Vec<Session> {
        vec![
            login("ålice", "pass\0word ü"),
            Session { proof: Proof::None, ..login("ålice", "") },
            Session { proof: Proof::Etcd { auth_revision: u64::MAX }, ..login("ålice", "") },
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
        let realm = |cluster| Realm::new(None, ClusterId(cluster));
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
        for cluster in 3..3 + u64::try_from(LEFT).unwrap() - 1 {
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
        for realm in [Realm::new(None, ClusterId(7)), Realm::new(Some("other"), CLUSTER)] {
            foreign.pin(&realm);
            assert_eq!(failure(&foreign, token), Some(OpenFailure::ForeignRealm), "{realm:?}");
        }
        foreign.pin(&Realm::new(Some("cafe"), CLUSTER));
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
        let revoke = |change: &Change| {
            let none = Revocations::default();
            Arc::new(none.with(none.entry(change, UNIX_EPOCH + std::time::Duration::from_secs(9))).unwrap())
        };
        for (change, stands) in [
            (Change::Revoke("bob".into()), true),
            (Change::Revoke("alice".into()), false),
            (Change::Block("alice".into()), false),
            (Change::RevokeSession(session.id), false),
        ] {
            changes.mark_unchanged();
            let revoked = revoke(&change);
            sealer.obey(Some(&revoked));
            assert!(changes.has_changed().unwrap(), "{change}");
            assert_eq!(sealer.stands(&session), stands, "{change}");
            let failed = failure(&sealer, token.expose().as_bytes());
            assert_eq!(failed, (!stands).then_some(OpenFailure::Revoked), "{change}");
            changes.mark_unchanged();
            sealer.obey(Some(&Arc::new(Revocations::clone(&revoked))));
            assert!(!changes.has_changed().unwrap(), "the same again changes nothing");
        }
        sealer.obey(Some(&revoke(&Change::Revoke("alice".into()))));
        let generation = sealer.admit(&"alice".into()).unwrap();
        let again = Session { generation, ..login("alice", "p") };
        let again = sealer.seal(&again).unwrap();
        assert!(sealer.open(again.expose().as_bytes()).is_ok(), "a login after it is good");
        sealer.obey(Some(&revoke(&Change::Block("alice".into()))));
        assert_eq!(sealer.admit(&"alice".into()), Err(Inadmissible::Blocked));
    }

    #[test]
    fn nothing_is_opened_while_nobody_knows_who_was_revoked() {
        let sealer = sealer(&[1]);
        let token = sealer.seal(&login("alice", "p")).unwrap();
        let session = sealer.open(token.expose().as_bytes()).unwrap();
        sealer.obey(None);
        let failed = failure(&sealer, token.expose().as_bytes()).unwrap();
        assert_eq!((failed, failed.is_ours()), (OpenFailure::NotKnown, true));
        assert_eq!(sealer.admit(&"alice".into()), Err(Inadmissible::NotKnown));
        assert!(sealer.stands(&session), "what stood goes on");
    }

    #[test]
    fn a_session_stands_as_long_as_its_key() {
        let sealer = sealer(&[1]);
        let token = sealer.seal(&login("alice", "p")).unwrap();
        let session = sealer.open(token.expose().as_bytes()).unwrap();
        sealer.replace_keys(&keys(&[2, 1]));
        assert!(sealer.stands(&session));
        sealer.replace_keys(&keys(&[2]));
        assert!(!sealer.stands(&session));
    }

    #[test]
    fn an_operator_is_told_of_sessions_and_never_of_a_token() {
        let sealer = sealer(&[1]);
        let sealed = login("alice", "hunter2");
        let token = sealer.seal(&sealed).unwrap();
        let seen = sealer.seen();
        assert_eq!((seen.len(), seen[0].id, &*seen[0].peer), (1, sealed.id, "password:alice"));
        assert!(seen[0].stands);
        sealer.refuse_before(u64::MAX);
        assert!(!sealer.seen()[0].stands);
        let shown = format!("{seen:?}");
        assert!(!shown.contains("hunter2") && !shown.contains(token.expose().as_str()), "{shown}");
    }

    #[test]
    fn of_more_sessions_than_are_kept_the_newest_are_listed() {
        let sealer = sealer(&[1]);
        let sessions: Vec<Session> = (0..SEEN + 1000).map(|_| login("alice", "p")).collect();
        for session in &sessions {
            sealer.note(session);
            // The oldest are in use: that does not make them stay.
            sealer.note(&sessions[0]);
        }
        sealer.seen.run_pending_tasks();
        let seen: std::collections::HashSet<_> = sealer.seen().into_iter().map(|seen| seen.id).collect();
        let newest = sessions.iter().rev().take(1000).filter(|session| seen.contains(&session.id)).count();
        assert_eq!((newest, seen.len()), (1000, usize::try_from(SEEN).unwrap()));
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
        assert_eq!(opened.proof, Proof::Etcd { auth_revision: 0 }, "it knew of none");
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
