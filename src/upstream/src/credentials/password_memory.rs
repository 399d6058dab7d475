//! The memory of passwords: verdicts without a bcrypt at etcd, and without a comparison with the users file.
//!
//! Owns: the accepted and the refused passwords of the process, by fingerprint; the time for which a password
//! stays refused; the maximum age of a proof by a token, and the revalidation of an older proof. Must not
//! know: how to make a login, the order of the password sources.
//! Invariants:
//! - a proof older than [`CONFIRMED`] counts only if a serving member still knows the token obtained by the
//!   proof (docs/decisions.md#d12). etcd drops a user's tokens when the user's password changes or the user
//!   is deleted, and leaves the tokens of all remaining users. Therefore a password changed directly at etcd
//!   is refused within [`CONFIRMED`], and no further user has to log in again. The auth revision is no
//!   substitute: the auth revision does not say whose password changed, and etcd 3.4 does not report an auth
//!   revision;
//! - only right passwords and passwords of sessions are remembered as accepted, so no flood of guesses evicts
//!   a right password;
//! - a refusal by the password sources lasts equally long whichever source refused, and for unknown users, so
//!   the time does not reveal the source that knows a user (docs/decisions.md#d15). A refusal by etcd of an
//!   upstream login says nothing about the users file, and a blocked user's refusal says nothing about the
//!   password: the three are remembered apart ([`RefusedBy`]);
//! - a verdict by the users file holds only for the line compared with, so a reload voids the verdicts of
//!   changed lines, and no others.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::time::Instant;

use super::auth_calls::{self, TouchVerdict};
use super::{Credentials, LoginFailure, PasswordFingerprint, PasswordIdentity};
use keyward_base::secret::Secret;
use keyward_config::users::UserLineMark;
use keyward_etcd::identity::{MemberId, UserName};

/// How long a member's answer about a token stays valid.
pub(super) const CONFIRMED: Duration = Duration::from_secs(1);
/// Time limit for a member to check a token; a slower check counts as unknown.
const LOOK: Duration = Duration::from_millis(500);
/// Accepted passwords in memory. The least recently used are evicted first, as of the refused passwords.
const ACCEPTED: u64 = 20_000;
/// Refused passwords in memory, of some 200 bytes each whatever the length of the names. Refusals of upstream
/// logins are counted apart: entries in one table would reveal by their eviction that etcd was asked.
const REFUSED: u64 = 4096;
/// Lifetime of an entry after the first refusal; each repetition doubles the lifetime, up to
/// [`LONGEST_WAIT`]. The limit is short, since an operator may make the password right at etcd.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The passwords lately accepted or refused, shared by all shards and the control runtime.
pub struct PasswordMemory {
    accepted: Cache<PasswordFingerprint, AcceptedPassword>,
    /// Refusals of logins and sessions.
    refused: Cache<RefusalKey, RefusedPassword>,
    /// Refusals by etcd of upstream logins.
    refused_upstream: Cache<RefusalKey, RefusedPassword>,
    hasher: RandomState,
    /// Number of times that all proofs became outdated.
    outdated: AtomicU64,
}

/// The proof made by a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoginProof {
    /// etcd accepted the password.
    Etcd,
    /// The user's line in the users file accepted the password.
    File(UserLineMark),
    /// No proof: auth is off, and the user is not in a users file (docs/decisions.md#d11).
    Nothing,
}

/// The judge of a refused password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusedBy {
    /// The configured password sources, at a login or at the check of a session.
    Sources,
    /// etcd, at a login upstream.
    Etcd,
    /// No source: the user is blocked.
    Blocklist,
}

/// A refused password, and the judge of the password.
pub type RefusalKey = (PasswordFingerprint, RefusedBy);

/// The reason for which a password was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PasswordRefusal {
    /// The password is wrong, or the user does not exist.
    WrongPassword,
    /// etcd has the user without a password.
    NoPassword,
}

#[derive(Clone, Copy)]
struct AcceptedPassword {
    proof: LoginProof,
    at: Instant,
    /// The value of [`PasswordMemory::outdated`] at the time.
    outdated: u64,
}

#[derive(Clone, Copy)]
struct RefusedPassword {
    /// Hash of the user name.
    user: u64,
    why: PasswordRefusal,
    line: Option<UserLineMark>,
    until: Instant,
    wait: Duration,
}

impl PasswordMemory {
    pub(super) fn new() -> Self {
        let refused =
            || Cache::builder().max_capacity(REFUSED).eviction_policy(EvictionPolicy::lru()).build();
        Self {
            accepted: Cache::builder().max_capacity(ACCEPTED).eviction_policy(EvictionPolicy::lru()).build(),
            refused: refused(),
            refused_upstream: refused(),
            hasher: RandomState::new(),
            outdated: AtomicU64::new(0),
        }
    }

    /// True if this line of the users file has accepted the password, however long ago.
    #[must_use]
    pub fn is_accepted_by_line(&self, password: PasswordFingerprint, line: UserLineMark) -> bool {
        self.accepted.get(&password).is_some_and(|accepted| accepted.proof == LoginProof::File(line))
    }

    /// The last proof by the password, and the proof's age. `line` marks the user's line in the users file: a
    /// proof by another line is void. `None` after [`PasswordMemory::forget_verdicts`].
    #[must_use]
    pub fn last_proof(
        &self,
        password: PasswordFingerprint,
        line: Option<UserLineMark>,
    ) -> Option<(LoginProof, Duration)> {
        let AcceptedPassword { proof, at, outdated } = self.accepted.get(&password)?;
        let is_void = matches!(proof, LoginProof::File(compared) if line != Some(compared));
        let is_outdated = outdated != self.outdated.load(Ordering::Acquire);
        (!is_void && !is_outdated).then(|| (proof, at.elapsed()))
    }

    /// Records that the password was accepted now.
    pub fn note_accepted(&self, password: PasswordFingerprint, proof: LoginProof) {
        let outdated = self.outdated.load(Ordering::Acquire);
        self.accepted.insert(password, AcceptedPassword { proof, at: Instant::now(), outdated });
    }

    /// Forgets that the password was accepted, because the password was refused.
    pub fn forget_accepted(&self, password: PasswordFingerprint) {
        self.accepted.invalidate(&password);
    }

    /// The reason of an earlier refusal, if the refusal is still in force `now`. `line` marks the user's line
    /// in the users file.
    #[must_use]
    pub fn refusal(
        &self,
        key: RefusalKey,
        line: Option<UserLineMark>,
        now: Instant,
    ) -> Option<PasswordRefusal> {
        let refused = self.refused_by(key.1).get(&key)?;
        (refused.line == line && now < refused.until).then_some(refused.why)
    }

    /// Records a refusal answered `now`. A refusal by another login under way does not lengthen the time of a
    /// refusal in force.
    pub fn note_refusal(
        &self,
        key: RefusalKey,
        user: &UserName,
        line: Option<UserLineMark>,
        why: PasswordRefusal,
        now: Instant,
    ) {
        let before = self.refused_by(key.1).get(&key).filter(|before| before.line == line);
        let wait = match before {
            Some(before) if now < before.until => return,
            // A refusal for lack of a password costs etcd no bcrypt. The time is short: the presence of a
            // password may decide which password source is asked.
            Some(_) if key.1 == RefusedBy::Etcd && why == PasswordRefusal::NoPassword => FIRST_WAIT,
            Some(before) => (before.wait * 2).min(LONGEST_WAIT),
            None => FIRST_WAIT,
        };
        let user = self.hasher.hash_one(user);
        self.refused_by(key.1).insert(key, RefusedPassword { user, why, line, until: now + wait, wait });
    }

    /// Forgets a refusal, because the password was accepted.
    pub fn forget_refusal(&self, key: RefusalKey) {
        self.refused_by(key.1).invalidate(&key);
    }

    /// Forgets all refusals of this user, since a password may be right now.
    pub(super) fn forget_refusals_of(&self, user: &UserName) {
        let user = self.hasher.hash_one(user);
        for table in [&self.refused, &self.refused_upstream] {
            for (key, refused) in table {
                if refused.user == user {
                    table.invalidate(key.as_ref());
                }
            }
        }
    }

    /// Forgets the verdicts on logins and sessions: the sources or the cluster have changed. The passwords
    /// accepted by a line of the users file stay in memory.
    pub fn forget_verdicts(&self) {
        self.outdated.fetch_add(1, Ordering::AcqRel);
        self.refused.invalidate_all();
    }

    /// Forgets the refusals of upstream logins: the cluster has changed.
    pub(super) fn forget_upstream_refusals(&self) {
        self.refused_upstream.invalidate_all();
    }

    fn refused_by(&self, judge: RefusedBy) -> &Cache<RefusalKey, RefusedPassword> {
        match judge {
            RefusedBy::Sources | RefusedBy::Blocklist => &self.refused,
            RefusedBy::Etcd => &self.refused_upstream,
        }
    }
}

impl PasswordRefusal {
    /// The refusal in the outcome of an upstream login; `None` if etcd did not judge the password.
    #[must_use]
    pub fn of(failure: &LoginFailure) -> Option<Self> {
        match failure {
            LoginFailure::WrongPassword => Some(Self::WrongPassword),
            LoginFailure::NoPassword => Some(Self::NoPassword),
            LoginFailure::AuthDisabled
            | LoginFailure::Unavailable(_)
            | LoginFailure::NoAnswer
            | LoginFailure::Busy => None,
        }
    }
}

impl From<PasswordRefusal> for LoginFailure {
    fn from(why: PasswordRefusal) -> Self {
        match why {
            PasswordRefusal::WrongPassword => Self::WrongPassword,
            PasswordRefusal::NoPassword => Self::NoPassword,
        }
    }
}

impl Credentials {
    /// True if a member of `members` knows a token obtained with the user and password. Costs at most one
    /// read of one key per member.
    pub async fn recall(&self, user: &UserName, password: &Secret<String>, members: &[MemberId]) -> bool {
        let Some(identity) = self.find(user, password) else { return false };
        if !self.confirm(&identity, members).await {
            return false;
        }
        identity.note_use();
        // The caller uses the identity next: keep the identity in memory.
        self.cache_identity(&identity);
        true
    }

    /// Like [`Credentials::recall`], for members without a leader: a token issued by another member also
    /// counts.
    pub async fn recall_leaderless(
        &self,
        user: &UserName,
        password: &Secret<String>,
        members: &[MemberId],
    ) -> bool {
        if let Some(identity) = self.find(user, password) {
            members.iter().for_each(|member| identity.adopt_token(*member));
        }
        self.recall(user, password, members).await
    }

    /// True if a member of `members` knows a token of the identity. A token unknown to its member is dropped.
    /// A token of a member without an answer is kept for calls, but proves no password.
    pub(super) async fn confirm(&self, identity: &PasswordIdentity, members: &[MemberId]) -> bool {
        let tokens = identity.tokens();
        let serving = || tokens.iter().filter(|(member, _)| members.contains(member));
        if serving().any(|(_, token)| token.unused_for() < CONFIRMED) {
            return true;
        }
        for (&member, token) in serving() {
            let Some(channel) = self.shared.channels.load().get(&member).cloned() else { continue };
            let unused = token.unused_for();
            let look = tokio::time::timeout(LOOK, auth_calls::touch(channel, token));
            let counters = &self.shared.counters;
            let counter = match look.await.unwrap_or(TouchVerdict::Unknown) {
                TouchVerdict::Alive => {
                    token.mark_touched();
                    self.shared.token_survived(member, unused);
                    counters.touches_alive.fetch_add(1, Ordering::Relaxed);
                    return true;
                }
                TouchVerdict::Dead => {
                    // Dropped by a password change or a restart: the death says nothing about the TTL.
                    identity.drop_token(member, token);
                    &counters.touches_dead
                }
                TouchVerdict::Unknown => &counters.touches_unknown,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::RefusedBy::{Blocklist, Etcd, Sources};
    use super::*;

    fn password(number: u64) -> PasswordFingerprint {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_be_bytes());
        PasswordFingerprint(hash)
    }

    /// Notes refusals for two minutes, once a second if none is in force. Returns the seconds.
    fn refused_at(key: RefusalKey, why: PasswordRefusal) -> Vec<u64> {
        let (memory, start) = (PasswordMemory::new(), Instant::now());
        let mut looks = Vec::new();
        for second in 0..120 {
            let now = start + Duration::from_secs(second);
            if memory.refusal(key, None, now).is_none() {
                looks.push(second);
                memory.note_refusal(key, &"alice".into(), None, why, now);
            }
            memory.note_refusal(key, &"alice".into(), None, why, now);
        }
        memory.forget_refusal(key);
        assert_eq!(memory.refusal(key, None, start), None);
        looks
    }

    #[test]
    fn the_same_password_is_refused_ever_longer_and_is_looked_at_in_between() {
        for by in [Sources, Etcd, Blocklist] {
            let looks = refused_at((password(1), by), PasswordRefusal::WrongPassword);
            assert_eq!(looks, [0, 1, 3, 7, 15, 31, 61, 91], "{by:?}");
        }
        assert_eq!(refused_at((password(1), Sources), PasswordRefusal::NoPassword).len(), 8);
        let short = refused_at((password(1), Etcd), PasswordRefusal::NoPassword);
        assert_eq!(short.len(), 120, "the next source is asked at once");
    }

    #[test]
    fn what_another_line_or_a_block_refused_is_not_what_this_one_says() {
        let (memory, now, line) = (PasswordMemory::new(), Instant::now(), Some(UserLineMark(1)));
        let why = PasswordRefusal::WrongPassword;
        memory.note_refusal((password(1), Blocklist), &"alice".into(), line, why, now);
        memory.note_refusal((password(1), Etcd), &"alice".into(), line, why, now);
        let of = |line| memory.refusal((password(1), Sources), line, now);
        assert_eq!(of(line), None);
        memory.note_refusal((password(1), Sources), &"alice".into(), line, why, now);
        assert_eq!((of(line), of(Some(UserLineMark(2))), of(None)), (Some(why), None, None));
    }

    #[test]
    fn a_change_at_etcd_makes_its_own_user_forgotten_only() {
        let (memory, now, why) = (PasswordMemory::new(), Instant::now(), PasswordRefusal::NoPassword);
        let (alice, bob) = ((password(1), Sources), (password(2), Sources));
        memory.note_refusal(alice, &"alice".into(), None, why, now);
        memory.note_refusal((password(1), Etcd), &"alice".into(), None, why, now);
        memory.note_refusal(bob, &"bob".into(), None, why, now);
        memory.forget_refusals_of(&"alice".into());
        assert_eq!(memory.refusal(alice, None, now), None);
        assert_eq!(memory.refusal((password(1), Etcd), None, now), None);
        assert_eq!(memory.refusal(bob, None, now), Some(why));
    }

    #[test]
    fn a_flood_of_wrong_passwords_takes_no_more_memory_than_there_is() {
        let (memory, now) = (PasswordMemory::new(), Instant::now());
        for n in 0..3 * REFUSED {
            let user = UserName::from(format!("user{n}").as_str());
            let key = (password(n), Sources);
            memory.note_refusal(key, &user, None, PasswordRefusal::WrongPassword, now);
        }
        // A single round of moka's housekeeping may stop before all work is done.
        let tidied = || (0..1000).for_each(|_| memory.refused.run_pending_tasks());
        tidied();
        assert!(memory.refused.entry_count() <= REFUSED, "{}", memory.refused.entry_count());
        memory.forget_verdicts();
        tidied();
        assert_eq!(memory.refused.entry_count(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_proof_ages_and_new_sources_void_it_but_for_the_line_that_made_it() {
        let (memory, alice, line) = (PasswordMemory::new(), password(1), UserLineMark(1));
        memory.note_accepted(alice, LoginProof::File(line));
        advance(CONFIRMED).await;
        assert_eq!(memory.last_proof(alice, Some(line)), Some((LoginProof::File(line), CONFIRMED)));
        assert_eq!(memory.last_proof(alice, Some(UserLineMark(2))), None);
        assert_eq!(memory.last_proof(alice, None), None);
        memory.forget_verdicts();
        assert_eq!(memory.last_proof(alice, Some(line)), None);
        assert!(memory.is_accepted_by_line(alice, line), "a reload costs no comparison");
        assert!(!memory.is_accepted_by_line(alice, UserLineMark(2)));
        memory.note_accepted(alice, LoginProof::Etcd);
        assert_eq!(memory.last_proof(alice, None), Some((LoginProof::Etcd, Duration::ZERO)));
        memory.forget_accepted(alice);
        assert_eq!(memory.last_proof(alice, None), None);
    }
}
