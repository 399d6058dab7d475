//! An etcd user that proves itself by a client certificate: its own connections, and no token.
//!
//! Owns: which certificate a new connection shows, and when one is to be replaced. Must not know: connections.
//! Invariants: etcd looks at a certificate at the handshake only, so a connection outlives its certificate and nothing
//! is ever renewed under a stream; there is nothing that a second try could renew, so that a refusal is the truth.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use rustls::ClientConfig;
use tokio::time::Instant;

use super::lock;
use super::mint::{Mint, MintError};
use crate::identity::UserName;

/// Whose certificate a connection shows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Showing {
    /// The etcd user that it names.
    pub user: UserName,
    /// Which configuration it is of: one that was replaced shows another.
    pub epoch: u64,
}

/// An etcd user with a certificate that names it.
pub struct CertificateIdentity {
    showing: Showing,
    source: Source,
}

enum Source {
    /// From a file.
    Held(Arc<ClientConfig>),
    /// Made here when it is needed.
    Minted { mint: Arc<Mint>, last: Mutex<Option<Leaf>> },
}

/// What a new connection shows.
#[derive(Clone)]
pub struct Leaf {
    /// TLS with the certificate.
    pub tls: Arc<ClientConfig>,
    /// When it is to be replaced; never where it is not ours to replace.
    pub fresh_until: Option<Instant>,
}

impl CertificateIdentity {
    pub(super) fn held(showing: Showing, tls: Arc<ClientConfig>) -> Arc<Self> {
        Arc::new(Self { showing, source: Source::Held(tls) })
    }

    pub(super) fn minted(showing: Showing, mint: Arc<Mint>) -> Arc<Self> {
        Arc::new(Self { showing, source: Source::Minted { mint, last: Mutex::default() } })
    }

    /// The etcd user.
    #[must_use]
    pub fn user(&self) -> &UserName {
        &self.showing.user
    }

    /// What tells its connections from others'.
    #[must_use]
    pub fn showing(&self) -> &Showing {
        &self.showing
    }

    /// Waits until there may be something to show: an authority mints nothing before it was held against members.
    /// Cancel-safe.
    pub async fn ready(&self) {
        if let Source::Minted { mint, .. } = &self.source {
            mint.held().await;
        }
    }

    /// What a connection that is opened now is to show.
    ///
    /// # Errors
    /// None can be minted.
    pub fn leaf(&self) -> Result<Leaf, MintError> {
        let (mint, last) = match &self.source {
            Source::Held(tls) => return Ok(Leaf { tls: Arc::clone(tls), fresh_until: None }),
            Source::Minted { mint, last } => (mint, last),
        };
        let mut last = lock(last);
        let fresh = |leaf: &&Leaf| leaf.fresh_until.is_none_or(|until| Instant::now() < until);
        if let Some(leaf) = last.as_ref().filter(fresh) {
            return Ok(leaf.clone());
        }
        let leaf = mint.leaf(&self.showing.user, SystemTime::now())?;
        Ok(last.insert(leaf).clone())
    }
}

impl fmt::Debug for CertificateIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CertificateIdentity").field("showing", &self.showing).finish_non_exhaustive()
    }
}
