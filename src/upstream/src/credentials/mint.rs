//! Client certificates minted by Keyward: short-lived, for one etcd user, with keys in memory only.
//!
//! Owns: the validity of a minted certificate, and how long a certificate is used. Must not know: the content
//! of a certificate (`authority`), the caller of a mint, connections.
//! Invariants (docs/decisions.md#d19): a certificate is valid for the configured lifetime and never beyond
//! the authority's validity; not-before lies far enough back for a member with a slow clock; each certificate
//! has a new key, wiped from memory owned by Keyward.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rcgen::KeyPair;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use tokio::sync::watch;
use tokio::time::Instant;
use zeroize::{Zeroize as _, Zeroizing};

use super::leaf::{CertificatePeriod, Leaf};
use keyward_base::wall_deadline::WallDeadline;
use keyward_config::authority::{Authority, UnusableAuthority};
use keyward_config::upstream_users;
use keyward_dial::member_tls::MemberTls;
use keyward_etcd::identity::UserName;

/// Largest tolerated lag of a member's clock behind the clock of Keyward.
const BEHIND: Duration = Duration::from_secs(300);

/// Reasons for not having a certificate.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MintError {
    /// The authority's certificate has expired or is not valid yet.
    #[error("mint.ca is not good at this time")]
    NotNow,
    /// The authority's certificate or key cannot be used, although the configuration passed its check.
    #[error("mint.ca {0}")]
    Unusable(#[from] UnusableAuthority),
    /// Members were not checked yet, or a member trusts the authority for peer connections.
    #[error("mint.ca was not held against the members' peer URLs yet")]
    NotHeld,
    /// Making the certificate failed.
    #[error("no certificate could be made: {0}")]
    Failed(Arc<str>),
}

/// The authorities allowed to mint: as far as could be checked, no member trusts an allowed authority for
/// peer connections. Oldest first; an authority not listed mints no certificate.
#[derive(Clone)]
pub(super) struct CheckedAuthorities(Arc<watch::Sender<Vec<MintChain>>>);

/// The certificate chain in `mint.ca`.
type MintChain = Vec<CertificateDer<'static>>;

/// Maximum of remembered authorities. Each change of `mint.ca` in the configuration adds an authority.
const HELD: usize = 8;

impl Default for CheckedAuthorities {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(Vec::new())))
    }
}

impl CheckedAuthorities {
    pub(super) fn add(&self, authority: &[CertificateDer<'static>]) {
        self.0.send_if_modified(|held| {
            let new = held.iter().all(|known| known != authority);
            if new {
                held.drain(..held.len().saturating_sub(HELD - 1));
                held.push(authority.to_vec());
            }
            new
        });
    }

    /// Forgets all checks of members.
    pub(super) fn clear(&self) {
        self.0.send_modify(Vec::clear);
    }

    pub(super) fn has(&self, authority: &[CertificateDer<'static>]) -> bool {
        self.0.borrow().iter().any(|known| known == authority)
    }
}

/// Mints certificates from one authority.
pub(super) struct CertificateMint {
    authority: Authority,
    chain: Vec<CertificateDer<'static>>,
    lifetime: Duration,
    towards: MemberTls,
    held: CheckedAuthorities,
    minted: AtomicU64,
    failing: AtomicBool,
}

impl CertificateMint {
    /// Mints from the configured authority, for connections using `towards`.
    ///
    /// # Errors
    /// The authority cannot be used.
    pub(super) fn new(
        config: &upstream_users::MintAuthority,
        towards: MemberTls,
        held: CheckedAuthorities,
    ) -> Result<Arc<Self>, MintError> {
        let authority = Authority::new(&config.authority)?;
        let chain = config.authority.chain().to_vec();
        let (minted, failing) = (AtomicU64::new(0), AtomicBool::new(false));
        let lifetime = config.lifetime;
        Ok(Arc::new(Self { authority, chain, lifetime, towards, held, minted, failing }))
    }

    /// The certificate chain of the mint authority.
    pub(super) fn authority(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// True if the authority was checked against the members and may mint.
    pub(super) fn is_held(&self) -> bool {
        self.held.has(&self.chain)
    }

    /// Waits until the authority may mint. Cancel-safe.
    pub(super) async fn held(&self) {
        let mut changes = self.held.0.subscribe();
        // The wait cannot fail: `self` owns the sender.
        drop(changes.wait_for(|held| held.contains(&self.chain)).await);
    }

    /// Number of certificates minted.
    pub(super) fn minted(&self) -> u64 {
        self.minted.load(Ordering::Relaxed)
    }

    /// Logs a change between working and failing. Callers retry often, so only changes are logged.
    pub(super) fn note(&self, made: Result<(), &MintError>) {
        let failed = made.is_err();
        if self.failing.swap(failed, Ordering::Relaxed) != failed {
            match made {
                Ok(()) => tracing::info!("certificates are minted again"),
                Err(error) => tracing::error!(%error, "no certificate can be minted"),
            }
        }
    }

    /// Mints a certificate for `user`. The certificate is used for some two thirds of its lifetime; the share
    /// is random, so that many certificates do not expire at once.
    pub(super) fn leaf(&self, user: &UserName, now: SystemTime) -> Result<Leaf, MintError> {
        if !self.is_held() {
            return Err(MintError::NotHeld);
        }
        let (begins, ends) = self.authority.good();
        let life = self.lifetime.min(ends.duration_since(now).unwrap_or_default());
        if now < begins || life < Duration::from_secs(1) {
            return Err(MintError::NotNow);
        }
        let failed = |error: &dyn fmt::Display| MintError::Failed(error.to_string().into());
        let mut key = KeyPair::generate().map_err(|error| failed(&error))?;
        let der = Zeroizing::new(PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())));
        let signing = any_supported_type(&der).map_err(|error| failed(&error));
        let begins = begins.max(now - BEHIND);
        let signed = self.authority.sign(user, begins, now + life, &key);
        key.zeroize();
        let mut chain = vec![signed.map_err(|error| failed(&error))?.der().clone()];
        chain.extend(self.chain.iter().cloned());
        let tls = self
            .towards
            .with_certificate(CertifiedKey::new(chain, signing?))
            .map_err(|error| failed(&error))?;
        self.minted.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(?user, life_s = life.as_secs(), "minted a certificate");
        let mut dice = [0];
        getrandom::fill(&mut dice).map_err(|error| failed(&error))?;
        // Between 60 % and 70 % of the lifetime.
        let share = (6.0 + f64::from(dice[0]) / 256.0) / 10.0;
        let used = life.mul_f64(share);
        let minted = Instant::now();
        let used_until = WallDeadline::at(now + used, minted, now);
        let times = CertificatePeriod { minted, begins, used_until };
        Ok(Leaf { tls, times: Some(times) })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use std::time::UNIX_EPOCH;

    use futures_util::FutureExt as _;
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
        ExtendedKeyUsagePurpose, IsCa,
    };
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier as _;
    use rustls::pki_types::UnixTime;
    use rustls::server::WebPkiClientVerifier;
    use rustls::{RootCertStore, SignatureScheme};
    use x509_parser::certificate::X509Certificate;
    use x509_parser::prelude::FromDer as _;

    use super::*;
    use keyward_base::pem::{Chain, PrivateKey, Roots};
    use keyward_config::MemberTrust;
    use keyward_config::trust::Strictness;

    /// A root authority trusted by etcd, and a mint below the root.
    struct MintFixture {
        root: CertificateDer<'static>,
        mint: Arc<CertificateMint>,
        held: CheckedAuthorities,
    }

    impl MintFixture {
        fn held(self) -> Self {
            self.held.add(self.mint.authority());
            self
        }
    }

    fn pair(folder: &Path, chain: &str, key: &str) -> keyward_base::pem::KeyPair {
        let (cert, private) = (folder.join("cert.pem"), folder.join("key.pem"));
        std::fs::write(&cert, chain).unwrap();
        std::fs::write(&private, key).unwrap();
        keyward_base::pem::KeyPair::new(Chain::read(&cert).unwrap(), PrivateKey::read(&private).unwrap())
            .unwrap()
    }

    fn house(
        lifetime: Duration,
        ends: Option<SystemTime>,
        of: &'static rcgen::SignatureAlgorithm,
    ) -> MintFixture {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "mint");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if let Some(ends) = ends {
            params.not_after = ends.into();
        }
        let key = KeyPair::generate_for(of).unwrap();
        let cert = params.signed_by(&key, &root).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let authority = pair(folder.path(), &cert.pem(), &key.serialize_pem());
        let roots = folder.path().join("root.pem");
        std::fs::write(&roots, root.pem()).unwrap();
        let towards =
            MemberTls::new(&MemberTrust::Authorities(Roots::read(&roots).unwrap(), Strictness::AsEtcd))
                .unwrap();
        let held = CheckedAuthorities::default();
        let mint = CertificateMint::new(
            &upstream_users::MintAuthority { authority, lifetime },
            towards,
            held.clone(),
        )
        .unwrap();
        MintFixture { root: root.der().clone(), mint, held }.held()
    }

    /// The certificates presented by a leaf, as seen by a member.
    fn shown(leaf: &Leaf) -> Vec<CertificateDer<'static>> {
        let certificate =
            leaf.tls.client_auth_cert_resolver.resolve(&[], &[SignatureScheme::ECDSA_NISTP256_SHA256]);
        certificate.unwrap().cert.clone()
    }

    /// Verifies a client certificate chain under the root alone at a given time, as etcd's TLS does.
    fn verified(house: &MintFixture, chain: &[CertificateDer<'static>], at: SystemTime) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add(house.root.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        let at = UnixTime::since_unix_epoch(at.duration_since(UNIX_EPOCH).unwrap());
        verifier.verify_client_cert(&chain[0], &chain[1..], at).is_ok()
    }

    #[test]
    fn a_minted_certificate_names_its_user_and_is_good_for_a_client_in_its_time_alone() {
        let hour = Duration::from_secs(3600);
        for of in [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384, &rcgen::PKCS_ED25519] {
            let house = house(hour, None, of);
            let now = SystemTime::now();
            let name = "alice \"the\" ,CN=root";
            let leaf = house.mint.leaf(&name.into(), now).unwrap();
            let chain = shown(&leaf);
            assert_eq!(chain.len(), 2, "the authority goes with it");
            let (_, parsed) = X509Certificate::from_der(&chain[0]).unwrap();
            let names: Vec<_> = parsed.subject().iter_common_name().map(|cn| cn.as_str().unwrap()).collect();
            assert_eq!(names, [name]);
            let usages = parsed.extended_key_usage().unwrap().unwrap().value;
            assert!(usages.client_auth && !usages.server_auth && !usages.any && usages.other.is_empty());
            assert!(!parsed.is_ca());
            let second = Duration::from_secs(1);
            for (at, good) in [
                (now, true),
                (now - BEHIND + second, true),
                (now - BEHIND - 2 * second, false),
                (now + hour - 2 * second, true),
                (now + hour + second, false),
            ] {
                assert_eq!(verified(&house, &chain, at), good, "{:?}", at.duration_since(now));
            }
        }
    }

    /// A stolen mint key can sign any certificate, but only client certificates verify.
    #[test]
    fn what_a_mint_signs_is_no_member_and_no_other_mint() {
        let authority = |name: &str, constraints, usages: &[ExtendedKeyUsagePurpose]| {
            let mut params = CertificateParams::default();
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(constraints);
            params.extended_key_usages = usages.to_vec();
            params
        };
        let clients = [ExtendedKeyUsagePurpose::ClientAuth];
        let both = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let new = || KeyPair::generate().unwrap();
        let root =
            CertifiedIssuer::self_signed(authority("root", BasicConstraints::Unconstrained, &[]), new());
        let root = root.unwrap();
        let mint = authority("mint", BasicConstraints::Constrained(0), &clients);
        let mint = CertifiedIssuer::signed_by(mint, new(), &root).unwrap();
        let other = authority("another mint", BasicConstraints::Unconstrained, &clients);
        let other = CertifiedIssuer::signed_by(other, new(), &mint).unwrap();
        let mut params = CertificateParams::new(vec!["member.example".to_owned()]).unwrap();
        params.extended_key_usages = both.to_vec();
        let leaf = params.signed_by(&new(), &mint).unwrap();
        let below = params.signed_by(&new(), &other).unwrap();

        let provider = || Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(root.der().clone()).unwrap();
        let roots = Arc::new(roots);
        let at = UnixTime::now();
        let as_clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider()).build().unwrap();
        let as_members = WebPkiServerVerifier::builder_with_provider(roots, provider()).build().unwrap();
        let chain = [mint.der().clone()];
        assert!(as_clients.verify_client_cert(leaf.der(), &chain, at).is_ok());
        let name = "member.example".try_into().unwrap();
        let member = as_members.verify_server_cert(leaf.der(), &chain, &name, &[], at);
        assert!(format!("{member:?}").contains("InvalidPurpose"), "{member:?}");
        let chain = [other.der().clone(), mint.der().clone()];
        let client = as_clients.verify_client_cert(below.der(), &chain, at);
        assert!(format!("{client:?}").contains("PathLen"), "{client:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_certificate_is_replaced_after_two_thirds_of_its_life_and_by_one_with_another_key() {
        let house = house(Duration::from_secs(600), None, &rcgen::PKCS_ECDSA_P256_SHA256);
        let showing =
            super::super::certificate_identity::CertificateConnectionKey { user: "alice".into(), epoch: 1 };
        let identity = super::super::CertificateIdentity::minted(showing, Arc::clone(&house.mint));
        let began = Instant::now();
        let first = identity.leaf().unwrap();
        let (until, wall) = (first.fresh_until().unwrap(), SystemTime::UNIX_EPOCH);
        let fresh =
            (0..600_000).map(Duration::from_millis).find(|age| until.has_passed(began + *age, wall)).unwrap();
        assert!((Duration::from_secs(360)..=Duration::from_secs(420)).contains(&fresh), "{fresh:?}");
        tokio::time::advance(fresh - Duration::from_millis(1)).await;
        assert_eq!(shown(&identity.leaf().unwrap()), shown(&first));
        tokio::time::advance(Duration::from_millis(1)).await;
        let second = identity.leaf().unwrap();
        let key = |leaf: &Leaf| {
            let chain = shown(leaf);
            let (_, parsed) = X509Certificate::from_der(&chain[0]).unwrap();
            parsed.public_key().raw.to_vec()
        };
        assert_ne!(key(&second), key(&first));
        assert_eq!(house.mint.minted(), 2);
    }

    #[tokio::test]
    async fn nothing_is_minted_before_the_authority_was_held_against_members() {
        let MintFixture { mint, .. } = house(BEHIND, None, &rcgen::PKCS_ECDSA_P256_SHA256);
        let mint = Arc::into_inner(mint).unwrap();
        let (held, now) = (CheckedAuthorities::default(), SystemTime::now());
        let mint = CertificateMint { held: held.clone(), ..mint };
        let mut waiting = Box::pin(mint.held());
        let stranger = house(BEHIND, None, &rcgen::PKCS_ECDSA_P256_SHA256);
        held.add(stranger.mint.authority());
        assert!((&mut waiting).now_or_never().is_none(), "it was another");
        assert!(matches!(mint.leaf(&"alice".into(), now), Err(MintError::NotHeld)));
        held.add(mint.authority());
        waiting.await;
        assert!(mint.leaf(&"alice".into(), now).is_ok());
        // The oldest of more than `HELD` authorities is forgotten.
        for number in 0..HELD {
            held.add(&[CertificateDer::from(vec![u8::try_from(number).unwrap()])]);
        }
        assert!(!mint.is_held());
    }

    #[tokio::test(start_paused = true)]
    async fn a_certificate_is_used_for_its_time_by_both_clocks() {
        let house = house(Duration::from_secs(600), None, &rcgen::PKCS_ECDSA_P256_SHA256);
        let (now, wall) = (Instant::now(), SystemTime::now());
        let leaf = house.mint.leaf(&"alice".into(), wall).unwrap();
        let second = Duration::from_secs(1);
        assert!(leaf.is_fresh(now + 300 * second, wall + 300 * second));
        assert!(
            !leaf.is_fresh(now + second, wall + 421 * second),
            "the machine slept, or its clock was behind"
        );
        assert!(leaf.is_fresh(now + second, wall - BEHIND));
        assert!(
            !leaf.is_fresh(now + second, wall - BEHIND - second),
            "its clock was ahead: no member takes it yet"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_certificate_that_was_refused_is_replaced_and_by_no_more_than_one_in_a_while() {
        let house = house(Duration::from_secs(600), None, &rcgen::PKCS_ECDSA_P256_SHA256);
        let showing =
            super::super::certificate_identity::CertificateConnectionKey { user: "alice".into(), epoch: 1 };
        let identity = super::super::CertificateIdentity::minted(showing, Arc::clone(&house.mint));
        let first = identity.leaf().unwrap();
        for _ in 0..100 {
            identity.refused(&identity.leaf().unwrap());
        }
        assert_eq!(shown(&identity.leaf().unwrap()), shown(&first), "another would be refused as well");
        tokio::time::advance(super::super::certificate_identity::AGAIN).await;
        identity.refused(&first);
        let second = identity.leaf().unwrap();
        assert_ne!(shown(&second), shown(&first));
        tokio::time::advance(super::super::certificate_identity::AGAIN).await;
        identity.refused(&first);
        assert_eq!(shown(&identity.leaf().unwrap()), shown(&second), "the first was replaced already");
        assert_eq!(house.mint.minted(), 2);
    }

    #[test]
    fn nothing_is_minted_past_the_authoritys_own_time() {
        let now = SystemTime::now();
        let ends = now + Duration::from_secs(60);
        let house = house(Duration::from_secs(3600), Some(ends), &rcgen::PKCS_ECDSA_P256_SHA256);
        let chain = shown(&house.mint.leaf(&"alice".into(), now).unwrap());
        let (_, parsed) = X509Certificate::from_der(&chain[0]).unwrap();
        let until = u64::try_from(parsed.validity().not_after.timestamp()).unwrap();
        assert!(UNIX_EPOCH + Duration::from_secs(until) <= ends);
        let late = house.mint.leaf(&"alice".into(), ends + Duration::from_secs(1));
        assert!(matches!(late, Err(MintError::NotNow)));
    }
}
