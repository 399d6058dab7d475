//! As whom calls may go upstream without the client's own password.
//!
//! Owns: which identity proves which etcd user. Must not know: who the client is, or why it is that user.
//! Invariants: `root` is proved only where the configuration names it; a user is one identity for as long as somebody
//! uses it, and the same one for as long as its certificate, or what it is minted from, is the same; a configuration is
//! published whole, and who goes on over that is proved by the new one from its next attempt on; where the new one has
//! nothing, by the password that it brought, or else by the old one.

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
use super::{As, Credentials, Identity, PasswordIdentity};
use crate::config::users::{Credential, Maker, Users};
use crate::config::{ClientTls, Cluster};
use crate::identity::UserName;
use crate::pem::{KeyPair, Roots};
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
    /// What the user's own password proves, where it brought one.
    own: Option<Arc<PasswordIdentity>>,
}

/// What one configuration has for a user.
struct Proving {
    published: u64,
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
        if last.published == acting.published {
            return last.identity.clone();
        }
        let own = || self.own.as_ref().map(|own| Identity::Password(Arc::clone(own)));
        // Where there is nothing any more, whatever goes on keeps what it had.
        let identity = acting.identity(&self.user).or_else(own).unwrap_or_else(|| last.identity.clone());
        self.last.store(Arc::new(Proving { published: acting.published, identity: identity.clone() }));
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
    /// Tells configurations apart.
    published: u64,
    /// Of what is minted.
    epoch: u64,
    named: HashMap<UserName, Identity>,
    /// What all others are made by.
    made: Cache<UserName, Identity>,
    /// By tokens that we sign, users of whom a token signed with etcd's own key told.
    signed: Cache<UserName, Identity>,
    mint: Option<Arc<Mint>>,
    signer: Option<Arc<Signer>>,
    /// What all that was made from.
    users: Users,
    roots: Option<Roots>,
}

impl Acting {
    /// Nobody.
    pub(super) fn nobody() -> Self {
        let (made, signed, users) = (Cache::new(0), Cache::new(0), Users::default());
        Self {
            published: 0,
            epoch: 0,
            named: HashMap::new(),
            made,
            signed,
            mint: None,
            signer: None,
            users,
            roots: None,
        }
    }

    /// What mints for these users too, where it is the same: a certificate that is not replaced costs no connection.
    fn mint_of(&self, users: &Users, roots: Option<&Roots>) -> Option<Arc<Mint>> {
        let of = |users: &Users| {
            let mint = users.mint.as_ref()?;
            Some((mint.authority.chain().to_vec(), mint.lifetime))
        };
        let same = of(&self.users) == of(users) && self.trusts(roots);
        self.mint.clone().filter(|_| same)
    }

    /// The user's identity by this certificate. Its key goes with it: that was checked.
    fn shows(&self, user: &UserName, pair: &KeyPair, roots: Option<&Roots>) -> Option<Identity> {
        let Some(Credential::Certificate(before)) = self.users.named.get(user) else { return None };
        let same = before.chain() == pair.chain() && self.trusts(roots);
        self.named.get(user).filter(|_| same).cloned()
    }

    /// The user's identity by what is minted here.
    fn minted(&self, user: &UserName) -> Option<Identity> {
        let minted = matches!(self.users.named.get(user), Some(Credential::Made(Maker::Mint)));
        self.named.get(user).filter(|_| minted).cloned()
    }

    /// Whether members are believed by these.
    fn trusts(&self, roots: Option<&Roots>) -> bool {
        self.roots.as_ref().map(Roots::certificates) == roots.map(Roots::certificates)
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

    /// By tokens that we sign, whether or not a row says so.
    fn signed(&self, user: &UserName) -> Option<Identity> {
        let signer = self.signer.as_ref().filter(|_| !user.as_str().is_empty())?;
        Some(self.signed.get_with_by_ref(user, || Identity::Signed(SignedIdentity::new(user, signer))))
    }

    fn identity(&self, user: &UserName) -> Option<Identity> {
        if let Some(identity) = self.named.get(user) {
            return Some(identity.clone());
        }
        let maker = self.users.others.filter(|_| !user.as_str().is_empty() && user.as_str() != "root")?;
        if let Some(identity) = self.made.get(user) {
            return Some(identity);
        }
        let identity = self.make(maker, user)?;
        // Whoever was first: two identities of one user would be two sets of connections.
        Some(self.made.get_with_by_ref(user, || identity))
    }
}

/// Tells apart certificates that one user has one after the other, and configurations.
fn epoch() -> u64 {
    static EPOCHS: AtomicU64 = AtomicU64::new(1);
    EPOCHS.fetch_add(1, Ordering::Relaxed)
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
        let before = self.acting.load();
        let roots = cluster.tls.as_ref().map(|tls: &ClientTls| &tls.roots);
        let towards = roots.map(Towards::new).transpose()?;
        let kept = before.mint_of(users, roots);
        let minted_as_before = kept.is_some();
        let mint = match (&users.mint, &towards) {
            (Some(_), Some(_)) if minted_as_before => kept,
            (Some(mint), Some(towards)) => Some(Mint::new(mint, towards.clone(), self.held.clone())?),
            _ => None,
        };
        let signer = users.sign_jwt.as_ref().map(|config| {
            let revisions = Revisions::new(self.questions.clone(), pages);
            Signer::new(config, revisions, Arc::clone(&self.shared))
        });
        let idle = self.shared.settings.idle;
        let keeps_others = minted_as_before && [before.users.others, users.others] == [Some(Maker::Mint); 2];
        let mut acting = Acting {
            published: epoch(),
            epoch: if minted_as_before { before.epoch } else { epoch() },
            named: HashMap::new(),
            made: if keeps_others {
                before.made.clone()
            } else {
                Cache::builder().max_capacity(OTHERS).time_to_idle(idle).build()
            },
            signed: Cache::builder().max_capacity(OTHERS).time_to_idle(idle).build(),
            mint,
            signer,
            users: users.clone(),
            roots: roots.cloned(),
        };
        for (user, credential) in &users.named {
            let identity = match credential {
                Credential::Password(password) => Some(Identity::Password(self.identity(user, password))),
                Credential::Certificate(pair) => match before.shows(user, pair, roots) {
                    Some(same) => Some(same),
                    None => {
                        let showing = Showing { user: user.clone(), epoch: epoch() };
                        let tls = towards.as_ref().map(|towards| towards.showing_pair(pair)).transpose()?;
                        tls.map(|tls| Identity::Certificate(CertificateIdentity::held(showing, tls)))
                    }
                },
                Credential::Made(Maker::Mint) if minted_as_before => {
                    before.minted(user).or_else(|| acting.make(Maker::Mint, user))
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
        let identity = acting.identity(user)?;
        Some(self.going_on(user, acting.published, identity, None))
    }

    /// As the etcd user whom a token signed with etcd's own key names, `root` included: by what the configuration has for that user,
    /// else by tokens that we sign. None where neither can be.
    #[must_use]
    pub fn acting_or_signed(&self, user: &UserName) -> Option<As> {
        let acting = self.acting.load();
        let identity = acting.identity(user).or_else(|| acting.signed(user))?;
        Some(self.going_on(user, acting.published, identity, None))
    }

    /// As the etcd user whose own password etcd accepted: by what the configuration has for it, for as long as it has
    /// something, and else by that password. And whether it is by that password now.
    #[must_use]
    pub fn acting_or(&self, own: Arc<PasswordIdentity>) -> (As, bool) {
        let acting = self.acting.load();
        let (user, entry) = (own.user().clone(), acting.identity(own.user()));
        let by_own = entry.is_none();
        let identity = entry.unwrap_or_else(|| Identity::Password(Arc::clone(&own)));
        (self.going_on(&user, acting.published, identity, Some(own)), by_own)
    }

    fn going_on(
        &self,
        user: &UserName,
        published: u64,
        identity: Identity,
        own: Option<Arc<PasswordIdentity>>,
    ) -> As {
        let last = ArcSwap::from_pointee(Proving { published, identity });
        let acting = Arc::clone(&self.acting);
        As::User(Identity::Acting(Arc::new(ActingIdentity { user: user.clone(), acting, last, own })))
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

    /// Members are those of another cluster: what was found out about the first holds no more.
    pub(super) fn forget_members(&self) {
        self.held.clear();
        if let Some(signer) = &self.acting.load().signer {
            signer.revisions().forget();
        }
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
    use std::path::Path;
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa};
    use tokio::time::Instant;

    use super::*;
    use crate::config::{ClusterPin, Serves};
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
            reads: Serves::Any,
            writes: Serves::Any,
            near: Vec::new(),
            hedge_after: None,
            outage: crate::config::OutageTimes::default(),
            probe: None,
            discovery: crate::config::Discovery::default(),
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

    const USERS: [&str; 3] = ["held", "minted", "other"];

    fn write(folder: &Path, name: &str, is_ca: IsCa) {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = match is_ca {
            IsCa::Ca(BasicConstraints::Unconstrained) => Vec::new(),
            _ => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        params.is_ca = is_ca;
        let key = rcgen::KeyPair::generate().unwrap();
        let write =
            |kind: &str, pem: String| std::fs::write(folder.join(name).with_extension(kind), pem).unwrap();
        write("crt", params.self_signed(&key).unwrap().pem());
        write("key", key.serialize_pem());
    }

    /// Reads the users again, as a reload does, and tells what tells their connections from others'.
    fn read(credentials: &Credentials, folder: &Path, lifetime: &str) -> [u64; 3] {
        let text = format!(
            "[[listener]]\nname = 'a'\naddress = '127.0.0.1:2'\n\
             [cluster]\nendpoints = ['https://127.0.0.1:1']\ntls = {{ ca = 'etcd.crt' }}\n\
             [mint]\nca = 'mint.crt'\nkey = 'mint.key'\nlifetime = '{lifetime}'\n\
             [[user]]\nname = 'held'\ncert = 'held.crt'\nkey = 'held.key'\n\
             [[user]]\nname = 'minted'\nmint = true\n[[user]]\nname = '*'\nmint = true\n"
        );
        let path = folder.join("keyward.toml");
        std::fs::write(&path, text).unwrap();
        let config = crate::config::load(&path).unwrap_or_else(|faults| panic!("{faults}")).0;
        let connector = Connector::tcp(None, Duration::from_secs(1));
        let members = Arc::new(ArcSwap::from_pointee(Membership::unknown(Instant::now())));
        credentials.act_for(&config.users, &config.cluster, Pages { connector, members }).unwrap();
        USERS.map(|user| match credentials.acting(&user.into()) {
            Some(As::User(identity)) => match &*identity.now() {
                Identity::Certificate(identity) => identity.showing().epoch,
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        })
    }

    #[tokio::test]
    async fn a_user_whose_certificate_is_the_same_keeps_its_connections() {
        let folder = tempfile::tempdir().unwrap();
        let mint = || write(folder.path(), "mint", IsCa::Ca(BasicConstraints::Constrained(0)));
        let root = || write(folder.path(), "etcd", IsCa::Ca(BasicConstraints::Unconstrained));
        let held = || write(folder.path(), "held", IsCa::NoCa);
        mint();
        root();
        held();
        let settings = CredentialSettings::default();
        let (credentials, _control) = Credentials::new(settings, ControlChannels::default()).unwrap();
        let read = |lifetime| read(&credentials, folder.path(), lifetime);
        let kept = |before: [u64; 3], now: [u64; 3]| [0, 1, 2].map(|user| before[user] == now[user]);
        let first = read("1h");
        assert_eq!(read("1h"), first, "whatever else was read again");
        held();
        let second = read("1h");
        assert_eq!(kept(first, second), [false, true, true]);
        let third = read("30m");
        assert_eq!(kept(second, third), [true, false, false]);
        mint();
        let fourth = read("30m");
        assert_eq!(kept(third, fourth), [true, false, false]);
        root();
        let fifth = read("30m");
        assert_eq!(kept(fourth, fifth), [false; 3]);
        assert_eq!(read("30m"), fifth);
    }
}
