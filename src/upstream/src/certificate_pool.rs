//! Connections showing a user's own certificate, shared by all shards: a user with a certificate costs
//! connections (`docs/decisions.md#d18`).
//!
//! Owns: the limit on their number, and the choice of the connection to close at the limit. Must not know:
//! certificates.
//! Invariants: a user has one connection per member and lane, and more only when the first is full, whatever
//! the number of shards: the opening shard drives a connection, and all shards send on it. The limit is never
//! exceeded; at the limit, a new connection closes the connection idle the longest, or is refused if all are
//! in use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::certificate_refusals::CertificateRefusals;
use crate::connection_slots::ConnectionSlots;
use keyward_telemetry::metrics::Metrics;

/// Time allowed for the close of a connection giving way.
const LEAVING: Duration = Duration::from_secs(1);

/// The connections of users with certificates.
pub struct CertificatePool {
    slots: Mutex<ConnectionSlots>,
    room: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    /// The members that refuse a certificate.
    pub(super) refusals: CertificateRefusals,
}

/// Counts a connection against the limit until dropped.
pub(super) struct CertificateConnectionPermit {
    #[expect(dead_code, reason = "holds its place until dropped")]
    permit: OwnedSemaphorePermit,
    metrics: Arc<Metrics>,
}

impl Drop for CertificateConnectionPermit {
    fn drop(&mut self) {
        self.metrics.certificate_connections.dec();
    }
}

impl CertificatePool {
    /// Creates a table of at most `limit` connections.
    #[must_use]
    pub fn new(limit: usize, metrics: Arc<Metrics>) -> Self {
        let room = Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)));
        Self { slots: Mutex::default(), room, metrics, refusals: CertificateRefusals::default() }
    }

    /// Locks the table for a short look, never across an await.
    pub(super) fn slots(&self) -> MutexGuard<'_, ConnectionSlots> {
        // No code under the lock can panic half-way, so a poisoned table is still whole.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves room for a connection, closing the connection idle the longest if needed. `None` if all are
    /// in use.
    pub(super) async fn reserve(&self) -> Option<CertificateConnectionPermit> {
        let permit = match Arc::clone(&self.room).try_acquire_owned() {
            Ok(permit) => Some(permit),
            Err(_) if self.close_the_quietest() => {
                let leaving = Arc::clone(&self.room).acquire_owned();
                tokio::time::timeout(LEAVING, leaving).await.ok().and_then(Result::ok)
            }
            Err(_) => None,
        };
        let Some(permit) = permit else {
            self.metrics.certificate_connections_refused.inc();
            return None;
        };
        self.metrics.certificate_connections.inc();
        Some(CertificateConnectionPermit { permit, metrics: Arc::clone(&self.metrics) })
    }

    /// Closes the connection idle the longest. Returns true if closed.
    fn close_the_quietest(&self) -> bool {
        let slots = self.slots();
        let mut quiet: Vec<_> =
            slots.all().filter_map(|connection| Some((connection.quiet_since()?, connection))).collect();
        quiet.sort_by_key(|(since, _)| *since);
        // A call may have begun on a connection meanwhile.
        quiet.into_iter().any(|(_, connection)| connection.close_if_quiet())
    }
}
