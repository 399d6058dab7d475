//! A call's in-flight slot at a member, kept until the call's request has left.
//!
//! Owns: keeping the slot until the request was sent to the member or dropped. Must not know: how slots are
//! granted.
//! Invariant: a cancelled call keeps its slot while its request is queued in h2; otherwise a client
//! starting and cancelling calls could queue requests without limit.

use std::cell::Cell;
use std::convert::Infallible;

use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::oneshot::{self, Receiver, Sender};

use keyward_base::tasks::Tasks;
use keyward_upstream::member_queue::MemberSlot;

/// An in-flight slot, freed after both the guard and the tracked request are dropped.
pub(super) struct TrackedSlot {
    place: Option<MemberSlot>,
    request: Cell<Option<Receiver<Infallible>>>,
    tasks: Tasks,
}

impl TrackedSlot {
    pub(super) fn new(place: MemberSlot, tasks: &Tasks) -> Self {
        Self { place: Some(place), request: Cell::default(), tasks: tasks.clone() }
    }

    /// Ties a request to the slot: the request counts as gone when the returned sender is dropped.
    pub(super) fn track(&self) -> Sender<Infallible> {
        let (request, gone) = oneshot::channel();
        self.request.set(Some(gone));
        request
    }
}

impl Drop for TrackedSlot {
    fn drop(&mut self) {
        let (Some(place), Some(mut request)) = (self.place.take(), self.request.take()) else { return };
        if request.try_recv() == Err(TryRecvError::Empty) {
            let keep = async move {
                drop(request.await);
                drop(place);
            };
            self.tasks.spawn("place of a request that is on its way", keep).detach();
        }
    }
}
