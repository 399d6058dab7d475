//! The state against which a session's password was proved.
//!
//! Owns: when a proof is outdated. Must not know: how a password is proved again.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::Gateway;
use keyward_config::Passwords;
use keyward_etcd::identity::ClusterId;

/// How long a proof counts while no member reports the auth revision.
const VALID_UNSEEN: Duration = Duration::from_secs(10);

/// The state against which a session's password was proved.
#[derive(Clone)]
pub struct ProofBasis {
    /// etcd's auth revision; 0 if unknown.
    revision: u64,
    /// The cluster of the auth revision: revisions of two clusters are not comparable.
    cluster: Option<ClusterId>,
    passwords: Arc<Passwords>,
    at: Instant,
}

impl ProofBasis {
    /// The state for a proof beginning now.
    #[must_use]
    pub fn now(gateway: &Gateway) -> Self {
        let logins = &gateway.logins;
        Self {
            revision: logins.auth_revision().settled(),
            cluster: gateway.upstream.members.snapshot.load().cluster,
            passwords: logins.passwords(),
            at: Instant::now(),
        }
    }

    /// The state for a proof of unknown age: due again at once.
    #[must_use]
    pub fn unknown(gateway: &Gateway) -> Self {
        Self { revision: 0, ..Self::now(gateway) }
    }

    /// True if the proof is outdated. `revision` is the auth revision now reported by members of `cluster`.
    pub(super) fn is_past(
        &self,
        revision: Option<u64>,
        cluster: Option<ClusterId>,
        passwords: &Arc<Passwords>,
    ) -> bool {
        let changed =
            revision.map_or(self.at.elapsed() >= VALID_UNSEEN, |revision| revision != self.revision);
        changed || cluster != self.cluster || !Arc::ptr_eq(&self.passwords, passwords)
    }
}
