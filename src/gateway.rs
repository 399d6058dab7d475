//! The way of a call: from the client's request to an honest reply.
//!
//! Owns: what a shard needs for every call, and the pipeline. Must not know: TOML, TLS, how streams are accepted.
//! Invariant: everything here belongs to one shard; what shards share is immutable, atomic or published whole.

pub mod access_log;
pub mod addressed;
pub mod blocked;
pub mod caller;
mod contents;
pub mod current;
pub mod defragment;
pub mod exchange;
mod gathering;
pub mod health;
pub mod inflating;
pub mod leadership;
pub mod live;
pub mod login;
pub mod member_answers;
pub mod pipeline;
pub mod proofs;
pub mod removal;
pub mod reply;
pub mod retries;
pub mod streams;
pub mod unread;
pub mod write_order;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::config::{Config, Listener, OnExpiry};
use crate::downstream::connection_activity::ConnectionActivity;
use crate::downstream::floor::Floor;
use crate::downstream::request_memory::{
    ConnectionRequests, Held, REQUEST, RequestLimits, RequestMemory, Requester, header_bytes,
};
use crate::downstream::session::Sealer;
use crate::downstream::watch_starts::WatchStarts;
use crate::gateway::access_log::AccessLog;
use crate::gateway::caller::{Caller, Callers, Identities, Remembered};
use crate::gateway::live::Live;
use crate::gateway::login::desk::Logins;
use crate::gateway::retries::Retries;
use crate::gateway::unread::{ConnectionUnread, UnreadAnswers};
use crate::identity::named::NamedMember;
use crate::identity::{ClusterId, MemberId, Peer};
use crate::lease::claims::Claims;
use crate::published::Published;
use crate::refusal::Refusal;
use crate::rpc::frame::PREFIX;
use crate::tasks::Tasks;
use crate::telemetry::limiter::RecordLimiter;
use crate::telemetry::metrics::Metrics;
use crate::upstream::choose::Wanted;
use crate::upstream::membership::Auth;
use crate::upstream::send::Door;
use crate::upstream::turns::Turns;
use crate::watch::budget;

/// Requests of blocked calls in memory, per shard, or one of the largest size: a name, a lease, perhaps a value each.
const WAITING: usize = 8 * 1024 * 1024;

/// The largest message of a request that is answered whoever makes it: a name and a password.
pub const ANYBODYS: usize = 64 * 1024;

/// For how long what one member knows of users may be unknown to others (rules 21).
const SPREADING: Duration = Duration::from_secs(2);

/// Everything that a shard's calls share.
pub struct Gateway {
    /// The way upstream.
    pub door: Rc<Door>,
    /// Seals and opens sessions.
    pub sealer: Arc<Sealer>,
    /// Checks passwords, for all shards.
    pub logins: Arc<Logins>,
    /// Who presented tokens here lately.
    pub callers: Callers,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What the configuration says now.
    pub config: Arc<Published<Config>>,
    /// How many shards share what is a budget of all.
    shards: usize,
    /// Which calls leave a record in the log.
    pub access_log: AccessLog,
    /// Limits the log lines that clients can cause without an identity.
    pub log_limiter: Rc<RecordLimiter>,
    /// The tasks of this shard's streams.
    pub tasks: Tasks,
    /// Whether calls should be sent here, as `/readyz` says.
    pub ready: watch::Receiver<bool>,
    /// Tells when the process drains, and until when; what a connection has open follows its client's.
    pub drain: watch::Receiver<Option<Instant>>,
    /// Locks and campaigns that are being waited for, on all shards.
    pub claims: Arc<Claims>,
    /// What may be sent again.
    pub retries: Retries,
    /// After what time a second member is asked for a read, if at all.
    hedge_after: Option<Duration>,
    /// Whose turn it is at members that have as much as they may.
    pub turns: Turns,
    /// Defragmentations, on all shards.
    pub defragmentations: Arc<defragment::Register>,
    request_memory: RequestMemory,
    /// What lives longer than the decision that let it begin, on this shard.
    pub live: Rc<Live>,
    /// Tells when a connection was dismissed.
    pub dismissed: Notify,
    /// What this shard's watch streams hold.
    pub watch_budget: Rc<budget::Budget>,
    /// Answers that this shard's clients have not taken yet.
    pub unread: Rc<UnreadAnswers>,
}

/// One client connection, as its calls see it.
pub struct Client {
    /// Where it came from.
    pub origin: Rc<access_log::Origin>,
    /// Which listener it came by.
    pub listener: Arc<Listener>,
    /// Who its certificate says it is.
    pub certificate: Option<Peer>,
    /// The member that it is about, where it is about one.
    pub member: Option<NamedMember>,
    /// When its welcome is over.
    pub until: Option<Instant>,
    /// Tells when it is to leave, and until when.
    pub drain: watch::Receiver<Option<Instant>>,
    /// What it was shown: nothing older may follow (rules 21).
    pub floor: Rc<Floor>,
    /// Its watches "from now" that no member has registered yet: its writes go upstream behind them.
    pub watch_starts: Rc<WatchStarts>,
    home: Cell<Option<MemberId>>,
    /// Until when all its calls go home.
    at_home_until: Cell<Option<Instant>>,
    dismissed: Cell<bool>,
    /// What its requests hold.
    requests: ConnectionRequests,
    /// Its health watches that are open.
    pub health_watches: Rc<Cell<usize>>,
    /// Who calls over it.
    pub remembered: RefCell<Remembered>,
    /// Answers that it has not taken yet.
    pub unread: Rc<ConnectionUnread>,
    /// Whether it is in use.
    activity: Arc<ConnectionActivity>,
}

/// When what a proof let in is cut that ends at `expires`. None where the listener lets it go on, or where that is further
/// away than timers can tell.
#[must_use]
pub fn cut_at(listener: &Listener, expires: SystemTime, now: SystemTime) -> Option<Instant> {
    match listener.on_expiry {
        OnExpiry::Cut => Instant::now().checked_add(expires.duration_since(now).unwrap_or_default()),
        OnExpiry::Keep => None,
    }
}

impl Client {
    /// A connection that has seen nothing yet.
    #[expect(clippy::too_many_arguments, reason = "what is known of a connection, each of it once")]
    #[must_use]
    pub fn new(
        gateway: &Gateway,
        origin: Rc<access_log::Origin>,
        listener: Arc<Listener>,
        certificate: Option<Peer>,
        member: Option<NamedMember>,
        until: Option<Instant>,
        drain: watch::Receiver<Option<Instant>>,
        activity: Arc<ConnectionActivity>,
    ) -> Self {
        let remembered = RefCell::new(gateway.callers.remembered());
        let floor = Rc::new(Floor::of(gateway.door.members.snapshot.load().cluster));
        let unread = ConnectionUnread::new(&gateway.unread, Rc::clone(&origin));
        Self {
            unread,
            activity,
            origin,
            listener,
            certificate,
            member,
            until,
            drain,
            floor,
            watch_starts: Rc::default(),
            home: Cell::default(),
            at_home_until: Cell::default(),
            dismissed: Cell::default(),
            requests: ConnectionRequests::default(),
            health_watches: Rc::default(),
            remembered,
        }
    }

    /// What let the connection in lets it in no more: what is open on it ends, and nothing begins.
    pub fn dismiss(&self, gateway: &Gateway) {
        self.dismissed.set(true);
        gateway.dismissed.notify_one();
    }

    /// A call of this caller may begin. One of nobody is none that its connection is kept for, where auth is on.
    pub fn note_call(&self, gateway: &Gateway, caller: &Caller) {
        if caller.user.is_some() || gateway.door.members.auth.now() != Auth::On {
            self.activity.note_call();
        }
    }

    /// Whether it was dismissed.
    #[must_use]
    pub fn is_dismissed(&self) -> bool {
        self.dismissed.get()
    }

    /// When a stream or a call that waits of this caller ends though nobody ends it, and what the client is told: its
    /// connection's welcome is over, or its proof.
    #[must_use]
    pub fn ends(&self, caller: &Caller) -> Option<(Instant, Refusal)> {
        let proof = caller.until.map(|at| (at, Refusal::INVALID_AUTH_TOKEN));
        let welcome = self.until.map(|at| (at, Refusal::SHUTTING_DOWN));
        proof.into_iter().chain(welcome).min_by_key(|(at, _)| *at)
    }

    /// This cluster is served from now on: what was shown of another one binds nobody.
    pub fn follow(&self, cluster: Option<ClusterId>) {
        if self.floor.follow(cluster) {
            self.home.take();
            self.at_home_until.take();
        }
    }

    /// A change of users or roles is known at `member`; at others a little later.
    pub fn stay_at(&self, member: MemberId) {
        self.home.set(Some(member));
        self.at_home_until.set(Some(Instant::now() + SPREADING));
    }

    /// Whether its calls go home now, whatever they are.
    #[must_use]
    pub fn is_at_home(&self) -> bool {
        let stays = self.at_home_until.get().is_some_and(|until| Instant::now() < until);
        if !stays {
            self.at_home_until.set(None);
        }
        stays
    }
}

impl Gateway {
    /// A gateway for one shard.
    #[expect(clippy::too_many_arguments, reason = "what a shard is given, each of it once")]
    #[must_use]
    pub fn new(
        door: Rc<Door>,
        sealer: Arc<Sealer>,
        logins: Arc<Logins>,
        metrics: Arc<Metrics>,
        config: Arc<Published<Config>>,
        tasks: Tasks,
        ready: watch::Receiver<bool>,
        drain: watch::Receiver<Option<Instant>>,
        claims: Arc<Claims>,
        defragmentations: Arc<defragment::Register>,
        identities: Arc<Published<Identities>>,
    ) -> Self {
        let begun = config.load_full();
        let shards = begun.runtime.shards.get();
        let watch_budget =
            Rc::new(budget::Budget::new(begun.watch.buffer / shards, metrics.watch_held_bytes.clone()));
        let log_limiter = Rc::new(RecordLimiter::new(metrics.log_records_left_out.clone()));
        let access_log =
            if begun.log.access { AccessLog::On(Rc::clone(&log_limiter)) } else { AccessLog::Off };
        let unread = UnreadAnswers::new(begun.limits.unread.buffer / shards, metrics.unread.clone());
        Self {
            unread: Rc::new(unread),
            request_memory: RequestMemory::new(metrics.request_memory.clone()),
            access_log,
            log_limiter,
            ready,
            shards,
            config,
            claims,
            defragmentations,
            door,
            retries: Retries::default(),
            hedge_after: begun.cluster.hedge_after,
            turns: Turns::new(begun.limits.member_in_flight / shards),
            live: Rc::default(),
            dismissed: Notify::new(),
            watch_budget,
            callers: Callers::new(Arc::clone(&sealer), identities),
            sealer,
            logins,
            metrics,
            tasks,
            drain,
        }
    }

    /// The connection's own member, chosen when first asked for and again when it is not ready.
    #[must_use]
    pub fn home(&self, client: &Client) -> Option<MemberId> {
        client.follow(self.door.members.snapshot.load().cluster);
        let chosen = self.door.choose(Wanted::Home(client.home.get()), &[]).map(|member| member.id);
        client.home.set(chosen.or(client.home.get()));
        chosen
    }

    /// Nothing yet of what requests may hold on this shard and on this connection.
    #[must_use]
    pub fn hold(&self, client: &Client, requester: Requester) -> Held {
        let limits = self.config.load().limits;
        // At least one request of the largest size, or none of that size would ever pass.
        let largest = limits.request_size + PREFIX;
        let limits = RequestLimits { all: (limits.replay_buffer / self.shards).max(largest), largest };
        self.request_memory.hold(&client.requests, requester, limits)
    }

    /// Holds a request with this header list, for as long as that is kept.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn hold_request(
        &self,
        client: &Client,
        requester: Requester,
        headers: &HeaderMap,
    ) -> Result<Held, Refusal> {
        let mut held = self.hold(client, requester);
        let room = held.more(REQUEST + header_bytes(headers));
        if room { Ok(held) } else { Err(Refusal::TOO_MANY_REQUESTS) }
    }

    /// On whose account this caller's requests are.
    #[must_use]
    pub fn requester(&self, caller: &Caller) -> Requester {
        let nobody = caller.user.is_none() && self.door.members.auth.now() != Auth::Off;
        if nobody { Requester::Anybody } else { Requester::Known }
    }

    /// The same for requests that wait in etcd without limit: thousands of them must not keep all others from being sent. None where there is
    /// no room.
    #[must_use]
    pub fn hold_waiting(&self, client: &Client, bytes: usize) -> Option<Held> {
        let largest = self.config.load().limits.request_size + PREFIX;
        let limits = RequestLimits { all: WAITING.max(largest), largest };
        let mut held = self.request_memory.hold_waiting(&client.requests, limits);
        held.more(bytes).then_some(held)
    }
}
