//! The streams of one client connection, run within the connection's task.
//!
//! Owns: the streams' futures, the order of their polls, and the polls left in a turn. Must not know: HTTP/2,
//! the services served, the length of a turn. With a task for each stream, a connection with a thousand ready
//! streams would have a thousand places in the runtime's queue, and all other connections would wait behind
//! them; this way each connection has a single place.
//! Invariants: a stream is polled only after a wakeup, in the order of the wakeups. A turn polls as many
//! streams as its beginning allows; the other woken streams wait for the connection's next turn. A panic ends
//! its own stream alone. The streams are dropped with the connection.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::task::coop::has_budget_remaining;

use keyward_base::tasks::poll_guarded;

/// The streams in service.
pub(super) struct StreamTurns<F> {
    streams: FuturesUnordered<TurnStream<F>>,
    /// The polls left in the current turn.
    left: Rc<Cell<usize>>,
}

/// One stream in service.
struct TurnStream<F> {
    stream: F,
    left: Rc<Cell<usize>>,
}

impl<F: Future<Output = ()> + Unpin> StreamTurns<F> {
    pub(super) fn new() -> Self {
        Self { streams: FuturesUnordered::new(), left: Rc::default() }
    }

    /// Adds a stream. The caller then calls [`StreamTurns::poll_woken`], which polls the stream for the first
    /// time.
    pub(super) fn push(&self, stream: F) {
        self.streams.push(TurnStream { stream, left: Rc::clone(&self.left) });
    }

    /// Begins a turn of `length` polls; called when the connection's task is polled.
    pub(super) fn begin(&self, length: usize) {
        self.left.set(length);
    }

    /// Polls the woken streams, until the end of the turn. At its end, the task is woken for the next turn.
    pub(super) fn poll_woken(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(Some(())) = self.streams.poll_next_unpin(cx) {}
    }
}

impl<F: Future<Output = ()> + Unpin> Future for TurnStream<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // Without a rest of the task's budget, tokio's own futures would be polled in vain.
        if self.left.get() == 0 || !has_budget_remaining() {
            // FuturesUnordered stops polling after the second future that wakes itself, and wakes the task.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.left.set(self.left.get() - 1);
        poll_guarded("stream", || Pin::new(&mut self.stream).poll(cx))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::poll_fn;

    use futures_util::future::LocalBoxFuture;
    use futures_util::task::noop_waker_ref;
    use tokio::sync::oneshot;

    use super::*;

    const POLLS: usize = 8;

    type Streams = StreamTurns<LocalBoxFuture<'static, ()>>;

    /// Runs one turn. True if a stream was polled.
    fn turn(streams: &mut Streams) -> bool {
        streams.begin(POLLS);
        streams.poll_woken(&mut Context::from_waker(noop_waker_ref()));
        streams.left.get() < POLLS
    }

    #[test]
    fn a_turn_ends_after_so_many_streams_and_each_stream_has_its_turn() {
        let (mut streams, polled) = (Streams::new(), Rc::new(RefCell::new(Vec::new())));
        for number in 0..3 * POLLS {
            let polled = Rc::clone(&polled);
            streams.push(Box::pin(async move { polled.borrow_mut().push(number) }));
        }
        for turns in 1..=3 {
            assert!(turn(&mut streams));
            assert_eq!(polled.borrow().len(), turns * POLLS);
        }
        assert!(!turn(&mut streams), "all have ended");
        let mut polled = polled.take();
        polled.sort_unstable();
        assert_eq!(polled, (0..3 * POLLS).collect::<Vec<_>>());
    }

    #[test]
    fn streams_that_wake_themselves_leave_turns_to_the_others() {
        let (mut streams, ended) = (Streams::new(), Rc::new(Cell::new(false)));
        for _ in 0..2 * POLLS {
            streams.push(Box::pin(poll_fn(|cx| {
                cx.waker().wake_by_ref();
                Poll::Pending
            })));
        }
        let marked = Rc::clone(&ended);
        streams.push(Box::pin(async move { marked.set(true) }));
        for _ in 0..2 * POLLS {
            assert!(turn(&mut streams));
        }
        assert!(ended.get());
    }

    #[test]
    fn only_a_woken_stream_is_polled() {
        let (mut streams, polls) = (Streams::new(), Rc::new(Cell::new(0)));
        let (wake, woken) = oneshot::channel::<()>();
        let (counted, mut woken) = (Rc::clone(&polls), woken);
        streams.push(Box::pin(poll_fn(move |cx| {
            counted.set(counted.get() + 1);
            Pin::new(&mut woken).poll(cx).map(drop)
        })));
        assert!(turn(&mut streams));
        assert!(!turn(&mut streams));
        assert_eq!(polls.get(), 1);
        wake.send(()).expect("the stream waits");
        assert!(turn(&mut streams));
        assert_eq!(polls.get(), 2);
    }

    #[test]
    fn a_panic_ends_its_stream_alone() {
        let (mut streams, ended) = (Streams::new(), Rc::new(Cell::new(false)));
        let marked = Rc::clone(&ended);
        streams.push(Box::pin(async { panic!("on purpose") }));
        streams.push(Box::pin(async move { marked.set(true) }));
        assert!(turn(&mut streams));
        assert!(ended.get());
        assert!(streams.streams.is_empty());
    }
}
