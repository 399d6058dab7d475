//! The audit log, as seen by the threads that make records.
//!
//! Owns: which events have records, and the treatment of a record without room. Must not know: how a record
//! is written.

use std::sync::Arc;
use std::time::Duration;

use super::queue::{AuditPlace, AuditQueue};
use super::record;
use super::recorder::{self, AuditStartError};
use crate::config::audit_settings::{AuditEvent, AuditEvents, AuditSettings, OnFull};
use crate::telemetry::audit_metrics::AuditMetrics;

/// How long the end of the process waits for the last records.
const LAST: Duration = Duration::from_secs(2);

/// The audit log of the process.
pub struct AuditLog {
    events: AuditEvents,
    on_full: OnFull,
    queue: Arc<AuditQueue>,
}

/// The record has no room, and the call must not go on without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditUnwritable;

/// Writes the last records when dropped, within two seconds.
#[must_use = "the last records are written when it is dropped at the end of the process"]
pub struct AuditCloseGuard(Arc<AuditQueue>);

impl Drop for AuditCloseGuard {
    fn drop(&mut self) {
        self.0.close(LAST);
    }
}

impl AuditLog {
    /// Starts the writer.
    ///
    /// # Errors
    /// The file cannot be used, or a thread cannot be started.
    pub fn start(
        settings: &AuditSettings,
        metrics: AuditMetrics,
    ) -> Result<(Arc<Self>, AuditCloseGuard), AuditStartError> {
        let queue = Arc::new(AuditQueue::new(settings.queue, metrics));
        recorder::start(settings, &queue)?;
        let guard = AuditCloseGuard(Arc::clone(&queue));
        Ok((Arc::new(Self { events: settings.events, on_full: settings.on_full, queue }), guard))
    }

    /// True if the event has records.
    #[must_use]
    pub fn has(&self, event: AuditEvent) -> bool {
        self.events.has(event)
    }

    /// Reserves room for the record of a call, before the call is sent. `None` if the call goes on without.
    /// Cancel-safe.
    ///
    /// # Errors
    /// There is no room, and `audit.on_full` is `block`.
    pub async fn reserve(&self, bytes: usize) -> Result<Option<AuditPlace>, AuditUnwritable> {
        match (self.queue.try_reserve(bytes), self.on_full) {
            (Some(place), _) => Ok(Some(place)),
            (None, OnFull::Drop) => Ok(None),
            (None, OnFull::Block) => match self.queue.reserve(bytes).await {
                Some(place) => Ok(Some(place)),
                None => {
                    self.queue.metrics.refused.inc();
                    Err(AuditUnwritable)
                }
            },
        }
    }

    /// Queues a record, into `place` if reserved. A record without room is counted as lost.
    pub fn record(&self, place: Option<AuditPlace>, record: &impl serde::Serialize) {
        match place.or_else(|| self.queue.try_reserve(1)) {
            Some(place) => place.fill(record::body(record)),
            None => self.queue.count_lost(1),
        }
    }
}
