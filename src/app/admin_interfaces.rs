//! Composition of the admin address and the admin socket.
//!
//! Owns: building the state and the commands of both, and opening both. Must not know: the execution of a
//! command. Invariants: a configured socket that cannot be bound ends the start, the default socket never;
//! no socket is taken from another process.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tokio::net::UnixListener;

use super::ServeError;
use super::shard_service::ShardParts;
use crate::admin::doctor::Doctor;
use crate::admin::drain::Exit;
use crate::admin::operator_actions::OperatorActions;
use crate::admin::socket::{self, AdminCommandService};
use crate::admin::view::Viewer;
use crate::admin::{self, AdminState};
use crate::config::reload_request::ReloadRequests;
use crate::config::{AdminSocketSetting, Config, DEFAULT_ADMIN_SOCKET};
use crate::credentials::MetricsPages;
use crate::downstream::connection_table::ConnectionTable;
use crate::policy_store::PolicyRegister;
use crate::published::Published;
use crate::revocation::RevocationRegister;
use crate::tasks::Tasks;

/// Builds the commands and the state of the admin interfaces.
pub(super) fn admin_commands(
    parts: &ShardParts,
    pages: &MetricsPages,
    connections: &Arc<ConnectionTable>,
    (register, policy): (RevocationRegister, Option<PolicyRegister>),
    reload: ReloadRequests,
    shards_alive: &Arc<AtomicBool>,
    exit: &Arc<Exit>,
) -> AdminCommandService {
    let state = AdminState::new(
        parts.members.clone(),
        Arc::clone(&parts.credentials),
        Arc::clone(&parts.sealer),
        (register.clone(), policy.clone()),
        Arc::clone(&parts.metrics),
        Arc::clone(shards_alive),
        Arc::clone(exit),
    );
    let doctor = Doctor {
        config: Arc::clone(&parts.config),
        connections: Arc::clone(connections),
        usage: Arc::clone(&parts.usage),
        pending_restart: Arc::new(Published::new(Vec::new())),
        members: parts.members.clone(),
        pages: pages.clone(),
        register: register.clone(),
        policy: policy.clone(),
        credentials: Arc::clone(&parts.credentials),
    };
    let (sealer, audit) = (Arc::clone(&parts.sealer), parts.audit.clone());
    let state = Arc::new(state);
    let viewer = Viewer {
        state: Arc::clone(&state),
        questions: Arc::clone(&parts.questions),
        config: Arc::clone(&parts.config),
        pending_restart: Arc::clone(&doctor.pending_restart),
        usage: Arc::clone(&parts.usage),
        connections: Arc::clone(connections),
        sealer: Arc::clone(&sealer),
        started: Instant::now(),
    };
    let actions = OperatorActions { questions: Arc::clone(&parts.questions), members: parts.members.clone() };
    AdminCommandService { register, policy, sealer, state, doctor, viewer, actions, reload, audit }
}

/// Opens the admin address for monitoring, and the admin socket for commands from this machine.
pub(super) async fn open_admin(
    config: &Config,
    commands: &Arc<AdminCommandService>,
    tasks: &Tasks,
) -> Result<(), ServeError> {
    let unbound = |address: String| move |source| ServeError::Bind { address, source };
    let address = config.admin.address;
    let bound = admin::bind(address).await.map_err(unbound(address.to_string()))?;
    tasks.spawn("admin", admin::serve(bound, Arc::clone(&commands.state), tasks.clone())).detach();
    let (bound, path) = match &config.admin.socket {
        AdminSocketSetting::Off => return Ok(()),
        AdminSocketSetting::Path(path) => {
            (socket::bind(path).map_err(unbound(path.display().to_string()))?, path.as_path())
        }
        AdminSocketSetting::Default => {
            let path = Path::new(DEFAULT_ADMIN_SOCKET);
            let Some(bound) = default_socket(path) else { return Ok(()) };
            (bound, path)
        }
    };
    let serve = socket::serve(bound, path.into(), Arc::clone(commands), tasks.clone());
    tasks.spawn("admin socket", serve).detach();
    Ok(())
}

/// Binds the default socket; `None` with a log record if the socket cannot be bound.
fn default_socket(path: &Path) -> Option<UnixListener> {
    let error = match socket::bind(path) {
        Ok(bound) => return Some(bound),
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
        let bound = default_socket(&path).expect("the folder is ours");
        assert!(default_socket(&path).is_none(), "the path is served");
        assert!(UnixListener::bind(&path).is_err() && std::os::unix::net::UnixStream::connect(&path).is_ok());
        drop(bound);
        assert!(default_socket(&path).is_some(), "a path left behind is free");
        assert!(default_socket(&folder.path().join("absent/admin.sock")).is_none());
    }
}
