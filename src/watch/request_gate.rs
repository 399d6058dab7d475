//! The decision on each request of a client's Watch stream: by the policy, then by the caller's limits.
//!
//! Owns: the order of the decisions, and telling the observer. Must not know: the hub's state. Invariant: the
//! observer does not see a watch past a limit, which never begins.

use bytes::Bytes;

use crate::refusal::Refusal;
use crate::watch::access::WatchAccess;
use crate::watch::hub::HubInput;
use crate::watch::limited_watches::{LimitedWatches, WatchPauses};

/// Sees each request message of a client's Watch stream.
pub type WatchRequestObserver = Box<dyn Fn(&[u8])>;

/// Hears of each watch refused on a stream that goes on.
pub type RefusedWatchObserver = Box<dyn Fn(&Refusal)>;

/// Decides on the requests of a stream.
pub struct WatchRequestGate {
    /// The decision on each watch; `None` permits every watch.
    pub access: Option<WatchAccess>,
    /// The caller's limits; `None` without any limit.
    pub usage: Option<Box<LimitedWatches>>,
    /// The observer of the client's requests, if any.
    pub observer: Option<WatchRequestObserver>,
    /// The observer of refused watches.
    pub refused: RefusedWatchObserver,
}

impl WatchRequestGate {
    /// The hub's input for a request of the client.
    pub fn input(&mut self, message: Bytes) -> HubInput {
        let is_permitted = self.access.as_ref().is_none_or(|access| access.permits(&message));
        if is_permitted && self.usage.as_mut().is_some_and(|usage| usage.take(&message).is_err()) {
            return self.denied(message, Refusal::TOO_MANY_REQUESTS);
        }
        if let Some(observer) = &self.observer {
            observer(&message);
        }
        if is_permitted {
            HubInput::Client(message)
        } else {
            self.denied(message, Refusal::PERMISSION_DENIED)
        }
    }

    fn denied(&self, message: Bytes, refusal: Refusal) -> HubInput {
        (self.refused)(&refusal);
        HubInput::DeniedClient(message, refusal)
    }

    /// The pauses of the stream now.
    pub fn pauses(&mut self) -> WatchPauses {
        self.usage.as_mut().map_or(WatchPauses::NONE, |usage| usage.pauses())
    }
}
