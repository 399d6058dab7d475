//! The audit log, as seen by the threads that make records.
//!
//! Owns: which events have records, and the treatment of a record without room. Must not know: how a record
//! is written.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::file::AuditFile;
use super::log_trouble::{LogTrouble, LogTroubleReport};
use super::loss_counter::LossSeries;
use super::queue::{AuditPlace, AuditQueue, RoomShare};
use super::recorder::{self, AuditStartError, Recorder};
use super::refusal_share::RefusalShare;
use super::retention::{AuditRetention, RetentionReport};
use super::sink_state::{SinkReport, SinkState};
use super::{record, record_relay};
use crate::otlp::collector_access::{CollectorAccess, CurrentCollectorAccess};
use keyward_config::audit_settings::{AuditCollector, AuditEvent, AuditEvents, AuditSettings, OnFull};
use keyward_dial::names::NameResolver;
use keyward_telemetry::audit_metrics::AuditMetrics;

/// How long a succession waits for the last records.
const SUCCESSION: Duration = Duration::from_secs(3);
/// How long the end of the process waits for the last records.
const LAST: Duration = Duration::from_secs(2);

/// The audit log of the process.
pub struct AuditLog {
    events: AuditEvents,
    on_full: OnFull,
    queue: Arc<AuditQueue>,
    refusals: Option<RefusalShare>,
    retention: Arc<AuditRetention>,
    has_file: bool,
    sinks: OnceLock<Vec<Arc<SinkState>>>,
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
    /// The last records that no sink has, if any.
    pub lost: Option<LossSeries>,
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

/// Writes the last records when dropped, within two seconds, unless [`AuditLog::end`] has done so.
#[must_use = "the last records are written when it is dropped at the end of the process"]
pub struct AuditCloseGuard(pub(super) Arc<AuditQueue>);

/// A log whose records wait in memory.
#[must_use = "until it begins nothing is written"]
pub struct AuditBegin {
    settings: AuditSettings,
    log: Arc<AuditLog>,
}

impl AuditBegin {
    /// Begins to write.
    ///
    /// # Errors
    /// The file cannot be used, or a thread cannot be started.
    pub fn begin(self) -> Result<AuditCloseGuard, AuditStartError> {
        let recorder = self.open()?;
        thread::Builder::new().name("audit".into()).spawn(move || recorder.run())?;
        Ok(AuditCloseGuard(Arc::clone(&self.log.queue)))
    }

    /// Looks if the file can be continued, while the process to be succeeded writes it.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn check(&self) -> Result<(), AuditStartError> {
        if let Some(file) = &self.settings.file {
            AuditFile::check(&file.path)?;
        }
        Ok(())
    }

    /// Begins to write once the process that was succeeded has left the file. `relay` brings the last
    /// records of that process.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn succeed(self, relay: Option<OwnedFd>) -> io::Result<AuditCloseGuard> {
        let queue = Arc::clone(&self.log.queue);
        thread::Builder::new().name("audit".into()).spawn(move || self.write_when_left())?;
        relay.map(|relay| record_relay::receive(relay, Arc::clone(&queue))).transpose()?;
        Ok(AuditCloseGuard(queue))
    }

    fn write_when_left(self) {
        let mut was_refused = false;
        loop {
            match self.open() {
                Ok(recorder) => {
                    self.log.trouble.note_written();
                    if was_refused {
                        tracing::info!("the audit file is continued");
                    }
                    return recorder.run();
                }
                Err(error) => {
                    let error = io::Error::other(error.to_string());
                    tracing::warn!(%error, "the audit file cannot be continued yet");
                    was_refused = true;
                    self.log.trouble.note_unwritable(&error);
                }
            }
            if !self.log.queue.pause(recorder::RETRY) {
                return self.log.queue.note_closed(0);
            }
        }
    }

    fn open(&self) -> Result<Recorder, AuditStartError> {
        let log = &self.log;
        let collector = log.collector.clone();
        let opened = recorder::open(&self.settings, collector, &log.queue, &log.retention, &log.trouble);
        let (recorder, sinks) = opened?;
        _ = log.sinks.set(sinks);
        Ok(recorder)
    }
}

impl Drop for AuditCloseGuard {
    fn drop(&mut self) {
        if self.0.goes_on() {
            self.0.close(Duration::ZERO, LAST);
        }
    }
}

impl AuditLog {
    /// Makes the log, whose records wait until [`AuditBegin`] begins to write. `names` resolves the name of
    /// a collector.
    ///
    /// # Errors
    /// The collector's TLS settings cannot be used.
    pub fn prepare(
        settings: &AuditSettings,
        names: &NameResolver,
        metrics: AuditMetrics,
    ) -> Result<(Arc<Self>, AuditBegin), AuditStartError> {
        let file = settings.file.as_ref();
        let access = |otlp: &AuditCollector| CollectorAccess::new(&otlp.collector, names);
        let log = Arc::new(Self {
            events: settings.events,
            on_full: settings.on_full,
            has_file: file.is_some(),
            refusals: file.and_then(|file| RefusalShare::new(file, Instant::now())),
            retention: Arc::new(AuditRetention::new(file, metrics.clone())),
            queue: Arc::new(AuditQueue::new(settings.queue, metrics)),
            sinks: OnceLock::new(),
            trouble: Arc::default(),
            collector: settings.otlp.as_ref().map(access).transpose()?.map(CollectorAccess::in_force),
        });
        let begin = AuditBegin { settings: settings.clone(), log: Arc::clone(&log) };
        Ok((log, begin))
    }

    /// Makes the log, and begins to write.
    ///
    /// # Errors
    /// The file or the collector's TLS settings cannot be used, or a thread cannot be started.
    pub fn start(
        settings: &AuditSettings,
        names: &NameResolver,
        metrics: AuditMetrics,
    ) -> Result<(Arc<Self>, AuditCloseGuard), AuditStartError> {
        let (log, begin) = Self::prepare(settings, names, metrics)?;
        Ok((log, begin.begin()?))
    }

    /// Leaves the file to a successor of this process. Returns the socket by which the records of calls
    /// that are open here reach the successor; none if the log has no file of its own. Not cancel-safe: a
    /// cancelled succession ends with the next record.
    ///
    /// # Errors
    /// The last records cannot be written, or not in time: the file stays this process's.
    pub async fn leave_to_successor(&self) -> io::Result<Option<OwnedFd>> {
        if !self.has_file {
            return Ok(None);
        }
        if self.trouble.unwritable(Instant::now()).is_some() {
            return Err(io::Error::other("the audit log cannot be written"));
        }
        let (order, left) = oneshot::channel();
        self.queue.order_succession(order);
        match timeout(SUCCESSION, left).await {
            Ok(Ok(left)) => left,
            Ok(Err(_)) | Err(_) => Err(io::Error::other("the audit log is not written in time")),
        }
    }

    /// Writes the last records at the end of the process. While the disk has no room, tries again for
    /// `attempts`. Returns the number of records that are lost with the process. Blocks for two seconds
    /// longer at most; a second call shortens the time of the first one.
    #[must_use]
    pub fn end(&self, attempts: Duration) -> u64 {
        self.queue.close(attempts, LAST)
    }

    /// The number of records of answered calls that wait in memory because the file cannot be written.
    #[must_use]
    pub fn waiting_for_disk(&self) -> u64 {
        self.trouble.unwritable(Instant::now()).map_or(0, |_| self.queue.waiting())
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
        let (trouble, lost) = (self.trouble.report(Instant::now()), self.queue.losses.series());
        AuditReport { retention, sinks: self.sinks(), trouble, lost }
    }

    fn sinks(&self) -> AuditSinksReport {
        let is_behind = self.queue.is_behind();
        let sinks = self.sinks.get().into_iter().flatten().map(|sink| sink.report()).collect();
        AuditSinksReport { sinks, is_behind }
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
