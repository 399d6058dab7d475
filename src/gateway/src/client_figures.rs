//! What one client connection has done so far, for an operator's questions.
//!
//! Owns: the counts and the newest facts of a connection. Must not know: the questions. Invariants: the shard
//! of the connection alone reads and writes; a call costs some additions: no lock, no allocation, no reading
//! of a clock; texts of the client are kept as sent, so whoever shows a text escapes it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tokio::time::Instant;

use keyward_downstream::socket_progress::SocketProgress;
use keyward_etcd::identity::UserName;
use keyward_etcd::refusal::Code;

/// A call that ended with an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientError {
    /// The status code.
    pub code: Code,
    /// The end of the call.
    pub at: Instant,
    /// The maker of the error: `etcd`, or Keyward's reason.
    pub refused_by: Option<&'static str>,
    /// The rule of the policy, or the limit, that refused the call.
    pub rule: Option<Box<str>>,
}

/// The figures of a connection.
#[derive(Debug)]
pub struct ClientFigures {
    /// Number of the connection, unique in the process.
    pub id: u64,
    progress: Rc<SocketProgress>,
    calls: Cell<u64>,
    failed: Cell<u64>,
    last_error: RefCell<Option<ClientError>>,
    user: RefCell<Option<UserName>>,
    peer: RefCell<Option<Rc<str>>>,
    blocked_login: RefCell<Option<UserName>>,
}

impl ClientFigures {
    /// A connection without calls so far. `progress` counts the bytes of its socket.
    #[must_use]
    pub fn new(id: u64, progress: Rc<SocketProgress>) -> Self {
        Self {
            id,
            progress,
            calls: Cell::default(),
            failed: Cell::default(),
            last_error: RefCell::default(),
            user: RefCell::default(),
            peer: RefCell::default(),
            blocked_login: RefCell::default(),
        }
    }

    /// Counts a call.
    pub fn begin_call(&self) {
        self.calls.set(self.calls.get() + 1);
    }

    /// Notes the identified caller of a call.
    pub fn note_caller(&self, user: Option<&UserName>, peer: Option<&Rc<str>>) {
        // The texts of a caller are shared by all calls: equal texts are nearly always the same text.
        if self.user.borrow().as_ref() != user {
            self.user.replace(user.cloned());
        }
        if self.peer.borrow().as_ref() != peer {
            self.peer.replace(peer.cloned());
        }
    }

    /// Notes the end of a call. A call that the client gave up `is_well`, as is a success; `error` describes
    /// any other end.
    pub fn end_call(&self, is_well: bool, error: impl FnOnce() -> ClientError) {
        if !is_well {
            self.failed.set(self.failed.get() + 1);
            self.last_error.replace(Some(error()));
        }
    }

    /// Notes the name of a login refused because its user is blocked: a claim, proved by nothing. The caller
    /// bounds the name.
    pub fn note_blocked_login(&self, name: &UserName) {
        if self.blocked_login.borrow().as_ref() != Some(name) {
            self.blocked_login.replace(Some(name.clone()));
        }
    }

    /// The name of the last login refused because its user is blocked.
    #[must_use]
    pub fn blocked_login(&self) -> Option<UserName> {
        self.blocked_login.borrow().clone()
    }

    /// Calls begun.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.get()
    }

    /// Calls ended with an error.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failed.get()
    }

    /// The last error.
    #[must_use]
    pub fn last_error(&self) -> Option<ClientError> {
        self.last_error.borrow().clone()
    }

    /// The etcd user of the last identified call.
    #[must_use]
    pub fn user(&self) -> Option<UserName> {
        self.user.borrow().clone()
    }

    /// The peer of the last identified call: the text names the evidence.
    #[must_use]
    pub fn peer(&self) -> Option<Rc<str>> {
        self.peer.borrow().clone()
    }

    /// Bytes received from the client, and sent to the client; without TLS.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.progress.received() as u64, self.progress.sent() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_call_names_its_caller() {
        let figures = ClientFigures::new(7, Rc::default());
        figures.begin_call();
        figures.begin_call();
        assert_eq!(figures.calls(), 2);
        let (alice, peer) = (UserName::from("alice"), Rc::from("session:alice"));
        figures.note_caller(Some(&alice), Some(&peer));
        assert_eq!((figures.user(), figures.peer()), (Some(alice), Some(peer)));
        figures.note_caller(None, None);
        assert_eq!((figures.user(), figures.peer()), (None, None));
    }

    #[test]
    fn a_call_that_ended_well_leaves_no_error() {
        let figures = ClientFigures::new(7, Rc::default());
        let rule = Some("no_grant: write".into());
        let error = ClientError {
            code: Code::PermissionDenied,
            at: Instant::now(),
            refused_by: Some("policy"),
            rule,
        };
        figures.end_call(true, || error.clone());
        assert_eq!((figures.failed(), figures.last_error()), (0, None));
        figures.end_call(false, || error.clone());
        assert_eq!((figures.failed(), figures.last_error()), (1, Some(error)));
    }
}
