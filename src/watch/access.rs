//! The decision on each watch of a stream, by the caller's current permissions.
//!
//! Owns: the decision on creates, and noticing changed permissions. Must not know: the hub's state, rules.
//! Invariant (docs/decisions.md#d29): after a change of the permissions every watch is decided again.

use std::rc::Rc;
use std::task::Context;

use crate::policy::live_permits::LivePermits;
use crate::policy::permit_set::{Decision, PermitSet};
use crate::rpc::method::{Method, lookup};
use crate::telemetry::policy_metrics::PolicyMetrics;

const PATH: &str = "/etcdserverpb.Watch/Watch";

/// The permissions of a watch stream.
pub struct WatchAccess {
    permits: Rc<LivePermits>,
    metrics: PolicyMetrics,
    method: Option<&'static Method>,
}

impl WatchAccess {
    /// Decides by `permits`.
    #[must_use]
    pub fn new(permits: Rc<LivePermits>, metrics: PolicyMetrics) -> Self {
        Self { permits, metrics, method: lookup(PATH) }
    }

    /// Decides on the request message `message`. A message that is no WatchRequest is left to the hub.
    ///
    /// # Errors
    /// The policy refuses the request: the rule.
    pub fn permit(&self, message: &[u8]) -> Result<(), String> {
        let Some(method) = self.method else { return Err(String::new()) };
        let permits = self.permits.now();
        let Decision::Denied(denial) = permits.decide(method, message) else { return Ok(()) };
        let enforced = permits.enforce_and_count(denial, &self.metrics);
        enforced.map(drop).map_err(|_| permits.denying_rule(denial))
    }

    /// True if the policy permits a watch that has begun, given as its WatchCreateRequest.
    #[must_use]
    pub fn permits_watch(&self, create: &[u8]) -> bool {
        let permits = self.permits.now();
        let is_permitted = self.is_permitted(&permits, &permits.decide_watch(create));
        if !is_permitted {
            self.metrics.watches_ended.inc();
        }
        is_permitted
    }

    /// True once after each change of the permissions. The task of `cx` is woken at the next change.
    #[must_use]
    pub fn take_change(&self, cx: &Context<'_>) -> bool {
        self.permits.take_change(cx)
    }

    fn is_permitted(&self, permits: &PermitSet, decision: &Decision) -> bool {
        let Decision::Denied(denial) = decision else { return true };
        permits.enforce_and_count(*denial, &self.metrics).is_ok()
    }
}
