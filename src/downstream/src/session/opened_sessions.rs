//! A cache of the sessions opened by one shard.
//!
//! Owns: a bounded cache of opened sessions, so that a shard decrypts each token once. Must not know: the
//! rules for a session's validity.
//! Invariants: a cached answer equals the sealer's current answer: a change of keys, realm, `not_before` or
//! revocations empties the cache. The lookup uses a hash with a random key, and the found token is compared
//! whole in constant time, so that neither a collision nor the timing helps an attacker to guess a token.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::rc::Rc;
use std::sync::{Arc, Weak};

use constant_time_eq::constant_time_eq;

use super::{OpenFailure, Sealer, SealerState, Session};
use keyward_base::secret::Secret;

/// The sessions opened by one shard. Holds at most `limit` sessions; the least recently used are evicted
/// first.
pub struct OpenedSessions {
    sealer: Arc<Sealer>,
    kept: RefCell<OpenedSessionMaps>,
    half: usize,
}

/// Two generations: the recent map fills, then replaces the old map. Sessions not used since the previous
/// replacement are dropped.
struct OpenedSessionMaps {
    sealing: Arc<SealerState>,
    hashing: RandomState,
    recent: HashMap<u64, OpenedSession>,
    old: HashMap<u64, OpenedSession>,
}

/// The session opened last on a connection: a connection's next token is nearly always the same. Replaced
/// keys are not kept in memory.
#[derive(Default)]
pub struct LastOpened(Option<(Weak<SealerState>, OpenedSession)>);

#[derive(Clone)]
struct OpenedSession {
    token: Rc<Secret<Vec<u8>>>,
    session: Rc<Session>,
    key: usize,
}

impl OpenedSession {
    fn is_of(&self, token: &[u8]) -> bool {
        constant_time_eq(self.token.expose(), token)
    }
}

impl OpenedSessions {
    /// An empty cache of at most `limit` sessions.
    #[must_use]
    pub fn new(sealer: Arc<Sealer>, limit: usize) -> Self {
        let kept = OpenedSessionMaps {
            sealing: sealer.sealing(),
            hashing: RandomState::new(),
            recent: HashMap::new(),
            old: HashMap::new(),
        };
        Self { sealer, kept: RefCell::new(kept), half: limit.div_ceil(2).max(1) }
    }

    /// Same as [`Sealer::open`], from `last` or from the cache if possible. The session becomes the `last`.
    ///
    /// # Errors
    /// Same as [`Sealer::open`]; failures are not cached.
    pub fn open_after(&self, last: &mut LastOpened, token: &[u8]) -> Result<Rc<Session>, OpenFailure> {
        if let Some((sealing, opened)) = &last.0 {
            let now = self.sealer.sealing.load();
            // A weak pointer keeps the address from being used again.
            if std::ptr::eq(sealing.as_ptr(), Arc::as_ptr(&now)) && opened.is_of(token) {
                now.keys.count(opened.key);
                return Ok(Rc::clone(&opened.session));
            }
        }
        let opened = self.find_or_open(token)?;
        let session = Rc::clone(&opened.session);
        last.0 = Some((Arc::downgrade(&self.kept.borrow().sealing), opened));
        Ok(session)
    }

    /// Same as [`Sealer::open`], from the cache if possible.
    ///
    /// # Errors
    /// Same as [`Sealer::open`]; failures are not cached.
    pub fn open(&self, token: &[u8]) -> Result<Rc<Session>, OpenFailure> {
        self.find_or_open(token).map(|opened| opened.session)
    }

    fn find_or_open(&self, token: &[u8]) -> Result<OpenedSession, OpenFailure> {
        let mut kept = self.kept.borrow_mut();
        kept.follow(&self.sealer);
        let hash = kept.hashing.hash_one(token);
        if let Some(opened) = kept.recent.get(&hash).filter(|opened| opened.is_of(token)) {
            kept.sealing.keys.count(opened.key);
            return Ok(opened.clone());
        }
        let opened = if let Some(opened) = kept.old.remove(&hash).filter(|opened| opened.is_of(token)) {
            kept.sealing.keys.count(opened.key);
            opened
        } else {
            let (session, key) = kept.sealing.open(token)?;
            self.sealer.remember_session(&session);
            OpenedSession { token: Rc::new(Secret::new(token.to_vec())), session: Rc::new(session), key }
        };
        if kept.recent.len() >= self.half {
            kept.old = std::mem::take(&mut kept.recent);
        }
        kept.recent.insert(hash, opened.clone());
        Ok(opened)
    }
}

impl OpenedSessionMaps {
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
        let mut last = LastOpened::default();
        let first = opened.open_after(&mut last, &alice).unwrap();
        assert!(Rc::ptr_eq(&first, &opened.open_after(&mut last, &alice).unwrap()));
        assert!(Rc::ptr_eq(&first, &opened.open(&alice).unwrap()));
        assert_eq!(opened.open(&bob).unwrap().peer.to_string(), "password:bob");
        assert_eq!(opened.open_after(&mut last, &bob).unwrap().peer.to_string(), "password:bob");
        assert!(Rc::ptr_eq(&first, &opened.open_after(&mut last, &alice).unwrap()));
        assert_eq!(sealer.opened_by_key()[0].1, 6);
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
        let mut last = LastOpened::default();
        let mut open = |token: &[u8]| {
            let (by_cache, after_last) = (opened.open(token), opened.open_after(&mut last, token));
            assert_eq!(by_cache.as_ref().err(), after_last.as_ref().err());
            after_last
        };
        open(&alice).unwrap();
        sealer.replace_keys(&keys(&[2]));
        assert_eq!(open(&alice).err(), Some(OpenFailure::UnknownKey));
        sealer.replace_keys(&keys(&[2, 1]));
        open(&alice).unwrap();
        sealer.refuse_before(u64::MAX);
        assert_eq!(open(&alice).err(), Some(OpenFailure::TooOld));
        sealer.refuse_before(0);
        open(&alice).unwrap();
        sealer.apply_revocations(None);
        assert_eq!(open(&alice).err(), Some(OpenFailure::NotKnown));
    }
}
