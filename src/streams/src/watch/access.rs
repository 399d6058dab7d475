//! The decision on each watch of a stream, by the caller's current permissions.
//!
//! Owns: the decision on creates, noticing changed permissions, and telling of the watches denied by them.
//! Must not know: the hub's state, rules. Invariant (docs/decisions.md#d29): after a change of the
//! permissions every watch is decided again.

use std::rc::Rc;
use std::task::Context;

use keyward_access::policy::live_permits::LivePermits;
use keyward_access::policy::permit_set::{Decision, Denial, PermitSet};
use keyward_access::policy::shadow_register::{DeniedPart, StreamDenials};
use keyward_etcd::rpc::method::{Method, lookup};

const PATH: &str = "/etcdserverpb.Watch/Watch";

/// Hears of a watch that is open, given as its WatchCreateRequest, and denied by changed permissions.
pub type DeniedWatchObserver = Box<dyn Fn(&[u8], &Rc<PermitSet>, Denial)>;

/// The permissions of a watch stream.
pub struct WatchAccess {
    permits: Rc<LivePermits>,
    denials: StreamDenials,
    method: Option<&'static Method>,
    observer: Option<DeniedWatchObserver>,
}

impl WatchAccess {
    /// Decides by `permits`.
    #[must_use]
    pub fn new(
        permits: Rc<LivePermits>,
        denials: StreamDenials,
        observer: Option<DeniedWatchObserver>,
    ) -> Self {
        Self { permits, denials, method: lookup(PATH), observer }
    }

    /// Decides on the request message `message`. A message that is no WatchRequest is left to the hub.
    ///
    /// # Errors
    /// The policy refuses the request: the rule.
    pub fn permit(&self, message: &[u8]) -> Result<(), String> {
        let Some(method) = self.method else { return Err(String::new()) };
        let permits = self.permits.now();
        let Decision::Denied(denial) = permits.decide(method, message) else { return Ok(()) };
        let counted = self.denials.count(&permits, denial, method, DeniedPart::Message(message));
        counted.map(drop).map_err(|_| permits.denying_rule(denial))
    }

    /// Decides again on a watch that has begun, given as its WatchCreateRequest.
    ///
    /// # Errors
    /// The policy refuses the watch now: the rule.
    pub fn permit_again(&self, create: &[u8]) -> Result<(), String> {
        let Some(method) = self.method else { return Err(String::new()) };
        let permits = self.permits.now();
        let Decision::Denied(denial) = permits.decide_watch(create) else { return Ok(()) };
        if let Some(observer) = &self.observer {
            observer(create, &permits, denial);
        }
        let part = DeniedPart::WatchCreate(create);
        self.denials.count(&permits, denial, method, part).map(drop).map_err(|_| {
            self.denials.metrics.watches_ended.inc();
            permits.denying_rule(denial)
        })
    }

    /// True once after each change of the permissions. The task of `cx` is woken at the next change.
    #[must_use]
    pub fn take_change(&self, cx: &Context<'_>) -> bool {
        self.permits.take_change(cx)
    }
}
