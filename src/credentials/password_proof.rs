//! Verification of a password from memory, without a bcrypt at etcd.
//!
//! Owns: the maximum age of a proof, and the revalidation of an older proof. Must not know: how to make a
//! login.
//! Invariants (docs/decisions.md#d12): a proof older than [`CONFIRMED`] counts only if a serving member still
//! knows the token obtained by the proof. etcd drops a user's tokens when the user's password changes or the
//! user is deleted, and leaves the tokens of all remaining users. Therefore a password changed directly at
//! etcd is refused within [`CONFIRMED`], and no further user has to log in again. The auth revision is no
//! substitute: the auth revision does not say whose password changed, and etcd 3.4 does not report an auth
//! revision.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::auth_calls::{self, TouchVerdict};
use super::{Credentials, PasswordIdentity};
use crate::identity::{MemberId, UserName};
use crate::secret::Secret;

/// How long a member's answer about a token stays valid.
pub(super) const CONFIRMED: Duration = Duration::from_secs(1);
/// Time limit for a member to check a token; a slower check counts as unknown.
const LOOK: Duration = Duration::from_millis(500);

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
