//! The messages on their way to a member on a stream, from the stream's owner to the request's body.
//!
//! Owns: the queue between the two, which may be on different threads: a user's certificate's connections are
//! shared by all shards. Must not know the messages' meaning.
//! Invariants: messages go out in the order given; dropping the outbox half-closes the stream after the
//! queued messages; an empty queue holds no buffer, since most streams send one message and then live for
//! days. The queue has no limit of its own: the owners send only as many requests as may be unanswered.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

/// The owner's side.
#[derive(Debug)]
pub struct Outbox(Arc<Mutex<OutboxState>>);

/// The side of the request's body.
#[derive(Debug)]
pub struct OutboxMessages(Arc<Mutex<OutboxState>>);

#[derive(Debug, Default)]
struct OutboxState {
    messages: VecDeque<Bytes>,
    /// The body, while it waits for a message.
    body: Option<Waker>,
    /// The owner or the body is gone.
    is_closed: bool,
}

fn lock(state: &Mutex<OutboxState>) -> MutexGuard<'_, OutboxState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Outbox {
    /// An empty outbox, and its messages for the request's body.
    #[must_use]
    pub fn new() -> (Self, OutboxMessages) {
        let state = Arc::<Mutex<OutboxState>>::default();
        (Self(Arc::clone(&state)), OutboxMessages(state))
    }

    /// Queues a framed message. The message is dropped if the body is gone: the stream's end follows.
    pub fn send(&self, framed: Bytes) {
        let mut state = lock(&self.0);
        if !state.is_closed {
            state.messages.push_back(framed);
            let body = state.body.take();
            drop(state);
            body.into_iter().for_each(Waker::wake);
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        let mut state = lock(&self.0);
        state.is_closed = true;
        let body = state.body.take();
        drop(state);
        body.into_iter().for_each(Waker::wake);
    }
}

impl OutboxMessages {
    /// The next framed message; `None` after the last one. Cancel-safe.
    pub fn poll_next(&mut self, cx: &Context<'_>) -> Poll<Option<Bytes>> {
        let mut state = lock(&self.0);
        if let Some(message) = state.messages.pop_front() {
            if state.messages.is_empty() {
                state.messages = VecDeque::new();
            }
            return Poll::Ready(Some(message));
        }
        if state.is_closed {
            return Poll::Ready(None);
        }
        state.body = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for OutboxMessages {
    fn drop(&mut self) {
        let mut state = lock(&self.0);
        state.is_closed = true;
        state.messages = VecDeque::new();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::task::noop_waker;

    use super::*;

    #[test]
    fn messages_go_out_in_order_before_the_end() {
        let waker = noop_waker();
        let cx = Context::from_waker(&waker);
        let (outbox, mut messages) = Outbox::new();
        assert_eq!(messages.poll_next(&cx), Poll::Pending);
        outbox.send("one".into());
        outbox.send("two".into());
        assert_eq!(messages.poll_next(&cx), Poll::Ready(Some("one".into())));
        drop(outbox);
        assert_eq!(messages.poll_next(&cx), Poll::Ready(Some("two".into())));
        assert_eq!(messages.poll_next(&cx), Poll::Ready(None));
    }

    #[test]
    fn nothing_is_kept_for_a_body_that_is_gone() {
        let (outbox, messages) = Outbox::new();
        outbox.send("one".into());
        drop(messages);
        outbox.send("two".into());
        assert!(lock(&outbox.0).messages.is_empty());
    }
}
