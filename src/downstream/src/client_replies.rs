//! Replies of a stream terminated by Keyward.
//!
//! Owns: the queue from the stream's work to the response body, and the work itself, unless it runs in a task
//! apart. Must not know the messages' meaning.
//! Invariants: the queue is short, so a client that does not read delays only the client's own stream. The
//! work is dropped or notified when the client disconnects. An empty queue holds no buffer: most streams are
//! idle for days. All senders of a queue belong to a single work, so the queue keeps one waker for all
//! senders.
//!
//! The task that sends the replies polls the work too: a message goes from the member to the client in one
//! turn of one task, while its memory is in the processor's cache.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::future::LocalBoxFuture;
use hyper::rt::Executor as _;

use keyward_base::tasks::{Guarded, LocalExecutor};
use keyward_etcd::refusal::AnswerEnd;
use keyward_etcd::rpc::frame::{PREFIX, write_prefix};

/// Bytes queued between a stream's work and HTTP/2's own buffer, beyond which the work waits and stops
/// reading upstream: one HTTP/2 frame of the default size, so that HTTP/2 takes the messages of a burst as
/// one frame. Each leaves in a frame of its own ([`message_frames`](super::message_frames)).
const WAITING_BYTES: usize = 16 * 1024;

/// Messages queued, beyond which the work waits: a bound on the entries of tiny messages.
const WAITING_MESSAGES: usize = 64;

/// Messages up to this size are given to HTTP/2 together: copying costs less than a frame of HTTP/2.
const JOINED: usize = 4 * 1024;

/// An item of the reply stream.
#[derive(Debug)]
pub enum ClientReply {
    /// One or more framed messages, and a guard kept until HTTP/2 has taken the bytes.
    Messages(Bytes, TakenGuard),
    /// The end of the stream, with the final status: a member's, or a refusal of Keyward's.
    End(AnswerEnd),
}

/// A guard; dropping the guard signals that the message was taken.
pub type TakenGuard = Option<Box<dyn Any>>;

/// The client has disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client is gone")]
pub struct ClientGone;

/// The replies on their way from the stream's work to the response body.
#[derive(Debug, Default)]
struct ReplyQueue {
    /// Small messages, framed, in order.
    joined: BytesMut,
    /// Large messages, and all messages behind a large one. All follow `joined`.
    apart: VecDeque<(Bytes, TakenGuard)>,
    bytes: usize,
    messages: usize,
    end: Option<Box<AnswerEnd>>,
    /// The stream's work, once the work waits for the queue.
    task: Option<Waker>,
    task_waits_for: QueueWait,
    /// The response body, once the body waits for a reply.
    body: Option<Waker>,
    body_waits: bool,
    senders: usize,
    is_client_gone: bool,
}

/// The state of the queue that wakes the stream's work, besides the client's departure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum QueueWait {
    #[default]
    Nothing,
    Room,
    Empty,
}

/// The sending side of the stream.
#[derive(Debug)]
pub struct ReplySender(Rc<RefCell<ReplyQueue>>);

/// The receiving side of the stream; dropped when the client disconnects.
pub struct ReplyReceiver {
    queue: Rc<RefCell<ReplyQueue>>,
    /// The stream's work; `None` once the work has ended, or runs in a task apart.
    work: Option<Guarded>,
}

impl ReplyQueue {
    fn has_room(&self) -> bool {
        self.bytes < WAITING_BYTES && self.messages < WAITING_MESSAGES
    }

    fn count(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.messages += 1;
        self.wake_body();
    }

    fn wake_body(&mut self) {
        if std::mem::take(&mut self.body_waits)
            && let Some(body) = &self.body
        {
            body.wake_by_ref();
        }
    }

    fn wake_task(&self) {
        if let Some(task) = &self.task {
            task.wake_by_ref();
        }
    }

    fn is_over(&self, wait: QueueWait) -> bool {
        match wait {
            QueueWait::Nothing => false,
            QueueWait::Room => self.has_room(),
            QueueWait::Empty => self.messages == 0,
        }
    }

    /// Wakes the task if its wait is over.
    fn tell_task(&mut self) {
        if self.is_over(self.task_waits_for) {
            self.task_waits_for = QueueWait::Nothing;
            self.wake_task();
        }
    }

    fn poll_task(&mut self, cx: &Context<'_>, wait: QueueWait) -> Poll<Result<(), ClientGone>> {
        if self.is_client_gone {
            return Poll::Ready(Err(ClientGone));
        }
        if self.is_over(wait) {
            return Poll::Ready(Ok(()));
        }
        register(&mut self.task, cx);
        self.task_waits_for = wait;
        Poll::Pending
    }

    /// The next bytes, or the end.
    fn take(&mut self) -> Option<ClientReply> {
        let taken = if !self.joined.is_empty() {
            // Given away whole: an idle stream keeps no buffer.
            let joined = std::mem::take(&mut self.joined).freeze();
            self.messages = self.apart.len();
            Some((joined, None))
        } else {
            self.apart.pop_front().inspect(|_| self.messages -= 1)
        };
        if self.apart.is_empty() {
            self.apart = VecDeque::new();
        }
        if let Some((framed, keep)) = taken {
            self.bytes -= framed.len();
            self.tell_task();
            return Some(ClientReply::Messages(framed, keep));
        }
        self.end.take().map(|end| ClientReply::End(*end))
    }
}

fn register(slot: &mut Option<Waker>, cx: &Context<'_>) {
    match slot {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *slot = Some(cx.waker().clone()),
    }
}

impl ReplySender {
    /// A sender and a receiver.
    #[must_use]
    pub fn channel() -> (Self, ReplyReceiver) {
        let queue = Rc::new(RefCell::new(ReplyQueue { senders: 1, ..ReplyQueue::default() }));
        (Self(Rc::clone(&queue)), ReplyReceiver { queue, work: None })
    }

    /// Sends a framed message, waiting for queue space. The message is not sent if the future is dropped
    /// first.
    ///
    /// # Errors
    /// [`ClientGone`].
    pub async fn say(&self, framed: Bytes) -> Result<(), ClientGone> {
        poll_fn(|cx| self.poll_room(cx)).await?;
        self.send(framed, None);
        Ok(())
    }

    /// Sends a framed message at once, past the queue's limit if need be.
    pub fn send(&self, framed: Bytes, keep: TakenGuard) {
        let mut queue = self.0.borrow_mut();
        if queue.is_client_gone {
            return;
        }
        let bytes = framed.len();
        if keep.is_none() && bytes <= JOINED && queue.apart.is_empty() {
            queue.joined.extend_from_slice(&framed);
        } else {
            queue.apart.push_back((framed, keep));
        }
        queue.count(bytes);
    }

    /// Sends a message of about `expected` bytes, written by `write` right into the queue. Nothing is sent if
    /// `write` returns `None`, or is not called because a large message is in the queue.
    pub fn send_written<T>(
        &self,
        expected: usize,
        write: impl FnOnce(&mut BytesMut) -> Option<T>,
    ) -> Option<T> {
        let mut queue = self.0.borrow_mut();
        if !queue.apart.is_empty() || queue.is_client_gone {
            return None;
        }
        let before = queue.joined.len();
        queue.joined.reserve(PREFIX + expected);
        queue.joined.put_bytes(0, PREFIX);
        let Some(written) = write(&mut queue.joined) else {
            queue.joined.truncate(before);
            return None;
        };
        write_prefix(&mut queue.joined[before..]);
        let bytes = queue.joined.len() - before;
        queue.count(bytes);
        Some(written)
    }

    /// True while the queue is short enough for further messages.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.0.borrow().has_room()
    }

    /// Ready once the queue is short enough for further messages. Cancel-safe.
    ///
    /// # Errors
    /// [`ClientGone`].
    pub fn poll_room(&self, cx: &Context<'_>) -> Poll<Result<(), ClientGone>> {
        self.0.borrow_mut().poll_task(cx, QueueWait::Room)
    }

    /// True if a sent message has not been taken yet.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.0.borrow().messages > 0
    }

    /// Ready once all sent messages have been taken. Cancel-safe.
    ///
    /// # Errors
    /// [`ClientGone`].
    pub fn poll_all_taken(&self, cx: &Context<'_>) -> Poll<Result<(), ClientGone>> {
        self.0.borrow_mut().poll_task(cx, QueueWait::Empty)
    }

    /// Sends the end of the stream, behind all messages. Later messages and ends are not sent.
    pub fn end(&self, end: impl Into<AnswerEnd>) {
        let mut queue = self.0.borrow_mut();
        queue.end.get_or_insert_with(|| Box::new(end.into()));
        queue.wake_body();
    }

    /// Ready once the client has disconnected. Cancel-safe.
    pub fn poll_gone(&self, cx: &Context<'_>) -> Poll<()> {
        let mut queue = self.0.borrow_mut();
        if queue.is_client_gone {
            return Poll::Ready(());
        }
        // A wait for the queue goes on beside this wait.
        register(&mut queue.task, cx);
        Poll::Pending
    }

    /// Waits until the client disconnects. Cancel-safe.
    pub async fn gone(&self) {
        poll_fn(|cx| self.poll_gone(cx)).await;
    }
}

impl Clone for ReplySender {
    fn clone(&self) -> Self {
        self.0.borrow_mut().senders += 1;
        Self(Rc::clone(&self.0))
    }
}

impl Drop for ReplySender {
    fn drop(&mut self) {
        let mut queue = self.0.borrow_mut();
        queue.senders -= 1;
        if queue.senders == 0 {
            queue.wake_body();
        }
    }
}

impl ReplyReceiver {
    /// Gives the receiver the stream's work, which sends the replies. `name` appears in the log upon a panic,
    /// which ends the stream like a dropped sender.
    #[must_use]
    pub fn with_work(mut self, name: &'static str, work: LocalBoxFuture<'static, ()>) -> Self {
        self.work = Some(Guarded::new(name, work));
        self
    }

    /// Moves the work into a task of its own: for a reader that polls the replies only while its client
    /// reads.
    pub fn run_apart(&mut self) {
        if let Some(work) = self.work.take() {
            LocalExecutor.execute(work);
        }
    }

    /// Lets the work go on. To be called once in each turn of the task, before replies are taken, even if the
    /// client leaves replies untaken: the work may hold a place in a queue of other streams. The task of `cx`
    /// is woken for further work.
    pub fn poll_work(&mut self, cx: &mut Context<'_>) {
        if let Some(work) = &mut self.work {
            // The replies sent now are taken in the same turn, or once the client has room.
            self.queue.borrow_mut().body_waits = false;
            if Pin::new(work).poll(cx).is_ready() {
                self.work = None;
            }
        }
    }

    /// The next item; `None` once all senders are gone. Does not poll the work. Cancel-safe.
    pub fn poll_next(&mut self, cx: &Context<'_>) -> Poll<Option<ClientReply>> {
        let mut queue = self.queue.borrow_mut();
        queue.body_waits = false;
        if let Some(reply) = queue.take() {
            return Poll::Ready(Some(reply));
        }
        if queue.senders == 0 {
            return Poll::Ready(None);
        }
        register(&mut queue.body, cx);
        queue.body_waits = true;
        Poll::Pending
    }
}

impl Drop for ReplyReceiver {
    fn drop(&mut self) {
        let mut queue = self.queue.borrow_mut();
        queue.is_client_gone = true;
        let dropped = (std::mem::take(&mut queue.joined), std::mem::take(&mut queue.apart));
        (queue.bytes, queue.messages) = (0, 0);
        queue.wake_task();
        // Guards run code of their own when dropped.
        drop(queue);
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;
    use keyward_etcd::refusal::Status;
    use keyward_etcd::rpc::frame::{FrameReader, encode};

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Wakes {
        fn new() -> (Arc<Self>, Waker) {
            let wakes = Arc::<Self>::default();
            (Arc::clone(&wakes), Waker::from(wakes))
        }

        fn count(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    fn taken(receiver: &mut ReplyReceiver, cx: &Context<'_>) -> Vec<Bytes> {
        let mut reader = FrameReader::new(1 << 20);
        while let Poll::Ready(Some(ClientReply::Messages(framed, _))) = receiver.poll_next(cx) {
            reader.push(framed);
        }
        reader.map(|message| message.expect("a frame")).collect()
    }

    #[test]
    fn messages_come_out_in_order_whichever_way_they_went_in() {
        let (_, waker) = Wakes::new();
        let cx = Context::from_waker(&waker);
        let (sender, mut receiver) = ReplySender::channel();
        let large = Bytes::from(vec![7; 2 * JOINED]);
        sender.send(encode(b"one"), None);
        let written = sender.send_written(3, |to| {
            to.put_slice(b"two");
            Some(2)
        });
        assert_eq!(written, Some(2));
        let unsent: Option<()> = sender.send_written(4, |to| {
            to.put_slice(b"none");
            None
        });
        assert_eq!(unsent, None);
        sender.send(encode(&large), None);
        assert_eq!(sender.send_written(1, |_| Some(())), None, "a large message is before");
        sender.send(encode(b"three"), Some(Box::new(())));
        sender.send(encode(b"four"), None);
        let all = taken(&mut receiver, &cx);
        assert_eq!(all, [Bytes::from_static(b"one"), "two".into(), large, "three".into(), "four".into()]);
        assert!(!sender.is_behind() && sender.has_room());
        assert_eq!(sender.0.borrow().joined.capacity() + sender.0.borrow().apart.capacity(), 0);
    }

    #[test]
    fn the_task_waits_for_room_and_the_body_for_messages() {
        let ((task, task_waker), (body, body_waker)) = (Wakes::new(), Wakes::new());
        let (task_cx, body_cx) = (Context::from_waker(&task_waker), Context::from_waker(&body_waker));
        let (sender, mut receiver) = ReplySender::channel();
        assert!(receiver.poll_next(&body_cx).is_pending());
        let message = encode(&[0; JOINED / 2]);
        while sender.poll_room(&task_cx).is_ready() {
            sender.send(message.clone(), None);
        }
        assert_eq!((task.count(), body.count()), (0, 1), "one wakeup for all messages");
        assert!(sender.0.borrow().bytes < WAITING_BYTES + message.len(), "the queue is short");
        assert!(receiver.poll_next(&body_cx).is_ready());
        assert_eq!((task.count(), sender.has_room()), (1, true));
        for _ in 0..WAITING_MESSAGES {
            assert!(sender.poll_room(&task_cx).is_ready());
            sender.send(encode(b""), None);
        }
        assert!(sender.poll_room(&task_cx).is_pending(), "empty messages are bounded too");
        assert!(sender.poll_all_taken(&task_cx).is_pending());
        assert!(receiver.poll_next(&body_cx).is_ready());
        assert_eq!(task.count(), 2);
        assert_eq!(sender.poll_all_taken(&task_cx), Poll::Ready(Ok(())));
    }

    #[test]
    fn each_side_hears_of_the_others_end() {
        let ((task, task_waker), (body, body_waker)) = (Wakes::new(), Wakes::new());
        let (task_cx, body_cx) = (Context::from_waker(&task_waker), Context::from_waker(&body_waker));
        let (sender, mut receiver) = ReplySender::channel();
        assert!(receiver.poll_next(&body_cx).is_pending());
        let twin = sender.clone();
        drop(sender);
        assert_eq!(body.count(), 0);
        twin.send(encode(b"last"), None);
        twin.end(Status::OK);
        assert!(matches!(receiver.poll_next(&body_cx), Poll::Ready(Some(ClientReply::Messages(..)))));
        assert!(matches!(receiver.poll_next(&body_cx), Poll::Ready(Some(ClientReply::End(_)))));
        assert!(receiver.poll_next(&body_cx).is_pending());
        drop(twin);
        assert_eq!(body.count(), 2);
        assert!(matches!(receiver.poll_next(&body_cx), Poll::Ready(None)));

        let (sender, receiver) = ReplySender::channel();
        assert!(sender.poll_gone(&task_cx).is_pending());
        let guard = Rc::new(());
        sender.send(encode(b"unread"), Some(Box::new(Rc::clone(&guard))));
        drop(receiver);
        assert_eq!((task.count(), Rc::strong_count(&guard)), (1, 1), "what is unread is given back");
        assert!(sender.poll_gone(&task_cx).is_ready());
        assert_eq!(sender.poll_room(&task_cx), Poll::Ready(Err(ClientGone)));
        sender.send(encode(b"late"), None);
        assert!(!sender.is_behind());
    }

    #[test]
    fn the_work_sends_replies_of_the_same_turn() {
        let (wakes, waker) = Wakes::new();
        let cx = &mut Context::from_waker(&waker);
        let (sender, receiver) = ReplySender::channel();
        let steps = Rc::new(RefCell::new((0, None::<Waker>)));
        let of_work = Rc::clone(&steps);
        let work = poll_fn(move |cx| {
            let mut steps = of_work.borrow_mut();
            *steps = (steps.0 + 1, Some(cx.waker().clone()));
            sender.send(encode(&[steps.0]), None);
            if steps.0 < 3 { Poll::Pending } else { Poll::Ready(()) }
        });
        let mut receiver = receiver.with_work("test", Box::pin(work));
        let wake = || steps.borrow().1.clone().expect("polled").wake();
        assert!(receiver.poll_next(cx).is_pending(), "the work has not begun");
        receiver.poll_work(cx);
        assert_eq!(taken(&mut receiver, cx), [&[1_u8][..]]);
        assert_eq!(wakes.count(), 0, "a reply of the same turn needs no wakeup");
        assert!(receiver.poll_next(cx).is_pending());
        assert_eq!(steps.borrow().0, 1);
        wake();
        assert_eq!(wakes.count(), 1);
        receiver.poll_work(cx);
        receiver.poll_work(cx);
        assert_eq!(steps.borrow().0, 3, "the work goes on while replies are untaken");
        assert_eq!(taken(&mut receiver, cx), [&[2_u8][..], &[3]]);
        assert!(matches!(receiver.poll_next(cx), Poll::Ready(None)), "an ended work has no sender");
    }

    #[test]
    fn a_panic_of_the_work_ends_the_stream_without_a_status() {
        let cx = &mut Context::from_waker(Waker::noop());
        let (sender, receiver) = ReplySender::channel();
        let mut is_first = true;
        let work = poll_fn(move |_| {
            sender.send(encode(b"told"), None);
            assert!(std::mem::take(&mut is_first), "a fault of the test");
            Poll::Pending
        });
        let mut receiver = receiver.with_work("test", Box::pin(work));
        for _ in 0..2 {
            receiver.poll_work(cx);
            assert_eq!(taken(&mut receiver, cx), [&b"told"[..]]);
        }
        assert!(matches!(receiver.poll_next(cx), Poll::Ready(None)));
    }

    #[test]
    fn the_work_is_dropped_with_the_replies() {
        let cx = &mut Context::from_waker(Waker::noop());
        let (sender, receiver) = ReplySender::channel();
        let held = Rc::new(());
        let (guard, of_work) = (Rc::clone(&held), sender.clone());
        let work = async move {
            of_work.gone().await;
            drop(guard);
        };
        let mut receiver = receiver.with_work("test", Box::pin(work));
        receiver.poll_work(cx);
        assert_eq!(Rc::strong_count(&held), 2);
        drop(receiver);
        assert_eq!(Rc::strong_count(&held), 1);
        assert!(sender.poll_gone(cx).is_ready());
    }

    #[tokio::test(flavor = "current_thread")]
    async fn the_work_can_run_in_a_task_apart() {
        let replies = async {
            let (sender, receiver) = ReplySender::channel();
            let work = async move { while sender.say(encode(&[7; JOINED])).await.is_ok() {} };
            let mut receiver = receiver.with_work("test", Box::pin(work));
            receiver.run_apart();
            tokio::task::yield_now().await;
            assert!(receiver.queue.borrow().bytes >= WAITING_BYTES, "nobody has polled the replies");
            let first = poll_fn(|cx| receiver.poll_next(cx)).await;
            assert!(matches!(first, Some(ClientReply::Messages(..))));
        };
        tokio::task::LocalSet::new().run_until(replies).await;
    }
}
