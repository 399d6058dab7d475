//! The queue of records between the serving threads and the writer.
//!
//! Owns: the room for records, places reserved in advance, and the counts of losses. Must not know: the form
//! of a record, the sinks. Invariants: the weights of reserved places and of waiting records together are at
//! most the capacity, and a record weighs its bytes; refusals have a share of their own, so that they
//! displace neither changes nor commands; a place is given back unless used, also when its call is dropped;
//! taking a place takes no lock, and a serving thread waits for no write.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::telemetry::audit_metrics::AuditMetrics;

/// Bytes of a unit of room. Most records are shorter.
const UNIT: usize = 1024;
/// How long a call waits for room while the writer works.
const PATIENCE: Duration = Duration::from_secs(7);
/// The pause between two writes, so that a write and its sync take many records.
const GATHER: Duration = Duration::from_millis(10);
/// The writer stops gathering when this part of the capacity waits.
const ENOUGH_PART: usize = 8;

/// The parts of the capacity for refusals, and for commands that find no other room.
const REFUSALS_PART: usize = 4;
const COMMANDS_PART: usize = 16;

/// The shares of the room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoomShare {
    /// Records of calls, and of everything else.
    Common,
    /// Records of refused calls without a reserved place.
    Refusals,
    /// Records of commands.
    Commands,
}

/// The shares, in the order of their rooms.
const SHARES: [RoomShare; 3] = [RoomShare::Common, RoomShare::Refusals, RoomShare::Commands];

/// The free room of a share, in units.
struct ShareRoom {
    free: Semaphore,
    capacity: usize,
}

impl ShareRoom {
    fn new(capacity: usize) -> Self {
        Self { free: Semaphore::new(capacity), capacity }
    }
}

/// Units by share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UnitsByShare([usize; 3]);

impl UnitsByShare {
    fn add(&mut self, share: RoomShare, units: u32) {
        self.0[share as usize] += units as usize;
    }
}

/// The queue.
pub struct AuditQueue {
    shares: [ShareRoom; 3],
    capacity: usize,
    state: Mutex<AuditQueueState>,
    /// Wakes the writer, which alone waits here: another waiter would take the writer's wake.
    wakes: Condvar,
    /// Wakes the pausing threads at the end of the process.
    pauses: Condvar,
    /// Wakes the end of the process, which waits for the writer.
    closed: Condvar,
    is_failing: AtomicBool,
    /// Lost records without a record of the loss.
    unreported: AtomicU64,
    /// Records of refused calls left out, without a record of it.
    left_out: AtomicU64,
    /// The metrics.
    pub metrics: AuditMetrics,
}

#[derive(Default)]
struct AuditQueueState {
    pending: Vec<WaitingRecord>,
    units: usize,
    by_share: UnitsByShare,
    /// True while the writer waits and must be woken.
    is_waiting: bool,
    is_closing: bool,
    is_closed: bool,
}

/// A record that waits for the writer.
struct WaitingRecord {
    body: Vec<u8>,
    share: RoomShare,
    units: u32,
}

/// Records taken by the writer.
#[derive(Default)]
pub(super) struct AuditBatch {
    /// The JSON objects.
    pub(super) bodies: Vec<Vec<u8>>,
    /// Their room, given back after the write.
    pub(super) units: UnitsByShare,
    /// True if no record follows any more.
    pub(super) is_last: bool,
}

/// Room for one record.
pub struct AuditPlace {
    queue: Arc<AuditQueue>,
    share: RoomShare,
    units: u32,
}

impl AuditPlace {
    /// Queues the record that the place was reserved for.
    pub fn fill(mut self, body: Vec<u8>) {
        let more = self.queue.units(self.share, body.len()).saturating_sub(self.units);
        // A record that is a little longer than its call foresaw is not lost for want of room.
        if self.units > 0 && self.queue.try_take(self.share, more) {
            self.units += more;
        }
        let units = mem::take(&mut self.units);
        self.queue.push(WaitingRecord { body, share: self.share, units });
    }
}

impl Drop for AuditPlace {
    fn drop(&mut self) {
        self.queue.release(self.share, self.units as usize);
    }
}

impl AuditQueue {
    /// A queue for `bytes` of records.
    #[must_use]
    pub fn new(bytes: usize, metrics: AuditMetrics) -> Self {
        let capacity = (bytes / UNIT).clamp(1, Semaphore::MAX_PERMITS >> 1);
        Self {
            shares: [
                ShareRoom::new(capacity - capacity / REFUSALS_PART - capacity / COMMANDS_PART),
                ShareRoom::new(capacity / REFUSALS_PART),
                ShareRoom::new(capacity / COMMANDS_PART),
            ],
            capacity,
            state: Mutex::default(),
            wakes: Condvar::new(),
            pauses: Condvar::new(),
            closed: Condvar::new(),
            is_failing: AtomicBool::new(false),
            unreported: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
            metrics,
        }
    }

    fn lock(&self) -> MutexGuard<'_, AuditQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The share, or the common one where the capacity is too small to be shared.
    fn room(&self, share: RoomShare) -> (&ShareRoom, RoomShare) {
        let own = &self.shares[share as usize];
        if own.capacity == 0 { (&self.shares[0], RoomShare::Common) } else { (own, share) }
    }

    fn units(&self, share: RoomShare, bytes: usize) -> u32 {
        let capacity = self.room(share).0.capacity;
        u32::try_from(bytes.div_ceil(UNIT).clamp(1, capacity)).unwrap_or(u32::MAX)
    }

    fn try_take(&self, share: RoomShare, units: u32) -> bool {
        self.room(share).0.free.try_acquire_many(units).is_ok_and(|taken| {
            taken.forget();
            true
        })
    }

    /// Reserves room for a record of `bytes` in a share, if there is room now.
    #[must_use]
    pub fn try_reserve_of(self: &Arc<Self>, share: RoomShare, bytes: usize) -> Option<AuditPlace> {
        let (_, share) = self.room(share);
        let units = self.units(share, bytes);
        self.try_take(share, units).then(|| AuditPlace { queue: Arc::clone(self), share, units })
    }

    /// Reserves room for a record of about `bytes`, if there is room now.
    #[must_use]
    pub fn try_reserve(self: &Arc<Self>, bytes: usize) -> Option<AuditPlace> {
        self.try_reserve_of(RoomShare::Common, bytes)
    }

    /// Waits for room. `None` if the writer fails, or has made no room for some seconds. Cancel-safe.
    pub async fn reserve(self: &Arc<Self>, bytes: usize) -> Option<AuditPlace> {
        if self.is_failing.load(Ordering::Relaxed) {
            return None;
        }
        let (share, units) = (RoomShare::Common, self.units(RoomShare::Common, bytes));
        timeout(PATIENCE, self.shares[0].free.acquire_many(units)).await.ok()?.ok()?.forget();
        Some(AuditPlace { queue: Arc::clone(self), share, units })
    }

    /// A place that takes no room.
    pub(super) fn place_beyond_limit(self: &Arc<Self>) -> AuditPlace {
        AuditPlace { queue: Arc::clone(self), share: RoomShare::Common, units: 0 }
    }

    fn push(&self, record: WaitingRecord) {
        self.metrics.waiting.inc();
        let mut state = self.lock();
        let enough = (self.capacity / ENOUGH_PART).max(1);
        let before = state.units;
        state.units += record.units as usize;
        state.by_share.add(record.share, record.units);
        state.pending.push(record);
        if mem::take(&mut state.is_waiting) || (before < enough && state.units >= enough) {
            drop(state);
            self.wakes.notify_one();
        }
    }

    fn release(&self, share: RoomShare, units: usize) {
        if units > 0 {
            self.shares[share as usize].free.add_permits(units);
        }
    }

    /// Counts records that no sink has.
    pub fn count_lost(&self, records: u64) {
        self.metrics.lost("all").inc_by(records);
        self.unreported.fetch_add(records, Ordering::Relaxed);
    }

    /// Counts records of refused calls that are left out.
    pub fn count_left_out(&self, records: u64) {
        self.left_out.fetch_add(records, Ordering::Relaxed);
    }

    /// Takes the number of records left out without a record of it.
    pub(super) fn take_left_out(&self) -> u64 {
        self.left_out.swap(0, Ordering::Relaxed)
    }

    /// Takes the number of lost records without a record of the loss.
    pub(super) fn take_unreported(&self) -> u64 {
        self.unreported.swap(0, Ordering::Relaxed)
    }

    /// Gives back the number of losses: the record of the loss was not written.
    pub(super) fn return_unreported(&self, records: u64) {
        self.unreported.fetch_add(records, Ordering::Relaxed);
    }

    /// Notes if the writer fails. Returns true if that is new.
    pub(super) fn note_failing(&self, fails: bool) -> bool {
        self.is_failing.swap(fails, Ordering::Relaxed) != fails
    }

    /// Waits for records until `until`, gathers more for a moment, and takes all.
    pub(super) fn take(&self, until: Instant) -> AuditBatch {
        let mut state = self.lock();
        while state.pending.is_empty() && !state.is_closing {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return AuditBatch::default();
            };
            state.is_waiting = true;
            state = self.wakes.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.is_waiting = false;
        }
        let enough = (self.capacity / ENOUGH_PART).max(1);
        let gathers = |state: &mut AuditQueueState| !state.is_closing && state.units < enough;
        let gathered = self.wakes.wait_timeout_while(state, GATHER, gathers);
        let mut state = gathered.unwrap_or_else(PoisonError::into_inner).0;
        state.units = 0;
        let units = mem::take(&mut state.by_share);
        let bodies = mem::take(&mut state.pending).into_iter().map(|record| record.body).collect();
        AuditBatch { bodies, units, is_last: state.is_closing }
    }

    /// Gives back the room of a batch.
    pub(super) fn finish(&self, batch: &AuditBatch) {
        self.metrics.waiting.dec_by(i64::try_from(batch.bodies.len()).unwrap_or(i64::MAX));
        for (share, units) in SHARES.into_iter().zip(batch.units.0) {
            self.release(share, units);
        }
    }

    /// Waits for `pause`. False once the process ends.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let waits = |state: &mut AuditQueueState| !state.is_closing;
        let paused = self.pauses.wait_timeout_while(self.lock(), pause, waits);
        !paused.unwrap_or_else(PoisonError::into_inner).0.is_closing
    }

    /// Tells the process's end that the writer has ended.
    pub(super) fn note_closed(&self) {
        self.lock().is_closed = true;
        self.closed.notify_all();
    }

    /// Lets the writer write the last records, and waits for its end, for `limit` at most.
    pub(super) fn close(&self, limit: Duration) {
        let mut state = self.lock();
        state.is_closing = true;
        self.wakes.notify_all();
        self.pauses.notify_all();
        let waits = |state: &mut AuditQueueState| !state.is_closed;
        drop(self.closed.wait_timeout_while(state, limit, waits));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};
    use std::thread;

    use super::*;
    use crate::telemetry::metrics::Metrics;

    fn queue(bytes: usize) -> Arc<AuditQueue> {
        Arc::new(AuditQueue::new(bytes, Metrics::new(Vec::new()).audit))
    }

    #[test]
    fn a_place_counts_until_its_record_was_written() {
        let queue = queue(3 * UNIT);
        let (first, second) = (queue.try_reserve(1).unwrap(), queue.try_reserve(2 * UNIT).unwrap());
        assert!(queue.try_reserve(1).is_none());
        drop(second);
        first.fill(b"{}".to_vec());
        let batch = queue.take(Instant::now());
        assert_eq!(batch.bodies, [b"{}"]);
        assert!(queue.try_reserve(3 * UNIT).is_none(), "not written yet");
        queue.finish(&batch);
        assert!(queue.try_reserve(99 * UNIT).is_some(), "a large record has all the room at most");
        assert!(queue.take(Instant::now()).bodies.is_empty());
    }

    /// Whoever is refused as often as he likes takes no room from changes and commands.
    #[test]
    fn refusals_and_commands_have_shares_and_a_record_weighs_its_bytes() {
        let queue = queue(64 * UNIT);
        let mut refusals = Vec::new();
        while let Some(place) = queue.try_reserve_of(RoomShare::Refusals, 4 * UNIT) {
            refusals.push(place);
        }
        assert_eq!(refusals.len(), 4);
        let mut common = Vec::new();
        while let Some(place) = queue.try_reserve(UNIT) {
            common.push(place);
        }
        assert_eq!(common.len(), 44);
        let command = queue.try_reserve_of(RoomShare::Commands, UNIT).expect("room for commands");
        // A record that is longer than foreseen takes the rest of its room.
        drop(common.drain(..3));
        common.pop().expect("a place").fill(vec![b'x'; 4 * UNIT]);
        assert!(queue.try_reserve(UNIT).is_none());
        command.fill(vec![b'x'; UNIT]);
        refusals.pop().expect("a place").fill(vec![b'x'; 4 * UNIT]);
        let batch = queue.take(Instant::now());
        assert_eq!(batch.units, UnitsByShare([4, 4, 1]));
        queue.finish(&batch);
        assert!(queue.try_reserve(4 * UNIT).is_some());
        assert!(queue.try_reserve_of(RoomShare::Refusals, 4 * UNIT).is_some());
    }

    /// A sink that fails pauses between its attempts.
    #[test]
    fn a_record_wakes_the_writer_although_sinks_pause() {
        let (queue, long) = (queue(1 << 20), Duration::from_secs(24 * 3600));
        let (written, writes) = mpsc::channel();
        thread::scope(|scope| {
            let queue = &queue;
            for _ in 0..4 {
                let begun = Arc::new(Barrier::new(2));
                let other = Arc::clone(&begun);
                scope.spawn(move || {
                    other.wait();
                    queue.pause(long)
                });
                begun.wait();
            }
            scope.spawn(move || {
                written.send(queue.take(Instant::now() + long).bodies.len()).expect("the test waits")
            });
            while !queue.lock().is_waiting {
                thread::yield_now();
            }
            queue.try_reserve(1).expect("room").fill(b"{}".to_vec());
            // A writer that nobody wakes lets the test wait for a day.
            assert_eq!(writes.recv(), Ok(1));
            queue.close(Duration::ZERO);
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_waits_for_room_and_not_for_ever() {
        let queue = queue(UNIT);
        let held = queue.try_reserve(1).unwrap();
        assert!(queue.reserve(1).await.is_none());
        let waiting = queue.reserve(1);
        let (place, ()) = tokio::join!(waiting, async { drop(held) });
        assert!(place.is_some());
        queue.note_failing(true);
        let begun = tokio::time::Instant::now();
        assert!(queue.reserve(1).await.is_none());
        assert_eq!(begun.elapsed(), Duration::ZERO, "a failing writer makes no room");
    }
}
