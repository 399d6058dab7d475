//! Configuration keys that wait for the next start.
//!
//! Owns: the values in force in place of the values read. Must not know: parts, names of keys. Invariant:
//! values that belong together are in force all old or all new, never mixed.

use std::sync::Arc;

use keyward_config::audit_settings::{AuditCollector, AuditSettings};
use keyward_config::collector_settings::CollectorSettings;
use keyward_config::trace_settings::TraceSettings;
use keyward_config::{
    Cluster, Config, KeySource, Limits, Passwords, PolicyInEtcd, PolicySettings, Revocation,
    RevocationPersistence, SessionSettings, UnreadLimits, WatchSettings,
};
use keyward_telemetry::LogSettings;

/// The configuration in force after `read` replaced `current`: keys that need a restart keep their current
/// values. No value has `..`, so a new setting is either current or read.
pub(super) fn in_force(current: &Config, read: Config) -> Config {
    Config {
        listeners: read.listeners,
        cluster: Arc::new(in_force_of_cluster(&current.cluster, &read.cluster)),
        advertise: read.advertise,
        users: read.users,
        session: Arc::new(in_force_of_session(&current.session, &read.session)),
        passwords: Arc::new(Passwords {
            sources: read.passwords.sources,
            users: Arc::clone(&read.passwords.users),
            failed: current.passwords.failed,
        }),
        issuers: read.issuers,
        mapping: read.mapping,
        policy: Arc::new(in_force_of_policy(&current.policy, &read.policy)),
        protection: read.protection,
        rest: read.rest,
        revocation: Arc::new(Revocation {
            keep: keep(&current.revocation.keep, &read.revocation.keep),
            max_age: current.revocation.max_age,
        }),
        maintenance: read.maintenance,
        watch: WatchSettings { buffer: current.watch.buffer, ..read.watch },
        limits: in_force_of_limits(&current.limits, read.limits),
        admin: current.admin.clone(),
        audit: in_force_of_audit(current.audit.as_deref(), read.audit.as_deref()).map(Arc::new),
        trace: in_force_of_trace(current.trace.as_deref(), read.trace.as_deref()).map(Arc::new),
        trace_sampling: read.trace_sampling,
        log: LogSettings { level: read.log.level, ..current.log },
        access_log: read.access_log,
        drain: read.drain,
        runtime: current.runtime.clone(),
        memory_limit: read.memory_limit,
        files: read.files,
        digest: read.digest,
    }
}

/// True if Keyward presents a certificate to members, and true if the members' certificates are verified;
/// `None` without TLS.
pub(super) fn kind_of_tls(cluster: &Cluster) -> Option<(bool, bool)> {
    cluster.tls.as_ref().map(|tls| (tls.identity.is_some(), tls.verifies_members()))
}

fn in_force_of_cluster(current: &Cluster, read: &Cluster) -> Cluster {
    let same_seeds = current.scheme() == read.scheme() && current.discovery.dns == read.discovery.dns;
    let seeds = if same_seeds { read } else { current };
    // Adding or removing Keyward's certificate, or the verification of members, changes how members are
    // contacted.
    let tls = if kind_of_tls(current) == kind_of_tls(read) { read } else { current };
    Cluster {
        endpoints: seeds.endpoints.clone(),
        tls: tls.tls.clone(),
        connect_timeout: current.connect_timeout,
        idle_timeout: current.idle_timeout,
        token_ttl: current.token_ttl,
        pin: current.pin,
        reads: read.reads,
        writes: read.writes,
        near: current.near.clone(),
        hedge_after: current.hedge_after,
        outage: read.outage,
        probe: read.probe.clone(),
        discovery: seeds.discovery.clone(),
    }
}

/// A random key is drawn at every reading, and never replaces the current keys.
fn in_force_of_session(current: &SessionSettings, read: &SessionSettings) -> SessionSettings {
    let keys = match read.key_source {
        KeySource::Files => read,
        KeySource::Random => current,
    };
    SessionSettings {
        keys: keys.keys.clone(),
        key_source: keys.key_source,
        realm: current.realm.clone(),
        not_before: read.not_before,
    }
}

/// The files of a collector belong to its address: with another address they wait, too.
fn in_force_of_collector(current: &CollectorSettings, read: &CollectorSettings) -> CollectorSettings {
    if current.endpoint == read.endpoint { read.clone() } else { current.clone() }
}

fn in_force_of_audit(current: Option<&AuditSettings>, read: Option<&AuditSettings>) -> Option<AuditSettings> {
    let current = current?;
    let read = read.and_then(|read| read.otlp.as_ref());
    let otlp = current.otlp.as_ref().map(|otlp| AuditCollector {
        collector: read.map_or_else(
            || otlp.collector.clone(),
            |read| in_force_of_collector(&otlp.collector, &read.collector),
        ),
        path: otlp.path.clone(),
    });
    Some(AuditSettings { otlp, ..current.clone() })
}

fn in_force_of_trace(current: Option<&TraceSettings>, read: Option<&TraceSettings>) -> Option<TraceSettings> {
    let current = current?;
    let collector = read.map_or_else(
        || current.collector.clone(),
        |read| in_force_of_collector(&current.collector, &read.collector),
    );
    Some(TraceSettings { collector, ..current.clone() })
}

fn in_force_of_limits(current: &Limits, read: Limits) -> Limits {
    Limits {
        connections: read.connections,
        client_connections: read.client_connections,
        streams_per_connection: read.streams_per_connection,
        header_size: read.header_size,
        request_size: read.request_size,
        handshake_timeout: read.handshake_timeout,
        replay_buffer: read.replay_buffer,
        certificate_connections: current.certificate_connections,
        connection_age: read.connection_age,
        member_in_flight: current.member_in_flight,
        unread: UnreadLimits { buffer: current.unread.buffer, timeout: read.unread.timeout },
        logins_in_flight_per_member: current.logins_in_flight_per_member,
    }
}

fn in_force_of_policy(current: &PolicySettings, read: &PolicySettings) -> PolicySettings {
    let stored = current.stored.as_ref().map(|stored| PolicyInEtcd {
        prefix: Arc::clone(&stored.prefix),
        login: read.stored.as_ref().map_or_else(|| stored.login.clone(), |read| read.login.clone()),
        state_file: stored.state_file.clone(),
    });
    PolicySettings { stored, ..read.clone() }
}

fn keep(current: &RevocationPersistence, read: &RevocationPersistence) -> RevocationPersistence {
    match (current, read) {
        (RevocationPersistence::Etcd { prefix, .. }, RevocationPersistence::Etcd { login, .. }) => {
            RevocationPersistence::Etcd { prefix: Arc::clone(prefix), login: login.clone() }
        }
        _ => current.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use rcgen::KeyPair;

    use super::*;
    use crate::reload::key_table::{self, TakesEffect};
    use keyward_config::load;

    fn waiting(in_force: &Config, read: &Config) -> Vec<&'static str> {
        key_table::changed(TakesEffect::Restart, in_force, read)
    }

    /// Reads a configuration of `lines` after the listener and the required keys.
    fn read(folder: &Path, lines: &str) -> Config {
        let path = folder.join("keyward.toml");
        let endpoints =
            if lines.contains("endpoints") { "" } else { "cluster.endpoints = ['https://m:1']\n" };
        let tls = if lines.contains("cluster.tls") || lines.contains("http:") {
            ""
        } else {
            "cluster.tls.ca = 'a.crt'\n"
        };
        // Without the key the number of shards is that of the machine's cores.
        let shards = if lines.contains("runtime.shards") { "" } else { "runtime.shards = 2\n" };
        let text = format!(
            "listener = [{{ name = 'a', address = '127.0.0.1:1' }}]\n{endpoints}{tls}{shards}{lines}"
        );
        std::fs::write(&path, text).unwrap();
        load(&path).unwrap_or_else(|faults| panic!("{faults}")).0
    }

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let made = rcgen::CertificateParams::new(["a".to_owned()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(folder.path().join("a.crt"), made.pem()).unwrap();
        std::fs::write(folder.path().join("a.key"), key.serialize_pem()).unwrap();
        std::fs::write(folder.path().join("password"), "secret").unwrap();
        std::fs::write(folder.path().join("session.key"), "0123456789abcdef".repeat(4)).unwrap();
        folder
    }

    const CERTIFICATE: &str = "cluster.tls = { ca = 'a.crt', cert = 'a.crt', key = 'a.key' }\n";

    #[test]
    fn what_waits_for_a_restart_is_named_and_is_not_in_force() {
        let folder = folder();
        let started = read(folder.path(), "");
        for (lines, keys) in [
            ("", &[][..]),
            ("cluster.endpoints = ['http://m:1']\n", &["cluster.endpoints", "cluster.tls"]),
            (CERTIFICATE, &["cluster.tls"]),
            ("cluster.dns = ['127.0.0.1:53']\n", &["cluster.dns"]),
            ("cluster.connect_timeout = '1s'\n", &["cluster.connect_timeout"]),
            ("cluster.idle_timeout = '1s'\n", &["cluster.idle_timeout"]),
            ("cluster.token_ttl = '7s'\n", &["cluster.token_ttl"]),
            ("cluster.id = 'a1'\n", &["cluster.id, cluster.identity"]),
            ("cluster.near = ['m']\n", &["cluster.near"]),
            ("cluster.hedge_after = '1s'\n", &["cluster.hedge_after"]),
            ("session.realm = 'r'\n", &["session.realm"]),
            ("login.failures_per_user = 1\n", &["login"]),
            ("revocation.state_file = 'state'\n", &["revocation"]),
            ("revocation.max_age = '9s'\n", &["revocation"]),
            ("watch.buffer = '64MiB'\n", &["watch.buffer"]),
            ("limits.certificate_connections = 1\n", &["limits"]),
            ("limits.member_in_flight = 1\n", &["limits"]),
            ("limits.logins_in_flight_per_member = 1\n", &["limits"]),
            ("admin.address = '127.0.0.1:9'\n", &["admin"]),
            ("admin.page = 'full'\n", &["admin"]),
            ("admin.hosts = ['ops.example.com']\n", &["admin"]),
            ("log.format = 'json'\n", &["log"]),
            ("trace = { url = 'https://c:1', ca = 'a.crt' }\n", &["the collector of [trace]"]),
            ("runtime.shards = 1\n", &["runtime"]),
        ] {
            let read = read(folder.path(), lines);
            let now = in_force(&started, read.clone());
            assert_eq!(waiting(&now, &read), keys, "{lines}");
            assert!(now.cluster == started.cluster, "{lines}");
            assert!(now.revocation == started.revocation && now.limits == started.limits, "{lines}");
            // Every difference from the reading has a name; a random session key is drawn at every reading.
            let with_session = Config { session: Arc::clone(&read.session), ..now.clone() };
            assert_eq!(with_session == read, keys.is_empty() || lines.starts_with("session"), "{lines}");
            // The same after a repeated reading.
            assert_eq!(waiting(&in_force(&now, read.clone()), &read), keys, "{lines}");
        }
    }

    #[test]
    fn what_is_followed_is_in_force_beside_what_waits() {
        let folder = folder();
        let started =
            read(folder.path(), "session.key_files = ['session.key']\nrevocation.etcd_prefix = '/r/'\n");
        let lines = "cluster.endpoints = ['https://n:1']\n\
                     cluster.probe = { user = 'k', password_file = 'password' }\n\
                     cluster.reads = 'leader'\ncluster.unreachable_timeout = '7s'\n\
                     cluster.near = ['n']\nrevocation.etcd_prefix = '/s/'\n\
                     limits.connections = 7\nlimits.certificate_connections = 1\n\
                     session.not_before = \"2026-01-31T12:00:00Z\"\n";
        let read = read(folder.path(), lines);
        let now = in_force(&started, read.clone());
        // The key files are gone from the configuration: the keys of the start stay in force.
        assert_eq!(waiting(&now, &read), ["cluster.near", "session.key_files", "revocation", "limits"]);
        assert_eq!(now.cluster.endpoints, read.cluster.endpoints);
        assert_eq!(now.cluster.reads, read.cluster.reads);
        assert_eq!(now.cluster.outage.unreachable_timeout, Duration::from_secs(7));
        assert!(now.cluster.probe.is_some() && now.cluster.near.is_empty());
        assert_eq!((now.limits.connections, now.session.not_before), (7, read.session.not_before));
        let RevocationPersistence::Etcd { prefix, login: Some(login) } = &now.revocation.keep else {
            panic!("{now:?}")
        };
        assert_eq!((&**prefix, login.user.as_str()), ("/r/", "k"), "as who asks for members");
    }

    /// A certificate for members, added by an earlier reading, keeps waiting when a later reading changes
    /// only the trusted authority.
    #[test]
    fn a_certificate_that_waits_comes_with_no_later_change() {
        let folder = folder();
        let started = read(folder.path(), "");
        let with = read(folder.path(), CERTIFICATE);
        let first = in_force(&started, with.clone());
        assert_eq!(kind_of_tls(&in_force(&first, with).cluster), Some((false, true)));
    }
}
