//! An etcd user that proves itself by a client certificate: its own connections, and no token.
//!
//! Owns: which certificate a new connection shows, and when one is to be replaced. Must not know: connections.
//! Invariants: etcd looks at a certificate at the handshake only, so a connection outlives its certificate and nothing
//! is ever renewed under a stream; there is nothing that a second try could renew, so that a refusal is the truth.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

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
    pub(super) times: Option<Times>,
}

/// When a certificate is used.
#[derive(Clone)]
pub(super) struct Times {
    pub(super) minted: Instant,
    /// For how long after that.
    pub(super) used: Duration,
    /// The same by the clock on the wall, by which members judge it, from its beginning on.
    pub(super) good: Range<SystemTime>,
}

impl Leaf {
    /// Until when connections with it take calls; for ever where it is not ours to replace.
    #[must_use]
    pub fn fresh_until(&self) -> Option<Instant> {
        self.times.as_ref().map(|times| times.minted + times.used)
    }

    /// Whether a new connection may show it: by both clocks, since one stands still while the machine sleeps, and the
    /// other may have been wrong.
    pub(super) fn is_fresh(&self, now: Instant, wall: SystemTime) -> bool {
        self.times.as_ref().is_none_or(|times| now < times.minted + times.used && times.good.contains(&wall))
    }
}

/// A minted certificate that was refused is shown for this long all the same: another would be refused as well, and each
/// costs a signature.
pub(super) const AGAIN: Duration = Duration::from_secs(5);

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
            Source::Held(tls) => return Ok(Leaf { tls: Arc::clone(tls), times: None }),
            Source::Minted { mint, last } => (mint, last),
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

    /// A member did not take `leaf`: the next connection shows another, where that may help.
    pub fn refused(&self, leaf: &Leaf) {
        let Source::Minted { last, .. } = &self.source else { return };
        let mut last = lock(last);
        last.take_if(|last| {
            let aged = |times: &Times| times.minted.elapsed() >= AGAIN;
            Arc::ptr_eq(&last.tls, &leaf.tls) && last.times.as_ref().is_some_and(aged)
        });
    }
}

impl fmt::Debug for CertificateIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CertificateIdentity").field("showing", &self.showing).finish_non_exhaustive()
    }
}
