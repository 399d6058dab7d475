//! The audit log, as seen by the threads that make records.
//!
//! Owns: which events have records, and the treatment of a record without room. Must not know: how a record
//! is written.

use std::sync::Arc;
use std::time::Duration;

use super::queue::{AuditPlace, AuditQueue, RoomShare};
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

/// The answer to a call that needs room for its record.
pub enum Reservation {
    /// Room is reserved.
    Place(AuditPlace),
    /// No room; the call goes on.
    Without,
    /// No room; the call must wait.
    Full,
}

/// The record has no room, and the call must not go on without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditUnwritable;

/// Writes the last records when dropped, within two seconds.
#[must_use = "the last records are written when it is dropped at the end of the process"]
pub struct AuditCloseGuard(pub(super) Arc<AuditQueue>);

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

    /// Reserves room for the record of a call, before the call is sent.
    #[must_use]
    pub fn reserve(&self, bytes: usize) -> Reservation {
        match (self.queue.try_reserve(bytes), self.on_full) {
            (Some(place), _) => Reservation::Place(place),
            (None, OnFull::Drop) => Reservation::Without,
            (None, OnFull::Block) => Reservation::Full,
        }
    }

    /// Waits for room. Cancel-safe.
    ///
    /// # Errors
    /// The log cannot be written, or makes no room for some seconds.
    pub async fn wait_for_room(&self, bytes: usize) -> Result<AuditPlace, AuditUnwritable> {
        let place = self.queue.reserve(bytes).await;
        place.ok_or_else(|| {
            self.queue.metrics.refused.inc();
            AuditUnwritable
        })
    }

    /// Room for the record of a call that found room at its begin, and must not hold room for its whole life.
    /// The number of such calls is limited elsewhere.
    #[must_use]
    pub fn room_beyond_limit(&self) -> Option<AuditPlace> {
        match self.on_full {
            OnFull::Block => Some(self.queue.place_beyond_limit()),
            OnFull::Drop => None,
        }
    }

    /// Counts a record that is left out: its peer is refused too often.
    pub fn note_left_out(&self) {
        self.queue.count_left_out(1);
    }

    /// Queues a record, into `place` if reserved, else into the room of `share`; a command may take common
    /// room too. A record without room is counted as lost.
    pub fn record(&self, place: Option<AuditPlace>, share: RoomShare, record: &impl serde::Serialize) {
        let body = record::body(record);
        let place = place.or_else(|| self.queue.try_reserve_of(share, body.len()));
        let commons = || (share == RoomShare::Commands).then(|| self.queue.try_reserve(body.len())).flatten();
        match place.or_else(commons) {
            Some(place) => place.fill(body),
            None => self.queue.count_lost(1),
        }
    }
}
