//! What this process keeps over a restart: its start, and the troubles of its files.
//!
//! Owns: which files there are. Must not know: the content of a file.

use std::sync::Arc;

use keyward_base::io::kept_file::KeptFileStatus;
use keyward_base::tasks::Tasks;
use keyward_config::Config;
use keyward_dial::names::NameResolver;
use keyward_downstream::session::Sealer;
use keyward_operations::admin::machine_troubles::MachineTroubles;
use keyward_operations::policy_store::PolicyRegister;
use keyward_operations::revocation::{RevocationRegister, StateFileError};
use keyward_upstream::own_keys::OwnKeysUpstream;

/// Opens the stored revocations, and starts the task that keeps them.
pub(super) fn start_revocations(
    config: &Config,
    upstream: &OwnKeysUpstream,
    sealer: &Arc<Sealer>,
    tasks: &Tasks,
) -> Result<RevocationRegister, StateFileError> {
    let (register, keeper) =
        RevocationRegister::open(&config.revocation, upstream.clone(), Arc::clone(sealer))?;
    tasks.spawn("revocations", keeper.run()).detach();
    Ok(register)
}

/// The state files and the resolvers of the process.
pub(super) fn machine_troubles(
    register: &RevocationRegister,
    policy: Option<&PolicyRegister>,
    kept_texts: Option<KeptFileStatus>,
    resolvers: Vec<NameResolver>,
) -> MachineTroubles {
    let of_stores = [register.state_file(), policy.and_then(PolicyRegister::state_file)];
    let of_names = resolvers.iter().map(NameResolver::kept_file);
    let state_files = of_stores.into_iter().chain(of_names).flatten().cloned().chain(kept_texts).collect();
    MachineTroubles { state_files, resolvers }
}
