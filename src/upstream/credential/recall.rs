//! What is known of a password without asking etcd for a bcrypt.
//!
//! Owns: how old a proof may be, and how an older one is looked at again. Must not know: how a login is made.
//! Invariants (rules 12): a proof that is older than [`CONFIRMED`] counts only when a member that serves still knows the
//! token that came of it. etcd drops a user's tokens when the password changes or the user goes, and no other user's:
//! so a password that was changed at etcd itself is refused within that time, and nobody else is asked for anything. The
//! auth revision could not say whose password changed, and 3.4 does not tell it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::wire::{self, Touched};
use super::{Credentials, PasswordIdentity};
use crate::identity::{MemberId, UserName};
use crate::secret::Secret;

/// For so long what a member said of a token is taken for true.
pub(super) const CONFIRMED: Duration = Duration::from_secs(1);
/// A member that takes longer to look at a token has told nothing.
const LOOK: Duration = Duration::from_millis(500);

impl Credentials {
    /// Whether this is known to be the user's password, by a token that one of `members` knows. Costs at most a read of one
    /// key at a member.
    pub async fn recall(&self, user: &UserName, password: &Secret<String>, members: &[MemberId]) -> bool {
        let Some(identity) = self.find(user, password) else { return false };
        if !self.confirm(&identity, members).await {
            return false;
        }
        identity.note_use();
        // Whoever is told so needs it next.
        self.keep(&identity);
        true
    }

    /// The same by members that have no leader: the token may be one that another member issued.
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

    /// Whether one of `members` knows a token of this identity. Tokens that they do not know are dropped; one whose member
    /// does not say stays for the calls that use it, and proves nothing.
    pub(super) async fn confirm(&self, identity: &PasswordIdentity, members: &[MemberId]) -> bool {
        let tokens = identity.tokens();
        let serving = || tokens.iter().filter(|(member, _)| members.contains(member));
        if serving().any(|(_, token)| token.unused_for() < CONFIRMED) {
            return true;
        }
        for (&member, token) in serving() {
            let Some(channel) = self.shared.channels.load().get(&member).cloned() else { continue };
            let unused = token.unused_for();
            let look = tokio::time::timeout(LOOK, wire::touch(channel, token));
            let counters = &self.shared.counters;
            let counter = match look.await.unwrap_or(Touched::Unknown) {
                Touched::Alive => {
                    token.mark_touched();
                    self.shared.token_survived(member, unused);
                    counters.touches_alive.fetch_add(1, Ordering::Relaxed);
                    return true;
                }
                Touched::Dead => {
                    // Of a new password or with its member: that tells nothing of how long tokens live.
                    identity.drop_token(member, token);
                    &counters.touches_dead
                }
                Touched::Unknown => &counters.touches_unknown,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        false
    }
}
