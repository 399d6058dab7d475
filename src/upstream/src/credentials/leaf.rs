//! A user's certificate for connections to members, and its period of use.
//!
//! Must not know: where the certificate comes from.

use std::sync::Arc;
use std::time::SystemTime;

use rustls::ClientConfig;
use tokio::time::Instant;

use keyward_base::wall_deadline::WallDeadline;

/// The certificate for a new connection.
#[derive(Clone)]
pub struct Leaf {
    /// TLS configuration with the certificate.
    pub tls: Arc<ClientConfig>,
    /// Period of use. None for a certificate read from a file, because Keyward cannot replace the file.
    pub(super) times: Option<CertificatePeriod>,
}

/// Period in which a certificate is used.
#[derive(Clone)]
pub(super) struct CertificatePeriod {
    pub(super) minted: Instant,
    /// Not-before. Members check certificates by the wall clock.
    pub(super) begins: SystemTime,
    /// The end of the use.
    pub(super) used_until: WallDeadline,
}

impl Leaf {
    /// Time until which connections with the certificate take new calls. None, meaning forever, for a
    /// certificate read from a file.
    #[must_use]
    pub fn fresh_until(&self) -> Option<WallDeadline> {
        self.times.as_ref().map(|times| times.used_until)
    }

    /// True if a new connection may present the certificate. The wall clock may have been wrong when the
    /// certificate was minted.
    pub(super) fn is_fresh(&self, now: Instant, wall: SystemTime) -> bool {
        let is_good =
            |times: &CertificatePeriod| times.begins <= wall && !times.used_until.has_passed(now, wall);
        self.times.as_ref().is_none_or(is_good)
    }
}
