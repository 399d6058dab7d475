//! The limits of a caller, applied to one client stream of watches.
//!
//! Owns: counting the stream's watches, and the pauses of a stream beyond a rate. Must not know: the hub's
//! state, how usage is counted. Invariants: a rate slows a stream down and never ends the stream; a pause is
//! no longer than the debt of its cause; a watch past the limit of watches is refused, and the stream goes
//! on.

use std::rc::Rc;

use tokio::time::Instant;

use keyward_access::usage::call_usage::WatchUsage;
use keyward_access::usage::exceeded::Exceeded;
use keyward_access::usage::live_usage::LiveUsage;
use keyward_access::usage::refusal_pace::RefusalPace;
use keyward_etcd::rpc::scan::WireFields;

/// The watches of a stream, and its pauses.
pub struct LimitedWatches {
    watches: WatchUsage,
    refusals: RefusalPace,
    /// No further request is taken before.
    next_request: Option<Instant>,
    /// The last request has no token yet: the token is taken before the next request.
    owes_token: bool,
}

/// The parts of a stream that wait for a rate, each with the end of the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchPauses {
    /// Requests of the client.
    pub requests: Option<Instant>,
    /// Events.
    pub events: Option<Instant>,
}

impl WatchPauses {
    /// Nothing waits.
    pub const NONE: Self = Self { requests: None, events: None };
}

impl LimitedWatches {
    /// A stream without watches, of a caller with these limits.
    #[must_use]
    pub fn new(usage: Rc<LiveUsage>) -> Self {
        Self {
            watches: WatchUsage::new(usage),
            refusals: RefusalPace::default(),
            next_request: None,
            owes_token: false,
        }
    }

    /// The pauses now.
    pub fn pauses(&mut self) -> WatchPauses {
        let now = Instant::now();
        self.next_request = self.next_request.filter(|until| *until > now);
        if self.next_request.is_none() && self.owes_token {
            self.take_token(now);
        }
        let caller = self.watches.caller();
        let events = caller.and_then(|caller| caller.reply_pause()).and_then(|pause| now.checked_add(pause));
        WatchPauses { requests: self.next_request, events }
    }

    /// Charges a request of the client, and counts its watch. Later requests wait if the rate is exceeded.
    ///
    /// # Errors
    /// A further watch exceeds a limit.
    pub fn take(&mut self, message: &[u8]) -> Result<(), Exceeded> {
        if let Some(caller) = self.watches.caller() {
            caller.charge_request(message.len());
        }
        let now = Instant::now();
        self.take_token(now);
        let taken = if is_create(message) { self.watches.begin() } else { Ok(()) };
        if taken.is_err() {
            let delayed = self.refusals.delay(now).and_then(|delay| now.checked_add(delay));
            self.next_request = self.next_request.max(delayed);
        }
        taken
    }

    fn take_token(&mut self, now: Instant) {
        let wait = self.watches.caller().and_then(|caller| caller.request_pause());
        self.owes_token = wait.is_some();
        self.next_request = wait.and_then(|wait| now.checked_add(wait));
    }

    /// Counts the `live` watches that have begun before the stream had limits.
    pub fn adopt(&self, live: usize) {
        self.watches.adopt(live);
    }

    /// Releases the watches beyond the first `live`.
    pub fn keep(&self, live: usize) {
        self.watches.keep(live);
    }
}

/// True for a WatchRequest with a create, in its field 1.
fn is_create(message: &[u8]) -> bool {
    WireFields::new(message).any(|field| field.is_ok_and(|field| field.number == 1))
}
