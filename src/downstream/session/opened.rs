//! Tokens that this shard has opened already.
//!
//! Owns: a bounded memory of opened sessions, so that the box is opened once per token and shard. Must not know: what
//! makes a session stand.
//! Invariants: it answers as the sealer would now: a change of keys, realm, `not_before` or revocations empties it. Found by the
//! token's SHA-256, so that neither a collision nor the time of a comparison helps a guesser.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::{OpenFailure, Sealer, Sealing, Session};

/// The sessions that one shard has opened. At most `limit` are kept; those unused for longest go first.
pub struct OpenedSessions {
    sealer: Arc<Sealer>,
    kept: RefCell<Kept>,
    half: usize,
}

/// Two halves: the recent one fills, then becomes the old one, whose unused remains are dropped at the next turn.
struct Kept {
    sealing: Arc<Sealing>,
    recent: HashMap<[u8; 32], Opened>,
    old: HashMap<[u8; 32], Opened>,
}

#[derive(Clone)]
struct Opened {
    session: Rc<Session>,
    key: usize,
}

impl OpenedSessions {
    /// An empty memory of at most `limit` sessions.
    #[must_use]
    pub fn new(sealer: Arc<Sealer>, limit: usize) -> Self {
        let kept = Kept { sealing: sealer.sealing(), recent: HashMap::new(), old: HashMap::new() };
        Self { sealer, kept: RefCell::new(kept), half: limit.div_ceil(2).max(1) }
    }

    /// As [`Sealer::open`], from memory if it can.
    ///
    /// # Errors
    /// As [`Sealer::open`]; failures are not remembered.
    pub fn open(&self, token: &[u8]) -> Result<Rc<Session>, OpenFailure> {
        let mut kept = self.kept.borrow_mut();
        kept.follow(&self.sealer);
        let digest: [u8; 32] = Sha256::digest(token).into();
        if let Some(opened) = kept.recent.get(&digest) {
            kept.sealing.keys.count(opened.key);
            return Ok(Rc::clone(&opened.session));
        }
        let opened = if let Some(opened) = kept.old.remove(&digest) {
            kept.sealing.keys.count(opened.key);
            opened
        } else {
            let (session, key) = kept.sealing.open(token)?;
            self.sealer.note(&session);
            Opened { session: Rc::new(session), key }
        };
        if kept.recent.len() >= self.half {
            kept.old = std::mem::take(&mut kept.recent);
        }
        kept.recent.insert(digest, opened.clone());
        Ok(opened.session)
    }
}

impl Kept {
    fn follow(&mut self, sealer: &Sealer) {
        let now = sealer.sealing.load();
        if !Arc::ptr_eq(&now, &self.sealing) {
            self.sealing = Arc::clone(&now);
            self.recent.clear();
            self.old.clear();
        }
    }
}

impl std::fmt::Debug for OpenedSessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kept = self.kept.borrow();
        f.debug_struct("OpenedSessions").field("kept", &(kept.recent.len() + kept.old.len())).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{keys, login, sealer};
    use super::*;

    fn token(sealer: &Sealer, user: &str) -> Vec<u8> {
        sealer.seal(&login(user, "p")).unwrap().expose().clone().into_bytes()
    }

    #[test]
    fn a_token_is_opened_once_and_counted_every_time() {
        let sealer = Arc::new(sealer(&[1]));
        let opened = OpenedSessions::new(Arc::clone(&sealer), 8);
        let (alice, bob) = (token(&sealer, "alice"), token(&sealer, "bob"));
        let first = opened.open(&alice).unwrap();
        assert!(Rc::ptr_eq(&first, &opened.open(&alice).unwrap()));
        assert_eq!(opened.open(&bob).unwrap().peer.to_string(), "password:bob");
        assert_eq!(sealer.opened_by_key()[0].1, 3);
    }

    #[test]
    fn it_is_bounded_and_keeps_what_is_used() {
        let sealer = Arc::new(sealer(&[1]));
        let opened = OpenedSessions::new(Arc::clone(&sealer), 8);
        let alice = token(&sealer, "alice");
        let first = opened.open(&alice).unwrap();
        for other in 0..64 {
            opened.open(&token(&sealer, &other.to_string())).unwrap();
            assert!(Rc::ptr_eq(&first, &opened.open(&alice).unwrap()), "after {other} others");
            let kept = opened.kept.borrow();
            assert!(kept.recent.len() + kept.old.len() <= 8);
        }
    }

    #[test]
    fn it_never_answers_what_the_sealer_would_not() {
        let sealer = Arc::new(sealer(&[1]));
        let opened = OpenedSessions::new(Arc::clone(&sealer), 8);
        let alice = token(&sealer, "alice");
        opened.open(&alice).unwrap();
        sealer.replace_keys(&keys(&[2]));
        assert_eq!(opened.open(&alice).err(), Some(OpenFailure::UnknownKey));
        sealer.replace_keys(&keys(&[2, 1]));
        opened.open(&alice).unwrap();
        sealer.refuse_before(u64::MAX);
        assert_eq!(opened.open(&alice).err(), Some(OpenFailure::TooOld));
        sealer.refuse_before(0);
        opened.open(&alice).unwrap();
        sealer.obey(None);
        assert_eq!(opened.open(&alice).err(), Some(OpenFailure::NotKnown));
    }
}
