//! TLS towards clients.
//!
//! Owns: the rustls configuration of a listener, and whether what a client has shown would be let in now. Must not know who
//! may do what. Invariants (rules 16, 45): ring is the provider, named explicitly; TLS 1.2 or newer; no resumption and no
//! early data where certificates count, so that a certificate is looked at on every connection; a connection is looked at by
//! what handshakes are.

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{RootCertStore, ServerConfig};

use crate::config::{ClientAuth, ClientCa, ServerTls};
use crate::downstream::first::{H2, HTTP1};
use crate::pem::Crls;
use crate::published::Published;

/// A listener's TLS as it is now. Replaced whole; each handshake takes what is there when it begins, and whoever has shown a
/// certificate is looked at again.
pub type Current = Arc<Published<ListenerTls>>;

/// One listener's TLS.
#[derive(Debug)]
pub struct ListenerTls {
    /// What handshakes are made with.
    pub handshakes: Arc<ServerConfig>,
    /// Who looks at what clients show, where they are asked.
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

/// Why a listener's TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// rustls refuses the certificate or key.
    #[error("the listener's certificate cannot be used: {0}")]
    Identity(#[from] rustls::Error),
    /// The client CA is of no use.
    #[error("the client CA cannot be used: {0}")]
    ClientCa(#[from] rustls::server::VerifierBuilderError),
}

impl ListenerTls {
    /// As the configuration says.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn new(tls: &ServerTls) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?;
        let verifier = |ca: &ClientCa| -> Result<_, TlsError> {
            let mut store = RootCertStore::empty();
            for certificate in ca.roots.certificates() {
                store.add(certificate.clone())?;
            }
            let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(store), Arc::clone(&provider));
            // Every authority of a chain must have a list: what one says nothing about may be revoked.
            Ok(builder.with_crls(ca.crls.iter().flat_map(Crls::lists).cloned()))
        };
        let clients = match &tls.clients {
            ClientAuth::None => None,
            ClientAuth::Optional(ca) => Some(verifier(ca)?.allow_unauthenticated().build()?),
            ClientAuth::Required(ca) => Some(verifier(ca)?.build()?),
        };
        let builder = match &clients {
            None => builder.with_no_client_auth(),
            Some(verifier) => builder.with_client_cert_verifier(Arc::clone(verifier)),
        };
        let identity = &tls.identity;
        // By what signs, not by a copy of the key, which nobody would wipe.
        let shown = CertifiedKey::new(identity.chain().to_vec(), Arc::clone(identity.signing()));
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(shown)));
        config.alpn_protocols = vec![H2.to_vec(), HTTP1.to_vec()];
        if clients.is_some() {
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(Self { handshakes: Arc::new(config), clients })
    }

    /// Whether clients are asked for certificates.
    #[must_use]
    pub fn asks(&self) -> bool {
        self.clients.is_some()
    }

    /// Whether a client would be let in `now` that has shown this chain, leaf first, or nothing.
    #[must_use]
    pub fn admits(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> bool {
        match (&self.clients, chain.split_first()) {
            (None, _) => true,
            (Some(verifier), None) => !verifier.client_auth_mandatory(),
            (Some(verifier), Some((leaf, rest))) => verifier.verify_client_cert(leaf, rest, now).is_ok(),
        }
    }
}
