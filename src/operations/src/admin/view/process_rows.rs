//! Rows about the process as a whole: sessions, members, limits, certificates, configuration, versions.
//!
//! Owns: the field names of these rows. Must not know: shards, clients. Invariants: a secret file is named
//! and never read; an unknown value is null.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::Value;
use time::OffsetDateTime;

use super::{ViewRow, Viewer, moment, rows_of};
use crate::admin::other_replicas::ReplicaRow;
use keyward_access::usage::register::LimitUse;
use keyward_config::certificate_expiry::configured_certificates;
use keyward_config::{AdminSocketSetting, Config, Listener, RevocationPersistence};
use keyward_telemetry::printable::escaped;

#[derive(Serialize)]
pub(super) struct SessionRow {
    session: String,
    peer: String,
    issued_at: String,
    valid: bool,
}

#[derive(Serialize)]
pub(super) struct CertificateRow {
    /// Use of the certificate, as in the metrics.
    usage: &'static str,
    /// Listener, etcd user or table of the configuration.
    name: String,
    expires_at: String,
    /// Whole days left; negative once expired.
    days_left: i64,
    /// The consequence of the expiry.
    consequence: &'static str,
}

#[derive(Serialize)]
pub(super) struct SettingRow {
    key: String,
    value: String,
    /// True if the file has another value, which waits for a restart.
    restart_pending: bool,
}

#[derive(Serialize)]
pub(super) struct VersionRow {
    /// `keyward`, or a member's name.
    part: String,
    version: Option<String>,
}

impl Viewer {
    pub(super) fn sessions(&self) -> Vec<SessionRow> {
        let row = |session: keyward_downstream::session::ListedSession| SessionRow {
            session: session.id.to_string(),
            peer: escaped(&session.peer),
            issued_at: moment_of(Duration::from_secs(session.issued_at)),
            valid: session.is_valid,
        };
        self.sealer.listed_sessions().into_iter().map(row).collect()
    }

    /// The rows of `keyward status`, with the counts of streams beside the other fields.
    pub(super) fn members(&self) -> Vec<ViewRow> {
        let mut rows = rows_of(&self.state.status().members);
        for row in &mut rows {
            if let Some(Value::Object(streams)) = row.remove("streams") {
                row.extend(streams.into_iter().map(|(kind, count)| (format!("{kind}_streams"), count)));
            }
            if let Some(Value::Array(errors)) = row.remove("errors") {
                let errors: Vec<&str> = errors.iter().filter_map(Value::as_str).collect();
                row.insert("errors".into(), escaped(&errors.join(", ")).into());
            }
        }
        rows
    }

    pub(super) fn limits(&self) -> Vec<LimitUse> {
        let limits = self.config.load().limits;
        let occupancy = self.connections.occupancy();
        let of_replica = |limit: &str, name: Option<String>, used: usize, allowed: usize| LimitUse {
            scope: "replica",
            name,
            limit: limit.to_owned(),
            used: Some(used as u64),
            allowed: allowed as u64,
        };
        let most = occupancy.most.map(|(address, count)| (address.to_string(), count));
        let (address, count) = most.unzip();
        let mut rows = vec![
            of_replica("connections", None, occupancy.open, limits.connections),
            of_replica(
                "connections_per_address",
                address,
                count.unwrap_or_default(),
                limits.client_connections.per_address,
            ),
        ];
        rows.extend(self.usage.limits_in_use());
        rows
    }

    pub(super) fn certificates(&self) -> Vec<CertificateRow> {
        let now = SystemTime::now();
        let row = |certificate: keyward_config::certificate_expiry::CertificateExpiry| CertificateRow {
            usage: certificate.usage.label(),
            name: certificate.name,
            expires_at: moment_of(
                certificate.ends.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
            ),
            days_left: days(now, certificate.ends),
            consequence: certificate.usage.loss(),
        };
        configured_certificates(&self.config.load()).into_iter().map(row).collect()
    }

    /// The outline of the configuration in force, with the keys that wait for a restart.
    pub(super) fn configuration(&self) -> Vec<SettingRow> {
        let config = self.config.load();
        let state = self.reload_state.load();
        let pending = &state.pending_restart;
        let known = outline(&config);
        let is_pending = |key: &str| pending.iter().any(|waiting| key_covers(waiting, key));
        let unlisted =
            pending.iter().filter(|waiting| !known.iter().any(|(key, _)| key_covers(waiting, key)));
        let unlisted: Vec<SettingRow> = unlisted
            .map(|key| SettingRow { key: (*key).to_owned(), value: String::new(), restart_pending: true })
            .collect();
        let row = |(key, value): (String, String)| SettingRow {
            restart_pending: is_pending(&key),
            value: escaped(&value),
            key,
        };
        known.into_iter().map(row).chain(unlisted).collect()
    }

    /// The row of this replica.
    #[must_use]
    pub fn replica(&self) -> ReplicaRow {
        let (status, config) = (self.state.status(), self.config.load());
        let started = SystemTime::now().checked_sub(self.started.elapsed()).unwrap_or(SystemTime::UNIX_EPOCH);
        let state = serde_json::to_value(status.replica.state).ok();
        ReplicaRow {
            host: rustix::system::uname().nodename().to_str().ok().map(str::to_owned),
            address: None,
            pid: Some(std::process::id()),
            version: status.replica.version,
            state: state.and_then(|state| Some(state.as_str()?.to_owned())).unwrap_or_default(),
            why: status.replica.why,
            started_at: moment_of(started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()),
            configuration: config.digest.to_string(),
            connections: Some(status.replica.connections),
            calls: Some(status.replica.calls),
            streams: Some(status.replica.streams),
            sessions: Some(status.replica.sessions),
            shards: Some(config.runtime.shards.get()),
        }
    }

    pub(super) fn versions(&self) -> Vec<VersionRow> {
        let own = VersionRow { part: "keyward".into(), version: Some(env!("CARGO_PKG_VERSION").into()) };
        let members = self.state.status().members.into_iter().map(|member| {
            let name = if member.name.is_empty() { member.id } else { escaped(&member.name) };
            VersionRow { part: format!("member {name}"), version: member.version }
        });
        std::iter::once(own).chain(members).collect()
    }
}

/// The settings that an operator asks for first, by their keys in `config.toml`.
fn outline(config: &Config) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut add = |key: &str, value: String| all.push((key.to_owned(), value));
    for listener in &config.listeners {
        add(&format!("listener.{}", listener.name), describe(listener));
    }
    let joined = |urls: Vec<String>| urls.join(", ");
    add("cluster.endpoints", joined(config.cluster.endpoints.iter().map(ToString::to_string).collect()));
    add("cluster.tls", on_off(config.cluster.tls.is_some()));
    add(
        "cluster.probe",
        config.cluster.probe.as_ref().map_or_else(|| "none".into(), |probe| probe.user.as_str().into()),
    );
    add("cluster.token_ttl", seconds(config.cluster.token_ttl));
    add("policy.mode", config.policy.mode.name().to_owned());
    kept(config).into_iter().for_each(|(key, value)| add(key, value));
    add("limits.connections", config.limits.connections.to_string());
    add("limits.connections_per_address", config.limits.client_connections.per_address.to_string());
    add("limits.member_in_flight", config.limits.member_in_flight.to_string());
    add("audit", on_off(config.audit.is_some()));
    add("admin.address", config.admin.address.to_string());
    add(
        "admin.socket",
        match &config.admin.socket {
            AdminSocketSetting::Off => "off".into(),
            AdminSocketSetting::Default => keyward_config::DEFAULT_ADMIN_SOCKET.into(),
            AdminSocketSetting::Path(path) => path.display().to_string(),
        },
    );
    add("drain.wait", seconds(config.drain.wait));
    add("drain.timeout", seconds(config.drain.timeout));
    add("runtime.shards", config.runtime.shards.to_string());
    all
}

/// Where Keyward keeps something beyond its process: the prefixes in etcd and the files, as far as set.
fn kept(config: &Config) -> Vec<(&'static str, String)> {
    let shown = |path: &PathBuf| Some(path.display().to_string());
    let stored = config.policy.stored.as_ref();
    let (revoked_in_etcd, revoked_in_file) = match &config.revocation.keep {
        RevocationPersistence::Memory => (None, None),
        RevocationPersistence::File(file) => (None, shown(file)),
        RevocationPersistence::Etcd { prefix, .. } => (Some(prefix.to_string()), None),
    };
    let places = [
        ("policy.file", config.policy.file.as_ref().and_then(shown)),
        ("policy.etcd_prefix", stored.map(|stored| stored.prefix.to_string())),
        ("policy.state_file", stored.and_then(|stored| stored.state_file.as_ref()).and_then(shown)),
        ("revocation.etcd_prefix", revoked_in_etcd),
        ("revocation.state_file", revoked_in_file),
        ("audit.file", config.audit.as_ref().and_then(|audit| shown(&audit.file.as_ref()?.path))),
        ("maintenance.etcd_prefix", config.maintenance.etcd_prefix.as_deref().map(str::to_owned)),
        ("runtime.state_dir", config.runtime.state_dir.as_ref().and_then(shown)),
    ];
    places.into_iter().filter_map(|(key, place)| Some((key, place?))).collect()
}

fn describe(listener: &Listener) -> String {
    let tls = match (&listener.tls, listener.client_ca()) {
        (None, _) => "plaintext",
        (Some(_), None) => "TLS",
        (Some(_), Some(_)) => "TLS with client certificates",
    };
    format!("{}, {tls}", listener.address)
}

/// True if `waiting` is `key` or a table around it.
fn key_covers(waiting: &str, key: &str) -> bool {
    key.strip_prefix(waiting).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn on_off(is_on: bool) -> String {
    if is_on { "on".into() } else { "off".into() }
}

fn seconds(time: Duration) -> String {
    format!("{}s", time.as_secs_f64())
}

fn days(now: SystemTime, ends: SystemTime) -> i64 {
    const DAY: u64 = 24 * 60 * 60;
    match ends.duration_since(now) {
        Ok(left) => i64::try_from(left.as_secs() / DAY).unwrap_or(i64::MAX),
        Err(past) => -i64::try_from(past.duration().as_secs() / DAY + 1).unwrap_or(i64::MAX),
    }
}

fn moment_of(since_epoch: Duration) -> String {
    let seconds = i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX);
    OffsetDateTime::from_unix_timestamp(seconds).map_or_else(|_| since_epoch.as_secs().to_string(), moment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expired_certificate_has_less_than_no_day_left() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        for (seconds, left) in [(0, 0), (86_399, 0), (86_400, 1), (-1, -1), (-86_400, -2)] {
            let ends = if seconds < 0 {
                now - Duration::from_secs(i64::unsigned_abs(seconds))
            } else {
                now + Duration::from_secs(seconds.unsigned_abs())
            };
            assert_eq!(days(now, ends), left, "{seconds}");
        }
    }

    #[test]
    fn a_table_that_waits_for_a_restart_covers_its_keys() {
        assert!(key_covers("cluster.tls", "cluster.tls") && key_covers("cluster", "cluster.tls"));
        assert!(!key_covers("cluster.tls", "cluster.tls_name") && !key_covers("cluster.tls", "cluster"));
    }
}
