//! The signer of tokens with etcd's own key.
//!
//! Owns: the format of a token. Must not know: when a token is signed, the source of the auth revision.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use data_encoding::BASE64URL_NOPAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::HeaderValue;
use rustls::SignatureScheme;
use sha2::{Sha256, Sha384, Sha512};

use super::CredentialContext;
use keyward_config::upstream_users::{JwtKey, JwtKind, SignJwt};

/// Signs tokens with one key.
pub(super) struct TokenSigner {
    pub(super) config: Arc<SignJwt>,
    pub(super) shared: Arc<CredentialContext>,
    signed: AtomicU64,
}

/// The key cannot sign, although the configuration passed its check.
#[derive(Debug, thiserror::Error)]
#[error("sign_jwt.key does not sign")]
pub(super) struct SigningError;

impl TokenSigner {
    pub(super) fn new(config: &Arc<SignJwt>, shared: Arc<CredentialContext>) -> Arc<Self> {
        Arc::new(Self { config: Arc::clone(config), shared, signed: AtomicU64::new(0) })
    }

    /// Number of tokens signed.
    pub(super) fn signed(&self) -> u64 {
        self.signed.load(Ordering::Relaxed)
    }

    /// Signs a token for `user` with the given auth revision, valid from now.
    pub(super) fn sign(
        &self,
        user: &str,
        revision: u64,
        now: SystemTime,
    ) -> Result<HeaderValue, SigningError> {
        let expires = now + self.config.lifetime;
        let expires = expires.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let part = |text: &str| BASE64URL_NOPAD.encode(text.as_bytes());
        let header = part(&format!("{{\"alg\":\"{}\",\"typ\":\"JWT\"}}", self.config.method.name));
        let claims =
            part(&format!("{{\"username\":{},\"revision\":{revision},\"exp\":{expires}}}", quoted(user)));
        let body = format!("{header}.{claims}");
        let signature = signature(&self.config, body.as_bytes()).ok_or(SigningError)?;
        let token = format!("{body}.{}", BASE64URL_NOPAD.encode(&signature));
        self.signed.fetch_add(1, Ordering::Relaxed);
        HeaderValue::try_from(token).map_err(|_| SigningError)
    }
}

/// Encodes a JSON string.
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

/// Converts an ECDSA signature to the form of RFC 7518: r and s, each of `size` bytes, instead of X.509's
/// SEQUENCE of two INTEGERs.
fn fixed(der: &[u8], size: usize) -> Option<Vec<u8>> {
    let (tag, rest) = der.split_first()?;
    let (length, rest) = rest.split_first()?;
    // Both curves fit the short form of a length.
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

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_name_cannot_add_a_claim() {
        let name = "eve\",\"username\":\"root\u{1}\\";
        let parsed: serde_json::Value = serde_json::from_str(&quoted(name)).unwrap();
        assert_eq!(parsed, name);
    }
}
