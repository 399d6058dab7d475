//! An etcd user proved by a token signed by Keyward with etcd's own key.
//!
//! Owns: the content of a token, and when a new token is signed. Must not know: how to find out the auth
//! revision.
//! Invariants: a token carries the auth revision known at signing (for reads, etcd compares for equality);
//! after a member called the revision old, no further token with the revision is signed before members were
//! asked again; a refused token is replaced, but never by an identical token.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use tokio::time::Instant;

use super::LoginFailure;
use super::password_identity::Token;
use super::signing_revision::SigningRevision;
use keyward_etcd::identity::UserName;

/// An etcd user with tokens signed by Keyward. Tokens are the same for all members.
pub struct SignedIdentity {
    user: UserName,
    revision: SigningRevision,
    last: ArcSwapOption<SignedToken>,
}

/// How long a refused token is still presented. A token's expiry has a resolution of one second, so a new
/// token signed within the second would be identical. If every token is refused, the delay also limits the
/// signing rate.
const SAME: Duration = Duration::from_secs(1);

struct SignedToken {
    token: Token,
    revision: u64,
    /// Time of signing, by both clocks.
    since: (Instant, SystemTime),
    refused: AtomicBool,
}

impl SignedToken {
    /// True if the token is still to be presented. The older age by both clocks counts: the monotonic clock
    /// stops while the machine sleeps, and the wall clock may have been wrong.
    fn is_good(&self, lifetime: Duration, now: (Instant, SystemTime)) -> bool {
        let walls = now.1.duration_since(self.since.1).unwrap_or_default();
        let age = now.0.saturating_duration_since(self.since.0).max(walls);
        age < if self.refused.load(Ordering::Relaxed) { SAME } else { used_for(lifetime) }
    }
}

impl SignedIdentity {
    pub(super) fn new(user: &UserName, revision: &SigningRevision) -> Arc<Self> {
        Arc::new(Self { user: user.clone(), revision: revision.clone(), last: ArcSwapOption::empty() })
    }

    /// The etcd user.
    #[must_use]
    pub fn user(&self) -> &UserName {
        &self.user
    }

    /// Returns a token with the current auth revision; signs a new token when the last token nears its
    /// expiry.
    ///
    /// # Errors
    /// The auth revision cannot be found out.
    pub async fn token(&self) -> Result<Token, LoginFailure> {
        self.token_by(|| (Instant::now(), SystemTime::now())).await
    }

    /// The same by these clocks, the monotonic clock and the wall clock.
    pub(super) async fn token_by(
        &self,
        clocks: impl FnOnce() -> (Instant, SystemTime),
    ) -> Result<Token, LoginFailure> {
        let (revision, signer) = (self.revision.current().await?, self.revision.signer());
        let now = clocks();
        if let Some(last) = &*self.last.load()
            && last.revision == revision
            && last.is_good(signer.config.lifetime, now)
        {
            return Ok(last.token.clone());
        }
        let header = signer.sign(self.user.as_str(), revision, now.1);
        let header = header.map_err(|error| {
            tracing::error!(%error, "no token can be signed");
            LoginFailure::NoAnswer
        })?;
        let token = Token::signed(header, &signer.shared);
        let refused = AtomicBool::new(false);
        self.last.store(Some(Arc::new(SignedToken { token: token.clone(), revision, since: now, refused })));
        Ok(token)
    }

    /// Records that a member refused `token`. Of all callers holding the token, only the first causes a
    /// question for the auth revision. If the revision is unchanged, the member refused the token as expired
    /// by the member's clock, and the token is not presented again.
    pub fn invalidate(&self, token: &Token) {
        let last = self.last.load();
        if let Some(last) = last.as_ref().filter(|last| last.token.serial() == token.serial()) {
            last.refused.store(true, Ordering::Relaxed);
            self.revision.signer().shared.counters.invalidations.fetch_add(1, Ordering::Relaxed);
            self.revision.refused(last.revision);
        }
    }
}

/// A token is used for two thirds of its lifetime.
fn used_for(lifetime: Duration) -> Duration {
    lifetime * 2 / 3
}

impl fmt::Debug for SignedIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SignedIdentity").field("user", &self.user).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::{CredentialSettings, Credentials};
    use http::HeaderValue;

    #[tokio::test]
    async fn a_token_is_shown_for_its_time_by_both_clocks() {
        let channels = keyward_cluster::membership::ControlChannels::default();
        let (credentials, _control) = Credentials::new(CredentialSettings::default(), channels).unwrap();
        let token = Token::signed(HeaderValue::from_static("a.b.c"), &credentials.shared);
        let (now, wall) = (Instant::now(), SystemTime::now());
        let signed = SignedToken { token, revision: 1, since: (now, wall), refused: AtomicBool::new(false) };
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
}
