//! The "from now" watches of one client connection, not yet registered by a member.
//!
//! Owns: the creates that a write on the same connection arrived behind, and the time limit of the write's
//! wait. A client sending a create and a put right behind the create, without waiting for Created, expects
//! the put as an event: etcd registers the watch long before agreeing on the put. Through a proxy the two
//! requests travel on different connections, perhaps to different members.
//! Must not know: how a watch is registered, the meaning of a write.
//! Invariants: a write waits only for creates received earlier on the same connection, and never past
//! [`LONGEST`] after a create's arrival. An overtaken create records a revision below every overtaking write.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use keyward_etcd::identity::Revision;

/// Wait limit: a slower create is overtaken, since its member is being dialled or a login is in progress.
pub const LONGEST: Duration = Duration::from_millis(250);

/// The unregistered creates of one connection, in order of arrival.
#[derive(Debug, Default)]
pub struct WatchStarts {
    last: Cell<u64>,
    pending: RefCell<BTreeMap<u64, PendingWatchStart>>,
    changed: Notify,
}

#[derive(Clone, Copy, Debug)]
struct PendingWatchStart {
    /// Time after which writes stop waiting for the create.
    until: Instant,
    /// The revision known when the first write overtook the create.
    overtaken: Option<Revision>,
}

/// One create, or a Watch stream with a first create possibly right behind its header. Later writes wait
/// until the last clone is dropped.
#[derive(Clone, Debug)]
pub struct WatchStart(Rc<WatchStartEntry>);

#[derive(Debug)]
struct WatchStartEntry {
    starts: Rc<WatchStarts>,
    number: u64,
}

impl WatchStarts {
    /// Adds a create arriving now.
    #[must_use]
    pub fn begin(self: &Rc<Self>) -> WatchStart {
        let number = self.last.get() + 1;
        self.last.set(number);
        let pending = PendingWatchStart { until: Instant::now() + LONGEST, overtaken: None };
        self.pending.borrow_mut().insert(number, pending);
        WatchStart(Rc::new(WatchStartEntry { starts: Rc::clone(self), number }))
    }

    /// True if there is no create to wait for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pending.borrow().is_empty()
    }

    /// Waits until all creates received before the call are registered or gone, or have exceeded [`LONGEST`].
    /// Creates exceeding the limit record `known()`, a revision reached by the cluster. False if there was no
    /// create to wait for. Cancel-safe.
    pub async fn wait(&self, known: impl FnOnce() -> Revision) -> bool {
        if self.is_empty() {
            return false;
        }
        let last = self.last.get();
        loop {
            let changed = self.changed.notified();
            let now = Instant::now();
            let longest = self.pending.borrow().range(..=last).map(|(_, it)| it.until).max();
            let Some(until) = longest.filter(|until| *until > now) else { break };
            tokio::select! {
                () = changed => {}
                () = sleep_until(until) => {}
            }
        }
        if self.pending.borrow().range(..=last).next().is_some() {
            let known = known();
            for (_, it) in self.pending.borrow_mut().range_mut(..=last) {
                it.overtaken.get_or_insert(known);
            }
        }
        true
    }
}

impl WatchStart {
    /// A revision below every write that overtook the create; `None` if no write did.
    #[must_use]
    pub fn overtaken(&self) -> Option<Revision> {
        self.0.starts.pending.borrow().get(&self.0.number)?.overtaken
    }
}

impl Drop for WatchStartEntry {
    fn drop(&mut self) {
        self.starts.pending.borrow_mut().remove(&self.number);
        self.starts.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn unknown() -> Revision {
        panic!("nothing is overtaken")
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_waits_for_the_creates_before_it_and_for_no_later_one() {
        let starts = Rc::new(WatchStarts::default());
        assert_eq!(starts.wait(unknown).now_or_never(), Some(false), "no create, no wait");
        let first = starts.begin();
        let twin = first.clone();
        let mut write = Box::pin(starts.wait(unknown));
        assert_eq!((&mut write).now_or_never(), None);
        let later = starts.begin();
        drop(first);
        assert_eq!((&mut write).now_or_never(), None, "a clone is left");
        drop(twin);
        assert_eq!(write.now_or_never(), Some(true));
        assert_eq!(later.overtaken(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_create_that_takes_too_long_is_told_the_first_revision_at_which_it_was_overtaken() {
        let starts = Rc::new(WatchStarts::default());
        let start = starts.begin();
        let began = Instant::now();
        assert!(starts.wait(|| Revision(7)).await);
        assert_eq!(began.elapsed(), LONGEST);
        assert_eq!(start.overtaken(), Some(Revision(7)));
        let later = starts.begin();
        assert!(starts.wait(|| Revision(9)).await);
        assert_eq!(began.elapsed(), 2 * LONGEST, "each create has its own time");
        assert_eq!((start.overtaken(), later.overtaken()), (Some(Revision(7)), Some(Revision(9))));
        drop((start, later));
        assert!(starts.pending.borrow().is_empty());
    }
}
