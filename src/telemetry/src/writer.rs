//! The log writer: records are queued in memory, and a separate thread writes the queue to stderr.
//!
//! Owns: the queue, its bound, the writer thread, and counting lost records. Must not know: a record's
//! contents.
//! Invariants: queueing a record never waits for stderr's reader: if the queue is full, the record is dropped
//! and counted; the queue holds at most `log.buffer` bytes; records are written whole and in order, many per
//! system call; losses are reported in the log once the writer can write again.

use std::io::{self, Write};
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The pause between two writes, so that a write takes many records. A record after a pause is written at
/// once.
const GATHER: Duration = Duration::from_millis(20);
/// The writer stops gathering when the queue holds this part of its capacity: 256 KiB by default. Waking the
/// writer earlier costs the logging thread a system call.
const ENOUGH_PART: usize = 16;
/// A buffer grown beyond this size is freed after writing.
const KEPT: usize = 512 * 1024;
/// The least time between two reports of losses.
const TELL: Duration = Duration::from_secs(1);
/// How long the process waits at its end for stderr to take the queued records.
const LAST: Duration = Duration::from_secs(1);

/// Records lost by this process, by reason. A process has a single log, so a single count suffices.
pub static LOSSES: Losses = Losses { queue_full: AtomicU64::new(0), write_failed: AtomicU64::new(0) };

/// Counts of lost records.
#[derive(Debug)]
pub struct Losses {
    queue_full: AtomicU64,
    write_failed: AtomicU64,
}

impl Losses {
    /// Records dropped because the queue was full: stderr is read too slowly or not at all.
    #[must_use]
    pub fn queue_full(&self) -> u64 {
        self.queue_full.load(Ordering::Relaxed)
    }

    /// Records refused by stderr: stderr is closed, or the disk is full.
    #[must_use]
    pub fn write_failed(&self) -> u64 {
        self.write_failed.load(Ordering::Relaxed)
    }

    fn total(&self) -> u64 {
        self.queue_full() + self.write_failed()
    }
}

/// The queue between the logging threads and the writer thread.
#[derive(Debug)]
pub struct LogQueue {
    state: Mutex<LogQueueState>,
    /// Wakes the writer thread.
    wakes: Condvar,
    /// Wakes callers waiting for an empty queue.
    drained: Condvar,
    /// Bytes queued at most.
    capacity: usize,
    losses: &'static Losses,
}

#[derive(Debug, Default)]
struct LogQueueState {
    pending: Vec<u8>,
    /// True while the writer holds records not yet written.
    is_writing: bool,
    /// True while the writer waits for a first record and must be woken.
    is_waiting: bool,
    /// True when the process is ending: the writer stops gathering.
    is_closing: bool,
}

/// On drop, waits until the queued records are written, for a second at most.
#[derive(Debug)]
#[must_use = "the last records are written when it is dropped at the end of the process"]
pub struct FlushGuard(Option<Arc<LogQueue>>);

impl FlushGuard {
    pub(super) fn nothing() -> Self {
        Self(None)
    }
}

impl Drop for FlushGuard {
    fn drop(&mut self) {
        if let Some(queue) = &self.0 {
            queue.flush(LAST);
        }
    }
}

impl LogQueue {
    /// Starts the thread writing to `sink`, with at most `capacity` queued bytes. The thread is never joined,
    /// because a write may hang for ever.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn start(sink: impl Write + Send + 'static, capacity: usize) -> io::Result<(Arc<Self>, FlushGuard)> {
        Self::counting(sink, capacity, &LOSSES)
    }

    fn counting(
        sink: impl Write + Send + 'static,
        capacity: usize,
        losses: &'static Losses,
    ) -> io::Result<(Arc<Self>, FlushGuard)> {
        let queue = Arc::new(Self {
            state: Mutex::default(),
            wakes: Condvar::new(),
            drained: Condvar::new(),
            capacity,
            losses,
        });
        let writer = LogWriter { queue: Arc::clone(&queue), sink, told: 0, told_at: None, is_torn: false };
        thread::Builder::new().name("log".into()).spawn(move || writer.run())?;
        Ok((Arc::clone(&queue), FlushGuard(Some(queue))))
    }

    fn lock(&self) -> MutexGuard<'_, LogQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queued bytes at which the writer stops gathering.
    fn enough(&self) -> usize {
        self.capacity / ENOUGH_PART
    }

    /// Queues a record, or drops and counts the record if the queue is full. Waits only for other threads
    /// copying a record.
    fn push(&self, record: &[u8]) {
        let mut state = self.lock();
        if state.pending.len() + record.len() > self.capacity {
            self.losses.queue_full.fetch_add(1, Ordering::Relaxed);
            return;
        }
        state.pending.extend_from_slice(record);
        let enough = self.enough();
        let is_enough = state.pending.len() >= enough && state.pending.len() - record.len() < enough;
        if mem::take(&mut state.is_waiting) || is_enough {
            drop(state);
            self.wakes.notify_one();
        }
    }

    /// Waits for the first record, then takes all queued records.
    fn take(&self, batch: &mut Vec<u8>) {
        let mut state = self.lock();
        state.is_writing = false;
        while state.pending.is_empty() {
            self.drained.notify_all();
            state.is_waiting = true;
            state = self.wakes.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_waiting = false;
        state.is_writing = true;
        mem::swap(&mut state.pending, batch);
    }

    /// Waits for more records, for `GATHER` at most.
    fn gather(&self) {
        let state = self.lock();
        let enough = self.enough();
        let waits = |state: &mut LogQueueState| !state.is_closing && state.pending.len() < enough;
        drop(self.wakes.wait_timeout_while(state, GATHER, waits));
    }

    /// Waits until all queued records are written, for `limit` at most.
    fn flush(&self, limit: Duration) {
        let mut state = self.lock();
        state.is_closing = true;
        self.wakes.notify_all();
        let waits = |state: &mut LogQueueState| state.is_writing || !state.pending.is_empty();
        drop(self.drained.wait_timeout_while(state, limit, waits));
    }
}

/// `tracing_subscriber` writes each record with a single call.
impl Write for &LogQueue {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        self.push(record);
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The state of the writer thread.
struct LogWriter<W> {
    queue: Arc<LogQueue>,
    sink: W,
    /// Losses already reported in the log.
    told: u64,
    told_at: Option<Instant>,
    /// True if the last write ended within a record.
    is_torn: bool,
}

impl<W: Write> LogWriter<W> {
    fn run(mut self) {
        let mut batch = Vec::new();
        let mut is_writable = true;
        loop {
            self.queue.take(&mut batch);
            if is_writable {
                // Report now: the queue has room again.
                self.tell_losses();
            }
            if mem::take(&mut self.is_torn) {
                batch.insert(0, b'\n');
            }
            is_writable = self.write(&batch);
            batch.clear();
            if batch.capacity() > KEPT {
                batch = Vec::new();
            }
            self.queue.gather();
        }
    }

    /// Logs the number of records lost since the last report. The report passes through the queue like any
    /// record.
    fn tell_losses(&mut self) {
        let total = self.queue.losses.total();
        if total == self.told || self.told_at.is_some_and(|at| at.elapsed() < TELL) {
            return;
        }
        let records = total - mem::replace(&mut self.told, total);
        self.told_at = Some(Instant::now());
        tracing::warn!(records, "log records were lost: stderr was not read in time, or did not take them");
    }

    /// Writes the whole batch. Returns false if the sink fails: the rest is lost and counted.
    fn write(&mut self, batch: &[u8]) -> bool {
        let mut rest = batch;
        while !rest.is_empty() {
            match self.sink.write(rest) {
                Ok(0) => return self.failed(batch, rest),
                Ok(written) => rest = rest.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A full pipe made non-blocking by another process.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.pause(),
                Err(_) => return self.failed(batch, rest),
            }
        }
        true
    }

    fn failed(&mut self, batch: &[u8], rest: &[u8]) -> bool {
        let records = rest.iter().filter(|byte| **byte == b'\n').count();
        self.queue.losses.write_failed.fetch_add(records as u64, Ordering::Relaxed);
        let written = batch.get(..batch.len() - rest.len()).unwrap_or_default();
        self.is_torn = written.last().is_some_and(|last| *last != b'\n');
        false
    }

    fn pause(&self) {
        let state = self.queue.lock();
        drop(self.queue.wakes.wait_timeout_while(state, GATHER, |_| true));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const CAPACITY: usize = 1024 * 1024;

    /// A sink with writes controlled by the test: blocking, or failing.
    struct Gate {
        entered: mpsc::Sender<Vec<u8>>,
        results: mpsc::Receiver<io::Result<usize>>,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.entered.send(bytes.to_vec()).expect("the test listens");
            self.results.recv().unwrap_or(Ok(bytes.len())).map(|most| most.min(bytes.len()))
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    type Gated = (Arc<LogQueue>, mpsc::Receiver<Vec<u8>>, mpsc::Sender<io::Result<usize>>);

    fn gated() -> Gated {
        let losses = Losses { queue_full: AtomicU64::new(0), write_failed: AtomicU64::new(0) };
        let (entered, writes) = mpsc::channel();
        let (allow, results) = mpsc::channel();
        let sink = Gate { entered, results };
        let (queue, guard) =
            LogQueue::counting(sink, CAPACITY, Box::leak(Box::new(losses))).expect("a thread");
        mem::forget(guard);
        (queue, writes, allow)
    }

    fn log(queue: &LogQueue, record: &str) {
        let mut writer = queue;
        writer.write_all(record.as_bytes()).expect("it never fails");
    }

    #[test]
    fn while_the_sink_hangs_records_wait_and_go_out_in_one_write() {
        let (queue, writes, allow) = gated();
        log(&queue, "first\n");
        assert_eq!(writes.recv().unwrap(), b"first\n");
        // The writer is blocked in its write now.
        for number in 0..100 {
            log(&queue, &format!("{number}\n"));
        }
        allow.send(Ok(usize::MAX)).unwrap();
        let expected: String = (0..100).map(|number| format!("{number}\n")).collect();
        assert_eq!(String::from_utf8(writes.recv().unwrap()).unwrap(), expected);
        assert_eq!(queue.losses.total(), 0);
    }

    #[test]
    fn beyond_the_bound_records_are_dropped_whole_and_counted() {
        let (queue, writes, allow) = gated();
        let record = "x".repeat(1023) + "\n";
        log(&queue, &record);
        writes.recv().unwrap();
        let fitting = CAPACITY / record.len();
        for _ in 0..fitting + 7 {
            log(&queue, &record);
        }
        assert_eq!((queue.losses.queue_full(), queue.losses.write_failed()), (7, 0));
        allow.send(Ok(usize::MAX)).unwrap();
        assert_eq!(writes.recv().unwrap().len(), fitting * record.len());
    }

    #[test]
    fn a_sink_that_fails_loses_what_it_did_not_take_and_the_next_record_begins_a_line() {
        let (queue, writes, allow) = gated();
        log(&queue, "a\n");
        writes.recv().unwrap();
        log(&queue, "bcd\nefg\n");
        allow.send(Ok(usize::MAX)).unwrap();
        assert_eq!(writes.recv().unwrap(), b"bcd\nefg\n");
        allow.send(Ok(2)).unwrap();
        assert_eq!(writes.recv().unwrap(), b"d\nefg\n");
        allow.send(Err(io::ErrorKind::BrokenPipe.into())).unwrap();
        log(&queue, "h\n");
        assert_eq!(writes.recv().unwrap(), b"\nh\n");
        assert_eq!((queue.losses.queue_full(), queue.losses.write_failed()), (0, 2));
    }

    #[test]
    fn a_full_non_blocking_pipe_is_tried_again() {
        let (queue, writes, allow) = gated();
        log(&queue, "a\n");
        writes.recv().unwrap();
        allow.send(Err(io::ErrorKind::WouldBlock.into())).unwrap();
        assert_eq!(writes.recv().unwrap(), b"a\n");
        assert_eq!(queue.losses.total(), 0);
    }

    #[test]
    fn a_flush_waits_for_the_writer_and_not_for_ever() {
        let (queue, writes, allow) = gated();
        log(&queue, "a\n");
        writes.recv().unwrap();
        queue.flush(Duration::from_millis(50));
        assert!(queue.lock().is_writing, "the sink hangs, and the flush has come back");
        // From here on, every write succeeds at once.
        drop(allow);
        log(&queue, "b\n");
        queue.flush(Duration::from_secs(3600));
        assert_eq!(writes.try_iter().collect::<Vec<_>>(), [b"b\n"]);
    }
}
