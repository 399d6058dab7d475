//! The connections that show a user's own certificate, for all shards: such a user costs connections (rules 18).
//!
//! Owns: how many there may be in all, and which one goes where there is no room. Must not know: what a certificate is.
//! Invariants: a user has one connection per member and lane, more only where that is full, whatever the number of
//! shards: the shard that opens it drives it, all send on it. There are never more than the limit; one more closes the
//! one that was quiet the longest, and where all are in use it is refused.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::telemetry::metrics::Metrics;
use crate::upstream::slots::Slots;

/// How long a connection that is closed for another may take to be gone.
const LEAVING: Duration = Duration::from_secs(1);

/// The connections of users with certificates.
pub struct Fleet {
    slots: Mutex<Slots>,
    room: Arc<Semaphore>,
    metrics: Arc<Metrics>,
}

/// Counts one connection for as long as it lives.
pub(super) struct Place {
    #[expect(dead_code, reason = "holds its place until dropped")]
    permit: OwnedSemaphorePermit,
    metrics: Arc<Metrics>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.metrics.certificate_connections.dec();
    }
}

impl Fleet {
    /// At most `limit` connections.
    #[must_use]
    pub fn new(limit: usize, metrics: Arc<Metrics>) -> Self {
        let room = Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)));
        Self { slots: Mutex::default(), room, metrics }
    }

    /// Held for a look at one small map, never over an await.
    pub(super) fn slots(&self) -> MutexGuard<'_, Slots> {
        // Nothing under this lock can panic half-way, so that a poisoned one is still whole.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for one more, made where there is none; none where all are in use.
    pub(super) async fn place(&self) -> Option<Place> {
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
        Some(Place { permit, metrics: Arc::clone(&self.metrics) })
    }

    /// Closes the connection that was without a call for the longest.
    fn close_the_quietest(&self) -> bool {
        let slots = self.slots();
        let mut quiet: Vec<_> =
            slots.all().filter_map(|connection| Some((connection.quiet_since()?, connection))).collect();
        quiet.sort_by_key(|(since, _)| *since);
        // A call may begin on one meanwhile.
        quiet.into_iter().any(|(_, connection)| connection.close_if_quiet())
    }
}
