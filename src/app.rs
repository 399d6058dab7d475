//! Composition: starts every part in dependency order, and ends them in reverse.
//!
//! Owns: the composition ([`build`], used by tests too), and around it the control runtime, the shards (each
//! is a [`ShardService`]), signals, the drain. Must not know: the inside of any part. Invariants: no
//! connection is accepted before all parts are running; a drain first reports "not ready", then stops
//! accepting, then lets open calls finish, within its limits; a second signal ends the process at once.

mod activated_sockets;
mod admin_interfaces;
pub mod audit_files;
mod cluster_reset;
pub mod config_check;
pub mod config_writer;
mod connection_end_report;
pub mod control_runtime;
pub mod hash_password;
mod kept_state;
mod listeners;
mod member_connections;
mod orderly_end;
pub mod policy_checks;
pub mod policy_learning;
mod protection;
mod published_rules;
mod service_reports;
mod serving_conditions;
pub mod shard_service;
mod shard_watchdog;
mod successor;
mod take_over;
mod telemetry_export;

use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::signal::unix::Signal;
use tokio::sync::watch;
use tokio::time::Instant;

use self::admin_interfaces::{admin_commands, open_admin};
use self::cluster_reset::ClusterReset;
use self::control_runtime::{ControlRuntime, EndSignals};
use self::kept_state::start_revocations;
use self::listeners::Listeners;
use self::member_connections::{machine_names, member_connector};
use self::orderly_end::{drain_and_join, shut_down};
use self::protection::control_shedding;
use self::published_rules::{PublishedRules, RulesAtStart};
use self::service_reports::report_state;
use self::shard_service::{ShardParts, ShardService};
use self::shard_watchdog::watch_shards;
use self::telemetry_export::ExportGuards;
use crate::reload::{self, Reload, ReloadCheck, ReloadPart, ReloadPartName};
use keyward_access::usage::register::UsageRegister;
use keyward_base::io::descriptor_limit::{DescriptorRoom, raise_descriptor_limit};
use keyward_base::io::kept_file::KeptFileStatus;
use keyward_base::io::listening_sockets::NamedSocket;
use keyward_base::io::service_manager;
use keyward_base::published::Published;
use keyward_base::shard::Shard;
use keyward_base::tasks::Tasks;
use keyward_cluster::discovery::{Members, ProbeLogin, SeedList};
use keyward_cluster::membership::{ControlChannels, MembersHandle};
use keyward_config::reload_request::{ReloadRequestReceiver, reload_requests};
use keyward_config::{Config, ConfigSources, ConfigWarning};
use keyward_dial::connect::Connector;
use keyward_dial::member_tls as upstream_tls;
use keyward_dial::names::NameResolver;
use keyward_downstream::acceptor::ShardIntake;
use keyward_downstream::connection_table::ConnectionTable;
use keyward_downstream::listener_tls::{CurrentListenerTls, ListenerTls, ListenerTlsError};
use keyward_downstream::session::{NoSessionKey, Sealer};
use keyward_etcd::refusal::RefusalReason;
use keyward_etcd::rpc::method::METHODS;
use keyward_gateway::login::service::LoginService;
use keyward_operations::admin::drain::Exit;
use keyward_operations::admin::socket::AdminCommandService;
use keyward_operations::revocation::StateFileError;
use keyward_records::audit::log::{AuditBegin, AuditCloseGuard, AuditLog};
use keyward_records::audit::recorder::AuditStartError;
use keyward_telemetry::limiter::report_left_out;
use keyward_telemetry::metrics::Metrics;
use keyward_telemetry::single_label::one;
use keyward_upstream::certificate_pool::CertificatePool;
use keyward_upstream::credentials::{CredentialSettings, Credentials, MetricsPages, UsersError};
use keyward_upstream::own_keys::OwnKeysUpstream;
use keyward_upstream::peer_urls::{MintingCaTrusted, PeerTrustCheck};

/// Time limit for pending file operations and final reports at the end.
const LAST: Duration = Duration::from_secs(1);

/// Fatal errors of the process.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A listener's address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// TLS towards clients cannot be set up.
    #[error("listener {listener}: {source}")]
    DownstreamTls {
        /// Name of the listener.
        listener: Arc<str>,
        /// The TLS error.
        source: ListenerTlsError,
    },
    /// TLS towards members cannot be set up.
    #[error("cluster.tls: {0}")]
    UpstreamTls(#[from] upstream_tls::MemberTlsError),
    /// A user's credential cannot be used.
    #[error("user: {0}")]
    Users(#[from] UsersError),
    /// An operating system resource is missing.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
    /// No random bytes.
    #[error("cannot start: {0}")]
    Randomness(#[from] keyward_upstream::credentials::NoRandomness),
    /// No session key.
    #[error("cannot start: {0}")]
    Keys(#[from] NoSessionKey),
    /// Revocations cannot be read or persisted.
    #[error("revocation.state_file: {0}")]
    Revocations(#[from] StateFileError),
    /// Minted certificates would be accepted as a member's certificate.
    #[error("mint.ca: {0}")]
    Mint(MintingCaTrusted),
    /// The audit log cannot be written.
    #[error("{0}")]
    Audit(#[from] AuditStartError),
    /// The listening sockets cannot be taken over; the process that serves goes on.
    #[error("nothing was taken over: {0}")]
    TakeOver(String),
    /// A socket received from the service manager cannot be used.
    #[error("socket activation: {0}")]
    Activation(io::Error),
    /// A shard panicked.
    #[error("a shard died")]
    ShardDied,
    /// The process served, and its last audit records could not be written.
    #[error("{0} audit records were not written")]
    RecordsLost(u64),
}

/// Serves until a signal or a drain command ends the process. `sources` are read again at SIGHUP;
/// `warnings` are those of the first reading.
///
/// # Errors
/// A failed start, the panic of a shard, or audit records that were not written at the end.
pub fn serve(
    config: Config,
    warnings: Vec<ConfigWarning>,
    sources: ConfigSources,
    takes_over: bool,
    ControlRuntime { runtime, hangups }: ControlRuntime,
) -> Result<(), ServeError> {
    let activated = activated_sockets::receive(&config)?;
    let started = (takes_over, activated, hangups);
    let outcome = runtime.block_on(run(Arc::new(config), warnings, sources, started));
    // Does not wait longer for a hanging file system.
    runtime.shutdown_timeout(LAST);
    outcome
}

async fn run(
    config: Arc<Config>,
    warnings: Vec<ConfigWarning>,
    sources: ConfigSources,
    (takes_over, activated, hangups): (bool, Vec<NamedSocket>, Signal),
) -> Result<(), ServeError> {
    let mut signals = EndSignals::new()?;
    let successor_requests = successor::requests()?;
    let tasks = Tasks::default();
    // Before the files named in the configuration are read.
    let files = reload::fingerprint(&sources, &config).await;
    let (taking_over, sockets) =
        if takes_over { take_over::begin(&config).await? } else { Default::default() };
    let connector = member_connector(&config)?;
    let mut running = compose(&config, connector, MemberSource::Discovery, &tasks)?;
    running.begin_audit(taking_over.is_some())?;
    let (parts, metrics) = (&running.parts, &running.parts.metrics);
    let descriptors = raise_descriptor_limit();
    descriptors.into_iter().for_each(|room| running.connections.bound_by(room));
    let left_out = report_left_out(metrics.log_records_left_out.clone());
    tasks.spawn("log records left out", left_out).detach();
    let (shards, intakes) = start_shards(parts)?;
    let hearts = shards.iter().map(Shard::beats).collect();
    tasks.spawn("shard watchdog", watch_shards(hearts, Arc::clone(&running.shards_alive))).detach();
    let readiness = Arc::clone(&running.admin.state).publish_readiness(running.ready.clone());
    tasks.spawn("readiness", readiness).detach();
    running.admin.sockets.adopt(activated);
    running.admin.sockets.adopt(sockets);
    let trust = peer_trust(&config, parts);
    let mut trusted = pin!(trust.follow());
    if taking_over.is_some() {
        let unready_reason = || running.admin.state.unready_reason();
        tokio::select! {
            ready = take_over::wait_until_ready(running.ready.subscribe(), unready_reason) => ready?,
            // Readiness waits for this check.
            trusted = &mut trusted => return Err(ServeError::Mint(trusted)),
            () = signals.next() => return Err(ServeError::TakeOver("ended by a signal".into())),
        }
    }
    open_admin(&config, &running.admin, &running.exit, &tasks).await?;
    let (table, sockets) = (Arc::clone(&running.connections), Arc::clone(&running.admin.sockets));
    let listeners = Listeners::open(&parts.config, &parts.tls, intakes, table, Arc::clone(metrics), sockets)?;
    if let Some(taking_over) = taking_over {
        let relay = take_over::finish(taking_over, &running.admin.sockets).await?;
        running.end_guards.0 = running.audit_begin.take().map(|begin| begin.succeed(relay)).transpose()?;
    }
    let trials = vec![ReloadCheck::mint(Arc::clone(&trust))];
    let state = Arc::clone(&running.admin.doctor.reload_state);
    let changing = running.reload_parts(&listeners);
    let reload = Reload::new(sources, &config, trials, changing, state, Arc::clone(metrics));
    let reload = reload.with_told_warnings(&warnings).with_files_at_start(files);
    let reload = reload.with_records(running.rules.records()).with_kept_texts(running.kept_texts);
    tasks.spawn("reload", reload.run(running.reload_requests, hangups)).detach();
    report_started(&config, descriptors);
    tasks.spawn("successor", successor::start_at_signals(successor_requests)).detach();
    service_manager::report_ready().await;
    let (state, exit) = (Arc::clone(&running.admin.state), Arc::clone(&running.exit));
    tasks.spawn("service manager", report_state(state, running.shards_alive, exit)).detach();

    let (refused, further) = tokio::select! {
        () = signals.next() => (None, 1),
        // After a drain command, the SIGTERM of stopping the service repeats the same request and must not
        // count as a second signal.
        () = running.exit.drain_requested() => (None, 2),
        trusted = &mut trusted => (Some(ServeError::Mint(trusted)), 1),
    };
    let mut drain = parts.config.load().drain;
    if running.exit.is_handed_over() {
        // Load balancers notice nothing: the other process is ready at the same address.
        drain.wait = Duration::ZERO;
    }
    let audit = parts.audit.as_ref();
    let orderly = drain_and_join(drain, &running.exit, &listeners, &running.drain, shards, audit);
    let outcome = shut_down(signals, further, &running.exit, audit, orderly).await;
    refused.map_or(outcome, Err)
}

fn report_started(config: &Config, descriptors: Option<DescriptorRoom>) {
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        configuration = &*config.digest,
        shards = config.runtime.shards.get(),
        listeners = config.listeners.len(),
        "started"
    );
    let wanted = config.limits.connections;
    if let Some(room) = descriptors.filter(|room| room.clients < wanted) {
        tracing::warn!(
            descriptors = room.limit,
            fit = room.clients,
            wanted,
            "limits.connections does not fit into the limit on open files: further clients are closed"
        );
    }
}

/// The parts of Keyward on the control runtime, composed by [`build`]. Shards are made of `parts`.
pub struct Running {
    /// Inputs of every shard.
    pub parts: ShardParts,
    /// The control runtime's access to members.
    pub upstream: OwnKeysUpstream,
    /// The members' HTTP/1.1 pages.
    pub pages: MetricsPages,
    /// Executes the commands of the admin socket; its state answers at the admin address.
    pub admin: Arc<AdminCommandService>,
    /// Places of client connections.
    pub connections: Arc<ConnectionTable>,
    /// Publishes readiness to the shards.
    pub ready: watch::Sender<bool>,
    /// Starts the drain of every shard.
    pub drain: watch::Sender<Option<Instant>>,
    /// The stages of the end.
    pub exit: Arc<Exit>,
    /// Requests of operators, for [`Reload::run`].
    reload_requests: ReloadRequestReceiver,
    /// False while a shard is stuck.
    shards_alive: Arc<AtomicBool>,
    probe: ProbeLogin,
    seeds: SeedList,
    rules: PublishedRules,
    kept_texts: Option<KeptFileStatus>,
    /// Begins to write the audit log, unless begun.
    audit_begin: Option<AuditBegin>,
    /// Write the last audit records, and send the last spans and log records, at the end.
    end_guards: (Option<AuditCloseGuard>, Option<ExportGuards>),
}

/// Source of the published members.
pub enum MemberSource {
    /// Probes of the configured cluster.
    Discovery,
    /// The caller publishes the members, and the control runtime's channels to the members.
    Published(MembersHandle, ControlChannels),
}

/// Composes Keyward on the current runtime, in dependency order: everything except for sockets of clients and
/// operators, threads and signals. `connector` opens the connections to members.
///
/// # Errors
/// A part cannot be made of the configuration.
pub fn build(
    config: &Arc<Config>,
    connector: Connector,
    source: MemberSource,
    tasks: &Tasks,
) -> Result<Running, ServeError> {
    let mut running = compose(config, connector, source, tasks)?;
    running.begin_audit(false)?;
    Ok(running)
}

/// [`build`], with an audit log that does not write yet.
fn compose(
    config: &Arc<Config>,
    connector: Connector,
    source: MemberSource,
    tasks: &Tasks,
) -> Result<Running, ServeError> {
    let (metrics, sealer) = (new_metrics(config), new_sealer(config)?);
    let reset = ClusterReset::new(Arc::clone(config), Arc::clone(&sealer), Arc::clone(&metrics));
    let discovery = Members::new(&config.cluster, connector.clone());
    let (probe, seeds) = (discovery.login(), discovery.seeds());
    let (members, channels) = start_members(discovery, source, &reset, tasks);
    let pages = MetricsPages { connector: connector.http1(), members: Arc::clone(&members.snapshot) };
    let credentials = start_credentials(config, &channels, &pages, tasks)?;
    let logins = LoginService::start(
        &config.passwords,
        Arc::clone(&credentials),
        members.clone(),
        pages.clone(),
        Arc::clone(&metrics),
        tasks,
    );
    let upstream =
        OwnKeysUpstream { members: members.clone(), channels, credentials: Arc::clone(&credentials) };
    let register = start_revocations(config, &upstream, &sealer, tasks)?;
    let rules = RulesAtStart::open(config, &upstream, &metrics);
    reset.set_state_holders(&credentials, &logins, &register);
    follow_members(members.clone(), reset, Arc::clone(&metrics), tasks);
    let names = machine_names(config, &connector);
    let (audit, audit_begin) = prepare_audit(config, &names, &metrics)?.unzip();
    let (spans, export_guards) = telemetry_export::start(config, &names, &metrics)?.unzip();
    let ((drain, draining), (ready, readiness)) = (watch::channel(None), watch::channel(false));
    let parts = ShardParts {
        usage: Arc::new(UsageRegister::new(&metrics.limits)),
        config: Arc::new(Published::new(Arc::clone(config))),
        tls: downstream_configs(config)?,
        connector,
        members,
        identities: Arc::new(Published::new(rules.identities(config, &credentials))),
        credentials,
        sealer,
        logins,
        certificate_pool: certificate_pool(config, &metrics),
        metrics,
        ready: readiness,
        drain: draining,
        lock_waits: Arc::default(),
        defragmentations: Arc::default(),
        questions: Arc::default(),
        audit,
        spans,
    };
    let (rules, policy) = rules.start(&parts, tasks);
    start_shedding(&parts, tasks);
    let (exit, shards_alive) = (Arc::new(Exit::default()), Arc::new(AtomicBool::new(true)));
    let connections = connection_table(&parts);
    let kept_texts = reload::kept_texts(config);
    let (stores, (reload, reload_requests)) = ((register, policy, kept_texts.clone()), reload_requests());
    let admin = admin_commands(&parts, (&pages, names), &connections, stores, reload, &shards_alive, &exit);
    Ok(Running {
        parts,
        upstream,
        pages,
        admin: Arc::new(admin),
        connections,
        ready,
        drain,
        exit,
        reload_requests,
        shards_alive,
        probe,
        seeds,
        rules,
        kept_texts,
        audit_begin,
        end_guards: (None, export_guards),
    })
}

fn new_metrics(config: &Config) -> Arc<Metrics> {
    let paths = METHODS.iter().map(|method| method.path).chain(std::iter::once("unknown"));
    let metrics = Arc::new(Metrics::new(paths.collect()));
    let unverified = config.cluster.tls.as_ref().is_some_and(|tls| !tls.verifies_members());
    metrics.members_unverified.set(unverified.into());
    metrics.refusals.name_reasons(RefusalReason::NAMES);
    reload::show_accepted(&metrics, config);
    metrics
}

fn new_sealer(config: &Config) -> Result<Arc<Sealer>, NoSessionKey> {
    let sealer = Arc::new(Sealer::new(reload::session_keys(config)?));
    sealer.refuse_before(config.session.not_before);
    Ok(sealer)
}

fn connection_table(parts: &ShardParts) -> Arc<ConnectionTable> {
    ConnectionTable::new(Arc::clone(&parts.config), parts.metrics.connection_figures.clone())
}

/// Starts the task that follows the pressure on the cluster.
fn start_shedding(parts: &ShardParts, tasks: &Tasks) {
    let (config, members) = (Arc::clone(&parts.config), parts.members.clone());
    tasks.spawn("shedding", control_shedding(config, members, Arc::clone(&parts.usage))).detach();
}

/// Makes the audit log, if configured.
fn prepare_audit(
    config: &Config,
    names: &NameResolver,
    metrics: &Metrics,
) -> Result<Option<(Arc<AuditLog>, AuditBegin)>, AuditStartError> {
    config
        .audit
        .as_ref()
        .map(|settings| AuditLog::prepare(settings, names, metrics.audit.clone()))
        .transpose()
}

impl Running {
    /// Begins to write the audit log; where another process writes it until it is succeeded, only looks if
    /// that will be possible.
    fn begin_audit(&mut self, is_successor: bool) -> Result<(), AuditStartError> {
        if is_successor {
            return self.audit_begin.as_ref().map_or(Ok(()), AuditBegin::check);
        }
        self.end_guards.0 = self.audit_begin.take().map(AuditBegin::begin).transpose()?;
        Ok(())
    }

    /// The parts changed by a reload while running, in the order of publication.
    fn reload_parts(&self, listeners: &Rc<Listeners>) -> Vec<ReloadPart> {
        let parts = &self.parts;
        let credentials = || Arc::clone(&parts.credentials);
        let part = |name| match name {
            ReloadPartName::SessionKeys => ReloadPart::session_keys(Arc::clone(&parts.sealer)),
            ReloadPartName::BreakGlass => ReloadPart::break_glass(Arc::clone(&parts.sealer)),
            ReloadPartName::Tls => ReloadPart::tls(listeners.running()),
            ReloadPartName::Passwords => ReloadPart::passwords(Arc::clone(&parts.logins)),
            ReloadPartName::ClusterTls => ReloadPart::cluster_tls(parts.connector.clone()),
            ReloadPartName::Identities => {
                let (identities, rules) = (Arc::clone(&parts.identities), self.rules.current());
                ReloadPart::identities(identities, rules, credentials(), self.pages.clone())
            }
            ReloadPartName::OwnLogins => {
                let register = self.admin.register.clone();
                let policy = self.admin.policy.clone();
                ReloadPart::own_logins(Arc::clone(&self.probe), register, policy, credentials())
            }
            ReloadPartName::Collectors => {
                let audit = parts.audit.as_ref().and_then(|audit| audit.collector());
                let trace = self.end_guards.1.as_ref().map(|exports| &exports.collector);
                ReloadPart::collectors(audit.cloned(), trace.cloned())
            }
            ReloadPartName::Seeds => ReloadPart::seeds(self.seeds.clone()),
            ReloadPartName::InForce => ReloadPart::in_force(Arc::clone(&parts.config)),
            ReloadPartName::Listeners => listeners.part(),
            ReloadPartName::LogLevel => ReloadPart::log_level(),
        };
        ReloadPartName::ALL.map(part).into()
    }
}

/// Builds the check of the members' peer URLs.
fn peer_trust(config: &Config, parts: &ShardParts) -> Arc<PeerTrustCheck> {
    let (connector, members) = (parts.connector.clone(), parts.members.clone());
    Arc::new(PeerTrustCheck::new(&config.cluster, connector, members, Arc::clone(&parts.credentials)))
}

fn certificate_pool(config: &Config, metrics: &Arc<Metrics>) -> Arc<CertificatePool> {
    Arc::new(CertificatePool::new(config.limits.certificate_connections, Arc::clone(metrics)))
}

/// Starts the publication of members, with the control runtime's channels to the members.
fn start_members(
    mut discovery: Members,
    source: MemberSource,
    reset: &ClusterReset,
    tasks: &Tasks,
) -> (MembersHandle, ControlChannels) {
    match source {
        MemberSource::Published(members, channels) => (members, channels),
        MemberSource::Discovery => {
            let (following, losing) = (reset.clone(), reset.clone());
            discovery.before_following(move |_left, followed| following.forget(followed));
            discovery.when_tokens_may_be_lost(move |member| losing.tokens_may_be_lost(member));
            let channels = discovery.channels();
            (discovery.start(tasks), channels)
        }
    }
}

/// Starts the tokens and the credentials of etcd users.
fn start_credentials(
    config: &Config,
    channels: &ControlChannels,
    pages: &MetricsPages,
    tasks: &Tasks,
) -> Result<Arc<Credentials>, ServeError> {
    let settings = CredentialSettings {
        token_ttl: config.cluster.token_ttl,
        logins_per_member: config.limits.logins_in_flight_per_member,
        ..CredentialSettings::default()
    };
    let (credentials, control) = Credentials::new(settings, channels.clone())?;
    tasks.spawn("credentials", control.run(tasks.clone())).detach();
    credentials.act_for(&config.users, &config.cluster, pages.clone())?;
    Ok(credentials)
}

fn downstream_configs(config: &Config) -> Result<Vec<Option<CurrentListenerTls>>, ServeError> {
    let one = |listener: &Arc<keyward_config::Listener>| {
        let made = listener.tls.as_ref().map(ListenerTls::new).transpose();
        made.map(|made| made.map(|made| Arc::new(Published::new(made))))
            .map_err(|source| ServeError::DownstreamTls { listener: Arc::clone(&listener.name), source })
    };
    config.listeners.iter().map(one).collect()
}

fn start_shards(parts: &ShardParts) -> Result<(Vec<Shard>, Vec<ShardIntake>), ServeError> {
    let mut shards = Vec::new();
    let mut intakes = Vec::new();
    for number in 0..parts.config.load().runtime.shards.get() {
        let (intake, receiver) = ShardIntake::new();
        let parts = parts.clone();
        shards.push(Shard::start(format!("shard-{number}"), move || ShardService::new(parts).run(receiver))?);
        intakes.push(intake);
    }
    Ok((shards, intakes))
}

/// Passes the published members on, now and at every change: the cluster id to the sealer, readiness and
/// leader to the metrics.
fn follow_members(members: MembersHandle, reset: ClusterReset, metrics: Arc<Metrics>, tasks: &Tasks) {
    let mut changes = members.changes.clone();
    let pass_on = move || {
        let snapshot = members.snapshot.load();
        if let Some(cluster) = snapshot.cluster {
            reset.pin(cluster);
        }
        metrics.member_ready.clear();
        metrics.member_leader.clear();
        for member in &snapshot.members {
            let label = one("member", member.id.to_string());
            let leads = snapshot.leader == Some(member.id);
            metrics.member_ready.get_or_create(&label).set(member.is_ready().into());
            metrics.member_leader.get_or_create(&label).set(leads.into());
        }
    };
    pass_on();
    let follow = async move {
        while changes.changed().await.is_ok() {
            pass_on();
        }
    };
    tasks.spawn("follow members", follow).detach();
}
