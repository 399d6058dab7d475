//! A shard's connections to members, per member and lane, opened on first use.
//!
//! Owns: opening connections (a single attempt for all waiting callers), reporting unreachable members to the
//! members' task. Must not know: calls, passwords, tokens.
//! Invariants: a connection without a user's certificate is shared by all identities of its shard; each
//! request carries its own credential. A connection with a user's certificate carries only the user's calls,
//! from any shard. A member refusing a connection with a user's certificate does not become suspect; for a
//! moment the member is not asked again with the same certificate.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::certificate_pool::{CertificateConnectionPermit, CertificatePool};
use crate::connection_slots::{ConnectionKey, ConnectionOpening, ConnectionSlots, Seat, SlotLookup, attempt};
use crate::credentials::{CertificateConnectionKey, CertificateIdentity, Leaf};
use crate::member_connection::{Connection, ConnectionEnd, ConnectionLifetime, MemberOrigin};
use keyward_base::tasks::Tasks;
use keyward_cluster::choose::{MemberChooser, MemberTarget};
use keyward_cluster::membership::{HintSender, Member, Membership, MembershipHint};
use keyward_dial::connect::{ConnectError, Connector};
use keyward_etcd::identity::MemberId;
use keyward_etcd::rpc::method::Lane;

/// Time limit on the readiness of a user's certificate, and on the member's first byte on a connection with
/// the certificate.
const FIRST_WORD: Duration = Duration::from_secs(5);

/// A shard's own connections, and access to the connections shared by all shards.
pub struct ConnectionPool {
    connector: Connector,
    hints: HintSender,
    tasks: Tasks,
    /// Tasks of the connections with a user's certificate driven by this shard; all shards send on them.
    shared_tasks: Tasks,
    own: Rc<RefCell<ConnectionSlots>>,
    certificate_pool: Arc<CertificatePool>,
    idle: Duration,
    calls: RefCell<HashMap<MemberId, Rc<Cell<usize>>>>,
}

/// The table listing a connection.
#[derive(Clone)]
enum ConnectionHome {
    /// The shard's own table.
    Own(Rc<RefCell<ConnectionSlots>>),
    /// The table shared by all shards.
    Fleet(Arc<CertificatePool>),
}

impl ConnectionHome {
    fn with<T>(&self, look: impl FnOnce(&mut ConnectionSlots) -> T) -> T {
        match self {
            Self::Own(slots) => look(&mut slots.borrow_mut()),
            Self::Fleet(certificate_pool) => look(&mut certificate_pool.slots()),
        }
    }
}

impl ConnectionPool {
    /// Creates an empty pool. Connections run on `tasks`, and are closed after `idle` without a call.
    #[must_use]
    pub fn new(
        connector: Connector,
        hints: HintSender,
        tasks: Tasks,
        certificate_pool: Arc<CertificatePool>,
        idle: Duration,
    ) -> Self {
        let (own, calls) = (Rc::default(), RefCell::default());
        Self { connector, hints, tasks, shared_tasks: Tasks::default(), own, certificate_pool, idle, calls }
    }

    /// Returns a seat on a connection of `lane` to `member`, showing `certificate` if given; opens a
    /// connection if none has room. Cancel-safe: a begun attempt goes on.
    ///
    /// # Errors
    /// No connection could be opened; no request was sent. Without a certificate, the member becomes suspect.
    pub async fn seat(
        &self,
        member: &Arc<Member>,
        lane: Lane,
        certificate: Option<&Arc<CertificateIdentity>>,
    ) -> Result<Seat, ConnectError> {
        let given_up = || failed(member, "the connection was closed as soon as it was open");
        let (shelf, key, calls) = self.place_of(member, lane, certificate);
        let mut opened = false;
        let mut delayed = None;
        loop {
            let begin = || self.open(&shelf, &key, Arc::clone(member), certificate.cloned());
            let opening = match shelf.with(|slots| slots.find(&key, &calls, opened, begin)) {
                SlotLookup::Seat(seat) => return Ok(seat),
                SlotLookup::GivenUp => return Err(given_up()),
                SlotLookup::Opening(opening) => opening,
            };
            delayed.get_or_insert_with(|| member.load.seats.begin());
            // All waiters look again: a burst needs several connections.
            opening.await.map_err(|_| given_up())??;
            opened = true;
        }
    }

    /// As [`ConnectionPool::seat`], on a connection that is open now. `None` if no connection has room.
    #[must_use]
    pub fn seat_now(
        &self,
        member: &Arc<Member>,
        lane: Lane,
        certificate: Option<&Arc<CertificateIdentity>>,
    ) -> Option<Seat> {
        let (shelf, key, calls) = self.place_of(member, lane, certificate);
        shelf.with(|slots| slots.find_seat(&key, &calls))
    }

    /// The table and the key of the connections for a call, and the count of the member's calls.
    fn place_of(
        &self,
        member: &Arc<Member>,
        lane: Lane,
        certificate: Option<&Arc<CertificateIdentity>>,
    ) -> (ConnectionHome, ConnectionKey, Rc<Cell<usize>>) {
        let shows = certificate.map(|certificate| certificate.showing().clone());
        let key = ConnectionKey { member: member.id, spot: member.connection_target(), lane, shows };
        let shelf = match certificate {
            None => ConnectionHome::Own(Rc::clone(&self.own)),
            Some(_) => ConnectionHome::Fleet(Arc::clone(&self.certificate_pool)),
        };
        (shelf, key, self.calls(member.id))
    }

    /// True if each ready member for `wanted` refused the certificate a moment ago.
    #[must_use]
    pub fn is_refused_everywhere(
        &self,
        members: &Membership,
        wanted: MemberTarget,
        shown: &CertificateConnectionKey,
    ) -> bool {
        let (refusals, now) = (&self.certificate_pool.refusals, Instant::now());
        let refuses =
            |member: &&Arc<Member>| refusals.is_refused((member.id, member.connection_target()), shown, now);
        let refusing: Vec<MemberId> =
            members.members.iter().filter(refuses).map(|member| member.id).collect();
        !MemberChooser::has_another_member(members, wanted, &refusing)
    }

    /// Cuts the open connections of `lane` to `member` and loses their calls. Returns the number of
    /// connections.
    pub fn give_up(&self, member: MemberId, lane: Lane) -> usize {
        let mut given_up = self.own.borrow_mut().take(member, lane);
        given_up.extend(self.certificate_pool.slots().take(member, lane));
        given_up.iter().for_each(|connection| connection.give_up());
        given_up.len()
    }

    /// Leaves connections to addresses where their member no longer is: the name resolves elsewhere, the
    /// member was removed, or the cluster changed. Short calls run to their end; streams are cut. Returns the
    /// number of stream connections cut.
    pub fn leave_moved_members(&self, members: &Membership) -> usize {
        let mut strays = self.own.borrow_mut().take_strays(members);
        strays.extend(self.certificate_pool.slots().take_strays(members));
        let (streams, others): (Vec<_>, Vec<_>) =
            strays.into_iter().partition(|(lane, _)| *lane == Lane::Stream);
        others.iter().for_each(|(_, connection)| connection.retire());
        streams.iter().for_each(|(_, connection)| connection.give_up());
        streams.len()
    }

    /// Tells streams on connections of `lane` to `member` to resume on another member, if able. Returns the
    /// number of connections.
    pub fn evacuate(&self, member: MemberId, lane: Lane) -> usize {
        let mut left = self.own.borrow_mut().take(member, lane);
        left.extend(self.certificate_pool.slots().take(member, lane));
        left.iter().for_each(|connection| connection.leave());
        left.len()
    }

    /// Returns the shard's calls in flight to `member`, on all lanes.
    #[must_use]
    pub fn in_flight(&self, member: MemberId) -> usize {
        self.calls.borrow().get(&member).map_or(0, |calls| calls.get())
    }

    /// Retires all connections with a user's certificate: each is closed after its last call, and shards open
    /// new connections. Returns the tasks of the connections driven by this shard, to be joined before the
    /// shard's thread ends.
    #[must_use]
    pub fn retire_shared_connections(&self) -> Tasks {
        self.certificate_pool.slots().all().for_each(|connection| connection.retire());
        self.shared_tasks.clone()
    }

    /// Closes each of the shard's own connections after its last call. Without this call the connections are
    /// never freed: a connection's end callback references the table listing the connection.
    pub fn retire(&self) {
        self.own.borrow().all().for_each(|connection| connection.retire());
    }

    fn calls(&self, member: MemberId) -> Rc<Cell<usize>> {
        Rc::clone(self.calls.borrow_mut().entry(member).or_default())
    }

    /// Opens a connection in a task: a departing caller neither stops nor stalls the attempt for the
    /// remaining callers.
    fn open(
        &self,
        shelf: &ConnectionHome,
        key: &ConnectionKey,
        member: Arc<Member>,
        certificate: Option<Arc<CertificateIdentity>>,
    ) -> ConnectionOpening {
        let (tell, opening) = attempt();
        let dial = DialAttempt {
            connector: self.connector.clone(),
            hints: self.hints.clone(),
            tasks: if certificate.is_some() { self.shared_tasks.clone() } else { self.tasks.clone() },
            certificate_pool: Arc::clone(&self.certificate_pool),
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
            let ended = dial.shelf.with(|slots| slots.finish_opening(&dial.key, opened));
            if tell.send(ended).is_err() {
                tracing::trace!("nobody waits for a connection any more");
            }
        };
        self.tasks.spawn("upstream dial", attempt).detach();
        opening
    }
}

/// An attempt to open a connection.
struct DialAttempt {
    connector: Connector,
    hints: HintSender,
    tasks: Tasks,
    certificate_pool: Arc<CertificatePool>,
    shelf: ConnectionHome,
    key: ConnectionKey,
    member: Arc<Member>,
    idle: Duration,
}

impl DialAttempt {
    async fn shared(&self) -> Result<Connection, ConnectError> {
        let keeping = ConnectionLifetime { idle: self.idle, fresh_until: None };
        let opened = self.open(&self.connector, keeping, None).await;
        if let Err(error) = &opened {
            tracing::debug!(member = %self.member.id, %error, "no connection to the member");
            self.member.suspect();
            self.hints.send(MembershipHint::Unreachable(self.member.id));
        }
        opened
    }

    async fn showing(&self, certificate: &CertificateIdentity) -> Result<Connection, ConnectError> {
        let (refusals, shown) = (&self.certificate_pool.refusals, certificate.showing());
        let target = (self.member.id, self.member.connection_target());
        if refusals.is_refused(target, shown, Instant::now()) {
            return Err(self.not_accepted("a moment ago".into()));
        }
        // Wait for the certificate before taking room: no open connection gives way to an attempt without a
        // certificate. After the time limit, `leaf` gives the reason for the missing certificate.
        drop(tokio::time::timeout(FIRST_WORD, certificate.ready()).await);
        let leaf =
            certificate.leaf().map_err(|error| ConnectError::NoCertificate(error.to_string().into()))?;
        let Some(place) = self.certificate_pool.reserve().await else {
            tracing::warn!(
                user = %certificate.user(),
                "no room for a connection with this user's certificate"
            );
            return Err(ConnectError::NoRoom);
        };
        let opened = self.answering(&leaf, place).await;
        let Err(error) = &opened else {
            refusals.forget(target, shown);
            return opened;
        };
        let is_refusal = matches!(error, ConnectError::NotAccepted { .. });
        if is_refusal || matches!(error, ConnectError::Handshake { .. }) {
            certificate.refused(&leaf);
        }
        if !is_refusal {
            // The members' task finds out, on connections of its own, if the member is at fault.
            self.hints.send(MembershipHint::Unreachable(self.member.id));
        }
        if refusals.note_trouble(target, shown, is_refusal, Instant::now()) {
            tracing::warn!(
                member = %self.member.id, user = %certificate.user(), %error,
                "no connection to the member with this user's certificate; told again in a minute"
            );
        }
        opened
    }

    fn not_accepted(&self, reason: Arc<str>) -> ConnectError {
        ConnectError::NotAccepted { endpoint: self.member.endpoint.clone(), reason }
    }

    async fn answering(
        &self,
        leaf: &Leaf,
        place: CertificateConnectionPermit,
    ) -> Result<Connection, ConnectError> {
        let keeping = ConnectionLifetime { idle: self.idle, fresh_until: leaf.fresh_until() };
        let connector = self.connector.showing(Arc::clone(&leaf.tls));
        let connection = self.open(&connector, keeping, Some(place)).await?;
        match tokio::time::timeout(FIRST_WORD, connection.answered()).await {
            Ok(true) => Ok(connection),
            // In TLS 1.3, Keyward's handshake ends before the member has checked the certificate. Without an
            // alert the member may be ending, or its lists may revoke the certificate: etcd tells that by
            // closing the connection.
            Ok(false) => Err(match connection.certificate_alert() {
                Some(alert) => self.not_accepted(alert),
                None => ConnectError::Handshake {
                    endpoint: self.member.endpoint.clone(),
                    reason: "the member closed the connection: it may not accept the certificate".into(),
                },
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
        keeping: ConnectionLifetime,
        place: Option<CertificateConnectionPermit>,
    ) -> Result<Connection, ConnectError> {
        let stream = connector.connect_at(&self.member.endpoint, self.member.resolved_ip).await?;
        let origin = MemberOrigin::of(&self.member.endpoint)
            .map_err(|error| failed(&self.member, &error.to_string()))?;
        let ended = {
            let (member, hints) = (Arc::clone(&self.member), self.hints.clone());
            let (shelf, key) = (self.shelf.clone(), self.key.clone());
            let own = place.is_none();
            move |how| {
                shelf.with(|slots| slots.sweep(&key));
                if how == ConnectionEnd::Lost {
                    if own {
                        member.suspect();
                    }
                    hints.send(MembershipHint::Unreachable(member.id));
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
