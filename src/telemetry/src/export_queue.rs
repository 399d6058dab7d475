//! The queue between the threads that make spans or log records and the thread that sends them to a
//! collector.
//!
//! Owns: the queue, its bound, and the count of its losses. Must not know: spans, records, the collector.
//! Invariants: queueing never waits for the collector: an item without room is dropped and counted; the items
//! queued and the items being sent together weigh `capacity` bytes at most; the end of the process waits for
//! the last items, within a limit.

use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;

/// The pause after the first item, so that a request has many items.
const GATHER: Duration = Duration::from_millis(500);
/// The sending thread stops gathering when the items weigh this part of the capacity.
const ENOUGH_PART: usize = 4;

/// A queue of items with a weight in bytes.
#[derive(Debug)]
pub struct ExportQueue<T> {
    state: Mutex<ExportState<T>>,
    /// Wakes the sending thread.
    wakes: Condvar,
    /// Wakes callers waiting for the end of the sending thread.
    ended: Condvar,
    capacity: usize,
}

#[derive(Debug)]
struct ExportState<T> {
    items: Vec<T>,
    /// The weight of the queued items, and of the items being sent.
    weight: usize,
    queued_weight: usize,
    /// True while the sending thread waits for a first item.
    is_waiting: bool,
    is_closing: bool,
    has_ended: bool,
    /// Items without room, as long as nobody counts them.
    lost: u64,
    counter: Option<Counter>,
}

/// Items taken for sending.
#[derive(Debug)]
pub struct ExportBatch<T> {
    /// The items, in the order of their arrival.
    pub items: Vec<T>,
    weight: usize,
}

/// Waits on drop until the last items are sent, within a limit.
#[must_use = "the last items are sent when it is dropped at the end of the process"]
pub struct ExportGuard<T>(pub std::sync::Arc<ExportQueue<T>>);

/// How long the end of the process waits for the last items.
const LAST: Duration = Duration::from_secs(2);

impl<T> Drop for ExportGuard<T> {
    fn drop(&mut self) {
        self.0.close(LAST);
    }
}

impl<T> ExportQueue<T> {
    /// An empty queue for `capacity` bytes.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let state = ExportState {
            items: Vec::new(),
            weight: 0,
            queued_weight: 0,
            is_waiting: false,
            is_closing: false,
            has_ended: false,
            lost: 0,
            counter: None,
        };
        Self { state: Mutex::new(state), wakes: Condvar::new(), ended: Condvar::new(), capacity }
    }

    fn lock(&self) -> MutexGuard<'_, ExportState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts lost items in `counter` from now on, the items lost before too.
    pub fn count_losses_in(&self, counter: Counter) {
        let mut state = self.lock();
        counter.inc_by(mem::take(&mut state.lost));
        state.counter = Some(counter);
    }

    /// Queues an item, or drops and counts the item if the queue has no room. Waits only for other threads
    /// queueing an item.
    pub fn push(&self, item: T, weight: usize) {
        let mut state = self.lock();
        if state.weight + weight > self.capacity || state.is_closing {
            match &state.counter {
                Some(counter) => {
                    counter.inc();
                }
                None => state.lost += 1,
            }
            return;
        }
        let enough = self.capacity / ENOUGH_PART;
        let before = state.queued_weight;
        state.items.push(item);
        state.weight += weight;
        state.queued_weight += weight;
        let is_enough = before < enough && before + weight >= enough;
        if mem::take(&mut state.is_waiting) || is_enough {
            drop(state);
            self.wakes.notify_one();
        }
    }

    /// Waits for items, gathers further items for a moment, and takes all. `None` once the queue is closed
    /// and empty. For the sending thread.
    pub fn take(&self) -> Option<ExportBatch<T>> {
        let mut state = self.lock();
        while state.items.is_empty() {
            if state.is_closing {
                return None;
            }
            state.is_waiting = true;
            state = self.wakes.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_waiting = false;
        let enough = self.capacity / ENOUGH_PART;
        let gathers = |state: &mut ExportState<T>| !state.is_closing && state.queued_weight < enough;
        let gathered = self.wakes.wait_timeout_while(state, GATHER, gathers);
        let (mut state, _) = gathered.unwrap_or_else(PoisonError::into_inner);
        let weight = mem::take(&mut state.queued_weight);
        Some(ExportBatch { items: mem::take(&mut state.items), weight })
    }

    /// Frees the room of a batch that was sent, or given up.
    pub fn release(&self, batch: ExportBatch<T>) {
        self.lock().weight -= batch.weight;
    }

    /// Waits for `pause`, or until the queue is closed. Returns false if the queue is closed.
    pub fn pause(&self, pause: Duration) -> bool {
        let waited = self.wakes.wait_timeout_while(self.lock(), pause, |state| !state.is_closing);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.is_closing
    }

    /// Notes the end of the sending thread.
    pub fn end(&self) {
        self.lock().has_ended = true;
        self.ended.notify_all();
    }

    /// Closes the queue, and waits until the last items are sent or given up, for `limit` at most.
    pub fn close(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        state.is_closing = true;
        self.wakes.notify_all();
        while !state.has_ended {
            let Some(left) = until.checked_duration_since(Instant::now()) else { return };
            (state, _) = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn items_beyond_the_bound_are_counted_and_items_being_sent_keep_their_room() {
        let queue = ExportQueue::new(10);
        (0..4).for_each(|item| queue.push(item, 4));
        let counter = Counter::default();
        queue.count_losses_in(counter.clone());
        assert_eq!(counter.get(), 2, "items lost before the counter are counted");
        let batch = queue.take().unwrap();
        assert_eq!(batch.items, [0, 1]);
        queue.push(4, 4);
        assert_eq!(counter.get(), 3, "the batch is still in memory");
        queue.release(batch);
        queue.push(5, 4);
        assert_eq!((queue.take().unwrap().items, counter.get()), (vec![5], 3));
    }

    #[test]
    fn the_end_waits_for_the_sending_thread_and_not_for_ever() {
        let queue = Arc::new(ExportQueue::new(10));
        queue.push(1, 1);
        queue.close(Duration::from_millis(20));
        assert_eq!(queue.take().map(|batch| batch.items), Some(vec![1]), "nobody has sent it");
        let sender = Arc::clone(&queue);
        let sending = thread::spawn(move || {
            assert!(!sender.pause(Duration::from_secs(3600)), "a pause ends with the queue");
            assert!(sender.take().is_none());
            sender.end();
        });
        queue.close(Duration::from_secs(3600));
        sending.join().unwrap();
    }
}
