//! SIGHUP: the configuration is read again.
//!
//! Owns: reading, comparing, and publishing what can change without a restart: the session keys. Must not know the
//! data path's sockets. Invariants: a configuration with a fault changes nothing, and the log says each fault; what
//! needs a restart is named, never half applied.

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};

use crate::config::{self, Config, KeySource};
use crate::downstream::session::{NoSessionKey, Sealer, SessionKeys};

/// Reads `path` again at every SIGHUP. `running` is what the process was started with.
pub async fn on_hangup(path: PathBuf, running: Arc<Config>, sealer: Arc<Sealer>) {
    let mut hangups = match signal(SignalKind::hangup()) {
        Ok(hangups) => hangups,
        Err(error) => return tracing::error!(%error, "SIGHUP cannot be received; reload is off"),
    };
    while hangups.recv().await.is_some() {
        match config::load(&path) {
            Ok((config, warnings)) => {
                for warning in warnings {
                    tracing::warn!(%warning, "configuration");
                }
                publish(&running, &config, &sealer);
            }
            Err(faults) => {
                for fault in faults.iter() {
                    tracing::error!(%fault, "configuration not reloaded");
                }
            }
        }
    }
}

/// The keys of the configuration, sealing key first.
///
/// # Errors
/// There is none.
pub fn session_keys(config: &Config) -> Result<SessionKeys, NoSessionKey> {
    SessionKeys::new(config.session.keys.iter().map(|key| &**key))
}

fn publish(running: &Config, config: &Config, sealer: &Sealer) {
    // A random key is drawn at every reading: taking it would log everybody out.
    if config.session.key_source == KeySource::Files {
        match session_keys(config) {
            Ok(keys) => sealer.replace_keys(&keys),
            Err(error) => return tracing::error!(%error, "configuration not reloaded"),
        }
    }
    let keys: Vec<_> = sealer.opened_by_key().into_iter().map(|(key, _)| key.to_string()).collect();
    tracing::info!(seals = keys.first(), opens = keys.len(), "session keys reloaded");
    // Debug shows no secret, so a changed password or key of these is not seen here; it needs a restart as well.
    differ("listener", &running.listeners, &config.listeners);
    differ("cluster", &running.cluster, &config.cluster);
    differ("user", &running.users, &config.users);
    differ("advertise", &running.advertise, &config.advertise);
    differ("session.realm", &running.session.realm, &config.session.realm);
    differ("limits", &running.limits, &config.limits);
    differ("admin", &running.admin, &config.admin);
    differ("log", &running.log, &config.log);
    differ("drain", &running.drain, &config.drain);
    differ("runtime", &running.runtime, &config.runtime);
}

fn differ<T: Debug>(section: &'static str, running: &T, read: &T) {
    if format!("{running:?}") != format!("{read:?}") {
        tracing::warn!(section, "changed in the file; takes effect at the next start");
    }
}
