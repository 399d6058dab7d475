//! A client's Watch stream, shared between its work and an operator's questions on the same shard.
//!
//! Owns: the sharing. Must not know: the questions, the driver's steps. Invariants: the stream's work alone
//! drives the session; a question borrows the session between two polls, reads, and changes nothing; the
//! session ends with its work, however many handles are left.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::rc::{Rc, Weak};

use crate::downstream::client_replies::ReplySender;
use crate::downstream::request_messages::RequestBody;
use crate::downstream::watch_starts::WatchStart;
use crate::watch::hub::WatchStreamReport;
use crate::watch::session_driver::{RunningWatchSession, WatchSession};

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

/// Begins a client's stream: the future serves the stream to its end. `first` stands for the creates that may
/// have arrived with the stream's header.
pub fn share(
    session: WatchSession,
    body: RequestBody,
    client: ReplySender,
    first: WatchStart,
) -> (WatchSessionHandle, impl Future<Output = ()> + use<>) {
    let running = Rc::new(RefCell::new(RunningWatchSession::new(session, body, client)));
    let handle = WatchSessionHandle(Rc::downgrade(&running));
    let mut first = Some(first);
    let serve = async move {
        let begun = first
            .take()
            .map_or(ControlFlow::Continue(()), |first| running.borrow_mut().take_first_requests(&first));
        let end = match begun {
            ControlFlow::Continue(()) => poll_fn(|cx| running.borrow_mut().poll(cx)).await,
            ControlFlow::Break(end) => end,
        };
        running.borrow_mut().close(end);
    };
    (handle, serve)
}
