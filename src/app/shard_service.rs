//! The data path of a thread: builds and serves client connections.
//!
//! Owns: the inputs of a shard ([`ShardParts`]), the shard's gateway, and the task of each connection. Must
//! not know: the number of shards, the acceptor, signals. A shard runs on any local runtime: the binary gives
//! each shard its own thread; in-process tests run shard and control plane on the same runtime. Invariant: a
//! connection uses no shared mutable state outside its shard.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::Either;
use http::{Request, Response};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::app::connection_end_report::ConnectionEndReport;
use keyward_access::usage::register::UsageRegister;
use keyward_base::io::ByteStream;
use keyward_base::published::Published;
use keyward_base::tasks::{TaskHandle, Tasks};
use keyward_cluster::choose::MemberChooser;
use keyward_cluster::membership::MembersHandle;
use keyward_config::Config;
use keyward_dial::connect::Connector;
use keyward_downstream::acceptor::{AcceptedConnection, ClientSocket, OpenListener, UnknownProtocolSocket};
use keyward_downstream::client_body::ClientBody;
use keyward_downstream::client_certificate::ClientCertificate;
use keyward_downstream::client_connection::{
    self, AdmittedClient, ConnectionBounds, ConnectionInputs, IntroducedClient,
};
use keyward_downstream::connection_table::ConnectionPlace;
use keyward_downstream::listener_tls::CurrentListenerTls;
use keyward_downstream::session::Sealer;
use keyward_downstream::turn_length::ShardTurns;
use keyward_gateway::call_trace::SpanQueue;
use keyward_gateway::caller::Identities;
use keyward_gateway::client_figures::ClientFigures;
use keyward_gateway::connection_origin::ConnectionOrigin;
use keyward_gateway::login::service::LoginService;
use keyward_gateway::shard_questions::ShardQuestions;
use keyward_gateway::{
    ClientConnection, Gateway, active_streams, defragment, expiry_deadline, password_revalidation, pipeline,
    shard_answers, unread_answers,
};
use keyward_records::audit::log::AuditLog;
use keyward_rest::{AnswerBody, RestFace, is_rest};
use keyward_streams::lease::lock_wait_register::LockWaitRegister;
use keyward_telemetry::metrics::Metrics;
use keyward_upstream::certificate_pool::CertificatePool;
use keyward_upstream::credentials::Credentials;
use keyward_upstream::ejection::suspect_hung_members;
use keyward_upstream::evacuation::leave_unfit_members;
use keyward_upstream::pool::ConnectionPool;
use keyward_upstream::resume_limiter::ResumeLimiter;
use keyward_upstream::send::UpstreamClient;
use keyward_upstream::waiting_calls::WaitingCalls;

/// Time limit for the end of upstream tasks after the last client connection has ended.
const LAST: Duration = Duration::from_secs(1);

/// Inputs of every shard; all may cross threads.
#[derive(Clone)]
pub struct ShardParts {
    /// The configuration in force.
    pub config: Arc<Published<Config>>,
    /// TLS of each listener of the start, in the configuration's order.
    pub tls: Vec<Option<CurrentListenerTls>>,
    /// Opens connections to members.
    pub connector: Connector,
    /// The published members.
    pub members: MembersHandle,
    /// Tokens per user and member.
    pub credentials: Arc<Credentials>,
    /// Maps peers to etcd users.
    pub identities: Arc<Published<Identities>>,
    /// Seals and opens sessions.
    pub sealer: Arc<Sealer>,
    /// Checks passwords.
    pub logins: Arc<LoginService>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Readiness, as reported by `/readyz`.
    pub ready: watch::Receiver<bool>,
    /// The drain of the process, with the time limit.
    pub drain: watch::Receiver<Option<Instant>>,
    /// Waiting Lock and Campaign calls.
    pub lock_waits: Arc<LockWaitRegister>,
    /// Running defragmentations.
    pub defragmentations: Arc<defragment::DefragmentationRegister>,
    /// The usage of peers, roles and listeners.
    pub usage: Arc<UsageRegister>,
    /// Connections showing a user's certificate.
    pub certificate_pool: Arc<CertificatePool>,
    /// The audit log, if on.
    pub audit: Option<Arc<AuditLog>>,
    /// Calls with a trace, for the collector; `None` if traces are off.
    pub spans: Option<SpanQueue>,
    /// Questions of an operator.
    pub questions: Arc<ShardQuestions>,
}

/// A shard of the data path.
pub struct ShardService {
    gateway: Rc<Gateway>,
    /// The listeners of the start.
    listeners: Vec<Arc<OpenListener>>,
    metrics: Arc<Metrics>,
    /// Client connection tasks, joined by a drain.
    connections: Tasks,
    /// All further tasks: streams, upstream connections, flushers.
    tasks: Tasks,
    /// Tasks evacuating streams and calls from members without service.
    evacuation_tasks: [TaskHandle; 2],
    /// Tasks ending streams without a valid proof, and unread answers.
    expiry_tasks: [TaskHandle; 3],
    ends: Rc<ConnectionEndReport>,
    /// Counts the turns of all connections.
    turns: ShardTurns,
    /// Numbers the connections.
    questions: Arc<ShardQuestions>,
    answering: TaskHandle,
}

impl ShardService {
    /// Builds a shard on the current thread, with a random generator per shard: shards must not choose
    /// members in step.
    #[must_use]
    pub fn new(parts: ShardParts) -> Self {
        Self::with_chooser(parts, MemberChooser::default())
    }

    /// Builds a shard with the caller's chooser: the shard's behaviour is determined by its inputs and the
    /// chooser's seed.
    #[must_use]
    pub fn with_chooser(parts: ShardParts, chooser: MemberChooser) -> Self {
        let tasks = Tasks::default();
        let config = parts.config.load_full();
        let listeners = config.listeners.iter().zip(parts.tls);
        let listeners = listeners.map(|(listener, tls)| {
            Arc::new(OpenListener { config: Arc::clone(listener), tls, drain: parts.drain.clone() })
        });
        let listeners = listeners.collect();
        let upstream = Rc::new(UpstreamClient {
            pool: ConnectionPool::new(
                parts.connector,
                parts.members.hints.clone(),
                tasks.clone(),
                parts.certificate_pool,
                config.cluster.idle_timeout,
            ),
            members: parts.members,
            credentials: parts.credentials,
            chooser,
            resumes: ResumeLimiter::default(),
            waiting_calls: WaitingCalls::default(),
            term: Cell::default(),
        });
        let departures = [
            tasks.spawn("departures", leave_unfit_members(Rc::clone(&upstream))),
            tasks.spawn("what hangs", suspect_hung_members(Rc::clone(&upstream))),
        ];
        let gateway = Rc::new(Gateway::new(
            upstream,
            parts.sealer,
            parts.logins,
            Arc::clone(&parts.metrics),
            parts.config,
            tasks.clone(),
            parts.ready,
            parts.drain,
            parts.lock_waits,
            parts.defragmentations,
            parts.identities,
            parts.audit,
            parts.spans,
            parts.usage,
        ));
        let fallen = [
            tasks.spawn("what stands no more", active_streams::reauthorize_on_changes(Rc::clone(&gateway))),
            tasks.spawn("proofs", password_revalidation::revalidate_passwords(Rc::clone(&gateway))),
            tasks.spawn("unread answers", unread_answers::give_up_unread(Rc::clone(&gateway))),
        ];
        let ends = Rc::new(ConnectionEndReport::new(Arc::clone(&parts.metrics)));
        let answers = shard_answers::answer_questions(Rc::clone(&gateway), parts.questions.join());
        Self {
            questions: parts.questions,
            answering: tasks.spawn("operator's questions", answers),
            gateway,
            listeners,
            metrics: parts.metrics,
            connections: Tasks::default(),
            tasks,
            evacuation_tasks: departures,
            expiry_tasks: fallen,
            ends,
            turns: ShardTurns::default(),
        }
    }

    /// Serves connections until the acceptors are gone, then waits for the last connection's end.
    pub async fn run(self, mut intake: mpsc::Receiver<AcceptedConnection>) {
        while let Some(accepted) = intake.recv().await {
            // Where files are short, a reader over HTTP/1.1 may not pause for long.
            let spares_file = !accepted.place.lacks_descriptors();
            let socket = spares_file.then(|| UnknownProtocolSocket::of(&accepted.socket)).flatten();
            match adopt(accepted.socket) {
                Ok(stream) => {
                    let AcceptedConnection { listener, remote, shard_count: slot, place, .. } = accepted;
                    self.serve(&listener, (stream, socket), remote, place, slot);
                }
                Err(error) => tracing::debug!(%error, "a socket could not be taken over"),
            }
        }
        self.join_connections().await;
    }

    /// Serves a connection of the listener at this index of the start's configuration, in a task. `keep` is
    /// dropped at the connection's end.
    pub fn take(
        &self,
        listener: usize,
        stream: ByteStream,
        remote: Option<SocketAddr>,
        keep: impl Sized + 'static,
    ) {
        if let Some(listener) = self.listeners.get(listener) {
            self.serve(listener, (stream, None), remote, ConnectionPlace::unlisted(), keep);
        }
    }

    /// Serves a connection of any listener.
    fn serve(
        &self,
        listener: &Arc<OpenListener>,
        (stream, socket): (ByteStream, Option<UnknownProtocolSocket>),
        remote: Option<SocketAddr>,
        place: ConnectionPlace,
        keep: impl Sized + 'static,
    ) {
        let limits = self.gateway.config.load().limits;
        let bounds = ConnectionBounds {
            streams: limits.streams_per_connection,
            header_size: limits.header_size,
            handshake: limits.handshake_timeout,
            first_call: limits.client_connections.first_call_timeout,
            pings: limits.client_connections.pings,
        };
        let (gateway, config) = (Rc::clone(&self.gateway), Arc::clone(&listener.config));
        let proxied = remote.is_some_and(|remote| config.is_trusted_proxy(remote.ip()));
        let age = limits.connection_age;
        let (tls, drain, leaves) = (listener.tls.clone(), listener.drain.clone(), listener.drain.clone());
        let activity = Arc::clone(place.activity());
        let listener_figures = self.metrics.listeners.of(&config.name);
        let id = self.questions.next_client();
        let listing = gateway.clients.listing(id);
        let admit = move |introduced: IntroducedClient<'_>| {
            let remote = introduced.source.or(remote);
            let figures = ClientFigures::new(id, introduced.progress);
            let origin =
                Rc::new(ConnectionOrigin::new(Arc::clone(&config.name), remote, listener_figures, figures));
            let ca = config.tls.as_ref().and_then(|tls| tls.clients.ca());
            let leaf = introduced.certificate;
            let shown = leaf.zip(ca).map(|(leaf, ca)| ClientCertificate::read(leaf, &ca.name)).transpose()?;
            let expires = shown.as_ref().map(|shown| shown.expires);
            let until = expires.and_then(|expires| expiry_deadline(&config, expires));
            // A connection with lent logins has no maximum age: on a new connection, calls relying on the
            // lent login would be unauthenticated.
            let age = age.filter(|_| !config.lend_login_identity);
            let old_at = age.map(|age| Instant::now() + with_jitter(age, &gateway.upstream.chooser));
            let peer = shown.map(|shown| shown.peer);
            let member = config.member_of(introduced.server_name.as_deref()).cloned();
            let client = Rc::new(ClientConnection::new(
                &gateway, origin, config, peer, member, until, leaves, activity,
            ));
            gateway.clients.add(&client);
            let dismissed = (Rc::clone(&gateway), Rc::clone(&client));
            let dismiss = Box::new(move || dismissed.1.dismiss(&dismissed.0));
            let face = RestFace { gateway: Rc::clone(&gateway), client: Rc::clone(&client) };
            let answer = move |request| match is_rest(&request) {
                true => Either::Left(face.clone().serve(request)),
                false => {
                    client.note_grpc_request(request.headers());
                    Either::Right(grpc_answer(Rc::clone(&gateway), Rc::clone(&client), request))
                }
            };
            Ok(AdmittedClient { answer, until, old_at, expires, dismiss })
        };
        let odd_authority = listener.config.accept_odd_authority.then(|| Arc::clone(&self.metrics));
        let figures = self.metrics.connection_figures.clone();
        let turns = self.turns.clone();
        let beginning = ConnectionInputs { place, figures, turns, socket, proxied, tls, odd_authority };
        let (ends, tasks) = (Rc::clone(&self.ends), self.tasks.clone());
        let name = Arc::clone(&listener.config.name);
        // Not an async block: it would hold a second copy of everything passed to `serve`.
        let serve =
            client_connection::serve(stream, beginning, bounds, tasks, drain, admit).map(move |end| {
                let _until_then = (keep, listing);
                ends.ended(end, &name, remote);
            });
        self.connections.spawn("client connection", serve).detach();
    }

    /// Waits for the end of every client connection; the remaining upstream tasks then get a second to end.
    pub async fn join_connections(self) {
        self.connections.joined().await;
        // Waits for calls of further shards on connections driven by this shard.
        self.gateway.upstream.pool.retire_shared_connections().joined().await;
        // Only upstream streams and flushers are left, without a waiting client.
        self.gateway.upstream.pool.retire();
        drop((self.gateway, self.evacuation_tasks, self.expiry_tasks, self.answering));
        if tokio::time::timeout(LAST, self.tasks.joined()).await.is_err() {
            self.tasks.abort_all();
        }
    }
}

/// The answer to a gRPC request. The call's future is boxed at once: every move copies the future.
fn grpc_answer(
    gateway: Rc<Gateway>,
    client: Rc<ClientConnection>,
    request: Request<ClientBody>,
) -> impl Future<Output = Response<AnswerBody>> + Unpin {
    Box::pin(pipeline::serve(gateway, client, request, None)).map(|reply| reply.map(AnswerBody::Grpc))
}

/// Returns the age plus or minus a tenth: connections opened together must not be closed together.
fn with_jitter(age: Duration, chooser: &MemberChooser) -> Duration {
    let tenth = age / 10;
    let more = chooser.draw(u64::try_from(tenth.as_millis() * 2).unwrap_or(u64::MAX));
    age - tenth + Duration::from_millis(more)
}

fn adopt(socket: ClientSocket) -> io::Result<ByteStream> {
    Ok(match socket {
        ClientSocket::Tcp(stream) => Box::new(tokio::net::TcpStream::from_std(stream)?),
        ClientSocket::Unix(stream) => Box::new(tokio::net::UnixStream::from_std(stream)?),
    })
}
