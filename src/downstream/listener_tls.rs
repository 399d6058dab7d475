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
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};

use crate::config::{ClientAuth, ClientCa, ServerTls};
use crate::downstream::sniff::{H2, HTTP1};
use crate::pem::Crls;
use crate::published::Published;
use crate::trust::{ChainVerifier, ChainVerifierError};

/// A listener's present TLS settings. Replaced as a whole; each handshake uses the settings at its start, and
/// certificates of open connections are verified again after a replacement.
pub type CurrentListenerTls = Arc<Published<ListenerTls>>;

/// One listener's TLS settings.
#[derive(Debug)]
pub struct ListenerTls {
    /// The rustls configuration for handshakes.
    pub handshakes: Arc<ServerConfig>,
    /// The verifier of client certificates, if certificates are requested.
    clients: Option<Arc<ChainVerifier>>,
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
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?;
        let verifier = |ca: &ClientCa, is_optional| -> Result<_, ChainVerifierError> {
            let lists = ca.crls.as_ref().map_or(&[][..], Crls::lists);
            let roots = ca.roots.certificates();
            let made = ChainVerifier::of_clients(roots, lists, is_optional, ca.strictness, &provider)?;
            Ok(Arc::new(made))
        };
        let clients = match &tls.clients {
            ClientAuth::None => None,
            ClientAuth::Optional(ca) => Some(verifier(ca, true)?),
            ClientAuth::Required(ca) => Some(verifier(ca, false)?),
        };
        let builder = match &clients {
            None => builder.with_no_client_auth(),
            Some(verifier) => builder.with_client_cert_verifier(Arc::<ChainVerifier>::clone(verifier)),
        };
        let identity = &tls.identity;
        // Use the signing key object: a copy of the key would never be wiped from memory.
        let shown = CertifiedKey::new(identity.chain().to_vec(), Arc::clone(identity.signing()));
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(shown)));
        config.alpn_protocols = vec![H2.to_vec(), HTTP1.to_vec()];
        if clients.is_some() {
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(Self { handshakes: Arc::new(config), clients })
    }

    /// True if clients are asked for certificates.
    #[must_use]
    pub fn requests_certificates(&self) -> bool {
        self.clients.is_some()
    }

    /// True if a client with the given chain, leaf first, possibly empty, would be admitted at `now`.
    #[must_use]
    pub fn admits_chain(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> bool {
        match (&self.clients, chain.split_first()) {
            (None, _) => true,
            (Some(verifier), None) => !verifier.client_auth_mandatory(),
            (Some(verifier), Some((leaf, rest))) => verifier.verify(leaf, rest, None, now).is_ok(),
        }
    }
}
