//! A cache of the JWTs verified by one shard.
//!
//! Owns: a bounded cache of valid tokens, so that a shard checks each token's signature once. Must not know:
//! the rules for a token's validity, the etcd user for a subject. Invariants: a cached answer equals the
//! answer of the issuers' present keys: a change of keys empties the cache, and a token is forgotten at
//! expiry. The lookup key is the token's SHA-256, so that neither a collision nor the timing of a comparison
//! helps an attacker to guess a token. An invalid token is not cached and evicts no entry.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use sha2::{Digest as _, Sha256};

use keyward_config::jwt::{Issuers, JwtRejection, VerifiedJwt};

/// The JWTs verified by one shard. Holds at most `limit` tokens; the least recently used are evicted first.
pub struct VerifiedJwts {
    kept: RefCell<VerifiedJwtMaps>,
    half: usize,
}

/// Two generations: the recent map fills, then replaces the old map. Tokens not used since the previous
/// replacement are dropped.
struct VerifiedJwtMaps {
    by: Arc<Issuers>,
    recent: HashMap<[u8; 32], Rc<VerifiedJwt>>,
    old: HashMap<[u8; 32], Rc<VerifiedJwt>>,
}

impl VerifiedJwts {
    /// An empty cache of at most `limit` tokens.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        let kept = VerifiedJwtMaps { by: Arc::default(), recent: HashMap::new(), old: HashMap::new() };
        Self { kept: RefCell::new(kept), half: limit.div_ceil(2).max(1) }
    }

    /// Same as [`Issuers::verify`], from the cache if possible.
    ///
    /// # Errors
    /// Same as [`Issuers::verify`].
    pub fn verify(
        &self,
        by: &Arc<Issuers>,
        token: &[u8],
        now: SystemTime,
    ) -> Result<Rc<VerifiedJwt>, JwtRejection> {
        let mut kept = self.kept.borrow_mut();
        if !Arc::ptr_eq(&kept.by, by) {
            *kept = VerifiedJwtMaps { by: Arc::clone(by), recent: HashMap::new(), old: HashMap::new() };
        }
        let digest: [u8; 32] = Sha256::digest(token).into();
        if let Some(verified) = kept.recent.get(&digest) {
            if now < verified.expires {
                return Ok(Rc::clone(verified));
            }
            kept.recent.remove(&digest);
            return Err(JwtRejection::Expired);
        }
        let verified = match kept.old.remove(&digest).filter(|verified| now < verified.expires) {
            Some(verified) => verified,
            None => Rc::new(by.verify(token, now)?),
        };
        if kept.recent.len() >= self.half {
            kept.old = std::mem::take(&mut kept.recent);
        }
        kept.recent.insert(digest, Rc::clone(&verified));
        Ok(verified)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use keyward_config::jwt::test_tokens::{Signer, claims, now, verifier};

    fn fixed() -> (Signer, Arc<Issuers>) {
        let signer = Signer::es256();
        let by = Arc::new(Issuers { listed: vec![verifier(&signer)], etcd: None });
        (signer, by)
    }

    #[test]
    fn a_token_is_verified_once_and_never_good_past_its_end() {
        let (signer, by) = fixed();
        let jwts = VerifiedJwts::new(4);
        let token = signer.sign(&claims("alice"));
        let first = jwts.verify(&by, token.as_bytes(), now()).unwrap();
        assert!(Rc::ptr_eq(&first, &jwts.verify(&by, token.as_bytes(), now()).unwrap()));
        let end = first.expires;
        assert!(jwts.verify(&by, token.as_bytes(), end - Duration::from_millis(1)).is_ok());
        assert_eq!(jwts.verify(&by, token.as_bytes(), end).err(), Some(JwtRejection::Expired));
        assert_eq!(
            jwts.verify(&by, token.as_bytes(), end).err(),
            Some(JwtRejection::Expired),
            "not from memory"
        );
    }

    #[test]
    fn it_is_bounded_and_keeps_what_is_used() {
        let (signer, by) = fixed();
        let jwts = VerifiedJwts::new(4);
        let token = signer.sign(&claims("alice"));
        let first = jwts.verify(&by, token.as_bytes(), now()).unwrap();
        for other in 0..16 {
            jwts.verify(&by, signer.sign(&claims(&other.to_string())).as_bytes(), now()).unwrap();
            assert!(Rc::ptr_eq(&first, &jwts.verify(&by, token.as_bytes(), now()).unwrap()), "{other}");
            let kept = jwts.kept.borrow();
            assert!(kept.recent.len() + kept.old.len() <= 4);
        }
        let all = jwts.kept.borrow().recent.len();
        for _ in 0..16 {
            assert!(jwts.verify(&by, b"a.b.c", now()).is_err());
        }
        assert_eq!(jwts.kept.borrow().recent.len(), all, "a bad one is not remembered");
    }

    #[test]
    fn other_keys_are_asked_again() {
        let (signer, by) = fixed();
        let jwts = VerifiedJwts::new(4);
        let token = signer.sign(&claims("alice"));
        jwts.verify(&by, token.as_bytes(), now()).unwrap();
        let other = Arc::new(Issuers { listed: vec![verifier(&Signer::es256())], etcd: None });
        assert_eq!(jwts.verify(&other, token.as_bytes(), now()).err(), Some(JwtRejection::Signature));
    }
}
