//! TLS towards clients, as resolved.
//!
//! Owns: the server's certificate, and the trust in client certificates. Must not know: rustls verifiers.
//! Invariant: clients are asked for certificates only with an authority to verify the certificates under.

use std::sync::Arc;

use crate::trust::Strictness;
use keyward_base::pem::{Crls, KeyPair, Roots};

/// TLS towards clients.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerTls {
    /// Certificate chain and key of the server.
    pub identity: KeyPair,
    /// Verification of client certificates.
    pub clients: ClientAuth,
}

/// Request for client certificates.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientAuth {
    /// Clients are not asked for a certificate.
    None,
    /// Clients are asked; a certificate must verify under this authority.
    Optional(ClientCa),
    /// Clients must show a certificate verifying under this authority.
    Required(ClientCa),
}

/// An authority of client certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCa {
    /// Label of the authority in peer names (`cert:<label>:CN=…`).
    pub name: Arc<str>,
    /// Root certificates.
    pub roots: Roots,
    /// Revocation lists, if checked.
    pub crls: Option<Crls>,
    /// The rules for client certificates.
    pub strictness: Strictness,
}

impl ClientAuth {
    /// The authority of client certificates, if clients are asked for a certificate.
    #[must_use]
    pub fn ca(&self) -> Option<&ClientCa> {
        match self {
            Self::None => None,
            Self::Optional(ca) | Self::Required(ca) => Some(ca),
        }
    }
}
