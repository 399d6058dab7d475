//! TLS towards clients.
//!
//! Owns: the rustls configuration of a listener. Must not know who may do what. Invariants (rules 16, 45): ring is the
//! provider, named explicitly; TLS 1.2 or newer; no resumption and no early data where certificates count, so that a
//! certificate is looked at on every connection.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

use crate::config::{ClientAuth, ClientCa, ServerTls};
use crate::pem::Crls;

/// A listener's TLS as it is now. Replaced whole; each handshake takes what is there when it begins.
pub type Current = Arc<ArcSwap<ServerConfig>>;

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

/// The TLS configuration of one listener.
///
/// # Errors
/// [`TlsError`].
pub fn server_config(tls: &ServerTls) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
    let verifier = |ca: &ClientCa| -> Result<_, TlsError> {
        let mut store = RootCertStore::empty();
        for certificate in ca.roots.certificates() {
            store.add(certificate.clone())?;
        }
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(store), Arc::clone(&provider));
        // Every authority of a chain must have a list: what one says nothing about may be revoked.
        Ok(builder.with_crls(ca.crls.iter().flat_map(Crls::lists).cloned()))
    };
    let (builder, certificates_count) = match &tls.clients {
        ClientAuth::None => (builder.with_no_client_auth(), false),
        ClientAuth::Optional(ca) => {
            let verifier = verifier(ca)?.allow_unauthenticated().build()?;
            (builder.with_client_cert_verifier(verifier), true)
        }
        ClientAuth::Required(ca) => (builder.with_client_cert_verifier(verifier(ca)?.build()?), true),
    };
    let identity = &tls.identity;
    let mut config = builder.with_single_cert(identity.chain().to_vec(), identity.key().clone_key())?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    if certificates_count {
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(Arc::new(config))
}
