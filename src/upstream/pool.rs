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
use futures_util::future::{LocalBoxFuture, Shared};

use crate::identity::MemberId;
use crate::rpc::method::Lane;
use crate::tasks::Tasks;
use crate::upstream::connect::{ConnectError, Connector};
use crate::upstream::connection::{Connection, Origin};
use crate::upstream::membership::{Hint, Hints, Member};

type Opening = Shared<LocalBoxFuture<'static, Result<Rc<Connection>, ConnectError>>>;

#[derive(Default)]
struct Slot {
    open: Vec<Rc<Connection>>,
    opening: Option<Opening>,
}

/// The connections of one shard.
pub struct Pool {
    connector: Connector,
    hints: Hints,
    tasks: Tasks,
    slots: RefCell<HashMap<(MemberId, Lane), Slot>>,
}

impl Pool {
    /// An empty pool; connections run on `tasks`.
    #[must_use]
    pub fn new(connector: Connector, hints: Hints, tasks: Tasks) -> Self {
        Self { connector, hints, tasks, slots: RefCell::default() }
    }

    /// A connection of `lane` to `member` that has room, opened if there is none. Cancel-safe.
    ///
    /// # Errors
    /// None could be opened; nothing was sent, and the member is marked unreachable.
    pub async fn connection(&self, member: &Arc<Member>, lane: Lane) -> Result<Rc<Connection>, ConnectError> {
        let opening = {
            let mut slots = self.slots.borrow_mut();
            let slot = slots.entry((member.id, lane)).or_default();
            slot.open.retain(|connection| !connection.is_closed());
            if let Some(ready) = slot.open.iter().find(|connection| connection.has_room()) {
                return Ok(Rc::clone(ready));
            }
            match &slot.opening {
                // A finished attempt that nobody cleared: its connection is full or gone by now.
                Some(opening) if opening.peek().is_none() => opening.clone(),
                _ => slot.opening.insert(self.open(Arc::clone(member), lane)).clone(),
            }
        };
        let opened = opening.await;
        self.settle(member, lane, &opened);
        opened
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

    fn settle(&self, member: &Arc<Member>, lane: Lane, opened: &Result<Rc<Connection>, ConnectError>) {
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(&(member.id, lane)) else { return };
        // The first waiter to wake settles for all.
        if slot.opening.take_if(|opening| opening.peek().is_some()).is_none() {
            return;
        }
        match opened {
            Ok(connection) => slot.open.push(Rc::clone(connection)),
            Err(error) => {
                tracing::debug!(member = %member.id, %error, "no connection to the member");
                member.suspect();
                self.hints.send(Hint::Unreachable(member.id));
            }
        }
    }

    fn open(&self, member: Arc<Member>, lane: Lane) -> Opening {
        let (connector, hints, tasks) = (self.connector.clone(), self.hints.clone(), self.tasks.clone());
        async move {
            let stream = connector.connect(&member.endpoint).await?;
            let lost = {
                let member = Arc::clone(&member);
                move || {
                    member.suspect();
                    hints.send(Hint::Unreachable(member.id));
                }
            };
            let failed = |reason: String| ConnectError::Failed {
                endpoint: member.endpoint.clone(),
                reason: reason.into(),
            };
            let origin = Origin::of(&member.endpoint).map_err(|error| failed(error.to_string()))?;
            let opened = Connection::open(stream, origin, lane, &tasks, lost).await;
            opened.map(Rc::new).map_err(|error| failed(error.to_string()))
        }
        .boxed_local()
        .shared()
    }
}
