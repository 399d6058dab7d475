//! Session keys: the first key seals, all keys open.
//!
//! Owns: the keys derived from a key file's 32 bytes, and the usage count of each key. Must not know: files,
//! tokens.
//! Invariant: the file's bytes are never used as a key directly; each purpose has its own HKDF output.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use chacha20poly1305::{KeyInit as _, XChaCha20Poly1305};
use data_encoding::HEXLOWER;
use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use super::{KEY_ID, REALM_TAG};
use keyward_base::secret::Secret;

/// Identifies a key without revealing the key; readable in every token sealed by the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyId(pub(super) [u8; KEY_ID]);

impl KeyId {
    /// Bytes of an id.
    pub const LENGTH: usize = KEY_ID;

    /// The id with these bytes, which need not be of a known key.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; KEY_ID]) -> Self {
        Self(bytes)
    }

    /// The bytes of the id.
    #[must_use]
    pub const fn bytes(self) -> [u8; KEY_ID] {
        self.0
    }
}

/// A key for one further purpose, derived from a session key: neither tells anything of the other.
#[derive(Debug)]
pub struct DerivedKey {
    /// The id of the session key.
    pub id: KeyId,
    /// The key itself.
    pub key: Secret<[u8; 32]>,
}

/// The keys shared by all replicas, in order: the first key seals, all keys open. Never empty.
#[derive(Clone, Debug)]
pub struct SessionKeys(Arc<[Arc<SealKey>]>);

/// No key was given, so sessions cannot be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at least one session key is needed")]
pub struct NoSessionKey;

pub(super) struct SealKey {
    id: KeyId,
    cipher: XChaCha20Poly1305,
    derive: Hkdf<Sha256>,
    opened: Arc<AtomicU64>,
}

impl SessionKeys {
    /// Keys from the replicas' shared secrets, sealing key first. A secret given twice counts once.
    ///
    /// # Errors
    /// [`NoSessionKey`] if `secrets` is empty.
    pub fn new<'a>(secrets: impl IntoIterator<Item = &'a Secret<[u8; 32]>>) -> Result<Self, NoSessionKey> {
        let mut keys: Vec<Arc<SealKey>> = Vec::new();
        for secret in secrets {
            let key = SealKey::derive(secret.expose());
            if keys.iter().all(|known| known.id != key.id) {
                keys.push(Arc::new(key));
            }
        }
        if keys.is_empty() { Err(NoSessionKey) } else { Ok(Self(keys.into())) }
    }

    /// The same keys; keys already present in `before` keep their usage counts.
    pub(super) fn succeeding(&self, before: &Self) -> Self {
        let keys = self.0.iter().map(|key| before.find(key.id).map_or(key, |(_, known)| known));
        Self(keys.cloned().collect())
    }

    pub(super) fn sealing(&self) -> &SealKey {
        self.0.first().expect("`new` makes no empty set, `succeeding` keeps the length")
    }

    pub(super) fn find(&self, id: KeyId) -> Option<(usize, &Arc<SealKey>)> {
        self.0.iter().enumerate().find(|(_, key)| key.id == id)
    }

    /// The key derived for `purpose` from the session key `id`, or from the sealing key; `None` for a session
    /// key that is not among these.
    pub(super) fn derived(&self, id: Option<KeyId>, purpose: &[u8]) -> Option<DerivedKey> {
        let from = match id {
            Some(id) => self.find(id)?.1,
            None => self.sealing(),
        };
        let mut key = Zeroizing::new([0; 32]);
        expand(&from.derive, &[purpose], &mut *key);
        Some(DerivedKey { id: from.id, key: Secret::new(*key) })
    }

    /// Counts one use of the key at `index`.
    pub(super) fn count(&self, index: usize) {
        if let Some(key) = self.0.get(index) {
            key.count();
        }
    }

    /// The id of each key and the number of sessions opened by the key; the sealing key first.
    #[must_use]
    pub fn opened(&self) -> Vec<(KeyId, u64)> {
        self.0.iter().map(|key| (key.id, key.opened.load(Ordering::Relaxed))).collect()
    }
}

impl SealKey {
    fn derive(secret: &[u8; 32]) -> Self {
        let derive = Hkdf::<Sha256>::new(None, secret);
        let mut key = Zeroizing::new([0; 32]);
        expand(&derive, &[b"keyward session key v1"], &mut *key);
        let mut id = [0; KEY_ID];
        expand(&derive, &[b"keyward session key id v1"], &mut id);
        let cipher = XChaCha20Poly1305::new((&*key).into());
        Self { id: KeyId(id), cipher, derive, opened: Arc::default() }
    }

    pub(super) fn id(&self) -> KeyId {
        self.id
    }

    pub(super) fn cipher(&self) -> &XChaCha20Poly1305 {
        &self.cipher
    }

    pub(super) fn count(&self) {
        self.opened.fetch_add(1, Ordering::Relaxed);
    }

    /// A tag to distinguish tokens of another realm from forged tokens, for logs and metrics only. Tokens of
    /// another realm are refused by the associated data.
    pub(super) fn realm_tag(&self, realm: &[u8]) -> [u8; REALM_TAG] {
        let mut tag = [0; REALM_TAG];
        expand(&self.derive, &[b"keyward session realm v1", realm], &mut tag);
        tag
    }
}

fn expand(derive: &Hkdf<Sha256>, purpose: &[&[u8]], out: &mut [u8]) {
    derive.expand_multi_info(purpose, out).expect("at most 32 bytes are asked for, HKDF-SHA256 gives 8160");
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        HEXLOWER.encode_display(&self.0).fmt(f)
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.id, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_always_a_sealing_key_and_no_key_twice() {
        assert_eq!(SessionKeys::new(&[]).err(), Some(NoSessionKey));
        let secrets = [1, 2, 1].map(|seed| Secret::new([seed; 32]));
        let keys = SessionKeys::new(&secrets).unwrap();
        assert_eq!(keys.opened().len(), 2);
        assert_eq!(keys.sealing().id, SessionKeys::new(&secrets[..1]).unwrap().sealing().id);
    }

    #[test]
    fn a_derived_key_differs_by_purpose_and_by_session_key() {
        let keys = SessionKeys::new(&[1, 2].map(|seed| Secret::new([seed; 32]))).unwrap();
        let derived = |id, purpose: &[u8]| *keys.derived(id, purpose).expect("known").key.expose();
        let second = keys.opened()[1].0;
        let all = [
            derived(None, b"a"),
            derived(None, b"b"),
            derived(Some(second), b"a"),
            derived(None, b"keyward session key id v1"),
        ];
        assert!((1..all.len()).all(|at| !all[..at].contains(&all[at])));
        assert_eq!(derived(Some(keys.sealing().id()), b"a"), all[0], "the sealing key is the default");
        assert!(keys.derived(Some(KeyId([0; KEY_ID])), b"a").is_none());
        assert_eq!(KeyId::from_bytes(second.bytes()), second);
    }

    #[test]
    fn a_key_is_the_same_on_every_replica_and_release() {
        let keys = SessionKeys::new(&[Secret::new([7; 32])]).unwrap();
        assert_eq!(keys.sealing().id.to_string(), "db38e5a06edb9f5a", "tokens in the field would be lost");
    }
}
