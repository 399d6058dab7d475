//! TLS towards members, as it was resolved.
//!
//! Owns: who is believed to be a member. Must not know: rustls' verifiers. Invariant: a member is believed in one way.

use std::sync::Arc;

use rustls::pki_types::CertificateDer;

use crate::pem::{Fingerprint, KeyPair, Roots};

/// TLS towards members.
#[derive(Clone, Debug)]
pub struct ClientTls {
    /// Who is believed to be a member.
    pub trust: MemberTrust,
    /// The client certificate that we show, where members ask for one.
    pub identity: Option<KeyPair>,
}

impl ClientTls {
    /// The authorities that vouch for members; none where their certificates are pinned, or not verified.
    #[must_use]
    pub fn authorities(&self) -> &[CertificateDer<'static>] {
        match &self.trust {
            MemberTrust::Authorities(roots) => roots.certificates(),
            MemberTrust::Pinned(_) | MemberTrust::Unverified => &[],
        }
    }

    /// Whether a handshake shows that a member is at the other end.
    #[must_use]
    pub fn verifies_members(&self) -> bool {
        self.trust != MemberTrust::Unverified
    }
}

/// Who is believed to be a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberTrust {
    /// Whoever shows a certificate by one of these, for the name or address that was asked for. System roots are not used.
    Authorities(Roots),
    /// Whoever shows one of these certificates, whatever its names, dates and issuer. Never empty.
    Pinned(Arc<[Fingerprint]>),
    /// Whoever answers.
    Unverified,
}
