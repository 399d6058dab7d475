//! The shard's streams being resumed, counted per member.
//!
//! Owns: the counts, and the order of admission. Must not know: the content of a stream, or when a stream is
//! resumed.
//! Invariants: at most [`AT_ONCE`] streams resume on a member at a time, first come first served. A stream
//! leaving the queue delays no waiting stream. A chosen member counts as busier at once, so concurrent
//! choices spread.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use keyward_etcd::identity::MemberId;

/// Streams resumed at a time by a shard on a member. A resumed watch makes etcd scan its history under a lock
/// blocking writes (etcd-io/etcd#22264), some 500 watches per pass. This many streams, each with as many
/// creates as a hub leaves unanswered, are 256 watches, and with the default of four shards 1,024: two of
/// etcd's passes.
pub const AT_ONCE: usize = 8;

/// The shard's streams being resumed.
#[derive(Default)]
pub struct ResumeLimiter {
    all: Rc<Cell<usize>>,
    /// An entry per member ever resumed on.
    members: RefCell<HashMap<MemberId, ResumeGate>>,
}

struct ResumeGate {
    coming: Rc<Cell<usize>>,
    room: Arc<Semaphore>,
}

/// Counts a stream until dropped.
struct ResumeCount(Rc<Cell<usize>>);

/// A stream being resumed, on any member.
pub struct ResumingStream(#[expect(dead_code, reason = "counts until dropped")] ResumeCount);

/// A stream being resumed on a chosen member.
pub struct QueuedResume {
    counted: (ResumingStream, ResumeCount),
    room: Arc<Semaphore>,
}

/// An admitted stream. Held until the stream's watches are established again, or until a time limit.
pub struct ResumePermit {
    #[expect(dead_code, reason = "counts until dropped")]
    counted: (ResumingStream, ResumeCount),
    #[expect(dead_code, reason = "holds its place until dropped")]
    permit: Option<OwnedSemaphorePermit>,
}

impl ResumeLimiter {
    /// Begins to resume a stream.
    #[must_use]
    pub fn begin(&self) -> ResumingStream {
        ResumingStream(ResumeCount::one(&self.all))
    }

    /// Returns the number of streams being resumed.
    #[must_use]
    pub fn all(&self) -> usize {
        self.all.get()
    }

    /// Returns the number of streams resuming on `member`, waiting streams included.
    #[must_use]
    pub fn resuming_on(&self, member: MemberId) -> usize {
        self.members.borrow().get(&member).map_or(0, |gate| gate.coming.get())
    }

    /// Records the member chosen for the stream.
    #[must_use]
    pub fn queue_on(&self, member: MemberId, resuming: ResumingStream) -> QueuedResume {
        let mut members = self.members.borrow_mut();
        let gate = members
            .entry(member)
            .or_insert_with(|| ResumeGate { coming: Rc::default(), room: Arc::new(Semaphore::new(AT_ONCE)) });
        QueuedResume { counted: (resuming, ResumeCount::one(&gate.coming)), room: Arc::clone(&gate.room) }
    }
}

impl QueuedResume {
    /// Waits for admission. Dropping the future leaves the queue.
    pub async fn turn(self) -> ResumePermit {
        // The semaphore is never closed: a permit arrives sooner or later.
        let permit = self.room.acquire_owned().await.ok();
        ResumePermit { counted: self.counted, permit }
    }
}

impl ResumeCount {
    fn one(count: &Rc<Cell<usize>>) -> Self {
        count.set(count.get() + 1);
        Self(Rc::clone(count))
    }
}

impl Drop for ResumeCount {
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
        let resumes = ResumeLimiter::default();
        let member = MemberId(1);
        let mut turns = Vec::new();
        for _ in 0..AT_ONCE {
            turns.push(
                resumes.queue_on(member, resumes.begin()).turn().now_or_never().expect("there is room"),
            );
        }
        let come = || Box::pin(resumes.queue_on(member, resumes.begin()).turn());
        let (mut second, mut third, mut fourth) = (come(), come(), come());
        for waiting in [&mut second, &mut third, &mut fourth] {
            assert!(waiting.now_or_never().is_none(), "no room");
        }
        assert_eq!((resumes.all(), resumes.resuming_on(member)), (AT_ONCE + 3, AT_ONCE + 3));
        assert!(
            resumes.queue_on(MemberId(2), resumes.begin()).turn().now_or_never().is_some(),
            "another member"
        );
        drop(second);
        drop(turns.pop());
        assert!((&mut fourth).now_or_never().is_none(), "not before the third");
        let turn = (&mut third).now_or_never();
        assert!(turn.is_some(), "its turn");
        assert!((&mut fourth).now_or_never().is_none());
        drop(turn);
        assert!(fourth.now_or_never().is_some());
        drop((third, turns));
        assert_eq!((resumes.all(), resumes.resuming_on(member)), (0, 0));
    }
}
