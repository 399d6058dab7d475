//! How many streams of this shard are being resumed, and on which member.
//!
//! Owns: the counts, and who may go next. Must not know: what a stream carries, or when it stands again.
//! Invariants: on one member no more than [`AT_ONCE`] streams are being resumed, first come first served; whoever leaves
//! while waiting holds nobody up; a member that was chosen counts as busier at once, so that those who choose in the
//! same moment spread.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::identity::MemberId;

/// Streams that one shard resumes on one member at once. A resumed watch makes etcd look through its history under a lock
/// that blocks writes (etcd issue 22264), some 500 watches at a time. This many streams with as many creates as a hub
/// leaves unanswered are 256 watches, and with the default of four shards 1,024: two of its passes.
pub const AT_ONCE: usize = 8;

/// The streams of one shard that are being resumed.
#[derive(Default)]
pub struct Resumes {
    all: Rc<Cell<usize>>,
    /// One entry per member that was ever resumed on.
    members: RefCell<HashMap<MemberId, Gate>>,
}

struct Gate {
    coming: Rc<Cell<usize>>,
    room: Arc<Semaphore>,
}

/// Counts one for as long as it lives.
struct Counted(Rc<Cell<usize>>);

/// A stream that is being resumed, wherever.
pub struct Resuming(#[expect(dead_code, reason = "counts until dropped")] Counted);

/// A stream that is being resumed on a certain member.
pub struct Coming {
    counted: (Resuming, Counted),
    room: Arc<Semaphore>,
}

/// A stream whose turn it is. Held until its watches stand again, or for a while at most.
pub struct Turn {
    #[expect(dead_code, reason = "counts until dropped")]
    counted: (Resuming, Counted),
    #[expect(dead_code, reason = "holds its place until dropped")]
    permit: Option<OwnedSemaphorePermit>,
}

impl Resumes {
    /// Begins to resume a stream.
    #[must_use]
    pub fn begin(&self) -> Resuming {
        Resuming(Counted::one(&self.all))
    }

    /// How many streams are being resumed.
    #[must_use]
    pub fn all(&self) -> usize {
        self.all.get()
    }

    /// How many streams are being resumed on `member`, or wait for it.
    #[must_use]
    pub fn coming(&self, member: MemberId) -> usize {
        self.members.borrow().get(&member).map_or(0, |gate| gate.coming.get())
    }

    /// The stream has chosen its member.
    #[must_use]
    pub fn on(&self, member: MemberId, resuming: Resuming) -> Coming {
        let mut members = self.members.borrow_mut();
        let gate = members
            .entry(member)
            .or_insert_with(|| Gate { coming: Rc::default(), room: Arc::new(Semaphore::new(AT_ONCE)) });
        Coming { counted: (resuming, Counted::one(&gate.coming)), room: Arc::clone(&gate.room) }
    }
}

impl Coming {
    /// Waits for its turn. Dropping the future gives the place in the line up.
    pub async fn turn(self) -> Turn {
        // Never closed: there is a permit, sooner or later.
        let permit = self.room.acquire_owned().await.ok();
        Turn { counted: self.counted, permit }
    }
}

impl Counted {
    fn one(count: &Rc<Cell<usize>>) -> Self {
        count.set(count.get() + 1);
        Self(Rc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get().saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn the_first_go_first_and_whoever_leaves_holds_nobody_up() {
        let resumes = Resumes::default();
        let member = MemberId(1);
        let mut turns = Vec::new();
        for _ in 0..AT_ONCE {
            turns.push(resumes.on(member, resumes.begin()).turn().now_or_never().expect("there is room"));
        }
        let come = || Box::pin(resumes.on(member, resumes.begin()).turn());
        let (mut second, mut third, mut fourth) = (come(), come(), come());
        for waiting in [&mut second, &mut third, &mut fourth] {
            assert!(waiting.now_or_never().is_none(), "no room");
        }
        assert_eq!((resumes.all(), resumes.coming(member)), (AT_ONCE + 3, AT_ONCE + 3));
        assert!(resumes.on(MemberId(2), resumes.begin()).turn().now_or_never().is_some(), "another member");
        drop(second);
        drop(turns.pop());
        assert!((&mut fourth).now_or_never().is_none(), "not before the third");
        let turn = (&mut third).now_or_never();
        assert!(turn.is_some(), "its turn");
        assert!((&mut fourth).now_or_never().is_none());
        drop(turn);
        assert!(fourth.now_or_never().is_some());
        drop((third, turns));
        assert_eq!((resumes.all(), resumes.coming(member)), (0, 0));
    }
}
