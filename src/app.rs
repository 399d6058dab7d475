//! Composition: every part, in the order in which it starts and, reversed, ends.
//!
//! Owns: the control runtime, the shards (each is a [`Serving`]), signals, the drain. Must not know how any part works inside.
//! Invariants: nothing is accepted before everything is in place; a drain first says "not ready", then stops
//! accepting, then lets what is open finish, within its limits; a second signal ends at once.

mod forgetting;
pub mod hash_password;
mod listeners;
pub mod serving;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

use self::forgetting::Forgetting;
use self::listeners::Listeners;
use self::serving::{Parts, Serving};
use crate::admin::doctor::Doctor;
use crate::admin::drain::{Exit, Stage};
use crate::admin::socket::{self, Desk};
use crate::admin::{self, State};
use crate::config::{self, Config};
use crate::downstream::connection_table::ConnectionTable;
use crate::downstream::listener::Intake;
use crate::downstream::session::{NoSessionKey, Sealer};
use crate::downstream::tls::{Current, ListenerTls, TlsError};
use crate::gateway::caller::Identities;
use crate::gateway::login::desk::Logins;
use crate::published::Published;
use crate::reload::{self, Part, Reload, Trial};
use crate::revocation::{Register, Unusable, Upstream};
use crate::rpc::method::METHODS;
use crate::shard::Shard;
use crate::tasks::Tasks;
use crate::telemetry::limiter::report_left_out;
use crate::telemetry::metrics::{Metrics, one};
use crate::upstream::connect::Connector;
use crate::upstream::credential::{CredentialSettings, Credentials, Pages, UsersError};
use crate::upstream::fleet::Fleet;
use crate::upstream::members::{Members, ProbeLogin, SeedList};
use crate::upstream::membership::MembersHandle;
use crate::upstream::names::Names;
use crate::upstream::peer_urls::{PeerTrust, Trusted};
use crate::upstream::tls as upstream_tls;

/// A shard whose heart has not beaten for this long is stuck.
const STUCK: Duration = Duration::from_secs(1);

/// How long what is being read or written may take at the end.
const LAST: Duration = Duration::from_secs(1);

/// Why the process ends with a failure.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A listener's address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// Which address.
        address: String,
        /// The system's words.
        source: io::Error,
    },
    /// TLS towards clients cannot be set up.
    #[error("listener {listener}: {source}")]
    DownstreamTls {
        /// Which listener.
        listener: Arc<str>,
        /// Why.
        source: TlsError,
    },
    /// TLS towards members cannot be set up.
    #[error("cluster.tls: {0}")]
    UpstreamTls(#[from] upstream_tls::TlsError),
    /// A user's credential cannot be used.
    #[error("user: {0}")]
    Users(#[from] UsersError),
    /// The system lacks something that we cannot do without.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
    /// No random bytes.
    #[error("cannot start: {0}")]
    Randomness(#[from] crate::upstream::credential::NoRandomness),
    /// No session key.
    #[error("cannot start: {0}")]
    Keys(#[from] NoSessionKey),
    /// Revocations cannot be read or kept.
    #[error("revocation.state_file: {0}")]
    Revocations(#[from] Unusable),
    /// What is minted would be good for a member.
    #[error("mint.ca: {0}")]
    Mint(Trusted),
    /// A shard panicked.
    #[error("a shard died")]
    ShardDied,
}

/// Serves until a signal ends it. `path` is read again at SIGHUP.
///
/// # Errors
/// What kept it from starting, or a shard that died.
pub fn serve(config: Config, path: PathBuf) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build_local(tokio::runtime::LocalOptions::default())?;
    let outcome = runtime.block_on(run(Arc::new(config), path));
    // A file system that hangs is not waited for.
    runtime.shutdown_timeout(LAST);
    outcome
}

async fn run(config: Arc<Config>, path: PathBuf) -> Result<(), Error> {
    let mut signals = Signals::new()?;
    let tasks = Tasks::default();
    let paths = METHODS.iter().map(|method| method.path).chain(std::iter::once("unknown"));
    let metrics = Arc::new(Metrics::new(paths.collect()));
    let tls = members_tls(&config, &metrics)?;
    let names = Names::by(&config.cluster.discovery.dns)?;
    let connector = Connector::resolving(names, tls, config.cluster.connect_timeout);
    let sealer = Arc::new(Sealer::new(reload::session_keys(&config)?));
    sealer.refuse_before(config.session.not_before);
    let forgetting = Forgetting::new(Arc::clone(&config), Arc::clone(&sealer), Arc::clone(&metrics));
    let (upstream, (probe, seeds), logins) =
        start_control(&config, &connector, &metrics, &forgetting, &tasks)?;
    let (members, credentials) = (upstream.members.clone(), Arc::clone(&upstream.credentials));
    let (register, keeper) = Register::open(&config.revocation, upstream, Arc::clone(&sealer))?;
    forgetting.tells(&credentials, &logins, &register);
    tasks.spawn("revocations", keeper.run()).detach();
    let following = follow(members.clone(), forgetting, Arc::clone(&metrics));
    tasks.spawn("follow members", following).detach();
    let left_out = report_left_out(metrics.log_records_left_out.clone());
    tasks.spawn("log records left out", left_out).detach();
    let (drain, draining) = watch::channel(None);
    let (readiness, ready) = watch::channel(false);
    let in_force = Arc::new(Published::new(Arc::clone(&config)));
    let parts = Parts {
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
        fleet: Arc::new(Fleet::new(config.limits.certificate_connections, Arc::clone(&metrics))),
    };
    let (shards, intakes) = start_shards(&parts)?;
    let healthy = Arc::new(AtomicBool::new(true));
    let exit = Arc::new(Exit::default());
    tasks
        .spawn("shard watchdog", watchdog(shards.iter().map(Shard::beats).collect(), Arc::clone(&healthy)))
        .detach();
    let waiting = Arc::new(Published::new(Vec::new()));
    let table = ConnectionTable::new(Arc::clone(&in_force), metrics.connection_figures.clone());
    let (state, desk) = administration(&parts, &table, &waiting, &register, healthy, &exit);
    tasks.spawn("readiness", Arc::clone(&state).publish_readiness(readiness)).detach();
    open_admin(&config, &state, desk, &tasks).await?;
    let listeners = Listeners::open(&in_force, &parts.tls, intakes, table, Arc::clone(&metrics))?;
    let trust = peer_trust(&config, &parts);
    let trials = vec![Trial::mint(Arc::clone(&trust))];
    let mut changing = changing(sealer, &parts, &listeners);
    changing.push(Part::own_logins(probe, register, Arc::clone(&parts.credentials)));
    changing.push(Part::seeds(seeds));
    changing.push(Part::in_force(Arc::clone(&in_force)));
    // Last: what is bound is not to be given up again.
    changing.push(listeners.part());
    let reload = Reload::new(path, &config, trials, changing, waiting, metrics);
    tasks.spawn("reload", reload.run()).detach();

    let (refused, further) = tokio::select! {
        () = signals.next() => (None, 1),
        // Who asks for a drain and then stops the service means the same twice.
        () = exit.asked() => (None, 2),
        trusted = trust.follow() => (Some(Error::Mint(trusted)), 1),
    };
    let orderly = leave(in_force.load().drain, &exit, &listeners, &drain, shards);
    let outcome = end(signals, further, &exit, orderly).await;
    refused.map_or(outcome, Err)
}

/// How members are spoken to over TLS, where they are; the metrics tell whether they are verified.
fn members_tls(config: &Config, metrics: &Metrics) -> Result<Option<Arc<rustls::ClientConfig>>, Error> {
    let tls = config.cluster.tls.as_ref();
    metrics.members_unverified.set(i64::from(tls.is_some_and(|tls| !tls.verifies_members())));
    Ok(tls.map(upstream_tls::client_config).transpose()?)
}

/// Ends in an orderly way; so many further signals have it end at once.
async fn end(
    mut signals: Signals,
    further: usize,
    exit: &Exit,
    orderly: impl Future<Output = Result<(), Error>>,
) -> Result<(), Error> {
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
    if tokio::time::timeout(LAST, exit.heard()).await.is_err() {
        tracing::debug!("somebody who waits for the end does not hear of it");
    }
    tracing::info!("ended");
    outcome
}

/// The signals that ask us to end.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Cancel-safe.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// What answers operators.
fn administration(
    parts: &Parts,
    table: &Arc<ConnectionTable>,
    waiting: &Arc<Published<Vec<&'static str>>>,
    register: &Register,
    healthy: Arc<AtomicBool>,
    exit: &Arc<Exit>,
) -> (Arc<State>, Desk) {
    let state = Arc::new(State::new(
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
        waiting: Arc::clone(waiting),
        members: parts.members.clone(),
        pages: pages(&parts.connector, &parts.members),
        register: register.clone(),
        credentials: Arc::clone(&parts.credentials),
    };
    let (register, sealer) = (register.clone(), Arc::clone(&parts.sealer));
    let desk = Desk { register, sealer, state: Arc::clone(&state), doctor };
    (state, desk)
}

/// Who looks at members' peer URLs.
fn peer_trust(config: &Config, parts: &Parts) -> Arc<PeerTrust> {
    let (connector, members) = (parts.connector.clone(), parts.members.clone());
    Arc::new(PeerTrust::new(&config.cluster, connector, members, Arc::clone(&parts.credentials)))
}

/// What a reload changes while we run.
fn changing(sealer: Arc<Sealer>, parts: &Parts, listeners: &Listeners) -> Vec<Part> {
    vec![
        Part::session_keys(Arc::clone(&sealer)),
        Part::break_glass(sealer),
        Part::tls(listeners.running()),
        Part::passwords(Arc::clone(&parts.logins)),
        Part::cluster_tls(parts.connector.clone()),
        Part::identities(
            Arc::clone(&parts.identities),
            Arc::clone(&parts.credentials),
            pages(&parts.connector, &parts.members),
        ),
    ]
}

/// What operators see, and the socket on which those of this machine give commands.
async fn open_admin(config: &Config, state: &Arc<State>, desk: Desk, tasks: &Tasks) -> Result<(), Error> {
    let unbound = |address: String| move |source| Error::Bind { address, source };
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

/// As whom members are asked, and where they are found first.
type Asked = (ProbeLogin, SeedList);

/// The members' task, the credentials' task and that of logins, on the control runtime.
fn start_control(
    config: &Config,
    connector: &Connector,
    metrics: &Arc<Metrics>,
    forgetting: &Forgetting,
    tasks: &Tasks,
) -> Result<(Upstream, Asked, Arc<Logins>), Error> {
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
    let (logins, control) = Logins::new(
        &config.passwords,
        Arc::clone(&credentials),
        members.clone(),
        pages(connector, &members),
        Arc::clone(metrics),
    );
    tasks.spawn("logins", control.run(tasks.clone())).detach();
    Ok((Upstream { members, channels, credentials }, asked, logins))
}

/// Who is asked for the pages that members serve by HTTP/1.1.
fn pages(connector: &Connector, members: &MembersHandle) -> Pages {
    Pages { connector: connector.http1(), members: Arc::clone(&members.snapshot) }
}

fn downstream_configs(config: &Config) -> Result<Vec<Option<Current>>, Error> {
    let one = |listener: &Arc<config::Listener>| {
        let made = listener.tls.as_ref().map(ListenerTls::new).transpose();
        made.map(|made| made.map(|made| Arc::new(Published::new(made))))
            .map_err(|source| Error::DownstreamTls { listener: Arc::clone(&listener.name), source })
    };
    config.listeners.iter().map(one).collect()
}

fn start_shards(parts: &Parts) -> Result<(Vec<Shard>, Vec<Intake>), Error> {
    let mut shards = Vec::new();
    let mut intakes = Vec::new();
    for number in 0..parts.config.load().runtime.shards.get() {
        let (intake, receiver) = Intake::new();
        let parts = parts.clone();
        shards.push(Shard::start(format!("shard-{number}"), move || Serving::new(parts).run(receiver))?);
        intakes.push(intake);
    }
    Ok((shards, intakes))
}

/// Carries what the members' task publishes to where it is needed: the sealer's realm, the metrics.
async fn follow(members: MembersHandle, forgetting: Forgetting, metrics: Arc<Metrics>) {
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

/// Notices a shard that is stuck or gone.
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

async fn leave(
    settings: config::Drain,
    exit: &Exit,
    listeners: &Listeners,
    drain: &watch::Sender<Option<Instant>>,
    shards: Vec<Shard>,
) -> Result<(), Error> {
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
        Ok(_) => Err(Error::ShardDied),
        Err(_) => {
            tracing::warn!("the drain took too long; ended with calls open");
            Ok(())
        }
    }
}
