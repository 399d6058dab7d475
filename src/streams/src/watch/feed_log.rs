//! The messages of a feed, kept until every reader has taken them.
//!
//! Owns: the kept messages, the readers' positions and wakers, the answers to progress requests. Must not
//! know: sockets, the meaning of events.
//! Invariants: a reader gets every message from its position on, in order, and a progress answer only after
//! all messages that arrived before the answer; a slow reader delays no other reader: it falls behind, and
//! its client resumes on a stream of its own; the log holds [`Bounds::most`] messages and bytes at most, and
//! at least one message.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use super::planted_fault::PlantedFault;

/// Larger messages are kept as received. A copy of a smaller one does not keep the buffer of the connection.
const COPIED: usize = 4096;

/// How much of the past a log keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Messages and bytes kept for watches that join, after every reader has taken them.
    pub(super) past: (usize, usize),
    /// Messages and bytes kept for the slowest reader.
    pub(super) most: (usize, usize),
}

#[derive(Debug)]
struct KeptMessage {
    /// The revision of the message's last event, or of the last event before.
    last: i64,
    message: Bytes,
}

#[derive(Debug)]
struct FeedLogReader {
    /// The number of the message to be read next.
    at: u64,
    /// The highest revision of the messages before.
    read: i64,
    waker: Waker,
    /// True if the reader was told to wait and not woken since.
    waits: bool,
    /// True if the next progress answer is for the reader, and the answer after the next.
    wants: bool,
    wants_later: bool,
    /// A progress answer, and the number of the first message after it.
    progress: Option<(u64, Bytes)>,
}

/// What a reader reads.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FeedRead {
    Message(Bytes),
    /// The reader has missed messages, or the feed has ended.
    End,
}

/// The messages of a feed.
#[derive(Debug)]
pub(super) struct FeedLog {
    bounds: Bounds,
    kept: VecDeque<KeptMessage>,
    /// The number of the first kept message.
    start: u64,
    bytes: usize,
    /// Every event of this revision and later is kept, or still to come.
    first: i64,
    /// The revision of the newest event; 0 without one.
    newest: i64,
    readers: Vec<Option<FeedLogReader>>,
    /// Free places in `readers`, the lowest first; some may lie beyond the end.
    free: BinaryHeap<Reverse<usize>>,
    ended: bool,
}

impl FeedLog {
    /// An empty log of a feed that delivers every event after `revision`.
    pub(super) fn after(revision: i64, bounds: Bounds) -> Self {
        Self {
            bounds,
            kept: VecDeque::new(),
            start: 0,
            bytes: 0,
            first: revision.saturating_add(1),
            newest: 0,
            readers: Vec::new(),
            free: BinaryHeap::new(),
            ended: false,
        }
    }

    /// The first revision that a new reader can still read wholly.
    pub(super) fn first(&self) -> i64 {
        self.first
    }

    /// The revision of the newest event; 0 without one. The first events may be older than the beginning.
    pub(super) fn newest(&self) -> i64 {
        self.newest
    }

    /// Bytes of the kept messages.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn end_number(&self) -> u64 {
        self.start + self.kept.len() as u64
    }

    /// Adds a reader of all events from revision `next` on; `None` if some are no longer kept.
    pub(super) fn add_reader(&mut self, next: i64) -> Option<usize> {
        if next < self.first || self.ended {
            return None;
        }
        let mut skipped = self.kept.partition_point(|kept| kept.last < next);
        if PlantedFault::JoinsAhead.is_on() {
            skipped = self.kept.len();
        }
        let reader = FeedLogReader {
            at: self.start + skipped as u64,
            read: next.saturating_sub(1),
            waker: Waker::noop().clone(),
            waits: false,
            wants: false,
            wants_later: false,
            progress: None,
        };
        let free = self.free.pop().filter(|Reverse(free)| *free < self.readers.len());
        let at = free.map_or(self.readers.len(), |Reverse(free)| free);
        if at == self.readers.len() {
            self.free.clear();
            self.readers.push(None);
        }
        self.readers[at] = Some(reader);
        Some(at)
    }

    pub(super) fn remove_reader(&mut self, reader: usize) {
        if self.readers.get_mut(reader).and_then(Option::take).is_some() {
            self.free.push(Reverse(reader));
        }
        while self.readers.last().is_some_and(Option::is_none) {
            self.readers.pop();
        }
        if self.ended && self.is_unread() {
            self.kept.clear();
            self.bytes = 0;
        }
    }

    /// True without a reader.
    pub(super) fn is_unread(&self) -> bool {
        self.readers.is_empty()
    }

    /// The first revision that the reader has not read any event of.
    pub(super) fn next_of(&self, reader: usize) -> Option<i64> {
        let reader = self.readers.get(reader)?.as_ref()?;
        (reader.at >= self.start).then(|| reader.read.saturating_add(1))
    }

    /// The reader's next message, progress answer, or end.
    pub(super) fn poll_read(&mut self, reader: usize, cx: &Context<'_>) -> Poll<FeedRead> {
        let end = self.end_number();
        let Some(reader) = self.readers.get_mut(reader).and_then(Option::as_mut) else {
            return Poll::Ready(FeedRead::End);
        };
        if let Some((_, answer)) = reader.progress.take_if(|(after, _)| *after <= reader.at) {
            return Poll::Ready(FeedRead::Message(answer));
        }
        let Some(ahead) = reader.at.checked_sub(self.start) else { return Poll::Ready(FeedRead::End) };
        let kept = usize::try_from(ahead).ok().and_then(|ahead| self.kept.get(ahead));
        if let Some(kept) = kept {
            reader.at += 1;
            reader.read = reader.read.max(kept.last);
            return Poll::Ready(FeedRead::Message(kept.message.clone()));
        }
        debug_assert_eq!(reader.at, end, "a reader reads in order");
        if self.ended {
            return Poll::Ready(FeedRead::End);
        }
        reader.waits = true;
        if !reader.waker.will_wake(cx.waker()) {
            reader.waker = cx.waker().clone();
        }
        Poll::Pending
    }

    /// Appends a message for every reader. `last` is the revision of its last event; `None` without events.
    pub(super) fn push(&mut self, message: &Bytes, last: Option<i64>) {
        self.newest = self.newest.max(last.unwrap_or(self.newest));
        let is_small = message.len() <= COPIED;
        let message = if is_small { Bytes::copy_from_slice(message) } else { message.clone() };
        self.bytes += message.len();
        self.kept.push_back(KeptMessage { last: self.newest, message });
        let (messages, bytes) = self.bounds.past;
        // A look at all readers pays only for many messages.
        let is_turn = self.end_number().is_multiple_of(messages as u64) || self.bytes >= 2 * bytes;
        if is_turn {
            self.forget_read(self.bounds.past);
        }
        self.forget_beyond(self.bounds.most);
        self.wake();
    }

    /// Forgets messages for lack of memory: those read by all readers, or else the older half. Readers of the
    /// newer half go on.
    pub(super) fn forget_for_room(&mut self) {
        if !self.forget_read((1, 0)) {
            self.forget_beyond((self.kept.len().div_ceil(2), usize::MAX));
            self.wake();
        }
    }

    /// Ends the log: each reader reads the kept messages, and then the end.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.wake();
    }

    /// Notes a progress request of the reader. Returns true if a request must be sent now; `is_asked` is true
    /// if one is on its way.
    pub(super) fn wish_progress(&mut self, reader: usize, is_asked: bool) -> bool {
        let Some(reader) = self.readers.get_mut(reader).and_then(Option::as_mut) else { return false };
        // The answer on its way may be older than this request.
        *(if is_asked { &mut reader.wants_later } else { &mut reader.wants }) = true;
        !is_asked
    }

    /// Gives a progress answer to the readers that asked for one. Returns true if another request must be
    /// sent.
    pub(super) fn progress(&mut self, answer: &Bytes) -> bool {
        let after = if PlantedFault::HastyProgress.is_on() { 0 } else { self.end_number() };
        let mut asks_again = false;
        for reader in self.readers.iter_mut().flatten() {
            if reader.wants {
                reader.progress = Some((after, answer.clone()));
                reader.wake();
            }
            reader.wants = std::mem::take(&mut reader.wants_later);
            asks_again |= reader.wants;
        }
        asks_again
    }

    /// Forgets messages read by all readers, beyond those given. A reader that has fallen behind reads none
    /// of them. Returns true if messages were forgotten.
    fn forget_read(&mut self, (messages, bytes): (usize, usize)) -> bool {
        let before = self.start;
        let at = self.readers.iter().flatten().map(|reader| reader.at);
        let slowest = at.filter(|at| *at >= self.start).min().unwrap_or(u64::MAX);
        while self.start < slowest
            && (self.kept.len() > messages || self.bytes > bytes)
            && self.kept.len() > 1
        {
            self.forget_first();
        }
        self.start > before
    }

    fn forget_beyond(&mut self, (messages, bytes): (usize, usize)) {
        while self.kept.len() > 1 && (self.kept.len() > messages || self.bytes > bytes) {
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        if let Some(forgotten) = self.kept.pop_front() {
            self.start += 1;
            self.bytes -= forgotten.message.len();
            self.first = self.first.max(forgotten.last.saturating_add(1));
        }
    }

    fn wake(&mut self) {
        self.readers.iter_mut().flatten().for_each(FeedLogReader::wake);
    }
}

impl FeedLogReader {
    fn wake(&mut self) {
        if std::mem::take(&mut self.waits) {
            self.waker.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use proptest::prelude::*;

    use super::*;

    const SMALL: Bounds = Bounds { past: (2, 20), most: (6, 60) };

    #[derive(Default)]
    struct WakeCount(AtomicUsize);

    impl Wake for WakeCount {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn message(revision: i64) -> Bytes {
        Bytes::from(format!("event {revision}"))
    }

    fn read(log: &mut FeedLog, reader: usize) -> Option<FeedRead> {
        match log.poll_read(reader, &Context::from_waker(Waker::noop())) {
            Poll::Ready(read) => Some(read),
            Poll::Pending => None,
        }
    }

    fn event(revision: i64) -> Option<FeedRead> {
        Some(FeedRead::Message(message(revision)))
    }

    fn push(log: &mut FeedLog, revision: i64) {
        log.push(&message(revision), Some(revision));
    }

    #[test]
    fn a_reader_begins_at_its_revision_if_every_later_message_is_kept() {
        let mut log = FeedLog::after(9, Bounds { past: (9, 900), most: (9, 900) });
        // A member may send an event from before the Created.
        push(&mut log, 9);
        (10..13).for_each(|revision| push(&mut log, revision));
        assert_eq!((log.first(), log.newest()), (10, 12));
        assert_eq!(log.add_reader(9), None, "the events of revision 9 may be incomplete");
        let (old, new) = (log.add_reader(10).unwrap(), log.add_reader(13).unwrap());
        assert_eq!((log.next_of(old), log.next_of(new)), (Some(10), Some(13)));
        assert_eq!([read(&mut log, old), read(&mut log, old), read(&mut log, old)], [10, 11, 12].map(event));
        assert_eq!((read(&mut log, old), read(&mut log, new)), (None, None));
        push(&mut log, 13);
        assert_eq!((read(&mut log, old), read(&mut log, new)), (event(13), event(13)));
        assert_eq!(log.next_of(new), Some(14));
    }

    #[test]
    fn a_revision_that_continues_in_the_next_message_is_read_from_its_beginning_or_not_at_all() {
        let mut log = FeedLog::after(4, SMALL);
        for _ in 0..4 {
            push(&mut log, 5);
        }
        // Without a reader, two messages are kept: the revision's beginning is gone.
        assert_eq!(log.add_reader(5), None);
        let reader = log.add_reader(6).unwrap();
        push(&mut log, 6);
        assert_eq!((read(&mut log, reader), read(&mut log, reader)), (event(6), None));
    }

    #[test]
    fn a_slow_reader_falls_behind_and_holds_up_nobody() {
        let mut log = FeedLog::after(0, SMALL);
        let (slow, quick) = (log.add_reader(1).unwrap(), log.add_reader(1).unwrap());
        for revision in 1..20 {
            push(&mut log, revision);
            assert_eq!(read(&mut log, quick), event(revision));
            assert!(log.bytes() <= 60 && log.kept.len() <= 6);
        }
        assert_eq!((read(&mut log, slow), log.next_of(slow)), (Some(FeedRead::End), None));
        log.remove_reader(slow);
        push(&mut log, 20);
        assert!(log.kept.len() <= 4, "only the past is kept: {}", log.kept.len());
        log.forget_for_room();
        assert_eq!((log.kept.len(), log.first()), (1, 20));
        assert_eq!(read(&mut log, quick), event(20));
        log.end();
        assert_eq!((read(&mut log, quick), log.add_reader(21)), (Some(FeedRead::End), None));
    }

    #[test]
    fn a_progress_answer_comes_after_the_messages_before_it_and_to_those_who_asked() {
        let mut log = FeedLog::after(0, SMALL);
        let [one, two, three] = [(); 3].map(|()| log.add_reader(1).unwrap());
        push(&mut log, 1);
        assert!(log.wish_progress(one, false), "a request must be sent");
        assert!(!log.wish_progress(two, true), "one is on its way");
        let answer = Bytes::from_static(b"answer");
        assert!(log.progress(&answer), "the second request wants an answer of its own");
        push(&mut log, 2);
        let told = |read| Some(FeedRead::Message(read));
        assert_eq!(
            [read(&mut log, one), read(&mut log, one), read(&mut log, one)],
            [event(1), told(answer.clone()), event(2)]
        );
        assert!(!log.progress(&answer));
        for reader in [two, three] {
            assert_eq!([read(&mut log, reader), read(&mut log, reader)], [event(1), event(2)]);
        }
        assert_eq!([read(&mut log, two), read(&mut log, two)], [told(answer), None]);
        assert_eq!(read(&mut log, three), None);
    }

    #[test]
    fn a_waiting_reader_is_woken_once() {
        let mut log = FeedLog::after(0, SMALL);
        let reader = log.add_reader(1).unwrap();
        let count = Arc::<WakeCount>::default();
        let waker = Waker::from(Arc::clone(&count));
        let poll = |log: &mut FeedLog| log.poll_read(reader, &Context::from_waker(&waker)).is_ready();
        push(&mut log, 1);
        assert_eq!(count.0.load(Ordering::Relaxed), 0, "nobody waits");
        assert!(poll(&mut log) && !poll(&mut log));
        push(&mut log, 2);
        push(&mut log, 3);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(poll(&mut log) && poll(&mut log) && !poll(&mut log));
        log.end();
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_reader_that_has_fallen_behind_keeps_no_message() {
        let mut log = FeedLog::after(0, SMALL);
        let (lost, quick) = (log.add_reader(1).unwrap(), log.add_reader(1).unwrap());
        for revision in 1..40 {
            push(&mut log, revision);
            assert_eq!(read(&mut log, quick), event(revision));
        }
        assert!(log.kept.len() <= 4, "{}", log.kept.len());
        assert_eq!(read(&mut log, lost), Some(FeedRead::End));
    }

    #[test]
    fn for_room_the_slower_readers_fall_behind_first() {
        let mut log = FeedLog::after(0, SMALL);
        let [slow, middle] = [(); 2].map(|()| log.add_reader(1).unwrap());
        (1..5).for_each(|revision| push(&mut log, revision));
        assert_eq!([read(&mut log, middle), read(&mut log, middle)], [1, 2].map(event));
        log.forget_for_room();
        assert_eq!((read(&mut log, slow), read(&mut log, middle)), (Some(FeedRead::End), event(3)));
        log.remove_reader(slow);
        // Before a reader falls behind, messages go that all have read.
        log.forget_for_room();
        assert_eq!((log.kept.len(), read(&mut log, middle)), (1, event(4)));
    }

    #[test]
    fn places_of_readers_are_used_again_and_given_back() {
        let mut log = FeedLog::after(0, SMALL);
        let readers: Vec<usize> = (0..5).map(|_| log.add_reader(1).unwrap()).collect();
        assert_eq!(readers, [0, 1, 2, 3, 4]);
        log.remove_reader(1);
        log.remove_reader(1);
        log.remove_reader(4);
        assert_eq!([(); 3].map(|()| log.add_reader(1).unwrap()), [1, 4, 5]);
        [0, 1, 2, 3, 5].into_iter().for_each(|reader| log.remove_reader(reader));
        assert_eq!((log.readers.len(), log.is_unread()), (5, false));
        push(&mut log, 1);
        log.end();
        log.remove_reader(4);
        assert_eq!((log.readers.len(), log.is_unread(), log.bytes()), (0, true, 0));
    }

    #[test]
    fn a_message_keeps_no_buffer_alive_unless_it_is_large() {
        let mut log = FeedLog::after(0, SMALL);
        let buffer = Bytes::from(vec![0; 16 * COPIED]);
        log.push(&buffer.slice(..COPIED), Some(1));
        assert!(buffer.is_unique());
        log.push(&buffer, Some(2));
        assert!(!buffer.is_unique());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Push(i64),
        Add(i64),
        Remove(usize),
        Read(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..3_i64).prop_map(Step::Push),
            1 => (-6..2_i64).prop_map(Step::Add),
            1 => (0..4_usize).prop_map(Step::Remove),
            6 => (0..4_usize).prop_map(Step::Read),
        ]
    }

    proptest! {
        /// Each reader gets every message from its revision on, in order, until it has fallen behind.
        #[test]
        fn nothing_is_missed_and_nothing_doubled(steps in prop::collection::vec(step(), 0..120)) {
            let mut log = FeedLog::after(10, SMALL);
            let mut pushed: Vec<i64> = Vec::new();
            // The reader, and its messages still to come, by their place in `pushed`.
            let mut readers: Vec<(usize, usize)> = Vec::new();
            for step in steps {
                let newest = pushed.last().copied().unwrap_or(10);
                match step {
                    Step::Push(ahead) => {
                        pushed.push(newest + if pushed.is_empty() { ahead + 1 } else { ahead });
                        push(&mut log, pushed[pushed.len() - 1]);
                    }
                    Step::Add(ahead) => {
                        let next = newest + ahead;
                        if let Some(reader) = log.add_reader(next) {
                            prop_assert!(!readers.iter().any(|(known, _)| *known == reader));
                            let at = pushed.iter().position(|revision| *revision >= next);
                            readers.push((reader, at.unwrap_or(pushed.len())));
                        }
                    }
                    Step::Remove(at) if at < readers.len() => log.remove_reader(readers.swap_remove(at).0),
                    Step::Read(at) if at < readers.len() => {
                        let (reader, next) = readers[at];
                        match read(&mut log, reader) {
                            Some(FeedRead::Message(read)) => {
                                prop_assert_eq!(read, message(pushed[next]));
                                readers[at].1 += 1;
                            }
                            Some(FeedRead::End) => {
                                prop_assert!(pushed.len() - next > log.kept.len());
                                log.remove_reader(reader);
                                readers.swap_remove(at);
                            }
                            None => prop_assert_eq!(next, pushed.len()),
                        }
                    }
                    Step::Remove(_) | Step::Read(_) => {}
                }
                prop_assert_eq!(log.bytes(), log.kept.iter().map(|kept| kept.message.len()).sum::<usize>());
            }
        }
    }
}
