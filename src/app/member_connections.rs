//! Connections to members, and the resolvers of names.
//!
//! Owns: the choice of the resolver for each kind of names, and the files of the last known answers. Must not
//! know: lookups, members.

use std::path::PathBuf;

use crate::app::ServeError;
use keyward_config::{Cluster, Config};
use keyward_dial::connect::Connector;
use keyward_dial::member_tls;
use keyward_dial::names::NameResolver;

/// Connects to members over TCP, with TLS if configured. The last known addresses survive a restart.
///
/// # Errors
/// The TLS settings cannot be used.
pub(super) fn member_connector(config: &Config) -> Result<Connector, ServeError> {
    connector(&config.cluster, kept_names(config, "names.json"))
}

/// As [`member_connector`], for a single look: no file is written.
///
/// # Errors
/// The TLS settings cannot be used.
pub(super) fn connector_of_look(cluster: &Cluster) -> Result<Connector, ServeError> {
    connector(cluster, None)
}

fn connector(cluster: &Cluster, kept: Option<PathBuf>) -> Result<Connector, ServeError> {
    let tls = cluster.tls.as_ref().map(member_tls::client_config).transpose()?;
    let names = NameResolver::by(&cluster.discovery.dns, kept);
    Ok(Connector::resolving(names, tls, cluster.connect_timeout))
}

/// The resolver for the names of collectors and of other replicas: the one of `connector` unless members have
/// name servers of their own.
pub(super) fn machine_names(config: &Config, connector: &Connector) -> NameResolver {
    let of_members = connector.names();
    if of_members.hosts_file().is_some() {
        return of_members.clone();
    }
    NameResolver::of_machine(kept_names(config, "names-of-machine.json"))
}

/// A file for the last known answers of a resolver; `None` without a folder for state.
fn kept_names(config: &Config, file: &str) -> Option<PathBuf> {
    Some(config.runtime.state_dir.as_ref()?.join(file))
}
