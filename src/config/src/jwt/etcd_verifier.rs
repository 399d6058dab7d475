//! Verification of tokens in etcd's own format (`--auth-token jwt`). Clients sign the tokens with etcd's key,
//! or get tokens from a signer with etcd's key.
//!
//! Owns: the checks of etcd's `server/auth/jwt.go`: signature, method, expiry, `username`, `revision`. Must
//! not know: the cluster's auth revision, also compared by etcd. Invariants: only the configured method is
//! accepted, so that a public key is never used as a shared secret; a holder of the key can act as every
//! user, as at etcd itself.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Map, Value};
use sha2::{Sha256, Sha384, Sha512};

use super::{Algorithm, IssuerKeys, JwtRejection, VerifiedJwt, instant, is_plain};
use keyward_base::secret::Secret;
use keyward_etcd::identity::{Peer, UserName};

/// The expiry of a token without an `exp` claim.
pub(super) const NEVER: Duration = Duration::from_secs(253_402_300_800);

/// Verifies tokens signed with etcd's key.
#[derive(Debug, PartialEq)]
pub struct EtcdTokens(EtcdTokenMethod);

#[derive(PartialEq)]
enum EtcdTokenMethod {
    Public(Algorithm, IssuerKeys),
    Shared(HmacHash, Secret<Vec<u8>>),
}

/// The hash of a signing method with a shared secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HmacHash {
    /// HS256.
    Sha256,
    /// HS384.
    Sha384,
    /// HS512.
    Sha512,
}

impl EtcdTokens {
    /// Accepts tokens signed with `algorithm` by the private key of any key in `keys`.
    #[must_use]
    pub fn by_public_key(algorithm: Algorithm, keys: IssuerKeys) -> Self {
        Self(EtcdTokenMethod::Public(algorithm, keys))
    }

    /// Accepts tokens signed with a secret shared with etcd.
    #[must_use]
    pub fn by_secret(hash: HmacHash, secret: Secret<Vec<u8>>) -> Self {
        Self(EtcdTokenMethod::Shared(hash, secret))
    }

    /// Verifies the signature with the cluster's key and the configured method.
    pub(super) fn check(&self, method: &str, signed: &[u8], signature: &[u8]) -> Result<(), JwtRejection> {
        let is_genuine = match &self.0 {
            EtcdTokenMethod::Public(algorithm, keys) => {
                if Algorithm::named(method) != Some(*algorithm) {
                    return Err(JwtRejection::Algorithm);
                }
                keys.verify(*algorithm, None, signed, signature)
            }
            EtcdTokenMethod::Shared(hash, secret) => {
                if method != hash.method() {
                    return Err(JwtRejection::Algorithm);
                }
                hash.verify(secret.expose(), signed, signature)
            }
        };
        if is_genuine { Ok(()) } else { Err(JwtRejection::Signature) }
    }

    /// Checks the claims of a token with a valid signature. As at etcd, the expiry is optional and no leeway
    /// is granted.
    pub(super) fn check_claims(
        claims: &Map<String, Value>,
        now: SystemTime,
    ) -> Result<VerifiedJwt, JwtRejection> {
        let user = claims.get("username").and_then(Value::as_str).filter(|name| is_plain(name));
        let user = UserName::from(user.ok_or(JwtRejection::Claim)?);
        // etcd accepts any number, parsed as a float.
        let revision = claims.get("revision").and_then(Value::as_f64).filter(|number| number.fract() == 0.0);
        let revision = revision.filter(|number| (0.0..9e15).contains(number)).ok_or(JwtRejection::Claim)?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "its range was checked")]
        let revision = revision as u64;
        let time = |name: &str| match claims.get(name) {
            None => Ok(None),
            Some(value) => instant(value).map(Some).ok_or(JwtRejection::Claim),
        };
        let expires = time("exp")?.unwrap_or(UNIX_EPOCH + NEVER);
        if now >= expires {
            return Err(JwtRejection::Expired);
        }
        if [time("nbf")?, time("iat")?].into_iter().flatten().any(|begins| now < begins) {
            return Err(JwtRejection::NotYet);
        }
        Ok(VerifiedJwt { peer: Peer::EtcdToken(user), expires, auth_revision: Some(revision) })
    }
}

impl HmacHash {
    /// The method's name in a token's header.
    #[must_use]
    pub fn method(self) -> &'static str {
        match self {
            Self::Sha256 => "HS256",
            Self::Sha384 => "HS384",
            Self::Sha512 => "HS512",
        }
    }

    /// Verifies the signature in constant time.
    fn verify(self, secret: &[u8], signed: &[u8], signature: &[u8]) -> bool {
        fn by<M: Mac + KeyInit>(secret: &[u8], signed: &[u8], signature: &[u8]) -> bool {
            let mac = M::new_from_slice(secret);
            mac.is_ok_and(|mac| mac.chain_update(signed).verify_slice(signature).is_ok())
        }
        match self {
            Self::Sha256 => by::<Hmac<Sha256>>(secret, signed, signature),
            Self::Sha384 => by::<Hmac<Sha384>>(secret, signed, signature),
            Self::Sha512 => by::<Hmac<Sha512>>(secret, signed, signature),
        }
    }
}

impl fmt::Debug for EtcdTokenMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Public(algorithm, _) => write!(f, "{algorithm:?}"),
            Self::Shared(hash, _) => f.write_str(hash.method()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::test_tokens::{Signer, now};
    use super::super::{Issuers, Verifier};
    use super::*;

    fn seconds(time: SystemTime) -> u64 {
        time.duration_since(UNIX_EPOCH).unwrap().as_secs()
    }

    fn issuers(signer: &Signer) -> Issuers {
        let tokens = EtcdTokens::by_public_key(Algorithm::Es256, signer.keys());
        Issuers { listed: Vec::new(), etcd: Some(tokens) }
    }

    #[test]
    fn a_token_says_user_revision_and_perhaps_an_end() {
        let signer = Signer::es256();
        let issuers = issuers(&signer);
        let later = seconds(now()) + 60;
        let verified = |claims: Value| issuers.verify(signer.sign(&claims).as_bytes(), now());
        let good = verified(json!({ "username": "alice", "revision": 7, "exp": later })).unwrap();
        assert_eq!((good.peer.to_string().as_str(), good.auth_revision), ("etcd_jwt:alice", Some(7)));
        assert_eq!(good.expiry(), Some(UNIX_EPOCH + Duration::from_secs(later)));
        let endless = verified(json!({ "username": "root", "revision": 7.0 })).unwrap();
        assert_eq!((endless.peer.to_string().as_str(), endless.expiry()), ("etcd_jwt:root", None));
        let past = seconds(now());
        for (claims, bad) in [
            (json!({ "username": "alice", "revision": 7, "exp": past }), JwtRejection::Expired),
            (json!({ "username": "alice", "revision": 7, "nbf": later }), JwtRejection::NotYet),
            (json!({ "username": "alice", "revision": 7, "iat": later }), JwtRejection::NotYet),
            (json!({ "username": "alice", "revision": 7, "exp": "soon" }), JwtRejection::Claim),
            (json!({ "username": "alice", "exp": later }), JwtRejection::Claim),
            (json!({ "username": "alice", "revision": "7" }), JwtRejection::Claim),
            (json!({ "username": "alice", "revision": -1 }), JwtRejection::Claim),
            (json!({ "username": "alice", "revision": 7.5 }), JwtRejection::Claim),
            (json!({ "username": "alice", "revision": 1e300 }), JwtRejection::Claim),
            (json!({ "username": "", "revision": 7 }), JwtRejection::Claim),
            (json!({ "username": "al\nice", "revision": 7 }), JwtRejection::Claim),
            (json!({ "username": ["alice"], "revision": 7 }), JwtRejection::Claim),
        ] {
            assert_eq!(verified(claims.clone()).err(), Some(bad), "{claims}");
        }
    }

    #[test]
    fn another_key_another_method_or_none_is_refused() {
        let (signer, other) = (Signer::es256(), Signer::es256());
        let claims = json!({ "username": "root", "revision": 7 });
        let token = other.sign(&claims);
        assert_eq!(issuers(&signer).verify(token.as_bytes(), now()).err(), Some(JwtRejection::Signature));
        let secret = EtcdTokens::by_secret(HmacHash::Sha256, Secret::new(vec![7; 32]));
        let by_secret = Issuers { listed: Vec::new(), etcd: Some(secret) };
        assert_eq!(by_secret.verify(token.as_bytes(), now()).err(), Some(JwtRejection::Algorithm));
        let nobody = Issuers::default();
        assert!(nobody.verify(token.as_bytes(), now()).is_err(), "none are taken where no key is known");
    }

    /// The issuer named by a token judges the token, even if the token also has etcd's claims.
    #[test]
    fn an_issuers_token_is_never_taken_for_etcds() {
        let (signer, issuer) = (Signer::es256(), Signer::es256());
        let mut issuers = issuers(&signer);
        let verifier: Verifier = super::super::test_tokens::verifier(&issuer);
        let mut claims = super::super::test_tokens::claims("alice");
        claims["username"] = json!("root");
        claims["revision"] = json!(7);
        issuers.listed.push(verifier);
        let verified = issuers.verify(issuer.sign(&claims).as_bytes(), now()).unwrap();
        assert!(matches!(verified.peer, Peer::Jwt { .. }), "{verified}");
        assert_eq!(verified.auth_revision, None);
        assert_eq!(
            issuers.verify(signer.sign(&claims).as_bytes(), now()).err(),
            Some(JwtRejection::Signature)
        );
    }

    #[test]
    fn a_shared_secret_verifies_by_its_own_hash() {
        use data_encoding::BASE64URL_NOPAD;
        let part = |text: &str| BASE64URL_NOPAD.encode(text.as_bytes());
        let body = format!("{}.{}", part(r#"{"alg":"HS256"}"#), part(r#"{"username":"alice","revision":3}"#));
        let mac = Hmac::<Sha256>::new_from_slice(&[7; 32]).unwrap();
        let signature = mac.chain_update(&body).finalize().into_bytes();
        let token = format!("{body}.{}", BASE64URL_NOPAD.encode(&signature[..]));
        let verify = |hash, secret: u8| {
            let tokens = EtcdTokens::by_secret(hash, Secret::new(vec![secret; 32]));
            Issuers { listed: Vec::new(), etcd: Some(tokens) }.verify(token.as_bytes(), now()).err()
        };
        assert_eq!(verify(HmacHash::Sha256, 7), None);
        assert_eq!(verify(HmacHash::Sha256, 8), Some(JwtRejection::Signature));
        assert_eq!(verify(HmacHash::Sha512, 7), Some(JwtRejection::Algorithm));
    }
}
