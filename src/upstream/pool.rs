//! The connections that carry a shard's calls: per member and lane, opened when first needed.
//!
//! Owns: opening them (a single attempt for all who wait), telling the members' task about members that cannot be
//! reached. Must not know: calls, passwords, tokens.
//! Invariants: a connection without a user's certificate is shared by all identities of its shard, and what proves a
//! user travels in each request; one with a user's certificate carries that user's calls only, from any shard. That a
//! member takes no connection with a user's certificate says nothing of the member.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::identity::MemberId;
use crate::rpc::method::Lane;
use crate::tasks::Tasks;
use crate::upstream::connect::{ConnectError, Connector};
use crate::upstream::connection::{Connection, Ended, Keeping, Origin};
use crate::upstream::credential::{CertificateIdentity, Leaf};
use crate::upstream::fleet::{Fleet, Place};
use crate::upstream::membership::{Hint, Hints, Member, Membership};
use crate::upstream::slots::{Found, Key, Opening, Seat, Slots, attempt};

/// How long a member may take to say anything on a connection with a user's certificate.
const FIRST_WORD: Duration = Duration::from_secs(5);

/// The connections of one shard, and its way to those that all shards share.
pub struct Pool {
    connector: Connector,
    hints: Hints,
    tasks: Tasks,
    /// Connections with a user's certificate that this shard drives: others send on them too.
    lent: Tasks,
    own: Rc<RefCell<Slots>>,
    fleet: Arc<Fleet>,
    idle: Duration,
    calls: RefCell<HashMap<MemberId, Rc<Cell<usize>>>>,
}

/// Where a connection is found again.
#[derive(Clone)]
enum Shelf {
    /// On this shard.
    Own(Rc<RefCell<Slots>>),
    /// On any.
    Fleet(Arc<Fleet>),
}

impl Shelf {
    fn with<T>(&self, look: impl FnOnce(&mut Slots) -> T) -> T {
        match self {
            Self::Own(slots) => look(&mut slots.borrow_mut()),
            Self::Fleet(fleet) => look(&mut fleet.slots()),
        }
    }
}

impl Pool {
    /// An empty pool; connections run on `tasks`, and are closed after `idle` without a call.
    #[must_use]
    pub fn new(connector: Connector, hints: Hints, tasks: Tasks, fleet: Arc<Fleet>, idle: Duration) -> Self {
        let (own, calls) = (Rc::default(), RefCell::default());
        Self { connector, hints, tasks, lent: Tasks::default(), own, fleet, idle, calls }
    }

    /// A place on a connection of `lane` to `member`, opened if there is none; with `certificate`, on one that shows
    /// that. Cancel-safe: an attempt that was begun goes on.
    ///
    /// # Errors
    /// None could be opened; nothing was sent. Where it was not for the certificate, the member is marked unreachable.
    pub async fn seat(
        &self,
        member: &Arc<Member>,
        lane: Lane,
        certificate: Option<&Arc<CertificateIdentity>>,
    ) -> Result<Seat, ConnectError> {
        let given_up = || failed(member, "the connection was closed as soon as it was open");
        let shows = certificate.map(|certificate| certificate.showing().clone());
        let key = Key { member: member.id, spot: member.spot(), lane, shows };
        let shelf = match certificate {
            None => Shelf::Own(Rc::clone(&self.own)),
            Some(_) => Shelf::Fleet(Arc::clone(&self.fleet)),
        };
        let calls = self.calls(member.id);
        let mut opened = false;
        let mut delayed = None;
        loop {
            let begin = || self.open(&shelf, &key, Arc::clone(member), certificate.cloned());
            let opening = match shelf.with(|slots| slots.find(&key, &calls, opened, begin)) {
                Found::Seat(seat) => return Ok(seat),
                Found::GivenUp => return Err(given_up()),
                Found::Opening(opening) => opening,
            };
            delayed.get_or_insert_with(|| member.conduct.seats.begin());
            // All who waited look again: a burst needs more connections than one.
            opening.await.map_err(|_| given_up())??;
            opened = true;
        }
    }

    /// Ends the open connections of `lane` to `member`, and what they carry as lost. Returns how many there were.
    pub fn give_up(&self, member: MemberId, lane: Lane) -> usize {
        let mut given_up = self.own.borrow_mut().take(member, lane);
        given_up.extend(self.fleet.slots().take(member, lane));
        given_up.iter().for_each(|connection| connection.give_up());
        given_up.len()
    }

    /// Leaves what leads to where no member is any more: its name leads elsewhere, it was removed, the cluster is another. Short
    /// calls end by themselves; streams end as lost. Returns how many connections had streams.
    pub fn leave_strays(&self, members: &Membership) -> usize {
        let mut strays = self.own.borrow_mut().strays(members);
        strays.extend(self.fleet.slots().strays(members));
        let (streams, others): (Vec<_>, Vec<_>) =
            strays.into_iter().partition(|(lane, _)| *lane == Lane::Stream);
        others.iter().for_each(|(_, connection)| connection.retire());
        streams.iter().for_each(|(_, connection)| connection.give_up());
        streams.len()
    }

    /// Has the streams on connections of `lane` to `member` go on elsewhere, where they can. Returns how many connections
    /// there were.
    pub fn leave(&self, member: MemberId, lane: Lane) -> usize {
        let mut left = self.own.borrow_mut().take(member, lane);
        left.extend(self.fleet.slots().take(member, lane));
        left.iter().for_each(|connection| connection.leave());
        left.len()
    }

    /// Calls in flight to `member` from this shard, on all lanes.
    #[must_use]
    pub fn in_flight(&self, member: MemberId) -> usize {
        self.calls.borrow().get(&member).map_or(0, |calls| calls.get())
    }

    /// Connections that this shard drives for others end once no call is on them, and others open their own. Taken before
    /// the shard's thread ends.
    #[must_use]
    pub fn lent(&self) -> Tasks {
        self.fleet.slots().all().for_each(|connection| connection.retire());
        self.lent.clone()
    }

    /// Closes all connections of this shard's own once no call is on them. Without that they stay: what tells of a connection's end
    /// knows where it is found again.
    pub fn retire(&self) {
        self.own.borrow().all().for_each(|connection| connection.retire());
    }

    fn calls(&self, member: MemberId) -> Rc<Cell<usize>> {
        Rc::clone(self.calls.borrow_mut().entry(member).or_default())
    }

    /// Opens a connection in a task, so that a caller who leaves neither stops nor stalls it for the others.
    fn open(
        &self,
        shelf: &Shelf,
        key: &Key,
        member: Arc<Member>,
        certificate: Option<Arc<CertificateIdentity>>,
    ) -> Opening {
        let (tell, opening) = attempt();
        let dial = Dial {
            connector: self.connector.clone(),
            hints: self.hints.clone(),
            tasks: if certificate.is_some() { self.lent.clone() } else { self.tasks.clone() },
            fleet: Arc::clone(&self.fleet),
            shelf: shelf.clone(),
            key: key.clone(),
            member,
            idle: self.idle,
        };
        let attempt = async move {
            let opened = match &certificate {
                None => dial.shared().await,
                Some(certificate) => dial.showing(certificate).await,
            };
            let ended = dial.shelf.with(|slots| slots.land(&dial.key, opened));
            if tell.send(ended).is_err() {
                tracing::trace!("nobody waits for a connection any more");
            }
        };
        self.tasks.spawn("upstream dial", attempt).detach();
        opening
    }
}

/// One attempt to open a connection.
struct Dial {
    connector: Connector,
    hints: Hints,
    tasks: Tasks,
    fleet: Arc<Fleet>,
    shelf: Shelf,
    key: Key,
    member: Arc<Member>,
    idle: Duration,
}

impl Dial {
    async fn shared(&self) -> Result<Connection, ConnectError> {
        let keeping = Keeping { idle: self.idle, fresh_until: None };
        let opened = self.open(&self.connector, keeping, None).await;
        if let Err(error) = &opened {
            tracing::debug!(member = %self.member.id, %error, "no connection to the member");
            self.member.suspect();
            self.hints.send(Hint::Unreachable(self.member.id));
        }
        opened
    }

    async fn showing(&self, certificate: &CertificateIdentity) -> Result<Connection, ConnectError> {
        // First: nobody's connection gives way to one that has nothing to show. Past that the leaf says why there is none.
        drop(tokio::time::timeout(FIRST_WORD, certificate.ready()).await);
        let leaf =
            certificate.leaf().map_err(|error| ConnectError::NoCertificate(error.to_string().into()))?;
        let Some(place) = self.fleet.place().await else {
            tracing::warn!(user = ?certificate.user(), "no room for a connection with this user's certificate");
            return Err(ConnectError::NoRoom);
        };
        let opened = self.answering(&leaf, place).await;
        if let Err(error) = &opened {
            if matches!(error, ConnectError::Handshake { .. }) {
                certificate.refused(&leaf);
            }
            // The members' task looks, on connections of its own, whether it is the member.
            self.hints.send(Hint::Unreachable(self.member.id));
            tracing::warn!(
                member = %self.member.id, user = ?certificate.user(), %error,
                "no connection to the member with this user's certificate"
            );
        }
        opened
    }

    async fn answering(&self, leaf: &Leaf, place: Place) -> Result<Connection, ConnectError> {
        let keeping = Keeping { idle: self.idle, fresh_until: leaf.fresh_until() };
        let connector = self.connector.showing(Arc::clone(&leaf.tls));
        let connection = self.open(&connector, keeping, Some(place)).await?;
        match tokio::time::timeout(FIRST_WORD, connection.answered()).await {
            Ok(true) => Ok(connection),
            // TLS 1.3: the handshake was over for us before the member had looked.
            Ok(false) => Err(ConnectError::Handshake {
                endpoint: self.member.endpoint.clone(),
                reason: "the member does not accept the certificate".into(),
            }),
            Err(_) => {
                connection.give_up();
                Err(failed(&self.member, "the member says nothing"))
            }
        }
    }

    async fn open(
        &self,
        connector: &Connector,
        keeping: Keeping,
        place: Option<Place>,
    ) -> Result<Connection, ConnectError> {
        let stream = connector.connect_at(&self.member.endpoint, self.member.at).await?;
        let origin =
            Origin::of(&self.member.endpoint).map_err(|error| failed(&self.member, &error.to_string()))?;
        let ended = {
            let (member, hints) = (Arc::clone(&self.member), self.hints.clone());
            let (shelf, key) = (self.shelf.clone(), self.key.clone());
            let own = place.is_none();
            move |how| {
                shelf.with(|slots| slots.sweep(&key));
                if how == Ended::Lost {
                    if own {
                        member.suspect();
                    }
                    hints.send(Hint::Unreachable(member.id));
                }
            }
        };
        let opened =
            Connection::open(stream, origin, self.key.lane, &self.tasks, keeping, place, ended).await;
        opened.map_err(|error| failed(&self.member, &error.to_string()))
    }
}

fn failed(member: &Member, reason: &str) -> ConnectError {
    ConnectError::Failed { endpoint: member.endpoint.clone(), reason: reason.into() }
}
