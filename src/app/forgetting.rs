//! What is forgotten before another cluster is followed (`cluster.identity = "follow"`).
//!
//! Owns: who is told, in which order. Must not know: when a cluster is followed.
//! Invariants (rules 20): when the first member of the new cluster is published, no token of the old one is left, sessions
//! have to prove themselves to the new one, and nobody is admitted whose revocation may stand there unread.

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::config::{Config, Realm as RealmName};
use crate::downstream::session::{Realm, Sealer};
use crate::gateway::login::desk::Logins;
use crate::identity::{ClusterId, MemberId};
use crate::revocation::Register;
use crate::telemetry::metrics::Metrics;
use crate::upstream::credential::Credentials;

/// Forgets a cluster. Clones are the same.
#[derive(Clone)]
pub(super) struct Forgetting(Rc<Parts>);

struct Parts {
    config: Arc<Config>,
    sealer: Arc<Sealer>,
    metrics: Arc<Metrics>,
    /// These know of the members, so that they come after them.
    credentials: OnceCell<Arc<Credentials>>,
    logins: OnceCell<Arc<Logins>>,
    register: OnceCell<Register>,
}

impl Forgetting {
    pub(super) fn new(config: Arc<Config>, sealer: Arc<Sealer>, metrics: Arc<Metrics>) -> Self {
        let (credentials, logins, register) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
        Self(Rc::new(Parts { config, sealer, metrics, credentials, logins, register }))
    }

    /// These are told from now on; the first ones, for good.
    pub(super) fn tells(&self, credentials: &Arc<Credentials>, logins: &Arc<Logins>, register: &Register) {
        self.0.credentials.get_or_init(|| Arc::clone(credentials));
        self.0.logins.get_or_init(|| Arc::clone(logins));
        self.0.register.get_or_init(|| register.clone());
    }

    /// Tokens of this member, or of all, may be lost otherwise than by their age.
    pub(super) fn tokens_may_be_lost(&self, member: Option<MemberId>) {
        self.0.credentials.get().inspect(|credentials| credentials.tokens_may_be_lost(member));
    }

    /// Sessions are those of this cluster's realm from now on.
    pub(super) fn pin(&self, cluster: ClusterId) {
        self.0.sealer.pin(&self.realm(cluster));
    }

    fn realm(&self, cluster: ClusterId) -> Realm {
        let name = match &self.0.config.session.realm {
            RealmName::Named(name) => Some(&**name),
            RealmName::ClusterId => None,
        };
        Realm::new(name, cluster)
    }

    /// Everything that was known of a cluster, for one that is followed from now on.
    pub(super) fn forget(&self, followed: ClusterId) {
        let parts = &self.0;
        // First: nobody is admitted while the rest is on its way.
        parts.register.get().inspect(|register| register.forget_cluster(&parts.sealer));
        parts.credentials.get().inspect(|credentials| credentials.forget_cluster());
        parts.logins.get().inspect(|logins| logins.forget_cluster());
        parts.sealer.follow(&self.realm(followed));
        parts.metrics.cluster_changes.inc();
    }
}
