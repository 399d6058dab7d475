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

/// Hears of each watch refused on a stream that goes on, with the rule or the limit.
pub type RefusedWatchObserver = Box<dyn Fn(&Refusal, &str)>;

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
        let permitted = self.access.as_ref().map_or(Ok(()), |access| access.permit(&message));
        let taken = match &mut self.usage {
            Some(usage) if permitted.is_ok() => usage.take(&message),
            _ => Ok(()),
        };
        if let Err(exceeded) = taken {
            return self.denied(message, Refusal::TOO_MANY_REQUESTS, &exceeded.to_string());
        }
        if let Some(observer) = &self.observer {
            observer(&message);
        }
        match permitted {
            Ok(()) => HubInput::Client(message),
            Err(rule) => self.denied(message, Refusal::PERMISSION_DENIED, &rule),
        }
    }

    fn denied(&self, message: Bytes, refusal: Refusal, rule: &str) -> HubInput {
        (self.refused)(&refusal, rule);
        HubInput::DeniedClient(message, refusal)
    }

    /// The pauses of the stream now.
    pub fn pauses(&mut self) -> WatchPauses {
        self.usage.as_mut().map_or(WatchPauses::NONE, |usage| usage.pauses())
    }
}
