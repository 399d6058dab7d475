//! The path of a call, from the client's request to the final reply.
//!
//! Owns: the state shared by all calls of a shard, and the call pipeline. Must not know: TOML, TLS, how
//! streams are accepted.
//! Invariant: every value here belongs to a single shard; data shared between shards is immutable, atomic or
//! published as a whole snapshot.

pub mod access_log;
pub mod active_streams;
pub mod addressed_member;
pub mod answer_limit;
pub mod audited_request;
pub mod auth_changes;
pub mod blocking_calls;
pub mod call;
pub mod call_audit;
pub mod call_trace;
pub mod caller;
pub mod client_figures;
pub mod client_register;
pub mod connection_origin;
pub mod defragment;
pub mod exchange;
mod fatal_requests;
pub mod forward;
pub mod health;
pub mod hot_prefixes;
pub mod inflating;
mod lasting_call_records;
pub mod leadership;
mod local_reads;
pub mod login;
pub mod member_answers;
pub mod namespace_leases;
pub mod namespaces;
pub mod pass_through;
pub mod password_revalidation;
pub mod permission;
pub mod pipeline;
pub mod pipeline_result;
pub mod proof_basis;
pub mod read_floor;
pub mod removal;
pub mod reply;
mod reply_contents;
mod request_body;
mod required_identity;
pub mod retries;
pub mod rewritten_answer;
pub mod shard_answers;
pub mod shard_questions;
pub mod shard_rows;
pub mod slow_calls;
pub mod streams;
pub mod unary_request;
pub mod unread_answers;
mod unread_need;
pub mod usage_limits;
pub mod vulnerable_members;
pub mod whole_answer;
pub mod write_order;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::USER_AGENT;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::access_log::{AccessLog, RecordSinks};
use crate::active_streams::ActiveStreams;
use crate::call::CallSnapshot;
use crate::call_trace::{CallTracer, SpanQueue};
use crate::caller::{Caller, CallerIdentification, ConnectionCallers, Identities};
use crate::client_register::ClientRegister;
use crate::hot_prefixes::HotPrefixes;
use crate::login::service::LoginService;
use crate::retries::RetryBudget;
use crate::slow_calls::SlowCalls;
use crate::unread_answers::{ConnectionUnread, UnreadAnswers};
use keyward_access::policy::shadow_register::ShadowRegister;
use keyward_access::usage::refusal_pace::RefusalPace;
use keyward_access::usage::register::UsageRegister;
use keyward_base::published::Published;
use keyward_base::tasks::Tasks;
use keyward_base::wall_deadline::WallDeadline;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::membership::AuthSetting;
use keyward_config::memory_budgets::BLOCKED_REQUEST_MEMORY;
use keyward_config::{Config, Listener, OnExpiry};
use keyward_downstream::connection_activity::ConnectionActivity;
use keyward_downstream::request_memory::{
    ConnectionRequests, REQUEST, RequestLimits, RequestMemory, RequestMemoryCharge, Requester, header_bytes,
};
use keyward_downstream::revision_watermark::RevisionWatermark;
use keyward_downstream::session::Sealer;
use keyward_downstream::stream_budget::StreamByteBudget;
use keyward_downstream::watch_starts::WatchStarts;
use keyward_etcd::identity::named_member::NamedMember;
use keyward_etcd::identity::{ClusterId, MemberId, Peer};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::frame::PREFIX;
use keyward_records::audit::log::AuditLog;
use keyward_streams::lease::lock_wait_register::LockWaitRegister;
use keyward_streams::watch::feeds::WatchFeeds;
use keyward_telemetry::access_settings::SampleCounter;
use keyward_telemetry::limiter::{PeerRecordLimiter, RecordLimiter};
use keyward_telemetry::metrics::Metrics;
use keyward_telemetry::user_metrics::UserFigures;
use keyward_upstream::member_queue::MemberQueues;
use keyward_upstream::send::UpstreamClient;

/// The largest message of a request answered without identifying the caller, such as a login with a name and
/// a password.
pub const UNIDENTIFIED_REQUEST_SIZE: usize = 64 * 1024;

/// How long a change of users or roles may stay unknown to members after the first member applied the change
/// (docs/decisions.md#d21).
const AUTH_PROPAGATION: Duration = Duration::from_secs(2);

/// State shared by all calls of a shard.
pub struct Gateway {
    /// The upstream client: choosing members, proving users, sending requests.
    pub upstream: Rc<UpstreamClient>,
    /// Seals and opens session tokens.
    pub sealer: Arc<Sealer>,
    /// Checks passwords, for all shards.
    pub logins: Arc<LoginService>,
    /// Identifies callers, and caches the session tokens and JWTs recently opened on this shard.
    pub callers: CallerIdentification,
    /// The metrics of the process.
    pub metrics: Arc<Metrics>,
    /// The current configuration.
    pub config: Arc<Published<Config>>,
    /// The published values as of the last call.
    snapshot: RefCell<Rc<CallSnapshot>>,
    /// The number of shards; process-wide budgets are divided by this number.
    shards: usize,
    /// The destinations of the records of calls.
    pub records: Rc<RecordSinks>,
    /// Rate limiter for log records caused by clients without an identity.
    pub log_limiter: Rc<RecordLimiter>,
    /// Spawner for the tasks of this shard's streams.
    pub tasks: Tasks,
    /// True while this replica should receive calls, as reported by `/readyz`.
    pub ready: watch::Receiver<bool>,
    /// Announces the drain of the process and its deadline. Streams and calls of a connection follow
    /// [`ClientConnection::drain`] instead.
    pub drain: watch::Receiver<Option<Instant>>,
    /// The Lock and Campaign calls waiting at etcd, on all shards.
    pub lock_waits: Arc<LockWaitRegister>,
    /// The retry budget.
    pub retries: RetryBudget,
    /// The delay before a hedged read is sent to a second member; `None` disables hedging.
    hedge_after: Option<Duration>,
    /// The queues of calls waiting for an in-flight slot at a member.
    pub member_queues: MemberQueues,
    /// The defragmentations of all shards.
    pub defragmentations: Arc<defragment::DefragmentationRegister>,
    request_memory: RequestMemory,
    /// This shard's active streams and waiting calls, authorized again whenever users, rules or sessions
    /// change.
    pub active_streams: Rc<ActiveStreams>,
    /// This shard's client connections.
    pub clients: Rc<ClientRegister>,
    /// Notified when a connection is dismissed ([`ClientConnection::dismiss`]).
    pub dismissed: Notify,
    /// Memory budget of this shard's watch streams.
    pub watch_budget: Rc<StreamByteBudget>,
    /// The shard's upstream watches shared by client streams.
    pub watch_feeds: Rc<WatchFeeds>,
    /// Answers not yet read by this shard's clients.
    pub unread: Rc<UnreadAnswers>,
    /// The usage of peers, roles and listeners, and the pressure on the cluster, for all shards.
    pub usage: Arc<UsageRegister>,
    /// The grants that callers of this shard lack, where the policy only counts denials.
    pub shadow: Rc<ShadowRegister>,
}

/// A client connection, as seen by its calls.
pub struct ClientConnection {
    /// The client's address and the listener's name, for records.
    pub origin: Rc<connection_origin::ConnectionOrigin>,
    /// The listener through which the connection arrived.
    pub listener: Arc<Listener>,
    /// The peer named by the client certificate.
    pub certificate: Option<Peer>,
    /// The member addressed by every call of this connection, on a per-member listener.
    pub member: Option<NamedMember>,
    /// When the connection must end because its client certificate expires; `None` if the listener keeps
    /// expired connections.
    pub expires_at: Option<WallDeadline>,
    /// Announces the drain of this connection and its deadline.
    pub drain: watch::Receiver<Option<Instant>>,
    /// The revision floor: the highest revision shown to the client. Later answers may not be older
    /// (docs/decisions.md#d21).
    pub floor: Rc<RevisionWatermark>,
    /// This connection's watches "from now" not yet registered at a member. Writes of the connection wait for
    /// the registration.
    pub watch_starts: Rc<WatchStarts>,
    home: Cell<Option<MemberId>>,
    /// Until when calls that any voter can serve go to the home member.
    at_home_until: Cell<Option<Instant>>,
    dismissed: Cell<bool>,
    /// Set by the first request of gRPC, whose user agent counts for the connection.
    is_grpc: Cell<bool>,
    /// The memory held by the connection's requests.
    requests: ConnectionRequests,
    /// The number of open health watches of the connection.
    pub health_watches: Rc<Cell<usize>>,
    /// The users identified on this connection.
    pub remembered: RefCell<ConnectionCallers>,
    /// Answers not yet read by this client.
    pub unread: Rc<ConnectionUnread>,
    /// The calls of this connection refused by a limit.
    pub refusal_pace: RefusalPace,
    /// Tracks usage of the connection: unused connections are closed first to make room for new connections.
    activity: Arc<ConnectionActivity>,
}

/// When to end a stream or connection whose proof expires at `expires`. `None` if the listener keeps expired
/// proofs in use.
#[must_use]
pub fn expiry_deadline(listener: &Listener, expires: SystemTime) -> Option<WallDeadline> {
    match listener.on_expiry {
        OnExpiry::Cut => Some(WallDeadline::from_now(expires)),
        OnExpiry::Keep => None,
    }
}

impl ClientConnection {
    /// A connection without calls so far.
    #[expect(clippy::too_many_arguments, reason = "what is known of a connection, each of it once")]
    #[must_use]
    pub fn new(
        gateway: &Gateway,
        origin: Rc<connection_origin::ConnectionOrigin>,
        listener: Arc<Listener>,
        certificate: Option<Peer>,
        member: Option<NamedMember>,
        until: Option<WallDeadline>,
        drain: watch::Receiver<Option<Instant>>,
        activity: Arc<ConnectionActivity>,
    ) -> Self {
        let remembered = RefCell::new(gateway.callers.remembered());
        let floor = Rc::new(RevisionWatermark::of(gateway.upstream.members.snapshot.load().cluster));
        let unread = ConnectionUnread::new(&gateway.unread, Rc::clone(&origin));
        Self {
            unread,
            activity,
            origin,
            listener,
            certificate,
            member,
            expires_at: until,
            drain,
            floor,
            watch_starts: Rc::default(),
            home: Cell::default(),
            at_home_until: Cell::default(),
            dismissed: Cell::default(),
            is_grpc: Cell::default(),
            requests: ConnectionRequests::default(),
            health_watches: Rc::default(),
            remembered,
            refusal_pace: RefusalPace::default(),
        }
    }

    /// Ends every stream and waiting call of the connection and refuses new calls, because the proof used to
    /// admit the connection is no longer valid.
    pub fn dismiss(&self, gateway: &Gateway) {
        self.dismissed.set(true);
        gateway.dismissed.notify_one();
    }

    /// Marks the connection as used, because a call of `caller` may begin. With auth on, calls without a user
    /// do not count as use, so the connection may still be closed to make room.
    pub fn note_call(&self, gateway: &Gateway, caller: &Caller) {
        if caller.user.is_some() || gateway.upstream.members.auth.now() != AuthSetting::On {
            self.activity.note_call();
        }
    }

    /// Notes a request of gRPC. By the user agent of the first request, the listener spares the connection
    /// its age: clients that cannot take a GOAWAY lose every stream with it. Clients of JSON can take one,
    /// and many of them send no user agent.
    pub fn note_grpc_request(&self, headers: &HeaderMap) {
        if self.is_grpc.replace(true) {
            return;
        }
        let agent = headers.get(USER_AGENT).map(|agent| agent.to_str());
        if agent.transpose().is_ok_and(|agent| self.listener.spares_age_of(agent)) {
            self.activity.spare_age();
        }
    }

    /// Asks the connection to end, and ends its streams and waiting calls, as a drain does. Returns the
    /// number of ended streams.
    pub fn kick(&self, gateway: &Gateway) -> u64 {
        self.activity.kick();
        gateway.active_streams.end_of_client(self, &Refusal::KICKED)
    }

    /// The connection's activity.
    #[must_use]
    pub fn activity(&self) -> &ConnectionActivity {
        &self.activity
    }

    /// True after [`ClientConnection::dismiss`].
    #[must_use]
    pub fn is_dismissed(&self) -> bool {
        self.dismissed.get()
    }

    /// When a stream or waiting call of `caller` must end, and the refusal for the client: at the end of the
    /// caller's proof or of the connection's certificate, whichever is earlier.
    #[must_use]
    pub fn authorization_end(&self, caller: &Caller) -> Option<(WallDeadline, Refusal)> {
        let proof = caller.expires_at.map(|at| (at, Refusal::INVALID_AUTH_TOKEN));
        let welcome = self.expires_at.map(|at| (at, Refusal::CERTIFICATE_ENDED));
        proof.into_iter().chain(welcome).min_by_key(|(at, _)| at.end())
    }

    /// Checks that a call of `caller` may begin: after its end, a connection finishes calls in flight and
    /// starts no new call.
    ///
    /// # Errors
    /// The connection is dismissed, or the caller's proof or the connection's certificate has ended.
    pub fn check_authorized(&self, caller: &Caller) -> Result<(), Refusal> {
        match self.authorization_end(caller) {
            _ if self.is_dismissed() => Err(Refusal::CERTIFICATE_ENDED),
            Some((end, refusal)) if end.is_over() => Err(refusal),
            _ => Ok(()),
        }
    }

    /// Resets the revision floor and the home member if `cluster` differs from the cluster served before:
    /// revisions of two clusters are not comparable.
    pub fn follow(&self, cluster: Option<ClusterId>) {
        if self.floor.follow(cluster) {
            self.home.take();
            self.at_home_until.take();
        }
    }

    /// Sends the calls of the next two seconds that any voter can serve to `member`, the first member to
    /// know a change of users or roles made on this connection.
    pub fn pin_home(&self, member: MemberId) {
        self.home.set(Some(member));
        self.at_home_until.set(Some(Instant::now() + AUTH_PROPAGATION));
    }

    /// True while calls that any voter can serve go to the home member. Calls for the leader or for one
    /// member are not affected.
    #[must_use]
    pub fn is_pinned_home(&self) -> bool {
        let stays = self.at_home_until.get().is_some_and(|until| Instant::now() < until);
        if !stays {
            self.at_home_until.set(None);
        }
        stays
    }
}

impl Gateway {
    /// The gateway of one shard.
    #[expect(clippy::too_many_arguments, reason = "what a shard is given, each of it once")]
    #[must_use]
    pub fn new(
        upstream: Rc<UpstreamClient>,
        sealer: Arc<Sealer>,
        logins: Arc<LoginService>,
        metrics: Arc<Metrics>,
        config: Arc<Published<Config>>,
        tasks: Tasks,
        ready: watch::Receiver<bool>,
        drain: watch::Receiver<Option<Instant>>,
        lock_waits: Arc<LockWaitRegister>,
        defragmentations: Arc<defragment::DefragmentationRegister>,
        identities: Arc<Published<Identities>>,
        audit: Option<Arc<AuditLog>>,
        spans: Option<SpanQueue>,
        usage: Arc<UsageRegister>,
    ) -> Self {
        let begun = config.load_full();
        let shards = begun.runtime.shards.get();
        let watch_budget =
            Rc::new(StreamByteBudget::new(begun.watch.buffer / shards, metrics.watch_held_bytes.clone()));
        let log_limiter = Rc::new(RecordLimiter::new(metrics.log_records_left_out.clone()));
        let log = AccessLog {
            settings: Cell::new(begun.access_log),
            limiter: Rc::clone(&log_limiter),
            refused: PeerRecordLimiter::for_access(metrics.log_records_left_out.clone()),
            samples: SampleCounter::default(),
        };
        let audit_limiter = PeerRecordLimiter::for_audit(metrics.log_records_left_out.clone());
        let not_followed = metrics.export.parents_not_followed.clone();
        let tracer = spans.map(|spans| CallTracer::new(spans, begun.trace_sampling, not_followed));
        let records = RecordSinks {
            tracer,
            metrics: Arc::clone(&metrics),
            users: UserFigures::new(begun.admin.user_metrics),
            log,
            slow_calls: SlowCalls::default(),
            hot_prefixes: HotPrefixes::default(),
            audit,
            audit_limiter: Rc::new(audit_limiter),
        };
        let unread = UnreadAnswers::new(&config, metrics.unread.clone());
        let snapshot = CallSnapshot {
            config: Arc::clone(&begun),
            members: upstream.members.snapshot.load_full(),
            identities: identities.load_full(),
        };
        let shadow = Rc::<ShadowRegister>::default();
        shadow.follow(snapshot.identities.policy_generation());
        Self {
            shadow,
            snapshot: RefCell::new(Rc::new(snapshot)),
            unread: Rc::new(unread),
            usage,
            request_memory: RequestMemory::new(&metrics.request_memory),
            records: Rc::new(records),
            log_limiter,
            ready,
            shards,
            config,
            lock_waits,
            defragmentations,
            upstream,
            retries: RetryBudget::default(),
            hedge_after: begun.cluster.hedge_after,
            member_queues: MemberQueues::new(begun.limits.member_in_flight / shards),
            active_streams: Rc::default(),
            clients: Rc::default(),
            dismissed: Notify::new(),
            watch_feeds: WatchFeeds::new(
                tasks.clone(),
                Rc::clone(&watch_budget),
                metrics.watch_feeds.clone(),
            ),
            watch_budget,
            callers: CallerIdentification::new(Arc::clone(&sealer), identities),
            sealer,
            logins,
            metrics,
            tasks,
            drain,
        }
    }

    /// The published values now. Calls share one copy until a value is replaced, so that a call neither
    /// counts references across threads nor holds a value back.
    #[must_use]
    pub fn snapshot(&self) -> Rc<CallSnapshot> {
        let config = self.config.load();
        let members = self.upstream.members.snapshot.load();
        let identities = self.callers.rules();
        let mut last = self.snapshot.borrow_mut();
        let is_current = Arc::ptr_eq(&last.config, &config)
            && Arc::ptr_eq(&last.members, &members)
            && Arc::ptr_eq(&last.identities, &identities);
        if !is_current {
            self.records.log.settings.set(config.access_log);
            if let Some(tracer) = &self.records.tracer {
                tracer.settings.set(config.trace_sampling);
            }
            let (config, members, identities) =
                (Arc::clone(&config), Arc::clone(&members), Arc::clone(&identities));
            *last = Rc::new(CallSnapshot { config, members, identities });
        }
        Rc::clone(&last)
    }

    /// The connection's home member: chosen on first use, and chosen again when the previous home is not
    /// ready.
    #[must_use]
    pub fn home(&self, client: &ClientConnection) -> Option<MemberId> {
        client.follow(self.upstream.members.snapshot.load().cluster);
        let chosen = self.upstream.choose(MemberTarget::Home(client.home.get()), &[]).map(|member| member.id);
        client.home.set(chosen.or(client.home.get()));
        chosen
    }

    /// An empty memory account of a request, limited by the budgets of the shard and of the connection.
    #[must_use]
    pub fn hold(&self, client: &ClientConnection, requester: Requester) -> RequestMemoryCharge {
        let limits = self.config.load().limits;
        // The budget admits at least a single request of the largest size; otherwise no request of that size
        // could pass.
        let largest = limits.request_size + PREFIX;
        let limits = RequestLimits { all: (limits.replay_buffer / self.shards).max(largest), largest };
        self.request_memory.hold(&client.requests, requester, limits)
    }

    /// Charges a request's header list to the memory budget, until the returned guard is dropped.
    ///
    /// # Errors
    /// The budget has no room for the request.
    pub fn hold_request(
        &self,
        client: &ClientConnection,
        requester: Requester,
        headers: &HeaderMap,
    ) -> Result<RequestMemoryCharge, Refusal> {
        let mut held = self.hold(client, requester);
        let room = held.charge(REQUEST + header_bytes(headers));
        if room { Ok(held) } else { Err(Refusal::TOO_MANY_REQUESTS) }
    }

    /// The memory account charged for the caller's requests.
    #[must_use]
    pub fn requester(&self, caller: &Caller) -> Requester {
        let nobody = caller.user.is_none() && self.upstream.members.auth.now() != AuthSetting::Off;
        if nobody { Requester::Anybody } else { Requester::Known }
    }

    /// Charges a request waiting in etcd without a time limit. Such requests have a budget of their own,
    /// because thousands of them must not use up the budget of all calls. `None` if the budget has no room.
    #[must_use]
    pub fn hold_waiting(&self, client: &ClientConnection, bytes: usize) -> Option<RequestMemoryCharge> {
        let largest = self.config.load().limits.request_size + PREFIX;
        let limits = RequestLimits { all: BLOCKED_REQUEST_MEMORY.max(largest), largest };
        let mut held = self.request_memory.hold_waiting(&client.requests, limits);
        held.charge(bytes).then_some(held)
    }
}
