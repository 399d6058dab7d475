//! TLS towards members: from what the configuration resolved to, to what rustls takes.
//!
//! Owns: which authorities vouch for a member, which certificate we show. Must not know: files, addresses, HTTP.
//! Invariants: `ring` is named here and never picked up from a process-wide default; system roots are not used; a
//! connection with a certificate of ours never resumes a session of an older one.

use std::sync::Arc;

use rustls::client::{Resumption, WantsClientCert, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore};

use crate::config::ClientTls;
use crate::pem::{KeyPair, Roots};

/// The resolved configuration cannot be used: rustls takes less than the check of the files did.
#[derive(Clone, Debug, thiserror::Error)]
#[error(transparent)]
pub struct TlsError(#[from] rustls::Error);

/// TLS towards members, with whatever certificate of ours. Cheap to clone.
#[derive(Clone)]
pub struct Towards {
    provider: Arc<CryptoProvider>,
    verifier: Arc<WebPkiServerVerifier>,
}

impl Towards {
    /// Towards members that these vouch for.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn new(roots: &Roots) -> Result<Self, TlsError> {
        let mut store = RootCertStore::empty();
        for root in roots.certificates() {
            store.add(root.clone())?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::clone(&provider));
        let verifier = verifier.build().map_err(|error| rustls::Error::General(error.to_string()))?;
        Ok(Self { provider, verifier })
    }

    /// For HTTP/2, without a certificate.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn anonymous(&self) -> Result<Arc<ClientConfig>, TlsError> {
        Ok(http2(self.builder()?.with_no_client_auth()))
    }

    /// For HTTP/2, with this certificate. No session is resumed: it would be that of an older one.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn showing(&self, certificate: CertifiedKey) -> Result<Arc<ClientConfig>, TlsError> {
        let shown = Arc::new(SingleCertAndKey::from(certificate));
        let mut config = self.builder()?.with_client_cert_resolver(shown);
        config.resumption = Resumption::disabled();
        Ok(http2(config))
    }

    /// The same with one that was read.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn showing_pair(&self, pair: &KeyPair) -> Result<Arc<ClientConfig>, TlsError> {
        self.showing(CertifiedKey::new(pair.chain().to_vec(), Arc::clone(pair.signing())))
    }

    fn builder(&self) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>, TlsError> {
        let builder = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?;
        Ok(builder.with_webpki_verifier(Arc::clone(&self.verifier)))
    }
}

fn http2(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// What rustls takes, for HTTP/2.
///
/// # Errors
/// [`TlsError`].
pub fn client_config(tls: &ClientTls) -> Result<Arc<ClientConfig>, TlsError> {
    let towards = Towards::new(&tls.roots)?;
    match &tls.identity {
        None => towards.anonymous(),
        Some(identity) => towards.showing_pair(identity),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustls::pki_types::{PrivateKeyDer, ServerName};

    use super::*;
    use crate::pem::{Chain, PrivateKey};

    /// An authority and a certificate by it for `name`.
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

    /// A handshake over a pipe, as the member sees it: what was agreed on and what we showed.
    async fn handshake(config: Arc<ClientConfig>, member: &Pki, name: &'static str) -> Result<Seen, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut authorities = RootCertStore::empty();
        let ca = rustls_pki_types_pem(&member.ca);
        authorities.add(ca).unwrap();
        let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
            Arc::new(authorities),
            Arc::clone(&provider),
        );
        let key = PrivateKeyDer::Pkcs8(member.key.serialize_der().into());
        let mut server = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.allow_unauthenticated().build().unwrap())
            .with_single_cert(vec![member.cert.der().clone()], key)
            .unwrap();
        server.alpn_protocols = vec![b"http/1.1".to_vec(), b"h2".to_vec()];
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let connect =
            tokio_rustls::TlsConnector::from(config).connect(ServerName::try_from(name).unwrap(), ours);
        let accept = tokio_rustls::TlsAcceptor::from(Arc::new(server)).accept(theirs);
        let (connected, accepted) = tokio::join!(connect, accept);
        connected.map_err(|error| error.to_string())?;
        let accepted = accepted.map_err(|error| error.to_string())?;
        let (_, session) = accepted.get_ref();
        Ok(Seen {
            protocol: session.alpn_protocol().map(<[u8]>::to_vec),
            certificates: session.peer_certificates().map_or(0, <[_]>::len),
        })
    }

    fn rustls_pki_types_pem(pem: &str) -> rustls::pki_types::CertificateDer<'static> {
        use rustls::pki_types::pem::PemObject as _;
        rustls::pki_types::CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    #[derive(Debug, PartialEq, Eq)]
    struct Seen {
        protocol: Option<Vec<u8>>,
        certificates: usize,
    }

    #[tokio::test]
    async fn a_member_is_believed_only_under_the_configured_authority_and_its_own_name() {
        let folder = tempfile::tempdir().unwrap();
        let (member, stranger) = (pki("member.example"), pki("member.example"));
        let tls = ClientTls { roots: roots(folder.path(), &member), identity: None };
        let config = || client_config(&tls).unwrap();
        let seen = handshake(config(), &member, "member.example").await.unwrap();
        assert_eq!(seen, Seen { protocol: Some(b"h2".to_vec()), certificates: 0 });
        assert!(handshake(config(), &stranger, "member.example").await.is_err());
        assert!(handshake(config(), &member, "other.example").await.is_err());
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
        let tls = ClientTls { roots: roots(folder.path(), &member), identity };
        let seen = handshake(client_config(&tls).unwrap(), &member, "member.example").await.unwrap();
        assert_eq!(seen.certificates, 1);
    }
}
