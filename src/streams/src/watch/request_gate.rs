//! The decision on each request of a client's Watch stream: by the policy, then by the caller's limits.
//!
//! Owns: the order of the decisions, and telling the observer. Must not know: the hub's state. Invariant: the
//! observer does not see a watch past a limit, which never begins.

use std::rc::Rc;
use std::task::Context;

use bytes::Bytes;

use crate::watch::access::WatchAccess;
use crate::watch::hub::HubInput;
use crate::watch::limited_watches::{LimitedWatches, WatchPauses};
use keyward_access::usage::live_usage::LiveUsage;
use keyward_etcd::refusal::Refusal;

/// Sees each request message of a client's Watch stream.
pub type WatchRequestObserver = Box<dyn Fn(&[u8])>;

/// Hears of each watch refused or ended on a stream that goes on, with the rule or the limit, if any.
pub type RefusedWatchObserver = Box<dyn Fn(&Refusal, Option<&str>)>;

/// A refused watch, for the audit log.
pub struct RefusedWatch<'w> {
    /// The request message, or the create, as the hub has it.
    pub asked: RefusedWatchRequest<'w>,
    /// The refusal.
    pub refusal: &'w Refusal,
    /// The limit that refused the watch.
    pub limit: Option<&'w str>,
}

/// The bytes of a refused watch.
#[derive(Clone, Copy)]
pub enum RefusedWatchRequest<'w> {
    /// A WatchRequest.
    Message(&'w [u8]),
    /// A WatchCreateRequest.
    Create(&'w [u8]),
}

/// Records the watches that no request observer has seen refused: by a member, or by a limit.
pub type RefusedWatchRecorder = Box<dyn Fn(&RefusedWatch<'_>)>;

/// A change of the rules for a stream's caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleChange {
    /// Another policy: every watch is decided again.
    Permissions,
    /// Other limits on usage.
    Limits,
}

/// Decides on the requests of a stream.
pub struct WatchRequestGate {
    /// The decision on each watch; `None` permits every watch.
    pub access: Option<WatchAccess>,
    /// The watches of a caller with limits; `None` without any limit.
    pub usage: Option<Box<LimitedWatches>>,
    /// The caller's limits of now; `None` for a caller that no limit can count.
    pub limits: Option<Rc<LiveUsage>>,
    /// The observer of the client's requests, if any.
    pub observer: Option<WatchRequestObserver>,
    /// The observer of refused watches.
    pub refused: RefusedWatchObserver,
    /// The recorder of refused watches, if any.
    pub recorder: Option<RefusedWatchRecorder>,
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
            let limit = exceeded.to_string();
            let asked = RefusedWatchRequest::Message(&message);
            self.record(&RefusedWatch { asked, refusal: &Refusal::TOO_MANY_REQUESTS, limit: Some(&limit) });
            return self.denied(message, Refusal::TOO_MANY_REQUESTS, &limit);
        }
        if let Some(observer) = &self.observer {
            observer(&message);
        }
        match permitted {
            Ok(()) => HubInput::Client(message),
            Err(rule) => self.denied(message, Refusal::PERMISSION_DENIED, &rule),
        }
    }

    /// A change of the caller's rules, once. The task of `cx` is woken at the next change.
    #[must_use]
    pub fn take_change(&self, cx: &Context<'_>) -> Option<RuleChange> {
        if self.access.as_ref().is_some_and(|access| access.take_change(cx)) {
            return Some(RuleChange::Permissions);
        }
        let limits = self.limits.as_ref()?;
        limits.take_change().then_some(RuleChange::Limits)
    }

    /// Begins or ends counting the stream's `live` watches, as the caller's limits of now want it. Returns
    /// true if the watches count.
    pub fn follow_limits(&mut self, live: usize) -> bool {
        let limits = self.limits.as_ref().filter(|limits| limits.now().is_some());
        match (&self.usage, limits) {
            (None, Some(limits)) => {
                let watches = LimitedWatches::new(Rc::clone(limits));
                watches.adopt(live);
                self.usage = Some(Box::new(watches));
            }
            (Some(_), None) => self.usage = None,
            (None, None) | (Some(_), Some(_)) => {}
        }
        self.usage.is_some()
    }

    /// Releases the watches beyond the first `live`.
    pub fn keep_watches(&self, live: usize) {
        if let Some(usage) = &self.usage {
            usage.keep(live);
        }
    }

    fn denied(&self, message: Bytes, refusal: Refusal, rule: &str) -> HubInput {
        (self.refused)(&refusal, Some(rule));
        HubInput::DeniedClient(message, refusal)
    }

    /// Tells of a watch, given as its WatchCreateRequest, that a member refused, or that no member can be
    /// asked for.
    pub fn note_refused(&self, create: &[u8], refusal: &Refusal) {
        (self.refused)(refusal, None);
        self.record(&RefusedWatch { asked: RefusedWatchRequest::Create(create), refusal, limit: None });
    }

    fn record(&self, watch: &RefusedWatch<'_>) {
        if let Some(recorder) = &self.recorder {
            recorder(watch);
        }
    }

    /// The pauses of the stream now.
    pub fn pauses(&mut self) -> WatchPauses {
        self.usage.as_mut().map_or(WatchPauses::NONE, |usage| usage.pauses())
    }
}
