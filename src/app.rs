//! Composition: starts every part in dependency order, and ends them in reverse.
//!
//! Owns: the control runtime, the shards (each is a [`ShardService`]), signals, the drain. Must not know: the
//! inside of any part. Invariants: no connection is accepted before all parts are running; a drain first
//! reports "not ready", then stops accepting, then lets open calls finish, within its limits; a second signal
//! ends the process at once.

mod cluster_reset;
pub mod hash_password;
mod listeners;
pub mod shard_service;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

use self::cluster_reset::ClusterReset;
use self::listeners::Listeners;
use self::shard_service::{ShardParts, ShardService};
use crate::admin::doctor::Doctor;
use crate::admin::drain::{Exit, Stage};
use crate::admin::socket::{self, AdminCommandService};
use crate::admin::{self, AdminState};
use crate::config::{self, Config};
use crate::credentials::{CredentialSettings, Credentials, MetricsPages, UsersError};
use crate::dial::connect::Connector;
use crate::dial::member_tls as upstream_tls;
use crate::dial::names::NameResolver;
use crate::downstream::acceptor::ShardIntake;
use crate::downstream::connection_table::ConnectionTable;
use crate::downstream::listener_tls::{CurrentListenerTls, ListenerTls, ListenerTlsError};
use crate::downstream::session::{NoSessionKey, Sealer};
use crate::gateway::caller::Identities;
use crate::gateway::login::service::LoginService;
use crate::members::discovery::{Members, ProbeLogin, SeedList};
use crate::members::membership::MembersHandle;
use crate::published::Published;
use crate::reload::{self, Reload, ReloadCheck, ReloadPart};
use crate::revocation::{RevocationRegister, RevocationUpstream, StateFileError};
use crate::rpc::method::METHODS;
use crate::shard::Shard;
use crate::tasks::Tasks;
use crate::telemetry::limiter::report_left_out;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::single_label::one;
use crate::upstream::certificate_pool::CertificatePool;
use crate::upstream::peer_urls::{MintingCaTrusted, PeerTrustCheck};

/// A shard without a heartbeat for this long is stuck.
const STUCK: Duration = Duration::from_secs(1);

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
    Randomness(#[from] crate::credentials::NoRandomness),
    /// No session key.
    #[error("cannot start: {0}")]
    Keys(#[from] NoSessionKey),
    /// Revocations cannot be read or persisted.
    #[error("revocation.state_file: {0}")]
    Revocations(#[from] StateFileError),
    /// Minted certificates would be accepted as a member's certificate.
    #[error("mint.ca: {0}")]
    Mint(MintingCaTrusted),
    /// A shard panicked.
    #[error("a shard died")]
    ShardDied,
}

/// Serves until a signal or a drain command ends the process. The file at `path` is read again at SIGHUP.
///
/// # Errors
/// A failed start, or the panic of a shard.
pub fn serve(config: Config, path: PathBuf) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build_local(tokio::runtime::LocalOptions::default())?;
    let outcome = runtime.block_on(run(Arc::new(config), path));
    // Does not wait longer for a hanging file system.
    runtime.shutdown_timeout(LAST);
    outcome
}

async fn run(config: Arc<Config>, path: PathBuf) -> Result<(), ServeError> {
    let mut signals = Signals::new()?;
    let tasks = Tasks::default();
    let paths = METHODS.iter().map(|method| method.path).chain(std::iter::once("unknown"));
    let metrics = Arc::new(Metrics::new(paths.collect()));
    let tls = members_tls(&config, &metrics)?;
    let names = NameResolver::by(&config.cluster.discovery.dns)?;
    let connector = Connector::resolving(names, tls, config.cluster.connect_timeout);
    let sealer = Arc::new(Sealer::new(reload::session_keys(&config)?));
    sealer.refuse_before(config.session.not_before);
    let forgetting = ClusterReset::new(Arc::clone(&config), Arc::clone(&sealer), Arc::clone(&metrics));
    let (upstream, (probe, seeds), logins) =
        start_control(&config, &connector, &metrics, &forgetting, &tasks)?;
    let (members, credentials) = (upstream.members.clone(), Arc::clone(&upstream.credentials));
    let (register, keeper) = RevocationRegister::open(&config.revocation, upstream, Arc::clone(&sealer))?;
    forgetting.set_state_holders(&credentials, &logins, &register);
    tasks.spawn("revocations", keeper.run()).detach();
    let following = publish_membership_changes(members.clone(), forgetting, Arc::clone(&metrics));
    tasks.spawn("follow members", following).detach();
    let left_out = report_left_out(metrics.log_records_left_out.clone());
    tasks.spawn("log records left out", left_out).detach();
    let (drain, draining) = watch::channel(None);
    let (readiness, ready) = watch::channel(false);
    let in_force = Arc::new(Published::new(Arc::clone(&config)));
    let parts = ShardParts {
        tls: downstream_configs(&config)?,
        config: Arc::clone(&in_force),
        connector,
        members,
        identities: Arc::new(Published::new(Identities::of(&config, &credentials))),
        credentials: Arc::clone(&credentials),
        sealer: Arc::clone(&sealer),
        logins: Arc::clone(&logins),
        metrics: Arc::clone(&metrics),
        ready,
        drain: draining,
        claims: Arc::default(),
        defragmentations: Arc::default(),
        fleet: Arc::new(CertificatePool::new(config.limits.certificate_connections, Arc::clone(&metrics))),
    };
    let (shards, intakes) = start_shards(&parts)?;
    let healthy = Arc::new(AtomicBool::new(true));
    let exit = Arc::new(Exit::default());
    tasks
        .spawn("shard watchdog", watchdog(shards.iter().map(Shard::beats).collect(), Arc::clone(&healthy)))
        .detach();
    let waiting = Arc::new(Published::new(Vec::new()));
    let table = ConnectionTable::new(Arc::clone(&in_force), metrics.connection_figures.clone());
    let (state, desk) = admin_interfaces(&parts, &table, &waiting, &register, healthy, &exit);
    tasks.spawn("readiness", Arc::clone(&state).publish_readiness(readiness)).detach();
    open_admin(&config, &state, desk, &tasks).await?;
    let listeners = Listeners::open(&in_force, &parts.tls, intakes, table, Arc::clone(&metrics))?;
    let trust = peer_trust(&config, &parts);
    let trials = vec![ReloadCheck::mint(Arc::clone(&trust))];
    let mut changing = reload_parts(sealer, &parts, &listeners);
    changing.push(ReloadPart::own_logins(probe, register, Arc::clone(&parts.credentials)));
    changing.push(ReloadPart::seeds(seeds));
    changing.push(ReloadPart::in_force(Arc::clone(&in_force)));
    // The listeners come last: a bound address is not to be released because a later part failed.
    changing.push(listeners.part());
    let reload = Reload::new(path, &config, trials, changing, waiting, metrics);
    tasks.spawn("reload", reload.run()).detach();

    let (refused, further) = tokio::select! {
        () = signals.next() => (None, 1),
        // After a drain command, the SIGTERM of stopping the service repeats the same request and must not
        // count as a second signal.
        () = exit.drain_requested() => (None, 2),
        trusted = trust.follow() => (Some(ServeError::Mint(trusted)), 1),
    };
    let orderly = drain_and_join(in_force.load().drain, &exit, &listeners, &drain, shards);
    let outcome = shut_down(signals, further, &exit, orderly).await;
    refused.map_or(outcome, Err)
}

/// Builds the TLS configuration towards members, if any, and sets the metric for unverified members.
fn members_tls(config: &Config, metrics: &Metrics) -> Result<Option<Arc<rustls::ClientConfig>>, ServeError> {
    let tls = config.cluster.tls.as_ref();
    metrics.members_unverified.set(i64::from(tls.is_some_and(|tls| !tls.verifies_members())));
    Ok(tls.map(upstream_tls::client_config).transpose()?)
}

/// Runs the orderly shutdown; `further` more signals end the process at once.
async fn shut_down(
    mut signals: Signals,
    further: usize,
    exit: &Exit,
    orderly: impl Future<Output = Result<(), ServeError>>,
) -> Result<(), ServeError> {
    tracing::info!("draining");
    let hurried = async {
        for _ in 0..further {
            signals.next().await;
        }
    };
    let outcome = tokio::select! {
        outcome = orderly => outcome,
        () = hurried => { tracing::warn!("ended at once by a second signal"); Ok(()) }
    };
    exit.enter(Stage::Ended);
    if tokio::time::timeout(LAST, exit.receivers_dropped()).await.is_err() {
        tracing::debug!("somebody who waits for the end does not hear of it");
    }
    tracing::info!("ended");
    outcome
}

/// The signals to end the process.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next signal. Cancel-safe.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Builds the state and the commands of the admin interfaces.
fn admin_interfaces(
    parts: &ShardParts,
    table: &Arc<ConnectionTable>,
    waiting: &Arc<Published<Vec<&'static str>>>,
    register: &RevocationRegister,
    healthy: Arc<AtomicBool>,
    exit: &Arc<Exit>,
) -> (Arc<AdminState>, AdminCommandService) {
    let state = Arc::new(AdminState::new(
        parts.members.clone(),
        Arc::clone(&parts.credentials),
        Arc::clone(&parts.sealer),
        register.clone(),
        Arc::clone(&parts.metrics),
        healthy,
        Arc::clone(exit),
    ));
    let doctor = Doctor {
        config: Arc::clone(&parts.config),
        connections: Arc::clone(table),
        pending_restart: Arc::clone(waiting),
        members: parts.members.clone(),
        pages: pages(&parts.connector, &parts.members),
        register: register.clone(),
        credentials: Arc::clone(&parts.credentials),
    };
    let (register, sealer) = (register.clone(), Arc::clone(&parts.sealer));
    let desk = AdminCommandService { register, sealer, state: Arc::clone(&state), doctor };
    (state, desk)
}

/// Builds the check of the members' peer URLs.
fn peer_trust(config: &Config, parts: &ShardParts) -> Arc<PeerTrustCheck> {
    let (connector, members) = (parts.connector.clone(), parts.members.clone());
    Arc::new(PeerTrustCheck::new(&config.cluster, connector, members, Arc::clone(&parts.credentials)))
}

/// Parts changed by a reload while running, apart from the listeners.
fn reload_parts(sealer: Arc<Sealer>, parts: &ShardParts, listeners: &Listeners) -> Vec<ReloadPart> {
    vec![
        ReloadPart::session_keys(Arc::clone(&sealer)),
        ReloadPart::break_glass(sealer),
        ReloadPart::tls(listeners.running()),
        ReloadPart::passwords(Arc::clone(&parts.logins)),
        ReloadPart::cluster_tls(parts.connector.clone()),
        ReloadPart::identities(
            Arc::clone(&parts.identities),
            Arc::clone(&parts.credentials),
            pages(&parts.connector, &parts.members),
        ),
    ]
}

/// Opens the admin address for monitoring, and the admin socket for commands from this machine.
async fn open_admin(
    config: &Config,
    state: &Arc<AdminState>,
    desk: AdminCommandService,
    tasks: &Tasks,
) -> Result<(), ServeError> {
    let unbound = |address: String| move |source| ServeError::Bind { address, source };
    let address = config.admin.address;
    let bound = admin::bind(address).await.map_err(unbound(address.to_string()))?;
    tasks.spawn("admin", admin::serve(bound, Arc::clone(state), tasks.clone())).detach();
    if let Some(path) = &config.admin.socket {
        let bound = socket::bind(path).map_err(unbound(path.display().to_string()))?;
        let serve = socket::serve(bound, path.as_path().into(), Arc::new(desk), tasks.clone());
        tasks.spawn("admin socket", serve).detach();
    }
    Ok(())
}

/// The probe's login and the list of seed endpoints.
type ProbeAndSeeds = (ProbeLogin, SeedList);

/// Starts the tasks for members, credentials and logins on the control runtime.
fn start_control(
    config: &Config,
    connector: &Connector,
    metrics: &Arc<Metrics>,
    forgetting: &ClusterReset,
    tasks: &Tasks,
) -> Result<(RevocationUpstream, ProbeAndSeeds, Arc<LoginService>), ServeError> {
    let settings = CredentialSettings {
        token_ttl: config.cluster.token_ttl,
        logins_per_member: config.limits.logins_in_flight_per_member,
        ..CredentialSettings::default()
    };
    let mut members = Members::new(&config.cluster, connector.clone());
    let (following, losing) = (forgetting.clone(), forgetting.clone());
    members.before_following(move |_left, followed| following.forget(followed));
    members.when_tokens_may_be_lost(move |member| losing.tokens_may_be_lost(member));
    let (channels, asked) = (members.channels(), (members.login(), members.seeds()));
    let (credentials, control) = Credentials::new(settings, channels.clone())?;
    let owned = tasks.clone();
    tasks.spawn("credentials", control.run(owned)).detach();
    let members = members.start(tasks);
    credentials.act_for(&config.users, &config.cluster, pages(connector, &members))?;
    let logins = LoginService::start(
        &config.passwords,
        Arc::clone(&credentials),
        members.clone(),
        pages(connector, &members),
        Arc::clone(metrics),
        tasks,
    );
    Ok((RevocationUpstream { members, channels, credentials }, asked, logins))
}

/// Access to the members' HTTP/1.1 pages.
fn pages(connector: &Connector, members: &MembersHandle) -> MetricsPages {
    MetricsPages { connector: connector.http1(), members: Arc::clone(&members.snapshot) }
}

fn downstream_configs(config: &Config) -> Result<Vec<Option<CurrentListenerTls>>, ServeError> {
    let one = |listener: &Arc<config::Listener>| {
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

/// Passes published membership changes on: the cluster id to the sealer, readiness and leader to the metrics.
async fn publish_membership_changes(members: MembersHandle, forgetting: ClusterReset, metrics: Arc<Metrics>) {
    let mut changes = members.changes.clone();
    loop {
        {
            let snapshot = members.snapshot.load();
            if let Some(cluster) = snapshot.cluster {
                forgetting.pin(cluster);
            }
            metrics.member_ready.clear();
            metrics.member_leader.clear();
            for member in &snapshot.members {
                let label = || one("member", member.id.to_string());
                metrics.member_ready.get_or_create(&label()).set(member.is_ready().into());
                metrics
                    .member_leader
                    .get_or_create(&label())
                    .set((snapshot.leader == Some(member.id)).into());
            }
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Detects a stuck or dead shard.
async fn watchdog(hearts: Vec<Arc<AtomicU64>>, healthy: Arc<AtomicBool>) {
    let mut turns = tokio::time::interval(STUCK);
    let beats = || hearts.iter().map(|heart| heart.load(Ordering::Relaxed)).collect::<Vec<_>>();
    turns.tick().await;
    let mut last = beats();
    loop {
        turns.tick().await;
        let now = beats();
        let alive = last.iter().zip(&now).all(|(last, now)| last != now);
        if healthy.swap(alive, Ordering::Relaxed) != alive {
            if alive {
                tracing::info!("all shards turn again");
            } else {
                tracing::error!("a shard is stuck or gone");
            }
        }
        last = now;
    }
}

async fn drain_and_join(
    settings: config::Drain,
    exit: &Exit,
    listeners: &Listeners,
    drain: &watch::Sender<Option<Instant>>,
    shards: Vec<Shard>,
) -> Result<(), ServeError> {
    let until = Instant::now() + settings.wait;
    exit.enter(Stage::Waiting { until });
    tokio::time::sleep_until(until).await;
    listeners.close().await;
    let until = Instant::now() + settings.timeout;
    exit.enter(Stage::Leaving { until });
    drain.send_replace(Some(until));
    listeners.leave(until);
    let joined = tokio::task::spawn_blocking(|| shards.into_iter().all(Shard::join));
    let limit = settings.timeout + Duration::from_secs(2);
    match tokio::time::timeout(limit, joined).await {
        Ok(Ok(true)) => Ok(()),
        Ok(_) => Err(ServeError::ShardDied),
        Err(_) => {
            tracing::warn!("the drain took too long; ended with calls open");
            Ok(())
        }
    }
}
