//! The table of connections by member, lane and shown certificate.
//!
//! Owns: finding a connection with room, sharing an attempt among all waiters, forgetting ended connections.
//! Must not know: how, or on which thread, a connection is opened. Pure but for the connections' own counts.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::Shared;
use tokio::sync::oneshot;

use crate::credentials::CertificateConnectionKey;
use crate::member_connection::{Connection, InFlight};
use keyward_cluster::membership::{ConnectionTarget, Membership};
use keyward_dial::connect::ConnectError;
use keyward_etcd::identity::MemberId;
use keyward_etcd::rpc::method::Lane;

/// An attempt running in a task of its own; all waiters learn its outcome.
pub(super) type ConnectionOpening = Shared<oneshot::Receiver<Result<(), ConnectError>>>;

/// The purpose of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ConnectionKey {
    pub(super) member: MemberId,
    /// The member's address: its name may later resolve elsewhere, and its address may go to another member.
    pub(super) spot: ConnectionTarget,
    pub(super) lane: Lane,
    pub(super) shows: Option<CertificateConnectionKey>,
}

/// Connections open or being opened.
#[derive(Default)]
pub(super) struct ConnectionSlots(HashMap<ConnectionKey, ConnectionSlot>);

#[derive(Default)]
struct ConnectionSlot {
    open: Vec<Arc<Connection>>,
    opening: Option<ConnectionOpening>,
}

/// A seat for a call on a connection.
pub struct Seat {
    /// The connection.
    pub connection: Arc<Connection>,
    /// Counts the call until dropped.
    pub in_flight: InFlight,
}

/// The result of [`ConnectionSlots::find`].
pub(super) enum SlotLookup {
    /// A seat for a call.
    Seat(Seat),
    /// No room yet: wait for the attempt and look again.
    Opening(ConnectionOpening),
    /// A connection was opened and has closed again.
    GivenUp,
}

impl ConnectionSlots {
    /// Returns a seat for a call, counted in `member`, or an attempt to wait for; `begin` starts an attempt
    /// if none is running. `opened` is true if the caller has waited for an attempt before.
    pub(super) fn find(
        &mut self,
        key: &ConnectionKey,
        member: &Rc<Cell<usize>>,
        opened: bool,
        begin: impl FnOnce() -> ConnectionOpening,
    ) -> SlotLookup {
        if let Some(seat) = self.find_seat(key, member) {
            return SlotLookup::Seat(seat);
        }
        let slot = self.0.entry(key.clone()).or_default();
        if opened && slot.open.is_empty() {
            return SlotLookup::GivenUp;
        }
        // A finished attempt still in the slot was abandoned by its task.
        SlotLookup::Opening(match slot.opening.take_if(|opening| opening.peek().is_none()) {
            Some(opening) => slot.opening.insert(opening).clone(),
            None => slot.opening.insert(begin()).clone(),
        })
    }

    /// Returns a seat for a call on an open connection, counted in `member`.
    pub(super) fn find_seat(&mut self, key: &ConnectionKey, member: &Rc<Cell<usize>>) -> Option<Seat> {
        let slot = self.0.get_mut(key)?;
        slot.open.retain(|connection| !connection.is_closed());
        slot.open.iter().find_map(|connection| {
            let in_flight = connection.enter(member)?;
            Some(Seat { connection: Arc::clone(connection), in_flight })
        })
    }

    /// opening → open, or removed.
    pub(super) fn finish_opening(
        &mut self,
        key: &ConnectionKey,
        opened: Result<Connection, ConnectError>,
    ) -> Result<(), ConnectError> {
        let slot = self.0.entry(key.clone()).or_default();
        slot.opening = None;
        let ended = opened.map(|connection| slot.open.push(Arc::new(connection)));
        self.sweep(key);
        ended
    }

    /// Forgets the ended connections of `key`.
    pub(super) fn sweep(&mut self, key: &ConnectionKey) {
        let Some(slot) = self.0.get_mut(key) else { return };
        slot.open.retain(|connection| !connection.is_closed());
        if slot.open.is_empty() && slot.opening.is_none() {
            self.0.remove(key);
        }
    }

    /// Removes and returns all connections of a lane to a member.
    pub(super) fn take(&mut self, member: MemberId, lane: Lane) -> Vec<Arc<Connection>> {
        let of = self.0.iter_mut().filter(|(key, _)| key.member == member && key.lane == lane);
        of.flat_map(|(_, slot)| std::mem::take(&mut slot.open)).collect()
    }

    /// Removes and returns connections to an address no longer held by their member.
    pub(super) fn take_strays(&mut self, members: &Membership) -> Vec<(Lane, Arc<Connection>)> {
        let is_stray = |key: &ConnectionKey| {
            members.get(key.member).is_none_or(|member| member.connection_target() != key.spot)
        };
        let of = self.0.iter_mut().filter(|(key, _)| is_stray(key));
        of.flat_map(|(key, slot)| slot.open.drain(..).map(|connection| (key.lane, connection))).collect()
    }

    /// Iterates over every connection.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Connection>> {
        self.0.values().flat_map(|slot| &slot.open)
    }
}

/// Creates an attempt, and the sender of its outcome.
pub(super) fn attempt() -> (oneshot::Sender<Result<(), ConnectError>>, ConnectionOpening) {
    let (tell, told) = oneshot::channel();
    (tell, told.shared())
}
