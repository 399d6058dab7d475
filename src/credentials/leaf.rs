//! A user's certificate for connections to members, and its period of use.
//!
//! Must not know: where the certificate comes from.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::ClientConfig;
use tokio::time::Instant;

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
    /// How long the certificate is used, counted from `minted`.
    pub(super) used: Duration,
    /// The period of use by the wall clock, starting at not-before. Members check certificates by the wall
    /// clock.
    pub(super) good: Range<SystemTime>,
}

impl Leaf {
    /// Time until which connections with the certificate take new calls. None, meaning forever, for a
    /// certificate read from a file.
    #[must_use]
    pub fn fresh_until(&self) -> Option<Instant> {
        self.times.as_ref().map(|times| times.minted + times.used)
    }

    /// True if a new connection may present the certificate. Both clocks must agree: the monotonic clock
    /// stops while the machine sleeps, and the wall clock may have been wrong.
    pub(super) fn is_fresh(&self, now: Instant, wall: SystemTime) -> bool {
        self.times.as_ref().is_none_or(|times| now < times.minted + times.used && times.good.contains(&wall))
    }
}
