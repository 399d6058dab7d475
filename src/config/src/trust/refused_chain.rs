//! The reason for refusing a peer's certificates.
//!
//! Owns: the reasons, the error of rustls (which decides the alert sent to the peer), and the way of a reason
//! from the verifier to the log line of its handshake. Must not know: the connection. Invariant: a handshake
//! reads its own refusal only.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;

use rustls::{CertificateError, OtherError};

use super::certificate_fields::NotAsGoReads;

tokio::task_local! {
    /// The refusal of the handshake that is polled now. An error of rustls that sends the right alert has no
    /// room for a subject.
    static REFUSED: RefCell<Option<RefusedChain>>;
}

/// A refused chain: the certificate at fault, and the reason.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("the certificate of {subject}: {refusal}")]
pub struct RefusedChain {
    /// The subject of the certificate at fault.
    pub subject: String,
    /// The reason.
    pub refusal: Refusal,
}

/// The reasons for refusing a chain.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The certificate cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(NotAsGoReads),
    /// The validity has not begun.
    #[error("it is not valid yet")]
    NotYet,
    /// The validity has ended.
    #[error("it has expired")]
    Expired,
    /// No trusted certificate has the issuer's name.
    #[error("no trusted authority has the name of its issuer")]
    UnknownIssuer,
    /// No authority of the issuer's name made the signature.
    #[error("its signature is not of the authority with its issuer's name")]
    BadSignature,
    /// The algorithm or the kind of key is not supported.
    #[error("its signature, or its issuer's key, is of a kind that is not supported")]
    UnsupportedSignature,
    /// The key is of a kind that no handshake can prove here.
    #[error("its key is of a kind that is not supported")]
    UnsupportedKey,
    /// The certificate signs others without being an authority's.
    #[error("it is no authority's (basicConstraints CA:TRUE, keyUsage keyCertSign)")]
    NoAuthority,
    /// More authorities stand below than an authority allows.
    #[error("more authorities stand below it than its path length allows")]
    PathTooLong,
    /// The extended key usage excludes the use.
    #[error("its extended key usage lacks {0}")]
    OtherPurpose(&'static str),
    /// A critical extension is unknown.
    #[error("it has a critical extension that is unknown")]
    UnknownCritical,
    /// Policy constraints are not evaluated.
    #[error("it has policy constraints or mappings, which are not supported")]
    PolicyRules,
    /// A name is outside of an authority's name constraints.
    #[error("a name constraint of an authority above excludes its names")]
    NameOutside,
    /// The certificate is for other hosts.
    #[error("it is not valid for the name {0}")]
    OtherHost(String),
    /// The certificate is revoked.
    #[error("it is revoked")]
    Revoked,
    /// No revocation list is the issuer's.
    #[error("no revocation list of its issuer tells whether it is revoked")]
    UnknownRevocation,
    /// The peer sent too many certificates.
    #[error("more than {0} certificates were sent with it")]
    TooMany(usize),
    /// The search for a chain has a limit.
    #[error("the search for a chain took too many steps")]
    TooMuchWork,
    /// The stricter library refuses the chain, and the configuration wants its verdict.
    #[error("strict_certificates is set, and {0}")]
    Strict(rustls::Error),
}

impl RefusedChain {
    /// The error for rustls. Remembers the reason for the log line of the handshake.
    pub(super) fn into_error(self) -> rustls::Error {
        let error = rustls::Error::InvalidCertificate(match &self.refusal {
            Refusal::Strict(error) => {
                let error = error.clone();
                return self.remembered(error);
            }
            Refusal::Unreadable(_) => CertificateError::BadEncoding,
            Refusal::NotYet => CertificateError::NotValidYet,
            Refusal::Expired => CertificateError::Expired,
            Refusal::UnknownIssuer => CertificateError::UnknownIssuer,
            Refusal::BadSignature => CertificateError::BadSignature,
            Refusal::OtherPurpose(_) => CertificateError::InvalidPurpose,
            Refusal::UnknownCritical => CertificateError::UnhandledCriticalExtension,
            Refusal::OtherHost(_) => CertificateError::NotValidForName,
            Refusal::Revoked => CertificateError::Revoked,
            Refusal::UnknownRevocation => CertificateError::UnknownRevocationStatus,
            Refusal::UnsupportedKey
            | Refusal::UnsupportedSignature
            | Refusal::NoAuthority
            | Refusal::PathTooLong
            | Refusal::PolicyRules
            | Refusal::NameOutside
            | Refusal::TooMany(_)
            | Refusal::TooMuchWork => CertificateError::Other(OtherError(Arc::new(self.clone()))),
        });
        self.remembered(error)
    }

    fn remembered(self, error: rustls::Error) -> rustls::Error {
        // Outside of a handshake nobody logs the reason.
        REFUSED.try_with(|refused| *refused.borrow_mut() = Some(self)).unwrap_or_default();
        error
    }
}

/// Runs a handshake. Its failure comes with the refusal of the peer's certificates, if that is the reason.
/// Cancel-safe as the handshake is.
///
/// # Errors
/// The handshake's.
pub async fn with_refusal<T>(
    handshake: impl Future<Output = io::Result<T>>,
) -> Result<T, (io::Error, Option<RefusedChain>)> {
    let noted = async { handshake.await.map_err(|error| (error, REFUSED.with(RefCell::take))) };
    REFUSED.scope(RefCell::default(), noted).await
}
