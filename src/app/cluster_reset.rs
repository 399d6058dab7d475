//! Drops the state of the previous cluster before following another cluster (`cluster.identity = "follow"`).
//!
//! Owns: the list of state holders, and their order. Must not know: the condition for following a cluster.
//! Invariants (docs/decisions.md#d20): before the first member of the new cluster is published, all tokens of
//! the previous cluster are dropped, sessions must prove themselves to the new cluster, and no session is
//! admitted while the new cluster's revocations are unread.

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;

use keyward_config::{Config, RealmSetting as RealmName};
use keyward_downstream::session::{SealRealm, Sealer};
use keyward_etcd::identity::{ClusterId, MemberId};
use keyward_gateway::login::service::LoginService;
use keyward_operations::revocation::RevocationRegister;
use keyward_telemetry::metrics::Metrics;
use keyward_upstream::credentials::Credentials;

/// Drops the state of a cluster. Clones share their state.
#[derive(Clone)]
pub(super) struct ClusterReset(Rc<ClusterStateHolders>);

struct ClusterStateHolders {
    config: Arc<Config>,
    sealer: Arc<Sealer>,
    metrics: Arc<Metrics>,
    /// Set after the start of the members, on which credentials, logins and revocations depend.
    credentials: OnceCell<Arc<Credentials>>,
    logins: OnceCell<Arc<LoginService>>,
    register: OnceCell<RevocationRegister>,
}

impl ClusterReset {
    pub(super) fn new(config: Arc<Config>, sealer: Arc<Sealer>, metrics: Arc<Metrics>) -> Self {
        let (credentials, logins, register) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
        Self(Rc::new(ClusterStateHolders { config, sealer, metrics, credentials, logins, register }))
    }

    /// Sets the parts to notify. Later calls are ignored.
    pub(super) fn set_state_holders(
        &self,
        credentials: &Arc<Credentials>,
        logins: &Arc<LoginService>,
        register: &RevocationRegister,
    ) {
        self.0.credentials.get_or_init(|| Arc::clone(credentials));
        self.0.logins.get_or_init(|| Arc::clone(logins));
        self.0.register.get_or_init(|| register.clone());
    }

    /// Tokens of the member, or of all members for `None`, may have been lost before their TTL.
    pub(super) fn tokens_may_be_lost(&self, member: Option<MemberId>) {
        self.0.credentials.get().inspect(|credentials| credentials.tokens_may_be_lost(member));
    }

    /// Binds sessions to the realm of the cluster.
    pub(super) fn pin(&self, cluster: ClusterId) {
        self.0.sealer.pin(&self.realm(cluster));
    }

    fn realm(&self, cluster: ClusterId) -> SealRealm {
        let name = match &self.0.config.session.realm {
            RealmName::Named(name) => Some(&**name),
            RealmName::ClusterId => None,
        };
        SealRealm::new(name, cluster)
    }

    /// Drops all state of the previous cluster, in favour of `followed`.
    pub(super) fn forget(&self, followed: ClusterId) {
        let parts = &self.0;
        // The revocations come first: no session is admitted while the rest is being dropped.
        parts.register.get().inspect(|register| register.forget_cluster(&parts.sealer));
        parts.credentials.get().inspect(|credentials| credentials.forget_cluster());
        parts.logins.get().inspect(|logins| logins.forget_cluster());
        parts.sealer.follow(&self.realm(followed));
        parts.metrics.cluster_changes.inc();
    }
}
