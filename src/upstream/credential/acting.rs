//! As whom calls may go upstream without the client's own password.
//!
//! Owns: which identity proves which etcd user. Must not know: who the client is, or why it is that user.
//! Invariants: `root` is proved only where the configuration names it; a user is one identity for as long as somebody
//! uses it; a configuration is published whole, and who goes on over that is proved by the new one from its next attempt on,
//! by the old one where the new one has nothing.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use moka::sync::Cache;
use rustls::pki_types::CertificateDer;

use super::certificate::{CertificateIdentity, Showing};
use super::mint::{Mint, MintError};
use super::revision::{Pages, Revisions};
use super::signed::{SignedIdentity, Signer};
use super::{As, Credentials, Identity};
use crate::config::users::{Credential, Maker, Users};
use crate::config::{ClientTls, Cluster};
use crate::identity::UserName;
use crate::upstream::tls::{TlsError, Towards};

/// Users whose identities are kept though the configuration does not name them.
const OTHERS: u64 = 10_000;

/// Why the users of a configuration cannot be proved: the check of the configuration took more than we can use.
#[derive(Clone, Debug, thiserror::Error)]
pub enum UsersError {
    /// A certificate or the members' authority.
    #[error("a user's certificate cannot be shown: {0}")]
    Tls(#[from] TlsError),
    /// The authority to mint from.
    #[error("{0}")]
    Mint(#[from] MintError),
}

/// An etcd user, proved by whatever the configuration in force has for it.
pub struct ActingIdentity {
    user: UserName,
    acting: Arc<ArcSwap<Acting>>,
    last: ArcSwap<Proving>,
}

/// What one configuration has for a user.
struct Proving {
    epoch: u64,
    identity: Identity,
}

impl ActingIdentity {
    /// The etcd user.
    #[must_use]
    pub fn user(&self) -> &UserName {
        &self.user
    }

    /// What proves the user now.
    pub(super) fn now(&self) -> Identity {
        let acting = self.acting.load();
        let last = self.last.load();
        if last.epoch == acting.epoch {
            return last.identity.clone();
        }
        // Where there is nothing any more, whatever goes on keeps what it had.
        let identity = acting.identity(&self.user).unwrap_or_else(|| last.identity.clone());
        self.last.store(Arc::new(Proving { epoch: acting.epoch, identity: identity.clone() }));
        identity
    }
}

impl fmt::Debug for ActingIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActingIdentity").field("user", &self.user).finish_non_exhaustive()
    }
}

/// Whom one configuration lets us prove.
pub struct Acting {
    epoch: u64,
    named: HashMap<UserName, Identity>,
    others: Option<Maker>,
    made: Cache<UserName, Identity>,
    mint: Option<Arc<Mint>>,
    signer: Option<Arc<Signer>>,
}

impl Acting {
    /// Nobody.
    pub(super) fn nobody() -> Self {
        let made = Cache::new(0);
        Self { epoch: 0, named: HashMap::new(), others: None, made, mint: None, signer: None }
    }

    fn make(&self, maker: Maker, user: &UserName) -> Option<Identity> {
        match maker {
            Maker::Mint => {
                let showing = Showing { user: user.clone(), epoch: self.epoch };
                let mint = Arc::clone(self.mint.as_ref()?);
                Some(Identity::Certificate(CertificateIdentity::minted(showing, mint)))
            }
            Maker::Jwt => Some(Identity::Signed(SignedIdentity::new(user, self.signer.as_ref()?))),
        }
    }

    fn identity(&self, user: &UserName) -> Option<Identity> {
        if let Some(identity) = self.named.get(user) {
            return Some(identity.clone());
        }
        let maker = self.others.filter(|_| !user.as_str().is_empty() && user.as_str() != "root")?;
        if let Some(identity) = self.made.get(user) {
            return Some(identity);
        }
        let identity = self.make(maker, user)?;
        // Whoever was first: two identities of one user would be two sets of connections.
        Some(self.made.get_with_by_ref(user, || identity))
    }
}

impl Credentials {
    /// Publishes whom the configuration lets us prove, in place of those before.
    ///
    /// # Errors
    /// [`UsersError`]; nothing changes.
    pub fn act_for(&self, users: &Users, cluster: &Cluster, pages: Pages) -> Result<(), UsersError> {
        self.acting_for(users, cluster, pages).map(|acting| self.act(acting))
    }

    /// Publishes it, in place of the one before.
    pub fn act(&self, acting: Acting) {
        self.acting.store(Arc::new(acting));
    }

    /// Whom the configuration lets us prove, before it is published. `pages` is where members are asked that tell the auth
    /// revision nowhere else.
    ///
    /// # Errors
    /// [`UsersError`].
    pub fn acting_for(&self, users: &Users, cluster: &Cluster, pages: Pages) -> Result<Acting, UsersError> {
        static EPOCHS: AtomicU64 = AtomicU64::new(1);
        let towards = cluster.tls.as_ref().map(|tls: &ClientTls| Towards::new(&tls.roots)).transpose()?;
        let mint = match (&users.mint, &towards) {
            (Some(mint), Some(towards)) => Some(Mint::new(mint, towards.clone(), self.held.clone())?),
            _ => None,
        };
        let signer = users.sign_jwt.as_ref().map(|config| {
            let revisions = Revisions::new(self.questions.clone(), pages);
            Signer::new(config, revisions, Arc::clone(&self.shared))
        });
        let idle = self.shared.settings.idle;
        let mut acting = Acting {
            epoch: EPOCHS.fetch_add(1, Ordering::Relaxed),
            named: HashMap::new(),
            others: users.others,
            made: Cache::builder().max_capacity(OTHERS).time_to_idle(idle).build(),
            mint,
            signer,
        };
        for (user, credential) in &users.named {
            let identity = match credential {
                Credential::Password(password) => Some(Identity::Password(self.identity(user, password))),
                Credential::Certificate(pair) => {
                    let showing = Showing { user: user.clone(), epoch: acting.epoch };
                    let tls = towards.as_ref().map(|towards| towards.showing_pair(pair)).transpose()?;
                    tls.map(|tls| Identity::Certificate(CertificateIdentity::held(showing, tls)))
                }
                Credential::Made(maker) => acting.make(*maker, user),
            };
            acting.named.extend(identity.map(|identity| (user.clone(), identity)));
        }
        Ok(acting)
    }

    /// As this etcd user, without its password; none where the configuration does not say how.
    #[must_use]
    pub fn acting(&self, user: &UserName) -> Option<As> {
        let acting = self.acting.load();
        let last = Proving { epoch: acting.epoch, identity: acting.identity(user)? };
        let (acting, last) = (Arc::clone(&self.acting), ArcSwap::from_pointee(last));
        Some(As::User(Identity::Acting(Arc::new(ActingIdentity { user: user.clone(), acting, last }))))
    }

    /// The authority that certificates are minted from, and what leads to one that members trust; none where none are.
    #[must_use]
    pub fn mints_from(&self) -> Option<Vec<CertificateDer<'static>>> {
        self.acting.load().mint.as_ref().map(|mint| mint.authority().to_vec())
    }

    /// Whether certificates can be minted, where they are to be.
    #[must_use]
    pub fn may_mint(&self) -> bool {
        self.acting.load().mint.as_ref().is_none_or(|mint| mint.is_held())
    }

    /// Whether this authority may mint.
    #[must_use]
    pub fn is_held(&self, authority: &[CertificateDer<'static>]) -> bool {
        self.held.has(authority)
    }

    /// No member trusts this authority between members, as far as could be seen: it may mint.
    pub fn let_mint(&self, authority: &[CertificateDer<'static>]) {
        self.held.add(authority);
    }

    /// How many certificates were minted and tokens signed, for the configuration that is in force.
    #[must_use]
    pub fn made(&self) -> (u64, u64) {
        let acting = self.acting.load();
        let minted = acting.mint.as_ref().map_or(0, |mint| mint.minted());
        (minted, acting.signer.as_ref().map_or(0, |signer| signer.signed()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;
    use crate::config::ClusterPin;
    use crate::secret::Secret;
    use crate::upstream::connect::Connector;
    use crate::upstream::credential::CredentialSettings;
    use crate::upstream::membership::{ControlChannels, Membership};

    fn publish(credentials: &Credentials, passwords: &[(&str, &str)]) {
        let credential = |text: &str| Credential::Password(Arc::new(Secret::new(text.to_owned())));
        let named = passwords.iter().map(|(user, text)| (UserName::from(*user), credential(text)));
        let users = Users { named: named.collect(), ..Users::default() };
        let second = Duration::from_secs(1);
        let cluster = Cluster {
            endpoints: Vec::new(),
            tls: None,
            connect_timeout: second,
            idle_timeout: second,
            token_ttl: second,
            pin: ClusterPin::FirstAnswer,
            probe: None,
        };
        let members = Arc::new(ArcSwap::from_pointee(Membership::unknown(Instant::now())));
        let pages = Pages { connector: Connector::tcp(None, second), members };
        credentials.act_for(&users, &cluster, pages).unwrap();
    }

    #[test]
    fn who_goes_on_over_a_reload_is_proved_by_what_is_new() {
        let (credentials, _control) =
            Credentials::new(CredentialSettings::default(), ControlChannels::default()).unwrap();
        publish(&credentials, &[("alice", "old")]);
        let Some(As::User(alice)) = credentials.acting(&"alice".into()) else { panic!("she has a row") };
        let proved_by = |text: &str| {
            let wanted = credentials.identity(&"alice".into(), &Secret::new(text.to_owned()));
            matches!(&*alice.now(), Identity::Password(identity) if Arc::ptr_eq(identity, &wanted))
        };
        assert!(proved_by("old"));
        publish(&credentials, &[("alice", "new"), ("bob", "old")]);
        assert!(proved_by("new") && !proved_by("old"));
        // Her row goes: nobody new is her, and what goes on has what it had.
        publish(&credentials, &[("bob", "old")]);
        assert!(credentials.acting(&"alice".into()).is_none() && proved_by("new"));
        publish(&credentials, &[("alice", "newest")]);
        assert!(proved_by("newest"));
    }
}
