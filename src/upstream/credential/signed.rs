//! An etcd user that proves itself by a token that we sign with etcd's own key.
//!
//! Owns: what such a token says, and when another is signed. Must not know: how the auth revision is found out.
//! Invariants: a token carries the auth revision that was known when it was signed (etcd compares for equality, for
//! reads); once a member called that old, no token with it is signed again before the revision was asked for anew; a
//! token that was refused is replaced, but never by one that would be the same.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwapOption;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, Mac as _};
use http::HeaderValue;
use rustls::SignatureScheme;
use sha2::{Sha256, Sha384, Sha512};
use tokio::time::Instant;

use super::identity::Token;
use super::revision::Revisions;
use super::{LoginFailure, Shared};
use crate::config::users::{JwtKey, JwtKind, SignJwt};
use crate::identity::UserName;

/// Signs tokens with one key.
pub(super) struct Signer {
    config: Arc<SignJwt>,
    revisions: Revisions,
    shared: Arc<Shared>,
    signed: AtomicU64,
}

/// An etcd user whom we sign tokens for. They are the same for all members.
pub struct SignedIdentity {
    user: UserName,
    signer: Arc<Signer>,
    last: ArcSwapOption<Signed>,
}

/// A token that was refused is shown for this long all the same: its end is told in seconds, so that one signed now would
/// be the same. Where all are refused, no more are signed.
const SAME: Duration = Duration::from_secs(1);

struct Signed {
    token: Token,
    revision: u64,
    /// By both clocks.
    since: (Instant, SystemTime),
    refused: AtomicBool,
}

impl Signed {
    /// Whether it is still to be shown: by both clocks, since one stands still while the machine sleeps, and the other may
    /// have been wrong.
    fn is_good(&self, lifetime: Duration, now: (Instant, SystemTime)) -> bool {
        let walls = now.1.duration_since(self.since.1).unwrap_or_default();
        let age = now.0.saturating_duration_since(self.since.0).max(walls);
        age < if self.refused.load(Ordering::Relaxed) { SAME } else { used_for(lifetime) }
    }
}

/// The key does not sign: the check of the configuration took it.
#[derive(Debug, thiserror::Error)]
#[error("sign_jwt.key does not sign")]
pub(super) struct NotSigned;

impl Signer {
    pub(super) fn new(config: &Arc<SignJwt>, revisions: Revisions, shared: Arc<Shared>) -> Arc<Self> {
        let (config, signed) = (Arc::clone(config), AtomicU64::new(0));
        Arc::new(Self { config, revisions, shared, signed })
    }

    pub(super) fn revisions(&self) -> &Revisions {
        &self.revisions
    }

    /// How many tokens were signed.
    pub(super) fn signed(&self) -> u64 {
        self.signed.load(Ordering::Relaxed)
    }

    /// A token for `user` at this auth revision, good from now.
    pub(super) fn sign(&self, user: &str, revision: u64, now: SystemTime) -> Result<HeaderValue, NotSigned> {
        let expires = now + self.config.lifetime;
        let expires = expires.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let part = |text: &str| URL_SAFE_NO_PAD.encode(text);
        let header = part(&format!("{{\"alg\":\"{}\",\"typ\":\"JWT\"}}", self.config.method.name));
        let claims =
            part(&format!("{{\"username\":{},\"revision\":{revision},\"exp\":{expires}}}", quoted(user)));
        let body = format!("{header}.{claims}");
        let signature = signature(&self.config, body.as_bytes()).ok_or(NotSigned)?;
        let token = format!("{body}.{}", URL_SAFE_NO_PAD.encode(signature));
        self.signed.fetch_add(1, Ordering::Relaxed);
        HeaderValue::try_from(token).map_err(|_| NotSigned)
    }
}

impl SignedIdentity {
    pub(super) fn new(user: &UserName, signer: &Arc<Signer>) -> Arc<Self> {
        Arc::new(Self { user: user.clone(), signer: Arc::clone(signer), last: ArcSwapOption::empty() })
    }

    /// The etcd user.
    #[must_use]
    pub fn user(&self) -> &UserName {
        &self.user
    }

    /// A token with the auth revision that is known, where it is; signed anew when its time is nearly over.
    ///
    /// # Errors
    /// The auth revision cannot be found out.
    pub async fn token(&self) -> Result<Token, LoginFailure> {
        let revision = self.signer.revisions.current(&self.signer).await?;
        let now = (Instant::now(), SystemTime::now());
        if let Some(last) = &*self.last.load()
            && last.revision == revision
            && last.is_good(self.signer.config.lifetime, now)
        {
            return Ok(last.token.clone());
        }
        let header = self.signer.sign(self.user.as_str(), revision, now.1);
        let header = header.map_err(|error| {
            tracing::error!(%error, "no token");
            LoginFailure::NoAnswer
        })?;
        let token = Token::signed(header, &self.signer.shared);
        let refused = AtomicBool::new(false);
        self.last.store(Some(Arc::new(Signed { token: token.clone(), revision, since: now, refused })));
        Ok(token)
    }

    /// A member refused `token`. Of those who hold it, the first has the revision asked for. Where that is the same
    /// still, it was refused for its time, by the member's clock: it is not shown again.
    pub fn invalidate(&self, token: &Token) {
        let last = self.last.load();
        if let Some(last) = last.as_ref().filter(|last| last.token.serial() == token.serial()) {
            last.refused.store(true, Ordering::Relaxed);
            self.signer.shared.counters.invalidations.fetch_add(1, Ordering::Relaxed);
            self.signer.revisions.refused(last.revision);
        }
    }
}

/// A token is used for two thirds of its life.
fn used_for(lifetime: Duration) -> Duration {
    lifetime * 2 / 3
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            '\0'..='\x1f' => quoted.push_str(&format!("\\u{:04x}", u32::from(letter))),
            _ => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

fn signature(config: &SignJwt, body: &[u8]) -> Option<Vec<u8>> {
    match (config.method.kind, &config.key) {
        (JwtKind::Private(scheme), JwtKey::Private(key)) => {
            let signature = key.signing().choose_scheme(&[scheme])?.sign(body).ok()?;
            match scheme {
                SignatureScheme::ECDSA_NISTP256_SHA256 => fixed(&signature, 32),
                SignatureScheme::ECDSA_NISTP384_SHA384 => fixed(&signature, 48),
                _ => Some(signature),
            }
        }
        (JwtKind::Hs256, JwtKey::Shared(key)) => {
            let mac = Hmac::<Sha256>::new_from_slice(key.expose()).ok()?;
            Some(mac.chain_update(body).finalize().into_bytes().to_vec())
        }
        (JwtKind::Hs384, JwtKey::Shared(key)) => {
            let mac = Hmac::<Sha384>::new_from_slice(key.expose()).ok()?;
            Some(mac.chain_update(body).finalize().into_bytes().to_vec())
        }
        (JwtKind::Hs512, JwtKey::Shared(key)) => {
            let mac = Hmac::<Sha512>::new_from_slice(key.expose()).ok()?;
            Some(mac.chain_update(body).finalize().into_bytes().to_vec())
        }
        _ => None,
    }
}

/// An ECDSA signature as RFC 7518 has it: r and s, each of `size` bytes, in place of X.509's SEQUENCE of two INTEGERs.
fn fixed(der: &[u8], size: usize) -> Option<Vec<u8>> {
    let (tag, rest) = der.split_first()?;
    let (length, rest) = rest.split_first()?;
    // Both fit the short form of a length.
    if *tag != 0x30 || usize::from(*length) != rest.len() || *length >= 0x80 {
        return None;
    }
    let mut joined = Vec::with_capacity(2 * size);
    let mut rest = rest;
    for _ in 0..2 {
        let [0x02, length, after @ ..] = rest else { return None };
        let (number, after) = after.split_at_checked(usize::from(*length))?;
        let number = &number[number.iter().take_while(|byte| **byte == 0).count()..];
        joined.extend(std::iter::repeat_n(0, size.checked_sub(number.len())?));
        joined.extend_from_slice(number);
        rest = after;
    }
    rest.is_empty().then_some(joined)
}

impl fmt::Debug for SignedIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SignedIdentity").field("user", &self.user).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::credential::{CredentialSettings, Credentials};

    #[test]
    fn an_ecdsa_signature_gets_its_fixed_form() {
        // r begins with a sign byte, s is short.
        let mut der = vec![0x30, 2 + 33 + 2 + 1, 0x02, 33, 0];
        der.extend([0x80; 32]);
        der.extend([0x02, 1, 7]);
        let fixed_form = fixed(&der, 32).unwrap();
        assert_eq!((fixed_form.len(), fixed_form[0], fixed_form[31]), (64, 0x80, 0x80));
        assert_eq!((fixed_form[32], fixed_form[62], fixed_form[63]), (0, 0, 7));
        for end in 0..der.len() {
            assert_eq!(fixed(&der[..end], 32), None, "{end}");
        }
        assert_eq!(fixed(&der, 31), None, "a number larger than the curve's");
    }

    #[tokio::test]
    async fn a_token_is_shown_for_its_time_by_both_clocks() {
        let channels = crate::upstream::membership::ControlChannels::default();
        let (credentials, _control) = Credentials::new(CredentialSettings::default(), channels).unwrap();
        let token = Token::signed(HeaderValue::from_static("a.b.c"), &credentials.shared);
        let (now, wall) = (Instant::now(), SystemTime::now());
        let signed = Signed { token, revision: 1, since: (now, wall), refused: AtomicBool::new(false) };
        let second = Duration::from_secs(1);
        let good = |later: Duration, wall| signed.is_good(60 * second, (now + later, wall));
        assert!(good(39 * second, wall + 39 * second));
        assert!(!good(40 * second, wall + 40 * second));
        assert!(!good(second, wall + 40 * second), "the machine slept, or its clock was behind");
        assert!(good(39 * second, wall - 3600 * second), "it ends later than told");
        assert!(!good(40 * second, wall - 3600 * second));
        signed.refused.store(true, Ordering::Relaxed);
        assert!(good(second / 2, wall + second / 2));
        assert!(!good(second, wall) && !good(Duration::ZERO, wall + second));
    }

    #[test]
    fn a_name_cannot_add_a_claim() {
        let name = "eve\",\"username\":\"root\u{1}\\";
        let parsed: serde_json::Value = serde_json::from_str(&quoted(name)).unwrap();
        assert_eq!(parsed, name);
    }
}
