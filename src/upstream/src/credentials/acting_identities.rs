//! Credentials that prove an etcd user without the client's own password.
//!
//! Owns: the mapping from an etcd user to the identity proving the user. Must not know: the client, or the
//! reason for acting as the user.
//! Invariants: `root` is proved only if the configuration names `root`, or the caller presented a token for
//! `root` signed with etcd's own key; a user has a single identity while in use, and keeps the identity while
//! the user's certificate, or the authority for minting, stays the same; a configuration is published whole.
//! After a reload, an ongoing stream or call is proved by the new configuration from the next attempt on. If
//! the new configuration has no credential for the user, the stream or call falls back to the password of its
//! own login, and without a password to the old credential.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use rustls::pki_types::CertificateDer;

use super::certificate_identity::{CertificateConnectionKey, CertificateIdentity};
use super::mint::{CertificateMint, MintError};
use super::signed_identity::SignedIdentity;
use super::signing_revision::{MetricsPages, SigningRevision};
use super::token_signer::TokenSigner;
use super::{Credentials, PasswordIdentity, UpstreamIdentity, UpstreamUser};
use keyward_base::pem::KeyPair;
use keyward_config::upstream_users::{CredentialMaker, UpstreamUsers, UserCredential};
use keyward_config::{ClientTls, Cluster, MemberTrust};
use keyward_dial::member_tls::{MemberTls, MemberTlsError};
use keyward_etcd::identity::UserName;

/// Maximum of cached identities for users not named in the configuration.
const OTHERS: u64 = 10_000;

/// Reasons for not being able to prove the configured users: the configuration passed its check, but cannot
/// be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum UsersError {
    /// A user's certificate, or the trusted authority of the members.
    #[error("a user's certificate cannot be shown: {0}")]
    Tls(#[from] MemberTlsError),
    /// The mint authority.
    #[error("{0}")]
    Mint(#[from] MintError),
}

/// An etcd user, proved by the credential that the current configuration gives the user.
pub struct ActingIdentity {
    user: UserName,
    acting: Arc<ArcSwap<ActingIdentities>>,
    last: ArcSwap<PublishedIdentity>,
    /// Identity by the user's own password, if the user logged in with a password.
    own: Option<Arc<PasswordIdentity>>,
}

/// The identity that one configuration gives a user.
struct PublishedIdentity {
    published: u64,
    identity: UpstreamIdentity,
}

impl ActingIdentity {
    /// The etcd user.
    #[must_use]
    pub fn user(&self) -> &UserName {
        &self.user
    }

    /// Returns the identity that proves the user now.
    pub(super) fn now(&self) -> UpstreamIdentity {
        let acting = self.acting.load();
        let last = self.last.load();
        if last.published == acting.published {
            return last.identity.clone();
        }
        let own = || self.own.as_ref().map(|own| UpstreamIdentity::Password(Arc::clone(own)));
        // Without any credential in the new configuration, an ongoing stream keeps the old credential.
        let identity = acting.identity(&self.user).or_else(own).unwrap_or_else(|| last.identity.clone());
        self.last
            .store(Arc::new(PublishedIdentity { published: acting.published, identity: identity.clone() }));
        identity
    }
}

impl fmt::Debug for ActingIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActingIdentity").field("user", &self.user).finish_non_exhaustive()
    }
}

/// The etcd users that one configuration can prove, with their identities.
pub struct ActingIdentities {
    /// Number of the configuration; unique per published configuration.
    published: u64,
    /// Epoch of minted certificates.
    epoch: u64,
    named: HashMap<UserName, UpstreamIdentity>,
    /// Identities of users not named in the configuration.
    made: Cache<UserName, UpstreamIdentity>,
    /// Identities proved by tokens signed by Keyward, for users named in a token signed with etcd's own key.
    signed: Cache<UserName, UpstreamIdentity>,
    mint: Option<Arc<CertificateMint>>,
    signing: Option<SigningRevision>,
    /// The configuration that the identities were made from.
    users: UpstreamUsers,
    trust: Option<MemberTrust>,
}

/// A cache of the identities used last: moka's default policy rejects newcomers beside frequently used
/// entries, and each call of a newcomer would mint or sign again.
fn recent_identities(idle: Duration) -> Cache<UserName, UpstreamIdentity> {
    Cache::builder().max_capacity(OTHERS).eviction_policy(EvictionPolicy::lru()).time_to_idle(idle).build()
}

impl ActingIdentities {
    /// A configuration without users.
    pub(super) fn nobody() -> Self {
        let (made, signed, users) = (Cache::new(0), Cache::new(0), UpstreamUsers::default());
        Self {
            published: 0,
            epoch: 0,
            named: HashMap::new(),
            made,
            signed,
            mint: None,
            signing: None,
            users,
            trust: None,
        }
    }

    /// Returns the current mint if the new configuration has the same mint authority, lifetime and trust.
    /// Keeping certificates keeps connections.
    fn mint_of(&self, users: &UpstreamUsers, trust: Option<&MemberTrust>) -> Option<Arc<CertificateMint>> {
        let of = |users: &UpstreamUsers| {
            let mint = users.mint.as_ref()?;
            Some((mint.authority.chain().to_vec(), mint.lifetime))
        };
        let same = of(&self.users) == of(users) && self.trusts(trust);
        self.mint.clone().filter(|_| same)
    }

    /// Returns the user's current identity if the certificate chain and the trust are unchanged. The chain
    /// determines the key: the configuration check matched the key and the certificate.
    fn shows(
        &self,
        user: &UserName,
        pair: &KeyPair,
        trust: Option<&MemberTrust>,
    ) -> Option<UpstreamIdentity> {
        let Some(UserCredential::Certificate(before)) = self.users.named.get(user) else { return None };
        let same = before.chain() == pair.chain() && self.trusts(trust);
        self.named.get(user).filter(|_| same).cloned()
    }

    /// Returns the user's current identity if minted.
    fn minted(&self, user: &UserName) -> Option<UpstreamIdentity> {
        let minted = matches!(self.users.named.get(user), Some(UserCredential::Made(CredentialMaker::Mint)));
        self.named.get(user).filter(|_| minted).cloned()
    }

    /// True if the configuration verifies members by the same `trust`.
    fn trusts(&self, trust: Option<&MemberTrust>) -> bool {
        self.trust.as_ref() == trust
    }

    fn make(&self, maker: CredentialMaker, user: &UserName) -> Option<UpstreamIdentity> {
        match maker {
            CredentialMaker::Mint => {
                let showing = CertificateConnectionKey { user: user.clone(), epoch: self.epoch };
                let mint = Arc::clone(self.mint.as_ref()?);
                Some(UpstreamIdentity::Certificate(CertificateIdentity::minted(showing, mint)))
            }
            CredentialMaker::Jwt => {
                Some(UpstreamIdentity::Signed(SignedIdentity::new(user, self.signing.as_ref()?)))
            }
        }
    }

    /// Returns an identity by tokens signed by Keyward, with or without a `[[user]]` row for the user.
    fn signed(&self, user: &UserName) -> Option<UpstreamIdentity> {
        let signing = self.signing.as_ref().filter(|_| !user.as_str().is_empty())?;
        Some(
            self.signed
                .get_with_by_ref(user, || UpstreamIdentity::Signed(SignedIdentity::new(user, signing))),
        )
    }

    fn identity(&self, user: &UserName) -> Option<UpstreamIdentity> {
        if let Some(identity) = self.named.get(user) {
            return Some(identity.clone());
        }
        let maker = self.users.others.filter(|_| !user.as_str().is_empty() && user.as_str() != "root")?;
        if let Some(identity) = self.made.get(user) {
            return Some(identity);
        }
        let identity = self.make(maker, user)?;
        // The first caller's identity wins: two identities of one user would mean two sets of connections.
        Some(self.made.get_with_by_ref(user, || identity))
    }
}

/// Returns a unique number, for telling apart configurations and successive certificates of one user.
fn epoch() -> u64 {
    static EPOCHS: AtomicU64 = AtomicU64::new(1);
    EPOCHS.fetch_add(1, Ordering::Relaxed)
}

impl Credentials {
    /// Builds and publishes the identities of a configuration, replacing the previous configuration.
    ///
    /// # Errors
    /// [`UsersError`]; the previous configuration stays published.
    pub fn act_for(
        &self,
        users: &UpstreamUsers,
        cluster: &Cluster,
        pages: MetricsPages,
    ) -> Result<(), UsersError> {
        self.build_acting(users, cluster, pages).map(|acting| self.publish_acting(acting))
    }

    /// Publishes a configuration, replacing the previous configuration.
    pub fn publish_acting(&self, acting: ActingIdentities) {
        self.acting.store(Arc::new(acting));
    }

    /// Builds the identities of a configuration without publishing. `pages` fetches the auth revision from
    /// members without an RPC for the auth revision.
    ///
    /// # Errors
    /// [`UsersError`].
    pub fn build_acting(
        &self,
        users: &UpstreamUsers,
        cluster: &Cluster,
        pages: MetricsPages,
    ) -> Result<ActingIdentities, UsersError> {
        let before = self.acting.load();
        let trust = cluster.tls.as_ref().map(|tls: &ClientTls| &tls.trust);
        let towards = trust.map(MemberTls::new).transpose()?;
        let kept = before.mint_of(users, trust);
        let minted_as_before = kept.is_some();
        let mint = match (&users.mint, &towards) {
            (Some(_), Some(_)) if minted_as_before => kept,
            (Some(mint), Some(towards)) => {
                Some(CertificateMint::new(mint, towards.clone(), self.checked_authorities.clone())?)
            }
            _ => None,
        };
        let signing = users.sign_jwt.as_ref().map(|config| {
            let signer = TokenSigner::new(config, Arc::clone(&self.shared));
            SigningRevision::new(signer, self.revision_requests.clone(), pages)
        });
        let idle = self.shared.settings.idle;
        let keeps_others =
            minted_as_before && [before.users.others, users.others] == [Some(CredentialMaker::Mint); 2];
        let mut acting = ActingIdentities {
            published: epoch(),
            epoch: if minted_as_before { before.epoch } else { epoch() },
            named: HashMap::new(),
            made: if keeps_others { before.made.clone() } else { recent_identities(idle) },
            signed: recent_identities(idle),
            mint,
            signing,
            users: users.clone(),
            trust: trust.cloned(),
        };
        for (user, credential) in &users.named {
            let identity = match credential {
                UserCredential::Password(password) => {
                    Some(UpstreamIdentity::Password(self.identity(user, password)))
                }
                UserCredential::Certificate(pair) => match before.shows(user, pair, trust) {
                    Some(same) => Some(same),
                    None => {
                        let showing = CertificateConnectionKey { user: user.clone(), epoch: epoch() };
                        let tls = towards.as_ref().map(|towards| towards.with_key_pair(pair)).transpose()?;
                        tls.map(|tls| UpstreamIdentity::Certificate(CertificateIdentity::held(showing, tls)))
                    }
                },
                UserCredential::Made(CredentialMaker::Mint) if minted_as_before => {
                    before.minted(user).or_else(|| acting.make(CredentialMaker::Mint, user))
                }
                UserCredential::Made(maker) => acting.make(*maker, user),
            };
            acting.named.extend(identity.map(|identity| (user.clone(), identity)));
        }
        Ok(acting)
    }

    /// Acts as the etcd user without the user's password. None if the configuration has no credential for the
    /// user.
    #[must_use]
    pub fn act_as(&self, user: &UserName) -> Option<UpstreamUser> {
        let acting = self.acting.load();
        let identity = acting.identity(user)?;
        Some(self.acting_identity(user, acting.published, identity, None))
    }

    /// Acts as the etcd user named in a token signed with etcd's own key, `root` included: by the configured
    /// credential of the user, or else by tokens signed by Keyward. None if neither is possible.
    #[must_use]
    pub fn act_as_or_signed(&self, user: &UserName) -> Option<UpstreamUser> {
        let acting = self.acting.load();
        let identity = acting.identity(user).or_else(|| acting.signed(user))?;
        Some(self.acting_identity(user, acting.published, identity, None))
    }

    /// Acts as the etcd user whose own password etcd accepted: by the configured credential while the
    /// configuration has a credential for the user, otherwise by the password. The returned flag is true if
    /// the password is used now.
    #[must_use]
    pub fn act_as_or_password(&self, own: Arc<PasswordIdentity>) -> (UpstreamUser, bool) {
        let acting = self.acting.load();
        let (user, entry) = (own.user().clone(), acting.identity(own.user()));
        let by_own = entry.is_none();
        let identity = entry.unwrap_or_else(|| UpstreamIdentity::Password(Arc::clone(&own)));
        (self.acting_identity(&user, acting.published, identity, Some(own)), by_own)
    }

    fn acting_identity(
        &self,
        user: &UserName,
        published: u64,
        identity: UpstreamIdentity,
        own: Option<Arc<PasswordIdentity>>,
    ) -> UpstreamUser {
        let last = ArcSwap::from_pointee(PublishedIdentity { published, identity });
        let acting = Arc::clone(&self.acting);
        UpstreamUser::User(UpstreamIdentity::Acting(Arc::new(ActingIdentity {
            user: user.clone(),
            acting,
            last,
            own,
        })))
    }

    /// The certificate chain of the mint authority, up to an authority trusted by members. None if no
    /// certificates are minted.
    #[must_use]
    pub fn mint_authority(&self) -> Option<Vec<CertificateDer<'static>>> {
        self.acting.load().mint.as_ref().map(|mint| mint.authority().to_vec())
    }

    /// True if certificates can be minted, or no minting is configured.
    #[must_use]
    pub fn may_mint(&self) -> bool {
        self.acting.load().mint.as_ref().is_none_or(|mint| mint.is_held())
    }

    /// True if the authority was checked against the members and may mint.
    #[must_use]
    pub fn may_authority_mint(&self, authority: &[CertificateDer<'static>]) -> bool {
        self.checked_authorities.has(authority)
    }

    /// Allows the authority to mint: as far as could be checked, no member trusts the authority for peer
    /// connections.
    pub fn allow_minting(&self, authority: &[CertificateDer<'static>]) {
        self.checked_authorities.add(authority);
    }

    /// Forgets mint checks and the auth revision, because Keyward follows another cluster.
    pub(super) fn forget_members(&self) {
        self.checked_authorities.clear();
        if let Some(signing) = &self.acting.load().signing {
            signing.forget();
        }
    }

    /// Numbers of certificates minted and of tokens signed under the current configuration.
    #[must_use]
    pub fn minted_and_signed(&self) -> (u64, u64) {
        let acting = self.acting.load();
        let minted = acting.mint.as_ref().map_or(0, |mint| mint.minted());
        (minted, acting.signing.as_ref().map_or(0, |signing| signing.signer().signed()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa};
    use tokio::time::Instant;

    use super::*;
    use crate::credentials::CredentialSettings;
    use keyward_base::secret::Secret;
    use keyward_cluster::membership::{ControlChannels, Membership};
    use keyward_config::{ClusterPin, MemberPreference};
    use keyward_dial::connect::Connector;

    fn publish(credentials: &Credentials, passwords: &[(&str, &str)]) {
        let credential = |text: &str| UserCredential::Password(Arc::new(Secret::new(text.to_owned())));
        let named = passwords.iter().map(|(user, text)| (UserName::from(*user), credential(text)));
        let users = UpstreamUsers { named: named.collect(), ..UpstreamUsers::default() };
        let second = Duration::from_secs(1);
        let cluster = Cluster {
            endpoints: Vec::new(),
            tls: None,
            connect_timeout: second,
            idle_timeout: second,
            token_ttl: second,
            pin: ClusterPin::FirstAnswer,
            reads: MemberPreference::Any,
            writes: MemberPreference::Any,
            near: Vec::new(),
            hedge_after: None,
            outage: keyward_config::OutageTimes::default(),
            probe: None,
            discovery: keyward_config::Discovery::default(),
        };
        let members = Arc::new(ArcSwap::from_pointee(Membership::unknown(Instant::now())));
        let pages = MetricsPages { connector: Connector::tcp(None, second), members };
        credentials.act_for(&users, &cluster, pages).unwrap();
    }

    #[test]
    fn a_full_cache_keeps_the_identity_of_a_newcomer() {
        let (credentials, _control) =
            Credentials::new(CredentialSettings::default(), ControlChannels::default())
                .expect("random bytes");
        let identity = |user: &str| {
            let password = Secret::new("p".to_owned());
            UpstreamIdentity::Password(credentials.identity(&user.into(), &password))
        };
        let (cache, shared) = (recent_identities(Duration::from_secs(60)), identity("alice"));
        for number in 0..OTHERS {
            let user = UserName::from(format!("user-{number}").as_str());
            cache.insert(user.clone(), shared.clone());
            // Frequent use of the old entries does not keep a newcomer out.
            (0..3).for_each(|_| assert!(cache.get(&user).is_some()));
        }
        cache.insert("newcomer".into(), shared);
        cache.run_pending_tasks();
        assert!(cache.get(&UserName::from("newcomer")).is_some());
        assert_eq!(cache.entry_count(), OTHERS);
    }

    #[test]
    fn who_goes_on_over_a_reload_is_proved_by_what_is_new() {
        let (credentials, _control) =
            Credentials::new(CredentialSettings::default(), ControlChannels::default()).unwrap();
        publish(&credentials, &[("alice", "old")]);
        let Some(UpstreamUser::User(alice)) = credentials.act_as(&"alice".into()) else {
            panic!("she has a row")
        };
        let proved_by = |text: &str| {
            let wanted = credentials.identity(&"alice".into(), &Secret::new(text.to_owned()));
            matches!(&*alice.current_identity(), UpstreamIdentity::Password(identity) if Arc::ptr_eq(identity, &wanted))
        };
        assert!(proved_by("old"));
        publish(&credentials, &[("alice", "new"), ("bob", "old")]);
        assert!(proved_by("new") && !proved_by("old"));
        // Without a row for alice, no new call may act as alice; an ongoing stream keeps the old credential.
        publish(&credentials, &[("bob", "old")]);
        assert!(credentials.act_as(&"alice".into()).is_none() && proved_by("new"));
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

    /// Reads the users again, as a reload does. Returns the epoch of each user's certificate identity; equal
    /// epochs share connections.
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
        let config = keyward_config::load(&path).unwrap_or_else(|faults| panic!("{faults}")).0;
        let connector = Connector::tcp(None, Duration::from_secs(1));
        let members = Arc::new(ArcSwap::from_pointee(Membership::unknown(Instant::now())));
        credentials.act_for(&config.users, &config.cluster, MetricsPages { connector, members }).unwrap();
        USERS.map(|user| match credentials.act_as(&user.into()) {
            Some(UpstreamUser::User(identity)) => match &*identity.current_identity() {
                UpstreamIdentity::Certificate(identity) => identity.showing().epoch,
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
