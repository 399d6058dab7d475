//! The queue of records between the serving threads and the writer.
//!
//! Owns: the room for records, places reserved in advance, and the counts of losses. Must not know: the form
//! of a record, the sinks. Invariants: every waiting record weighs its bytes; the weights of reserved places
//! and of waiting records together are at most the capacity, but for records of calls already served, whose
//! room is owed: no place is given until that debt is paid; refusals have a share of their own, so that they
//! displace neither changes nor commands; a place is given back unless used, also when its call is dropped;
//! the writer holds a part of the capacity at a time; taking a place takes no lock, and a serving thread
//! waits for no write. A batch without a file holds its room until every sink has done with it.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::left_out::{LeftOut, LeftOutCounts};
use super::loss_counter::LossCounter;
use keyward_config::audit_settings::BATCH_PART;
use keyward_telemetry::audit_metrics::AuditMetrics;

/// Bytes of a unit of room. Most records are shorter.
const UNIT: usize = 1024;
/// How long a call waits for room while the writer works.
const PATIENCE: Duration = Duration::from_secs(7);
/// The pause between two writes, so that a write and its sync take many records.
const GATHER: Duration = Duration::from_millis(10);
/// Time between the first and the last record of a batch at most: each batch of old records has its head.
const BATCH_SPAN: Duration = Duration::from_secs(30);

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

/// The free room of a share, in units.
struct ShareRoom {
    free: Semaphore,
    capacity: usize,
    /// Units taken without room.
    debt: AtomicUsize,
}

impl ShareRoom {
    fn new(capacity: usize) -> Self {
        Self { free: Semaphore::new(capacity), capacity, debt: AtomicUsize::new(0) }
    }

    /// Takes the units, with or without room.
    fn take_all(&self, units: usize) {
        let owed = units - self.free.forget_permits(units);
        if owed > 0 {
            self.debt.fetch_add(owed, Ordering::Relaxed);
        }
    }

    /// Gives units back: to the debt first.
    fn release(&self, units: usize) {
        let pay = |debt: usize| Some(debt.saturating_sub(units));
        let before = self.debt.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay);
        let free = units.saturating_sub(before.unwrap_or_default());
        if free > 0 {
            self.free.add_permits(free);
        }
    }
}

/// Units by share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UnitsByShare([usize; 3]);

impl UnitsByShare {
    fn add(&mut self, share: RoomShare, units: usize) {
        self.0[share as usize] += units;
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
    /// True while a sink that follows the file is behind by more than the kept files.
    is_behind: AtomicBool,
    /// Sinks that fail while records wait for them in memory.
    failing_sinks: AtomicUsize,
    /// Records that no sink has.
    pub(super) losses: LossCounter,
    /// Records of calls without effect left out, without a record of it.
    left_out: Mutex<LeftOut>,
    /// The metrics.
    pub metrics: AuditMetrics,
}

#[derive(Default)]
struct AuditQueueState {
    pending: VecDeque<WaitingRecord>,
    units: usize,
    /// True while the writer waits and must be woken.
    is_waiting: bool,
    /// The order to leave the file to a successor.
    succession: Option<SuccessionOrder>,
    is_closing: bool,
    /// At the end of the process: until when a write that fails is attempted again.
    attempts_until: Option<Instant>,
    is_closed: bool,
    /// Records that no sink has at the end of the process.
    unwritten: u64,
}

/// A record that waits for the writer.
struct WaitingRecord {
    body: Vec<u8>,
    share: RoomShare,
    units: usize,
    queued: Instant,
    waits: Option<WrittenWait>,
}

/// Dropped once the writer has done with a record.
pub(super) type WrittenWait = mpsc::Sender<()>;
/// Takes the socket by which further records reach the successor; none if the log has no file of its own.
pub(super) type SuccessionOrder = oneshot::Sender<io::Result<Option<OwnedFd>>>;

/// Records taken by the writer.
#[derive(Default)]
pub(super) struct AuditBatch {
    /// The JSON objects.
    pub(super) bodies: Vec<Vec<u8>>,
    /// Their room, given back after the write.
    pub(super) units: UnitsByShare,
    /// True if further records wait already.
    pub(super) has_more: bool,
    /// True if no record follows any more.
    pub(super) is_last: bool,
    /// The waits for these records.
    waits: Vec<WrittenWait>,
    /// The file is to be left to a successor behind this batch.
    pub(super) succession: Option<SuccessionOrder>,
}

impl AuditBatch {
    /// The end of the log, without a record of a call.
    pub(super) fn of_end() -> Self {
        Self { is_last: true, ..Self::default() }
    }
}

/// The room of a batch's records, given back at the end of its last owner.
pub(super) struct BatchRoom {
    queue: Arc<AuditQueue>,
    records: usize,
    units: UnitsByShare,
}

impl Drop for BatchRoom {
    fn drop(&mut self) {
        self.queue.metrics.waiting.dec_by(i64::try_from(self.records).unwrap_or(i64::MAX));
        for (share, units) in self.queue.shares.iter().zip(self.units.0) {
            share.release(units);
        }
    }
}

/// Room for one record.
pub struct AuditPlace {
    queue: Arc<AuditQueue>,
    share: RoomShare,
    units: usize,
}

impl AuditPlace {
    /// Queues the record that the place was reserved for. A record longer than its call foresaw, or of a call
    /// that held no room, is not lost for want of room: the room is owed.
    pub fn fill(self, body: Vec<u8>) {
        self.fill_for(body, None);
    }

    /// The same, for somebody who waits until the writer has done with the record.
    pub(super) fn fill_for(mut self, mut body: Vec<u8>, waits: Option<WrittenWait>) {
        body.shrink_to_fit();
        let (reserved, units) = (mem::take(&mut self.units), units_of(body.len()));
        let room = &self.queue.shares[self.share as usize];
        room.take_all(units.saturating_sub(reserved));
        room.release(reserved.saturating_sub(units));
        self.queue.push(WaitingRecord { body, share: self.share, units, queued: Instant::now(), waits });
    }
}

fn units_of(bytes: usize) -> usize {
    bytes.div_ceil(UNIT).max(1)
}

impl Drop for AuditPlace {
    fn drop(&mut self) {
        self.queue.shares[self.share as usize].release(self.units);
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
            is_behind: AtomicBool::new(false),
            failing_sinks: AtomicUsize::new(0),
            losses: LossCounter::new("all"),
            left_out: Mutex::default(),
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

    /// The permits of a place: a record larger than its share waits for all of it.
    fn permits(room: &ShareRoom, bytes: usize) -> u32 {
        u32::try_from(units_of(bytes).min(room.capacity)).unwrap_or(u32::MAX)
    }

    fn place(self: &Arc<Self>, share: RoomShare, permits: u32) -> AuditPlace {
        AuditPlace { queue: Arc::clone(self), share, units: permits as usize }
    }

    /// Reserves room for a record of `bytes` in a share, if there is room now.
    #[must_use]
    pub fn try_reserve_of(self: &Arc<Self>, share: RoomShare, bytes: usize) -> Option<AuditPlace> {
        let (room, share) = self.room(share);
        let permits = Self::permits(room, bytes);
        room.free.try_acquire_many(permits).ok()?.forget();
        Some(self.place(share, permits))
    }

    /// Reserves room for a record of about `bytes`, if there is room now.
    #[must_use]
    pub fn try_reserve(self: &Arc<Self>, bytes: usize) -> Option<AuditPlace> {
        self.try_reserve_of(RoomShare::Common, bytes)
    }

    /// Waits for room. `None` if the writer or a sink fails, or has made no room for some seconds.
    /// Cancel-safe.
    pub async fn reserve(self: &Arc<Self>, bytes: usize) -> Option<AuditPlace> {
        let fails = self.is_failing.load(Ordering::Relaxed) || self.failing_sinks.load(Ordering::Relaxed) > 0;
        if fails || self.is_behind() {
            return None;
        }
        let (room, share) = self.room(RoomShare::Common);
        let permits = Self::permits(room, bytes);
        timeout(PATIENCE, room.free.acquire_many(permits)).await.ok()?.ok()?.forget();
        Some(self.place(share, permits))
    }

    /// A place for the record of a call that was served without holding room: its room is owed.
    pub(super) fn place_in_debt(self: &Arc<Self>) -> AuditPlace {
        self.place(RoomShare::Common, 0)
    }

    fn push(&self, record: WaitingRecord) {
        self.metrics.waiting.inc();
        let mut state = self.lock();
        if state.is_closed {
            state.unwritten += 1;
        }
        let before = state.units;
        state.units += record.units;
        state.pending.push_back(record);
        let enough = self.batch_units();
        if mem::take(&mut state.is_waiting) || (before < enough && state.units >= enough) {
            drop(state);
            self.wakes.notify_one();
        }
    }

    /// The units that the writer takes at once, and stops gathering at.
    fn batch_units(&self) -> usize {
        (self.capacity / BATCH_PART).max(1)
    }

    /// Counts records that no sink has.
    pub fn count_lost(&self, records: u64) {
        self.count_lost_at(records, SystemTime::now());
    }

    /// The same, for records that were given up at `at`.
    pub(super) fn count_lost_at(&self, records: u64, at: SystemTime) {
        self.metrics.lost("all").inc_by(records);
        self.losses.add(records, at);
    }

    fn left_out(&self) -> MutexGuard<'_, LeftOut> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a record of a call without effect that is left out.
    pub fn count_left_out(&self, peer: Option<&str>) {
        self.left_out().count(peer);
    }

    /// Takes the counts of records left out without a record of it.
    pub(super) fn take_left_out(&self) -> LeftOutCounts {
        self.left_out().take()
    }

    /// Gives back the counts: the record of them was not written.
    pub(super) fn return_left_out(&self, counts: LeftOutCounts) {
        self.left_out().add(counts);
    }

    /// True while a sink is behind by more than the kept files.
    pub(super) fn is_behind(&self) -> bool {
        self.is_behind.load(Ordering::Relaxed)
    }

    /// True while a sink that fails holds all room of calls.
    pub(super) fn is_held_by_sink(&self) -> bool {
        self.failing_sinks.load(Ordering::Relaxed) > 0 && self.shares[0].free.available_permits() == 0
    }

    /// Notes if a sink is behind by more than the kept files. Returns true if that is new.
    pub(super) fn note_behind(&self, is_behind: bool) -> bool {
        self.is_behind.swap(is_behind, Ordering::Relaxed) != is_behind
    }

    /// Notes that a sink begins to fail, or works again, while records wait for it in memory.
    pub(super) fn note_sink_failing(&self, fails: bool) {
        if fails {
            self.failing_sinks.fetch_add(1, Ordering::Relaxed);
        } else {
            self.failing_sinks.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Notes if the writer fails. Returns true if that is new.
    pub(super) fn note_failing(&self, fails: bool) -> bool {
        self.is_failing.swap(fails, Ordering::Relaxed) != fails
    }

    /// Waits for records until `until`, gathers more for a moment, and takes some: of half a minute at most,
    /// and a part of the capacity, or a single record.
    pub(super) fn take(&self, until: Instant) -> AuditBatch {
        let mut state = self.lock();
        while state.pending.is_empty() && !state.is_closing && state.succession.is_none() {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return AuditBatch::default();
            };
            state.is_waiting = true;
            state = self.wakes.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.is_waiting = false;
        }
        let enough = self.batch_units();
        let gathers = |state: &mut AuditQueueState| !state.is_closing && state.units < enough;
        let gathered = self.wakes.wait_timeout_while(state, GATHER, gathers);
        let mut state = gathered.unwrap_or_else(PoisonError::into_inner).0;
        let (mut batch, mut taken) = (AuditBatch::default(), 0);
        let last = state.pending.front().map(|first| first.queued + BATCH_SPAN);
        let fits = |taken: usize, next: &WaitingRecord| {
            taken == 0 || (taken + next.units <= enough && last.is_some_and(|last| next.queued <= last))
        };
        while state.pending.front().is_some_and(|next| fits(taken, next)) {
            let Some(record) = state.pending.pop_front() else { break };
            taken += record.units;
            batch.units.add(record.share, record.units);
            batch.bodies.push(record.body);
            batch.waits.extend(record.waits);
        }
        state.units -= taken;
        batch.has_more = !state.pending.is_empty();
        batch.succession = if batch.has_more { None } else { state.succession.take() };
        batch.is_last = state.is_closing && !batch.has_more;
        batch
    }

    /// Orders the writer to leave the file to a successor, behind the records that wait now.
    pub(super) fn order_succession(&self, order: SuccessionOrder) {
        self.lock().succession = Some(order);
        self.wakes.notify_one();
    }

    /// True while the process is not ending.
    pub(super) fn goes_on(&self) -> bool {
        !self.lock().is_closing
    }

    /// The room of a batch.
    pub(super) fn room_of(self: &Arc<Self>, batch: &AuditBatch) -> BatchRoom {
        BatchRoom { queue: Arc::clone(self), records: batch.bodies.len(), units: batch.units }
    }

    /// Waits for `pause`. False once the process ends.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let waits = |state: &mut AuditQueueState| !state.is_closing;
        let paused = self.pauses.wait_timeout_while(self.lock(), pause, waits);
        !paused.unwrap_or_else(PoisonError::into_inner).0.is_closing
    }

    /// Waits for `pause` before the next attempt at a write that failed. False once the process ends, and
    /// the time for its last attempts is over.
    pub(super) fn pause_writing(&self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        let mut state = self.lock();
        loop {
            let (now, last) = (Instant::now(), state.attempts_until);
            if last.is_some_and(|last| last <= now) {
                return false;
            }
            if until <= now {
                return true;
            }
            let left = last.map_or(until, |last| last.min(until)) - now;
            state = self.pauses.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The number of records that wait to be written.
    pub(super) fn waiting(&self) -> u64 {
        u64::try_from(self.metrics.waiting.get()).unwrap_or_default()
    }

    /// Tells the process's end that the writer has ended, and has not written so many records, besides those
    /// that it has not taken.
    pub(super) fn note_closed(&self, unwritten: u64) {
        let mut state = self.lock();
        state.is_closed = true;
        state.unwritten = unwritten + state.pending.len() as u64;
        self.closed.notify_all();
    }

    /// Lets the writer write the last records, with attempts for `attempts` at most while that fails, and
    /// waits for its end, for `limit` longer at most. Returns the number of records that were not written.
    /// A second call may only shorten the time for attempts.
    pub(super) fn close(&self, attempts: Duration, limit: Duration) -> u64 {
        let mut state = self.lock();
        let until = Instant::now() + attempts;
        state.is_closing = true;
        state.attempts_until = Some(state.attempts_until.map_or(until, |before| before.min(until)));
        self.wakes.notify_all();
        self.pauses.notify_all();
        let waits = |state: &mut AuditQueueState| !state.is_closed;
        let waited = self.closed.wait_timeout_while(state, attempts + limit, waits);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.is_closed {
            return state.unwritten;
        }
        // The disk does not answer the writer, which has none of these records written.
        self.waiting() + self.losses.unreported().records
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use keyward_telemetry::metrics::Metrics;

    const SHARES: [RoomShare; 3] = [RoomShare::Common, RoomShare::Refusals, RoomShare::Commands];

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
        drop(queue.room_of(&batch));
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
        let mut taken = UnitsByShare::default();
        loop {
            let batch = queue.take(Instant::now());
            SHARES.into_iter().zip(batch.units.0).for_each(|(share, units)| taken.add(share, units));
            drop(queue.room_of(&batch));
            if !batch.has_more {
                break;
            }
        }
        assert_eq!(taken, UnitsByShare([4, 4, 1]));
        assert!(queue.try_reserve(4 * UNIT).is_some());
        assert!(queue.try_reserve_of(RoomShare::Refusals, 4 * UNIT).is_some());
    }

    /// A lock, a watch: calls that were served without holding room while nothing is written.
    #[test]
    fn the_room_of_calls_that_held_none_is_owed_before_any_other_call_has_room() {
        let queue = queue(4 * UNIT);
        for _ in 0..6 {
            queue.place_in_debt().fill(vec![b'x'; UNIT]);
        }
        // A record without room for its last bytes is not lost either.
        assert!(queue.try_reserve(1).is_none());
        for owed in (0..6).rev() {
            let batch = queue.take(Instant::now());
            assert_eq!((batch.bodies.len(), batch.has_more), (1, owed > 0));
            drop(queue.room_of(&batch));
            assert_eq!(queue.try_reserve(1).is_some(), owed < 3, "{owed} records wait in 3 units");
        }
    }

    /// The disk was full for an hour, and nobody wrote much meanwhile.
    #[test]
    fn a_batch_has_the_records_of_half_a_minute() {
        let queue = queue(1 << 20);
        for _ in 0..4 {
            queue.try_reserve(1).expect("room").fill(b"{}".to_vec());
        }
        let began = Instant::now();
        for (record, at) in queue.lock().pending.iter_mut().zip(0..) {
            record.queued = began + BATCH_SPAN / 2 * at;
        }
        let sizes = [(); 2].map(|()| {
            let batch = queue.take(Instant::now());
            (batch.bodies.len(), batch.has_more)
        });
        assert_eq!(sizes, [(3, true), (1, false)]);
    }

    /// The next thing that happens to a queue.
    #[derive(Clone, Debug)]
    enum Step {
        Reserve(RoomShare, usize),
        Fill(usize, usize),
        Drop(usize),
        Owe(usize),
        Write,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let share =
            prop_oneof![Just(RoomShare::Common), Just(RoomShare::Refusals), Just(RoomShare::Commands)];
        let bytes = 0..20 * UNIT;
        let step = prop_oneof![
            (share, bytes.clone()).prop_map(|(share, bytes)| Step::Reserve(share, bytes)),
            (any::<usize>(), bytes.clone()).prop_map(|(at, bytes)| Step::Fill(at, bytes)),
            any::<usize>().prop_map(Step::Drop),
            bytes.prop_map(Step::Owe),
            Just(Step::Write),
        ];
        proptest::collection::vec(step, 1..200)
    }

    proptest! {
        /// Whatever happens: the room that is free, held, waiting and written is the capacity and the debt, a
        /// record weighs its bytes, a batch is a part of the capacity, and nothing is lost or left behind.
        #[test]
        fn room_is_neither_lost_nor_made(units in 1..100_usize, steps in steps()) {
            let queue = queue(units * UNIT);
            let (mut places, mut batches) = (Vec::new(), Vec::new());
            let (mut filled, mut written) = (0, 0);
            for step in steps {
                match step {
                    Step::Reserve(share, bytes) => places.extend(queue.try_reserve_of(share, bytes)),
                    Step::Fill(at, bytes) if !places.is_empty() => {
                        let place: AuditPlace = places.swap_remove(at % places.len());
                        place.fill(vec![b'x'; bytes]);
                        filled += 1;
                    }
                    Step::Drop(at) if !places.is_empty() => drop(places.swap_remove(at % places.len())),
                    Step::Owe(bytes) => {
                        queue.place_in_debt().fill(vec![b'x'; bytes]);
                        filled += 1;
                    }
                    Step::Write if !queue.lock().pending.is_empty() => {
                        let batch = queue.take(Instant::now());
                        let units = batch.units.0.iter().sum::<usize>();
                        prop_assert!(batch.bodies.len() == 1 || units <= queue.batch_units());
                        written += batch.bodies.len();
                        batches.push(batch);
                        if batches.len() > 1 {
                            drop(queue.room_of(&batches.remove(0)));
                        }
                    }
                    Step::Fill(..) | Step::Drop(_) | Step::Write => {}
                }
                let state = queue.lock();
                prop_assert!(state.pending.iter().all(|record| record.units * UNIT >= record.body.capacity()));
                let waiting = |share| {
                    let of_share = move |record: &&WaitingRecord| record.share == share;
                    state.pending.iter().filter(of_share).map(|record| record.units)
                };
                for (share, room) in SHARES.into_iter().zip(&queue.shares) {
                    let held = places.iter().filter(|place| place.share == share).map(|place| place.units);
                    let taken = batches.iter().map(|batch| batch.units.0[share as usize]);
                    let used = held.chain(waiting(share)).chain(taken).sum::<usize>();
                    let (free, debt) = (room.free.available_permits(), room.debt.load(Ordering::Relaxed));
                    prop_assert_eq!(free + used, room.capacity + debt);
                    prop_assert!(free == 0 || debt == 0);
                }
            }
            places.clear();
            batches.iter().for_each(|batch| drop(queue.room_of(batch)));
            while !queue.lock().pending.is_empty() {
                let batch = queue.take(Instant::now());
                written += batch.bodies.len();
                drop(queue.room_of(&batch));
            }
            prop_assert_eq!(filled, written);
            for room in &queue.shares {
                prop_assert_eq!(room.free.available_permits(), room.capacity);
            }
        }
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
            queue.close(Duration::ZERO, Duration::ZERO);
        });
    }

    /// The disk has room again while the process ends, or a second signal ends the attempts.
    #[test]
    fn a_write_is_attempted_again_until_the_end_allows_no_more() {
        let (queue, long) = (queue(UNIT), Duration::from_secs(24 * 3600));
        thread::scope(|scope| {
            let first = scope.spawn(|| queue.close(long, long));
            while queue.goes_on() {
                thread::yield_now();
            }
            assert!(!queue.pause(long), "a sink that fails does not wait for the end");
            assert!(queue.pause_writing(Duration::ZERO), "the file does");
            let attempts = scope.spawn(|| queue.pause_writing(long));
            queue.close(Duration::ZERO, Duration::ZERO);
            assert!(!attempts.join().unwrap());
            queue.try_reserve(1).expect("room").fill(b"{}".to_vec());
            queue.note_closed(6);
            assert_eq!(first.join().unwrap(), 7, "one that the writer has not taken");
            queue.place_in_debt().fill(b"{}".to_vec());
            assert_eq!(queue.close(long, long), 8, "a record behind the end");
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
