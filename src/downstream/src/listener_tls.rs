//! TLS towards clients.
//!
//! Owns: the rustls configuration of a listener, and the check of a client's certificate chain against the
//! present configuration. Must not know any permissions. Invariants: ring is the provider, named explicitly
//! (`docs/decisions.md#d45`). TLS 1.2 or newer. With client certificates there is no resumption and no early
//! data, so that every connection's certificate is verified (`docs/decisions.md#d16`). An open connection is
//! verified by the same verifier as handshakes.

use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::server::NoServerSessionStorage;
use rustls::sign::{CertifiedKey, SingleCertAndKey};

use crate::client_trust::ClientTrust;
use crate::sniff::{H2, HTTP1};
use keyward_base::published::Published;
use keyward_config::ServerTls;
use keyward_config::trust::{ChainVerifier, ChainVerifierError};

/// A listener's present TLS settings. Replaced as a whole; each handshake uses the settings at its start, and
/// certificates of open connections are verified again after a replacement.
pub type CurrentListenerTls = Arc<Published<ListenerTls>>;

/// One listener's TLS settings.
#[derive(Debug)]
pub struct ListenerTls {
    /// The rustls configuration for handshakes.
    pub handshakes: Arc<ServerConfig>,
    /// The trust in clients' certificates, kept while its settings stay.
    trust: Arc<ClientTrust>,
}

/// Reason for rejecting a listener's TLS settings.
#[derive(Debug, thiserror::Error)]
pub enum ListenerTlsError {
    /// rustls rejects the certificate or key.
    #[error("the listener's certificate cannot be used: {0}")]
    Identity(#[from] rustls::Error),
    /// The client CA or its revocation lists cannot be used.
    #[error("the client CA cannot be used: {0}")]
    ClientCa(#[from] ChainVerifierError),
}

/// The algorithms by which clients' certificates are verified.
#[must_use]
pub fn algorithms() -> WebPkiSupportedAlgorithms {
    rustls::crypto::ring::default_provider().signature_verification_algorithms
}

impl ListenerTls {
    /// TLS settings from the configuration.
    ///
    /// # Errors
    /// [`ListenerTlsError`].
    pub fn new(tls: &ServerTls) -> Result<Self, ListenerTlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        Self::by(tls, Arc::new(ClientTrust::new(&tls.clients, &provider)?))
    }

    /// The settings in the place of these, with the same trust in clients where its settings are the same:
    /// open connections are not verified again for a new certificate of the server.
    ///
    /// # Errors
    /// [`ListenerTlsError`].
    pub fn renewed(&self, tls: &ServerTls) -> Result<Self, ListenerTlsError> {
        if self.trust.is_by(&tls.clients) { Self::by(tls, Arc::clone(&self.trust)) } else { Self::new(tls) }
    }

    fn by(tls: &ServerTls, trust: Arc<ClientTrust>) -> Result<Self, ListenerTlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?;
        let builder = match trust.verifier() {
            None => builder.with_no_client_auth(),
            Some(verifier) => builder.with_client_cert_verifier(Arc::<ChainVerifier>::clone(verifier)),
        };
        let identity = &tls.identity;
        // Use the signing key object: a copy of the key would never be wiped from memory.
        let shown = CertifiedKey::new(identity.chain().to_vec(), Arc::clone(identity.signing()));
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(shown)));
        config.alpn_protocols = vec![H2.to_vec(), HTTP1.to_vec()];
        if trust.verifier().is_some() {
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(Self { handshakes: Arc::new(config), trust })
    }

    /// True if clients are asked for certificates.
    #[must_use]
    pub fn requests_certificates(&self) -> bool {
        self.trust.verifier().is_some()
    }

    /// The trust in clients' certificates.
    #[must_use]
    pub fn trust(&self) -> &Arc<ClientTrust> {
        &self.trust
    }
}

#[cfg(test)]
mod tests {
    use rcgen::PublicKeyData as _;
    use rustls::client::Resumption;
    use rustls::pki_types::{PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, SupportedProtocolVersion, version};

    use rustls::pki_types::CertificateDer;

    use super::*;
    use keyward_base::pem::{Chain, KeyPair, PrivateKey, Roots};
    use keyward_config::trust::test_certificates::{Draft, alternative, basic, der};
    use keyward_config::trust::{RefusedChain, Strictness, with_refusal};
    use keyward_config::{ClientAuth, ClientCa};

    const VERSIONS: [&SupportedProtocolVersion; 2] = [&version::TLS12, &version::TLS13];

    fn signer(key: &rcgen::KeyPair) -> Arc<dyn rustls::sign::SigningKey> {
        let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        rustls::crypto::ring::sign::any_supported_type(&key).unwrap()
    }

    /// A client with `certificate` and `key` at a listener that trusts `root`: the refusal, or the failure of
    /// the proof.
    async fn shows(
        root: &CertificateDer<'static>,
        certificate: &CertificateDer<'static>,
        key: &rcgen::KeyPair,
        version: &'static SupportedProtocolVersion,
    ) -> Result<(), Option<RefusedChain>> {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let pem = |der: &CertificateDer<'_>| {
            let text = data_encoding::BASE64.encode(der);
            format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
        };
        let server_key = rcgen::KeyPair::generate().unwrap();
        let names = alternative(&[&der(0x82, &[b"keyward.test"])]);
        // The listener's own certificate is of the same kind.
        let server =
            Draft::new("server", "server", &server_key).with(&[basic(true, None), names]).sign(&server_key);
        let chain = Chain::read(&write("server.crt", pem(&server))).unwrap();
        let own = PrivateKey::read(&write("server.key", server_key.serialize_pem())).unwrap();
        let roots = Roots::read(&write("ca.crt", pem(root))).unwrap();
        let ca = ClientCa { name: "staff".into(), roots, crls: None, strictness: Strictness::AsEtcd };
        let tls =
            ServerTls { identity: KeyPair::new(chain, own).unwrap(), clients: ClientAuth::Required(ca) };
        let listener = ListenerTls::new(&tls).unwrap();

        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let members =
            ChainVerifier::of_members(std::slice::from_ref(&server), Strictness::AsEtcd, &provider).unwrap();
        let shown = CertifiedKey::new(vec![certificate.clone()], signer(key));
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(members))
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(shown)));
        client.resumption = Resumption::disabled();
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let name = ServerName::try_from("keyward.test").unwrap();
        let connect = tokio_rustls::TlsConnector::from(Arc::new(client)).connect(name, theirs);
        let accept = tokio_rustls::TlsAcceptor::from(listener.handshakes).accept(ours);
        let (_connected, accepted) = tokio::join!(connect, with_refusal(accept));
        accepted.map(drop).map_err(|(_, refused)| refused)
    }

    #[tokio::test]
    async fn a_client_proves_the_key_of_any_kind_of_certificate() {
        let (ca, alice, thief) = (
            rcgen::KeyPair::generate().unwrap(),
            rcgen::KeyPair::generate().unwrap(),
            rcgen::KeyPair::generate().unwrap(),
        );
        let root = Draft::new("ca", "ca", &ca).v1().sign(&ca);
        let usual = Draft::new("alice", "ca", &alice).sign(&ca);
        let v1 = Draft::new("alice", "ca", &alice).v1().sign(&ca);
        let mut off_curve = alice.subject_public_key_info();
        *off_curve.last_mut().unwrap() ^= 1;
        let unprovable = Draft { key: off_curve, ..Draft::new("alice", "ca", &alice) }.sign(&ca);
        for version in VERSIONS {
            for certificate in [&usual, &v1] {
                assert_eq!(shows(&root, certificate, &alice, version).await, Ok(()), "{version:?}");
                assert_eq!(shows(&root, certificate, &thief, version).await, Err(None), "{version:?}");
            }
            assert_eq!(shows(&root, &unprovable, &alice, version).await, Err(None), "no point of its curve");
            let refused =
                shows(&root, &Draft::new("alice", "ca", &alice).sign(&thief), &alice, version).await;
            let refused = refused.unwrap_err().expect("a reason");
            assert_eq!(refused.subject, "CN=alice", "{version:?}");
        }
    }
}
