//! JWTs that this shard has verified already.
//!
//! Owns: a bounded memory of tokens that are genuine, so that a signature is checked once per token and shard. Must not
//! know: what makes a token genuine, which etcd user its subject is. Invariants: it answers as the issuers' keys would
//! now: other keys empty it, and a token is forgotten when it expires; found by the token's SHA-256, so that neither a
//! collision nor the time of a comparison helps a guesser; a bad token is not remembered, and pushes nothing out.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use sha2::{Digest as _, Sha256};

use crate::jwt::{Bad, Issuers, Verified};

/// The JWTs that one shard has verified. At most `limit` are kept; those unused for longest go first.
pub struct VerifiedJwts {
    kept: RefCell<Kept>,
    half: usize,
}

/// Two halves: the recent one fills, then becomes the old one, whose unused remains are dropped at the next turn.
struct Kept {
    by: Arc<Issuers>,
    recent: HashMap<[u8; 32], Rc<Verified>>,
    old: HashMap<[u8; 32], Rc<Verified>>,
}

impl VerifiedJwts {
    /// An empty memory of at most `limit` tokens.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        let kept = Kept { by: Arc::default(), recent: HashMap::new(), old: HashMap::new() };
        Self { kept: RefCell::new(kept), half: limit.div_ceil(2).max(1) }
    }

    /// As [`Issuers::verify`], from memory if it can.
    ///
    /// # Errors
    /// As there.
    pub fn verify(&self, by: &Arc<Issuers>, token: &[u8], now: SystemTime) -> Result<Rc<Verified>, Bad> {
        let mut kept = self.kept.borrow_mut();
        if !Arc::ptr_eq(&kept.by, by) {
            *kept = Kept { by: Arc::clone(by), recent: HashMap::new(), old: HashMap::new() };
        }
        let digest: [u8; 32] = Sha256::digest(token).into();
        if let Some(verified) = kept.recent.get(&digest) {
            if now < verified.expires {
                return Ok(Rc::clone(verified));
            }
            kept.recent.remove(&digest);
            return Err(Bad::Expired);
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
    use crate::jwt::tests::{Signer, claims, now, verifier};

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
        assert_eq!(jwts.verify(&by, token.as_bytes(), end).err(), Some(Bad::Expired));
        assert_eq!(jwts.verify(&by, token.as_bytes(), end).err(), Some(Bad::Expired), "not from memory");
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
        assert_eq!(jwts.verify(&other, token.as_bytes(), now()).err(), Some(Bad::Signature));
    }
}
