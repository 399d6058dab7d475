//! The connections of one shard: per member and lane, opened when first needed.
//!
//! Owns: finding a connection with room, opening one (a single attempt for all who wait), forgetting those that
//! ended, telling the members' task about members that cannot be reached. Must not know: calls, credentials.
//! Invariant: a connection is shared by all identities; what proves a user travels in each request.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::Shared;
use tokio::sync::oneshot;

use crate::identity::MemberId;
use crate::rpc::method::Lane;
use crate::tasks::Tasks;
use crate::upstream::connect::{ConnectError, Connector};
use crate::upstream::connection::{Connection, Origin};
use crate::upstream::membership::{Hint, Hints, Member};

/// An attempt that a task of its own makes; all who wait are told how it ended.
type Opening = Shared<oneshot::Receiver<Result<(), ConnectError>>>;

#[derive(Default)]
struct Slot {
    open: Vec<Rc<Connection>>,
    opening: Option<Opening>,
}

type Slots = Rc<RefCell<HashMap<(MemberId, Lane), Slot>>>;

/// The connections of one shard.
pub struct Pool {
    connector: Connector,
    hints: Hints,
    tasks: Tasks,
    slots: Slots,
}

impl Pool {
    /// An empty pool; connections run on `tasks`.
    #[must_use]
    pub fn new(connector: Connector, hints: Hints, tasks: Tasks) -> Self {
        Self { connector, hints, tasks, slots: Slots::default() }
    }

    /// A connection of `lane` to `member` that has room, opened if there is none. Cancel-safe: an attempt that was
    /// begun goes on.
    ///
    /// # Errors
    /// None could be opened; nothing was sent, and the member is marked unreachable.
    pub async fn connection(&self, member: &Arc<Member>, lane: Lane) -> Result<Rc<Connection>, ConnectError> {
        let given_up = || failed(member, "the connection was closed as soon as it was open");
        let mut opened = false;
        loop {
            let opening = {
                let mut slots = self.slots.borrow_mut();
                let slot = slots.entry((member.id, lane)).or_default();
                slot.open.retain(|connection| !connection.is_closed());
                if let Some(ready) = slot.open.iter().find(|connection| connection.has_room()) {
                    return Ok(Rc::clone(ready));
                }
                if opened && slot.open.is_empty() {
                    return Err(given_up());
                }
                // One that has ended and is still there was given up by its task.
                match slot.opening.take_if(|opening| opening.peek().is_none()) {
                    Some(opening) => slot.opening.insert(opening).clone(),
                    None => slot.opening.insert(self.open(Arc::clone(member), lane)).clone(),
                }
            };
            // All who waited look again: a burst needs more connections than one.
            opening.await.map_err(|_| given_up())??;
            opened = true;
        }
    }

    /// Ends the open connections of `lane` to `member`, and what they carry as lost. Returns how many there were.
    pub fn give_up(&self, member: MemberId, lane: Lane) -> usize {
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(&(member, lane)) else { return 0 };
        let given_up = std::mem::take(&mut slot.open);
        given_up.iter().for_each(|connection| connection.give_up());
        given_up.len()
    }

    /// Calls in flight to `member` from this shard, on all lanes.
    #[must_use]
    pub fn in_flight(&self, member: MemberId) -> usize {
        let slots = self.slots.borrow();
        [Lane::Unary, Lane::Stream, Lane::Bulk]
            .iter()
            .filter_map(|lane| slots.get(&(member, *lane)))
            .flat_map(|slot| &slot.open)
            .map(|connection| connection.in_flight())
            .sum()
    }

    /// Opens a connection in a task, so that a caller who leaves neither stops nor stalls it for the others.
    fn open(&self, member: Arc<Member>, lane: Lane) -> Opening {
        let (tell, told) = oneshot::channel();
        let (connector, hints, tasks) = (self.connector.clone(), self.hints.clone(), self.tasks.clone());
        let slots = Rc::clone(&self.slots);
        let attempt = async move {
            let opened = connect(&connector, &hints, &tasks, &member, lane).await;
            if let Err(error) = &opened {
                tracing::debug!(member = %member.id, %error, "no connection to the member");
                member.suspect();
                hints.send(Hint::Unreachable(member.id));
            }
            let ended = {
                let mut slots = slots.borrow_mut();
                let slot = slots.entry((member.id, lane)).or_default();
                slot.opening = None;
                opened.map(|connection| slot.open.push(Rc::new(connection)))
            };
            if tell.send(ended).is_err() {
                tracing::trace!("nobody waits for a connection any more");
            }
        };
        self.tasks.spawn("upstream dial", attempt).detach();
        told.shared()
    }
}

async fn connect(
    connector: &Connector,
    hints: &Hints,
    tasks: &Tasks,
    member: &Arc<Member>,
    lane: Lane,
) -> Result<Connection, ConnectError> {
    let stream = connector.connect(&member.endpoint).await?;
    let lost = {
        let (member, hints) = (Arc::clone(member), hints.clone());
        move || {
            member.suspect();
            hints.send(Hint::Unreachable(member.id));
        }
    };
    let origin = Origin::of(&member.endpoint).map_err(|error| failed(member, &error.to_string()))?;
    let opened = Connection::open(stream, origin, lane, tasks, lost).await;
    opened.map_err(|error| failed(member, &error.to_string()))
}

fn failed(member: &Member, reason: &str) -> ConnectError {
    ConnectError::Failed { endpoint: member.endpoint.clone(), reason: reason.into() }
}
