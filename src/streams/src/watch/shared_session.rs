//! A client's Watch stream, shared between its work and an operator's questions on the same shard.
//!
//! Owns: the sharing. Must not know: the questions, the driver's steps. Invariants: the stream's work alone
//! drives the session; a question borrows the session between two polls, reads, and changes nothing; the
//! session ends with its work, however many handles are left.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::rc::{Rc, Weak};
use std::task::{Poll, ready};

use futures_util::future::LocalBoxFuture;

use crate::watch::hub::{HubTiming, WatchStreamReport};
use crate::watch::session_driver::{RunningWatchSession, WatchSession};
use keyward_downstream::client_replies::ReplySender;
use keyward_downstream::request_messages::RequestBody;
use keyward_downstream::watch_starts::WatchStart;
use keyward_etcd::refusal::Refusal;

/// A handle to a running session.
pub struct WatchSessionHandle(Weak<RefCell<RunningWatchSession>>);

impl WatchSessionHandle {
    /// The stream's watches; empty once the stream has ended.
    #[must_use]
    pub fn report(&self) -> WatchStreamReport {
        let session = self.0.upgrade();
        session.map(|session| session.borrow().report()).unwrap_or_default()
    }

    /// The number of the stream's watches, and the bytes held for the client: unfinished revisions, and large
    /// messages not yet taken by the client.
    #[must_use]
    pub fn held(&self) -> (u64, u64) {
        self.0.upgrade().map_or((0, 0), |session| session.borrow().held())
    }
}

/// A client's stream before its work begins.
pub struct SharedWatchSession(Rc<RefCell<RunningWatchSession>>);

impl SharedWatchSession {
    /// A stream with the request body `body` and the replies `client`.
    #[must_use]
    pub fn new(session: WatchSession, timing: HubTiming, body: RequestBody, client: ReplySender) -> Self {
        Self(Rc::new(RefCell::new(RunningWatchSession::new(session, timing, body, client))))
    }

    /// A handle to the session.
    #[must_use]
    pub fn handle(&self) -> WatchSessionHandle {
        WatchSessionHandle(Rc::downgrade(&self.0))
    }

    /// Serves the stream to its end, or until `limits` is over, and tells the client the reason. `start`
    /// stands for the creates that may have arrived with the stream's header. `keep` is held until the end.
    pub fn serve(
        self,
        start: WatchStart,
        limits: LocalBoxFuture<'static, Refusal>,
        keep: impl Sized,
    ) -> impl Future<Output = ()> {
        self.0.borrow_mut().set_limits(limits);
        let mut start = Some(start);
        // No async block: it would store its variables twice.
        poll_fn(move |cx| {
            let _keep = &keep;
            let mut session = self.0.borrow_mut();
            let begun =
                start.take().map_or(ControlFlow::Continue(()), |start| session.take_first_requests(&start));
            let end = match begun {
                ControlFlow::Continue(()) => ready!(session.poll(cx)),
                ControlFlow::Break(end) => end,
            };
            session.close(end);
            Poll::Ready(())
        })
    }
}
