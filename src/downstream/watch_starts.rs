//! The watches "from now" of one client connection that no member has registered yet.
//!
//! Owns: which of them a write on the same connection arrived behind, and how long that write waits for them. A client that sends a
//! create and a put right behind it, without waiting for Created, expects the put as an event: etcd registers the watch
//! long before it has agreed on the put. Through a proxy the two travel on different connections, perhaps to different members.
//! Must not know: how a watch is registered, what a write is.
//! Invariants: a write waits only for creates that arrived before it on its own connection, and never past [`LONGEST`] after the
//! create arrived; a create that was overtaken is told a revision below every write that overtook it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::identity::Revision;

/// A create that takes longer than this is overtaken: its member is being dialled, or a login is under way.
pub const LONGEST: Duration = Duration::from_millis(250);

/// The unregistered creates of one connection, in the order of their arrival.
#[derive(Debug, Default)]
pub struct WatchStarts {
    last: Cell<u64>,
    pending: RefCell<BTreeMap<u64, Pending>>,
    changed: Notify,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    /// When writes stop waiting for it.
    until: Instant,
    /// The revision that was known when the first write went ahead of it.
    overtaken: Option<Revision>,
}

/// One create, or a Watch stream whose first create may have arrived with its header. Writes behind it wait until the last
/// clone is dropped.
#[derive(Clone, Debug)]
pub struct WatchStart(Rc<Entry>);

#[derive(Debug)]
struct Entry {
    starts: Rc<WatchStarts>,
    number: u64,
}

impl WatchStarts {
    /// Registers a create that arrives now.
    #[must_use]
    pub fn begin(self: &Rc<Self>) -> WatchStart {
        let number = self.last.get() + 1;
        self.last.set(number);
        let pending = Pending { until: Instant::now() + LONGEST, overtaken: None };
        self.pending.borrow_mut().insert(number, pending);
        WatchStart(Rc::new(Entry { starts: Rc::clone(self), number }))
    }

    /// Waits until the creates that arrived before this call are registered or gone, or have taken too long; those are told
    /// `known()`, a revision that the cluster has reached by then. False where there was nothing to wait for. Cancel-safe.
    pub async fn wait(&self, known: impl FnOnce() -> Revision) -> bool {
        if self.pending.borrow().is_empty() {
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
    /// A revision below that of every write which went ahead of this create; none where no write did.
    #[must_use]
    pub fn overtaken(&self) -> Option<Revision> {
        self.0.starts.pending.borrow().get(&self.0.number)?.overtaken
    }
}

impl Drop for Entry {
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
