//! Connections by what they are for: member, lane, and whose certificate they show.
//!
//! Owns: finding one with room, that one attempt serves all who wait, forgetting those that ended. Must not know: how a
//! connection is opened, on which thread. Pure but for the connections' own counts.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::Shared;
use tokio::sync::oneshot;

use crate::identity::MemberId;
use crate::rpc::method::Lane;
use crate::upstream::connect::ConnectError;
use crate::upstream::connection::{Connection, InFlight};
use crate::upstream::credential::Showing;
use crate::upstream::membership::{Membership, Spot};

/// An attempt that a task of its own makes; all who wait are told how it ended.
pub(super) type Opening = Shared<oneshot::Receiver<Result<(), ConnectError>>>;

/// What a connection is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) member: MemberId,
    /// Where the member was: its name may lead elsewhere, and its address to another member.
    pub(super) spot: Spot,
    pub(super) lane: Lane,
    pub(super) shows: Option<Showing>,
}

/// The connections that are open or being opened.
#[derive(Default)]
pub(super) struct Slots(HashMap<Key, Slot>);

#[derive(Default)]
struct Slot {
    open: Vec<Arc<Connection>>,
    opening: Option<Opening>,
}

/// A place on a connection.
pub struct Seat {
    /// The connection.
    pub connection: Arc<Connection>,
    /// Counts the call for as long as it lives.
    pub in_flight: InFlight,
}

/// What was found.
pub(super) enum Found {
    /// A place for a call.
    Seat(Seat),
    /// None yet: wait for this and look again.
    Opening(Opening),
    /// One was opened and is closed again.
    GivenUp,
}

impl Slots {
    /// A place for a call, counted in `member`, or an attempt to wait for, which `begin` begins where there is none.
    /// `opened`: the caller has waited for one before.
    pub(super) fn find(
        &mut self,
        key: &Key,
        member: &Rc<Cell<usize>>,
        opened: bool,
        begin: impl FnOnce() -> Opening,
    ) -> Found {
        let slot = match self.0.get_mut(key) {
            Some(slot) => slot,
            None => self.0.entry(key.clone()).or_default(),
        };
        slot.open.retain(|connection| !connection.is_closed());
        let seat = slot.open.iter().find_map(|connection| {
            let in_flight = connection.enter(member)?;
            Some(Seat { connection: Arc::clone(connection), in_flight })
        });
        if let Some(seat) = seat {
            return Found::Seat(seat);
        }
        if opened && slot.open.is_empty() {
            return Found::GivenUp;
        }
        // One that has ended and is still there was given up by its task.
        Found::Opening(match slot.opening.take_if(|opening| opening.peek().is_none()) {
            Some(opening) => slot.opening.insert(opening).clone(),
            None => slot.opening.insert(begin()).clone(),
        })
    }

    /// opening → open, or gone.
    pub(super) fn land(
        &mut self,
        key: &Key,
        opened: Result<Connection, ConnectError>,
    ) -> Result<(), ConnectError> {
        let slot = self.0.entry(key.clone()).or_default();
        slot.opening = None;
        let ended = opened.map(|connection| slot.open.push(Arc::new(connection)));
        self.sweep(key);
        ended
    }

    /// Forgets connections of this key that have ended.
    pub(super) fn sweep(&mut self, key: &Key) {
        let Some(slot) = self.0.get_mut(key) else { return };
        slot.open.retain(|connection| !connection.is_closed());
        if slot.open.is_empty() && slot.opening.is_none() {
            self.0.remove(key);
        }
    }

    /// Takes all connections of a lane to a member out.
    pub(super) fn take(&mut self, member: MemberId, lane: Lane) -> Vec<Arc<Connection>> {
        let of = self.0.iter_mut().filter(|(key, _)| key.member == member && key.lane == lane);
        of.flat_map(|(_, slot)| std::mem::take(&mut slot.open)).collect()
    }

    /// Takes those out that lead to where no member is any more.
    pub(super) fn strays(&mut self, members: &Membership) -> Vec<(Lane, Arc<Connection>)> {
        let is_stray = |key: &Key| members.get(key.member).is_none_or(|member| member.spot() != key.spot);
        let of = self.0.iter_mut().filter(|(key, _)| is_stray(key));
        of.flat_map(|(key, slot)| slot.open.drain(..).map(|connection| (key.lane, connection))).collect()
    }

    /// Every connection.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Connection>> {
        self.0.values().flat_map(|slot| &slot.open)
    }
}

/// An attempt, and the end by which its task tells how it ended.
pub(super) fn attempt() -> (oneshot::Sender<Result<(), ConnectError>>, Opening) {
    let (tell, told) = oneshot::channel();
    (tell, told.shared())
}
