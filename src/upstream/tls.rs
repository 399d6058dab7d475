//! TLS towards members: from what the configuration resolved to, to what rustls takes.
//!
//! Owns: which authorities vouch for a member, which certificate we show, which protocol is spoken. Must not know:
//! files, addresses, HTTP. Invariants: `ring` is named here and never picked up from a process-wide default; system
//! roots are not used; a connection with our certificate never resumes an older one's session.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::{ClientConfig, RootCertStore};

use crate::config::ClientTls;

/// What is spoken over TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alpn {
    /// gRPC.
    H2,
    /// The pages that members serve beside it.
    Http11,
}

/// The rustls configuration for members.
///
/// # Errors
/// rustls' own; the resolved configuration has been checked so that none is expected.
pub fn client_config(tls: &ClientTls, alpn: Alpn) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for root in tls.roots.certificates() {
        roots.add(root.clone())?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let mut config = match &tls.identity {
        None => builder.with_no_client_auth(),
        Some(identity) => {
            let chain = identity.chain().to_vec();
            let mut config = builder.with_client_auth_cert(chain, identity.key().clone_key())?;
            config.resumption = Resumption::disabled();
            config
        }
    };
    config.alpn_protocols = vec![match alpn {
        Alpn::H2 => b"h2".to_vec(),
        Alpn::Http11 => b"http/1.1".to_vec(),
    }];
    Ok(Arc::new(config))
}
