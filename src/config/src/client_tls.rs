//! TLS towards members, as resolved.
//!
//! Owns: the trust in members. Must not know: rustls verifiers. Invariant: exactly a single kind of trust
//! applies.

use std::sync::Arc;

use rustls::pki_types::CertificateDer;

use crate::trust::Strictness;
use keyward_base::pem::{CertificateFingerprint, KeyPair, Roots};

/// TLS towards members.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientTls {
    /// Verification of member certificates.
    pub trust: MemberTrust,
    /// Client certificate for members requesting client certificates.
    pub identity: Option<KeyPair>,
}

impl ClientTls {
    /// The authorities of member certificates; empty if the certificates are pinned or not verified.
    #[must_use]
    pub fn authorities(&self) -> &[CertificateDer<'static>] {
        match &self.trust {
            MemberTrust::Authorities(roots, _) => roots.certificates(),
            MemberTrust::Pinned(_) | MemberTrust::Unverified => &[],
        }
    }

    /// True if a TLS handshake proves a member's identity.
    #[must_use]
    pub fn verifies_members(&self) -> bool {
        self.trust != MemberTrust::Unverified
    }
}

/// Verification of member certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberTrust {
    /// Member certificates must verify under these roots, for the requested name or address. System roots are
    /// not used.
    Authorities(Roots, Strictness),
    /// Member certificates must be in this list, whatever the names, dates and issuer. Never empty.
    Pinned(Arc<[CertificateFingerprint]>),
    /// Every server is accepted.
    Unverified,
}
