//! TLS towards members: from the resolved configuration to the configuration of rustls.
//!
//! Owns: the verification of members, the client certificate presented to members, the reason for a failed
//! handshake. Must not know: files, addresses, HTTP. Invariants: the `ring` provider is named explicitly and
//! never taken from a process-wide default; system roots are not used; a connection with a client certificate
//! never resumes a session of an older certificate; a member always proves possession of the presented
//! certificate's key, even if the certificate is pinned or not verified.

mod ecdsa_p521;

use std::io;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WantsClientCert};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    CertificateError, ClientConfig, ConfigBuilder, DigitallySignedStruct, OtherError, SignatureScheme,
};

use keyward_base::pem::{CertificateFingerprint, KeyPair};
use keyward_config::trust::{
    ChainVerifier, ChainVerifierError, HandshakeVersion, Refusal, RefusedChain, verify_handshake,
};
use keyward_config::{ClientTls, MemberTrust};

/// The resolved configuration is rejected, although the files passed their check.
#[derive(Clone, Debug, thiserror::Error)]
#[error(transparent)]
pub enum MemberTlsError {
    /// By rustls.
    Rustls(#[from] rustls::Error),
    /// By the verifier of members.
    Authorities(#[from] ChainVerifierError),
}

/// TLS towards members, not yet bound to a client certificate. Cheap to clone.
#[derive(Clone)]
pub struct MemberTls {
    provider: Arc<CryptoProvider>,
    verifier: Arc<dyn ServerCertVerifier>,
}

/// The member's certificate is not among the pinned certificates.
#[derive(Debug, thiserror::Error)]
#[error("its certificate is not pinned: its SHA-256 is {shown}, which is not in cluster.tls.pinned_sha256")]
struct NotPinned {
    shown: CertificateFingerprint,
}

/// Accepts any member with the key of a pinned certificate; without pins, any member.
#[derive(Debug)]
struct WithoutAuthorities(Option<Arc<[CertificateFingerprint]>>);

impl ServerCertVerifier for WithoutAuthorities {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let shown = CertificateFingerprint::of(certificate);
        match &self.0 {
            Some(pins) if !pins.contains(&shown) => {
                let why = OtherError(Arc::new(NotPinned { shown }));
                Err(rustls::Error::InvalidCertificate(CertificateError::Other(why)))
            }
            Some(_) | None => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_handshake(HandshakeVersion::Tls12, message, certificate, signed, &ecdsa_p521::ALGORITHMS)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_handshake(HandshakeVersion::Tls13, message, certificate, signed, &ecdsa_p521::ALGORITHMS)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ecdsa_p521::ALGORITHMS.supported_schemes()
    }
}

/// The alert by which a member refused the certificate shown, if `error` is one. In TLS 1.3 the handshake is
/// complete for Keyward before the member has looked at the certificate: the alert comes as the failure of a
/// read.
#[must_use]
pub fn certificate_alert(error: &io::Error) -> Option<Arc<str>> {
    use rustls::AlertDescription as Alert;
    let Some(rustls::Error::AlertReceived(alert)) = error.get_ref()?.downcast_ref() else { return None };
    let is_about_certificate = matches!(
        alert,
        Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::DecryptError
            | Alert::CertificateRequired
    );
    is_about_certificate.then(|| format!("{alert:?}").into())
}

/// Describes a failed handshake for operators: Keyward's own reasons, with advice for the most frequent
/// failures.
pub(super) fn describe_handshake_failure(error: &io::Error, refused: Option<&RefusedChain>) -> String {
    let told = refused.map_or_else(|| error.to_string(), ToString::to_string);
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        Some(rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(why))))
            if why.is::<NotPinned>() =>
        {
            why.to_string()
        }
        Some(rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        )) => format!(
            "{told}: cluster.tls.ca does not vouch for it; a certificate that a member made itself \
             (--auto-tls) is pinned by cluster.tls.pinned_sha256"
        ),
        Some(
            rustls::Error::AlertReceived(rustls::AlertDescription::HandshakeFailure)
            | rustls::Error::InvalidCertificate(
                CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. },
            ),
        ) => unsupported(&told),
        _ if refused.is_some_and(|refused| {
            matches!(refused.refusal, Refusal::UnsupportedSignature | Refusal::UnsupportedKey)
        }) =>
        {
            unsupported(&told)
        }
        _ => told,
    }
}

fn unsupported(told: &str) -> String {
    format!(
        "{told}: the member's key or its signature is of no kind that is known here (RSA, ECDSA P-256, \
             P-384 and P-521, Ed25519), or it takes no TLS of ours"
    )
}

impl MemberTls {
    /// TLS towards members verified by `trust`.
    ///
    /// # Errors
    /// [`MemberTlsError`].
    pub fn new(trust: &MemberTrust) -> Result<Self, MemberTlsError> {
        let ring = rustls::crypto::ring::default_provider();
        let provider =
            Arc::new(CryptoProvider { signature_verification_algorithms: *ecdsa_p521::ALGORITHMS, ..ring });
        let verifier: Arc<dyn ServerCertVerifier> = match trust {
            MemberTrust::Authorities(roots, strictness) => {
                Arc::new(ChainVerifier::of_members(roots.certificates(), *strictness, &provider)?)
            }
            MemberTrust::Pinned(pins) => Arc::new(WithoutAuthorities(Some(Arc::clone(pins)))),
            MemberTrust::Unverified => Arc::new(WithoutAuthorities(None)),
        };
        Ok(Self { provider, verifier })
    }

    /// Returns a configuration for HTTP/2, without a client certificate.
    ///
    /// # Errors
    /// [`MemberTlsError`].
    pub fn anonymous(&self) -> Result<Arc<ClientConfig>, MemberTlsError> {
        Ok(http2(self.builder()?.with_no_client_auth()))
    }

    /// Returns a configuration for HTTP/2, with a client certificate. Resumption is disabled: a resumed
    /// session would belong to an older certificate.
    ///
    /// # Errors
    /// [`MemberTlsError`].
    pub fn with_certificate(&self, certificate: CertifiedKey) -> Result<Arc<ClientConfig>, MemberTlsError> {
        let shown = Arc::new(SingleCertAndKey::from(certificate));
        let mut config = self.builder()?.with_client_cert_resolver(shown);
        config.resumption = Resumption::disabled();
        Ok(http2(config))
    }

    /// Like [`MemberTls::with_certificate`], with a certificate and key read from files.
    ///
    /// # Errors
    /// [`MemberTlsError`].
    pub fn with_key_pair(&self, pair: &KeyPair) -> Result<Arc<ClientConfig>, MemberTlsError> {
        self.with_certificate(CertifiedKey::new(pair.chain().to_vec(), Arc::clone(pair.signing())))
    }

    fn builder(&self) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>, MemberTlsError> {
        let builder = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?;
        Ok(builder.dangerous().with_custom_certificate_verifier(Arc::clone(&self.verifier)))
    }
}

/// The algorithms by which members' certificates are verified.
#[must_use]
pub fn algorithms() -> WebPkiSupportedAlgorithms {
    *ecdsa_p521::ALGORITHMS
}

fn http2(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// Returns a rustls configuration for HTTP/2.
///
/// # Errors
/// [`MemberTlsError`].
pub fn client_config(tls: &ClientTls) -> Result<Arc<ClientConfig>, MemberTlsError> {
    let towards = MemberTls::new(&tls.trust)?;
    match &tls.identity {
        None => towards.anonymous(),
        Some(identity) => towards.with_key_pair(identity),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustls::pki_types::PrivateKeyDer;

    use super::*;
    use keyward_base::pem::{Chain, PrivateKey, Roots};
    use keyward_config::trust::{Strictness, with_refusal};
    use rustls::RootCertStore;

    /// A CA, and a certificate issued by the CA for `name`.
    struct Pki {
        ca: String,
        cert: rcgen::Certificate,
        key: rcgen::KeyPair,
    }

    fn pki(name: &str) -> Pki {
        let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority_key = rcgen::KeyPair::generate().unwrap();
        let ca = authority.self_signed(&authority_key).unwrap();
        let issuer = rcgen::Issuer::new(authority, authority_key);
        let key = rcgen::KeyPair::generate().unwrap();
        let cert =
            rcgen::CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
        Pki { ca: ca.pem(), cert, key }
    }

    fn roots(folder: &Path, pki: &Pki) -> Roots {
        let path = folder.join("ca.pem");
        std::fs::write(&path, &pki.ca).unwrap();
        Roots::read(&path).unwrap()
    }

    fn trusting(roots: Roots) -> MemberTrust {
        MemberTrust::Authorities(roots, Strictness::AsEtcd)
    }

    /// Runs a handshake over a pipe. Returns the agreed protocol and the number of client certificates, as
    /// seen by the member.
    async fn handshake(
        config: Arc<ClientConfig>,
        member: &Pki,
        name: &'static str,
    ) -> Result<HandshakeSeen, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut authorities = RootCertStore::empty();
        let ca = rustls_pki_types_pem(&member.ca);
        authorities.add(ca).unwrap();
        let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
            Arc::new(authorities),
            Arc::clone(&provider),
        );
        let key = PrivateKeyDer::Pkcs8(member.key.serialize_der().into());
        let key = rustls::crypto::ring::sign::any_supported_type(&key).unwrap();
        // A thief presents a certificate without having the key.
        let shown = CertifiedKey::new(vec![member.cert.der().clone()], key);
        let mut server = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.allow_unauthenticated().build().unwrap())
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(shown)));
        server.alpn_protocols = vec![b"http/1.1".to_vec(), b"h2".to_vec()];
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let connect =
            tokio_rustls::TlsConnector::from(config).connect(ServerName::try_from(name).unwrap(), ours);
        let connect = with_refusal(connect);
        let accept = tokio_rustls::TlsAcceptor::from(Arc::new(server)).accept(theirs);
        let (connected, accepted) = tokio::join!(connect, accept);
        connected.map_err(|(error, refused)| describe_handshake_failure(&error, refused.as_ref()))?;
        let accepted = accepted.map_err(|error| error.to_string())?;
        let (_, session) = accepted.get_ref();
        Ok(HandshakeSeen {
            protocol: session.alpn_protocol().map(<[u8]>::to_vec),
            certificates: session.peer_certificates().map_or(0, <[_]>::len),
        })
    }

    fn rustls_pki_types_pem(pem: &str) -> CertificateDer<'static> {
        use rustls::pki_types::pem::PemObject as _;
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    #[derive(Debug, PartialEq, Eq)]
    struct HandshakeSeen {
        protocol: Option<Vec<u8>>,
        certificates: usize,
    }

    #[tokio::test]
    async fn a_member_is_believed_only_under_the_configured_authority_and_its_own_name() {
        let folder = tempfile::tempdir().unwrap();
        let (member, stranger) = (pki("member.example"), pki("member.example"));
        let tls = ClientTls { trust: trusting(roots(folder.path(), &member)), identity: None };
        let config = || client_config(&tls).unwrap();
        let seen = handshake(config(), &member, "member.example").await.unwrap();
        assert_eq!(seen, HandshakeSeen { protocol: Some(b"h2".to_vec()), certificates: 0 });
        assert!(handshake(config(), &stranger, "member.example").await.is_err());
        assert!(handshake(config(), &member, "other.example").await.is_err());
    }

    #[tokio::test]
    async fn a_pinned_certificate_is_believed_under_any_name_and_no_other_is() {
        let (member, stranger) = (pki("member.example"), pki("member.example"));
        let pin = CertificateFingerprint::of(member.cert.der());
        let tls = |trust| ClientTls { trust, identity: None };
        let pinned = tls(MemberTrust::Pinned(
            [CertificateFingerprint::of(&CertificateDer::from(b"x".to_vec())), pin].into(),
        ));
        for name in ["member.example", "other.example"] {
            handshake(client_config(&pinned).unwrap(), &member, name).await.unwrap();
            let refused = handshake(client_config(&pinned).unwrap(), &stranger, name).await.unwrap_err();
            let shown = CertificateFingerprint::of(stranger.cert.der());
            assert_eq!(refused, NotPinned { shown }.to_string());
        }
        // The pinned certificate alone is not enough: the member must prove possession of the key.
        let thief = Pki { key: rcgen::KeyPair::generate().unwrap(), ..pki("member.example") };
        let thief = Pki { cert: member.cert.clone(), ..thief };
        assert!(handshake(client_config(&pinned).unwrap(), &thief, "member.example").await.is_err());
        let anybody = tls(MemberTrust::Unverified);
        for one in [&member, &stranger] {
            handshake(client_config(&anybody).unwrap(), one, "other.example").await.unwrap();
        }
    }

    #[tokio::test]
    async fn our_certificate_is_shown_where_the_member_asks() {
        let folder = tempfile::tempdir().unwrap();
        let member = pki("member.example");
        let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        std::fs::write(&cert, member.cert.pem()).unwrap();
        std::fs::write(&key, member.key.serialize_pem()).unwrap();
        let identity =
            Some(KeyPair::new(Chain::read(&cert).unwrap(), PrivateKey::read(&key).unwrap()).unwrap());
        let tls = ClientTls { trust: trusting(roots(folder.path(), &member)), identity };
        let seen = handshake(client_config(&tls).unwrap(), &member, "member.example").await.unwrap();
        assert_eq!(seen.certificates, 1);
    }
}
