//! An etcd user proved by a client certificate: dedicated connections, and no token.
//!
//! Owns: the choice of the certificate for a new connection, and the replacement of certificates. Must not
//! know: connections.
//! Invariants: etcd checks a certificate only at the handshake, so a connection outlives its certificate, and
//! no credential is renewed under a stream; a retry has no credential to renew, so a refusal is final.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use rustls::ClientConfig;
use tokio::time::Instant;

use super::leaf::{CertificatePeriod, Leaf};
use super::lock;
use super::mint::{CertificateMint, MintError};
use keyward_etcd::identity::UserName;

/// Key of the connections that present one user's certificate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CertificateConnectionKey {
    /// The etcd user named in the certificate.
    pub user: UserName,
    /// Epoch of the certificate's configuration: a replaced certificate or authority has a new epoch.
    pub epoch: u64,
}

/// An etcd user with a certificate naming the user.
pub struct CertificateIdentity {
    showing: CertificateConnectionKey,
    source: CertificateSource,
}

enum CertificateSource {
    /// Read from a file.
    Held(Arc<ClientConfig>),
    /// Minted by Keyward on demand.
    Minted { mint: Arc<CertificateMint>, last: Mutex<Option<Leaf>> },
}

/// Minimum age at which a refused minted certificate is replaced. A new certificate would probably be refused
/// as well, and each costs a signature.
pub(super) const AGAIN: Duration = Duration::from_secs(5);

impl CertificateIdentity {
    pub(super) fn held(showing: CertificateConnectionKey, tls: Arc<ClientConfig>) -> Arc<Self> {
        Arc::new(Self { showing, source: CertificateSource::Held(tls) })
    }

    pub(super) fn minted(showing: CertificateConnectionKey, mint: Arc<CertificateMint>) -> Arc<Self> {
        Arc::new(Self { showing, source: CertificateSource::Minted { mint, last: Mutex::default() } })
    }

    /// The etcd user.
    #[must_use]
    pub fn user(&self) -> &UserName {
        &self.showing.user
    }

    /// The key of the identity's connections.
    #[must_use]
    pub fn showing(&self) -> &CertificateConnectionKey {
        &self.showing
    }

    /// Waits until a certificate may be available: an authority mints no certificate before the check against
    /// the members. Cancel-safe.
    pub async fn ready(&self) {
        if let CertificateSource::Minted { mint, .. } = &self.source {
            mint.held().await;
        }
    }

    /// Returns the certificate for a connection opened now.
    ///
    /// # Errors
    /// Minting failed.
    pub fn leaf(&self) -> Result<Leaf, MintError> {
        let (mint, last) = match &self.source {
            CertificateSource::Held(tls) => return Ok(Leaf { tls: Arc::clone(tls), times: None }),
            CertificateSource::Minted { mint, last } => (mint, last),
        };
        let mut last = lock(last);
        let (now, wall) = (Instant::now(), SystemTime::now());
        if let Some(leaf) = last.as_ref().filter(|leaf| leaf.is_fresh(now, wall)) {
            return Ok(leaf.clone());
        }
        let made = mint.leaf(&self.showing.user, wall);
        mint.note(made.as_ref().map(drop));
        Ok(last.insert(made?).clone())
    }

    /// Records that a member refused `leaf`. The next connection presents a new certificate if the refused
    /// certificate was minted at least `AGAIN` ago.
    pub fn refused(&self, leaf: &Leaf) {
        let CertificateSource::Minted { last, .. } = &self.source else { return };
        let mut last = lock(last);
        last.take_if(|last| {
            let aged = |times: &CertificatePeriod| times.minted.elapsed() >= AGAIN;
            Arc::ptr_eq(&last.tls, &leaf.tls) && last.times.as_ref().is_some_and(aged)
        });
    }
}

impl fmt::Debug for CertificateIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CertificateIdentity").field("showing", &self.showing).finish_non_exhaustive()
    }
}
