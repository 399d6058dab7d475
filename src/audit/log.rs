//! The audit log, as seen by the threads that make records.
//!
//! Owns: which events have records, and the treatment of a record without room. Must not know: how a record
//! is written.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::log_trouble::{LogTrouble, LogTroubleReport};
use super::queue::{AuditPlace, AuditQueue, RoomShare};
use super::record;
use super::recorder::{self, AuditStartError};
use super::refusal_share::RefusalShare;
use super::retention::{AuditRetention, RetentionReport};
use super::sink_state::{SinkReport, SinkState};
use crate::config::audit_settings::{AuditCollector, AuditEvent, AuditEvents, AuditSettings, OnFull};
use crate::dial::names::NameResolver;
use crate::otlp::collector_access::{CollectorAccess, CurrentCollectorAccess};
use crate::telemetry::audit_metrics::AuditMetrics;

/// How long the end of the process waits for the last records.
const LAST: Duration = Duration::from_secs(2);

/// The audit log of the process.
pub struct AuditLog {
    events: AuditEvents,
    on_full: OnFull,
    queue: Arc<AuditQueue>,
    refusals: Option<RefusalShare>,
    retention: Arc<AuditRetention>,
    sinks: Vec<Arc<SinkState>>,
    trouble: Arc<LogTrouble>,
    collector: Option<CurrentCollectorAccess>,
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

/// The reason for which calls with records are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditObstacle {
    /// The file cannot be written: a matter of this replica.
    File,
    /// A sink beside the file is past its bound: replicas often share the receiver.
    Sink,
}

/// The state of the log.
#[derive(Clone, Debug, Default)]
pub struct AuditReport {
    /// How long records are kept, if that is to be watched.
    pub retention: Option<RetentionReport>,
    /// The sinks beside the file.
    pub sinks: AuditSinksReport,
    /// The troubles of the file.
    pub trouble: LogTroubleReport,
}

/// The state of the sinks beside the file.
#[derive(Clone, Debug, Default)]
pub struct AuditSinksReport {
    /// The sinks.
    pub sinks: Vec<SinkReport>,
    /// True while calls are refused since a sink is behind by more than the kept files.
    pub is_behind: bool,
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
    /// Starts the writer. `names` resolves the name of a collector.
    ///
    /// # Errors
    /// The file or the collector's TLS settings cannot be used, or a thread cannot be started.
    pub fn start(
        settings: &AuditSettings,
        names: &NameResolver,
        metrics: AuditMetrics,
    ) -> Result<(Arc<Self>, AuditCloseGuard), AuditStartError> {
        let file = settings.file.as_ref();
        let retention = Arc::new(AuditRetention::new(file, metrics.clone()));
        let queue = Arc::new(AuditQueue::new(settings.queue, metrics));
        let trouble = Arc::default();
        let access = |otlp: &AuditCollector| CollectorAccess::new(&otlp.collector, names);
        let collector = settings.otlp.as_ref().map(access).transpose()?.map(CollectorAccess::in_force);
        let sinks = recorder::start(settings, collector.clone(), &queue, &retention, &trouble)?;
        let guard = AuditCloseGuard(Arc::clone(&queue));
        let refusals = file.and_then(|file| RefusalShare::new(file, Instant::now()));
        let (events, on_full) = (settings.events, settings.on_full);
        let log = Self { events, on_full, queue, refusals, retention, sinks, trouble, collector };
        Ok((Arc::new(log), guard))
    }

    /// The access to the collector, if there is one.
    #[must_use]
    pub fn collector(&self) -> Option<&CurrentCollectorAccess> {
        self.collector.as_ref()
    }

    /// True if the event has records.
    #[must_use]
    pub fn has(&self, event: AuditEvent) -> bool {
        self.events.has(event)
    }

    /// Reserves room for the record of a call, before the call is sent.
    #[must_use]
    pub fn reserve(&self, bytes: usize) -> Reservation {
        let place = if self.queue.is_behind() { None } else { self.queue.try_reserve(bytes) };
        match (place, self.on_full) {
            (Some(place), _) => Reservation::Place(place),
            (None, OnFull::Drop) => Reservation::Without,
            (None, OnFull::Block) => Reservation::Full,
        }
    }

    /// Waits for room. Cancel-safe.
    ///
    /// # Errors
    /// The log cannot be written, a sink is past its bound, or there is no room for some seconds.
    pub async fn wait_for_room(&self, bytes: usize) -> Result<AuditPlace, AuditUnwritable> {
        // A disk that hangs makes no room while a call waits.
        let hangs = self.trouble.unwritable(Instant::now()).is_some();
        let place = if hangs { None } else { self.queue.reserve(bytes).await };
        place.ok_or_else(|| {
            self.queue.metrics.refused.inc();
            AuditUnwritable
        })
    }

    /// Why calls with records are refused; `None` if they are served.
    #[must_use]
    pub fn obstacle(&self) -> Option<AuditObstacle> {
        match self.on_full {
            OnFull::Drop => None,
            OnFull::Block if self.trouble.unwritable(Instant::now()).is_some() => Some(AuditObstacle::File),
            OnFull::Block if self.queue.is_behind() || self.queue.is_held_by_sink() => {
                Some(AuditObstacle::Sink)
            }
            OnFull::Block => None,
        }
    }

    /// The state of the log, for doctor.
    #[must_use]
    pub fn report(&self) -> AuditReport {
        let retention = self.retention.report(SystemTime::now());
        AuditReport { retention, sinks: self.sinks(), trouble: self.trouble.report(Instant::now()) }
    }

    fn sinks(&self) -> AuditSinksReport {
        let is_behind = self.queue.is_behind();
        AuditSinksReport { sinks: self.sinks.iter().map(|sink| sink.report()).collect(), is_behind }
    }

    /// Room for the record of a call that found room at its begin, and must not hold room for its whole life:
    /// without room now, it is owed, and no call has room until it is paid.
    #[must_use]
    pub fn room_in_debt(&self) -> Option<AuditPlace> {
        match self.on_full {
            OnFull::Block => Some(self.queue.place_in_debt()),
            OnFull::Drop => None,
        }
    }

    /// Counts a record that is left out: its peer has too many calls without effect. Without a proved
    /// identity there is no peer.
    pub fn note_left_out(&self, peer: Option<&str>) {
        self.queue.count_left_out(peer.map(record::cut_name));
    }

    /// Queues the record of a call without effect, in the room for those. A record beyond their part of the
    /// disk is left out; one without room is counted as lost.
    pub fn record_without_effect(
        &self,
        place: Option<AuditPlace>,
        peer: Option<&str>,
        record: &impl serde::Serialize,
    ) {
        let body = record::body(record);
        let has_disk = |share: &RefusalShare| share.try_take(body.len(), Instant::now());
        if !self.refusals.as_ref().is_none_or(has_disk) {
            self.queue.metrics.left_out.inc();
            return self.note_left_out(peer);
        }
        match place.or_else(|| self.queue.try_reserve_of(RoomShare::Refusals, body.len())) {
            Some(place) => place.fill(body),
            None => self.queue.count_lost(1),
        }
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
