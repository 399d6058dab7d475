//! Composition of the admin address and the admin socket.
//!
//! Owns: building the state and the commands of both, and opening both. Must not know: the execution of a
//! command. Invariants: a configured socket that cannot be bound ends the start, the default socket never;
//! no socket is taken from another process.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use super::ServeError;
use super::kept_state::machine_troubles;
use super::shard_service::ShardParts;
use keyward_base::io::kept_file::KeptFileStatus;
use keyward_base::io::listening_sockets::{ListeningSockets, plain_socket_path};
use keyward_base::tasks::Tasks;
use keyward_config::reload_request::ReloadRequests;
use keyward_config::{AdminSocketSetting, Config, DEFAULT_ADMIN_SOCKET};
use keyward_dial::names::NameResolver;
use keyward_downstream::connection_table::ConnectionTable;
use keyward_operations::admin::doctor::{Doctor, LastHashes};
use keyward_operations::admin::drain::Exit;
use keyward_operations::admin::fleet::{Fleet, FleetDoor};
use keyward_operations::admin::local_commands::LocalCommands;
use keyward_operations::admin::operator_actions::OperatorActions;
use keyward_operations::admin::other_replicas::OtherReplicas;
use keyward_operations::admin::socket::{self, AdminCommandService};
use keyward_operations::admin::status_page::StatusPage;
use keyward_operations::admin::view::Viewer;
use keyward_operations::admin::{self, AdminState};
use keyward_operations::policy_store::PolicyRegister;
use keyward_operations::revocation::RevocationRegister;
use keyward_upstream::credentials::MetricsPages;

/// Builds the commands and the state of the admin interfaces.
pub(super) fn admin_commands(
    parts: &ShardParts,
    (pages, names): (&MetricsPages, NameResolver),
    connections: &Arc<ConnectionTable>,
    (register, policy, kept_texts): (RevocationRegister, Option<PolicyRegister>, Option<KeptFileStatus>),
    reload: ReloadRequests,
    shards_alive: &Arc<AtomicBool>,
    exit: &Arc<Exit>,
) -> AdminCommandService {
    let resolvers = vec![pages.connector.names().clone(), names.clone()];
    let troubles = machine_troubles(&register, policy.as_ref(), kept_texts, resolvers);
    let state = AdminState::new(
        parts.members.clone(),
        Arc::clone(&parts.credentials),
        Arc::clone(&parts.sealer),
        (register.clone(), policy.clone(), troubles.clone()),
        (Arc::clone(&parts.metrics), parts.audit.clone()),
        Arc::clone(shards_alive),
        Arc::clone(exit),
    );
    let doctor = Doctor {
        config: Arc::clone(&parts.config),
        connections: Arc::clone(connections),
        usage: Arc::clone(&parts.usage),
        reload_state: Arc::default(),
        members: parts.members.clone(),
        pages: pages.clone(),
        register: register.clone(),
        identities: Arc::clone(&parts.identities),
        policy: policy.clone(),
        credentials: Arc::clone(&parts.credentials),
        audit: parts.audit.clone(),
        last_hashes: LastHashes::default(),
        troubles,
    };
    let (sealer, audit) = (Arc::clone(&parts.sealer), parts.audit.clone());
    let state = Arc::new(state);
    let viewer = Viewer {
        state: Arc::clone(&state),
        questions: Arc::clone(&parts.questions),
        config: Arc::clone(&parts.config),
        reload_state: Arc::clone(&doctor.reload_state),
        usage: Arc::clone(&parts.usage),
        connections: Arc::clone(connections),
        sealer: Arc::clone(&sealer),
        others: OtherReplicas::new(Arc::clone(&parts.config.load().admin.replicas), names.clone()),
        started: Instant::now(),
    };
    let actions = OperatorActions { questions: Arc::clone(&parts.questions), members: parts.members.clone() };
    let (viewer, doctor) = (Arc::new(viewer), Arc::new(doctor));
    let local = Arc::new(LocalCommands {
        register: register.clone(),
        sealer: Arc::clone(&sealer),
        doctor: Arc::clone(&doctor),
        viewer: Arc::clone(&viewer),
        actions,
        audit: audit.clone(),
    });
    let fleet = Arc::new(Fleet::new(Arc::clone(&local), parts.metrics.fleet.clone()));
    AdminCommandService {
        register,
        policy,
        sealer,
        state,
        doctor,
        viewer,
        local,
        fleet,
        reload,
        audit,
        sockets: Arc::default(),
        hand_over: Semaphore::new(1),
    }
}

/// The name of the socket of the admin address.
pub(super) fn address_name(address: SocketAddr) -> String {
    format!("admin address {address}")
}

/// Opens the admin address for monitoring, and the admin socket for commands from this machine. Both are
/// served until another process has taken over their sockets.
pub(super) async fn open_admin(
    config: &Config,
    commands: &Arc<AdminCommandService>,
    exit: &Arc<Exit>,
    tasks: &Tasks,
) -> Result<(), ServeError> {
    let unbound = |address: String| move |source| ServeError::Bind { address, source };
    let (sockets, state) = (&commands.sockets, &commands.state);
    let address = config.admin.address;
    let name = address_name(address);
    let bound = match sockets.take(&name) {
        Some(socket) => TcpListener::from_std(socket.into()),
        None => admin::bind(address).await,
    };
    let bound = bound.map_err(unbound(address.to_string()))?;
    sockets.opened(name, &bound)?;
    let page = StatusPage::new(Arc::clone(&commands.viewer), Arc::clone(&commands.doctor), tasks.clone());
    let fleet = FleetDoor::new(Arc::clone(&commands.fleet), tasks.clone());
    let serve = admin::serve(bound, Arc::clone(state), (page, fleet), tasks.clone());
    tasks.spawn("admin", until_handed_over(serve, exit)).detach();
    let (bound, path) = match &config.admin.socket {
        AdminSocketSetting::Off => return Ok(()),
        AdminSocketSetting::Path(path) => {
            (admin_socket(path, sockets).map_err(unbound(path.display().to_string()))?, path.as_path())
        }
        AdminSocketSetting::Default => {
            let path = Path::new(DEFAULT_ADMIN_SOCKET);
            let Some(bound) = default_socket(path, sockets) else { return Ok(()) };
            (bound, path)
        }
    };
    let serve = socket::serve(bound, path.into(), Arc::clone(commands), tasks.clone());
    tasks.spawn("admin socket", until_handed_over(serve, exit)).detach();
    Ok(())
}

/// Runs `serve` until another process has taken over the listening sockets.
fn until_handed_over<F: Future<Output = ()>>(
    serve: F,
    exit: &Arc<Exit>,
) -> impl Future<Output = ()> + use<F> {
    let exit = Arc::clone(exit);
    async move {
        // Every arm is cancel-safe: a connection accepted is served by a task of its own.
        tokio::select! {
            () = serve => {}
            () = exit.handed_over() => {}
        }
    }
}

/// Opens the admin socket: the socket taken over from another process, or a socket bound now.
fn admin_socket(path: &Path, sockets: &ListeningSockets) -> io::Result<UnixListener> {
    let name = format!("admin socket {}", plain_socket_path(path).display());
    let opened = match sockets.take(&name) {
        Some(socket) => UnixListener::from_std(socket.into())?,
        None => socket::bind(path)?,
    };
    sockets.opened(name, &opened)?;
    Ok(opened)
}

/// Opens the default socket; `None` with a log record if the socket cannot be bound.
fn default_socket(path: &Path, sockets: &ListeningSockets) -> Option<UnixListener> {
    let error = match admin_socket(path, sockets) {
        Ok(opened) => return Some(opened),
        Err(error) => error,
    };
    let path = path.display();
    // Outside of systemd the folder is usually missing: no fault of this process.
    if error.kind() == io::ErrorKind::NotFound {
        tracing::info!(%path, "no admin socket: its folder is missing; admin.socket names another path");
    } else {
        tracing::warn!(%path, %error, "no admin socket; admin.socket names another path, or turns it off");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_default_socket_is_taken_from_nobody_and_never_ends_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin.sock");
        let (sockets, others) = (ListeningSockets::default(), ListeningSockets::default());
        let bound = default_socket(&path, &sockets).expect("the folder is ours");
        assert!(default_socket(&path, &others).is_none(), "the path is served");
        assert!(UnixListener::bind(&path).is_err() && std::os::unix::net::UnixStream::connect(&path).is_ok());
        // A process that takes over gets the socket itself.
        let (names, copies) = sockets.copies().unwrap();
        others.adopt(names.into_iter().zip(copies).collect());
        drop((bound, sockets));
        let taken_over = default_socket(&path, &others).expect("handed over");
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        drop((taken_over, others));
        let after = ListeningSockets::default();
        assert!(default_socket(&path, &after).is_some(), "a path left behind is free");
        assert!(default_socket(&folder.path().join("absent/admin.sock"), &after).is_none());
    }
}
