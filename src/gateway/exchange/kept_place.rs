//! A call's place at a member, which outlives the call where its request does.
//!
//! Owns: keeping the place until the request has left for the member, or never will. Must not know: how places are given.
//! Invariant: a call that is given up while its request stands in hyper's queue has its place until the request is gone from there: else a
//! client that begins and cancels calls could queue requests without end.

use std::cell::Cell;
use std::convert::Infallible;

use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::oneshot::{self, Receiver, Sender};

use crate::tasks::Tasks;
use crate::upstream::turns::Place;

/// A place, until dropped and until the request that goes with it is gone.
pub(super) struct KeptPlace {
    place: Option<Place>,
    request: Cell<Option<Receiver<Infallible>>>,
    tasks: Tasks,
}

impl KeptPlace {
    pub(super) fn new(place: Place, tasks: &Tasks) -> Self {
        Self { place: Some(place), request: Cell::default(), tasks: tasks.clone() }
    }

    /// For a request that goes with this place: it is gone when what is returned is dropped.
    pub(super) fn track(&self) -> Sender<Infallible> {
        let (request, gone) = oneshot::channel();
        self.request.set(Some(gone));
        request
    }
}

impl Drop for KeptPlace {
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
