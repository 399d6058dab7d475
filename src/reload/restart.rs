//! Configuration keys that wait for the next start.
//!
//! Owns: the list of keys, and the values in force in their place. Must not know: parts. Invariants: values
//! that belong together are in force all old or all new, never mixed; no secret is compared or logged.

use std::fmt::Debug;
use std::sync::Arc;

use crate::config::{
    Cluster, Config, KeySource, Limits, Passwords, Revocation, RevocationPersistence, SessionSettings,
    UnreadLimits, WatchSettings,
};

/// The configuration in force after `read` replaced `current`: keys that need a restart keep their current
/// values.
pub(super) fn in_force(current: &Config, read: Config) -> Config {
    let Config { cluster, session, passwords, revocation, watch, limits, .. } = &read;
    Config {
        cluster: Arc::new(in_force_of_cluster(&current.cluster, cluster)),
        session: Arc::new(SessionSettings {
            realm: current.session.realm.clone(),
            ..keys(&current.session, session)
        }),
        passwords: Arc::new(Passwords { failed: current.passwords.failed, ..Passwords::clone(passwords) }),
        revocation: Arc::new(Revocation {
            keep: keep(&current.revocation.keep, &revocation.keep),
            max_age: current.revocation.max_age,
        }),
        watch: WatchSettings { buffer: current.watch.buffer, ..*watch },
        limits: Limits {
            certificate_connections: current.limits.certificate_connections,
            member_in_flight: current.limits.member_in_flight,
            logins_in_flight_per_member: current.limits.logins_in_flight_per_member,
            unread: UnreadLimits { buffer: current.limits.unread.buffer, ..limits.unread },
            ..*limits
        },
        admin: current.admin.clone(),
        log: current.log,
        runtime: current.runtime,
        ..read
    }
}

/// The keys whose value in `read` differs from the value in force. A name stands for all keys beginning with
/// the name.
pub(super) fn waiting(in_force: &Config, read: &Config) -> Vec<&'static str> {
    let mut waiting = Vec::new();
    let mut told = |key: &'static str, same: bool| {
        if !same {
            waiting.push(key);
        }
    };
    let (was, is) = (&*in_force.cluster, &*read.cluster);
    told("cluster.dns", was.discovery.dns == is.discovery.dns);
    let found = |cluster: &Cluster| (cluster.endpoints.clone(), cluster.discovery.srv.clone());
    told("cluster.endpoints", found(was) == found(is));
    told("cluster.allowed_hosts", was.discovery.allowed_hosts == is.discovery.allowed_hosts);
    told("cluster.tls", kind_of_tls(was) == kind_of_tls(is));
    told("cluster.connect_timeout", was.connect_timeout == is.connect_timeout);
    told("cluster.idle_timeout", was.idle_timeout == is.idle_timeout);
    told("cluster.token_ttl", was.token_ttl == is.token_ttl);
    told("cluster.id, cluster.identity", was.pin == is.pin);
    told("cluster.near", was.near == is.near);
    told("cluster.hedge_after", was.hedge_after == is.hedge_after);
    told("session.key_files", in_force.session.key_source == read.session.key_source);
    told("session.realm", in_force.session.realm == read.session.realm);
    told("login", in_force.passwords.failed == read.passwords.failed);
    told("revocation", same(&*in_force.revocation, &*read.revocation));
    told("watch.buffer", in_force.watch == read.watch);
    told("limits", in_force.limits == read.limits);
    told("admin", in_force.admin == read.admin);
    told("log", same(&in_force.log, &read.log));
    told("runtime", same(&in_force.runtime, &read.runtime));
    waiting
}

/// True if Keyward presents a certificate to members, and true if the members' certificates are verified;
/// `None` without TLS.
pub(super) fn kind_of_tls(cluster: &Cluster) -> Option<(bool, bool)> {
    cluster.tls.as_ref().map(|tls| (tls.identity.is_some(), tls.verifies_members()))
}

/// True if the Debug output of both is equal. Debug output contains no secrets.
pub(super) fn same<T: Debug>(one: &T, other: &T) -> bool {
    format!("{one:?}") == format!("{other:?}")
}

fn in_force_of_cluster(current: &Cluster, read: &Cluster) -> Cluster {
    let Cluster { reads, writes, outage, probe, .. } = read.clone();
    let mut cluster = Cluster { reads, writes, outage, probe, ..current.clone() };
    if current.scheme() == read.scheme() && current.discovery.dns == read.discovery.dns {
        (cluster.endpoints, cluster.discovery) = (read.endpoints.clone(), read.discovery.clone());
    }
    // Adding or removing Keyward's certificate, or the verification of members, changes how members are
    // contacted.
    if kind_of_tls(current) == kind_of_tls(read) {
        cluster.tls.clone_from(&read.tls);
    }
    cluster
}

/// A random key is drawn at every reading, and never replaces the current keys.
fn keys(current: &SessionSettings, read: &SessionSettings) -> SessionSettings {
    let SessionSettings { keys, key_source, .. } = match read.key_source {
        KeySource::Files => read.clone(),
        KeySource::Random => current.clone(),
    };
    SessionSettings { keys, key_source, ..read.clone() }
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
    use crate::config::load;

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
        let text = format!("listener = [{{ name = 'a', address = '127.0.0.1:1' }}]\n{endpoints}{tls}{lines}");
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
            ("log.level = 'warn'\n", &["log"]),
            ("runtime.shards = 1\n", &["runtime"]),
        ] {
            let read = read(folder.path(), lines);
            let now = in_force(&started, read.clone());
            assert_eq!(waiting(&now, &read), keys, "{lines}");
            assert_eq!(format!("{:?}", now.cluster), format!("{:?}", started.cluster), "{lines}");
            assert!(
                same(&now.revocation, &started.revocation) && same(&now.limits, &started.limits),
                "{lines}"
            );
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
